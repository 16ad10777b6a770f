"""Convert GPT-2 or Llama 3 between a folder of Hugging Face's and the checkpoint that the trainers read.

    python -m dev.tools.convert gpt2 gpt2_124M.bin        # OpenAI's, from the hub; gpt2-medium, -large, -xl
    python -m dev.tools.convert FOLDER OUT.bin            # or a name on the hub: meta-llama/Llama-3.2-1B
    python -m dev.tools.convert FILE.safetensors OUT.bin  # without a config.json beside it: GPT-2
    python -m dev.tools.convert IN.bin FOLDER             # a folder that transformers loads

A folder has config.json, and the weights in model.safetensors, or in several such files and an index of them. Without
--dtype the numbers stay as they are, except that fp16 becomes fp32. The hub is the one of HF_ENDPOINT. It is asked
through huggingface_hub, which keeps what it downloads in HF_HOME, and with HF_HUB_OFFLINE=1 takes it from there.

A folder and a checkpoint hold the same tensors, with these differences.

GPT-2       In a folder a linear layer's weight is (in, out), and in a checkpoint (out, in). A checkpoint's wte has rows
            of zeros below its V words, so that they are a multiple of 128.
Llama 3     In a checkpoint RoPE rotates neighbouring rows 2i and 2i+1 of a query or key head together, as in Meta's own
            files; in a folder it rotates rows i and i + HS/2. And a checkpoint has zeros for the biases that GPT-2 has,
            and wte once more as lm_head if the two are tied. config.json keeps as llm_c what only a checkpoint's
            header says, so that a checkpoint becomes a folder and the same bytes again. (One of llm.c's master
            comes back in the format of its branch llama3.)

A folder that is written also gets GPT-2's tokenizer, if the model has GPT-2's words. No file says whether a model was
trained with `--attention relu`, which transformers does not know.

A safetensors file is the length of a JSON text in 8 bytes; that text, {name: {dtype, shape, data_offsets}}; and the
numbers. So NumPy maps it into memory, bfloat16 too, and a model is converted tensor by tensor.
"""
import argparse
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prepro_tinyshakespeare import (END_OF_TEXT, PRINTING, UserError, gpt2_encoding, replace_file,
                                    run)

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

from dev.common.bf16 import to_bf16
from dev.data.hub import ask
from dev.common.file_kinds import read_header
from dev.llama3.train_llama3 import Config3
from dev.runs.tokenizer import words_of
from train_gpt2 import BF16, Config, to_float

DTYPES = {"BF16": BF16, "F32": np.float32, "F16": np.float16}
SHARD_BYTES = 5 * 10**9  # the most that a file of a folder holds, unless one tensor is more
CHUNK = 2**24  # numbers that are converted at a time
GPT2_WORDS = 50257
TEXT_IDS = {GPT2_WORDS: (50256, 50256), 128256: (128000, 128001)}  # V: the tokens before and after a text
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names on the hub that have no owner before them
HUB_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
             "tokenizer.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
BUFFERS = r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)"  # no weights: what old versions of transformers saved
CONV1D = "c_attn.weight", "c_fc.weight", "c_proj.weight"  # GPT-2's linear layers
ROTATED = "q_proj.weight", "k_proj.weight"  # Llama's, of which RoPE rotates the results
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # RoPE's

# What a Llama 3 checkpoint's header says and config.json has no names for: it only has the H that these make, and
# factor 8 for scaled 1 and 8.
HEADER = {"multiple_of": (int,), "ffn_multiplier": (int, float), "scaled": (int,), "minor": (int,)}

# A checkpoint's tensors, and the folder's whose rows they hold one after the other. {} is the layer. None has no name
# in the folder: zeros.
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


# ---- What config.json says, and what these trainers can do


def check_config(path, config, wishes):
    """Raise UserError unless the dict of a config.json fulfils the wishes, each of them a name and what is accepted. A
    name that is left out has a default, which is."""
    for name, *accepted in wishes:
        found = config.get(name)
        if found is not None and found not in accepted:
            raise UserError(f"{path}: {name} is {found}; expected {' or '.join(map(str, accepted))}: "
                            "the trainer has nothing else")


def sizes_of(path, config, defaults):
    """The sizes of these names in the dict of a config.json; one that is left out has its default. Raises UserError."""
    sizes = []
    for name, default in defaults:
        size = default if config.get(name) is None else config[name]
        if type(size) is not int or not 0 < size < 2**24:
            raise UserError(f"{path}: {name} is {size}; expected a size of 1 to 2**24 - 1")
        sizes.append(size)
    return sizes


def padded(V):
    """Vp of V words, as llm.c has it: a multiple of 128."""
    return -(-V // 128) * 128


def read_gpt2(path, config):
    """The Config of the dict of a config.json. Raises UserError."""
    maxT, V, L, NH, C = sizes_of(path, config, (("n_positions", 1024), ("vocab_size", None), ("n_layer", None),
                                                ("n_head", None), ("n_embd", None)))
    check_config(path, config, (
        ("architectures", ["GPT2LMHeadModel"], ["GPT2Model"]), ("activation_function", "gelu_new", "gelu_pytorch_tanh"),
        ("layer_norm_epsilon", 1e-5), ("n_inner", 4 * C), ("tie_word_embeddings", True), ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False), ("reorder_and_upcast_attn", False), ("add_cross_attention", False)))
    c = Config(maxT, V, L, NH, C, padded(V))
    c.check(path)
    return c


def write_gpt2(c):
    """What config.json says of a Config, beside what it says of every model."""
    return {"n_positions": c.maxT, "n_layer": c.L, "n_head": c.NH, "n_embd": c.C, "n_inner": None,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}


def mlp_numbers(C, H):
    """(multiple_of, ffn_multiplier) that make H of C, as they are and rounded to fp32: Llama's own if they do; or None.
    """
    for multiple_of in (2**i for i in range(10, -1, -1)):
        middle = (H + 1 - multiple_of / 2) / int(8 * C / 3)
        for ffn_multiplier in (1.0, 1.3, 1.4, 1.5, *(round(middle, digits) for digits in range(1, 9))):
            if all(Config3(C=C, multiple_of=multiple_of, ffn_multiplier=number).H == H
                   for number in (ffn_multiplier, float(np.float32(ffn_multiplier)))):
                return multiple_of, ffn_multiplier
    return None


def with_header(path, c, kept):
    """The Config3 with the numbers of HEADER that a config.json kept. Raises UserError unless c has the same sizes."""
    ok = (isinstance(kept, dict) and kept.keys() == HEADER.keys()
          and all(type(kept[name]) in types and abs(kept[name]) < 2**31 for name, types in HEADER.items())
          and kept["multiple_of"] > 0 and kept["ffn_multiplier"] > 0)
    found = dataclasses.replace(c, **kept) if ok else None
    if not ok or (found.H, found.factor) != (c.H, c.factor):
        raise UserError(f"{path}: llm_c is {kept}; expected {', '.join(HEADER)} that make intermediate_size {c.H} and "
                        f"RoPE's factor {c.factor}, or no llm_c")
    return found


def read_llama(path, config):
    """The Config3 of the dict of a config.json. Raises UserError."""
    maxT, V, L, NH, NKV, C, H = sizes_of(path, config, (
        ("max_position_embeddings", 2048), ("vocab_size", None), ("num_hidden_layers", None),
        ("num_attention_heads", None), ("num_key_value_heads", config.get("num_attention_heads")),
        ("hidden_size", None), ("intermediate_size", None)))
    check_config(path, config, (("architectures", ["LlamaForCausalLM"]), ("hidden_act", "silu"),
                                ("attention_bias", False), ("mlp_bias", False), ("head_dim", C // NH)))
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise UserError(f"{path}: {name} is {config[name]}; expected an object or null")
    rope = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    rope = config.get("rope_parameters") or rope  # as transformers has written it since version 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling, factor, scaled = {name: rope.get(name) for name in SCALING}, rope.get("factor"), 0
    if kind != "default":
        if (kind, scaling) != ("llama3", SCALING) or factor not in range(2, 2**16):
            raise UserError(f"{path}: RoPE is of type {kind} with factor {factor}, {scaling}; expected default, or "
                            f"llama3 with a whole factor and {SCALING}")
        scaled = 1 if factor == 8 else int(factor)
    mlp = mlp_numbers(C, H)
    if not mlp:
        raise UserError(f"{path}: no multiple_of and ffn_multiplier of a checkpoint make intermediate_size {H} of "
                        f"hidden_size {C}")
    tied = bool(config.get("tie_word_embeddings"))
    eps, theta = config.get("rms_norm_eps") or 1e-6, rope.get("rope_theta") or 10000.0
    if not all(isinstance(number, (int, float)) and number > 0 for number in (eps, theta)):
        raise UserError(f"{path}: rms_norm_eps is {eps} and rope_theta {theta}; expected numbers above 0")
    # Of the versions 3.1 and 3.2, the tied models are 3.2.
    c = Config3(maxT, V, L, NH, C, 0, NKV, *mlp, eps, theta, scaled, 1 + tied, tied)
    if config.get("llm_c") is not None:
        c = with_header(path, c, config["llm_c"])
    c.check(path)
    return c


def write_llama(c):
    """What config.json says of a Config3, beside what it says of every model."""
    return {"max_position_embeddings": c.maxT, "num_hidden_layers": c.L, "num_attention_heads": c.NH,
            "num_key_value_heads": c.NKV, "hidden_size": c.C, "intermediate_size": c.H, "head_dim": c.C // c.NH,
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rms_norm_eps": c.eps,
            "rope_theta": c.theta, "tie_word_embeddings": c.tied,
            "rope_scaling": {"rope_type": "llama3", "factor": float(c.factor), **SCALING} if c.scaled else None,
            "llm_c": {name: getattr(c, name) for name in HEADER}}


class Architecture(NamedTuple):
    """What tells one kind of model from the other."""
    title: str
    model_type: str  # in config.json
    model_class: str  # of transformers
    names: dict
    prefix: str  # of the names in a folder, except lm_head's; some files leave it out
    rows: Callable  # config -> {a checkpoint's tensor: the rows of each of its parts, where it has several}
    read_config: Callable  # path of a config.json, its dict -> config. Raises UserError
    write_config: Callable  # config -> what is the architecture's own in config.json


ARCHITECTURES = {
    Config: Architecture("GPT-2", "gpt2", "GPT2LMHeadModel", GPT2_NAMES, "transformer.",
                         lambda c: {"wte": [c.V, c.Vp - c.V]}, read_gpt2, write_gpt2),
    Config3: Architecture("Llama 3", "llama", "LlamaForCausalLM", LLAMA_NAMES, "model.",
                          lambda c: {"qkvw": [heads * c.C // c.NH for heads in (c.NH, c.NKV, c.NKV)],
                                     "fcw": [c.H, c.H]}, read_llama, write_llama),
}


# ---- Tensors


def blocks(c, table):
    """The numbers of a checkpoint with this table, in their order, as (the folder's name of a tensor, or None for
    zeros; the shape of these rows in the checkpoint; the checkpoint's name of the tensor)."""
    architecture = ARCHITECTURES[type(c)]
    rows = architecture.rows(c)
    for row in table:
        count, *columns = row.shape
        for l in range(max(1, row.layers)):
            for name, part in zip(architecture.names.get(row.name, [None]), rows.get(row.name, [count])):
                yield name and name.format(l), (part, *columns), row.name


def shape_in_folder(name, shape):
    """The shape that a tensor has in a folder, of its shape in a checkpoint; or the other way round."""
    return shape[::-1] if name.endswith(CONV1D) else shape


def turned(name, tensor, HS, groups):
    """A tensor of a folder as a checkpoint has it, or the other way round. Where RoPE rotates rows, those of each head
    come in groups: 2 of HS/2, to become neighbours, or HS/2 of 2."""
    if name.endswith(CONV1D):
        return tensor.T
    if name.endswith(ROTATED):
        return tensor.reshape(-1, groups, HS // groups, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def stored_as(dtype, tensor):
    """The numbers of a tensor, in chunks of dtype."""
    numbers = tensor.reshape(-1)
    for chunk in (numbers[at : at + CHUNK] for at in range(0, numbers.size, CHUNK)):
        if chunk.dtype != dtype:
            chunk = chunk.astype(np.float32) if chunk.dtype == np.float16 else to_float(chunk)
            chunk = to_bf16(chunk) if dtype == BF16 else chunk
        yield chunk


# ---- The hub

def find_folder(name):
    """The path of a folder, which is downloaded if this is the name of a model on the hub. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    if name not in OPENAI and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise UserError(f"{name}: there is no such folder; expected one with config.json and model.safetensors, or a "
                        f"name on the hub: {', '.join(OPENAI)}, or one such as meta-llama/Llama-3.2-1B")
    folder = Path(ask(f"{name}: there is no such folder, and for the model of that name",
                      lambda hub: hub.snapshot_download(name, allow_patterns=list(HUB_FILES)), "give a folder"))
    print(f"downloaded to {folder}")
    return folder


# ---- Folders


def read_json(path):
    """The dict in a JSON file. Raises UserError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a folder of Hugging Face's") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: is no JSON ({e})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object, found a {type(found).__name__}")
    return found


def read_config(folder):
    """The config of a folder, by its config.json. Raises UserError where it is of something else."""
    path = folder / "config.json"
    config = read_json(path)
    for architecture in ARCHITECTURES.values():
        if config.get("model_type") == architecture.model_type:
            return architecture.read_config(path, config)
    expected = " or ".join(architecture.model_type for architecture in ARCHITECTURES.values())
    raise UserError(f"{path}: model_type is {config.get('model_type')}; expected {expected}: nothing else can be "
                    "converted")


def config_of_tensors(path, found):
    """The Config of a lone file of GPT-2, by the shapes of its tensors. Raises UserError."""
    prefix = ARCHITECTURES[Config].prefix
    names = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    wte, wpe = (names.get(f"{name}.weight") for name in ("wte", "wpe"))
    if wte is None or wpe is None or not wte.ndim == wpe.ndim == 2:
        raise UserError(f"{path}: has no wte.weight and wpe.weight of GPT-2, and other models can be converted with "
                        "their config.json alone; expected it in the same folder")
    C = wte.shape[1]
    if C % 64:
        raise UserError(f"{path}: without a config.json beside it heads have 64 channels, and C = {C} is no multiple")
    L = len({name.split(".")[1] for name in names if re.match(r"h\.\d+\.", name)})
    c = Config(len(wpe), len(wte), L, C // 64, C, padded(len(wte)))
    c.check(path)
    print(f"{path}: no config.json is beside it, so it has NH = {c.NH} heads of 64 channels, as OpenAI's models have")
    return c


def map_file(path):
    """{name: array} of a safetensors file, mapped into memory. Raises UserError."""
    try:
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int(data[:8].view("<u8")[0])
        header, tensors = json.loads(data[8:start].tobytes()), {}
        header.pop("__metadata__", None)
        for name, of in header.items():
            if re.fullmatch(BUFFERS, name):
                continue
            if of["dtype"] not in DTYPES:
                raise UserError(f"{path}: {name} is of type {of['dtype']}; expected {', '.join(DTYPES)}")
            first, last = of["data_offsets"]
            tensors[name] = data[start + first : start + last].view(DTYPES[of["dtype"]]).reshape(of["shape"])
        return tensors
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); is the download complete?") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: is no safetensors file, or truncated; is the download complete?") from None


def files_of(folder):
    """The paths of a folder's weights. Raises UserError."""
    index, path = folder / INDEX, folder / WEIGHTS
    if path.exists():
        return [path]
    if not index.exists():
        raise UserError(f"{folder}: has no {WEIGHTS}, nor {INDEX}; expected weights of this kind, which "
                        "transformers makes of a pytorch_model.bin with save_pretrained")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{index}: expected a weight_map, {{tensor: file}}")
    return [folder / file for file in sorted(set(places.values()))]


def same_bits(a, b):
    """Whether two arrays have the same type, shape and bits, NaNs too."""
    return a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def check_tensors(source, found, c):
    """{name: array} of a model, out of those that were found in its files, with whole names. Raises UserError unless
    they are all of a model of this config and nothing else."""
    architecture, whole = ARCHITECTURES[type(c)], {}
    embedding = architecture.names["wte"][0]
    for name, tensor in found.items():
        long = name if name == HEAD or name.startswith(architecture.prefix) else architecture.prefix + name
        if long in whole:
            raise UserError(f"{source}: has {long} twice, with and without {architecture.prefix}")
        whole[long] = tensor
    if getattr(c, "tied", True):
        head = whole.get(HEAD)
        if head is not None and embedding in whole and not same_bits(head, whole[embedding]):
            raise UserError(f"{source}: {HEAD} differs from {embedding}; expected a head that is tied to it")
        whole[HEAD] = whole.get(embedding)
    expected = {HEAD}
    for name, shape, _ in blocks(c, c.file_table()):
        if name is None:
            continue
        if whole.get(name) is None:
            raise UserError(f"{source}: its files have no {name}; is the download complete?")
        expected.add(name)
        shape = shape_in_folder(name, shape)
        if whole[name].shape != shape:
            raise UserError(f"{source}: {name} is of shape {whole[name].shape}; expected {shape}, by the model's sizes")
    for name in found:
        if name not in expected and architecture.prefix + name not in expected:
            raise UserError(f"{source}: {name} is no tensor of {architecture.title}, and nothing else can be converted")
    return whole


def folder_to_checkpoint(name, path, dtype=None):
    """Convert a folder, a model of the hub, or one file. Raises UserError; an older checkpoint is then untouched."""
    if str(name).endswith(".safetensors") and not Path(name).is_dir():
        source = Path(name)
        found = map_file(source)
        beside = source.with_name("config.json").exists()
        c = read_config(source.parent) if beside else config_of_tensors(source, found)
    else:
        source = find_folder(name)
        c = read_config(source)
        found = {name: array for file in files_of(source) for name, array in map_file(file).items()}
        if type(c) is Config3 and (source / "tokenizer.json").exists():
            print(f"{source / 'tokenizer.json'} is for dev/llama3/tokens.py")
    found = check_tensors(source, found, c)
    if dtype is None:
        dtype = BF16 if all(tensor.dtype == BF16 for tensor in found.values()) else np.float32

    def tensors():
        for name, shape, _ in blocks(c, c.file_table()):
            tensor = np.zeros(shape, dtype) if name is None else turned(name, found[name], c.C // c.NH, 2)
            yield from stored_as(dtype, tensor)

    version = next(version for version, stored in c.STORED.items() if stored == dtype)
    replace_file(path, itertools.chain(c.headers(version), tensors()))


def write_safetensors(path, tensors, dtype, HS):
    """Write {name: array of a checkpoint}. Raises UserError."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    name_of_dtype = next(name for name, stored in DTYPES.items() if stored == dtype)
    for name, tensor in tensors.items():
        end = at + tensor.size * np.dtype(dtype).itemsize
        header[name] = {"dtype": name_of_dtype, "shape": shape_in_folder(name, tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = (chunk for name, tensor in tensors.items()
               for chunk in stored_as(dtype, turned(name, tensor, HS, HS // 2)))
    replace_file(path, (chunk for part in ([np.uint64(len(text)), text], numbers) for chunk in part))


def write_objects(folder, objects):
    """Write {name of a file: what it holds as JSON} into a folder. Raises UserError."""
    for file, found in objects.items():
        replace_file(folder / file, [json.dumps(found, indent=2).encode() + b"\n"])


def named_tensors(path, c, stored, header):
    """(name, array) of a checkpoint's tensors that a folder has, too, as the checkpoint has them. Raises UserError."""
    table = c.file_table(stored, header)
    body = np.memmap(path, stored, "r", Path(path).stat().st_size - sum(row.nbytes for row in table))
    at = 0
    for name, shape, row in blocks(c, table):
        tensor, at = body[at : at + math.prod(shape)].reshape(shape), at + math.prod(shape)
        if name is None and to_float(tensor).any():
            raise UserError(f"{path}: {row} has other numbers than zeros below its V = {c.V} words; expected padding")
        if name and not (name == HEAD and c.tied):
            yield name, tensor


def checkpoint_to_folder(path, folder, dtype=None):
    """Convert a checkpoint. Raises UserError."""
    header = read_header(path, *(kind.FILE for kind in ARCHITECTURES))
    kind = next(kind for kind in ARCHITECTURES if kind.FILE.magic == header[0])
    c, architecture, folder = kind.from_file(path), ARCHITECTURES[kind], Path(folder)
    stored = c.STORED[header[1]]
    dtype = dtype or stored
    if any(folder.glob("*.safetensors*")):
        raise UserError(f"{folder}: has weights in it already; give a new folder, or delete them")
    shards, room = [{}], SHARD_BYTES
    for name, tensor in named_tensors(path, c, stored, header):
        nbytes = tensor.size * np.dtype(dtype).itemsize
        if shards[-1] and nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name], room = tensor, room - nbytes
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, tensors in zip(files, shards):
        write_safetensors(folder / file, tensors, dtype, c.C // c.NH)
    begin, end = TEXT_IDS.get(c.V, (None, None))
    objects = {"config.json": {
        "architectures": [architecture.model_class], "model_type": architecture.model_type,
        "torch_dtype": "bfloat16" if dtype == BF16 else "float32", "vocab_size": c.V, **architecture.write_config(c),
        "bos_token_id": begin, "eos_token_id": end}}
    if len(shards) > 1:
        objects[INDEX] = {
            "metadata": {"total_size": sum(tensor.size for tensors in shards for tensor in tensors.values())
                         * np.dtype(dtype).itemsize},
            "weight_map": {name: file for file, tensors in zip(files, shards) for name in tensors}}
    write_objects(folder, objects)
    try:
        if c.V != GPT2_WORDS:
            raise UserError(f"GPT-2's has {GPT2_WORDS} words, and this model V = {c.V}; copy its own to {folder}")
        write_tokenizer(folder, gpt2_encoding(), c.maxT)
    except UserError as e:
        print(f"no tokenizer is written: {e}")


# ---- GPT-2's tokenizer


def letters():
    """{byte: its letter} of Hugging Face's vocabularies: itself where it prints, else one from U+0100 on."""
    others = [b for b in range(256) if b not in PRINTING]
    return {b: chr(b) for b in PRINTING} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def merges_of(ranks):
    """The pairs of words that byte-pair encoding joins, the earliest first, of {word: its rank}, all bytes.

    A word longer than a byte comes from the join of two parts, and these from earlier joins: of all neighbours, those
    are joined first whose word has the lowest rank. Raises UserError where that does not lead to a word.
    """
    for word in sorted(ranks, key=ranks.get):
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 2:
            joined = [ranks.get(first + second, math.inf) for first, second in itertools.pairwise(parts)]
            i = joined.index(min(joined))
            if joined[i] == math.inf:
                raise UserError(f"tiktoken's vocabulary has {word}, which no joins of its other words make")
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield tuple(parts)


def write_tokenizer(folder, encoding, maxT):
    """Write the files from which transformers makes GPT-2's tokenizer, of tiktoken's encoding. Raises UserError."""
    words, letter = words_of(encoding), letters()
    spelled = lambda word: "".join(letter[b] for b in word)
    merges = merges_of({word: i for i, word in words.items() if word != END_OF_TEXT.encode()})
    lines = ["#version: 0.2", *(f"{spelled(first)} {spelled(second)}" for first, second in merges)]
    replace_file(folder / "merges.txt", ["\n".join(lines).encode() + b"\n"])
    write_objects(folder, {
        "vocab.json": {spelled(word): i for i, word in sorted(words.items())},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "model_max_length": maxT, "add_prefix_space": False,
            "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}})


# ---- The program


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a folder, a name on the hub, a .safetensors file, or a checkpoint, *.bin")
    parser.add_argument("target", help="the checkpoint, *.bin, or the folder, that is written")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of what is written (default: the source's)")

    def refuse(message):
        raise UserError(f"{message}; --help says how it is used")

    parser.error = refuse
    flags = parser.parse_args(arguments)
    from_checkpoint = flags.source.endswith(".bin")
    if from_checkpoint == flags.target.endswith(".bin"):
        raise UserError(f"{flags.source} {flags.target}: expected one of them to be a checkpoint, which ends in .bin")
    if flags.target.endswith(".safetensors"):
        raise UserError(f"{flags.target}: expected a folder, since the weights are not all that is written")
    convert = checkpoint_to_folder if from_checkpoint else folder_to_checkpoint
    convert(flags.source, flags.target, {"fp32": np.float32, "bf16": BF16, None: None}[flags.dtype])
    print(f"wrote {flags.target}")


if __name__ == "__main__":
    run(main)
