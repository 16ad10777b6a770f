"""Vocabularies of token files: what text each id stands for.

The file has llm.c's tokenizer format: a header of 256 int32 (magic 20240328, version 2, number of
words, id of <|endoftext|>), then for each word a byte with its length, and its bytes. It lies
beside the token files as data/NAME/NAME_tokenizer.bin; without one, tokens are GPT-2's. The words
say which kind of vocabulary it is, so no field of the header does:

bytes     Word i is the byte i, for all 256; word 256 is <|endoftext|>.
chars     The characters of a text, sorted, and then <|endoftext|>.
N words   The 256 bytes, then words that byte-pair encoding joins of earlier ones, most frequent
          first, and then <|endoftext|>. A word's id is its rank, as in tiktoken.
ids       Word i is a space and the number i: tokens that stand for no text, see ids.py.

Of a text, <|endoftext|> is the last word, so that the trainer's samples begin with it.
"""
import functools
import os
import re
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from dev.common.files import checked_header, paths_of
from dev.data.hub import library
from dev.data.text import call_tiktoken
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import (EOT, HEADER_BYTES, FileKind, UserError, gpt2_encoding, make_header,
                        replace_file)

TOKENIZER = FileKind("tokenizer", 20240328, (2,), "prepro_tinyshakespeare.py --vocab writes one, "
                     "and llm.c's train_gpt2.py GPT-2's")
BYTES = [bytes([b]) for b in range(256)]
PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes, as Latin-1
END = END_OF_TEXT.encode()
MOST = 50257  # words, as GPT-2: with more, the trainer's samples would not begin with the last
LONGEST = 255  # bytes of a word, since its length is a byte
# To join a pair takes the longer, the longer the piece is that it stands in: pieces are cut here.
LONG = re.compile(r"\S{1000}|\s{1000}")
# How GPT-2 splits a text into pieces that are tokenized one by one, as tiktoken writes it: without
# backtracking, which overflows at a million spaces
PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")


class Vocabulary:
    """words: the bytes of each id; eot: the id of <|endoftext|>. name: for errors."""

    def __init__(self, words, eot, name="this vocabulary"):
        self.words, self.eot, self.name = words, eot, name

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and (self.words, self.eot) == (other.words, other.eot)

    @functools.cached_property
    def encoding(self):
        """tiktoken's Encoding of words that have all 256 bytes among them. Raises UserError."""
        ranks = {word: i for i, word in enumerate(self.words) if i != self.eot}
        try:
            import tiktoken
        except ImportError as e:
            raise UserError(f"{self.name}: needs tiktoken ({e}): pip install -r "
                            "requirements.txt") from None
        return call_tiktoken(tiktoken.Encoding, str(self.name), pat_str=PATTERN,
                             mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot})

    @functools.cached_property
    def is_ids(self):
        """Whether tokens stand for no text."""
        return self.words == words_of_ids(len(self.words))

    def check_text(self, what, remedy):
        """Raise UserError if tokens stand for no text, which `what` needs."""
        if self.is_ids:
            raise UserError(f"{what} needs text, and {self.name} has ids, which stand for none; "
                            f"{remedy}")

    @functools.cached_property
    def kind(self):
        """"bytes", "chars", "words" or "ids". Raises UserError if texts cannot become such
        tokens."""
        if self.is_ids:
            return "ids"
        if self.words == [*BYTES, END]:
            return "bytes"
        if len({*self.words}) == len(self.words):
            if {*BYTES} <= {*self.words}:
                return "words"
            if all(is_character(word) for i, word in enumerate(self.words) if i != self.eot):
                return "chars"
        raise UserError(f"{self.name}: its words are neither single characters, nor have they all "
                        "256 bytes among them: texts cannot become its tokens; expected a file of "
                        "prepro_tinyshakespeare.py --vocab")

    @functools.cached_property
    def ids(self):
        """{character: id}."""
        return {word.decode(): i for i, word in enumerate(self.words) if i != self.eot}

    def encode_array(self, text):
        """The ids of a text, uint16. <|endoftext|> in it is one token. Raises UserError at a
        character that the vocabulary lacks."""
        if self.is_ids:
            return self.encode_ids(text)
        parts = []
        for document in whole(text).split(END_OF_TEXT):
            parts += [np.array([self.eot], "<u2"), self.encode_ordinary(document)]
        return np.concatenate(parts[1:])

    def encode_ordinary(self, text):
        """The same; <|endoftext|> in the text is as ordinary as the rest."""
        return getattr(self, f"encode_{self.kind}")(whole(text))

    def encode(self, text):
        """The same as a list."""
        return self.encode_array(text).tolist()

    def encode_bytes(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype("<u2")

    def encode_chars(self, text):
        missing = next((c for c in dict.fromkeys(text) if c not in self.ids), None)
        if missing is not None:
            raise UserError(f"{missing!r} (U+{ord(missing):04X}) is none of the {len(self.ids)} "
                            f"characters of {self.name}: leave it out, or train with --vocab bytes")
        return np.fromiter(map(self.ids.get, text), "<u2", len(text))

    def encode_ids(self, text):
        V = len(self.words)
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < V):
                raise UserError(f"{word!r} is no id: the model's tokens are the numbers from 0 to "
                                f"{V - 1}, and stand for no text; expected some of them, such as "
                                '"12 7 9"')
        return np.array([*map(int, text.split())], "<u2")

    def encode_words(self, text):
        return np.array(call_tiktoken(self.encoding.encode_ordinary, text), "<u2")

    def decode(self, ids):
        """The text of ids. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.words[i] for i in ids).decode("utf-8", "replace")


def letters():
    """{byte: the letter that stands for it in Hugging Face's vocabularies}: itself if it prints,
    else one from U+0100 up."""
    others = [b for b in range(256) if b not in PRINTING]
    return {b: chr(b) for b in PRINTING} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def words_of_ids(V):
    """The words of V ids."""
    return [b" %d" % i for i in range(V)]


def is_character(word):
    try:
        return len(word.decode()) == 1
    except UnicodeDecodeError:
        return False


def whole(text):
    """A text whose halves of surrogate pairs, which JSON and a command line may have, are joined or
    replaced, as tiktoken does it."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- Files


def read_vocabulary(path):
    """The Vocabulary in a file. Raises UserError."""
    _, _, count, eot, *_ = checked_header(path, TOKENIZER)
    data, words, at = Path(path).read_bytes(), [], HEADER_BYTES
    while at < len(data) and len(words) < count:
        words.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len(words) < count or at != len(data):
        raise UserError(f"{path}: its header promises {count} tokens, and its {len(data):,} bytes "
                        f"are not that many; {TOKENIZER.remedy}")
    if not 0 <= eot < max(1, count):
        raise UserError(f"{path}: its {END_OF_TEXT} is token {eot}; expected one of its {count} "
                        f"tokens; {TOKENIZER.remedy}")
    return Vocabulary(words, eot, str(path))


def vocabulary_bytes(vocabulary):
    """The content of a vocabulary's file."""
    words = vocabulary.words
    assert all(0 < len(word) <= LONGEST for word in words)
    header = make_header(TOKENIZER.magic, 2, len(words), vocabulary.eot)
    return header.tobytes() + b"".join(bytes([len(word)]) + word for word in words)


def write_vocabulary(path, vocabulary):
    """Write a vocabulary's file. Raises UserError."""
    replace_file(path, [vocabulary_bytes(vocabulary)])


def tokenizer_path(token_path):
    """Where the vocabulary of a token file is, or of the files of a pattern: book_tokenizer.bin
    beside book_train.bin, and fineweb_tokenizer.bin beside fineweb_train_000001.bin. None if the
    name has neither train nor val as a word."""
    path = Path(paths_of(str(token_path))[0])
    found = re.match(r"(.*(?<![A-Za-z]))(train|val)(?![A-Za-z])", path.name)
    return path.with_name(f"{found[1]}tokenizer.bin") if found else None


def vocabulary_beside(token_path):
    """The Vocabulary beside a token file, or beside the files of a pattern; None if there is none,
    which means GPT-2's. Raises UserError."""
    path = tokenizer_path(token_path)
    return read_vocabulary(path) if path and path.is_file() else None


def vocabulary_of_checkpoint(path):
    """The Vocabulary of a checkpoint, or None: in book_tokenizer.bin beside book.bin, or in
    tokenizer.bin, as in the folder of a run. Raises UserError."""
    path = Path(path)
    for beside in (path.with_name(f"{path.stem}_tokenizer.bin"), path.with_name("tokenizer.bin")):
        if beside.is_file():
            return read_vocabulary(beside)
    return None


# ---- Vocabularies of texts


def vocabulary_of(choice, texts):
    """The Vocabulary that --vocab names, for these texts. Raises UserError."""
    if choice == "gpt2":
        return gpt2_vocabulary()
    if choice == "bytes":
        return Vocabulary([*BYTES, END], len(BYTES))
    if choice == "chars":
        return character_vocabulary(texts)
    return joined_vocabulary(int(choice), texts)


def gpt2_vocabulary():
    """GPT-2's, in which texts are encoded by tiktoken's own. Raises UserError."""
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        raise UserError(f"{e}; or give --vocab: bytes, chars and a number need no network") from e
    words = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]
    vocabulary = Vocabulary(words, EOT, "GPT-2's vocabulary")
    vocabulary.encoding = encoding
    return vocabulary


def character_vocabulary(texts):
    """All characters of the texts, sorted, and <|endoftext|>."""
    found = sorted(set().union(*(text.replace(END_OF_TEXT, "") for text in texts)))
    if len(found) >= MOST:
        raise UserError(f"the text has {len(found):,} different characters; expected at most "
                        f"{MOST - 1:,}: give --vocab bytes")
    return Vocabulary([*(c.encode() for c in found), END], len(found))


def interruptible(function, *args):
    """function(*args), which may spend minutes in Rust code that does not notice Ctrl-C: another
    thread calls it, and Ctrl-C ends the program. Nothing may be half done then, such as a file."""
    found = Future()

    def run():
        try:
            found.set_result(function(*args))
        except BaseException as e:
            found.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # as a shell says it; sys.exit() would wait for the thread, or crash it


def joined_vocabulary(count, texts):
    """The words of a byte-pair encoding of `count` words, which the tokenizers library learns from
    the texts. Raises UserError if they have not enough different pairs."""
    tokenizers = library("tokenizers")
    byte_of = {letter: b for b, letter in letters().items()}
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    print(f"learning {count:,} words from {sum(map(len, texts)):,} characters", flush=True)
    interruptible(
        learner.train_from_iterator,
        (piece for text in texts
         for piece in LONG.sub(rf"\g<0>{END_OF_TEXT}", text).split(END_OF_TEXT)),
        tokenizers.trainers.BpeTrainer(vocab_size=count - 1, show_progress=False,
                                       initial_alphabet=[*byte_of], max_token_length=LONGEST))
    ids = learner.get_vocab()
    joined = [word for word in sorted(ids, key=ids.get) if len(word) > 1]
    words = [*BYTES, *(bytes(map(byte_of.get, word)) for word in joined), END]
    if len(words) < count:
        raise UserError(f"--vocab {count}: the text has pairs to join for {len(words):,} words "
                        "only; expected that many at most, or a longer text")
    return Vocabulary(words, count - 1)
