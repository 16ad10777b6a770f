"""Test Llama's products with SwiGLU of dev/features/hopper/swiglu_products.cu: on a CPU as on
Hopper, and on a Hopper GPU.
"""
from unittest import mock

import numpy as np

from dev.tests import hopper
from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.dropout import DroppedOutputs, INSIDE, SOURCE as DROPOUT
from dev.features.feature import stack
from dev.features.hopper import swiglu_products
from dev.lab.bench import BF16_LIMIT
from dev.lab.formulas import dswiglu, swiglu
from dev.lab.ladder import parse_sizes
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests.checks import EXACT, check
from dev.tests.models import (AS_HOPPER, check_compiled, check_in_each_order, gradients,
                              model_class, on_device, on_hopper)
from dev.tests.test_gelu_products import class_on_gpu, noting
from train_gpt2 import UserError, to_float


def small_device(flags=AS_HOPPER):
    """A CPU with the kernels alone, as on Hopper."""
    return on_hopper(Emulated, "bf16", Config(C=768, NH=12), swiglu_products.SOURCES, flags=flags,
                     only=hopper.SWIGLU_KERNELS)


def device_for(device_name):
    """The device, or None if its GPU is no Hopper."""
    if device_name != "cuda":
        return small_device()
    try:
        return hopper.make_swiglu(device_name)
    except UserError as e:
        print(f"skipped: {e}")


def test_products(device_name):
    """Both products against NumPy in float64, at sizes with ragged rows and columns, and with more
    rows of tiles than TALL."""
    device = device_for(device_name)
    for text in hopper.SWIGLU_CHECKS if device else ():
        check_in_each_order(text, device, hopper.faults_of_swiglu, device,
                            *parse_sizes(text).values())


def test_saturated(device_name):
    """SwiGLU and its gradient where gate is -1e9 .. 1e9, and powers overflow."""
    device = device_for(device_name)
    if not device:
        return
    a = hopper.drawn_swiglu(device, 130, 64, 128)
    size = np.logspace(-3, 9, 64)
    gate = to_float(to_bf16(np.float32(np.r_[-size[::-1], size])))
    both = np.broadcast_to(np.r_[np.linspace(-2, 2, 128), gate].astype(np.float32), (130, 256))
    device.put(a.fch_in, to_bf16(both))
    one = np.zeros((256, 64), np.float32)
    one[:, 0] = both[0]  # fch becomes the same by a product with a unit vector
    device.put(a.w, to_bf16(one))
    device.put(a.inp, to_bf16(np.float32(np.eye(1, 64).repeat(130, 0))))
    hopper.with_swiglu(device, a)
    hopper.with_dswiglu(device, a)
    rounded = np.float64(to_float(to_bf16(both)))
    yield "fch", to_float(device.get(a.fch)), rounded, EXACT
    dout, wproj = (np.float64(to_float(device.get(x))) for x in (a.dout, a.wproj))
    with np.errstate(over="ignore"):
        wishes = swiglu(rounded), dswiglu(dout @ wproj, rounded)[0]
    for name, wish in zip(("fch_swiglu", "dfch"), wishes):
        found = to_float(device.get(getattr(a, name)))
        off = abs(found - wish) - 1e-2 * abs(wish)
        check(f"{name} of large numbers", (off < 1e-3).all(), off.max())


def whole(device, text="M=2400,C=128,H=320"):
    """The first wrong result, or "outside" if more than N rows were written, or ""."""
    behind = []  # rows of which nobody may write

    def longer(device, shape, dtype):
        array = on_device(device, np.full((shape[0] + 256, *shape[1:]), 0xffff, dtype))
        behind.append(array[shape[0] :])
        return array[: shape[0]]

    try:
        with mock.patch.object(hopper, "array_on", longer):
            found = hopper.faults_of_swiglu(device, **parse_sizes(text))
    except UserError as e:
        return f"{e}"
    if any((device.get(rows) != 0xffff).any() for rows in behind):
        return "outside"
    return next((what for what, error, limit in found if not error <= limit), "")


def wrong(race=False):
    """The first wrong result, or what a CPU says, or "". race: look for races."""
    if race:
        return whole(small_device(f"{AS_HOPPER} {races.FLAG}"), "M=150,C=64,H=64")
    return whole(small_device())


def test_training():
    """A model's gradients over two micro-batches with these products as without them, also with
    dropout, which drops the gradient that the second of them reads. Where H is no multiple of 64,
    the trainer's kernels compute SwiGLU."""
    for H, given in ((256, ()), (192, ("--dropout", "0.2")), (200, ())):
        c = Config3(NKV=1, maxT=64, V=257, L=2, NH=2, C=128, multiple_of=8,
                    ffn_multiplier=(H + 0.5) / 341)
        assert c.H == H
        found = []
        for kind, mixins in ((model_class, []), (class_on_gpu, [DroppedOutputs] * bool(given))):
            device = on_hopper(stack(Emulated, mixins), "bf16", c,
                               (*swiglu_products.SOURCES, DROPOUT, *INSIDE.sources))
            launched = []
            device.launch = noting(device.launch, launched)
            model = kind(Llama3, *given)(c, device, 1, 64)
            model.set_parameters(draw_parameters(c, 1))
            tokens = np.random.default_rng(1).integers(257, size=(2, 2, 1, 64))
            found.append(gradients(model, *tokens))
        own = {name for name in launched if "swiglu" in name}
        check(f"H={H}: launched", own == ({"matmul_swiglu", "matmul_dswiglu"} if H % 64 == 0 else
                                          {"swiglu_forward", "swiglu_backward"}), own)
        for name, wish in found[0].items():
            yield f"H={H} {given} {name}", found[1][name], wish, 4 * BF16_LIMIT


def test_compiled():
    """For sm_90a nothing spills, and a block fits a multiprocessor."""
    check_compiled(Config3(C=1024, NH=8), swiglu_products.SOURCES, hopper.SWIGLU_KERNELS,
                   swiglu_products.THREADS, swiglu_products.SHARED)


def test_beside_library(device_name):
    """On a Hopper GPU: close to cuBLASLt's products and the trainer's kernels at the sizes of Llama
    3.2 1B, and the same bits ten times."""
    device = device_for(device_name) if device_name == "cuda" else None
    if not device:
        return
    a = hopper.drawn_swiglu(device, 4096, 2048, 8192)
    b = hopper.drawn_swiglu(device, 4096, 2048, 8192)
    said = hopper.same_bits(
        lambda: (hopper.with_swiglu(device, a), hopper.with_dswiglu(device, a)),
        a.fch, a.fch_swiglu, a.dfch)
    check("bits", said.startswith("the same"), said)
    N, H = b.fch_swiglu.shape
    device.matmul(b.fch, b.inp, b.w.T)
    device.launch("swiglu_forward", N * H, b.fch_swiglu, b.fch, N, H)
    for name in ("fch", "fch_swiglu"):
        yield name, device.get(getattr(a, name)), to_float(device.get(getattr(b, name))), BF16_LIMIT
    device.matmul(b.fch_swiglu, b.dout, b.wproj)
    device.launch("swiglu_backward", N * H, b.dfch, b.fch_swiglu, b.fch_in, N, H)
    yield "dfch", device.get(a.dfch), to_float(device.get(b.dfch)), 2 * BF16_LIMIT
