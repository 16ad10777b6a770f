"""Test what controls samples: --top-p, --stop, --samples, FILE: and --sample-prompt, which are in
dev/features/sample.py, and --chat, in chat.py.
"""
import contextlib
import io
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.data.vocabulary import vocabulary_of, write_vocabulary
from dev.features.chat import Chatting
from dev.features.feature import stack
from dev.features.order import main
from dev.features.sample import Sampling, choose, generate, nucleus, read_prompt, stream, texts
from dev.features.tokenizer import Tokenized
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import TINY, check, check_refusal, fast
from dev.tests.test_sample import Listed, check_drawn, small_words, write_model
from dev.tests.trainings import LLAMA, TRAINER, call, check_error, ran
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import coins

# ---- --top-p


@fast
def test_top_p():
    """The nucleus against a recount, in turn with temperature and top-k; ties, P = 1 and tiny P."""
    check_drawn((0.5, 1, 2), (0, 1, 4, 30), (1e-9, 0.1, 0.5, 0.9, 0.999, 1), count=40, least=20)
    halves = np.log(np.float32((1 / 8, 1 / 2, 1 / 8, 1 / 4)))
    for top_p, wish in ((1e-30, [1]), (0.4, [1]), (0.6, [1, 3]), (0.8, [0, 1, 3]),
                        (0.9, [0, 1, 2, 3])):
        found = nucleus(halves, top_p).tolist()
        check(f"probabilities of 1/8, 1/2, 1/8, 1/4, top_p {top_p}", found == wish, found)
    found = nucleus(np.zeros(4, np.float32), 0.5).tolist()
    check("two of four equals are a half", found == [0, 1], found)
    last = np.float32(1 - 2**-24)  # draws the last word that is kept
    weights = np.log(np.float32((4, 2, 1, 1)))
    for name, wish, *settings in (("temperature comes before it", 0, 0.5, 0, 0.7),
                                  ("without it", 1, 1, 0, 0.7), ("so does top-k", 0, 1, 2, 0.6),
                                  ("greedy needs none", 0, 0, 0, 0.9)):
        found = choose(weights, last, *settings)
        check(name, found == wish, f"{found}, expected {wish}")
    logits = np.float32([5, -90, 3, -200])  # exp(-205) is no fp32
    for coin in (np.float32(0), np.float32(0.5), last):
        check(f"P = 1 changes nothing, coin {coin}",
              choose(logits, coin, 1, 0, 1.0) == choose(logits, coin, 1, 0))
    model = Listed(np.float32([[3, 2.9, 0], [3, 2.9, 0], [3, 2.9, 0]]))
    drawn = [{*generate(model, [0], 40, 1, 0, coins(), top_p)} for top_p in (1.0, 0.9, 0.1)]
    check("a text's tokens", drawn == [{0, 1, 2}, {0, 1}, {0}], drawn)


# ---- --stop


def cut(data, size):
    """Bytes as words of this size."""
    return {i: data[i * size : (i + 1) * size] for i in range(-(-len(data) // size))}


def check_random_stop(text, stop):
    """A text of one letter a token: what is written after each, and how many are read."""
    read, pieces, late = [], [], 0

    def tokens():
        for i in range(len(text)):
            read.append(i)
            yield i

    for piece in texts(tokens(), cut(text.encode(), 1), stop):
        pieces.append(piece)
        seen = text[: len(read)]
        if stop not in seen and len(read) < len(text):
            held = next(n for n in range(len(seen) + 1) if stop.startswith(seen[n:]))
            late += "".join(pieces) != seen[:held]
    end = text.find(stop)
    ok = "".join(pieces) == text.split(stop)[0] and not late
    ok &= len(read) == (end + len(stop) if end >= 0 else len(text))
    check(f"{stop} in {text}", ok, f"{pieces}, {late} late, {len(read)} read")


@fast
def test_stop():
    """A text ends at the first occurrence, however tokens cut it; what cannot be its beginning is
    written at once."""
    written = "aab é€👍🏽 aaab\nzé"
    for stop in ("aab", "aaab", "a", "b", "é", "€", "👍", "🏽", "\n", " aaab\n", "z", "zé",
                 "é€👍🏽 aa", written, "absent", "aabé", "\uFFFD", "ézz"):
        for size in (1, 2, 3, 4, 7, 99):
            words = cut(written.encode(), size)
            found = "".join(texts(range(len(words)), words, stop))
            check(f"{stop!r}, tokens of {size} bytes", found == written.split(stop)[0], found)
    rng = np.random.default_rng(2)
    for _ in range(300):
        text, stop = ("".join(rng.choice(["a", "b"], n)) for n in (30, rng.integers(1, 6)))
        check_random_stop(text, stop)
    model, words = Listed(np.eye(6)[[1, 2, 3, 4, 5, 0]]), {i: b"%d" % i for i in range(6)}
    for name, prompt, stop, wish, drawn in (
            ("the prompt's own text does not end it", 3, "3", "345012", 6),
            ("tokens after it are not drawn", 5, "50", "501234", 7), ("at once", 3, "45", "3", 2),
            ("not there", 3, "44", "3450123450", 9)):
        pieces, model.asked = [], []
        stream(model, [prompt], words, str(prompt), 9, coins(), 0, 0, pieces.append, stop=stop)
        found = "".join(pieces)
        check(f"{name}: {found}", found == wish and len(model.asked) == drawn, len(model.asked))
    special = {0: b"text", 1: b"<|endoftext|>", 2: b"<|end"}
    for tokens, wish in (([0, 1, 0], "text"), ([0, 2, 0], "text<|endtext")):
        found = "".join(texts(tokens, special, "<|endoftext|>"))
        check("<|endoftext|> ends a text if asked", found == wish, found)
    check("and else does not", "".join(texts([0, 1, 0], special)) == "text<|endoftext|>text")
    # \udc9f: a byte of the command line that is no UTF-8
    found = "".join(texts([0], {0: "a👍".encode()}, "\udc9f"))
    check("within a character", found == "a\ufffd", repr(found))


# ---- The command line


def prepare_models(folder):
    """Small models: of GPT-2's words, a Llama, of bytes and of characters. {name: (program, its
    checkpoint)}."""
    found = {}
    for name, V, words, program in (("gpt2", 50257, None, TRAINER), ("llama", 50257, None, LLAMA),
                                    ("bytes", 257, "bytes", TRAINER),
                                    ("chars", 9, "chars", TRAINER)):
        path = folder / f"{name}.bin"
        kind = dict(Config=Config3, NKV=1, multiple_of=32) if program == LLAMA else {}
        write_model(path, V, **kind)
        if words:
            vocabulary = vocabulary_of(words, ["ABCD é€\n"])
            assert len(vocabulary.words) == V
            write_vocabulary(folder / f"{name}_tokenizer.bin", vocabulary)
        found[name] = program, path
    return found


def stop_in(text):
    """A character of a text, for --stop, if any of it is one."""
    return next((x for x in text if x != "\ufffd"), "absent")


def sampled(program, path, *flags, stdin=None, status=0):
    """(stdout, stderr) of a program that samples on the CPU."""
    stdin = io.TextIOWrapper(io.BytesIO(stdin or b""))
    with mock.patch("sys.stdin", stdin):
        found, text, error = call("--device", "cpu", "-e", path, "-g", 12, *flags, program=program)
    assert found == status, error
    return text, error


def test_samples(folder):
    """N samples differ, repeat, and each is that of its own seed alone; for each kind of words."""
    with small_words(folder):
        for name, (program, path) in prepare_models(folder).items():
            flags = "--sample", "AB", "--top-p", 0.7, "--top-k", 200, "--temperature", 1.5
            text, _ = sampled(program, path, *flags, "--samples", 3, "--seed", 5)
            parts = re.split(r"^--- sample (\d) of 3, seed (\d+) ---\n", text, flags=re.M)
            check(f"{name}: numbered", parts[0] == "" and parts[1::3] == ["1", "2", "3"] and
                  parts[2::3] == ["5", "6", "7"], parts)
            alone = [sampled(program, path, *flags, "--seed", seed)[0] for seed in (5, 6, 7)]
            check(f"{name}: those of the seeds", parts[3::3] == alone, parts[3::3])
            check(f"{name}: of one prompt, and different",
                  len({*alone}) == 3 and all(x.startswith("AB") for x in alone), alone)
            some = sampled(program, path, "--sample", "A", "--seed", 1, "--top-p", 1e-9)[0]
            check(f"{name}: a tiny P is greedy", some == sampled(
                program, path, "--sample", "A", "--temperature", 0)[0], some)
            check(f"{name}: and P = 1 is not", some != sampled(
                program, path, "--sample", "A", "--seed", 1, "--top-p", 1)[0])
            text = alone[2].removeprefix("AB")
            stop = stop_in(text[3:])
            stopped, _ = sampled(program, path, *flags, "--seed", 7, "--stop", stop)
            check(f"{name}: --stop {stop!r}", stopped == f"AB{text.split(stop)[0]}\n", stopped)


def test_prompts(folder):
    """FILE: gives a prompt as it gives a text to train on; <|endoftext|> in it is one token."""
    here = folder / "prompt.txt"
    for name, data, wish in (("as it is", "é A\n".encode(), "é A\n"),
                             ("Windows", b"\xef\xbb\xbfA\r\nB\r", "A\nB\n"), ("empty", b"", "")):
        here.write_bytes(data)
        found = read_prompt("--sample", f"FILE:{here}")
        check(f"a file, {name}", found == wish, repr(found))
    check("no file", read_prompt("--sample", "file:x") == "file:x")
    found = read_prompt("--sample", "\ufeffA\r\nB\r")
    check("a text, Windows", found == "A\nB\n", repr(found))
    here.write_bytes(b"ab\xff")
    for wish, name in (("byte 2 is not UTF-8; expected UTF-8 text", here),
                       (r"could not be read \(No such file or directory\)", folder / "none"),
                       (r"could not be read \(Is a directory\)", folder)):
        check_refusal("a file", f"--sample FILE:{name}: {wish}", read_prompt, "--sample",
                      f"FILE:{name}")
    here.write_bytes(b"<|endoftext|>AB")
    with small_words(folder):
        for name, (program, path) in prepare_models(folder).items():
            with mock.patch("dev.features.sample.generate", return_value=[]) as drawn:
                for prompt in (f"FILE:{here}", "<|endoftext|>AB"):
                    text, _ = sampled(program, path, "--sample", prompt)
                    check(f"{name}: printed", text == "<|endoftext|>AB\n", text)
            asked = [each.args[1] for each in drawn.call_args_list]
            ok = len(asked[0]) == 3 and asked[0] == asked[1] and asked[0][0] in (50256, 256, 8)
            check(f"{name}: one token, and two letters", ok, asked)
        long = "AB" * 30
        _, error = sampled(program, path, "--sample", long)
        check("a long prompt is reported", "the prompt has 60 tokens, and the model sees the last "
              "T = 40 (-t)" in error, error)


# ---- --chat


@contextlib.contextmanager
def heard():
    """A list that gets what each call of generate sees, and what it draws."""
    calls = []

    def spy(model, tokens, *settings):
        calls.append((tokens, []))
        for token in generate(model, tokens, *settings):
            calls[-1][1].append(token)
            yield token

    with mock.patch("dev.features.sample.generate", spy):
        yield calls


def test_chat(folder):
    """Each line of stdin is continued behind all that was said before, with a seed of its own, as
    full passes do; blank lines are skipped, and lines that are no prompts reported."""
    with small_words(folder):
        for name, (program, path) in prepare_models(folder).items():
            with mock.patch.object(Sampling, "load", autospec=True,
                                   side_effect=Sampling.load) as load, heard() as calls:
                lines = "\ufeffAB\n\n \r\n<|endoftext|>é\r\n /reset\nA".encode()
                text, error = sampled(program, path, "--chat", "--seed", 4, "-g", 9, stdin=lines)
            check(f"{name}: loaded once", load.call_count == 1)
            (first, answer), (second, _), (third, _) = calls
            newline = second[11:12]
            wish = first + answer + newline
            check(f"{name}: the second line is behind both", second[: len(wish)] == wish, second)
            whole = [*second[len(wish) :], *newline, *first, *third]
            check(f"{name}: the lines", len(third) == 1 and len(whole) == 6 + (name != "chars"),
                  whole)
            full, _ = sampled(program, path, "--chat", "--seed", 4, "-g", 9, "--kv-cache", 0,
                              stdin=lines)
            check(f"{name}: as with full passes", text == full, f"{text!r} {full!r}")
            for seed, prompt in ((4, "AB"), (6, "A")):  # alone, and after /reset
                alone, _ = sampled(program, path, "--sample", prompt, "--seed", seed, "-g", 9)
                check(f"{name}: seed {seed}", alone.removeprefix(prompt) in text, text)
            check(f"{name}: what is said", re.findall("^(?!WARNING|compiling).+", error, re.M) == [
                "seed 4 (--seed)", "(turns forgotten: 2)"], error)
        for stdin in (b"", b"\n\n"):
            check(f"{stdin}: no prompt", sampled(program, path, "--chat", stdin=stdin)[0] == "")
        text, error = sampled(program, path, "--chat", "--seed", 4, "--stop", "zz",
                              stdin=b"A\n\xc3(\nAxB\n/reset\n/reset\n/quit\n/reset B\nB", status=1)
        check("bad lines are reported", re.findall(r"^(?:error: |\().*", error, re.M) == [
            "error: line 2: byte 0 is not UTF-8; it is skipped",
            f"error: line 3: 'x' (U+0078) is none of the 8 characters of {folder}/"
            "chars_tokenizer.bin: leave it out, or train with --vocab bytes; it is skipped",
            "(turns forgotten: 1)", "(turns forgotten: 0)",
            "error: line 6: /quit is no command; expected /reset, or a text; Ctrl-D ends the chat; "
            "it is skipped", "error: line 7: /reset B is no command; expected /reset, or a text; "
            "Ctrl-D ends the chat; it is skipped"], error)
        alone, _ = sampled(program, path, "--sample", "B", "--seed", 5)
        check("after them it goes on", text.endswith(alone.removeprefix("B")), text)
        with mock.patch("sys.stdin", None):
            status, text, _ = call("--device", "cpu", "-e", path, "--chat", program=program)
        check("a closed stdin", (status, text) == (0, ""))

        class Terminal(io.TextIOWrapper):
            def isatty(self):
                return True

        for terminal, kind in ((True, Terminal), (False, io.TextIOWrapper)):
            given, calls = kind(io.BytesIO(b"A\nB\n")), []

            def interrupted(model, tokens, words, text, *more, calls=calls, **named):
                calls.append(tokens)
                if len(calls) == 1:
                    print("half", end="")
                    raise KeyboardInterrupt

            out, err = io.StringIO(), io.StringIO()
            with mock.patch("sys.stdin", given), mock.patch("dev.features.sample.stream",
                                                            interrupted):
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    try:
                        ended = main(["--device", "cpu", "-e", str(path), "--chat"])
                    except KeyboardInterrupt:
                        ended = "interrupted"
            wish = (0, 2, "half\n\n", 3) if terminal else ("interrupted", 1, "half", 0)
            found = ended, len(calls), out.getvalue(), err.getvalue().count("> ")
            check(f"Ctrl-C, in a terminal: {terminal}", found == wish, found)


# ---- Samples while training


def test_training(folder):
    """--sample-prompt, --top-p and --stop, for each kind of words; a resumed run keeps them."""
    (folder / "begin.txt").write_bytes(b"<|endoftext|>B\r\n")
    with small_words(folder), contextlib.redirect_stdout(None):
        models = prepare_models(folder)
        write_tokens("tokens.bin", [i % 9 for i in range(100)])
    flags = ("--device", "cpu", "-i", "tokens.bin", "-j", "tokens.bin", "-b", 1, "-t", 8, "-v", 0,
             "-s", 1, "-g", 9)

    def samples(text):
        return re.findall(r"^generating:\n---\n(.*?)\n---\n", text, re.M | re.S)

    with small_words(folder):
        for name, (program, path) in models.items():
            more = ("--temperature", 0, "-l", 0, "--sample-prompt", "FILE:begin.txt")
            text = ran(*flags, "-e", path, "-x", 2, "-n", 1, "-o", f"out {name}", *more,
                       program=program)
            truth = sampled(program, path, "--sample", "FILE:begin.txt", "-g", 9, "-t", 8,
                            "--temperature", 0)[0].removesuffix("\n")
            check(f"{name}: as --sample writes", samples(text) == 2 * [truth] and
                  truth.startswith("<|endoftext|>B\n"), f"{samples(text)} {truth!r}")
            os.rename("begin.txt", "elsewhere.txt")
            text = ran("--device", "cpu", "-o", f"out {name}", "-y", 1, "-x", 3, program=program)
            check(f"{name}: a resumed run needs no file", samples(text) == 2 * [truth], text)
            os.rename("elsewhere.txt", "begin.txt")
            stop = stop_in(truth[17:])
            text = ran(*flags, "-e", path, "-x", 1, *more, "--stop", stop, program=program)
            wish = f"<|endoftext|>B\n{truth[15:].split(stop)[0]}"
            check(f"{name}: --stop {stop!r}", samples(text) == [wish], samples(text))
        for more in (("-s", 0), ("--sample", "A")):
            ran("--device", "cpu", "-o", "out chars", "-y", 1, *more)  # which needs no prompt
        nucleus, greedy = (samples(call(*flags, "-e", models["gpt2"][1], "-x", 1, *more)[1])
                           for more in (("--top-p", 1e-9), ("--temperature", 0)))
        check("--top-p alone", nucleus == greedy and len(greedy) == 1, f"{nucleus} {greedy}")
        for wish, encode in (
                (r"'x' \(U\+0078\) is none of", Tokenized.encode),
                ("the text to go on from has token 9, and the model has V = 9 ", lambda *_: [9])):
            with mock.patch.object(Tokenized, "encode", encode):
                status, text, error = call(*flags, "-e", path, "-x", 1, "--sample-prompt", "x")
            check(f"refused before the first step: {wish}", status == 1 and re.match(
                f"error: {wish}", error) and "step" not in text, error)


def test_refusals(folder):
    """What does not go together, and values that make no sense."""
    os.chdir(folder)
    shutil.copy(TINY, "tiny.bin")
    (folder / "empty").mkdir()
    model, sample = ("-e", "tiny.bin"), ("--sample", "A")
    for wish, *flags in (
            ("--samples: expected --sample too", "--samples", 2, "--dry-run"),
            ("--samples: 0: expected at least 1", *sample, "--samples", 0),
            ("--samples: with --temperature 0 all would be the same: expected another "
             "--temperature", *sample, *model, "--samples", 2, "--temperature", 0),
            ("--chat: expected -e too, a checkpoint", "--chat"),
            ("--chat: reads its prompts from stdin: expected no --sample", "--chat", *sample),
            ("--chat: goes on from its answer, and .*: expected no --samples", *model, "--chat",
             "--samples", 2),
            ("--sample: expected -e too, a checkpoint", *sample),
            ("--sample-prompt: is for the samples of a training: expected no --sample or --chat",
             *model, *sample, "--sample-prompt", "A"),
            ("--sample-prompt: is for the samples of a training", *model, "--chat",
             "--sample-prompt", "A"),
            ("--sample-prompt: with -s 0 a training writes no samples", "--sample-prompt", "A",
             "-s", 0, "--dry-run"),
            ("--stop: expected a text, found nothing", *sample, "--stop", ""),
            ("--sample-prompt: expected a text, found nothing", "--sample-prompt", ""),
            ("-e: expected a name|--model: expected a name, found nothing", *sample, "-e", ""),
            ("--top-p: 0: expected more than 0, and at most 1", *sample, "--top-p", 0),
            ("--top-p: 1.01: expected more than 0, and at most 1", *sample, "--top-p", 1.01),
            ("--top-p: nan: expected more than 0, and at most 1", *sample, "--top-p", "nan"),
            ("--top-p: -1: expected more than 0, and at most 1", *sample, "--top-p=-1"),
            ("--top-p: invalid probability value: 'x'", *sample, "--top-p", "x"),
            ("-e empty: .*; empty is a folder, and no run's: it has no model_", *sample, "-e",
             "empty")):
        check_error(wish, "--device", "cpu", *flags, early=True)


def test_ranks():
    """Several processes would write the same text, and read one stdin."""
    for name, classes in (("--sample", []), ("--chat", [Chatting])):
        flags = SimpleNamespace(chat=len(classes), sample="")
        run = stack(Sampling, classes, dict(count=2, flags=flags))().run
        check_refusal("several ranks", f"{name}: is for one process: expected no --gpus", run)
