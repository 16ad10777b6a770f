"""Test dev/runs/sample.py: the tokens it draws against a formula in NumPy, and the pieces of its text against the
whole. And dev/runs/tokenizer.py: which vocabulary samples are decoded with.

    python -m dev.tests.test_sample
"""
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np  # after prepro_tinyshakespeare, which sets how its threads wait

import train_gpt2
from dev.llama3.tokens import vocabulary as llamas_words
from dev.llama3.train_llama3 import Config3
from dev.runs.sample import choose, generate, stream, texts
from dev.runs.tokenizer import decode, gpt2_words, vocabulary, words_of
from dev.tests.checks import EXACT, check, check_refusal, run_program
from dev.tests.models import FIXTURES, device_of, poisoned_model
from prepro_tinyshakespeare import byte_encoding, make_header, write_tokens
from train_gpt2 import coins
from train_gpt2 import generate as trainers_sample


def first_coins(count):
    return [coin for _, coin in zip(range(count), coins())]


class Listed:
    """A model whose next logits depend only on the last token, and which remembers what it was asked."""

    def __init__(self, logits, T=4):  # logits (V,V)
        self.logits, self.T, self.asked = np.float32(logits), T, []
        self.config = SimpleNamespace(V=len(logits), EOT=50256)

    def next_logits(self, tokens):
        self.asked.append(list(tokens))
        return self.logits[tokens[-1]]


def drawn_by_formula(logits, coin, temperature, top_k):
    """The first word whose cumulative probability is above the coin, in float64. Words outside of top_k have the
    probability 0. None if the coin is too close to a boundary to tell."""
    logits = np.float64(logits)
    left = [i for i in range(len(logits)) if sum((logits > logits[i]) | (logits == logits[i])
            & (np.arange(len(logits)) < i)) < (top_k or len(logits))]  # fewer than top_k words rank above it
    weights = np.array([np.exp((logits[i] - logits.max()) / temperature) * (i in left) for i in range(len(logits))])
    cdf = np.cumsum(weights) / weights.sum()
    return None if min(abs(cdf - coin)) < 1e-5 else next(i for i in range(len(cdf)) if cdf[i] > coin)


def formula():
    """Temperatures and top-k for random logits, with the same coins; in some rows many logits are equal."""
    rng = np.random.default_rng(3)
    for temperature in (0.2, 0.8, 1, 3):
        for top_k in (0, 1, 2, 5, 36, 37, 50):
            wrong = tried = 0
            for row, coin in enumerate(first_coins(120)):
                logits = np.float32(rng.normal(0, 2, 37) if row % 2 else rng.integers(-2, 3, 37))
                wish = drawn_by_formula(logits, coin, temperature, top_k)
                tried += wish is not None
                wrong += wish is not None and choose(logits, coin, temperature, top_k) != wish
            check(f"temperature {temperature}, top_k {top_k}", wrong == 0 and tried > 100, f"{wrong} of {tried} differ")
    logits = np.float32((0.5, 2, 2, -1, 2))
    for coin in (0, 0.5, np.float32(1 - 2**-24)):
        coin = np.float32(coin)
        for name, wish, *settings in (
                ("temperature 0 is greedy, the first of equals", 1, 0, 0), ("and with top_k", 1, 0, 3),
                ("the smallest temperatures are not 0", {0: 1, 0.5: 2}.get(float(coin), 4), 1e-40, 0),
                ("what fp32 rounds to 0 is 0", 1, 1e-50, 0), ("top_k 1 is greedy, the first of equals", 1, 5, 1),
                ("top_k 2 keeps the first two of three equals", 1 if coin < 0.5 else 2, 1, 2)):
            found = choose(logits, coin, *settings)
            check(f"{name}, coin {coin:.3f}", found == wish, f"{found}, expected {wish}")
    # Rounding can leave the running sum of fp32 weights below the coin even at the end. Even then the last word is not
    # drawn if it is outside of top_k.
    logits = np.float32([0.1 * (i % 7) for i in range(3000)] + [-9.0])
    last = choose(logits, np.float32(1), 1, 3000)
    check("a word outside of top_k is never drawn", last == 2999, last)
    check("large logits", choose(logits + np.float32(1000), np.float32(0.5), 0.5, 0) < 3000)


def as_the_trainer():
    """With default settings and an empty text, the tokens are those of the trainer's own samples. Greedy tokens are
    those with the largest logits in a forward pass."""
    model = poisoned_model(device_of("cpu", "fp32", 64, 2), 1, 20)
    tokens = list(generate(model, [256], 40, 1.0, 0))
    yield "the trainer's tokens", np.array(tokens), np.array(trainers_sample(model, 40)), EXACT
    found, pieces = list(generate(model, [256], 40, 0, 0)), []
    prompt, wish = [256], []
    for _ in range(40):  # a forward pass over the last T tokens, without padding
        window = np.int32([(prompt + wish)[-20:]])
        model.forward(window, window)
        wish.append(int(np.argmax(model.device.get(model.acts.logits)[window.size - 1, :257])))
    yield "greedy tokens", np.array(found), np.array(wish), EXACT
    words = {i: b"%d " % i for i in range(257)}
    stream(model, lambda text: [], words, "", 40, write=pieces.append)
    check("the trainer's text", "".join(pieces) == decode(trainers_sample(model, 40), words), "".join(pieces)[:40])


def windows():
    """The model is given the last T tokens, whether from the text or its own."""
    model = Listed(np.eye(6)[[1, 2, 3, 4, 5, 0]])  # after i comes i + 1
    pieces, words = [], {i: b"%d" % i for i in range(6)}
    stream(model, lambda text: list(map(int, text)), words, "312045", 3, 0, 0, pieces.append)
    check("the last T", model.asked == [[2, 0, 4, 5], [0, 4, 5, 0], [4, 5, 0, 1]], model.asked)
    check("the text, and then what follows", pieces == ["312045", "0", "1", "2"], pieces)
    stream(model, lambda text: list(map(int, text)), words, "3", 2, 0, 0, pieces.append)
    check("a short text", model.asked[3:] == [[3], [3, 4]], model.asked[3:])
    model = Listed(np.eye(6))
    stream(model, lambda text: [], words, "", 1, 0, 0, pieces.append)
    check("an empty text: EOT, or the last word", model.asked == [[5]], model.asked)
    model = Listed(np.eye(6), T=1)
    model.next_logits = lambda tokens: np.eye(60000, 1, 0 if tokens == [50256] else -1)[:, 0]
    model.config.V = 60000
    stream(model, lambda text: [], {0: b"after EOT", 1: b"after another"}, "", 1, 0, 0, pieces.append)
    check("an empty text: EOT", pieces[-1] == "after EOT", pieces[-1])

    model, pieces = Listed(np.eye(6)), []
    model.config.V = 5
    check_refusal("a word too many", "token 5, and the model has V = 5 words; expected", stream, model,
                  lambda text: [5, 2], words, "x", 1, 0, 0, pieces.append)
    check("a word too many: nothing is written", pieces == [], pieces)
    model.config.V = 6
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        stream(model, lambda text: [5, 2], words, "x", 2, 0)
    check("the last word, and printed", printed.getvalue() == "x22", printed.getvalue())


def characters():
    """Characters of two to four bytes, cut into tokens at every place: each is written when it is complete, and
    together they are the text."""
    text = "aé\n€👍🏽 z"
    encoded = text.encode()
    for size in (1, 2, 3, 5, len(encoded)):
        words = {i: encoded[i * size : (i + 1) * size] for i in range(-(-len(encoded) // size))}
        pieces = list(texts(range(len(words)), words))
        check(f"tokens of {size} bytes", "".join(pieces) == text, pieces)
        whole = [encoded[: (i + 1) * size].decode(errors="ignore") for i in range(len(words))]
        check(f"tokens of {size} bytes: as soon as they are whole",
              ["".join(pieces[: i + 1]) for i in range(len(words))] == whole, pieces)
    for name, *parts in (("an end within a character", b"x\xf0", b"\x9f", b"\x91"),
                         ("no UTF-8", b"\xff", b"\xe2A", b"\x80"), ("a token without bytes", b"a", None, b"b")):
        words = {i: part for i, part in enumerate(parts) if part is not None}
        pieces = list(texts(range(3), words))
        check(name, "".join(pieces) == decode(range(3), words), pieces)
    encoding = byte_encoding()
    model, pieces = Listed(np.eye(50257, 1)), []  # any logits: nothing is generated
    stream(model, encoding.encode_ordinary, words_of(encoding), text, 0, write=pieces.append)
    check("a text alone", pieces == [text], pieces)


def tokenizer_file():
    """The trainer decodes samples with gpt2_tokenizer.bin if it is here, else with GPT-2's vocabulary. So does a Llama
    with GPT-2's vocabulary, or with its own if its tokenizer is missing."""
    here, own, plain = os.getcwd(), [b"[%d]" % i for i in range(331)], words_of(byte_encoding())
    arguments = (f"--device cpu -e {FIXTURES / 'gpt2_tiny.bin'} -i tokens.bin -j tokens.bin -b 1 -t 8 -x 1 -v 0 -s 1 "
                 "-g 9").split()

    def shown():
        """A sample; and the words of a Llama with V = 331, of llamas_words() and of vocabulary()."""
        gpt2_words.cache_clear()
        vocabulary.cache_clear()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train_gpt2.main(arguments)
        text = re.search(r"generating:\n---\n((?s:.*))\n---", said.getvalue())[1]
        return text, Config3(V=331).words(), llamas_words(), vocabulary()

    with tempfile.TemporaryDirectory() as folder, mock.patch("dev.runs.tokenizer.gpt2_encoding", byte_encoding):
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(None):
                write_tokens("tokens.bin", range(100))
            text, *words = shown()
            check("without a file", "[" not in text and words == [plain] * 3, text)
            header = make_header(20240328, 2, len(own), 0)
            Path("gpt2_tokenizer.bin").write_bytes(header.tobytes() + b"".join(bytes([len(x)]) + x for x in own))
            text, *words = shown()
            check("the file's words, in a sample", re.fullmatch(r"(\[\d+\]){9}", text), text)
            check("the file's words, of a Llama", words[:2] == [dict(enumerate(own))] * 2)
            check("the encoding is without", words[2] == plain)
        finally:
            os.chdir(here)
            gpt2_words.cache_clear()
            vocabulary.cache_clear()


if __name__ == "__main__":
    run_program((formula, as_the_trainer, windows, characters, tokenizer_file))
