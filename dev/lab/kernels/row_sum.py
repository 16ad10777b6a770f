"""out (N) = the sum of each row of inp (N,C)"""
from dev.lab.exercises import Exercise, Repair
from dev.lab.ladder import ODD_SHAPES, Ladder, Version
from dev.lab.mistakes import parts


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


EXERCISE = Exercise(
    "row_sum3", "a tree in shared memory: where the barrier belongs", "a row",
    ("A block takes a row. Each thread adds up its own numbers (c = threadIdx.x, then c += "
     "blockDim.x) and stores the sum in part[threadIdx.x], which is __shared__.",
     "Then begin with half = blockDim.x / 2, and halve it until it was 1: the threads below half "
     "add part[threadIdx.x + half] to their own sum. Between two steps all threads wait, also "
     "those that do not add."),
    helpers="to_float shared",
    repair=Repair(3, "        __syncthreads();\n", "",
                  "In each step a thread reads what another one wrote in the step before."),
    mistakes=(
        *parts("inp.sum", "inp[:, {}].sum", "the sum"),
        ("this is the average: do not divide by C", "inp.sum", "inp.mean")))
