"""Test --document-mask: where documents begin, attention within them against NumPy's of each alone,
a whole model's gradients, and runs."""
import functools
import json
import re
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.data.masks import write_mask
from dev.features.base import GPT2
from dev.features.devices import device_class, make_device
from dev.features.documents import SOURCE, SeesDocuments
from dev.features.feature import stack
from dev.features.order import read_flags
from dev.features.replay import replay
from dev.lab import heads
from dev.lab.formulas import dattention
from dev.lab.gpt2_numpy_backward import loss_and_gradients
from dev.lab.ladder import config_of
from dev.tests.checks import EXACT, TINY, check, check_refusal, normal, words
from dev.tests.models import (ATTENTION, for_numpy, gradients, in_each_order, model_class,
                              on_device, on_hopper)
from dev.tests.trainings import check_resumed, place_of, ran
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import UserError, read_tokens, to_float

EOT = 7
# Of the documents in each row of 200 tokens
LENGTHS = ([1, 63, 64, 65, 7], [200], [65, 7, 64, 1, 63], [1] * 70 + [130])
KERNELS = {*ATTENTION, "find_documents", "add_positions", "add_position_gradients"}


def device_for(name, dtype, HS, NH, NKV):
    """A device whose attention stays within documents."""
    kind, given = stack(device_class(name), [SeesDocuments]), {}
    if name == "emulated":  # only what is tested in it compiles fast
        given = dict(only=KERNELS)
    return kind(dtype, config_of(NH * HS, NH, NH // NKV), beside=[SOURCE], **given)


def rows_of(lengths):
    """Tokens (B,T) of rows with documents of these lengths, and their bounds (B,2,T)."""
    starts = [np.cumsum([0, *row]) for row in lengths]
    tokens = np.ones((len(lengths), starts[0][-1]), np.int32)
    bounds = np.zeros((len(lengths), 2, tokens.shape[1]), np.int32)
    for b, row in enumerate(starts):
        tokens[b, row[:-1]] = EOT
        for first, end in pairwise(row):
            bounds[b, :, first:end] = [[first], [end]]
    return tokens, bounds


def find(device, tokens, targets, eot=EOT):
    """The bounds (B,2,T) of documents, on the device."""
    B, T = tokens.shape
    bounds = on_device(device, np.full((B, 2, T), -7, np.int32))
    device.launch("find_documents", B * T, bounds, on_device(device, tokens),
                  on_device(device, targets), B * T, T, eot)
    return bounds


def of_each(bounds, f, *arrays):
    """f's results (B,heads,T,..) for each document alone: of slices of arrays (B,heads,T,..)."""
    wholes = []
    for b, (firsts, ends) in enumerate(bounds):
        for part in map(slice, np.unique(firsts), np.unique(ends)):
            found = f(*(x[b, :, part] for x in arrays))
            wholes = wholes or [np.zeros((*arrays[0].shape[:3], *x.shape[2:])) for x in found]
            for whole, x in zip(wholes, found):
                whole[b, :, part] = x
    return wholes


def attention_of(device, HS, NH, NKV, tokens, bounds):
    """(found, expected) of attention, forward and backward: {tensor: array}."""
    (B, T), group = tokens.shape, NH // NKV
    bf16 = device.real != np.float32

    def stored(*shape):
        x = np.float32(normal(*shape))
        return to_float(to_bf16(x)) if bf16 else x

    def put(x):
        return on_device(device, to_bf16(np.float32(x)) if bf16 else np.float32(x))

    qkv, dout = stored(B, T, NH + 2 * NKV, HS), stored(B, T, NH, HS)
    qkv[:, :, :NH] *= 4  # so that weights differ
    q, k, v = heads.split(np.float64(qkv), NH, NKV)
    k, v, dy = k.repeat(group, 1), v.repeat(group, 1), np.float64(dout).swapaxes(1, 2)
    out, lse = of_each(bounds, functools.partial(heads.forward_of, "softmax"), q, k, v)
    dq, dk, dv = of_each(bounds, functools.partial(dattention, "softmax"), dy, q, k, v)
    dk, dv = (x.reshape(B, NKV, group, T, HS).sum(2) for x in (dk, dv))
    wish = dict(out=heads.join(out), lse=lse, dqkv=heads.join(dq, dk, dv))
    a = SimpleNamespace(B=B, T=T, NH=NH, NKV=NKV, scale=HS**-0.5, qkv=put(qkv), dout=put(dout),
                        **{name: put(np.full(x.shape, np.nan)) for name, x in wish.items()})
    a.lse, a.delta = (on_device(device, np.full(lse.shape, np.nan, np.float32)) for _ in "ld")
    a.bounds = find(device, tokens, np.ones_like(tokens))
    heads.trainers_forward(device, a)
    heads.trainers_backward(device, a)
    return {name: to_float(device.get(getattr(a, name))) for name in wish}, wish


# ---- Kernels


def test_bounds(device_name):
    """A document begins with a row, and where <|endoftext|> ends no answer: one that counts while
    what follows does not."""
    rng = np.random.default_rng(3)
    for device in (device_for(device_name, "bf16", 64, 4, 2), device_for("cpu", "fp32", 64, 4, 2)):
        for B, T in ((1, 1), (3, 7), (2, 300)):
            tokens = np.where(rng.random((B, T)) < 0.3, EOT, 1).astype(np.int32)
            targets = np.where(rng.random((B, T)) < 0.5, -1, 1).astype(np.int32)
            for eot in (EOT, -1):
                wish = np.zeros((B, 2, T), int)
                for b in range(B):
                    begins = [t for t in range(T) if t == 0 or tokens[b, t] == eot and not (
                        targets[b, t - 1] != -1 and targets[b, t] == -1)]
                    for first, end in pairwise([*begins, T]):
                        wish[b, :, first:end] = [[first], [end]]
                found = device.get(find(device, tokens, targets, eot))
                check(f"{device.name} B={B} T={T} eot={eot}", (found == wish).all(), found)


def test_positions(device_name):
    """wpe is added at a token's place in its document, and its gradient is the sum over these."""
    tokens, bounds = rows_of(LENGTHS)
    (B, T), C, maxT = tokens.shape, 256, 208
    places = np.arange(T) - bounds[:, 0]
    for device in (device_for(device_name, "bf16", 64, 4, 2), device_for("cpu", "fp32", 64, 4, 2),
                   device_for("cpu", "bf16", 64, 4, 2)):
        x, dwpe = np.float32(normal(B * T, C)), np.float32(normal(maxT, C))
        wpe, dout = (np.float32(normal(n, C)) for n in (maxT, B * T))
        if device.real != np.float32:
            wpe, dout = to_bf16(wpe), to_bf16(dout)
        found = find(device, tokens, np.ones_like(tokens))
        stream = on_device(device, x)
        device.launch("add_positions", B * T * C, stream, on_device(device, wpe), found, B * T, T,
                      C)
        yield (f"{device.name} {device.dtype} forward", device.get(stream),
               x + to_float(wpe)[places.reshape(-1)], EXACT)
        wish = np.zeros((maxT, C))
        np.add.at(wish, places.reshape(-1), to_float(dout))
        for adds in (0, 1):
            gradient = on_device(device, dwpe)
            device.launch("add_position_gradients", maxT * C, gradient, on_device(device, dout),
                          found, B, T, maxT, C, adds)
            yield (f"{device.name} {device.dtype} backward {adds=}", device.get(gradient),
                   wish + adds * dwpe, 1e-6)


def check_attention(device, HS, NH, NKV):
    """Attention of rows of several documents, and of a row that is one."""
    tokens, bounds = rows_of(LENGTHS)
    for way, (found, wish) in in_each_order(device, attention_of, device, HS, NH, NKV, tokens,
                                            bounds):
        for tensor, x in wish.items():
            limits = heads.LSE_LIMITS if tensor == "lse" else heads.ATTENTION_LIMITS
            limit = limits[device.dtype] * (2 if tensor == "dqkv" else 1)  # out is rounded, too
            error = np.linalg.norm(found[tensor] - x) / np.linalg.norm(x)
            check(f"{device.name} {device.dtype} HS={HS} {NH}:{NKV} {way} {tensor}",
                  error <= limit, f"{error:.1e}")


def test_attention(device_name):
    """The portable kernels; on a GPU, those that it has."""
    for dtype, HS in (("fp32", 64), ("bf16", 64), ("fp32", 2)):  # the last: scale2 is above 1
        check_attention(device_for(device_name, dtype, HS, 4, 2), HS, 4, 2)


def test_hopper(device_name):
    """Hopper's kernels: a slab is a block, or half of it."""
    for HS, NH, NKV in ((64, 2, 2), (128, 4, 2)):
        device = on_hopper(device_for, device_name, "bf16", HS, NH, NKV)
        if device:
            check_attention(device, HS, NH, NKV)


def test_loops():
    """The CPU's loops."""
    for dtype in ("fp32", "bf16"):
        check_attention(device_for("cpu", dtype, 64, 4, 2), 64, 4, 2)


# ---- A model, and runs


def test_model(device_name):
    """The loss of packed rows and its gradients are those of each document alone. A sample is one
    document."""
    lengths = [LENGTHS[0], LENGTHS[2]]
    c = Config(maxT=200, V=EOT + 1, L=2, NH=2, C=64, Vp=128)
    kind = stack(device_class(place_of(device_name)), [SeesDocuments])
    device = kind("fp32", c, beside=[SOURCE])
    model = model_class(GPT2, "--document-mask", "1")(c, device, 2, 200)
    model.set_parameters((name, 4 * values if values.ndim > 2 else values)
                         for name, values in draw_parameters(c, 1))
    tokens, bounds = rows_of(lengths)
    tokens = np.where(tokens == EOT, EOT, words(EOT, *tokens.shape))
    targets = words(EOT, *tokens.shape)
    p = for_numpy(((name, device.get(x)) for name, x in vars(model.params).items()), c.V)
    total, wish = 0, {}
    for b, (firsts, ends) in enumerate(bounds):
        for first, end in zip(np.unique(firsts), np.unique(ends)):
            loss, g = loss_and_gradients(p, tokens[b, first:end], targets[b, first:end], c.NH)
            total += loss * (end - first) / tokens.size
            for name, x in vars(g).items():
                wish[name] = wish.get(name, 0) + x * (end - first) / tokens.size
    found = gradients(model, (tokens, targets))
    yield "the loss", np.float64(model.forward(tokens, targets)), total, 1e-6
    for name, x in wish.items():
        yield f"d{name}", found[name][: c.V] if name == "wte" else found[name], x, 2e-5
    plain = model_class(GPT2)(c, make_device(place_of(device_name), "fp32", c), 2, 200)
    plain.set_parameters((name, device.get(x)) for name, x in vars(model.params).items())
    text = tokens[0, :100].tolist()
    yield "a sample", model.next_logits(text), plain.next_logits(text), 1e-6


def test_runs(device_name, folder):
    """A new run on data with masks has --document-mask 1, one that is resumed its own, and a run of
    a version without the flag 0."""
    for name in ("train", "val"):
        write_tokens(folder / f"{name}.bin", np.where(words(9, 200) == 0, 330, words(330, 200)))
    flags = ("-e", TINY, "-i", folder / "train.bin", "-b", 2, "-t", 8, "-v", 2, "-m", 1, "-s", 0,
             "--device", place_of(device_name), "--dtype", "fp32")

    def losses(*more):
        text = ran(*flags, *more)
        return "documents    | " in text, re.findall("loss (.*?) ", text)

    plain, asked = losses("-x", 2), losses("-x", 2, "--document-mask", 1)
    check("text: asked for", (plain[0], asked[0]) == (False, True) and plain[1] != asked[1], asked)
    for more in (("--recompute", 2), ("--dropout", 1e-9)):
        found = losses("-x", 2, "--document-mask", 1, *more)[1]
        yield f"with {more[0]}", np.float64(found), np.float64(asked[1]), 1e-6
    for name in ("train", "val"):
        tokens = np.array(read_tokens(folder / f"{name}.bin", 331))
        write_mask(folder / f"{name}.bin", tokens, np.arange(200) % 3 > 0)
    chats = losses("-x", 4, "-o", folder / "on", "-n", 2)
    off = losses("-x", 4, "-o", folder / "off", "-n", 2, "--document-mask", 0)
    check("a mask: by default", (chats[0], off[0]) == (True, False) and chats[1] != off[1], chats)
    for name in ("on", "off"):
        check_resumed(name, folder / name, 4,
                      go_on=lambda copy: ran(*flags, "-x", 4, "-o", copy, "-y", 1))
    path = folder / "off" / "run_00000002.json"
    notes = json.loads(path.read_text())
    del notes["flags"]["document_mask"]
    path.write_text(json.dumps(notes))
    check_resumed("an older run", folder / "off", 4,
                  go_on=lambda copy: ran(*flags, "-x", 4, "-o", copy, "-y", 1))


def test_replay_of_older(folder):
    """A step of a run of a version without the flag is repeated without it, though it had masks."""
    np.savez(folder / "replay.npz", tokens=np.zeros((1, 1, 8)), targets=0,
             notes=json.dumps(dict(model="model.bin", flags=dict(mask=1))))
    given = read_flags(["--replay", f"{folder}/replay.npz", "--device", "cpu"], GPT2)
    attach = mock.Mock(side_effect=UserError("asked for"))
    check_refusal("its classes", "asked for", replay, *given, attach)
    [flags], _ = attach.call_args
    check("its flags", (flags.mask, flags.document_mask) == (1, 0), flags)
