"""out (N,C) = inp, one place to the right: out[n,c] = inp[n,c-1], and out[n,0] = 0"""
import numpy as np

from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp = draw(N, C)
    out = np.zeros((N, C))
    out[:, 1:] = inp[:, :-1]
    return dict(N=N, inp=inp), dict(out=out)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=45", *ODD_SHAPES), args="out inp N C", exact="out",
    versions=(
        Version("one thread per number", "shift1", "N*C"),
        Version("16 bytes per lane, and the number before them", "shift2", "N*C",
                fits=lambda a: a.C % a.W == 0),
    ), torch=lambda torch, x: lambda: torch.nn.functional.pad(x.inp[:, :-1], (1, 0)))
