"""Test dev/llama3/tokens.py and Llama 3's token files, with small tokenizers made here."""
import base64
import contextlib
import functools
import io
import json
import sys
from unittest import mock

import numpy as np

from dev.common.config import Config, read_tokens as read_tokens_of
from dev.features.data_loader import FilesLoader
from dev.features.tokenizer import decode, words_of
from dev.llama3 import tokens
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import EXACT, check, check_refusal, fast, header_refusal, working_in
from dev.tests.folders import BYTES, byte_encoding, letters
from prepro_tinyshakespeare import END_OF_TEXT, write_tokens
from train_gpt2 import TOKENS

WORDS = [*BYTES, b"th", b"he", b" t", b" th", b" the", b"ab", b"abc", b"12", b"123", b"45",
         "é".encode(), b"  "]
TEXTS = [  # a text, and its tokens as Llama 3 splits and joins it
    ("the", [b"th", b"e"]),  # th ranks before he, and there is no token the
    (" the", [b" the"]),
    ("abcabc", [b"abc", b"abc"]),
    ("12345", [b"123", b"45"]),  # a piece has at most three digits
    ("é\n\n\x00", ["é".encode(), b"\n", b"\n", b"\x00"]),
    ("a   the", [b"a", b"  ", b" the"]),  # the last space goes with the word
]
SPECIAL = {"<|begin_of_text|>": len(WORDS), "<|end_of_text|>": len(WORDS) + 1}


def read_tokens(path, V, kind=Config3):
    """The tokens in a file for a model with V words."""
    return read_tokens_of(path, kind(V=V))


SPLIT = {"type": "Split", "pattern": {"Regex": tokens.PATTERN}, "behavior": "Isolated",
         "invert": False}
VOCABULARY = {"".join(map(letters().get, word)): i for i, word in enumerate(WORDS)}


def tokenizer_json(**change):
    return json.dumps({
        "added_tokens": [{"id": i, "content": name, "special": True}
                         for name, i in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [SPLIT, {"type": "ByteLevel", "use_regex": False}]},
        "model": {"type": "BPE", "vocab": VOCABULARY},
    } | change).encode()


def tokenizer_model(words=WORDS):
    return b"".join(base64.b64encode(word) + b" %d\n" % i for i, word in enumerate(words))


def of_few_words(test):
    """Decorate a test whose tokenizers have only WORDS, instead of Llama 3's 128,000."""
    @functools.wraps(test)
    def patched(folder):
        with mock.patch.object(tokens, "BEGIN_ID", len(WORDS)):
            yield from test(folder) or ()
    return patched


@fast
@of_few_words
def test_words_and_ids(folder):
    """Both kinds of tokenizer file give the same result, and texts become the right tokens."""
    for name, content, special in (("tokenizer.json", tokenizer_json(), 2),
                                   ("tokenizer.model", tokenizer_model(), 256)):
        path = folder / name
        path.write_bytes(content)
        encoding, words = tokens.encoding(path), tokens.vocabulary(path)
        check(f"{name}: its words", words == {i: word for i, word in enumerate(WORDS)} | {
            i: word for i, word in words.items() if i >= len(WORDS)} and
              len(words) == len(WORDS) + special, len(words))
        check(f"{name}: its special tokens",
              [words[i] for i in SPECIAL.values()] == [s.encode() for s in SPECIAL])
        for text, wish in TEXTS:
            found = [words[i] for i in encoding.encode(text)]
            check(f"{name}: {text!r}", found == wish, found)
            check(f"{name}: {text!r} decoded", decode(encoding.encode(text), words) == text)
    check("tokenizer.model: eot_id and the last",
          (words[len(WORDS) + 9], words[len(WORDS) + 255]) ==
          (b"<|eot_id|>", b"<|reserved_special_token_246|>"), words[len(WORDS) + 255])
    path.with_suffix(".json").write_bytes(tokenizer_json(
        added_tokens=[{"content": name, "id": i}
                      for name, i in (SPECIAL | {"<a pad>": 300}).items()],
        model={"type": "BPE", "vocab": VOCABULARY | SPECIAL | {"<a pad>": 300}}))
    tokens.encoding.cache_clear()
    words = tokens.vocabulary(path.with_suffix(".json"))
    check("special tokens among the words, too",
          (words[300], len(words)) == (b"<a pad>", len(WORDS) + 3), len(words))
    check("GPT-2's bytes have their end of text",
          words_of(byte_encoding())[50256] == END_OF_TEXT.encode())
    for name, content in (("tokenizer.json",
                           tokenizer_json()), ("tokenizer.model", tokenizer_model())):
        path.with_name(name).write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
        tokens.encoding.cache_clear()
        found = tokens.vocabulary(path.with_name(name))
        check(f"{name} with a byte order mark", [found[i] for i in range(len(WORDS))] == WORDS)
    with working_in(folder):
        tokens.encoding.cache_clear()
        check("the tokenizer of the current folder", tokens.encoding().name == "tokenizer.json")


@fast
@of_few_words
def test_files(folder):
    """The program's two files hold the text, with a border before each document, and GPT-2's and
    Llama's token files can both be read."""
    text = "the abc\n\nabc <|end_of_text|> 123\n\n" * 20
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "book.txt").write_text(text, "utf-8-sig", newline="\r\n")
    tokens.encoding.cache_clear()
    arguments, out = ["tokens.py", "--input", "book.txt", "--name", "a_book", "--documents",
                      "blank-lines"], io.StringIO()
    with working_in(folder), mock.patch.object(sys, "argv",
                                               arguments), contextlib.redirect_stdout(out):
        tokens.main()
    check("tokens.py", "tokenizer.json: 270 tokens" in out.getvalue(), out.getvalue())
    words = tokens.vocabulary(folder / "tokenizer.json")
    parts = [read_tokens(folder / f"data/a_book/a_book_{part}.bin", len(words))
             for part in ("val", "train")]
    found = np.concatenate(parts)
    begin = SPECIAL["<|begin_of_text|>"]
    borders = decode(found.tolist(), words).split("<|begin_of_text|>")
    check("tokens.py: the text", "".join(borders) == text)
    check("tokens.py: its documents",
          borders == ["", *(x + "\n\n" for x in text.split("\n\n")[:-1]), ""])
    check("tokens.py: a special token's name in a text is text",
          SPECIAL["<|end_of_text|>"] not in found)
    check("tokens.py: a tenth validates",
          len(parts[0]) == len(found) // 10 and parts[0][0] == begin)
    for name, part in zip(("val", "train"), parts):
        raw = (folder / f"data/a_book/a_book_{name}.bin").read_bytes()
        yield (f"{name}, header", np.frombuffer(raw, "<i4", 256)[:4],
               np.int32([20240801, 7, len(part), 0]), EXACT)
        yield (f"{name}, tokens", np.frombuffer(raw, "<u4", offset=1024), np.array(part, "<u4"),
               EXACT)
    ids = np.arange(40) * 3000
    llama = dict(magic=20240801, version=7, dtype="<u4")
    write_tokens(folder / "large.bin", ids, **llama)
    write_tokens(folder / "small.bin", ids // 3000)
    write_tokens(folder / "small_llama.bin", ids // 3000, **llama)
    yield "ids above 65,535", read_tokens(folder / "large.bin", 128256), ids.astype("<u4"), EXACT
    x, y = FilesLoader(folder / "large.bin", 2, 8, Config3(V=128256)).next_batch()
    yield "targets above 65,535", y, np.int32(ids[1:17]).reshape(2, 8), EXACT
    yield "GPT-2's file", read_tokens(folder / "small.bin", 40), (ids // 3000).astype("<u2"), EXACT
    yield ("GPT-2's ids in Llama's file", read_tokens(folder / "small_llama.bin", 40),
           (ids // 3000).astype("<u4"), EXACT)
    check_refusal("token file", "large.bin: token 17 is 51000; expected .* 50257", read_tokens,
                  folder / "large.bin", 50257)
    check_refusal("token file", f"large.bin: .*{header_refusal((20240801, 7), TOKENS)}",
                  read_tokens, folder / "large.bin", 50257, Config)
    header = np.fromfile(folder / "large.bin", "<i4")
    for wish, index, value in ((header_refusal((5, 7), TOKENS, tokens.LLAMA_TOKENS), 0, 5),
                               (header_refusal((20240801, 1), TOKENS, tokens.LLAMA_TOKENS), 1, 1),
                               ("1,184 bytes; expected 1,188", 2, 41),
                               ("1,184 bytes; expected 1,180", 2, 39),
                               ("token 0 is 4294967295", 256, -1)):
        content = header.copy()
        content[index] = value
        content.tofile(folder / "bad.bin")
        check_refusal("token file", f"bad.bin: .*{wish}", read_tokens, folder / "bad.bin", 128256)


@of_few_words
def test_unusable(folder):
    """Words and patterns that tiktoken refuses, in one line; at two words with one id it panics."""
    path = folder / "tokenizer.json"
    for name, change in (*((f"aa is {i!r}", {"model": {"type": "BPE", "vocab": VOCABULARY |
                                                       {"aa": i}}}) for i in (5, -1, 2**40, "5")),
                         ("a parenthesis", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                             SPLIT | {"pattern": {"Regex": "("}},
                             {"type": "ByteLevel", "use_regex": False}]}})):
        path.write_bytes(tokenizer_json(**change))
        tokens.encoding.cache_clear()
        check_refusal(name, "tokenizer.json: tiktoken cannot use its words or its pattern; "
                      "expected a tokenizer of Ll", tokens.encoding, path)


@fast
def test_refusals(folder):
    """What is not a tokenizer of Llama 3 is refused in one line. One with the right number of words
    is not refused."""
    bytelevel = {"type": "ByteLevel", "use_regex": True}
    for name, wish, content in (
            ("tokenizer.json", "could not be read", None),
            ("tokenizer.model", "could not be read", None),
            *(("tokenizer.json", f"its {wish}", tokenizer_json(**change)) for wish, change in (
                ("model is of type Unigram, not BPE", {"model": {"type": "Unigram", "vocab": []}}),
                ("normalizer is of type NFC, not none", {"normalizer": {"type": "NFC"}}),
                ("pre_tokenizer has the steps ByteLevel, not Split, ByteLevel",
                 {"pre_tokenizer": bytelevel}),
                ("pre_tokenizer has the steps Split, not", {"pre_tokenizer": SPLIT}),
                ("pre_tokenizer has the steps Split, Split, ByteLevel, not", {"pre_tokenizer": {
                    "type": "Sequence", "pretokenizers": [SPLIT, SPLIT, bytelevel]}}),
                ("pre_tokenizer has the steps Digits, ByteLevel, not", {"pre_tokenizer": {
                    "type": "Sequence", "pretokenizers": [{"type": "Digits"}, bytelevel]}}))),
            *((name, "expected Llama 3's tokenizer", content) for name, content in (
                *(("tokenizer.json", content) for content in (b"{", b"[]", b"\xff", b"{}")),
                ("tokenizer.json", tokenizer_json(pre_tokenizer=None)),
                ("tokenizer.json", tokenizer_json(model={"type": "BPE", "vocab": {"\u4e00": 0}})),
                ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>"), ("tokenizer.model", b"YQ== x\n"),
                ("tokenizer.json", b"[" * 3000 + b"]" * 3000),
                ("tokenizer.model", b"!!!! 1\n"))),
            ("tokenizer.json", r"has no <\|begin_of_text\|>", tokenizer_json(added_tokens=[])),
            ("tokenizer.model", "has no token for byte 0; expected", tokenizer_model(BYTES[:255])),
            ("tokenizer.model", r"its <\|begin_of_text\|> is token 268, not 128000; .* GPT-2's "
             r"words", tokenizer_model(WORDS[:268])),
            ("tokenizer.json", r"its <\|begin_of_text\|> is token 32000, not 128000",
             tokenizer_json(added_tokens=[{"id": 32000, "content": "<|begin_of_text|>"}]))):
        path = folder / name
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)
        tokens.encoding.cache_clear()
        check_refusal(name, f"{path}: .*{wish}", tokens.encoding, path)
    path.with_suffix(".model").write_bytes(tokenizer_model([*WORDS, *(
        b"\xff" + i.to_bytes(3, "big") for i in range(128000 - len(WORDS)))]))
    words = tokens.encoding(path.with_suffix(".model"))
    check("128,000 words",
          (words.n_vocab, words.encode_single_token("<|begin_of_text|>")) == (128256, 128000))
