"""Dump what PyTorch computes for GPT-2 or Llama 3, for the tests to compare with.

    python -m dev.bench.torch_reference PREFIX [flags]                   # GPT-2
    python -m dev.bench.torch_reference PREFIX --llama [flags]           # Llama 3
    python -m dev.bench.torch_reference PREFIX --transformers [flags]    # a folder of transformers

For a model of any shape with random weights, and for one batch of random tokens, this writes

    PREFIX.bin              checkpoint: magic 20240326, version 3, the shape, the weights
    PREFIX_debug_state.bin  magic 20240327, version 2, B, T; then x, y (B,T) int32, logits (B,T,V),
                            the loss, and the gradient of each weight in the checkpoint's order, all
                            fp32
    PREFIX_losses.json      the loss before each of ten AdamW steps on that batch, and the
                            hyperparameters

With --checkpoint FILE the weights come from FILE, and only the last two are written. With --autocast
the last one also has the errors of PyTorch's own bf16: see autocast_errors. --transformers writes a
folder and its logits instead: see torch_gpt2.write_folder.

Llama's files have the format of llm.c's branch llama3. The checkpoint has magic 20240803, version 3,
and a second header of 256 fp32. The debug state has magic 20240803, version 3, B, T and k. It ends
with k = 10 losses and k norms of the gradient, from the ten AdamW steps, which do not clip. Llama has
no biases, so they are zeros in both files. In a tied model's files lm_head repeats wte, and its
gradient repeats wte's, which is the sum over both uses.

Weights are rounded to fp32 first, so that the checkpoint holds them exactly. Everything else is
computed in float64 and rounded to fp32 when it is written. So any difference is an error of the code
under test, and its size means something. This program shares only the parser of flags and the
replacing of files with the trainer; an error in the model would have to be made twice to go unseen.
"""
import json
import math
import os

import numpy as np
import torch

from dev.bench import torch_gpt2, torch_llama
from dev.bench.torch_gpt2 import check, header, write_folder
from dev.common.flags import argument, parse_flags
from prepro_tinyshakespeare import replace_file, run_main

STEPS = 10
MODEL_FLAGS = [
    (None, "--layers", "count", 12, "L"),
    (None, "--heads", "count", 12, "NH; the head size HS is C / NH"),
    (None, "--channels", "count", 768, "C, a multiple of 32"),
    (None, "--vocab", "count", 50257, "V"),
    (None, "--max-seq-len", "count", 1024, "maxT, the rows of GPT-2's wpe"),
    (None, "--std", "rate", 0.02, "standard deviation of the random weights; a tiny model tells "
     "more with a larger one"),
]
RUN_FLAGS = [
    (None, "--batch", "count", 4, "B"),
    (None, "--seq-len", "count", 64, "T, at most maxT"),
    (None, "--seed", "count or 0", 1337, "of the tokens and the weights"),
    (None, "--learning-rate", "rate", 1e-4, "of AdamW"),
    (None, "--beta1", "share", 0.9, "decay of AdamW's first moment"),
    (None, "--beta2", "share", 0.999, "decay of AdamW's second moment"),
    (None, "--eps", "eps", 1e-8, "added to the root of AdamW's second moment"),
    (None, "--weight-decay", "rate", 0.01, "of matrices and embeddings"),
]
FLAGS = [
    (None, "prefix", argument("PREFIX"), None, "what the names of the files begin with"),
    (None, "--llama", "switch", 0, "Llama 3 instead of GPT-2"),
    (None, "--transformers", "switch", 0, "a folder of transformers, and logits; GPT-2 only"),
    (None, "--checkpoint", "name", None, "take shape and weights from this version-3 checkpoint"),
    (None, "--attention", ("softmax", "relu"), "softmax", "GPT-2's"),
    (None, "--autocast", "switch", 0, "also measure the errors of PyTorch's autocast to bf16"),
    *MODEL_FLAGS, *torch_gpt2.FLAGS, *torch_llama.FLAGS, *RUN_FLAGS]
HYPERPARAMETERS = ["attention", "learning_rate", "beta1", "beta2", "eps", "weight_decay"]


def key_of(row):
    return row[1].removeprefix("--").replace("-", "_")


def read_flags(arguments):
    """The flags, with defaults. Raises UserError if one was given that has no meaning here."""
    flags = parse_flags(__doc__, FLAGS, arguments, defaults=False)

    def given(table):
        return " ".join(row[1] for row in table if getattr(flags, key_of(row)) is not None)

    extra = given([*MODEL_FLAGS, *torch_gpt2.FLAGS, *torch_llama.FLAGS])
    check(not (flags.checkpoint and extra), f"--checkpoint brings its own model: leave out {extra}")
    extra = given(torch_gpt2.FLAGS if flags.llama else torch_llama.FLAGS)
    check(not extra, f"{extra} does not go {'with' if flags.llama else 'without'} --llama")
    check(not (flags.llama and flags.attention == "relu"), "--llama: expected --attention softmax")
    if flags.transformers:
        names = "llama", "checkpoint", "autocast", "attention", *map(key_of, RUN_FLAGS[3:])
        extra = given([row for row in FLAGS if key_of(row) in (*names, "padded_vocab")])
        check(not extra, f"{extra} does not go with --transformers")
    for row in FLAGS:
        if getattr(flags, key_of(row)) is None:
            setattr(flags, key_of(row), row[3])
    return flags


# ---- Weights, and their files


def as_bytes(tensor, dtype="<f4"):
    return tensor.detach().numpy().astype(dtype).tobytes()


def write(path, *chunks):
    replace_file(path, chunks)
    print(f"wrote {path}, {os.path.getsize(path)} bytes")


def random_weights(architecture, shape, std, generator):
    """GPT-2's initial weights, except that no bias is 0 and no norm weight is 1: these would hide a
    bias that is never added or a norm that is never scaled. Projections into the residual stream
    have std / sqrt(2L), since 2L of them add up in it."""
    mean_std = {"weight": (0, std), "residual": (0, std / math.sqrt(2 * shape.L)),
                "bias": (0, std), "norm": (1, std)}
    weights = {}
    for name, dims, kind in architecture.tensors(shape):
        if kind != "absent":
            mean, deviation = mean_std[kind]
            noise = torch.randn(dims, generator=generator, dtype=torch.float64)
            weights[name] = (mean + deviation * noise).float().double()
    weights["wte"][shape.V :] = 0
    return weights


def read_checkpoint(path, architecture):
    """(shape, float64 weights by name) of a version-3 checkpoint."""
    data = np.fromfile(path, "<i4")
    found, expected = data[:2].tolist(), list(architecture.CHECKPOINT)
    check(found == expected, f"{path}: begins with {found}, expected {expected}, magic and version "
          "of an fp32 checkpoint")
    check(data.size >= 512, f"{path}: the file is truncated")
    shape = architecture.shape_of_file(data)
    architecture.check_shape(shape)
    rows, start = architecture.tensors(shape), len(architecture.headers(shape))
    sizes = [math.prod(dims) for _, dims, _ in rows]
    found, expected = os.path.getsize(path), start + 4 * sum(sizes)
    check(found == expected, f"{path}: {found} bytes, expected {expected} for {shape}")
    values = torch.from_numpy(data[start // 4 :].view("<f4")).split(sizes)
    return shape, {name: value.double().view(dims)
                   for (name, dims, kind), value in zip(rows, values) if kind != "absent"}


def for_file(values, architecture, shape):
    """The bytes of weights or gradients in a file. A tied lm_head repeats wte, and biases that the
    model does not have are zeros."""
    for name, dims, _ in architecture.tensors(shape):
        value = values.get(name)
        if value is None:
            value = values["wte"] if name == "lm_head" else torch.zeros(dims)
        yield as_bytes(value)


# ---- Ten steps


def autocast_errors(forward, weights, shape, x, y, kind, truth):
    """{tensor: relative error, by Frobenius norm} of PyTorch's mixed precision: weights in fp32, the
    forward pass and the loss under autocast to bfloat16, on a GPU if there is one. truth: "loss",
    "logits" and gradients in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: weight.detach().float().to(device).requires_grad_()
               for name, weight in weights.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        logits, loss = forward(weights, shape, x.to(device), y.to(device), kind)
    loss.backward()
    found = {"loss": loss, "logits": logits}
    found |= {name: weight.grad for name, weight in weights.items()}
    errors = {name: (found[name].cpu().double() - value).norm() / value.norm()
              for name, value in truth.items()}
    return {name: float(f"{error:.3g}") for name, error in errors.items()}


def main(arguments=None):
    flags = read_flags(arguments)
    architecture = torch_llama if flags.llama else torch_gpt2
    if flags.checkpoint:
        shape, weights = read_checkpoint(flags.checkpoint, architecture)
    else:
        shape = architecture.shape_of_flags(flags)
        architecture.check_shape(shape)
    B, T = flags.batch, flags.seq_len
    check(T <= shape.maxT, f"--seq-len {T}: expected at most maxT, which is {shape.maxT}")
    if flags.transformers:
        return write_folder(flags.prefix, shape, flags.std, flags.seed, B, T)

    # Tokens are drawn first, so that a seed gives the same batch with and without --checkpoint.
    generator = torch.Generator().manual_seed(flags.seed)
    tokens = torch.randint(shape.V, (B, T + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    if not flags.checkpoint:
        weights = random_weights(architecture, shape, flags.std, generator)
        write(f"{flags.prefix}.bin", architecture.headers(shape),
              *for_file(weights, architecture, shape))

    decayed = {name: kind in ("weight", "residual")
               for name, _, kind in architecture.tensors(shape)}
    groups = [{"params": [w.requires_grad_() for name, w in weights.items()
                          if decayed[name] == decay], "weight_decay": rate}
              for decay, rate in ((True, flags.weight_decay), (False, 0.0))]
    optimizer = torch.optim.AdamW(groups, lr=flags.learning_rate, betas=(flags.beta1, flags.beta2),
                                  eps=flags.eps)
    losses, norms, autocast = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits, loss = architecture.forward(weights, shape, x, y, flags.attention)
        loss.backward()
        losses.append(loss.detach())
        gradients = {name: weight.grad for name, weight in weights.items()}
        norms.append(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        if step == 0:
            truth = {"loss": loss.detach(), "logits": logits.detach()}
            truth |= {name: gradient.clone() for name, gradient in gradients.items()}
            if flags.autocast:
                autocast["autocast_errors"] = autocast_errors(
                    architecture.forward, weights, shape, x, y, flags.attention, truth)
        optimizer.step()
    write(f"{flags.prefix}_debug_state.bin",
          header(*architecture.STATE, B, T, *([STEPS] if flags.llama else [])),
          as_bytes(x, "<i4"), as_bytes(y, "<i4"), as_bytes(truth["logits"]),
          as_bytes(truth["loss"]), *for_file(truth, architecture, shape),
          *([as_bytes(torch.stack(losses)), as_bytes(torch.stack(norms))] if flags.llama else []))
    report = {name: getattr(flags, name) for name in HYPERPARAMETERS}
    report |= {"losses": [round(loss.item(), 9) for loss in losses]} | autocast
    write(f"{flags.prefix}_losses.json", json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    run_main(main)
