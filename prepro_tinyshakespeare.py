"""Text to tokens: writes the two files that train_gpt2.py reads, the same that llm.c reads.

    python prepro_tinyshakespeare.py                      # downloads tinyshakespeare, 1.1 MB
    python prepro_tinyshakespeare.py --input book.txt     # a text of your own
    python prepro_tinyshakespeare.py --help               # other files, other vocabularies

tinyshakespeare becomes GPT-2 tokens, with <|endoftext|> before it and after every blank line, so
that each speech of the plays is a document of its own. The first 32,768 tokens, or the first tenth
if that is less, are for validation, the rest for training. A file is 256 int32 (magic 20240520,
version 1, count), then the tokens as uint16. dev/data/own_text.py does what flags ask for.
"""
import sys

import numpy as np

from train_gpt2 import DATA, UserError, gpt2_encoding, make_header, replace_file, run_main

TEXT_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
            "input.txt")
END_OF_TEXT = "<|endoftext|>"
VAL_TOKENS = 32768


def download_tinyshakespeare():
    """The text of tinyshakespeare, a str of 1,115,394 characters. Raises UserError."""
    import http.client  # which take a while: a training needs none of this
    import urllib.request
    try:
        with urllib.request.urlopen(TEXT_URL, timeout=20) as response:
            return response.read().decode("utf-8-sig")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as e:
        raise UserError(f"tinyshakespeare could not be downloaded ({getattr(e, 'reason', e)}): "
                        "connect to the network, or give a text of your own with "
                        "prepro_tinyshakespeare.py --input FILE") from None


def write_tokens(path, tokens, magic=20240520, version=1, dtype="<u2"):
    """Write a token file. tokens: a sequence of ids (GPT-2's are below 65,536)."""
    print(f"writing {len(tokens):,} tokens to {path}")
    replace_file(path, [make_header(magic, version, len(tokens)), np.asarray(tokens, dtype)])


def val_count(tokens):
    """How many of the tokens, the first, are for validation. Raises UserError if they are few."""
    if len(tokens) < 20:
        raise UserError(f"the input has {len(tokens)} tokens, and needs at least 20 for training "
                        "and validation")
    return min(VAL_TOKENS, len(tokens) // 10)


def write_parts(tokens, path, **kind):
    """Write the tokens for validation to path.format("val"), and the others to
    path.format("train"). kind: as in write_tokens, for the tokens of dev/llama3."""
    val = val_count(tokens)
    write_tokens(str(path).format("val"), tokens[:val], **kind)
    write_tokens(str(path).format("train"), tokens[val:], **kind)


def prepare_tinyshakespeare():
    """Download tinyshakespeare, tokenize it, and write its two files. Raises UserError."""
    encoding = gpt2_encoding()
    text = download_tinyshakespeare()
    documents = END_OF_TEXT + text.replace("\n\n", "\n\n" + END_OF_TEXT)
    write_parts(encoding.encode(documents, allowed_special={END_OF_TEXT}), DATA)


def main():
    if not sys.argv[1:]:
        return prepare_tinyshakespeare()
    try:
        from dev.data import own_text
    except ModuleNotFoundError as e:
        if e.name != "dev":
            raise
        raise UserError("flags need dev/, which is missing beside this file: restore it") from None
    return own_text.program()


if __name__ == "__main__":
    run_main(main)
