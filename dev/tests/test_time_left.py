"""Test what a program says of the time that it still takes (dev/common/time_left.py, and
dev/features/terminal.py of a run), and --minutes (dev/features/minutes.py), by a clock that only
these tests move.
"""
import contextlib
import io
import json
import math
import re
from unittest import mock

import numpy as np

import train_gpt2
from dev.common.time_left import TimeLeft, duration
from dev.data import fineweb, hellaswag
from dev.features import first_run
from dev.features.order import main
from dev.tests.checks import TINY, check, fast, working_in
from dev.tests.documents import write_jsonl
from dev.tests.folders import byte_encoding
from dev.tests.trainings import (call, check_error, check_resumed, ran, trained, two_token_files,
                                 without)
from dev.tools import evaluate


class Clock:
    """A clock that stands still, but for what tests add. step, validation and sample: the seconds
    that these take in a training, each a function of how many came before."""

    def __init__(self, step=lambda n: 0, validation=0, sample=0):
        self.now, self.steps = 1e4, 0
        self.step, self.validation, self.sample = step, validation, sample

    @contextlib.contextmanager
    def in_place(self):
        """Training by this clock."""
        def longer(kind, name, seconds):
            work = getattr(kind, name)

            def changed(*args, **keywords):
                self.now += seconds()
                return work(*args, **keywords)
            return mock.patch.object(kind, name, changed)

        def of_step():
            self.steps += 1
            return self.step(self.steps - 1)

        with (mock.patch("time.perf_counter", lambda: self.now),
              longer(train_gpt2.GPT2, "train_step", of_step),
              longer(train_gpt2.Training, "total_loss", lambda: self.validation),
              longer(train_gpt2, "generate", lambda: self.sample)):
            yield self


class Screen(io.StringIO):
    def isatty(self):
        return True


@fast
def test_durations():
    for seconds, wish in ((0.4, "0 s"), (59.4, "59 s"), (240, "4 min 0 s"), (250.3, "4 min 10 s"),
                          (12000, "3 h 20 min"), (100000, "27 h 46 min")):
        check(f"{seconds} s", duration(seconds) == wish, duration(seconds))


@fast
def test_work():
    """After a quarter in 12 seconds, 36 are left: a log has that once, a terminal in a line that
    goes away. Work of less than ten seconds says nothing, nor does its end."""
    for each, wish, drawn in ((3, "36 s left\n", 12), (0.5, "", 0)):
        for stream in (io.StringIO(), Screen()):
            clock, seen = Clock(), []
            with clock.in_place(), contextlib.redirect_stderr(stream):
                for part in TimeLeft().over(["ab"] * 16, 32):
                    seen.append(part)
                    clock.now += each
            said, terminal = stream.getvalue(), stream.isatty()
            check(f"{each} s, {terminal}: all parts", seen == ["ab"] * 16)
            if not terminal:
                check(f"{each} s: in a log", said == wish, said)
                continue
            lines = [line for line in said.split("\r\x1b[K") if line]
            check(f"{each} s: drawn", len(lines) == drawn, lines)
            check("a bar", not drawn or lines[0] == f"[{'#' * 10:40}]  25%, 36 s left", lines)
            check("it goes", not drawn or said.endswith("\r\x1b[K"), said[-20:])


FLAGS = ("--device", "cpu", "-e", TINY, "-i", "tokens.bin", "-j", "tokens.bin", "-b", 2, "-t", 8,
         "-m", 1, "-g", 2)


def run_in(stream, *flags):
    """What a run prints to a stream that is both its stdout and its stderr."""
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        main([*map(str, flags)])
    return stream.getvalue()


@fast
def test_estimate(folder):
    """From the tenth step on a run knows how long it takes: the first of its steps is slow, and
    what comes between them counts once it was seen. On a terminal the bar says so, in a log a
    line."""
    two_token_files(folder)
    flags = *FLAGS, "-x", 40, "-v", 10, "-s", 15
    times = dict(step=lambda n: 50 if n == 0 else 2, validation=30, sample=5)
    with working_in(folder), Clock(**times).in_place():
        text = run_in(io.StringIO(), *flags)
    found = re.findall(r"^estimate +\| (.*)\n", text, re.M)
    # 30 steps, and validations after steps 10, 20, 30 and 40
    wish = "3 min 0 s left: 30 steps of 2000.00 ms, 4 validations of 30.0 s, 3 samples on top"
    check("in a log, once", found == [wish], found)
    check("after the tenth step", re.search(r"step   10/40 .*\nestimate", text), text[-900:])
    check("no bar in a log", "[#" not in text)
    with working_in(folder), Clock(**times).in_place():
        text = run_in(Screen(), *flags)
    bars = re.findall(r"\x1b\[K\[[# ]{40}\] ([^\r\x1b\n]*)", text)
    # after step 20: 20 steps, validations after 20, 30 and 40, samples after 30 and 40
    check("the bar", [bars[i] for i in (8, 9, 19, 39)] == [
        " 22%", " 25%, 3 min 0 s left", " 50%, 2 min 20 s left", "100%, 35 s left"], bars)
    check("no line on a terminal", "estimate" not in text)


def test_first_run(folder):
    """A first run that takes more than two minutes says so, and names the machine; a shorter one
    and one with -e do not."""
    two_token_files(folder)
    with working_in(folder), mock.patch.object(first_run, "processor", lambda: "Abacus"):
        for name, seconds, more, wish in (
                ("long", 9, (), "2 min 15 s"), ("short", 7, (), ""),
                ("with -e", 9, ("-e", "1x1x32"), "")):
            with Clock(lambda n, seconds=seconds: seconds).in_place(), mock.patch.object(
                    first_run, "choose", lambda flags, kind: (
                        ({}, "") if flags.model else (dict(model="1x1x32"), "why"))):
                text = ran("--device", "cpu", "-i", "tokens.bin", "-j", "tokens.bin", "-b", 2,
                           "-t", 8, "-v", 0, "-s", 0, "-x", 15, *more)
            found = re.findall(r"first run +\| takes about (.*) on this machine \(Abacus, \d+ "
                               r"cores?\); --minutes", text)
            check(name, found == [wish] * bool(wish), text[-300:])


def test_programs(folder):
    """Programs that take more than ten seconds say how long they still take, once, on stderr."""
    (folder / "texts").mkdir()
    (folder / "tables").mkdir()
    for i in range(9):
        (folder / f"texts/{i}.txt").write_text("some words " * 9)
    for name in ("a", "b", "c"):
        write_jsonl(folder / f"tables/{name}.jsonl", [{"text": "word " * 30}] * 9)
    write_jsonl(folder / "questions.jsonl", [dict(ctx="a", endings=[*"bcde"], label=1)] * 9)
    evaluated = "dev.tools.evaluate", "--device", "cpu", "-e", TINY, "--input", "texts/1.txt"
    for program, *flags in (
            (*evaluated, "-b", 1, "-t", 8), ("dev.tools.convert", TINY, "folder"),
            ("dev.tools.convert", "folder", "back.bin"), ("dev.tools.convert", TINY, "one.gguf"),
            ("dev.data.hellaswag", "--input", "questions.jsonl", "--output", "q.bin"),
            ("dev.data.own_text", "--input", "texts/*.txt", "--vocab", "bytes", "--name", "x"),
            ("dev.data.fineweb", "--input", "tables", "--name", "x", "--output", "out",
             "-s", 300)):
        clock = Clock()

        def ticking(clock=clock):
            clock.now += 6
            return clock.now

        with working_in(folder), mock.patch("time.perf_counter", ticking), (
                mock.patch.object(hellaswag, "gpt2_encoding", byte_encoding)), (
                mock.patch.object(fineweb, "gpt2_encoding", byte_encoding)), (
                mock.patch.object(evaluate, "tokens_of", lambda *args: np.arange(99, dtype="i4"))):
            status, text, error = call(*flags, program=program)
        said = text if program.endswith("fineweb") else error
        check(f"{program} {flags[:1]}", status == 0 and re.search(r"\d s left$", said, re.M),
              text + error)
        check("once", program.endswith("fineweb") or error.count(" left\n") == 1, error)


# ---- --minutes


def uneven(n):
    """Seconds of a step: fast at first, then slow."""
    return 0.2 if n < 20 else 0.7


def rates(output):
    """The learning rates of a run's log.jsonl."""
    lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if "lr" in line]


def test_minutes(folder):
    """With steps of the same length, a run by the clock is the run of as many steps, to the last
    bit. With others, the rate is that of the share of the time that is over."""
    two_token_files(folder)
    for name, *more in (("cosine", "-u", 3), ("wsd", "-k", "wsd"), ("linear", "-k", "linear")):
        outputs = []
        for end in (("-x", 12), ("--minutes", 0.1)):
            outputs.append(folder / f"{name} {end[0]}")
            with working_in(folder), Clock(lambda n: 0.5).in_place():
                ran(*FLAGS, "-v", 5, "-s", 0, "-l", 1e-2, "-q", 0.1, *more, *end, "-o",
                    outputs[-1])
        for file in ("main.log", "model_00000012.bin"):
            one, two = ((output / file).read_bytes() for output in outputs)
            check(f"{name}: {file}", one == two)
    output = folder / "uneven"
    with working_in(folder), Clock(uneven).in_place():
        text = run_in(Screen(), *FLAGS, "-v", 0, "-s", 0, "-l", 1e-2, "-q", 0.1, "--minutes", 0.3,
                      "-o", output)
    # 20 steps in 4 s, and another 20 until 18 s; 6.8 s are over after step 24
    check("it ends", "40 steps in 18.0 s" in text, text[-200:])
    bars = re.findall(r"\] [ \d]+%, (\S+ s) left", text)
    check("what is left", [bars[0], bars[14]] == ["16 s", "11 s"], bars)
    found = np.array(rates(output))
    begun = np.cumsum([0, *map(uneven, range(39))]) / 18
    wish = np.array([1e-3 + 9e-3 * (1 + math.cos(math.pi * share)) / 2 for share in begun])
    yield "rates by the clock", found, wish, 0.02


def test_minutes_resumed(folder):
    """A run that resumes makes the steps of its log again with their rates, though the clock is
    another now: from a checkpoint, twice, or from its start. Steps after the log follow the
    clock. --replay shows a step that was not finite."""
    two_token_files(folder)
    output = folder / "whole"
    with working_in(folder), Clock(uneven).in_place():
        ran(*FLAGS, "-v", 9, "-s", 0, "-l", 1e-2, "-q", 0.1, "--minutes", 0.2, "-n", 10, "-o",
            output)
    steps = [10, 20, 30, 32]  # 4 s, and 12 steps until 12 s
    for gone in (steps[2:], steps[1:], steps):
        with working_in(folder), Clock(lambda n: 3).in_place():
            copy, _ = check_resumed(f"minutes {len(gone)}", output, *gone)
        check("its rates", rates(copy) == rates(output))
        with working_in(folder), Clock(lambda n: 0.01).in_place():
            check_resumed(f"{len(gone)} again", copy, *gone)

    copy = without(output, folder / "cut", *steps[1:])
    # 22 steps in the log: 4 s, and two of 0.7; one of them with another rate
    lines = [json.loads(line) for line in (copy / "log.jsonl").read_text().splitlines()]
    lines = [line | dict(lr=0.25) if "lr" in line and line["step"] == 15 else line
             for line in lines if line["step"] < 23]
    (copy / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with working_in(folder), Clock(lambda n: 1.5).in_place():
        text = trained(copy, "-y", 1)
    # 12 steps are made again, without regard to the clock; then 5.4 s are over, and five of 1.5 s
    # remain
    check("beyond the log", "step   27/27" in text and "step   28" not in text, text[-600:])
    check("the rates of the log", rates(copy)[:22] == [
        *rates(output)[:14], 0.25, *rates(output)[15:22]], rates(copy))
    with working_in(folder), Clock(lambda n: 3).in_place():
        said = trained(without(output, folder / "more", 32), "-y", 1, "--minutes", 0.5)
        longer = trained(without(output, folder / "longer"), "-y", 1, "--minutes", 0.5)
        check_error("the loss of step 2 is", *FLAGS, "-l", 1e30, "--minutes", 1, "-o", "bad")
        status, text, error = call("--device", "cpu", "--replay", "bad/replay_00000001.npz")
    check("another number of minutes", "WARNING: --minutes was 0.2 until step 30, and is 0.5" in
          said, said)
    check("and so its rates", rates(folder / "more")[30] > rates(output)[30])
    check("a run that has ended goes on: 18 s in steps of 3", "step   38/" in longer
          and "step   39/" not in longer and "nothing is left" not in longer, longer)
    check("replayed", status == 0 and "step 2: the first number that is not" in text, text + error)
    with working_in(folder):
        said = trained(output, "-y", 1)
    check("nothing is left", "all 32 steps are made" in said, said)
