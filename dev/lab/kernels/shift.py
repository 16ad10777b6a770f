"""out (N,C) = inp, one place to the right: out[n,c] = inp[n,c-1], and out[n,0] = 0"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp = draw(N, C)
    return dict(N=N, inp=inp), dict(out=np.pad(inp[:, :-1], ((0, 0), (1, 0))))


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=45", *ODD_SHAPES), args="out inp N C", exact="out",
    versions=(
        Version("one thread per number", "shift1", "N*C"),
        Version("16 bytes per lane, and the number before them", "shift2", "N*C",
                fits=lambda a: a.C % a.W == 0),
    ), torch=lambda torch, x: lambda: torch.nn.functional.pad(x.inp[:, :-1], (1, 0)))


EXERCISE = Exercise(
    "shift1", "a neighbour's number, and an edge where there is no neighbour", "a number of out",
    ("Column c of number i is i % C. Column 0 has no left neighbour: what lies before it in "
     "memory is the end of another row.",
     "Why is out not inp? A thread would overwrite a number that its neighbour still has to "
     "read: a race."),
    repair=Repair(1, "i % C ?", "i ?",
                  "Which numbers of out have no left neighbour? There are N of them."),
    mistakes=(
        ("column 0 has the last number of the row before: it must be 0",
         "np.pad(inp[:, :-1], ((0, 0), (1, 0)))", "np.r_[0, inp.reshape(-1)[:-1]].reshape(N, C)"),
        ("column 0 is not 0: it has inp's own number", "(1, 0))", '(1, 0)), mode="edge"'),
        ("the numbers moved left, but must move right: out[n,c] = inp[n,c-1]",
         ":-1], ((0, 0), (1, 0))", "1:], ((0, 0), (0, 1))"),
        ("nothing moved: out[n,c] must be inp[n,c-1]", "np.pad(inp[:, :-1], ((0, 0), (1, 0)))",
         "inp")))
