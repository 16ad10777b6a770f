"""Mistakes in exercises where a thread computes a number: a sum, GELU, SwiGLU, AdamW."""
import math

import numpy as np

from dev.common.bf16 import joined
from dev.lab.formulas import gelu, sigmoid
from dev.lab.kernels.adamw import NORM
from dev.lab.mistakes.common import Mistake, exp32, of
from train_gpt2 import ADAMW



ROOT = math.sqrt(8 / math.pi)


def gelu_tanh(a, factor=0.5 * ROOT, cube=lambda x: 0.044715 * x**3, tanh=np.tanh):
    x = a.inp
    return dict(out=x / 2 * (1 + tanh(factor * (x + cube(x)))))


GELU = [Mistake("this is GELU by erf. GPT-2's is the one by tanh", lambda a: dict(
    out=a.inp / 2 * (1 + np.vectorize(math.erf)(a.inp / math.sqrt(2))))), *of(
    gelu_tanh,
    ("e^u is infinite in fp32 from u = 89 on, and infinite / infinite is NaN. tanhf has no such "
     "limit; or write the quotient with e^(-2|u|)",
     dict(tanh=lambda u: (exp32(u) - exp32(-u)) / (exp32(u) + exp32(-u)))),
    ("e^(2u) is infinite in fp32 from u = 45 on, and infinite / infinite is NaN. Divide by 1 + "
     "e^(-2u)",
     dict(tanh=lambda u: 2 * exp32(2 * u) / (1 + exp32(2 * u)) - 1)),
    ("0.044715 is left out", dict(cube=lambda x: x**3)),
    ("the term 0.044715 x^3 is left out", dict(cube=lambda x: 0)),
    ("this has x^2; the formula has x^3", dict(cube=lambda x: 0.044715 * x**2)),
    ("the root is missing: sqrt(2/pi) is 0.7978846", dict(factor=2 / math.pi)),
    ("sqrt(2/pi), which is 0.7978846, is left out", dict(factor=1)),
    ("it is tanh(u), with u = sqrt(2/pi) (x + 0.044715 x^3), and not tanh(2u)",
     dict(factor=ROOT)))]


def gelu_gradient(a, dout=lambda a: a.dinp, inner=lambda x: 1 + 3 * 0.044715 * x**2, tail=1,
                  root=ROOT):
    x = a.inp
    s = sigmoid(ROOT * (x + 0.044715 * x**3))
    return dict(dinp=dout(a) * s * (1 + tail * x * (1 - s) * root * inner(x)))


READ_FIRST = "dinp was overwritten before the gradient that it held was read"
GELU_GRADIENT = [
    *of(gelu_gradient, ("the gradient of the output, which dinp held, is not multiplied",
                        dict(dout=lambda a: 1)),
        ("only the first term of the derivative is there: that of tanh(u) is missing",
         dict(tail=0)),
        ("du/dx has 3 * 0.044715 x^2, and the 3 is missing",
         dict(inner=lambda x: 1 + 0.044715 * x**2)),
        ("du/dx is left out: sqrt(2/pi) (1 + 3 * 0.044715 x^2)", dict(inner=lambda x: 1, root=2)),
        ("du/dx begins with sqrt(2/pi), which is left out", dict(root=2)),
        ("du/dx has (1 + 3 * 0.044715 x^2), which is left out", dict(inner=lambda x: 1))),
    Mistake("this is GELU itself, and not its derivative, times the gradient",
            lambda a: dict(dinp=a.dinp * gelu(a.inp))),
    *of(gelu_gradient, *((READ_FIRST, dict(dout=dout)) for dout in (
        lambda a: sigmoid(ROOT * (a.inp + 0.044715 * a.inp**3)),
        lambda a: gelu_gradient(a, dout=lambda a: 1)["dinp"]))),
    Mistake("this is GELU of inp, and not a gradient", lambda a: dict(dinp=gelu(a.inp)))]


def halves(x):
    return np.split(x, 2, -1)


def swiglu(a, gate=lambda up, gate: gate, up=lambda up, gate: up, silu=lambda g: g * sigmoid(g)):
    pair = halves(a.inp)
    return dict(out=up(*pair) * silu(gate(*pair)))


SWIGLU = of(
    swiglu, ("the halves are exchanged: the first is up, the second gate",
             dict(up=lambda up, gate: gate, gate=lambda up, gate: up)),
    ("up is left out", dict(up=lambda up, gate: 1)),
    ("silu(gate) is gate * s, with s = 1 / (1 + e^-gate): gate is left out", dict(silu=sigmoid)),
    ("the sign of the exponent is wrong: s = 1 / (1 + e^-gate)",
     dict(silu=lambda g: g * sigmoid(-g))),
    ("e^gate is infinite in fp32 from 89 on, and infinite / infinite is NaN. Write 1 / (1 + "
     "e^-gate)",
     dict(silu=lambda g: g * exp32(g) / (1 + exp32(g)))))


def swiglu_gradient(a, slope=lambda g, s: s * (1 + g * (1 - s)), silu=lambda g, s: g * s, dout=None,
                    swap=False):
    up, gate = halves(a.inp)
    s, d = sigmoid(gate), a.dout if dout is None else dout
    two = [d * silu(gate, s), d * up * slope(gate, s)]
    return dict(dinp=np.concatenate(two[::-1] if swap else two, -1))


SWIGLU_GRADIENT = of(
    swiglu_gradient, ("the halves are exchanged: the first is up's gradient, the second gate's",
                      dict(swap=True)),
    ("dout is left out", dict(dout=1)),
    ("silu's derivative is s (1 + gate (1 - s)): only s is there", dict(slope=lambda g, s: s)),
    ("silu's derivative is s (1 + gate (1 - s)): this is the sigmoid's, s (1 - s)",
     dict(slope=lambda g, s: s * (1 - s))),
    ("silu's derivative is s (1 + gate (1 - s)): the 1 + is missing",
     dict(slope=lambda g, s: s * g * (1 - s))),
    ("up's gradient is dout * silu(gate), and silu(gate) is gate * s: gate is left out",
     dict(silu=lambda g, s: s)))

RESIDUAL = [
    Mistake("inp2 is subtracted instead of added", lambda a: dict(out=a.inp1 - a.inp2)),
    Mistake("this is inp1 alone: inp2 is not added", lambda a: dict(out=a.inp1)),
    Mistake("this is inp2 alone: inp1 is not added", lambda a: dict(out=a.inp2)),
    Mistake("inp1 is added twice", lambda a: dict(out=2 * a.inp1)),
    Mistake("these are products: add", lambda a: dict(out=a.inp1 * a.inp2))]


def adamw(a, clip=True, decay=lambda each: each, g2=lambda g: g * g, m_used=lambda old, new: new,
          correction=lambda m, v, s: (m * s["correction1"], v * s["correction2"]),
          root=lambda v, eps: np.sqrt(v) + eps):
    s, m, v = dict(zip(ADAMW, a.settings)), a.m, a.v
    p = a.params if a.low is None else joined(a.params, a.low).astype(np.float64)
    g = a.grads * (min(1, s["clip"] / NORM) if clip and s["clip"] else 1)
    new_m, new_v = m + s["rate1"] * (g - m), v + s["rate2"] * (g2(g) - v)
    above, below = correction(m_used(m, new_m), new_v, s)
    each = decay(np.repeat(a.decayed != 0, np.diff(a.starts.astype(np.int64))))
    p = p - s["learning_rate"] * (above / root(below, s["eps"]) + s["weight_decay"] * each * p)
    return dict(params=p, master=p, m=new_m, v=new_v)


ADAMW_STEP = of(
    adamw, ("the gradients are not clipped: each is multiplied by min(1, clip / norm)",
            dict(clip=False)),
    ("the weight decay is left out", dict(decay=lambda each: each * 0)),
    ("all tensors decay: only those with decayed[i] do", dict(decay=lambda each: each * 0 + 1)),
    ("those tensors decay whose decayed[i] is 0", dict(decay=lambda each: ~each)),
    ("v takes the square of the gradient, and not the gradient", dict(g2=lambda g: g)),
    ("the step uses m from before its update", dict(m_used=lambda old, new: old)),
    ("correction1 and correction2 are left out", dict(correction=lambda m, v, s: (m, v))),
    ("correction1 is left out", dict(correction=lambda m, v, s: (m, v * s["correction2"]))),
    ("correction2 is left out", dict(correction=lambda m, v, s: (m * s["correction1"], v))),
    ("eps is added inside the root: it belongs outside, sqrtf(v) + eps", dict(root=lambda v, eps: np.sqrt(v + eps))),
    ("eps is left out", dict(root=lambda v, eps: np.sqrt(v))),
    ("v's root is missing", dict(root=lambda v, eps: v + eps)))
