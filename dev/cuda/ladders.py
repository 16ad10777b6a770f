"""The kernels of the lab: for each its shapes, its versions, and what NumPy says.

A kernel is a function under @ladder. Given the sizes in a namespace `a`, it puts the kernel's inputs there, numbers from
a seeded generator in float64 or integers, rounded to what the device will store, and returns {output: what NumPy says
in float64}; NaN is any value. An input that is also an output is updated in place. The decorator's rows are

    shape, checks       the shape to time, and small odd ones to check
    args                the names in `a` of the kernel's arguments, if most versions have the same
    versions            a Version each, the last of them the best: the trainer's own where the trainer has the kernel
    fp32                the arrays that are fp32 in every dtype; the others are real, as kernels.cu calls it
    flops, traffic      what it has to compute, and its bytes if they are not all of the inputs and outputs, once each
    limits              {dtype: largest relative error}, if not that of a kernel in test_gpt2.py
    torch               what PyTorch would do, for comparison: (torch, tensors) -> a function

To add a version: a function in the kernel's .cu file, and a row here.
"""
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, NamedTuple

import numpy as np

from test_gpt2 import (ATTENTION_LIMITS, attention, bf16, cross_entropy, dattention, dcross_entropy, dgelu, dlayernorm,
                       f32, gelu, heads, layernorm, moments, softmax, transposed)
from train_gpt2 import BLOCK, COLUMNS, FP32_COLUMNS, LAUNCH, NUMBER, WARP, runs_of_equal


def THREAD(threads, W): return threads  # the items of a block when each thread takes one; the others are the trainer's


class Version(NamedTuple):
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (launch, a) that launches several
    unit: Callable = None  # how a kernel is shared out, and over how many items: sizes to multiply, as in "N*C"
    items: str = None
    threads: tuple = (64, 128, 256, 512, 1024)  # of a block, to try
    args: str = None
    shared: Callable = None  # a -> bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # what else can be chosen, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = None
    library: str = ""  # its name, if that is what it calls
    fits: Callable = None  # a -> whether it does these sizes

    @property
    def tries(self):
        return {"threads": self.threads, **self.more}

    def launch(self, launch, a, ladder):
        if callable(self.run):
            self.run(launch, a)
            return
        args = [getattr(a, name) for name in (self.args or ladder.args).split()]
        items = math.prod(getattr(a, name) for name in self.items.split("*"))
        launch(self.run, self.unit, items, *args, shared=self.shared(a) if self.shared else 0)


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
    limits: dict = None
    torch: Callable = None


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


def in_parts(f, *arrays):
    """f over the arrays' first axis, in parts and on all cores: what is large is in the cache, and no temporary is as
    large as the arrays. f returns an array or a tuple of them, whose first axis is the same."""
    step = max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    return np.concatenate(results) if isinstance(results[0], np.ndarray) else [*map(np.concatenate, zip(*results))]


ROWS = ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")  # odd shapes of (B,T,C)


# ---------------------------------------------------------------------------------------------------------------------
# Layernorm


@ladder("B=8,T=1024,C=768", *ROWS, fp32="mean rstd", args="out mean rstd inp weight bias N C", versions=(
    Version("a thread a row", "layernorm_forward1", THREAD, "N", threads=(32, 64, 128, 256)),
    Version("three kernels: means, deviations, and a thread a number", lambda launch, a: (
        launch("layernorm_forward2_mean", BLOCK, a.N, a.mean, a.inp, a.C),
        launch("layernorm_forward2_rstd", BLOCK, a.N, a.rstd, a.mean, a.inp, a.C),
        launch("layernorm_forward2_normalize", THREAD, a.N * a.C, a.out, a.mean, a.rstd, a.inp, a.weight, a.bias, a.N,
               a.C)), threads=(128, 256, 512)),
    Version("one kernel, a warp a row", "layernorm_forward3", WARP, "N"),
    Version("16 bytes a lane: the trainer's", "layernorm_forward", WARP, "N"),
), torch=lambda torch, x: lambda: torch.nn.functional.layer_norm(x.inp, x.inp.shape[-1:], x.weight, x.bias))
def layernorm_forward(a, draw):
    """out (N,C) = (inp - mean) * rstd * weight + bias, with mean and rstd of each row"""
    a.N = a.B * a.T
    a.inp, a.weight, a.bias = draw(a.N, a.C), draw(a.C), draw(a.C)
    mean, rstd = moments(a.inp)
    return dict(out=layernorm(a.inp, a.weight, a.bias), mean=mean[:, 0], rstd=rstd[:, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


def matmul_by_library(launch, a):
    launch.device.matmul(a.out, a.inp, a.weight.T, bias=a.bias)


def tiles_of(launch, a, name, size, shared=0):
    """Blocks of size x size of out (N,OC), those of a row of blocks next to each other."""
    launch(name, BLOCK, (-(-a.OC // size), -(-a.N // size)), a.out, a.inp, a.weight, a.bias, a.N, a.C, a.OC,
           shared=shared)


MATMUL_LIMITS = {"fp32": 2e-5, "tf32": 5e-4, "bf16": 2.2e-3}


@ladder("B=8,T=1024,C=768,OC=3072", "B=1,T=1,C=32,OC=1", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=257",
        flops=lambda a: 2 * a.N * a.C * a.OC, limits=MATMUL_LIMITS, versions=(
    Version("a thread an element", lambda launch, a: launch(
        "matmul_forward1", THREAD, a.N * a.OC, a.out, a.inp, a.weight, a.bias, a.N, a.C, a.OC), threads=(256, 1024)),
    Version("tiles of 32 x 32 in shared memory", lambda launch, a: tiles_of(launch, a, "matmul_forward2", 32),
            threads=(1024,)),
    Version("8 x 8 elements a thread, in registers", lambda launch, a: tiles_of(launch, a, "matmul_forward3", 128),
            threads=(256,)),
    Version("16 bytes a load, and the next tile on its way", lambda launch, a: tiles_of(
        launch, a, "matmul_forward4", 128), threads=(256,)),
    Version("tensor cores, by mma.sync", lambda launch, a: tiles_of(
        launch, a, "matmul_forward5", 128, shared=2 * 256 * (128 // a.itemsize + 8) * a.itemsize), threads=(256,),
        dtypes=("fp32", "tf32", "bf16")),
    Version("cuBLAS, as the trainer does", matmul_by_library, threads=(1,), dtypes=("fp32", "tf32", "bf16"),
            library="cuBLAS"),
))
def matmul_forward(a, draw):
    """out (N,OC) = inp (N,C) weight' (OC,C) + bias (OC)"""
    a.N = a.B * a.T
    a.inp, a.weight, a.bias = draw(a.N, a.C), draw(a.OC, a.C), draw(a.OC)
    return dict(out=a.inp @ a.weight.T + a.bias)
