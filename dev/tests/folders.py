"""Write and read Hugging Face's folders and tokenizers without convert.py."""
import json

import numpy as np

from dev.common.bf16 import to_bf16
from dev.data.vocabulary import PRINTING
from dev.tests.checks import FIXTURES, check, check_refusal, output_of
from dev.tools import convert
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import BF16, EOT, to_float

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


def check_types(folder, cases, random_tensors, config, convert, expected):
    """Check convert(source, target, asked), which rounds to bf16 if asked for, and keeps numbers as
    they are in fp32. cases: (type of a folder's tensors, asked, type of the checkpoint's)."""
    for i, (stored, asked, made) in enumerate(cases):
        tensors, source, path = random_tensors(stored), folder / f"source{i}", folder / f"{i}.bin"
        write_folder(source, tensors, config)
        convert(str(source), str(path), asked)
        values = {name: array.astype(np.float32) if stored == np.float16 else to_float(array)
                  for name, array in tensors.items()}
        if made == BF16:
            values = {name: to_bf16(array) for name, array in values.items()}
        check(f"{LIBRARY[stored]} to {LIBRARY[made]}", path.read_bytes() == expected(values, made))


def read_folder(folder):
    """{name: (type, shape, bytes)} of a folder, read with the safetensors library."""
    import safetensors
    return {name: (of["dtype"], tuple(of["shape"]), bytes(of["data"])) for path in folder.glob(
        "*.safetensors") for name, of in safetensors.deserialize(path.read_bytes())}


def logits_in_transformers(folder, tokens):
    """The logits of tokens (B,T) that transformers computes with a folder's model, and the
    model."""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy(), model


def in_transformers(folder, name):
    """A row to compare: the logits of a fixture's debug state, from its folder, which transformers
    loads; what it saves becomes the fixture again."""
    path = FIXTURES / f"{name}.bin"
    state = np.fromfile(FIXTURES / f"{name}_debug_state.bin", "<i4")
    output_of(convert.checkpoint_to_folder, path, folder / name)
    B, T = state[2:4]
    found, model = logits_in_transformers(folder / name, state[256:][: B * T].reshape(B, T))
    model.save_pretrained(folder / f"{name} saved", max_shard_size="200KB")
    convert.folder_to_checkpoint(str(folder / f"{name} saved"), folder / "again.bin")
    check(f"{name}, saved by transformers",
          (folder / "again.bin").read_bytes() == path.read_bytes())
    wish = state.view("<f4")[256 + 2 * B * T :][: found.size].reshape(found.shape)
    return f"{name}, logits", found, wish, 2e-6


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
