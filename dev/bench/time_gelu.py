"""Check the products with GELU of gelu_products.cu, and time them beside cuBLASLt's.

    python -m dev.bench.time_gelu                                # on a Hopper GPU: checks, times
    python -m dev.bench.time_gelu --shape "M=65536,C=768;M=8192,C=1600"
    CXXFLAGS="-O1 -DHOPPER" python -m dev.bench.time_gelu --device cpu               # only checks

M is the number of rows, B*T. Checks are against NumPy in float64. Times are medians in
microseconds; the difference is from cuBLASLt's results.
"""
from types import SimpleNamespace

import numpy as np

from dev.bench.time_five import check_hopper
from dev.common.bf16 import to_bf16
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.cpu.emulated import Emulated
from dev.features.declare import stack
from dev.features.devices import FastCuda
from dev.features.hopper.gelu_products import (
    HEIGHT, SOURCES, OwnGelu, multiply_dgelu, multiply_gelu)
from dev.features.products import TimedProducts
from dev.lab import timing
from dev.lab.bench import BF16_LIMIT
from dev.lab.ladder import parse_sizes
from prepro_tinyshakespeare import UserError, run_main
from train_gpt2 import BF16, to_float

KERNELS = {"matmul_gelu", "matmul_dgelu"}
SHAPE = "M=65536,C=768"
FLAGS = [
    (None, "--device", ("cpu", "cuda"), "cuda", "cpu: only checks"),
    (None, "--shape", str, None, f"sizes, several after one another: {SHAPE};M=8192,C=1600 "
     "(default: the first)"),
    (None, "--no-check", "switch", 0, "1: only time"),
]
CHECKS = ("M=1,C=64", "M=129,C=64", "M=300,C=192", "M=640,C=384,OC=320")


def gelu_and_derivative(x):
    """float64 of float64; tanh form."""
    root, inner = np.sqrt(2 / np.pi), x + 0.044715 * x**3
    t = np.tanh(root * inner)
    return x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def make(name):
    """A device with the kernels. Raises UserError."""
    check_hopper(name, SOURCES[-1])
    config = Config(C=768, NH=12)
    if name != "cuda":
        return Emulated("bf16", config, SOURCES, only=KERNELS)
    return stack(FastCuda, [OwnGelu, TimedProducts])("bf16", config, SOURCES)


def array_on(device, shape, dtype):
    """An array of bytes of 255, which are NaN."""
    array = device.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array[...] = 255
    return array.view(dtype).reshape(shape)


def drawn(device, M, C, OC=None):
    """Inputs on the device. Of many rows the first 4,096 are repeated. GELU saturates in some."""
    rng, OC = np.random.default_rng(1), OC or 4 * C

    def draw(scale, *shape):
        array = array_on(device, shape, BF16)
        for i in range(0, shape[0], 4096):
            if i == 0:
                some = np.float32(scale * rng.standard_normal((min(4096, shape[0]), *shape[1:])))
                device.put(array[:4096], to_bf16(some))
            else:
                array[i : i + 4096] = array[: min(4096, shape[0] - i)]
        return array

    return SimpleNamespace(inp=draw(1, M, C), w=draw(2 * C**-0.5, OC, C), bias=draw(3, OC),
                           dout=draw(1, M, C), wproj=draw(C**-0.5, C, OC), fch_in=draw(3, M, OC))


def with_outputs(device, a):
    """The same inputs with outputs of their own."""
    shape = a.fch_in.shape
    return SimpleNamespace(**{**vars(a), **{
        name: array_on(device, shape, BF16) for name in ("fch", "fch_gelu", "dfch")},
        "sums": array_on(device, (-(-shape[0] // HEIGHT), shape[1]), np.float32)})


def off(found, wish):
    """How far apart, by Frobenius norm."""
    return np.linalg.norm(found - wish) / np.linalg.norm(wish)


def faults(device, a):
    """Run both on the device. Returns [(what, error, limit)] against NumPy in float64."""
    a = with_outputs(device, a)
    inp, w, bias, dout, wproj, fch_in = (to_float(device.get(x)).astype(np.float64) for x in (
        a.inp, a.w, a.bias, a.dout, a.wproj, a.fch_in))
    multiply_gelu(device, a.fch, a.fch_gelu, a.inp, a.w, a.bias)
    multiply_dgelu(device, a.dfch, a.sums, a.dout, a.wproj, a.fch_in)
    fch, fch_gelu, dfch, sums = (to_float(device.get(x)).astype(np.float64) for x in (
        a.fch, a.fch_gelu, a.dfch, a.sums))
    wish = dout @ wproj * gelu_and_derivative(fch_in)[1]
    rows = np.pad(dfch, ((0, -len(dfch) % HEIGHT), (0, 0))).reshape(len(sums), HEIGHT, -1)
    return [("fch", off(fch, inp @ w.T + bias), BF16_LIMIT),
            ("fch_gelu", off(fch_gelu, gelu_and_derivative(fch)[0]), BF16_LIMIT),
            ("dfch", off(dfch, wish), BF16_LIMIT), ("sums", off(sums, rows.sum(1)), 1e-6)]


def check(device, text):
    """Check both at a size. Returns how many results are wrong."""
    found = faults(device, drawn(device, **parse_sizes(text)))
    print(f"{text}: " + ", ".join(f"{what} {error:.1e}{'' if error <= limit else ' WRONG'}"
                                  for what, error, limit in found), flush=True)
    return sum(not error <= limit for _, error, limit in found)


def same_bits(device, a):
    """Whether both kernels give the same bits ten times, in words."""
    first = None
    for _ in range(10):
        for x in (a.fch, a.fch_gelu, a.dfch, a.sums):
            x.data.memset_async(255, x.nbytes)
        multiply_gelu(device, a.fch, a.fch_gelu, a.inp, a.w, a.bias)
        multiply_dgelu(device, a.dfch, a.sums, a.dout, a.wproj, a.fch_in)
        bits = [x.view(f"u{x.itemsize}").copy() for x in (a.fch, a.fch_gelu, a.dfch, a.sums)]
        first = first or bits
        if not all((x == y).all() for x, y in zip(first, bits)):
            return "error: other bits in another run"
    return "the same bits ten times"


def most_apart(ours, theirs):
    """(the largest difference, NaN if there is one; the largest number), of arrays on a GPU."""
    parts = [[to_float(x[i : i + 4096]).astype(np.float32) for x in (ours, theirs)]
             for i in range(0, len(ours), 4096)]
    return (float(np.max([float(abs(x - y).max()) for x, y in parts])),
            max(float(abs(y).max()) for _, y in parts))


def time(device, text):
    """Print the times at a size beside cuBLASLt's, and how far its results are from ours."""
    a = with_outputs(device, drawn(device, **parse_sizes(text)))
    b = with_outputs(device, a)
    library = super(OwnGelu, device).matmul

    def us(work):
        return f"{1e6 * timing.time_rounds(device, [work]):.0f}"

    def forward():
        multiply_gelu(device, a.fch, a.fch_gelu, a.inp, a.w, a.bias)

    def backward():
        multiply_dgelu(device, a.dfch, a.sums, a.dout, a.wproj, a.fch_in)

    def backward_only():
        multiply_dgelu(device, a.dfch, None, a.dout, a.wproj, a.fch_in)

    forward(), backward()
    words = [same_bits(device, a)]
    library(b.fch, b.inp, b.w.T, b.bias, gelu=b.fch_gelu)
    library(b.dfch, b.dout, b.wproj, dgelu_at=b.fch_in)
    for name in ("fch", "fch_gelu", "dfch"):
        words.append("{} max difference {:.2g} of {:.2g}".format(name, *most_apart(
            getattr(a, name), getattr(b, name))))
    print(f"{text}: {'; '.join(words)}", flush=True)
    for _ in range(2):
        print(f"{text}, us: ours: gelu {us(forward)}, dgelu {us(backward)}, "
              f"without sums {us(backward_only)}; cuBLASLt: gelu "
              f"{us(lambda: library(b.fch, b.inp, b.w.T, b.bias, gelu=b.fch_gelu))}, dgelu "
              f"{us(lambda: library(b.dfch, b.dout, b.wproj, dgelu_at=b.fch_in))}, plain "
              f"{us(lambda: library(b.fch, b.inp, b.w.T))} and "
              f"{us(lambda: library(b.dfch, b.dout, b.wproj))}, with bias "
              f"{us(lambda: library(b.fch, b.inp, b.w.T, b.bias))}", flush=True)


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    wrong, on_gpu = 0, flags.device == "cuda"
    shapes = (flags.shape or SHAPE).split(";")
    for text in shapes:
        sizes = parse_sizes(text)
        if not {"M", "C"} <= sizes.keys() <= {"M", "C", "OC"} or not all(sizes.values()) or (
                sizes["C"] % 64 or sizes.get("OC", 0) % 64):
            raise UserError(f"--shape {text}: expected M, C and perhaps OC, with C and OC "
                            "multiples of 64, such as M=8192,C=1600")
    device = make(flags.device)
    if not flags.no_check:
        checks = shapes if flags.shape and not on_gpu else CHECKS
        wrong = sum(check(device, text) for text in checks)
    if on_gpu and not wrong:
        with device.cupy.cuda.Stream(non_blocking=True):  # the default is not recorded
            for text in shapes:
                time(device, text)
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
