"""Test --dropout: its bits against the lab's SplitMix64, its gradients against PyTorch's
with the same masks, and runs that stop and resume."""
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.common.flags import parse_flags
from dev.cpu.emulated import Emulated
from dev.features import order
from dev.features.base import GPT2, Training
from dev.features.devices import device_class, make_device
from dev.features.dropout import SOURCE, DroppedInside, DroppedOutputs
from dev.features.feature import stack
from dev.features.fused_biases import SOURCE as FUSED, FusedBiases, SummedOutputs
from dev.features.recompute import LLAMA_SOURCE, SOURCE as RECOMPUTE
from dev.lab.kernels.adamw_bf16 import splitmix64
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests.checks import EXACT, FIXTURES, TINY, check, check_refusal, normal, words
from dev.tests.in_torch import parameters_in_torch, sum_in_torch
from dev.tests.models import gradients, in_each_order, model_class, on_device
from dev.tests.trainings import LLAMA, TRAINER, call, check_feature, place_of, trained
from train_gpt2 import to_float

B, T = 3, 5
C = 64
L = 2
CONFIGS = {GPT2: Config(maxT=7, V=259, L=L, NH=2, C=C, Vp=320),
           Llama3: Config3(maxT=7, V=259, L=L, NH=2, C=C, NKV=1)}


def mask(seed, step, site, first, n, P):
    """What n numbers of a site are multiplied by, from the index `first` of a step's numbers on:
    0, or 1 / (1 - P). float64."""
    key = splitmix64(seed, step * 65536 + site)
    i = np.arange(first, first + n, dtype=np.uint64)
    bits = splitmix64(key, i // 2) >> 32 * (i % 2) & 0xFFFFFFFF
    return np.where(bits < round(P * 2**32), 0.0, 1 / (1 - P))


@functools.cache
def device_for(name, dtype, Model=GPT2):
    if name == "emulated":  # only what is tested in it compiles fast
        return Emulated(dtype, CONFIGS[Model], [SOURCE], only=("drop", "drop_stream"))
    beside = [SOURCE, RECOMPUTE, *[LLAMA_SOURCE] * (Model is Llama3)]
    return make_device(name, dtype, CONFIGS[Model], beside=beside)


@functools.cache
def summed_device(name, dtype, Model, inside):
    """A device as on a GPU; inside: whose norms' kernels drop."""
    mixins = [DroppedOutputs if inside else SummedOutputs]
    beside = [SOURCE, RECOMPUTE, *[LLAMA_SOURCE] * (Model is Llama3), FUSED]
    return stack(device_class(name), mixins)(dtype, CONFIGS[Model], beside)


def dropped_model(device_name, Model=GPT2, P=0.25, rank=0, count=1, flags=(), device=None):
    """A model with --dropout, in step 3 of a run with seed 7; with a device whose norms' kernels
    drop, as on a GPU."""
    inside = isinstance(device, DroppedOutputs)
    device = device or device_for(place_of(device_name), "fp32", Model)
    given = "--dropout", f"{P}", "--seed", "7", *flags
    plain = stack(Model, [FusedBiases] * (inside and Model is GPT2))
    kind = stack(model_class(plain, *given, rank=rank, count=count), [DroppedInside] * inside)
    model = kind(CONFIGS[Model], device, B, T)
    model.set_parameters((name, 4 * values if values.ndim > 2 else values)
                         for name, values in draw_parameters(CONFIGS[Model], 1))
    model.count_step(3)
    return model


def batches(count):
    return [(words(259, B, T), words(259, B, T)) for _ in range(count)]


def test_kernels(device_name):
    """Both kernels and their loops, for numbers that are multiples of 32: the same numbers are
    dropped as in whole numbers, in place or not."""
    def work(device, kernel, inp, inside, *args):
        inp = on_device(device, inp)
        out = inp if inside else on_device(device, np.full_like(device.get(inp), 255))
        device.launch(kernel, inp.size, out, inp, *args, inp.size)
        return device.get(out)

    devices = [device_for(device_name, "bf16"),
               *(device_for("cpu", dtype) for dtype in ("fp32", "bf16"))]
    for device in devices:
        for n, P, seed, step, part, site in ((32, 0.5, 0, 1, 0, 0), (96, 0.1, 42, 9, 3, 5),
                                             (3200, 0.9, 2**24 - 1, 2**24 - 1, 70000, 65535)):
            counter = on_device(device, np.float32([seed, step]))
            parts = on_device(device, np.uint64([part]))
            times = mask(seed, step, site, part * n, n, P)
            for kernel in ("drop", "drop_stream"):
                x = np.float32(normal(n))
                if kernel == "drop" and device.real != np.float32:
                    x = to_bf16(x)
                for inside in (True, False):
                    args = counter, parts, site, round(P * 2**32), 1 / (1 - P)
                    for way, found in in_each_order(device, work, device, kernel, x, inside, *args):
                        name = f"{device.name} {device.dtype} {kernel} n={n} {way} {inside}"
                        yield name, found, times * to_float(x), 3e-3 if x.itemsize == 2 else 1e-7
                        check(f"{name}: the same zeros",
                              np.array_equal(to_float(found) == 0, times == 0))


def test_share_of_zeros():
    """As many numbers are dropped as P says, within 5 standard deviations; and independently of
    those beside them, of another site, step and micro-batch."""
    device = device_for("cpu", "fp32")
    n = 2**18
    ones = np.ones(n, np.float32)

    def dropped(P, seed=1, step=1, part=0, site=0):
        out = np.empty_like(ones)
        device.launch("drop", n, out, ones, np.float32([seed, step]), np.uint64([part]), site,
                      round(P * 2**32), 1 / (1 - P), n)
        return (out == 0).astype(np.float64)

    for P in (0.01, 0.1, 0.5, 0.99):
        z = (dropped(P).mean() - P) / np.sqrt(P * (1 - P) / n)
        check(f"P={P}", abs(z) < 5, f"{z:.1f} standard deviations")
    first = dropped(0.3)
    others = dict(neighbours=np.roll(first, 1), channels=np.roll(first, C),
                  steps=dropped(0.3, step=2), parts=dropped(0.3, part=1),
                  sites=dropped(0.3, site=1), seeds=dropped(0.3, seed=2))
    for name, other in others.items():
        z = np.corrcoef(first, other)[0, 1] * np.sqrt(n)
        check(f"independent: {name}", abs(z) < 5, f"{z:.1f} standard deviations")


def test_gradients(device_name):
    """The loss and all gradients of two micro-batches are PyTorch's with the same masks, and
    --recompute gives the same bits. A validation between them drops nothing."""
    import torch
    model = dropped_model(device_name)
    c = CONFIGS[GPT2]
    P = 0.25
    p = parameters_in_torch(model)
    given = batches(2)
    N = B * T
    mean = 0
    for micro, (tokens, targets) in enumerate(given):
        times = [torch.tensor(mask(7, 3, site, micro * N * C, N * C, P).reshape(N, C))
                 for site in range(2 * L + 1)]
        mean = mean + sum_in_torch(p, c, tokens, targets, times) / (2 * N)
    mean.backward()
    model.forward(*given[0])
    model.micros = 2
    found = gradients(model, *given)
    yield "the loss", np.float32(model.verdict().loss), mean.item(), 1e-6
    for name, value in found.items():
        yield f"d{name}", value, p[name].grad.numpy(), 2e-5
    model.micros = 1
    for level in (1, 2):
        again = dropped_model(device_name, flags=("--recompute", f"{level}"))
        again.micros = 2
        for name, value in gradients(again, *given).items():
            yield f"--recompute {level}: d{name}", value, found[name], (
                EXACT if device_name != "cuda" else 1e-5)
    plain = model_class(GPT2)(c, model.device, B, T)
    plain.set_parameters((name, model.device.get(getattr(model.params, name)))
                         for name in vars(model.params))
    yield "a validation", model.forward(*given[0]), plain.forward(*given[0]), EXACT
    tokens = [3, 1, 4]
    yield "a sample's logits", model.next_logits(tokens), plain.next_logits(tokens), EXACT


@pytest.mark.parametrize("Model", (GPT2, Llama3))
def test_inside_norms(device_name, Model):
    """Norms' kernels drop what Dropped drops beside them: the losses and gradients have the same
    bits, but for the biases, whose sums have another order; also with --recompute, and in a
    validation."""
    beside, inside = (summed_device(device_name, "bf16", Model, inside) for inside in (False, True))
    given = batches(2)

    def of(device, level):
        model = dropped_model(device_name, Model, flags=("--recompute", f"{level}"), device=device)
        found = {"a validation": np.float32(model.forward(*given[0]))}
        model.micros = 2
        found |= gradients(model, *given)
        return found | {"the loss": np.float32(model.verdict().loss)}

    plain = []  # a model without --dropout, whose norms drop nothing on either device
    for device in (beside, inside):
        model = model_class(Model)(CONFIGS[Model], device, B, T)
        model.set_parameters(draw_parameters(CONFIGS[Model], 1))
        plain.append(gradients(model, *given))
    for name, value in plain[1].items():
        yield f"nothing is dropped: {name}", value, plain[0][name], EXACT
    for level in (0, 1, 2):
        expected = of(beside, level)
        for name, value in of(inside, level).items():
            bias = name in ("qkvb", "attprojb", "fcb", "fcprojb")
            yield f"--recompute {level}: {name}", value, expected[name], 1e-5 if bias else EXACT


def test_llama(device_name):
    """Llama 3's gradient is the slope of its loss with the masks held; with --recompute it has the
    same bits."""
    model = dropped_model(device_name, Llama3)
    c = CONFIGS[Llama3]
    given = batches(1)
    found = gradients(model, *given)
    size = np.sqrt(sum((value.astype(np.float64)**2).sum() for value in found.values()))
    start = {name: model.device.get(getattr(model.params, name)).copy() for name in found}

    def loss_at(sign):
        model.set_parameters((name, np.float32(value + sign * 1e-3 * found[name] / size))
                             for name, value in start.items())
        gradients(model, *given)
        return model.verdict().loss

    yield "the gradient's norm", size, (loss_at(1) - loss_at(-1)) / 2e-3, 2e-3
    for level in (1, 2):
        again = dropped_model(device_name, Llama3, flags=("--recompute", f"{level}"))
        for name, value in gradients(again, *given).items():
            yield f"--recompute {level}: d{name}", value, found[name], (
                EXACT if device_name != "cuda" else 1e-5)
    sites = []
    model.drop = lambda kernel, out, inp, site: sites.append(site)
    gradients(model, *given)
    check("each site forward, and backward", sites == [*range(2 * c.L + 1),
                                                       *reversed(range(2 * c.L + 1))], sites)


def test_ranks_and_micro_batches(device_name):
    """Two ranks with two micro-batches drop what one process drops in four."""
    given = batches(4)
    alone = dropped_model(device_name)
    alone.micros = 4
    expected = gradients(alone, *given)
    total = {}
    for rank in range(2):
        model = dropped_model(device_name, rank=rank, count=2)
        model.micros = model.sharing = 2
        for name, value in gradients(model, *given[rank::2]).items():
            total[name] = total.get(name, 0) + value
    for name, value in expected.items():
        yield f"d{name}", total[name], value, 1e-6


@pytest.mark.parametrize("program, model, flags", (
    (TRAINER, TINY, ("--recompute", 2)), (LLAMA, FIXTURES / "llama_gqa.bin", ()),
    # whose kernels take long to compile for a CPU
    pytest.param(TRAINER, TINY, ("--dtype", "fp8"), marks=pytest.mark.longest)))
def test_runs(device_name, folder, program, model, flags):
    """A stopped run that resumes, with --dropout from its folder, ends with the same bytes. Another
    seed draws other masks."""
    whole, losses = check_feature(device_name, folder, "dropped", ("--dropout", 0.5), "-e", model,
                                  *flags, program=program)
    check("another seed", losses[3] not in losses[:3], losses)
    again = trained(whole, "-y", 1, "-x", 4, "--seed", 43, device=place_of(device_name),
                    program=program)
    check("another seed: a warning", "WARNING" in again and "--seed" in again, again)


def test_steps_again():
    """A step that is replayed, or looked at again, drops what it dropped the first time."""
    flags = parse_flags("", order.FLAGS, ("--dropout", "0.5", "--seed", "7"))
    Run, Model = order.attach(flags, Training, GPT2)
    training = Run(Model.flags)
    model = dropped_model("emulated")
    training.set_state(model, {"step": 2})
    check("--replay: step 3", model.adam.counter.tolist() == [7, 3], model.adam.counter)
    model.count_step(9)  # as if later steps had been queued
    training.model = model
    queued = SimpleNamespace(number=5, batches=SimpleNamespace(packed=[], places=[]))
    verdict = SimpleNamespace(loss=np.nan, norm=np.nan)
    check_refusal("step 5", "the loss of step 5 is nan", training.give_up, queued, verdict)
    check("its counter", model.adam.counter.tolist() == [7, 5], model.adam.counter)
    model.count_step(9)
    training.explain_outlier(queued, "z-scores")
    check("an outlier's", model.adam.counter.tolist() == [7, 5], model.adam.counter)


def test_refused():
    """A share of 1 would leave nothing; with 0 the model is the plain one."""
    status, _, error = call("--dropout", "1")
    check("--dropout 1", status and "expected at least 0 and below 1" in error, error)
    names = [kind.__name__ for kind in model_class(GPT2, "--dropout", "0").__mro__]
    check("--dropout 0", "Dropped" not in names, names)
