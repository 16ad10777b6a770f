"""out (N,C) = inp1 + inp2"""
from dev.lab.kernel import ROWS, Kernel, Version


def problem(draw, B, T, C):
    N = B * T
    inp1, inp2 = draw(N, C), draw(N, C)
    return dict(N=N, inp1=inp1, inp2=inp2), dict(out=inp1 + inp2)


KERNEL = Kernel(
    problem, "B=8,T=1024,C=768", ROWS, args="out inp1 inp2 N C", exact="out", versions=(
        Version("a thread a number", "residual_forward1", "N*C"),
        Version("16 bytes a lane", "residual_forward2", "N*C"),
        Version("streaming loads and stores", "residual_forward3", "N*C", held_back={
                    "fp32": "the memory is idle while a launch begins and ends, which takes two or three "
                            "microseconds",
                    "bf16": "the memory is idle while a launch begins and ends, which takes two or three "
                            "microseconds"}),
    ), torch=lambda torch, x: lambda: x.inp1 + x.inp2)
