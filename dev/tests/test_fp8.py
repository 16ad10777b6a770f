"""Test FP8, --dtype fp8, against the 8-bit formats of ml_dtypes (pip install ml_dtypes).

Resuming in FP8 is tested in dev/tests/test_resume.py, and FP8 on several ranks in
dev/tests/test_ranks.py.
"""
import contextlib
import itertools
from unittest import mock

import numpy as np
import pytest

from dev.common.bf16 import master_numbers, to_bf16
from dev.common.config import Config, read_parameters
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.dropout import SOURCE as DROPOUT
from dev.features.fp8 import fp8
from dev.features.fp8.fp8 import fp8_device
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.models import (FIXTURES, RECOMPUTE, RECOMPUTE_LLAMA, SMALL_MODEL, device_of,
                              gradients, in_each_order, model_class, on_device, poisoned_model,
                              read_debug_state)
from train_gpt2 import BF16, pack_batch, to_float


ml_dtypes = pytest.importorskip("ml_dtypes")


def cut_off(x, scale=1):
    """fp32 x times the scale, rounded to 8 bits: to the nearest number, at most the largest. NaN
    and infinity are the byte 0x7f, NaN."""
    bytes_ = np.clip(scale * x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isfinite(x), bytes_, 0x7F).astype(np.uint8)


def in_8_bits(values, scale):
    """The numbers that a twin (an 8-bit copy) of these values holds, in float64."""
    return e4m3(cut_off(values, np.float32(scale))) / float(scale)


def small_model(device_name, architecture=GPT2, T=23, graph=True, beside=(), **more):
    """(a device, a model of two layers and sequences of T tokens on it)."""
    sizes = SMALL_MODEL[architecture] | dict(C=64, NH=2)
    place = fp8_device(device_name, architecture.Config(**sizes), graph=graph, beside=beside)
    place.architecture = architecture
    return place, poisoned_model(place, 2, T, C=64, NH=2, **more)


def a_batch(T=23):
    return pack_batch(*np.random.default_rng(5).integers(257, size=(2, 2, T), dtype=np.int32))


def e4m3(bytes_):
    """The numbers of these bytes, in float64."""
    return bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_numbers(device_name):
    """Every bf16 becomes the 8-bit number that ml_dtypes rounds it to, at several scales, and the
    largest magnitude is found, NaNs aside."""
    device = device_of(device_name, "fp8", 64, 2, plain=False)
    every = np.arange(2**16).astype(np.uint16)
    every_byte = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    yield "values", fp8.Fp8OnCpu.VALUES[:127], every_byte[:127], EXACT
    yield "values below 0", fp8.Fp8OnCpu.VALUES[128:255], every_byte[128:255], EXACT
    for scale, count in itertools.product((1.0, 0.37, 300.0, 1e-6, 1e30), (2**16, 8, 1000)):
        some = every if count == 2**16 else np.random.default_rng(count).choice(every, count)
        inp, out8 = (on_device(device, some.view(BF16)),
                     on_device(device, np.zeros(count + 64, np.uint8)))
        scale8 = on_device(device, np.float32([1 / scale, scale, 0, 0]))

        def work(*args):
            device.zero(args[-1][2:3])
            device.launch("to_fp8", args[1], *args)
            return device.get(args[2]), device.get(args[-1])[2:3]

        x = to_float(some.view(BF16))
        wish = np.r_[cut_off(x, np.float32(scale)), np.zeros(64, np.uint8)]
        for order, (found, largest) in in_each_order(device, work, inp, count, out8, scale8):
            differ = np.flatnonzero(found != wish)
            check(f"to_fp8 {scale} {count} {order}", not differ.size,
                  f"{differ.size} differ, the first of {x[differ[0]]}: {found[differ[0]]}"
                  if differ.size else "")
            check(f"largest of {count} {order}", largest[0] == np.nanmax(abs(x)), largest[0])
    some = np.float32([3, -7, 2, 1, 0, 0, 0, 0])
    device.put(scale8, [1, 1, 9, 0])
    device.launch("to_fp8", 8, on_device(device, to_bf16(some)), 8, out8, scale8)
    check("a larger one stays", device.get(scale8)[2] == 9)


def test_weights(device_name):
    """The twins of weights, plain and transposed; each layer has its own scale. The plain one can
    be left out."""
    device = device_of(device_name, "fp8", 64, 2, plain=False)
    for L, R, C in ((1, 16, 16), (3, 48, 80), (2, 128, 64), (2, 272, 144)):
        rng = np.random.default_rng(R)
        w = np.float32(rng.normal(0, 1, (L, R, C)) * np.logspace(0, 2, L)[:, None, None])
        # The last of these is only large.
        w[-1, R // 2, C // 2 : C // 2 + 3] = np.inf, -np.inf, 3e38
        w = to_bf16(w)
        scale, nothing = np.float32(rng.uniform(1, 50, L)), np.zeros(w.size, np.uint8)
        scales = np.stack([1 / scale, scale, 0 * scale, 0 * scale], axis=1)
        arrays = [on_device(device, x) for x in (nothing.reshape(L, C, R), nothing.reshape(L, R, C),
                                                 w, scales)]

        def work(across, out, w, scales, R, C, fresh, plain):
            for array in (out, across):
                device.zero(array)
            device.put(scales, fresh)
            device.launch("weights_to_fp8", len(w) * fp8.tiles(R, C), across,
                          out if plain else None, w, scales, R, C)
            return device.get(out), device.get(across), device.get(scales)[:, 2]

        wish = cut_off(to_float(w), scale[:, None, None])
        for plain in (True, False):
            for order, found in in_each_order(device, work, *arrays, R, C, scales, plain):
                case = f"{L, R, C} {order} {plain=}"
                yield case, found[0], wish * plain, EXACT
                yield f"{case} transposed", found[1], wish.transpose(0, 2, 1), EXACT
                yield f"{case} largest", found[2], abs(to_float(w)).max(axis=(1, 2)), EXACT


def test_next_scales(device_name):
    """A scale brings the largest magnitude to 224. Zeros, infinity and NaN leave the scale as it
    was, and nothing overflows. `forget` only clears the largest magnitudes."""
    device = device_of(device_name, "fp8", 64, 2, plain=False)
    largest = np.float32([2, 0, np.inf, np.nan, 2e-38, 3e38, 448, 0.5])
    before = np.stack([np.full(8, 0.2), np.full(8, 5), largest,
                       np.zeros(8)], axis=1).astype(np.float32)
    for forget, stopped in ((0, 0), (1, 0), (0, 1)):
        scales, verdict = (on_device(device, before),
                           on_device(device, np.float32([0, 0, 1, stopped])))
        device.launch("next_scales", 8, scales, 8, forget, verdict)
        found = device.get(scales)
        wish = np.float32([112, 5, 5, 5, 1e30, np.float32(224) / np.float32(3e38), 0.5, 448])
        case = f"{forget=} {stopped=}"
        yield f"{case} scales", found[:, 1], before[:, 1] if forget or stopped else wish, EXACT
        yield (f"{case} inverses", found[:, 0],
               np.where(found[:, 1] == 5, np.float32(0.2), 1 / found[:, 1]), EXACT)
        check(f"{case}: the largest begin anew", not found[:, 2].any())


def test_transposed(device_name):
    """The twin of a transposed tensor; the columns that fill its rows up to a multiple of 16 are
    zeros."""
    device = device_of(device_name, "fp8", 64, 2, plain=False)
    for R, C in ((1, 16), (16, 128), (130, 48), (128, 128), (261, 400)):
        stride = -(-R // 16) * 16
        twin = np.random.default_rng(R).integers(256, size=(R, C)).astype(np.uint8)
        found = on_device(device, np.full((C + 1, stride), 77, np.uint8))

        def work(across, twin, R, C, stride):
            device.launch("transpose_fp8", fp8.tiles(C, stride), across, twin, R, C, stride)
            return device.get(across)

        wish = np.full((C + 1, stride), 77)
        wish[:C] = np.pad(twin, ((0, stride - R), (0, 0))).T
        for order, across in in_each_order(device, work, found, on_device(device,
                                                                          twin), R, C, stride):
            yield f"{R, C} {order}", across, wish, EXACT


def normed(device, given, x, *first):
    """What a norm's kernel writes: first, which is out and its twin, or both twins; the scale;
    mean, rstd, copy and x."""
    (N, C), zeros = x.shape, np.zeros(len(x), np.float32)
    first = [on_device(device, array) for array in first]
    scale8 = on_device(device, np.float32([1 / 23, 23, 0, 0]))
    more = [on_device(device, array) for array in (zeros, zeros, np.zeros((N, C), BF16), x)]
    if first[0].dtype == np.uint8:
        device.launch("residual_layernorm_to_fp8", N, *first, scale8, *more, *given, N,
                      first[1].shape[1])
    else:
        device.launch("residual_layernorm_forward", N, first[0], *more, *given, N)
        device.launch("to_fp8", N * C, first[0], N * C, first[1], scale8)
    return [device.get(array) for array in (*first, scale8, *more)]


def test_norm_to_twins(device_name):
    """A norm's twins, plain and transposed, and all else that it writes: the bits of the trainer's
    kernel, whose output is then made a twin."""
    C = 64
    device = device_of(device_name, "fp8", C, 2, plain=False)
    for N, added in ((1, False), (33, True), (64, False), (100, True)):
        rng, stride = np.random.default_rng(N), -(-N // 16) * 16
        x, *given = (np.float32(rng.normal(0, size, shape)) for size, shape in (
            (9, (N, C)), (3, (N, C)), (2, C), (1, C)))
        given = [on_device(device, to_bf16(values)) for values in given]  # branch, weight, bias
        given[0] = given[0] if added else None
        _, twin, *wish = normed(device, given, x, np.zeros((N, C), BF16),
                                np.zeros((N, C), np.uint8))
        wish = [twin, np.pad(twin, ((0, stride - N), (0, 0))).T, *wish]
        names = "twin", "transposed", "largest", "mean", "rstd", "copy", "x"
        for order, found in in_each_order(device, normed, device, given, x, np.full_like(twin, 77),
                                          np.full((C, stride), 77, np.uint8)):
            for name, one, other in zip(names, found, wish):
                yield f"{N} {order} {name}", one, other, EXACT


def test_both_twins(device_name):
    """GELU's output and its gradient as twins, plain and transposed; the largest magnitude; sums of
    the gradient."""
    device = device_of(device_name, "fp8", 64, 2, plain=False)
    for R, C in ((1, 16), (130, 144), (261, 64)):
        rng, stride, scale = np.random.default_rng(R), -(-R // 16) * 16, np.float32(23)
        inp, dout = (to_bf16(np.float32(rng.normal(0, 2, (R, C)))) for _ in "12")
        inp[0, :4] = to_bf16(np.float32([-1e4, -30, 15, 0]))
        x, d = (to_float(values).astype(np.float64) for values in (inp, dout))
        inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        gelu, slope = 0.5 * x * (1 + np.tanh(inner)), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        derivative = 0.5 * (1 + np.tanh(inner)) + 0.5 * x / np.cosh(inner) ** 2 * slope
        arrays = [on_device(device, values) for values in (
            np.zeros((R, C), np.uint8), np.zeros((C, stride), np.uint8), np.zeros(4, np.float32),
            np.zeros((-(-R // 128), C), np.float32), dout, inp)]

        def work(name, twin, across, scale8, *args):
            device.put(twin, np.full(twin.shape, 77))
            device.put(across, np.full(across.shape, 77))
            device.put(scale8, [1 / 23, 23, 0, 0])
            device.launch(name, fp8.tiles(*across.shape), twin, across, scale8, *args)
            return [device.get(array) for array in (twin, across, scale8, args[0])]

        for name, wish, some in (("gelu_to_fp8", gelu, (*arrays[:3], arrays[5])),
                                 ("gelu_backward_to_fp8", d * derivative, arrays)):
            for order, (twin, across, scale8, sums) in in_each_order(device, work, name, *some, R,
                                                                     C, stride):
                case = f"{name} {R, C} {order}"
                values = e4m3(twin)
                error = abs(values - scale * wish) / np.maximum(abs(scale * wish), 2.0**-6)
                check(f"{case}", error.max() < 0.0626, error.max())
                yield f"{case} transposed", across, np.pad(twin, ((0, stride - R), (0, 0))).T, EXACT
                yield f"{case} largest", scale8[2], abs(wish).max(), 1e-5
                if name == "gelu_backward_to_fp8":
                    each = [wish[i : i + 128].sum(0) for i in range(0, R, 128)]
                    yield f"{case} sums", sums, np.array(each), 1e-5


def test_infinities(device_name):
    """An infinity that only a twin carries stops the step: in what a norm or GELU writes, and in a
    weight."""
    for level, name, value in (("all", None, 0), ("all", "ln1b", np.inf), ("all", "ln2b", -np.inf),
                               ("all", "qkvw", np.inf), ("all", "fcprojw", -np.inf),
                               ("layers", "fcw", np.inf)):
        place, model = small_model(device_name, fp8=level)
        steps_of(model, 1)
        if name:
            array = getattr(model.params, name)
            values = to_float(place.get(array))
            values.reshape(-1)[-1] = value
            place.put(array, to_bf16(values))
            place.cast_weights()
        steps_of(model, 1)
        verdict = model.verdict()
        finite = bool(np.isfinite([verdict.loss, verdict.norm]).all())
        check(f"--fp8 {level}: {value} in {name}",
              (finite, verdict.stopped) == (not name, bool(name)), verdict)


def test_classifier(device_name):
    """Losses, and the twin of dlogits, whose scale is 448 / dloss. Rows are cached in shared
    memory, or not."""
    device, dloss = device_of(device_name, "fp8", 64, 2, plain=False), 1 / 96
    for N, V, Vp, blocks, cached in ((5, 257, 384, 2, True), (5, 257, 384, 5, False),
                                     (3, 1000, 1008, 3, True),
                                     (4, 384, 384, 1, True)):
        rng = np.random.default_rng(N)
        logits = to_bf16(np.float32(rng.normal(0, 4, (N, Vp))))
        logits[:, V:] = 0x7FC0  # NaN in the padding
        targets = rng.integers(V, size=N, dtype=np.int32)
        targets[0] = V - 1
        arrays = [on_device(device, x) for x in (
            np.full((N, Vp), 99, np.uint8), np.zeros(4, np.float32), np.zeros(N, np.float32),
            logits, targets)]

        def work(*args):
            blocks, *args = args
            device.launch("classifier_to_fp8", blocks, *args, shared=2 * args[-1])
            return [device.get(array) for array in args[:3]]

        x = to_float(logits)[:, :V].astype(np.float64)
        e = np.exp(x - x.max(1, keepdims=True))
        wish = e / e.sum(1, keepdims=True)
        losses = -np.log(wish[np.arange(N), targets])
        wish[np.arange(N), targets] -= 1
        room = 2 * Vp if cached else 0
        for order, (out8, scale, found) in in_each_order(device, work, blocks, *arrays, dloss, N, V,
                                                         Vp, room):
            case = f"{N, V, Vp, blocks, cached} {order}"
            yield f"{case} losses", found, losses, 1e-5
            yield f"{case} scale", scale[1:2], [448 / dloss], 1e-6
            yield f"{case} inverse", scale[:1], [dloss / 448], 1e-6
            values = e4m3(out8)
            check(f"{case} padding", not values[:, V:].any())
            # half a unit of the last bit, dither, and 2^x is rounded
            error = (abs(values[:, :V] - 448 * wish) - 2.0**-10) / np.maximum(abs(448 * wish),
                                                                              2.0**-6)
            check(f"{case} dlogits", error.max() < 0.0626, error.max())


def test_rare_words(device_name):
    """The mean of small dlogits is right, though most become 0."""
    device, N, V = device_of(device_name, "fp8", 64, 2, plain=False), 96, 2000
    rng = np.random.default_rng(3)
    for low in (-14, -16):
        x = rng.normal(low, 0.5, (N, V))
        x[:, 7] = rng.normal(0, 0.1, N)
        logits = to_bf16(np.float32(x))
        arrays = [on_device(device, a) for a in (
            np.full((N, V), 99, np.uint8), np.zeros(4, np.float32), np.zeros(N, np.float32), logits,
            np.full(N, 7, np.int32))]
        device.launch("classifier_to_fp8", 5, *arrays, 1, N, V, V, 0)
        found = e4m3(device.get(arrays[0]))
        e = np.exp(to_float(logits).astype(np.float64))
        wish = 448 * e / e.sum(1, keepdims=True)
        found, wish = np.delete(found, 7, 1), np.delete(wish, 7, 1)
        check(f"{low}: all are near 0",
              wish.max() < 2.0**-8 and set(found.ravel()) <= {0, 2.0**-9, 2.0**-8})
        # Per word: one of its rows may get what another does not.
        often = (found > 0).mean(0) - wish.mean(0) * 2**9
        check(f"{low}: no word is always rounded alike", abs(often).max() < 0.3, abs(often).max())
        for name, a, b in (("all", found, wish), ("early rows", found[:48], wish[:48]),
                           ("early words", found[:, :1000], wish[:, :1000])):
            check(f"{low}: mean of {name}", abs(a.mean() / b.mean() - 1) < 0.1,
                  f"{a.mean()} {b.mean()}")


def test_head(device_name):
    """The head's logits are bf16's, and its products in the backward pass are those of its twins;
    in parts, and with rows that are no multiple of 16."""
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        place, model = small_model(device_name, fp8="head")
        steps_of(model, 3, 2)
        check("slices", len(model.slices) == 3, model.slices)
        before, n = place.get(place.all_scales)[:, 1], place.count
        model.set_batch(a_batch())
        place.begin_step()
        model.forward_pass()
        lnf, wte = (to_float(place.get(x)).astype(np.float64)
                    for x in (model.acts.lnf, model.params.wte))
        lnf8, wte8 = in_8_bits(lnf, before[n - 1]), in_8_bits(wte, before[3 * n - 1])
        in_bf16 = device_of(device_name, "bf16", 64, 2, plain=False)
        inputs, words, room = (on_device(in_bf16, place.get(x)) for x in (
            model.acts.lnf, model.params.wte, model.acts.logits))
        dlogits8 = []
        for rows in model.slices:
            logits = model.head_forward(rows)
            # 8-bit ones would be 3% off.
            yield f"logits {rows.start}", place.get(logits), lnf[rows] @ wte.T, 3e-3
            in_bf16.matmul(room[: len(logits)], inputs[rows], words.T)
            yield (f"logits {rows.start}, bits", place.get(logits),
                   in_bf16.get(room[: len(logits)]), EXACT)
            model.loss_forward(rows, logits, with_gradient=True)
            dlogits8.append(e4m3(place.get(model.dlogits8[: len(logits)])) / 448 / 46)
            model.head_backward(rows, logits)
        dlogits8 = np.concatenate(dlogits8)
        yield "dinp", place.get(model.back.dinp), dlogits8 @ wte8, 3e-3
        yield ("dwte", place.get(model.grads.wte), dlogits8.T @ lnf8,
               1e-5 if device_name != "cuda" else 2e-3)
        x = np.exp(lnf @ wte[:257].T)
        wish = x / x.sum(1, keepdims=True)
        wish[np.arange(46), place.get(model.batch.targets).reshape(-1)] -= 1
        found = 46 * dlogits8[:, :257]
        check("dlogits", np.linalg.norm(found - wish) < 0.1 * np.linalg.norm(wish))
        place.end_step()
        largest = 224 / abs(lnf).max()
        found = place.get(place.all_scales)[n - 1, 1]
        check("the next scale at lnf", abs(found / largest - 1) < 1e-6, f"{found} {largest}")
        tokens = np.zeros((1, 5), np.int32)
        model.forward(tokens, tokens)  # fewer tokens, whose head is in bf16


def test_layers(device_name):
    """With --fp8 all, weights have the gradients of their layers' twins: those of layer 0 are still
    in memory."""
    place, model = small_model(device_name, fp8="all")
    steps_of(model, 3, 2)
    model.set_batch(a_batch())
    place.begin_step()
    scales, seen = place.get(place.all_scales)[:, 1], {}
    product = model.weight_backward

    def spy(dout, inp, y):
        product(dout, inp, y)
        twins_ = [e4m3(place.get(x))[: len(x), :46]
                  for x in (model.kept.gradient[: len(y.dw)], getattr(model.kept, y.name)[y.l])]
        seen[y.name, y.l] = twins_[0] @ twins_[1].T, place.get(y.dw)

    model.forward_pass()
    model.weight_backward = spy
    model.loss_pass(with_gradient=True)
    model.backward_pass()
    check("products", len(seen) == 8, [*seen])
    order = [row.name for row in fp8.fp8_rows(model.config)]
    for (name, l), (wish, found) in seen.items():
        i = order.index(f"{name}w") * model.config.L + l
        wish = wish / scales[fp8.GRADIENT * place.count + i] / scales[fp8.INPUT * place.count + i]
        yield f"d{name} {l}", found, wish, 1e-5 if device_name != "cuda" else 2e-3


def test_layers_of_llama(device_name):
    """With --fp8 all, Llama's weights have the gradients of inp and dout in e4m3, made here from
    what the product reads, also if a layer is recomputed. Where the tokens are no multiple of 16,
    they have those of bf16. The next scales come from the largest numbers. The gradient of up and
    gate is stored in bf16 only where a product reads it."""
    for T, recompute in ((24, 0), (24, 2), (23, 0)):
        place, model = small_model(device_name, Llama3, T, graph=False, fp8="all",
                                   beside=[RECOMPUTE, RECOMPUTE_LLAMA], recompute=recompute)
        steps_of(model, 2, 2)
        scales, seen, product = place.get(place.all_scales)[:, 1], [], model.linear_backward
        in_fp8, largest = 2 * T % fp8.WHOLE == 0, {}
        order = [row.name for row in fp8.fp8_rows(model.config)]

        def spy(dinp, dout, inp, y, model=model, place=place, scales=scales, in_fp8=in_fp8,
                product=product, seen=seen, largest=largest, order=order):
            of_dout, of_inp = (
                kind * place.count + order.index(f"{y.name}w") * model.config.L + y.l
                for kind in (fp8.GRADIENT, fp8.INPUT))
            x, before = to_float(place.get(inp)), place.get(y.dw).copy()
            scale = scales[of_dout], scales[of_inp]
            ready = place.ready[0] is dout and place.ready[1] == (fp8.GRADIENT, y.name, y.l)
            dy = to_float(place.get(dout)).astype(np.float64)
            twin = e4m3(place.get(place.twin[: dout.size].reshape(dout.shape))) / float(scale[0])
            if ready:
                stored = np.linalg.norm(twin - dy) < 0.1 * np.linalg.norm(dy)
                wish = not in_fp8 or y.name != "fc"
                check("dout is stored in bf16", stored == wish, (y.name, stored))
            for tensor, values in ((of_dout, twin if ready else dy), (of_inp, x)):
                largest[tensor] = max(largest.get(tensor, 0), abs(values).max())
            if in_fp8:
                dy = twin if ready else in_8_bits(dy, scale[0])
                x = in_8_bits(x, scale[1])
            product(dinp, dout, inp, y)
            wish = dy.T @ x.astype(np.float64) + (before if model.micro else 0)
            seen.append((place.get(y.dw), wish, ready))

        model.linear_backward = spy
        steps_of(model, 1, 2)
        after = place.get(place.all_scales)[:, 1]
        for n, size in largest.items():
            yield f"{T=} the next scale of {n}", after[n], 224 / size, 0.07
        check(f"{T=} {recompute=}: products", len(seen) == 16, len(seen))
        check(f"{T=} {recompute=}: twins that kernels have left", any(ready for *_, ready in seen))
        for n, (found, wish, _) in enumerate(seen):
            yield (f"{T=} {recompute=}: product {n}", found, wish,
                   1e-5 if device_name != "cuda" else 2e-3)


def test_levels(device_name):
    """The gradients and losses of --fp8 all are close to those of --fp8 layers, from the same
    weights."""
    biases = "qkvb attprojb fcb fcprojb ln2b".split()
    for architecture, T in ((GPT2, 70), (Llama3, 72)):
        found, names = [], "qkvw attprojw fcw fcprojw ln1w wte".split()
        names += biases if architecture is GPT2 else ()
        for level in ("layers", "all"):
            beside = [RECOMPUTE, RECOMPUTE_LLAMA] if architecture is Llama3 else ()  # as above
            place, model = small_model(device_name, architecture, T, graph=False, beside=beside,
                                       fp8=level)
            for _ in range(2):
                model.train_step(a_batch(T), a_batch(T), learning_rate=0)
            found.append([model.verdict().loss,
                          *(place.get(getattr(model.grads, name)) for name in names)])
        name = architecture.__name__
        check(f"{name}: loss", abs(found[1][0] / found[0][0] - 1) < 0.01,
              f"{found[1][0]} {found[0][0]}")
        for tensor, one, other in zip(names, *(values[1:] for values in found)):
            yield f"{name}: {tensor}", other, one, 0.1
            check(f"{name}: {tensor} differs", not np.array_equal(one, other))


def steps_of(model, count, micros=1):
    """Train `count` steps, each on other words. Returns the losses."""
    rng, losses = np.random.default_rng(3), []
    for _ in range(count):
        batches = [rng.integers(model.config.V, size=(2, model.B, model.T), dtype=np.int32)
                   for _ in range(micros)]
        model.train_step(*(pack_batch(*batch) for batch in batches), learning_rate=1e-3)
        losses.append(model.verdict().loss)
    return losses


def test_twins(device_name):
    """A kernel that stores a twin beside its output stores the right one. So if all these twins are
    forgotten and made again, the products are the same, bit for bit, also in layers that recompute
    norms and GELUs, or whose products read a dropped copy."""
    # casts: how many twins in a layer no kernel leaves for the product that reads them. Llama's
    # rope changes dqkv in place, and when a layer is recomputed, the twins of dx and atty are gone
    # by the time they are needed. Dropped dx has no twin.
    for architecture, recompute, level, dropout, casts in (
            (GPT2, 0, "layers", 0, 0), (GPT2, 1, "layers", 0, 0), (GPT2, 2, "head", 0, 2),
            (GPT2, 0, "head", 0.5, 2), (Llama3, 0, "head", 0, 1), (Llama3, 2, "layers", 0, 3)):
        results = []
        for told in (True, False):
            beside = [RECOMPUTE, DROPOUT if architecture is GPT2 else RECOMPUTE_LLAMA]
            # Any number of rows; without a graph, so that each launch is counted.
            place, model = small_model(device_name, architecture, graph=False, beside=beside,
                                       recompute=recompute, fp8=level, dropout=dropout)
            losses = []
            for _ in range(3):
                if not told:
                    place.read_by = lambda *tensor: contextlib.nullcontext()
                below = type(place).__mro__[1 + type(place).__mro__.index(fp8.Fp8)]
                with mock.patch.object(below, "launch", autospec=True,
                                       side_effect=below.launch) as watched:
                    losses += steps_of(model, 1, 2)
                made = sum(call.args[1] == "to_fp8" for call in watched.mock_calls)
            results.append((losses, master_numbers(model), made))
        name = f"{architecture.__name__} {recompute=} {dropout=}"
        yield f"{name}: losses", np.array(results[0][0]), results[1][0], EXACT
        yield f"{name}: parameters", results[0][1], results[1][1], EXACT
        wish = casts * 2 * 2  # for two micro-batches and two layers
        check(f"{name}: casts", results[0][2] == wish,
              f"{results[0][2]}, expected {wish}; without {results[1][2]}")


def test_products(device_name):
    """The products, forward and backward, are those of the twins, whose scales come from the step
    before."""
    place, model = small_model(device_name, T=24)
    steps_of(model, 3)
    n, V = place.count, fp8
    before = place.get(place.all_scales)[:, 1]
    model.set_batch(a_batch(24))
    place.begin_step()
    model.forward_pass()
    (y, a), l = model.layers[1], 1
    order = [row.name for row in fp8.fp8_rows(model.config)]
    for of, inp, out in ((y.qkv, a.ln1, "qkv"), (y.fc, a.ln2, "fch")):
        i = order.index(f"{of.name}w") * model.config.L + l
        x, w = to_float(place.get(inp)), to_float(place.get(of.w))
        scale_x, scale_w = before[V.INPUT * n + i], before[V.WEIGHT * n + i]
        eight = [in_8_bits(values, scale) for values, scale in ((x, scale_x), (w, scale_w))]
        yield (f"{out}", place.get(getattr(a, out)),
               eight[0] @ eight[1].T + to_float(place.get(of.b)), 3e-3)
    largest = lambda array: abs(to_float(place.get(array))).max()
    inputs = largest(a.ln2), largest(a.fch_gelu)
    model.loss_pass(with_gradient=True)
    model.backward_pass()
    i = order.index("qkvw") * model.config.L  # layer 0, whose dqkv and dln1 are still in memory
    dqkv, w = (to_float(place.get(array)) for array in (model.back.dqkv, model.params.qkvw[0]))
    scale_d, scale_w = before[V.GRADIENT * n + i], before[V.WEIGHT * n + i]
    eight = [in_8_bits(values, scale) for values, scale in ((dqkv, scale_d), (w, scale_w))]
    yield "dln1", place.get(model.back.dinp), eight[0] @ eight[1], 3e-3
    # Layer 0; fch_gelu is dfch now.
    gradients_ = largest(model.back.dqkv), largest(model.layers[0][1].fch_gelu)
    place.end_step()
    after = place.get(place.all_scales)[:, 1]
    for weight, kind, l, size in (("fcw", V.INPUT, 1, inputs[0]),
                                  ("fcprojw", V.INPUT, 1, inputs[1]),
                                  ("qkvw", V.GRADIENT, 0, gradients_[0]),
                                  ("fcw", V.GRADIENT, 0, gradients_[1])):
        i = order.index(weight) * model.config.L + l
        found, wish = after[kind * n + i], 224 / size
        check(f"the next scale at {weight}", abs(found / wish - 1) < 1e-6, f"{found} {wish}")
    validated = steps_of(model, 1), place.get(place.all_scales)[:, 1]
    check("a scale changes in a step", not np.array_equal(validated[1], after))


def test_scales_alone(device_name):
    """A validation before a step does not change the step, and runs have the same bits, with or
    without a graph."""
    results = []
    for validates, graph in ((False, True), (True, True), (False, True), (False, False)):
        (place, model), losses = small_model(device_name, T=24, graph=graph, fp8="all"), []
        for _ in range(3):
            if validates:
                scales = place.get(place.all_scales)
                scales[: 2 * place.count, 2] = 1e6  # as if a validation had seen larger numbers
                place.put(place.all_scales, scales)
                model.forward(np.full((2, 24), 5, np.int32), np.full((2, 24), 6, np.int32))
            losses += steps_of(model, 1)
        results.append(np.array(losses))
    yield "losses after validations", results[1], results[0], EXACT
    yield "losses again", results[2], results[0], EXACT
    yield "losses without a graph", results[3], results[0], EXACT


def test_fixture(device_name):
    """In FP8 the fixture's gradients and loss are close to those in fp32."""
    c = Config.from_file(FIXTURES / "gpt2_tiny.bin")
    truth, errors = read_debug_state(FIXTURES / "gpt2_tiny_debug_state.bin", c), {}
    for dtype, level in (("bf16", "layers"), ("fp8", "layers"), ("fp8", "head"), ("fp8", "all")):
        place = fp8_device(device_name, c) if dtype == "fp8" else make_device(device_name, dtype, c)
        model = model_class(GPT2, "--dtype", dtype, "--fp8", level)(c, place, *truth.x.shape)
        model.set_parameters(read_parameters(FIXTURES / "gpt2_tiny.bin", c))
        if dtype == "fp8":
            model.begin_step([pack_batch(truth.x, truth.y)])
        found = gradients(model, (truth.x, truth.y))
        loss = model.verdict().loss
        check(f"{dtype} {level}: loss", abs(loss / truth.loss - 1) < 0.02, f"{loss} {truth.loss}")
        errors[dtype, level] = {name: np.linalg.norm(found[name][: len(wish)] - wish) /
                                np.linalg.norm(wish) for name, wish in truth.gradients.items()}
    in_bf16 = errors.pop(("bf16", "layers"))
    for (_, level), of_level in errors.items():
        for name, error in of_level.items():
            wish = 16 * in_bf16[name]  # a mantissa of 3 bits is 16 times coarser than one of 7
            check(f"{level}: gradient of {name}", error < wish,
                  f"{error:.3f}, in bf16 {in_bf16[name]:.3f}")


def test_defaults(device_name):
    """Without --fp8, as much is in FP8 as the model and the other flags allow."""
    for model, given, wish in ((GPT2, (), "all"), (GPT2, ("--recompute", "1"), "head"),
                               (Llama3, (), "all"), (Llama3, ("--recompute", "2"), "all"),
                               (Llama3, ("--dropout", "0.1"), "all"),
                               (Llama3, ("--mask", "1"), "layers"),
                               (GPT2, ("--label-smoothing", "0.1"), "layers"),
                               (GPT2, ("--dropout", "0.1"), "head"),
                               (GPT2, ("--mask", "1"), "layers"),
                               (GPT2, ("--fp8", "layers"), "layers")):
        kinds = [kind.__name__ for kind in model_class(model, "--dtype", "fp8", *given).__mro__]
        levels = {"Fp8All": "all", "Fp8AllLlama": "all", "Fp8Head": "head"}
        found = min((levels[kind] for kind in kinds if kind in levels), default="layers")
        check(f"{model.__name__} {given}", found == wish and "Fp8Model" in kinds, kinds)


def test_refusals(device_name):
    check_refusal("--plain", "--dtype fp8 --plain 1: FP8 is there for speed alone", fp8_device,
                  device_name, Config(C=32, NH=1), True)
