"""out (N,C) = inp1 + inp2"""
from dev.lab.exercises import Exercise, Repair
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


EXERCISE = Exercise(
    "residual_forward1", "which thread does what, and which threads have nothing to do",
    "a number of out",
    ("Each thread adds one pair of numbers, found by blockIdx.x and threadIdx.x.",
     "N*C is rarely a multiple of the block size. What must the threads beyond it do?"),
    repair=Repair(1, "i < (size_t)", "i <= (size_t)",
                  "Count the threads of the last block, and the items that are left for them."),
    mistakes=(
        ("inp2 is subtracted instead of added", "inp1 + inp2", "inp1 - inp2"),
        ("this is inp1 alone: inp2 is not added", "inp1 + inp2", "inp1"),
        ("this is inp2 alone: inp1 is not added", "inp1 + inp2", "inp2"),
        ("inp1 is added twice", "inp1 + inp2", "2 * inp1"),
        ("these are products: add", "inp1 + inp2", "inp1 * inp2")))
