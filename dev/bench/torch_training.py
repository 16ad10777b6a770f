"""Train GPT-2 with PyTorch and the trainer's flags: same weights, data, schedule, clipping and
update.

    python train_gpt2.py -d 16384 -u 40 -x 200 -v 0 -s 0 --dtype fp32 -o log_ours
    python -m dev.bench.torch_training -d 16384 -u 40 -x 200 -v 0 -s 0 --dtype fp32 -o log_torch
    python -m dev.tools.plot log_ours log_torch

To compare the mean loss of the last 50 steps:

    for run in log_ours log_torch; do grep -o 'trl:[0-9.]*' $run/main.log | tail -50 |
        awk -F: -v run=$run '{sum += $2} END {print run, sum / NR}'; done

-o gets a main.log and no checkpoint. The differences:

    flags that change no step, such as -s and --graph, are ignored
    flags that change a step but are not implemented here, such as --attention relu, are refused
    bf16 is autocast: parameters and the residual stream in fp32, products and attention in bfloat16

The model is the one of dev/bench/torch_reference.py, with PyTorch's own attention. It shares no
kernel, gradient or update with the trainer, only the inputs: the initial weights, batches, flags
and learning rates, each of which has tests of its own.
"""
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from dev.bench.torch_reference import GPT2, fused_attention
from dev.common.config import Config, count_tokens, draw_parameters, read_parameters
from dev.common.files import paths_of
from dev.common.flags import parse_flags, with_values
from dev.common.program import run_main
from dev.data.first_text import data_paths
from dev.features.base import Training
from dev.features.data_loader import FilesLoader, check_pair
from dev.features.order import table_of_flags, with_defaults
from dev.features.schedule import Scheduled
from train_gpt2 import FLAGS, UserError, to_float

OWN_FLAGS = [(None, "--compile", "switch", 0, "1: with torch.compile")]
FOLLOWED = {"train_data", "val_data", "model", "output", "batch_size", "total_batch", "seq_len",
            "learning_rate", "schedule", "warmup", "final_fraction", "steps", "val_every",
            "val_batches", "weight_decay", "beta1", "beta2", "eps", "clip", "overfit", "shuffle",
            "seed", "device", "dtype", "compile"}
IGNORED = {"sample_every", "sample_tokens", "checkpoint_every", "checkpoints_kept",  # they change
           "checkpoints_major", "hellaswag", "plain", "graph", "nvtx", "recompute"}  # no step


# ---- The model


def parameters_of(c, tensors, place):
    """{name: [one parameter per layer, or just one]}, in fp32, from the (name, array) that
    read_parameters or draw_parameters yields. wte's padding is left out."""
    weights = {}
    for row, (name, values) in zip(c.parameter_table(), tensors):
        values = to_float(np.asarray(values))
        values = values if row.layers else values[None, : c.V] if name in c.PADDED else values[None]
        weights[name] = [torch.nn.Parameter(torch.tensor(value, device=place)) for value in values]
    return weights


# ---- A step


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


def train(c, weights, train_data, val_data, steps, place, flags, log):
    """The loop. Lines for main.log go to log. Raises UserError if the loss is not finite."""
    parameters = [p for of_name in weights.values() for p in of_name]
    optimizer = make_adamw(c, weights, flags)
    micros = flags.total_batch // (train_data.B * train_data.T)
    loss_of, weights = model_of(c, weights)
    if flags.compile:
        loss_of = torch.compile(loss_of)

    def loss_of_next(data):
        x, y = (torch.from_numpy(part.astype(np.int64)).to(place) for part in data.next_batch())
        with torch.autocast(place, torch.bfloat16, enabled=flags.dtype == "bf16"):
            return loss_of(weights, x, y)

    for done in range(steps + 1):
        if flags.val_every and (done % flags.val_every == 0 or done == steps):
            val_data.open(0)
            count = val_data.per_epoch
            if flags.val_batches >= 0:
                count = min(count, flags.val_batches)
            with torch.no_grad():
                val_loss = sum(loss_of_next(val_data).item() for _ in range(count)) / count
            print(f"val loss {val_loss:.6f}", flush=True)
            print(f"s:{done} tel:{val_loss:.4f}", file=log)
        if done == steps:
            return

        begin, losses, rate = time.perf_counter(), [], float(rate_of(done, steps, flags))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        if flags.overfit:
            train_data.open(0)
        for _ in range(micros):
            loss = loss_of_next(train_data)
            (loss / micros).backward()
            losses.append(loss.detach())
        norm = clip_gradients(parameters, flags.clip)
        loss = torch.stack(losses).double().mean().item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(f"step {done + 1}/{steps}: the loss is {loss} and the norm of its "
                            f"gradient {norm}; try a smaller -l, or look at the data")
        optimizer.step()
        if place == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        print(f"step {done + 1:4d}/{steps} | loss {loss:.6f} | norm {norm:7.4f} | lr {rate:.2e} | "
              f"{1e3 * seconds:8.2f} ms | {flags.total_batch / seconds:9,.0f} tok/s", flush=True)
        print(f"s:{done} trl:{loss:.4f} lr:{rate:.6f} norm:{norm:.2f}", file=log)


# ---- Flags, and main


def check_followed(flags, table):
    """Raise UserError if a flag that is neither followed nor ignored differs from its default."""
    for letter, name, _, default, *_ in table:
        key = name.removeprefix("--").replace("-", "_")
        if key not in FOLLOWED | IGNORED and getattr(flags, key) not in (None, default):
            raise UserError(f"{letter or name} {getattr(flags, key)}: PyTorch's twin does not do "
                            "that; leave it out of both runs")


def open_log(folder):
    """A new folder/main.log, or, without a folder, the null device. Raises UserError."""
    path = Path(folder) / "main.log" if folder else Path(os.devnull)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "x" if folder else "w", buffering=1)
    except OSError as e:
        raise UserError(f"-o {folder}: {path} could not be written ({e.strerror}); "
                        "give -o a new folder") from None


def rate_of(step, steps, flags):
    """The trainer's learning rate of a step."""
    kinds = (Training,) if flags.schedule == "cosine" else (Scheduled, Training)
    rates = type("Rates", kinds, {})(flags)
    rates.steps = steps
    return rates.learning_rate(step)


def main(arguments=None):
    """Everything from the flags to the last line of main.log. Raises UserError."""
    trainers, _ = table_of_flags(FLAGS, Config)
    table = [*trainers, *OWN_FLAGS]
    flags = parse_flags("Train with PyTorch, with train_gpt2.py's flags.", table, arguments,
                        defaults=False)
    check_followed(flags, table)
    place = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place == "emulated":
        raise UserError("--device emulated: PyTorch has no such thing; take cpu")
    if place == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU; check nvidia-smi, or train with "
                        "--device cpu")
    flags, _ = with_defaults(with_values(flags, device=place), table, Config)
    if flags.dtype == "tf32" and place == "cpu":
        raise UserError("--dtype tf32: PyTorch has it only on a GPU; take fp32 or bf16, or "
                        "--device cuda")
    torch.set_float32_matmul_precision("high" if flags.dtype == "tf32" else "highest")

    name = flags.model
    from_file = Path(name).is_file() or name.endswith(".bin")
    c = Config.from_file(name) if from_file else Config.from_descriptor(name)
    longest = min(c.maxT, 64 if place == "cpu" else 1024)  # as the trainer
    B, T = flags.batch_size, flags.seq_len or longest
    if T > c.maxT:
        raise UserError(f"-t {T}: expected at most the model's {c.maxT} positions")
    train_path, val_path = paths = data_paths(flags.train_data, flags.val_data)
    check_pair((flags.train_data, flags.val_data), paths)
    train_data = FilesLoader(val_path if flags.overfit else train_path, B, T, c,
                             0 if flags.overfit else flags.shuffle)
    val_data = None
    if flags.val_every:
        # sequences, as the trainer's
        fits = (min(count_tokens(path, c)[0] for path in paths_of(val_path)) - 1) // T
        val_data = FilesLoader(val_path, max(1, min(B, fits)), T, c, False)
    flags = with_values(flags, total_batch=flags.total_batch or B * T)
    if flags.total_batch % (B * T):
        raise UserError(f"-d {flags.total_batch}: expected a multiple of B*T = {B * T}, a "
                        "micro-batch's tokens")
    epoch = max(1, train_data.total // flags.total_batch)
    steps = epoch if flags.steps in (None, -1) else flags.steps
    print(f"PyTorch {torch.__version__} on {place}, {flags.dtype}; {name}, {c}; {train_path}; "
          f"B={B} T={T}, {flags.total_batch:,} tokens a step, {steps} steps")
    tensors = read_parameters(name, c) if from_file else draw_parameters(c, flags.seed)
    weights = parameters_of(c, tensors, place)
    with open_log(flags.output) as log:
        train(c, weights, train_data, val_data, steps, place, flags, log)


if __name__ == "__main__":
    run_main(main)
