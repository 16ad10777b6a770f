"""out (N,C) = (inp - mean) * rstd * weight + bias, once more"""
from dev.lab.ladder import LAUNCH_GAP, ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C):
    N = B * T
    inp, weight, bias, mean, rstd = draw(N, C), draw(C), draw(C), draw.fp32(N), draw.fp32(N)
    scale = rstd[:, None] * weight
    inputs = dict(N=N, inp=inp, mean=mean, rstd=rstd, weight=weight, bias=bias)
    return (inputs, dict(out=(inp - mean[:, None]) * scale + bias),
            dict(out=(abs(inp) + abs(mean[:, None])) * abs(scale) + abs(bias)))


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32",), fp32="mean rstd",
    sums="out", versions=(
        Version("16 bytes per lane: the trainer's", "layernorm_again", "N*C",
                args="out inp mean rstd weight bias N C", trainer=True, held_back=LAUNCH_GAP),
    ))
