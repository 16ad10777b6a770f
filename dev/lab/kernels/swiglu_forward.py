"""out (N,H) = up * silu(gate), the halves of inp (N,2H)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import sigmoid, swiglu
from dev.lab.ladder import Ladder, Version, in_parts

ROWS_H = ("B=1,T=1,H=264", "B=3,T=9,H=96", "B=1,T=5,H=2048")
ODD_ROWS_H = ("B=1,T=1,H=2056", "B=1,T=9,H=264")  # the trainer's alone


def swiglu_inputs(draw, N, H):
    """(N,2H): gates of four kinds, small, negative, positive, and in every 64th row so large that
    exponentials overflow or vanish; and one NaN among up and one among gate."""
    kinds = draw.rng.integers(4, size=39989)
    low, high = np.array([(-4, 4), (-20, -1), (1, 20), (-100, 100)]).T
    gate = draw.rng.uniform(low[kinds], high[kinds])
    gate = draw.real(np.where(kinds == 3, np.copysign(100, gate), gate))
    gates = np.resize(gate, (N, H))
    near = np.where(abs(gates) == 100, np.sign(gates), gates)
    inp = np.concatenate([draw(N, H), np.where(np.arange(N)[:, None] % 64 == 0, gates, near)], 1)
    inp[0, [0, -1]] = np.nan
    return inp


def problem(draw, B, T, H):
    inp = swiglu_inputs(draw, B * T, H)
    return dict(N=B * T, inp=inp), dict(out=in_parts(swiglu, inp))


LADDER = Ladder(
    problem, "B=8,T=1024,H=8192", ROWS_H, trainer_checks=ODD_ROWS_H, args="out inp N H", versions=(
        Version("one thread per number", "swiglu_forward1", "N*H"),
        Version("16 bytes per lane: the trainer's", "swiglu_forward", "N*H", trainer=True),
    ), torch=lambda torch, x: lambda: torch.nn.functional.silu(x.inp[:, x.H :]) * x.inp[:, : x.H])


def formula(a):
    up, gate = np.split(a.inp, 2, -1)
    return dict(out=up * gate * sigmoid(gate))


EXERCISE = Exercise(
    "swiglu_forward1", "rows and columns from an index: two inputs from one row", "a number of out",
    ("The row of number i is i / H and its column is i % H. A row of inp has 2*H numbers.",
     "The first half of a row is up, the second half is gate."),
    helpers="to_float from_float math", formula=formula, mistakes=(
        ("the halves are exchanged: the first is up, the second gate", "up, gate", "gate, up"),
        ("up is left out", "up * ", ""),
        ("silu(gate) is gate * s, with s = 1 / (1 + e^-gate): gate is left out", "* gate ", ""),
        ("the sign of the exponent is wrong: s = 1 / (1 + e^-gate)", "(gate)", "(-gate)"),
        ("e^gate is infinite in fp32 from 89 on, and infinite / infinite is NaN. Write 1 / (1 + "
         "e^-gate)", "sigmoid(gate)", "exp32(gate) / (1 + exp32(gate))")))
