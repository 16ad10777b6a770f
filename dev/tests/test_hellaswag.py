"""Test HellaSwag: the reader on files made by hand, and losses against NumPy.

NumPy takes the logits of each row by itself, without padding, and continues in float64. In one test
the logits are PyTorch's.
"""
import os
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import read_parameters
from dev.data.hellaswag import EVAL_FILE
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.hellaswag_score import Example, count_right, mean_losses, read_examples
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import EXACT, check, check_refusal, fast, header_refusal
from dev.tests.models import FIXTURES, LIMITS, device_of, poisoned_model, read_debug_state
from dev.tests.trainings import LENGTHS, call, file_of, random_examples
from train_gpt2 import to_float

DEVICE_SIZES = {GPT2: (64, 2), Llama3: (64, 2)}  # C and NH of these


# ---- Reading


@fast
def test_good_files(folder):
    """The examples in a file are those that were written. Tokens up to V - 1, and rows of T - 1
    tokens, are valid."""
    for name, examples in (("several", random_examples(257)), ("one", random_examples(257)[:1]),
                           ("of large ids", random_examples(50257)), ("START among tokens", [
                               Example(3, np.int32([65535]), [np.int32([65535, 1, 4])] * 4)])):
        path = folder / "hellaswag.bin"
        path.write_bytes(file_of(examples))
        V = 1 + max(int(part.max()) for example in examples
                    for part in (example.context, *example.completions))
        T = 1 + max(len(example.context) + len(part) for example in examples
                    for part in example.completions)
        for found in (read_examples(path, V), read_examples(path, 2**16, T)):
            same = len(found) == len(examples) and all(
                one.label == two.label and len(one.completions) == 4 and all(
                    part.dtype == np.int32 and np.array_equal(part, wish)
                    for part, wish in zip((one.context, *one.completions),
                                          (two.context, *two.completions)))
                for one, two in zip(found, examples))
            check(f"{name}, V = {V}", same)
        check_refusal(name, f"-t {T - 1}: HellaSwag's example .* {T - 1} tokens .*; expected -t "
                      f"{T} or more", read_examples, path, V, T - 1)
        check_refusal(name, f"token {V - 1}, and the model has V = {V - 1} words", read_examples,
                      path, V - 1)
    check_refusal("Llama's words", "the model V = 128256 words of another vocabulary",
                  read_examples, path, 128256)


@fast
def test_bad_files(folder):
    """Each rule of the format, broken: the error is one line with the example and the byte."""
    # Example 0: numbers 512 to 529 of the file, counted as uint16. 1: from 530 on.
    examples = [Example(1, np.int32([7, 8]), [np.int32([n]) for n in range(4)]),
                Example(2, np.int32([9]), [np.int32([n, n]) for n in range(4)])]
    whole = np.frombuffer(file_of(examples), "<u2")
    assert len(whole) == 512 + 16 + 19, len(whole)
    first, second, path = 512, 512 + 16, folder / "hellaswag.bin"
    for wish, index, value, *cut in (
            (header_refusal((5, 1), EVAL_FILE), 0, (5, 0)),
            (header_refusal((20240522, 2), EVAL_FILE), 2, 2),
            ("its header promises 0 examples", 4, 0),
            ("its header promises -1 examples", 4, (65535, 65535)),
            ("example 2, byte 1094: the file ends here, and its header promises 3", 4, 3),
            ("38 bytes follow the 1 examples", 4, 1),
            ("longest example has 38 bytes, and its header promises 36", 6, 36),
            ("longest example has 38 bytes, and its header promises 40", 6, 40),
            ("example 0, byte 1024: START is 65534; expected 65535", first, 65534),
            ("example 1, byte 1056: START is 0; expected 65535", second, 0),
            ("example 0, byte 1026: EXAMPLE_BYTES is 31; expected an even number from 30 to the 70",
             first + 1, 31),
            ("example 0, byte 1026: EXAMPLE_BYTES is 28; expected", first + 1, 28),
            ("example 0, byte 1026: EXAMPLE_BYTES is 72; expected", first + 1, 72),
            ("example 0, byte 1052: 0 tokens of completion 3; expected at least 1, and "
             "EXAMPLE_BYTES leaves 0", first + 1, 30),
            ("example 0, byte 1056: 1 numbers follow the last completion", first + 1, 34),
            ("example 1, byte 1058: EXAMPLE_BYTES is 40; expected an even number from 30 to the 38",
             second + 1, 40),
            ("example 0, byte 1028: EXAMPLE_INDEX is 1; expected 0", first + 2, 1),
            ("example 1, byte 1060: EXAMPLE_INDEX is 0; expected 1", second + 2, 0),
            ("example 1, byte 1062: LABEL is 4; expected 0 to 3", second + 3, 4),
            ("example 0, byte 1032: NUM_COMPLETIONS is 5; expected 4", first + 4, 5),
            ("example 0, byte 1032: NUM_COMPLETIONS is 3; expected 4", first + 4, 3),
            ("example 0, byte 1034: 0 tokens of context; expected at least 1, .* leaves 10",
             first + 5, 0),
            ("example 0, byte 1034: 11 tokens of context; .* leaves 10", first + 5, 11),
            ("example 0, byte 1040: 0 tokens of completion 0; .* leaves 7", first + 8, 0),
            ("example 0, byte 1052: 2 tokens of completion 3; .* leaves 1", first + 14, 2),
            ("example 0, byte 1038: token 50, and the model has V = 50 words", first + 7, 50),
            ("example 1, byte 1092: token 65535, and the model", second + 18, 65535),
            ("its header of 1000 bytes .*expected 1024", 4, 2, 1000),
            ("could not be read .*expected a HellaSwag file", 4, 2, None),
            ("example 0, byte 1024: the file ends here, and its header promises 2", 4, 2, 1024),
            ("example 1, byte 1056: the file ends here", 4, 2, second * 2 + 9),
            ("example 1, byte 1058: EXAMPLE_BYTES is 38; expected an even number from 30 to the 36",
             4, 2, -1),
            ("1 bytes follow the 2 examples", 4, 2, 1)):
        changed = whole.copy()
        changed[index : index + np.size(value)] = value
        content = changed.tobytes()
        content = (content[: cut[0]]
                   if cut and cut[0] and cut[0] != 1 else content + b"\0" * (cut == [1]))
        path.write_bytes(content)
        if cut == [None]:
            path.unlink()
        check_refusal("bad file", f"{path}: .*{wish}", read_examples, path, 50)


# ---- Losses


def counted(model, examples):
    """The mean loss of each completion in float64, from the logits of a forward pass over its row
    alone."""
    c, means = model.config, []
    for example in examples:
        for completion in example.completions:
            row = np.concatenate([example.context, completion])
            model.forward(row[None, :-1], row[None, 1:])
            logits = to_float(model.device.get(model.acts.logits)).astype(np.float64)[: len(row) -
                                                                                      1, : c.V]
            means.append(count_of_logits(logits, row, len(completion)))
    return np.reshape(means, (-1, 4))


def count_of_logits(logits, row, count):
    """The mean over the last `count` tokens of a row of -log softmax(logits)[token]."""
    places = range(len(row) - 1 - count, len(row) - 1)
    return np.mean([np.log(np.sum(np.exp(logits[t] - logits[t].max()))) + logits[t].max() -
                    logits[t, row[t + 1]] for t in places])


def agrees(name, model, examples, truth):
    """The losses are close to the truth, and so the score is the truth's, whose smallest losses
    must not be too close to call."""
    means = mean_losses(model, examples)
    yield f"{name}, losses", means, truth, LIMITS[model.device.dtype]
    ordered = np.sort(truth, axis=1)
    near = np.min(ordered[:, 1] - ordered[:, 0])
    right = sum(int(np.argmin(row)) == example.label for row, example in zip(truth, examples))
    # Do not compute them again.
    with mock.patch("dev.features.hellaswag_score.mean_losses", return_value=means):
        found = count_right(model, examples)
    check(f"{name}, score {found}", found == (right, len(examples)) and near > 2e-4,
          f"{right}, {near:.1e} apart")


@pytest.mark.parametrize("architecture", (GPT2, Llama3))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_small_models(architecture, dtype):
    """Batches of any size; rows in one batch or several; T a multiple of 128 or not."""
    device = device_of("emulated", dtype, *DEVICE_SIZES[architecture], architecture=architecture,
                       group=2 if architecture is Llama3 else 1)
    long = [(100, (1, 27, 28, 60)), (3, (200, 2, 3, 4))]  # of 101 to 203 tokens
    for T, lengths, sizes in {
            (GPT2, "fp32"): [(40, LENGTHS, (1, 3, 4, 5, 8)), (204, long, (5,))],
            (GPT2, "bf16"): [(40, LENGTHS, (3,)),
                             (204, long, (5,))]}.get((architecture, dtype), [(40, LENGTHS, (3,))]):
        examples = random_examples(257, lengths)
        truth = counted(poisoned_model(device, 1, T, maxT=204), examples)
        for B in sizes:
            yield from agrees(f"B={B} T={T}", poisoned_model(device, B, T, maxT=204), examples,
                              truth)


@pytest.mark.parametrize("stem, architecture", (("gpt2_tiny", GPT2), ("llama_gqa", Llama3)))
def test_pytorch_logits(stem, architecture):
    """PyTorch's logits of a batch give the losses of completions that are cut out of its rows."""
    path = FIXTURES / f"{stem}.bin"
    c = architecture.Config.from_file(path)
    truth = read_debug_state(FIXTURES / f"{stem}_debug_state.bin", c)
    device = make_device("emulated", "fp32", c)
    model = architecture(c, device, 4, 40)
    model.set_parameters(read_parameters(path, c))
    B, T = truth.x.shape
    rows = np.concatenate([truth.x, truth.y[:, -1:]], axis=1)  # T + 1 tokens: y is x shifted by one
    assert np.array_equal(rows[:, 1:], truth.y)
    ends = [(9, (10, 12, 20, T + 1)), (1, (2, 3, 4, 5)), (T, (T + 1,) * 4)]
    examples = [Example(0, row[:start], [row[start:end] for end in stops]) for row in rows
                for start, stops in ends]
    wish = [[count_of_logits(np.float64(truth.logits[b]), rows[b, :end], end - start)
             for end in stops] for b in range(B) for start, stops in ends]
    yield "losses of PyTorch's logits", mean_losses(model, examples), np.array(wish), LIMITS["fp32"]


class Told:
    """A model whose losses are told in advance: table[t] for target t. It remembers the shapes of
    its batches."""

    def __init__(self, table, B=4, T=300):
        self.table, self.B, self.T, self.widths = np.float32(table), B, T, []
        self.device, self.acts = SimpleNamespace(get=np.copy), SimpleNamespace()

    def forward(self, tokens, targets):
        assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == targets.shape
        assert np.array_equal(tokens[:, 1:], targets[:, :-1])
        self.widths.append(tokens.shape)
        self.acts.losses = self.table[targets.reshape(-1)]


@fast
def test_rules(folder):
    """Which completion is predicted, how losses are summed, and how rows are padded, with losses
    told in advance."""
    def example(label, *completions, context=(9,)):
        return Example(label, np.int32(context),
                       [np.int32(completion) for completion in completions])

    table = np.r_[np.arange(10.0), np.nan, 1e8, -1e8, np.inf]
    nan, large, minus, infinite = 10, 11, 12, 13
    for name, wish, *completions in (
            ("the smallest", 2, [3], [2], [1], [4]), ("the last", 3, [3], [2], [1], [0]),
            ("the first of two", 1, [3], [2], [2], [4]),
            ("the first of four", 0, [2], [2], [2], [2]),
            ("the mean, not the sum", 0, [2, 2, 2], [3], [4], [5]),
            ("the mean of all", 3, [2], [0, 6], [3], [0, 3]),
            ("a loss that is no number, later", 2, [3], [nan], [2], [nan]),
            ("an infinite one", 1, [infinite], [3], [4], [4]),
            ("a first one that is no number stays, as in llm.c", 0, [nan], [1], [1], [1]),
            ("fp32, in order: 1e8 swallows each 1", 1, [0, 1], [1, 1, 1, large, *[1] * 20, minus],
             [1], [1])):
        for B in (1, 3, 4, 7):
            found = [count_right(Told(table, B), [example(label, *completions)])
                     for label in range(4)]
            check(f"{name}, B={B}", found == [(int(label == wish), 1) for label in range(4)], found)
    first = mean_losses(Told(table),
                        [example(0, [1, 1, 1, large, *[1] * 20, minus], [2], [3, 4], [5])])
    yield "sums in order", first, np.float32([[0, 2, 3.5, 5]]), EXACT
    thirds = mean_losses(Told(table), [example(0, [1, 0, 0], [2, 0, 0], [7, 7, 6], [0])])
    yield "means in fp32", thirds, np.float32([[1 / 3, 2 / 3, 20 / 3, 0]]), EXACT
    context = example(0, [1], [2], [3], [4], context=[5] * 7 + [nan, nan])
    yield ("the context has no part", mean_losses(Told(table), [context]),
           np.float32([[1, 2, 3, 4]]), EXACT)

    seen = []
    long = [example(i % 4, [1] * n, [2], [3], [4], context=[5] * 100)
            for i, n in enumerate((28, 3, 29, 199, 150))]
    model = Told(table, 3)
    check("of five, two are right",
          count_right(model, long, lambda *counts: seen.append(counts)) == (2, 5))
    check("widths: the longest of a batch, to a multiple of 128, at most T",
          model.widths == [(3, 300), (3, 128), (3, 128), (3, 128), (3, 128), (3, 128), (3, 128)],
          model.widths)
    check("progress", seen == [(3, 20), (6, 20), (9, 20), (12, 20), (15, 20), (18, 20), (20, 20)],
          seen)
    model = Told(table, 5)
    mean_losses(model, [example(0, *[[1] * (n - 100)] * 4, context=[5] * 100) for n in (129, 130)]
                + [example(0, [1], [2], [3], [4])])
    check("widths of short rows", model.widths == [(5, 256), (5, 256), (5, 128)], model.widths)
    check_refusal("too long", "-t 299: HellaSwag's example 3 has 299 tokens .*; expected -t 300 or "
                  "more", count_right, Told(table, 4, 299), long)


# ---- The program


MISTAKES = [  # the error, and the flags
    ("-t 35: HellaSwag's example 5 has 39 tokens", "-t", "35"),
              ("absent.bin: could not be read", "-e", "absent.bin"),
    ("none.bin: could not be read .*dev/data/hellaswag.py writes one", "--data", "none.bin"),
    ("is a file of HellaSwag's questions, .* expected a GPT-2 checkpoint or a Llama 3 c", "-e",
     "hellaswag.bin"),
    ("token 400, and the model has V = 331", "--data", "words.bin"),
              ("--nonsense; --help", "--nonsense"),
    ("--batch-size.* 0: expected at least 1", "-b", "0"), ("maxT = 40", "-t", "41"),
]


def test_command_line(folder):
    """The program prints the score that is computed here, for both architectures. By default T is
    the next multiple of 128, if the model has that many positions; a row of 128 tokens needs 256.
    Errors are one line."""
    os.chdir(folder)
    (folder / "words.bin").write_bytes(file_of([Example(0, np.int32([400]), [np.int32([1])] * 4)]))
    for stem, architecture, longer, T, calls in (
            ("gpt2_tiny", GPT2, [], 40,
             [(None,), (None, "-b", "3", "-t", "40", "--plain", "1"), *MISTAKES]),
            ("llama_tied", Llama3, [(100, (28, 1, 2, 3))], 256, [(None,)])):
        path = FIXTURES / f"{stem}.bin"
        c = architecture.Config.from_file(path)
        examples = random_examples(c.V, 2 * LENGTHS + longer)
        (folder / "hellaswag.bin").write_bytes(file_of(examples))
        model = architecture(c, make_device("emulated", "fp32", c), 1, T)
        model.set_parameters(read_parameters(path, c))
        right = sum(int(np.argmin(row)) == example.label
                    for row, example in zip(counted(model, examples), examples))
        line = f"HellaSwag: {right}/{len(examples)} = {right / len(examples):.6f}"
        for wish, *flags in calls:
            found = call("-e", path, "--data", "hellaswag.bin", "--device", "cpu", *flags,
                         program="dev.tools.score")
            status, text, error = found
            if wish:
                ok = status == 1 and re.fullmatch(f"error: .*({wish}).*\n", error)
            else:
                ok = status == 0 and f"B={3 if flags else 16} T={T}\n{line}\n" in text and not error
            check(f"score.py {stem}: {wish or line} {' '.join(flags)}", ok,
                  "" if ok else repr(found))
