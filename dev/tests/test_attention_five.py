"""Test attention's gradient with five products, dev/features/hopper/attention_five.cu, for heads of
128 channels.

On a Hopper GPU: also the same bits in ten runs.
"""
import contextlib
import io
import os
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common import gpus
from dev.common.bf16 import to_bf16
from dev.common.gpus import capability
from dev.cpu import races
from dev.features.base import GPT2, Training
from dev.features.devices import device_class
from dev.features.fp8.fp8 import fp8_device
from dev.features.hopper import attention_five
from dev.features.hopper.attention_five import FiveProducts
from dev.features.order import FEATURES
from dev.lab.bench import BF16_LIMIT
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests import hopper
from dev.tests.checks import EXACT, check
from dev.tests.models import AS_HOPPER, SMALL_MODEL, on_hopper, poisoned_model
from train_gpt2 import offsets, pack_batch, to_float

CXXFLAGS = AS_HOPPER
A_SIZE = "B=3,T=200,NH=2,NKV=2"  # with 6 heads, of which 4 are done at once
# A block that waits for the first; and shares of its heads
RACE_SIZES = "B=1,T=140,NH=1,NKV=1", "B=1,T=140,NH=2,NKV=1"


def runs_on(device_name):
    return device_name != "cuda" or capability() == 90


def test_results(device_name):
    """dqkv and its sums, at odd sizes, with heads that share keys, with ReLU and with huge
    scores."""
    for text in hopper.FIVE_CHECKS:
        check(f"five products {text}", *checked(device_name, text))
    for text in ("B=2,T=300,NH=3,NKV=3", "B=3,T=260,NH=4,NKV=2"):  # with several sections of heads
        check(f"five products, 4 heads at once, {text}", *checked(device_name, text, "AT_ONCE=4"))


def checked(device_name, text, *defined):
    """(whether five products are right at a size, what is said)."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        device = hopper.make_five_for(device_name, text, *defined)
        wrong = hopper.check_five(device, text, hopper.VERSIONS[:1])
    return not wrong, said.getvalue().strip().rpartition("products: ")[2]


def test_bits(device_name):
    """Two runs give the same bits, on a GPU in which blocks of many heads wait for each other."""
    if device_name == "cuda":
        device = hopper.make_five("cuda")
        with device.cupy.cuda.Stream(non_blocking=True):
            said = hopper.same(hopper.filled_bench(device, "B=4,T=1000,NH=16,NKV=16"))
        check("the same bits ten times", said.startswith("the same"), said)


def test_model(device_name):
    """A model with this feature has the gradient that the plain one has, for batches of two
    shapes."""
    device, found = hopper.make_five(device_name), []
    for kind in (GPT2, type("Five", (FiveProducts, GPT2), {})):
        of_model = kind(hopper.Config128(maxT=300, V=50, Vp=64, L=1, NH=2, C=256), device, 2,
                        300)
        launched, results, draw = [], [], np.random.default_rng(1)
        with noted(device, launched):
            for B, T in ((2, 300), (1, 140)):
                of_model.set_batch(pack_batch(*np.zeros((2, B, T), np.int32)))
                a, back = of_model.layers[0][1], of_model.back
                for array in (a.qkv, back.dinp):
                    device.put(array, to_bf16(np.float32(draw.standard_normal(array.shape))))
                of_model.attention_forward(a.atty, a.lse, a.qkv)
                blocks, width = B * -(-T // device.attention_sizes.rows), a.qkv.shape[1]
                device.column_sums = device.empty(4 * blocks * width).view(np.float32)
                of_model.attention_backward(back.dqkv, back.dinp, a.atty, a.lse, a.qkv)
                sums, device.column_sums = device.get(device.column_sums), None
                results += to_float(device.get(back.dqkv)), sums.reshape(blocks, width).sum(0)
        found.append((results, {*launched}))
    (plain, by_plain), (five, by_five) = found
    seven_of, five_of = "attention_backward_q", "attention_backward_five"
    check("the plain one takes seven products", seven_of in by_plain and five_of not in by_plain)
    check("with the feature it takes five", five_of in by_five and seven_of not in by_five)
    for name, one, other in zip(("dqkv", "sums", "dqkv, another shape",
                                 "sums, another shape"), five, plain):
        yield name, one, other, BF16_LIMIT


def test_shares():
    """As many blocks share the heads of a block of keys as a GPU needs, if they divide them; the
    arena of a larger batch has room for a smaller one."""
    gpu = SimpleNamespace(multiprocessors=132, hopper=True)
    for B, T, NH, NKV, wish in ((8, 1024, 12, 2, 2), (16, 1024, 12, 2, 2), (17, 1024, 12, 2, 1),
                                (4, 1024, 12, 2, 3), (1, 2048, 24, 8, 3), (1, 128, 28, 4, 7),
                                (8, 1024, 28, 4, 1), (8, 1024, 12, 12, 1)):
        found = attention_five.shares_for(gpu, B, T, NH, NKV)
        check(f"shares for {B=} {T=} {NH=} {NKV=}", found == wish, found)
    c = SimpleNamespace(C=1536, NH=12, NKV=2)
    for sizes in ((17, 1024), (16, 1024), (8, 1024), (8, 1023), (3, 100)):
        large, small = (offsets(FiveProducts.five_table(c, gpu, *of))[-1]
                        for of in ((17, 1024), sizes))
        rows = {row.name: row.shape for row in FiveProducts.five_table(c, gpu, *sizes)}
        blocks = attention_five.blocks_of_keys(*sizes, c.NKV)
        check(f"{sizes} fit", small <= large and (
            attention_five.shares_for(gpu, *sizes, c.NH, c.NKV) == 1 or rows["kept"][0] >= blocks))


def test_llama(device_name):
    """Where four heads share keys, and with RoPE: dqkv is that of seven products, rotated back in
    float64. With any number of shares."""
    B, T, NH, HS = 2, 150, 4, 128
    c = Config3(maxT=T, V=50, L=1, NH=NH, NKV=1, C=NH * HS, multiple_of=64)
    device = on_hopper(device_class(device_name), "bf16", c, attention_five.SOURCES)
    models = [kind(c, device, B, T) for kind in (
        Llama3, type("Five", (FiveProducts, Llama3), {}))]
    draw, found = np.random.default_rng(2), []
    values = [to_bf16(np.float32(draw.standard_normal((B * T, width)))) for width in (c.QKV, c.C)]
    for i, model in enumerate((models[0], *[models[1]] * 3)):
        shares = (None, 1, 2, 4)[i]
        model.set_batch(pack_batch(*np.zeros((2, B, T), np.int32)))
        model.embedding_forward()  # makes RoPE's table
        a, back = model.layers[0][1], model.back
        for array, value in zip((a.qkv, back.dinp), values):
            device.put(array, value)
        model.attention_forward(a.atty, a.lse, a.qkv)
        with mock.patch.object(attention_five, "shares_for", return_value=shares):
            model.attention_backward(back.dqkv, back.dinp, a.atty, a.lse, a.qkv)
            if i > 0:
                model.rope("rope_backward", back.dqkv)  # does nothing
        found.append(np.float64(to_float(device.get(back.dqkv))))
    wish = found[0].reshape(B, T, NH + 2, HS).copy()
    pairs = wish[:, :, : NH + 1].reshape(B, T, NH + 1, HS // 2, 2).copy()
    turn = np.exp(-1j * np.arange(T)[:, None] * c.theta ** (-np.arange(0, HS, 2) / HS))
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn[:, None]
    wish[:, :, : NH + 1] = np.stack([turned.real, turned.imag], -1).reshape(B, T, NH + 1, HS)
    for shares, each in zip((1, 2, 4), found[1:]):
        yield f"dqkv, {shares=}", each.reshape(wish.shape), wish, 2 * BF16_LIMIT


def noted(device, launched):
    """Has the device's launch also append each kernel's name to launched."""
    launch = device.launch

    def with_note(name, *args, **sizes):
        launched.append(name)
        launch(name, *args, **sizes)

    return mock.patch.object(device, "launch", with_note)


def test_in_fp8(device_name):
    """In FP8, where dqkv goes straight to 8 bits, steps have the losses and the gradient that seven
    products give."""
    found = []
    for kind in (GPT2, type("GPT2", (FiveProducts, GPT2), {})):
        device = fp8_device(device_name, hopper.Config128(C=256, NH=2), graph=False,
                            beside=attention_five.SOURCES)
        device.architecture, SMALL_MODEL[kind] = kind, SMALL_MODEL[GPT2]
        model, launched = poisoned_model(device, 1, 70, fp8="all", L=1, C=256, NH=2), []
        batch = pack_batch(*np.random.default_rng(5).integers(257, size=(2, 1, 70), dtype=np.int32))
        losses = []
        with noted(device, launched):
            for _ in range(3):
                model.train_step(batch, learning_rate=1e-3)
                losses.append(model.verdict().loss)
        casts = sum(name == "to_fp8" for name in launched)
        found.append(SimpleNamespace(losses=np.array(losses), casts=casts, dqkvw=device.get(
            model.grads.qkvw), by_five="attention_backward_five" in launched))
    seven, five = found
    check("FP8 with five products", five.by_five and not seven.by_five)
    check("FP8: no more casts than with seven", five.casts == seven.casts,
          f"{five.casts} {seven.casts}")
    yield "FP8: losses", five.losses, seven.losses, 1e-3
    yield "FP8: dqkvw", five.dqkvw, to_float(seven.dqkvw), 0.1


def test_others(device_name):
    """Heads of other sizes, other dtypes and GPUs other than Hopper are not affected; a GPU asks
    for the feature. What the kernels write is found by FP8, which knows gradients by the kernels'
    names."""
    outputs = re.findall(r"(\w+)\(\s*Output\b dqkv", attention_five.SOURCE.read_text("utf-8"))
    check("names of kernels that write gradients",
          len(outputs) == 2 and all("backward" in name for name in outputs))
    for is_hopper, C in ((True, 128), (False, 256)):
        base = type("Base", (), dict(tables=classmethod(lambda cls, *sizes: {})))
        kind = type("Five", (FiveProducts, base), {})
        tables = kind.tables(SimpleNamespace(C=C, NH=2), SimpleNamespace(hopper=is_hopper), 1, 64)
        yield f"no arena, {is_hopper=} {C=}", np.array(len(tables)), 0, EXACT
    run = Training(SimpleNamespace())
    run.layers, run.Device = [attention_five.FEATURE], lambda dtype, c, beside: beside
    for gpu, dtype, C, wish in ((90, "bf16", 256, 2), (90, "fp8", 256, 2), (90, "bf16", 128, 0),
                                (90, "tf32", 256, 0),
                                (80, "bf16", 256, 0), (100, "bf16", 256, 0)):
        run.config, run.flags = SimpleNamespace(C=C, NH=2), SimpleNamespace(dtype=dtype)
        with mock.patch.object(gpus, "capability", return_value=gpu):
            yield f"files for {gpu} {dtype} {C // 2}", np.array(len(run.make_device())), wish, EXACT
    [row] = [feature for feature in FEATURES if feature.name == "five products"]
    for device, plain, mask, wish in (("cuda", 0, 0, True), ("cuda", 1, 0, False),
                                      ("cpu", 0, 0, False), ("cuda", 0, 1, False)):
        flags = SimpleNamespace(device=device, plain=plain, document_mask=mask)
        asked = bool(row.asked(flags, None))
        yield f"asked for, {device} {plain=} {mask=}", np.array(asked), wish, EXACT


def wrong(race=False):
    """The first wrong result, or what a CPU says, or "". race: look for races."""
    sizes = RACE_SIZES if race else [A_SIZE, *hopper.FIVE_CHECKS]
    with mock.patch.dict(os.environ, CXXFLAGS=f"{AS_HOPPER} {races.FLAG}" if race else AS_HOPPER):
        results = (checked("emulated", text, "AT_ONCE=4") for text in sizes)
        return next((said or "wrong" for right, said in results if not right), "")
