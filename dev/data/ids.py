"""Ids that stand for no text: notes of music, letters of DNA, moves of chess.

    python prepro_tinyshakespeare.py --input games.npy --vocab-size 1968
    python prepro_tinyshakespeare.py --input "songs/*.bin" --vocab-size 512 --name songs

A .npy file has one row of whole numbers; a .bin file has numbers of 16 or 32 bits, little-endian,
and no header. Ids are from 0 to --vocab-size - 1, and several files follow each other: a mark
between two of them, if a model should know it, is an id, too. Beside the tokens lies a vocabulary
whose word i is " i": so samples are ids with spaces, and so is a prompt: --sample "12 7 9". All
that needs a text, such as --chat, refuses such a model.
"""
import numpy as np

from dev.data.vocabulary import Vocabulary, words_of_ids
from train_gpt2 import UserError, number

KINDS = ".npy", ".bin"
MOST = 2**16  # ids: a token file has 16 bits for each
TEXTS = dict(vocab="gpt2", documents=None, column="text", chat=0)  # flags for texts, if not given
FLAGS = [(None, "--vocab-size", number(int, 2, MOST + 1), None, "the input is ids without a text, "
          ".npy or .bin: how many different ones there may be, at most 65,536")]


def read_files(paths, flags):
    """The ids of all files. Raises UserError."""
    if not paths:
        raise UserError("--vocab-size: expected --input too, .npy or .bin files of ids")
    for name, default in TEXTS.items():
        if getattr(flags, name) != default:
            raise UserError(f"--{name} {getattr(flags, name)}: is for texts, and the input is ids; "
                            f"expected no --{name}")
    return np.concatenate([read_ids(path, flags.vocab_size) for path in paths])


def read_ids(path, V):
    """The ids of a file, all of them below V, uint16. Raises UserError."""
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{path}: expected ids, in .npy or .bin files: --vocab-size is for these, "
                        "and a text has --vocab")
    ids = read_array(path) if path.suffix.lower() == ".npy" else read_numbers(path, V or MOST)
    for ok, wish in ((ids.dtype.kind in "iu", "whole numbers: ids.astype(np.uint16)"),
                     (ids.ndim == 1, "one row: ids.ravel()"), (ids.size, "at least one id")):
        if not ok:
            raise UserError(f"{path}: has ids of the type {ids.dtype} and the shape {ids.shape}; "
                            f"expected {wish}")
    if V is None:
        raise UserError(f"{path}: has ids; expected --vocab-size too: how many different ones "
                        f"there may be, here {ids.max() + 1} or more")
    if ids.min() < 0 or ids.max() >= V:
        at = int(np.argmax((ids < 0) | (ids >= V)))
        raise UserError(f"{path}: has ids from {ids.min()} to {ids.max()}, the first wrong one at "
                        f"index {at:,}: {ids[at]}; expected 0 to {V - 1} (--vocab-size)")
    return ids.astype("<u2")


def read_array(path):
    """The array of a .npy file. Raises UserError."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path}: is no .npy file of numbers, or cannot be read; "
                        f"np.save({path.name!r}, ids) writes one") from None


def read_numbers(path, V):
    """The numbers of a .bin file: of 32 bits, if all of these are below V. Raises UserError."""
    data = path.read_bytes()
    if len(data) % 2:
        raise UserError(f"{path}: has {len(data):,} bytes; expected ids of 16 or 32 bits")
    short, long = np.frombuffer(data, "<u2"), np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    is_long = 2 * len(long) == len(short) and long.max(initial=0) < V
    print(f"{path}: numbers of {32 if is_long else 16} bits")
    return long if is_long else short


def vocabulary_of_ids(V):
    """The Vocabulary of V ids. No id ends a text."""
    return Vocabulary(words_of_ids(V), 0, "ids")
