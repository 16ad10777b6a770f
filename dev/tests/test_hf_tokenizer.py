"""Test dev/tools/hf_tokenizer.py: a folder's tokenizer gives the same ids as tiktoken.

If TIKTOKEN_CACHE_DIR names a folder with GPT-2's vocabulary, that is tested too.
"""
import hashlib
import itertools
import json
import os
import shutil
from unittest import mock

import numpy as np

from dev.tests.checks import check, check_refusal, fast, output_of
from dev.tests.folders import BYTES, letters
from dev.tests.models import FIXTURES
from dev.tools import convert
from dev.tools.hf_tokenizer import write_tokenizer
from train_gpt2 import UserError, gpt2_encoding

WORDS = [*BYTES, b"th", b"e ", b"he", b" t", b" th", b" the", b"ab", b"abc", b"cab", b"abcab",
         "é".encode(), b"\n\n", b"  ", b"    ", "\u2019".encode()[:2], "\u2019".encode(), b"xx",
         b"xxx"]
# Made by hand. In " the", th has the lowest rank, and then " th" has the only one. In xxx the first
# pair is joined.
MERGES = ["t h", "e Ġ", "h e", "Ġ t", "Ġ th", "Ġth e", "a b", "ab c", "c ab", "abc ab", "Ã ©",
          "Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ",
          "â Ģ", "âĢ Ļ", "x x", "xx x"]
HARD = ["", " ", "  \n\n  a", "the the  the", "abcababcab", "é e\u0301 naïve",
        "it's IT'S I\u2019ll we'd",
        "\u2003x \u00a0y\u200bz", "1234567 ½ ٣ Ⅷ", "日本語 한국어 العربية עברית हिन्दी",
        "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f9d1\U0001f3fd",
        "\x00\x01\x7f\x80\xad\ufeff",
        "a<|endoftext|>b<|endoftext|>", "<|endoftext |>", "tabs\t\tand\r\nlines\r", "x" * 300,
        " " * 99 + "y",
        "...!!!???", "def f(x):\n    return x**2  # 4 spaces\n",
        "SolidGoldMagikarp rawdownloadcloneembedreportprint",
        "_a__b___"]
# Its SHA-256, from tiktoken.
VOCAB_BPE = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# GPT-2's split of a text.
PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def small_encoding(words=WORDS):
    """tiktoken's Encoding with these words, and then <|endoftext|>."""
    import tiktoken
    return tiktoken.Encoding("small", pat_str=PIECES, mergeable_ranks={
        word: i for i, word in enumerate(words)}, special_tokens={"<|endoftext|>": len(words)})


def tokenizer_of(folder):
    """The function text -> ids of a folder's vocab.json and merges.txt, as in Sennrich et al.
    (2016): of all pairs of neighbours, the one that comes first in merges.txt is joined everywhere,
    until no pair is in it."""
    import regex

    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    assert lines[0].startswith("#version") and lines[-1] == "", lines[:1]
    rank = {tuple(line.split(" ")): i for i, line in enumerate(lines[1:-1])}
    letter, special = letters(), "<|endoftext|>"

    def join(piece):
        parts = [letter[b] for b in piece.encode()]
        while known := [pair for pair in itertools.pairwise(parts) if pair in rank]:
            pair, joined, i = min(known, key=rank.get), [], 0
            while i < len(parts):
                step = 2 if tuple(parts[i : i + 2]) == pair else 1
                joined.append("".join(parts[i : i + step]))
                i += step
            parts = joined
        return [vocabulary[part] for part in parts]

    def encode(text):
        found = []
        for i, document in enumerate(text.split(special)):
            found += [vocabulary[special]] * (i > 0)
            for piece in regex.findall(PIECES, document):
                found += join(piece)
        return found

    return encode


@fast
def test_tokenizers(folder):
    """The files of a small vocabulary are those written by hand. With them, and with GPT-2's if it
    is here, texts get tiktoken's ids. A folder gets these files if it should."""
    (folder / "small").mkdir()
    write_tokenizer(folder / "small", small_encoding(), 77)
    wish = "\n".join(["#version: 0.2", *MERGES]) + "\n"
    found = (folder / "small/merges.txt").read_text(encoding="utf-8")
    check("merges.txt", found == wish, found if found != wish else "")
    spelled = {"".join(map(letters().get, word)): i for i, word in enumerate(WORDS)} | {
        "<|endoftext|>": len(WORDS)}
    check("vocab.json", json.loads((folder / "small/vocab.json").read_text()) == spelled)
    said = json.loads((folder / "small/tokenizer_config.json").read_text())
    check("tokenizer_config.json",
          (said["model_max_length"], said["eos_token"], said["tokenizer_class"]) ==
          (77, "<|endoftext|>", "GPT2Tokenizer"), said)
    encodings = {"small": small_encoding()}
    if os.environ.get("TIKTOKEN_CACHE_DIR"):  # without it, tiktoken would use the network
        encodings["gpt2"] = gpt2_encoding()
        (folder / "gpt2").mkdir()
        write_tokenizer(folder / "gpt2", encodings["gpt2"], 1024)
        found = hashlib.sha256((folder / "gpt2/merges.txt").read_bytes()).hexdigest()
        check("gpt2: merges.txt is OpenAI's vocab.bpe", found == VOCAB_BPE, found)
    check_refusal("a word without joins", "tiktoken's vocabulary has b'bcd', which no joins",
                  write_tokenizer, folder / "small", small_encoding([*WORDS, b"bcd"]), 77)
    for name, encoding in encodings.items():
        encode = tokenizer_of(folder / name)
        differ = [text for text in HARD
                  if encode(text) != encoding.encode(text, allowed_special="all")]
        check(f"{name}: the ids of {len(HARD)} hard texts", not differ, differ or "")
    checkpoint = np.zeros(256 + 32 * (50304 + 4) + 13 * 32 + 12 * 32 * 32 + 2 * 32, "<f4")
    checkpoint.view("<i4")[:8] = 20240326, 3, 4, 50257, 1, 1, 32, 50304
    checkpoint.tofile(folder / "words.bin")
    with mock.patch.object(convert, "gpt2_encoding", small_encoding):
        output_of(convert.checkpoint_to_folder, folder / "words.bin", folder / "with")
    made = sorted(file.name for file in (folder / "with").iterdir())
    check("GPT-2's words: a tokenizer", made == ["config.json", "merges.txt", "model.safetensors",
                                                  "tokenizer_config.json", "vocab.json"], made)
    said = json.loads((folder / "with/config.json").read_text())
    check("GPT-2's words: the ends of a text",
          (said["bos_token_id"], said["eos_token_id"]) == (50256, 50256))
    said = json.loads((folder / "with/tokenizer_config.json").read_text())
    check("GPT-2's words: the longest text", said["model_max_length"] == 4)
    with mock.patch.object(convert, "gpt2_encoding",
                           side_effect=UserError("tiktoken could not get it")):
        said = output_of(convert.checkpoint_to_folder, folder / "words.bin", folder / "without")
    made = sorted(file.name for file in (folder / "without").iterdir())
    check("no vocabulary: one line, and the rest", said == "no tokenizer is written: tiktoken "
          "could not get it\n" and made == ["config.json", "model.safetensors"], said.strip())


def test_transformers_reads(folder):
    """The tokenizer that transformers loads from a folder gives tiktoken's ids, and gives the text
    back."""
    from transformers import AutoTokenizer

    shutil.copytree(FIXTURES / "gpt2_folder", folder / "words")
    write_tokenizer(folder / "words", gpt2_encoding(), 40)
    tokenizer, encoding = (AutoTokenizer.from_pretrained(folder / "words", local_files_only=True),
                           gpt2_encoding())
    texts = [*HARD, "".join(chr(i) for i in range(0x3000) if not 0xD800 <= i < 0xE000)]
    for text in texts:
        found, wish = tokenizer(text)["input_ids"], encoding.encode(text, allowed_special="all")
        check(f"ids of {text[:30]!r}", found == wish, f"{len(wish)} ids")
        back = tokenizer.decode(wish, clean_up_tokenization_spaces=False)
        check(f"text of {text[:30]!r}", back == text, "" if back == text else repr(back))
    check("the tokenizer's sizes",
          (len(tokenizer), tokenizer.model_max_length, tokenizer.eos_token_id) ==
          (50257, 40, 50256), (len(tokenizer), tokenizer.model_max_length, tokenizer.eos_token_id))
