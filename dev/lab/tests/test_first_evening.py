"""Test dev/lab/first_evening.ipynb: run its cells as a student without a GPU would.

    pytest dev/lab/tests/test_first_evening.py --checked 99  # all cells, in two minutes

A notebook is JSON, so Jupyter is not needed: its code cells run in one namespace, in order.
"""
import contextlib
import io
import json
import os
import re
import sys
from unittest import mock

import pytest

from dev.tests.checks import TOP, check
from dev.tests.mutants import Copy

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
    ('check("my_gelu_forward.cu"', RIGHT),
    ('check("my_gelu_forward.cu"', r"wrong: out\[.* is nan, expected "),
    ('check("my_softmax_forward.cu"', RIGHT),
    ('check("my_softmax_forward.cu"', RIGHT),
    ('task("shift")', r"Exercise shift: .*void my_shift\("),
    ('check("my_shift.cu"', r"out\[0,0\] was never written"),
    ("lab()", r" 1  residual_forward .* shift .* attention_backward "),
)


@pytest.fixture
def checked(pytestconfig):
    return pytestconfig.option.checked


def cells_of(top):
    """The notebook's code cells."""
    cells = json.loads((top / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_stored(folder):
    """It is stored without outputs, and each cell is Python of at most 100 columns."""
    cells = cells_of(TOP)
    check("no outputs", not any(cell["outputs"] or cell["execution_count"] for cell in cells))
    check("as many code cells as expected", len(cells) == len(SAYS), f"{len(cells)}")
    for cell, (begins, _) in zip(cells, SAYS):
        code = "".join(cell["source"])
        compile(code, begins, "exec")
        narrow = max(map(len, code.splitlines())) <= 100
        check(f"begins with {begins}", code.startswith(begins) and narrow)


def test_executed(folder, checked):
    """Its cells, and this many of those that call the checker, print in a copy of the repository
    what the text around them says."""
    top, names = Copy(folder / "copy").top, {"__name__": "__main__"}
    os.chdir(top / "dev/lab")  # as Jupyter does
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", sys.path[:]):
        os.environ.pop("PYTHONPATH")  # the notebook finds the repository by itself
        for cell, (begins, wish) in zip(cells_of(top), SAYS):
            if begins.startswith("check("):
                checked -= 1
                if checked < 0:
                    continue
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec("".join(cell["source"]), names)
            ok = re.search(wish, out.getvalue(), re.S)
            check(f"{begins} prints {wish[:24]}", ok, "" if ok else out.getvalue())
    written = [*(top / "out/first_evening").iterdir()]
    check("kernels are in out/", top / "out/first_evening/my_residual_forward.cu" in written)
