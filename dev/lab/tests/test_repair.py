"""Test the repairs: a kernel of the lab with a planted bug, the line that a student names, and what
is said of it."""
import difflib
import json
import re
from unittest import mock

import pytest

from dev.lab import grade, progress, repair
from dev.lab.submission import Submission
from dev.lab.tests.student import exercise, said
from dev.lab.tests.test_exercise import grade_together, refused
from dev.tests.checks import check, fast

# The lines of the bugs, as read by a person
LINES = {"row_sum": ("for (int half", "if (threadIdx.x < half)"),
         "prefix_sum": ("if (threadIdx.x >= step)", "sums[threadIdx.x] = sum"),
         "matmul_forward": ("for (int k = 0; k < 32", "}"),
         "softmax_forward": ("from_float(out[", "v <= V"),
         "layernorm_forward": ("float m =", "for (int c = lane"),
         "gqa_forward": ("const real *k", "h % NKV")}
RACES = "encoder_backward",  # that only the race finder sees, since a CPU runs one thread at a time


def named(text, number):
    return text.replace("bug is in line:", f"bug is in line: {number}")


@fast
def test_lines():
    """Each repair differs from the right kernel in one line, and names it; no comment tells it."""
    for name, row in repair.repairs().items():
        planted, right = repair.texts(row)
        numbers = [number for number, *_ in repair.lines_of(row)]
        lines = planted.splitlines()
        changed = [line for line in difflib.ndiff(lines, right.splitlines()) if line[0] in "+-"]
        check(f"{name}: one line", len(changed) <= 2 and set(numbers) & {
            i for i, line in enumerate(lines, 1) if f"- {line}" in changed} or
              len(changed) == 1 and len(numbers) == 2, changed)
        kernel = planted[planted.index("\nBLOCK(") :]
        check(f"{name}: no comment, and no line too long", "//" not in kernel and max(
            map(len, lines)) <= 122, max(map(len, lines)))
        for number, word in zip(numbers if len(numbers) > 1 else 2 * numbers, LINES.get(name, ())):
            check(f"{name}: line {number}", word in lines[number - 1], lines[number - 1])


def test_planted(folder):
    """Each bug is noticed; without them the kernels are the lab's, which other tests check."""
    found = grade_together(folder, {f"my_{name}": repair.texts(row)[0]
                                    for name, row in repair.repairs().items()})
    for name in repair.repairs():
        check(name, (found[f"my_{name}"] == []) == (name in RACES), found[f"my_{name}"])


@pytest.mark.longest
def test_judged(folder):
    """The judge refuses each, and its message names the line in most."""
    hits = 0
    for name, row in repair.repairs().items():
        path = folder / f"my_{name}_repair.cu"
        path.write_text(repair.texts(row)[0])
        lines = grade.grade_file(Submission(path)).lines
        check(f"{name} is refused", lines)
        hits += bool({number for number, *_ in repair.lines_of(row)} &
                     {*map(int, re.findall(r"line (\d+)", said(lines)))})
    check("messages that name the line", hits >= 4, hits)


@fast
def test_command(folder):
    """The list, the file, a hint, the answer, and what is said of a line."""
    status, text, _ = exercise(folder, "repair")
    check("the list", status == 0 and all(
        f"  repair:{name}\n" in text for name in repair.repairs()), text)
    status, text, _ = exercise(folder, "repair:softmax_forward")
    path = folder / "my_softmax_forward_repair.cu"
    check("a file", status == 0 and path.exists() and path.name in text, text)
    planted, right = repair.texts(repair.repairs()["softmax_forward"])
    check("  with the bug", path.read_text() == planted != right)
    refused(folder, "never over a file", "exists already", "repair:softmax_forward")
    refused(folder, "an unknown one", "no repair of 'sofmax'", "repair:sofmax")
    _, text, _ = exercise(folder, "repair:softmax_forward", "--hint")
    check("its hint", text == "Look at the first column of the padding.\n", text)
    _, text, _ = exercise(folder, "repair:softmax_forward", "--solution")
    check("its answer", re.fullmatch(
        r"- 56: .*v <= V \? expf.*\n\+ 56: .*v < V \? expf.*\n", text), text)
    _, text, _ = exercise(folder, "repair:row_sum", "--solution")
    check("the answer where a line is missing", text == "+ 41: __syncthreads();\n", text)
    refused(folder, "the hint of all", "the name of one before --hint", "repair", "--hint")
    refused(folder, "a number", "a repair has one solution", "repair:row_sum", "--solution", "2")
    refused(folder, "a slip", "did you mean repair?", "repairs")

    wrong = grade.Judgement(["wrong: out[0,0] is 1"], {}, ["fp32"], [])
    good = grade.Judgement([], dict.fromkeys((grade.BOUNDS, grade.RACES, grade.GPU), True),
                           ["fp32"], [])
    for text, judged, wish, ends in (
            (planted, wrong, "wrong: .*Which line is it", 1),
            (named(planted, 56), wrong, "line 56 is the one. Now mend it", 1),
            (named(planted, 55), wrong, "not line 55. Look at the first column", 1),
            (right, good, "Which line was it", 1),
            (named(right, 55), good, "works, but it was not line 55: line 56 was: from_float", 1),
            (named(right, 56), good, "found and mended", 0)):
        path.write_text(text)
        with mock.patch("dev.lab.grade.grade_file", return_value=judged):
            status, said_, _ = exercise(folder, path.name)
        check(f"it says {wish}", status == ends and re.search(wish, said_, re.S), said_)
        there = progress.FILE.exists() and json.loads(progress.FILE.read_text())
        check("  and notes it", (there and there["mended"] == ["softmax_forward"]) == (ends == 0)
              and not (there and there["solved"]), there)
    _, text, _ = exercise(folder, "repair")
    check("the list marks it", "* repair:softmax_forward\n" in text and text.count("*") == 2, text)
    path = folder / "my_row_sum_repair.cu"
    planted, right = repair.texts(repair.repairs()["row_sum"])
    for number, wish in ((40, "found and"), (41, "found and"), (39, "before line 41 was missing")):
        path.write_text(named(right, number))
        lines, done = repair.verdict(Submission(path), True)
        check(f"a missing line, named {number}",
              re.search(wish, lines[0]) and done == (number > 39), lines)
        check("  and not mended", not repair.verdict(Submission(path), False)[1])
    path.write_text(right.replace("// Repair", "// repair"))
    check("no repair", repair.verdict(Submission(path), True) == ([], False))
