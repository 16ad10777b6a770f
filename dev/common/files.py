"""Files by their names and headers: what a pattern matches; and errors about a file of the wrong
kind, which say what it is, by its first number. (The trainer's own error only has the numbers.)"""
import glob
import os
from pathlib import Path

import numpy as np

from train_gpt2 import HEADER_BYTES, UserError, read_header

FILES = {  # by the first number
    20240326: "a GPT-2 checkpoint, which train_gpt2.py trains (-e)",
    20240327: "a debug state of GPT-2, which test_gpt2.py compares with (--state)",
    20240328: "a vocabulary, which lies beside the token files that have its words (--vocab)",
    20240520: "a file of GPT-2's tokens, which train_gpt2.py trains on (-i)",
    20240522: "a file of HellaSwag's questions, which train_gpt2.py scores (--hellaswag)",
    20240527: "AdamW's state, with which a run goes on (-o FOLDER -y 1)",
    20240801: "a file of Llama 3's tokens, which dev/llama3/train_llama3.py trains on (-i)",
    20240803: "a Llama 3 checkpoint, which dev/llama3/train_llama3.py trains (-e)",  # or its state
    20261125: "a mask, which says which tokens of the file beside it count as targets (--mask)",
}


def paths_of(pattern):
    """The paths that match a pattern such as data/fineweb_train_*.bin, sorted as in llm.c; or the
    pattern itself if none does. What exists is meant as it is written: the file runs[1]/train.bin,
    or in runs[1]/train_*.bin the folder runs[1]."""
    if os.path.exists(pattern):
        return [str(pattern)]
    path = Path(pattern)
    folder = next((parent for parent in path.parents if os.path.exists(parent)), Path())
    found = glob.glob(str(path.relative_to(folder)), root_dir=folder)
    return sorted(str(folder / name) for name in found) or [str(pattern)]


def header_of_kinds(path, *kinds):
    """As train_gpt2.read_header, of a file of one of these kinds."""
    if len(kinds) == 1 or not os.path.isfile(path):
        return read_header(path, kinds[0])
    header = np.fromfile(path, "<i4", 256).tolist()
    for kind in kinds:
        if len(header) == 256 and header[0] == kind.magic and header[1] in kind.versions:
            return header
    wish = " or ".join(f"a {kind.name}'s [{kind.magic}, {' or '.join(map(str, kind.versions))}]"
                       for kind in kinds)
    raise UserError(f"{path}: its header of {4 * len(header)} bytes begins with {header[:2]}; "
                    f"expected {HEADER_BYTES} bytes, and {wish}: {kinds[0].remedy}")


def check_kind(path, *kinds):
    """Raise UserError if a file is of a known kind, but none of these (train_gpt2.FileKind)."""
    try:
        with open(path, "rb") as file:
            magic = int.from_bytes(file.read(4), "little")
    except OSError:  # reported by whoever needs the file
        return
    if magic in FILES and magic not in {kind.magic for kind in kinds}:
        names = " or a ".join({kind.name: 0 for kind in kinds})
        raise UserError(f"{path}: is {FILES[magic]}; expected a {names}: {kinds[0].remedy}")


def checked_header(path, *kinds):
    """As train_gpt2.read_header, with the better error."""
    check_kind(path, *kinds)
    return header_of_kinds(path, *kinds)
