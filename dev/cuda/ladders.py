"""The kernels of the lab: for each its shapes, its versions, and what NumPy computes from the same inputs.

A kernel is a function under @ladder, its problem. It is given a namespace `a` with the sizes. It puts the inputs there,
which are float64 or integers. A seeded generator draws them, and they are rounded to what the device will store. The
function returns {output: what NumPy computes, in float64}, where NaN stands for any value. An output that is among the
inputs too is updated in place. The arguments of the decorator are

    shape, checks       the shape to time, and small odd shapes to check
    args                the names in `a` of the kernel's arguments, if most versions have the same
    versions            a Version each; if the trainer has the kernel, the last of them is the trainer's
    fp32                the arrays that are fp32 in every dtype; the others are real, as kernels.cu calls it
    flops, traffic      the FLOPs that it takes; and the bytes, if they are not those of each input and output once
    compiled_for_C      whether it calls kernels that are compiled for a model's channels, C
    limits              {dtype: largest relative error}, if not that of a kernel in test_gpt2.py
    torch               what PyTorch would do, for comparison: (torch, tensors) -> a function
    beside              other kernels, whose files have versions that it launches too

A version's launch is given by expressions in the names of `a`, as in "N*C". Four names are there besides those of the
problem: W, the numbers of type real in 16 bytes; itemsize, the bytes of a real; threads; and what is in `more`.
"""
import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from prepro_tinyshakespeare import UserError
from test_gpt2 import (ATTENTION_LIMITS, attention, bf16, cross_entropy, dattention, dcross_entropy, dgelu, dlayernorm,
                       f32, gelu, heads, layernorm, moments, softmax, transposed)
from train_gpt2 import (ADAMW, PARTIAL_ROWS, Verdict, attention_launch, batch_table, carve, classifier_launch,
                        layernorm_backward_launch, pack_batch)

ALL = "fp32", "tf32", "bf16"  # the dtypes of a version that uses tensor cores; to the others tf32 is fp32


class Version(NamedTuple):
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (device, a) that launches several
    items: str = None  # what the kernel's BLOCK shares out; with a comma, how many along x and how many along y
    threads: tuple = (64, 128, 256, 512, 1024)  # of a block, to try; () takes as many as BLOCK says
    args: str = None  # the names in `a` of the kernel's arguments, if not those of the ladder
    shared: str = "0"  # bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # what else can be chosen, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = None
    library: str = ""  # its name, if that is what it calls
    fits: Callable = None  # a -> whether it does these sizes

    def choices(self, device):
        """Each combination of what can be chosen: {"threads": 256, ...}."""
        threads = self.threads or (() if callable(self.run) else (device.kernels[self.run].threads,))
        tries = {**({"threads": threads} if threads else {}), **self.more}
        return [dict(zip(tries, values)) for values in itertools.product(*tries.values())]

    def launch(self, device, a, ladder):
        if callable(self.run):
            self.run(device, a)
            return
        items, shared = (eval(expression, {}, vars(a)) for expression in (self.items, self.shared))
        args = [getattr(a, name) for name in (self.args or ladder.args).split()]
        device.launch(self.run, items, *args, threads=a.threads, shared=shared)


class Ladder(NamedTuple):
    name: str
    summary: str
    problem: Callable
    shape: str
    checks: tuple
    versions: tuple
    args: str = ""
    fp32: str = ""
    flops: Callable = None
    traffic: Callable = None
    compiled_for_C: bool = False
    limits: dict = None
    torch: Callable = None
    held_back: str = ""
    beside: tuple = ()


LADDERS = {}


def ladder(shape, *checks, **rows):
    """Register the kernel of a function's name; the first line of its docstring says what it computes."""
    def register(problem):
        summary = problem.__doc__.strip().splitlines()[0]
        LADDERS[problem.__name__] = Ladder(problem.__name__, summary, problem, shape, checks, **rows)
        return problem
    return register


POOL = 2**22 + 1  # numbers drawn for an array; a larger one repeats them, no two of its rows alike


class Draw:
    """Inputs: draw(*shape) are normal numbers as real stores them."""

    def __init__(self, in_bf16):
        self.rng, self.round = np.random.default_rng(1337), bf16 if in_bf16 else f32
        self.bf16 = in_bf16

    def __call__(self, *shape, scale=1.0):
        return np.resize(self.round(scale * self.rng.standard_normal(min(math.prod(shape), POOL))), shape)

    def fp32(self, *shape, scale=1.0):
        return np.resize(f32(scale * self.rng.standard_normal(min(math.prod(shape), POOL))), shape)

    def words(self, V, *shape):
        return self.rng.integers(V, size=shape, dtype=np.int32)


def in_parts(f, *arrays, step=None):
    """f over the arrays' first axis, `step` of it at a time and on all cores, so that no temporary is as large as the
    arrays. f returns an array or a tuple of them, whose first axis is the same."""
    step = step or max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    return np.concatenate(results) if isinstance(results[0], np.ndarray) else [*map(np.concatenate, zip(*results))]


ROWS = ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")  # odd shapes of (B,T,C)


# ---------------------------------------------------------------------------------------------------------------------
# Token and position embeddings


@ladder("B=8,T=1024,C=768,V=50257", *(f"{shape},V=257" for shape in ROWS), args="out tokens wte wpe N T C",
        fp32="out", traffic=lambda a: (a.N + a.T) * a.C * a.itemsize + 4 * a.N * (a.C + 1), versions=(
    Version("a thread a token", "encoder_forward1", "N", threads=(32, 64, 128, 256)),
    Version("a thread a channel", "encoder_forward2", "N*C"),
    Version("4 channels a lane: the trainer's", "encoder_forward", "N*C"),
))
def encoder_forward(a, draw):
    """out (B,T,C) = wte (V,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]"""
    a.N = a.B * a.T
    a.tokens, a.wte, a.wpe = draw.words(a.V, a.B, a.T), draw(a.V, a.C), draw(a.T, a.C)
    return dict(out=a.wte[a.tokens] + a.wpe)


def trainers_encoder_backward(device, a):
    device.launch("encoder_backward_wte", (a.N, a.C), a.dwte, a.dout, a.tokens, a.order, a.run, a.C)
    device.launch("encoder_backward_wpe", a.T * a.C, a.dwpe, a.dout, a.B, a.T, a.C, threads=a.threads)


@ladder("B=8,T=1024,C=768,V=50257", *(f"{shape},V=17" for shape in ROWS), args="dwte dwpe dout tokens N T C",
        fp32="dwte dwpe", traffic=lambda a: a.N * a.C * a.itemsize + 8 * (a.words + a.T) * a.C, versions=(
    Version("a thread a channel of a token, with atomics", "encoder_backward1", "N*C"),
    Version("a thread a channel, all tokens in order", "encoder_backward2", "C", threads=(32, 64, 128)),
    Version("runs of equal tokens: the trainer's", trainers_encoder_backward, threads=(64, 128, 256, 512)),
),
        held_back="a block of 256 threads for each token moves one row, most of its warps idle: it is made "
                  "for the words that make up a tenth of a text")
def encoder_backward(a, draw):
    """dwte (V,C)[tokens (B,T)] and dwpe (maxT,C)[t] += dout (B,T,C)"""
    a.N = a.B * a.T
    a.tokens = np.where(draw.rng.random((a.B, a.T)) < 0.1, a.V - 1, draw.words(a.V, a.B, a.T)).astype(np.int32)
    batch, a.words = carve(pack_batch(a.tokens)[0], batch_table(a.B, a.T)), len(np.unique(a.tokens))
    a.order, a.run = batch.order, batch.run_length
    a.dwte, a.dwpe, a.dout = draw.fp32(a.V, a.C), draw.fp32(a.T, a.C), draw(a.B, a.T, a.C)
    dwte, order = a.dwte.copy(), np.argsort(a.tokens.reshape(-1), kind="stable")
    words, starts = np.unique(a.tokens.reshape(-1)[order], return_index=True)
    dwte[words] += np.add.reduceat(a.dout.reshape(a.N, a.C)[order], starts)
    return dict(dwte=dwte, dwpe=a.dwpe + a.dout.sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# Layernorm, and the residual stream before it


TRAINERS_LAYERNORM = "out mean rstd copy residual branch weight bias N"


def layernorm_in_three(device, a):
    device.launch("layernorm_forward2_mean", a.N, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_rstd", a.N, a.rstd, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_normalize", a.N * a.C, a.out, a.mean, a.rstd, a.copy, a.residual, a.weight,
                  a.bias, a.N, a.C, threads=a.threads)


@ladder("B=8,T=1024,C=768", *ROWS, fp32="residual mean rstd", compiled_for_C=True,
        args="out mean rstd copy residual weight bias N C", versions=(
    Version("a thread a row", "layernorm_forward1", "N", threads=(32, 64, 128, 256)),
    Version("three kernels: means, deviations, and a thread a number", layernorm_in_three, threads=(128, 256, 512)),
    Version("one kernel, a warp a row", "layernorm_forward3", "N"),
    Version("16 bytes a lane", "layernorm_forward4", "N"),
    Version("one pass for both sums, by E[x^2] - E[x]^2", "layernorm_forward5", "N",
            limits=dict(fp32=1e-3, bf16=1e-3)),  # rstd is off by 1e-4 where the mean is 50 deviations: see its comment
    Version("the row in registers: the trainer's", "residual_layernorm_forward", "N", threads=(64, 128, 256, 512),
            args=TRAINERS_LAYERNORM),
), torch=lambda torch, x: lambda: torch.nn.functional.layer_norm(
    x.residual.to(x.weight.dtype), x.weight.shape, x.weight, x.bias))
def layernorm_forward(a, draw):
    """out (N,C) = the layernorm of residual, with its mean and rstd, and copy = residual as a real"""
    a.N, a.branch = a.B * a.T, None
    a.residual, a.weight, a.bias = draw.fp32(a.N, a.C), draw(a.C), draw(a.C)
    mean, rstd = moments(a.residual)
    return dict(out=layernorm(a.residual, a.weight, a.bias), mean=mean[:, 0], rstd=rstd[:, 0], copy=a.residual)


def trainers_layernorm_backward(device, a):
    blocks, threads, shared = layernorm_backward_launch(device, a.N)
    device.launch("layernorm_backward", blocks, a.dresidual, a.partials, a.dout, a.inp, a.weight, a.mean, a.rstd, a.N,
                  threads=threads, shared=shared)
    device.launch("add_partials", (a.C, 3), a.dweight, a.dbias, a.before, a.partials, blocks, a.C)


BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


@ladder("B=8,T=1024,C=768", *ROWS, fp32="mean rstd dweight dbias before partials", compiled_for_C=True,
        args="dresidual dweight dbias before dout inp weight mean rstd N C", versions=(
    Version("a thread a row, with atomics", "layernorm_backward1", "N", threads=(32, 64, 128, 256)),
    Version("a warp a row, atomics in shared memory", "layernorm_backward2", "blocks", threads=(128, 256, 512),
            shared="4 * 3*C", more=dict(blocks=BLOCKS)),
    Version("sums in registers, and the last block adds up", "layernorm_backward3", "blocks", threads=(128, 256),
            args="dresidual dweight dbias before partials counters dout inp weight mean rstd N",
            shared="threads // 32 * 4*C", more=dict(blocks=(132, 264, 528)),
            scratch=lambda a: dict(partials=(3, a.blocks, a.C))),
    Version("sums in registers, rows by asynchronous copies: the trainer's", trainers_layernorm_backward, threads=(),
            scratch=lambda a: dict(partials=(3, PARTIAL_ROWS, a.C))),
), torch=lambda torch, x: lambda: torch.ops.aten.native_layer_norm_backward(
    x.dout, x.inp, x.inp.shape[-1:], x.mean[:, None], x.rstd[:, None], x.weight, x.weight, [True, True, True]),
        held_back="each of 1,584 warps has five or six rows, so the wait for the first, the sum over the "
                  "warps at the end and the second launch weigh as much as the rows")
def layernorm_backward(a, draw):
    """dresidual (N,C), dweight and dbias (C) += layernorm's gradients; before (C) += the sum of dresidual's rows"""
    a.N = a.B * a.T
    a.inp, a.dout, a.dresidual, a.weight = draw(a.N, a.C), draw(a.N, a.C), draw(a.N, a.C), draw(a.C)
    a.dweight, a.dbias, a.before = draw.fp32(a.C), draw.fp32(a.C), draw.fp32(a.C)
    a.mean, a.rstd = (f32(x[:, 0]) for x in moments(a.inp))
    dx, dweight, dbias = dlayernorm(a.dout, a.inp, a.weight, 0)
    dresidual = a.dresidual + dx
    a.counters = np.zeros(64, np.int32)  # which have to be 0 again in the end
    return dict(dresidual=dresidual, dweight=a.dweight + dweight, dbias=a.dbias + dbias,
                before=a.before + dresidual.sum(0), counters=a.counters)


@ladder("B=8,T=1024,C=768", *ROWS, args="out inp1 inp2 N C", versions=(
    Version("a thread a number", "residual_forward1", "N*C"),
    Version("16 bytes a lane", "residual_forward2", "N*C"),
    Version("streaming loads and stores", "residual_forward3", "N*C"),
), torch=lambda torch, x: lambda: x.inp1 + x.inp2)
def residual_forward(a, draw):
    """out (N,C) = inp1 + inp2"""
    a.N = a.B * a.T
    a.inp1, a.inp2 = draw(a.N, a.C), draw(a.N, a.C)
    return dict(out=a.inp1 + a.inp2)


def add_then_normalize(device, a):
    device.launch("fused_residual_forward1_add", a.N * a.C, a.residual, a.branch, a.N, a.C, threads=a.threads)
    device.launch("residual_layernorm_forward", a.N, a.out, a.mean, a.rstd, a.copy, a.residual, None, a.weight, a.bias,
                  a.N, threads=a.threads)


@ladder("B=8,T=1024,C=768", *ROWS, fp32="residual mean rstd", compiled_for_C=True,
        args=TRAINERS_LAYERNORM + " C", traffic=lambda a: a.N * (a.C * (8 + 3 * a.itemsize) + 8), versions=(
    Version("two kernels: an addition, then the layernorm", add_then_normalize, threads=(128, 256, 512)),
    Version("one kernel, the sum kept in shared memory", "fused_residual_forward2", "N", threads=(64, 128, 256),
            shared="threads // 32 * 4*C"),
    Version("the sum in registers: the trainer's", "residual_layernorm_forward", "N", threads=(64, 128, 256, 512),
            args=TRAINERS_LAYERNORM),
))
def fused_residual_forward(a, draw):
    """residual (N,C) += branch, copy = residual as a real, and out = its layernorm"""
    a.N = a.B * a.T
    a.residual, a.branch, a.weight, a.bias = draw.fp32(a.N, a.C), draw(a.N, a.C), draw(a.C), draw(a.C)
    residual = f32(a.residual + a.branch)
    mean, rstd = moments(residual)
    return dict(residual=residual, copy=residual, out=layernorm(residual, a.weight, a.bias), mean=mean[:, 0],
                rstd=rstd[:, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


# Of sums of some thousand products. Tensor cores truncate where they add.
MATMUL_LIMITS = {"fp32": 2e-5, "tf32": 1e-3, "bf16": 1e-4}
TENSOR_CORE_LIMITS = MATMUL_LIMITS | {"fp32": 1e-4}


@ladder("B=8,T=1024,C=768,OC=3072", "B=1,T=1,C=32,OC=1", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=257",
        args="out inp weight bias N C OC", flops=lambda a: 2 * a.N * a.C * a.OC, limits=MATMUL_LIMITS, versions=(
    Version("a thread an element", "matmul_forward1", "N*OC", threads=(256, 1024)),
    Version("tiles of 32 x 32 in shared memory", "matmul_forward2", "OC, N", threads=()),
    Version("8 x 8 elements a thread, in registers", "matmul_forward3", "OC, N", threads=()),
    Version("16 bytes a load, and the next tile on its way", "matmul_forward4", "OC, N", threads=()),
    Version("tensor cores, by mma.sync", "matmul_forward5", "OC, N", threads=(),
            shared="2 * 2*128 * (128 + 8*itemsize)", dtypes=ALL, limits=TENSOR_CORE_LIMITS),
    Version("cuBLAS, as the trainer does", lambda device, a: device.matmul(a.out, a.inp, a.weight.T, bias=a.bias),
            threads=(), dtypes=ALL, library="cuBLAS"),
))
def matmul_forward(a, draw):
    """out (N,OC) = inp (N,C) weight' (OC,C) + bias (OC)"""
    a.N = a.B * a.T
    a.inp, a.weight, a.bias = draw(a.N, a.C), draw(a.OC, a.C), draw(a.OC)
    return dict(out=a.inp @ a.weight.T + a.bias)


def matmul_backward_elements(device, a):
    device.launch("matmul_backward1_inp", a.N * a.C, a.dinp, a.dout, a.weight, a.N, a.C, a.OC, threads=a.threads)
    device.launch("matmul_backward1_weight", a.OC * a.C, a.dweight, a.dout, a.inp, a.N, a.C, a.OC, threads=a.threads)


def matmul_backward_tiles(name):
    """A function that launches the two products of a version whose blocks have tiles of the results."""
    def run(device, a):
        device.launch(f"{name}_inp", (a.C, a.N), a.dinp, a.dout, a.weight, a.N, a.C, a.OC, threads=a.threads)
        device.launch(f"{name}_weight", (a.C, a.OC), a.dweight, a.dout, a.inp, a.N, a.C, a.OC, threads=a.threads)
    return run


def matmul_backward_by_library(device, a):
    device.matmul(a.dinp, a.dout, a.weight)
    device.matmul(a.dweight, a.dout.T, a.inp, accumulate=True)


@ladder("B=8,T=1024,C=768,OC=3072", "B=1,T=1,C=32,OC=8", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=264",
        fp32="dweight", flops=lambda a: 4 * a.N * a.C * a.OC, versions=(
    Version("a thread an element", matmul_backward_elements, threads=(256, 1024)),
    Version("tiles of 32 x 32 in shared memory", matmul_backward_tiles("matmul_backward2"), threads=(1024,)),
    Version("8 x 8 elements a thread, in registers", matmul_backward_tiles("matmul_backward3"), threads=(256,)),
    Version("cuBLAS, as the trainer does", matmul_backward_by_library, threads=(), dtypes=ALL, library="cuBLAS"),
), limits=MATMUL_LIMITS)
def matmul_backward(a, draw):
    """dinp (N,C) = dout (N,OC) weight (OC,C), and dweight (OC,C) += dout' inp (N,C)"""
    a.N = a.B * a.T
    a.inp, a.weight, a.dout, a.dweight = draw(a.N, a.C), draw(a.OC, a.C), draw(a.N, a.OC), draw.fp32(a.OC, a.C)
    return dict(dinp=a.dout @ a.weight, dweight=a.dweight + a.dout.T @ a.inp)


def trainers_matmul_backward_bias(device, a):
    device.launch("matmul_backward_bias", (a.OC, a.shares), a.partials, a.dout, a.N, a.OC)
    device.launch("add_partials", a.OC, a.dbias, None, None, a.partials, a.shares, a.OC)


@ladder("B=8,T=1024,OC=3072", "B=1,T=2,OC=32", "B=3,T=9,OC=288", "B=1,T=140,OC=1600", fp32="dbias partials",
        args="dbias dout N OC", versions=(
    Version("a thread a column", "matmul_backward_bias1", "OC", threads=(32, 64, 128)),
    Version("the rows shared out, with atomics", "matmul_backward_bias2", "OC, shares", threads=(128, 256),
            more=dict(shares=(16, 64, 256))),
    Version("16 bytes a lane, and the last block adds up the shares", "matmul_backward_bias3", "OC, shares", threads=(),
            args="dbias partials counters dout N OC", more=dict(shares=(16, 32, 64)),
            scratch=lambda a: dict(partials=(a.shares, a.OC))),
    Version("16 bytes a lane, no atomics: the trainer's", trainers_matmul_backward_bias, threads=(),
            more=dict(shares=(16, 32, 64)), scratch=lambda a: dict(partials=(a.shares, a.OC))),
), torch=lambda torch, x: lambda: x.dout.sum(0),
        held_back="the second launch, which adds up the shares, takes two or three of them")
def matmul_backward_bias(a, draw):
    """dbias (OC) += the sum over rows of dout (N,OC)"""
    a.N = a.B * a.T
    a.dout, a.dbias = draw(a.N, a.OC), draw.fp32(a.OC)
    a.counters = np.zeros(-(-a.OC // 32), np.int32)  # which have to be 0 again in the end
    return dict(dbias=a.dbias + a.dout.sum(0), counters=a.counters)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


HEADS = "B=1,T=1,NH=1,HS=64", "B=2,T=33,NH=3,HS=64", "B=1,T=130,NH=2,HS=64"
LONG_HEADS = "B=1,T=150,NH=2,HS=128"
pairs_seen = lambda a: a.B * a.NH * a.T * (a.T + 1) // 2  # of a query and a key


def split_heads(a, qkv):
    """q, k, v (B*NH,T,HS) of qkv (B,T,3*NH*HS)."""
    return heads(qkv, 3, a.NH).reshape(3, -1, a.T, a.HS)


def join_heads(a, x):
    """(B,T,NH*HS) of x (B*NH,T,HS)."""
    return x.reshape(a.B, a.NH, a.T, a.HS).swapaxes(1, 2).reshape(a.B, a.T, -1)


def launch_trainers(device, a, NKV, kernel, *arrays, relu=0):
    blocks, threads, shared = attention_launch(device, kernel, a.B, a.T, a.NH, NKV)
    device.launch(kernel, blocks, *arrays, a.scale, relu, a.T, a.NH, NKV, threads=threads, shared=shared)


def trainers_attention(device, a, relu=0):
    launch_trainers(device, a, a.NH, "attention_forward", a.out, a.lse, a.qkv, relu=relu)


def materialized_attention(device, a):
    heads, tiles, channel_tiles = a.B * a.NH, -(-a.T // 32), -(-a.HS // 32)
    device.launch("attention_forward2_scores", (heads * tiles, a.T), a.att, a.qkv, a.scale, a.T, a.NH, threads=1024)
    device.launch("attention_forward2_softmax", heads * a.T, a.att, heads * a.T, a.T, threads=a.threads)
    device.launch("attention_forward2_values", (heads * channel_tiles, a.T), a.out, a.att, a.qkv, a.T, a.NH,
                  threads=1024)


def torch_attention(torch, x):
    q, k, v = x.qkv.view(x.B, x.T, 3, x.NH, x.HS).permute(2, 0, 3, 1, 4)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, LONG_HEADS, fp32="att lse", flops=lambda a: 4 * pairs_seen(a) * a.HS,
        limits=ATTENTION_LIMITS, versions=(
    Version("a thread a query, its weights in device memory", "attention_forward1", "B*NH*T", threads=(64, 256),
            args="out att qkv scale B T NH", scratch=lambda a: dict(att=(a.B, a.NH, a.T, a.T))),
    Version("three kernels: tiles, online softmax, tiles", materialized_attention, threads=(128, 256),
            scratch=lambda a: dict(att=(a.B, a.NH, a.T, a.T))),
    Version("flash in fp32", "attention_forward3", "T, B*NH", threads=(64, 128, 256), args="out qkv scale T NH"),
    Version("flash on tensor cores, by mma.sync", "attention_forward4", "B*NH, T", threads=(), dtypes=ALL,
            args="out qkv scale T NH", shared="2*2*64 * (HS + 8) * itemsize"),
    Version("flash on tensor cores, by mma.sync or wgmma: the trainer's", trainers_attention, threads=(), dtypes=ALL,
            scratch=lambda a: dict(lse=(a.B, a.NH, a.T))),
), torch=torch_attention)
def attention_forward(a, draw):
    """out (B,T,NH,HS) = softmax(q k' / sqrt(HS)) v, causal, from qkv (B,T,3,NH,HS)"""
    a.scale, a.qkv = a.HS**-0.5, draw(a.B, a.T, 3 * a.NH * a.HS)
    return dict(out=join_heads(a, in_parts(functools.partial(attention, "softmax"), *split_heads(a, a.qkv), step=1)))


def attention_backward_with_atomics(device, a):
    device.zero(a.dqkv)
    device.launch("attention_backward1", a.B * a.NH * a.T, a.dqkv, a.dout, a.out, a.qkv, a.lse, a.scale, a.B, a.T, a.NH,
                  threads=a.threads)


def attention_backward_without_atomics(device, a):
    rows, inputs = (a.T, a.B * a.NH), (a.dqkv, a.dout, a.qkv, a.lse)
    device.launch("attention_backward2_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T, a.NH,
                  threads=a.threads)
    device.launch("attention_backward2_q", rows, *inputs, a.delta, a.scale, a.T, a.NH, threads=a.threads)
    device.launch("attention_backward2_k", rows, *inputs, a.delta, a.scale, a.T, a.NH, threads=a.threads)
    device.launch("attention_backward2_v", rows, *inputs, a.scale, a.T, a.NH, threads=a.threads)


def attention_backward_sizes(a):
    """(the rows of a head that a block owns, the bytes of its tiles in shared memory) on tensor cores."""
    rows = 128 if a.HS * a.itemsize <= 256 else 64
    return rows, (2 * rows + 2 * 2 * 32) * (a.HS + 8) * a.itemsize


def attention_backward_on_tensor_cores(device, a, longest_first):
    (rows, shared), inputs = attention_backward_sizes(a), (a.dqkv, a.dout, a.qkv, a.lse, a.delta)
    device.launch("attention_backward3_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T, a.NH)
    for kernel in ("attention_backward3_q", "attention_backward3_kv"):
        device.launch(kernel, -(-a.T // rows) * a.B * a.NH, *inputs, a.scale, longest_first, a.T, a.NH,
                      threads=2 * rows, shared=shared)


def attention_backward_in_turns(device, a):
    rows, shared = attention_backward_sizes(a)
    device.launch("attention_backward3_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T, a.NH)
    device.launch("attention_backward5", -(-a.T // rows) * a.B * a.NH, a.dqkv, a.dq, a.turns, a.dout, a.qkv, a.lse,
                  a.delta, a.scale, a.T, a.NH, threads=2 * rows, shared=shared + rows * (32 + 8) * a.itemsize)


def trainers_attention_backward(device, a):
    launch_trainers(device, a, a.NH, "attention_backward_q", a.dqkv, a.delta, a.dout, a.out, a.qkv, a.lse)
    launch_trainers(device, a, a.NH, "attention_backward_kv", a.dqkv, a.dout, a.qkv, a.lse, a.delta)


def torch_attention_backward(torch, x):
    q, k, v = (t.detach().requires_grad_() for t in x.qkv.view(x.B, x.T, 3, x.NH, x.HS).permute(2, 0, 3, 1, 4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    dout = x.dout.view(x.B, x.T, x.NH, x.HS).transpose(1, 2)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, LONG_HEADS, "B=1,T=300,NH=3,HS=64", fp32="lse delta dq",
        flops=lambda a: 10 * pairs_seen(a) * a.HS, limits=ATTENTION_LIMITS | dict(tf32=1e-3), versions=(
    Version("a thread a query, with atomics", attention_backward_with_atomics, threads=(64, 256), dtypes=("fp32",)),
    Version("a thread a row of dq, dk or dv", attention_backward_without_atomics, threads=(64, 128),
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
    Version("tensor cores, by mma.sync", functools.partial(attention_backward_on_tensor_cores, longest_first=0),
            threads=(), dtypes=ALL, scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
    Version("the longest blocks first", functools.partial(attention_backward_on_tensor_cores, longest_first=1),
            threads=(), dtypes=ALL, scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
    Version("five products in one kernel, blocks take turns at dq", attention_backward_in_turns, threads=(), dtypes=ALL,
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T), dq=(a.B, a.NH, -(-a.T // 32) * 32, a.HS))),
    Version("seven products, by mma.sync or wgmma: the trainer's", trainers_attention_backward, threads=(), dtypes=ALL,
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
), torch=torch_attention_backward)
def attention_backward(a, draw):
    """dqkv (B,T,3,NH,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
    a.qkv, a.dout = draw(a.B, a.T, 3 * a.NH * a.HS), draw(a.B, a.T, a.NH * a.HS)
    a.turns = np.zeros(a.B * a.NH * -(-a.T // 32) + 1, np.int32)  # counters, which have to be 0 again in the end
    return dict(dqkv=np.concatenate(attention_gradients(a, draw, a.qkv), -1), turns=a.turns)


def attention_gradients(a, draw, qkv):
    """dq, dk and dv (B,T,NH*HS) of qkv (B,T,3*NH*HS) and a.dout. Sets scale, out and lse in a, for versions to use."""
    def gradients(q, k, v, dout):
        score = np.where(np.tri(a.T, dtype=bool), q @ transposed(k) / np.sqrt(a.HS), -np.inf)
        top = score.max(-1)
        lse = (np.log(np.exp(score - top[..., None]).sum(-1)) + top) / np.log(2)
        out = draw.round(attention("softmax", q, k, v))
        return (out, lse, *dattention("softmax", dout, q, k, v, (dout * out).sum(-1, keepdims=True)))

    out, lse, *dqkv = in_parts(gradients, *split_heads(a, qkv), heads(a.dout, 1, a.NH).reshape(-1, a.T, a.HS), step=1)
    a.scale, a.out, a.lse = a.HS**-0.5, join_heads(a, out), f32(lse.reshape(a.B, a.NH, a.T))
    return [join_heads(a, x) for x in dqkv]


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, LONG_HEADS, fp32="lse", flops=lambda a: 4 * pairs_seen(a) * a.HS,
        limits=ATTENTION_LIMITS, versions=(
    Version("a thread a query", "relu_attention_forward1", "B*NH*T", threads=(64, 256), args="out qkv scale B T NH"),
    Version("tiles of keys in shared memory", "relu_attention_forward2", "T, B*NH", threads=(64, 128, 256),
            args="out qkv scale T NH"),
    Version("tensor cores, by mma.sync or wgmma: the trainer's", functools.partial(trainers_attention, relu=1),
            threads=(), dtypes=ALL, scratch=lambda a: dict(lse=(a.B, a.NH, a.T))),
))
def relu_attention_forward(a, draw):
    """out (B,T,NH,HS) = max(0, q k' / sqrt(HS)) v, causal, from qkv (B,T,3,NH,HS)"""
    a.scale, a.qkv = a.HS**-0.5, draw(a.B, a.T, 3 * a.NH * a.HS)
    return dict(out=join_heads(a, in_parts(functools.partial(attention, "relu"), *split_heads(a, a.qkv), step=1)))


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, limits=TENSOR_CORE_LIMITS | dict(tf32=2e-3),
        args="att qkv scale T NH", flops=lambda a: 2 * pairs_seen(a) * a.HS,
        traffic=lambda a: (2 * a.B * a.T * a.NH * a.HS + pairs_seen(a)) * a.itemsize, versions=(
    Version("a thread an element", "trimat_forward1", "B*NH*T*T", threads=(256, 1024), args="att qkv scale B T NH"),
    Version("tiles of 32 x 32 in shared memory", "trimat_forward2", "B*NH * -(-T // 32), T", threads=()),
    Version("8 x 8 elements a thread, in registers", "trimat_forward3", "B*NH * -(-T // 128), T", threads=()),
    Version("tensor cores", "trimat_forward4", "B*NH * -(-T // 128), T", threads=(), dtypes=ALL,
            shared="-(-HS*itemsize // 128) * 2*128 * (128 + 8*itemsize)"),
))
def trimat_forward(a, draw):
    """att (B,NH,T,T) = q k' / sqrt(HS) on and below the diagonal, from qkv (B,T,3,NH,HS)"""
    a.scale, a.qkv = a.HS**-0.5, draw(a.B, a.T, 3 * a.NH * a.HS)
    q, k, _ = split_heads(a, a.qkv)
    att = in_parts(lambda q, k: np.where(np.tri(a.T, dtype=bool), q @ transposed(k) * a.scale, np.nan), q, k, step=1)
    return dict(att=att.reshape(a.B, a.NH, a.T, a.T))


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, args="out inp B T NH HS", versions=(
    Version("a thread a number", "permute1", "3*B*T*NH*HS"),
    Version("16 bytes a lane, 32-bit divisions", "permute2", "NH*T*HS, 3*B"),
), torch=lambda torch, x: lambda: x.inp.view(x.B, x.T, 3, x.NH, x.HS).permute(2, 0, 3, 1, 4).contiguous())
def permute(a, draw):
    """inp (B,T,3,NH,HS) to out (3,B,NH,T,HS)"""
    a.inp = draw(a.B, a.T, 3, a.NH, a.HS)
    return dict(out=a.inp.transpose(2, 0, 3, 1, 4).copy())


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, args="out inp B T NH HS", versions=(
    Version("a thread a number", "unpermute1", "B*NH*T*HS"),
    Version("16 bytes a lane, 32-bit divisions", "unpermute2", "NH*T*HS, B"),
), torch=lambda torch, x: lambda: x.inp.transpose(1, 2).contiguous())
def unpermute(a, draw):
    """inp (B,NH,T,HS) to out (B,T,NH,HS)"""
    a.inp = draw(a.B, a.NH, a.T, a.HS)
    return dict(out=a.inp.swapaxes(1, 2).copy())


# ---------------------------------------------------------------------------------------------------------------------
# GELU


@ladder("B=8,T=1024,C=768", *ROWS, args="out inp N OC", versions=(
    Version("a thread a number, by tanh", "gelu_forward1", "N*OC"),
    Version("16 bytes a lane", "gelu_forward2", "N*OC"),
    Version("one exponential: the trainer's", "gelu_forward", "N*OC"),
), torch=lambda torch, x: lambda: torch.nn.functional.gelu(x.inp, approximate="tanh"))
def gelu_forward(a, draw):
    """out (N,4C) = gelu(inp)"""
    a.N, a.OC = a.B * a.T, 4 * a.C
    a.inp = draw(a.N, a.OC, scale=3)
    return dict(out=in_parts(gelu, a.inp))


@ladder("B=8,T=1024,C=768", *ROWS, args="dinp inp N OC", versions=(
    Version("a thread a number, by tanh", "gelu_backward1", "N*OC"),
    Version("16 bytes a lane", "gelu_backward2", "N*OC"),
    Version("one exponential: the trainer's", "gelu_backward", "N*OC"),
), torch=lambda torch, x: lambda: torch.ops.aten.gelu_backward(x.dinp, x.inp, approximate="tanh"))
def gelu_backward(a, draw):
    """dinp (N,4C), the gradient of gelu(inp), becomes that of inp"""
    a.N, a.OC = a.B * a.T, 4 * a.C
    a.inp, a.dinp = draw(a.N, a.OC, scale=3), draw(a.N, a.OC)
    return dict(dinp=in_parts(dgelu, a.dinp, a.inp))


# ---------------------------------------------------------------------------------------------------------------------
# Softmax and cross-entropy over the vocabulary


WORDS = "B=1,T=1,V=17,Vp=32", "B=3,T=9,V=257,Vp=384", "B=1,T=3,V=50257,Vp=50304"


def set_words(a):
    """The sizes of a row of logits. Raises UserError."""
    if a.V > a.Vp:
        raise UserError(f"expected V = {a.V} not to exceed Vp = {a.Vp}")
    a.N = a.B * a.T


def pad(a, x):
    """x (N,V) with columns of zeros up to Vp."""
    return np.pad(x, ((0, 0), (0, a.Vp - a.V)))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="out inp N V Vp", versions=(
    Version("a thread a row, three passes", "softmax_forward1", "N", threads=(32, 128),
            limits=dict(fp32=1e-4)),  # a sum of 50,257 numbers one by one
    Version("a block a row, three passes", "softmax_forward2", "N", threads=(256, 512, 1024)),
    Version("a warp a row, two passes, 16 bytes a lane", "softmax_forward3", "N"),
    Version("a block a row, two passes, 16 bytes a lane", "softmax_forward4", "N", threads=(256, 512, 1024)),
    Version("one pass, the next row on its way", "softmax_forward5", "min(blocks, N)", threads=(512, 1024),
            shared="Vp*itemsize", more=dict(blocks=(132, 264))),
), torch=lambda torch, x: lambda: torch.softmax(x.inp[:, :x.V], -1))
def softmax_forward(a, draw):
    """out (N,Vp) = softmax(inp) over the first V columns, zeros in the others"""
    set_words(a)
    a.inp = draw(a.N, a.Vp, scale=3)
    return dict(out=in_parts(lambda x: pad(a, softmax(x[:, :a.V])), a.inp))


def torch_cross_entropy(torch, x):
    logits, targets = x.logits[:, :x.V], x.targets.long()
    return lambda: torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def trainers_classifier(device, a, with_gradient):
    blocks, room, shared = classifier_launch(device, a.N, a.Vp, with_gradient)
    device.launch("fused_classifier", blocks, a.logits, a.losses, a.targets, a.dloss, a.N, a.V, a.Vp, with_gradient,
                  room, threads=a.threads, shared=shared)


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="losses logits targets N V Vp", fp32="losses", versions=(
    Version("a thread a row, two passes", "crossentropy_forward1", "N", threads=(32, 128)),
    Version("a block a row", "crossentropy_forward2", "N", threads=(256, 512, 1024)),
    Version("one pass, 16 bytes a lane: the trainer's", functools.partial(trainers_classifier, with_gradient=False),
            threads=(256, 512, 1024)),
), torch=torch_cross_entropy,
        held_back="an exponential for every 2 bytes keeps the instructions as busy as the memory")
def crossentropy_forward(a, draw):
    """losses (N) = -log(softmax(logits (N,Vp)) at the target), over the first V columns"""
    set_words(a)
    a.dloss = 0.0
    a.logits, a.targets = draw(a.N, a.Vp, scale=3), draw.words(a.V, a.N)
    return dict(losses=in_parts(lambda targets, x: cross_entropy(targets, x[:, :a.V]), a.targets, a.logits))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="dlogits dlosses probs targets N V Vp", fp32="dlosses", versions=(
    Version("a thread a number", "crossentropy_softmax_backward1", "N*Vp"),
    Version("16 bytes a lane", "crossentropy_softmax_backward2", "Vp, N"),
))
def crossentropy_softmax_backward(a, draw):
    """dlogits (N,Vp) = (probs - 1 at the target) * dlosses (N)"""
    def gradient(probs, targets, dlosses):
        return pad(a, dlosses[:, None] * (probs[:, :a.V] - (np.arange(a.V) == targets[:, None])))

    set_words(a)
    a.probs, a.targets, a.dlosses = abs(draw(a.N, a.Vp)), draw.words(a.V, a.N), draw.fp32(a.N)
    return dict(dlogits=in_parts(gradient, a.probs, a.targets, a.dlosses))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, "B=1,T=3,V=128256,Vp=128256", args="logits losses targets dloss N V Vp",
        fp32="losses", versions=(
    Version("a thread a row, four passes", "classifier_fused1", "N", threads=(32, 128),
            limits=dict(fp32=1e-4, bf16=1e-4)),
    Version("a block a row, three passes", "classifier_fused2", "N", threads=(256, 512, 1024)),
    Version("two passes", "classifier_fused3", "N", threads=(256, 512, 1024)),
    Version("16 bytes a lane, one row in shared memory", "classifier_fused4", "min(blocks, N)", threads=(512, 1024),
            shared="Vp*itemsize", more=dict(blocks=(132, 264)), fits=lambda a: a.Vp <= 50304),
    Version("two rows in shared memory, or as much of one as fits: the trainer's", functools.partial(
        trainers_classifier, with_gradient=True), threads=(256, 512, 1024)),
))
def classifier_fused(a, draw):
    """losses (N) of logits (N,Vp), which become their gradient dloss * (softmax - 1 at the target)"""
    def both(targets, x):
        dloss = np.full(len(targets), a.dloss)
        return cross_entropy(targets, x[:, :a.V]), pad(a, dcross_entropy(targets, dloss, x[:, :a.V]))

    set_words(a)
    a.dloss = float(np.float32(1 / a.N))
    a.logits, a.targets = draw(a.N, a.Vp, scale=3), draw.words(a.V, a.N)
    losses, dlogits = in_parts(both, a.targets, a.logits)
    return dict(losses=losses, logits=dlogits)


# ---------------------------------------------------------------------------------------------------------------------
# The update


def norm_with_atomics(name, items):
    """A function that launches a kernel over items(a), which adds to zero, and the root."""
    def run(device, a):
        device.zero(a.norm)
        device.launch(name, items(a), a.norm, a.grads, a.n, threads=a.threads)
        device.launch("global_norm1_root", 1, a.norm)
    return run


@ladder("n=124475904", "n=32", "n=9600", "n=300032", args="norm grads n", fp32="grads norm", limits=dict(fp32=1e-4),
        versions=(
    Version("a thread a number, an atomic a block", norm_with_atomics("global_norm1", lambda a: a.n), dtypes=("fp32",)),
    Version("as many blocks as run at once", norm_with_atomics("global_norm2", lambda a: a.blocks), dtypes=("fp32",),
            threads=(256, 512), more=dict(blocks=BLOCKS)),
    Version("16 bytes a lane, no float atomics: the trainer's", "global_norm", "blocks", dtypes=("fp32",),
            threads=(256, 512), more=dict(blocks=BLOCKS)),
), torch=lambda torch, x: lambda: torch.linalg.vector_norm(x.grads))
def global_norm(a, draw):
    """norm[0] = the square root of the sum of the squares of grads (n)"""
    a.grads, a.norm = draw.fp32(a.n), np.zeros(2 + max(BLOCKS))
    return dict(norm=np.r_[np.sqrt(np.square(a.grads).sum()), 0, np.full(max(BLOCKS), np.nan)])


def adamw_line_by_line(device, a):
    launch = functools.partial(device.launch, threads=a.threads)
    launch("adamw1_clip", a.n, a.clipped, a.grads, a.n, a.settings, a.verdict)
    launch("adamw1_decay", a.n, a.master, a.starts, a.decayed, a.tensors, a.n, a.settings)
    launch("adamw1_m", a.n, a.m, a.clipped, a.n, a.settings)
    launch("adamw1_v", a.n, a.v, a.clipped, a.n, a.settings)
    launch("adamw1_step", a.n, a.params, a.master, a.m, a.v, a.n, a.settings)


@ladder("n=124475904", "n=32", "n=9600", "n=300032", fp32="master grads clipped m v settings verdict",
        args="params master grads m v starts decayed tensors n settings verdict", versions=(
    Version("five kernels, a line of the algorithm each", adamw_line_by_line, threads=(256, 512, 1024),
            scratch=lambda a: dict(clipped=(a.n,))),
    Version("one kernel, a thread a number", "adamw2", "n"),
    Version("16 bytes a lane: the trainer's", "adamw", "n"),
))
def adamw(a, draw):
    """a step of AdamW on n numbers, clipped, in 16 tensors of arenas; params are rounded copies of the master"""
    values = dict.fromkeys(ADAMW, 0) | dict(learning_rate=0.01, rate1=0.1, rate2=0.001, eps=1e-8, weight_decay=0.1,
                                            clip=1.0, correction1=1 / (1 - 0.9**3), correction2=1 / (1 - 0.999**3))
    a.settings, a.tensors = f32([values[name] for name in ADAMW]), min(16, a.n // 32)
    a.verdict = np.array(Verdict(norm=2.5, loss=0, norm_z=0, loss_z=0, update=1, stopped=0))  # the norm comes first
    a.starts = np.append(np.arange(a.tensors) * (a.n // a.tensors // 32 * 32), a.n).astype(np.uint64)
    a.decayed = np.resize(np.int32([1, 0, 0]), a.tensors)
    a.master, a.grads, a.m, a.v = draw.fp32(a.n), draw.fp32(a.n), draw.fp32(a.n), abs(draw.fp32(a.n))
    s = dict(zip(ADAMW, a.settings))

    def step(p, g, m, v, decayed):
        g = g * s["clip"] / 2.5
        m, v = m + s["rate1"] * (g - m), v + s["rate2"] * (g**2 - v)
        change = m * s["correction1"] / (np.sqrt(v * s["correction2"]) + s["eps"])
        return p - s["learning_rate"] * (change + s["weight_decay"] * decayed * p), m, v

    decayed = np.repeat(a.decayed.astype(bool), np.diff(a.starts.astype(np.int64)))
    master, m, v = (x.reshape(-1) for x in in_parts(step, *(
        x.reshape(-1, 32) for x in (a.master, a.grads, a.m, a.v, decayed))))
    if draw.bf16:
        return dict(master=master, m=m, v=v, params=master)
    a.params = None  # in fp32 they are the master
    return dict(master=master, m=m, v=v)


# ---------------------------------------------------------------------------------------------------------------------
# What a Llama needs


LONG_ROWS = *ROWS, "B=1,T=3,C=2112", "B=1,T=5,C=4096"


@ladder("B=8,T=1024,C=2048", *LONG_ROWS, fp32="residual rstd", compiled_for_C=True,
        args="out rstd copy residual branch weight eps N C", versions=(
    Version("a thread a row", "rmsnorm_forward1", "N", threads=(32, 64, 128, 256)),
    Version("a warp a row", "rmsnorm_forward2", "N"),
    Version("16 bytes a lane", "rmsnorm_forward3", "N"),
    Version("the row in registers: the trainer's", "residual_rmsnorm_forward", "N", threads=(),
            args="out rstd copy residual branch weight eps N"),
), torch=lambda torch, x: lambda: torch.nn.functional.rms_norm(
    x.residual.add_(x.branch).to(x.weight.dtype), x.weight.shape, x.weight, x.eps))
def rmsnorm_forward(a, draw):
    """residual (N,C) += branch, copy = residual as a real, and out = residual * rstd * weight, with rstd of each row"""
    a.N, a.eps = a.B * a.T, 1e-5
    a.residual, a.branch, a.weight = draw.fp32(a.N, a.C), draw(a.N, a.C), draw(a.C)
    residual = f32(a.residual + a.branch)
    rstd = 1 / np.sqrt(np.square(residual).mean(-1) + a.eps)
    return dict(residual=residual, copy=residual, out=residual * rstd[:, None] * a.weight, rstd=rstd)


def rmsnorm_backward_in_registers(device, a):
    device.launch("rmsnorm_backward3", a.blocks, a.dinp, a.partials, a.dout, a.inp, a.weight, a.rstd, a.N, a.C,
                  threads=a.threads, shared=a.threads // 32 * 4 * a.C)
    device.launch("add_partials", a.C, a.dweight, None, None, a.partials, a.blocks, a.C)


def trainers_rmsnorm_backward(device, a):
    device.launch("rmsnorm_backward", a.blocks, a.dinp, a.partials, a.dout, a.inp, a.weight, a.rstd, a.N,
                  shared=96 * 1024)
    device.launch("add_partials", a.C, a.dweight, None, None, a.partials, a.blocks, a.C)


@ladder("B=8,T=1024,C=2048", *LONG_ROWS, fp32="rstd dweight partials", args="dinp dweight dout inp weight rstd N C",
        compiled_for_C=True, versions=(
    Version("a thread a row, with atomics", "rmsnorm_backward1", "N", threads=(32, 64, 128, 256)),
    Version("a warp a row, atomics in shared memory", "rmsnorm_backward2", "blocks", threads=(128, 256, 512),
            shared="4*C", more=dict(blocks=BLOCKS)),
    Version("16 bytes a lane, sums in registers, C up to 1,024", rmsnorm_backward_in_registers, threads=(128, 256),
            more=dict(blocks=BLOCKS), scratch=lambda a: dict(partials=(a.blocks, a.C)), fits=lambda a: a.C <= 1024),
    Version("several warps a row, rows by asynchronous copies: the trainer's", trainers_rmsnorm_backward, threads=(),
            more=dict(blocks=(132, 256)), scratch=lambda a: dict(partials=(a.blocks, a.C))),
))
def rmsnorm_backward(a, draw):
    """dinp (N,C) and dweight (C) += the gradients behind dout, of rmsnorm"""
    a.N = a.B * a.T
    a.inp, a.dout, a.dinp = draw(a.N, a.C), draw(a.N, a.C), draw(a.N, a.C)
    a.weight, a.dweight = draw(a.C), draw.fp32(a.C)
    a.rstd = f32(1 / np.sqrt(np.square(a.inp).mean(-1) + 1e-5))
    norm, dnorm = a.inp * a.rstd[:, None], a.dout * a.weight
    dinp = a.rstd[:, None] * (dnorm - norm * (dnorm * norm).mean(-1, keepdims=True))
    return dict(dinp=a.dinp + dinp, dweight=a.dweight + (a.dout * norm).sum(0))


def angles(a):
    """Those that each pair of channels turns by at each position (T,HS/2), rounded to fp32 where PyTorch rounds."""
    exponent = np.float32(np.arange(0, a.HS, 2)) / np.float32(a.HS)
    frequency = np.float32(1) / np.float32(a.theta ** np.float64(exponent))
    return np.float64(np.float32(np.arange(a.T))[:, None] * frequency)


def cosines_and_sines(a):
    """(T,HS), of a pair side by side."""
    return np.stack([f(angles(a)) for f in (np.cos, np.sin)], -1).reshape(a.T, a.HS)


@ladder("T=8192,HS=64", "T=1,HS=64", "T=33,HS=32", "T=5000,HS=128", fp32="table", traffic=lambda a: 4 * a.T * a.HS,
        versions=(
    Version("a thread a pair", "rope_table1", "T*HS // 2", args="table theta T"),
    Version("a block computes the powers once: the trainer's", "rope_table", "T*HS // 2", args="table theta factor T"),
),
        held_back="they are so few that the launch and a block's powers take longer")
def rope_table(a, draw):
    """table (T,HS) = the cosines and sines of t / theta^(2i/HS)"""
    a.theta, a.factor = 500000.0, 1.0
    return dict(table=cosines_and_sines(a))


TURNS = [f"{shape},apart={apart}" for shape, HS in (
    ("B=1,T=1,NH=1,NKV=1,HS=64", 64), ("B=2,T=33,NH=6,NKV=2,HS=32", 32), ("B=1,T=70,NH=4,NKV=1,HS=80", 80))
    for apart in (1, HS // 2)]


def turned(a, draw, sign):
    """Draw qkv (B,T,NH+2NKV,HS), and return it with its queries and keys turned. The channels of a pair are `apart`: 1,
    or HS/2. Raises UserError."""
    if a.apart not in (1, a.HS // 2):
        raise UserError(f"expected apart = {a.apart} to be 1 or HS/2 = {a.HS // 2}")
    a.N, a.heads, a.row, a.theta = a.B * a.T, a.NH + a.NKV, (a.NH + 2 * a.NKV) * a.HS, 500000.0
    a.half, a.table, x = int(a.apart > 1), f32(cosines_and_sines(a)), draw(a.B, a.T, a.NH + 2 * a.NKV, a.HS)
    pairs = (2, a.HS // 2) if a.half else (a.HS // 2, 2)
    left, right = np.moveaxis(x[:, :, : a.heads].reshape(a.B, a.T, a.heads, *pairs), 3 if a.half else 4, 0)
    cosine, sine = a.table[:, None, ::2], sign * a.table[:, None, 1::2]
    both = np.stack([left * cosine - right * sine, left * sine + right * cosine], 3 if a.half else 4)
    return x, np.concatenate([both.reshape(a.B, a.T, a.heads, a.HS), x[:, :, a.heads :]], 2)


@ladder("B=8,T=1024,NH=32,NKV=8,HS=64,apart=1", *TURNS, fp32="table", args="qkv table N T heads row half",
        traffic=lambda a: 2 * a.N * a.heads * a.HS * a.itemsize, versions=(
    Version("a thread a pair, which computes its angle", "rope_forward1", "N*heads*HS // 2",
            args="qkv theta N T heads row half"),
    Version("a table of cosines and sines", "rope_forward2", "N*heads*HS // 2"),
    Version("16 bytes a lane: the trainer's", "rope_forward", "N*heads*HS"),
))
def rope_forward(a, draw):
    """the queries and keys of qkv (B,T,NH+2NKV,HS), in place, pairs of channels turned by an angle for each position"""
    a.qkv, expected = turned(a, draw, 1)
    return dict(qkv=expected)


@ladder("B=8,T=1024,NH=32,NKV=8,HS=64,apart=1", *TURNS, fp32="table", args="dqkv table N T heads row half",
        traffic=lambda a: 2 * a.N * a.heads * a.HS * a.itemsize, versions=(
    Version("a thread a pair", "rope_backward1", "N*heads*HS // 2"),
    Version("16 bytes a lane: the trainer's", "rope_backward", "N*heads*HS"),
))
def rope_backward(a, draw):
    """dqkv (B,T,NH+2NKV,HS), in place, with queries and keys turned back"""
    a.dqkv, expected = turned(a, draw, -1)
    return dict(dqkv=expected)


ROWS_H = "B=1,T=1,H=32", "B=3,T=9,H=96", "B=1,T=5,H=2048"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@ladder("B=8,T=1024,H=8192", *ROWS_H, args="out inp N H", versions=(
    Version("a thread a number", "swiglu_forward1", "N*H"),
    Version("16 bytes a lane: the trainer's", "swiglu_forward", "N*H"),
), torch=lambda torch, x: lambda: torch.nn.functional.silu(x.inp[:, x.H :]) * x.inp[:, : x.H])
def swiglu_forward(a, draw):
    """out (N,H) = up * silu(gate), the halves of inp (N,2H)"""
    a.N = a.B * a.T
    a.inp = draw(a.N, 2 * a.H, scale=3)
    up, gate = np.split(a.inp, 2, -1)
    return dict(out=up * gate * sigmoid(gate))


@ladder("B=8,T=1024,H=8192", *ROWS_H, args="dinp dout inp N H", versions=(
    Version("a thread a number", "swiglu_backward1", "N*H"),
    Version("16 bytes a lane: the trainer's", "swiglu_backward", "N*H"),
))
def swiglu_backward(a, draw):
    """dinp (N,2H) of up * silu(gate)"""
    a.N = a.B * a.T
    a.inp, a.dout = draw(a.N, 2 * a.H, scale=3), draw(a.N, a.H)
    up, gate = np.split(a.inp, 2, -1)
    s = sigmoid(gate)
    return dict(dinp=np.concatenate([a.dout * gate * s, a.dout * up * s * (1 + gate * (1 - s))], -1))


GROUPS = ("B=1,T=1,NH=1,NKV=1,HS=64", "B=2,T=33,NH=6,NKV=2,HS=64", "B=1,T=130,NH=4,NKV=1,HS=64",
          "B=1,T=70,NH=3,NKV=3,HS=64")
LONG_GROUPS = "B=1,T=150,NH=4,NKV=2,HS=128"


def set_groups(a):
    """The sizes of grouped heads. Raises UserError."""
    if a.NH % a.NKV:
        raise UserError(f"expected NKV = {a.NKV} to divide NH = {a.NH}")
    a.N = a.B * a.T


def repeat_heads(a, inp):
    """(B,T,3,NH,HS) of inp (B,T,NH+2NKV,HS)."""
    kv = inp[:, :, a.NH :].reshape(a.B, a.T, 2, a.NKV, a.HS).repeat(a.NH // a.NKV, 3)
    return np.concatenate([inp[:, :, None, : a.NH], kv], 2)


@ladder("B=8,T=1024,NH=12,NKV=4,HS=64", *GROUPS, args="out inp N NH NKV HS", versions=(
    Version("a thread a number", "repeat_kv_forward1", "N*3*NH*HS"),
    Version("16 bytes a lane", "repeat_kv_forward2", "3*NH*HS, N"),
))
def repeat_kv_forward(a, draw):
    """out (B,T,3,NH,HS) = inp (B,T,NH+2NKV,HS) with each key and value head NH/NKV times"""
    set_groups(a)
    a.inp = draw(a.B, a.T, a.NH + 2 * a.NKV, a.HS)
    return dict(out=repeat_heads(a, a.inp))


def repeat_kv_backward_with_atomics(device, a):
    device.zero(a.dinp)
    device.launch("repeat_kv_backward1", a.N * 3 * a.NH * a.HS, a.dinp, a.dout, a.N, a.NH, a.NKV, a.HS,
                  threads=a.threads)


@ladder("B=8,T=1024,NH=12,NKV=4,HS=64", *GROUPS, args="dinp dout N NH NKV HS", versions=(
    Version("a thread a number of dout, with atomics", repeat_kv_backward_with_atomics, dtypes=("fp32",)),
    Version("a thread a number of dinp", "repeat_kv_backward2", "N*(NH + 2*NKV)*HS"),
    Version("16 bytes a lane", "repeat_kv_backward3", "(NH + 2*NKV)*HS, N"),
))
def repeat_kv_backward(a, draw):
    """dinp (B,T,NH+2NKV,HS) = dout (B,T,3,NH,HS), summed over the copies of a head"""
    set_groups(a)
    a.dout = draw(a.B, a.T, 3, a.NH, a.HS)
    dkv = a.dout[:, :, 1:].reshape(a.B, a.T, 2 * a.NKV, a.NH // a.NKV, a.HS).sum(3)
    return dict(dinp=np.concatenate([a.dout[:, :, 0], dkv], 2))


def trainers_grouped_attention(device, a):
    launch_trainers(device, a, a.NKV, "attention_forward", a.out, a.lse, a.inp)


def repeat_and_attend(device, a):
    device.launch("repeat_kv_forward2", (3 * a.NH * a.HS, a.N), a.qkv, a.inp, a.N, a.NH, a.NKV, a.HS)
    trainers_attention(device, a)


def torch_grouped_attention(torch, x):
    q, k, v = (t.transpose(1, 2) for t in x.inp.split([x.NH, x.NKV, x.NKV], 2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@ladder("B=8,T=1024,NH=12,NKV=4,HS=64", *GROUPS, LONG_GROUPS, fp32="lse", flops=lambda a: 4 * pairs_seen(a) * a.HS,
        beside=("repeat_kv_forward",), limits=ATTENTION_LIMITS, versions=(
    Version("a thread a query", "gqa_forward1", "B*NH*T", threads=(64, 256), args="out inp scale B T NH NKV"),
    Version("repeat_kv, then the trainer's attention", repeat_and_attend, threads=(), dtypes=ALL,
            scratch=lambda a: dict(lse=(a.B, a.NH, a.T), qkv=(a.B, a.T, 3, a.NH, a.HS))),
    Version("each block finds its group's keys: the trainer's", trainers_grouped_attention, threads=(), dtypes=ALL,
            scratch=lambda a: dict(lse=(a.B, a.NH, a.T))),
), torch=torch_grouped_attention)
def gqa_forward(a, draw):
    """out (B,T,NH,HS) = causal softmax attention of inp (B,T,NH+2NKV,HS), NH/NKV heads to each key and value"""
    set_groups(a)
    a.scale, a.inp = a.HS**-0.5, draw(a.B, a.T, a.NH + 2 * a.NKV, a.HS)
    q, k, v = split_heads(a, repeat_heads(a, a.inp).reshape(a.B, a.T, -1))
    return dict(out=join_heads(a, in_parts(functools.partial(attention, "softmax"), q, k, v, step=1)))


def grouped_backward_with_atomics(device, a):
    device.zero(a.dinp)
    device.launch("gqa_backward1", a.B * a.NH * a.T, a.dinp, a.dout, a.out, a.inp, a.lse, a.scale, a.B, a.T, a.NH,
                  a.NKV, threads=a.threads)


def grouped_backward_by_rows(device, a):
    inputs, sizes = (a.dout, a.out, a.inp, a.lse, a.delta), (a.scale, a.B, a.T, a.NH, a.NKV)
    device.launch("gqa_backward2_q", a.B * a.NH * a.T, a.dinp, *inputs, *sizes, threads=a.threads)
    device.launch("gqa_backward2_kv", a.B * a.NKV * a.T, a.dinp, *inputs, *sizes, threads=a.threads)


def trainers_grouped_backward(device, a):
    launch_trainers(device, a, a.NKV, "attention_backward_q", a.dinp, a.delta, a.dout, a.out, a.inp, a.lse)
    launch_trainers(device, a, a.NKV, "attention_backward_kv", a.dinp, a.dout, a.inp, a.lse, a.delta)


def torch_grouped_backward(torch, x):
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in x.inp.split([x.NH, x.NKV, x.NKV], 2))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dout = x.dout.view(x.B, x.T, x.NH, x.HS).transpose(1, 2)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


@ladder("B=8,T=1024,NH=12,NKV=4,HS=64", *GROUPS, LONG_GROUPS, fp32="lse delta",
        flops=lambda a: 10 * pairs_seen(a) * a.HS, limits=ATTENTION_LIMITS | dict(tf32=1e-3), versions=(
    Version("a thread a query, with atomics", grouped_backward_with_atomics, threads=(64, 256), dtypes=("fp32",)),
    Version("a thread a query, or a key and a value", grouped_backward_by_rows, threads=(64, 128),
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
    Version("a block's keys meet the queries of all heads of a group: the trainer's", trainers_grouped_backward,
            threads=(), dtypes=ALL, scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
), torch=torch_grouped_backward)
def gqa_backward(a, draw):
    """dinp (B,T,NH+2NKV,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
    set_groups(a)
    a.inp, a.dout = draw(a.B, a.T, a.NH + 2 * a.NKV, a.HS), draw(a.B, a.T, a.NH * a.HS)
    dq, *dkv = attention_gradients(a, draw, repeat_heads(a, a.inp).reshape(a.B, a.T, -1))
    dkv = [x.reshape(a.B, a.T, a.NKV, a.NH // a.NKV, a.HS).sum(3) for x in dkv]
    return dict(dinp=np.concatenate([dq.reshape(a.B, a.T, a.NH, a.HS), *dkv], 2))
