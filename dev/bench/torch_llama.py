"""Llama 3 in PyTorch: transformers' LlamaForCausalLM, with weights in the order of llm.c's branch
llama3. It has the same functions as dev/bench/torch_gpt2.py."""
import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

from dev.bench.torch_gpt2 import check, header

CHECKPOINT = STATE = 20240803, 3  # magic, version
FLAGS = [
    (None, "--kv-heads", "count", 4, "Llama's NKV, which divides NH"),
    (None, "--multiple-of", "count", 256, "the MLP's hidden channels, 8/3 C times "
     "--ffn-multiplier, are rounded up to a multiple of this"),
    (None, "--ffn-multiplier", "rate", 1.0, "see --multiple-of"),
    (None, "--norm-eps", "rate", 1e-5, "added to the mean square in RMSNorm"),
    (None, "--theta", "rate", 500000.0, "the base of RoPE's wavelengths"),
    (None, "--scaled", "count or 0", 0, "1: long wavelengths are scaled by 8, as in Llama 3.1; "
     "2 and more: by that, 32 in Llama 3.2"),
    (None, "--tied", "switch", 0, "1: wte is the head too"),
]


class LlamaShape(NamedTuple):
    """The sizes of a Llama, in the order of a checkpoint's header, where they start at the third
    int; then the numbers of its second header, and whether the head is tied to wte."""
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
        hidden = int(self.ffn_multiplier * int(8 * self.C / 3))
        return -(-hidden // self.multiple_of) * self.multiple_of


def shape_of_flags(flags):
    numbers = [flags.ffn_multiplier, flags.norm_eps, flags.theta]
    return LlamaShape(flags.max_seq_len, flags.vocab, flags.layers, flags.heads, flags.kv_heads,
                      flags.channels, flags.multiple_of, flags.scaled,
                      *np.float32(numbers).tolist(), flags.tied)  # rounded as in the file


def shape_of_file(data):
    """The shape in a checkpoint, given as int32. It is tied if its lm_head equals its wte."""
    shape = LlamaShape(*data[2:10].tolist(), *data[256:259].view("<f4").tolist(), 0)
    size, weights = shape.V * shape.C, data[512:]
    return shape._replace(tied=int(np.array_equal(weights[:size], weights[size : 2 * size])))


def check_shape(s):
    check(min(s[:7]) >= 1 and s.H >= 1, f"{s}, H={s.H}: expected sizes of at least 1")
    check(s.NH % s.NKV == 0, f"NH={s.NH}, NKV={s.NKV}: expected NH to be a multiple of NKV")
    check(s.C % (2 * s.NH) == 0, f"C={s.C}, NH={s.NH}: expected C to be a multiple of 2 NH")
    check(s.C % 32 == 0, f"C={s.C}: expected a multiple of 32")
    check(s.scaled >= 0 and s.tied in (0, 1), f"scaled={s.scaled}, tied={s.tied}: "
          "expected at least 0, and 0 or 1")
    check(s.eps > 0 and s.theta > 1, f"eps={s.eps}, theta={s.theta}: expected eps above 0 and "
          "theta above 1")


def headers(shape):
    """The bytes of both headers. Tied models are version 3.2, as Meta's are, others 3.1."""
    return (header(*CHECKPOINT, *shape[:8], 3, 1 + shape.tied)
            + header(*shape[8:11], dtype="<f4"))


def tensors(shape):
    """As torch_gpt2.tensors. Tensors that only the files have are of the kind "absent"."""
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
    """A context in which transformers finds dtype under the name torch.float32. It computes RMSNorm
    and RoPE's angles in torch.float32 even in a float64 model."""
    with mock.patch.multiple(torch, float=dtype, float32=dtype):
        with mock.patch.object(torch.Tensor, "float", lambda x: x.to(dtype)):
            yield


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


def half_split(weight, HS):
    """The rows of query or key heads in transformers' order, which rotates rows i and i + HS/2 of a
    head together. llm.c rotates rows 2i and 2i+1."""
    return weight.unflatten(0, (-1, HS // 2, 2)).transpose(1, 2).flatten(0, 2)


def forward(weights, shape, x, y, kind):
    """As torch_gpt2.forward. transformers' model computes with views of our weights, so the
    gradients are in our order."""
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
