"""Texts of your own as tokens of a vocabulary of your own: what prepro_tinyshakespeare.py does if
it is given flags.

    python prepro_tinyshakespeare.py --input book.txt               # GPT-2's tokens
    python prepro_tinyshakespeare.py --input texts --vocab 4096     # a folder, and 4,096 words
    python prepro_tinyshakespeare.py --vocab bytes                  # tinyshakespeare's bytes
    python prepro_tinyshakespeare.py --input chats.jsonl --chat     # conversations: see chats.py
    python prepro_tinyshakespeare.py --input a.npy --vocab-size 512 # ids without a text: see ids.py

writes data/NAME/NAME_{train,val}.bin, and, unless the words are GPT-2's, NAME_tokenizer.bin, which
the trainer finds beside them: see dev/data/vocabulary.py. Each document becomes <|endoftext|> and
its tokens. The first tenth of all tokens, at most 32,768, is for validation. dev/data/fineweb.py
takes inputs that are larger than memory.
"""
import os
from pathlib import Path

import numpy as np

from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft
from dev.data import chats, ids
from dev.data.documents import FLAGS as DOCUMENTS, documents_of, input_files, name_of, said
from dev.data.text import both
from dev.data.vocabulary import (BYTES, MOST, interruptible, read_vocabulary, tokenizer_path,
                                 vocabulary_bytes, vocabulary_of, write_vocabulary)
from prepro_tinyshakespeare import val_count, write_parts
from train_gpt2 import DATA, UserError


def vocab(text):
    """The type of --vocab."""
    if text in ("bytes", "chars", "gpt2") or text.endswith(".bin"):
        return text
    if text.isascii() and text.isdigit() and len(BYTES) + 2 <= int(text) <= MOST:
        return text
    raise UserError(f"--vocab {text}: expected bytes, chars, gpt2, a number of words from "
                    f"{len(BYTES) + 2} to {MOST:,}, or the NAME_tokenizer.bin of other tokens")


FLAGS = [
    *DOCUMENTS[:-1],
    (None, "--vocab", vocab, "gpt2", "the words: bytes, chars, gpt2, a number of words to learn "
     "from the text, or the NAME_tokenizer.bin of other tokens"),
    DOCUMENTS[-1],
    *chats.FLAGS,
    *ids.FLAGS,
]


def tokens_of(texts, vocabulary):
    """<|endoftext|> and its tokens of each text, uint16."""
    parts = []
    for text in TimeLeft().over(texts, sum(map(len, texts))):
        parts += [np.array([vocabulary.eot], "<u2"), vocabulary.encode_array(text)]
    return np.concatenate(parts) if parts else np.zeros(0, "<u2")


def write_set(pattern, tokens, vocabulary=None):
    """Write the two token files of a pattern, and the vocabulary beside them, if they do not have
    GPT-2's. Raises UserError."""
    val_count(tokens)  # before anything is written
    begin_set(pattern, vocabulary)
    write_parts(tokens, pattern)
    chats.remove_masks(pattern)


def begin_set(pattern, vocabulary):
    """Write the vocabulary of the two token files of a pattern, or remove one if it is None. Tokens
    that another vocabulary had are removed before. Raises UserError."""
    path = tokenizer_path(str(pattern).format("train"))
    content = vocabulary_bytes(vocabulary) if vocabulary else None
    old = [Path(name) for name in both(pattern) if os.path.exists(name)]
    if (path.read_bytes() if path.is_file() else None) != content:
        for each in (*old, path):
            each.unlink(missing_ok=True)
        if vocabulary:
            print(f"writing {len(vocabulary.words):,} words to {path}")
            write_vocabulary(path, vocabulary)  # before tokens, which are GPT-2's without it


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    chats.check_flags(flags)
    own = flags.vocab != "gpt2"
    default = "tinyshakespeare" + own * f"_{Path(flags.vocab).stem}"
    name = name_of(flags) or (default if own else None)
    pattern = f"data/{name}/{name}_{{}}.bin" if name else DATA
    files = input_files(flags.input or ())
    if flags.vocab_size or any(path.suffix.lower() in ids.KINDS for path in files):
        tokens = ids.read_files(files, flags)
        return write_set(pattern, tokens, ids.vocabulary_of_ids(flags.vocab_size))
    if not flags.input and not own and not flags.documents:
        flags.documents = "blank-lines"  # as in llm.c's files
    given = read_vocabulary(flags.vocab) if flags.vocab.endswith(".bin") else None
    if flags.chat:
        conversations = chats.read_conversations(input_files(flags.input))
        vocabulary = given or vocabulary_of(flags.vocab, chats.texts_of(conversations))
        rows = chats.prepare(conversations, chats.template_of_vocabulary(vocabulary), flags)
        begin_set(pattern, vocabulary if own else None)
        return chats.write_rows(pattern, *rows)
    texts, units = documents_of(flags)
    vocabulary = given or vocabulary_of(flags.vocab, texts)
    tokens = interruptible(tokens_of, texts, vocabulary)
    print(said(units))
    write_set(pattern, tokens, vocabulary if own else None)


def program():
    """main(), as a program."""
    run_main(main)
