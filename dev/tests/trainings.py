"""Small training runs and their files, for several tests."""
import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np

import train_gpt2
from dev.common.config import Config, read_parameters
from dev.features.hellaswag_score import Example
from dev.tests.checks import TINY, check, numbers_of, words
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import UserError

TRAINER, LLAMA = "train_gpt2", "dev.llama3.train_llama3"
# In the fixture's parameters.
NUMBERS = sum(row.size for row in Config.from_file(TINY).parameter_table())


def two_token_files(folder):
    """Write two token files, one of them too short."""
    write_tokens(folder / "tokens.bin", words(257, 200))
    write_tokens(folder / "short.bin", words(257, 16))


def place_of(device_name):
    """Where a training runs for a test: on a CPU with loops, since emulated kernels, which have
    tests of their own, are slow."""
    return "cuda" if device_name == "cuda" else "cpu"


def command(device_name, folder, output, *flags, trainer=TRAINER, model=TINY):
    return [str(x) for x in (
        sys.executable, *(["-m", trainer] if isinstance(trainer, str) else [trainer]), "--device",
        place_of(device_name),
        "-e", model, "-i", folder / "part_train_*.bin", "-j",
        folder / "part_val_0.bin", "-b", 2, "-t", 8, "-d", 32, "-x", 12, "-n", 3, "-v", 4, "-m", 2,
        "-s", 5, "-g", 3,
        "-u", 3, "-q", 0.1, "-l", 1e-2, "-c", 0.1, "-o", output, *flags)]


def token_files(folder):
    """Write three files of training data, the last the shortest, and one to validate on."""
    for i, count in enumerate((333, 300, 170)):
        write_tokens(folder / f"part_train_{i}.bin", words(257, count))
    write_tokens(folder / "part_val_0.bin", words(257, 100))


def call(*arguments, program=TRAINER):
    """Call a program's main in this process, which saves the second that a new one takes to start.
    Returns its exit status, its output, and what went to stderr, including the line of an error."""
    module = "dev.features.order" if program == TRAINER else program
    main = importlib.import_module(module).main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments]) or 0
        except UserError as e:
            status, _ = 1, err.write(f"error: {e}\n")
    return status, out.getvalue(), err.getvalue()


def ran(*arguments, status=0, **program):
    """What a program prints that ends with this status, with the line of an error."""
    found, *said = call(*arguments, **program)
    check(f"{' '.join(map(str, arguments))[-90:]}: status", found == status, said[1])
    return "".join(said)


def trained(output, *flags, device="cpu", **more):
    """Train on the token files beside a run's folder, or go on with the run (-y 1). Flags win over
    those of here. Returns what ran returns."""
    data = () if "-y" in flags else (
        "-e", TINY, "-i", output.parent / "part_train_0.bin", "-j", output.parent /
        "part_val_0.bin", "-b", 2, "-t", 8, "-v", 0, "-s", 0, "-l", 1e-2)
    return ran("--device", device, *data, *flags, "-o", output, **more)


def check_error(wish, *arguments, early=False, **program):
    """Check that a program ends with the status 1 and one line, in which this is (a regular
    expression). early: before it prints anything."""
    status, text, error = call(*arguments, **program)
    ok = status == 1 and re.fullmatch(f"error: .*({wish}).*\n", error) and not (early and text)
    check(f"refused: {wish}", ok, f"{status}, {text[-300:]}, {error!r}")


def train(device_name, *args, status=0, **keywords):
    """Run a training to its end and check its exit status. Returns its output. On a GPU it is a
    process of its own, so that its memory is freed."""
    arguments = command(device_name, *args, **keywords)
    if device_name != "cuda" and arguments[1] == "-m":
        found, *said = call(*arguments[3:], program=arguments[2])
    else:
        done = subprocess.run(arguments, capture_output=True, text=True)
        found, *said = done.returncode, done.stdout, done.stderr
    if status is not None and found != status:
        raise AssertionError(f"exit status {found}, not {status}: {said[1] or said[0][-500:]}")
    return "".join(said)


WAYS = (("plain", "--plain", 1), ("no_graph", "--graph", 0), ("recompute", "--recompute", 1))


def same_bits(device_name, folder, program, model, kind, dtypes, *ways):
    """Two runs of three steps in each dtype give the same bits, and other ways of computing, in
    fp32, nearly the same. It runs in the folder, on two_token_files. kind: the model's Config."""
    runs = [(f"{dtype}_{again}", "--dtype", dtype) for dtype in dtypes for again in (1, 2)]
    for name, *flags in (*runs, *((name, "--dtype", "fp32", *flags) for name, *flags in ways)):
        ran("--device", place_of(device_name), "-e", model, "-i", "tokens.bin", "-j", "tokens.bin",
            "-b", 2, "-t", 8, "-x", 3, "-s", 3, "-g", 2, *flags, "-o", name, program=program)

    def result(name):
        return folder / name / "model_00000003.bin"

    for dtype in dtypes:
        one, two = (result(f"{dtype}_{again}") for again in (1, 2))
        check(f"its checkpoint in {dtype} is one", kind.from_file(one) == kind.from_file(model))
        check(f"the same bits again in {dtype}",
              one.read_bytes() == two.read_bytes() != model.read_bytes())
    c = kind.from_file(model)
    for name, *_ in ways:  # not with the same bits on every device
        yield (name, *(numbers_of(read_parameters(result(x), c)) for x in (name, "fp32_1")), 5e-4)


def check_same(name, output, whole, step, ranks=1):
    """Check that those files of a run that must not depend on where it stopped are another's."""
    states = (f"state_{step:08d}_{rank:05d}.bin" for rank in range(ranks))
    for file in (f"model_{step:08d}.bin", "main.log", *states):
        found, wish = ((folder / file).read_bytes() for folder in (output, whole))
        check(f"{name}: {file} is that of a run without a stop", found == wish,
              f"{len(found)} bytes, {len(wish)} expected, or others" * (found != wish))


def done_steps(output):
    """The steps of the checkpoints that DONE files promise."""
    return sorted(int(path.name[5:]) for path in output.glob("DONE_????????"))


def whole_ones(output):
    """The steps that DONE files name. Checks that the files of these checkpoints are there and of
    the right sizes."""
    for step in (steps := done_steps(output)):
        model, state = ((output / f"{name}_{step:08d}{end}").stat().st_size
                        for name, end in (("model", ".bin"), ("state", "_00000.bin")))
        good = (model in (1024 + 2 * NUMBERS, 1024 + 4 * NUMBERS) and
                state > 1024 + 12 * NUMBERS + 2520)
        assert good, f"step {step}: {model} and {state} bytes"
        json.loads((output / f"run_{step:08d}.json").read_text())
    return steps


def without(output, copy, *steps):
    """Copy a run's folder without the checkpoints of these steps, as if it had been killed before
    them."""
    shutil.copytree(output, copy)
    for path in [path for step in steps for path in copy.glob(f"*_{step:08d}*")]:
        path.unlink()
    return copy


def check_resumed(name, whole, *steps, go_on=None, change=None, ranks=1, **more):
    """Stop and resume: go_on(copy), or the trainer with -y 1 alone, goes on with a run in a copy of
    its folder that lacks the checkpoints of these steps (the last of them is the run's), and ends
    with the same bytes. change(copy) comes before. Returns the copy, and what go_on returns."""
    copy = without(whole, whole.with_name(f"{name} without {' '.join(map(str, steps))}"), *steps)
    if change:
        change(copy)
    said = go_on(copy) if go_on else trained(copy, "-y", 1, **more)
    check_same(f"{name} resumed", copy, whole, steps[-1], ranks)
    return copy, said


def check_feature(device_name, folder, name, feature, *flags, **more):
    """A run with the flags of a feature that changes the loss: stopped, it resumes with them, from
    its folder. Without them, the first step has another loss, and the validation before it the
    same. Returns the run's folder, and losses: of the run, without the flags, with them again, and
    with another seed."""
    token_files(folder)
    more, whole = more | dict(device=place_of(device_name)), folder / name
    flags = "-t", 32, "-d", 128, "-v", 3, "-m", 1, *flags
    said = [trained(whole, *flags, "-x", 4, "-n", 2, *feature, **more)]
    _, again = check_resumed(name, whole, 4, **more)
    check(f"{name}: no warning of another flag", feature[0] not in again, again)
    said += [trained(folder / f"{name} {i}", *flags, "-x", 1, *given, **more)
             for i, given in enumerate(((), feature, (*feature, "--seed", 43)))]
    validations, losses = ([re.search(pattern, text, re.M)[1] for text in said] for pattern in (
        r"^val loss (\S+)", r"^step    1/.*? loss (\S+)"))
    check(f"{name}: the same validation before the first step", len({*validations}) == 1,
          validations)
    check(f"{name}: another loss of the first step", losses[0] == losses[2] != losses[1], losses)
    return whole, losses


# ---- HellaSwag's questions, and their file: dev/features/hellaswag_score.py describes it

LENGTHS = [(3, (1, 1, 1, 1)), (1, (5, 1, 2, 9)), (17, (4, 4, 4, 4)), (30, (8, 1, 3, 2)),
           (2, (30, 31, 32, 33)),
           # Of a context and its completions: the longest row has 39 tokens.
           (20, (2, 19, 3, 1)), (6, (6, 6, 2, 6))]


def random_examples(V, lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    tokens = lambda n: rng.integers(V, size=n, dtype=np.int32)
    return [Example(int(rng.integers(4)), tokens(context), [tokens(n) for n in completions])
            for context, completions in lengths]


def file_of(examples, **change):
    """The bytes of a file of examples, put together number by number."""
    stream, longest = [], 0
    for i, example in enumerate(examples):
        rest = [i, example.label, 4]
        for part in (example.context, *example.completions):
            rest += [len(part), *part]
        stream += [65535, 2 * (2 + len(rest)), *rest]
        longest = max(longest, 2 * (2 + len(rest)))
    header = [20240522, 1, len(examples), longest] + 252 * [0]
    return np.array(header, "<i4").tobytes() + np.array(stream, "<u2").tobytes()


@contextlib.contextmanager
def killed_in(step):
    """A run within ends abruptly in the step that follows `step` others, as if it were killed."""
    train_step = train_gpt2.GPT2.train_step

    def killed(model, *args, **keywords):
        if model.step == step:
            raise ZeroDivisionError
        train_step(model, *args, **keywords)

    with mock.patch.object(train_gpt2.GPT2, "train_step", killed), contextlib.suppress(
            ZeroDivisionError):
        yield
