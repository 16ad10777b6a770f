"""Compare kernels.cu and train_gpt2.py with independent truths: formulas in NumPy, and tensors dumped from PyTorch.

    python test_gpt2.py                                  # everything, on the CPU, and on a GPU if there is one
    python test_gpt2.py --checkpoint FILE --state FILE   # only this dump, of dev/torch_reference.py or of llm.c
    python test_gpt2.py --kernels                        # only the kernels, for a sanitizer
    python test_gpt2.py --only gelu_forward              # only one of them, for a debugger

It prints a line a tensor, and then `N passed, N failed`. The exit status is 1 if any failed. Everything includes
dev/test_files.py, which tests files, refusals and the command line. On a GPU, the plain device and the fast one are
both compared with the truths. Their kernels are the same, so each kernel is tested once.
"""
import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from prepro_tinyshakespeare import (BF16, HEADER_BYTES, FileKind, UserError, check_size, check_tokens, read_header,
                                    replace_file, to_bf16, to_float)
from train_gpt2 import (ADAMW, GPT2, HERE, NORM_BLOCKS, PARTIAL_ROWS, WINDOW, Config, Row, Verdict, attention_launch,
                        batch_table, carve, checkpoint_parts, classifier_launch, has_gpu, layernorm_backward_launch,
                        make_device, pack_batch, read_kernels, read_parameters)

# The largest relative errors of a tensor, by Frobenius norm. A kernel by itself errs by 1e-7 to 2e-6, and without one
# of its terms by far more than its limit; stored in bf16, whose 8 bits are off by 1.5e-3 when they are rounded and by
# 3e-3 when they are cut off, it may err by BF16_LIMIT. Inside of attention, weights are rounded to TF32 or bf16 too.
KERNEL_LIMIT, BF16_LIMIT = 1e-5, 2.2e-3
# Attention in fp32 on a GPU is sums that tensor cores truncate: 1e-5 for 128 channels of a head.
ATTENTION_LIMITS = {"fp32": 2 * KERNEL_LIMIT, "tf32": 5e-4, "bf16": 3e-3}
# Of the whole model. How much bf16 costs depends on the model: on parameters of deviation 0.08, PyTorch's own autocast
# errs by 2.0e-2 and this program by 2.4e-2. It rounds more than autocast does: embeddings, weights of norms, and the
# gradient of the residual stream. So where a dump says by how much autocast errs on a tensor, half as much again is the
# limit, but no less than two or three roundings in a row cost.
LIMITS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 3e-2}
AUTOCAST_MARGIN, AUTOCAST_FLOOR = 1.5, 2.5 * BF16_LIMIT
EXACT = 0  # the same bits
counts = {True: 0, False: 0}
under_test = None  # the device whose kernel is being tested


def check(name, ok, detail=""):
    """Count a check, and print its line."""
    counts[bool(ok)] += 1
    print(f"{'OK  ' if ok else 'FAIL'} {name:64} {detail}", flush=True)


def run(name, test, *args):
    """Run a test, which checks by itself, or generates (tensor, found, expected, limit), without a limit a kernel's.
    It draws the same random numbers whatever ran before. An exception is a failure like any other."""
    global rng
    rng = np.random.default_rng(1337)
    try:
        for tensor, found, expected, *limit in test(*args) or ():
            found = np.asarray(found)
            [limit] = limit or [BF16_LIMIT if found.dtype == BF16 else KERNEL_LIMIT]
            if limit == EXACT:
                bits = f"u{found.itemsize}"
                differ = np.count_nonzero(found.view(bits) != stored(np.asarray(expected), found.dtype).view(bits))
                check(f"{name} {tensor}", differ == 0, f"{differ} of {found.size} differ" if differ else "same bits")
            else:
                assert found.shape == np.shape(expected), f"{tensor} {found.shape}, expected {np.shape(expected)}"
                error = np.linalg.norm(to_float(found) - np.float64(expected)) / (np.linalg.norm(expected) or 1)
                check(f"{name} {tensor}", error <= limit, f"{error:.1e} {'<=' if error <= limit else '> '} {limit:.1e}")
    except Exception as e:
        check(name, False, f"{type(e).__name__}: {e}")


@functools.cache
def device_of(name, dtype, C, NH, plain=True, architecture=GPT2):
    """A device, compiled once for an architecture. A CPU has only one kind, for which plain means nothing."""
    device = make_device(name, dtype, architecture.Config(C=C, NH=NH), plain)
    device.architecture = architecture
    return device


def stored(values, dtype):
    """An array rounded to a dtype of the devices."""
    return to_bf16(values) if dtype == BF16 != values.dtype else values.astype(dtype)


def bf16(x):
    """x rounded to the 8 bits of a bfloat16's mantissa, to nearest with ties to even, but in float64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(256 * mantissa), exponent - 8)


def f32(x):
    """x rounded to fp32, but in float64: what a kernel is given, ready for a formula."""
    return np.float32(x).astype(np.float64)


def as_real(x):
    """x rounded to what the device under test stores, but in float64."""
    return bf16(x) if under_test and under_test.real == BF16 else f32(x)


def normal(*shape):
    return as_real(rng.standard_normal(shape))


def normal32(*shape):
    return f32(rng.standard_normal(shape))


def nan32(*shape):
    return np.full(shape, np.nan, np.float32)


def words(V, *shape):
    return rng.integers(V, size=shape, dtype=np.int32)


# ---- The formulas. df(dout, x) is the gradient of sum(dout * f(x)), and a list of them if there are several x.


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dgelu(dout, x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return dout * ((1 + tanh) / 2 + x / 2 * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2))


def moments(x):  # (N,C) -> mean (N,1), rstd (N,1)
    return x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def layernorm(x, weight, bias):  # (N,C), (C), (C) -> (N,C)
    mean, rstd = moments(x)
    return (x - mean) * rstd * weight + bias


def dlayernorm(dout, x, weight, bias):
    mean, rstd = moments(x)
    norm, dnorm = (x - mean) * rstd, dout * weight
    dx = rstd * (dnorm - dnorm.mean(-1, keepdims=True) - norm * (dnorm * norm).mean(-1, keepdims=True))
    return [dx, (dout * norm).sum(0), dout.sum(0)]


def transposed(x):
    return x.swapaxes(-1, -2)


def attention_weights(kind, score):  # (...,T,T) -> (...,T,T), whose row t sees the columns s <= t
    past = np.tri(score.shape[-1], dtype=bool)
    return softmax(np.where(past, score, -np.inf)) if kind == "softmax" else np.where(past, np.maximum(score, 0), 0)


def dattention_weights(kind, datt, att, delta):  # (...,T,T) twice, (...,T,1) -> the gradient of the scores (...,T,T)
    return att * (datt - delta) if kind == "softmax" else np.where(att > 0, datt, 0)


def attention(kind, q, k, v):  # (...,T,HS) three times -> (...,T,HS)
    return attention_weights(kind, q @ transposed(k) / np.sqrt(q.shape[-1])) @ v


def dattention(kind, dout, q, k, v, delta=None):
    """delta (...,T,1), which softmax's gradient needs, is the average over a row of att of dout @ v.T."""
    att = attention_weights(kind, q @ transposed(k) / np.sqrt(q.shape[-1]))
    delta = (dout * (att @ v)).sum(-1, keepdims=True) if delta is None else delta
    dscore = dattention_weights(kind, dout @ transposed(v), att, delta) / np.sqrt(q.shape[-1])
    return [dscore @ k, transposed(dscore) @ q, transposed(att) @ dout]


def cross_entropy(targets, logits):  # (N), (N,V) -> (N)
    top = logits.max(-1)
    return np.log(np.exp(logits - top[:, None]).sum(-1)) + top - logits[np.arange(len(targets)), targets]


def dcross_entropy(targets, dout, logits):
    return dout[:, None] * (softmax(logits) - (np.arange(logits.shape[-1]) == targets[:, None]))


def heads(x, S, NH):  # (B,T,S*NH*HS) -> (S,B,NH,T,HS)
    return x.reshape(*x.shape[:2], S, NH, -1).transpose(2, 0, 3, 1, 4)


def finite_difference(name, f, df, *inputs):
    """A gradient against central differences of its function along a random direction."""
    dout, steps = normal(*f(*inputs).shape), [1e-6 * normal(*x.shape) for x in inputs]
    ahead, behind = (f(*(x + sign * s for x, s in zip(inputs, steps))) for sign in (1, -1))
    found = sum((gradient * s).sum() for gradient, s in zip(df(dout, *inputs), steps))
    return name, found, (dout * (ahead - behind)).sum() / 2, 1e-6


def finite_differences():
    qkv, targets = [normal(2, 9, 6) for _ in range(3)], words(11, 5)
    for name, f, df, inputs in (
            ("gelu", gelu, lambda *x: [dgelu(*x)], [3 * normal(200)]),
            ("layernorm", layernorm, dlayernorm, [normal(5, 32), normal(32), normal(32)]),
            ("softmax attention", *(functools.partial(f, "softmax") for f in (attention, dattention)), qkv),
            ("relu attention", *(functools.partial(f, "relu") for f in (attention, dattention)), qkv),
            ("cross entropy", functools.partial(cross_entropy, targets),
             lambda *x: [dcross_entropy(targets, *x)], [normal(5, 11)])):
        yield finite_difference(name, f, df, *inputs)


def rounding():
    """What the devices store is the nearest bfloat16, and a number half way between two goes to the even one."""
    half_way = np.float32(1 + np.arange(512) / 256)
    x = f32(np.r_[10 ** rng.uniform(-30, 30, 10**5) * normal(10**5), half_way, np.nextafter(half_way, 0), -half_way, 0])
    yield "of an fp32", to_float(to_bf16(x)), bf16(x), EXACT


# ---- Each kernel against its formula. The sizes of each run stand over its test.

KERNELS = {}  # name: (test, runs)
BTC = (1, 1, 32), (2, 27, 96), (1, 40, 768), (3, 300, 1600)
NC = (1, 32), (27, 96), (40, 768), (9, 1600)


def kernel(*runs, tests=KERNELS):
    """Register a test of the kernel of its name, for each of these sizes."""
    def register(test):
        tests[test.__name__] = test, runs
    return register


ORDERS = "forward", "reverse", 1  # of the threads of a block, on a CPU; the last is a shuffle


def run_in_orders(name, launch, written):
    """Launch a kernel, on a CPU once in each of ORDERS; under a sanitizer, which is slow and looks for something else,
    in the first alone. Raises AssertionError unless each array of written, {label: array}, comes out the same to the
    last bit; it names the kernel, the array and the first element that differs, and both values."""
    if under_test.name != "cpu":
        return launch()
    given, first = {label: array.copy() for label, array in written.items()}, {}
    try:
        for order in ORDERS[:1] if "-fsanitize" in os.environ.get("CXXFLAGS", "") else ORDERS:
            for label, array in written.items():
                array[...] = given[label]
            under_test.set_order(order)
            launch()
            for label, array in written.items():
                wish, bits = first.setdefault(label, array.copy()), f"u{array.itemsize}"
                for place in np.argwhere(array.view(bits) != wish.view(bits))[:1].tolist():
                    found, expected = (to_float(x[tuple(place)]) for x in (array, wish))
                    raise AssertionError(f"{name} has a race: {label}{place} is {found} when threads run in the order "
                                         f"{order}, and {expected} in the order {ORDERS[0]}")
    finally:
        under_test.set_order(ORDERS[0])


def launch(name, items, *args, threads=None, shared=0):
    """Launch a kernel, in blocks as large as a GPU's unless `threads` says otherwise. A float64 array becomes one of
    real; a shape becomes an array of real that is full of NaN; arrays of other types stay as they are; None is an array
    that is not there. Returns a list of the arrays that the kernel may write, which are those that are not const. They
    lie between guards. Any other ends where its allocation does, for a sanitizer to see. See run_in_orders too."""
    kernel, guard, args, written = under_test.kernels[name], 2**15, list(args), []  # in bytes, more than a row
    for i, (value, (label, _, const)) in enumerate(zip(args, kernel.parameters, strict=True)):
        if isinstance(value, (np.ndarray, tuple)):
            value = np.full(value, np.nan) if isinstance(value, tuple) else value
            value = stored(value, under_test.real) if value.dtype == np.float64 else value
            margin = 0 if const else guard
            buffer = under_test.empty(value.nbytes + 2 * margin)
            args[i] = buffer[margin : margin + value.nbytes].view(value.dtype).reshape(value.shape)
            under_test.put(buffer, np.full(buffer.nbytes, 255, np.uint8))
            under_test.put(args[i], value)
            written += [(label, buffer, args[i])] if margin else []
    launch_it = functools.partial(under_test.launch, name, items, *args, threads=threads or kernel.threads,
                                  shared=shared)
    run_in_orders(name, launch_it, {label: array for label, _, array in written})
    for _, buffer, _ in written:
        assert (np.delete(under_test.get(buffer), slice(guard, -guard)) == 255).all(), "wrote outside of an array"
    return [under_test.get(array) for *_, array in written]


@kernel(*BTC)
def encoder_forward(launch, B, T, C):
    tokens, wte, wpe = words(257, B, T), normal(257, C), normal(T + 3, C)
    for name, positions, expected in (("out", wpe, wte[tokens] + wpe[:T]), ("without wpe", None, wte[tokens])):
        yield name, *launch(B * T * C, nan32(B, T, C), tokens, wte, positions, B * T, T, C), expected, EXACT


@kernel(*BTC)
def encoder_backward_wte(launch, B, T, C):
    tokens = np.where(rng.random((B, T)) < 0.6, 256, words(257, B, T)).astype(np.int32)  # one word is most of the batch
    dwte, dout, batch = normal32(257, C), normal(B, T, C), carve(pack_batch(tokens)[0], batch_table(B, T))
    found = launch((B * T, C), np.float32(dwte), dout, tokens, batch.order, batch.run_length, C)
    np.add.at(dwte, tokens, dout)
    yield "dwte", *found, dwte


@kernel(*BTC)
def encoder_backward_wpe(launch, B, T, C):
    dwpe, dout = normal32(T + 3, C), normal(B, T, C)
    [found] = launch(T * C, np.float32(dwpe), dout, B, T, C)
    yield "dwpe", found[:T], dwpe[:T] + dout.sum(0)
    yield "dwpe beyond T", found[T:], dwpe[T:], EXACT


@kernel(*((*sizes, with_branch) for sizes in NC for with_branch in (0, 1)))
def residual_layernorm_forward(launch, N, C, with_branch):
    # Rows of deviation 10 to 0.001, where the 1e-5 under the root counts; every third has a mean of 50 deviations.
    deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
    residual, branch = f32(deviation * (normal32(N, C) + mean)), as_real(deviation * normal(N, C))
    x = f32(residual + branch * with_branch)
    weight, bias, (mean, rstd) = normal(C), normal(C), moments(x)
    out, found_mean, found_rstd, copy, found = launch(N, (N, C), nan32(N, 1), nan32(N, 1), (N, C), np.float32(residual),
                                                      branch if with_branch else None, weight, bias, N)
    yield "residual", found, x, EXACT
    yield "copy", copy, x, EXACT
    yield "out", out, layernorm(x, weight, bias)
    yield "mean", found_mean * rstd, mean * rstd
    yield "rstd", found_rstd / rstd, np.ones((N, 1))


@kernel(*NC)
def layernorm_again(launch, N, C):
    inp, mean, rstd, weight, bias = normal(N, C), normal32(N, 1), normal32(N, 1), normal(C), normal(C)
    found = launch(N * C, (N, C), inp, np.float32(mean), np.float32(rstd), weight, bias, N, C)
    yield "out", *found, (inp - mean) * rstd * weight + bias


@kernel(*((*sizes, None) for sizes in (*NC, (300, 96), (70, 1600))), (1, 32, (2, 4)), (3, 768, (1, 12)),
        (27, 96, (5, 3)), (100, 768, (3, 4)), (70, 1600, (2, 5)), (9, 1600, (9, 1)))
def layernorm_backward(launch, N, C, blocks_warps):
    """With the trainer's own grid, or with another of so many blocks, each of so many warps."""
    blocks, threads, shared = layernorm_backward_launch(under_test, N)
    if blocks_warps:
        (blocks, warps), of_warp = blocks_warps, under_test.layernorm_sizes.shared_of_warp
        threads, shared = 32 * warps, warps * of_warp
    inp, dout, dresidual, weight = as_real(normal(N, C) + 3), normal(N, C), normal(N, C), normal(C)
    mean, rstd = moments(inp)
    found, partials = launch(blocks, dresidual, nan32(3, blocks, C), dout, inp, weight, np.float32(mean),
                             np.float32(rstd), N, threads=threads, shared=shared)
    dx, dweight, dbias = dlayernorm(dout, inp, weight, 0)
    yield "dresidual", found, dresidual + dx
    dbias_before = (dresidual + dx).sum(0)  # of dresidual before it is rounded
    yield from zip(("dweight", "dbias", "dbias before"), partials.sum(1), (dweight, dbias, dbias_before))


@kernel((1, 32, 1), (27, 96, 1), (40, 2304, 1), (PARTIAL_ROWS, 768, 1), (300, 96, 5), (130, 1600, 2))
def matmul_backward_bias(launch, N, OC, shares):
    dout, dbias = normal(N, OC), normal32(OC)
    [found] = launch((OC, shares), np.float32(dbias) if shares == 1 else nan32(shares, OC), dout, N, OC)
    yield "dbias", found.reshape(-1, OC).sum(0), dout.sum(0) + dbias * (shares == 1)


@kernel((1, 32, "1"), (27, 96, "12"), (40, 2304, "123"), (PARTIAL_ROWS, 768, "12-"), (5, 96, "1--"), (3, 1600, "-2-"))
def add_partials(launch, N, OC, outs):
    partials, given = normal32(len(outs), N, OC), [None if out == "-" else normal32(OC) for out in outs]
    outs32 = [out if out is None else np.float32(out) for out in given]
    found = launch((OC, len(outs)), *outs32, *[None] * (3 - len(outs)), np.float32(partials), N, OC)
    wishes = [out + sums for out, sums in zip(given, partials.sum(1)) if out is not None]
    yield "outs", np.stack(found), np.stack(wishes)


def attention_kernels(direction, launch, kind, B, T, NH, NKV, HS):
    """One of the three kernels, given what the others leave for it; delta is that of an out that is not quite right, or
    softmax's dscore would be 0 where T is 1. The truth is ungrouped: it repeats the keys and values for each query head
    of a group, and adds their gradients up."""
    shape, limit = (B, T, NH * HS), ATTENTION_LIMITS[under_test.dtype]
    blocks, threads, shared = attention_launch(under_test, f"attention_{direction}", B, T, NH, NKV)
    launch_it = functools.partial(launch, blocks, threads=threads, shared=shared)
    q, k, v, dout, noise = (normal(B, T, heads_here * HS) for heads_here in (NH, NKV, NKV, NH, NH))
    if kind == "relu" or under_test.dtype == "tf32":  # in sixteenths scores are exact, and one next to 0 keeps its sign
        q, k, v, dout = (np.round(16 * x) / 16 for x in (q, k, v, dout))
    q *= 2.0 ** rng.integers(-3, 4, (B, T, 1))  # some scores are some tens
    qkv, scale, relu = np.concatenate([q, k, v], -1), 1 / np.sqrt(HS), int(kind == "relu")
    q, k, v, dout_heads = (heads(x, 1, x.shape[-1] // HS)[0].repeat(NH * HS // x.shape[-1], 1)
                           for x in (q, k, v, dout))  # (B,NH,T,HS) each
    score = np.where(np.tri(T, dtype=bool), scale * q @ transposed(k), -np.inf)
    lse = np.logaddexp.reduce(score, -1, keepdims=True) / np.log(2)
    out = attention(kind, q, k, v).swapaxes(1, 2).reshape(shape)
    given = as_real(out + noise / 10)
    delta = f32((dout_heads * heads(given, 1, NH)[0]).sum(-1, keepdims=True))
    dq, dk, dv = dattention(kind, dout_heads, q, k, v, delta)
    dk, dv = (x.reshape(B, NKV, NH // NKV, T, HS).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.swapaxes(1, 2).reshape(B, T, -1) for x in (dq, dk, dv))

    sizes, lse32, split = (scale, relu, T, NH, NKV), np.float32(lse), [NH * HS, (NH + NKV) * HS]
    if direction == "forward":
        found, found_lse = launch_it(shape, nan32(*lse.shape), qkv, *sizes)
        yield "out", found, out, limit
        if kind == "softmax":
            yield "lse", np.exp2(found_lse - lse), np.ones(lse.shape)
    elif direction == "backward_q":
        dqkv, found_delta = launch_it(qkv.shape, nan32(*lse.shape), dout, given, qkv, lse32, *sizes)
        found, *others = np.split(dqkv, split, -1)
        yield "delta", found_delta, delta
        yield "dq", found, dq, limit
        yield "dk, dv untouched", np.stack(others), np.full((2, *dk.shape), np.nan), EXACT
    else:
        [dqkv] = launch_it(qkv.shape, dout, qkv, lse32, np.float32(delta), *sizes)
        other, found_dk, found_dv = np.split(dqkv, split, -1)
        yield "dq untouched", other, np.full(shape, np.nan), EXACT
        yield "dk", found_dk, dk, limit
        yield "dv", found_dv, dv, limit


for direction in ("forward", "backward_q", "backward_kv"):
    KERNELS[f"attention_{direction}"] = functools.partial(attention_kernels, direction), [
        (kind, *sizes) for kind in ("softmax", "relu") for sizes in (
            (3, 1, 44, 22, 3), (2, 27, 8, 1, 6), (1, 40, 2, 1, 32), (1, 64, 3, 3, 32), (2, 65, 6, 2, 64),
            (1, 260, 2, 1, 128), (1, 130, 4, 4, 100), (1, 70, 5, 5, 80), (1, 300, 2, 2, 64), (2, 130, 40, 40, 32))]


def gelu_kernels(direction, launch, N, C):
    small, dout = rng.random((N, 4 * C)) < 0.5, normal(N, 4 * C)
    inp = np.where(small, normal(N, 4 * C), as_real(rng.uniform(-100, 100, (N, 4 * C))))
    if direction == "forward":
        [found], expected = launch(inp.size, inp.shape, inp, N, 4 * C), gelu(inp)
    else:
        [found], expected = launch(inp.size, dout, inp, N, 4 * C), dgelu(dout, inp)
    yield "of small numbers", found[small], expected[small]
    yield "of any up to 100", found, expected


for name in ("gelu_forward", "gelu_backward"):
    KERNELS[name] = functools.partial(gelu_kernels, name.removeprefix("gelu_")), NC


@kernel(*((*sizes, rows) for sizes in ((1, 257, 257), (27, 257, 384), (5, 384, 384), (3, 50257, 50304),
                                       (7, 4096, 4224)) for rows in (None, 0, 0.7, 1, 2)))
def fused_classifier(launch, N, V, Vp, rows):
    """With the trainer's own grid, or with a block for two rows, and shared memory for so many of them."""
    blocks, room, shared = classifier_launch(under_test, N, Vp, with_gradient=1)
    if rows is not None:
        blocks, room = -(-N // 2), int(rows * Vp) // under_test.W * under_test.W
        shared = room * 16 // under_test.W
    if shared > under_test.max_shared:
        return
    logits, targets, dloss = as_real(3 * normal(N, V)), words(V, N), f32(1 / N)
    logits[-1] = rng.choice([-80, 80], V)
    logits[0, targets[0]] = -200  # its probability is 0 in fp32, its loss is not
    padded = np.pad(logits, ((0, 0), (0, Vp - V)), constant_values=np.nan)
    for with_gradient in (0, 1):
        found, losses = launch(blocks, padded, nan32(N), targets, dloss, N, V, Vp, with_gradient, room, shared=shared)
        yield "losses", losses, cross_entropy(targets, logits)
        if not with_gradient:
            yield "logits left alone", found, padded, EXACT
    yield "dlogits", found[:, :V], dcross_entropy(targets, np.full(N, dloss), logits)
    yield "dlogits, padding", found[:, V:], np.zeros((N, Vp - V)), EXACT


@kernel((4, 1), (4 * 37, NORM_BLOCKS), (4 * 12345, 70), (10**6, 3))
def global_norm(launch, n, blocks):
    grads, norm = np.float32(normal32(n) * 10 ** rng.uniform(-6, 3, n)), np.r_[nan32(1), np.float32(0), nan32(blocks)]
    for last in (1, np.inf, np.nan):
        grads[-1] = last
        [found] = launch(blocks, norm, grads, n)
        if last == 1:
            yield "norm", found[0], np.linalg.norm(np.float64(grads))
        else:
            yield f"norm with {last} is finite", np.isfinite(found[0]), False, EXACT
        yield "counter", found[1], 0, EXACT


@kernel((1, 0), (37, 1), (1024, 0), (5000, 1))
def add_loss(launch, N, accumulate):
    verdict, losses = np.float32(normal32(len(Verdict._fields))), np.float32(3 + 10 * np.square(normal32(N)))
    [found] = launch(1, verdict, losses, 0.125 / N, N, accumulate)
    before = np.float64(verdict[1]) if accumulate else 0
    yield "loss", found[1], before + 0.125 * np.mean(losses, dtype=np.float64)
    yield "the rest", np.delete(found, 1), np.delete(verdict, 1), EXACT


@kernel((0, 0), (3, 0), (0, 3), (30, 30))
def judge(launch, loss_limit, norm_limit):
    """290 steps, of which some are outliers and some not finite, by the formula of llm.c's detector (z is NaN in its
    first 128 values) on all values so far."""
    settings = np.zeros(len(ADAMW), np.float32)
    settings[-2:] = loss_limit, norm_limit
    steps = 3 + 0.01 * (np.arange(290) % 7), np.square(normal32(290)) + 1
    steps[0][[100, 150, 151]], steps[1][[131, 200, 289]] = (9, 5, 3), (1e3, 9, 1e30)
    steps[0][[50, 180]], steps[1][[60, 250, 251]] = (np.nan, np.inf), (np.inf, np.nan, np.inf)
    values, seen = np.float32(steps), np.zeros(1, np.int32)
    verdict, windows = np.zeros(6, np.float32), np.zeros((2, WINDOW), np.uint64)  # the bits of float64s
    known, found, expected = [], [], []
    for loss, norm in values.T:
        verdict[1] = loss
        verdict, windows, seen = launch(32, verdict, windows, seen, np.float32([norm, 7]), settings)
        found.append(verdict)
        if not (np.isfinite(loss) and np.isfinite(norm)):
            expected.append([norm, loss, *verdict[2:4], 0, 1])
            [again, kept, _] = launch(32, np.float32([0, 3, 0, 0, 1, 1]), windows, seen, np.float32([1, 7]), settings)
            yield "after a step that is not finite", again[4:], [0, 1], EXACT
            yield "the windows then", kept, windows, EXACT
            verdict = np.zeros(6, np.float32)  # as the host clears it
            continue
        known.append((loss, norm))
        last = np.float64(known[-WINDOW:])
        z = (last[-1] - last.mean(0)) / last.std(0) if len(known) > WINDOW else np.full(2, np.nan)
        skips = 0 < loss_limit < z[0] or 0 < norm_limit < z[1]
        expected.append([norm, loss, z[1], z[0], not skips, 0])
    found, expected = np.array(found), np.array(expected)
    judged = np.isfinite(expected[:, 2])
    yield "which steps are judged", np.isfinite(found[:, 2:4]), np.stack([judged, judged], 1), EXACT
    yield "z-scores", found[judged, 2:4], expected[judged, 2:4]
    yield "update, stopped", found[:, 4:], np.float32(expected[:, 4:]), EXACT
    skipped = {(0, 0): 0, (3, 0): 1, (0, 3): 3}.get((loss_limit, norm_limit), 0)
    yield "steps without update", np.sum(found[:, 4] == 0), skipped + 5, EXACT
    yield "windows", np.sort(windows.view(np.float64)), np.sort(np.float64(known[-WINDOW:]).T), EXACT
    yield "seen", seen, [len(known)], EXACT


@kernel((1, 0), (14, 0.5), (32, 2))
def adamw(launch, tensors, clip):
    """Three steps, clipped to a multiple of the norm, and between them two that are not to update."""
    sizes, decayed = 32 * rng.integers(1, 200, tensors), np.resize(np.int32([1, 0, 0]), tensors)
    n, starts = sum(sizes), np.cumsum([0, *sizes]).astype(np.uint64)
    lr, rate1, rate2, eps, weight_decay = f32([0.01, 0.1, 0.001, 1e-8, 0.1])
    first = p = f32(0.02 * normal32(n))
    m = v = np.zeros(n)
    state = [np.float32(x) for x in (p, m, v)]
    for step, update in ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1)):
        g = f32(normal32(n) * 10 ** rng.uniform(-10, 0, n))  # the small ones bring out eps
        norm, corrections = np.linalg.norm(g), (1 / (1 - (1 - rate1) ** step), 1 / (1 - (1 - rate2) ** step))
        settings = dict.fromkeys(ADAMW, 0) | dict(
            learning_rate=lr, rate1=rate1, rate2=rate2, correction1=corrections[0], correction2=corrections[1], eps=eps,
            weight_decay=weight_decay, clip=clip * norm)
        params, master, *moments = launch(
            n, p.shape, state[0], np.float32(g), *state[1:], starts, decayed, tensors, n,
            np.float32([settings[name] for name in ADAMW]), np.float32(Verdict(norm, 0, 0, 0, update, 1 - update)))
        if not update:
            yield f"master, m, v without update {step}", np.stack([master, *moments]), np.stack(state), EXACT
            yield f"params without update {step}", params, np.full(n, np.nan), EXACT
            continue
        state, g = [master, *moments], g * min(clip or 1, 1)
        m, v = (1 - rate1) * m + rate1 * g, (1 - rate2) * v + rate2 * g**2
        change = m * corrections[0] / (np.sqrt(v * corrections[1]) + eps)
        p = p - lr * (change + weight_decay * np.repeat(decayed, sizes) * p)
    yield from zip(("change", "m", "v"), (state[0] - first, *state[1:]), (p - first, m, v))
    # In fp32, params are the master, and nothing else is written.
    yield "params", params, state[0] if params.dtype == BF16 else np.full(n, np.nan), EXACT


# C and NH; the fixtures' first
COMPILED_FOR = (64, 2), (32, 1), (96, 16), (96, 32), (768, 12), (768, 6), (160, 2), (1600, 16)


def test_kernels(device_name, dtype, only, tests=KERNELS, compiled_for=COMPILED_FOR, architecture=GPT2):
    """All kernels, compiled for the C and HS of each run if it has them; in tf32 only those that multiply matrices,
    which are attention's."""
    global under_test
    wanted = []  # (kernel, test, its sizes, their names, the C and NH to compile for)
    for name, (test, runs) in tests.items():
        for sizes in runs if only in (None, name) and (dtype != "tf32" or "attention" in name) else ():
            named = dict(zip([*inspect.signature(test).parameters][1:], sizes, strict=True))
            wanted.append((name, test, sizes, named, next(
                (C, NH) for C, NH in compiled_for
                if (named.get("C", C), named.get("HS", C // NH)) == (C, C // NH))))
    device_for = lambda model: device_of(device_name, dtype, *model, architecture=architecture)
    if device_name == "cpu":  # a compiler takes a core
        with ThreadPoolExecutor() as pool:
            list(pool.map(device_for, {model: True for *_, model in wanted}))
    for name, test, sizes, named, model in wanted:
        under_test = device_for(model)
        # Without CuPy's pool, which a sanitizer would take for one large array.
        with under_test.cupy.cuda.using_allocator(None) if device_name == "cuda" else contextlib.nullcontext():
            title = " ".join((dtype, name, *(f"{size}={value}" for size, value in named.items())))
            run(title, test, functools.partial(launch, name), *sizes)
    under_test = None


# ---- What else the model is made of: a few steps to its gradients, and matrix products


def poison(model, *arenas):
    """Fill arenas with NaN."""
    for name in arenas:
        model.device.put(model.arenas[name], np.full(model.arenas[name].nbytes, 255, np.uint8))


SMALL_MODEL = {GPT2: dict(V=257, L=2, NH=1, C=32, Vp=384)}  # the sizes of a model that steps are tested with


def write_checkpoint(path, model):
    """Write a checkpoint of a model, as a run does."""
    replace_file(path, map(model.device.get, checkpoint_parts(model)))


def poisoned_model(device, B, T, kind="softmax", recompute=False, **sizes):
    """A model whose activations and gradients are NaN until they are computed, with parameters of deviation 0.2."""
    c = device.architecture.Config(**{"maxT": T} | SMALL_MODEL[device.architecture] | sizes)
    model = device.architecture(c, device, B, T, kind, recompute)
    poison(model, "activations", "backward", "gradients")
    values = np.random.default_rng(1).normal(0, 0.2, model.master.size).astype(np.float32)
    model.set_parameters(vars(carve(values.view(np.uint8), c.parameter_table())).items())
    return model


def gradients(model, *batches):
    """{name: gradient} that a step's micro-batches, each (tokens, targets), add up to."""
    for micro, batch in enumerate(batches):
        model.set_batch(pack_batch(*batch))
        model.forward_pass()
        model.backward_pass(micro)
    return {name: model.device.get(array) for name, array in vars(model.grads).items()}


def matmul(device, M, K, N):
    """The products of a linear layer x (M,K) @ w (N,K).T + bias (N), and of its gradients, beside a GELU or not."""
    real, fp32 = device.real, np.float32
    # In bf16, cuBLAS may round the product before it adds the bias, and then again.
    limit = [] if device.dtype == "fp32" else [3e-3]
    x, w, bias, dout, dw, h = (normal32(*shape) for shape in ((M, K), (N, K), (N,), (M, N), (N, K), (M, K)))
    x, w, bias, dout, h = (bf16(values) if real == BF16 else values for values in (x, w, bias, dout, h))

    def nan(*shape):
        return np.full(shape, np.nan)

    def array(values, dtype=real):
        on_device = device.empty(values.size * np.dtype(dtype).itemsize).view(dtype).reshape(values.shape)
        device.put(on_device, stored(values, dtype))
        return on_device

    for name, out, expected, *factors in (
            ("x @ w.T", array(nan(M, N)), x @ w.T, array(x), array(w).T),
            ("x @ w.T + bias", array(nan(M, N)), x @ w.T + bias, array(x), array(w).T, array(bias)),
            ("dout @ w", array(nan(M, K)), dout @ w, array(dout), array(w)),
            ("dout.T @ x", array(nan(N, K), fp32), dout.T @ x, array(dout).T, array(x)),
            ("+= dout.T @ x", array(dw, fp32), dw + dout.T @ x, array(dout).T, array(x))):
        device.matmul(out, *factors, accumulate="+=" in name)
        yield name, device.get(out), expected, *limit
    if N % 32 == 0:  # as GELU's channels are in a model
        out, activated = array(nan(M, N)), array(nan(M, N))
        device.matmul(out, array(x), array(w).T, array(bias), gelu=activated)
        yield "x @ w.T + bias, with its GELU", device.get(out), x @ w.T + bias, *limit
        yield "gelu(x @ w.T + bias)", device.get(activated), gelu(x @ w.T + bias), *limit
    if K % 32 == 0:
        out = array(nan(M, K))
        device.matmul(out, array(dout), array(w), dgelu_at=array(h))
        yield "dout @ w * gelu'(h)", device.get(out), dgelu(dout @ w, h), *limit


# ---- The whole model against a dump

DEBUG_STATE = {GPT2.Config: FileKind("debug state", 20240327, (2,),
                                     "llm.c's train_gpt2.py or dev/torch_reference.py writes one")}
HYPERPARAMETERS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
LLM_C_LOSSES = [  # of the 124M model, in llm.c's fp32 tests, and in its mixed-precision test
    ((1e-4, 0.9, 0.999, 1e-8, 0.01), (5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147,
                                      0.624080, 0.376511)),
    ((1e-4, 0.9, 0.95, 1e-8, 0.0), (5.270009, 4.060681, 3.320085, 2.717550, 2.181066, 1.653923, 1.168050, 0.736873,
                                    0.401021, 0.187493))]


def read_debug_state(path, c):
    """A debug state for a model of config c: x, y (B,T) int32, logits (B,T,V), loss, and gradients {name: array}.
    Raises UserError."""
    kind = DEBUG_STATE[type(c)]
    B, T, recorded = read_header(path, kind)[2:5]  # a GPT-2's has no losses and norms of recorded steps behind it
    if B < 1 or not 1 <= T <= c.maxT:
        raise UserError(f"{path}: B = {B}, T = {T} in its header; expected 1 <= B and 1 <= T <= maxT = {c.maxT}")
    rows = [Row("x", (B, T), np.int32), Row("y", (B, T), np.int32), Row("logits", (B, T, c.V)), Row("loss", ())]
    rows += c.file_table()
    check_size(path, kind, HEADER_BYTES + sum(row.nbytes for row in rows) + 2 * 4 * recorded)
    state = {}
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        for row in rows:
            state[row.name] = np.fromfile(file, row.dtype, row.size).reshape(row.whole_shape)
    x, y, logits, loss = (state.pop(row.name) for row in rows[:4])
    check_tokens(path, x, c.V)
    check_tokens(path, y, c.V)
    return SimpleNamespace(x=x, y=y, logits=logits, loss=float(loss), gradients=state)


def dump_limit(dtype, report, tensor, sign_changes=0):
    """The limit of "loss", "logits", or the gradient of a parameter of this name, given what a dump's report says: in
    bf16 AUTOCAST_MARGIN times autocast's error, if the report has it, but no less than AUTOCAST_FLOOR."""
    error = report.get("autocast_errors", {}).get(tensor) if dtype == "bf16" else None
    return LIMITS[dtype] + sign_changes if error is None else max(AUTOCAST_MARGIN * error, AUTOCAST_FLOOR)


def sign_changes(model, limit):
    """How far off gradients may be with ReLU attention: a rounding of `limit` turns scores next to 0 positive or
    negative, and with that their gradients on or off. If a share s of them turn, the error is about sqrt(s)."""
    qkv = to_float(model.device.get(model.acts.qkv)).astype(np.float64)  # (L,N,3C)
    q, k, _ = heads(qkv.reshape(-1, model.shape[1], qkv.shape[-1]), 3, model.config.NH)  # (L*B,NH,T,HS) each
    score = (q @ transposed(k))[..., np.tri(q.shape[-2], dtype=bool)]
    return 3 * np.sqrt(np.mean(abs(score) < limit * np.sqrt(np.mean(score**2))))


def dump(device, checkpoint, state, kind, limit_of, losses=(), bound=0, hyperparameters=None):
    """Logits, loss and gradients of a debug state, and the losses, if they are known, before each of ten updates on its
    one batch; these must be within bound."""
    c, dtype = device.architecture.Config.from_file(checkpoint), device.dtype
    truth = read_debug_state(state, c)
    model = poisoned_model(device, *truth.x.shape, kind, **dataclasses.asdict(c))
    model.set_parameters(read_parameters(checkpoint, c))
    yield "loss", model.forward(truth.x, truth.y), truth.loss, limit_of("loss")
    logits = device.get(model.acts.logits)[:, : c.V].reshape(truth.logits.shape)
    yield "logits", logits, truth.logits, limit_of("logits")
    found = gradients(model, (truth.x, truth.y))
    more = sign_changes(model, LIMITS[dtype]) if kind == "relu" else 0
    for name, gradient in truth.gradients.items():
        if name in found:  # a tensor of the file alone is zeros, or another's again
            yield f"d{name}", found[name][: len(gradient)], gradient, limit_of(name, more)
    for step, wish in enumerate(losses):
        model.train_step(pack_batch(truth.x, truth.y), **hyperparameters)
        yield f"loss {step}", model.report()().loss - wish, 0, bound


def test_dump(where, checkpoint, state, kind=None, fp32_bound=1e-2):
    """Compare with a debug state, and with ten losses if they are known: beside it, or because it is llm.c's. where: a
    device's name, its dtype, whether it is the plain one, and an architecture."""
    device_name, dtype, plain, architecture = where
    prefix = str(state).removesuffix(".bin").removesuffix("_debug_state")
    report = json.loads(Path(f"{prefix}_losses.json").read_text()) if Path(f"{prefix}_losses.json").exists() else {}
    kind, known = kind or report.get("attention", "softmax"), []
    limit_of = functools.partial(dump_limit, dtype, report if kind == report.get("attention") else {})
    if kind == report.get("attention"):
        bound = fp32_bound if dtype == "fp32" else 3e-2
        known.append((report["losses"], bound, {name: report[name] for name in HYPERPARAMETERS}))
    if kind == "softmax" and Path(prefix).name == "gpt2_124M":
        known += [(losses, 1e-2, dict(zip(HYPERPARAMETERS, values))) for values, losses in LLM_C_LOSSES]
    c = architecture.Config.from_file(checkpoint)
    device = device_of(device_name, dtype, c.C, c.NH, plain, architecture)
    for ten in known or [()]:
        run(f"{dtype} {Path(prefix).name}", dump, device, checkpoint, state, kind, limit_of, *ten)


# ---- The program

FIXTURES = HERE / "dev/fixtures"
FLAGS = [  # name, form, what it is
    ("--device", {"choices": ("cpu", "cuda")}, "only on this one (default: the CPU, and a GPU if there is one)"),
    ("--dtype", {"choices": tuple(LIMITS)}, "only with this one (default: all)"),
    ("--plain", {"type": int, "choices": (0, 1)},
     "on a GPU, only the plain device (1) or the fast one (0; default: both)"),
    ("--checkpoint", {}, "the checkpoint of a dump; with --state, only this dump is compared"),
    ("--state", {}, "the debug state of the dump"),
    ("--attention", {"choices": ("softmax", "relu")}, "the dump's (default: what its losses' file says, else softmax)"),
    ("--kernels", {"action": "store_true"}, "only the kernels"),
    ("--only", {}, "only this kernel"),
]


def read_flags(description, tests):
    """The flags of a test program with these kernels."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, form, text in FLAGS:
        parser.add_argument(name, help=text, **form, **({"choices": tuple(tests)} if name == "--only" else {}))
    flags = parser.parse_args()
    if bool(flags.checkpoint) != bool(flags.state) or flags.attention and not flags.state:
        parser.error("--checkpoint and --state go together, and --attention with them")
    return flags


def each_device(flags):
    """(device's name, dtype) of each combination that the flags ask for, after a line that says so."""
    for name in [flags.device] if flags.device else ["cpu", "cuda"] if has_gpu() else ["cpu"]:
        for dtype in [flags.dtype] if flags.dtype else LIMITS:
            print(f"--- {name} {dtype}")
            yield name, dtype


def each_kind(flags, name, dtype):
    """Whether the device is to be the plain one, of each kind that the flags ask for. A CPU has only one."""
    for plain in (1, 0) if name == "cuda" else (1,):
        if name != "cuda" or flags.plain in (None, plain):
            if name == "cuda":
                print(f"--- {name} {dtype}, the {'plain' if plain else 'fast'} device")
            yield plain


def test_device(device_name, dtype, plain):
    """Matrix products, and the dumps that are here."""
    where = device_name, dtype, plain, GPT2
    for sizes in ((1, 1, 1), (27, 96, 288), (40, 768, 257), (300, 6, 32)):
        run(f"{dtype} matmul {sizes}", matmul, device_of(device_name, dtype, 32, 1, plain), *sizes)
    for state in ("gpt2_tiny", "gpt2_tiny_relu"):
        # To decay one tensor wrongly moves a loss by 1.5e-5 or more, to leave out the bias correction by 0.4, and
        # rounding by 1e-6.
        test_dump(where, FIXTURES / "gpt2_tiny.bin", FIXTURES / f"{state}_debug_state.bin", fp32_bound=1e-5)
    if Path("gpt2_124M.bin").exists() and Path("gpt2_124M_debug_state.bin").exists():
        test_dump(where, "gpt2_124M.bin", "gpt2_124M_debug_state.bin")


def main():
    flags = read_flags("Compare train_gpt2.py with independent truths.", KERNELS)
    kernels = flags.kernels or flags.only
    everything = not (kernels or flags.state)
    if everything:
        from dev.test_files import test_files, test_steps
        run("gradient of", finite_differences)
        run("rounding", rounding)
        untested = read_kernels(Config.SOURCES).keys() ^ KERNELS.keys()
        check("each kernel has a test, and each test a kernel", not untested, " ".join(sorted(untested)))
    for name, dtype in each_device(flags):
        if not flags.state:
            test_kernels(name, dtype, flags.only)
        if kernels:
            continue
        for plain in each_kind(flags, name, dtype):
            if flags.state:
                test_dump((name, dtype, plain, GPT2), flags.checkpoint, flags.state, flags.attention)
            else:
                test_device(name, dtype, plain)
                test_steps(name, dtype, plain)
    if everything:
        test_files(name)
    return summary()


def summary():
    """Print how many checks have passed and failed. Returns the exit status."""
    print(f"{counts[True]} passed, {counts[False]} failed")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    import test_gpt2  # not `__main__` itself: dev/test_files.py imports test_gpt2, and there must be only one
    try:
        sys.exit(test_gpt2.main())
    except UserError as e:
        sys.exit(f"error: {e}")
