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

from dev.common.files import FILES
from dev.data.vocabulary import Vocabulary, words_of_ids
from train_gpt2 import UserError

KINDS = ".npy", ".bin"
MOST = 2**16  # ids: a token file has 16 bits for each
TEXTS = dict(vocab="gpt2", documents=None, column="text", chat=0)  # flags for texts, if not given


def vocab_size(text):
    """The type of --vocab-size."""
    if text.isascii() and text.isdigit() and 2 <= int(text) <= MOST:
        return int(text)
    raise UserError(f"--vocab-size {text}: expected a number from 2 to {MOST:,}, more than the "
                    "largest id: a token file has 16 bits for each")


FLAGS = [(None, "--vocab-size", vocab_size, None, "the input is ids without a text, .npy or .bin: "
          "how many different ones there may be")]


def has_ids(flags, paths):
    """Whether the input is ids. Raises UserError if it is no such input as flags say."""
    ids = [path for path in paths if path.suffix.lower() in KINDS]
    if ids and len(ids) < len(paths):
        raise UserError(f"--input: {ids[0]} has ids, and other files are texts; expected one kind")
    if flags.vocab_size and not ids:
        raise UserError("--vocab-size: is for ids: expected --input too, .npy or .bin files; a "
                        "text has --vocab")
    for name, default in TEXTS.items():
        if ids and getattr(flags, name) != default:
            raise UserError(f"--{name} {getattr(flags, name)}: is for texts, and {ids[0]} has ids; "
                            f"expected no --{name}")
    return bool(ids)


def read_ids(path, V):
    """The ids of a file, all of them below V if that is no None. Raises UserError."""
    ids = read_array(path) if path.suffix.lower() == ".npy" else read_numbers(path, V)
    if ids.dtype.kind not in "iu":
        raise UserError(f"{path}: has numbers of the type {ids.dtype}; expected whole ones: "
                        "ids.astype(np.uint16)")
    if ids.ndim != 1:
        raise UserError(f"{path}: has the shape {ids.shape}; expected one row of ids, such as "
                        "ids.ravel()")
    if not ids.size:
        raise UserError(f"{path}: is empty; expected ids")
    if V is None:
        raise UserError(f"{path}: has ids; expected --vocab-size too: how many different ones "
                        f"there may be, here {ids.max() + 1} or more")
    bad = np.flatnonzero((ids < 0) | (ids >= V))
    if bad.size:
        raise UserError(f"{path}: id {bad[0]:,} of {len(ids):,}, counted from 0, is "
                        f"{ids[bad[0]]}; expected 0 to {V - 1} (--vocab-size), and the file has "
                        f"{ids.min()} to {ids.max()}")
    return ids.astype("<u2")


def read_array(path):
    """The array of a .npy file. Raises UserError."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path}: is no .npy file of numbers, or cannot be read; "
                        f"np.save({path.name!r}, ids) writes one") from None
    if not isinstance(found, np.ndarray):
        raise UserError(f"{path}: has several arrays; expected one, as np.save writes it")
    return found


def read_numbers(path, V):
    """The numbers of a .bin file: of 32 bits, if all of these are below V. Raises UserError."""
    data = path.read_bytes()
    if len(data) % 2:
        raise UserError(f"{path}: has {len(data):,} bytes; expected ids of 16 or 32 bits")
    kind = FILES.get(int.from_bytes(data[:4], "little"))
    if kind:
        raise UserError(f"{path}: is {kind}; expected ids without a header")
    short, long = np.frombuffer(data, "<u2"), np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    is_long = 2 * len(long) == len(short) and long.max(initial=0) < (V or MOST)
    print(f"{path}: numbers of {32 if is_long else 16} bits")
    return long if is_long else short


def vocabulary_of_ids(V):
    """The Vocabulary of V ids. No id ends a text."""
    return Vocabulary(words_of_ids(V), 0, "ids")
