"""Text to tokens: writes the two files that train_gpt2.py reads, the same that llm.c reads.

    python prepro_tinyshakespeare.py                          # downloads tinyshakespeare, 1.1 MB
    python prepro_tinyshakespeare.py --input book.txt --name book    # any UTF-8 text, as data/book/book_{train,val}.bin

The text becomes GPT-2 tokens, with <|endoftext|> before it and after every blank line, so that each speech of a play
is a document of its own. The first 32,768 tokens are for validation (the first tenth of a text too short for that),
the rest for training. A file is 256 int32 (magic 20240520, version 1, count), then the tokens as uint16.

What the other programs share with this one is here too: errors for a person, files that are written whole or not at
all, the numbers and the header of llm.c's files, and the text of tokens.
"""
import argparse
import functools
import http.client
import os
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

TEXT_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE = Path("data/tinyshakespeare/tiny_shakespeare_{}.bin")  # {}: train or val
END_OF_TEXT, EOT = "<|endoftext|>", 50256
VAL_TOKENS = 32768
HEADER_BYTES = 1024


class UserError(Exception):
    """Something that the user can mend. The message is one line: what was found, what was expected, what to do."""


def replace_file(path, chunks):
    """Write the chunks (bytes or C-contiguous arrays) to path, whole or not at all.

    They go to a temporary file beside it, which then takes its name: an old file is there until the new one is
    complete. Raises UserError if the disk is full or the folder cannot be written.
    """
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); what was there before is untouched") from None
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass  # the folder itself is missing or read-only, which the UserError says


def cache_folder():
    """Where what took long to make is kept: $XDG_CACHE_HOME/train_gpt2, or ~/.cache/train_gpt2."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"


BF16 = np.uint16  # NumPy has no bfloat16, so an array holds its bits: the upper half of an fp32's


def to_bf16(x):
    """fp32 numbers rounded to bfloat16, to nearest with ties to even, as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(x):
    """An array as fp32, from bfloat16's bits or from fp32 as it is."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


class FileKind(NamedTuple):
    """A kind of file: its name, what its header begins with, and how a person gets a good one."""
    name: str
    magic: int
    versions: tuple
    remedy: str


TOKEN_FILE = FileKind("token file", 20240520, (1,),
                      "prepro_tinyshakespeare.py writes one, also from a text of your own with --input")
TOKENIZER = FileKind("tokenizer", 20240328, (2,), "llm.c's train_gpt2.py writes one; without it tiktoken is used")


def read_header(path, kind):
    """The 256 ints of a file's header. Raises UserError if the file is not of this kind and version."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kind.name}: {kind.remedy}") from None
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()
    if header and header[0] != kind.magic:
        legacy = "; a file without a header is of an old format" if kind is TOKEN_FILE else ""
        raise UserError(f"{path}: begins with {header[0]}, and a {kind.name} with {kind.magic}{legacy}: {kind.remedy}")
    if len(header) < 256:
        raise UserError(f"{path}: truncated within its header of {HEADER_BYTES} bytes; "
                        f"expected a {kind.name}: {kind.remedy}")
    if header[1] not in kind.versions:
        old = " (an old format)" if header[1] < kind.versions[0] else ""
        expected = " or ".join(map(str, kind.versions))
        raise UserError(f"{path}: {kind.name} of version {header[1]}{old}; expected version {expected}: {kind.remedy}")
    return header


def check_size(path, kind, expected):
    """Raise UserError unless the file has exactly the expected number of bytes."""
    size = os.path.getsize(path)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(f"{path}: {what}: {size:,} bytes, and the header of this {kind.name} promises {expected:,}: "
                        f"{kind.remedy}")


def gpt2_encoding():
    """GPT-2's byte-pair encoding (50,257 tokens). tiktoken downloads it once, or takes it from TIKTOKEN_CACHE_DIR.

    Raises UserError if it is neither cached nor to be had from the network.
    """
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever its HTTP library raises
        raise UserError(f"tiktoken could not get GPT-2's vocabulary ({type(e).__name__}): connect to the network once, "
                        "or set TIKTOKEN_CACHE_DIR to a folder that holds it") from None


def byte_encoding():
    """The part of GPT-2's vocabulary that needs no download: its 256 single-byte tokens, and end-of-text.

    The ids are GPT-2's own: it numbers the bytes that print in Latin-1 first, and then the others.
    """
    import tiktoken

    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printing]
    ranks = {bytes([b]): i for i, b in enumerate(printing + others)}
    return tiktoken.Encoding("gpt2_bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: EOT})


def download_tinyshakespeare():
    """The text of tinyshakespeare, a str of 1,115,394 characters. Raises UserError if it cannot be downloaded."""
    try:
        with urllib.request.urlopen(TEXT_URL, timeout=20) as response:
            return response.read().decode("utf-8")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as e:  # URLError and time-outs are OSErrors
        raise UserError(f"tinyshakespeare could not be downloaded ({getattr(e, 'reason', e)}): connect to the network, "
                        "or give a text of your own with prepro_tinyshakespeare.py --input FILE") from None


def write_tokens(path, tokens):
    """Write a token file: path, tokens (a sequence of ids below 65,536)."""
    print(f"writing {len(tokens):,} tokens to {path}")
    header = np.zeros(256, "<i4")
    header[:3] = TOKEN_FILE.magic, TOKEN_FILE.versions[0], len(tokens)
    replace_file(path, [header, np.asarray(tokens, "<u2")])


def read_tokens(path, V):
    """The tokens of a token file, mapped into memory. Raises UserError unless all ids are in 0..V-1."""
    check_size(path, TOKEN_FILE, HEADER_BYTES + 2 * read_header(path, TOKEN_FILE)[2])
    tokens = np.memmap(path, "<u2", "r", offset=HEADER_BYTES) if os.path.getsize(path) > HEADER_BYTES else np.zeros(0)
    check_tokens(path, tokens, V)
    return tokens


def check_tokens(path, tokens, V):
    """Raise UserError unless all ids are in 0..V-1."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < V:
        bad = int(np.argmax((tokens < 0) | (tokens >= V)))
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}, and the model has V = {V} words; "
                        "expected a file made with the model's own vocabulary")


def prepare(text, encoding, path):
    """Tokenize text (str) and write the two files path.format("val") and path.format("train")."""
    document = END_OF_TEXT + text.replace("\n\n", "\n\n" + END_OF_TEXT)
    tokens = encoding.encode(document, allowed_special={END_OF_TEXT})
    val = min(VAL_TOKENS, len(tokens) // 10)
    if val < 2:
        raise UserError(f"the text has {len(tokens)} tokens, and needs at least 20 for training and validation")
    write_tokens(str(path).format("val"), tokens[:val])
    write_tokens(str(path).format("train"), tokens[val:])


def data_paths(train, val):
    """The paths of the tokens to train and to validate on. One that is None has the other's name, with val for train in
    it or the other way round. Raises UserError.

    If both are None, they are tinyshakespeare's, which is prepared if it is missing. Without a network it is another
    real text, the language reference that Python carries, so that the trainer always runs. Each thing done without is
    a loud line.
    """
    for given, part, other, flag in ((train, "train", "val", "-j"), (val, "val", "train", "-i")):
        if given and part not in Path(given).name and not (train and val):
            raise UserError(f"{given} has no '{part}' in its name: give {flag} too")
    if train or val:
        return [train or str(Path(val).with_name(Path(val).name.replace("val", "train"))),
                val or str(Path(train).with_name(Path(train).name.replace("train", "val")))]

    def paths(pattern):
        return [str(pattern).format(part) for part in ("train", "val")]

    if all(Path(path).exists() for path in paths(TINYSHAKESPEARE)):
        return paths(TINYSHAKESPEARE)
    try:
        prepare(download_tinyshakespeare(), gpt2_encoding(), TINYSHAKESPEARE)
        return paths(TINYSHAKESPEARE)
    except UserError as e:
        print(f"WARNING: {e}. Training on Python's language reference instead.")
    try:
        encoding, name = gpt2_encoding(), "python_reference"
    except UserError as e:
        print(f"WARNING: {e}. Every byte of the text is a token of its own.")
        encoding, name = byte_encoding(), "python_reference_bytes"
    pattern = Path(f"data/{name}/{name}_{{}}.bin")
    if not all(Path(path).exists() for path in paths(pattern)):
        from pydoc_data.topics import topics
        prepare("\n\n".join(topics[key] for key in sorted(topics)), encoding, pattern)
    return paths(pattern)


def read_tokenizer(path):
    """The bytes of each token, from a gpt2_tokenizer.bin. Raises UserError."""
    count = read_header(path, TOKENIZER)[2]
    data, words, at = Path(path).read_bytes(), [], HEADER_BYTES
    while at < len(data) and len(words) < count:
        words.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len(words) < count or at != len(data):
        raise UserError(f"{path}: its header promises {count} tokens, and its {len(data):,} bytes are not that many; "
                        f"{TOKENIZER.remedy}")
    return words


@functools.cache
def vocabulary():
    """{token id: its bytes}: by gpt2_tokenizer.bin if it is here, else by tiktoken, else the single bytes only."""
    if Path("gpt2_tokenizer.bin").exists():
        return dict(enumerate(read_tokenizer("gpt2_tokenizer.bin")))
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        encoding = byte_encoding()
    return {encoding.encode_single_token(word): word for word in encoding.token_byte_values()} | {
        EOT: END_OF_TEXT.encode()}


def decode(tokens):
    """The text of token ids."""
    return b"".join(vocabulary().get(t, f"<{t}>".encode()) for t in tokens).decode("utf-8", errors="replace")


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--input", metavar="FILE", help="a UTF-8 text, instead of downloading tinyshakespeare")
    flags.add_argument("--name", help="writes data/NAME/NAME_{train,val}.bin (default: the input's name)")
    flags = flags.parse_args()
    encoding = gpt2_encoding()
    if flags.input is None:
        text = download_tinyshakespeare()
    else:
        try:
            text = Path(flags.input).read_text(encoding="utf-8")
        except OSError as e:
            raise UserError(f"{flags.input}: could not be read ({e.strerror}); --input takes a text file") from None
        except UnicodeDecodeError as e:
            raise UserError(f"{flags.input}: byte {e.start} is not UTF-8, and --input takes UTF-8 text") from None
    name = flags.name or (Path(flags.input).stem if flags.input else None)
    if name and not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UserError(f"--name {name}: expected letters, digits, '-', '_' and '.'")
    prepare(text, encoding, Path(f"data/{name}/{name}_{{}}.bin") if name else TINYSHAKESPEARE)


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
