"""Test the products with GELU of dev/features/hopper/gelu_products.cu: on a CPU as on Hopper, and
on a Hopper GPU beside cuBLASLt.
"""
from unittest import mock

import numpy as np

from dev.bench.step_by_kernel import work_of
from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.devices import FastCuda
from dev.features.fused_biases import SOURCE as FUSED, with_summed_outputs
from dev.features.hopper import attention_five, gelu_products, swiglu_products
from dev.features.hopper.gelu_products import SHORT, fits, with_own_gelu
from dev.features.recompute import LLAMA_SOURCE as RECOMPUTE_LLAMA, SOURCE as RECOMPUTE
from dev.lab.bench import BF16_LIMIT
from dev.lab.ladder import parse_sizes
from dev.llama3.train_llama3 import Llama3
from dev.tests import hopper
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.models import (AS_HOPPER, check_compiled, check_in_each_order, gradients,
                              model_class, on_device, on_hopper)
from train_gpt2 import BF16, UserError, to_float


def small_device(sources=gelu_products.SOURCES, flags=AS_HOPPER):
    """A CPU with the kernels alone, as on Hopper."""
    return on_hopper(Emulated, "bf16", Config(C=768, NH=12), sources, flags=flags,
                     only=hopper.GELU_KERNELS)


def device_for(device_name):
    """The device, or None if its GPU is no Hopper."""
    if device_name != "cuda":
        return small_device()
    return on_hopper(with_own_gelu(FastCuda), "bf16", Config(C=768, NH=12), gelu_products.SOURCES)


def test_products(device_name):
    """Both products and the sums against NumPy in float64, at sizes with ragged rows."""
    device = device_for(device_name)
    for text in hopper.GELU_CHECKS if device else ():
        given = hopper.drawn(device, **parse_sizes(text))
        check_in_each_order(text, device, hopper.faults, device, given)


def test_saturated(device_name):
    """GELU and its derivative of -1e9 .. 1e9, where powers overflow. fch becomes the bias."""
    device = device_for(device_name)
    if not device:
        return
    size = np.logspace(-3, 9, 128)
    x = to_float(to_bf16(np.float32(np.r_[-size[::-1], size])))
    a = hopper.with_outputs(device, hopper.drawn(device, 130, 64))
    device.put(a.bias, to_bf16(x))
    device.put(a.inp, np.zeros(a.inp.shape, np.uint16))
    device.put(a.fch_in, to_bf16(np.broadcast_to(x, a.fch_in.shape)))
    gelu_products.multiply_gelu(device, a.fch, a.fch_gelu, a.inp, a.w, a.bias)
    gelu_products.multiply_dgelu(device, a.dfch, None, a.dout, a.wproj, a.fch_in)
    wish, derivative = hopper.gelu_and_derivative(np.float64(x))
    yield "fch", device.get(a.fch), np.broadcast_to(x, a.fch.shape), EXACT
    dout, wproj = (np.float64(to_float(device.get(x))) for x in (a.dout, a.wproj))
    for name, found, right in (("gelu", a.fch_gelu, wish),
                               ("dgelu", a.dfch, dout @ wproj * derivative)):
        off = abs(to_float(device.get(found)) - right) - 1e-2 * abs(right)
        check(f"{name} of large numbers", (off < 1e-3).all(), off.max())


def whole(device, text="M=580,C=384,OC=320", more_rows=0):
    """The first wrong result, or "outside" if more than N rows were written, or "". more_rows: how
    many rows more the results' tensor maps allow to store."""
    a = hopper.drawn(device, **parse_sizes(text))
    outputs = [hopper.array_on(device, (len(a.inp) + 2 * SHORT, a.fch_in.shape[1]), BF16)
               for _ in range(3)]
    with mock.patch.object(hopper, "array_on", lambda device, shape, dtype: (
            outputs.pop()[: shape[0]] if dtype == BF16 else on_device(
                device, np.full(shape, np.nan, dtype)))):
        kept, maps = [*outputs], gelu_products.maps
        starts = {x.ctypes.data for x in kept}

        def wider(device, *arrays):
            return [device.tensor_map(x, len(x) + more_rows, x.shape[1])
                    if x.ctypes.data in starts else maps(device, x)[0] for x in arrays]

        try:
            with mock.patch.object(gelu_products, "maps", wider):
                found = hopper.faults(device, a)
        except UserError as e:
            return f"{e}"
    if any((device.get(x)[len(a.inp) :] != 0xffff).any() for x in kept):
        return "outside"
    return next((what for what, error, limit in found if not error <= limit), "")


def wrong(race=False):
    """The first wrong result, or what a CPU says, or "". race: look for races."""
    if race:
        return whole(small_device(flags=f"{AS_HOPPER} {races.FLAG}"), "M=150,C=64")
    return whole(small_device())


def with_fault(sources, old, new, folder):
    """The sources with a replacement in the one that has this text, copied to a folder."""
    texts = {path.name: path.read_text("utf-8") for path in sources}
    assert sum(text.count(old) for text in texts.values()) == 1, old
    for name, text in texts.items():
        (folder / name).write_text(text.replace(old, new), "utf-8")
    return [folder / name for name in texts]


def test_slow_warpgroup(folder):
    """Warpgroup 1 may come to its first box of fch when warpgroup 0 has replaced the first one of
    its second tile. So no wait may take a box of another tile for its own."""
    slow = with_fault(gelu_products.SOURCES, "unsigned box = 6 * n;", """unsigned box = 6 * n;
        for (int i = 0; i < 2 && n == 1; i++) mbarrier_wait(waits.dfch_there[12 % RING], i);""",
                      folder)
    said = whole(small_device(slow))
    check("a slow warpgroup", said == "", said)
    for old, new in (("[i / 6 % 2][i % 6]", "[i % RING / 6][i % RING % 6]"),
                     ("[n % 2][b]", "[box % RING / 6][box % RING % 6]"),
                     ("box / 12 % 2", "box / RING % 2")):
        slow = with_fault(slow, old, new, folder)
    said = whole(small_device(slow))
    check("with an mbarrier for each place in the ring", "stuck" in said, said)


def test_choice(device_name):
    """What does not fit goes to cuBLASLt."""
    device = device_for(device_name)
    if not device:
        return
    a = hopper.drawn(device, 8, 128)
    check("fits", fits(a.inp, a.w, a.fch_in))
    for what, arrays in (("a transposed weight", (a.inp, a.w.T, a.fch_in)),
                         ("part of the channels", (a.inp[:, :64], a.w, a.fch_in)),
                         ("fp32", (a.inp.view(np.float32), a.w, a.fch_in)),
                         ("a part of a result's columns", (a.inp, a.w, a.fch_in[:, :256]))):
        check(f"does not fit: {what}", not fits(*arrays))
    b = hopper.drawn(device, 8, 96, 384)
    check("does not fit: 96 channels", not fits(b.inp, b.w, b.fch_in))


def test_map_of_fours():
    """The driver is asked for boxes with each fourth row of w, in the layout that wgmma reads. It
    is asked once, and its error is reported."""
    OC, C, asked, status = 320, 128, [], 0

    class Driver:
        def cuTensorMapEncodeTiled(self, at, *arguments):
            asked.append([x.value if hasattr(x, "value") else [*x] if hasattr(x, "__len__") else x
                          for x in arguments])
            return status

    w = np.arange(OC * C, dtype=np.uint16).reshape(OC, C)
    on_gpu = mock.Mock(shape=w.shape, data=mock.Mock(ptr=4096))
    device = mock.Mock(maps={}, AVOID="")
    with mock.patch("ctypes.CDLL", return_value=Driver()):
        made = [gelu_products.map_of_fours(device, on_gpu) for _ in range(2)]
        check("made once", len(asked) == 1 and made[0].ctypes.data == made[1].ctypes.data)
        status = 1
        device.maps.clear()
        check_refusal("an error", r"cuTensorMapEncodeTiled failed with status 1: \(320, 128\)",
                      gelu_products.map_of_fours, device, on_gpu)
    kind, rank, start, sizes, strides, box, *rest = asked[0]
    yield "bf16, 4 dimensions, where", [kind, rank, start], [9, 4, 4096], EXACT
    check("every element, 128-byte swizzle, zeros beyond", rest == [[1] * 4, 0, 3, 2, 0], rest)
    as_asked = np.lib.stride_tricks.as_strided(w, sizes[::-1], [*strides[::-1], 2])
    for row in range(4):
        c, s = slice(64, 64 + box[0]), slice(16, 16 + box[2])
        yield (f"row {row} of 48 fours", as_asked[0, s, row, c],
               w[64 + row : 64 + 4 * 48 : 4, 64:128], EXACT)
    yield "one row of each", [box[1], box[3]], 1, EXACT


def test_training():
    """A model's gradients over two micro-batches with these products, as without them."""
    c = Config(maxT=96, V=257, Vp=384, L=2, NH=2, C=128)
    own = on_hopper(with_summed_outputs(with_own_gelu(Emulated)), "bf16", c,
                    (*gelu_products.SOURCES, FUSED))
    plain = on_hopper(Emulated, "bf16", c, gelu_products.SOURCES)
    models = [GPT2(c, plain, 2, 96), class_on_gpu(GPT2)(c, own, 2, 96)]
    rng = np.random.default_rng(1)
    batches = [(rng.integers(257, size=(2, 96)), rng.integers(257, size=(2, 96))) for _ in "12"]
    launched, launch = [], own.launch
    work = []  # as the tables of kernels count it

    def counting(name, items, *args, **more):
        launched.append(name)
        if name in hopper.GELU_KERNELS:
            work.append(work_of((name, (items, 1), args), c, 2, 96, 0, {}))
        launch(name, items, *args, **more)

    own.launch = counting
    found = []
    for each in models:
        each.set_parameters(draw_parameters(c, 1))
        found.append(gradients(each, *batches))
    check("launched", launched.count("matmul_gelu") == launched.count("matmul_dgelu") == 4 and not
          {"gelu_forward", "gelu_backward", "matmul_backward_bias", "sum_rows"} & {*launched},
          {*launched})
    size = "matmul 192 x 512 x 128 +"
    check("FLOPs", {*work} == {(f"{size} GELU", "FLOP", 2 * 192 * 512 * 128),
                               (f"{size} GELU's gradient", "FLOP", 2 * 192 * 512 * 128)}, work)
    for name, wish in found[0].items():
        yield name, found[1][name], wish, 4 * BF16_LIMIT


def class_on_gpu(Model, *given):
    """The class that trains on a GPU in bf16, with these flags of features."""
    return model_class(Model, "--device", "cuda", "--dtype", "bf16", *given, plain=0)


def noting(launch, names):
    """launch, which notes the names of kernels."""
    return lambda name, *args, **more: (names.append(name), launch(name, *args, **more))


def test_any_model():
    """What runs on a GPU in bf16, GPT-2 or Llama 3, recomputing or not, has the gradients that it
    has without the features of a GPU."""
    for Model, recompute in ((GPT2, 1), (GPT2, 2), (Llama3, 0), (Llama3, 1), (Llama3, 2)):
        more = dict(NKV=1) if Model is Llama3 else {}
        c = Model.Config(**more, maxT=64, V=257, Vp=384, L=2, NH=2, C=128)
        again = "--recompute", f"{recompute}"
        found, launched = [], []
        for plain in (True, False):
            kind = (Emulated if plain or Model is Llama3 else
                    with_summed_outputs(with_own_gelu(Emulated)))
            again_too = RECOMPUTE_LLAMA if Model is Llama3 else RECOMPUTE
            device = on_hopper(kind, "bf16", c, (
                *gelu_products.SOURCES, swiglu_products.SOURCE,
                FUSED if kind is not Emulated else again_too, again_too))
            device.launch = noting(device.launch, launched)
            model = (model_class if plain else class_on_gpu)(Model, *again)(c, device, 1, 64)
            model.set_parameters(draw_parameters(c, 1))
            tokens = np.random.default_rng(1).integers(257, size=(2, 1, 64))
            found.append(gradients(model, tokens))
        own = {name for name in launched if name.startswith("matmul_d")}
        wish = "matmul_dgelu" if Model is GPT2 else "matmul_dswiglu"
        check(f"{Model.__name__} {again}: launched", own == {wish}, own)
        for name, wish in found[0].items():
            yield f"{Model.__name__} {again} {name}", found[1][name], wish, 4 * BF16_LIMIT


def test_compiled():
    """For sm_90a nothing spills, and a block fits a multiprocessor; attention_five.cu is there,
    too, and so are the functions that both have."""
    check_compiled(Config(C=1024, NH=8), (*attention_five.SOURCES, *gelu_products.SOURCES),
                   hopper.GELU_KERNELS, gelu_products.THREADS, gelu_products.SHARED)


def test_beside_library(device_name):
    """On a Hopper GPU: close to cuBLASLt's results at a real shape, and the same bits ten times."""
    if device_name != "cuda":
        return
    device = device_for(device_name)
    for M, C in ((4096, 768), (8192, 1600)) if device else ():
        a = hopper.with_outputs(device, hopper.drawn(device, M, C))
        b = hopper.with_outputs(device, a)
        said = hopper.bits_of_gelu(device, a)
        check(f"{M, C} bits", said.startswith("the same"), said)
        library = super(gelu_products.OwnGelu, device).matmul
        library(b.fch, b.inp, b.w.T, b.bias, gelu=b.fch_gelu)
        library(b.dfch, b.dout, b.wproj, dgelu_at=b.fch_in)
        for name in ("fch", "fch_gelu", "dfch"):
            yield f"{M, C} {name}", device.get(getattr(a, name)), to_float(
                device.get(getattr(b, name))), BF16_LIMIT
