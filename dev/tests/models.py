"""Models and devices for tests; checks of kernels against their formulas, and of models against
PyTorch's tensors.

test_trainer.py and test_llama3.py use this for their two architectures.
"""
import contextlib
import dataclasses
import functools
import json
import os
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.config import check_tokens, checkpoint_parts, read_parameters
from dev.common.files import checked_header
from dev.common.flags import parse_flags, with_values
from dev.cpu.emulated import Emulated
from dev.common.gpus import GPUS, blocks_that_fit, capability
from dev.common.nvrtc import compile_cuda, has_nvrtc
from dev.features.base import GPT2, Training
from dev.features.devices import device_class
from dev.features.feature import stack
from dev.features.fp8.fp8 import fp8_device
from dev.features.moments import SOURCE as MOMENTS
from dev.features.order import FLAGS as FEATURE_FLAGS, attach
from dev.features.ranks.ranks import Ranks
from dev.features.recompute import LLAMA_SOURCE as RECOMPUTE_LLAMA, SOURCE as RECOMPUTE
from dev.features.relu_attention import ReluAttention
from dev.lab.bench import BF16_LIMIT, Bench, noting, orders
from dev.lab.formulas import heads, transposed
from dev.lab.ladder import (config_of, describe_choice, find_ladder, launched_by, model_of,
                            parse_sizes)
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import FIXTURES, check, run  # noqa: F401
from test_gpt2 import LOSSES, MODEL_LIMITS as LIMITS, STATE
from train_gpt2 import (HEADER_BYTES, FileKind, Row, UserError, carve, check_size, offsets,
                        pack_batch, read_kernels, replace_file, to_float, whole_shape)

# Limits for a whole model. How large the errors of bf16 are depends on the model: with parameters
# of deviation 0.08, PyTorch's own autocast is off by 2.0e-2, and this program by 2.4e-2. It rounds
# more than autocast does: embeddings, the weights of norms, and the gradient of the residual
# stream. So if a dump has autocast's error of a tensor, the limit is 1.6 times that, but no less
# than the cost of two or three roundings in a row. (A single parameter that is rounded the other
# way can change the error by a twentieth.)
AUTOCAST_MARGIN, AUTOCAST_FLOOR = 1.6, 2.5 * BF16_LIMIT
made = {}  # {arguments of device_of: [(the device's kernels, or None for all, the device)]}


def device_of(name, dtype, C, NH, plain=True, architecture=GPT2, only=None, group=None, relu=0):
    """A device for an architecture, made once. plain makes no difference on a CPU. only: the
    kernels to compile (default: all), if they are emulated. group, relu: attention's switches, as
    in Compiled; without a group, SMALL_MODEL's."""
    only = set(only) if only and name == "emulated" else None
    small = SMALL_MODEL.get(architecture, {})
    group = group or small.get("NH", 1) // small.get("NKV", small.get("NH", 1))
    arguments = name, dtype, C, NH, plain or name != "cuda", architecture, None, group, relu
    devices = made.setdefault(arguments, [])
    for kernels, device in devices:
        if kernels is None or only and only <= kernels:
            return device
    c = (config_of(C, NH, group)
         if architecture is GPT2 else architecture.Config(C=C, NH=NH, NKV=NH // group))
    beside = [MOMENTS, RECOMPUTE] if architecture is GPT2 else [MOMENTS, RECOMPUTE, RECOMPUTE_LLAMA]
    if dtype == "fp8":
        device = fp8_device(name, c, plain, beside=beside)
    else:
        kind = device_class(name, plain)
        kind = stack(kind, [ReluAttention] if relu else [])
        device = kind(dtype, c, beside, only) if only else kind(dtype, c, beside)
    device.architecture, device.arguments, device.only = architecture, arguments, only
    devices.append((only, device))
    return device


def emulated_with(kernels):
    """The emulated device with these kernels alone, as a class."""
    return type("Few", (Emulated,), dict(
        __init__=functools.partialmethod(Emulated.__init__, only=kernels)))


def for_attention(device, kind):
    """The device like this one that is compiled for softmax or for ReLU attention."""
    *arguments, _, group, relu = device.arguments
    wanted = int(kind == "relu")
    return device if relu == wanted else device_of(*arguments, device.only, group, wanted)


ATTENTION = "attention_forward", "attention_backward_q", "attention_backward_kv"  # of kernels.cu


launched = set()  # the names of the kernels that tests have launched


def fits(device_name, C=0, HS=0, relu=0, **other):
    """Whether rows and heads fit into a block's shared memory: before 8.0 that is 64 KB. The loops
    of a CPU have no ReLU attention."""
    if device_name == "cpu" and relu:
        return False
    return device_name != "cuda" or capability() >= 80 or C <= 4096 and HS <= 64


def rounds_alone(device_name, dtype):
    """Whether a dtype has fp32's kernels, but for a rounding in attention's products: TF32, which
    the emulated device need not check at all sizes again. (`dev.lab --check` has more.)"""
    return device_name == "emulated" and dtype == "tf32"


def check_kernels(device_name, dtype, names, models, architecture=GPT2):
    """Check the trainer's versions of these kernels: a check for each size and each choice of what
    can be chosen. They are compiled for the one of the models, (C, NH), whose sizes fit. If a dtype
    only rounds otherwise, the sizes are the first model's."""
    wanted = []  # (kernel, version, sizes as a text, the Compiled)
    few = rounds_alone(device_name, dtype)
    for name in names:
        kernel = find_ladder(name)
        for version in kernel.versions:
            if version.trainer and dtype in version.dtypes:
                found = [(kernel, version, sizes, model_of(kernel, parse_sizes(sizes), models))
                         for sizes in (*kernel.checks, *kernel.trainer_checks)
                         if fits(device_name, **parse_sizes(sizes))]
                wanted += [row for row in found if not few or row[3][:2] == models[0]]
    named, known = {}, read_kernels([*architecture.Config.SOURCES, MOMENTS, RECOMPUTE,
                                     RECOMPUTE_LLAMA])
    for kernel, _, _, model in wanted:
        named.setdefault(model, set()).add(kernel.name)

    def device_for(model):  # the first model's device has all kernels, since other tests share it
        needed = None if model == models[0] else launched_by(named[model], known)
        return device_of(device_name, dtype, model.C, model.NH, architecture=architecture,
                         only=needed, group=model.group, relu=model.relu)

    if device_name != "cuda":  # each compiler takes a core
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(device_for, named))
    for kernel, version, sizes, model in wanted:
        device, title = device_for(model), f"{kernel.name} {sizes} {dtype}"
        # Without CuPy's pool, which to a sanitizer looks like one large array.
        without_pool = (device.cupy.cuda.using_allocator(None)
                        if device_name == "cuda" else contextlib.nullcontext())
        with without_pool, noting(device, launched):
            try:
                bench = Bench(kernel, device, parse_sizes(sizes))
                for choice in version.choices(device, few=True) if bench.fits(version) else ():
                    if choice.get("threads") is None:  # the lab tries others
                        verdict = bench.check(version, choice)
                        check(f"{title} {describe_choice(choice)}:", verdict.place is None, verdict)
            except Exception as e:
                check(title, False, f"{type(e).__name__}: {e}")


def check_launched(sources):
    """Check that the tests so far have launched each kernel of these files."""
    missing = read_kernels(sources).keys() - launched
    check("each kernel has a test", not missing, " ".join(sorted(missing)))


def poison(model, *arenas):
    """Fill arenas with NaN."""
    for name in arenas:
        model.device.put(model.arenas[name], np.full(model.arenas[name].nbytes, 255, np.uint8))


# The sizes of the model that tests of steps use. C and NH are the fixture's, so that they share a
# compiled library
SMALL_MODEL = {GPT2: dict(V=257, L=2, NH=2, C=64, Vp=384),
               Llama3: dict(V=257, L=2, NH=2, C=64, NKV=1)}


def write_checkpoint(path, model):
    """Write a checkpoint of a model, as a run does."""
    replace_file(path, map(model.device.get,
                           checkpoint_parts(model.config, model.params, model.device.real)))


def model_class(architecture, *given, rank=0, count=1, **values):
    """An architecture's class with the features that these flags ask for, on one of `count` ranks,
    which never speaks to the others. values: of the trainer's flags."""
    given = ("--kv-cache", "0", *map(str, given))  # tests of samples ask for it
    flags = with_values(parse_flags("", FEATURE_FLAGS, given), **values)
    ranks = Ranks.__new__(Ranks) if count > 1 else None
    if ranks:
        ranks.rank, ranks.count = rank, count
    return attach(flags, Training, architecture, ranks)[1]


def for_numpy(tensors, V):
    """The parameters of dev/lab/gpt2_numpy.py, given the tensors of a checkpoint."""
    p = SimpleNamespace(**{name: np.float64(to_float(values)) for name, values in tensors})
    p.wte = p.wte[:V]
    return p


def poisoned_model(device, B, T, kind="softmax", recompute=0, moments="fp32", fp8="layers",
                   dropout=0, **sizes):
    """A model with parameters of deviation 0.2, whose activations and gradients are NaN until they
    are computed. kind: of attention, which the device is compiled for."""
    c = device.architecture.Config(**{"maxT": T} | SMALL_MODEL[device.architecture] | sizes)
    device = for_attention(device, kind) if kind == "relu" else device
    Model = model_class(device.architecture, "--dtype", device.dtype, "--recompute", f"{recompute}",
                        "--moments", moments, "--fp8", fp8, "--dropout", f"{dropout}")
    model = Model(c, device, B, T)
    poison(model, "activations", "backward", "gradients")
    values = np.random.default_rng(1).normal(0, 0.2, offsets(c.parameter_table())[-1] // 4).astype(
        np.float32)
    model.set_parameters(vars(carve(values.view(np.uint8), c.parameter_table())).items())
    return model


def gradients(model, *batches):
    """{name: gradient}, summed over a step's micro-batches. Each of these is (tokens, targets)."""
    for model.micro, batch in enumerate(batches):
        model.set_batch(pack_batch(*batch))
        model.forward_pass()
        model.loss_pass(with_gradient=True)
        model.backward_pass()
    model.micro = 0
    names = (row.name for row in model.config.parameter_table())
    return {name: model.device.get(getattr(model.grads, name)) for name in names}


LOWER = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # around half a unit of the upper half


# ---- The whole model against a dump

DEBUG_STATE = {GPT2.Config: STATE,
               Llama3.Config: FileKind("Llama 3 debug state", 20240803, (3,),
                                       "dev/bench/torch_reference.py writes one")}


HYPERPARAMETERS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
LLM_C_LOSSES = [  # the 124M model's, from llm.c's fp32 tests and from its mixed-precision test
    ((1e-4, 0.9, 0.999, 1e-8, 0.01), LOSSES["gpt2_124M"][1]),
    ((1e-4, 0.9, 0.95, 1e-8, 0.0), (5.270009, 4.060681, 3.320085, 2.717550, 2.181066, 1.653923,
                                    1.168050, 0.736873, 0.401021, 0.187493))]


def read_debug_state(path, c):
    """A debug state for a model of config c: x, y (B,T) int32, logits (B,T,V), loss, and gradients
    {name: array}. Raises UserError."""
    kind = DEBUG_STATE[type(c)]
    # GPT-2's does not end with recorded losses and norms.
    B, T, recorded = checked_header(path, kind)[2:5]
    if B < 1 or not 1 <= T <= c.maxT:
        raise UserError(f"{path}: B = {B}, T = {T} in its header; expected 1 <= B and 1 <= T <= "
                        f"maxT = {c.maxT}")
    rows = [Row("x", (B, T), np.int32), Row("y", (B, T), np.int32), Row("logits", (B, T, c.V)),
            Row("loss", ())]
    rows += c.file_table()
    check_size(path, kind, HEADER_BYTES + sum(row.nbytes for row in rows) + 2 * 4 * recorded)
    state = {}
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        for row in rows:
            state[row.name] = np.fromfile(file, row.dtype, row.size).reshape(whole_shape(row))
    x, y, logits, loss = (state.pop(row.name) for row in rows[:4])
    check_tokens(path, x, c.V)
    check_tokens(path, y, c.V)
    return SimpleNamespace(x=x, y=y, logits=logits, loss=float(loss), gradients=state)


def dump_limit(dtype, report, tensor, sign_changes=0):
    """The limit for "loss", "logits", or the gradient of the parameter with this name. In bf16, if
    the dump's report has autocast's error, it is AUTOCAST_MARGIN times that, but no less than
    AUTOCAST_FLOOR."""
    error = report.get("autocast_errors", {}).get(tensor) if dtype == "bf16" else None
    return LIMITS[dtype] + sign_changes if error is None else max(AUTOCAST_MARGIN * error,
                                                                  AUTOCAST_FLOOR)


def sign_changes(model, limit):
    """How far off gradients may be with ReLU attention. A rounding error of `limit` flips the sign
    of scores near 0, which turns their gradients on or off. If a share s of the scores flip, the
    error is about sqrt(s)."""
    qkv = to_float(model.device.get(model.acts.qkv)).astype(np.float64)  # (L,N,3C)
    # (L*B,NH,T,HS) each.
    q, k, _ = heads(qkv.reshape(-1, model.BT[1], qkv.shape[-1]), 3, model.config.NH)
    score = (q @ transposed(k))[..., np.tri(q.shape[-2], dtype=bool)]
    return 3 * np.sqrt(np.mean(abs(score) < limit * np.sqrt(np.mean(score**2))))


def dump(device, checkpoint, state, kind, limit_of, losses=(), bound=0, hyperparameters=None):
    """Compare the logits, the loss and the gradients with a debug state, and the losses before each
    of ten updates on its one batch with these losses, if given, within bound."""
    c, dtype = device.architecture.Config.from_file(checkpoint), device.dtype
    truth = read_debug_state(state, c)
    model = poisoned_model(device, *truth.x.shape, kind, **dataclasses.asdict(c))
    device = model.device
    model.set_parameters(read_parameters(checkpoint, c))
    yield "loss", model.forward(truth.x, truth.y), truth.loss, limit_of("loss")
    logits = device.get(model.acts.logits)[:, : c.V].reshape(truth.logits.shape)
    yield "logits", logits, truth.logits, limit_of("logits")
    found = gradients(model, (truth.x, truth.y))
    more = sign_changes(model, LIMITS[dtype]) if kind == "relu" else 0
    for name, gradient in truth.gradients.items():
        if name in found:  # tensors that only the file has are zeros, or repeat another
            yield f"d{name}", found[name][: len(gradient)], gradient, limit_of(name, more)
    for step, wish in enumerate(losses):
        model.train_step(pack_batch(truth.x, truth.y), **hyperparameters)
        yield f"loss {step}", model.verdict().loss - wish, 0, bound


def check_dump(where, checkpoint, state, kind=None, fp32_bound=1e-2):
    """Compare with a debug state, and with ten losses if they are known: from the file beside it,
    or because the dump is llm.c's. where: (device's name, dtype, whether it is the plain device,
    architecture)."""
    device_name, dtype, plain, architecture = where
    prefix = str(state).removesuffix(".bin").removesuffix("_debug_state")
    report = (json.loads(Path(f"{prefix}_losses.json").read_text())
              if Path(f"{prefix}_losses.json").exists() else {})
    kind, known = kind or report.get("attention", "softmax"), []
    limit_of = functools.partial(dump_limit, dtype,
                                 report if kind == report.get("attention") else {})
    if kind == report.get("attention"):
        bound = fp32_bound if dtype == "fp32" else 3e-2
        known.append((report["losses"], bound, {name: report[name] for name in HYPERPARAMETERS}))
    if kind == "softmax" and Path(prefix).name == "gpt2_124M":
        known += [(losses, 1e-2, dict(zip(HYPERPARAMETERS, values)))
                  for values, losses in LLM_C_LOSSES]
    c = architecture.Config.from_file(checkpoint)
    device = device_of(device_name, dtype, c.C, c.NH, plain, architecture, group=c.NH // c.NKV)
    for ten in known or [()]:
        run(f"{dtype} {Path(prefix).name}", dump, device, checkpoint, state, kind, limit_of, *ten)


def dtypes_of(device_name):
    """Those of LIMITS that a device has: GPUs before 8.0 have fp32 alone."""
    return ["fp32"] if device_name == "cuda" and capability() < 80 else [*LIMITS]


def on_device(device, values):
    array = device.empty(values.nbytes).view(values.dtype).reshape(values.shape)
    device.put(array, values)
    return array


AS_HOPPER = "-O1 -DHOPPER"


def on_hopper(kind, *args, flags=AS_HOPPER, **more):
    """A device that is made with the compiler's flags for Hopper; or None if its GPU is none."""
    with mock.patch.dict(os.environ, CXXFLAGS=flags), contextlib.redirect_stdout(None):
        device = kind(*args, **more)
    if device.name == "cuda" and not device.hopper:
        print("skipped: this GPU is no Hopper")
        return None
    return device


def check_compiled(c, sources, kernels, threads, shared, *switches):
    """Check that for sm_90a no kernel of these spills, and that a block fits a multiprocessor."""
    if not has_nvrtc():
        raise unittest.SkipTest("NVRTC is not installed")
    text = "".join(path.read_text("utf-8") for path in (*c.SOURCES, *sources))
    log, used, _ = compile_cuda(text, "sm_90a", ["-std=c++17", "-DBF16", "-DHOPPER", *c.switches(),
                                                 *switches])
    check("wgmma is not serialized", "serialized" not in log and "warning" not in log)
    for name in kernels:
        check(f"{name} spills nothing", used[name].spilled == 0, used[name])
        check(f"{name} fits", blocks_that_fit(GPUS["9.0"], used[name], threads, shared) == 1)


def check_in_each_order(title, device, faults, *args):
    """Check [(what, error, limit)], which faults(*args) returns, in each order of threads."""
    for order, found in in_each_order(device, faults, *args):
        for what, error, limit in found:
            check(f"{title} {order} {what}", error <= limit, f"{error:.1e}")


def in_each_order(device, work, *args):
    """Yield (order, work(*args)). Emulated threads run in several orders, one after another."""
    emulated = hasattr(device, "set_order")
    for order in orders() if emulated else ("forward",):
        if emulated:
            device.set_order(order)
        yield order, work(*args)
    if emulated:
        device.set_order("forward")
