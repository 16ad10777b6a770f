"""Test label smoothing, --label-smoothing, against its formula in float64."""
import functools
import itertools
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.label_smoothing import SOURCE
from dev.lab import gpt2_numpy_backward
from dev.lab.formulas import cross_entropy
from dev.tests.checks import check, finite_difference, normal, words
from dev.tests.models import for_numpy, gradients, in_each_order, model_class, on_device
from dev.tests.trainings import check_feature
from train_gpt2 import to_float

SIZES = dict(maxT=1024, V=259, L=1, NH=1, C=64, Vp=320)


@functools.cache
def device_for(name, dtype):
    """A device. Emulated in bf16, it has only the kernel that is tested so: it compiles faster."""
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
    """The loss and the gradients are NumPy's, of all micro-batches together, and forward() returns
    the usual loss."""
    c, (B, T), E, device = Config(**SIZES), (2, 6), 0.3, device_for(device_name, "fp32")
    batches = [(words(c.V, B, T), words(c.V, B, T)) for _ in range(2)]
    plain, smooth = (model_class(GPT2, *flags)(c, device, B, T)
                     for flags in ((), ("--label-smoothing", E)))
    for each in (plain, smooth):
        each.set_parameters(draw_parameters(c, 1))
    for batch in batches:
        usual = plain.forward(*batch)
        check("forward() has the usual loss", smooth.forward(*batch) == usual, usual)
    smooth.micros = 2
    found = gradients(smooth, *batches)

    def loss(targets, logits):
        return smoothed(E, targets, logits)[0].mean()

    def dloss(targets, logits):
        return smoothed(E, targets, logits)[1] / len(targets)

    p = for_numpy(draw_parameters(c, 1), c.V)
    with mock.patch.multiple(gpt2_numpy_backward, mean_loss=loss, dmean_loss=dloss):
        wish = [gpt2_numpy_backward.loss_and_gradients(p, *rows, c.NH)
                for batch in batches for rows in zip(*batch)]
    yield "loss", np.float32(smooth.verdict().loss), np.mean([loss for loss, _ in wish]), 1e-6
    for name, value in found.items():
        mean = sum(getattr(each, name) for _, each in wish) / len(wish)
        yield f"d{name}", value[: len(mean)], mean, 1e-5


def test_command_line(device_name, folder):
    """In FP8, with recompute and micro-batches: a stopped run that resumes, with the flag restored
    from its folder, ends with the same bytes. Without the flag, the first step has another loss,
    and the validation before it the same.
    """
    check_feature(device_name, folder, "smoothed", ("--label-smoothing", 0.5), "--dtype", "fp8",
                  "--recompute", 2)
