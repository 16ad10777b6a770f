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

With --checkpoint FILE the weights come from FILE, and only the last two are written. With
--autocast the last one also has the errors of PyTorch's own bf16: see autocast_errors.
--transformers writes a folder and its logits instead: see write_folder.

Llama's files have the format of llm.c's branch llama3. The checkpoint has magic 20240803, version
3, and a second header of 256 fp32. The debug state has magic 20240803, version 3, B, T and k. It
ends with k = 10 losses and k norms of the gradient, from the ten AdamW steps, which do not clip.
Llama has no biases, so they are zeros in both files. In a tied model's files lm_head repeats wte,
and its gradient repeats wte's, which is the sum over both uses.

Weights are rounded to fp32 first, so that the checkpoint holds them exactly. Everything else is
computed in float64 and rounded to fp32 when it is written. So any difference is an error of the
code under test, and its size means something. This program shares only the parser of flags and the
replacing of files with the trainer; an error in the model would have to be made twice to go unseen.

dev/bench/torch_training.py trains the GPT-2 below, and dev/bench/peers.py times both models.
"""
import contextlib
import functools
import json
import math
import os
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

from dev.common.flags import argument, parse_flags
from dev.common.program import run_main
from train_gpt2 import UserError, replace_file


def check(condition, message):
    if not condition:
        raise UserError(message)


def header(*values, dtype="<i4"):
    return np.array(values + (0,) * (256 - len(values)), dtype).tobytes()


# ---- GPT-2, written from its formulas (Radford et al. 2019)


def attention(q, k, v, kind="softmax"):
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


def fused_attention(q, k, v, **more):
    """The same with softmax, by a kernel of PyTorch's."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)


class GPT2(NamedTuple):
    """The sizes of a GPT-2, in the order of a checkpoint's header, where they start at the third
    int."""
    maxT: int
    V: int
    L: int
    NH: int
    C: int
    Vp: int

    CHECKPOINT, STATE = (20240326, 3), (20240327, 2)  # magic, version
    FLAGS = [(None, "--padded-vocab", "count", None, "Vp, the rows of GPT-2's wte (default: V "
              "rounded up to a multiple of 128)")]

    @classmethod
    def from_flags(cls, flags):
        Vp = flags.padded_vocab or -(-flags.vocab // 128) * 128
        return cls(flags.max_seq_len, flags.vocab, flags.layers, flags.heads, flags.channels, Vp)

    @classmethod
    def from_file(cls, data):
        """The shape in the int32 of a checkpoint's header."""
        return cls(*data[2:8].tolist())

    def check(self):
        check(min(self) >= 1, f"{self}: expected sizes of at least 1")
        check(self.C % self.NH == 0,
              f"C={self.C}, NH={self.NH}: expected C to be a multiple of NH")
        check(self.C % 32 == 0, f"C={self.C}: expected a multiple of 32")
        check(self.Vp >= self.V, f"Vp={self.Vp}, V={self.V}: expected Vp to be at least V")

    def headers(self):
        """The bytes of a checkpoint before its weights."""
        return header(*self.CHECKPOINT, *self)

    def tensors(self):
        """(name, shape, kind) of every parameter, in the order of the files. Matrices are (out,
        in), as in nn.Linear."""
        L, C = self.L, self.C
        return [
            ("wte", (self.Vp, C), "weight"),
            ("wpe", (self.maxT, C), "weight"),
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

    def forward(self, weights, x, y, attention=attention):
        """Tokens x and targets y (B,T) -> logits (B,T,V) and the mean cross entropy over B*T."""
        B, T = x.shape
        C, NH = self.C, self.NH
        wte, wpe, *blocks, lnfw, lnfb = weights.values()
        h = F.embedding(x, wte) + wpe[:T]  # (B,T,C)
        for (ln1w, ln1b, qkvw, qkvb, attprojw, attprojb,
             ln2w, ln2b, fcw, fcb, fcprojw, fcprojb) in zip(*blocks):
            n = F.layer_norm(h, (C,), ln1w, ln1b, 1e-5)
            qkv = F.linear(n, qkvw, qkvb).view(B, T, 3, NH, C // NH)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B,NH,T,HS) each
            a = attention(q, k, v).transpose(1, 2).reshape(B, T, C)
            h = h + F.linear(a, attprojw, attprojb)
            n = F.layer_norm(h, (C,), ln2w, ln2b, 1e-5)
            gelu = F.gelu(F.linear(n, fcw, fcb), approximate="tanh")
            h = h + F.linear(gelu, fcprojw, fcprojb)
        logits = F.linear(F.layer_norm(h, (C,), lnfw, lnfb, 1e-5), wte[: self.V])
        return logits, F.cross_entropy(logits.view(B * T, -1), y.reshape(B * T))


# ---- Llama 3: transformers' LlamaForCausalLM


@contextlib.contextmanager
def with_float32_as(dtype):
    """A context in which transformers finds dtype under the name torch.float32. It computes RMSNorm
    and RoPE's angles in torch.float32 even in a float64 model."""
    with mock.patch.multiple(torch, float=dtype, float32=dtype):
        with mock.patch.object(torch.Tensor, "float", lambda x: x.to(dtype)):
            yield


def half_split(weight, HS):
    """The rows of query or key heads in transformers' order, which rotates rows i and i + HS/2 of a
    head together. llm.c rotates rows 2i and 2i+1."""
    return weight.unflatten(0, (-1, HS // 2, 2)).transpose(1, 2).flatten(0, 2)


class Llama(NamedTuple):
    """The sizes of a Llama, in the order of a checkpoint's header, where they start at the third
    int; then the numbers of its second header, and whether the head is tied to wte. It has the same
    methods as GPT2."""
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

    CHECKPOINT = STATE = 20240803, 3  # magic, version
    FLAGS = [
        (None, "--kv-heads", "count", 4, "Llama's NKV, which divides NH"),
        (None, "--multiple-of", "count", 256, "the MLP's hidden channels, 8/3 C times "
         "--ffn-multiplier, are rounded up to a multiple of this"),
        (None, "--ffn-multiplier", "amount", 1.0, "see --multiple-of"),
        (None, "--norm-eps", "amount", 1e-5, "added to the mean square in RMSNorm"),
        (None, "--theta", "amount", 500000.0, "the base of RoPE's wavelengths"),
        (None, "--scaled", "count or 0", 0, "1: long wavelengths are scaled by 8, as in Llama 3.1; "
         "2 and more: by that, 32 in Llama 3.2"),
        (None, "--tied", "switch", 0, "1: wte is the head too"),
    ]

    @property
    def H(self):
        """The hidden channels of the MLP."""
        hidden = int(self.ffn_multiplier * int(8 * self.C / 3))
        return -(-hidden // self.multiple_of) * self.multiple_of

    @classmethod
    def from_flags(cls, flags):
        numbers = [flags.ffn_multiplier, flags.norm_eps, flags.theta]
        return cls(flags.max_seq_len, flags.vocab, flags.layers, flags.heads, flags.kv_heads,
                   flags.channels, flags.multiple_of, flags.scaled,
                   *np.float32(numbers).tolist(), flags.tied)  # rounded as in the file

    @classmethod
    def from_file(cls, data):
        """The shape in a checkpoint, given as int32. It is tied if its lm_head equals its wte."""
        shape = cls(*data[2:10].tolist(), *data[256:259].view("<f4").tolist(), 0)
        size, weights = shape.V * shape.C, data[512:]
        tied = np.array_equal(weights[:size], weights[size : 2 * size])
        return shape._replace(tied=int(tied))

    def check(self):
        s = self
        check(min(s[:7]) >= 1 and s.H >= 1, f"{s}, H={s.H}: expected sizes of at least 1")
        check(s.NH % s.NKV == 0, f"NH={s.NH}, NKV={s.NKV}: expected NH to be a multiple of NKV")
        check(s.C % (2 * s.NH) == 0, f"C={s.C}, NH={s.NH}: expected C to be a multiple of 2 NH")
        check(s.C % 32 == 0, f"C={s.C}: expected a multiple of 32")
        check(s.scaled >= 0 and s.tied in (0, 1), f"scaled={s.scaled}, tied={s.tied}: "
              "expected at least 0, and 0 or 1")
        check(s.eps > 0 and s.theta > 1, f"eps={s.eps}, theta={s.theta}: expected eps above 0 and "
              "theta above 1")

    def headers(self):
        """The bytes of both headers. Tied models are version 3.2, as Meta's are, others 3.1."""
        return (header(*self.CHECKPOINT, *self[:8], 3, 1 + self.tied)
                + header(*self[8:11], dtype="<f4"))

    def tensors(self):
        """As GPT2.tensors. Tensors that only the files have are of the kind "absent"."""
        L, C, H, HS = self.L, self.C, self.H, self.C // self.NH
        qkv = (self.NH + 2 * self.NKV) * HS
        return [
            ("wte", (self.V, C), "weight"),
            ("lm_head", (self.V, C), "absent" if self.tied else "weight"),
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

    def forward(self, weights, x, y, attention=None):
        """As GPT2.forward. transformers' model computes with views of our weights, so the gradients
        are in our order."""
        HS = self.C // self.NH
        views = {
            "model.embed_tokens": weights["wte"],
            "lm_head": weights["wte" if self.tied else "lm_head"],
            "model.norm": weights["lnfw"],
        }
        for l in range(self.L):
            q, k, v = weights["qkvw"][l].split([self.NH * HS, self.NKV * HS, self.NKV * HS])
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
            logits = torch.func.functional_call(
                llama_model(self).to(x.device), parameters, (x,), {"use_cache": False}).logits
        return logits, F.cross_entropy(logits.view(y.numel(), -1), y.reshape(-1))


@functools.cache
def llama_model(shape):
    """transformers' model of this shape, with RoPE's frequencies in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default"}
    if shape.scaled:
        factor = 8.0 if shape.scaled == 1 else float(shape.scaled)
        rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        max_position_embeddings=131072,  # Llama 3.1's, whatever maxT: RoPE does not depend on it
        vocab_size=shape.V, num_hidden_layers=shape.L, num_attention_heads=shape.NH,
        num_key_value_heads=shape.NKV, hidden_size=shape.C, intermediate_size=shape.H,
        rms_norm_eps=shape.eps, rope_parameters=rope | {"rope_theta": shape.theta},
        tie_word_embeddings=bool(shape.tied),
        attn_implementation="sdpa")  # the default, and in float64 where it is asked for
    with with_float32_as(torch.float64):
        return LlamaForCausalLM(config)


# ---- Flags

STEPS = 10
MODEL_FLAGS = [
    (None, "--layers", "count", 12, "L"),
    (None, "--heads", "count", 12, "NH; the head size HS is C / NH"),
    (None, "--channels", "count", 768, "C, a multiple of 32"),
    (None, "--vocab", "count", 50257, "V"),
    (None, "--max-seq-len", "count", 1024, "maxT, the rows of GPT-2's wpe"),
    (None, "--std", "amount", 0.02, "standard deviation of the random weights; a tiny model tells "
     "more with a larger one"),
]
RUN_FLAGS = [
    (None, "--batch", "count", 4, "B"),
    (None, "--seq-len", "count", 64, "T, at most maxT"),
    (None, "--seed", "count or 0", 1337, "of the tokens and the weights"),
    (None, "--learning-rate", "amount", 1e-4, "of AdamW"),
    (None, "--beta1", "fraction", 0.9, "decay of AdamW's first moment"),
    (None, "--beta2", "fraction", 0.999, "decay of AdamW's second moment"),
    (None, "--eps", "eps", 1e-8, "added to the root of AdamW's second moment"),
    (None, "--weight-decay", "amount", 0.01, "of matrices and embeddings"),
]
FLAGS = [
    (None, "prefix", argument("PREFIX"), None, "what the names of the files begin with"),
    (None, "--llama", "switch", 0, "Llama 3 instead of GPT-2"),
    (None, "--transformers", "switch", 0, "a folder of transformers, and logits; GPT-2 only"),
    (None, "--checkpoint", "name", None, "take shape and weights from this version-3 checkpoint"),
    (None, "--attention", ("softmax", "relu"), "softmax", "GPT-2's"),
    (None, "--autocast", "switch", 0, "also measure the errors of PyTorch's autocast to bf16"),
    *MODEL_FLAGS, *GPT2.FLAGS, *Llama.FLAGS, *RUN_FLAGS]
HYPERPARAMETERS = ["attention", "learning_rate", "beta1", "beta2", "eps", "weight_decay"]


def key_of(row):
    return row[1].removeprefix("--").replace("-", "_")


def read_flags(arguments):
    """The flags, with defaults. Raises UserError if one was given that has no meaning here."""
    flags = parse_flags(__doc__, FLAGS, arguments, defaults=False)

    def given(table):
        return " ".join(row[1] for row in table if getattr(flags, key_of(row)) is not None)

    extra = given([*MODEL_FLAGS, *GPT2.FLAGS, *Llama.FLAGS])
    check(not (flags.checkpoint and extra), f"--checkpoint brings its own model: leave out {extra}")
    extra = given(GPT2.FLAGS if flags.llama else Llama.FLAGS)
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


def random_weights(shape, std, generator):
    """GPT-2's initial weights, except that no bias is 0 and no norm weight is 1: these would hide a
    bias that is never added or a norm that is never scaled. Projections into the residual stream
    have std / sqrt(2L), since 2L of them add up in it."""
    mean_std = {"weight": (0, std), "residual": (0, std / math.sqrt(2 * shape.L)),
                "bias": (0, std), "norm": (1, std)}
    weights = {}
    for name, dims, kind in shape.tensors():
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
    shape = architecture.from_file(data)
    shape.check()
    rows, start = shape.tensors(), len(shape.headers())
    sizes = [math.prod(dims) for _, dims, _ in rows]
    found, expected = os.path.getsize(path), start + 4 * sum(sizes)
    check(found == expected, f"{path}: {found} bytes, expected {expected} for {shape}")
    values = torch.from_numpy(data[start // 4 :].view("<f4")).split(sizes)
    return shape, {name: value.double().view(dims)
                   for (name, dims, kind), value in zip(rows, values) if kind != "absent"}


def for_file(values, shape):
    """The bytes of weights or gradients in a file. A tied lm_head repeats wte, and biases that the
    model does not have are zeros."""
    for name, dims, _ in shape.tensors():
        value = values.get(name)
        if value is None:
            value = values["wte"] if name == "lm_head" else torch.zeros(dims)
        yield as_bytes(value)


# ---- A folder, or ten steps


def write_folder(prefix, shape, std, seed, B, T):
    """Let transformers save a random GPT-2 in the folder PREFIX, and write PREFIX_logits.npz:
    tokens (B,T) int32, and transformers' own logits (B,T,V), computed in float64, as fp32.

    As in random_weights, no bias is 0 and no norm weight is 1.
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


def autocast_errors(forward, weights, x, y, truth):
    """{tensor: relative error, by Frobenius norm} of PyTorch's mixed precision: weights in fp32,
    the forward pass and the loss under autocast to bfloat16, on a GPU if there is one. truth:
    "loss", "logits" and gradients in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: weight.detach().float().to(device).requires_grad_()
               for name, weight in weights.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        logits, loss = forward(weights, x.to(device), y.to(device))
    loss.backward()
    found = {"loss": loss, "logits": logits}
    found |= {name: weight.grad for name, weight in weights.items()}
    errors = {name: (found[name].cpu().double() - value).norm() / value.norm()
              for name, value in truth.items()}
    return {name: float(f"{error:.3g}") for name, error in errors.items()}


def main(arguments=None):
    flags = read_flags(arguments)
    architecture = Llama if flags.llama else GPT2
    if flags.checkpoint:
        shape, weights = read_checkpoint(flags.checkpoint, architecture)
    else:
        shape = architecture.from_flags(flags)
        shape.check()
    B, T = flags.batch, flags.seq_len
    check(T <= shape.maxT, f"--seq-len {T}: expected at most maxT, which is {shape.maxT}")
    if flags.transformers:
        return write_folder(flags.prefix, shape, flags.std, flags.seed, B, T)

    # Tokens are drawn first, so that a seed gives the same batch with and without --checkpoint.
    generator = torch.Generator().manual_seed(flags.seed)
    tokens = torch.randint(shape.V, (B, T + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    if not flags.checkpoint:
        weights = random_weights(shape, flags.std, generator)
        write(f"{flags.prefix}.bin", shape.headers(), *for_file(weights, shape))

    decayed = {name: kind in ("weight", "residual") for name, _, kind in shape.tensors()}
    groups = [{"params": [w.requires_grad_() for name, w in weights.items()
                          if decayed[name] == decay], "weight_decay": rate}
              for decay, rate in ((True, flags.weight_decay), (False, 0.0))]
    optimizer = torch.optim.AdamW(groups, lr=flags.learning_rate, betas=(flags.beta1, flags.beta2),
                                  eps=flags.eps)
    forward = functools.partial(
        shape.forward, attention=functools.partial(attention, kind=flags.attention))
    losses, norms, autocast = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits, loss = forward(weights, x, y)
        loss.backward()
        losses.append(loss.detach())
        gradients = {name: weight.grad for name, weight in weights.items()}
        norms.append(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        if step == 0:
            truth = {"loss": loss.detach(), "logits": logits.detach()}
            truth |= {name: gradient.clone() for name, gradient in gradients.items()}
            if flags.autocast:
                autocast["autocast_errors"] = autocast_errors(forward, weights, x, y, truth)
        optimizer.step()
    write(f"{flags.prefix}_debug_state.bin",
          header(*shape.STATE, B, T, *([STEPS] if flags.llama else [])),
          as_bytes(x, "<i4"), as_bytes(y, "<i4"), as_bytes(truth["logits"]),
          as_bytes(truth["loss"]), *for_file(truth, shape),
          *([as_bytes(torch.stack(losses)), as_bytes(torch.stack(norms))] if flags.llama else []))
    report = {name: getattr(flags, name) for name in HYPERPARAMETERS}
    report |= {"losses": [round(loss.item(), 9) for loss in losses]} | autocast
    write(f"{flags.prefix}_losses.json", json.dumps(report, indent=2).encode() + b"\n")


if __name__ == "__main__":
    run_main(main)
