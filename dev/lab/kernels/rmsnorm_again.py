"""out (N,C) = inp * rstd * weight once more, for a backward pass that has not kept it"""
from dev.lab.ladder import LAUNCH_GAP, ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp, rstd, weight = draw(N, C), draw.fp32(N), draw(C)
    return dict(N=N, inp=inp, rstd=rstd, weight=weight), dict(out=inp * rstd[:, None] * weight)


LADDER = Ladder(
    problem, "B=8,T=1024,C=2048", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32", "B=1,T=5,C=8192"),
    fp32="rstd", args="out inp rstd weight N C", versions=(
        Version("16 bytes per lane: the trainer's", "rmsnorm_again", "N*C", trainer=True,
                held_back=LAUNCH_GAP),
    ))
