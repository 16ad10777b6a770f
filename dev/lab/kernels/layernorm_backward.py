"""dresidual (N,C), dweight and dbias (C) += layernorm's gradients; before (C) += the sum of
dresidual's rows"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import dlayernorm, moments
from dev.lab.kernels.matmul_backward_bias import bias_shares
from dev.lab.ladder import ODD_SHAPES, Ladder, Version
from dev.lab.mistakes import sums, whole
from train_gpt2 import PARTIAL_ROWS, layernorm_backward_launch

BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


def problem(draw, B, T, C, linear=1):
    """inp has rows as in Draw.rows. Without a linear layer before, `before` is None."""
    N = B * T
    inp, dout, dresidual, weight = draw.real(draw.rows(N, C)), draw(N, C), draw(N, C), draw(C)
    dweight, dbias, before = draw.fp32(C), draw.fp32(C), draw.fp32(C)
    mean, rstd = moments(inp)
    dx, sum_dweight, sum_dbias = dlayernorm(dout, inp, weight, 0)
    new = dresidual + dx
    inputs = dict(N=N, inp=inp, dout=dout, dresidual=dresidual, weight=weight, dweight=dweight,
                  dbias=dbias, before=before if linear else None, mean=mean[:, 0], rstd=rstd[:, 0],
                  counters=np.zeros(64, np.int32))  # which must be 0 again at the end
    truth = dict(dresidual=new, dweight=dweight + sum_dweight, dbias=dbias + sum_dbias,
                 counters=inputs["counters"])
    return inputs, truth | (dict(before=before + new.sum(0)) if linear else {})


def add_partials(device, a, blocks):
    device.launch("add_partials", (a.C, 2), a.dweight, a.dbias, a.partials, blocks, a.C, True)


def blocks_and_partials(device, a):
    device.launch("layernorm_backward3", a.blocks, a.dresidual, a.partials, a.dout, a.inp, a.weight,
                  a.mean, a.rstd, a.N)
    add_partials(device, a, a.blocks)
    device.launch("add_partials", (a.C, 1), a.before, None, a.partials[2], a.blocks, a.C, True)


def trainers(device, a):
    """With the trainer's own grid, or with the blocks and rows that were chosen, if they fit. As
    the trainer does, it reads dresidual again for `before`."""
    blocks, threads, shared = layernorm_backward_launch(device, a.N)
    if a.grid:
        sizes = device.layernorm_sizes
        blocks, rows = a.grid[0], min(a.grid[1], threads // sizes.row_threads)
        threads, shared = rows * sizes.row_threads, rows * sizes.shared_of_row
    device.launch("layernorm_backward", blocks, a.dresidual, a.partials, a.dout, a.inp, a.weight,
                  a.mean, a.rstd, a.N, threads=threads, shared=shared)
    add_partials(device, a, blocks)
    if a.before is not None:
        shares = bias_shares(a.N)
        device.launch("matmul_backward_bias", (a.C, shares), a.partials, a.dresidual, a.N, a.C)
        device.launch("add_partials", (a.C, 1), a.before, None, a.partials, shares, a.C, True)


# A mean of 50 deviations leaves (inp - mean) * rstd with an error of some 1e-6.
LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES,
    trainer_checks=("B=1,T=1,C=32", "B=3,T=100,C=96", "B=1,T=70,C=1600", "B=2,T=20,C=768,linear=0"),
    args="dresidual dweight dbias before dout inp weight mean rstd N C", compiled_for="C",
    fp32="mean rstd dweight dbias before partials", sums="dresidual dweight dbias before",
    versions=(
        Version("one thread per row, with atomics", "layernorm_backward1", "N",
                threads=(32, 64, 128, 256), atomics=True),
        Version("one warp per row, atomics in shared memory", "layernorm_backward2", "blocks",
                threads=(128, 256, 512), shared="4 * 3*C", more=dict(blocks=(2, *BLOCKS)),
                atomics=True),
        Version("one block per row, sums in registers, and a second launch", blocks_and_partials,
                threads=(), more=dict(blocks=(2, *BLOCKS)),
                scratch=lambda a: dict(partials=(3, a.blocks, a.C))),
        Version("one warp per row, sums in registers, and the last block adds up",
                "layernorm_backward4", "blocks", threads=(128, 256),
                args="dresidual dweight dbias before partials counters dout inp weight mean rstd N",
                shared="threads // 32 * 4*C", more=dict(blocks=(2, 132, 264)),
                scratch=lambda a: dict(partials=(3, a.blocks, a.C))),
        Version("sums in registers, rows by asynchronous copies: the trainer's", trainers,
                threads=(), more=dict(grid=(None, (1, 12), (2, 4), (5, 3), (9, 1))), trainer=True,
                limits=dict(bf16=5e-3),  # `before` sums what was stored, rounded
                scratch=lambda a: dict(partials=(3, PARTIAL_ROWS, a.C)), held_back={
                    "fp32": "the wait for the first row, the sums over the warps and the second "
                    "launch take the other nine",
                    "bf16": "the wait for the first row, the sums over the warps and the second "
                    "launch weigh nearly as much as the rows"}),
    ), torch=lambda torch, x: lambda: torch.ops.aten.native_layer_norm_backward(
        x.dout, x.inp, x.inp.shape[-1:], x.mean[:, None], x.rstd[:, None], x.weight, x.weight,
        [True, True, True]))


def formula(a):
    mean, rstd, dnorm = a.mean[:, None], a.rstd[:, None], a.dout * a.weight
    norm = (a.inp - mean) * rstd
    dx = rstd * (dnorm - whole(dnorm) / a.C - norm * (whole(dnorm * norm) / a.C))
    new = a.dresidual + dx
    return dict(dresidual=new, dweight=a.dweight + (a.dout * norm).sum(0),
                dbias=a.dbias + a.dout.sum(0), before=a.before + new.sum(0))


EXERCISE = Exercise(
    "layernorm_backward1", "three gradients, of which two are sums over rows", "a row",
    ("With norm = (x - mean) * rstd and dnorm = dout * weight, the input's gradient is rstd * "
     "(dnorm - average of dnorm - norm * average of (dnorm * norm)).",
     "Every row adds a term to dweight, dbias and before: atomicAdd. before gets the new "
     "dresidual."),
    helpers="to_float from_float warp_sum warp_max atomicAdd",
    rows=("inp", "dresidual", "deviation"), formula=formula, mistakes=(
        ("the average of dnorm is not subtracted", " - whole(dnorm) / a.C", ""),
        ("norm * (the average of dnorm * norm) is not subtracted",
         " - norm * (whole(dnorm * norm) / a.C)", ""),
        ("both averages are left out", " - whole(dnorm) / a.C", "",
         " - norm * (whole(dnorm * norm) / a.C)", ""),
        ("norm is left out before the average of dnorm * norm", "norm * (whole", "(whole"),
        ("both sums are not divided by C", "(dnorm) / a.C", "(dnorm)", "norm) / a.C)", "norm))"),
        ("the sum of dnorm is not divided by C", "(dnorm) / a.C", "(dnorm)"),
        ("the sum of dnorm * norm is not divided by C", "* norm) / a.C)", "* norm))"),
        ("the weight is left out: dnorm = dout * weight", " * a.weight", ""),
        ("the factor rstd in front is left out", "rstd * (dnorm", "(dnorm"),
        ("norm is (x - mean) * rstd: the mean is not subtracted", "inp - mean", "inp"),
        ("norm is (x - mean) * rstd: rstd is left out", "mean) * rstd", "mean)"),
        ("dweight adds up dout * norm: this is the sum of dout", "(a.dout * norm)", "a.dout"),
        ("dweight adds up dout * norm: this is that of dout * inp", "a.dout * norm",
         "a.dout * a.inp"),
        ("dbias adds up dout, without norm", "a.dout.sum(0)", "(a.dout * norm).sum(0)"),
        ("before adds up dresidual, with what was there, and not only what is added to it",
         "new.sum(0)", "dx.sum(0)"),
        ("before adds up dresidual, and not dout", "new.sum(0)", "a.dout.sum(0)"),
        *sums("whole(dnorm)", "the sum of dnorm"),
        *sums("whole(dnorm * norm)", "the sum of dnorm * norm")))
