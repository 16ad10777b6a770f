"""Test what a run without -e does (dev/features/first_run.py): which model it has, that it learns
to write words, and that its held-out loss falls to the end. And models of own sizes
(dev/features/own_sizes.py): their tables, what is refused, that they resume, write and convert.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.data.text import both
import train_gpt2
from dev.common.config import Config
from dev.data import first_text
from dev.data.vocabulary import (read_vocabulary, tokenizer_path, vocabulary_of,
                                 write_vocabulary)
from dev.features import first_run
from dev.features.order import check_refused, table_of_flags, with_defaults
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import EXACT, TINY, TOP, check, fast
from dev.tests.trainings import LLAMA, TRAINER, call, check_error, check_resumed, ran
from dev.tools import convert
from prepro_tinyshakespeare import write_tokens

CXXFLAGS = ""  # the first run's speed is part of it


def words_of(text):
    """The words of three letters or more, in lower case."""
    return [word for word in re.findall(r"[a-z']+", text.lower()) if len(word) >= 3]


def share_of_words(sample, text):
    """The share of a sample's words that are words of a text."""
    known, found = {*words_of(text)}, words_of(sample)
    return sum(word in known for word in found) / max(1, len(found))


# ---- Which model


def chosen(folder, *arguments, device="cpu", kind=Config):
    """The flags of a run with these arguments in a folder, and why they have their model."""
    table, _ = table_of_flags(train_gpt2.FLAGS, kind)
    flags = SimpleNamespace(**{row.key: None for row in table})
    for name, value in zip(arguments[::2], arguments[1::2]):
        setattr(flags, name, value)
    flags.device = device
    os.chdir(folder)
    return with_defaults(flags, table, kind)


@fast
def test_choice(folder):
    """Without -e: the weights of GPT-2 if they are here and the data has GPT-2's words; a small
    model for other words, and without -i for bytes. The reason is told in a line."""
    weights, empty = folder / "weights", folder / "empty"
    for each in (weights, empty):
        each.mkdir()
        write_tokens(each / "gpt2_train.bin", range(99))
        own_words(each / "own_train.bin", b"some text")
    (weights / "gpt2_124M.bin").touch()
    (weights / "llama3.2_1B.bin").touch()
    for device in ("cpu", "cuda"):
        small = first_run.SCRATCH[device]["model"]
        large = "d3" if device == "cpu" else "d12"
        for where, data, wish, why in (
                (empty, None, small, "no gpt2_124M.bin here: .* -e d12 trains GPT-2 124M"),
                (empty, "gpt2_train.bin", large, ""), (weights, None, "gpt2_124M.bin", ""),
                (weights, "gpt2_train.bin", "gpt2_124M.bin", ""),
                (weights, "own_train.bin", small, "own_train.bin has a vocabulary of its own.*"),
                (empty, "own_train.bin", small, "own_train.bin has a vocabulary of its own.*")):
            flags, said = chosen(where, "train_data", data, device=device)
            ok = flags.model == wish and re.fullmatch(why, said)
            check(f"{device}, {where.name}, -i {data}", ok, f"{flags.model}, {said!r}")
            steps = first_run.SCRATCH[device]["steps"]
            check(f"{device}, {where.name}, -i {data}: steps", (flags.steps == steps) == (
                wish == small), flags.steps)
        flags, said = chosen(empty, "model", "d12", "learning_rate", 1.0, device=device)
        check(f"{device}: -e d12", (flags.model, flags.steps, flags.temperature, said) ==
              ("d12", -1, 1.0, ""), said)
        flags, _ = chosen(empty, "steps", 7, "seq_len", 32, device=device)
        check(f"{device}: what is given stays", (flags.steps, flags.seq_len) == (7, 32))
        flags, said = chosen(empty, device=device, kind=Config3)
        ok = flags.model == small and re.fullmatch("no llama3.2_1B.bin here: .*", said)
        check(f"{device}: a Llama", ok, said)
        flags, said = chosen(weights, device=device, kind=Config3)
        check(f"{device}: Llama's weights", flags.model == "llama3.2_1B.bin" and not said, said)


@fast
def test_optimizer(folder):
    """A small model on a GPU trains with AdamW and the file's arithmetic; with Muon, its settings
    and dropout, where a flag asks for it. Both go with all other defaults."""
    for given, wish, steps, dropout in (((), "adamw", 1000, 0.0),
                                        (("optimizer", "muon"), "muon", 1100, 0.3),
                                        (("optimizer", "muon", "steps", 7), "muon", 7, 0.3),
                                        (("moments", "bf16"), "adamw", 1000, 0.0),
                                        (("learning_rate", 0.0), "adamw", 1000, 0.0)):
        flags, _ = chosen(folder, *given, device="cuda")
        found = flags.optimizer, flags.steps, flags.dropout
        check(f"{given}: {wish}", found == (wish, steps, dropout), found)
        check_refused(flags)
        flags, _ = chosen(folder, *given, device="cpu")
        found = flags.optimizer, flags.dropout
        check(f"{given}: on a CPU", found == (wish, 0.0), found)


# ---- Own sizes

V = 1 + 256  # the bytes, and <|endoftext|>


def own_words(path, text):
    """Write the bytes of a text as tokens, with a vocabulary of the bytes beside them."""
    write_tokens(path, np.frombuffer(text, np.uint8))
    write_vocabulary(tokenizer_path(path), vocabulary_of("bytes", ()))


def data_of(folder):
    """Token files of bytes in a folder, which becomes the current one. Returns the flags for
    them."""
    text = (TOP / "README.md").read_bytes()
    own_words(folder / "own_train.bin", text[:9000])
    write_tokens(folder / "own_val.bin", np.frombuffer(text[9000:9900], np.uint8))
    write_tokens(folder / "gpt2_train.bin", range(1000))
    write_tokens(folder / "gpt2_val.bin", range(100))
    os.chdir(folder)
    return "--device", "cpu", "-i", "own_train.bin", "-b", 2, "-t", 16, "-s", 0, "-v", 0


@fast
def test_sizes(folder):
    """Parameters of own sizes, counted by hand, in a run's first lines; and V, Vp and maxT, by the
    data and -t."""
    flags = data_of(folder)
    wte, C = 384 * 64, 64  # 257 words become 384 rows
    attention = 3 * C * C + 3 * C + C * C + C
    mlp = 4 * C * C + 4 * C + 4 * C * C + C
    gpt2 = 16 * C + 3 * (4 * C + attention + mlp) + 2 * C
    llama = 3 * (2 * C + (4 + 2) * 16 * C + C * C + 2 * 256 * C + 256 * C) + C  # H = 170, so 256
    more = 3 * 2 * 16 * C  # another head of keys and values
    for name, wish, words, program in (
            ("3x4x64", wte + gpt2, V, TRAINER), ("3x4x64", wte + llama, V, LLAMA),
            ("llama3:3x4x64", wte + llama, V, LLAMA), ("3x4x2x64", wte + llama + more, V, LLAMA),
            ("3x4x64", 50304 * C + gpt2, 50257, TRAINER),
            ("3x4x64", 50304 * C + llama, 50257, LLAMA)):
        data = ("-i", "gpt2_train.bin") if words != V else ()
        text = ran(*flags, "-e", name, "--dry-run", *data, program=program)
        found = re.search(r"\(-e\): ([\d,]+) parameters, .*\(maxT=(\d+), V=(\d+).* Vp=(\d+)", text)
        numbers = [int(x.replace(",", "")) for x in found.groups()]
        positions = 16 if program == TRAINER else 8192
        yield (f"{program} {name}, V = {words}", numbers,
               [wish, positions, words, 384 if words == V else 50304], EXACT)
    _, text, _ = call(*flags, "-e", "d2", "--dry-run")
    check("a depth has the data's words, and GPT-2's positions",
          "Config(maxT=1024, V=257, L=2, NH=2, C=128, Vp=384)" in text, text[:400])
    c = Config.from_descriptor("6x6x384")
    check("6x6x384", (c.L, c.NH, c.C, c.maxT) == (6, 6, 384, 1024), c)
    c = Config3.from_descriptor("6x6x384")
    check("6x6x384 as a Llama: the heads of keys and values of a depth", c.NKV == 2, c)
    for given, positions, T in (((), 1024, 64), (("-t", 1030), 1030, 1030)):
        _, text, error = call("--device", "cpu", "-i", "own_train.bin", "-b", 1, "-e", "1x1x32",
                              "-v", 0, "--dry-run", *given)
        check(f"-t: {given}", f"maxT={positions}," in text and f"T={T} " in text, error)


@fast
def test_refusals(folder):
    """Sizes that make no model, and a checkpoint whose words are not the data's, are refused in a
    line that says what was found and what is expected."""
    flags = data_of(folder)
    ran(*flags, "-e", "1x2x64", "-x", 0, "-o", "own")
    (folder / "alone").mkdir()
    shutil.copy("own/model_00000000.bin", "alone/model.bin")
    gpt2 = "-i", "gpt2_train.bin"
    for program, wish, *more in (
            (TRAINER, "-e 6x6x380: .*C=380.*; expected C to be divisible by NH", "-e", "6x6x380"),
            (TRAINER, "-e 5x5x40: .*C=40.*; expected C to be a multiple of 32", "-e", "5x5x40"),
            (TRAINER, "-e 0x6x384: .*L=0.*; expected sizes from 1", "-e", "0x6x384"),
            (TRAINER, "-e 6x0x384: .*NH=0.*; expected sizes from 1", "-e", "6x0x384"),
            (TRAINER, "-e 6x6: has 2 sizes; expected LxNHxC, such as 6x6x384", "-e", "6x6"),
            (TRAINER, "-e 6x6x6x384: has 4 sizes; expected LxNHxC, such as", "-e", "6x6x6x384"),
            (LLAMA, "-e 6x6: has 2 sizes; expected LxNHxC, .* or LxNHxNKVxC, ", "-e", "6x6"),
            (LLAMA, "-e 6x6x4x384: .*NKV=4.*; expected NH to be divisible", "-e", "6x6x4x384"),
            (LLAMA, "-e 6x32x32: .*; expected heads of an even number", "-e", "6x32x32"),
            (TRAINER, "-e 6x: expected a checkpoint, or .*, such as 6x6x384", "-e", "6x"),
            (TRAINER, "own_tokenizer.bin: has 257 words, and the model V = 331; expected as many",
             "-e", TINY),
            (TRAINER, "gpt2_train.bin: token 257 is 257; expected ids below V = 257", "-e",
             "alone/model.bin", *gpt2)):
        check_error(wish, *flags, *more, program=program)


def test_resume(folder):
    """Models of own sizes, with the data's own words: a run that stops and resumes has the bits of
    one that does not, from its checkpoint or from its start. Its checkpoint is trained on, writes
    text, and is converted to a folder and back."""
    flags = data_of(folder)
    for program, name in ((TRAINER, "2x2x64"), (LLAMA, "2x4x2x64")):
        whole = folder / f"whole {name}"
        ran(*flags, "-e", name, "-x", 6, "-n", 3, "-l", 1e-3, "-o", whole, program=program)
        check_resumed(name, whole, 6, program=program)
        check_resumed(name, whole, 3, 6, program=program)
        path = whole / "model_00000006.bin"
        for text in ("", "The ", "é"):
            status, said, error = call("--device", "cpu", "-e", path, "--sample", text, "-g", 9,
                                       "--seed", 1, program=program)
            ids = re.search(r"<\d+>", said)  # as tokens are written whose words are not known
            ok = not status and said.startswith(text) and not ids
            check(f"{name}: --sample {text!r}", ok, f"{said!r} {error}")
        said = ran(*flags, "-e", path, "-x", 1, program=program)
        check(f"{name}: its checkpoint", "step    1/1" in said, said)
        convert.main([str(path), str(whole / "hf")])
        convert.main([str(whole / "hf"), str(whole / "back.bin")])
        check(f"{name}: converted and back", (whole / "back.bin").read_bytes() == path.read_bytes())


def test_interrupted(folder):
    """A signal in a first run leaves its weights in a new file, and Ctrl-C a last sample."""
    flags = *data_of(folder), "-v", 0, "-u", 0, "-q", 1, "-g", 9, "-s", 10**6
    for step in range(1000):
        (folder / f"interrupted_{step:08d}.bin").touch()
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, TOP / "train_gpt2.py", *map(str, flags)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        next(line for line in child.stdout if line.startswith("step    2/"))
        child.send_signal(number)
        text, _ = child.communicate(timeout=60)
        step, name = re.search(r"after (\d+) of .* are in (\S+_again.bin): the same ",
                               text).groups()
        call(*flags, "-x", step, "-s", 0, "-o", f"whole {number}")
        wish = (folder / f"whole {number}/model_{int(step):08d}.bin").read_bytes()
        check(f"{number}: its weights", (folder / name).read_bytes() == wish)
        before, _, after = text.partition("interrupted after")  # the line that says how to go on
        check(f"{number}: a sample", ("generating:" in before) == (number == signal.SIGINT), text)
        check(f"{number}: once", "generating:" not in after, text)
        said = ran(*flags, "-e", name, "-x", 1, "-s", 0)
        check(f"{number}: it goes on", "step    1/1" in said, said)
        _, said, _ = call("--device", "cpu", "-e", name, "--sample", "The ", "-g", 3)
        check(f"{number}: its words", said.startswith("The ") and "<" not in said, said)


def test_dry_run(folder):
    """--dry-run needs no compiler, and takes less than two seconds."""
    data_of(folder)
    environment = os.environ | {"CXX": "absent", "XDG_CACHE_HOME": str(folder / "cache")}
    for more in ((), ("-m", LLAMA)):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, *(more or (TOP / "train_gpt2.py",)), "--dry-run",
                               "-i", "own_train.bin", "--device", "cpu"], capture_output=True,
                              text=True, env=environment)
        seconds = time.perf_counter() - begun
        ok = not done.returncode and "first run " in done.stdout and "estimate  " in done.stdout
        check("without a compiler", ok, done.stdout[-300:] + done.stderr)
        check("nothing is compiled", not (folder / "cache").exists())
        check("seconds", seconds < 2 or os.getloadavg()[0] > 2, f"{seconds:.1f}")


# ---- The run itself

CXXFLAGS = "-O3"  # as a user: a training repays its compiler
STEPS = 1000  # of the whole run's 5,000, in a test of half a minute on two cores
LETTERS = 1500  # of a sample: the more words, the less their share is due to chance
LEAST = 0.65  # the share of its words that are the text's: 0.81 were measured
RISE = 0.02  # nats: the noise of a validation


def first_run_in(folder, *more):
    """(the held-out losses, the last sample, the text it was trained on, the output, seconds) of a
    run without -e and -i in a folder, without a network."""
    os.chdir(folder)
    begun = time.perf_counter()
    with mock.patch("urllib.request.urlopen", side_effect=OSError("no network")):
        said = ran("--device", "cpu", *more)
    seconds = time.perf_counter() - begun
    path = both(first_text.REPOSITORY)[0]
    tokens = np.fromfile(path, "<u2", offset=1024)
    text = read_vocabulary(tokenizer_path(path)).decode(tokens.tolist())
    losses = [float(x) for x in re.findall(r"^val loss (\S+)$", said, re.M)]
    samples = re.findall(r"^generating:\n---\n(.*?)\n---$", said, re.M | re.S)
    return losses, samples[-1], text, said, seconds


def check_run(losses, sample, text, said, least):
    """Check that a run has written words and its loss has not risen."""
    share, count = share_of_words(sample, text), len(words_of(sample))
    check("words of the text", share >= least and count > 30, f"{share:.2f} of {count}: {sample}")
    check("the held-out loss falls", losses[-1] <= min(losses) + RISE, losses)
    check("far", losses[0] > 5 > 2.5 > losses[-1], losses)
    check("it says why", "first run    | no gpt2_124M.bin here: a small model on the bytes of this "
          "program's own text; -e d12 trains GPT-2 124M" in said, said[:300])


def test_first_run(folder):
    """A fifth of the run without flags writes words, and its held-out loss does not rise; the same
    model untrained writes none."""
    *found, _ = first_run_in(folder, "-x", STEPS, "-v", STEPS // 4, "-s", STEPS, "-g",
                                   LETTERS)
    check_run(*found, LEAST)
    _, sample, text, *_ = first_run_in(folder, "-x", 1, "-l", 0, "-s", 1, "-v", 0, "-g", LETTERS)
    share, count = share_of_words(sample, text), len(words_of(sample))
    # which seldom has three letters in a row
    ok = share < LEAST - 0.15 and count < len(words_of(found[1])) / 2
    check("untrained", ok, f"{share:.2f} of {count}: {sample}")


@pytest.mark.longest
def test_whole_run(folder):
    """The run without flags: at least six words in ten are the text's, within two minutes on two
    cores; validations and samples take at most a tenth of that."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        *found, seconds = first_run_in(folder)
    check_run(*found, 0.6)
    steps = float(re.search(r"steps in ([\d.]+) s", found[3])[1])
    check("seconds", seconds < 120 or os.getloadavg()[0] > 3, f"{seconds:.0f} s, {steps} in steps")
