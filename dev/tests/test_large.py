"""Test kernels on arrays of more than 2^31 numbers, where an index of 32 bits would be negative.
This takes a GPU.

    pytest dev/tests/test_large.py -m longest   # with such an index each test has to fail
    pytest dev/tests/test_large.py --device cpu --numbers 200000  # small arrays, to debug

A kernel runs over all rows, and then over a few by themselves: the first, those around number 2^31,
and the last. The few come out with the same bits. Sums over all rows are compared with sums in
float64.
"""
import functools
import gc
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.features.devices import device_class
from dev.features.fused_biases import SOURCE, with_summed_outputs
from dev.features.order import has_gpu
from dev.features.recompute import SOURCE as RECOMPUTE
from dev.lab.heads import trainers_backward, trainers_forward
from dev.tests.checks import TOP, check
from train_gpt2 import (ADAMW, BF16, LOW, PARTIAL_ROWS, batch_table, carve, classifier_launch,
                        layernorm_backward_launch, pack_batch, to_float)

C, NH, T = 768, 12, 1024
NUMBERS = 2_214_600_000  # of an array: 3% more than 2^31
DTYPES = "bf16", "fp32"
PART = 2**26  # numbers that are made, or added up, at a time
BYTES = {np.float32: 4, BF16: 2, LOW: 2, np.int32: 4}
PLANTED = (  # (test, a line's text in kernels.cu, the same with an index of 32 bits)
    ("attention", "return (((size_t)b * T + t) * heads + h) * HS;",
     "return ((b * T + t) * heads + h) * HS;"),
    ("classifier", "real *x = logits + (size_t)row * Vp,", "real *x = logits + row * Vp,"),
    ("layernorm_forward", "size_t start = (size_t)row * C;\n    out.begin",
     "int start = row * C;\n    out.begin"),
    ("layernorm_again", "return (unsigned)(i / W) / (C / W);", "return (int)i / C;"),
    ("layernorm_backward", "size_t start = (size_t)row * C;\n        // E",
     "int start = row * C;\n        // E"),
    ("gelu", "return W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);",
     "return (int)(W * (blockIdx.x * blockDim.x + threadIdx.x));"),
    ("encoder_forward", "store(out + (size_t)row * C + c, x);", "store(out + row * C + c, x);"),
    ("encoder_forward", "load<4>(wte + (size_t)tokens[row] * C + c)",
     "load<4>(wte + tokens[row] * C + c)"),
    ("encoder_backward", "load<W>(dout + (size_t)order[runs[2 * run] + j] * C + c)",
     "load<W>(dout + order[runs[2 * run] + j] * C + c)"),
    ("encoder_backward", "load<W>(dout + b * TC + i)", "load<W>(dout + (int)(b * TC + i))"),
    ("bias_backward", "dout + (size_t)first * OC", "dout + first * OC"),
    ("global_norm", "load<4>(grads + i)", "load<4>(grads + (int)i)"),
    ("adamw", "load<W>(m + i), m2", "load<W>(m + (int)i), m2"))


@pytest.fixture
def numbers(pytestconfig):
    return pytestconfig.option.numbers


@pytest.fixture
def plant(pytestconfig):
    return pytestconfig.option.plant


@functools.cache
def device_for(device_name, dtype, plant):
    """A device; with plant >= 0 its kernels have that fault."""
    text = Config.SOURCES[0].read_text("utf-8")
    if plant >= 0:
        _, right, wrong = PLANTED[plant]
        assert right in text, right
        text = text.replace(right, wrong)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cu"
        path.write_text(text, encoding="utf-8")
        with mock.patch.object(Config, "SOURCES", (path,)):
            kind = with_summed_outputs(device_class(device_name))
            return kind(dtype, Config(C=C, NH=NH), [SOURCE, RECOMPUTE])


class Rows:
    """Arrays that all have N rows, {name: (numbers of a row, type)}, filled with numbers in [-1,
    1); written ones are filled with NaN. N is so large that the widest array has at least `numbers`
    numbers."""

    def __init__(self, device, numbers, few, read, written):
        self.device, self.few = device, few
        self.np = device.cupy if device.name == "cuda" else np
        kinds = {**read, **written}
        self.width = max(width for width, _ in kinds.values())
        self.N = -(-numbers // self.width // few) * few + few
        self.arrays = {name: self.new(self.N, width, dtype=dtype)
                       for name, (width, dtype) in kinds.items()}
        for seed, name in enumerate(kinds):
            if name in read:
                self.fill(self.arrays[name], seed)
            else:
                self.forget(self.arrays[name])
        self.written = [*written]

    def new(self, *shape, dtype=np.float32):
        return self.device.empty(math.prod(shape) * BYTES[dtype]).view(dtype).reshape(shape)

    def forget(self, array):
        """Make all numbers NaN."""
        whole = array.reshape(-1).view(np.uint8)
        for start in range(0, whole.size, PART):
            whole[start : start + PART] = 255

    def fill(self, array, seed):
        """Set each number from its index, which is mixed up as random generators do."""
        flat = array.reshape(-1)
        for start in range(0, flat.size, PART):
            part = flat[start : start + PART]
            z = self.np.arange(start, start + part.size, dtype=np.uint64) * np.uint64(
                0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(31)) ^ np.uint64(seed << 32)) * np.uint64(0xBF58476D1CE4E5B9)
            x = (z >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
            if array.dtype == np.float32:
                part[...] = x
            else:
                part[...] = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(array.dtype)

    def column_sums(self, array):
        """Sums in float64."""
        rows = max(1, PART * array.itemsize // array.strides[0])
        parts = (to_float(array[i : i + rows]).sum(0, dtype=np.float64)
                 for i in range(0, len(array), rows))
        return sum(parts)

    def check(self, name, launch, changed=()):
        """launch(arrays, rows) over all rows, then over a few by themselves. changed: names of
        arrays that are read and written."""
        last = self.N - self.few
        places = sorted({0, min(last, 2**31 // self.width // self.few * self.few), last})
        some = {place: {name: x[place : place + self.few].copy() for name, x in self.arrays.items()}
                for place in places}
        launch(SimpleNamespace(**self.arrays), self.N)
        for place, arrays in some.items():
            launch(SimpleNamespace(**arrays), self.few)
            for of in (*self.written, *changed):
                found, wish = (x.reshape(-1).view(np.uint8)
                               for x in (self.arrays[of][place : place + self.few], arrays[of]))
                check(f"{name}: {of}, rows {place:,} to {place + self.few:,} of {self.N:,}",
                      bool((found == wish).all()) and not bool((wish == 255).all()))

    def check_sum(self, name, found, wish):
        found, wish = (np.float64(self.device.get(x) if hasattr(x, "get") else x)
                       for x in (found, wish))
        error = np.linalg.norm(found - wish) / np.linalg.norm(wish)
        check(f"{name}: sums over {self.N:,} rows", error <= 1e-4, f"{error:.1e} <= 1e-4")


def large(needed):
    """A test for each dtype, if the device has so many GiB; afterwards its memory is free again."""
    def decorated(test):
        @functools.wraps(test)
        def run(device_name, numbers, plant):
            if device_name != "cuda" and not numbers:
                pytest.skip(f"needs a GPU with {needed} GiB")
            for dtype in DTYPES[: 1 if plant >= 0 else 2]:
                device = device_for(device_name, dtype, plant)
                if device_name == "cuda" and not numbers:
                    device.cupy.get_default_memory_pool().free_all_blocks()
                    free = device.gpu.mem_info[0] / 2**30
                    if free < needed:
                        pytest.skip(f"{dtype} needs {needed} GiB, and {free:.0f} are free")
                test(device, dtype, numbers or NUMBERS)
                gc.collect()
        del run.__wrapped__  # whose parameters are others
        return run
    return decorated


@large(32)
def test_attention(device, dtype, numbers):
    """A row is a sequence, so the arrays have B * T * 3C numbers."""
    real, tokens = device.real, T if numbers == NUMBERS else 70
    heads, blocks = NH * tokens, -(-tokens // device.attention_sizes.rows)
    if numbers == NUMBERS:
        numbers = 1022 * tokens * 3 * C  # B = 1024
    rows = Rows(device, numbers, 2, dict(qkv=(tokens * 3 * C, real), dout=(tokens * C, real)),
                dict(out=(tokens * C, real), lse=(heads, np.float32)))

    def shaped(a, B):
        whole = SimpleNamespace(B=B, T=tokens, NH=NH, NKV=NH, HS=C // NH, C=C,
                                scale=(C // NH) ** -0.5)
        for name, array in vars(a).items():
            setattr(whole, name, array.reshape(B * tokens, -1)
                    if name in ("qkv", "dout", "out", "dqkv") else array)
        return whole

    rows.check(f"attention_forward {dtype}", lambda a, B: trainers_forward(device, shaped(a, B)))
    for name, shape, kind in (("dqkv", tokens * 3 * C, real), ("delta", heads, np.float32),
                              ("sums", blocks * 3 * C, np.float32)):
        rows.arrays[name] = rows.new(rows.N, shape, dtype=kind)
        rows.forget(rows.arrays[name])
    rows.written = ["dqkv", "delta", "sums"]

    def backward(a, B):
        whole = shaped(a, B)
        device.column_sums = a.sums
        trainers_backward(device, whole)
        device.column_sums = None

    rows.check(f"attention_backward {dtype}", backward)


@large(25)
def test_classifier(device, dtype, numbers):
    """8,192 rows of 262,144 logits are exactly 2^31, so there are some more."""
    Vp = 262_144 if numbers == NUMBERS else 1_024
    V = Vp - 44
    rows = Rows(device, numbers, 64, dict(logits=(Vp, device.real)), dict(losses=(1, np.float32)))
    targets = rows.new(rows.N, 1, dtype=np.int32)
    device.put(targets, np.random.default_rng(1).integers(V, size=(rows.N, 1)))
    rows.arrays["targets"] = targets

    def launch(a, n):
        blocks, room, shared = classifier_launch(device, n, Vp, True)
        device.launch("fused_classifier", blocks, a.logits, a.losses, a.targets, 1 / 64, n, V, Vp,
                      True, room, shared=shared)

    rows.check(f"fused_classifier {dtype}", launch, ["logits"])


def vectors(rows, *names):
    """Arrays of C numbers."""
    made = [rows.new(C, dtype=rows.device.real) for _ in names]
    for seed, array in enumerate(made):
        rows.fill(array, 100 + seed)
    return made


@large(40)
def test_layernorm_forward(device, dtype, numbers):
    real, one = device.real, (1, np.float32)
    rows = Rows(device, numbers, 64, dict(x=(C, np.float32), branch=(C, real)),
                dict(out=(C, real), copy=(C, real), mean=one, rstd=one))
    weight, bias = vectors(rows, "weight", "bias")
    rows.check(f"residual_layernorm_forward {dtype}", lambda a, n: device.launch(
        "residual_layernorm_forward", n, a.out, a.mean, a.rstd, a.copy, a.x, a.branch, weight, bias,
        n), ["x"])


@large(20)
def test_layernorm_again(device, dtype, numbers):
    real, one = device.real, (1, np.float32)
    rows = Rows(device, numbers, 64, dict(inp=(C, real), mean=one, rstd=one), dict(out=(C, real)))
    weight, bias = vectors(rows, "weight", "bias")
    rows.check(f"layernorm_again {dtype}", lambda a, n: device.launch(
        "layernorm_again", n * C, a.out, a.inp, a.mean, a.rstd, weight, bias, n, C))


@large(30)
def test_layernorm_backward(device, dtype, numbers):
    real, one = device.real, (1, np.float32)
    rows = Rows(device, numbers, 64,
                dict(dx=(C, real), dout=(C, real), inp=(C, real), mean=one, rstd=one), {})
    [weight], partials, kept = vectors(rows, "weight"), rows.new(3 * PARTIAL_ROWS * C), []

    def launch(a, n):
        blocks, threads, shared = layernorm_backward_launch(device, n)
        device.launch("layernorm_backward", blocks, a.dx, partials, a.dout, a.inp, weight, a.mean,
                      a.rstd, n, threads=threads, shared=shared)
        kept.append(partials[: 3 * blocks * C].reshape(3, blocks, C).sum(1, dtype=np.float64))

    rows.check(f"layernorm_backward {dtype}", launch, ["dx"])
    rows.check_sum(f"layernorm_backward {dtype}: dbias", kept[0][1],
                   rows.column_sums(rows.arrays["dout"]))
    # in bf16 the kernel adds what it stores before it rounds it
    wish = rows.column_sums(rows.arrays["dx"])
    found = kept[0][2]
    error = float(abs(found - wish).max()) / math.sqrt(rows.N)
    check(f"layernorm_backward {dtype}: sums of dx", error <= (2e-2 if dtype == "bf16" else 1e-4),
          f"{error:.1e}")


@large(30)
def test_gelu(device, dtype, numbers):
    OC = 4 * C
    rows = Rows(device, numbers, 64, dict(inp=(OC, device.real), dinp=(OC, device.real)),
                dict(out=(OC, device.real)))

    def launch(a, n):
        device.launch("gelu_forward", n * OC, a.out, a.inp, n, OC)
        device.launch("gelu_backward", n * OC, a.dinp, a.inp, n, OC)

    rows.check(f"gelu {dtype}", launch, ["dinp"])


@large(25)
def test_encoder_forward(device, dtype, numbers):
    """The words are as many as the tokens, and come in reverse: wte is large, too."""
    rows, few = Rows(device, numbers, 64, dict(wte=(C, device.real)), dict(out=(C, np.float32))), 64
    wte, wpe = rows.arrays.pop("wte"), rows.new(few, C, dtype=device.real)
    rows.fill(wpe, 9)
    rows.arrays["tokens"] = tokens = rows.new(rows.N, 1, dtype=np.int32)
    device.put(tokens, np.arange(rows.N)[::-1])
    rows.check(f"encoder_forward {dtype}", lambda a, n: device.launch(
        "encoder_forward", n * C, a.out, a.tokens, wte, wpe, n, few, C))


@large(15)
def test_encoder_backward(device, dtype, numbers):
    rows, few, V = Rows(device, numbers, 64, dict(dout=(C, device.real)), {}), 64, 50
    dout, tokens = (rows.arrays["dout"],
                    np.random.default_rng(1).integers(V, size=(rows.N // few, few), dtype=np.int32))
    data, _ = pack_batch(tokens, tokens)
    packed = device.empty(data.nbytes)
    device.put(packed, data)
    batch = carve(packed, batch_table(*tokens.shape))
    dwte, dwpe = rows.new(V, C), rows.new(few, C)
    dwte[...] = 0
    device.launch("encoder_backward_wte", (rows.N, C), dwte, dout, batch.tokens, batch.order,
                  batch.runs, rows.N, C)
    device.launch("encoder_backward_wpe", few * C, dwpe, dout, rows.N // few, few, few, C, False)
    for word in (0, 1, V - 1):
        wish, own = 0, rows.np.asarray(tokens.reshape(-1) == word)
        for start in range(0, rows.N, PART // C):
            part = slice(start, start + PART // C)
            wish = wish + to_float(dout[part][own[part]]).sum(0, dtype=np.float64)
        rows.check_sum(f"encoder_backward_wte {dtype}, word {word}", dwte[word], wish)
    for t in (0, few - 1):
        rows.check_sum(f"encoder_backward_wpe {dtype}, position {t}", dwpe[t],
                       rows.column_sums(dout.reshape(-1, few * C)[:, t * C : (t + 1) * C]))


@large(15)
def test_bias_backward(device, dtype, numbers):
    OC, shares = 4 * C, 64
    rows = Rows(device, numbers, 64, dict(dout=(OC, device.real)), {})
    partials = rows.new(shares, OC)
    device.launch("matmul_backward_bias", (OC, shares), partials, rows.arrays["dout"], rows.N, OC)
    wish = rows.column_sums(rows.arrays["dout"])
    rows.check_sum(f"matmul_backward_bias {dtype}", partials.sum(0, dtype=np.float64), wish)
    device.launch("sum_rows", (OC, shares), partials, rows.arrays["dout"], rows.N, OC)
    rows.check_sum(f"sum_rows {dtype}", partials.sum(0, dtype=np.float64), wish)


@large(15)
def test_global_norm(device, dtype, numbers):
    rows = Rows(device, numbers, 64, dict(grads=(C, np.float32)), {})
    blocks, norm, grads = (8 * device.multiprocessors, rows.new(2 + 8 * device.multiprocessors),
                           rows.arrays["grads"])
    norm[...] = 0
    device.launch("global_norm", blocks, norm, grads, grads.size)
    parts = (grads[i : i + PART // C] for i in range(0, rows.N, PART // C))
    wish = math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in parts))
    found = float(device.get(norm)[0])
    check(f"global_norm {dtype} of {grads.size:,}", abs(found / wish - 1) <= 1e-5,
          f"{found} {wish}")


@large(40)
def test_adamw(device, dtype, numbers):
    """All in one tensor, which decays."""
    low = dict(low=(C, LOW)) if dtype == "bf16" else {}
    rows = Rows(device, numbers, 64, dict(params=(C, device.real), **low, grads=(C, np.float32),
                                          m=(C, np.float32), v=(C, np.float32)), {})
    for i in range(0, rows.N, PART // C):
        part = rows.arrays["v"][i : i + PART // C]
        part[...] = abs(part)
    settings, verdict = rows.new(len(ADAMW)), rows.new(4)
    device.put(settings, [0.01, 0.1, 0.001, 2, 3, 1e-8, 0.1, 0])
    device.put(verdict, [1, 0, 1, 0])
    decayed = rows.new(1, dtype=np.int32)
    device.put(decayed, [1])
    starts = device.empty(16).view(np.uint64)

    def launch(a, n):
        device.put(starts, np.uint64([0, n * C]))
        device.launch("adamw", n * C, a.params, getattr(a, "low", None), a.grads, a.m, a.v, starts,
                      decayed, 1, n * C, settings, verdict)

    rows.check(f"adamw {dtype}", launch, ["params", *low, "m", "v"])


def test_planted_faults(device_name):
    """kernels.cu still has the lines of PLANTED."""
    text = Config.SOURCES[0].read_text("utf-8")
    for test, right, wrong in PLANTED:
        check(f"{test}: {right!r}", text.count(right) == 1, text.count(right))
        check(f"{test}: {wrong!r} is not there", text.count(wrong) == 0)


def run_planted(i):
    """Run the test of fault i in a process of its own, since a GPU that read a wrong address takes
    no further work."""
    test = f"dev/tests/test_large.py::test_{PLANTED[i][0]}"
    return subprocess.run([sys.executable, "-m", "pytest", test, "--device", "cuda", "--plant",
                           str(i)], cwd=TOP, capture_output=True, text=True)


@pytest.mark.longest
def test_all_planted():
    """Each test fails with its fault."""
    if not has_gpu():
        pytest.skip("needs a GPU with 40 GiB")
    with ThreadPoolExecutor(3) as pool:
        for (test, right, _), done in zip(PLANTED, pool.map(run_planted, range(len(PLANTED)))):
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
            check(f"planted in {test}: {right[:40]!r}", done.returncode == 1 and failed,
                  failed[:1] or done.stdout[-300:] + done.stderr[-300:])
