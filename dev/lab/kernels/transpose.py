"""out (C,N) = inp (N,C) transposed"""
from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp = draw(N, C)
    return dict(N=N, inp=inp), dict(out=inp.T)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=45", "B=1,T=70,C=33", *ODD_SHAPES),
    args="out inp N C", exact="out", versions=(
        Version("one thread per number, which stores far from its neighbours", "transpose1", "N*C"),
        Version("a tile in shared memory", "transpose2", "N, C", threads=(128, 256, 512, 1024)),
        Version("rows one bank longer, so that a column is in 32 banks", "transpose3", "N, C",
                threads=(128, 256, 512, 1024)),
    ), torch=lambda torch, x: lambda: x.inp.t().contiguous())
