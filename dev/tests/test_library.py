"""Test dev/tools/library.py: models against NumPy in float64 and against PyTorch's tensors,
trainings against the program's, and dev/tools/library.ipynb against the outputs that it is stored
with."""
import contextlib
import difflib
import functools
import io
import json
import os
import re
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

import train_gpt2
from dev.tools import library
from dev.common.config import Config, read_parameters
from dev.data import own_text
from dev.features import order
from dev.lab.gpt2_numpy import forward
from dev.lab.gpt2_numpy_backward import loss_and_gradients
from dev.tools.library import load, train
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import EXACT, FIXTURES, TINY, TOP, check, check_refusal, fast, words
from dev.tests.models import LIMITS, for_numpy, read_debug_state
from dev.tests.mutants import Copy
from dev.tests.trainings import call, place_of

NOTEBOOK = "dev/tools/library.ipynb"


def tiny():
    """(the config, the parameters in float64, without padding) of the fixture."""
    c = Config.from_file(TINY)
    return c, for_numpy(read_parameters(TINY, c), c.V)


@fast
def test_gpt2(device_name):
    """Logits, the loss and gradients are NumPy's, for any number of rows: one at a time, two at a
    time, and with logits that are computed in parts."""
    c, p = tiny()
    for rows, B, T, dtype in ((3, 1, 13, "fp32"), (4, 2, 7, "fp32"), (3, 2, 40, "bf16")):
        tokens, targets = words(c.V, rows, T), words(c.V, rows, T)
        with mock.patch.object(train_gpt2, "LOGIT_ROWS", 3):
            model = load(TINY, device=place_of(device_name), batch_size=B, dtype=dtype)
            logits = model.logits(tokens)
            loss = model.loss(tokens, targets)
            found = model.gradients(tokens.tolist(), targets)
        truth = [loss_and_gradients(p, *row, c.NH) for row in zip(tokens, targets)]
        wish = np.stack([forward(p, row, c.NH) for row in tokens])
        limit = LIMITS[dtype] if dtype == "fp32" else 5e-2
        name = f"{rows} rows, {dtype}:"
        yield f"{name} logits", logits, wish, limit
        yield f"{name} loss", loss, np.mean([loss for loss, _ in truth]), limit
        check(f"{name} names", found.keys() == vars(p).keys(), found.keys())
        for key, gradient in found.items():
            wish = np.mean([getattr(g, key) for _, g in truth], 0)
            yield f"{name} d{key}", gradient, wish, limit
        yield f"{name} twice", model.gradients(tokens, targets)["fcw"], found["fcw"], EXACT
        yield f"{name} loss again", model.loss(tokens, targets), loss, EXACT
        yield f"{name} one row", model.logits(tokens[1])[0], logits[1], limit
    one, same = (load("1x2x64", device=place_of(device_name)) for _ in range(2))
    check("random ones have GPT-2's sizes", (one.config.V, one.model.T) == (50257, 1024))
    tokens = words(50257, 2, 3)
    yield "and are the same each time", one.logits(tokens), same.logits(tokens), EXACT


def test_step(device_name):
    """Ten steps have PyTorch's losses; and two rows at a time, those of all at once."""
    c, _ = tiny()
    state = read_debug_state(FIXTURES / "gpt2_tiny_debug_state.bin", c)
    report = json.loads((FIXTURES / "gpt2_tiny_losses.json").read_text())
    adamw = {name: report[name] for name in ("learning_rate", "beta1", "beta2", "eps",
                                             "weight_decay")}
    for B in (1, len(state.x)):
        model = load(TINY, device=place_of(device_name), batch_size=B, dtype="fp32")
        found = [model.step(state.x, state.y, **adamw) for _ in report["losses"]]
        yield f"losses, {B} rows at a time", np.array(found), report["losses"], 1e-4


def test_llama(device_name):
    """A Llama 3 has PyTorch's logits, loss and gradients; a random one has its sizes."""
    path = FIXTURES / "llama_gqa.bin"
    c = Config3.from_file(path)
    state = read_debug_state(FIXTURES / "llama_gqa_debug_state.bin", c)
    model = load(path, device=place_of(device_name), dtype="fp32")
    yield "logits", model.logits(state.x), state.logits, LIMITS["fp32"]
    yield "loss", model.loss(state.x, state.y), state.loss, LIMITS["fp32"]
    found = model.gradients(state.x, state.y)
    for name in found.keys() - {"fcw"}:
        yield f"d{name}", found[name], state.gradients[name], LIMITS["fp32"]
    yield "dfcw", found["fcw"], state.gradients["fcw"], LIMITS["fp32"]
    made = load("llama3:1x2x64", device=place_of(device_name), seq_len=5)
    check("a random one", (made.config.L, made.config.NH, made.model.T) == (1, 2, 5), made.config)
    loss = made.loss(words(50257, 2, 5), words(50257, 2, 5))
    check("a random one's loss is about log(V)", abs(loss - np.log(50257)) < 1.2, loss)


def test_train(device_name, folder):
    """train gives the program's losses to the callback, and ends when it says so; the model goes on
    from there, and writes what its logits say."""
    os.chdir(folder)
    (folder / "own.txt").write_text("How much wood would a woodchuck chuck? \u00e9\n" * 20)
    own_text.main(["--input", "own.txt", "--vocab", "bytes"])
    name, data = "1x2x64", "data/own/own_train.bin"
    flags = dict(device=place_of(device_name), train_data=data, batch_size=2, seq_len=9, steps=6,
                 learning_rate=1e-2, val_every=3, dtype="fp32")
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    _, said, _ = call("-e", name, *arguments, "-s", 0, "--graph", 0)
    steps = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model = train(name, steps.append, graph=False, shuffle=None, **flags)
    check("nothing is printed", not out.getvalue(), out.getvalue())
    lines = re.findall(r"step +(\d+)/6 \| loss (\S+) \| norm +(\S+) \| lr (\S+)", said)
    shown = [(str(s.number), f"{s.loss:.6f}", f"{s.norm:.4f}", f"{s.learning_rate:.2e}")
             for s in steps]
    check("six steps are the program's", len(lines) == 6 and shown == lines, (shown, lines))
    validations = re.findall(r"val loss (\S+)", said)
    found = [f"{x:.6f}" for x in (steps[0].val_loss, steps[3].val_loss, model.val_loss)]
    check("validations are the program's", found == validations, (found, validations))

    tokens = model.encode("H\u00e9")
    check("words are bytes", bytes(tokens.tolist()) == "H\u00e9".encode(), tokens)
    check("and back", model.decode(tokens) == "H\u00e9")
    check("Windows' text", model.decode(model.encode("\ufeffH\r\no\r")) == "H\no\n")
    text = model.generate("H\r\no", 0)
    check("Windows' prompt", text == "H\no", repr(text))
    text, greedy = model.generate("How ", 4, temperature=0), [*b"How "]
    for _ in range(4):
        greedy.append(int(model.logits(greedy)[0, -1].argmax()))
    check("it writes what its logits say", text == model.decode(greedy), text)
    drawn = {model.generate("How ", 4, seed=seed) for seed in (1, 1, 2, 3)}
    check("other seeds draw other texts", 1 < len(drawn) < 4, drawn)
    tokens, targets = words(257, 3, 8), words(257, 3, 8)
    before = model.loss(tokens, targets)
    again = model.step(tokens, targets, learning_rate=1e-2)
    after = model.loss(tokens, targets)
    check("a step lowers the loss", abs(again - before) < 1e-5 and after < before, (before, after))

    ended = []
    train(name, lambda step: ended.append(step) or step.number == 2, **flags)
    late = device_name == "cuda"
    check("the callback ends it", len(ended) == 2 + late, len(ended))
    two, before = train(name, lambda step: step.number == 2, **flags), signal.getsignal(2)
    for count, seen in ((1, 2 + late), (2, 1)):  # the second ends the callback, too
        def interrupted(step, count=count):
            for _ in range(count * (step.number == 2)):
                signal.raise_signal(signal.SIGINT)
            ended.append(step)

        ended.clear()
        with pytest.raises(KeyboardInterrupt) as found:
            train(name, interrupted, **flags)
        check(f"Ctrl-C, {count} times", len(ended) == seen and signal.getsignal(2) == before)
        yield f"{count} times: the model so far", found.value.model.loss(tokens, targets), two.loss(
            tokens, targets), EXACT
    ThreadPoolExecutor(1).submit(train, name, ended.append, **flags).result()
    check("in a thread", len(ended) == 1 + 6, len(ended))
    once = train(name, lambda step: step.number == 1, **flags | dict(val_every=0, shuffle=True))
    check("0 and True are flags' values", (once.val_loss, once.training.settled()["shuffle"]) == (
        None, 1))
    dropped = train(name, lambda step: None, **flags | dict(dropout=0.5))
    losses = [dropped.loss(tokens, targets) for _ in range(2)]
    rows = dropped.logits(tokens).reshape(-1, 257).astype(np.float64)
    chances = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    found = -np.log(chances[np.arange(24), targets.ravel()]).mean()
    yield "nothing is dropped outside of training", np.array(losses), [found, found], 1e-5
    given = model.training.settled()
    check("so is False, and None is the default", (given["graph"], given["shuffle"]) == (0, 0))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(name, **flags | dict(output="log"))
    check("without a callback it prints", "step    6/6 | loss" in out.getvalue())
    kept = load("log", device=flags["device"], dtype="fp32")
    yield "a folder's model", kept.loss(tokens[:, :8], targets), train(
        name, lambda step: None, **flags).loss(tokens, targets), 1e-6
    check("has its words", kept.generate("How ", 4, temperature=0) == text)

    # the lines of the docstring and of the README, on models of this test
    def run_lines(text, pattern):
        lines = re.search(pattern, text, re.S)[1]
        for shown, own in (("gpt2_124M.bin", "log"), ("2x4x128", name), ("steps=500", "steps=2")):
            lines = lines.replace(shown, own)
        names = dict(tokens=tokens, targets=targets)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(textwrap.dedent(lines), names)
        return names, out.getvalue()

    names, printed = run_lines(library.__doc__, r"\n\n(    from .*?)\n\n")
    check("the docstring's lines work",
          re.search(r"To be, or not to be.*\n1 \d\.\d+\n2 \d\.\d+\n$", printed, re.S), printed)
    check("with the shapes that they tell", names["logits"].shape == (1, 9, 257) and
          names["gradients"]["wte"].shape == (257, 64))
    again, written = run_lines((TOP / "README.md").read_text("utf-8"),
                               r"## As a library\n\n(.*?)\n\n")
    check("the README's lines work, and write the same", printed.startswith(written) and written
          and again["model"].config == kept.config, written)


def test_refusals(device_name, folder):
    """Mistakes are refused in one line."""
    place = place_of(device_name)
    for wish, name, flags in (
        ("unrecognized arguments: --foo=1", TINY, dict(foo=1)),
        ("--dtype: invalid choice: 'fp9'", TINY, dict(dtype="fp9")),
        ("gpus=2: a library call is one process", TINY, dict(gpus=2)),
        ("sample=x: a library call .* train_gpt2.py --sample", TINY, dict(sample="x")),
        ("none.bin: could not be read", "none.bin", {}),
        ("-e x: expected a checkpoint, or a descriptor", "x", {}),
        ("-t 41: expected at most maxT = 40", TINY, dict(seq_len=41))):
        check_refusal("load", wish, lambda name=name, flags=flags: load(
            name, **dict(device=place) | flags))
    check_refusal("train", "chat=True: a library call", lambda: train("1x2x64", chat=True))
    model = load(TINY, device=place)
    row = np.zeros((1, 41), int)
    for wish, tokens in ((r"shape \(1, 41\): expected at most T = 40", row),
                         (r"type float64: expected integers \(B,T\)", np.zeros((1, 3))),
                         (r"shape \(1, 1, 3\)", np.zeros((1, 1, 3), int)),
                         (r"shape \(1, 0\)", row[:, :0]),
                         ("token 1 is 331", [0, 331]),
                         ("token 0 is -1", [-1, 0]), ("token 0 is 4294967296", [2**32, 0])):
        check_refusal("tokens", wish, model.logits, tokens)
    for call_of in (model.loss, model.gradients, model.step):
        check_refusal("targets", r"shape \(1, 3\) and targets of shape \(1, 4\)", call_of,
                      row[:, :3], row[:, :4])
        check_refusal("targets", "token 2 is 331", call_of, row[:, :3], [1, 2, 331])
    for call_of, wish, flags in (
        (model.generate, "--temperature: -1: expected", dict(text="x", count=2, temperature=-1)),
        (model.generate, "--temperature: nan: ", dict(text="x", count=2, temperature=np.nan)),
        (model.generate, "--top-p: 0: expected more than 0", dict(text="x", count=2, top_p=0)),
        (model.generate, "--sample-tokens: -1: expected at least 0", dict(text="x", count=-1)),
        (model.generate, "sample=b'x': expected a number, a text", dict(text=b"x", count=2)),
        (model.step, "--beta1: 1: expected .* below 1", dict(tokens=[1], targets=[1], beta1=1)),
        (model.encode, "sample=None: expected a number, a text", dict(text=None)),
        (model.logits, "tokens: .*: expected integers", dict(tokens=[[1], [1, 2]])),
        (load, r"batch_size=\[1\]: expected a number", dict(name=TINY, batch_size=[1]))):
        check_refusal("a value", wish, functools.partial(call_of, **flags))
    with contextlib.redirect_stdout(None):
        check_refusal("generate", "the tokens of a text in its vocabulary are not known",
                      model.generate, "To be", 3)


# ---- The notebook


def numbers_and_rest(text):
    """(numbers with a point or a percent sign, everything else) of an output, without the lines
    that say what is compiled."""
    text = re.sub(r"(?m)^compiling .*\n", "", text)
    pattern = r"\d+\.\d+|\d+(?=%)"
    return [float(x) for x in re.findall(pattern, text)], re.sub(pattern, "#", text)


def test_notebook(folder):
    """Its cells print, in a copy of the repository and without a GPU, what is stored with them: the
    same words, and about the same numbers. Another compiler or processor rounds otherwise, so what
    is generated has only to be the sonnet's."""
    top, names = Copy(folder / "copy").top, {"__name__": "__main__"}
    os.chdir(top / "dev")  # as Jupyter does
    cells = json.loads((top / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    with mock.patch.object(sys, "path", sys.path[:]), mock.patch.object(order, "has_gpu", bool):
        for cell in (cell for cell in cells if cell["cell_type"] == "code"):
            source = "".join(cell["source"])
            check("at most 100 columns", max(map(len, source.splitlines())) <= 100)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(source, names)
            stored = "".join("".join(output["text"]) for output in cell["outputs"])
            (found, rest), (wish, rest_stored) = map(numbers_and_rest, (out.getvalue(), stored))
            if "generate" in source:  # 20 letters of the sonnet in a row
                sonnet = names["Path"]("out/sonnet.txt").read_text()
                alike = difflib.SequenceMatcher(None, rest, sonnet, False).find_longest_match()
                rest = rest_stored if alike.size >= 20 else rest
            ok = rest == rest_stored and len(found) == len(wish)
            ok = ok and np.allclose(found, wish, rtol=0.5, atol=0.5)
            check(f"prints what is stored: {source[:30]!r}", ok, "" if ok else out.getvalue())
