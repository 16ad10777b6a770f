"""out (N,C) = the layernorm of residual, with its mean and rstd, and copy = residual as a real"""
from dev.lab.exercises import Exercise, Repair
from dev.lab.formulas import layernorm, moments
from dev.lab.ladder import LAUNCH_GAP, ODD_SHAPES, Ladder, Version
from dev.lab.mistakes import Mistake, sums, whole

TRAINERS_ARGS = "out mean rstd copy residual branch weight bias N"


def problem(draw, B, T, C):
    N = B * T
    residual, weight, bias = draw.rows(N, C), draw(C), draw(C)
    mean, rstd = moments(residual)
    inputs = dict(N=N, residual=residual, branch=None, weight=weight, bias=bias)
    truth = dict(out=layernorm(residual, weight, bias), mean=mean[:, 0], rstd=rstd[:, 0],
                 copy=residual)
    return inputs, truth, dict(mean=abs(mean[:, 0]) + 1 / rstd[:, 0])


def in_three(device, a):
    device.launch("layernorm_forward2_mean", a.N, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_rstd", a.N, a.rstd, a.mean, a.residual, a.C,
                  threads=a.threads)
    device.launch("layernorm_forward2_normalize", a.N * a.C, a.out, a.mean, a.rstd, a.copy,
                  a.residual, a.weight, a.bias, a.N, a.C, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32", "B=8,T=5,C=768"),
    compiled_for="C", args="out mean rstd copy residual weight bias N C", fp32="residual mean rstd",
    exact="copy", sums="out mean", versions=(
        Version("one thread per row", "layernorm_forward1", "N", threads=(32, 64, 128, 256),
                limits=dict(fp32=1e-4)),  # a mean of 50 deviations, added up one by one
        Version("three kernels: means, deviations, and one thread per number", in_three,
                threads=(128, 256, 512)),
        Version("one kernel, one warp per row", "layernorm_forward3", "N"),
        Version("16 bytes per lane", "layernorm_forward4", "N"),
        Version("both sums in one pass, as E[x^2] - E[x]^2", "layernorm_forward5", "N",
                # Which cancels where a mean is 50 deviations: see its comment.
                limits=dict(fp32=1e-3, bf16=1e-3)),
        Version("the row in registers: the trainer's", "residual_layernorm_forward", "N", threads=(
            64, 128, 256, 512), args=TRAINERS_ARGS, trainer=True, held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: torch.nn.functional.layer_norm(
        x.residual.to(x.weight.dtype), x.weight.shape, x.weight, x.bias))


def formula(a):
    """Also where a branch is added before."""
    x = a.residual if a.branch is None else a.residual + a.branch
    mean = whole(x) / a.C
    d = x - mean
    variance = whole(d * d) / a.C
    rstd = (variance + 1e-5) ** -0.5
    return dict(out=(x - mean) * rstd * a.weight + a.bias, mean=mean[:, 0], rstd=rstd[:, 0])


def cancels(a, found):
    """Rows whose mean is many deviations, and whose numbers are a little off: E[x^2] - E[x]^2
    cancels there."""
    mean, rstd = moments(a.truth["copy"])
    rows = (abs(mean) * rstd > 20)[:, 0]
    return {name: abs(numbers - a.truth[name]) < 0.3 * (abs(a.truth[name]) + (name == "out")) *
            (rows[:, None] if name == "out" else rows) for name, numbers in found.items()
            if name in ("out", "rstd")}


MISTAKES = (
    ("eps (1e-5) is left out: it is added to the variance, inside the root", " + 1e-5", ""),
    ("eps (1e-5) is added to the root: it belongs inside, to the variance",
     "(variance + 1e-5) ** -0.5", "1 / (variance**0.5 + 1e-5)"),
    ("rstd has no root: it is 1 / sqrtf(variance + 1e-5f)", "-0.5", "-1.0"),
    ("rstd is one over the deviation: 1 / sqrtf(variance + 1e-5f)", "-0.5", "0.5"),
    ("the sum of squares is not divided by C", "whole(d * d) / a.C", "whole(d * d)"),
    ("the sum of squares is divided by C - 1: divide by C", "whole(d * d) / a.C",
     "whole(d * d) / (a.C - 1)"),
    ("the sum is not divided by C, so this is no mean", "whole(x) / a.C", "whole(x)"),
    ("the mean is not subtracted where out is written", "(x - mean)", "x"),
    ("the weight is left out", " * a.weight", ""),
    ("the bias is left out", " + a.bias", ""),
    ("the variance is taken around 0: subtract the mean before you square", "d * d", "x * x"),
    Mistake("only rows with a mean of many deviations are wrong: the average of x^2 minus mean^2 "
            "cancels there. Take the average of (x - mean)^2", places=cancels),
    *(("each lane has only its own sums: is warp_sum missing?", "whole(x)",
       f"by_lanes(x, width={width})", "whole(d * d)", f"by_lanes(d * d, width={width})")
      for width in (1, 4)),
    *sums("whole(x)", "the sum for the mean"),
    *sums("whole(d * d)", "the sum of squares"))


EXERCISE = Exercise(
    "layernorm_forward1", "two sums over a row, and a difference that may cancel", "a row",
    ("First the mean, then the average of (x - mean)^2: the average of x^2 minus mean^2 would "
     "cancel.",
     "With one warp per row, each thread adds every 32nd number: for (int c = lane; c < C; c += "
     "32)."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math",
    rows=("residual", "out mean rstd copy", "deviation"),
    repair=Repair(3, "\n    sum = 0.0f;\n", "\n",
                  "A row has two sums, one after the other. What does each of them begin with?"),
    formula=formula, mistakes=MISTAKES)
