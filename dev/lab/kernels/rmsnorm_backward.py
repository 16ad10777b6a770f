"""dinp (N,C) and dweight (C) += the gradients of rmsnorm, from dout (N,C)"""
from dev.lab.exercises import Exercise
from dev.lab.formulas import drmsnorm, root
from dev.lab.kernels.rmsnorm_forward import LONG_ROWS, ODD_ROWS
from dev.lab.ladder import Ladder, Version, f32
from dev.lab.mistakes import sums, whole
from dev.llama3.train_llama3 import rmsnorm_backward_launch
from train_gpt2 import PARTIAL_ROWS

BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


def problem(draw, B, T, C):
    N = B * T
    inp, dinp, dweight = draw.real(draw.rows(N, C)), draw(N, C), draw.fp32(C)
    rstd, weight = root(inp, 1e-5), draw.real(1 + draw.normal(C))
    dout = draw.real(draw.normal(N, C) + inp * rstd)  # so that dnorm * norm has an average
    dx, dw = drmsnorm(1e-5, dout, inp, weight)
    inputs = dict(N=N, inp=inp, dout=dout, dinp=dinp, weight=weight, dweight=dweight,
                  rstd=f32(rstd[:, 0]))
    return inputs, dict(dinp=dinp + dx, dweight=dweight + dw)


def add_partials(device, a, blocks):
    device.launch("add_partials", (a.C, 1), a.dweight, None, a.partials, blocks, a.C, True)


def in_registers(device, a):
    device.launch("rmsnorm_backward3", a.blocks, a.dinp, a.partials, a.dout, a.inp, a.weight,
                  a.rstd, a.N, a.C, threads=a.threads, shared=a.threads // 32 * 4 * a.C)
    add_partials(device, a, a.blocks)


def trainers(device, a):
    blocks, shared = rmsnorm_backward_launch(device, a.N)
    blocks = a.blocks or blocks
    device.launch("rmsnorm_backward", blocks, a.dinp, a.partials, a.dout, a.inp, a.weight, a.rstd,
                  a.N, shared=shared)
    add_partials(device, a, blocks)


def partials(a):
    return dict(partials=(a.blocks or PARTIAL_ROWS, a.C))


LADDER = Ladder(
    problem, "B=8,T=1024,C=2048", LONG_ROWS, compiled_for="C", fp32="rstd dweight partials",
    sums="dinp dweight", trainer_checks=(*ODD_ROWS, "B=3,T=100,C=96", "B=1,T=70,C=1600",
                                         "B=1,T=37,C=4096", "B=1,T=23,C=8192"),
    args="dinp dweight dout inp weight rstd N C", versions=(
        Version("one thread per row, with atomics", "rmsnorm_backward1", "N",
                threads=(32, 64, 128, 256), atomics=True),
        Version("one warp per row, atomics in shared memory", "rmsnorm_backward2", "blocks",
                threads=(128, 256, 512), shared="4*C", more=dict(blocks=(2, *BLOCKS)),
                atomics=True),
        Version("16 bytes per lane, sums in registers, C up to 1,024", in_registers,
                threads=(128, 256), more=dict(blocks=(2, *BLOCKS)), scratch=partials,
                fits=lambda a: a.C <= 1024),
        Version("several warps per row, rows by asynchronous copies: the trainer's", trainers,
                threads=(), more=dict(blocks=(132, 256)), scratch=partials, trainer=True,
                held_back={
                    "fp32": "an fp32 row is loaded only when the one before is done, and a second "
                    "launch adds up partials",
                    "bf16": "two blocks have one row each on its way while warps meet for a sum, "
                    "and a second launch adds up partials"}),
    ))


def formula(a):
    x, rstd, dnorm = a.inp, a.rstd[:, None], a.dout * a.weight
    dx = rstd * (dnorm - x * rstd**2 * (whole(dnorm * x) / a.C))
    return dict(dinp=a.dinp + dx, dweight=a.dweight + (a.dout * x * rstd).sum(0))


EXERCISE = Exercise(
    "rmsnorm_backward1", "a gradient of a row, and one of all rows", "a row",
    ("With dnorm = dout * weight, dinp += rstd * (dnorm - x * rstd^2 * average of (dnorm * x)).",
     "Every row adds a term to dweight[c]: atomicAdd."),
    helpers="to_float from_float warp_sum warp_max atomicAdd", rows=("inp", "dinp", "deviation"),
    formula=formula, mistakes=(
        ("the term with the average of dnorm * x is left out",
         " - x * rstd**2 * (whole(dnorm * x) / a.C)", ""),
        ("the sum of dnorm * x is not divided by C", " / a.C", ""),
        ("x * rstd^2 * average: the 2 is missing", "rstd**2", "rstd"),
        ("x * rstd^2 * average: rstd^2 is left out", " * rstd**2", ""),
        ("the term with the average is added instead of subtracted", "dnorm - ", "dnorm + "),
        ("the weight is left out: dnorm = dout * weight", " * a.weight", ""),
        ("the factor rstd in front is left out", "rstd * (dnorm", "(dnorm"),
        ("dweight adds up dout * x * rstd: rstd is left out", "x * rstd)", "x)"),
        ("dweight adds up dout * x * rstd: this is the sum of dout", "a.dout * x * rstd", "a.dout"),
        *sums("whole(dnorm * x)", "the sum of dnorm * x")))
