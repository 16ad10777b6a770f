"""Compare kernels.cu and train_gpt2.py with independent truths: formulas in NumPy, and tensors dumped from PyTorch.

    python test_gpt2.py                                  # everything, on the CPU, and on a GPU if there is one
    python test_gpt2.py --checkpoint FILE --state FILE   # only this dump, of dev/tools/torch_reference.py or of llm.c
    python test_gpt2.py --kernels                        # only the kernels, for a sanitizer
    python test_gpt2.py --only gelu_forward              # only one of them, for a debugger

It prints a line a tensor, or a line a launch of a kernel, and then `N passed, N failed`. The exit status is 1 if any
failed. The kernels' problems are those of the kernel lab, dev/lab/: `python -m dev.lab --check` gives them to all
versions, and this gives them, and some more sizes, to the trainer's. Everything includes dev/tests/test_files.py, which
tests files, refusals and the command line. On a GPU, the plain and the fast device are both compared with the truths.
Their kernels are the same, so each kernel is tested once.
"""
import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import joined, to_bf16
from dev.cpu.device import Cpu
from dev.lab.kernels.adamw import halves
from dev.lab.formulas import (attention, cross_entropy, dattention, dcross_entropy, dgelu, dlayernorm, gelu, heads,
                               layernorm, transposed)
from dev.lab.kernel import words as chosen
from dev.lab.kernel import (BF16_LIMIT, KERNEL_LIMIT, Bench, bf16, f32, find_kernel, launched_by, model_of, noting,
                             parse_sizes, stored)
from dev.common.devices import make_device
from dev.features import FLAGS as FEATURE_FLAGS
from dev.features import attach, has_gpu
from dev.common.file_kinds import read_header
from dev.gpt2_numpy import forward, mean_loss
from dev.precision.fp8 import fp8_device
from dev.tests.checks import TOP  # noqa: F401  (its programs find train_gpt2)
from prepro_tinyshakespeare import UserError, replace_file
from train_gpt2 import (BF16, GPT2, HEADER_BYTES, HERE, LOW, Config, FileKind, Row, Training, carve,
                        check_size, check_tokens, checkpoint_parts, kept_as, layout, pack_batch, parse_flags,
                        read_kernels, read_parameters, to_float)

MOMENTS = HERE / "dev/precision/moments.cu"

# Of the whole model. How much bf16 costs depends on the model: on parameters of deviation 0.08, PyTorch's own autocast
# errs by 2.0e-2 and this program by 2.4e-2. It rounds more than autocast does: embeddings, weights of norms, and the
# gradient of the residual stream. So where a dump says by how much autocast errs on a tensor, 1.6 times as much is the
# limit, of which one parameter that is rounded otherwise may change a twentieth, but no less than two or three
# roundings in a row cost.
LIMITS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 3e-2}
AUTOCAST_MARGIN, AUTOCAST_FLOOR = 1.6, 2.5 * BF16_LIMIT
EXACT = 0  # the same bits
counts = {True: 0, False: 0}


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


made = {}  # {what a device is made for: [(its kernels, or None for all, the device)]}


def device_of(name, dtype, C, NH, plain=True, architecture=GPT2, only=None):
    """A device, compiled once for an architecture. A CPU has only one kind, for which plain means nothing; only: the
    kernels that it needs, or all."""
    only = set(only) if only and name == "cpu" else None
    devices = made.setdefault((name, dtype, C, NH, plain or name == "cpu", architecture), [])
    for kernels, device in devices:
        if kernels is None or only and only <= kernels:
            return device
    c = architecture.Config(C=C, NH=NH)
    if only:
        device = Cpu(dtype, c, [MOMENTS], only)
    elif dtype == "fp8":
        device = fp8_device(name, c, plain, beside=[MOMENTS])
    else:
        device = make_device(name, dtype, c, plain, beside=[MOMENTS])
    device.architecture = architecture
    devices.append((only, device))
    return device


def normal(*shape):
    """Normal numbers, as fp32 stores them."""
    return f32(rng.standard_normal(shape))


def words(V, *shape):
    return rng.integers(V, size=shape, dtype=np.int32)


# ---- The formulas, each gradient against finite differences of its function; and what numbers are rounded to


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


LOWER = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # half a bit of the upper half, and what is around it


def two_halves():
    """The halves of an fp32 are all that it is: every upper half, with lower ones at which rounding changes."""
    bits = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | LOWER).reshape(-1)
    x = bits.view(np.float32)
    nan, finite = np.isnan(x), np.isfinite(x)
    upper, low = (kept_as(x, kind) for kind in (BF16, LOW))
    together = joined(upper, low)
    yield "together", together.view(np.uint32)[~nan], bits[~nan], EXACT
    check("halves: of a NaN", np.isnan(to_float(upper)[nan]).all() and np.isnan(together[nan]).all())
    for name, found, wish in zip(("upper", "lower"), (upper, low), halves(x[finite].astype(np.float64))):
        yield name, found[finite], wish, EXACT


# ---- Each kernel against its formula: the problems are in dev/lab/, and here the trainer's versions are checked

KERNELS = ("encoder_forward", "encoder_backward", "layernorm_forward", "fused_residual_forward", "layernorm_again",
           "layernorm_backward", "matmul_backward_bias", "attention_forward", "relu_attention_forward",
           "attention_backward", "attention_backward_bias", "gqa_forward", "gqa_backward", "gelu_forward",
           "gelu_backward", "crossentropy_forward", "classifier_fused", "global_norm", "add_loss", "judge", "adamw",
           "adamw_bf16")
ATTENTION = "attention_forward", "attention_backward_q", "attention_backward_kv"  # of kernels.cu
# C and NH; the first is the fixture's and SMALL_MODEL's, and has all kernels
COMPILED_FOR = (64, 2), (32, 1), (96, 16), (96, 32), (768, 12), (768, 6), (160, 2), (1600, 16)
launched = set()  # the names of the kernels that tests have launched


def test_kernels(device_name, dtype, only=None, names=KERNELS, models=COMPILED_FOR, architecture=GPT2):
    """The trainer's versions of these kernels, or of the one that is asked for, at all sizes to check, with each choice
    of what can be chosen: a check each. They are compiled for one of the models, (C, NH), if its sizes fit."""
    wanted = []  # (kernel, version, sizes as a text, the C and NH to compile for)
    for name in [only] if only else names:
        try:
            kernel = find_kernel(name)
        except Exception as e:  # of the kernel's own .py
            check(f"{name}.py", False, f"{type(e).__name__}: {e}")
            continue
        for version in kernel.versions:
            if version.trainer and dtype in version.dtypes:
                wanted += [(kernel, version, sizes, model_of(kernel, parse_sizes(sizes), models))
                           for sizes in (*kernel.checks, *kernel.trainer_checks)]
    named, known = {}, read_kernels([*architecture.Config.SOURCES, MOMENTS])
    for kernel, _, _, model in wanted:
        named.setdefault(model, set()).add(kernel.name)

    def device_for(model):  # the first one has all kernels, since other tests share it
        needed = None if model == models[0] and not only else launched_by(named[model], known)
        return device_of(device_name, dtype, *model, architecture=architecture, only=needed)

    if device_name == "cpu":  # a compiler takes a core
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(device_for, named))
    for kernel, version, sizes, model in wanted:
        device, title = device_for(model), f"{kernel.name} {sizes} {dtype}"
        # Without CuPy's pool, which a sanitizer would take for one large array.
        without_pool = device.cupy.cuda.using_allocator(None) if device_name == "cuda" else contextlib.nullcontext()
        with without_pool, noting(device, launched):
            try:
                bench = Bench(kernel, device, parse_sizes(sizes))
                choices = version.choices(device, few=True) if bench.fits(version) else ()
                choices = [choice for choice in choices if choice.get("threads") is None]  # the lab tries others
            except Exception as e:
                check(title, False, f"{type(e).__name__}: {e}")
                continue
            for choice in choices:
                try:
                    verdict = bench.check(version, choice)
                    check(f"{title} {chosen(choice)}:", verdict.place is None, verdict)
                except Exception as e:
                    check(f"{title} {chosen(choice)}:", False, f"{type(e).__name__}: {e}")


AS_HOPPER = (  # heads of both sizes that Hopper's tensor cores have, whole tiles and parts of one
    ("gqa_forward", "B=1,T=1,NH=1,NKV=1,HS=64,with_lse=1"), ("gqa_forward", "B=1,T=130,NH=4,NKV=2,HS=64,with_lse=1"),
    ("gqa_forward", "B=2,T=70,NH=1,NKV=1,HS=64,relu=1"), ("gqa_forward", "B=1,T=330,NH=1,NKV=1,HS=128,with_lse=1"),
    ("gqa_backward", "B=1,T=1,NH=1,NKV=1,HS=64"), ("gqa_backward", "B=1,T=200,NH=4,NKV=2,HS=64"),
    ("gqa_backward", "B=2,T=70,NH=1,NKV=1,HS=64,relu=1"), ("gqa_backward", "B=1,T=330,NH=2,NKV=1,HS=128"),
    ("attention_backward_bias", "B=1,T=130,NH=2,HS=64"), ("attention_backward_bias", "B=1,T=150,NH=2,HS=128"))


def test_as_hopper(only=None):
    """Attention as a Hopper GPU does it, on the CPU, which has wgmma in C++. A missing wait or fence makes NaN."""
    devices = {}
    for name, text in AS_HOPPER:
        kernel, sizes = find_kernel(name), parse_sizes(text)
        if only not in (None, name):
            continue
        C, NH = model_of(kernel, sizes)
        try:
            if C not in devices:
                with mock.patch.dict(os.environ, CXXFLAGS=f"{os.environ.get('CXXFLAGS', '')} -DHOPPER"):
                    devices[C] = Cpu("bf16", Config(C=C, NH=NH), only=(*ATTENTION, "add_partials"))
            version = next(version for version in kernel.versions if version.trainer)
            verdict = Bench(kernel, devices[C], sizes).check(version, {})
            check(f"{name} {text} as on Hopper:", verdict.place is None, verdict)
        except Exception as e:
            check(f"{name} {text} as on Hopper:", False, f"{type(e).__name__}: {e}")


def check_launched(sources):
    """Whether each kernel of these files was launched by the tests before."""
    missing = read_kernels(sources).keys() - launched
    check("each kernel has a test", not missing, " ".join(sorted(missing)))


# ---- What else the model is made of: a few steps to its gradients, and matrix products


def poison(model, *arenas):
    """Fill arenas with NaN."""
    for name in arenas:
        model.device.put(model.arenas[name], np.full(model.arenas[name].nbytes, 255, np.uint8))


# The sizes of a model that steps are tested with: C and NH are the fixture's, so that both share a library
SMALL_MODEL = {GPT2: dict(V=257, L=2, NH=2, C=64, Vp=384)}


def write_checkpoint(path, model):
    """Write a checkpoint of a model, as a run does."""
    replace_file(path, map(model.device.get, checkpoint_parts(model.config, model.params, model.device.real)))


def model_class(architecture, *given):
    """An architecture with the features that these flags bring."""
    return attach(parse_flags("", FEATURE_FLAGS, given), Training, architecture)[1]


def poisoned_model(device, B, T, kind="softmax", recompute=0, moments="fp32", **sizes):
    """A model whose activations and gradients are NaN until they are computed, with parameters of deviation 0.2."""
    c = device.architecture.Config(**{"maxT": T} | SMALL_MODEL[device.architecture] | sizes)
    Model = model_class(device.architecture, "--dtype", device.dtype, "--recompute", f"{recompute}", "--moments",
                        moments, "--attention", kind)
    model = Model(c, device, B, T)
    poison(model, "activations", "backward", "gradients")
    values = np.random.default_rng(1).normal(0, 0.2, layout(c.parameter_table())[-1] // 4).astype(np.float32)
    model.set_parameters(vars(carve(values.view(np.uint8), c.parameter_table())).items())
    return model


def gradients(model, *batches):
    """{name: gradient} that a step's micro-batches, each (tokens, targets), add up to."""
    for model.micro, batch in enumerate(batches):
        model.set_batch(pack_batch(*batch))
        model.forward_pass()
        model.backward_pass()
    model.micro = 0
    names = (row.name for row in model.config.parameter_table())
    return {name: model.device.get(getattr(model.grads, name)) for name in names}


def matmul(device, M, K, N):
    """The products of a linear layer x (M,K) @ w (N,K).T + bias (N), and of its gradients, beside a GELU or not."""
    real, fp32 = device.real, np.float32
    # In bf16, cuBLAS may round the product before it adds the bias, and then again.
    limit = [] if device.dtype == "fp32" else [3e-3]
    x, w, bias, dout, dw, h = (normal(*shape) for shape in ((M, K), (N, K), (N,), (M, N), (N, K), (M, K)))
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


# ---- The whole forward pass against dev/gpt2_numpy.py, and that against PyTorch

FORWARD = ("encoder_forward", "residual_layernorm_forward", "attention_forward", "gelu_forward",
           "fused_classifier", "add_loss")
HARD = {  # (mean, deviation) of parameters; of the others (0, 0.2)
    "wte": (0, 0.5), "wpe": (6, 1),  # the stream's mean is five times its deviation
    "ln1w": (1, 0.5), "ln1b": (1, 0.5), "ln2w": (1, 0.5), "ln2b": (-1, 0.5),
    "qkvb": (1, 1), "fcb": (-1, 1),
    "lnfw": (4, 2), "lnfb": (-1, 1)}  # logits of 15 and more, so that softmax saturates


def in_numpy(c, tensors, tokens, targets):
    """Logits (B,T,V) and the mean loss by dev/gpt2_numpy.py, of the tensors of a checkpoint."""
    p = SimpleNamespace(**{name: np.float64(to_float(values)) for name, values in tensors})
    p.wte = p.wte[: c.V]
    logits = np.stack([forward(p, sequence, c.NH) for sequence in tokens])
    return logits, mean_loss(targets.reshape(-1), logits.reshape(-1, c.V))


def numpy_beside_pytorch():
    """dev/gpt2_numpy.py by itself: the logits and the loss of the fixture, as PyTorch wrote them."""
    checkpoint = FIXTURES / "gpt2_tiny.bin"
    c = Config.from_file(checkpoint)
    truth = read_debug_state(FIXTURES / "gpt2_tiny_debug_state.bin", c)
    logits, loss = in_numpy(c, read_parameters(checkpoint, c), truth.x, truth.y)
    yield "logits", logits, truth.logits, 1e-7
    yield "loss", loss, truth.loss, 1e-7


def forward_pass(device, C, NH):
    """Logits and loss of GPT2.forward, whose logits come in four parts, beside NumPy's."""
    B, T = 2, 37
    c = Config(maxT=41, V=251, L=2, NH=NH, C=C, Vp=288)
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        model = GPT2(c, device, B, T)
    poison(model, "activations")
    for row in c.parameter_table():
        mean, std = HARD.get(row.name, (0, 0.2))
        model.set_parameters([(row.name, np.float32(mean + std * normal(*row.whole_shape)))])
    tensors = [(name, device.get(values)) for name, values in vars(model.params).items()]  # as rounded
    tokens, targets = words(c.V, 2, B, T)
    logits, loss = in_numpy(c, tensors, tokens, targets)
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        # of which each token's error averages out
        yield "loss", model.forward(tokens, targets), loss, LIMITS[device.dtype] / 5
    assert len(model.parts) == 4, model.parts
    found = [to_float(device.get(model.head_forward(rows)))[:, : c.V] for rows in model.parts]
    yield "logits", np.concatenate(found).reshape(logits.shape), logits, LIMITS[device.dtype]


# ---- The whole model against a dump

DEBUG_STATE = {GPT2.Config: FileKind("debug state", 20240327, (2,),
                                     "llm.c's train_gpt2.py or dev/tools/torch_reference.py writes one")}
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
    q, k, _ = heads(qkv.reshape(-1, model.BT[1], qkv.shape[-1]), 3, model.config.NH)  # (L*B,NH,T,HS) each
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
        yield f"loss {step}", model.report().loss - wish, 0, bound


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


def read_flags(description, kernels):
    """The flags of a test program with these kernels."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, form, text in FLAGS:
        parser.add_argument(name, help=text, **form, **({"choices": kernels} if name == "--only" else {}))
    flags = parser.parse_args()
    if bool(flags.checkpoint) != bool(flags.state) or flags.attention and not flags.state:
        parser.error("--checkpoint and --state go together, and --attention with them")
    return flags


def places_of(flags):
    """(device's name, dtype) of each combination that the flags ask for."""
    return [(name, dtype)
            for name in ([flags.device] if flags.device else ["cpu", "cuda"] if has_gpu() else ["cpu"])
            for dtype in ([flags.dtype] if flags.dtype else LIMITS)]


def each_device(flags):
    """The same, after a line that says so."""
    for name, dtype in places_of(flags):
        print(f"--- {name} {dtype}")
        yield name, dtype


# Of all tests in a dtype; on a CPU of two cores, if no kernel is compiled yet. Files, once, take another minute.
MINUTES = {"cpu": {"fp32": 1.5, "tf32": 1, "bf16": 2}, "cuda": dict.fromkeys(LIMITS, 2)}


def say_how_long(flags):
    """Print about how long all tests take."""
    minutes = 1 + sum(MINUTES[name][dtype] for name, dtype in places_of(flags))
    print(f"about {minutes:.0f} minutes; in one, python -m dev.tests.run --fast says the most important", flush=True)


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
        run(f"{dtype} matmul {sizes}", matmul, device_of(device_name, dtype, 64, 2, plain), *sizes)
    for C, NH in ((64, 2), (96, 32)):  # heads of 32 channels, and of 3
        device = device_of(device_name, dtype, C, NH, plain, only=None if C == 64 else FORWARD)
        run(f"{dtype} forward, C={C}, NH={NH},", forward_pass, device, C, NH)
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
        say_how_long(flags)
        from dev.tests.test_files import test_files, test_steps
        run("gradient of", finite_differences)
        run("rounding", rounding)
        run("halves", two_halves)
        run("NumPy beside PyTorch:", numpy_beside_pytorch)
    for name, dtype in each_device(flags):
        if not flags.state:
            test_kernels(name, dtype, flags.only)
            if (name, dtype) == ("cpu", "bf16"):
                test_as_hopper(flags.only)
        if kernels:
            continue
        for plain in each_kind(flags, name, dtype):
            if flags.state:
                test_dump((name, dtype, plain, GPT2), flags.checkpoint, flags.state, flags.attention)
            else:
                test_device(name, dtype, plain)
                test_steps(name, dtype, plain)
    if everything and flags.dtype in (None, "fp32"):
        check_launched([*Config.SOURCES, MOMENTS])
    if everything:
        test_files(name)
    return summary()


def summary():
    """Print how many checks have passed and failed. Returns the exit status."""
    print(f"{counts[True]} passed, {counts[False]} failed")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    import test_gpt2  # not `__main__` itself: dev/tests/test_files.py imports test_gpt2, and there must be only one
    try:
        sys.exit(test_gpt2.main())
    except UserError as e:
        sys.exit(f"error: {e}")
