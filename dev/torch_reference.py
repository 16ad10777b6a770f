"""Dump what GPT-2 should compute, as plain PyTorch computes it, for the tests to compare with.

    python dev/torch_reference.py PREFIX [flags]

writes, for a model of any shape with random weights and one batch of random tokens,

    PREFIX.bin              checkpoint: magic 20240326, version 3, the shape, the weights
    PREFIX_debug_state.bin  magic 20240327, version 2, B, T; then x, y (B, T) int32, logits (B, T, V), the loss,
                            and the gradient of every weight in the checkpoint's order, all fp32
    PREFIX_losses.json      the loss before each of ten AdamW steps on that batch, and the hyperparameters

With --checkpoint FILE the weights come from FILE, and only the last two files are written. With --autocast the last
file also says how far PyTorch's own bf16 is from the truth: see autocast_errors. Every header is 256 little-endian
int32; tensors are little-endian and C-contiguous.

The weights are rounded to fp32 before anything is computed, so the checkpoint holds them exactly. Everything after
that is float64, and is rounded to fp32 only as it is written: the truth should be more exact than what it judges,
so that a difference is the fault of the code under test and its size means something.

The model is GPT-2 (Radford et al. 2019): pre-norm blocks, GELU in its tanh form, a head tied to wte. No code is
shared with the trainer; an error would have to be made twice to go unseen.
"""

import argparse
import json
import math
import os
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

CHECKPOINT_MAGIC, CHECKPOINT_VERSION = 20240326, 3
STATE_MAGIC, STATE_VERSION = 20240327, 2
STEPS = 10

# Flag: default, help. The first table describes new weights, so none of it goes with --checkpoint.
MODEL_FLAGS = {
    "layers": (12, "L"),
    "heads": (12, "NH; the head size HS is C / NH"),
    "channels": (768, "C, a multiple of 32"),
    "vocab": (50257, "V"),
    "padded_vocab": (None, "Vp, the rows of wte (default: V rounded up to a multiple of 128)"),
    "max_seq_len": (1024, "maxT, the rows of wpe"),
    "std": (0.02, "standard deviation of the random weights; a tiny model tells more with a larger one"),
}
RUN_FLAGS = {
    "batch": (4, "B"),
    "seq_len": (64, "T, at most maxT"),
    "seed": (1337, "of the tokens and the weights"),
    "learning_rate": (1e-4, "of AdamW"),
    "beta1": (0.9, "decay of AdamW's first moment"),
    "beta2": (0.999, "decay of AdamW's second moment"),
    "eps": (1e-8, "added to the root of AdamW's second moment"),
    "weight_decay": (0.01, "of matrices and embeddings; biases and norms have none"),
}
HYPERPARAMETERS = ["attention", "learning_rate", "beta1", "beta2", "eps", "weight_decay"]


class Shape(NamedTuple):
    """The sizes of a model, in the order of the checkpoint's header from its third int on."""

    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int


def tensors(shape):
    """Every parameter as (name, shape, kind), in the order of the files. Matrices are (out, in), as in nn.Linear."""
    L, C = shape.L, shape.C
    return [
        ("wte", (shape.Vp, C), "weight"),
        ("wpe", (shape.maxT, C), "weight"),
        ("ln1w", (L, C), "norm"),
        ("ln1b", (L, C), "bias"),
        ("qkvw", (L, 3 * C, C), "weight"),
        ("qkvb", (L, 3 * C), "bias"),
        ("attprojw", (L, C, C), "residual"),
        ("attprojb", (L, C), "bias"),
        ("ln2w", (L, C), "norm"),
        ("ln2b", (L, C), "bias"),
        ("fcw", (L, 4 * C, C), "weight"),
        ("fcb", (L, 4 * C), "bias"),
        ("fcprojw", (L, C, 4 * C), "residual"),
        ("fcprojb", (L, C), "bias"),
        ("lnfw", (C,), "norm"),
        ("lnfb", (C,), "bias"),
    ]


def check(condition, message):
    if not condition:
        sys.exit(f"torch_reference.py: {message}")


def check_shape(s):
    check(min(s) >= 1, f"every size must be at least 1, found {s}")
    check(s.C % s.NH == 0, f"channels must be divisible by heads, found C={s.C} and NH={s.NH}")
    check(s.C % 32 == 0, f"channels must be a multiple of 32, found C={s.C}")
    check(s.Vp >= s.V, f"padded-vocab must be at least vocab, found Vp={s.Vp} and V={s.V}")


def random_weights(shape, std, generator):
    """GPT-2's initial weights, except that no bias is 0 and no norm weight is 1.

    Fresh biases and norms would hide a bias that is never added, or a norm that is never scaled: here they are
    perturbed by std too. Projections into the residual stream have std / sqrt(2L), since 2L of them add up in it.
    """
    mean_std = {"weight": (0, std), "residual": (0, std / math.sqrt(2 * shape.L)), "bias": (0, std), "norm": (1, std)}
    weights = {}
    for name, dims, kind in tensors(shape):
        mean, deviation = mean_std[kind]
        noise = torch.randn(dims, generator=generator, dtype=torch.float64)
        weights[name] = (mean + deviation * noise).float().double()
    weights["wte"][shape.V :] = 0
    return weights


def read_checkpoint(path):
    """Return the Shape and the float64 weights by name of a version-3 checkpoint."""
    data = np.fromfile(path, "<i4")
    found, expected = data[:2].tolist(), [CHECKPOINT_MAGIC, CHECKPOINT_VERSION]
    check(found == expected, f"{path}: magic and version are {found}, expected {expected}, an fp32 checkpoint")
    check(data.size >= 256, f"{path}: the header is cut short")
    shape = Shape(*data[2:8].tolist())
    check_shape(shape)
    sizes = [math.prod(dims) for _, dims, _ in tensors(shape)]
    found, expected = os.path.getsize(path), 1024 + 4 * sum(sizes)
    check(found == expected, f"{path}: {found} bytes, expected {expected} for {shape}")
    values = torch.from_numpy(data[256:].view("<f4")).split(sizes)
    return shape, {name: value.double().view(dims) for (name, dims, _), value in zip(tensors(shape), values)}


def attention(q, k, v, kind):
    """Causal attention with its matrix written out: q, k, v (B, NH, T, HS) -> (B, NH, T, HS).

    softmax: att[t, s] = exp(score[t, s]) / sum over u <= t of exp(score[t, u]), for s <= t.
    relu:    att[t, s] = max(0, score[t, s]) for s <= t, not normalised.
    Both with score = q k^T / sqrt(HS), and att[t, s] = 0 for s > t.
    """
    T, HS = q.shape[-2:]
    score = q @ k.mT / math.sqrt(HS)  # (B, NH, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    if kind == "softmax":
        att = score.masked_fill(future, -math.inf).softmax(-1)
    else:
        att = score.relu().masked_fill(future, 0)
    return att @ v


def forward(weights, shape, x, y, kind):
    """Tokens x and targets y (B, T) -> logits (B, T, V) and the mean cross entropy over B*T."""
    B, T = x.shape
    C, NH = shape.C, shape.NH
    wte, wpe, *blocks, lnfw, lnfb = weights.values()
    h = F.embedding(x, wte) + wpe[:T]  # (B, T, C)
    for ln1w, ln1b, qkvw, qkvb, attprojw, attprojb, ln2w, ln2b, fcw, fcb, fcprojw, fcprojb in zip(*blocks):
        n = F.layer_norm(h, (C,), ln1w, ln1b, 1e-5)
        q, k, v = F.linear(n, qkvw, qkvb).view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4)  # (B, NH, T, HS) each
        a = attention(q, k, v, kind).transpose(1, 2).reshape(B, T, C)
        h = h + F.linear(a, attprojw, attprojb)
        n = F.layer_norm(h, (C,), ln2w, ln2b, 1e-5)
        h = h + F.linear(F.gelu(F.linear(n, fcw, fcb), approximate="tanh"), fcprojw, fcprojb)
    logits = F.linear(F.layer_norm(h, (C,), lnfw, lnfb, 1e-5), wte[: shape.V])
    return logits, F.cross_entropy(logits.view(B * T, -1), y.reshape(B * T))


def autocast_errors(weights, shape, x, y, kind, truth):
    """{tensor: relative error} of PyTorch's mixed precision: weights in fp32, and a forward pass and a loss under
    autocast to bfloat16, on a GPU if there is one. The errors are those of "loss", "logits" and the gradient of each
    weight against `truth`, which has them in float64, and they are measured by Frobenius norm."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: weight.detach().float().to(device).requires_grad_() for name, weight in weights.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        logits, loss = forward(weights, shape, x.to(device), y.to(device), kind)
    loss.backward()
    found = {"loss": loss, "logits": logits} | {name: weight.grad for name, weight in weights.items()}
    errors = {name: (found[name].cpu().double() - value).norm() / value.norm() for name, value in truth.items()}
    return {name: float(f"{error:.3g}") for name, error in errors.items()}


def header(*values):
    return np.array(values + (0,) * (256 - len(values)), "<i4").tobytes()


def as_bytes(tensor, dtype="<f4"):
    return tensor.detach().numpy().astype(dtype).tobytes()


def write(path, *chunks):
    """Write the chunks of bytes to a file that takes the name path only when it is whole."""
    with open(f"{path}.tmp", "wb") as file:
        file.writelines(chunks)
    os.replace(f"{path}.tmp", path)
    print(f"wrote {path}, {os.path.getsize(path)} bytes")


def parse_flags():
    """Return the flags with defaults filled in; a flag of MODEL_FLAGS beside --checkpoint is refused."""
    parser = argparse.ArgumentParser(description="Dump a GPT-2 checkpoint, debug state and losses from PyTorch.")
    parser.add_argument("prefix", help="of the names of the files that are written")
    parser.add_argument("--checkpoint", help="take the shape and the weights from this version-3 checkpoint")
    parser.add_argument("--attention", choices=["softmax", "relu"], default="softmax")
    parser.add_argument("--autocast", action="store_true", help="also measure the errors of PyTorch's autocast to bf16")
    flags = MODEL_FLAGS | RUN_FLAGS
    for name, (default, text) in flags.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=float if isinstance(default, float) else int,
            default=argparse.SUPPRESS,  # so that a flag given can be told from one left out
            help=text if default is None else f"{text} (default: {default})",
        )
    given = vars(parser.parse_args())
    extra = ["--" + name.replace("_", "-") for name in MODEL_FLAGS if name in given]
    check(not (given["checkpoint"] and extra), f"--checkpoint brings its own model, leave out {' '.join(extra)}")
    return argparse.Namespace(**{name: default for name, (default, _) in flags.items()} | given)


def main():
    args = parse_flags()
    if args.checkpoint:
        shape, weights = read_checkpoint(args.checkpoint)
    else:
        Vp = -(-args.vocab // 128) * 128 if args.padded_vocab is None else args.padded_vocab
        shape = Shape(args.max_seq_len, args.vocab, args.layers, args.heads, args.channels, Vp)
        check_shape(shape)
    B, T = args.batch, args.seq_len
    check(B >= 1 and T >= 1, f"batch and seq-len must be at least 1, found B={B} and T={T}")
    check(T <= shape.maxT, f"seq-len must be at most max-seq-len, found T={T} and maxT={shape.maxT}")
    check(min(args.learning_rate, args.weight_decay) >= 0, "learning-rate and weight-decay must not be negative")
    check(0 <= args.beta1 < 1 and 0 <= args.beta2 < 1, "beta1 and beta2 must be at least 0 and below 1")
    check(args.eps > 0, "eps must be above 0, or a weight whose gradient is 0 becomes 0/0")

    # Tokens are drawn before weights, so that a seed names the same batch with and without --checkpoint.
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(shape.V, (B, T + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    if not args.checkpoint:
        weights = random_weights(shape, args.std, generator)
        write(
            f"{args.prefix}.bin",
            header(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, *shape),
            *(as_bytes(weight) for weight in weights.values()),
        )

    decayed = {name: kind in ("weight", "residual") for name, _, kind in tensors(shape)}
    groups = [
        {"params": [w.requires_grad_() for name, w in weights.items() if decayed[name] == decay], "weight_decay": rate}
        for decay, rate in ((True, args.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(args.beta1, args.beta2), eps=args.eps)
    losses, autocast = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits, loss = forward(weights, shape, x, y, args.attention)
        loss.backward()
        losses.append(round(loss.item(), 9))
        if step == 0:
            write(
                f"{args.prefix}_debug_state.bin",
                header(STATE_MAGIC, STATE_VERSION, B, T),
                as_bytes(x, "<i4"),
                as_bytes(y, "<i4"),
                as_bytes(logits),
                as_bytes(loss),
                *(as_bytes(weight.grad) for weight in weights.values()),
            )
            if args.autocast:
                truth = {"loss": loss, "logits": logits} | {name: weight.grad for name, weight in weights.items()}
                autocast["autocast_errors"] = autocast_errors(weights, shape, x, y, args.attention, truth)
        optimizer.step()
    report = {name: getattr(args, name) for name in HYPERPARAMETERS} | {"losses": losses} | autocast
    write(f"{args.prefix}_losses.json", json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"torch_reference.py: {error}")
