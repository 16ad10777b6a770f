"""Test dev/features/sample.py: the tokens it draws against a formula in NumPy, and the pieces of
its text against the whole. And dev/features/tokenizer.py: which vocabulary samples are decoded
with.
"""
import contextlib
import io
import itertools
import os
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.config import Config, draw_parameters
from dev.features.sample import Controlled, choose, coins_of, generate, stream, texts
from dev.features.tokenizer import FILE, decode, gpt2_words, vocabulary, words_of, words_of_model
from dev.llama3.tokens import no_words
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.folders import byte_encoding
from dev.tests.models import device_of, poisoned_model
from dev.tests.trainings import call, ran
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import coins, generate as trainers_sample, make_header, replace_file


def first_coins(count):
    return [coin for _, coin in zip(range(count), coins())]


class Listed:
    """A model whose next logits depend only on the last token, and which remembers what it was
    asked."""

    def __init__(self, logits, T=4):  # logits (V,V)
        self.logits, self.T, self.asked = np.float32(logits), T, []
        self.config = SimpleNamespace(V=len(logits), EOT=50256)

    def next_logits(self, tokens):
        self.asked.append(list(tokens))
        return self.logits[tokens[-1]]


def drawn_by_hand(logits, coin, temperature, top_k, top_p):
    """The word that a coin draws, in float64: words from the likeliest to the least, the first of
    equals before the others, are kept until they have the share top_p of top_k's probability. None
    if a rounding could decide."""
    weights = np.exp((np.float64(logits) - logits.max()) / temperature)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    total, kept, close = sum(weights[i] for i in ranked), [], False
    for i in ranked if top_p < 1 else ():
        share = sum(weights[j] for j in kept) / total
        close |= bool(kept) and abs(share - top_p) < 1e-6
        if share >= top_p:
            break
        kept.append(i)
    kept = sorted(kept if top_p < 1 else ranked)
    cdf = np.cumsum(weights[kept]) / weights[kept].sum()
    close |= min(abs(cdf - coin)) < 1e-5
    return None if close else kept[int(np.argmax(cdf > coin))]


def check_drawn(temperatures, top_ks, top_ps, count, least):
    """Check choose() for random logits, with so many coins, at least some of which tell."""
    rng = np.random.default_rng(3)
    for settings in itertools.product(temperatures, top_ks, top_ps):
        wrong = tried = 0
        for row, coin in enumerate(first_coins(count)):
            logits = np.float32(rng.normal(0, 2, 37) if row % 2 else rng.integers(-2, 3, 37))
            wish = drawn_by_hand(logits, coin, *settings)
            tried += wish is not None
            wrong += wish is not None and choose(logits, coin, *settings) != wish
        check(f"temperature, top_k and top_p {settings}", wrong == 0 and tried >= least,
              f"{wrong} of {tried} differ")


@fast
def test_formula():
    """Temperatures and top-k for random logits, with the same coins; in some rows many logits are
    equal."""
    check_drawn((0.2, 0.8, 1, 3), (0, 1, 2, 5, 36, 37, 50), (1,), count=120, least=101)
    logits = np.float32((0.5, 2, 2, -1, 2))
    for coin in (0, 0.5, np.float32(1 - 2**-24)):
        coin = np.float32(coin)
        for name, wish, *settings in (
                ("temperature 0 is greedy, the first of equals", 1, 0, 0),
                ("and with top_k", 1, 0, 3),
                ("the smallest temperatures are not 0", {0: 1, 0.5: 2}.get(float(coin), 4), 1e-40,
                 0),
                ("what fp32 rounds to 0 is 0", 1, 1e-50, 0),
                ("top_k 1 is greedy, the first of equals", 1, 5, 1),
                ("top_k 2 keeps the first two of three equals", 1 if coin < 0.5 else 2, 1, 2)):
            found = choose(logits, coin, *settings)
            check(f"{name}, coin {coin:.3f}", found == wish, f"{found}, expected {wish}")
    # Rounding can leave the running sum of fp32 weights below the coin even at the end. Even then
    # the last word is not drawn if it is outside of top_k.
    logits = np.float32([0.1 * (i % 7) for i in range(3000)] + [-9.0])
    last = choose(logits, np.float32(1), 1, 3000)
    check("a word outside of top_k is never drawn", last == 2999, last)
    check("large logits", choose(logits + np.float32(1000), np.float32(0.5), 0.5, 0) < 3000)


@fast
def test_as_the_trainer():
    """With llm.c's coins, default settings and an empty text, the tokens are those of the trainer's
    own samples. Greedy tokens are those with the largest logits in a forward pass."""
    model = poisoned_model(device_of("emulated", "fp32", 64, 2), 1, 20)
    tokens = list(generate(model, [256], 40, 1.0, 0, coins()))
    yield "the trainer's tokens", np.array(tokens), np.array(trainers_sample(model, 40)), EXACT
    found, pieces = list(generate(model, [256], 40, 0, 0, coins())), []
    prompt, wish = [256], []
    for _ in range(40):  # a forward pass over the last T tokens, without padding
        window = np.int32([(prompt + wish)[-20:]])
        model.forward(window, window)
        wish.append(int(np.argmax(model.device.get(model.acts.logits)[window.size - 1, :257])))
    yield "greedy tokens", np.array(found), np.array(wish), EXACT
    words = {i: b"%d " % i for i in range(257)}
    stream(model, [], words, "", 40, coins(), write=pieces.append)
    check("the trainer's text", "".join(pieces) == decode(trainers_sample(model, 40), words),
          "".join(pieces)[:40])


@fast
def test_windows():
    """The model is given the last T tokens, whether from the text or its own."""
    model = Listed(np.eye(6)[[1, 2, 3, 4, 5, 0]])  # after i comes i + 1
    pieces, words = [], {i: b"%d" % i for i in range(6)}
    stream(model, [3, 1, 2, 0, 4, 5], words, "312045", 3, coins(), 0, 0, pieces.append)
    check("the last T", model.asked == [[2, 0, 4, 5], [0, 4, 5, 0], [4, 5, 0, 1]], model.asked)
    check("the text, and then what follows", pieces == ["312045", "0", "1", "2"], pieces)
    stream(model, [3], words, "3", 2, coins(), 0, 0, pieces.append)
    check("a short text", model.asked[3:] == [[3], [3, 4]], model.asked[3:])
    model = Listed(np.eye(6))
    stream(model, [], words, "", 1, coins(), 0, 0, pieces.append)
    check("an empty text: EOT, or the last word", model.asked == [[5]], model.asked)
    model = Listed(np.eye(6), T=1)
    model.next_logits = lambda tokens: np.eye(60000, 1, 0 if tokens == [50256] else -1)[:, 0]
    model.config.V = 60000
    stream(model, [], {0: b"after EOT", 1: b"after another"}, "", 1, coins(), 0, 0, pieces.append)
    check("an empty text: EOT", pieces[-1] == "after EOT", pieces[-1])

    model, pieces = Listed(np.eye(6)), []
    model.config.V = 5
    check_refusal("a word too many", "token 5, and the model has V = 5 words; expected", stream,
                  model,
                  [5, 2], words, "x", 1, coins(), 0, 0, pieces.append)
    check("a word too many: nothing is written", pieces == [], pieces)
    model.config.V = 6
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        stream(model, [5, 2], words, "x", 2, coins(), 0)
    check("the last word, and printed", printed.getvalue() == "x22", printed.getvalue())


@fast
def test_characters():
    """Characters of two to four bytes, cut into tokens at every place: each is written when it is
    complete, and together they are the text."""
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
                         ("no UTF-8", b"\xff", b"\xe2A", b"\x80"),
                         ("a token without bytes", b"a", None, b"b")):
        words = {i: part for i, part in enumerate(parts) if part is not None}
        pieces = list(texts(range(3), words))
        check(name, "".join(pieces) == decode(range(3), words), pieces)
    encoding = byte_encoding()
    model, pieces = Listed(np.eye(50257, 1)), []  # any logits: nothing is generated
    stream(model, encoding.encode(text), words_of(encoding), text, 0, coins(), write=pieces.append)
    check("a text alone", pieces == [text], pieces)


def forget_words():
    for function in (gpt2_words, vocabulary, words_of_model, no_words):
        function.cache_clear()


@contextlib.contextmanager
def small_words(folder):
    """In this folder, GPT-2's words are the single bytes and <|endoftext|>."""
    here = os.getcwd()
    os.chdir(folder)
    forget_words()
    try:
        with mock.patch("dev.features.tokenizer.gpt2_encoding", byte_encoding):
            yield
    finally:
        os.chdir(here)
        forget_words()


def write_model(path, V, Config=Config, **sizes):
    """A checkpoint of a small random model with V words."""
    c = Config(V=V, Vp=-(-V // 128) * 128, maxT=40, L=1, NH=2, C=64, **sizes)
    views = SimpleNamespace(**dict(draw_parameters(c, 1)))
    if hasattr(c, "tied"):
        views.lm_head = views.wte
    replace_file(path, [*c.headers(3), *c.file_parts(views)])
    return c


def write_words(words):
    header = make_header(20240328, 2, len(words), 0)
    FILE.write_bytes(header.tobytes() + b"".join(bytes([len(x)]) + x for x in words))


def test_vocabularies(folder):
    """The trainer decodes samples with gpt2_tokenizer.bin if it is here and has the model's V
    words, else with GPT-2's if the model has them, else as token ids, and says so once. So does a
    Llama, unless its words are Llama's."""
    ids, own, gpt2 = r"(<\d+>){4}", r"(\[\d+\]){4}", r"(\{\d+\}){4}"
    said_331 = (r"WARNING: the model has V = 331 words, and GPT-2 50,257: samples are shown as "
                r"token ids")
    no_file = r"WARNING: gpt2_tokenizer.bin has 331 words, and the model {}: it is not used"
    llama = r"WARNING: there is no tokenizer.json or tokenizer.model in this folder"
    words_of_gpt2 = {i: b"{%d}" % i for i in range(50304)}
    with small_words(folder), mock.patch("dev.features.tokenizer.vocabulary",
                                         lambda: words_of_gpt2):
        write_tokens("tokens.bin", range(100))
        for V in (331, 50257, 50304, 50265):
            write_model(f"gpt2_{V}.bin", V)
        for V in (331, 50257, 128256):
            write_model(f"llama_{V}.bin", V, Config3, NKV=1, multiple_of=32)
        for words, name, wish, *warnings in (
                (0, "gpt2_331", ids, said_331), (0, "gpt2_50257", gpt2), (0, "gpt2_50304", gpt2),
                (0, "gpt2_50265", ids, r"WARNING: the model has V = 50,265 words"),
                (0, "llama_331", ids, said_331), (0, "llama_50257", gpt2),
                (0, "llama_128256", ids, llama),
                (331, "gpt2_331", own), (331, "gpt2_50257", gpt2, no_file.format("50,257")),
                (331, "gpt2_50265", ids, no_file.format("50,265"),
                 r"WARNING: the model has V = 50,265 words"),
                (50257, "gpt2_50257", own), (50257, "gpt2_50304", own),
                (50257, "llama_50257", own)):
            write_words([b"[%d]" % i for i in range(words)]) if words else FILE.unlink(
                missing_ok=True)
            forget_words()
            program = "dev.llama3.train_llama3" if "llama" in name else "train_gpt2"
            status, text, error = call("--device", "cpu", "-e", f"{name}.bin", "-i", "tokens.bin",
                                       "-j", "tokens.bin",
                                       "-b", 1, "-t", 8, "-x", 2, "-v", 0, "-s", 1, "-g", 4,
                                       program=program)
            samples = re.findall(r"generating:\n---\n((?s:.*?))\n---\n", text)
            check(f"{name}, a file of {words} words", status == 0 and len(samples) == 2,
                  error or samples)
            check(f"{name}, a file of {words} words: shown",
                  all(re.fullmatch(wish, text) for text in samples), samples)
            said = re.findall("WARNING: .*", text)
            said = [line for line in said if "has GPT-2's tokens" not in line]
            ok = len(said) == len(warnings) and all(map(re.match, warnings, said))
            check(f"{name}, a file of {words} words: said once", ok, said)


def test_prompts(folder):
    """--sample encodes a text as the model's vocabulary has it, with <|endoftext|> as one token; or
    refuses it."""
    asked = []

    def stream(model, tokens, words, text, *more, **named):
        asked.append((tokens, text))

    def generate(name, text, program="train_gpt2"):
        asked.clear()
        with mock.patch("dev.features.sample.stream", stream):
            return call("--device", "cpu", "-e", f"{name}.bin", "--sample", text, "-g", 2,
                        program=program)

    with small_words(folder):
        for V in (331, 50257, 50304):
            write_model(f"gpt2_{V}.bin", V)
        for V in (50257, 128256):
            write_model(f"llama_{V}.bin", V, Config3, NKV=1, multiple_of=32)
        for name in ("gpt2_50257", "gpt2_50304", "llama_50257"):
            program = "dev.llama3.train_llama3" if "llama" in name else "train_gpt2"
            for text, wish in (("", []), ("AB", [32, 33]), ("<|endoftext|>AB", [50256, 32, 33]),
                               ("A<|endoftext|>", [32, 50256]),
                               ("<|endoftext|", [ord(x) - 33 for x in "<|endoftext|"]),
                               ("<|endoftext|><|endoftext|>", [50256, 50256])):
                _, _, error = generate(name, text, program)
                check(f"{name}: {text!r}", asked == [(wish, text)], asked or error)
        for name, wish in (("gpt2_331",
                            "V = 331 words, and GPT-2 50,257: .*; expected an empty text"),
                           ("llama_128256",
                            "V = 128,256 words of Llama 3: expected its tokenizer.json")):
            program = "dev.llama3.train_llama3" if "llama" in name else "train_gpt2"
            status, _, error = generate(name, "A", program)
            check(f"{name}: a text is refused",
                  status == 1 and re.fullmatch(f"error: .*{wish}.*\n", error), error)
            status, _, error = generate(name, "", program)
            check(f"{name}: an empty text is none", status == 0 and asked == [([], "")], error)


def test_seeds(folder):
    """--sample draws from --seed; without it each run is another one, whose seed is printed and
    repeats it. The coins are NumPy's. Samples in a training do not depend on the seed."""
    for seed in (0, 7, 2**40):
        found = [x for _, x in zip(range(1000), coins_of(seed))]
        wish = np.random.Generator(np.random.PCG64(seed)).random(1000, np.float32)
        yield f"coins of {seed}", np.array(found), wish, EXACT
    [same] = {float(x) for _, x in zip(range(1), coins_of(7))}
    check("another seed, other coins", same != float(next(coins_of(8))))
    c = write_model(folder / "llama.bin", 50257, Config3, NKV=1, multiple_of=32)
    write_model(folder / "gpt2.bin", c.V)
    with small_words(folder):
        def said(*flags, program):
            forget_words()
            name = "llama" if "llama" in program else "gpt2"
            status, text, error = call("--device", "cpu", "-e", f"{name}.bin", "--sample", "A",
                                       "-g", 12, *flags, program=program)
            assert not status, error
            return text, re.findall(r"^seed (\d+) \(--seed\)$", error, re.M)

        for program in ("train_gpt2", "dev.llama3.train_llama3"):
            said(program=program)  # may compile kernels, and say so
            one, two, again = (said("--seed", n, program=program) for n in (1, 2, 1))
            check(f"{program}: the same seed, the same text",
                  one == again and one[0].startswith("A"), one)
            check(f"{program}: another seed, another text", one[0] != two[0], two)
            check(f"{program}: the seed is printed", (one[1], two[1]) == (["1"], ["2"]))
            (text, [drawn]), (other, [seed]) = (said(program=program) for _ in range(2))
            check(f"{program}: without a seed, another text each time",
                  text != other and drawn != seed)
            check(f"{program}: with the printed seed, the same",
                  said("--seed", drawn, program=program)[0] == text)
            short = said("--seed", 1, "--temperature", 0.5, "--top-k", 9, program=program)
            check(f"{program}: with other settings too", short ==
                  said("--seed", 1, "--temperature", 0.5, "--top-k", 9, program=program) != one)
            greedy = [said("--temperature", 0, *flags, program=program)
                      for flags in ((), ("--seed", 5))]
            check(f"{program}: greedy needs no seed", greedy[0] == greedy[1] and not greedy[0][1],
                  greedy)
        write_tokens("tokens.bin", range(100))
        texts = [re.findall("generating:\n(.*?)\n---", call(
            "--device", "cpu", "-e", "gpt2.bin", "-i", "tokens.bin", "-j", "tokens.bin", "-b", 1,
            "-t", 8, "-x", 2,
            "-v", 0, "-s", 1, "--seed", seed)[1], re.S) for seed in (1, 2)]
        check("samples in a training are llm.c's", len(texts[0]) == 2 and texts[0] == texts[1],
              texts)


def test_in_training(folder):
    """Samples in a training have --temperature and --top-k. They go on from <|endoftext|>, or from
    a newline if the data has no <|endoftext|>."""
    write_model(folder / "gpt2.bin", 50257)
    with small_words(folder):
        write_tokens("tokens.bin", [*range(99), 50256])

        def sample(*flags):
            said = ran("--device", "cpu", "-e", "gpt2.bin", "-i", "tokens.bin", "-j", "tokens.bin",
                       "-b", 1, "-t", 8, "-x", 1, "-l", 0, "-v", 0, "-s", 1, "-g", 20, *flags)
            return re.search("generating:\n(.*?)\n---$", said, re.S | re.M)[1]

        plain, greedy = sample(), sample("--temperature", 0)
        check("temperature 1 and top-k 0 are the trainer's",
              plain == sample("--temperature", 1, "--top-k", 0) == sample("--top-k", 50257))
        check("temperature 0 and top-k 1 are greedy", greedy == sample("--top-k", 1) != plain)
        check("others", len({plain, greedy, sample("--temperature", 0.3),
                             sample("--temperature", 0.3, "--top-k", 3)}) == 4)

    def first(words, tokens, V=257):
        return Controlled.first_token(SimpleNamespace(
            config=SimpleNamespace(EOT=50256, V=V), vocabulary=None, words=lambda: words,
            train_data=SimpleNamespace(tokens=np.uint16(tokens))))

    each = {i: bytes([i]) for i in range(256)} | {256: b"<|endoftext|>"}
    for name, found, wish in (
            ("a text", first(each, [65, 66]), 10), ("documents", first(each, [256, 65]), 256),
            ("no newline", first({0: b"a", 1: b"<|endoftext|>"}, [0, 0], 2), 1),
            ("unknown words", first({}, [65], 300), 299),
            ("GPT-2's", first({50256: b"", 198: b"\n"}, [50256], 50257), 50256)):
        yield name, found, wish, EXACT
