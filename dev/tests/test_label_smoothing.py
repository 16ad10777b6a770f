"""Test label smoothing, --label-smoothing, against its formula in float64."""
import functools
import itertools

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.cpu.emulated import Emulated
from dev.features.devices import make_device
from dev.features.label_smoothing import SOURCE
from dev.features.seams import GPT2
from dev.lab.formulas import cross_entropy
from dev.lab.ladder import f32
from dev.tests.checks import check, finite_difference, normal, words
from dev.tests.models import gradients, in_each_order, model_class, on_device
from dev.tests.trainings import check_resumed, place_of, token_files, trained
from train_gpt2 import to_float

SIZES = dict(maxT=1024, V=259, L=1, NH=1, C=64, Vp=320)


@functools.cache
def device_for(name, dtype):
    """A device; on a CPU in bf16 with the one kernel that is tested in it, which compiles
    faster."""
    if (name, dtype) == ("emulated", "bf16"):
        return Emulated(dtype, Config(**SIZES), [SOURCE], only=("smoothed_classifier",))
    return make_device(name, dtype, Config(**SIZES), beside=[SOURCE])


def smoothed(E, targets, x):
    """The losses of logits x (N,V) in float64, straight from the definition, and their gradient."""
    logs = x - x.max(axis=1, keepdims=True)
    logs = logs - np.log(np.exp(logs).sum(axis=1, keepdims=True))
    t = np.full(x.shape, E / x.shape[1])
    t[np.arange(len(x)), targets] += 1 - E
    return -(t * logs).sum(axis=1), np.exp(logs) - t


def test_formula():
    """The formula's gradient against finite differences; without smoothing it gives the usual
    loss."""
    targets = words(11, 5)
    for E in (0, 0.1, 0.7):
        of = functools.partial(smoothed, E, targets)
        yield finite_difference(f"E={E}", lambda x, of=of: of(x)[0],
                                lambda dout, x, of=of: [dout[:, None] * of(x)[1]],
                                3 * normal(5, 11))
    x = normal(5, 11)
    yield "E=0", smoothed(0, targets, x)[0], cross_entropy(targets, x), 1e-14


def test_kernel(device_name):
    """Losses and gradients of ordinary logits, of rows that are almost certain (and right, or
    wrong), and of rows far from 0. The padding is NaN before and 0 after. The threads of a block
    run in several orders."""
    def work(device, logits, losses, *args):
        logits = on_device(device, logits)
        device.launch("smoothed_classifier", len(logits), logits, losses, *args)
        return device.get(losses), device.get(logits)

    sizes = (1, 1, 1), (3, 11, 13), (5, 257, 384), (2, 1027, 1027), (4, 3000, 3008)
    for dtype in ("fp32", "bf16"):
        device = device_for(device_name, dtype)
        for (N, V, Vp), E in itertools.product(sizes, (0, 0.1, 0.99)):
            x, targets = normal(N, V), words(V, N)
            x[0, targets[0]] += 1e4  # certain and right
            if N > 2:
                x[1, (targets[1] + 1) % V] += 1e4  # certain and wrong
                x[2] += 1e3
            padded = np.full((N, Vp), np.nan, np.float32)
            padded[:, :V] = x
            padded = padded if device.real == np.float32 else to_bf16(padded)
            x = to_float(padded)[:, :V].astype(np.float64)  # the stored values
            args = (on_device(device, np.zeros(N, np.float32)), on_device(device, targets), 0.25, E,
                    N, V, Vp)
            loss, gradient = smoothed(E, targets, x)
            wish = np.zeros((N, Vp))
            wish[:, :V] = 0.25 * gradient
            for order, (found_loss, found) in in_each_order(device, work, device, padded, *args):
                name = f"{device.dtype} N={N} V={V} Vp={Vp} E={E} {order}"
                # Relative to each row.
                yield f"{name} losses", found_loss / (1 + loss), loss / (1 + loss), 1e-6
                yield f"{name} gradient", found, wish
                check(f"{name} padding", not to_float(found)[:, V:].any())


def test_model(device_name):
    """The model's gradients are those of the smoothed loss of all micro-batches together, and
    forward() returns the usual loss."""
    c, (B, T), E, device = Config(**SIZES), (2, 6), 0.3, device_for(device_name, "fp32")
    batches = [(words(c.V, B, T), words(c.V, B, T)) for _ in range(2)]
    plain, smooth = (model_class(GPT2, *flags)(c, device, B, T)
                     for flags in ((), ("--label-smoothing", str(E))))
    for each in (plain, smooth):
        each.set_parameters(draw_parameters(c, 1))
    wish = 0
    for tokens, targets in batches:
        usual = plain.forward(tokens, np.zeros_like(tokens))
        logits = to_float(device.get(plain.acts.logits))[:, : c.V].astype(np.float64)
        wish += smoothed(E, targets.reshape(-1), logits)[0].mean() / 2
        usual = plain.forward(tokens, targets)
        check("forward() has the usual loss", smooth.forward(tokens, targets) == usual, usual)
    smooth.micros = 2
    found = gradients(smooth, *batches)
    yield "the mean loss", np.float32(smooth.verdict().loss), wish, 1e-6

    def loss_at(sign, step):
        smooth.set_parameters((name, f32(value + sign * step[name]))
                              for name, value in draw_parameters(c, 1))
        total = 0
        for tokens, targets in batches:
            smooth.forward(tokens, np.zeros_like(tokens))
            logits = to_float(device.get(smooth.acts.logits))[:, : c.V].astype(np.float64)
            total += smoothed(E, targets.reshape(-1), logits)[0].mean() / 2
        return total

    size = np.sqrt(sum((value.astype(np.float64)**2).sum() for value in found.values()))
    # Downhill, where the loss changes most.
    step = {name: 1e-3 * value / size for name, value in found.items()}
    difference = (loss_at(1, step) - loss_at(-1, step)) / 2e-3
    yield "the gradient's norm, by finite differences", size, difference, 1e-3


def test_command_line(device_name, folder):
    """In FP8, with recompute and micro-batches: a stopped run that resumes, with the flag restored
    from its folder, ends with the same bytes. Without the flag, the first step has another loss,
    and the validation before it the same.
    """
    token_files(folder)
    place = place_of(device_name)

    whole = folder / "whole"
    flags = "-t", 32, "-d", 128, "-v", 3, "-m", 1, "--dtype", "fp8", "--recompute", 2
    text = trained(whole, *flags, "-x", 4, "-n", 2, "--label-smoothing", 0.5, device=place)
    _, again = check_resumed("smoothed", whole,
                             lambda copy: trained(copy, "-y", 1, device=place), 4)
    check("no warning of another flag", "--label-smoothing" not in again, again)
    plain = trained(folder / "plain", *flags, "-x", 1, device=place)
    first, last = ([next(line for line in output.splitlines() if line.startswith(what))
                    for output in (text, plain)] for what in ("val loss", "step    1/"))
    check("the same validation before the first step", first[0] == first[1], first)
    losses = [float(line.split()[4]) for line in last]
    check("another loss of the first step", abs(losses[0] - losses[1]) > 1e-4, losses)
