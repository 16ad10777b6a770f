"""Which words a model has, to decode samples and to encode a prompt.

A vocabulary of its own (dev/data/vocabulary.py) lies beside the tokens that it trains on, or beside
the checkpoint that it starts from; a run copies it into its folder, -o, as tokenizer.bin. Without
one the words are those of gpt2_tokenizer.bin, llm.c's file of GPT-2's words, if it is in the
current folder; otherwise tiktoken's; without a network only the single bytes. A model of another
size is decoded by a gpt2_tokenizer.bin of as many words, or shown as token ids.
"""
import functools
import os
from pathlib import Path

import train_gpt2
from dev.common.config import read_tokens
from dev.common.files import paths_of
from dev.data.vocabulary import (PRINTING, read_vocabulary, vocabulary_beside, vocabulary_bytes,
                                 vocabulary_of_checkpoint)
from dev.features.feature import Feature, Pair
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import EOT, UserError, gpt2_encoding, replace_file

FILE = Path("gpt2_tokenizer.bin")
GPT2_SIZES = 50257, 50304  # V of models with GPT-2's words; the second is padded, as nanoGPT's


def words_of(encoding):
    """{token id: its bytes} of an encoding, with special tokens."""
    special = (name.encode() for name in encoding.special_tokens_set)
    words = *encoding.token_byte_values(), *special
    return {encoding.encode_single_token(word): word for word in words}


@functools.cache
def vocabulary():
    """{token id: its bytes} of GPT-2, from tiktoken, or of the single bytes only. GPT-2 numbers the
    bytes that print in Latin-1 first, then the others."""
    try:
        return words_of(gpt2_encoding())
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        order = PRINTING + [b for b in range(256) if b not in PRINTING]
        return {i: bytes([b]) for i, b in enumerate(order)} | {EOT: END_OF_TEXT.encode()}


@functools.cache
def gpt2_words():
    """{token id: its bytes} of GPT-2."""
    return file_of_words(GPT2_SIZES) or vocabulary()


def file_of_words(sizes):
    """{token id: its bytes} of gpt2_tokenizer.bin, or None if it is not here, or has another
    number of words than these."""
    if not FILE.is_file():
        return None
    words = dict(enumerate(read_vocabulary(FILE).words))
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


def vocabulary_of_run(checkpoint, V, train_path=None):
    """The Vocabulary of a model of V words, or None if nothing says that it has its own: of the
    tokens it trains on, and of the checkpoint it starts from (or None). Raises UserError if these
    differ, or do not fit."""
    own = vocabulary_of_checkpoint(checkpoint) if checkpoint else None
    beside = vocabulary_beside(train_path) if train_path else None
    found = own or beside
    if own and beside and own != beside:
        flag = f"--vocab-size {len(own.words)}" if own.is_ids else f"--vocab {own.name}"
        raise UserError(f"{train_path}: its tokens have the {len(beside.words):,} words of "
                        f"{beside.name}, and {checkpoint} the {len(own.words):,} of {own.name}: "
                        f"expected the same; prepro_tinyshakespeare.py {flag} makes tokens for "
                        "this model")
    if found and len(found.words) > V or checkpoint and beside and not own and len(
            beside.words) != V:
        raise UserError(f"{found.name}: has {len(found.words):,} words, and the model V = {V:,}; "
                        "expected as many: a model or tokens of the same vocabulary")
    return found


def named(vocabulary):
    """What an error calls it."""
    return f"the words of {vocabulary.name}" if vocabulary else "GPT-2's words"


class Tokenized:
    """Training that decodes samples with these words."""

    def data_paths(self):
        paths = super().data_paths()
        self.vocabulary = self.find_vocabulary(paths[0])  # it must fit before tokens are read
        train, val = map(vocabulary_beside, paths)
        if train != val and os.path.exists(paths_of(paths[1])[0]):
            raise UserError(f"{paths[1]}: its tokens have {named(val)}, and those of {paths[0]} "
                            f"{named(train)}: expected the same; give another -j")
        return paths

    def open_data(self):
        super().open_data()
        words = self.vocabulary.words if self.vocabulary else ()
        if 0 < len(words) < self.config.V:  # else the loader checks the tokens
            for path in paths_of(self.paths[0]) + paths_of(self.paths[1]):
                largest = int(read_tokens(path, self.config).max(initial=0))
                if largest >= len(words):
                    raise UserError(f"{path}: has token {largest}, and {self.vocabulary.name} only "
                                    f"{len(words):,} words; expected both from one run of "
                                    "prepro_tinyshakespeare.py --vocab")

    @functools.cached_property
    def vocabulary(self):
        """The model's own Vocabulary, or None."""
        return self.find_vocabulary()  # of a run without data

    def find_vocabulary(self, train_path=None):
        checkpoint = self.name if self.from_file else None
        return vocabulary_of_run(checkpoint, self.config.V, train_path)

    def words(self):
        """{token id: its bytes}, {} if they are not known; another model's config has its own."""
        c = self.config
        if self.vocabulary:
            return dict(enumerate(self.vocabulary.words))
        return c.words() if hasattr(c, "words") else words_of_model(c.V)

    def encode(self, text):
        """The token ids of a text. A special token's name, such as <|endoftext|>, is that token.
        Raises UserError if the model's vocabulary is not known."""
        c = self.config
        if self.vocabulary:
            return self.vocabulary.encode(text)
        encoding = c.encoding() if hasattr(c, "words") else encoding_of_model(c.V)
        return encoding.encode(text, allowed_special="all")

    def decode(self, tokens):
        words = self.words()
        own = self.vocabulary or FILE.is_file()
        of_gpt2 = not own and self.config.V == len(words) == train_gpt2.Config.V
        return super().decode(tokens) if of_gpt2 else decode(tokens, words)


class Kept:
    """A run that copies its model's own vocabulary into its folder."""

    def make_model(self):
        folder = self.folder
        content = vocabulary_bytes(self.vocabulary) if self.vocabulary else None
        path = folder.path / "tokenizer.bin"
        if content and path.is_file() and path.read_bytes() != content:
            raise UserError(f"{path}: has other words than the tokens of -i, "
                            f"{self.vocabulary.name}: remove it, or give another -o")
        model = super().make_model()
        if content and not folder.rank:
            replace_file(path, [content])
        return model


FEATURE = Feature("tokenizer", training=Tokenized, pairs=(Pair("runs", training=Kept),),
                  left=r"tokenizer\.bin\.[0-9a-f]+\.tmp")
