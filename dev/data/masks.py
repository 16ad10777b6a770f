"""Masks, which say which tokens of the file beside them count as targets.

The mask of chats_train.bin is chats_train.mask: 256 int32 (magic 20261125, version 1, tokens, T of
a row or 0, CRC-32 of the token file's ids), then a byte for each token, 1 where it counts. A token
file without one counts as a whole, so a run may mix both.
"""
import zlib
from pathlib import Path

import numpy as np

from dev.common.files import checked_header, paths_of
from train_gpt2 import HEADER_BYTES, FileKind, UserError, check_size, make_header, replace_file

MASK = FileKind("mask", 20261125, (1,), "prepro_tinyshakespeare.py --chat writes one beside the "
                "tokens")


def mask_path(token_path):
    """Where the mask of a token file is: chats_train.mask beside chats_train.bin."""
    return Path(token_path).with_suffix(".mask")


def checksum(tokens):
    """CRC-32 of the ids of a token file, as they are stored; an int32."""
    return int(np.uint32(zlib.crc32(np.ascontiguousarray(tokens))).astype(np.int32))


def write_mask(token_path, tokens, mask, T=0):
    """Write the mask of a token file that has just been written. tokens: its ids, of the type in
    which they are stored; mask (len(tokens),): whether each counts; T: the length of the rows in
    which they lie, or 0. Raises UserError."""
    header = make_header(MASK.magic, 1, len(mask), T, checksum(tokens))
    replace_file(mask_path(token_path), [header, np.asarray(mask, np.uint8)])


def read_mask(token_path, tokens):
    """Whether each of a file's tokens counts, bool; None if there is no mask beside it. Raises
    UserError if the mask is damaged, or belongs to other tokens."""
    path = mask_path(token_path)
    if not path.is_file():
        return None
    header = checked_header(path, MASK)
    count = header[2]
    check_size(path, MASK, HEADER_BYTES + count)
    mask = np.memmap(path, np.uint8, "r", HEADER_BYTES) if count else np.zeros(0, np.uint8)
    if count != len(tokens) or header[4] != checksum(tokens):
        raise UserError(f"{path}: is the mask of {count:,} other tokens than the {len(tokens):,} "
                        f"of {token_path}; expected both from one run: {MASK.remedy}, or remove it "
                        "to count all tokens")
    if mask.max(initial=0) > 1:
        at = int(np.argmax(mask > 1))
        raise UserError(f"{path}: byte {at} is {mask[at]}; expected 0 or 1: {MASK.remedy}")
    return mask.view(bool)


def row_of(pattern):
    """The length of the rows in which the tokens of these files lie; 0 if no mask says so. Raises
    UserError."""
    masks = [path for path in map(mask_path, paths_of(pattern)) if path.is_file()]
    return max((checked_header(path, MASK)[3] for path in masks), default=0)


def masks_beside(*patterns):
    """Whether any token file of these patterns (or None) has a mask."""
    return any(mask_path(path).is_file() for pattern in patterns if pattern
               for path in paths_of(pattern))
