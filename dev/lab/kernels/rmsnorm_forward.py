"""residual (N,C) += branch, copy = residual as a real, and out = residual * rstd * weight, with
rstd of each row"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import rmsnorm, root
from dev.lab.ladder import ODD_SHAPES, Ladder, Version, f32
from dev.lab.mistakes import sums, whole

LONG_ROWS = (*ODD_SHAPES, "B=1,T=5,C=4096")
# The trainer's alone.
ODD_ROWS = ("B=1,T=1,C=32", "B=1,T=7,C=2112", "B=1,T=1,C=4096", "B=1,T=5,C=8192")


def problem(draw, B, T, C, eps_exponent=5, branch=1, apart=0):
    """eps is 10^-eps_exponent. Without a branch, residual does not change. apart: the branch is
    added to `before`, which does not change, and not to residual."""
    N, eps = B * T, 10.0**-eps_exponent
    residual, weight = draw.rows(N, C), draw(C)
    added = draw.real(np.logspace(1, -3, N)[:, None] * draw.normal(N, C)) if branch else None
    x = f32(residual + added) if branch else residual
    stream = dict(before=residual) if apart else dict(residual=residual, before=None)
    return (dict(N=N, eps=eps, **stream, branch=added, weight=weight),
            dict(residual=x, copy=x, out=rmsnorm(eps, x, weight), rstd=root(x, eps)[:, 0]))


def has_branch(a):
    return a.branch is not None


def trainers(device, a):
    """The trainer's, or that of --recompute 2, in dev/features/recompute_llama.cu."""
    kernel, given = "residual_rmsnorm_forward", (a.residual,)
    if a.before is not None:
        kernel, given = "residual_rmsnorm_into", (a.residual, a.before)
    device.launch(kernel, a.N, a.out, a.rstd, a.copy, *given, a.branch, a.weight, a.eps, a.N)


LADDER = Ladder(
    problem, "B=8,T=1024,C=2048", (*LONG_ROWS, "B=2,T=10,C=768,eps_exponent=3"), compiled_for="C",
    trainer_checks=(*ODD_ROWS,
                    *(f"{sizes},branch=0,eps_exponent=3" for sizes in (*LONG_ROWS, *ODD_ROWS)),
                    "B=3,T=9,C=96,apart=1", "B=1,T=7,C=2112,apart=1"),
    fp32="residual before rstd", exact="residual copy",
    args="out rstd copy residual branch weight eps N C", versions=(
        Version("one thread per row", "rmsnorm_forward1", "N", threads=(32, 64, 128, 256),
                fits=has_branch, limits=dict(fp32=3e-5)),  # sums of up to 4,096 squares one by one
        Version("one warp per row", "rmsnorm_forward2", "N", fits=has_branch),
        Version("16 bytes per lane", "rmsnorm_forward3", "N", fits=has_branch),
        Version("the row in registers: the trainer's", trainers, threads=(), trainer=True,
                held_back={
                    "bf16": "the warps of a row meet at a barrier between its load and its store, "
                    "and four blocks overlap only a part"}),
    ), torch=lambda torch, x: lambda: torch.nn.functional.rms_norm(
        x.residual.add_(x.branch).to(x.weight.dtype), x.weight.shape, x.weight, x.eps))


def formula(a):
    x = a.residual + a.branch
    square = whole(x * x) / a.C
    rstd = (square + a.eps) ** -0.5
    return dict(out=x * rstd * a.weight, rstd=rstd[:, 0])


EXERCISE = Exercise(
    "rmsnorm_forward1", "the sum of a row, with one thread and then with a warp", "a row",
    ("A thread can take a whole row. That is correct but slow.",
     "With one warp per row, each thread adds every 32nd number: for (int c = lane; c < C; c += "
     "32)."),
    helpers="to_float from_float warp_sum warp_max math",
    rows=("residual", "out rstd", "deviation"), formula=formula, mistakes=(
        ("branch is not added", " + a.branch", "", "dict(",
         "dict(residual=a.residual, copy=a.residual, "),
        ("rstd is that of residual before branch was added", "x * x", "a.residual**2"),
        ("eps is left out: it is added to the average of the squares, inside the root",
         " + a.eps", ""),
        ("eps is added to the root: it belongs inside", "(square + a.eps) ** -0.5",
         "1 / (square**0.5 + a.eps)"),
        ("eps is an argument, and not always 1e-5", "a.eps", "1e-5"),
        ("rstd has no root: it is 1 / sqrtf(average + eps)", "-0.5", "-1.0"),
        ("rstd is one over the root: 1 / sqrtf(average + eps)", "-0.5", "0.5"),
        ("the sum of squares is not divided by C", " / a.C", ""),
        ("a mean is subtracted: RMSNorm has none", "whole(x * x) / a.C",
         "x.var(-1, keepdims=True)"),
        ("the weight is left out", " * a.weight", ""),
        ("rstd is left out", "x * rstd", "x"),
        *sums("whole(x * x)", "the sum of squares")))
