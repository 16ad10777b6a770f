"""The words that decode samples: those of gpt2_tokenizer.bin, llm.c's file of GPT-2's words, if it
is in the current folder; otherwise tiktoken's; without a network only the single bytes. A model
with another vocabulary is decoded by a gpt2_tokenizer.bin of as many words, or shown as token ids.
"""
import functools
from pathlib import Path

from dev.features.declare import Feature
from dev.features.file_kinds import checked_header
from prepro_tinyshakespeare import UserError, byte_encoding, gpt2_encoding
from train_gpt2 import HEADER_BYTES, FileKind

TOKENIZER = FileKind("tokenizer", 20240328, (2,), "llm.c's train_gpt2.py writes one; without it "
                     "tiktoken is used")
FILE = Path("gpt2_tokenizer.bin")
GPT2_SIZES = 50257, 50304  # V of models with GPT-2's words; the second is padded, as nanoGPT's


def read_tokenizer(path):
    """The bytes of each token, from a gpt2_tokenizer.bin."""
    count = checked_header(path, TOKENIZER)[2]
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
    return file_of_words(GPT2_SIZES) or vocabulary()


def file_of_words(sizes):
    """{token id: its bytes} of gpt2_tokenizer.bin, or None if it is not here, or has another
    number of words than these."""
    if not FILE.is_file():
        return None
    words = dict(enumerate(read_tokenizer(FILE)))
    if len(words) in sizes:
        return words
    print(f"WARNING: {FILE} has {len(words):,} words, and the model {sizes[0]:,}: it is not used")
    return None


@functools.cache
def words_of_model(V):
    """{token id: its bytes} of a model of V words: GPT-2's, or those of gpt2_tokenizer.bin. {} if
    nothing says what its words are."""
    if V in GPT2_SIZES:
        return gpt2_words()
    words = file_of_words((V,))
    if words is None:
        print(f"WARNING: the model has V = {V:,} words, and GPT-2 {GPT2_SIZES[0]:,}: samples are "
              f"shown as token ids; a {FILE} of {V:,} words, in this folder, would decode them")
    return words or {}


def encoding_of_model(V):
    """The encoding of texts for a model of V words. Raises UserError unless they are GPT-2's."""
    if V not in GPT2_SIZES:
        raise UserError(f"the model has V = {V:,} words, and GPT-2 {GPT2_SIZES[0]:,}: the tokens "
                        "of a text in its vocabulary are not known; expected an empty text")
    return gpt2_encoding()


def decode(tokens, words):
    """The text of token ids. words: {id: bytes}; other ids are shown as numbers."""
    text = b"".join(words.get(t, f"<{t}>".encode()) for t in tokens)
    return text.decode("utf-8", errors="replace")


class Tokenized:
    """Training that decodes samples with these words."""

    def words(self):
        """{token id: its bytes}, {} if they are not known; another model's config has its own."""
        c = self.config
        return c.words() if hasattr(c, "words") else words_of_model(c.V)

    def encoding(self):
        """The encoding of texts. Raises UserError if it is not known."""
        c = self.config
        return c.encoding() if hasattr(c, "words") else encoding_of_model(c.V)

    def decode(self, tokens):
        return decode(tokens, self.words())


FEATURE = Feature("tokenizer", training=Tokenized)
