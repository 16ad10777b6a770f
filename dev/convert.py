"""Convert Llama 3 between a folder of Hugging Face's and the checkpoint that dev/llama3/train_llama3.py reads.

    python dev/convert.py FOLDER OUT.bin [--dtype bf16]    # a folder, or a name on the hub: meta-llama/Llama-3.2-1B
    python dev/convert.py IN.bin FOLDER [--dtype bf16]

A folder has config.json, and the weights in model.safetensors, or in several such files and an index of them. Without
--dtype the numbers stay as they are, except that fp16 becomes fp32.

The two hold the same tensors, with two differences. In a checkpoint RoPE rotates neighbouring rows 2i and 2i+1 of a
query or key head together, as in Meta's own files; in a folder it rotates rows i and i + HS/2. And a checkpoint has
zeros for the biases that GPT-2 has, and wte once more as lm_head if the two are tied.

A safetensors file is the length of a JSON text in 8 bytes; that text, {name: {dtype, shape, data_offsets}}; and the
numbers. So NumPy maps it into memory, bfloat16 too, and a model is converted tensor by tensor.
"""
import argparse
import itertools
import json
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from prepro_tinyshakespeare import BF16, UserError, read_header, replace_file, run, to_bf16, to_float  # noqa: E402

import numpy as np  # noqa: E402  (after prepro_tinyshakespeare, which has said how its threads are to wait)

from dev.llama3.train_llama3 import Config3  # noqa: E402

DTYPES = {"BF16": BF16, "F32": np.float32, "F16": np.float16}
SHARD_BYTES = 5 * 10**9  # the most that a file of a folder holds, unless one tensor is more
CHUNK = 2**24  # numbers that are converted at a time
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # RoPE's
TEXT_IDS = {50257: (50256, 50256), 128256: (128000, 128001)}  # V: the tokens before and after a text
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = {  # a checkpoint's tensors, and the folder's whose rows they hold one after the other; {}: the layer
    "wte": [EMBEDDING],
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


# ---- Tensors


def blocks(c, table):
    """The numbers of a checkpoint with this table, in their order, as (the folder's name of a tensor, or None for
    zeros; its shape)."""
    rows = {"qkvw": [heads * c.C // c.NH for heads in (c.NH, c.NKV, c.NKV)], "fcw": [c.H, c.H]}
    for row in table:
        names, (count, *columns) = NAMES.get(row.name, [None]), row.shape
        for l in range(max(1, row.layers) if names[0] else 1):
            for name, part in zip(names, rows.get(row.name, [count])):
                yield (name.format(l), (part, *columns)) if name else (None, row.whole_shape)


def reordered(name, tensor, HS, groups):
    """A tensor with the rows of each head in their other order, if RoPE rotates them. They come in groups: 2 of HS/2,
    for neighbours, or HS/2 of 2."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    return tensor.reshape(-1, groups, HS // groups, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def stored_as(dtype, tensor):
    """The numbers of a tensor, in chunks of dtype."""
    numbers = tensor.reshape(-1)
    for chunk in (numbers[at : at + CHUNK] for at in range(0, numbers.size, CHUNK)):
        if chunk.dtype != dtype:
            chunk = chunk.astype(np.float32) if chunk.dtype == np.float16 else to_float(chunk)
            chunk = to_bf16(chunk) if dtype == BF16 else chunk
        yield chunk


# ---- Folders


def find_folder(name):
    """The path of a folder, which is downloaded if this is the name of a model on the hub. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise UserError(f"{name}: there is no such folder; expected one with config.json and model.safetensors, or a "
                        "name on the hub such as meta-llama/Llama-3.2-1B")
    try:
        from huggingface_hub import snapshot_download
        folder = Path(snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*", "tokenizer.json"]))
        print(f"downloaded to {folder}; its tokenizer.json is for dev/llama3/tokens.py")
        return folder
    except ImportError:
        raise UserError(f"{name}: there is no such folder, and to download it huggingface_hub is missing: "
                        "pip install huggingface_hub") from None
    except Exception as e:  # whatever its HTTP library raises
        kind = type(e).__name__
        advice = {"GatedRepoError": f"accept its licence at https://huggingface.co/{name}, then `hf auth login`",
                  "RepositoryNotFoundError": "it has no such model, or shows it only after `hf auth login`",
                  }.get(kind, "connect to the network, or give a folder")
        raise UserError(f"{name}: there is no such folder, and the hub did not give it ({kind}): {advice}") from None


def read_json(path):
    """The dict in a JSON file. Raises UserError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a folder of Hugging Face's") from None
    except ValueError as e:
        raise UserError(f"{path}: is no JSON ({e})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object, found a {type(found).__name__}")
    return found


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


def read_config(folder):
    """The Config3 of a folder's config.json. Raises UserError where it is something else."""
    path = folder / "config.json"
    config = read_json(path)
    sizes = {}
    for name, default in (("max_position_embeddings", 2048), ("vocab_size", None), ("num_hidden_layers", None),
                          ("num_attention_heads", None), ("num_key_value_heads", config.get("num_attention_heads")),
                          ("hidden_size", None), ("intermediate_size", None)):
        sizes[name] = size = default if config.get(name) is None else config[name]
        if type(size) is not int or not 0 < size < 2**24:
            raise UserError(f"{path}: {name} is {size}; expected a size of 1 to 2**24 - 1")
    maxT, V, L, NH, NKV, C, H = sizes.values()
    for name, wish in (("model_type", "llama"), ("architectures", ["LlamaForCausalLM"]), ("hidden_act", "silu"),
                       ("attention_bias", False), ("mlp_bias", False), ("head_dim", C // NH)):
        found = wish if config.get(name) is None else config[name]
        if found != wish:
            raise UserError(f"{path}: {name} is {found}; expected {wish}: only Llama 3 can be converted")
    rope = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    rope = config.get("rope_parameters") or rope  # as transformers has written it since version 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling, factor, scaled = {name: rope.get(name) for name in SCALING}, rope.get("factor"), 0
    if kind != "default":
        if (kind, scaling) != ("llama3", SCALING) or factor not in range(2, 1024):
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
    c.check(path)
    return c


def map_file(path):
    """{name: array} of a safetensors file, mapped into memory. Raises UserError."""
    try:
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int(data[:8].view("<u8")[0])
        header, tensors = json.loads(data[8:start].tobytes()), {}
        header.pop("__metadata__", None)
        for name, of in header.items():
            if of["dtype"] not in DTYPES:
                raise UserError(f"{path}: {name} is of type {of['dtype']}; expected {', '.join(DTYPES)}")
            first, last = of["data_offsets"]
            tensors[name] = data[start + first : start + last].view(DTYPES[of["dtype"]]).reshape(of["shape"])
        return tensors
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); is the download complete?") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path}: is no safetensors file, or truncated; is the download complete?") from None


def map_folder(folder, c):
    """{name: array} of a folder's weights, mapped into memory: just those of the model. Raises UserError."""
    index, files = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
    if not files[0].exists() and index.exists():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    found = {name: array for path in files for name, array in map_file(path).items()}
    if c.tied:
        found[HEAD] = found.get(EMBEDDING)
    expected = {name: shape for name, shape in blocks(c, c.file_table()) if name}
    for name, shape in expected.items():
        if found.get(name) is None:
            raise UserError(f"{folder}: its files have no {name}; is the download complete?")
        if found[name].shape != shape:
            raise UserError(f"{folder}: {name} is of shape {found[name].shape}, and config.json makes it {shape}")
    for name in found.keys() - expected.keys():
        if not name.endswith("rotary_emb.inv_freq"):  # which old versions of transformers saved
            raise UserError(f"{folder}: {name} is no tensor of Llama 3, which alone can be converted")
    return found


def folder_to_checkpoint(name, path, dtype=None):
    """Convert a folder. Raises UserError; an older checkpoint is then untouched."""
    folder = find_folder(name)
    c = read_config(folder)
    found = map_folder(folder, c)
    if dtype is None:
        dtype = BF16 if all(tensor.dtype == BF16 for tensor in found.values()) else np.float32

    def tensors():
        for name, shape in blocks(c, c.file_table()):
            tensor = np.zeros(shape, dtype) if name is None else reordered(name, found[name], c.C // c.NH, 2)
            yield from stored_as(dtype, tensor)

    version = next(version for version, stored in c.STORED.items() if stored == dtype)
    replace_file(path, itertools.chain(c.headers(version), tensors()))


def write_safetensors(path, tensors, dtype, HS):
    """Write {name: array of a checkpoint}. Raises UserError."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    name_of_dtype = next(name for name, stored in DTYPES.items() if stored == dtype)
    for name, tensor in tensors.items():
        end = at + tensor.size * np.dtype(dtype).itemsize
        header[name], at = {"dtype": name_of_dtype, "shape": tensor.shape, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = (chunk for name, tensor in tensors.items()
               for chunk in stored_as(dtype, reordered(name, tensor, HS, HS // 2)))
    replace_file(path, (chunk for part in ([np.uint64(len(text)), text], numbers) for chunk in part))


def checkpoint_to_folder(path, folder, dtype=None):
    """Convert a checkpoint. Raises UserError."""
    c, header = Config3.from_file(path), read_header(path, Config3.FILE)
    stored, folder = c.STORED[header[1]], Path(folder)
    table, dtype = c.file_table(stored, header), dtype or stored
    body = np.memmap(path, stored, "r", Path(path).stat().st_size - sum(row.nbytes for row in table))
    if any(folder.glob("*.safetensors*")):
        raise UserError(f"{folder}: has weights in it already; give a new folder, or delete them")
    shards, room, at = [{}], SHARD_BYTES, 0
    for name, shape in blocks(c, table):
        tensor, at = body[at : at + math.prod(shape)].reshape(shape), at + math.prod(shape)
        if name and not (name == HEAD and c.tied):
            nbytes = tensor.size * np.dtype(dtype).itemsize
            if shards[-1] and nbytes > room:
                shards.append({})
                room = SHARD_BYTES
            shards[-1][name], room = tensor, room - nbytes
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, tensors in zip(files, shards):
        write_safetensors(folder / file, tensors, dtype, c.C // c.NH)
    begin, end = TEXT_IDS.get(c.V, (None, None))
    objects = {"config.json": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "torch_dtype": "bfloat16" if dtype == BF16 else "float32",
        "vocab_size": c.V, "max_position_embeddings": c.maxT, "num_hidden_layers": c.L, "num_attention_heads": c.NH,
        "num_key_value_heads": c.NKV, "hidden_size": c.C, "intermediate_size": c.H, "head_dim": c.C // c.NH,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rms_norm_eps": c.eps, "rope_theta": c.theta,
        "rope_scaling": {"rope_type": "llama3", "factor": float(c.factor), **SCALING} if c.scaled else None,
        "tie_word_embeddings": c.tied, "bos_token_id": begin, "eos_token_id": end}}
    if len(shards) > 1:
        objects["model.safetensors.index.json"] = {
            "metadata": {"total_size": sum(tensor.size for tensors in shards for tensor in tensors.values())
                         * np.dtype(dtype).itemsize},
            "weight_map": {name: file for file, tensors in zip(files, shards) for name in tensors}}
    for file, found in objects.items():
        replace_file(folder / file, [json.dumps(found, indent=2).encode() + b"\n"])


def main():
    parser = argparse.ArgumentParser(description="Convert Llama 3 between a folder of Hugging Face's and a checkpoint.")
    parser.add_argument("source", help="a folder, a name on the hub, or a checkpoint, which ends in .bin")
    parser.add_argument("target", help="the checkpoint, or the folder, that is written")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of what is written (default: the source's)")
    flags = parser.parse_args()
    if flags.source.endswith(".bin") == flags.target.endswith(".bin"):
        raise UserError(f"{flags.source} {flags.target}: expected one of them to be a checkpoint, which ends in .bin")
    convert = checkpoint_to_folder if flags.source.endswith(".bin") else folder_to_checkpoint
    convert(flags.source, flags.target, {"fp32": np.float32, "bf16": BF16, None: None}[flags.dtype])
    print(f"wrote {flags.target}")


if __name__ == "__main__":
    run(main)
