"""GPT-2 in plain PyTorch, written from its formulas (Radford et al. 2019): pre-norm blocks, GELU in
its tanh form, a head tied to wte. dev/bench/torch_reference.py dumps what it computes, and
dev/bench/peers.py times it."""
import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from prepro_tinyshakespeare import UserError

CHECKPOINT, STATE = (20240326, 3), (20240327, 2)  # magic, version
FLAGS = [(None, "--padded-vocab", "count", None, "Vp, the rows of GPT-2's wte (default: V rounded "
          "up to a multiple of 128)")]


def check(condition, message):
    if not condition:
        raise UserError(message)


def header(*values, dtype="<i4"):
    return np.array(values + (0,) * (256 - len(values)), dtype).tobytes()


class Shape(NamedTuple):
    """The sizes of a GPT-2, in the order of a checkpoint's header, where they start at the third
    int."""
    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int


def shape_of_flags(flags):
    Vp = flags.padded_vocab or -(-flags.vocab // 128) * 128
    return Shape(flags.max_seq_len, flags.vocab, flags.layers, flags.heads, flags.channels, Vp)


def shape_of_file(data):
    """The shape in the int32 of a checkpoint's header."""
    return Shape(*data[2:8].tolist())


def headers(shape):
    """The bytes of a checkpoint before its weights."""
    return header(*CHECKPOINT, *shape)


def tensors(shape):
    """(name, shape, kind) of every parameter, in the order of the files. Matrices are (out, in), as
    in nn.Linear."""
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
    check(min(s) >= 1, f"{s}: expected sizes of at least 1")
    check(s.C % s.NH == 0, f"C={s.C}, NH={s.NH}: expected C to be a multiple of NH")
    check(s.C % 32 == 0, f"C={s.C}: expected a multiple of 32")
    check(s.Vp >= s.V, f"Vp={s.Vp}, V={s.V}: expected Vp to be at least V")


def attention(q, k, v, kind):
    """Causal attention with its matrix written out: q, k, v (B,NH,T,HS) -> (B,NH,T,HS).

    softmax: att[t, s] = exp(score[t, s]) / sum over u <= t of exp(score[t, u]), for s <= t.
    relu:    att[t, s] = max(0, score[t, s]) for s <= t, not normalised.
    Both with score = q k^T / sqrt(HS), and att[t, s] = 0 for s > t.
    """
    T, HS = q.shape[-2:]
    score = q @ k.mT / math.sqrt(HS)  # (B,NH,T,T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    if kind == "softmax":
        att = score.masked_fill(future, -math.inf).softmax(-1)
    else:
        att = score.relu().masked_fill(future, 0)
    return att @ v


linear = F.linear  # the products of a layer; dev/bench/peers.py can put torchao's in its place


def forward(weights, shape, x, y, kind):
    """Tokens x and targets y (B,T) -> logits (B,T,V) and the mean cross entropy over B*T."""
    B, T = x.shape
    C, NH = shape.C, shape.NH
    wte, wpe, *blocks, lnfw, lnfb = weights.values()
    h = F.embedding(x, wte) + wpe[:T]  # (B,T,C)
    for (ln1w, ln1b, qkvw, qkvb, attprojw, attprojb,
         ln2w, ln2b, fcw, fcb, fcprojw, fcprojb) in zip(*blocks):
        n = F.layer_norm(h, (C,), ln1w, ln1b, 1e-5)
        qkv = linear(n, qkvw, qkvb).view(B, T, 3, NH, C // NH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B,NH,T,HS) each
        a = attention(q, k, v, kind).transpose(1, 2).reshape(B,T,C)
        h = h + linear(a, attprojw, attprojb)
        n = F.layer_norm(h, (C,), ln2w, ln2b, 1e-5)
        h = h + linear(F.gelu(linear(n, fcw, fcb), approximate="tanh"), fcprojw, fcprojb)
    logits = F.linear(F.layer_norm(h, (C,), lnfw, lnfb, 1e-5), wte[: shape.V])
    return logits, F.cross_entropy(logits.view(B * T, -1), y.reshape(B * T))


def write_folder(prefix, shape, std, seed, B, T):
    """Let transformers save a random GPT-2 in the folder PREFIX, and write PREFIX_logits.npz:
    tokens (B,T) int32, and transformers' own logits (B,T,V), computed in float64, as fp32.

    As in dev/bench/torch_reference.py, no bias is 0 and no norm weight is 1.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.V, (B, T), generator=generator)
    config = GPT2Config(vocab_size=shape.V, n_positions=shape.maxT, n_layer=shape.L,
                        n_head=shape.NH, n_embd=shape.C, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = ".ln_" in name and name.endswith("weight")
            weight.copy_(is_norm + std * torch.randn(weight.shape, generator=generator))
        model.save_pretrained(prefix)
        logits = model.double()(tokens).logits
    np.savez(f"{prefix}_logits.npz", tokens=tokens.numpy().astype("<i4"),
             logits=logits.numpy().astype("<f4"))
    print(f"wrote {prefix} and {prefix}_logits.npz")
