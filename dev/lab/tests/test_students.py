"""Kernels as students write them, right and wrong, and what the lab's judge says of each.

    pytest dev/lab/tests/test_students.py                   # some of them, others on another day
    pytest dev/lab/tests/test_students.py -m ""                 # every one
    pytest dev/lab/tests/test_students.py -m "" -k softmax  # those with this word in their names

They are in dev/lab/tests/students; changed_students.py makes more of these. The first line of each
says what a GPU makes of it, in three dtypes and at all sizes: `// right`, or `// wrong: ` and a
regular expression that the judge's message must match. If lines end in `//!`, the message must name
one of them. Each file is graded by itself, as a student does it.
"""
import datetime
import random
import re

import pytest

from dev.lab import grade
from dev.lab.submission import Submission
from dev.lab.tests.changed_students import texts
from dev.lab.tests.student import said
from dev.tests.checks import check
from train_gpt2 import UserError

DRAWN = 3  # some 13 CPU seconds each


def expected(path):
    """(the words of the message or None if the kernel is right, the lines one of which it
    names)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = re.fullmatch(r"// (right|wrong: (.+))", lines[0])
    assert found, f"{path.name}: begins with {lines[0]!r}; expected // right or // wrong: words"
    return found[2], {number for number, line in enumerate(lines, 1) if line.endswith("//!")}


def judged(path):
    """The lines that the judge says of a file, and none if it is right."""
    try:
        return grade.grade_file(Submission(path)).lines
    except UserError as e:
        return [f"error: {e}"]


def mistake(path, lines):
    """What is wrong with the judge's lines, or "" if nothing is."""
    wish, marked = expected(path)
    text = said(lines)
    if wish is None:
        return f"a right kernel is refused: {text}" if lines else ""
    if not lines:
        return f"it is accepted; expected: {wish}"
    if not re.search(wish, text):
        return f"expected {wish}: {text}"
    named = {int(number) for number in re.findall(r"line (\d+)", text)}
    if marked and not marked & named:
        return f"names lines {sorted(named)}, expected one of {sorted(marked)}: {text}"
    return ""


def each():
    """(name, text) of all: those that are not drawn today are for `-m longest`."""
    every = texts()
    drawn = random.Random(datetime.date.today().toordinal()).sample(sorted(every), DRAWN)
    return [pytest.param(name, text, id=name, marks=[pytest.mark.longest] * (name not in drawn))
            for name, text in every.items()]


@pytest.mark.parametrize("name, text", each())
def test_students(name, text, folder):
    """The judge accepts right kernels, and refuses each wrong one with its reason and its line."""
    path = folder / f"{name}.cu"
    path.write_text(text, "utf-8")
    wrong = mistake(path, judged(path))
    check(name, not wrong, wrong)
