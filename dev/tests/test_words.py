"""Test what CUDA's words give, on a CPU and on a GPU: functions of numbers, shuffles and votes
under a mask, atomics, halves, dynamic shared memory.
"""

import numpy as np
import pytest

from dev.common.bf16 import to_bf16
from dev.common.nvrtc import NotCompiled, compile_cuda, has_nvrtc, include_flags
from dev.common.student_text import for_gpu
from dev.tests.checks import EXACT, check, refusal
from dev.tests.small_kernels import built, launch
from dev.tests.word_table import ATOMICS, BLOCKS, FLOATS, INTEGERS, LANES, STORED, TEXT, signed
from train_gpt2 import to_float

DEVICES = {}


def with_words(device_name, folder):
    """The device, compiled once."""
    if device_name not in DEVICES:
        DEVICES[device_name] = built(device_name, folder, TEXT)
    return DEVICES[device_name]


# ---- the tests


def test_floats(device_name, folder):
    """Functions of floats."""
    device = with_words(device_name, folder)
    rng = np.random.default_rng(5)
    x = rng.uniform(0.1, 9, 64).astype(np.float32)
    y = (rng.uniform(0.05, 3, 64) * rng.choice([-1, 1], 64)).astype(np.float32)
    out, _ = launch(device, "floats", 64, np.zeros((len(FLOATS), 64), np.float32), np.stack([x, y]))
    for (text, formula, limit), found in zip(FLOATS, out):
        expected = formula(np.float64(x), np.float64(y))
        error = np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 0.1))
        check(f"{text}", error <= limit, f"{error:.1e}, limit {limit:.1e}")
    found, _ = launch(device, "unfused", 64, np.zeros(64, np.float32), x)
    check("a product and a sum, each rounded",
          np.array_equal(found, np.float32(x * x) - np.float32(1)))


def test_integers(device_name, folder):
    """Functions of integers, and of floats that become integers."""
    device = with_words(device_name, folder)
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 2**32, (2, 64), dtype=np.uint32)
    a[:4], b[:4] = (0, 1, 2**32 - 1, 1 << 31), (0, 2**32 - 1, 1 << 31, 1 << 31)
    f = (rng.standard_normal(64) * 1e3).astype(np.float32)
    f[:9] = 0.5, 1.5, 2.5, -0.5, -3.7, np.nan, np.inf, -np.inf, 3e9
    out, *_ = launch(device, "integers", 64, np.zeros((len(INTEGERS), 64), np.uint32),
                     np.stack([a, b]), f)
    for (text, formula), found in zip(INTEGERS, out):
        expected = [formula(int(x), int(y), z) % 2**32 for x, y, z in zip(a, b, f)]
        check(text, found.tolist() == expected,
              [(hex(x), hex(y), z, hex(g), hex(e))
               for x, y, z, g, e in zip(a, b, f, found.tolist(), expected) if g != e][:3] or "")


def test_shuffles(device_name, folder):
    """Shuffles, votes and matches of warps and of lanes that a mask names; votes of a block."""
    device = with_words(device_name, folder)
    x = np.random.default_rng(7).integers(2, 3000, 64).astype(np.int32)
    for order in ("forward", "reverse", 3) if device_name != "cuda" else ("forward",):
        if device_name != "cuda":
            device.set_order(order)
        out, _ = launch(device, "lanes", 64, np.zeros((len(LANES + BLOCKS), 64), np.int32), x)
        for (text, formula), found in zip(LANES, out):
            warps = [x[:32].tolist(), x[32:].tolist()]
            expected = [signed(formula(i % 32, warps[i // 32])) for i in range(64)]
            check(f"{order}: {text}"[:200], found.tolist() == expected,
                  [(i, *pair) for i, pair in enumerate(zip(found.tolist(), expected))
                   if pair[0] != pair[1]][:4] or "")
        for (text, formula), found in zip(BLOCKS, out[len(LANES) :]):
            check(f"{order}: {text}", found.tolist() == [formula(x.tolist())] * 64, found[:3])
        out, _ = launch(device, "tail", 40, np.zeros(80, np.int32), x[:40])
        odd = [signed(sum(1 << i for i in range(n) if x[at + i] % 2))
               for at, n in ((0, 32), (32, 8))]
        check(f"{order}: a ballot of a tail", out[:40].tolist() == [odd[0]] * 32 + [odd[1]] * 8,
              out[32:40])
        check(f"{order}: a sum of a tail", out[40:].tolist() == [32] * 32 + [8] * 8)


def test_atomics(device_name, folder):
    """Atomics of each type, by 64 threads at once."""
    device = with_words(device_name, folder)
    x = np.random.default_rng(8).permutation(64).astype(np.int32)
    at = np.zeros((len(ATOMICS), 8), np.uint8)
    for place, (T, _, before, _) in zip(at, ATOMICS):
        value = (to_bf16(np.float32([before])).view(np.uint16) if "bf" in T
                 else np.array([before], STORED[T]))
        place[: value.nbytes] = value.view(np.uint8)
    out, _ = launch(device, "atomics", 64, at.view(np.uint64), x)
    for (T, text, before, formula), place in zip(ATOMICS, out.view(np.uint8).reshape(-1, 8)):
        found = place[: STORED[T]().nbytes].view(STORED[T])[0]
        found = (float(found) if "bf" not in T
                 else float(to_float(np.array([found], np.uint16)).item()))
        expected = formula(before, x.tolist())
        if T in ("unsigned", "unsigned long long"):
            expected %= 1 << 32 if T == "unsigned" else 1 << 64
        check(f"{T}: {text}"[:100], abs(found - float(expected)) <= 1e-15 * abs(expected),
              f"{found}, expected {expected}")
    before, _ = launch(device, "steps", 64, np.zeros(64, np.uint32), np.zeros(1, np.uint32))
    check("atomicInc returns what was there",
          sorted(before.tolist()) == sorted([*range(41), *range(23)]), before)


def test_halves(device_name, folder):
    """Numbers of 16 bits: from fp32 and back, ties to even; their arithmetic; pairs."""
    device = with_words(device_name, folder)
    rng = np.random.default_rng(9)
    x = np.concatenate([
        rng.standard_normal(700).astype(np.float32) * 10.0 ** rng.integers(-9, 5, 700),
        np.arange(0, 2, 1 / 256) * 2.0**-24, 1 + np.arange(24) * 2.0**-12,
        1 + np.arange(24) * 2.0**-9,
        [0.0, -0.0, 65504, 65519.9, 65520, 70000, 1e38, 3.4e38, np.inf, -np.inf, np.nan, 2.0**-25]])
    x = np.resize(x, 1280).astype(np.float32)
    half, low, _ = launch(device, "narrow", 1280, *np.zeros((2, 1280), np.uint16), x)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    known = ~np.isnan(x)
    yield "to half", half[known], expected.view(np.uint16)[known], EXACT
    yield "to bfloat16", low[known], to_bf16(x).view(np.uint16)[known], EXACT
    check("a NaN stays one",
          (half[~known] & 0x7FFF > 0x7C00).all() and (low[~known] & 0x7FFF > 0x7F80).all())
    bits = np.arange(65536, dtype=np.uint16)
    wide, more, *_ = launch(device, "widen", 65536, *np.zeros((2, 65536), np.float32), bits, bits)
    real = bits.view(np.float16)
    yield "from half", wide[~np.isnan(real)], real[~np.isnan(real)].astype(np.float32), EXACT
    yield ("from bfloat16", more.view(np.uint32)[bits & 0x7FFF <= 0x7F80],
           (np.uint32(bits) << 16)[bits & 0x7FFF <= 0x7F80], EXACT)
    a = rng.standard_normal(64).astype(np.float16)
    c = to_bf16(rng.standard_normal(64).astype(np.float32))
    b, d = a[np.arange(64) ^ 1], to_float(c)[np.arange(64) ^ 1]
    out, _, _, pairs = launch(device, "arithmetic", 64, np.zeros((6, 64), np.float32),
                              a.view(np.uint16), c.view(np.uint16), np.zeros(64, np.uint16))
    once = (np.float64(b) * b + 1).astype(np.float16)
    rounded = [a + b, a * b, to_float(to_bf16(to_float(c) - d)), to_float(to_bf16(to_float(c) * d)),
               once, to_float(c) + d]
    names = "half +", "half *", "bf16 -", "bf16 *", "half2 fma", "bf16 pairs"
    for what, found, expected in zip(names, out, rounded):
        yield what, found, expected.astype(np.float32), EXACT
    check("pairs stored", pairs.tolist() == [n for i in range(32) for n in (i, 0x4000)], pairs[:6])


def test_dynamic(device_name, folder):
    """extern __shared__, within a kernel and above it; functions that a host may call too."""
    device = with_words(device_name, folder)
    x = np.arange(64, dtype=np.float32)
    out, _ = launch(device, "within", 64, np.zeros(64, np.float32), x, shared=256)
    check("within a kernel", np.array_equal(out, x[::-1]))
    out, _ = launch(device, "outside", 64, np.zeros(64, np.float32), x, shared=256)
    check("above a kernel", np.array_equal(out, x // 4 * 4 + 2 + x[::-1] + 120), out)
    if device_name != "cuda":
        found = refusal(device.launch, "within", 64, np.zeros(64, np.float32), x)
        check("without bytes", found and "extern __shared__ bytes[] has no bytes" in found, found)


def test_gpu_compiles(folder):
    """NVRTC, if it is installed, compiles all of this."""
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    try:
        compile_cuda(for_gpu(TEXT), "sm_80", ["-std=c++17", *include_flags()])
        log = ""
    except NotCompiled as e:
        log = f"{e}"
    check("NVRTC compiles all words", not log, log[:1500])
