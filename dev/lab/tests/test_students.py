"""Kernels as students write them, right and wrong, and what the lab's judge says of each.

    python -m dev.lab.tests.test_students                 # some of them, others on another day
    python -m dev.lab.tests.test_students --all           # every one
    python -m dev.lab.tests.test_students softmax vector  # those with one of these words in their names

They are in dev/lab/tests/students. The first line of each says what a GPU makes of it, in three dtypes and at all
sizes: `// right`, or `// wrong: ` and a regular expression that the judge's message must match. If lines end in `//!`,
the message must name one of them. Each file is graded by itself, as a student does it.
"""
import datetime
import random
import re
import sys
import time
from pathlib import Path

from dev.lab import grade
from dev.lab.submission import Submission
from dev.lab.tests.student import said
from dev.tests.checks import check, run_tests, summary
from prepro_tinyshakespeare import UserError

STUDENTS = Path(__file__).parent / "students"
DRAWN = 3  # some 13 CPU seconds each


def expected(path):
    """(the words of the message or None if the kernel is right, the lines one of which it names)."""
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


def students(paths):
    """The judge accepts right kernels, and refuses each wrong one with its reason and its line."""
    for path in paths:
        begun = time.monotonic()
        wrong = mistake(path, judged(path))
        check(path.stem, not wrong, wrong or f"{time.monotonic() - begun:.0f} s")


def chosen(words):
    """The files that the command line names; without words a few that change from day to day."""
    paths = sorted(STUDENTS.glob("*.cu"))
    if "--all" in words:
        return paths
    if words:
        found = [path for path in paths if any(word in path.stem for word in words)]
        return found or sys.exit(f"error: {' '.join(words)}: no file of {STUDENTS} has one of these in its name")
    seed = datetime.date.today().toordinal()
    print(f"of {len(paths)} kernels, {DRAWN} drawn with seed {seed}")
    return random.Random(seed).sample(paths, DRAWN)


if __name__ == "__main__":
    run_tests([students], paths=chosen(sys.argv[1:]))
    sys.exit(summary())
