"""The words that decode samples: those of gpt2_tokenizer.bin, llm.c's file of GPT-2's words, if it
is in the current folder; otherwise tiktoken's; without a network only the single bytes.
"""
import functools
from pathlib import Path

from dev.common.file_kinds import read_header
from prepro_tinyshakespeare import UserError, byte_encoding, gpt2_encoding
from train_gpt2 import HEADER_BYTES, FileKind

TOKENIZER = FileKind("tokenizer", 20240328, (2,), "llm.c's train_gpt2.py writes one; without it "
                     "tiktoken is used")
FILE = Path("gpt2_tokenizer.bin")


def read_tokenizer(path):
    """The bytes of each token, from a gpt2_tokenizer.bin."""
    count = read_header(path, TOKENIZER)[2]
    data, words, at = Path(path).read_bytes(), [], HEADER_BYTES
    while at < len(data) and len(words) < count:
        words.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len(words) < count or at != len(data):
        raise UserError(f"{path}: its header promises {count} tokens, and its {len(data):,} bytes "
                        f"are not that many; {TOKENIZER.remedy}")
    return words


def words_of(encoding):
    """{token id: its bytes} of an encoding, with special tokens."""
    special = (name.encode() for name in encoding.special_tokens_set)
    words = *encoding.token_byte_values(), *special
    return {encoding.encode_single_token(word): word for word in words}


@functools.cache
def vocabulary():
    """{token id: its bytes} of GPT-2, from tiktoken, or of the single bytes only."""
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        encoding = byte_encoding()
    return words_of(encoding)


@functools.cache
def gpt2_words():
    """{token id: its bytes} of GPT-2."""
    return dict(enumerate(read_tokenizer(FILE))) if FILE.exists() else vocabulary()


def decode(tokens, words):
    """The text of token ids. words: {id: bytes}; other ids are shown as numbers."""
    text = b"".join(words.get(t, f"<{t}>".encode()) for t in tokens)
    return text.decode("utf-8", errors="replace")


class Tokenized:
    """Training that decodes samples with these words."""

    def words(self):
        """{token id: its bytes}; another model's config has its own."""
        return self.config.words() if hasattr(self.config, "words") else gpt2_words()

    def decode(self, tokens):
        return decode(tokens, self.words())
