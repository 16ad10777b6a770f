"""Test what test_gpt2.py leaves out: the steps of a training run, files, refusals, and the command line.

    python -m dev.tests.test_files                  # on the CPU, and the steps on a GPU too if there is one
    python -m dev.tests.test_files --device cpu     # only on this one

`python test_gpt2.py` runs this too. Here nothing is compared with a formula. A step is compared with the same step made
in another way, a file with what was written, and a refusal with what it must say.
"""
import argparse
import contextlib
import copy
import ctypes
import dataclasses
import functools
import io
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import train_gpt2
from dev import gpt2_numpy
from dev.common.bf16 import joined, master_numbers, to_bf16
from dev.lab.kernels.adamw import halves
from dev.lab.kernels.adamw_bf16 import rounded, splitmix64
from dev.lab.heads import launch_trainers
from dev.lab.kernel import Bench, find_kernel, noting, parse_sizes
from dev.lab.kernel import orders as thread_orders
from dev.data.shuffled_loader import FilesLoader
from dev.common.devices import make_device
from dev.features import has_gpu
from dev.common.file_kinds import FILES, check_kind
from dev.common.cuda_source import read_kernels
from dev.memory import fit
from dev.gpu.nvtx import DEVICE, MODEL, Annotated, with_ranges
from dev.runs.tokenizer import TOKENIZER, read_tokenizer
from dev.variants.outliers import SOURCE as OUTLIERS
from dev.variants.schedule import Scheduled
from prepro_tinyshakespeare import UserError, byte_encoding, replace_file, write_tokens
from test_gpt2 import (ATTENTION, AUTOCAST_FLOOR, AUTOCAST_MARGIN, DEBUG_STATE, EXACT, FIXTURES,
                       KERNEL_LIMIT, LIMITS, LOWER, SMALL_MODEL, check, device_of, dump_limit, gradients, model_class,
                       poison, poisoned_model, read_debug_state, run, stored, summary, words, write_checkpoint)
from train_gpt2 import (ADAMW, BF16, GPT2, LOW, TOKENS, Config, DataLoader, Training, Verdict,
                        batch_table, carve, coins, draw_parameters, draw_token, kept_as, pack_batch,
                        read_header, read_parameters, to_float)

TOP = Path(__file__).resolve().parents[2]


def run_prepared(prepare, tests, device, only):
    """Run tests, each (function, its last arguments ...), or only the one of this name. Each has a folder of its own,
    which prepare(folder) fills."""
    def prepared(test, folder, more):
        prepare(folder)
        yield from test(device, folder, *more) or ()

    names = [test.__name__ for test, *_ in tests]
    if only and tests and only not in names:
        sys.exit(f"error: --only {only}: expected one of {', '.join(names)}")
    for test, *more in tests:
        if only in (None, test.__name__):
            with tempfile.TemporaryDirectory() as folder:
                run(test.__name__.replace("_", " ") + ":", prepared, test, Path(folder), more)


# ---- The steps of a training run: the same bits again, no more memory, other ways to the same gradients


def micro_batches(device):
    """A step's micro-batches add up. Of the gradients before it, be they NaN or another step's, nothing is left."""
    model, batches, alone = poisoned_model(device, 2, 20), words(257, 3, 2, 2, 20), []
    for batch in batches:
        poison(model, "gradients")
        alone.append(gradients(model, batch))
    together, again = gradients(model, *batches), gradients(model, batches[0])
    for name in together:
        yield f"sum of d{name}", together[name], sum(np.float64(one[name]) for one in alone), KERNEL_LIMIT
        yield f"d{name} after other micro-batches", again[name], alone[0][name], EXACT


def accumulated_steps(device):
    """A step of several micro-batches has the mean of their losses and of their gradients, which AdamW's first moment
    shows; on a fast GPU, be it run, recorded or replayed."""
    model, alone, losses = poisoned_model(device, 2, 20), [], []
    batches, parameters = words(257, 3, 2, 2, 20), master_numbers(model)
    for batch in batches:
        alone.append(np.concatenate([array.ravel() for array in gradients(model, batch).values()], dtype=np.float64))
        losses.append(model.report().loss)
    for count in (3, 3, 3, 2, 1):
        packed = [pack_batch(*batch) for batch in batches[:count]]
        model.train_step(*packed, learning_rate=0.0, beta1=0, clip=0)
        norm, loss, *_ = model.report()
        mean = sum(alone[:count]) / count
        yield f"loss of {count}", loss, np.mean(losses[:count]), KERNEL_LIMIT
        limit = KERNEL_LIMIT if device.dtype == "fp32" else LIMITS[device.dtype]  # a third is rounded anew
        yield f"norm of {count}", norm, np.linalg.norm(mean), limit
        yield f"m of {count}", device.get(model.arenas["adam m"].view(np.float32)), mean, limit
    yield "steps", model.step, 5, EXACT
    yield "the parameters stay", master_numbers(model), parameters, EXACT


def repeated_steps(device):
    """Runs of one seed end in the same bits, in steps of two shapes. Their steps are made by train_step, with reports
    that are read late where the device can, or pass by pass. A fast GPU records train_step's second step of each shape
    as a graph, and after that no more memory is taken."""
    runs, memory, settings = [], [], dict(learning_rate=1e-2, weight_decay=0.1, clip=0.5)
    for pass_by_pass in (False, False, True):
        model, reports, generator = poisoned_model(device, 2, 20), [], np.random.default_rng(1)
        for step in range(7):
            B, T = ((2, 20), (1, 13))[step % 2]
            x, y = generator.integers(257, size=(2, B, T), dtype=np.int32)
            model.forward(y[:1, :7], x[:1, :7])  # a validation between two steps
            if pass_by_pass:
                gradients(model, (x, y))
                model.set_adamw(**settings)
                model.update_pass()
                reports.append(model.report())
            else:
                model.train_step(pack_batch(x, y), **settings)
                late = hasattr(device, "fetch")
                reports.append(device.fetch(model.adam.verdict) if late else model.report())
            if device.name == "cuda":
                memory.append((device.gpu.mem_info[0], device.cupy.get_default_memory_pool().total_bytes()))
        reports = [Verdict(*report().tolist()) if callable(report) else report for report in reports]
        runs.append([reports, *(device.get(model.arenas[name]) for name in ("adam m", "adam v", "parameters"))])
    for name, *found, by_passes in zip(("losses, norms", "m", "v", "parameters"), *runs):
        yield name, np.stack(found), np.stack([by_passes] * 2), EXACT
    if memory:
        yield "memory, free and in CuPy's pool", np.array(memory[4:7]), np.array(memory[3:4] * 3), EXACT


def clipped_gradients(device):
    """The norm of a gradient, and what is left of one that is clipped to half of it, seen in AdamW's first moment. The
    update leaves the gradient itself alone."""
    model, batch = poisoned_model(device, 2, 20), words(257, 2, 2, 20)
    for clip, left in ((0, 1), (0.5, 0.5), (2, 1)):
        gradient = np.concatenate([array.ravel() for array in gradients(model, batch).values()])
        norm = np.linalg.norm(np.float64(gradient))
        model.set_adamw(clip=clip * norm, beta1=0)
        model.update_pass()
        yield f"norm, clip {clip}", model.report().norm, norm
        yield f"m, clip {clip}", device.get(model.arenas["adam m"].view(np.float32)), left * gradient
        yield f"gradient, clip {clip}", device.get(model.arenas["gradients"].view(np.float32)), gradient, EXACT


def other_ways(device):
    """What is computed again, and logits of a part of the batch at a time, give the gradients of what is kept."""
    batches, found, memory = words(257, 2, 2, 2, 21), [], []  # 42 tokens: parts of 11, 11, 11 and 9
    for recompute, rows in ((0, 42), (1, 42), (0, 7)):
        with mock.patch("train_gpt2.LOGIT_ROWS", rows):
            model = poisoned_model(device, 2, 21, recompute=recompute)
            found.append(gradients(model, *batches) | {"loss": model.report().loss})
            memory.append(model.arenas["activations"].nbytes)
    for i, way in ((1, "recomputed"), (2, "in parts")):
        check(f"{device.dtype} other ways: less memory {way}", memory[i] < memory[0], f"{memory[i]} < {memory[0]}")
        for name, gradient in found[i].items():
            yield f"{way}: {name if name == 'loss' else 'd' + name}", gradient, found[0][name], LIMITS[device.dtype]


def computed_again(device):
    """--recompute 2 changes no bit of losses, of gradients of micro-batches, or of what AdamW makes of some steps. It
    runs the same kernels and products on the same numbers. ReLU attention too."""
    batches = words(257, 3, 2, 2, 21)
    for kind in ("softmax", "relu"):
        found, memory = [], []
        for recompute in (0, 2):
            model = poisoned_model(device, 2, 21, kind, recompute)
            found.append(gradients(model, *batches) | {"loss": np.float32(model.report().loss)})
            for _ in range(3):  # on a fast GPU: run, recorded, replayed
                model.train_step(*[pack_batch(*batch) for batch in batches[:2]], learning_rate=1e-2)
            found[-1] |= {f"master, {kind}": master_numbers(model), "verdict": device.get(model.adam.verdict)}
            memory.append(model.arenas["activations"].nbytes)
        check(f"{device.dtype} computed again: less memory", memory[1] < memory[0], f"{memory[1]} < {memory[0]}")
        for name, array in found[1].items():
            yield name, array, found[0][name], EXACT


def moments_in_bf16(device):
    """With moments in bf16 a run repeats, another seed is another run, and losses are close to those with fp32 moments.
    """
    batch, runs = pack_batch(*words(257, 2, 2, 20)), {}
    for moment, seed, again in ((np.float32, 0, 0), (np.float32, 1, 0), (BF16, 0, 0), (BF16, 0, 1), (BF16, 1, 0)):
        model, losses = poisoned_model(device, 2, 20, moments="bf16" if moment == BF16 else "fp32"), []
        for _ in range(12):
            model.train_step(batch, learning_rate=5e-3, **dict(seed=seed) if moment == BF16 else {})
            losses.append(model.report().loss)
        runs[moment, seed, again] = np.array(losses), device.get(model.arenas["parameters"])
        size, wish = model.arenas["adam v"].nbytes, model.arenas["gradients"].nbytes // 4 * np.dtype(moment).itemsize
        yield "bytes of a moment", size, wish, EXACT
    for i, what in enumerate(("losses", "parameters")):
        yield f"{what} with fp32 moments and another seed", runs[np.float32, 1, 0][i], runs[np.float32, 0, 0][i], EXACT
        yield f"{what} again", runs[BF16, 0, 1][i], runs[BF16, 0, 0][i], EXACT
        check(f"{device.dtype} moments: {what} of another seed", (runs[BF16, 1, 0][i] != runs[BF16, 0, 0][i]).any())
    limit = 1e-3 if device.name == "cpu" else 3e-3  # an H200's products sum in other orders: 1.2e-3 was found
    yield "losses beside fp32 moments", runs[BF16, 0, 0][0], runs[np.float32, 0, 0][0], limit
    check(f"{device.dtype} moments: it has learned", losses[-1] < losses[0] - 0.5, f"{losses[0]:.2f} {losses[-1]:.2f}")


def mean_moments(device):
    """After 1,500 steps of one gradient the mean of the second moment in bf16 is right, where rounding to nearest would
    have stopped it below a third of that."""
    gradient, steps = np.float32(0.01), 1500
    model = poisoned_model(device, 2, 20, L=1, moments="bf16")
    gradients = model.arenas["gradients"].view(np.float32)
    device.put(gradients, np.full(gradients.size, gradient))
    for _ in range(steps):
        model.set_adamw(learning_rate=0.0, seed=42)
        model.update_pass()
    for name, wish, limit in (("m", gradient, 1e-4), ("v", gradient**2 * (1 - 0.999**steps), 1e-3)):
        found = to_float(device.get(model.arenas[f"adam {name}"].view(BF16)))
        yield f"the mean of {name}", np.mean(found, dtype=np.float64), wish, limit


def bits_of_updates(device):
    """What AdamW makes of fp32 numbers in halves has the bits of what it makes of whole ones. With a rate of 0 no bit
    of a number changes, whatever its halves are, and what is not a finite number becomes, or stays, NaN. CuPy has a GPU
    take denormal numbers for zeros."""
    every = np.arange(2**16).repeat(LOWER.size).astype(BF16), np.resize(LOWER, 2**16 * LOWER.size).astype(LOW)
    normal = np.float32(np.random.default_rng(1).standard_normal((4, every[0].size)))
    grads, m, v = normal[1], normal[2], normal[3] ** 2

    def updated(device, rate, *numbers):
        model, results = SimpleNamespace(device=device, step=2, adam=SimpleNamespace()), []
        for array in (*numbers, grads * (rate > 0), m * (rate > 0), v, np.uint64([0, grads.size]), np.int32([0]),
                      np.zeros(len(ADAMW), np.float32), np.float32(Verdict(1, 0, 1, 0))):
            results.append(device.empty(array.nbytes).view(array.dtype))
            device.put(results[-1], array)
        *arrays, starts, decayed, model.adam.settings, verdict = results
        GPT2.set_adamw(model, learning_rate=rate)
        given = arrays if len(numbers) == 2 else (arrays[0], None, *arrays[1:])
        device.launch("adamw", grads.size, *given, starts, decayed, 1, grads.size, model.adam.settings, verdict)
        return [*map(device.get, arrays[: len(numbers)])]

    upper, low = updated(device, 0.0, *every)
    before, after, finite = joined(*every), joined(upper, low), np.isfinite(joined(*every))
    before[abs(before) < np.finfo(np.float32).tiny] *= device.name == "cpu"  # which leaves the sign
    yield "at a rate of 0", after[finite].view(np.uint32), before[finite].view(np.uint32), EXACT
    check("bf16 updates: not finite", np.isnan(to_float(upper)[~finite]).all() and np.isnan(after[~finite]).all())
    [whole] = updated(device_of(device.name, "fp32", 64, 2), 1e-2, normal[0])
    halved = updated(device, 1e-2, *(kept_as(normal[0], kind) for kind in (BF16, LOW)))
    yield "of halves", joined(*halved), whole, EXACT
    yield "of halves, rounded", halved[0], halves(whole.astype(np.float64))[0], EXACT


def smaller_batches(device):
    """A model for (2,maxT), given (B,t): no logit depends on later tokens, and the gradients of a batch are the average
    of those of its two rows. A bias's gradient is taken in two stages from 520 tokens, in one from fewer."""
    T, limit = 260, LIMITS[device.dtype]
    model = poisoned_model(device, 2, T)
    model.set_parameters(draw_parameters(model.config, 42))
    x, y = words(257, 2, 2, T)
    model.forward(x)
    logits = to_float(device.get(model.acts.logits)).reshape(2, T, -1)
    for t in (1, 50, T):
        model.forward(x[:1, :t])
        yield f"logits of (1,{t})", device.get(model.acts.logits), logits[0, :t], limit
        rows = gradients(model, (x[:1, :t], y[:1, :t]), (x[1:, :t], y[1:, :t]))
        for name, gradient in gradients(model, (x[:, :t], y[:, :t])).items():
            yield f"d{name} of (2,{t})", 2 * gradient, rows[name], limit


def next_logits(device):
    """The logits of the next token are the last row of a forward pass without padding. The model has room for no more
    than T tokens, which are not a multiple of the padding's 64."""
    T = 100
    model, tokens = poisoned_model(device, 1, T), words(257, T)
    for n in (1, 63, 64, 65, T):
        model.forward(tokens[None, :n])
        expected = to_float(device.get(model.acts.logits))[n - 1, :257]
        poison(model, "activations")
        yield f"after {n} tokens", model.next_logits(tokens[:n].tolist()), expected, LIMITS[device.dtype]


def attention_of_nan(device, T, HS):
    """One NaN in q, k or v of token p of one head goes through the three kernels of attention. The rows that it has a
    part in become NaN, and all other heads stay as they were."""
    B, NH, p, channel, real = 2, 3, T // 2, 5, device.real
    qkv, dout = (np.float32(np.random.default_rng(1).normal(size=(B, T, *of_token))) for of_token in (
        (3, NH, HS), (NH, HS)))

    def array(values, dtype=real):
        on_device = device.empty(values.size * np.dtype(dtype).itemsize).view(dtype).reshape(values.shape)
        device.put(on_device, stored(values, dtype))
        return on_device

    def launch(kernel, relu, *arrays, tiled):
        a = SimpleNamespace(B=B, T=T, NH=NH, NKV=NH, scale=HS**-0.5, relu=relu)
        launch_trainers(device, a, kernel, *arrays, tiled=tiled)

    def outputs(given):
        """out, dq, dk and dv (4,B,T,NH,HS), in fp32."""
        given, douts, out, dqkv = array(given), array(dout), array(np.nan * dout), array(np.nan * qkv)
        lse, delta = (array(np.full((B, NH, T), np.nan), np.float32) for _ in range(2))
        launch("attention_forward", 0, out, lse, tiled=(given,))
        launch("attention_backward_q", 0, dqkv, None, delta, lse, out, tiled=(given, douts))
        launch("attention_backward_kv", 0, dqkv, None, delta, lse, tiled=(given, douts))
        return to_float(np.stack([device.get(out), *device.get(dqkv).transpose(2, 0, 1, 3, 4)]))

    def relu_output(given):
        given, out, lse = array(given), array(np.nan * dout), array(np.full((B, NH, T), np.nan), np.float32)
        launch("attention_forward", 1, out, lse, tiled=(given,))
        return to_float(device.get(out))

    clean, itself, before, after, every = outputs(qkv), slice(p, p + 1), slice(p + 1), slice(p, T), slice(T)
    yield "finite without a NaN", np.isfinite(clean), True, EXACT
    for part, rows in enumerate((  # of out, dq, dk and dv that become NaN; dv does not depend on v
            (itself, itself, before, before), (after, after, every, every), (after, after, every))):
        for bits in (0x7FFF, 0xFFC0) if real == BF16 else (0x7FFFFFFF, 0xFFC00000):  # a GPU's, and a CPU's
            poisoned = stored(qkv, real).view(f"u{np.dtype(real).itemsize}")
            poisoned[1, p, part, 1, channel] = bits
            found, name = outputs(poisoned.view(real)), f"{bits:#x} in {'qkv'[part]}"
            hit = np.concatenate([found[i, 1, of_part, 1, channel] for i, of_part in enumerate(rows)])
            yield f"{name}, its rows are NaN", np.isnan(hit), True, EXACT
            found[:, 1, :, 1] = clean[:, 1, :, 1]
            yield f"{name}, other heads", found, clean, EXACT
            found = relu_output(poisoned.view(real))[1, rows[0], 1, channel]
            yield f"{name}, ReLU's rows are NaN", np.isnan(found), True, EXACT


def test_steps(device_name, dtype, plain, architecture=GPT2):
    """All of these on one device."""
    sizes = SMALL_MODEL[architecture]
    device = device_of(device_name, dtype, sizes["C"], sizes["NH"], plain, architecture)
    for name, test in (("micro-batches:", micro_batches), ("steps:", accumulated_steps), ("again:", repeated_steps),
                       ("clipped:", clipped_gradients), ("other ways:", other_ways),
                       ("computed again:", computed_again), ("moments:", moments_in_bf16),
                       *[("mean moments:", mean_moments), ("updates", bits_of_updates)] * (
                           dtype == "bf16" and architecture is GPT2),
                       ("smaller batches:", smaller_batches), ("next logits", next_logits)):
        run(f"{dtype} {name}", test, device)
    heads = ((64, 2, 40), (768, 12, 70), (768, 6, 130)) if plain and architecture is GPT2 else ()  # of 32, 64, 128
    for C, NH, T in heads:
        device = device_of(device_name, dtype, C, NH, only=ATTENTION if device_name == "cpu" and C > 64 else None)
        run(f"{dtype} attention, HS={C // NH},", attention_of_nan, device, T, C // NH)


# ---- Files

SMALL = Config(maxT=40, V=257, L=1, NH=2, C=64, Vp=384)
PARAMETERS = 4 * sum(row.size for row in SMALL.parameter_table())
STATE = 4 * (2 * 16 + 16 * 257 + 1)  # bytes of a debug state before its gradients, of B = 2 and T = 8
GOOD_FILES = {  # kind: (its FileKind, the header behind magic and version, bytes behind the header, how it is read)
    "GPT-2 checkpoint": (Config.FILE, dataclasses.astuple(SMALL), PARAMETERS, Config.from_file),
    "debug state": (DEBUG_STATE[Config], (2, 8), STATE + PARAMETERS,
                    lambda path: read_debug_state(path, SMALL)),
    "token file": (TOKENS, (100,), 200, lambda path: DataLoader(path, 2, 8, SMALL)),
    "tokenizer": (TOKENIZER, (100, 99), 100, read_tokenizer),
}
HEADER, SIZE = "its header", "its size"  # the two numbers that are found there, and those that are expected
BAD_FILES = [  # kind, what the message says (a regular expression, or one of these two), {index: int32} that makes it
    # so, and the size from that of a good file
    *((kind, *row) for kind in GOOD_FILES for row in (
        ("could not be read", {}, lambda size: None),
        (r"its header of 0 bytes .*expected 1024", {}, lambda size: 0),
        (r"its header of 1020 bytes .*expected 1024", {}, lambda size: 1023),
        (SIZE, {}, lambda size: size - 1),
        (SIZE, {}, lambda size: size + 1),
        (HEADER, {0: 1}),
        (HEADER, {1: 0}),
        (HEADER, {1: 9}))),
    ("GPT-2 checkpoint", f"{1024 + PARAMETERS:,} bytes; expected {1024 + PARAMETERS // 2:,}", {1: 5}),  # of bf16
    ("GPT-2 checkpoint", "maxT ?= ?0", {2: 0}),
    ("GPT-2 checkpoint", "V ?= ?-1", {3: -1}),
    ("GPT-2 checkpoint", "L ?= ?1073741824", {4: 2**30}),
    ("GPT-2 checkpoint", "NH ?= ?3.* divisible|divisible by NH ?= ?3", {5: 3}),
    ("GPT-2 checkpoint", "C ?= ?48.* multiple of 32", {6: 48}),
    ("GPT-2 checkpoint", "V ?= ?257.* not to exceed Vp", {7: 256}),
    ("debug state", "B = 0", {2: 0}),
    ("debug state", f"expected {1024 + 2**29 * (STATE - 4) + 4 + PARAMETERS:,}", {2: 2**30}),
    ("debug state", "T = -1", {3: -1}),
    ("debug state", "T <= maxT = 40", {3: 41}),
    ("debug state", "token 1 is -1", {257: -1}),
    ("debug state", "token 0 is 257", {256 + 16: 257}),
    ("token file", r"prepro_tinyshakespeare\.py", {0: 50256 + (318 << 16)}),  # of an old format, without a header
    ("token file", "1,224 bytes; expected 1,022", {2: -1}),
    ("token file", "1,224 bytes; expected 4,294,968,318", {2: 2**31 - 1}),
    ("token file", "token 1 is 257", {256: 5 + (257 << 16)}),
    ("token file", "16 tokens; expected 17", {2: 16}, lambda size: 1024 + 32),
    ("token file", "0 tokens; expected 17", {2: 0}, lambda size: 1024),
]


def numbers_of(tensors):
    """All numbers of (name, values) pairs, one flat array."""
    return np.concatenate([values.ravel() for _, values in tensors])


def refusal(function, *args):
    """The message of the UserError that a call raises, or None."""
    try:
        function(*args)
    except UserError as e:
        return str(e)


def check_refusal(name, wish, function, *args):
    """Check that a call is refused in one line that says this (a regular expression)."""
    message = refusal(function, *args)
    check(f"{name}: {wish}", message and re.fullmatch(f".*{wish}.*", message), message)


def header_refusal(found, *kinds):
    """What is said (a regular expression) of a file whose first two numbers are none of these kinds'."""
    wishes = (re.escape(f"[{kind.magic}, {' or '.join(map(str, kind.versions))}]") for kind in kinds)
    return f"begins with {re.escape(str([*found]))}; expected .*{'.*'.join(wishes)}.*: {kinds[0].remedy}"


def bad_files(device_name, folder):
    """Each is refused in one line that names it and says what is wrong."""
    for label, wish, change, *resize in [*((kind, None, {}) for kind in GOOD_FILES), *BAD_FILES]:
        (kind, sizes, body, read), path = GOOD_FILES[label], folder / "file.bin"
        content = np.zeros(256 + body // 4, "<i4")
        content[: 2 + len(sizes)] = kind.magic, kind.versions[0], *sizes
        for index, number in change.items():
            content[index] = number
        size = resize[0](content.nbytes) if resize else content.nbytes
        path.write_bytes(content.tobytes().ljust(size or 0, b"\0")[:size])
        if size is None:
            path.unlink()
        if wish == HEADER:
            wish = header_refusal(content[:2].tolist(), kind)
        elif wish == SIZE:
            wish = f"promises 100 tokens, and its {size:,} bytes|{size:,} bytes; expected {content.nbytes:,}"
        found = refusal(read, path)
        ok = found == wish or found and wish and re.fullmatch(f"{path}: .*({wish}).*", found)
        check(f"{label}: {wish or 'a good one'}", ok, "" if ok else repr(found))


def other_kinds(device_name, folder):
    """A good file of another kind is named, with the program that takes it: of all kinds that any module knows. So the
    trainer does with what it opens. By itself it has the first numbers."""
    path, header, top = folder / "file.bin", np.zeros(256, "<i4"), TOP
    for label, magic, name, program in (
            ("GPT-2 checkpoint", 20240803, "a Llama 3 checkpoint", r"dev/llama3/train_llama3.py trains \(-e\)"),
            ("GPT-2 checkpoint", 20240527, "AdamW's state", "-y 1"),
            ("GPT-2 checkpoint", 20240520, "GPT-2's tokens", "-i"),
            ("GPT-2 checkpoint", 20240522, "HellaSwag's questions", "--hellaswag"),
            ("token file", 20240326, "a GPT-2 checkpoint", r"train_gpt2.py trains \(-e\)"),
            ("token file", 20240328, "GPT-2's tokenizer", "gpt2_tokenizer.bin"),
            ("tokenizer", 20240327, "a debug state of GPT-2", "test_gpt2.py .*--state"),
            ("debug state", 20240801, "Llama 3's tokens", r"train_llama3.py trains on \(-i\)")):
        kind, read, header[0] = GOOD_FILES[label][0], GOOD_FILES[label][-1], magic
        header.tofile(path)
        wish = f"{path}: is .*{name}, .*{program}.*; expected a {kind.name}: {kind.remedy}"
        plain = f"{path}: .*{header_refusal((magic, 0), kind)}"
        check_refusal(label, wish, check_kind, path, kind)
        check_refusal(label, plain if label in ("GPT-2 checkpoint", "token file") else wish, read, path)
    for name in ("absent.bin", "", "short.bin"):  # of these, who reads them says what is wrong
        (folder / "short.bin").write_bytes(b"\1")
        check(f"no word about {name or 'a folder'}", refusal(check_kind, folder / name, TOKENS) is None)
    with contextlib.redirect_stdout(None):
        for name in ("good.bin", "part_1.bin", "part_3.bin"):
            write_tokens(folder / name, range(99))
    for name, magic in (("part_2.bin", 20240801), ("scores.bin", 20240522), ("other.bin", 1)):
        header[:2] = magic, 1
        header.tofile(folder / name)
    tiny, good, scores = (FIXTURES / "gpt2_tiny.bin", *(folder / name for name in ("good.bin", "scores.bin")))
    for wish, *flags in (
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a GPT-2 checkpoint: a run", "-e", scores),
            ("scores.bin: is a file of Hella.*; expected a GPT-2 checkpoint", "-e", scores, "--sample", "a"),
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a token file: prepro", "-i", scores),
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a token file: prepro", "-j", scores),
            ("scores.bin: is a file of Hella.*; expected a token file", "-i", scores, "--dry-run"),
            ("part_2.bin: is a file of Llama 3's tokens, .*; expected a token f", "-i", folder / "part_*.bin"),
            ("scores.bin: is .*; expected a token file", "-j", scores, "-i", scores, "-a"),
            ("good.bin: is a file of GPT-2's tokens, .*; expected a Hella", "--hellaswag", good, "-v", 1),
            (f"other.bin: .*{header_refusal((1, 1), TOKENS)}", "-i", folder / "other.bin"),
            (None, "-j", scores, "-v", 0), (None, "-i", scores, "-a")):  # which is not opened
        given = map(str, ("--device", "cpu", "-e", tiny, "-i", good, "-j", good, "-b", 1, "-t", 8, "-x", 0, *flags))
        with contextlib.redirect_stdout(None):
            found = refusal(train_gpt2.main, [*given])
        ok = found == wish or found and wish and re.fullmatch(f".*{wish}.*", found)
        check(f"train_gpt2.py {' '.join(getattr(flag, 'name', str(flag)) for flag in flags)}", ok, found)
    sources = [file.read_text(encoding="utf-8") for file in (*top.glob("*.py"), *(TOP / "dev").rglob("*.py"))]
    magics = {int(magic) for text in sources for magic in re.findall(r"FileKind\(\s*\"[^\"]+\", (\d+)", text)}
    check("all kinds of files are known", magics == FILES.keys(), magics ^ FILES.keys())
    programs = {name for text in FILES.values() for name in re.findall(r"\S+\.py", text)}
    check("their programs exist", programs and all((top / name).exists() for name in programs), programs)


def good_files(device_name, folder):
    """What is written is read again, in fp32 and in bf16, and a full disk leaves the old file as it was."""
    path, copy = folder / "model.bin", folder / "copy.bin"
    models = [GPT2(SMALL, device_of(device_name, dtype, 64, 2), 1, 1) for dtype in ("fp32", "bf16")]
    for model, version in zip(models, (3, 5)):
        model.set_parameters(draw_parameters(SMALL, 42))
        write_checkpoint(path, model)
        dtype, numbers = model.device.dtype, np.fromfile(path, model.device.real, offset=1024)
        found = read_header(path, Config.FILE)[1], Config.from_file(path)
        check(f"checkpoint: version {version} for {dtype}", found == (version, SMALL), f"{found}")
        for other in models:
            other.set_parameters(read_parameters(path, SMALL))
            write_checkpoint(copy, other)
            master, again = master_numbers(other), np.fromfile(copy, other.device.real, offset=1024)
            wish = halves(master.astype(np.float64))[0] if other.device.real == BF16 else master
            check(f"checkpoint: written in {dtype}, read and written in {other.device.dtype}",
                  np.array_equal(master, to_float(numbers)) and np.array_equal(again, wish))
    check("checkpoint: what was read, written again", path.read_bytes() == copy.read_bytes())
    models[1].set_parameters(draw_parameters(SMALL, 43))
    room, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit))  # as if the disk were full from there on
    message = refusal(write_checkpoint, path, models[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit))
    check("checkpoint: a full disk", message and re.fullmatch(f"{path}: .*", message), message)
    check("checkpoint: the old one is intact", path.read_bytes() == copy.read_bytes())
    check("checkpoint: no temporary file is left", {p.name for p in folder.iterdir()} == {"model.bin", "copy.bin"})

    tokens = words(257, 41)
    with contextlib.redirect_stdout(None):
        write_tokens(path, tokens)
    check("token file: its header", read_header(path, TOKENS) == [20240520, 1, 41] + 253 * [0])
    data = DataLoader(path, 2, 8, SMALL)
    for start in (0, 16, 0):
        batch = [tokens[i : i + 16].reshape(2, 8) for i in (start, start + 1)]
        check(f"token file: the batch from {start}", np.array_equal(data.next_batch(), batch))


def packed_batches(device_name, folder):
    """The host's part of encoder_backward_wte: positions in the order of their tokens, and the lengths of runs."""
    for V in (1, 300, 70000):  # the last does not fit into 16 bits
        tokens, targets = words(V, 2, 3, 50)
        data, shape = pack_batch(tokens, targets)
        batch = carve(data, batch_table(*shape))
        yield f"tokens, V={V}", np.stack([batch.tokens, batch.targets]), np.stack([tokens, targets]), EXACT
        order = sorted(range(150), key=tokens.ravel().tolist().__getitem__)
        yield f"order, V={V}", batch.order, np.int32(order), EXACT
        ordered = tokens.ravel()[order].tolist()
        runs = [ordered.count(word) if i == 0 or ordered[i - 1] != word else 0 for i, word in enumerate(ordered)]
        yield f"runs, V={V}", batch.run_length, np.int32(runs), EXACT
    yield "no targets", carve(pack_batch(tokens)[0], batch_table(*shape)).targets, np.zeros((3, 50), np.int32), EXACT


def first_parameters(device_name, folder):
    """Parameters start as in the GPT-2 paper, each tensor with numbers of its own; the padding of wte is 0."""
    c, small = Config(maxT=300, V=1000, L=3, NH=2, C=64, Vp=1024), 0.02 / math.sqrt(6)
    params = dict(draw_parameters(c, 1))
    deviations = dict(wte=0.02, wpe=0.02, qkvw=0.02, fcw=0.02, attprojw=small, fcprojw=small)
    for name, array in params.items():
        values = array[: c.V].ravel()
        if name in deviations:
            yield f"{name}, deviation", values.std(), np.float64(deviations[name]), 5 / math.sqrt(2 * values.size)
            yield f"{name}, mean", 1 + values.mean(), 1, 5 * deviations[name] / math.sqrt(values.size)
        else:
            yield name, values, np.full(values.shape, name.endswith("w"), np.float32), EXACT
    yield "wte, padding", params["wte"][c.V :], np.zeros((24, 64), np.float32), EXACT
    different = {float(params[name].ravel()[0] / deviations[name]) for name in deviations}
    yield "tensors that differ", len(different), len(deviations), EXACT
    first, again, other = (numbers_of(draw_parameters(c, seed)) for seed in (1, 1, 2))
    yield "the same seed", again, first, EXACT
    yield "another seed is another model", np.array_equal(other, first), False, EXACT
    for name, sizes, count in (("d12", (12, 12, 768), 124475904), ("d24", (24, 16, 1024), 354871296),
                               ("d36", (36, 20, 1280), 774090240), ("d48", (48, 25, 1600), 1557686400),
                               ("d3", (3, 3, 192), None), ("d18", (18, 14, 896), None),
                               ("d60", (60, 30, 1920), None), ("d72", (72, 30, 2880), None),
                               ("d84", (84, 36, 3456), None)):
        c = Config.from_descriptor(name)
        yield f"sizes of {name}", np.array([c.L, c.NH, c.C]), np.array(sizes), EXACT
        if count:
            yield f"parameters of {name}", sum(row.size for row in c.parameter_table()), count, EXACT


SCHEDULES = {  # llm.c's, at steps 0, 699, 700, 5000, 9432, 15092, 15093 and 18864 of 18865
    "cosine": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 5.28716249e-04, 3.46356886e-04, 1.15471652e-04,
               1.15443312e-04, 6.00000021e-05),
    "linear": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 4.72171756e-04, 3.40419501e-04, 1.72161846e-04,
               1.72132131e-04, 6.00297353e-05),
    "wsd": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 6.00000028e-04, 6.00000028e-04, 6.00000028e-04,
            5.91208809e-04, 6.00715866e-05),
    "constant": (6.00000028e-04,) * 8}


def schedules(device_name, folder):
    """The learning rates of llm.c, to the last digit."""
    for kind, rates in SCHEDULES.items():
        flags = SimpleNamespace(learning_rate=6e-4, warmup=700, final_fraction=0.1, schedule=kind, steps=18865)
        layers = (Training,) if kind == "cosine" else (Scheduled, Training)
        rate_of = type("Rates", layers, {})(flags, None).learning_rate
        found = [rate_of(step) for step in (0, 699, 700, 5000, 9432, 15092, 15093, 18864)]
        yield kind, np.float32(found), np.float32(rates), EXACT
    flags = SimpleNamespace(learning_rate=3e-4, warmup=0, final_fraction=1.0, steps=3)
    rates = [Training(flags, None).learning_rate(step) for step in range(3)]
    yield "by default", np.float32(rates), np.float32([3e-4] * 3), EXACT


def samples(device_name, folder):
    """llm.c's coins, and the tokens that they draw from its logits."""
    first = [coin for _, coin in zip(range(6), coins())]
    yield "coins", np.float32(first), np.float32((0.230317235, 0.19051826, 0.310865164, 0.902659476, 0.684917867,
                                                  0.307830393)), EXACT
    logits = np.float32((0.1, 2, -1, 0.5, 0))
    drawn = [draw_token(logits, coin) for _, coin in zip(range(8), coins())]
    yield "tokens", np.array(drawn), np.array([1, 1, 1, 3, 1, 1, 1, 1]), EXACT
    yield "the last token", np.array(draw_token(logits, np.float32(1))), np.array(4), EXACT
    for shift in (-1000, 1000):  # where their exponentials would be 0, or infinite
        drawn = [draw_token(logits + np.float32(shift), coin) for _, coin in zip(range(8), coins())]
        yield f"tokens of logits around {shift}", np.array(drawn), np.array([1, 1, 1, 3, 1, 1, 1, 1]), EXACT


def numpy_program(device_name, folder):
    """dev/gpt2_numpy.py prints a loss and five tokens, by a checkpoint of either type; and what it refuses."""
    c, said = Config(maxT=12, L=1, NH=1, C=32), []
    for version, stored_as in ((3, np.float32), (5, to_bf16)):
        tensors = [stored_as(values) for _, values in draw_parameters(c, 1)]
        replace_file(folder / f"{version}.bin", [*c.headers(version), *tensors])
    for *arguments, wish in ((folder / "3.bin", "O Romeo", "loss"), (folder / "5.bin", "O Romeo", "loss"),
                             (folder / "3.bin", "", "are 1 tokens"), (folder / "3.bin", 12 * "x", "are 13 tokens"),
                             (FIXTURES / "gpt2_tiny.bin", "x", "ids below 331"),
                             (folder / "absent.bin", "x", "dev/tools/convert.py")):
        with (mock.patch.object(sys, "argv", ["gpt2_numpy.py", *map(str, arguments)]),
              mock.patch.object(Config, "encoding", staticmethod(byte_encoding)),
              contextlib.redirect_stdout(io.StringIO()) as output):
            try:
                gpt2_numpy.main()
            except UserError as e:
                output.write(f"{e}")
        said.append(output.getvalue())
        check(f"it says {wish}", wish in said[-1], said[-1].splitlines()[0])
    losses = [float(text.split()[1]) for text in said[:2]]
    yield "a new model's loss", losses, np.full(2, np.log(c.V)), 0.01
    yield "five tokens", [len(re.findall(r"^ +0\.\d\d%  '.+'$", text, re.M)) for text in said[:2]], [5, 5]


def random_numbers(device_name, folder):
    """SplitMix64 in the NumPy formula of dev/lab/kernels/adamw_bf16.py: its published numbers for the seed 1234567."""
    wish = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    yield "SplitMix64", splitmix64(1234567, range(5)), np.uint64(wish), EXACT
    [x, half] = np.float64([3.0, 3.0 + 2**-7])  # half way between 3 and the next bf16
    rises = [rounded(np.float64([half]), np.float64(parts), 1)[0] > x for parts in (2**15 - 100, 2**15 + 100)]
    check("half way: up with one half of the random numbers", rises == [False, True], rises)


def token_order(device_name, folder):
    """Files come in llm.c's order, and their batches: an epoch has each batch of each file once, without the tails. The
    permutations are those that llm.c's Mersenne Twister makes, by its own program."""
    sizes = (12 * 16 + 1, 5 * 16 + 9, 16 + 1)  # of 12, 5 and 1 batches of (2,8)
    WORDS, fewer = (dataclasses.replace(SMALL, V=V, Vp=5056) for V in (5000, 1000))
    with contextlib.redirect_stdout(None):
        for i, size in enumerate(sizes):
            write_tokens(folder / f"part_{i}.bin", np.arange(size) + 1000 * i)

    def starts(data, count):
        return [int(data.next_batch()[0][0, 0]) for _ in range(count)]

    in_order = [0 + 16 * i for i in range(12)] + [1000 + 16 * i for i in range(5)] + [2000]
    one, several = str(folder / "part_0.bin"), str(folder / "part_*.bin")
    for Loader in (DataLoader, FilesLoader):
        found = starts(Loader(one, 2, 8, WORDS), 13)
        yield f"one file, in order, {Loader.__name__}", np.array(found), np.array([*in_order[:12], 0]), EXACT
    shuffled = [16 * i for i in (1, 0, 9, 10, 5, 8, 3, 2, 4, 11, 7, 6)]
    yield "one file, shuffled", np.array(starts(FilesLoader(one, 2, 8, WORDS, True), 12)), np.array(shuffled), EXACT
    data = FilesLoader(several, 2, 8, WORDS, False)
    yield "several files, in order", np.array(starts(data, 19)), np.array([*in_order, 0]), EXACT
    data.next_batch()
    data.open(0)
    yield "and from the first again", np.array(starts(data, 18)), np.array(in_order), EXACT
    data, epochs = FilesLoader(several, 2, 8, WORDS), []
    for _ in range(3):
        epochs.append(starts(data, 18))
        yield "an epoch of several files", np.sort(epochs[-1]), np.array(in_order), EXACT
        files = [start // 1000 for start in epochs[-1]]
        yield "files one after the other", np.count_nonzero(np.diff(files)), 2, EXACT
    check("epochs differ", epochs[0] != epochs[1] != epochs[2] != in_order)
    data.files, data.rng = None, np.random.RandomState(42)
    items = data.permuted(range(10))
    found = [items, data.permuted(items), data.permuted(range(12))]
    wish = [[1, 3, 9, 7, 6, 0, 8, 4, 5, 2], [2, 5, 9, 0, 3, 1, 4, 8, 6, 7], [2, 4, 0, 7, 6, 5, 11, 1, 8, 10, 9, 3]]
    check("llm.c's permutations", found == wish, f"{found}")
    check_refusal("pattern", r"none_\*.bin: could not be read .*expected a token file", FilesLoader,
                  str(folder / "none_*.bin"), 2, 8, WORDS)
    check_refusal("pattern", "part_2.bin: 17 tokens; expected 33", FilesLoader, several, 4, 8, WORDS)
    check_refusal("pattern", "part_1.bin: token 0 is 1000; expected .* 1000", lambda: starts(
        FilesLoader(several, 2, 8, fewer, False), 13))


def limits(device_name, folder):
    """A dump's own measure of what bf16 costs is taken for the tensors that it names, in bf16 alone."""
    report = {"autocast_errors": {"wte": 0.02, "logits": 1e-4}}
    for dtype, tensor, wish in (("bf16", "wte", 0.02 * AUTOCAST_MARGIN), ("bf16", "logits", AUTOCAST_FLOOR),
                                ("bf16", "loss", LIMITS["bf16"]), ("fp32", "wte", LIMITS["fp32"])):
        check(f"limit of {tensor} in {dtype}", dump_limit(dtype, report, tensor) == wish)
    check("limit without a report", dump_limit("bf16", {}, "wte", 0.1) == LIMITS["bf16"] + 0.1)


# ---- What a device or a model refuses

KERNEL_FILE = """
#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
BLOCK(32, threads)
extern "C" __global__ void fill(float* out, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
extern "C" __global__ void without_block(float* out) { out[0] = 1.0f; }
"""


def kernel_files(device_name, folder):
    """A kernel without a BLOCK, and a launch with too few arguments or too many, are refused."""
    path = folder / "kernels.cu"
    path.write_text(KERNEL_FILE)

    class OneKernel(Config):
        SOURCES = (path,)

    with contextlib.redirect_stdout(None):
        device = make_device(device_name, "fp32", OneKernel(), plain=True)
    out = device.empty(4 * 50).view(np.float32)
    device.put(out, np.zeros(50))
    device.launch("fill", 40, out, 3, 40)
    yield "a kernel of 40 items", device.get(out), np.float32([3] * 40 + [0] * 10), EXACT
    check_refusal("kernel", "no kernel without_block with a BLOCK", device.launch, "without_block", 1, out)
    check_refusal("kernel", "2 arguments", device.launch, "fill", 40, out, 3)
    check_refusal("kernel", "4 arguments", device.launch, "fill", 40, out, 3, 40, 5)
    if device_name == "cpu":  # a copy finds the library, but one with lines for a debugger is its own
        (folder / "copy").mkdir()
        copied = shutil.copy(path, folder / "copy")
        for flag, wish in (("-O1", 1), ("-O1 -g1", 2)):
            with mock.patch.dict("os.environ", CXXFLAGS=flag), contextlib.redirect_stdout(None):
                found = {make_device("cpu", "fp32", type("One", (Config,), dict(SOURCES=(file,)))()).library._name
                         for file in (path, Path(copied))}
            check(f"a copy of the kernels, {flag}: libraries", len(found) == wish, len(found))
    path.write_text(KERNEL_FILE.replace("float value", "double value"))
    check_refusal("kernel", "fill: double value: expected a pointer.* int, float", read_kernels, [path])
    for block in ("size", "4 *", "threads / 0", "0 * threads"):
        path.write_text(KERNEL_FILE.replace("BLOCK(32, threads)", f"BLOCK(32, {block})"))
        check_refusal("kernel", "BLOCK over .*: .*: expected arithmetic in threads and W", read_kernels, [path])


# ---- Races, and how the CPU shows them

ORDER_FILE = """
#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
template <int a, int b> struct Numbers { float x[a * b]; };
BLOCK(128, threads)
extern "C" __global__ void turns(int* turn, int* count) {
    int i = 2 * blockDim.x * blockIdx.x + threadIdx.x;
    turn[i] = count[blockIdx.x]++;
    __syncwarp();
    turn[i + blockDim.x] = count[blockIdx.x]++;
}
BLOCK(32, 1)
extern "C" __global__ void leftovers(float* out) {
    __shared__ __align__(16) float x[32], y[2][32];  // two of them
    __shared__ Numbers<4, 8> z;
    int i = threadIdx.x;
    out[32 * blockIdx.x + i] = x[i] == x[i] || y[0][i] == y[0][i] || y[1][i] == y[1][i] || z.x[i] == z.x[i];
    x[i] = y[0][i] = y[1][i] = z.x[i] = 1.0f;
}
BLOCK(32, 1)
extern "C" __global__ void copies(float* out, float* from) {
    __shared__ float to[4][32];
    int t = threadIdx.x;
    auto read = [&](int when) {
        for (int group = 0; group < 4; group++) out[(4 * when + group) * 32 + t] = to[group][t];
    };
    for (int group = 0; group < 4; group++) {
        to[group][t] = -1.0f;
        copy4(&to[group][t], from + 32 * group + t, group != 1 || t % 2 == 0);
        if (group < 3) copies_end();
    }
    read(0);
    copies_arrive<1>();
    read(1);
    from[64 + t] = 5.0f;
    copies_arrive<0>();
    read(2);
    copies_end();
    copies_arrive<0>();
    read(3);
}
"""


def cpu_of(folder, text, dtype="fp32", **sizes):
    """A CPU that is compiled for other kernels, in a cache of its own."""
    path = folder / "kernels.cu"
    path.write_text(text)

    class Other(Config):
        SOURCES = (path,)

    with contextlib.redirect_stdout(None), mock.patch.dict("os.environ", CXXFLAGS="-O1", XDG_CACHE_HOME=str(folder)):
        return make_device("cpu", dtype, Other(**sizes), plain=True)


def orders(device_name, folder):
    """In which order threads run, when copies land, and that shared memory is poison in each block."""
    if device_name != "cpu":
        return
    device = cpu_of(folder, ORDER_FILE)

    def turns(order, block=0):  # of the 70 threads of a block, before and after they have waited for their warp
        turn, count = np.full((2, 2, 70), -1, np.int32), np.zeros(2, np.int32)
        device.set_order(order)
        device.launch("turns", 140, turn, count, threads=70)
        return turn[block]

    # A warp does both before the next one starts. The lane that comes last is not the first to go on, but forward.
    lanes = np.arange(32)
    yield "forward", turns("forward")[0], np.r_[lanes, 64 + lanes, 128 + lanes[:6]], EXACT
    forward_again = (32 + (lanes + 1) % 32, 96 + (lanes + 1) % 32, 134 + (lanes[:6] + 1) % 6)
    yield "forward, after a wait", turns("forward")[1], np.concatenate(forward_again), EXACT
    reverse = np.r_[76 + lanes[::-1], 12 + lanes[::-1], lanes[5::-1]]
    yield "reverse", turns("reverse"), [reverse, reverse + np.repeat([32, 6], [64, 6])], EXACT
    shuffled = {seed: turns(seed) for seed in (1, 2, 3, "4", 2**31 - 1)}
    yield "a shuffle again", turns(3), shuffled[3], EXACT
    firsts = set()
    for seed, (before, after) in shuffled.items():
        warps = [slice(0, 32), slice(32, 64), slice(64, 70)]
        first = [min(before[warp]) for warp in warps]
        firsts.add(tuple(np.argsort(first)))
        whole = all(sorted(before[w]) + sorted(after[w]) == [*range(f, f + 2 * (w.stop - w.start))]
                    for w, f in zip(warps, first))
        check(f"shuffle {seed}: warp by warp", whole, f"{first}")
        ranks = [tuple(np.argsort(turn[w])) for w in warps for turn in (before, after)]
        check(f"shuffle {seed}: lanes are shuffled anew", len({*ranks, (*lanes,), (*lanes[::-1],)}) == 8)
    check("each block is shuffled in its own way", (turns(1, block=1)[0] != shuffled[1][0]).any())
    yield "and all are reversed alike", turns("reverse", block=1), turns("reverse"), EXACT
    check("warps are shuffled", len(firsts) > 2, f"{firsts}")
    device.set_order("forward")
    for order in ("backward", 0, -1, 1.5, 2**31, ""):
        check_refusal("order", f"order is {order}: expected forward, reverse, or a", device.set_order, order)
    with mock.patch.dict("os.environ", CUDA_ON_CPU_ORDER="x"):
        check_refusal("order", "CUDA_ON_CPU_ORDER is x: expected forward", cpu_of, folder, ORDER_FILE)
    with mock.patch.dict("os.environ", CUDA_ON_CPU_ORDER="reverse"):
        device = cpu_of(folder, ORDER_FILE)
    turn, count = np.zeros(140, np.int32), np.zeros(1, np.int32)
    device.launch("turns", 70, turn, count, threads=70)
    yield "reverse by CUDA_ON_CPU_ORDER", turn[:70], reverse, EXACT

    out = np.ones((5, 32), np.float32)
    for again in range(2):
        device.launch("leftovers", 5, out)
        yield f"shared memory that outlives a block {again}", out, np.zeros((5, 32)), EXACT
    for order in thread_orders():
        nan, source = np.full((4, 4, 32), np.nan), np.arange(128, dtype=np.float32).reshape(4, 32) + 1
        nan[1:, 0], nan[1:, 1], nan[3, 3] = source[0], np.where(lanes % 2 == 0, source[1], 0), source[3]
        out = np.zeros((4, 4, 32), np.float32)
        device.set_order(order)
        device.launch("copies", 1, out, source)
        check(f"copies land where they are waited for, in order {order}", np.array_equal(out, nan, equal_nan=True))


RACES = (  # kernel of the lab, sizes, a choice, behind which words of kernels.cu what is taken out, what then comes out
    ("encoder_backward", "B=2,T=27,C=64,V=257,share=60", {}, "of_warp[warp][lane] = sum;", "__syncthreads();",
     r"has a race: dwte\[.*\]"),
    ("matmul_backward_bias", "B=1,T=300,OC=96", dict(shares=5), "% 8 * n + i] = sum[i];", "__syncthreads();",
     r"has a race: dbias\[.*\]"),
    ("layernorm_backward", "B=1,T=70,C=64", dict(grid=(2, 3)), "copies_arrive<1>();\n        } else {",
     "copies_arrive<0>();", r"dresidual\[.*\] is nan, expected"),  # in every order
    ("attention_forward", "B=1,T=300,NH=2,HS=64", {}, "tiles_arrive(Arrivals&) {\n", "__syncthreads();",
     r"out\[.*\] is nan, expected"),  # in every order: a thread that does not wait reads poison
    ("classifier_fused", "B=1,T=27,V=257,Vp=384", dict(rows=0.7), "to_float(*at(target));", "__syncthreads();",
     r"has a race: losses\[\d+\]"),
    ("global_norm", "n=49380", dict(blocks=70), "(int)gridDim.x - 1;\n    }", "__syncthreads();",
     "kernels.cu: global_norm: block .* is stuck: "),
    ("outliers", "seen=290", {}, "window[seen % WINDOW] = value;", "__syncwarp();", r"has a race: z_scores\[.*\]"))


def races(device_name, folder):
    """A barrier or a wait that is missing in a copy of kernels.cu, and a feature's kernels behind it, is found, and a
    check names the array and an element; without a wait the array is NaN in every order."""
    if device_name != "cpu":
        return
    sources = [*Config.SOURCES, OUTLIERS]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)

    def text_of(names, before=None, cut=None):
        """The text with no kernels but these, and without `cut` behind `before`."""
        kept = text
        for name in read_kernels(sources).keys() - names:  # is not compiled
            kept = re.sub(rf'BLOCK\(.*\)\n(?=extern "C" __global__ void .*\b{name}\()', "", kept)
        if not cut:
            return kept
        start = kept.index(cut, kept.index(before))
        return kept[:start] + "(void)0;" + kept[start + len(cut) :]

    def found(device, kernel, sizes, choice):
        [version] = (version for version in kernel.versions if version.trainer)
        own, launched = version.choices(device)[0], set()  # all None
        try:
            with noting(device, launched):
                verdict = Bench(kernel, device, parse_sizes(sizes)).check(version, own | choice)
            return "" if verdict.place is None else str(verdict), launched
        except (AssertionError, UserError) as e:
            return str(e), launched

    whole, kernels = cpu_of(folder, text, C=64, NH=1), [find_kernel(name) for name, *_ in RACES]
    for kernel, (name, sizes, choice, before, cut, wish) in zip(kernels, RACES):
        said, launched = found(whole, kernel, sizes, choice)
        check(f"{name}, whole: {cut}", said == "", said)
        said, _ = found(cpu_of(folder, text_of(launched, before, cut), C=64, NH=1), kernel, sizes, choice)
        check(f"{name}, cut: {cut}", re.match(wish, said), said)


# ---- Graphs, and models that are too large


def steps_of_a_graph(device_name, folder):
    """A step is run, then recorded and launched, then only launched. It is counted once, and before that: a Ctrl-C that
    comes during the launch finds it counted."""
    done, stream = [], mock.MagicMock()
    stream.end_capture.return_value.launch = lambda: done.append("launched")
    device, graphs = mock.Mock(graph=True, capturing=stream), {}
    for _ in range(4):
        train_gpt2.FastCuda.repeat(device, graphs, "shape", lambda: done.append("run"))
    check("a step is run, recorded, launched", done == ["run", "run", *["launched"] * 3], f"{done}")
    model, counted = poisoned_model(device_of(device_name, "fp32", 64, 2), 2, 20), []
    with mock.patch.object(model.device, "repeat", lambda *args: counted.append(model.step)):
        for _ in range(3):
            model.train_step(*[pack_batch(*words(257, 2, 2, 20))] * 2)
    check("steps are counted once each, before they are launched", counted == [1, 1, 2, 2, 3, 3], f"{counted}")


def late_reports(device_name, folder):
    """A step is reported when the next one is queued. Its verdict is fetched before: a report may use the device."""
    done, flags = [], SimpleNamespace(steps=9, val_every=0, val_batches=0, sample_tokens=0, sample_every=0)
    training = train_gpt2.FastTraining(flags, None)
    training.model = SimpleNamespace(adam=SimpleNamespace(verdict="verdict"))

    def fetch(what):
        done.append(f"fetch {what}")
        return lambda: np.array([1, 2, 1, 0])

    training.device, steps = SimpleNamespace(fetch=fetch), [SimpleNamespace(number=i, begun=0.0) for i in (1, 2)]
    training.report = lambda queued, verdict: done.append((queued.number, verdict.loss))
    for queued in steps:
        training.finish(queued)
    check("reports: one step late", done == ["fetch verdict", "fetch verdict", (1, 2)], done)
    training.save = lambda *_: done.append("save")
    training.pause(3, None)
    check("reports: not for a pause without an action", done[3:] == [], done)
    training.pause(9, None)
    check("reports: before a checkpoint", done[3:] == [(2, 2), "save"], done)
    check("reports: a step's time begins when the last was reported", steps[1].begun > 0 == steps[0].begun, steps)


class Ranges:
    """What CuPy's nvtx has, noting all ranges, each as the tuple of those that it is in and its own name."""

    def __init__(self):
        self.open, self.all = [], []

    def RangePush(self, name):
        self.open.append(name)
        self.all.append((*self.open,))

    def RangePop(self):
        self.open.pop()


def profiler_ranges(device_name, folder):
    """A step's ranges are those of its passes, layers, kernels and products, and change nothing."""
    device, nvtx = device_of(device_name, "fp32", 64, 2), Ranges()
    plain, batch = poisoned_model(device, 2, 20, recompute=2), pack_batch(*words(257, 2, 2, 20))
    ranged = copy.copy(device)
    vars(ranged).pop("launch", None)  # what notes the launches of a test stands in front of the class
    ranged.__class__ = with_ranges(type(device), DEVICE, nvtx)
    model = with_ranges(type(plain), MODEL, nvtx)(plain.config, ranged, 2, 20)
    model.set_parameters((name, device.get(array)) for name, array in vars(plain.params).items())
    for each in (plain, model):
        each.train_step(batch)
    step = [path for path in nvtx.all if path[0] == "step 1"]
    check("ranges: all are closed", not nvtx.open and len(step) > 100, f"{nvtx.open} {len(step)}")
    passes = [path[1] for path in step if len(path) == 2]
    check("ranges: passes", passes == ["forward_pass", "backward_pass", "update_pass"], passes)
    for l in (0, 1):
        own = [path[3] for path in step if path[1:3] == ("backward_pass", f"layer_backward {l}") and len(path) == 4]
        kernels = [name for name in own if not name.startswith("matmul ")]
        wish = [*["residual_layernorm_forward"] * 2, "matmul_backward_bias", "layernorm_backward", "add_partials",
                "attention_backward_q", "attention_backward_kv", "add_partials", "layernorm_backward", "add_partials"]
        check(f"ranges: kernels of layer {l} backward", kernels == wish, kernels)
        products = [name for name in own if name.startswith("matmul ")]
        wish = ["40 x 192 x 64", "40 x 64 x 64", "40 x 256 x 64",  # of the forward pass, again
                "64 x 256 x 40", "40 x 256 x 64", "256 x 64 x 40", "40 x 64 x 256", "64 x 64 x 40", "40 x 64 x 64",
                "192 x 64 x 40", "40 x 64 x 192"]
        check(f"ranges: products of layer {l} backward", products == [f"matmul {x}" for x in wish], products)
    with mock.patch.object(ranged, "kernels", {}):
        check_refusal("ranges", "no kernel encoder_forward", model.train_step, batch)
    check("ranges: closed behind an error", not nvtx.open, nvtx.open)
    yield "parameters with ranges", master_numbers(model), master_numbers(plain), EXACT

    class Made:
        make_device = lambda self: SimpleNamespace(graph=True)

    check("ranges: no graph", not type("Ranged", (Annotated, Made), {})().make_device().graph)


def models_too_large(device_name, folder):
    """A model that the device has no room for is refused before anything is allocated, and the advice is right."""
    device = device_of(device_name, "fp32", 64, 2)
    c = dataclasses.replace(SMALL, L=24)

    def allocate(nbytes):
        raise AssertionError("allocated before it was refused")

    Model, Recomputing = model_class(GPT2), model_class(GPT2, "--recompute", "2")

    def tables(Model, B):
        return Model.memory(c, device, B, 40)[0]

    sizes = device.attention_sizes
    with mock.patch.object(device, "empty", allocate):
        wider = dataclasses.replace(c, C=128)
        check_refusal("model", r"\(?.*-DCHANNELS=64.*-DCHANNELS=128", Model, wider, device, 1, 1)
        check_refusal("model", "-t 41: .* at most maxT = 40", Model, c, device, 1, 41)
        for shared in (sizes.shared_forward, sizes.shared_backward):
            with mock.patch.object(device, "max_shared", shared - 1):
                check_refusal("model", "C = 64, NH = 2: .* shared memory.*smaller heads", Model, c, device, 1, 1)
        room = tables(Model, 3)
        for free, B, wish in ((room, 4, r"the largest -b that fits is 3\b.* --recompute 2"),
                              (room, 50, r"the largest -b that fits is 3\b"),
                              (tables(Model, 4) - 1, 4, r"the largest -b that fits is 3\b"),
                              (tables(Recomputing, 1) - 1, 1, "(not even -b 1|is 0).* choose a smaller -t or -e")):
            with mock.patch.object(fit, "free_bytes", lambda device, free=free: free):
                check_refusal(f"model of -b {B}", wish, Model, c, device, B, 40)
    with mock.patch.object(fit, "free_bytes", lambda device: room):
        model = Model(c, device, 3, 40)
    found = sum(arena.nbytes for arena in model.arenas.values())
    yield "bytes that a model takes, as foretold", found, room, EXACT
    for moments, recompute, wish in (("fp32", 0, 12.5), ("fp32", 1, 9.5), ("fp32", 2, 6.0), ("bf16", 2, 5.5)):
        bf16 = SimpleNamespace(real=BF16, name="cpu")
        Model = model_class(GPT2, "--moments", moments, "--recompute", f"{recompute}")
        found, *_ = Model.memory(Config(), bf16, 32, 1024)
        check(f"124M, B=32, --recompute {recompute}", found <= wish * 2**30, f"{found / 2**30:.2f} <= {wish} GiB")


# ---- The command line

TINY = FIXTURES / "gpt2_tiny.bin"


def token_files(folder):
    """Write two token files, one of them too short."""
    with contextlib.redirect_stdout(None):
        write_tokens(folder / "tokens.bin", words(257, 200))
        write_tokens(folder / "short.bin", words(257, 16))


def command_line(device_name, folder):
    """train_gpt2.py says in one line what it was given wrong, and trains twice to the same bits."""
    token_files(folder)
    tiny = ("-e", TINY, "-i", "tokens.bin", "-j", "tokens.bin", "-b", "2", "-t", "8", "-x", "3", "-s", "0")
    trained = [(dtype, f"{dtype}_{again}") for dtype in ("fp32", "bf16") for again in (1, 2)]
    others = [(name, "--dtype", "fp32", *flags) for name, *flags in (
        ("plain", "--plain", "1"), ("no_graph", "--graph", "0"), ("recompute", "--recompute", "1"),
        ("recompute_2", "--recompute", "2"), ("moments", "--moments", "bf16"))]
    for wish, *flags in [("--batch-size.* 0: ", "-b", "0"), ("--nonsense", "--nonsense"), ("1.5", "-t", "1.5"),
                         ("nonsense", "-e", "nonsense"), ("short.bin", *tiny, "-i", "short.bin"),
                         ("absent.bin", *tiny, "-j", "absent.bin"), ("maxT = 40", *tiny, "-t", "41"),
                         ("--clip.* -0.5: ", "--clip", "-0.5"), ("--clip.* nan: ", "--clip", "nan"),
                         ("-d 24: expected a multiple of .*B.T = 16", *tiny, "-d", "24"),
                         ("--recompute.* 3: ", "--recompute", "3"), ("--plain.* 2: ", "--plain", "2"),
                         ("--moments.*'fp16'", "--moments", "fp16"),
                         *[("--nvtx 1: .*expected --device cuda", *tiny, "--nvtx", "1")] * (device_name == "cpu"),
                         ("the loss of step 2 is", *tiny, "-l", "1e30", "--dtype", "fp32"),
                         *([] if has_gpu() else [("--device cpu", "--device", "cuda")]),
                         *((None, *tiny, *flags, "-o", name) for name, *flags in others),
                         *((None, *tiny, "--dtype", dtype, "-o", name) for dtype, name in trained)]:
        done = subprocess.run([sys.executable, TOP / "train_gpt2.py", "--device", device_name, *flags],
                              cwd=folder, capture_output=True, text=True)
        ok = done.returncode == (wish is not None) and re.fullmatch(
            f"error: .*{wish}.*\n" if wish else "", done.stderr)
        name = wish or "three steps " + " ".join(map(str, flags[len(tiny) :]))
        check(f"train_gpt2.py: {name}", ok, "" if ok else f"{done.returncode}, {done.stderr!r}")

    def result(name):
        return folder / name / "model_00000003.bin"

    for (dtype, one), (_, two) in (trained[:2], trained[2:]):
        same_config = Config.from_file(result(one)) == Config.from_file(TINY)
        check(f"train_gpt2.py: its checkpoint in {dtype} is one", same_config)
        same = result(one).read_bytes() == result(two).read_bytes() != TINY.read_bytes()
        check(f"train_gpt2.py: the same bits again in {dtype}", same)
    c = Config.from_file(TINY)
    for name, *_ in others:  # by other ways, and so not to the same bits on every device
        yield f"{name}", *(numbers_of(read_parameters(result(x), c)) for x in (name, "fp32_1")), 5e-4
    lines = (folder / "fp32_1" / "main.log").read_text()
    steps = "".join(rf"s:{step} trl:\d\.\d{{4}} lr:0\.000300 norm:\d+\.\d\d\n" for step in (0, 1, 2))
    ok = re.fullmatch(rf"s:0 tel:\d\.\d{{4}}\n{steps}s:3 tel:\d\.\d{{4}}\n", lines)
    check("train_gpt2.py: its log", ok, "" if ok else repr(lines))


def top_level_files(device_name, folder):
    """The files of the top level alone train on a GPU, to the bits of the whole program; without one they say so."""
    token_files(folder)
    alone = folder / "alone"
    alone.mkdir()
    for name in ("train_gpt2.py", "kernels.cu", "prepro_tinyshakespeare.py"):
        shutil.copy(TOP / name, alone)
    arguments = ("-e", TINY, "-i", "tokens.bin", "-j", "tokens.bin", "-b", "2", "-t", "8", "-x", "3", "-s", "0",
                 "--dtype", "fp32", "--plain", "1")  # which times no algorithms of products

    def train(program, *arguments):
        return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, cwd=folder,
                              env=os.environ | {"PYTHONPATH": ""})

    if device_name == "cpu":
        done = train(alone / "train_gpt2.py", *arguments)
        ok = has_gpu() or done.returncode == 1 and re.fullmatch("error: --device cuda: .*\n", done.stderr)
        check("train_gpt2.py: alone, and no GPU", ok, "" if ok else f"{done.returncode}, {done.stderr!r}")
    else:
        for name, program in (("few", alone), ("all", TOP)):
            done = train(program / "train_gpt2.py", *arguments, "-o", name)
            ok = done.returncode == 0 and "step    3/3" in done.stdout
            check(f"train_gpt2.py: with {name} files", ok, "" if ok else f"{done.stdout[-300:]} {done.stderr!r}")
        few, whole = (folder / name / "model_00000003.bin" for name in ("few", "all"))
        check("train_gpt2.py: the same bits", few.read_bytes() == whole.read_bytes())
    done = train(alone / "train_gpt2.py", "--recompute", "1")
    ok = done.returncode == 1 and "unrecognized arguments: --recompute" in done.stderr
    check("train_gpt2.py: without features, their flags are none", ok, "" if ok else done.stderr)


def tensor_maps_of_a_gpu(device_name, folder):
    """What cuTensorMapEncodeTiled is asked, by its documentation, and that what it makes goes to a kernel by value: for
    CuPy that is an array of one number. It is made once, and where kernels.cu has no use for it, not at all."""
    asked = []

    class Driver:
        def cuTensorMapEncodeTiled(self, at, *arguments):
            asked.append([*(x.value if hasattr(x, "value") else list(x) if hasattr(x, "__len__") else x
                            for x in arguments)])
            ctypes.memset(at, 7, 128)
            asked[-1].append(at.value % 64)
            return status

    B, T, channels, status = 3, 5, 192, 0
    array = SimpleNamespace(data=SimpleNamespace(ptr=4096), shape=(B * T, channels))
    device = mock.Mock(maps={}, hopper=False, kernels=read_kernels(Config.SOURCES), AVOID="")
    device.tensor_map = functools.partial(train_gpt2.FastCuda.tensor_map, device)
    arguments = "atty", "lse", array, 0.1, 0, T, 3, 3  # of attention_forward
    given = train_gpt2.FastCuda.with_tensor_maps(device, "attention_forward", arguments)
    check("without a use, the array itself", given is arguments and not asked)
    device.hopper = True
    with mock.patch("ctypes.CDLL", return_value=Driver()):
        made, others = [], []
        for _ in range(2):
            *before, one, scale, relu, same_T, NH, NKV = train_gpt2.FastCuda.with_tensor_maps(
                device, "attention_forward", arguments)
            made.append(one)
            others.append((*before, array, scale, relu, same_T, NH, NKV))
    check("other arguments stay", others == [arguments] * 2)
    yield "one number", [made[0].size, made[0].nbytes, made[0].ctypes.data % 64], [1, 128, 0], EXACT
    yield "the same again", made[1].ctypes.data, made[0].ctypes.data, EXACT
    yield "its bytes", made[0].view(np.uint8), 7, EXACT
    # bf16, 3 dimensions, address; sizes; strides in bytes; a box of 64 x 64; every element; swizzle 3 of 128 bytes
    wish = [9, 3, 4096, [channels, T, B], [2 * channels, 2 * channels * T], [64, 64, 1], [1, 1, 1], 0, 3, 2, 0, 0]
    check("asked once, for a box of 64 tokens and channels", asked == [wish], asked)
    device.maps, status = {}, 1
    with mock.patch("ctypes.CDLL", return_value=Driver()):
        check_refusal("GPU", r"cuTensorMapEncodeTiled failed with status 1: T=5, \(15, 192\)",
                      device.tensor_map, array, T)


def faults_of_a_gpu(device_name, folder):
    """A fault of the GPU names the kernel."""
    device = device_of(device_name, "fp32", 64, 2)
    token_files(folder)

    class Broken(Exception):
        pass

    def launch(name, *args, **keywords):
        type(device).launch(device, name, *args, **keywords)
        device.last_kernel = name
        if name == "global_norm":
            raise Broken("an illegal address")

    arguments = ["--device", device_name, "-e", TINY, "-b", "2", "-t", "8", "-x", "3", "-v", "0", "-s", "0",
                 "-i", folder / "tokens.bin", "-j", folder / "tokens.bin", "-o", folder / "fault"]
    with (contextlib.redirect_stdout(None), mock.patch.object(train_gpt2.Training, "make_device", return_value=device),
          mock.patch.multiple(device, create=True, launch=launch, last_kernel=None, Fault=Broken)):
        check_refusal("GPU", r"the GPU stopped \(an illegal address\) at global_norm or before",
                      train_gpt2.main, [str(argument) for argument in arguments])


# ---- The program


def test_files(device_name):
    """All but the steps, each in a folder of its own; what needs a device is on this one."""
    for test in (bad_files, other_kinds, good_files, packed_batches, first_parameters, schedules, samples,
                 numpy_program, random_numbers, token_order, limits, kernel_files, orders, races,
                 steps_of_a_graph, late_reports, profiler_ranges, models_too_large, command_line, top_level_files,
                 tensor_maps_of_a_gpu, faults_of_a_gpu):
        with tempfile.TemporaryDirectory() as folder:
            run(test.__name__.replace("_", " ") + ":", test, device_name, Path(folder))


def main():
    parser = argparse.ArgumentParser(description="Test steps, files, refusals and the command line.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one (default: the CPU, and a GPU if any)")
    flags = parser.parse_args()
    for name in [flags.device] if flags.device else ["cpu", "cuda"] if has_gpu() else ["cpu"]:
        for dtype in LIMITS:
            for plain in (1, 0) if name == "cuda" else (1,):
                test_steps(name, dtype, plain)
    test_files(name)
    return summary()


if __name__ == "__main__":
    sys.exit(main())
