"""Repairs: a right kernel of the lab with one bug planted in it. A student names the line of the
bug, and mends it.

    python -m dev.lab --exercise repair               # lists them
    python -m dev.lab --exercise repair:row_sum       # writes my_row_sum_repair.cu
    python -m dev.lab --exercise my_row_sum_repair.cu # checks it, as any kernel of the exercise

The bugs are of the kinds that mutants.py plants to test the tests: a bound, an index, a missing
term, a missing barrier.
"""
import difflib
import re
import textwrap
from typing import NamedTuple

from dev.common.cuda_source import without_comments
from dev.lab.exercises import PREFIX, command
from dev.lab.progress import read, version_text
from dev.lab.submission import template, write_new
from train_gpt2 import UserError

PREFACE = "repair:"  # of the name of a repair


class Repair(NamedTuple):
    """A bug. `old`, which is once in the kernel of a version, becomes `new`."""
    exercise: str
    version: int
    old: str
    new: str
    hint: str


REPAIRS = {row.exercise: row for row in (
    Repair("residual_forward", 1, "i < (size_t)", "i <= (size_t)",
           "Count the threads of the last block, and the items that are left for them."),
    Repair("shift", 1, "i % C ?", "i ?",
           "Which numbers of out have no left neighbour? There are N of them."),
    Repair("row_sum", 3, "        __syncthreads();\n", "",
           "In each step a thread reads what another one wrote in the step before."),
    Repair("transpose", 2, "tile[lane][c]", "tile[c][lane]",
           "Which index of the tile is the row of inp when it is written, and which one when it is "
           "read?"),
    Repair("group_scale", 2, "step = 16", "step = 8",
           "How far apart may two lanes of a group be? Follow the number of lane 0."),
    Repair("prefix_sum", 2, "step];\n            __syncthreads();\n", "step];\n",
           "A thread overwrites a sum that its right neighbour still has to read."),
    Repair("softmax_forward", 2, "v < V ? expf", "v <= V ? expf",
           "Look at the first column of the padding."),
    Repair("encoder_forward", 2, "row % T", "row / T",
           "The rows of a sequence come one after the other. What is the position of row T + 1?"),
    Repair("matmul_backward_bias", 1, "] += sum", "] = sum",
           "What does dbias hold before the launch?"),
    Repair("layernorm_forward", 3, "\n    sum = 0.0f;\n", "\n",
           "A row has two sums, one after the other. What does each of them begin with?"),
    Repair("crossentropy_forward", 2, "logf(sum) + top", "logf(sum)",
           "The sum is of e^(x - top). What is its logarithm?"),
    Repair("matmul_forward", 2, "w[j][k];\n        __syncthreads();\n", "w[j][k];\n",
           "A warp that is done with a tile goes on to load the next one. Into which array?"),
    Repair("encoder_backward", 1, "atomicAdd(dwte + (size_t)tokens[row] * C + c, d);",
           "dwte[(size_t)tokens[row] * C + c] += d;",
           "Two positions may have the same token."),
    Repair("rope_backward", 1, "right * cosine - left * sine", "right * cosine + left * sine",
           "A rotation back and the rotation itself must give the pair that was there."),
    Repair("gqa_forward", 1, "h / (NH / NKV)", "h % NKV",
           "With NH = 6 and NKV = 2, which query heads share a key head?"),
)}


def known(what):
    """The Repair of a name such as "repair:row_sum". Raises UserError."""
    name = what.removeprefix(PREFACE)
    if name not in REPAIRS:
        raise UserError(f"no repair of {name!r}; {command('repair')} lists them, such as "
                        f"{PREFACE}{next(iter(REPAIRS))}")
    return REPAIRS[name]


def path_of(repair):
    return f"{PREFIX}{repair.exercise}_repair.cu"


def kernel_of(repair):
    """The text of the right kernel, with its helpers and without comments."""
    before, kernel, _ = version_text(repair.exercise, repair.version, PREFIX + repair.exercise)
    before = [line for line in before if not line.startswith("//")]
    bare = without_comments("\n".join([*before, *kernel]))
    return "".join(f"{line.rstrip()}\n" for line in bare.splitlines())


def head_of(repair):
    """The comment above the kernel: the task of the exercise, and what to do here."""
    task = [line for line in template(repair.exercise).split("\nBLOCK(")[0].splitlines()
            if not re.match("// (?:Check it with|For a hint): ", line)]
    words = (f"This kernel has one bug. Find it, and write the number of its line below; then mend "
             "the line. If a line is missing, the number of the one before or behind it will do. "
             f"Check it with: {command(path_of(repair))}")
    lines = (f"// Repair {repair.exercise}", "//",
             *(f"// {line}" for line in textwrap.wrap(words, 116)), "//",
             "// The bug is in line:", "//", *task)
    return "\n".join(lines).removesuffix("\n//") + "\n\n"


def texts(repair):
    """(the text of the file, the same without the bug)."""
    right, head = kernel_of(repair), head_of(repair)
    if right.count(repair.old) != 1:
        raise UserError(f"repair of {repair.exercise}: {repair.old!r} is there "
                        f"{right.count(repair.old)} times, expected once")
    return head + right.replace(repair.old, repair.new), head + right


def lines_of(repair):
    """[(number, the line there, or "" where one is missing, the line that should be there)]: the
    lines of the file that count as the bug's."""
    planted, right = (text.splitlines() for text in texts(repair))
    for how, i, _, j, _ in difflib.SequenceMatcher(None, planted, right, False).get_opcodes():
        if how == "insert":
            return [(i, "", right[j].strip()), (i + 1, "", right[j].strip())]
        if how == "replace":
            return [(i + 1, planted[i].strip(), right[j].strip())]
    raise UserError(f"repair of {repair.exercise}: it changes no line")


def listed():
    """The lines of the list of repairs."""
    done, names = read()[0]["mended"], list(REPAIRS)
    return [*(f"{'*' if name in done else ' '} {PREFACE}{name}" for name in names), "",
            *["* You have mended it."] * bool(done),
            f"{command(PREFACE + names[0])} writes a file with a bug: name its line there, mend "
            "it, and check the file."]


def write_file(repair):
    """Writes the file, and returns its path. Raises UserError."""
    return write_new(path_of(repair), texts(repair)[0])


def of(file):
    """The Repair that a Submission comes from, or None."""
    found = re.match(r"// Repair (\w+)\n", file.text)
    return REPAIRS.get(found[1]) if found else None


def verdict(file, right):
    """(lines on the line that a student has named in a file of a repair, whether it is named and
    mended). right: whether the kernel is right now. ([], False) of another file."""
    repair = of(file)
    if not repair:
        return [], False
    named = re.search(r"^// The bug is in line: *(\d+)", file.text, re.M)
    places = lines_of(repair)
    if not named:
        return ["Which line was it? Write its number behind \"The bug is in line:\", as the lines "
                "were numbered at first" if right else
                "Which line is it? Write its number behind \"The bug is in line:\""], False
    if int(named[1]) in [number for number, *_ in places]:
        return [f"line {named[1]} is the one: you have found and mended the bug" if right else
                f"line {named[1]} is the one. Now mend it"], right
    if not right:
        return [f"it is not line {named[1]}. {repair.hint}"], False
    number, was, wanted = places[-1]
    return [f"it works, but it was not line {named[1]}: " +
            (f"line {number} was: {was}" if was else f"before line {number} was missing: {wanted}")
            ], False


def solution(repair):
    """The lines that show the bug and what should be there."""
    number, was, wanted = lines_of(repair)[-1]
    return [f"- {number}: {was}"] * bool(was) + [f"+ {number}: {wanted}"]
