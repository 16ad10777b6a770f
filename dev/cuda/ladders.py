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
from test_gpt2 import (ATTENTION_LIMITS, attention, bf16, dattention, f32, heads, transposed)
from train_gpt2 import (attention_launch)

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
# Layernorm, and the residual stream before it


BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


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


def trainers_attention_backward(device, a):
    launch_trainers(device, a, a.NH, "attention_backward_q", a.dqkv, a.delta, a.dout, a.out, a.qkv, a.lse)
    launch_trainers(device, a, a.NH, "attention_backward_kv", a.dqkv, a.dout, a.qkv, a.lse, a.delta)


def torch_attention_backward(torch, x):
    q, k, v = (t.detach().requires_grad_() for t in x.qkv.view(x.B, x.T, 3, x.NH, x.HS).permute(2, 0, 3, 1, 4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    dout = x.dout.view(x.B, x.T, x.NH, x.HS).transpose(1, 2)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


@ladder("B=8,T=1024,NH=12,HS=64", *HEADS, LONG_HEADS, fp32="lse delta",
        flops=lambda a: 10 * pairs_seen(a) * a.HS, limits=ATTENTION_LIMITS | dict(tf32=1e-3), versions=(
    Version("a thread a query, with atomics", attention_backward_with_atomics, threads=(64, 256), dtypes=("fp32",)),
    Version("a thread a row of dq, dk or dv", attention_backward_without_atomics, threads=(64, 128),
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
    Version("tensor cores, by mma.sync or wgmma: the trainer's", trainers_attention_backward, threads=(), dtypes=ALL,
            scratch=lambda a: dict(delta=(a.B, a.NH, a.T))),
), torch=torch_attention_backward)
def attention_backward(a, draw):
    """dqkv (B,T,3,NH,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
    a.qkv, a.dout = draw(a.B, a.T, 3 * a.NH * a.HS), draw(a.B, a.T, a.NH * a.HS)
    return dict(dqkv=np.concatenate(attention_gradients(a, draw, a.qkv), -1))


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
    device.launch("gqa_forward2_repeat", (3 * a.NH * a.HS, a.N), a.qkv, a.inp, a.NH, a.NKV)
    trainers_attention(device, a)


def torch_grouped_attention(torch, x):
    q, k, v = (t.transpose(1, 2) for t in x.inp.split([x.NH, x.NKV, x.NKV], 2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@ladder("B=8,T=1024,NH=12,NKV=4,HS=64", *GROUPS, LONG_GROUPS, fp32="lse", flops=lambda a: 4 * pairs_seen(a) * a.HS,
        limits=ATTENTION_LIMITS, versions=(
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
