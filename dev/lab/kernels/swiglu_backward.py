"""dinp (N,2H) of up * silu(gate)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import dswiglu, sigmoid
from dev.lab.kernels.swiglu_forward import ODD_ROWS_H, ROWS_H, swiglu_inputs
from dev.lab.ladder import Ladder, Version, in_parts


def problem(draw, B, T, H, in_place=0):
    """With in_place, dinp is where inp was."""
    def gradient(dout, inp):
        up, gate = np.split(inp, 2, -1)
        s = sigmoid(gate)
        # 1 + gate * (1 - s) cancels where the gradient of silu is 0
        terms = np.concatenate([abs(dout * gate * s),
                                abs(dout * up * s) * (1 + abs(gate) * (1 - s))], -1)
        return *dswiglu(dout, inp), terms

    inp, dout = swiglu_inputs(draw, B * T, H), draw(B * T, H)
    dinp, terms = in_parts(gradient, dout, inp)
    inputs = dict(N=B * T, in_place=in_place, dout=dout, **{"dinp" if in_place else "inp": inp})
    return inputs, dict(dinp=dinp), dict(dinp=terms)


def trainers(device, a):
    inp = a.dinp if a.in_place else a.inp
    device.launch("swiglu_backward", a.N * a.H, a.dinp, a.dout, inp, a.N, a.H, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,H=8192", ROWS_H, sums="dinp", args="dinp dout inp N H",
    trainer_checks=(*ODD_ROWS_H, *(f"{sizes},in_place=1" for sizes in (*ROWS_H, *ODD_ROWS_H))),
    versions=(
        Version("one thread per number", "swiglu_backward1", "N*H", fits=lambda a: not a.in_place),
        Version("16 bytes per lane: the trainer's", trainers, trainer=True),
    ))


def formula(a):
    up, gate = np.split(a.inp, 2, -1)
    s = sigmoid(gate)
    both = [a.dout * (gate * s), a.dout * up * (s * (1 + gate * (1 - s)))]
    return dict(dinp=np.concatenate(both, -1))


EXERCISE = Exercise(
    "swiglu_backward1", "one thread, two results", "a number of dout",
    ("A thread reads up, gate and dout once, and can write both gradients.",
     "With s = 1 / (1 + exp(-gate)), silu is gate * s, and its derivative s * (1 + gate * (1 - "
     "s))."),
    helpers="to_float from_float math", formula=formula, mistakes=(
        ("the halves are exchanged: the first is up's gradient, the second gate's",
         "concatenate(both", "concatenate(both[::-1]"),
        ("dout is left out", "a.dout * (gate", "(gate", "a.dout * up", "up"),
        ("silu's derivative is s (1 + gate (1 - s)): only s is there", "s * (1 + gate * (1 - s))",
         "s"),
        ("silu's derivative is s (1 + gate (1 - s)): this is the sigmoid's, s (1 - s)",
         "s * (1 + gate * (1 - s))", "s * (1 - s)"),
        ("silu's derivative is s (1 + gate (1 - s)): the 1 + is missing", "1 + gate", "gate"),
        ("up's gradient is dout * silu(gate), and silu(gate) is gate * s: gate is left out",
         "(gate * s)", "s")))
