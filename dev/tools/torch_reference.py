"""Dump what GPT-2 or Llama 3 should compute, as plain PyTorch computes it, for the tests to compare with.

    python -m dev.tools.torch_reference PREFIX [flags]                   # GPT-2
    python -m dev.tools.torch_reference PREFIX --llama [flags]           # Llama 3
    python -m dev.tools.torch_reference PREFIX --transformers [flags]    # as transformers saves it: write_folder

writes, for a model of any shape with random weights and one batch of random tokens,

    PREFIX.bin              checkpoint: magic 20240326, version 3, the shape, the weights
    PREFIX_debug_state.bin  magic 20240327, version 2, B, T; then x, y (B, T) int32, logits (B, T, V), the loss,
                            and the gradient of every weight in the checkpoint's order, all fp32
    PREFIX_losses.json      the loss before each of ten AdamW steps on that batch, and the hyperparameters

With --checkpoint FILE the weights come from FILE, and only the last two files are written. With --autocast the last
file also says how far PyTorch's own bf16 is from the truth: see autocast_errors. Every header is 256 little-endian
int32; tensors are little-endian and C-contiguous.

Llama's files are those of llm.c's branch llama3. The checkpoint has magic 20240803, version 3, and behind its header a
second one of 256 fp32. The debug state has magic 20240803, version 3, and B, T, k; the k = 10 losses and then the k
norms of the gradient end it, those of the ten AdamW steps, which clip nothing. For each bias of GPT-2 both files have
zeros. In a tied model's files lm_head repeats wte, and its gradient repeats wte's, the sum over both uses.

The weights are rounded to fp32 before anything is computed, so the checkpoint holds them exactly. Everything after
that is float64, and is rounded to fp32 only as it is written: the truth should be more exact than what it judges,
so that a difference is the fault of the code under test and its size means something.

GPT-2 (Radford et al. 2019) is written out below: pre-norm blocks, GELU in its tanh form, a head tied to wte. Llama is
transformers' LlamaForCausalLM. No code is shared with the trainer; an error would have to be made twice to go unseen.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

STEPS = 10

# Flag: default, help. All but RUN_FLAGS describe new weights, so none of them goes with --checkpoint.
MODEL_FLAGS = {
    "layers": (12, "L"),
    "heads": (12, "NH; the head size HS is C / NH"),
    "channels": (768, "C, a multiple of 32"),
    "vocab": (50257, "V"),
    "max_seq_len": (1024, "maxT, the rows of GPT-2's wpe"),
    "std": (0.02, "standard deviation of the random weights; a tiny model tells more with a larger one"),
}
GPT2_FLAGS = {
    "padded_vocab": (None, "Vp, the rows of GPT-2's wte (default: V rounded up to a multiple of 128)"),
}
LLAMA_FLAGS = {
    "kv_heads": (4, "Llama's NKV, which divides NH"),
    "multiple_of": (256, "Llama's MLP has H = 8/3 C ffn-multiplier hidden channels, rounded up to a multiple of this"),
    "ffn_multiplier": (1.0, "see multiple-of"),
    "norm_eps": (1e-5, "added to the mean square in Llama's RMSNorm"),
    "theta": (500000.0, "the base of the wavelengths of Llama's RoPE"),
    "scaled": (0, "1: long wavelengths are scaled by 8, as in Llama 3.1; from 2 on, by that: 32 in Llama 3.2"),
    "tied": (0, "1: Llama's wte is the head too"),
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


def check(condition, message):
    if not condition:
        sys.exit(f"torch_reference.py: {message}")


def header(*values, dtype="<i4"):
    return np.array(values + (0,) * (256 - len(values)), dtype).tobytes()


def as_bytes(tensor, dtype="<f4"):
    return tensor.detach().numpy().astype(dtype).tobytes()


def write(path, *chunks):
    """Write the chunks of bytes to a file that takes the name path only when it is whole."""
    with open(f"{path}.tmp", "wb") as file:
        file.writelines(chunks)
    os.replace(f"{path}.tmp", path)
    print(f"wrote {path}, {os.path.getsize(path)} bytes")


# ---- GPT-2


class Shape(NamedTuple):
    """The sizes of a GPT-2, in the order of the checkpoint's header from its third int on."""

    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int


def shape_of_flags(args):
    Vp = -(-args.vocab // 128) * 128 if args.padded_vocab is None else args.padded_vocab
    return Shape(args.max_seq_len, args.vocab, args.layers, args.heads, args.channels, Vp)


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


def check_shape(s):
    check(min(s) >= 1, f"every size must be at least 1, found {s}")
    check(s.C % s.NH == 0, f"channels must be divisible by heads, found C={s.C} and NH={s.NH}")
    check(s.C % 32 == 0, f"channels must be a multiple of 32, found C={s.C}")
    check(s.Vp >= s.V, f"padded-vocab must be at least vocab, found Vp={s.Vp} and V={s.V}")


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


# ---- Llama 3


class LlamaShape(NamedTuple):
    """The sizes of a Llama, in the order of the checkpoint's header from its third int on, then the numbers of its
    second header, and whether the head is tied to wte."""

    maxT: int
    V: int
    L: int
    NH: int
    NKV: int
    C: int
    multiple_of: int
    scaled: int
    ffn_multiplier: float
    eps: float
    theta: float
    tied: int

    @property
    def H(self):
        """The hidden channels of the MLP."""
        return -(-int(self.ffn_multiplier * int(8 * self.C / 3)) // self.multiple_of) * self.multiple_of


def llama_of_flags(args):
    sizes = args.max_seq_len, args.vocab, args.layers, args.heads, args.kv_heads, args.channels, args.multiple_of
    numbers = np.float32([args.ffn_multiplier, args.norm_eps, args.theta]).tolist()  # as the file holds them
    return LlamaShape(*sizes, args.scaled, *numbers, args.tied)


def llama_of_file(data):
    """Of a checkpoint's int32. A model whose lm_head is its wte, bit for bit, is tied."""
    shape = LlamaShape(*data[2:10].tolist(), *data[256:259].view("<f4").tolist(), 0)
    size = shape.V * shape.C
    return shape._replace(tied=int(np.array_equal(data[512:][:size], data[512:][size : 2 * size])))


def check_llama(s):
    check(min(s[:7]) >= 1 and s.H >= 1, f"every size must be at least 1, found {s} and H={s.H}")
    check(s.NH % s.NKV == 0, f"heads must be divisible by kv-heads, found NH={s.NH} and NKV={s.NKV}")
    check(s.C % (2 * s.NH) == 0, f"channels must be divisible by twice the heads, found C={s.C} and NH={s.NH}")
    check(s.C % 32 == 0, f"channels must be a multiple of 32, found C={s.C}")
    check(s.scaled >= 0 and s.tied in (0, 1), f"scaled must not be negative, tied 0 or 1, found {s.scaled}, {s.tied}")
    check(s.eps > 0 and s.theta > 1, f"norm-eps must be above 0 and theta above 1, found {s.eps} and {s.theta}")


def llama_headers(shape):
    """Both. The version in them is 3.2 for a tied model, as Llama's tied ones have it, else 3.1."""
    return header(*LLAMA.checkpoint, *shape[:8], 3, 1 + shape.tied) + header(*shape[8:11], dtype="<f4")


def llama_tensors(shape):
    """As tensors(). What the files have and the model has not is of the kind "absent"."""
    L, C, H, HS = shape.L, shape.C, shape.H, shape.C // shape.NH
    qkv = (shape.NH + 2 * shape.NKV) * HS
    return [
        ("wte", (shape.V, C), "weight"),
        ("lm_head", (shape.V, C), "absent" if shape.tied else "weight"),
        ("ln1w", (L, C), "norm"),
        ("ln1b", (L, C), "absent"),
        ("qkvw", (L, qkv, C), "weight"),
        ("qkvb", (L, qkv), "absent"),
        ("attprojw", (L, C, C), "residual"),
        ("attprojb", (L, C), "absent"),
        ("ln2w", (L, C), "norm"),
        ("ln2b", (L, C), "absent"),
        ("fcw", (L, 2 * H, C), "weight"),  # up, then gate
        ("fcb", (L, 2 * H), "absent"),
        ("fcprojw", (L, C, H), "residual"),
        ("fcprojb", (L, C), "absent"),
        ("lnfw", (C,), "norm"),
        ("lnfb", (C,), "absent"),
    ]


@contextlib.contextmanager
def with_float32_as(dtype):
    """Have transformers compute in dtype what it computes in torch.float32 even in a float64 model: RMSNorm and RoPE's
    angles. It finds another type under that name for as long as this lasts."""
    with mock.patch.multiple(torch, float=dtype, float32=dtype):
        with mock.patch.object(torch.Tensor, "float", lambda x: x.to(dtype)):
            yield


@functools.cache
def llama_model(shape):
    """transformers' model of this shape, with float64 frequencies of RoPE. Its own weights are not used."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default"}
    if shape.scaled:
        factor = 8.0 if shape.scaled == 1 else float(shape.scaled)
        rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        max_position_embeddings=131072,  # Llama 3.1's, whatever maxT: RoPE does not depend on it
        vocab_size=shape.V,
        num_hidden_layers=shape.L,
        num_attention_heads=shape.NH,
        num_key_value_heads=shape.NKV,
        hidden_size=shape.C,
        intermediate_size=shape.H,
        rms_norm_eps=shape.eps,
        rope_parameters=rope | {"rope_theta": shape.theta},
        tie_word_embeddings=bool(shape.tied),
        attn_implementation="sdpa",  # the default, and in float64 where it is asked for
    )
    with with_float32_as(torch.float64):
        return LlamaForCausalLM(config)


def half_split(weight, HS):
    """Rows of query or key heads, in each of which RoPE rotates the pairs (2i, 2i+1), in transformers' order, in which
    it rotates (i, i + HS/2)."""
    return weight.unflatten(0, (-1, HS // 2, 2)).transpose(1, 2).flatten(0, 2)


def llama_forward(weights, shape, x, y, kind):
    """As forward(). transformers' model computes with views of our weights, so gradients arrive in our order."""
    HS = shape.C // shape.NH
    views = {
        "model.embed_tokens": weights["wte"],
        "lm_head": weights["wte" if shape.tied else "lm_head"],
        "model.norm": weights["lnfw"],
    }
    for l in range(shape.L):
        q, k, v = weights["qkvw"][l].split([shape.NH * HS, shape.NKV * HS, shape.NKV * HS])
        up, gate = weights["fcw"][l].chunk(2)
        layer = {
            "input_layernorm": weights["ln1w"][l],
            "self_attn.q_proj": half_split(q, HS),
            "self_attn.k_proj": half_split(k, HS),
            "self_attn.v_proj": v,
            "self_attn.o_proj": weights["attprojw"][l],
            "post_attention_layernorm": weights["ln2w"][l],
            "mlp.up_proj": up,
            "mlp.gate_proj": gate,
            "mlp.down_proj": weights["fcprojw"][l],
        }
        views |= {f"model.layers.{l}.{name}": view for name, view in layer.items()}
    parameters = {f"{name}.weight": view for name, view in views.items()}
    with with_float32_as(weights["wte"].dtype):
        model = llama_model(shape).to(x.device)
        logits = torch.func.functional_call(model, parameters, (x,), {"use_cache": False}).logits
    return logits, F.cross_entropy(logits.view(y.numel(), -1), y.reshape(-1))


# ---- A folder


def write_folder(prefix, shape, std, seed, B, T):
    """Have transformers save a random GPT-2 in the folder PREFIX, and write PREFIX_logits.npz: tokens (B, T) int32, and
    logits (B, T, V) fp32, which are transformers' own, computed in float64.

    No bias is 0 and no norm weight is 1, as in random_weights.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.V, (B, T), generator=generator)
    config = GPT2Config(
        vocab_size=shape.V,
        n_positions=shape.maxT,
        n_layer=shape.L,
        n_head=shape.NH,
        n_embd=shape.C,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = ".ln_" in name and name.endswith("weight")
            weight.copy_(is_norm + std * torch.randn(weight.shape, generator=generator))
        model.save_pretrained(prefix)
        logits = model.double()(tokens).logits
    np.savez(f"{prefix}_logits.npz", tokens=tokens.numpy().astype("<i4"), logits=logits.numpy().astype("<f4"))
    print(f"wrote {prefix} and {prefix}_logits.npz")


# ---- What they share


class Architecture(NamedTuple):
    """What tells one kind of model from the other. A shape has at least maxT, V and L."""

    checkpoint: tuple  # magic, version
    state: tuple  # magic, version
    flags: dict
    of_flags: Callable  # flags -> shape
    of_file: Callable  # a checkpoint's int32 -> shape
    check: Callable
    headers: Callable  # shape -> the bytes before the weights
    tensors: Callable
    forward: Callable


GPT2 = Architecture(
    (20240326, 3),
    (20240327, 2),
    GPT2_FLAGS,
    shape_of_flags,
    lambda data: Shape(*data[2:8].tolist()),
    check_shape,
    lambda shape: header(*GPT2.checkpoint, *shape),
    tensors,
    forward,
)
LLAMA = Architecture(
    (20240803, 3),
    (20240803, 3),
    LLAMA_FLAGS,
    llama_of_flags,
    llama_of_file,
    check_llama,
    llama_headers,
    llama_tensors,
    llama_forward,
)


def random_weights(architecture, shape, std, generator):
    """GPT-2's initial weights, except that no bias is 0 and no norm weight is 1.

    Fresh biases and norms would hide a bias that is never added, or a norm that is never scaled: here they are
    perturbed by std too. Projections into the residual stream have std / sqrt(2L), since 2L of them add up in it.
    """
    mean_std = {"weight": (0, std), "residual": (0, std / math.sqrt(2 * shape.L)), "bias": (0, std), "norm": (1, std)}
    weights = {}
    for name, dims, kind in architecture.tensors(shape):
        if kind == "absent":
            continue
        mean, deviation = mean_std[kind]
        noise = torch.randn(dims, generator=generator, dtype=torch.float64)
        weights[name] = (mean + deviation * noise).float().double()
    weights["wte"][shape.V :] = 0
    return weights


def read_checkpoint(path, architecture):
    """Return the shape and the float64 weights by name of a version-3 checkpoint."""
    data = np.fromfile(path, "<i4")
    found, expected = data[:2].tolist(), list(architecture.checkpoint)
    check(found == expected, f"{path}: magic and version are {found}, expected {expected}, an fp32 checkpoint")
    check(data.size >= 512, f"{path}: the file is cut short")
    shape = architecture.of_file(data)
    architecture.check(shape)
    rows, start = architecture.tensors(shape), len(architecture.headers(shape))
    sizes = [math.prod(dims) for _, dims, _ in rows]
    found, expected = os.path.getsize(path), start + 4 * sum(sizes)
    check(found == expected, f"{path}: {found} bytes, expected {expected} for {shape}")
    values = torch.from_numpy(data[start // 4 :].view("<f4")).split(sizes)
    return shape, {row[0]: value.double().view(row[1]) for row, value in zip(rows, values) if row[2] != "absent"}


def for_file(values, architecture, shape):
    """The bytes of a file's tensors, of weights or their gradients by name. An lm_head that the model has not is wte
    again, and a bias is zeros."""
    for name, dims, _ in architecture.tensors(shape):
        value = values.get(name)
        if value is None:
            value = values["wte"] if name == "lm_head" else torch.zeros(dims)
        yield as_bytes(value)


def autocast_errors(forward, weights, shape, x, y, kind, truth):
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


def parse_flags():
    """Return the flags with defaults filled in; a flag of another model, or of any beside --checkpoint, is refused."""
    parser = argparse.ArgumentParser(description="Dump a checkpoint, debug state and losses from PyTorch.")
    parser.add_argument("prefix", help="of the names of the files that are written")
    parser.add_argument("--llama", action="store_true", help="Llama 3 instead of GPT-2")
    parser.add_argument("--transformers", action="store_true", help="a folder of transformers, and logits; GPT-2 alone")
    parser.add_argument("--checkpoint", help="take the shape and the weights from this version-3 checkpoint")
    parser.add_argument("--attention", choices=["softmax", "relu"], default="softmax")
    parser.add_argument("--autocast", action="store_true", help="also measure the errors of PyTorch's autocast to bf16")
    flags = MODEL_FLAGS | GPT2_FLAGS | LLAMA_FLAGS | RUN_FLAGS
    for name, (default, text) in flags.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=float if isinstance(default, float) else int,
            default=argparse.SUPPRESS,  # so that a flag given can be told from one left out
            help=text if default is None else f"{text} (default: {default})",
        )
    given = vars(parser.parse_args())

    def named(table):
        return " ".join("--" + name.replace("_", "-") for name in table if name in given)

    extra = named(MODEL_FLAGS | GPT2_FLAGS | LLAMA_FLAGS)
    check(not (given["checkpoint"] and extra), f"--checkpoint brings its own model, leave out {extra}")
    extra = named(GPT2_FLAGS if given["llama"] else LLAMA_FLAGS)
    check(not extra, f"{extra} does not go {'with' if given['llama'] else 'without'} --llama")
    check(not given["llama"] or given["attention"] == "softmax", "Llama's attention is softmax")
    if given["transformers"]:
        extra = named(["padded_vocab", *(name for name in RUN_FLAGS if name not in ("batch", "seq_len", "seed"))])
        check(not extra, f"{extra} does not go with --transformers")
        other = given["llama"] or given["checkpoint"] or given["autocast"] or given["attention"] == "relu"
        check(not other, "--transformers goes with none of --llama, --checkpoint, --autocast and --attention relu")
    return argparse.Namespace(**{name: default for name, (default, _) in flags.items()} | given)


def main():
    args = parse_flags()
    architecture = LLAMA if args.llama else GPT2
    if args.checkpoint:
        shape, weights = read_checkpoint(args.checkpoint, architecture)
    else:
        shape = architecture.of_flags(args)
        architecture.check(shape)
    B, T = args.batch, args.seq_len
    check(B >= 1 and T >= 1, f"batch and seq-len must be at least 1, found B={B} and T={T}")
    check(T <= shape.maxT, f"seq-len must be at most max-seq-len, found T={T} and maxT={shape.maxT}")
    if args.transformers:
        return write_folder(args.prefix, shape, args.std, args.seed, B, T)
    check(min(args.learning_rate, args.weight_decay) >= 0, "learning-rate and weight-decay must not be negative")
    check(0 <= args.beta1 < 1 and 0 <= args.beta2 < 1, "beta1 and beta2 must be at least 0 and below 1")
    check(args.eps > 0, "eps must be above 0, or a weight whose gradient is 0 becomes 0/0")

    # Tokens are drawn before weights, so that a seed names the same batch with and without --checkpoint.
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(shape.V, (B, T + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    if not args.checkpoint:
        weights = random_weights(architecture, shape, args.std, generator)
        write(f"{args.prefix}.bin", architecture.headers(shape), *for_file(weights, architecture, shape))

    decayed = {name: kind in ("weight", "residual") for name, _, kind in architecture.tensors(shape)}
    groups = [
        {"params": [w.requires_grad_() for name, w in weights.items() if decayed[name] == decay], "weight_decay": rate}
        for decay, rate in ((True, args.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(args.beta1, args.beta2), eps=args.eps)
    losses, norms, autocast = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits, loss = architecture.forward(weights, shape, x, y, args.attention)
        loss.backward()
        losses.append(loss.detach())
        gradients = {name: weight.grad for name, weight in weights.items()}
        norms.append(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        if step == 0:
            truth = {"loss": loss.detach(), "logits": logits.detach()}
            truth |= {name: gradient.clone() for name, gradient in gradients.items()}
            if args.autocast:
                errors = autocast_errors(architecture.forward, weights, shape, x, y, args.attention, truth)
                autocast["autocast_errors"] = errors
        optimizer.step()
    write(
        f"{args.prefix}_debug_state.bin",
        header(*architecture.state, B, T, *([STEPS] if args.llama else [])),
        as_bytes(x, "<i4"),
        as_bytes(y, "<i4"),
        as_bytes(truth["logits"]),
        as_bytes(truth["loss"]),
        *for_file(truth, architecture, shape),
        *([as_bytes(torch.stack(losses)), as_bytes(torch.stack(norms))] if args.llama else []),
    )
    report = {name: getattr(args, name) for name in HYPERPARAMETERS}
    report |= {"losses": [round(loss.item(), 9) for loss in losses]} | autocast
    write(f"{args.prefix}_losses.json", json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ImportError) as error:
        sys.exit(f"torch_reference.py: {error}")
