"""out (N,Vp) = softmax(inp) over the first V columns, zeros in the others"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
from dev.lab.formulas import softmax
from dev.lab.ladder import Ladder, Version, in_parts
from dev.lab.mistakes import OVERFLOW, exp32, largest, sums, whole
from train_gpt2 import UserError

WORDS = "B=1,T=1,V=17,Vp=32", "B=3,T=9,V=257,Vp=384", "B=1,T=3,V=50257,Vp=50304"


def logits_of(draw, N, V, Vp):
    """(N,Vp): rows of deviation 3, the last of them 200 higher, where exponentials are infinite in
    fp32, and, if there are others, the second to last 200 lower, where they are all 0. What is
    beyond V is NaN: no kernel is to use it. Raises UserError."""
    if V > Vp:
        raise UserError(f"expected V = {V} not to exceed Vp = {Vp}")
    logits = draw(N, Vp, scale=3)
    logits[-1] = draw.real(logits[-1] + 200)
    logits[-2:-1] = draw.real(logits[-2:-1] - 200)
    logits[:, V:] = np.nan
    return logits


def padded(x, Vp):
    """x (N,V) with columns of zeros up to Vp."""
    return np.pad(x, ((0, 0), (0, Vp - x.shape[1])))


def problem(draw, B, T, V, Vp):
    inp = logits_of(draw, B * T, V, Vp)
    return dict(N=B * T, inp=inp), dict(out=in_parts(lambda x: padded(softmax(x[:, :V]), Vp), inp))


def in_packs(a):
    return a.Vp % a.W == 0


LADDER = Ladder(
    problem, "B=8,T=1024,V=50257,Vp=50304", (*WORDS, "B=3,T=9,V=257,Vp=257"), args="out inp N V Vp",
    versions=(
        Version("one thread per row, three passes", "softmax_forward1", "N", threads=(32, 128),
                limits=dict(fp32=1e-4)),  # a sum of 50,257 numbers one by one
        Version("one block per row, three passes", "softmax_forward2", "N",
                threads=(256, 512, 1024)),
        Version("online, one warp per row: two passes, 16 bytes per lane", "softmax_forward3", "N",
                threads=(128, 256, 1024), fits=in_packs),
        Version("online, one block per row", "softmax_forward4", "N", threads=(256, 512, 1024),
                fits=in_packs),
        Version("one pass, the next row on its way", "softmax_forward5", "min(blocks, N)", threads=(
            512, 1024), shared="Vp*itemsize", more=dict(blocks=(2, 132, 264)), fits=in_packs),
    ), torch=lambda torch, x: lambda: torch.softmax(x.inp[:, :x.V], -1))


def formula(a):
    x = a.inp[:, : a.V]
    e = exp32(x - largest(x))
    return dict(out=padded(e / whole(e), a.Vp))


EXERCISE = Exercise(
    "softmax_forward1", "the maximum of a row, a sum, and how exp overflows", "a row",
    ("exp(x) is infinite in fp32 from x = 89 on. exp(x - largest) never is, and the quotient is "
     "the same.",
     "Three loops over the row: the largest number, the sum of the exponentials, the quotients."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math",
    rows=("inp", "out", "range"), padded="out",
    repair=Repair(2, "v < V ? expf", "v <= V ? expf", "Look at the first column of the padding."),
    formula=formula, mistakes=(
        (OVERFLOW, "largest(x)", "0"),
        ("these are the exponentials: divide them by their sum", " / whole(e)", ""),
        ("each lane subtracts the largest of its own numbers: is warp_max missing?", "largest(x)",
         "by_lanes(x, np.max)"),
        *sums("whole(e)", "the sum of the exponentials")))
