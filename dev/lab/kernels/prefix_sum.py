"""out (N,C) = the running sums of each row of inp: out[n,c] = inp[n,0] + ... + inp[n,c]"""
from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp = draw(N, C)
    return dict(N=N, inp=inp), dict(out=inp.cumsum(1))


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=145", *ODD_SHAPES), args="out inp N C", fp32="out",
    sums="out", versions=(
        Version("one thread per row", "prefix_sum1", "N"),
        Version("one block per row, in steps that double", "prefix_sum2", "N"),
        Version("one warp per row, by shuffles", "prefix_sum3", "N"),
    ), torch=lambda torch, x: lambda: x.inp.cumsum(1, dtype=torch.float32))
