"""out (n) = inp / the largest |inp| of its group of 32 numbers; the last group may have fewer"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
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


EXERCISE = Exercise(
    "group_scale1", "a shuffle: lanes of a warp exchange numbers", "a number of out",
    ("First let each thread look at all numbers of its group, from i / 32 * 32 on. fabsf(x) is "
     "|x|.",
     "Then use shuffles: swap with the lane 16 away and keep the larger number, then 8, 4, 2 and "
     "1 away. Now every lane knows the largest of 32.",
     "The last warp may have lanes without a number. They must not return before the shuffles."),
    helpers="to_float from_float shuffle math",
    repair=Repair(2, "step = 16", "step = 8",
                  "How far apart may two lanes of a group be? Follow the number of lane 0."),
    mistakes=(
        ("the largest |inp| is meant: fabsf is missing", "abs(inp)", "inp"),
        ("it multiplies by the group's largest |inp| instead of dividing", "inp / ", "inp * "),
        ("this is divided by the sum of the group, and not by its largest", "np.maximum",
         "np.add")))
