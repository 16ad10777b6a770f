"""The inputs of a kernel's problem: seeded numbers, rounded as the device stores them."""
import math
import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dev.common.bf16 import to_bf16
from train_gpt2 import BF16, to_float


def stored(values, dtype):
    """An array rounded to a dtype of the device."""
    return to_bf16(values) if dtype == BF16 != values.dtype else values.astype(dtype)


def bf16(x):
    """x rounded to the 8 bits of a bfloat16's mantissa, to nearest with ties to even, but in float64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(256 * mantissa), exponent - 8)


def f32(x):
    """x rounded to fp32, but in float64: the input of a kernel, ready for a formula."""
    return np.float32(x).astype(np.float64)


def as_stored(truth, dtype):
    """A truth rounded to a dtype of the device, but in float64; ANY stays ANY."""
    with np.errstate(over="ignore"):
        return np.where(truth == ANY, ANY, to_float(stored(truth, dtype)).astype(np.float64))


POOL = 2**22 + 1  # numbers drawn for an array; a larger one repeats them, and its rows still differ


class Draw:
    """Seeded inputs. draw(*shape) gives normal numbers, rounded as real stores them, in float64."""

    def __init__(self, in_bf16, seed=1337):
        self.rng, self.in_bf16 = np.random.default_rng(seed), in_bf16
        self.real = bf16 if in_bf16 else f32  # rounds to what real stores

    def pool(self, *shape):
        """The normal numbers of an array, but at most POOL of them."""
        return self.rng.standard_normal(min(math.prod(shape), POOL))

    def normal(self, *shape):
        return np.resize(self.pool(*shape), shape)

    def __call__(self, *shape, scale=1.0):
        return np.resize(self.real(scale * self.pool(*shape)), shape)

    def fp32(self, *shape, scale=1.0):
        return np.resize(f32(scale * self.pool(*shape)), shape)

    def rows(self, N, C):
        """(N,C) in fp32, hard for a norm: rows of deviation 10 to 0.001, where an eps of 1e-5 counts; every third
        row has a mean of 50 deviations, so that E[x^2] - E[x]^2 cancels."""
        deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
        return f32(deviation * (self.normal(N, C) + mean))

    def words(self, V, *shape):
        return self.rng.integers(V, size=shape, dtype=np.int32)


def in_parts(f, *arrays, step=None):
    """f over the arrays' first axis, `step` of it at a time and on all cores, so that temporaries stay small. f
    returns an array, or a tuple of arrays, with the same first axis."""
    step = step or max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    return np.concatenate(results) if isinstance(results[0], np.ndarray) else [*map(np.concatenate, zip(*results))]


ANY = 1.5e300  # in a truth: any value is right. No fp32 is as large.
COPIED = -1.0  # as the size of a sum's terms: this number is copied from an input, and must have its bits
ODD_SHAPES = ("B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")

GROW = "B T C OC V H n NH NKV".split()  # the sizes that a check may raise; Vp follows V


def larger(checks, text):
    """Sizes that are larger than those of all checks, [{name: number}], and drawn by a text: the same text gives the
    same sizes. A size that is the same in all checks stays. Steps are those of the checks, so that C stays a multiple
    of 32; a size that goes by steps of 1 becomes odd."""
    rng = random.Random(zlib.crc32(text.encode()))
    drawn = dict(max(checks, key=lambda sizes: math.prod(sizes.get(name, 1) for name in GROW)))
    every = {name: [sizes[name] for sizes in checks if name in sizes] for name in drawn}
    for name in (name for name in GROW if name in drawn and len(set(every[name])) > 1 and name != "B"):
        # a whole vocabulary in each row takes too long: its check has few rows
        step, most = math.gcd(*every[name]), max(size for size in every[name] if size < 10000)
        drawn[name] = most + step * rng.randint(1, max(2, min(most // (8 * step), 500)))
        drawn[name] += step == 1 and drawn[name] % 2 == 0
    if "NKV" in drawn:  # each key head has as many query heads
        drawn["NKV"] = max(every["NKV"]) + rng.randint(0, 1)
        drawn["NH"] = drawn["NKV"] * -(-(max(every["NH"]) + 1) // drawn["NKV"])
    if "Vp" in drawn:
        step = math.gcd(*every["Vp"])
        drawn["Vp"] = -(-drawn["V"] // step) * step + step * rng.randint(0, 128 // step)
    if "B" in drawn:
        rows = max(sizes["B"] * sizes["T"] for sizes in checks)
        drawn["B"] = 1 if {"NH", "V"} & drawn.keys() else rng.randint(1, 2)
        drawn["T"] = max(drawn["T"], rows // drawn["B"] + rng.randint(1, 9))
    return drawn
