"""For dev/tools/convert.py: how Hugging Face's config.json and a checkpoint's sizes translate into
each other, and the names of tensors in both."""
import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dev.common.config import Config, padded
from dev.llama3.train_llama3 import Config3
from train_gpt2 import UserError, replace_file

HEAD = "lm_head.weight"
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0,  # RoPE's
           "original_max_position_embeddings": 8192}

# Fields of a Llama 3 checkpoint's header that config.json has no names for. It has only H, which
# follows from the first two, and one factor, 8, for both scaled 1 and scaled 8.
HEADER = {"multiple_of": (int,), "ffn_multiplier": (int, float), "scaled": (int,), "minor": (int,)}

# {a checkpoint's tensor: the folder's tensors whose rows it holds, in order}. {} is the layer. None
# is zeros, which a folder does not have.
GPT2_NAMES = {
    "wte": ["transformer.wte.weight", None],
    "wpe": ["transformer.wpe.weight"],
    "ln1w": ["transformer.h.{}.ln_1.weight"],
    "ln1b": ["transformer.h.{}.ln_1.bias"],
    "qkvw": ["transformer.h.{}.attn.c_attn.weight"],
    "qkvb": ["transformer.h.{}.attn.c_attn.bias"],
    "attprojw": ["transformer.h.{}.attn.c_proj.weight"],
    "attprojb": ["transformer.h.{}.attn.c_proj.bias"],
    "ln2w": ["transformer.h.{}.ln_2.weight"],
    "ln2b": ["transformer.h.{}.ln_2.bias"],
    "fcw": ["transformer.h.{}.mlp.c_fc.weight"],
    "fcb": ["transformer.h.{}.mlp.c_fc.bias"],
    "fcprojw": ["transformer.h.{}.mlp.c_proj.weight"],
    "fcprojb": ["transformer.h.{}.mlp.c_proj.bias"],
    "lnfw": ["transformer.ln_f.weight"],
    "lnfb": ["transformer.ln_f.bias"],
}
LLAMA_NAMES = {
    "wte": ["model.embed_tokens.weight"],
    "lm_head": [HEAD],
    "ln1w": ["model.layers.{}.input_layernorm.weight"],
    "qkvw": [f"model.layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"],
    "attprojw": ["model.layers.{}.self_attn.o_proj.weight"],
    "ln2w": ["model.layers.{}.post_attention_layernorm.weight"],
    "fcw": [f"model.layers.{{}}.mlp.{part}_proj.weight" for part in ("up", "gate")],
    "upw": ["model.layers.{}.mlp.up_proj.weight"],  # of llm.c's master, which has them apart
    "gatew": ["model.layers.{}.mlp.gate_proj.weight"],
    "fcprojw": ["model.layers.{}.mlp.down_proj.weight"],
    "lnfw": ["model.norm.weight"],
}


# ---- JSON


def read_json(path):
    """The dict in a JSON file. Raises UserError."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a folder of Hugging "
                        "Face's") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: is no JSON ({e})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object, found a {type(found).__name__}")
    return found


def write_objects(folder, objects):
    """Write {name of a file: an object to store as JSON} into a folder. Raises UserError."""
    for file, found in objects.items():
        replace_file(folder / file, [json.dumps(found, indent=2).encode() + b"\n"])


# ---- What config.json says, and what these trainers can do


def check_config(path, config, wishes):
    """Raise UserError if the dict of a config.json has other values than the accepted ones. wishes:
    (name, accepted values ...). A name may be missing."""
    for name, *accepted in wishes:
        found = config.get(name)
        if found is not None and found not in accepted:
            raise UserError(f"{path}: {name} is {found}; expected "
                            f"{' or '.join(map(str, accepted))}: the trainer knows nothing else")


def sizes_of(path, config, defaults):
    """Sizes from the dict of a config.json. defaults: (name, default) of each. Raises UserError."""
    sizes = []
    for name, default in defaults:
        size = default if config.get(name) is None else config[name]
        if type(size) is not int or not 0 < size < 2**24:
            raise UserError(f"{path}: {name} is {size}; expected a size of 1 to 2**24 - 1")
        sizes.append(size)
    return sizes


def read_gpt2(path, config):
    """The Config of the dict of a config.json. Raises UserError."""
    maxT, V, L, NH, C = sizes_of(path, config,
                                 (("n_positions", 1024), ("vocab_size", None), ("n_layer", None),
                                  ("n_head", None), ("n_embd", None)))
    check_config(path, config, (
        ("architectures", ["GPT2LMHeadModel"], ["GPT2Model"]),
        ("activation_function", "gelu_new", "gelu_pytorch_tanh"), ("layer_norm_epsilon", 1e-5),
        ("n_inner", 4 * C), ("tie_word_embeddings", True), ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False), ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False)))
    c = Config(maxT, V, L, NH, C, padded(V))
    c.check(path)
    return c


def write_gpt2(c):
    """The part of config.json that only GPT-2 has."""
    return {"n_positions": c.maxT, "n_layer": c.L, "n_head": c.NH, "n_embd": c.C, "n_inner": None,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True}


def mlp_numbers(C, H):
    """(multiple_of, ffn_multiplier) that give H, also when rounded to fp32; Llama's own if they do.
    None if there are none."""
    for multiple_of in (2**i for i in range(10, -1, -1)):
        middle = (H + 1 - multiple_of / 2) / int(8 * C / 3)
        for ffn_multiplier in (1.0, 1.3, 1.4, 1.5,
                               *(round(middle, digits) for digits in range(1, 9))):
            if all(Config3(C=C, multiple_of=multiple_of, ffn_multiplier=number).H == H
                   for number in (ffn_multiplier, float(np.float32(ffn_multiplier)))):
                return multiple_of, ffn_multiplier
    return None


def with_header(path, c, kept):
    """c with the fields of HEADER that a config.json kept. Raises UserError if they change its
    sizes."""
    ok = (isinstance(kept, dict) and kept.keys() == HEADER.keys()
          and all(type(kept[name]) in types and abs(kept[name]) < 2**31
                  for name, types in HEADER.items()) and kept["multiple_of"] > 0
          and kept["ffn_multiplier"] > 0)
    found = dataclasses.replace(c, **kept) if ok else None
    if not ok or (found.H, found.factor) != (c.H, c.factor):
        raise UserError(f"{path}: llm_c is {kept}; expected {', '.join(HEADER)} that make "
                        f"intermediate_size {c.H} and RoPE's factor {c.factor}, or no llm_c")
    return found


def read_llama(path, config):
    """The Config3 of the dict of a config.json. Raises UserError."""
    maxT, V, L, NH, NKV, C, H = sizes_of(path, config, (
        ("max_position_embeddings", 2048), ("vocab_size", None), ("num_hidden_layers", None),
        ("num_attention_heads", None), ("num_key_value_heads", config.get("num_attention_heads")),
        ("hidden_size", None), ("intermediate_size", None)))
    check_config(path, config, (("architectures", ["LlamaForCausalLM"]), ("hidden_act", "silu"),
                                ("attention_bias", False), ("mlp_bias", False),
                                ("head_dim", C // NH)))
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise UserError(f"{path}: {name} is {config[name]}; expected an object or null")
    rope = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    rope = config.get("rope_parameters") or rope  # the name since transformers 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling, factor, scaled = {name: rope.get(name) for name in SCALING}, rope.get("factor"), 0
    if kind != "default":
        if (kind, scaling) != ("llama3", SCALING) or factor not in range(2, 2**16):
            raise UserError(f"{path}: RoPE is of type {kind} with factor {factor}, {scaling}; "
                            f"expected default, or llama3 with a whole factor and {SCALING}")
        scaled = 1 if factor == 8 else int(factor)
    mlp = mlp_numbers(C, H)
    if not mlp:
        raise UserError(f"{path}: no multiple_of and ffn_multiplier of a checkpoint make "
                        f"intermediate_size {H} of hidden_size {C}")
    tied = bool(config.get("tie_word_embeddings"))
    eps, theta = config.get("rms_norm_eps") or 1e-6, rope.get("rope_theta") or 10000.0
    if not all(isinstance(number, (int, float)) and number > 0 for number in (eps, theta)):
        raise UserError(f"{path}: rms_norm_eps is {eps} and rope_theta {theta}; expected numbers "
                        "above 0")
    # Tied models are version 3.2, the others 3.1.
    c = Config3(maxT, V, L, NH, C, 0, NKV, *mlp, eps, theta, scaled, 1 + tied, tied)
    if config.get("llm_c") is not None:
        c = with_header(path, c, config["llm_c"])
    c.check(path)
    return c


def write_llama(c):
    """The part of config.json that only Llama has."""
    scaling = {"rope_type": "llama3", "factor": float(c.factor), **SCALING}
    return {"max_position_embeddings": c.maxT, "num_hidden_layers": c.L,
            "num_attention_heads": c.NH, "num_key_value_heads": c.NKV, "hidden_size": c.C,
            "intermediate_size": c.H, "head_dim": c.C // c.NH, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "rms_norm_eps": c.eps,
            "rope_theta": c.theta, "tie_word_embeddings": c.tied,
            "rope_scaling": scaling if c.scaled else None,
            "llm_c": {name: getattr(c, name) for name in HEADER}}


class Architecture(NamedTuple):
    """How an architecture is written in a folder."""
    title: str
    model_type: str  # in config.json
    model_class: str  # of transformers
    names: dict
    prefix: str  # of the names in a folder, except lm_head's; some files leave it out
    rows: Callable  # config -> {a checkpoint's tensor with several parts: the rows of each part}
    read_config: Callable  # path of a config.json, its dict -> config. Raises UserError
    write_config: Callable  # config -> its part of config.json


ARCHITECTURES = {
    Config: Architecture("GPT-2", "gpt2", "GPT2LMHeadModel", GPT2_NAMES, "transformer.",
                         lambda c: {"wte": [c.V, c.Vp - c.V]}, read_gpt2, write_gpt2),
    Config3: Architecture("Llama 3", "llama", "LlamaForCausalLM", LLAMA_NAMES, "model.",
                          lambda c: {"qkvw": [heads * c.C // c.NH
                                              for heads in (c.NH, c.NKV, c.NKV)],
                                     "fcw": [c.H, c.H]}, read_llama, write_llama),
}


def read_config(folder):
    """The config of a folder. Raises UserError."""
    path = folder / "config.json"
    config = read_json(path)
    for architecture in ARCHITECTURES.values():
        if config.get("model_type") == architecture.model_type:
            return architecture.read_config(path, config)
    expected = " or ".join(architecture.model_type for architecture in ARCHITECTURES.values())
    raise UserError(f"{path}: model_type is {config.get('model_type')}; expected {expected}: only "
                    "these can be converted")
