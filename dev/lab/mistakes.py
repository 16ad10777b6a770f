"""The usual mistakes of each exercise, each with the numbers that come of it.

If a student's numbers are those of the formula without eps, then eps is missing. So a Mistake has a
sentence, and a function that computes the wrong numbers; causes.py compares. Where rounding decides
the numbers, it has the places that the mistake makes wrong.

The functions get the problem, a: its sizes, its inputs in float64, and a.truth {output: numbers}.
They return {output: numbers} for the outputs that the mistake changes. A mistake in a formula is
one of its pieces replaced: layernorm(a, rstd=lambda v: v**-0.5) has no eps.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from dev.common.bf16 import joined
from dev.lab.formulas import gelu, moments, rotate, sigmoid, transposed
from dev.lab.heads import join, split
from dev.lab.kernels.adamw import NORM
from dev.lab.kernels.rope_table import angles, cosines_and_sines
from dev.lab.kernels.softmax_forward import padded
from train_gpt2 import ADAMW


class Mistake(NamedTuple):
    """numbers(a) -> {output: wrong numbers}; or places(a, found) -> {output: True where it is
    wrong}."""
    why: str
    numbers: Callable = None
    places: Callable = None


def of(formula, *rows):
    """Mistakes in a formula, from rows ("the sentence", {piece: what stands in its place})."""
    return [Mistake(why, partial(formula, **pieces)) for why, pieces in rows]


# ---- Sums, as they go wrong in every exercise


def whole(x):
    return x.sum(-1, keepdims=True)


def average(x):
    return x.mean(-1, keepdims=True)


def by_lanes(x, f=np.sum, width=1):
    """At each place of a row the sum (or maximum) of the numbers of its lane. A lane has `width`
    numbers next to each other, and then those that come 32 * width later."""
    C = x.shape[-1]
    turns = -(-C // (32 * width))
    rows = np.full((*x.shape[:-1], turns * 32 * width), 0.0 if f is np.sum else -np.inf)
    rows[..., :C] = x
    lanes = f(f(rows.reshape(*x.shape[:-1], turns, 32, width), -1), -2)
    return np.tile(lanes.repeat(width, -1), turns)[..., :C]


PARTS = (("has only its last term. Write += and not =", slice(-1, None)),
         ("leaves out its last term. Where does the loop end?", slice(None, -1)),
         ("leaves out its first term. Where does the loop begin?", slice(1, None)))


def sums(formula, piece, name, divide=False):
    """Mistakes in a sum over a row. divide: the piece is an average, so it is divided by C."""
    def part_of(part, x):
        return whole(x[..., part]) / (x.shape[-1] if divide else 1)

    def lanes(width, x):
        return by_lanes(x, width=width) / (x.shape[-1] if divide else 1)

    rows = [(f"{name} {why}", {piece: partial(part_of, part)}) for why, part in PARTS]
    rows += [(f"{name} is each lane's own: is warp_sum missing?",
              {piece: partial(lanes, width)}) for width in (1, 4)]
    return of(formula, *rows)


def parts(formula, name):
    """Mistakes in a sum whose formula takes the part of the terms that is added up."""
    return of(formula, *((f"{name} {why}", dict(part=part)) for why, part in PARTS))


# ---- In fp32 e^x is infinite from x = 89 on, and 0 below -104


def exp32(x):
    return np.exp(np.float32(x)).astype(np.float64)


def largest(x):
    return x.max(-1, keepdims=True)


def nought(x):
    return np.zeros_like(x[..., :1])


# ---- Small exercises: a neighbour's number, sums of rows, a transpose, groups


def row_sums(a, part=slice(None)):
    return dict(out=a.inp[:, part].sum(-1))


def running(a, first=0):
    """first: how many numbers a running sum is behind."""
    sums = np.cumsum(a.inp, -1)
    return dict(out=np.pad(sums, ((0, 0), (first, 0)))[:, : a.C])


def scaled(a, size=abs, top=np.max, divide=np.divide):
    n = a.inp.size
    groups = np.full(-(-n // 32) * 32, np.nan)
    groups[:n] = size(a.inp)
    most = np.array([top(group[np.isfinite(group)]) for group in groups.reshape(-1, 32)])
    return dict(out=divide(a.inp, most.repeat(32)[:n]))


SHIFT = [
    Mistake("column 0 has the last number of the row before: it must be 0",
            lambda a: dict(out=np.r_[0, a.inp.reshape(-1)[:-1]].reshape(a.inp.shape))),
    Mistake("column 0 is not 0: it has inp's own number",
            lambda a: dict(out=np.concatenate([a.inp[:, :1], a.inp[:, :-1]], -1))),
    Mistake("the numbers moved left, but must move right: out[n,c] = inp[n,c-1]",
            lambda a: dict(out=np.pad(a.inp, ((0, 0), (0, 1)))[:, 1:])),
    Mistake("nothing moved: out[n,c] must be inp[n,c-1]",
            lambda a: dict(out=a.inp))]
ROW_SUM = [*parts(row_sums, "the sum"),
           Mistake("this is the average: do not divide by C",
                   lambda a: dict(out=average(a.inp)[:, 0]))]
TRANSPOSE = [Mistake("nothing is transposed: column c of inp must become row c of out",
                     lambda a: dict(out=a.inp.reshape(a.truth["out"].shape)))]
GROUP_SCALE = of(
    scaled, ("the largest |inp| is meant: fabsf is missing", dict(size=lambda x: x)),
    ("it multiplies by the group's largest |inp| instead of dividing", dict(divide=np.multiply)),
    ("this is divided by the sum of the group, and not by its largest", dict(top=np.sum)))
PREFIX_SUM = [
    Mistake("each sum leaves out its own number: out[n,c] must include inp[n,c]",
            lambda a: running(a, 1)),
    Mistake("these are inp's numbers: nothing is added up", lambda a: dict(out=a.inp)),
    Mistake("the sum runs on into the next row: each row must start again from 0",
            lambda a: dict(out=np.cumsum(a.inp.reshape(-1)).reshape(a.inp.shape)))]


# ---- Softmax and its loss


def softmax(a, total=whole, top=largest, last=lambda e, s: e / s):
    x = a.inp[:, : a.V]
    e = exp32(x - top(x))
    return dict(out=padded(last(e, total(e)), a.Vp))


OVERFLOW = ("in fp32 e^x is infinite from x = 89 on, and 0 below x = -104. Subtract the row's "
            "largest number before exp")


def lane_top(x):
    return by_lanes(x, np.max)


SOFTMAX = [
    *of(softmax, (OVERFLOW, dict(top=nought)),
        ("these are the exponentials: divide them by their sum", dict(last=lambda e, s: e)),
        ("each lane subtracts the largest of its own numbers: is warp_max missing?",
         dict(top=lane_top))),
    *sums(softmax, "total", "the sum of the exponentials")]


def at_target(x, targets):
    return x[np.arange(len(x)), targets]


def loss(a, total=whole, top=largest, log=np.log, back=lambda t: t, target=1):
    x = a.logits[:, : a.V]
    e = exp32(x - top(x))
    return dict(losses=(log(total(e)) + back(top(x)))[:, 0] - target * at_target(x, a.targets))


LOSS = [
    *of(loss, (OVERFLOW, dict(top=nought)),
        ("the largest number is not added back behind the logarithm", dict(back=nought)),
        ("the target's logit is not subtracted", dict(target=0)),
        ("the target's logit is added instead of subtracted", dict(target=-1)),
        ("the logarithm is to base 2: use logf", dict(log=np.log2)),
        ("the logarithm is to base 10: use logf", dict(log=np.log10))),
    *sums(loss, "total", "the sum of the exponentials")]


def classifier(a, total=whole, top=largest, hot=1, sign=1, dloss=None):
    x = a.logits[:, : a.V]
    e = exp32(x - top(x))
    gradient = e / total(e) - hot * (np.arange(a.V) == a.targets[:, None])
    return dict(logits=padded(sign * (a.dloss if dloss is None else dloss) * gradient, a.Vp))


def both(first, second):
    """A mistake in two formulas."""
    return lambda a: {**first(a), **second(a)}


CLASSIFIER = [
    Mistake(OVERFLOW, both(partial(loss, top=nought), partial(classifier, top=nought))),
    Mistake("the target's logit was read when the gradient stood there already. Read it before",
            lambda a: dict(losses=(loss(a, target=0)["losses"] -
                                   at_target(classifier(a)["logits"], a.targets)))),
    *LOSS[1:],
    *of(classifier, ("the 1 at the target is not subtracted", dict(hot=0)),
        ("the sign is the other one: it is softmax minus 1 at the target", dict(sign=-1)),
        ("dloss is left out", dict(dloss=1))),
    *sums(classifier, "total", "the sum of the exponentials")]


def loss_gradient(a, hot=1, targets=None, dlosses=None):
    hot = hot * (np.arange(a.V) == (a.targets if targets is None else targets(a))[:, None])
    dlosses = a.dlosses if dlosses is None else dlosses(a)
    return dict(dlogits=padded((a.probs[:, : a.V] - hot) * dlosses[:, None], a.Vp))


LOSS_GRADIENT = of(
    loss_gradient, ("the 1 at the target is not subtracted", dict(hot=0)),
    ("the 1 at the target is added instead of subtracted", dict(hot=-1)),
    ("dlosses is left out", dict(dlosses=lambda a: np.ones(a.N))),
    ("each row has its own target: targets[row]", dict(targets=lambda a: a.targets[:1])),
    ("each row has its own loss: dlosses[row]", dict(dlosses=lambda a: a.dlosses[:1])))


# ---- Norms


def normalized(a, x, mean=average, variance=lambda d: average(d * d),
               rstd=lambda v: (v + 1e-5) ** -0.5,
               out=lambda x, m, s, a: (x - m) * s * a.weight + a.bias):
    m = mean(x)
    s = rstd(variance(x - m))
    return dict(out=out(x, m, s, a), mean=m[:, 0], rstd=s[:, 0])


def layernorm(a, **pieces):
    return normalized(a, a.residual, **pieces)


def fused(a, **pieces):
    return normalized(a, a.residual + a.branch, **pieces)


def flat(x):
    mean, rstd = moments(x)
    return (abs(mean) * rstd > 20)[:, 0]


def cancels(a, found):
    """Rows whose mean is many deviations, and whose numbers are a little off: E[x^2] - E[x]^2
    cancels there."""
    rows = flat(a.truth["copy"])
    return {name: abs(numbers - a.truth[name]) < 0.3 * (abs(a.truth[name]) + (name == "out")) *
            (rows[:, None] if name == "out" else rows) for name, numbers in found.items()
            if name in ("out", "rstd")}


EPS = "eps (1e-5) is left out: it is added to the {of}, inside the root"
OUTSIDE = "eps (1e-5) is added to the root: it belongs inside, to the {of}"


def lane_average(x, width):
    return by_lanes(x, width=width) / x.shape[-1]


def lane_average_of_squares(d, width):
    return lane_average(d * d, width)


def layernorm_mistakes(formula):
    squares = lambda f: lambda d: f(d * d)
    return [
        *of(formula, (EPS.format(of="variance"), dict(rstd=lambda v: v**-0.5)),
            (OUTSIDE.format(of="variance"), dict(rstd=lambda v: 1 / (v**0.5 + 1e-5))),
            ("rstd has no root: it is 1 / sqrtf(variance + 1e-5f)",
             dict(rstd=lambda v: 1 / (v + 1e-5))),
            ("rstd is one over the deviation: 1 / sqrtf(variance + 1e-5f)",
             dict(rstd=lambda v: (v + 1e-5) ** 0.5)),
            ("the sum of squares is not divided by C", dict(variance=squares(whole))),
            ("the sum of squares is divided by C - 1: divide by C",
             dict(variance=lambda d: whole(d * d) / (d.shape[-1] - 1))),
            ("the sum is not divided by C, so this is no mean", dict(mean=whole)),
            ("the mean is not subtracted where out is written",
             dict(out=lambda x, m, s, a: x * s * a.weight + a.bias)),
            ("the weight is left out", dict(out=lambda x, m, s, a: (x - m) * s + a.bias)),
            ("the bias is left out", dict(out=lambda x, m, s, a: (x - m) * s * a.weight))),
        Mistake("the variance is taken around 0: subtract the mean before you square",
                lambda a: formula(a,
                                  rstd=lambda v: (average(a.truth["copy"] ** 2) + 1e-5) ** -0.5)),
        Mistake("only rows with a mean of many deviations are wrong: the average of x^2 minus "
                "mean^2 cancels there. Take the average of (x - mean)^2", places=cancels),
        *(Mistake("each lane has only its own sums: is warp_sum missing?",
                  partial(formula, mean=partial(lane_average, width=width),
                          variance=partial(lane_average_of_squares, width=width)))
          for width in (1, 4)),
        *sums(formula, "mean", "the sum for the mean", divide=True),
        *(m._replace(numbers=partial(formula, variance=squares(m.numbers.keywords["variance"])))
          for m in sums(formula, "variance", "the sum of squares", divide=True))]


def before_branch(a):
    return normalized(a, a.residual) | dict(residual=a.residual, copy=a.residual)


FUSED = [Mistake("branch is not added", before_branch),
         Mistake("mean and rstd are those of residual before branch was added",
                 lambda a: normalized(a, a.residual)),
         *layernorm_mistakes(fused)]


def rmsnorm(a, x=lambda a: a.residual + a.branch, square=lambda x: average(x * x),
            rstd=lambda q, eps: (q + eps) ** -0.5, out=lambda x, s, a: x * s * a.weight):
    each = x(a)
    s = rstd(square(each), a.eps)
    return dict(out=out(each, s, a), rstd=s[:, 0])


RMSNORM = [
    Mistake("branch is not added", lambda a: dict(rmsnorm(a, x=lambda a: a.residual),
                                                  residual=a.residual,
                                                  copy=a.residual)),
    Mistake("rstd is that of residual before branch was added",
            lambda a: rmsnorm(a, square=lambda x: average(a.residual**2))),
    *of(rmsnorm, ("eps is left out: it is added to the average of the squares, inside the root",
                  dict(rstd=lambda q, eps: q**-0.5)),
        ("eps is added to the root: it belongs inside",
         dict(rstd=lambda q, eps: 1 / (q**0.5 + eps))),
        ("eps is an argument, and not always 1e-5", dict(rstd=lambda q, eps: (q + 1e-5) ** -0.5)),
        ("rstd has no root: it is 1 / sqrtf(average + eps)",
         dict(rstd=lambda q, eps: 1 / (q + eps))),
        ("rstd is one over the root: 1 / sqrtf(average + eps)",
         dict(rstd=lambda q, eps: (q + eps) ** 0.5)),
        ("the sum of squares is not divided by C", dict(square=lambda x: whole(x * x))),
        ("a mean is subtracted: RMSNorm has none", dict(square=lambda x: x.var(-1, keepdims=True))),
        ("the weight is left out", dict(out=lambda x, s, a: x * s)),
        ("rstd is left out", dict(out=lambda x, s, a: x * a.weight))),
    *(m._replace(numbers=partial(rmsnorm,
                                 square=lambda x, f=m.numbers.keywords["square"]: f(x * x)))
      for m in sums(rmsnorm, "square", "the sum of squares", divide=True))]


def rmsnorm_gradient(a, mean=average, dnorm=lambda d, w: d * w, third=lambda x, s, m: x * s**2 * m,
                     first=lambda s: s, dweight=lambda d, x, s: d * x * s):
    x, s, dn = a.inp, a.rstd[:, None], dnorm(a.dout, a.weight)
    dx = first(s) * (dn - third(x, s, mean(dn * x)))
    return dict(dinp=a.dinp + dx, dweight=a.dweight + dweight(a.dout, x, s).sum(0))


RMSNORM_GRADIENT = [
    *of(rmsnorm_gradient,
        ("the term with the average of dnorm * x is left out", dict(third=lambda x, s, m: 0)),
        ("the sum of dnorm * x is not divided by C", dict(mean=whole)),
        ("x * rstd^2 * average: the 2 is missing", dict(third=lambda x, s, m: x * s * m)),
        ("x * rstd^2 * average: rstd^2 is left out", dict(third=lambda x, s, m: x * m)),
        ("the term with the average is added instead of subtracted",
         dict(third=lambda x, s, m: -x * s**2 * m)),
        ("the weight is left out: dnorm = dout * weight", dict(dnorm=lambda d, w: d)),
        ("the factor rstd in front is left out", dict(first=lambda s: 1)),
        ("dweight adds up dout * x * rstd: rstd is left out", dict(dweight=lambda d, x, s: d * x)),
        ("dweight adds up dout * x * rstd: this is the sum of dout",
         dict(dweight=lambda d, x, s: d))),
    *sums(rmsnorm_gradient, "mean", "the sum of dnorm * x", divide=True)]


def layernorm_gradient(a, mean=average, mean2=average, dnorm=lambda d, w: d * w,
                       norm=lambda x, m, s: (x - m) * s,
                       last=lambda dn, m1, n, m2: dn - m1 - n * m2, first=lambda s: s,
                       dweight=lambda d, n, x: d * n, dbias=lambda d, n: d,
                       before=lambda new, dx, d: new):
    m, s, dn = a.mean[:, None], a.rstd[:, None], dnorm(a.dout, a.weight)
    n = norm(a.inp, m, s)
    dx = first(s) * last(dn, mean(dn), n, mean2(dn * n))
    new = a.dresidual + dx
    return dict(dresidual=new, dweight=a.dweight + dweight(a.dout, n, a.inp).sum(0),
                dbias=a.dbias + dbias(a.dout, n).sum(0),
                before=a.before + before(new, dx, a.dout).sum(0))


LAYERNORM_GRADIENT = [
    *of(layernorm_gradient,
        ("the average of dnorm is not subtracted", dict(last=lambda dn, m1, n, m2: dn - n * m2)),
        ("norm * (the average of dnorm * norm) is not subtracted",
         dict(last=lambda dn, m1, n, m2: dn - m1)),
        ("both averages are left out", dict(last=lambda dn, m1, n, m2: dn)),
        ("norm is left out before the average of dnorm * norm",
         dict(last=lambda dn, m1, n, m2: dn - m1 - m2)),
        ("both sums are not divided by C", dict(mean=whole, mean2=whole)),
        ("the sum of dnorm is not divided by C", dict(mean=whole)),
        ("the sum of dnorm * norm is not divided by C", dict(mean2=whole)),
        ("the weight is left out: dnorm = dout * weight", dict(dnorm=lambda d, w: d)),
        ("the factor rstd in front is left out", dict(first=lambda s: 1)),
        ("norm is (x - mean) * rstd: the mean is not subtracted", dict(norm=lambda x, m, s: x * s)),
        ("norm is (x - mean) * rstd: rstd is left out", dict(norm=lambda x, m, s: x - m)),
        ("dweight adds up dout * norm: this is the sum of dout", dict(dweight=lambda d, n, x: d)),
        ("dweight adds up dout * norm: this is that of dout * inp",
         dict(dweight=lambda d, n, x: d * x)),
        ("dbias adds up dout, without norm", dict(dbias=lambda d, n: d * n)),
        ("before adds up dresidual, with what was there, and not only what is added to it",
         dict(before=lambda new, dx, d: dx)),
        ("before adds up dresidual, and not dout", dict(before=lambda new, dx, d: d))),
    *sums(layernorm_gradient, "mean", "the sum of dnorm", divide=True),
    *sums(layernorm_gradient, "mean2", "the sum of dnorm * norm", divide=True)]


# ---- Sums of columns and of everything, products


def column_sums(a, part=slice(None)):
    return dict(dbias=a.dbias + a.dout[part].sum(0))


def norm_of(a, f):
    truth = a.truth["norm"].copy()
    truth[0] = f(a.grads)
    return dict(norm=truth)


NORM_OF = of(
    norm_of, ("this is the sum of the squares: its root is missing",
              dict(f=lambda x: (x * x).sum())),
    *(("only the first warp's sum is there: is block_reduce missing, or its barrier?",
       dict(f=lambda x, n=threads: np.sqrt((x[np.arange(len(x)) % n < 32] ** 2).sum())))
      for threads in (64, 128, 256, 512, 1024)),
    *((f"the last n % {width} numbers are left out: add them up behind the loop over n / {width}",
       dict(f=lambda x, n=width: np.sqrt((x[: len(x) // n * n] ** 2).sum())))
      for width in (2, 4, 8)),
    ("these are no squares: the sum is of the numbers", dict(f=lambda x: np.sqrt(x.sum()))),
    ("these are no squares: the sum is of the absolute numbers",
     dict(f=lambda x: np.sqrt(abs(x).sum()))),
    ("this is the average of the squares: do not divide by n",
     dict(f=lambda x: np.sqrt((x * x).mean()))))


def product(a, part=slice(None), bias=1, weight=lambda w: w):
    return dict(out=a.inp[:, part] @ weight(a.weight)[:, part].T + bias * a.bias)


PRODUCT = [
    *of(product, ("the bias is not added", dict(bias=0)),
        ("weight (OC,C) is read as if it were (C,OC): number c of row oc is weight[oc * C + c]",
         dict(weight=lambda w: w.reshape(w.shape[::-1]).T))),
    Mistake("the bias is added once for each of the C terms", lambda a: product(a, bias=a.C)),
    *parts(product, "the sum over c")]


def gram(a, part=slice(None), other=lambda x: x):
    x = a.inp[..., part]
    return dict(out=x @ transposed(other(x)))


GRAM = [*of(gram, ("all matrices are multiplied with the first one",
                   dict(other=lambda x: np.broadcast_to(x[:1], x.shape)))),
        *parts(gram, "the sum over c")]


# ---- A thread computes a number: a sum, GELU, SwiGLU, AdamW

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
    ("eps is added inside the root: it belongs outside, sqrtf(v) + eps",
     dict(root=lambda v, eps: np.sqrt(v + eps))),
    ("eps is left out", dict(root=lambda v, eps: np.sqrt(v))),
    ("v's root is missing", dict(root=lambda v, eps: v + eps)))


# ---- Indices: permutations, copies of heads, embeddings, rotations


def back(x, axes, shape):
    """x (with the numbers of shape) seen as the result of a transposition, and turned back."""
    return x.reshape([shape[i] for i in axes]).transpose(np.argsort(axes))


ORDER = ("they are inp's numbers in the order of inp: build another index for reading than for "
         "writing")
BACK = "the numbers go the other way: take the index of out apart, and build that of inp"


def permutation(axes, *rows):
    def unchanged(a):
        return dict(out=a.inp.reshape(a.truth["out"].shape))

    def backward(a):
        return dict(out=back(a.inp, axes, a.inp.shape).reshape(a.truth["out"].shape))

    def other(order, a):
        return dict(out=a.inp.transpose(order).reshape(a.truth["out"].shape))

    others = [Mistake(why, partial(other, order)) for why, order in rows]
    return [Mistake(ORDER, unchanged), *others, Mistake(BACK, backward)]


def repeated(a, head=lambda h, a: h // (a.NH // a.NKV), which=(0, 1)):
    q, kv = a.inp[:, :, : a.NH], a.inp[:, :, a.NH :].reshape(a.B, a.T, 2, a.NKV, a.HS)
    copies = kv[:, :, list(which)][:, :, :, head(np.arange(a.NH), a)]
    return dict(out=np.concatenate([q[:, :, None], copies], 2))


MODULO = "NH / NKV heads next to each other share a key head: it is h / (NH / NKV), and not h % NKV"


def modulo(h, a):
    return h % a.NKV


REPEATED = of(
    repeated, (MODULO, dict(head=modulo)),
    ("the values are copies of the keys: they come NKV heads later", dict(which=(0, 0))),
    ("keys and values are exchanged", dict(which=(1, 0))),
    ("all heads are copies of the first key and value head", dict(head=lambda h, a: h * 0)))


def summed(a, part=slice(None), axis=4):
    """axis: of a group's copies, in (B,T,2,NKV,copies,HS); with 3, in (B,T,2,copies,NKV,HS)."""
    copies = a.NH // a.NKV
    kv = a.dout[:, :, 1:].reshape(a.B, a.T, 2, *((a.NKV, copies) if axis == 4 else (copies, a.NKV)),
                                  a.HS)
    if axis == 4:
        kv = kv[:, :, :, :, part]
    kv = kv.sum(axis).reshape(a.B, a.T, 2 * a.NKV, a.HS)
    return dict(dinp=np.concatenate([a.dout[:, :, 0], kv], 2))


SUMMED = [
    *of(summed, (MODULO, dict(axis=3)),
        ("only the first copy is there: add up all NH / NKV of them", dict(part=slice(0, 1)))),
    *parts(summed, "the sum of the copies")]


def embedding(a, tokens=lambda a: a.tokens, position=lambda a, row: row % a.T, wpe=1):
    rows = np.arange(a.N)
    each = a.wte[tokens(a).reshape(-1)] + wpe * a.wpe[position(a, rows)]
    return dict(out=each.reshape(a.B, a.T, a.C))


EMBEDDING = [
    *of(embedding, ("wpe is not added", dict(wpe=0)),
        ("each sequence has its own tokens: tokens[row], and not tokens[row % T]",
         dict(tokens=lambda a: np.broadcast_to(a.tokens[:1], a.tokens.shape))),
        ("the row of wpe is the position, row % T, and not row / T",
         dict(position=lambda a, row: row // a.T % a.T))),
    Mistake("this is wpe alone: wte is not added",
            lambda a: dict(out=np.broadcast_to(a.wpe, (a.B, a.T, a.C))))]


def embedding_gradient(a, dwte=1, position=lambda a, row: row % a.T):
    new, rows = dict(dwte=a.dwte.copy(), dwpe=a.dwpe.copy()), a.dout.reshape(a.N, a.C)
    np.add.at(new["dwte"], a.tokens.reshape(-1), dwte * rows)
    np.add.at(new["dwpe"], position(a, np.arange(a.N)), rows)
    return new


def of_one_position(a, found):
    """Rows that a single position wrote, whichever was the last."""
    alone = {name: np.zeros(numbers.shape, bool) for name, numbers in found.items()}
    for row, (token, dout) in enumerate(zip(a.tokens.reshape(-1), a.dout.reshape(a.N, a.C))):
        for name, place in (("dwte", token), ("dwpe", row % a.T)):
            alone[name][place] |= np.isclose(found[name][place], dout, rtol=1e-5)
    return alone


EMBEDDING_GRADIENT = [
    *of(embedding_gradient, ("it subtracts where it should add", dict(dwte=-1)),
        ("the row of dwpe is the position, row % T, and not row / T",
         dict(position=lambda a, row: row // a.T % a.T))),
    Mistake("each row has what one position wrote: several have the same token or the same t, so "
            "add with atomicAdd",
            places=of_one_position)]


# ---- Rotations


def table(a, angle=None, order=lambda angle: cosines_and_sines(angle)):
    return dict(table=order(angles(a.T, a.HS, a.theta) if angle is None else angle(a)))


def with_exponent(factor, a):
    frequency = np.float64(a.theta) ** (factor * np.arange(0, a.HS, 2) / a.HS)
    return np.arange(a.T)[:, None] * frequency


def off_with_position(a, found):
    """The error grows with the position, and is small."""
    near = abs(found["table"] - a.truth["table"]) < 0.02
    return dict(table=near & (np.arange(a.T)[:, None] >= 4))


TABLE = [
    *of(table,
        ("cosines and sines are exchanged", dict(order=lambda x: cosines_and_sines(np.pi / 2 - x))),
        ("cosine and sine of a pair are neighbours: table[2 * i] and table[2 * i + 1]",
         dict(order=lambda x: np.concatenate([np.cos(x), np.sin(x)], -1))),
        ("the exponent is 2i/HS: the 2 is left out", dict(angle=partial(with_exponent, -0.5))),
        ("it is t / theta^(2i/HS), and not t * theta^(2i/HS)",
         dict(angle=partial(with_exponent, 1)))),
    Mistake("the error grows with the position: t multiplies the rounding error of the frequency. "
            "Compute the power in double, round it to float, and divide in float: "
            "1.0f / (float)pow(...)",
            places=off_with_position)]


def turned(name, sign, a, half=lambda half: half, heads=lambda a: a.heads, overwritten=False,
           turn=None):
    x, heads = getattr(a, name), heads(a)
    angle, new = angles(a.T, a.HS, a.theta), x.copy()
    new[:, :, :heads] = rotate(x[:, :, :heads], (sign if turn is None else turn) * angle,
                               half(a.half))
    if overwritten:
        both = slice(0, a.HS // 2), slice(a.HS // 2, None)
        first = both if a.half else (slice(0, None, 2), slice(1, None, 2))
        left, right = new[:, :, :heads, first[0]], x[:, :, :heads, first[1]]
        new[:, :, :heads, first[1]] = (sign * left * np.sin(angle)[:, None] + right *
                                       np.cos(angle)[:, None])
    return {name: new}


def turns(name, sign, whither):
    return of(
        partial(turned, name, sign),
        ("the second number was computed from the first one's new value. Read both before you "
         "write",
         dict(overwritten=True)),
        (f"the pairs are turned {whither}: the sign of sin is wrong", dict(turn=-sign)),
        ("`half` says which two numbers are a pair: neighbours, or numbers HS/2 apart",
         dict(half=lambda half: 1 - half)),
        ("the values are turned too: only the first `heads` heads are",
         dict(heads=lambda a: a.heads + a.NKV)))


# ---- Attention, forward and backward


def seen(T, mask=np.tri):
    return mask(T).astype(bool)


def strictly(T):
    return np.tri(T, k=-1)


def everything(T):
    return np.ones((T, T))


def softmax32(score, top=largest):
    e = exp32(score - top(score))
    return e / whole(e)


def relu(score):
    return np.maximum(score, 0)


def groups(a, head=None):
    """q, k, v (B,NH,T,HS): each query head with its key and value head."""
    q, k, v = split(a.qkv, a.NH, a.NKV)
    of_head = head(np.arange(a.NH), a) if head else np.arange(a.NH) // (a.NH // a.NKV)
    return q, k[:, of_head], v[:, of_head]


def attend(a, weights=softmax32, mask=np.tri, scale=None, head=None, values=lambda k, v: v):
    q, k, v = groups(a, head)
    score = np.where(seen(a.T, mask), (a.scale if scale is None else scale) * q @ transposed(k),
                     -np.inf)
    return dict(out=join(weights(score) @ values(k, v)))


def exponentials(score):
    return exp32(score - largest(score))


def only_last(score):
    return exponentials(score) / exp32(np.diagonal(score, axis1=-2,
                                                   axis2=-1)[..., None] - largest(score))


CAUSAL = [("a query does not see its own key: s goes up to t, so write s <= t",
           dict(mask=strictly)),
          ("every query sees all keys; it must stop at its own: s <= t", dict(mask=everything)),
          ("scale is left out", dict(scale=1)),
          ("all heads use the keys and values of head 0", dict(head=lambda h, a: h * 0))]
KEYS = ("the keys stand where the values should: v lies behind k", dict(values=lambda k, v: k))
ATTENTION = of(
    attend, *CAUSAL, KEYS, ("the weights are not divided by their sum", dict(weights=exponentials)),
    ("e^x is infinite in fp32 from x = 89 on. Subtract the largest score of the query before exp",
     dict(weights=partial(softmax32, top=nought))),
    ("the sum of the exponentials has only its last term. Write += and not =",
     dict(weights=only_last)))


def relu_attend(a, **pieces):
    return attend(a, **{"weights": relu, **pieces})


RELU_ATTENTION = of(
    relu_attend, *CAUSAL, KEYS,
    ("max(0, score) is missing",
     dict(weights=lambda score: np.where(np.isfinite(score), score, 0))),
    ("this is softmax: here a weight is max(0, score)", dict(weights=softmax32)))


def scores(a, scale=None, key=lambda q, k, v: k, query=lambda q, k, v: q):
    q, k, v = split(a.qkv, a.NH, a.NH)
    score = (a.scale if scale is None else scale) * query(q, k, v) @ transposed(key(q, k, v))
    return dict(att=np.where(seen(a.T), score, a.truth["att"]))


SCORES = of(
    scores, ("scale is left out", dict(scale=1)),
    ("the values stand where the keys should: k lies right behind q", dict(key=lambda q, k, v: v)),
    ("q and k are exchanged: row t of att belongs to query t",
     dict(query=lambda q, k, v: k, key=lambda q, k, v: q)),
    ("all heads use the keys of head 0", dict(key=lambda q, k, v: k[:, :1])))


def attention_gradient(a, mask=np.tri, delta=1, scale=None,
                       weight=lambda score, lse: exp32(score - lse * np.log(2)),
                       score_scale=None, head=None, only=(), q_terms=lambda dscore, k: dscore @ k):
    q, k, v = groups(a, head)
    dout, out = a.dout.swapaxes(1, 2), a.out.swapaxes(1, 2)
    score = (a.scale if score_scale is None else score_scale) * q @ transposed(k)
    att = np.where(seen(a.T, mask), weight(score, a.lse[..., None]), 0)
    average_of = delta * (dout * out).sum(-1, keepdims=True)
    dscore = (a.scale if scale is None else scale) * att * (dout @ transposed(v) - average_of)
    two = []
    for each in (transposed(dscore) @ q, transposed(att) @ dout):
        total = np.zeros((a.B, a.NKV, a.T, a.HS))
        of_head = head(np.arange(a.NH), a) if head else np.arange(a.NH) // (a.NH // a.NKV)
        for h in range(a.NH):
            total[:, of_head[h]] += each[:, h]
        two.append(total)
    return dict(dqkv=join(q_terms(dscore, k), *two))


ATTENTION_GRADIENT = of(
    attention_gradient, *CAUSAL[:1], ("scale is left out of dscore", dict(scale=1)),
    ("scale is left out of the score", dict(score_scale=1)),
    ("delta, the sum of dout * out, is not subtracted", dict(delta=0)),
    ("delta is added instead of subtracted", dict(delta=-1)),
    ("lse is a logarithm to base 2: use exp2f, and multiply the score by LOG2_E",
     dict(weight=lambda score, lse: exp32(score - lse))),
    ("the score is not multiplied by LOG2_E",
     dict(weight=lambda score, lse: np.exp2(np.float32(score - lse)).astype(float))),
    ("dq has the term of the last key alone: write += and not =",
     dict(q_terms=lambda dscore, k: np.diagonal(dscore, axis1=-2, axis2=-1)[..., None] * k)))
GROUPED = (MODULO, dict(head=modulo))


# ---- All exercises

MISTAKES = dict(
    shift=SHIFT, row_sum=ROW_SUM, transpose=TRANSPOSE, group_scale=GROUP_SCALE,
    prefix_sum=PREFIX_SUM, residual_forward=RESIDUAL, gelu_forward=GELU, swiglu_forward=SWIGLU,
    encoder_forward=EMBEDDING,
    permute=permutation((2, 0, 3, 1, 4), ("t and h are exchanged", (2, 0, 1, 3, 4)),
                        ("b and which are exchanged: out is (3,B,NH,T,HS)", (0, 2, 3, 1, 4))),
    unpermute=permutation((0, 2, 1, 3)), repeat_kv_forward=REPEATED, gelu_backward=GELU_GRADIENT,
    swiglu_backward=SWIGLU_GRADIENT, crossentropy_softmax_backward=LOSS_GRADIENT, rope_table=TABLE,
    rope_forward=turns("qkv", 1, "backward"), rope_backward=turns("dqkv", -1, "forward"),
    adamw=ADAMW_STEP, matmul_backward_bias=parts(column_sums, "the sum over rows"),
    softmax_forward=SOFTMAX, rmsnorm_forward=RMSNORM,
    layernorm_forward=layernorm_mistakes(layernorm), fused_residual_forward=FUSED,
    crossentropy_forward=LOSS, classifier_fused=CLASSIFIER, global_norm=NORM_OF,
    matmul_forward=PRODUCT, gram=GRAM, repeat_kv_backward=SUMMED,
    encoder_backward=EMBEDDING_GRADIENT,
    rmsnorm_backward=RMSNORM_GRADIENT, layernorm_backward=LAYERNORM_GRADIENT,
    relu_attention_forward=RELU_ATTENTION, trimat_forward=SCORES,
    attention_forward=ATTENTION, gqa_forward=[*ATTENTION, *of(attend, GROUPED)],
    attention_backward=ATTENTION_GRADIENT, gqa_backward=[*ATTENTION_GRADIENT,
                                                         *of(attention_gradient, GROUPED)])
