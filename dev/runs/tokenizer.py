"""gpt2_tokenizer.bin, llm.c's file of GPT-2's words: if it is in the current folder, samples are
shown in its words, and tiktoken is not needed.
"""
import functools
from pathlib import Path

from dev.files import read_header
from prepro_tinyshakespeare import UserError
from train_gpt2 import HEADER_BYTES, Config, FileKind, vocabulary

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


@functools.cache
def gpt2_words():
    """{token id: its bytes} of GPT-2: by the file, else as train_gpt2.vocabulary."""
    return dict(enumerate(read_tokenizer(FILE))) if FILE.exists() else vocabulary()


class Tokenized:
    """Training whose samples are in the file's words."""

    def words(self):
        # The config of another model says which words it has.
        return gpt2_words() if type(self.config) is Config else super().words()
