"""residual (N,C) += branch, copy = residual as a real, and out = its layernorm"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import layernorm, moments
from dev.lab.kernels.layernorm_forward import MISTAKES, formula
from dev.lab.ladder import ODD_SHAPES, Ladder, Version, f32


def problem(draw, B, T, C, apart=0):
    """Rows as in Draw.rows, and a branch with their deviations. apart: the branch is added to
    `before`, which does not change, and not to residual."""
    N = B * T
    given, branch = draw.rows(N, C), draw.real(np.logspace(1, -3, N)[:, None] * draw.normal(N, C))
    weight, bias, residual = draw(C), draw(C), f32(given + branch)
    mean, rstd = moments(residual)
    truth = dict(residual=residual, copy=residual, out=layernorm(residual, weight, bias),
                 mean=mean[:, 0], rstd=rstd[:, 0])
    stream = dict(before=given) if apart else dict(residual=given, before=None)
    return (dict(N=N, **stream, branch=branch, weight=weight, bias=bias), truth,
            dict(mean=abs(mean[:, 0]) + 1 / rstd[:, 0]))


def in_place(a):
    return a.before is None


def add_then_normalize(device, a):
    device.launch("fused_residual_forward1_add", a.N * a.C, a.residual, a.branch, a.N, a.C,
                  threads=a.threads)
    device.launch("residual_layernorm_forward", a.N, a.out, a.mean, a.rstd, a.copy, a.residual,
                  None, a.weight, a.bias, a.N, threads=a.threads)


def trainers(device, a):
    """The trainer's, or that of --recompute 2, in dev/features/recompute.cu."""
    kernel, given = "residual_layernorm_forward", (a.residual,)
    if not in_place(a):
        kernel, given = "residual_layernorm_into", (a.residual, a.before)
    device.launch(kernel, a.N, a.out, a.mean, a.rstd, a.copy, *given, a.branch, a.weight, a.bias,
                  a.N, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, compiled_for="C",
    trainer_checks=("B=1,T=1,C=32", "B=8,T=5,C=768", "B=3,T=9,C=96,apart=1",
                    "B=1,T=5,C=768,apart=1"), args="out mean rstd copy residual branch weight bias "
    "N C", fp32="residual before mean rstd", exact="residual copy", sums="out mean",
    traffic=lambda a: a.N * (a.C * (8 + 3 * a.itemsize) + 8), versions=(
        Version("two kernels: an addition, then the layernorm", add_then_normalize,
                threads=(128, 256, 512), fits=in_place),
        Version("one kernel, the sum kept in shared memory", "fused_residual_forward2", "N",
                threads=(64, 128, 256), shared="threads // 32 * 4*C", fits=in_place),
        Version("the sum in registers: the trainer's", trainers, threads=(64, 128, 256, 512),
                trainer=True),
    ))


EXERCISE = Exercise(
    "fused_residual_forward2", "two kernels in one: the row is read once", "a row",
    ("residual += branch first, and the mean is that of the new residual.",
     "A thread or a warp that has written a number may read it again."),
    helpers="to_float from_float warp_sum warp_max dynamic math",
    rows=("residual", "out mean rstd copy", "deviation"), formula=formula, mistakes=(
        ("branch is not added", " + a.branch", "", "dict(",
         "dict(residual=a.residual, copy=a.residual, "),
        ("mean and rstd are those of residual before branch was added", " + a.branch", ""),
        *MISTAKES))
