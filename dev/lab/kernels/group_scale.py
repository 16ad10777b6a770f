"""out (n) = inp / the largest |inp| of its group of 32 numbers; the last group may have fewer"""
import numpy as np

from dev.lab.ladder import Ladder, Version


def problem(draw, B, T, C):
    """The groups differ in size by up to six decades."""
    n = B * T * C
    group = np.arange(n) // 32
    inp = draw.real(draw.normal(n) * 10.0 ** (group * 5 % 7 - 3))
    largest = np.maximum.reduceat(abs(inp), np.arange(0, n, 32))
    return dict(n=n, inp=inp), dict(out=inp / largest[group])


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=3,T=11,C=45", "B=2,T=10,C=768", "B=1,T=1,C=20"),
    args="out inp n", versions=(
        Version("one thread per number, which looks at its group", "group_scale1", "n"),
        Version("one warp per group, by shuffles", "group_scale2", "n"),
    ))
