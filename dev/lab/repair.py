"""Repairs: a right kernel of the lab with one bug planted in it. A student names the line of the
bug, and mends it.

    python -m dev.lab --exercise repair               # lists them
    python -m dev.lab --exercise repair:row_sum       # writes my_row_sum_repair.cu
    python -m dev.lab --exercise my_row_sum_repair.cu # checks it, as any kernel of the exercise

The bugs are of the kinds that mutants.py plants to test the tests: a bound, an index, a missing
term, a missing barrier. Each is the `repair` of an Exercise.
"""
import difflib
import functools
import re
import textwrap

from dev.common.cuda_source import without_comments
from dev.lab.exercises import PREFIX, command, exercise_names, find_exercise
from dev.lab.progress import read, version_text
from dev.lab.submission import template, write_new
from train_gpt2 import UserError

PREFACE = "repair:"  # of the name of a repair


@functools.cache
def repairs():
    """{name: the Exercise} of those that have a bug to find."""
    return {name: found for name in exercise_names() if (found := find_exercise(name)).repair}


def known(what):
    """The Exercise of a name such as "repair:row_sum". Raises UserError."""
    name = what.removeprefix(PREFACE)
    if name not in repairs():
        raise UserError(f"no repair of {name!r}; {command('repair')} lists them, such as "
                        f"{PREFACE}{next(iter(repairs()))}")
    return repairs()[name]


def path_of(exercise):
    return f"{PREFIX}{exercise.kernel}_repair.cu"


def kernel_of(exercise):
    """The text of the right kernel, with its helpers and without comments."""
    name = exercise.kernel
    before, kernel, _ = version_text(name, exercise.repair.version, PREFIX + name)
    before = [line for line in before if not line.startswith("//")]
    bare = without_comments("\n".join([*before, *kernel]))
    return "".join(f"{line.rstrip()}\n" for line in bare.splitlines())


def head_of(exercise):
    """The comment above the kernel: the task of the exercise, and what to do here."""
    task = [line for line in template(exercise.kernel).split("\nBLOCK(")[0].splitlines()
            if not re.match("// (?:Check it with|For a hint): ", line)]
    words = (f"This kernel has one bug. Find it, and write the number of its line below; then mend "
             "the line. If a line is missing, the number of the one before or behind it will do. "
             f"Check it with: {command(path_of(exercise))}")
    lines = (f"// Repair {exercise.kernel}", "//",
             *(f"// {line}" for line in textwrap.wrap(words, 116)), "//",
             "// The bug is in line:", "//", *task)
    return "\n".join(lines).removesuffix("\n//") + "\n\n"


def texts(exercise):
    """(the text of the file, the same without the bug)."""
    right, head, old = kernel_of(exercise), head_of(exercise), exercise.repair.old
    if right.count(old) != 1:
        raise UserError(f"repair of {exercise.kernel}: {old!r} is there {right.count(old)} times, "
                        "expected once")
    return head + right.replace(old, exercise.repair.new), head + right


def lines_of(exercise):
    """[(number, the line there, or "" where one is missing, the line that should be there)]: the
    lines of the file that count as the bug's."""
    planted, right = (text.splitlines() for text in texts(exercise))
    for how, i, _, j, _ in difflib.SequenceMatcher(None, planted, right, False).get_opcodes():
        if how == "insert":
            return [(i, "", right[j].strip()), (i + 1, "", right[j].strip())]
        if how == "replace":
            return [(i + 1, planted[i].strip(), right[j].strip())]
    raise UserError(f"repair of {exercise.kernel}: it changes no line")


def listed():
    """The lines of the list of repairs."""
    done, names = read()[0]["mended"], list(repairs())
    return [*(f"{'*' if name in done else ' '} {PREFACE}{name}" for name in names), "",
            *["* You have mended it."] * bool(done),
            f"{command(PREFACE + names[0])} writes a file with a bug: name its line there, mend "
            "it, and check the file."]


def write_file(exercise):
    """Writes the file, and returns its path. Raises UserError."""
    return write_new(path_of(exercise), texts(exercise)[0])


def of(file):
    """The Exercise whose repair a Submission comes from, or None."""
    found = re.match(r"// Repair (\w+)\n", file.text)
    return repairs().get(found[1]) if found else None


def verdict(file, right):
    """(lines on the line that a student has named in a file of a repair, whether it is named and
    mended). right: whether the kernel is right now. ([], False) of another file."""
    exercise = of(file)
    if not exercise:
        return [], False
    named = re.search(r"^// The bug is in line: *(\d+)", file.text, re.M)
    places = lines_of(exercise)
    if not named:
        return ["Which line was it? Write its number behind \"The bug is in line:\", as the lines "
                "were numbered at first" if right else
                "Which line is it? Write its number behind \"The bug is in line:\""], False
    if int(named[1]) in [number for number, *_ in places]:
        return [f"line {named[1]} is the one: you have found and mended the bug" if right else
                f"line {named[1]} is the one. Now mend it"], right
    if not right:
        return [f"it is not line {named[1]}. {exercise.repair.hint}"], False
    number, was, wanted = places[-1]
    return [f"it works, but it was not line {named[1]}: " +
            (f"line {number} was: {was}" if was else f"before line {number} was missing: {wanted}")
            ], False


def solution(exercise):
    """The lines that show the bug and what should be there."""
    number, was, wanted = lines_of(exercise)[-1]
    return [f"- {number}: {was}"] * bool(was) + [f"+ {number}: {wanted}"]
