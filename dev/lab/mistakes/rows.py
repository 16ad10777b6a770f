"""Mistakes in exercises on rows and columns: softmax and its loss, norms, sums, matrix products."""
from functools import partial

import numpy as np

from dev.lab.formulas import moments
from dev.lab.kernels.softmax_forward import padded
from dev.lab.mistakes.common import (
    Mistake, average, by_lanes, exp32, largest, nought, of, parts, sums, whole)

# ---- Softmax and its loss


def softmax(a, total=whole, top=largest, last=lambda e, s: e / s):
    x = a.inp[:, : a.V]
    e = exp32(x - top(x))
    return dict(out=padded(last(e, total(e)), a.Vp))


OVERFLOW = ("in fp32 e^x is infinite from x = 89 on, and 0 below x = -104. Subtract the row's "
            "largest "
            "number before exp")


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
            lambda a: dict(losses=loss(a, target=0)["losses"] - at_target(classifier(a)["logits"],
                                                                          a.targets))),
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
    """Rows whose mean is many deviations, and whose numbers are a little off: E[x^2] - E[x]^2 cancels there."""
    rows = flat(a.truth["copy"])
    return {name: abs(numbers - a.truth[name]) < 0.3 * (abs(a.truth[name]) + (name == "out")) *
            (rows[:, None] if name == "out" else rows) for name, numbers in found.items() if name in ("out", "rstd")}


EPS = "eps (1e-5) is left out: it is added to the {of}, inside the root"
OUTSIDE = "eps (1e-5) is added to the root: it belongs inside, to the {of}"


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
                "mean^2 cancels "
                "there. Take the average of (x - mean)^2", places=cancels),
        *(Mistake("each lane has only its own sums: is warp_sum missing?",
                  partial(formula, mean=lambda x, n=width: by_lanes(x, width=n) / x.shape[-1],
                          variance=lambda d, n=width: by_lanes(d * d,
                                                               width=n) / d.shape[-1])) for width in (1, 4)),
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
