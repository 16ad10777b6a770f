"""The trainer's tests: each kernel of kernels.cu at all sizes of its .py in dev/lab/kernels/,
attention as on other GPUs, matrix products, the forward pass, dumps, steps, and its program.

    pytest dev/tests/test_trainer.py -k bf16
    pytest dev/tests/test_trainer.py -k model --checkpoint FILE --state FILE    # of another dump

test_gpt2.py has each kernel once, and one dump. On a GPU both the plain and the fast device are
tested; they have the same kernels, which are tested once.
"""
import functools
import os
import re
import subprocess
import sys
from importlib import util
from unittest import mock

import numpy as np
import pytest

import test_gpt2
from dev.common.bf16 import joined, to_bf16
from dev.common.config import Config, read_parameters
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.moments import SOURCE as MOMENTS
from dev.lab.gpt2_numpy import forward, mean_loss
from dev.lab.gpt2_numpy_backward import loss_and_gradients
from dev.lab.bench import Bench
from dev.lab.formulas import (attention, cross_entropy, dattention, dcross_entropy, dgelu,
                              dlayernorm, gelu, layernorm)
from dev.lab.kernels.adamw import halves
from dev.lab.ladder import bf16, config_of, f32, find_ladder, model_of, parse_sizes, stored
from dev.tests import steps
from dev.tests.checks import (EXACT, FIXTURES, TINY, TOP, check, fast, finite_difference, normal,
                              run, words)
from dev.tests.models import (ATTENTION, LIMITS, LOWER, check_dump, check_kernels, check_launched,
                              device_of, dtypes_of, for_numpy, launched, on_device, poison,
                              read_debug_state)
from dev.tests.trainings import call, check_resumed, command, token_files
from train_gpt2 import BF16, LOW, kept_as, read_kernels, to_float, whole_shape

# ---- The formulas: each gradient against finite differences; and rounding


@fast
def test_finite_differences():
    qkv, targets = [normal(2, 9, 6) for _ in range(3)], words(11, 5)
    for name, f, df, inputs in (
            ("gelu", gelu, lambda *x: [dgelu(*x)], [3 * normal(200)]),
            ("layernorm", layernorm, dlayernorm, [normal(5, 32), normal(32), normal(32)]),
            *((f"{kind} attention", *(functools.partial(f, kind) for f in (attention, dattention)),
               qkv) for kind in ("softmax", "relu")),
            ("cross entropy", functools.partial(cross_entropy, targets),
             lambda *x: [dcross_entropy(targets, *x)], [normal(5, 11)])):
        yield finite_difference(name, f, df, *inputs)


@fast
def test_rounding():
    """Devices store the nearest bfloat16; a number halfway between two goes to the even one."""
    half_way = np.float32(1 + np.arange(512) / 256)
    x = f32(np.r_[10 ** np.linspace(-30, 30, 10**5) * normal(10**5), half_way,
                  np.nextafter(half_way, 0), -half_way, 0])
    yield "of an fp32", to_float(to_bf16(x)), bf16(x), EXACT


@fast
def test_halves():
    """Joining the two halves of an fp32 gives it back: every upper half, with the lower halves
    where the rounding changes."""
    bits = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | LOWER).reshape(-1)
    x = bits.view(np.float32)
    nan, finite = np.isnan(x), np.isfinite(x)
    upper, low = (kept_as(x, kind) for kind in (BF16, LOW))
    together = joined(upper, low)
    yield "together", together.view(np.uint32)[~nan], bits[~nan], EXACT
    kept = np.isnan(to_float(upper)[nan]).all() and np.isnan(together[nan]).all()
    check("halves: of a NaN", kept)
    wishes = halves(x[finite].astype(np.float64))
    for name, found, wish in zip(("upper", "lower"), (upper, low), wishes):
        yield name, found[finite], wish, EXACT


# ---- Each kernel against its formula, at all sizes of its .py in dev/lab/kernels/

KERNELS = (
    "encoder_forward", "encoder_backward", "layernorm_forward", "fused_residual_forward",
    "layernorm_again", "layernorm_backward", "matmul_backward_bias", "attention_forward",
    "relu_attention_forward", "attention_backward", "gqa_forward", "gqa_backward", "gelu_forward",
    "gelu_backward", "crossentropy_forward", "classifier_fused", "global_norm", "add_loss", "judge",
    "adamw", "adamw_bf16")
# C and NH. The first are the fixture's and SMALL_MODEL's, and are compiled with all kernels.
COMPILED_FOR = (64, 2), (32, 1), (96, 16), (96, 32), (768, 12), (768, 6), (144, 2), (1600, 16)
AS = {  # by dtype, a GPU and sizes: heads of so many channels, whole tiles and parts of one
    "fp32": ("Turing", {
        "gqa_forward": ("B=1,T=130,NH=4,NKV=2,HS=64,with_lse=1", "B=2,T=37,NH=1,NKV=1,HS=6,relu=1"),
        "gqa_backward": ("B=1,T=70,NH=2,NKV=1,HS=64", "B=2,T=37,NH=1,NKV=1,HS=6,relu=1")}),
    "bf16": ("Hopper", {
        "gqa_forward": (
            "B=1,T=1,NH=1,NKV=1,HS=64,with_lse=1", "B=1,T=130,NH=4,NKV=2,HS=64,with_lse=1",
            "B=2,T=70,NH=1,NKV=1,HS=64,relu=1", "B=2,T=70,NH=2,NKV=2,HS=80,with_lse=1",
            "B=1,T=150,NH=4,NKV=2,HS=96,relu=1", "B=1,T=70,NH=2,NKV=1,HS=72,with_lse=1",
            "B=1,T=330,NH=1,NKV=1,HS=128,with_lse=1"),
        "gqa_backward": (
            "B=1,T=1,NH=1,NKV=1,HS=64", "B=1,T=200,NH=4,NKV=2,HS=64",
            "B=2,T=70,NH=1,NKV=1,HS=64,relu=1", "B=2,T=150,NH=2,NKV=2,HS=80",
            "B=1,T=200,NH=4,NKV=2,HS=96,relu=1", "B=1,T=70,NH=2,NKV=1,HS=72",
            "B=1,T=330,NH=1,NKV=1,HS=128", "B=1,T=330,NH=2,NKV=1,HS=128")})}


def attention_as_on(gpu, cases, device_name, dtype):
    """Attention on the CPU as on a GPU whose kernels differ. Hopper's has wgmma in C++: a missing
    wait gives NaN. Turing's has products without tensor cores. On a GPU the same sizes, with its
    own kernels."""
    devices = {}
    for name, text in ((kernel, sizes) for kernel in cases for sizes in cases[kernel]):
        kernel, sizes = find_ladder(name), parse_sizes(text)
        model = model_of(kernel, sizes)
        try:
            if device_name == "cuda":
                devices[model] = device_of("cuda", dtype, model.C, model.NH, plain=False,
                                           group=model.group, relu=model.relu)
            elif model not in devices:
                flags = f"{os.environ.get('CXXFLAGS', '')} -D{gpu.upper()}"
                with mock.patch.dict(os.environ, CXXFLAGS=flags):
                    devices[model] = Emulated(dtype, config_of(*model), only=ATTENTION)
            version = next(version for version in kernel.versions if version.trainer)
            verdict = Bench(kernel, devices[model], sizes).check(version, {})
            check(f"{name} {text} as on {gpu}:", verdict.place is None, verdict)
        except Exception as e:
            check(f"{name} {text} as on {gpu}:", False, f"{type(e).__name__}: {e}")


# ---- Matrix products


def matmul(device, M, K, N):
    """The products of a linear layer x (M,K) @ w (N,K).T + bias (N), forward and backward, with
    and without GELU."""
    real, fp32 = device.real, np.float32
    # In bf16, cuBLAS may round the product before it adds the bias, and then again.
    limit = [] if device.dtype == "fp32" else [3e-3]
    x, w, bias = (normal(*shape) for shape in ((M, K), (N, K), (N,)))
    dout, dw, h = (normal(*shape) for shape in ((M, N), (N, K), (M, K)))
    if real == BF16:
        x, w, bias, dout, h = map(bf16, (x, w, bias, dout, h))

    def nan(*shape):
        return np.full(shape, np.nan)

    def array(values, dtype=real):
        return on_device(device, stored(values, dtype))

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


# ---- The whole forward pass against dev/lab/gpt2_numpy.py, and that against PyTorch

FORWARD = ("encoder_forward", "residual_layernorm_forward", "attention_forward", "gelu_forward",
           "fused_classifier", "add_loss")
HARD = {  # (mean, deviation) of these parameters; the others have (0, 0.2)
    "wte": (0, 0.5), "wpe": (6, 1),  # the stream's mean is five times its deviation
    "ln1w": (1, 0.5), "ln1b": (1, 0.5), "ln2w": (1, 0.5), "ln2b": (-1, 0.5),
    "qkvb": (1, 1), "fcb": (-1, 1),
    "lnfw": (4, 2), "lnfb": (-1, 1)}  # logits of 15 and more, so that softmax saturates


def in_numpy(c, tensors, tokens, targets):
    """for_numpy's parameters, their logits (B,T,V), and the mean loss."""
    p = for_numpy(tensors, c.V)
    logits = np.stack([forward(p, sequence, c.NH) for sequence in tokens])
    return p, logits, mean_loss(targets.reshape(-1), logits.reshape(-1, c.V))


@fast
def test_numpy_beside_pytorch():
    """dev/lab/gpt2_numpy.py and its backward pass give the logits, the loss and the gradients of
    the fixture that PyTorch wrote."""
    c = Config.from_file(TINY)
    truth = read_debug_state(FIXTURES / "gpt2_tiny_debug_state.bin", c)
    p, logits, loss = in_numpy(c, read_parameters(TINY, c), truth.x, truth.y)
    yield "logits", logits, truth.logits, 1e-7
    yield "loss", loss, truth.loss, 1e-7
    both = [loss_and_gradients(p, x, y, c.NH) for x, y in zip(truth.x, truth.y)]
    yield "loss of each sequence", np.mean([one for one, _ in both]), truth.loss, 1e-7
    for name, wish in truth.gradients.items():
        found = sum(getattr(g, name) for _, g in both) / len(both)
        yield f"d{name}", found, wish[: len(found)], 1e-7


def forward_pass(device, C, NH):
    """Logits and loss of GPT2.forward, with the logits in four parts, against NumPy's."""
    B, T = 2, 37
    c = Config(maxT=41, V=251, L=2, NH=NH, C=C, Vp=288)
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        model = GPT2(c, device, B, T)
    poison(model, "activations")
    for row in c.parameter_table():
        mean, std = HARD.get(row.name, (0, 0.2))
        model.set_parameters([(row.name, np.float32(mean + std * normal(*whole_shape(row))))])
    tensors = [(name, device.get(array)) for name, array in vars(model.params).items()]  # rounded
    tokens, targets = words(c.V, 2, B, T)
    _, logits, loss = in_numpy(c, tensors, tokens, targets)
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        # in the mean loss, the errors of single tokens average out
        yield "loss", model.forward(tokens, targets), loss, LIMITS[device.dtype] / 5
    assert len(model.slices) == 4, model.slices
    found = [to_float(device.get(model.head_forward(rows)))[:, : c.V] for rows in model.slices]
    yield "logits", np.concatenate(found).reshape(logits.shape), logits, LIMITS[device.dtype]


# ---- All of it, in each dtype


def check_model(device_name, dtype, plain=True):
    """Matrix products, the forward pass, and the fixture's dumps."""
    for sizes in ((1, 1, 1), (27, 96, 288), (40, 768, 257), (300, 6, 32)):
        run(f"{dtype} matmul {sizes}", matmul, device_of(device_name, dtype, 64, 2, plain), *sizes)
    for C, NH in ((64, 2), (96, 32)):  # heads of 32 channels, and of 3
        device = device_of(device_name, dtype, C, NH, plain, only=None if C == 64 else FORWARD)
        run(f"{dtype} forward, C={C}, NH={NH},", forward_pass, device, C, NH)
    for state in ("gpt2_tiny", "gpt2_tiny_relu"):
        # A loss moves by 1.5e-5 or more if one tensor is decayed wrongly, by 0.4 without the bias
        # correction, and by 1e-6 through rounding.
        check_dump((device_name, dtype, plain, GPT2), TINY,
                   FIXTURES / f"{state}_debug_state.bin", fp32_bound=1e-5)


@pytest.mark.parametrize("dtype", LIMITS)
def test_model(device_name, dtype, pytestconfig):
    """Each kernel, the dumps, and steps of a small model."""
    if dtype not in dtypes_of(device_name):
        pytest.skip(f"this GPU has no {dtype}")
    given = pytestconfig.option
    if not given.state:
        check_kernels(device_name, dtype, KERNELS, COMPILED_FOR)
        if dtype in AS and (device_name, dtype) != ("cuda", "fp32"):
            attention_as_on(*AS[dtype], device_name, dtype)
    for plain in (1, 0) if device_name == "cuda" else (1,):
        if given.state:
            check_dump((device_name, dtype, plain, GPT2), given.checkpoint, given.state)
            continue
        check_model(device_name, dtype, plain)
        steps.check_steps(device_name, dtype, plain)
    if not given.state and dtype != "tf32":  # whose kernels are fp32's: only products differ
        kernels = set().union(*test_gpt2.CHECKS.values())
        check("test_gpt2.py has each kernel", kernels == read_kernels(Config.SOURCES).keys())
        launched.update({"global_norm"} if dtype == "bf16" else ())  # fp32's, for all
        check_launched([*Config.SOURCES, MOMENTS])


@fast
@pytest.mark.parametrize("test", steps.OF_GPT2, ids=lambda test: test.__name__)
def test_steps(test):
    """The most important of them in fp32, one by one."""
    return test(device_of("emulated", "fp32", 64, 2))


# ---- The program


@fast
def test_lint():
    """ruff finds nothing."""
    if not util.find_spec("ruff"):
        pytest.skip("ruff is not installed")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=TOP,
                          text=True, capture_output=True)
    check("ruff", done.returncode == 0, (done.stdout + done.stderr) * done.returncode)


def train(*flags):
    """Train in fp32. Returns the output and the line of the error."""
    return call("--device", "cpu", "--dtype", "fp32", *flags)[1:]


@fast
def test_three_steps_and_a_resume(folder):
    """Three steps print three losses and leave a checkpoint. A run that stops after three steps and
    resumes ends with the bytes of a run of six."""
    token_files(folder)
    flags = command("cpu", folder, folder / "six", "-x", 6, "-n", 3, "-s", 0)[5:]
    text, error = train(*flags)
    losses = re.findall(r"^step +\d+/6 \| loss (\S+) ", text, re.M)
    check("six steps", not error and len(losses) == 6 and
          all(0 < float(loss) < 7 for loss in losses), error or losses)
    check_resumed("six steps", folder / "six", 6,
                  go_on=lambda copy: train(*flags, "-o", copy, "-y", 1))
