"""Text to tokens: writes the two files that train_gpt2.py reads, the same that llm.c reads.

    python prepro_tinyshakespeare.py                          # downloads tinyshakespeare, 1.1 MB
    python prepro_tinyshakespeare.py --input book.txt --name book    # any UTF-8 text, as data/book/book_{train,val}.bin

The text becomes GPT-2 tokens, with <|endoftext|> before it and after every blank line, so that each speech of a play
is a document of its own. The first 32,768 tokens are for validation (the first tenth of a text too short for that),
the rest for training. A file is 256 int32 (magic 20240520, version 1, count), then the tokens as uint16.
"""
import argparse
import http.client
import os
import sys
import urllib.request
from pathlib import Path

import numpy as np

TEXT_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE = Path("data/tinyshakespeare/tiny_shakespeare_{}.bin")  # {}: train or val
END_OF_TEXT, EOT = "<|endoftext|>", 50256
VAL_TOKENS = 32768


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
    header[:3] = 20240520, 1, len(tokens)
    replace_file(path, [header, np.asarray(tokens, "<u2")])


def prepare(text, encoding, path):
    """Tokenize text (str) and write the two files path.format("val") and path.format("train")."""
    document = END_OF_TEXT + text.replace("\n\n", "\n\n" + END_OF_TEXT)
    tokens = encoding.encode(document, allowed_special={END_OF_TEXT})
    val = min(VAL_TOKENS, len(tokens) // 10)
    if val < 2:
        raise UserError(f"the text has {len(tokens)} tokens, and needs at least 20 for training and validation")
    write_tokens(str(path).format("val"), tokens[:val])
    write_tokens(str(path).format("train"), tokens[val:])


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
