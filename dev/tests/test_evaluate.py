"""Test dev/tools/evaluate.py: against dev/lab/gpt2_numpy.py in float64, against transformers on the
exported folder, and its windows against Hugging Face's guide."""
import re
from unittest import mock

import numpy as np
import pytest

from dev.lab import gpt2_numpy
from dev.common.config import Config, draw_parameters, read_parameters
from dev.data.vocabulary import Vocabulary, write_vocabulary
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.tests.checks import EXACT, FIXTURES, TINY, check, fast, words
from dev.tests.models import for_numpy
from dev.tests.trainings import check_error, ran
from dev.tools import convert, evaluate

TEXT = "To be, or not to be: thät is the question.<|endoftext|>Whether 'tis nobler\n" * 3
WINDOWS = b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()  # a file of it


class Letters:
    """A vocabulary in which a token is a byte, and a special token is 256."""

    def encode(self, text, allowed_special):
        parts = text.split("<|endoftext|>")
        assert allowed_special == "all"
        return [t for i, part in enumerate(parts) for t in [*[256] * (i > 0), *part.encode()]]


@pytest.fixture(autouse=True)
def letters():
    with mock.patch("dev.features.tokenizer.encoding_of_model", lambda V: Letters()), mock.patch(
            "dev.llama3.train_llama3.encoding_of_model", lambda V: Letters()):
        yield


def contexts(n, T, S):
    """Hugging Face's guide, token by token: the first token that predicts token i, for all i but 0.
    Its windows are tokens begin .. begin + T - 1, and its targets those after the last window's.
    A window does not predict its own first token: with S = T the one before does."""
    found, previous = {}, 0
    for begin in range(0, n, S):
        end = min(begin + T, n)
        for i in range(previous, end):
            if i > 0:
                found[i] = begin - S if i == begin else begin
        previous = end
        if end == n:
            break
    return [found[i] for i in range(1, n)]


@fast
def test_windows():
    """Each token is counted once, with the tokens before it that the guide gives it."""
    for n, T, S in ((2, 8, 8), (8, 8, 8), (9, 8, 8), (10, 8, 8), (17, 8, 8), (16, 8, 3), (17, 8, 7),
                    (23, 8, 1), (5, 8, 2), (6, 1, 1), (7, 2, 1)):
        found = [start for start, first, end in evaluate.windows(n, T, S)
                 for _ in range(first, end)]
        check(f"n={n} T={T} S={S}", found == contexts(n, T, S), found)


def figures(*args):
    """The four numbers that the program prints, and its first lines."""
    text = ran("--device", "cpu", *args, program="dev.tools.evaluate")
    found = re.search(r"loss (\S+) nats per token, over (\S+) tokens\nperplexity (\S+)\nbits per "
                      r"byte (\S+)\n$", text)
    return [float(number.replace(",", "")) for number in found.groups()], text


def by_numpy(path, tokens, T, S):
    """The sum of the losses, in float64: for each token a forward pass over those before it."""
    c = Config.from_file(path)
    p = for_numpy(read_parameters(path, c), c.V)
    total = 0
    for i, start in enumerate(contexts(len(tokens), T, S), 1):
        logits = gpt2_numpy.forward(p, tokens[start:i], c.NH)
        total += gpt2_numpy.cross_entropy(tokens[i : i + 1], logits[-1:])[0]
    return total


def test_against_numpy(folder):
    """The program on a text of 238 tokens, in a file with Windows' line ends."""
    (folder / "text.txt").write_bytes(WINDOWS)
    tokens, size = np.array(Letters().encode(TEXT, "all")), len(TEXT.encode())
    for T, S in ((40, 40), (31, 7)):
        found, text = figures("-e", TINY, "--input", folder / "text.txt", "-t", T, "--stride", S,
                              "-b", 3)
        total = by_numpy(TINY, tokens, T, S)
        loss = total / (len(tokens) - 1)
        yield f"T={T} S={S}: tokens", np.int64(found[1]), len(tokens) - 1, EXACT
        for name, number, wish in (("loss", found[0], loss), ("perplexity", found[2], np.exp(loss)),
                                   ("bits per byte", found[3], total / np.log(2) / size)):
            yield f"T={T} S={S}: {name}", number, wish, 1e-6
        check("bytes and tokens", f"{size} bytes, {len(tokens)} tokens" in text, text)
    default, _ = figures("-e", TINY, "--input", folder / "text.txt")
    whole, _ = figures("-e", TINY, "--input", folder / "text.txt", "-t", 40, "--stride", 40)
    check("by default T is maxT = 40, and S = T", default == whole, default)
    (folder / "two.txt").write_text("ab")
    found, _ = figures("-e", TINY, "--input", folder / "two.txt")
    yield "a text of two tokens", found[0], by_numpy(TINY, np.array([97, 98]), 40, 40), 1e-6


def test_own_words(folder):
    """A model with a vocabulary of its own beside it, of eight characters."""
    model, file = folder / "own.bin", folder / "text.txt"
    model.write_bytes(TINY.read_bytes())
    write_vocabulary(folder / "tokenizer.bin",
                     Vocabulary([*(c.encode() for c in "abcdefgh"), b"<|endoftext|>"], 8))
    file.write_text("abc<|endoftext|>hg")
    found, _ = figures("-e", model, "--input", file)
    tokens = np.array([0, 1, 2, 8, 7, 6])
    yield "its own words", found[0] * 5, by_numpy(model, tokens, 40, 40), 1e-6


def test_against_transformers(folder):
    """The same figure from transformers, on the folder that dev/tools/convert.py exports, with the
    guide's windows and masked targets. GPT-2, and Llama with and without a head of its own."""
    import torch
    from transformers import AutoModelForCausalLM
    (folder / "text.txt").write_bytes(WINDOWS)
    ids = torch.tensor([Letters().encode(TEXT, "all")])
    n = ids.shape[1]
    for name in ("gpt2_tiny", "llama_gqa", "llama_tied"):
        path = FIXTURES / f"{name}.bin"
        convert.checkpoint_to_folder(path, folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / name, local_files_only=True)
        T = 40
        for S in (11, T):
            total, counted, previous, windows = 0.0, 0, 0, 0
            for begin in range(0, n, S):
                end = min(begin + T, n)
                inputs = ids[:, begin:end]
                targets = inputs.clone()
                targets[:, : -(end - previous)] = -100
                with torch.no_grad():
                    loss = model(inputs, labels=targets).loss.double()
                count = int((targets[:, 1:] != -100).sum())
                total, counted, previous = total + float(loss) * count, counted + count, end
                windows += 1
                if end == n:
                    break
            found, _ = figures("-e", path, "--input", folder / "text.txt", "-t", T, "--stride", S)
            left_out = 1 if S < T else windows  # by the guide
            check(f"{name} S={S}: tokens", found[1] == n - 1 == counted + left_out - 1, found[1])
            apart = abs(found[0] - total / counted)
            check(f"{name} S={S}: loss", (apart < 1e-5) == (S < T),
                  f"{found[0]}, transformers {total / counted}")


def test_losses_of_batches():
    """Any B gives the same losses, also with a last batch and a last window that are shorter."""
    c = Config(maxT=23, V=251, L=1, NH=2, C=64, Vp=264)
    tokens, device = words(c.V, 101), make_device("cpu", "fp32", c)
    found = []
    for B in (1, 4):
        model = GPT2(c, device, B, 23)
        model.set_parameters(draw_parameters(c, 1))
        found.append(evaluate.losses_of(model, tokens, 23, 10))
    yield "B = 4 and B = 1", found[1], found[0], 1e-6


def test_refused(folder):
    """One line for each mistake."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "one.txt").write_text("a")
    (folder / "latin.txt").write_bytes("für".encode("latin-1"))
    text = ("--input", folder / "text.txt")
    for flags, wish in (
            ((), "--input: expected a text file"),
            (("--input", folder / "none.txt"), "none.txt: could not be read"),
            (("--input", folder / "latin.txt"), "latin.txt: byte 1 is not UTF-8"),
            (("--input", folder / "one.txt"), "has 1 tokens; expected 2 or more"),
            ((*text, "-t", 41), "-t 41: expected at most maxT = 40"),
            ((*text, "-t", 8, "--stride", 9), "--stride 9: expected at most T = 8"),
            ((*text, "--stride", 0), "--stride: 0: expected at least 1"),
            ((*text, "-e", folder / "text.txt"), "text.txt: .*expected")):
        check_error(wish, "--device", "cpu", "-e", TINY, *flags, program="dev.tools.evaluate")
    with mock.patch.object(Letters, "encode", lambda *args, **more: [1, 400]):
        check_error("token 1 is 400", "--device", "cpu", "-e", TINY, *text,
                      program="dev.tools.evaluate")
