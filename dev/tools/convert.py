"""Convert GPT-2 or Llama 3 between a Hugging Face folder and the checkpoint that the trainers read,
and a checkpoint to GGUF.

    python -m dev.tools.convert gpt2 gpt2_124M.bin        # the hub's; or gpt2-medium, -large, -xl
    python -m dev.tools.convert FOLDER OUT.bin            # or from the hub: meta-llama/Llama-3.2-1B
    python -m dev.tools.convert FILE.safetensors OUT.bin  # GPT-2, if there is no config.json
    python -m dev.tools.convert IN.bin FOLDER             # a folder that transformers loads
    python -m dev.tools.convert IN.bin OUT.gguf           # for llama.cpp, Ollama: gguf_file.py

IN.bin may be a run's folder: its newest checkpoint.

A folder has config.json, and the weights in model.safetensors, or in several files and an index. If
the head is tied to the embeddings, one of the two is enough.
Without --dtype the numbers stay as they are, except that fp16 becomes fp32. Downloads go through
huggingface_hub: HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE=1 work as usual.

A folder and a checkpoint hold the same tensors, with these differences:

GPT-2       A linear layer's weight is (in, out) in a folder and (out, in) in a checkpoint. A
            checkpoint pads wte with rows of zeros to a multiple of 128.
Llama 3     RoPE rotates rows 2i and 2i+1 of a query or key head together in a checkpoint, as in
            Meta's own files, and rows i and i + HS/2 in a folder. A checkpoint has zeros where
            GPT-2 has biases, and repeats wte as lm_head if they are tied. Fields that only its
            header has are kept in config.json as llm_c, so that a checkpoint survives the round
            trip bit for bit (one of llm.c's master becomes one of its branch llama3).

A new folder also gets a tokenizer: the model's own vocabulary (dev/data/vocabulary.py), if there is
one beside the checkpoint, or GPT-2's, if the model has as many words. Of a folder with such a
tokenizer.json, the vocabulary is written beside OUT.bin, as OUT_tokenizer.bin. A model that trained
on conversations also gets their template (dev/data/chats.py). No file says whether a model was
trained with `--attention relu`, which transformers does not have.

A safetensors file is the length of a JSON text, in 8 bytes; that text, {name: {dtype, shape,
data_offsets}}; and the numbers. NumPy maps it into memory, and tensors are converted one by one.
"""
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, padded
from dev.common.files import checked_header
from dev.common.flags import argument, parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft
from dev.data.chats import jinja_of
from dev.data.hub import ask
from dev.data.vocabulary import vocabulary_bytes
from dev.features.chat import template_of_model
from dev.features.checkpoints.newest import newest_checkpoint
from dev.features.masked import trained_with_masks
from dev.features.tokenizer import vocabulary_of_run
from dev.features.wrong_files import ON_HUB, OPENAI
from dev.llama3.train_llama3 import Config3
from dev.tools import gguf_file
from dev.tools.hf_config import ARCHITECTURES, HEAD, read_config, read_json, write_objects
from dev.tools.hf_tokenizer import vocabulary_in, write_tokenizer, write_vocabulary
from train_gpt2 import BF16, UserError, gpt2_encoding, replace_file, to_float

DTYPES = {"BF16": BF16, "F32": np.float32, "F16": np.float16}
SHARD_BYTES = 5 * 10**9  # the largest file of a folder, unless a single tensor is larger
CHUNK = 2**24  # numbers that are converted at a time
GPT2_WORDS = 50257
# V: the tokens before and after a text
TEXT_IDS = {GPT2_WORDS: (50256, 50256), 128256: (128000, 128001)}
HUB_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json",
             "model-*-of-*.safetensors", "tokenizer.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# not weights; old transformers saved them
BUFFERS = r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)"
FLAGS = [
    (None, "source", argument("SOURCE"), None, "a folder, a name on the hub, a .safetensors file, "
     "or a checkpoint (.bin)"),
    (None, "target", argument("TARGET"), None, "the checkpoint (.bin), the folder or the .gguf to "
     "write"),
    (None, "--dtype", ("fp32", "bf16"), None, "of what is written (default: the source's)"),
    (None, "--chat", "switch", None, "1: a chat template, too (default: if its run had masks)"),
]
CONV1D = "c_attn.weight", "c_fc.weight", "c_proj.weight"  # GPT-2's linear layers
ROTATED = "q_proj.weight", "k_proj.weight"  # Llama's; RoPE rotates their outputs

# ---- Tensors


def blocks(c, table, names=None):
    """The parts of a checkpoint with this table, in order: (the tensor's name in a folder, or None
    for zeros; the shape of these rows in the checkpoint; the tensor's name in the checkpoint).
    names: those of another format."""
    architecture = ARCHITECTURES[type(c)]
    names = names or architecture.names
    rows = architecture.rows(c)
    for row in table:
        count, *columns = row.shape
        for l in range(max(1, row.layers)):
            for name, part in zip(names.get(row.name, [None]),
                                  rows.get(row.name, [count])):
                yield name and name.format(l), (part, *columns), row.name


def shape_in_folder(name, shape):
    """A tensor's shape in a folder, given its shape in a checkpoint, or the other way round."""
    return shape[::-1] if name.endswith(CONV1D) else shape


def turned(name, tensor, HS, groups):
    """Turn a folder's tensor into a checkpoint's (groups=2), or the other way round (groups=HS/2).
    Rows that RoPE rotates are regrouped within each head."""
    if name.endswith(CONV1D):
        return tensor.T
    if name.endswith(ROTATED):
        return tensor.reshape(-1, groups, HS // groups,
                              tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def stored_as(dtype, tensor):
    """The numbers of a tensor converted to dtype, in chunks."""
    numbers = tensor.reshape(-1)
    for chunk in (numbers[at : at + CHUNK] for at in range(0, numbers.size, CHUNK)):
        if chunk.dtype != dtype:
            chunk = chunk.astype(np.float32) if chunk.dtype == np.float16 else to_float(chunk)
            chunk = to_bf16(chunk) if dtype == BF16 else chunk
        yield chunk


def told(chunks, numbers):
    """The chunks of a file of about so many numbers; says how long they take."""
    return TimeLeft().over(chunks, numbers, lambda chunk: getattr(chunk, "size", 0))


# ---- The hub

def find_folder(name):
    """The path of a folder, downloaded if this is a name on the hub. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    if name not in OPENAI and not re.fullmatch(ON_HUB, name):
        raise UserError(f"{name}: there is no such folder; expected one with config.json and "
                        f"model.safetensors, or a name on the hub: {', '.join(OPENAI)}, or one "
                        "such as meta-llama/Llama-3.2-1B")
    folder = Path(ask(f"{name}: there is no such folder, and for the model of that name",
                      lambda hub: hub.snapshot_download(name, allow_patterns=list(HUB_FILES)),
                      "give a folder"))
    print(f"downloaded to {folder}")
    return folder


# ---- Folders


def config_of_tensors(path, found):
    """The Config of a GPT-2 in a single file, from the shapes of its tensors. Raises UserError."""
    prefix = ARCHITECTURES[Config].prefix
    names = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    wte, wpe = names.get("wte.weight", names.get(HEAD)), names.get("wpe.weight")
    if wte is None or wpe is None or not wte.ndim == wpe.ndim == 2:
        raise UserError(f"{path}: has no wte.weight and wpe.weight of GPT-2, and other models can "
                        "be converted only with their config.json; expected it in the same folder")
    C = wte.shape[1]
    if C % 64:
        raise UserError(f"{path}: without a config.json heads have 64 channels, and C = {C} is no "
                        "multiple")
    L = len({name.split(".")[1] for name in names if re.match(r"h\.\d+\.", name)})
    c = Config(len(wpe), len(wte), L, C // 64, C, padded(len(wte)))
    c.check(path)
    print(f"{path}: has no config.json beside it; NH = {c.NH} heads of 64 channels, as in OpenAI's "
          "models")
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
                raise UserError(f"{path}: {name} is of type {of['dtype']}; expected "
                                f"{', '.join(DTYPES)}")
            first, last = of["data_offsets"]
            numbers = data[start + first : start + last].view(DTYPES[of["dtype"]])
            tensors[name] = numbers.reshape(of["shape"])
        return tensors
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); is the download complete?"
                        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: is no safetensors file, or truncated; is the download complete?"
                        ) from None


def files_of(folder):
    """The paths of a folder's weights. Raises UserError."""
    index, path = folder / INDEX, folder / WEIGHTS
    if path.exists():
        return [path]
    if not index.exists():
        raise UserError(f"{folder}: has no {WEIGHTS}, nor {INDEX}; expected such weights, which "
                        "transformers makes from a pytorch_model.bin with save_pretrained")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{index}: expected a weight_map, {{tensor: file}}")
    return [folder / file for file in sorted(set(places.values()))]


def same_bits(a, b):
    """Whether two arrays have the same type, shape and bits, NaNs too."""
    return a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def check_tensors(source, found, c):
    """{full name: array} of the tensors in a model's files. Raises UserError unless they are
    exactly those of a model of this config."""
    architecture, whole = ARCHITECTURES[type(c)], {}
    embedding = architecture.names["wte"][0]
    for name, tensor in found.items():
        is_long = name == HEAD or name.startswith(architecture.prefix)
        long = name if is_long else architecture.prefix + name
        if long in whole:
            raise UserError(f"{source}: has {long} twice, with and without {architecture.prefix}")
        whole[long] = tensor
    if getattr(c, "tied", True):
        head = whole.get(HEAD)
        if head is not None and embedding in whole and not same_bits(head, whole[embedding]):
            raise UserError(f"{source}: {HEAD} differs from {embedding}; expected a head that is "
                            "tied to it")
        # safetensors.torch.save_model keeps one of two tensors that share memory, whichever name it
        # meets last
        whole[embedding] = whole[HEAD] = whole.get(embedding, head)
    expected = {HEAD}
    for name, shape, _ in blocks(c, c.file_table()):
        if name is None:
            continue
        if whole.get(name) is None:
            raise UserError(f"{source}: its files have no {name}; is the download complete?")
        expected.add(name)
        shape = shape_in_folder(name, shape)
        if whole[name].shape != shape:
            raise UserError(f"{source}: {name} is of shape {whole[name].shape}; expected {shape}, "
                            "by the model's sizes")
    for name in found:
        if name not in expected and architecture.prefix + name not in expected:
            raise UserError(f"{source}: {name} is no tensor of {architecture.title}; expected none "
                            "but the model's")
    return whole


def folder_to_checkpoint(name, path, dtype=None):
    """Convert a folder, a model on the hub, or one file. Raises UserError, and then leaves an older
    checkpoint as it was."""
    own = None
    if str(name).endswith(".safetensors") and not Path(name).is_dir():
        source = Path(name)
        found = map_file(source)
        beside = source.with_name("config.json").exists()
        c = read_config(source.parent) if beside else config_of_tensors(source, found)
    else:
        source = find_folder(name)
        c = read_config(source)
        found = {name: array for file in files_of(source) for name, array in map_file(file).items()}
        tokenizer = source / "tokenizer.json"
        own = vocabulary_in(tokenizer) if tokenizer.exists() else None
        if type(c) is Config3 and tokenizer.exists() and not own:
            print(f"{tokenizer} is for dev/llama3/tokens.py")
    found = check_tensors(source, found, c)
    if dtype is None:
        dtype = BF16 if all(tensor.dtype == BF16 for tensor in found.values()) else np.float32

    def tensors():
        for name, shape, _ in blocks(c, c.file_table()):
            zeros = name is None
            yield from stored_as(dtype, np.zeros(shape, dtype) if zeros else turned(
                name, found[name], c.C // c.NH, 2))

    version = next(version for version, stored in c.STORED.items() if stored == dtype)
    numbers = sum(row.size for row in c.file_table())
    replace_file(path, itertools.chain(c.headers(version), told(tensors(), numbers)))
    beside = Path(path).with_name(f"{Path(path).stem}_tokenizer.bin")
    if own:
        replace_file(beside, [vocabulary_bytes(own)])
    else:
        beside.unlink(missing_ok=True)  # of an older checkpoint of this name


def write_safetensors(path, tensors, dtype, HS):
    """Write {name: array of a checkpoint}. Raises UserError."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    name_of_dtype = next(name for name, stored in DTYPES.items() if stored == dtype)
    for name, tensor in tensors.items():
        end = at + tensor.size * np.dtype(dtype).itemsize
        header[name] = {"dtype": name_of_dtype, "shape": shape_in_folder(name, tensor.shape),
                        "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = (chunk for name, tensor in tensors.items()
               for chunk in stored_as(dtype, turned(name, tensor, HS, HS // 2)))
    count = sum(tensor.size for tensor in tensors.values())
    replace_file(path, itertools.chain([np.uint64(len(text)), text], told(numbers, count)))


def named_tensors(path, c, stored, header, names=None):
    """(name, array) of a checkpoint's tensors that a folder also has. names: as for blocks. Raises
    UserError."""
    table = c.file_table(stored, header)
    body = np.memmap(path, stored, "r",
                     Path(path).stat().st_size - sum(row.nbytes for row in table))
    at = 0
    for name, shape, row in blocks(c, table, names):
        tensor, at = body[at : at + math.prod(shape)].reshape(shape), at + math.prod(shape)
        if name is None and to_float(tensor).any():
            raise UserError(f"{path}: {row} has other numbers than zeros below its V = {c.V} "
                            "words; expected padding")
        if name and not (row == "lm_head" and c.tied):
            yield name, tensor


def open_checkpoint(path):
    """(a checkpoint's config, the type of its numbers, its header). Raises UserError."""
    header = checked_header(path, *(kind.FILE for kind in ARCHITECTURES))
    kind = next(kind for kind in ARCHITECTURES if kind.FILE.magic == header[0])
    c = kind.from_file(path)
    return c, c.STORED[header[1]], header


def chat_template(path, c, asked):
    """The template in which a checkpoint answers, or None. asked: --chat. Raises UserError."""
    asked = trained_with_masks(path) if asked is None else asked
    return template_of_model(c, vocabulary_of_run(path, c.V)) if asked else None


def checkpoint_to_gguf(path, target, dtype=None, chat=None):
    """Convert a checkpoint into a file for llama.cpp. Raises UserError."""
    c, stored, header = open_checkpoint(path)
    _, names = gguf_file.ARCHITECTURES[type(c)]
    tensors = dict(named_tensors(path, c, stored, header, names))
    template = chat_template(path, c, chat)
    parts = gguf_file.gguf_parts(path, c, tensors, dtype or stored, TEXT_IDS, stored_as, template)
    replace_file(target, told(parts, sum(tensor.size for tensor in tensors.values())))
    if template:
        beside = Path(target).with_suffix(".Modelfile")
        replace_file(beside, [gguf_file.modelfile(target, c, template).encode()])
        print(f"wrote {beside}: ollama create {beside.stem} -f {beside}")


def checkpoint_to_folder(path, folder, dtype=None, chat=None):
    """Convert a checkpoint. Raises UserError."""
    c, stored, header = open_checkpoint(path)
    architecture, folder = ARCHITECTURES[type(c)], Path(folder)
    own, template = vocabulary_of_run(path, c.V), chat_template(path, c, chat)
    more = {"chat_template": jinja_of(template)} if template else {}
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
    is_ids = own and own.is_ids
    begin, end = [None if is_ids else own.eot] * 2 if own else TEXT_IDS.get(c.V, (None, None))
    end = template.end_id if template else end
    objects = {"config.json": {
        "architectures": [architecture.model_class], "model_type": architecture.model_type,
        "torch_dtype": "bfloat16" if dtype == BF16 else "float32", "vocab_size": c.V,
        **architecture.write_config(c), "bos_token_id": begin, "eos_token_id": end}}
    if len(shards) > 1:
        size = sum(tensor.size for tensors in shards for tensor in tensors.values())
        objects[INDEX] = {
            "metadata": {"total_size": size * np.dtype(dtype).itemsize},
            "weight_map": {name: file for file, tensors in zip(files, shards) for name in tensors}}
    write_objects(folder, objects)
    try:
        if own:
            own.check_text("it", "transformers takes them as they are")
            return write_vocabulary(folder, own, min(c.maxT, 2**20), **more)
        if c.V != GPT2_WORDS:
            raise UserError(f"GPT-2's has {GPT2_WORDS} words, and this model V = {c.V}; copy its "
                            f"own to {folder}")
        write_tokenizer(folder, gpt2_encoding(), c.maxT, **more)
    except UserError as e:
        print(f"no tokenizer is written: {e}")
        for name, text in more.items():  # which transformers reads beside the model's own tokenizer
            replace_file(folder / f"{name}.jinja", [text.encode()])


# ---- The program


def main(arguments=None):
    """Everything from the flags to the files. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    if not flags.target.endswith(".bin") and Path(flags.source).is_dir():
        flags.source = newest_checkpoint(flags.source) or flags.source  # of a run
    from_checkpoint = flags.source.endswith(".bin")
    if from_checkpoint == flags.target.endswith(".bin"):
        raise UserError(f"{flags.source} {flags.target}: expected one of them to be a checkpoint, "
                        "which ends in .bin")
    if flags.target.endswith(".safetensors"):
        raise UserError(f"{flags.target}: expected a folder, for config.json too")
    convert = checkpoint_to_folder if from_checkpoint else folder_to_checkpoint
    if flags.target.endswith(".gguf"):
        convert = checkpoint_to_gguf
    convert(flags.source, flags.target, {"fp32": np.float32, "bf16": BF16, None: None}[flags.dtype],
            *[flags.chat] * from_checkpoint)
    print(f"wrote {flags.target}")


if __name__ == "__main__":
    run_main(main)
