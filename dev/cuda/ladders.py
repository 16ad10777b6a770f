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
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from test_gpt2 import bf16, f32

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
