"""GPT-2's training in PyTorch, with the trainer's flags: the same weights, data, schedule, clipping
and update.

dev/tests/test_training.py compares the trainer with losses_of, and on_cpu.py times such steps. The
model is the one of dev/bench/torch_reference.py, with PyTorch's own attention. It shares no kernel,
gradient or update with the trainer, only the inputs: the initial weights, batches, flags and
learning rates, each of which has tests of its own.
"""
import numpy as np
import torch

from dev.bench.torch_reference import GPT2, fused_attention
from dev.common.config import count_tokens, draw_parameters, read_parameters
from dev.common.files import paths_of
from dev.features.base import Training
from dev.features.data_loader import FilesLoader
from dev.features.schedule import Scheduled
from train_gpt2 import to_float


def parameters_of(c, tensors, place):
    """{name: [one parameter per layer, or just one]}, in fp32, from the (name, array) that
    read_parameters or draw_parameters yields. wte's padding is left out."""
    weights = {}
    for row, (name, values) in zip(c.parameter_table(), tensors):
        values = to_float(np.asarray(values))
        values = values if row.layers else values[None, : c.V] if name in c.PADDED else values[None]
        weights[name] = [torch.nn.Parameter(torch.tensor(value, device=place)) for value in values]
    return weights


def make_adamw(c, weights, flags, **more):
    """torch.optim.AdamW, with weight decay for the tensors that the trainer decays."""
    groups = [dict(params=[p for row in c.parameter_table() if row.decay == decays
                           for p in weights[row.name]], weight_decay=flags.weight_decay * decays)
              for decays in (True, False)]
    return torch.optim.AdamW(groups, betas=(flags.beta1, flags.beta2), eps=flags.eps, **more)


def model_of(c, weights):
    """(the loss as a function of the weights, tokens and targets; the weights as it takes them) of
    what parameters_of returns."""
    shape = GPT2(c.maxT, c.V, c.L, c.NH, c.C, c.V)  # without padding

    def loss_of(weights, x, y):
        return shape.forward(weights, x, y, fused_attention)[1]

    return loss_of, {row.name: weights[row.name] if row.layers else weights[row.name][0]
                     for row in c.parameter_table()}


def clip_gradients(parameters, clip):
    """Scale the gradients down to a norm of clip, unless clip is 0. Returns their norm before
    that."""
    # In float64: on a CPU, PyTorch's fp32 sum of this many squares is off by some 5e-4.
    norm = torch.stack([p.grad.double().square().sum() for p in parameters]).sum().sqrt().item()
    if 0 < clip < norm:
        for p in parameters:
            p.grad.mul_(clip / norm)
    return norm


def rate_of(step, steps, flags):
    """The trainer's learning rate of a step."""
    kinds = (Training,) if flags.schedule == "cosine" else (Scheduled, Training)
    rates = type("Rates", kinds, {})(flags)
    rates.steps = steps
    return rates.learning_rate(step)


def losses_of(c, flags, from_file):
    """Train on a CPU in fp32, with all flags of the trainer's given: ([(loss, norm) of each step],
    [validation losses]). from_file: flags.model is a checkpoint."""
    B, T = flags.batch_size, flags.seq_len or min(c.maxT, 64)  # on a CPU
    train_data = FilesLoader(flags.val_data if flags.overfit else flags.train_data, B, T, c,
                             0 if flags.overfit else flags.shuffle)
    # sequences, as the trainer's
    fits = (min(count_tokens(path, c)[0] for path in paths_of(flags.val_data)) - 1) // T
    val_data = FilesLoader(flags.val_data, max(1, min(B, fits)), T, c, False)
    weights = parameters_of(c, read_parameters(flags.model, c) if from_file else
                            draw_parameters(c, flags.seed), "cpu")
    parameters = [p for of_name in weights.values() for p in of_name]
    optimizer, micros = make_adamw(c, weights, flags), (flags.total_batch or B * T) // (B * T)
    loss_of, weights = model_of(c, weights)
    steps, val_losses = [], []

    def loss_of_next(data):
        x, y = (torch.from_numpy(part.astype(np.int64)) for part in data.next_batch())
        return loss_of(weights, x, y)

    for done in range(flags.steps + 1):
        if done % flags.val_every == 0 or done == flags.steps:
            val_data.open(0)
            count = val_data.per_epoch
            if flags.val_batches >= 0:
                count = min(count, flags.val_batches)
            with torch.no_grad():
                val_losses.append(sum(loss_of_next(val_data).item() for _ in range(count)) / count)
        if done == flags.steps:
            return steps, val_losses
        for group in optimizer.param_groups:
            group["lr"] = float(rate_of(done, flags.steps, flags))
        optimizer.zero_grad()
        if flags.overfit:
            train_data.open(0)
        losses = [loss_of_next(train_data) for _ in range(micros)]
        (sum(losses) / micros).backward()
        steps.append((sum(losses).item() / micros, clip_gradients(parameters, flags.clip)))
        optimizer.step()
