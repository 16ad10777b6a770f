"""Compare llama3.cu with independent truths: formulas in NumPy.

    python dev/llama3/test_llama3.py                       # everything, on the CPU, and on a GPU if there is one
    python dev/llama3/test_llama3.py --kernels             # only the kernels, for a sanitizer
    python dev/llama3/test_llama3.py --only rope_forward   # only one of them, for a debugger

It prints a line a tensor, and then `N passed, N failed`. The exit status is 1 if any failed. Flags, limits and the way
a kernel is launched are test_gpt2.py's, which tests the kernels of kernels.cu.
"""
import functools
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(TOP))
from prepro_tinyshakespeare import BF16, UserError, read_kernels, to_float  # noqa: E402

import numpy as np  # noqa: E402  (after prepro_tinyshakespeare, which has said how its threads are to wait)

import test_gpt2  # noqa: E402  (for what changes there: rng, and the device under test)
from test_gpt2 import (BF16_LIMIT, EXACT, KERNEL_LIMIT, as_real, check, each_device, f32, finite_difference,  # noqa: E402
                       kernel, nan32, normal, normal32, read_flags, run, stored, summary, test_kernels)
from train_gpt2 import PARTIAL_ROWS, Config  # noqa: E402


LLAMA = TOP / "dev/llama3/llama3.cu"


class Config3(Config):
    SOURCES = (*Config.SOURCES, LLAMA)


def rmsnorm_backward_launch(device, N):
    """(blocks, bytes of shared memory) of rmsnorm_backward."""
    return min(N, 2 * device.multiprocessors, PARTIAL_ROWS), 96 * 1024


# ---- The formulas. df(dout, x) is the gradient of sum(dout * f(x)), and a list of them if there are several x.


def root(x, eps):  # (N,C) -> rstd (N,1)
    return 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def rmsnorm(eps, x, weight):  # (N,C), (C) -> (N,C)
    return x * root(x, eps) * weight


def drmsnorm(eps, dout, x, weight):
    rstd, dnorm = root(x, eps), dout * weight
    return [rstd * (dnorm - x * rstd**2 * np.mean(dnorm * x, -1, keepdims=True)), (dout * x * rstd).sum(0)]


def frequencies(HS, theta, scaled):
    """Radians a token of each pair of channels (HS/2), rounded to fp32 where PyTorch rounds. Llama 3.1's scaling goes
    by wavelengths, in tokens."""
    exponent = np.float32(np.arange(0, HS, 2)) / np.float32(HS)
    frequency = np.float32(1) / np.float32(np.float64(np.float32(theta)) ** exponent)
    wavelength = 2 * np.pi / np.float64(frequency)
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    return np.float32((1 - smooth) * frequency / 8 + smooth * frequency) if scaled else frequency


def rotate(x, angle, half):
    """x (B,T,heads,HS) with its pairs of channels as complex numbers, each turned by its angle (T,HS/2)."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2) if half else x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle[:, None])
    return np.stack([turned.real, turned.imag], -2 if half else -1).reshape(x.shape)


def swiglu(inp):  # (N,2H) -> (N,H)
    up, gate = np.split(inp, 2, -1)
    return up * gate / (1 + np.exp(-gate))


def dswiglu(dout, inp):
    up, gate = np.split(inp, 2, -1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return [np.concatenate([dout * gate * sigmoid, dout * up * (sigmoid + gate * sigmoid * (1 - sigmoid))], -1)]


def finite_differences():
    yield finite_difference("rmsnorm", *(functools.partial(f, 0.1) for f in (rmsnorm, drmsnorm)), normal(5, 32),
                            normal(32))
    yield finite_difference("swiglu", swiglu, dswiglu, 3 * normal(5, 64))


# ---- Each kernel against its formula. The sizes of each run stand over its test.

KERNELS = {}  # name: (test, runs)
NC = (1, 32), (27, 96), (40, 768), (9, 1600), (7, 2112), (1, 4096), (11, 4096), (5, 8192)
# C and NH: for each C of NC, and for heads of 2, 6, 32, 64, 128 and 80 channels.
COMPILED_FOR = (32, 16), (96, 16), (768, 24), (1600, 25), (2112, 33), (4096, 32), (8192, 64), (160, 2)


@kernel(*((*sizes, eps, with_branch) for sizes in NC for eps, with_branch in ((1e-5, 0), (1e-3, 1))), tests=KERNELS)
def residual_rmsnorm_forward(launch, N, C, eps, with_branch):
    # Rows of deviation 10 to 0.001, where eps counts; every third has a mean of 50 deviations.
    deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
    residual, branch = f32(deviation * (normal32(N, C) + mean)), as_real(deviation * normal(N, C))
    x, weight = f32(residual + branch * with_branch), normal(C)
    out, rstd, copy, found = launch(N, (N, C), nan32(N, 1), (N, C), np.float32(residual),
                                    branch if with_branch else None, weight, eps, N)
    yield "residual", found, x, EXACT
    yield "copy", copy, x, EXACT
    yield "out", out, rmsnorm(eps, x, weight)
    yield "rstd", rstd / root(x, eps), np.ones((N, 1))


@kernel(*NC, tests=KERNELS)
def rmsnorm_again(launch, N, C):
    inp, rstd, weight = normal(N, C), normal32(N, 1), normal(C)
    yield "out", *launch(N * C, (N, C), inp, np.float32(rstd), weight, N, C), inp * rstd * weight


@kernel(*((*sizes, blocks) for sizes in (*NC, (300, 96), (70, 1600), (37, 4096), (23, 8192)) for blocks in (None, 3)),
        tests=KERNELS)
def rmsnorm_backward(launch, N, C, blocks):
    """With the trainer's own grid, or with another, in which a block may have no row."""
    own_blocks, shared = rmsnorm_backward_launch(test_gpt2.under_test, N)
    blocks = blocks or own_blocks
    inp, dresidual, weight = as_real(normal(N, C) + 3), normal(N, C), as_real(1 + normal(C))
    dout = as_real(normal(N, C) + inp)  # so that dnorm * norm has an average
    found, partials = launch(blocks, dresidual, nan32(blocks, C), dout, inp, weight, np.float32(root(inp, 1e-5)), N,
                             shared=shared)
    dx, dweight = drmsnorm(1e-5, dout, inp, weight)
    yield "dresidual", found, dresidual + dx
    yield "dweight", partials.sum(0), dweight


@kernel(*((T, HS, theta, scaled) for theta, scaled in ((5e5, 0), (5e5, 1), (1e4, 0)) for T, HS in (
    (1, 2), (7, 2), (33, 6), (9000, 32), (8192, 64), (4097, 80), (9001, 128))), tests=KERNELS)
def rope_table(launch, T, HS, theta, scaled):
    angle = np.float32(np.arange(T))[:, None] * frequencies(HS, theta, scaled)  # an fp32, whose cosine is exact
    expected = np.stack([f(np.float64(angle)) for f in (np.cos, np.sin)], -1).reshape(T, HS)
    yield "table", *launch(T * HS // 2, nan32(T, HS), theta, scaled, T), expected, 1e-6


ROPE = [(*sizes, half) for half in (0, 1) for sizes in (
    (70, 1, 1, 1, 2), (2, 5, 5, 5, 2), (3, 7, 3, 1, 6), (2, 33, 6, 2, 32), (1, 70, 8, 1, 64), (2, 9, 2, 1, 80),
    (3, 17, 4, 2, 128))]


def rope_kernels(direction, launch, B, T, NH, NKV, HS, half):
    """Queries and keys turn by an angle for each position and pair, here any angle. Values stay, bit for bit."""
    sizes = B * T, T, NH + NKV, (NH + 2 * NKV) * HS, half
    turned = B * T * (NH + NKV) * HS
    qkv, angle = normal(B, T, NH + 2 * NKV, HS), test_gpt2.rng.uniform(-np.pi, np.pi, (T, HS // 2))
    table = np.float32(np.stack([np.cos(angle), np.sin(angle)], -1).reshape(T, HS))
    [found] = launch(turned, qkv, table, *sizes)
    expected = rotate(qkv[:, :, : NH + NKV], angle if direction == "forward" else -angle, half)
    yield "q, k", found[:, :, : NH + NKV], expected
    yield "v untouched", found[:, :, NH + NKV :], qkv[:, :, NH + NKV :], EXACT
    [back] = test_gpt2.launch("rope_backward" if direction == "forward" else "rope_forward", turned, found, table,
                              *sizes)
    yield "there and back", back, qkv, 2 * BF16_LIMIT if back.dtype == BF16 else KERNEL_LIMIT


for direction in ("forward", "backward"):
    KERNELS[f"rope_{direction}"] = functools.partial(rope_kernels, direction), ROPE


def swiglu_kernels(direction, launch, N, H, gates):
    low, high = {"small": (-4, 4), "saturated": (-100, 100), "left": (-20, -1), "right": (1, 20)}[gates]
    gate = test_gpt2.rng.uniform(low, high, (N, H))
    if gates == "saturated":
        gate = np.where(gate < 0, low, high)
    inp, dout = np.concatenate([normal(N, H), as_real(gate)], -1), normal(N, H)
    if direction == "forward":
        yield "out", *launch(N * H, (N, H), inp, N, H), swiglu(inp)
    else:
        [found], [expected] = launch(N * H, inp.shape, dout, inp, N, H), dswiglu(dout, inp)
        yield "dup", found[:, :H], expected[:, :H]
        yield "dgate", found[:, H:], expected[:, H:]
        yield "dinp in place of inp", swiglu_backward_in_place(test_gpt2.under_test, dout, inp), found, EXACT
    inp[0, [0, -1]] = np.nan  # an up and a gate
    f, arrays = (swiglu, [inp]) if direction == "forward" else (lambda *x: dswiglu(*x)[0], [dout, inp])
    [found], expected = launch(N * H, f(*arrays).shape, *arrays, N, H), f(*arrays)
    yield "NaN", np.isnan(to_float(found)), np.isnan(expected), EXACT


def swiglu_backward_in_place(device, dout, inp):
    dout, inp = (stored(values, device.real) for values in (dout, inp))
    arrays = [device.empty(values.nbytes).view(values.dtype).reshape(values.shape) for values in (dout, inp)]
    for array, values in zip(arrays, (dout, inp)):
        device.put(array, values)
    device.launch("swiglu_backward", dout.size, arrays[1], *arrays, *dout.shape)
    return device.get(arrays[1])


for direction in ("forward", "backward"):
    KERNELS[f"swiglu_{direction}"] = functools.partial(swiglu_kernels, direction), [
        (*sizes, gates) for sizes in ((1, 2056), (27, 96), (9, 264))
        for gates in ("small", "saturated", "left", "right")]


# ---- The program


def main():
    flags = read_flags("Compare llama3.cu with independent truths.", KERNELS)
    everything = not (flags.kernels or flags.only or flags.state)
    if everything:
        run("gradient of", finite_differences)
        untested = read_kernels([LLAMA]).keys() ^ KERNELS.keys()
        check("each kernel has a test, and each test a kernel", not untested, " ".join(sorted(untested)))
    for name, dtype in each_device(flags):
        if not flags.state:
            test_kernels(name, dtype, flags.only, KERNELS, COMPILED_FOR, Config3)
    return summary()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
