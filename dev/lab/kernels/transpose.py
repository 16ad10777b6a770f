"""out (C,N) = inp (N,C) transposed"""
from dev.lab.exercises import Exercise, Repair
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


EXERCISE = Exercise(
    "transpose1", "which side is contiguous, and the banks of shared memory", "a number of inp",
    ("Number i of inp is in row i / C and column i % C. In out, column c begins at c * N.",
     "To read neighbours and write neighbours, turn a tile in shared memory: BLOCK(1024, 32, 32) "
     "and __shared__ real tile[32][33]. In fp32 the 33rd number of each row puts the 32 numbers "
     "of a column into 32 banks."),
    helpers="shared", plane="N, C",
    repair=Repair(2, "tile[lane][c]", "tile[c][lane]",
                  "Which index of the tile is the row of inp when it is written, and which one "
                  "when it is read?"),
    mistakes=(
        ("nothing is transposed: column c of inp must become row c of out", "inp.T",
         "inp.reshape(C, N)"),))
