"""Kernels for Hopper, for their tests: inputs, and what is wrong with results beside NumPy in
float64. Attention's gradient with five products, attention_five.cu; the products with GELU,
gelu_products.cu, and with SwiGLU, swiglu_products.cu; Muon's symmetric products, symmetric.cu.

M is the number of rows, B*T; n the number of matrices.
"""
import dataclasses
import functools
import os
from types import SimpleNamespace

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.gpus import capability
from dev.cpu.emulated import Emulated
from dev.features.devices import FastCuda, device_class
from dev.features.feature import stack
from dev.features.fused_biases import SOURCE as FUSED, SummedOutputs
from dev.features.hopper import swiglu_products, symmetric
from dev.features.hopper.attention_five import (
    HOPPER, ROWS, SOURCES as FIVE, blocks_of_keys, five_table, launch_delta, launch_dq,
    launch_five)
from dev.features.hopper.gelu_products import (
    LONG, multiply_dgelu, multiply_gelu)
from dev.features.products import TimedProducts
from dev.lab import heads
from dev.lab.bench import BF16_LIMIT, Bench
from dev.lab.formulas import dswiglu, swiglu
from dev.lab.ladder import ANY, Ladder, SwitchedConfig, Version, parse_sizes
from dev.llama3.train_llama3 import Config3
from dev.tests.models import emulated_with
from train_gpt2 import BF16, UserError, read_kernels, to_float


def check_hopper(name, source):
    """Raise UserError unless a device is Hopper, or emulates it."""
    like_hopper = "-DHOPPER" in os.environ.get("CXXFLAGS", "").split()
    if not like_hopper if name == "emulated" else capability() != HOPPER:
        raise UserError(f"{source.name} is for Hopper: expected such a GPU, or --device emulated "
                        "with CXXFLAGS=\"-O1 -DHOPPER\"")


def in_float64(device, *arrays):
    return [to_float(device.get(x)).astype(np.float64) for x in arrays]


def sums_of_rows(x, height):
    """The sums of each `height` rows of x (rows,columns), the last of which may be fewer."""
    return np.pad(x, ((0, -len(x) % height), (0, 0))).reshape(-1, height, x.shape[1]).sum(1)


def same_bits(run, *outputs):
    """Whether run() gives outputs on a GPU the same bits ten times, in words."""
    first = None
    for _ in range(10):
        for x in outputs:
            x.data.memset_async(255, x.nbytes)
        run()
        bits = [x.view(f"u{x.itemsize}").copy() for x in outputs]
        first = first or bits
        if not all((x == y).all() for x, y in zip(first, bits)):
            return "error: other bits in another run"
    return "the same bits ten times"


# ---- Attention's gradient with five products

FIVE_CHECKS = ("B=1,T=1,NH=2,NKV=2", "B=2,T=33,NH=3,NKV=3", "B=1,T=150,NH=2,NKV=2",
               "B=2,T=300,NH=3,NKV=3", "B=1,T=260,NH=4,NKV=2", "B=1,T=200,NH=2,NKV=1,relu=1",
               "B=1,T=140,NH=2,NKV=2,cold=1", "B=1,T=640,NH=2,NKV=2", "B=1,T=260,NH=6,NKV=1")
FIVE_SHAPE = "B=8,T=2048,NH=16,NKV=16"


@dataclasses.dataclass(frozen=True)
class Config128(SwitchedConfig):
    """Heads of 128 channels."""
    C: int = 256
    NH: int = 2
    defined: tuple = ()  # such as "AT_ONCE=8", for attention_five.cu

    def switches(self):
        return [*super().switches(), *(f"-D{each}" for each in self.defined)]


def problem(draw, B, T, NH, NKV, HS, relu=0, cold=0):
    return heads.backward_problem(draw, B, T, NH, NKV, HS, relu, cold)


def scratch(a):
    kept = blocks_of_keys(a.B, a.T, a.NKV) if a.NKV < a.NH else 0
    blocks = -(-a.T // ROWS)
    sizes = {row.name: row.shape for row in five_table(a.B, a.T, a.NH, kept)}
    return sizes | dict(sums=(a.B, blocks, a.NH + 2 * a.NKV, a.HS), delta=(a.B, a.NH, a.T))


def tiled(a, x):
    return x.reshape(a.B * a.T, -1)


def whole_numbers(a):
    """The arrays, with turns as int32: the ladder makes all scratch float."""
    a.turns = a.turns.view(np.int32)
    return a


def delta(device, a):
    launch_delta(device, whole_numbers(a), a.lse, a.out, a.dout, a.B, a.T, a.NH)


def with_sums(run):
    """A version whose kernels also sum columns, as in a training step."""
    @functools.wraps(run)
    def work(device, a):
        device.column_sums = a.sums
        run(device, a)
        device.column_sums = None
    return work


def gradients(device, a):
    launch_five(device, whole_numbers(a), a.dqkv, tiled(a, a.qkv), tiled(a, a.dout), None, a.scale,
                a.B, a.T, a.NH, a.NKV)


@with_sums
def five(device, a):
    delta(device, a)
    gradients(device, a)
    launch_dq(device, a, a.dqkv, None, a.scale, a.B, a.T, a.NH)


seven = with_sums(heads.trainers_backward)


VERSIONS = [Version(what, run, threads=(), scratch=scratch) for what, run in (
    ("five products", five), ("seven products, the trainer's", seven))]
# turns is filled with bytes of 255, like all scratch: attention_backward_five_delta must clear it.
LADDER = Ladder(problem, FIVE_SHAPE, FIVE_CHECKS, tuple(VERSIONS),
                fp32="lse delta dq stats sums turns kept", sums="dqkv",
                limits=heads.ATTENTION_LIMITS,
                flops=lambda a: 10 * heads.pairs_seen(a) * a.HS,
                torch=heads.torch_backward)


@functools.cache
def make_five(name, *defined, group=1, relu=0):
    """A device for heads of 128 channels. Raises UserError unless it is Hopper, or a CPU like
    it."""
    check_hopper(name, FIVE[-1])
    c = Config128(group=group, relu=relu, defined=defined)
    sources, kind = [FUSED, *FIVE], device_class(name)
    if name == "emulated":
        only = {kernel for kernel in read_kernels([*c.SOURCES, *sources])
                if kernel.startswith(("attention_b", "attention_f"))}
        kind = emulated_with(only)
    return stack(kind, [SummedOutputs])("bf16", c, sources)


def make_five_for(name, text, *defined):
    """The same for sizes in words, with their switches."""
    sizes = parse_sizes(text)
    return make_five(name, *defined, group=sizes["NH"] // sizes["NKV"], relu=sizes.get("relu", 0))


def bench_for(device, text, **changes):
    """The bench for sizes in words."""
    return Bench(LADDER._replace(**changes), device, {**parse_sizes(text), "HS": 128})


def check_sums(bench, a):
    """Raises AssertionError unless the sums of each block's rows are those of dqkv."""
    dqkv, found = in_float64(bench.device, bench.sets[0].dqkv, bench.scratch.sums)
    for b, rows in enumerate(dqkv.reshape(a.B, a.T, -1)):
        wish, sums = sums_of_rows(rows, ROWS), found[b].reshape(-1, rows.shape[1])
        off = abs(sums - wish) - 1e-5 * sums_of_rows(abs(rows), ROWS)
        at = np.unravel_index(off.argmax(), off.shape)
        assert (off <= 0).all(), f"sums[{b}]{at} is wrong"


def check_five(device, text, versions=VERSIONS):
    """Check versions at a size. Returns how many are wrong."""
    bench, wrong = bench_for(device, text), 0
    for version in versions:
        try:
            found = bench.check(version, {})
            assert found.place is None, str(found)
            check_sums(bench, bench.given)
            said = str(found)
        except (AssertionError, UserError) as e:
            wrong, said = wrong + 1, f"error: {e}"
        print(f"{text}: {version.what}: {said}", flush=True)
    return wrong


def inputs_alone(draw, B, T, NH, NKV, HS):
    """Inputs to time: of out and lse the forward pass comes first, and no truth."""
    inputs = heads.sizes_of(B, T, NH, NKV, HS, relu=0) | dict(
        qkv=draw(B, T, NH + 2 * NKV, HS), dout=draw(B, T, NH, HS), out=np.zeros((B, T, NH, HS)),
        lse=np.zeros((B, NH, T)))
    return inputs, dict(dqkv=np.full((B, T, NH + 2 * NKV, HS), ANY))


def filled_bench(device, text):
    """The bench for sizes in words, after the forward pass."""
    bench = bench_for(device, text, problem=inputs_alone)
    heads.trainers_forward(device, bench.sets[0])
    return bench


def same(bench):
    """How far both versions are apart, by Frobenius norm, and whether five gives the same bits in
    each of ten runs, in words."""
    dqkv = bench.sets[0].dqkv
    next(bench.launches(VERSIONS[1], {}))()
    by_seven, work = to_float(dqkv).astype(np.float32), next(bench.launches(VERSIONS[0], {}))

    def run():
        bench.fill(bench.scratch, vars(bench.scratch))  # with NaN
        work()

    said, norm = same_bits(run, dqkv), bench.device.cupy.linalg.norm
    off = float(norm((to_float(dqkv).astype(np.float32) - by_seven).ravel())
                / norm(by_seven.ravel()))
    return f"{said if off < 1e-2 else 'error'}: {off:.1e} from seven products"


# ---- The products with GELU

GELU_KERNELS = {"matmul_gelu", "matmul_dgelu"}
GELU_CHECKS = ("M=1,C=64", "M=129,C=64", "M=300,C=192", "M=640,C=384,OC=320")


def gelu_and_derivative(x):
    """float64 of float64; tanh form."""
    root, inner = np.sqrt(2 / np.pi), x + 0.044715 * x**3
    t = np.tanh(root * inner)
    return x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def array_on(device, shape, dtype):
    """An array of bytes of 255, which are NaN."""
    array = device.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array[...] = 255
    return array.view(dtype).reshape(shape)


def drawing(device):
    """draw(scale, rows, columns): random numbers in bf16 on the device. Of many rows the first
    4,096 are repeated."""
    rng = np.random.default_rng(1)

    def draw(scale, *shape):
        array = array_on(device, shape, BF16)
        for i in range(0, shape[0], 4096):
            if i == 0:
                some = np.float32(scale * rng.standard_normal((min(4096, shape[0]), *shape[1:])))
                device.put(array[:4096], to_bf16(some))
            else:
                array[i : i + 4096] = array[: min(4096, shape[0] - i)]
        return array

    return draw


def drawn(device, M, C, OC=None):
    """Inputs on the device. GELU saturates in some."""
    draw, OC = drawing(device), OC or 4 * C
    return SimpleNamespace(inp=draw(1, M, C), w=draw(2 * C**-0.5, OC, C), bias=draw(3, OC),
                           dout=draw(1, M, C), wproj=draw(C**-0.5, C, OC), fch_in=draw(3, M, OC))


def with_outputs(device, a):
    """The same inputs with outputs of their own."""
    shape = a.fch_in.shape
    return SimpleNamespace(**{**vars(a), **{
        name: array_on(device, shape, BF16) for name in ("fch", "fch_gelu", "dfch")},
        "sums": array_on(device, (-(-shape[0] // LONG), shape[1]), np.float32)})


def gelu(device, a):
    multiply_gelu(device, a.fch, a.fch_gelu, a.inp, a.w, a.bias)


def dgelu(device, a):
    multiply_dgelu(device, a.dfch, a.sums, a.dout, a.wproj, a.fch_in)


def bits_of_gelu(device, a):
    """Whether both kernels give the same bits ten times, in words."""
    return same_bits(lambda: (gelu(device, a), dgelu(device, a)), a.fch, a.fch_gelu, a.dfch, a.sums)


def off(found, wish):
    """How far apart, by Frobenius norm."""
    return np.linalg.norm(found - wish) / np.linalg.norm(wish)


def faults(device, a):
    """Run both on the device. Returns [(what, error, limit)] against NumPy in float64."""
    a = with_outputs(device, a)
    inp, w, bias, dout, wproj, fch_in = in_float64(device, a.inp, a.w, a.bias, a.dout, a.wproj,
                                                   a.fch_in)
    gelu(device, a)
    dgelu(device, a)
    fch, fch_gelu, dfch, sums = in_float64(device, a.fch, a.fch_gelu, a.dfch, a.sums)
    wish = dout @ wproj * gelu_and_derivative(fch_in)[1]
    return [("fch", off(fch, inp @ w.T + bias), BF16_LIMIT),
            ("fch_gelu", off(fch_gelu, gelu_and_derivative(fch)[0]), BF16_LIMIT),
            ("dfch", off(dfch, wish), BF16_LIMIT),
            ("sums", off(sums, sums_of_rows(wish, LONG)), 1e-4)]


# ---- The products with SwiGLU

SWIGLU_KERNELS = {"matmul_swiglu", "matmul_dswiglu"}
SWIGLU_CHECKS = ("M=1,C=64,H=64", "M=129,C=64,H=192", "M=300,C=192,H=256", "M=2700,C=64,H=192")


def make_swiglu(name, *_):
    """A device with the kernels, for all sizes, and on a GPU with Llama's. Raises UserError."""
    check_hopper(name, swiglu_products.SOURCE)
    config = Config3(C=768, NH=12)
    if name == "emulated":
        return Emulated("bf16", config, swiglu_products.SOURCES, only=SWIGLU_KERNELS)
    return stack(FastCuda, [TimedProducts])("bf16", config, swiglu_products.SOURCES)


def drawn_swiglu(device, M, C, H):
    """Inputs on the device, and outputs. SwiGLU saturates in some."""
    draw = drawing(device)
    return SimpleNamespace(
        inp=draw(1, M, C), w=draw(2 * C**-0.5, 2 * H, C), dout=draw(1, M, C),
        wproj=draw(C**-0.5, C, H), fch_in=draw(3, M, 2 * H),
        **{name: array_on(device, (M, 2 * H), BF16) for name in ("fch", "dfch")},
        fch_swiglu=array_on(device, (M, H), BF16))


def with_swiglu(device, a):
    swiglu_products.multiply_swiglu(device, a.fch, a.fch_swiglu, a.inp, a.w)


def with_dswiglu(device, a):
    swiglu_products.multiply_dswiglu(device, a.dfch, a.dout, a.wproj, a.fch_in)


def faults_of_swiglu(device, M, C, H):
    """Run both on the device. Returns [(what, error, limit)] against NumPy in float64. In place
    there have to be the same bits."""
    a = drawn_swiglu(device, M, C, H)
    inp, w, dout, wproj, fch_in = in_float64(device, a.inp, a.w, a.dout, a.wproj, a.fch_in)
    with_swiglu(device, a)
    with_dswiglu(device, a)
    swiglu_products.multiply_dswiglu(device, a.fch_in, a.dout, a.wproj, a.fch_in)
    in_place = (device.get(a.fch_in) == device.get(a.dfch)).all()
    fch, fch_swiglu, dfch = in_float64(device, a.fch, a.fch_swiglu, a.dfch)
    wish, = dswiglu(dout @ wproj, fch_in)
    return [("fch", off(fch, inp @ w.T), BF16_LIMIT),
            ("fch_swiglu", off(fch_swiglu, swiglu(fch)), BF16_LIMIT),
            ("dfch", off(dfch, wish), BF16_LIMIT), ("in place", 1 - in_place, 0)]


# ---- Muon's symmetric products

SYMMETRIC_KERNELS = {"matmul_symmetric", "matmul_gram", "matmul_gram_of_columns"}
SYMMETRIC_CHECKS = ("n=1,rows=16,columns=16", "n=3,rows=136,columns=72", "n=2,rows=200,columns=264",
                    "n=3,rows=392,columns=392")
FACTORS = dict(factor=0.5, share=-2.0, diagonal=3.0)


class AnySide(symmetric.OwnSymmetric):
    """The kernels multiply small matrices, too."""
    smallest = 0


def drawn_matrices(device, n, rows, columns):
    """On the device: matrices x (n,rows,columns) of norm 1, gram, a multiple of x x' or x' x, poly,
    a polynomial of gram, which commutes with it, and scales (n,): powers of 2, which change no
    rounding."""
    rng, x = np.random.default_rng(1), array_on(device, (n, rows, columns), BF16)
    gram, poly = (array_on(device, (n, min(rows, columns), min(rows, columns)), BF16) for _ in "12")
    for i in range(n):
        drawn = rng.standard_normal((rows, columns), np.float32)
        drawn /= np.linalg.norm(drawn)
        product = drawn.T @ drawn if rows > columns else drawn @ drawn.T
        product *= len(product)  # its diagonal is about 1, so all terms of a polynomial count
        device.put(x[i], to_bf16(drawn))
        device.put(gram[i], to_bf16(product))
        device.put(poly[i], to_bf16(product @ product - 2 * product))
    scales = array_on(device, (n,), np.float32)
    device.put(scales, np.exp2(1 + np.arange(n) % 3).astype(np.float32))
    return SimpleNamespace(x=x, gram=gram, poly=poly, scales=scales)


def half(x):
    """A copy of x (n,side,side) that is NaN in the tiles below the diagonal."""
    made, height = x.copy(), symmetric.HEIGHT
    for first in range(height, x.shape[1], height):
        made.view(np.uint16)[:, first : first + height, :first] = 0xffff
    return made


def symmetric_products(device, a):
    """{what: (a call that makes the product in `out`, what it is in float64)}."""
    f, x, gram, poly = FACTORS, *in_float64(device, a.x, a.gram, a.poly)
    s = device.get(a.scales).astype(np.float64)[:, None, None]
    squares = x.transpose(0, 2, 1) @ x if x.shape[1] > x.shape[2] else x @ x.transpose(0, 2, 1)
    with_all = f["factor"] * gram @ gram + f["share"] * poly
    with_all += f["diagonal"] * np.eye(squares.shape[1])
    of_gram, of_poly = half(a.gram), half(a.poly)

    def multiply(out, *factors, **more):
        symmetric.multiply(device, out, *factors, **more)

    return {
        "gram": (lambda out: symmetric.multiply_gram(device, out, a.x), squares),
        "scaled": (lambda out: symmetric.multiply_gram(device, out, a.x, a.scales),
                   s * s * squares),
        "poly": (lambda out: multiply(out, of_gram, add=of_poly, **f), with_all),
        "whole": (lambda out: multiply(out, of_gram, add=of_poly, both_sides=True,
                                       scales=a.scales, **f), s * with_all),
        "of two": (lambda out: multiply(out, of_gram, of_poly), gram @ poly)}


def symmetric_faults(device, a):
    """Make the products. Returns [(what, error, limit)] against NumPy in float64. Below the
    diagonal's tiles nothing may be stored, or in "whole", the same bits as above them."""
    found = []
    for what, (make, wish) in symmetric_products(device, a).items():
        out = array_on(device, wish.shape, BF16)
        make(out)
        product, = in_float64(device, out)
        panel = np.arange(wish.shape[1]) // symmetric.HEIGHT
        below = np.broadcast_to(panel[:, None] > panel, wish.shape)
        turned = product.transpose(0, 2, 1)
        right = product == turned if what == "whole" else np.isnan(product)
        found += [(what, off(np.where(below, turned, product), wish), BF16_LIMIT),
                  (f"{what}: sides", (below & ~right).sum(), 0)]
    return found
