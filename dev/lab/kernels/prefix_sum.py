"""out (N,C) = the running sums of each row of inp: out[n,c] = inp[n,0] + ... + inp[n,c]"""
from dev.lab.exercises import Exercise, Repair
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


EXERCISE = Exercise(
    "prefix_sum1", "running sums: many threads do what looks serial", "a row",
    ("One thread per row is right, and slow. With a block per row, each thread first adds the "
     "number one to its left, then the sum two to the left, then four, and so on.",
     "In shared memory each of these steps needs two barriers: one after reading, because "
     "another thread then overwrites the number, and one after writing, because another one then "
     "reads it."),
    helpers="to_float shared shuffle",
    repair=Repair(2, "step];\n            __syncthreads();\n", "step];\n",
                  "A thread overwrites a sum that its right neighbour still has to read."),
    mistakes=(
        ("each sum leaves out its own number: out[n,c] must include inp[n,c]", "cumsum(1)",
         "cumsum(1) - inp"),
        ("these are inp's numbers: nothing is added up", ".cumsum(1)", ""),
        ("the sum runs on into the next row: each row must start again from 0", "cumsum(1)",
         "cumsum().reshape(N, C)")))
