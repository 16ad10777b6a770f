"""Test the FP8 products with GELU for Hopper, fp8_gelu.cu, on a CPU that emulates it and, on a
Hopper GPU, there too.

    pytest dev/tests/test_fp8_gelu.py -m longest   # registers
"""
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.devices import FastCuda, WithoutGraphs
from dev.features.feature import stack
from dev.features.fp8 import fp8, fp8_gelu
from dev.features.fp8.fp8 import Fp8OnCpu, Fp8OnGpu
from dev.features.fp8.fp8_gelu import WIDTH
from dev.features.fused_biases import output_switches
from dev.tests.checks import check
from dev.tests.hopper import gelu_and_derivative, sums_of_rows
from dev.tests.models import (AS_HOPPER, check_compiled, check_in_each_order, emulated_with,
                              model_class, on_device, on_hopper)
from dev.tests.test_gelu_products import class_on_gpu, noting
from train_gpt2 import BF16, UserError, pack_batch, to_float

ml_dtypes = pytest.importorskip("ml_dtypes")

KERNELS = "matmul_gelu_fp8", "matmul_dgelu_fp8"
SIZES = (128, 256, 16), (384, 256, 144), (256, 512, 272)  # N, OC, C


def small_device(flags=AS_HOPPER):
    """A CPU with the kernels alone, as on Hopper."""
    return on_hopper(stack(emulated_with(KERNELS), [Fp8OnCpu]), "fp8", Config(C=768, NH=12),
                     (fp8.SUMS, fp8.SOURCE, *fp8_gelu.SOURCES), flags=flags)


def device_for(device_name, c=None):
    """The device, with all kernels if it is for a model; or None if its GPU is no Hopper."""
    if device_name != "cuda" and not c:
        return small_device()
    kind = stack(Emulated, [Fp8OnCpu])
    if device_name == "cuda":
        graphs = [WithoutGraphs] if c else []
        kind = stack(FastCuda, [*graphs, fp8_gelu.PairedMaps, Fp8OnGpu])
    return on_hopper(kind, "fp8", c or Config(C=768, NH=12),
                     (fp8.SUMS, fp8.SOURCE, *fp8_gelu.SOURCES))


def values_of(twin):
    """The numbers of e4m3, float64."""
    return twin.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


STEPS, ZERO = 192, 26  # a slope is a byte b: (b - ZERO) / STEPS


def in_registers(x):
    """x (N,OC) in the order in which the kernels keep slopes: of each tile of 128 x 128, for each
    64 rows and each 32 columns, each thread's 16 numbers, which are 2 rows and twice 4 columns."""
    N, OC = x.shape
    tiles = x.reshape(N // 128, 2, 4, 8, 2, OC // 128, 4, 2, 4, 4)
    # half, warp, i, row; tile, k, m, q, column
    return np.ascontiguousarray(tiles.transpose(0, 5, 1, 6, 2, 3, 8, 7, 4, 9)).reshape(N, OC)


def from_registers(kept):
    """The inverse of in_registers."""
    N, OC = kept.shape
    tiles = kept.reshape(N // 128, OC // 128, 2, 4, 4, 8, 4, 2, 2, 4)
    return tiles.transpose(0, 2, 4, 5, 8, 1, 3, 7, 6, 9).reshape(N, OC)


def drawn(device, N, OC, C):
    """Arrays on the device: inputs, and outputs of bytes of 255, which are NaN."""
    rng = np.random.default_rng(N)

    def twin(*shape):
        x = np.float32(rng.normal(0, 30, shape)).astype(ml_dtypes.float8_e4m3fn)
        return on_device(device, x.view(np.uint8))

    scale = lambda of_twin: np.float32([1 / of_twin, of_twin, 0, 0])
    return SimpleNamespace(
        inp=twin(N, C), w=twin(OC, C), bias=on_device(device, to_bf16(
            np.float32(rng.normal(0, 2, OC)))),
        of_inp=on_device(device, scale(7.3)), of_w=on_device(device, scale(120 * C**0.5)),
        slopes=on_device(device, rng.integers(256, size=(N, OC), dtype=np.uint8)),
        out=on_device(device, np.full((N, OC), 0xFF, np.uint8)),
        across=on_device(device, np.full((OC, N), 0xFF, np.uint8)),
        scale8=on_device(device, scale(23)),
        sums=on_device(device, np.full((N // 128, OC), np.nan, np.float32)))


def run(device, a, backward):
    """The results of one of the kernels on the host: slopes or sums, twins, the largest number."""
    for twin in (a.out, a.across):
        device.put(twin, np.full(twin.shape, 0xFF))
    device.put(a.scale8, np.float32([1 / 23, 23, 0, 0]))
    if not backward:
        device.put(a.slopes, np.full(a.slopes.shape, 0xFF))
    outputs = (a.sums, a.slopes) if backward else (a.slopes, a.bias)
    fp8_gelu.multiply(device, KERNELS[backward], (a.out, a.across), a.scale8, outputs,
                      (a.inp, a.w), (a.of_inp[:1], a.of_w[:1]))
    return [device.get(x) for x in (outputs[0], a.out, a.across, a.scale8)]


def product_of(device, a):
    """(inp @ w.T in float64, of what the twins stand for; how far off its numbers may be). A GPU's
    sums have some 14 bits, of the largest term."""
    inp, w = (values_of(device.get(x)) * float(device.get(scale)[0])
              for x, scale in ((a.inp, a.of_inp), (a.w, a.of_w)))
    emulated = hasattr(device, "set_order")
    return inp @ w.T, (2.0**-20 if emulated else 2.0**-9) * (abs(inp) @ abs(w).T)


def faults(device, a, backward):
    """[(what, error, limit)] of one of the kernels against NumPy in float64."""
    N, OC = a.out.shape
    (product, slack), emulated = product_of(device, a), hasattr(device, "set_order")
    first, out, across, scale8 = run(device, a, backward)
    if backward:
        slopes = (from_registers(device.get(a.slopes)).astype(np.float64) - ZERO) / STEPS
        # a slope is off by 2^-17, as 2^16 + 52 is rounded in units of 2 / 192
        wish, slack = product * slopes, slack * np.abs(slopes) + 2.0**-16 * np.abs(product)
        results = [("sums", np.abs(first - sums_of_rows(wish, 128)).max()
                    / np.abs(wish).max(), 1e-4 if emulated else 1e-2)]
    else:
        fch = product + to_float(device.get(a.bias))
        wish, derivative = gelu_and_derivative(fch)
        slopes = (from_registers(first).astype(np.float64) - ZERO) / STEPS
        slack = 1.13 * slack  # GELU is nowhere steeper; and its derivative no more than 0.8
        results = [("slopes", (np.abs(slopes - derivative) - slack).max(), 0.501 / STEPS)]
    # half a unit of the last bit
    off = np.maximum(np.abs(values_of(out) - 23 * wish) - 23 * slack, 0)
    return [*results, ("twin", (off / np.maximum(np.abs(23 * wish), 2.0**-6)).max(), 0.0626),
            ("transposed", (across != out.T).sum(), 0),
            ("largest", abs(scale8[2] / np.abs(wish).max() - 1), 1e-4 if emulated else 1e-2)]


def test_products(device_name):
    """Both products against NumPy in float64: fch, twins, the largest number, sums of columns."""
    device = device_for(device_name)
    for sizes in SIZES if device else ():
        for backward in (False, True):
            given = drawn(device, *sizes)
            check_in_each_order(f"{KERNELS[backward]} {sizes}", device, faults, device, given,
                                backward)


def test_saturated(device_name):
    """GELU of -1e30 .. 1e30; and infinities, which leave a NaN in the twins."""
    device = device_for(device_name)
    if not device:
        return
    N, OC, C = SIZES[0]
    size = np.logspace(-3, 30, OC // 2)
    for bad in (0, np.inf, -np.inf, np.nan):
        x = np.r_[-size[::-1], size]
        x[7] = bad or x[7]
        a = drawn(device, N, OC, C)
        device.put(a.inp, np.zeros((N, C), np.uint8))
        device.put(a.bias, to_bf16(np.float32(x)))
        x = np.float64(to_float(device.get(a.bias)))
        slopes, out, across, _ = run(device, a, False)
        found = (from_registers(slopes) - np.float64(ZERO)) / STEPS
        wish = gelu_and_derivative(x)[1]
        finite = np.isfinite(x)
        check(f"slopes {bad}", np.abs(found - wish)[:, finite].max() <= 0.501 / STEPS)
        tile = slice(WIDTH if bad else 0, OC)  # the other tile is as it should be
        wish = np.clip(23 * gelu_and_derivative(x[tile])[0], -448, 448)
        off = np.abs(values_of(out)[:, tile] - wish) - 0.0626 * np.maximum(np.abs(wish), 2.0**-6)
        check(f"twin {bad}", (off <= 0).all(), off.max())
        check(f"transposed {bad}", (across[tile] == out[:, tile].T).all())
        for name, twin in (("twin", out), ("transposed", across.T)):
            found = np.isnan(values_of(twin)[:, :WIDTH])
            check(f"{name}: NaN for {bad}", found.any() == (bad != 0), found.sum())


def test_training(device_name):
    """A model's loss and gradients over two micro-batches with these products, as without them;
    and other sizes, which do not fit."""
    c = Config(maxT=64, V=257, Vp=384, L=1, NH=1, C=64)
    found, launched = [], []
    for own in (False, True):
        device = device_for(device_name, c)
        if not device:
            return
        Model = (class_on_gpu(GPT2, "--dtype", "fp8") if own else
                 model_class(GPT2, "--dtype", "fp8", "--fp8", "all"))
        model = Model(c, device, 2, 64)
        model.set_parameters(draw_parameters(c, 1))
        rng, launch = np.random.default_rng(1), device.launch
        batches = [pack_batch(*rng.integers(257, size=(2, 2, 64))) for _ in "12"]
        model.train_step(*batches, learning_rate=0)
        launched.append([])
        with mock.patch.object(device, "launch", noting(launch, launched[-1])):
            model.train_step(*batches, learning_rate=0)
            loss = model.verdict().loss
            names = [row.name for row in c.parameter_table()]
            found.append([np.array(loss), *(device.get(getattr(model.grads, name))
                                            for name in names)])
            few = rng.integers(257, size=(2, 1, 48))
            found[-1].append(np.array(model.forward(*few)))
    check("launched", [[names.count(kernel) for kernel in KERNELS] for names in launched] ==
          [[0, 0], [2, 2]], [{*names} for names in launched])
    without = {"gelu_to_fp8": 1, "gelu_backward_to_fp8": 0}  # that of the pass of other sizes
    check("others", {name: launched[1].count(name) for name in without} == without)
    for name, one, other in zip(("loss", *names, "other sizes"), *found):
        yield name, other, one, 1e-3 if name in ("loss", "other sizes") else 6e-2


def whole(device, sizes=(384, 256, 1296)):
    """The first wrong result of both products, in words, or ""."""
    try:
        for backward in (False, True):
            a = drawn(device, *sizes)
            for what, error, limit in faults(device, a, backward):
                if not error <= limit:
                    return what
    except UserError as e:
        return f"{e}"
    return ""


def wrong(race=False):
    """The first wrong result, or what a CPU says, or "". race: look for races."""
    if race:
        return whole(small_device(f"{AS_HOPPER} {races.FLAG}"), SIZES[0])
    return whole(small_device())


@pytest.mark.longest
def test_compiled():
    """For sm_90a nothing spills, and a block fits a multiprocessor."""
    shared = fp8_gelu.plan(mock.Mock(multiprocessors=132), 128, 256)[1]
    check_compiled(Config(C=768, NH=12), (fp8.SUMS, fp8.SOURCE, *fp8_gelu.SOURCES), KERNELS,
                   fp8_gelu.THREADS, shared, *output_switches(fp8.OUTPUT))


def test_beside_library(device_name):
    """On a Hopper GPU: close to what cuBLASLt and fp8.cu's kernels make at real shapes, and the
    same bits ten times."""
    if device_name != "cuda" or not (device := device_for(device_name)):
        return
    for sizes in ((2048, 3072, 768), (1024, 6400, 1600)):
        N, OC, C = sizes
        a, b = drawn(device, *sizes), drawn(device, *sizes)
        fch, dgelu = (on_device(device, np.zeros((N, OC), BF16)) for _ in "12")
        for backward in (False, True):
            found = run(device, a, backward)
            again = [run(device, a, backward) for _ in range(9)]
            check(f"{sizes} {KERNELS[backward]}: bits", all(
                np.array_equal(x, y, equal_nan=True) for other in again
                for x, y in zip(found, other)))
            device.multiply_twins(dgelu if backward else fch, b.inp, b.w.T,
                                  [b.of_inp[:1], b.of_w[:1]], None if backward else b.bias)
            device.put(b.scale8, np.float32([1 / 23, 23, 0, 0]))
            given = (b.sums, dgelu, fch) if backward else (fch,)
            device.launch(("gelu_to_fp8", "gelu_backward_to_fp8")[backward], fp8.tiles(OC, N),
                          b.out, b.across, b.scale8, *given, N, OC, N)
            for name, x, y in (("twin", found[1], b.out), ("transposed", found[2], b.across)):
                yield (f"{sizes} {KERNELS[backward]}: {name}", values_of(x),
                       values_of(device.get(y)), 3e-2)
            largest = found[3][2] / device.get(b.scale8)[2]
            check(f"{sizes} {KERNELS[backward]}: largest", abs(largest - 1) < 1e-2, largest)
        yield f"{sizes} sums", found[0], device.get(b.sums), 1e-2
