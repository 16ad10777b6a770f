"""out (N) = the sum of each row of inp (N,C)"""
from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp = draw(N, C)
    return dict(N=N, inp=inp), dict(out=inp.sum(1))


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=45", *ODD_SHAPES), args="out inp N C", fp32="out",
    sums="out", versions=(
        Version("one thread per row", "row_sum1", "N"),
        Version("one block per row, a tree of neighbours", "row_sum2", "N"),
        Version("a tree of halves", "row_sum3", "N"),
        Version("shuffles, and one barrier", "row_sum4", "N"),
    ), torch=lambda torch, x: lambda: x.inp.sum(1, dtype=torch.float32))
