"""Write and read Hugging Face's folders and tokenizers without convert.py."""
import json

import numpy as np

from dev.tests.checks import check_refusal
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


def check_bad_folders(folder, tensors, config, cases, function, target):
    """Check that function(source, target) refuses folders: (what it says, changes of config.json,
    changes of the tensors); what becomes None is left out."""
    for i, (wish, change, *more) in enumerate(cases):
        source, found = folder / f"case{i}", tensors | (more[0] if more else {})
        write_folder(source, *({name: value for name, value in table.items() if value is not None}
                               for table in (found, config | change)))
        check_refusal("folder", wish, function, str(source), target)


def read_folder(folder):
    """{name: (type, shape, bytes)} of a folder, read with the safetensors library."""
    import safetensors
    return {name: (of["dtype"], tuple(of["shape"]), bytes(of["data"])) for path in folder.glob(
        "*.safetensors") for name, of in safetensors.deserialize(path.read_bytes())}


# So that ids are neither the bytes themselves nor GPT-2's.
BYTES = [bytes([b]) for b in range(255, -1, -1)]


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
