"""Test dev/lab/first_evening.ipynb: run its cells as a student without a GPU would.

    pytest dev/lab/tests/test_first_evening.py --checked 99  # all cells, in two minutes
    python -m dev.lab.tests.test_first_evening  # runs all, and stores what they print in it

A notebook is JSON, so Jupyter is not needed: its code cells run in one namespace, in order.
"""
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from dev.tests.checks import TOP, check
from dev.tests.mutants import Copy
from train_gpt2 import replace_file

NOTEBOOK = "dev/lab/first_evening.ipynb"
RIGHT = r"right, at all sizes, in fp32 and bf16\n"
SAYS = (  # what begins a code cell, and what it prints
    ("import importlib", "^$"),
    ('task("residual_forward")',
     r"^// Exercise residual_forward: .*\n    real\* out, const real\* inp1, .*{\n\n}\n"),
    ('check("my_residual_forward.cu"',
     r"it reads inp[12]\[2592\], and the last is inp[12]\[2591\] \(27 rows of 96 numbers\)\n"
     r" +line 5: from_float\(out\[i\], .*\n +at the sizes B=3,T=9,C=96, in fp32\n"),
    ('check("my_residual_forward.cu"', RIGHT),
    ('check("my_gelu_forward.cu"', r"out\[0,0\] was never written"),
    ('check("my_gelu_forward.cu"', RIGHT),
    ('check("my_gelu_forward.cu"', r"wrong: out\[.* is nan, expected "),
    ('check("my_softmax_forward.cu"', r"out\[0,0\] was never written"),
    ('check("my_softmax_forward.cu"', RIGHT),
    ('check("my_softmax_forward.cu"', RIGHT),
    ('task("shift")', r"Exercise shift: .*void my_shift\("),
    ('check("my_shift.cu"', r"out\[0,0\] was never written"),
    ("lab()", r" 1  residual_forward .* shift .* attention_backward "),
)
TITLE = "#@title A solution"  # the first line of a cell that is folded


@pytest.fixture
def checked(pytestconfig):
    return pytestconfig.option.checked


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def read(top):
    return json.loads((top / NOTEBOOK).read_text(encoding="utf-8"))


def code_of(cell):
    """A cell's Python, without its title."""
    lines = "".join(cell["source"]).splitlines(True)
    return "".join(lines[lines[0].startswith(TITLE) :])


@contextlib.contextmanager
def a_student(top):
    """A function that runs cells in a copy of the repository, as Jupyter does, and gives what each
    prints."""
    names = {"__name__": "__main__"}
    os.chdir(top / "dev/lab")
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", sys.path[:]):
        os.environ.pop("PYTHONPATH", None)  # the notebook finds the repository by itself

        def run(cell):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec("".join(cell["source"]), names)
            return out.getvalue()

        yield run


def test_stored(folder):
    """It is stored with what its cells print, its solutions are folded, and each cell is Python of
    at most 100 columns."""
    cells = code_cells(read(TOP))
    check("as many code cells as expected", len(cells) == len(SAYS), f"{len(cells)}")
    for number, (cell, (begins, wish)) in enumerate(zip(cells, SAYS), 1):
        code, out = code_of(cell), "".join(
            line for output in cell["outputs"] for line in output["text"])
        compile(code, begins, "exec")
        narrow = max(map(len, code.splitlines())) <= 100
        check(f"begins with {begins}", code.startswith(begins) and narrow)
        check("  and has printed what it prints", re.search(wish, out, re.S) and
              cell["execution_count"] == number and "/tmp" not in out, out[-300:])
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
        check("  and is folded if it is a solution", folded == ("".join(
            cell["source"]).startswith(TITLE)) == (wish == RIGHT), cell["metadata"])


def test_executed(folder, checked):
    """Its cells, and this many of those that call the checker, print in a copy of the repository
    what the text around them says."""
    top = Copy(folder / "copy").top
    with a_student(top) as run:
        for cell, (begins, wish) in zip(code_cells(read(top)), SAYS):
            if begins.startswith("check("):
                checked -= 1
                if checked < 0:
                    continue
            out = run(cell)
            ok = re.search(wish, out, re.S)
            check(f"{begins} prints {wish[:24]}", ok, "" if ok else out)
    written = [*(top / "out/first_evening").iterdir()]
    check("kernels are in out/", top / "out/first_evening/my_residual_forward.cu" in written)


def store():
    """Run all cells in a copy of the repository, and store what they print."""
    notebook = read(TOP)
    with tempfile.TemporaryDirectory() as folder, a_student(Copy(Path(folder) / "copy").top) as run:
        for number, cell in enumerate(code_cells(notebook), 1):
            out = run(cell)
            print(f"{number}: {out.splitlines()[-1:]}", flush=True)
            cell["execution_count"], cell["outputs"] = number, [dict(
                name="stdout", output_type="stream", text=out.splitlines(True))] * bool(out)
        os.chdir(TOP)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    replace_file(TOP / NOTEBOOK, [text.encode()])


if __name__ == "__main__":
    store()
