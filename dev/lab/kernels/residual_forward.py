"""out (N,C) = inp1 + inp2"""
from dev.lab.ladder import LAUNCH_GAP, ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp1, inp2 = draw(N, C), draw(N, C)
    return dict(N=N, inp1=inp1, inp2=inp2), dict(out=inp1 + inp2)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, args="out inp1 inp2 N C", exact="out", versions=(
        Version("one thread per number", "residual_forward1", "N*C"),
        Version("16 bytes per lane", "residual_forward2", "N*C"),
        Version("streaming loads and stores", "residual_forward3", "N*C", held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: x.inp1 + x.inp2)
