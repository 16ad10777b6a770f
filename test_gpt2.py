"""Test the trainer: every kernel against its formula in NumPy, the model against PyTorch's numbers.

    python test_gpt2.py                            # everything, on the CPU, and on a GPU if any
    python test_gpt2.py --kernels                  # only the kernels, for a sanitizer
    python test_gpt2.py --only gelu_forward        # only one of them, for a debugger
    python test_gpt2.py --checkpoint A --state B   # only this dump, of llm.c or torch_reference.py

It prints a line for each check, and then `N passed, N failed`; the exit status is 1 if any failed.
The inputs of each kernel, and its formula, are in dev/lab/kernels/; `python -m dev.lab --check`
checks the slower versions too. The tests of a step (dev/tests/steps.py), of files, of the CPU, of
the GPU's own features, and of the command line (dev/tests/test_*.py) run as well; `pytest dev` runs
all tests of dev/. On the CPU both kernels.cu itself (--device emulated) and its loops (--device
cpu) are tested. On a GPU both the plain and the fast device are; they have the same kernels, which
are tested once.
"""
import functools
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import joined, to_bf16
from dev.common.config import Config, read_parameters
from dev.cpu.emulated import Emulated
from dev.features.seams import GPT2
from dev.gpt2_numpy import forward, mean_loss
from dev.gpt2_numpy_backward import loss_and_gradients
from dev.lab.bench import Bench
from dev.lab.formulas import (attention, cross_entropy, dattention, dcross_entropy, dgelu,
                              dlayernorm, gelu, layernorm)
from dev.lab.kernels.adamw import halves
from dev.lab.ladder import bf16, config_of, f32, find_ladder, model_of, parse_sizes, stored
from dev.tests.checks import (EXACT, TINY, check, finite_difference, normal, run, run_file,
                              summary, words)
from dev.tests.models import (ATTENTION, FIXTURES, LIMITS, LOWER, check_dump, check_kernels,
                              check_launched, device_of, each_device, each_kind, places_of, poison,
                              read_debug_state, read_flags)
from dev.tests.steps import check_steps
from train_gpt2 import BF16, HERE, LOW, UserError, kept_as, to_float, whole_shape

MOMENTS = HERE / "dev/features/moments.cu"


# ---- The formulas: each gradient against finite differences; and rounding


def finite_differences():
    qkv, targets = [normal(2, 9, 6) for _ in range(3)], words(11, 5)
    for name, f, df, inputs in (
            ("gelu", gelu, lambda *x: [dgelu(*x)], [3 * normal(200)]),
            ("layernorm", layernorm, dlayernorm, [normal(5, 32), normal(32), normal(32)]),
            *((f"{kind} attention", *(functools.partial(f, kind) for f in (attention, dattention)),
               qkv) for kind in ("softmax", "relu")),
            ("cross entropy", functools.partial(cross_entropy, targets),
             lambda *x: [dcross_entropy(targets, *x)], [normal(5, 11)])):
        yield finite_difference(name, f, df, *inputs)


def rounding():
    """Devices store the nearest bfloat16; a number halfway between two goes to the even one."""
    half_way = np.float32(1 + np.arange(512) / 256)
    x = f32(np.r_[10 ** np.linspace(-30, 30, 10**5) * normal(10**5), half_way,
                  np.nextafter(half_way, 0), -half_way, 0])
    yield "of an fp32", to_float(to_bf16(x)), bf16(x), EXACT


def two_halves():
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


AS_TURING = (  # heads of 64 and of 6 channels, whole tiles and parts of one
    ("gqa_forward", "B=1,T=130,NH=4,NKV=2,HS=64,with_lse=1"),
    ("gqa_forward", "B=2,T=37,NH=1,NKV=1,HS=6,relu=1"),
    ("gqa_backward", "B=1,T=70,NH=2,NKV=1,HS=64"),
    ("gqa_backward", "B=2,T=37,NH=1,NKV=1,HS=6,relu=1"))
AS_HOPPER = (  # heads of 64 to 128 channels, whole tiles and parts of one
    ("gqa_forward", "B=1,T=1,NH=1,NKV=1,HS=64,with_lse=1"),
    ("gqa_forward", "B=1,T=130,NH=4,NKV=2,HS=64,with_lse=1"),
    ("gqa_forward", "B=2,T=70,NH=1,NKV=1,HS=64,relu=1"),
    ("gqa_forward", "B=2,T=70,NH=2,NKV=2,HS=80,with_lse=1"),
    ("gqa_forward", "B=1,T=150,NH=4,NKV=2,HS=96,relu=1"),
    ("gqa_forward", "B=1,T=70,NH=2,NKV=1,HS=72,with_lse=1"),
    ("gqa_forward", "B=1,T=330,NH=1,NKV=1,HS=128,with_lse=1"),
    ("gqa_backward", "B=1,T=1,NH=1,NKV=1,HS=64"),
    ("gqa_backward", "B=1,T=200,NH=4,NKV=2,HS=64"),
    ("gqa_backward", "B=2,T=70,NH=1,NKV=1,HS=64,relu=1"),
    ("gqa_backward", "B=2,T=150,NH=2,NKV=2,HS=80"),
    ("gqa_backward", "B=1,T=200,NH=4,NKV=2,HS=96,relu=1"),
    ("gqa_backward", "B=1,T=70,NH=2,NKV=1,HS=72"),
    ("gqa_backward", "B=1,T=330,NH=1,NKV=1,HS=128"),
    ("gqa_backward", "B=1,T=330,NH=2,NKV=1,HS=128"))


AS = {"bf16": ("Hopper", AS_HOPPER), "fp32": ("Turing", AS_TURING)}


def test_as_on(device_name, dtype, only=None):
    """Attention on the CPU as on a GPU whose kernels differ. Hopper's has wgmma in C++: a missing
    wait gives NaN. Turing's has products without tensor cores. On a GPU the same sizes, with its
    own kernels."""
    devices, (gpu, cases) = {}, AS[dtype]
    for name, text in cases:
        kernel, sizes = find_ladder(name), parse_sizes(text)
        if only not in (None, name):
            continue
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
        memory = device.empty(values.size * np.dtype(dtype).itemsize)
        on_device = memory.view(dtype).reshape(values.shape)
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
HARD = {  # (mean, deviation) of these parameters; the others have (0, 0.2)
    "wte": (0, 0.5), "wpe": (6, 1),  # the stream's mean is five times its deviation
    "ln1w": (1, 0.5), "ln1b": (1, 0.5), "ln2w": (1, 0.5), "ln2b": (-1, 0.5),
    "qkvb": (1, 1), "fcb": (-1, 1),
    "lnfw": (4, 2), "lnfb": (-1, 1)}  # logits of 15 and more, so that softmax saturates


def in_numpy(c, tensors, tokens, targets):
    """Logits (B,T,V) and the mean loss by dev/gpt2_numpy.py, given the tensors of a checkpoint."""
    p = SimpleNamespace(**{name: np.float64(to_float(values)) for name, values in tensors})
    p.wte = p.wte[: c.V]
    logits = np.stack([forward(p, sequence, c.NH) for sequence in tokens])
    return logits, mean_loss(targets.reshape(-1), logits.reshape(-1, c.V))


def numpy_beside_pytorch():
    """dev/gpt2_numpy.py and its backward pass give the logits, the loss and the gradients of the
    fixture that PyTorch wrote."""
    c = Config.from_file(TINY)
    truth = read_debug_state(FIXTURES / "gpt2_tiny_debug_state.bin", c)
    logits, loss = in_numpy(c, read_parameters(TINY, c), truth.x, truth.y)
    yield "logits", logits, truth.logits, 1e-7
    yield "loss", loss, truth.loss, 1e-7
    p = SimpleNamespace(**{name: np.float64(to_float(values))
                           for name, values in read_parameters(TINY, c)})
    p.wte = p.wte[: c.V]
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
    logits, loss = in_numpy(c, tensors, tokens, targets)
    with mock.patch("train_gpt2.LOGIT_ROWS", 16):
        # in the mean loss, the errors of single tokens average out
        yield "loss", model.forward(tokens, targets), loss, LIMITS[device.dtype] / 5
    assert len(model.slices) == 4, model.slices
    found = [to_float(device.get(model.head_forward(rows)))[:, : c.V] for rows in model.slices]
    yield "logits", np.concatenate(found).reshape(logits.shape), logits, LIMITS[device.dtype]


# ---- The program

OTHERS = "files", "cpu", "gpu", "command_line"  # these files of dev/tests are tested, too
# All tests of a dtype, on two cores, if no kernel is compiled yet. The rest takes a minute more.
MINUTES = {"emulated": {"fp32": 1.5, "tf32": 0.3, "bf16": 2}, "cpu": dict.fromkeys(LIMITS, 0.3),
           "cuda": dict.fromkeys(LIMITS, 2)}


def say_how_long(flags):
    """Print about how long all tests take."""
    minutes = 1 + sum(MINUTES[name][dtype] for name, dtype in places_of(flags))
    print(f"about {minutes:.0f} minutes; in one, pytest dev -m fast tests the most important",
          flush=True)


def test_device(device_name, dtype, plain):
    """Matrix products, the forward pass, and the dumps that are here."""
    where = device_name, dtype, plain, GPT2
    for sizes in ((1, 1, 1), (27, 96, 288), (40, 768, 257), (300, 6, 32)):
        run(f"{dtype} matmul {sizes}", matmul, device_of(device_name, dtype, 64, 2, plain), *sizes)
    for C, NH in ((64, 2), (96, 32)):  # heads of 32 channels, and of 3
        device = device_of(device_name, dtype, C, NH, plain, only=None if C == 64 else FORWARD)
        run(f"{dtype} forward, C={C}, NH={NH},", forward_pass, device, C, NH)
    for state in ("gpt2_tiny", "gpt2_tiny_relu"):
        # A loss moves by 1.5e-5 or more if one tensor is decayed wrongly, by 0.4 without the bias
        # correction, and by 1e-6 through rounding.
        check_dump(where, TINY, FIXTURES / f"{state}_debug_state.bin", fp32_bound=1e-5)
    if Path("gpt2_124M.bin").exists() and Path("gpt2_124M_debug_state.bin").exists():
        check_dump(where, "gpt2_124M.bin", "gpt2_124M_debug_state.bin")


def main():
    flags = read_flags("Compare train_gpt2.py with independent truths.", KERNELS)
    kernels = flags.kernels or flags.only
    once = not (kernels or flags.state) and flags.dtype in (None, "fp32")  # tests without a dtype
    if once:
        say_how_long(flags)
        run("gradient of", finite_differences)
        run("rounding", rounding)
        run("halves", two_halves)
        run("NumPy beside PyTorch:", numpy_beside_pytorch)
    for name, dtype in each_device(flags):
        if not flags.state:
            check_kernels(name, dtype, KERNELS, COMPILED_FOR, flags.only)
            if dtype in AS and name != "cpu" and (name, dtype) != ("cuda", "fp32"):
                test_as_on(name, dtype, flags.only)
        if kernels:
            continue
        for plain in each_kind(flags, name, dtype):
            if flags.state:
                where = name, dtype, plain, GPT2
                check_dump(where, flags.checkpoint, flags.state, flags.attention)
            else:
                test_device(name, dtype, plain)
                check_steps(name, dtype, plain)
    if once:
        check_launched([*Config.SOURCES, MOMENTS])
    for module in OTHERS if once else ():
        run_file(importlib.import_module(f"dev.tests.test_{module}"),
                 "cuda" if name == "cuda" else "emulated")
    return summary()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
