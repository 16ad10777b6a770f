"""The difference between a student's file and a version of the lab, as a solution."""
import difflib
import re
from pathlib import Path

from dev.common.config import Config
from dev.common.cuda_source import without_comments
from dev.lab.exercises import EXERCISES, PREFIX, command
from dev.lab.ladder import find_ladder
from dev.lab.submission import DECLARATION, exercise_of, signature
from dev.lab.workers import sources_of
from prepro_tinyshakespeare import UserError


def lines_of_kernel(text, run):
    """(a kernel's first line, BLOCK's; the line behind its last; its parameters), or None. Where a
    brace is missing it reaches to the end."""
    code = without_comments(text)
    match = re.search(DECLARATION % run, code, re.S)
    if not match:
        return None
    first, depth = code[: match.start()].count("\n"), 0
    for i, line in enumerate(code.splitlines()[first:], first + 1):
        depth += line.count("{") - line.count("}")
        if depth == 0 and "}" in line:
            return first, i, match[2]
    return first, len(text.splitlines()), match[2]


def version_text(name, number, own):
    """(The lines of a version's helpers and comment; those of its kernel, which gets the name
    `own`; its parameters). Raises UserError."""
    run = find_ladder(name).versions[number - 1].run
    run = f"{name}{number}" if callable(run) else run
    for path in (*sources_of([name]), *Config.SOURCES):
        text = path.read_text(encoding="utf-8")
        found = lines_of_kernel(text, run)
        if found:
            break
    else:
        raise UserError(f"--solution {number}: version {number} has several kernels; read them in "
                        f"dev/lab/kernels/{name}.cu")
    lines, (first, end, parameters) = text.splitlines(), found
    above = first
    while above and lines[above - 1].startswith("//"):
        above -= 1
    before, kernel = "\n".join(lines[above:first]), "\n".join(lines[first:end])
    if path not in Config.SOURCES:  # those are compiled before a student's file
        helpers = re.findall(r"^(namespace (\w+) \{\n.*?^\}  // namespace \2\n)",
                             "\n".join(lines[:above]), re.M | re.S)
        used = [(whole, name) for whole, name in helpers if re.search(rf"\b{name}\b", kernel)]
        before = "\n".join([*(whole for whole, _ in used), before])
        for _, name in used:  # on a GPU the lab's .cu is compiled beside it
            before, kernel = (re.sub(rf"\b{name}\b", PREFIX + name, text)
                              for text in (before, kernel))
    kernel = re.sub(rf"\b{run}\b", own, kernel)
    return before.splitlines(), kernel.splitlines(), parameters


def types_of(parameters):
    return [re.findall(r"\w+", text.replace("__restrict__", "").replace("*", " pointer "))[:-1]
            for text in parameters]


def solution(path, number=0):
    """The lines of --solution: a diff from a student's file to a version of the lab; 0: the one
    that the exercise has its parameters from. Raises UserError."""
    (name, run), text = exercise_of(path), path.read_text(encoding="utf-8")
    exercise, versions = EXERCISES[name], find_ladder(name).versions
    like = int(re.search(r"\d+$", exercise.like)[0])
    number = number or like
    if not 1 <= number <= len(versions):
        raise UserError(f"--solution {number}: {name} has versions 1 to {len(versions)}")
    before, kernel, parameters = version_text(name, number, run)
    old, (first, end, _) = text.splitlines(), lines_of_kernel(text, run)
    if old[:first][-len(before) :] == before:  # it is there already
        before = []
    diff = [*difflib.unified_diff(old, [*old[:first], *before, *kernel, *old[end:]], str(path),
                                  f"version {number}", n=2, lineterm="")]
    if not diff:
        return [f"{path} is version {number} of the lab."]
    same = types_of(parameters.split(",")) == types_of(signature(exercise)[1])
    alone = any(version.run == exercise.like for version in versions) or (
        exercise.zeroed and exercise.items != "1")  # one block does all of it only in the exercise
    return [f"This is a solution: version {number} of the lab. - is a line of yours, + one of it.",
            *["Its parameters are not those of the exercise. Keep yours."] * (not same),
            *["The lab launches it together with other kernels: see "
              f"dev/lab/kernels/{name}.py. Yours has to do all of it."] * (not alone), "", *diff]


def file_of(what):
    """The student's file for the name of an exercise or of a file. Raises UserError."""
    path = Path(what if what.endswith(".cu") else f"{PREFIX}{what}.cu")
    if not path.exists():
        raise UserError(f"--solution compares with your file, and there is no {path}; "
                        f"{command(path.stem.removeprefix(PREFIX))} writes it")
    return path
