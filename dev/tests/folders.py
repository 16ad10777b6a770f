"""Write and read Hugging Face's folders and tokenizers without convert.py."""
import json

import numpy as np

from dev.data.vocabulary import PRINTING
from prepro_tinyshakespeare import END_OF_TEXT, EOT
from train_gpt2 import BF16

# The names of types in safetensors.
LIBRARY = {BF16: "bfloat16", np.float32: "float32", np.float16: "float16"}


def write_folder(folder, tensors, config, files=1):
    """Write a folder as transformers saves it, with the safetensors library. The tensors are dealt
    out to the files."""
    import safetensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.safetensors"] if files == 1 else [f"model-{i + 1}-of-{files}.safetensors"
                                                      for i in range(files)]
    place = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        safetensors.serialize_file({name: safetensors.TensorSpec(
            dtype=LIBRARY[array.dtype.type], shape=array.shape, data_ptr=array.ctypes.data,
            data_len=array.nbytes)
            for name, array in tensors.items() if place[name] == file}, folder / file,
                                   {"format": "pt"})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {},
                                                                         "weight_map": place}))


def read_folder(folder):
    """{name: (type, shape, bytes)} of a folder, read with the safetensors library."""
    import safetensors
    return {name: (of["dtype"], tuple(of["shape"]), bytes(of["data"])) for path in folder.glob(
        "*.safetensors") for name, of in safetensors.deserialize(path.read_bytes())}


# So that ids are neither the bytes themselves nor GPT-2's.
BYTES = [bytes([b]) for b in range(255, -1, -1)]


def byte_encoding():
    """The part of GPT-2's encoding that needs no download: its 256 single-byte tokens, and
    <|endoftext|>."""
    import tiktoken
    order = PRINTING + [b for b in range(256) if b not in PRINTING]
    return tiktoken.Encoding("gpt2_bytes", pat_str=r"[\s\S]", special_tokens={END_OF_TEXT: EOT},
                             mergeable_ranks={bytes([b]): i for i, b in enumerate(order)})


def letters():
    """{byte: the letter that stands for it in tokenizer.json}: itself if it prints, else one from
    U+0100 up."""
    found, following = {}, 0x100
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b:
            found[b] = chr(b)
        else:
            found[b], following = chr(following), following + 1
    return found
