"""A student's file: the one that an exercise begins with, and a Submission, which has read it.
"""
import difflib
import functools
import importlib
import inspect
import itertools
import math
import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.common.config import Config
from dev.common.cuda_source import checked_kernels, parameters_of, without_comments
from dev.lab import formulas, gpt2_numpy
from dev.lab.exercises import (HELPERS, PREFIX, checks_of, command, exercise_names, find_exercise,
                               version_of)
from dev.lab.ladder import KERNELS, Draw, find_ladder
from train_gpt2 import UserError

MODEL = Config(C=768, NH=12)  # kernels.cu is compiled for it, before a student's file: HS is 64
DECLARATION = (r'(BLOCK\([^;{}]*?\))\s*extern "C" __global__ void\s+'
               r"(?:__launch_bounds__\(.*?\)\s*)?%s\(([^)]*)\)")
# Words for which tf32 is not fp32.
TENSOR_CORES = r"\b(mma\w*|load_matrices\w*|multiply_transposed|TF32)\b|\btiles::"


def signature(exercise):
    """(BLOCK line, [parameter]) of the lab's kernel, from the text of its .cu."""
    text = (KERNELS / f"{exercise.kernel}.cu").read_text(encoding="utf-8")
    block, parameters = re.search(DECLARATION % exercise.like, text).groups()
    return block, [" ".join(parameter.replace("__restrict__ ", "").split())
                   for parameter in parameters.split(",")]


def own_labels(exercise, ladder):
    """{an argument's name in the lab: its name in a student's file}."""
    labels = [re.findall(r"\w+", parameter)[-1] for parameter in signature(exercise)[1]]
    return dict(zip(version_of(exercise, ladder).args.split(), labels))


class Submission:
    """A student's file, read once. Only its text is there at once: a file that does not compile has
    one, too. The rest is found when it is asked for, and raises a UserError if it is wrong."""

    def __init__(self, path):
        self.shown = Path(path)  # as it was typed
        self.path = Path(os.path.abspath(path))
        try:
            self.text = self.path.read_text(encoding="utf-8-sig")
        except OSError as e:
            raise UserError(f"{path}: could not be read ({e.strerror}); `python -m dev.lab "
                            "--exercise NAME` writes a file to fill in") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: expected text") from None
        self.lines = self.text.splitlines()
        self.code = without_comments(self.text)  # comments are blanked; lines keep their numbers

    def __str__(self):
        return str(self.shown)

    def quoted(self, number):
        """Such as "line 12: out[i] = x;"."""
        there = 0 < number <= len(self.lines)
        return f"line {number}: {self.lines[number - 1].strip()}" if there else f"line {number}"

    def line_of(self, text):
        """The first of its lines that a compiler's or sanitizer's text names, quoted, or ""."""
        match = re.search(rf"{re.escape(str(self.path))}:(\d+)", text)
        return self.quoted(int(match[1])) if match else ""

    def numbers_with(self, pattern):
        """The numbers of the lines of code in which a pattern is found."""
        return [i for i, line in enumerate(self.code.splitlines(), 1) if re.search(pattern, line)]

    def quoted_with(self, pattern):
        return [self.quoted(number) for number in self.numbers_with(pattern)]

    @functools.cached_property
    def names(self):
        """(the name of the exercise, the name of the kernel)."""
        known = sorted(exercise_names(), key=len, reverse=True)
        found = {kernel: next((name for name in known if kernel.startswith(PREFIX + name)), None)
                 for kernel in re.findall(r"\b(my_\w+)\s*\(", self.code)}
        found = {kernel: name for kernel, name in found.items() if name}
        whole = [kernel for kernel in found if re.search(DECLARATION % kernel, self.code, re.S)]
        if len(whole) > 1:
            raise UserError(f"{self}: has {', '.join(whole)}; expected one kernel of an exercise")
        if whole:
            return found[whole[0]], whole[0]
        if found:
            name = next(iter(found))
            raise UserError(f"{self}: there is no kernel {name} with a BLOCK line directly over "
                            "it; expected: BLOCK(256, threads), and on the next line: "
                            f'extern "C" __global__ void {name}(...)')
        names = [PREFIX + name for name in exercise_names()]
        kernels = r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s*)?(\w+)"
        there = [*re.findall(kernels, self.code), self.path.stem]
        near = [name for each in there for name in difflib.get_close_matches(each, names, 1)]
        raise UserError(f"{self}: has no kernel of an exercise; expected one such as "
                        f"{[*near, *names][0]}; {command('')} lists them")

    @property
    def exercise(self):
        return find_exercise(self.names[0])

    @property
    def ladder(self):
        return find_ladder(self.names[0])

    @property
    def run(self):
        """The kernel's name."""
        return self.names[1]

    @functools.cached_property
    def kernel(self):
        """The train_gpt2.Kernel."""
        # Not train_gpt2.read_kernels: this one says what is wrong with a BLOCK. The types of the
        # parameters are compared with the exercise's in version.
        kernels = checked_kernels([self.path], types=False)
        if self.run in kernels:
            return kernels[self.run]
        match = re.search(DECLARATION % self.run, self.code, re.S)
        block = " ".join(match[1].split())
        hint, example = "where the first is a number", "BLOCK(256, threads)"
        plane = r"BLOCK\( *(?:dim3 *\( *(\d+) *, *(\d+) *\)|(\d+) *\* *(\d+)) *,"
        if sizes := re.match(plane, block):
            one, other = map(int, filter(None, sizes.groups()))
            example = f"BLOCK({one * other}, {block[sizes.end() :].strip()}"
        elif block.count("(") > 1:
            hint = "without parentheses"
        if "dim3" in block or re.search(r"\bthreadIdx\.[yz]\b", self.code):
            example += ("; blocks are one-dimensional here, so write threadIdx.x % 32 and "
                        "threadIdx.x / 32 for the x and y of a tile of 32 columns")
        line = self.code[: match.start()].count("\n") + 1
        raise UserError(f"{self.path.name}, line {line}: {block}: expected BLOCK(threads, items), "
                        f"{hint}, such as {example}")

    @functools.cached_property
    def version(self):
        """The Version that launches the student's kernel in place of the lab's."""
        exercise, ladder, kernel = self.exercise, self.ladder, self.kernel
        _, expected = signature(exercise)
        kinds = [None if "*" in text else text.split()[0] for text in expected]
        if kinds != [None if array else kind for _, kind, array, _ in parameters_of(kernel)]:
            found = ", ".join(" ".join(text.replace("__restrict__", "").split())
                              for text in kernel.parameters)
            raise UserError(f"{self}: {self.run} has the wrong parameters, ({found}); expected "
                            f"({', '.join(expected)})")
        if not 1 <= kernel.threads <= 1024:
            raise UserError(f"{self}: BLOCK({kernel.threads}, ...): a block has at least one "
                            "thread, and at most 1024")
        version = version_of(exercise, ladder)
        plane = len(kernel.covers) == 2 and exercise.plane
        items = exercise.plane if plane else version.items
        if len(kernel.covers) != len(items.split(",")):
            more = ", and how many along y" if "," in items else ""
            raise UserError(f"{self}: BLOCK over {self.run}: expected BLOCK(threads, items that a "
                            f"block covers{more})")
        version = version._replace(
            run=self.run, items=items, threads=self.block_sizes(),
            atomics=bool(re.search(r"\batomic[A-Z]", self.code)))

        def zero_and_run(device, a):
            device.zero(getattr(a, exercise.zeroed))
            version.launch(device, a, ladder)

        return version._replace(run=zero_and_run) if exercise.zeroed else version

    def block_sizes(self):
        """The block sizes to check: the one in BLOCK, and half of it if BLOCK counts items in
        threads and the code has no number that may stand for the block size, so that it has to work
        with any."""
        block = re.search(DECLARATION % self.run, self.code, re.S)[1]
        numbers = re.findall(r"\b(?:0[xX][0-9a-fA-F]+|[1-9]\d*)\b", self.code.replace(block, ""))
        numbers, threads = {int(number, 0) for number in numbers}, self.kernel.threads
        own = {threads // part - less for part in (1, 2, 32) for less in (0, 1)}
        fixed = threads % 64 or "threads" not in block or "<<" in self.code
        if fixed or (own - {0, 1}) & numbers:
            return (threads,)
        return threads, threads // 2

    @property
    def dtypes(self):
        """The dtypes to check it in: tf32 is fp32 unless the file uses tensor cores."""
        own = self.version.dtypes
        tf32 = "fp32" in own and re.search(TENSOR_CORES, self.code)
        return [*own, *["tf32"] * bool(tf32)]


# ---- The file that an exercise begins with: the task and the arguments, and an empty kernel


def symbols(given, checks_given, shapes):
    """The shape of an array in the names of the problem, right for all checks, such as "N,Vp"."""
    names = [name for name, value in given.items()
             if type(value) is int and all(name in each for each in checks_given)]
    terms = [*names, *(f"{a}+1" for a in names),
             *(f"{a}*{b}" for a, b in itertools.product("234", names)),
             *(f"{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"3*{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"({a}+2*{b})" for a, b in itertools.permutations(names, 2)),
             *(f"({a}+2*{b})*{c}" for a, b, c in itertools.permutations(names, 3))]

    def symbol(sizes):
        values = [dict(each) for each in checks_given]
        if len(set(sizes)) == 1 and sizes[0] < 4:
            return str(sizes[0])
        preferred = sorted(terms, key=lambda term: (len(term) > 2, term not in ("N", "B", "T")))
        good = [term for term in preferred
                if [eval(term, {}, value) for value in values] == list(sizes)]
        return re.sub(r"^\(([^()]*)\)$", r"\1", good[0]) if good else str(sizes[0])

    return ",".join(symbol(sizes) for sizes in zip(*shapes))


def tables_of(exercise, ladder):
    """For each check the inputs and the truths of the problem, and the scratch memory of the
    exercise."""
    for sizes in checks_of(exercise, ladder):
        given, truth, *_ = ladder.problem(Draw(False), **sizes)
        version = version_of(exercise, ladder)
        given = {**sizes, **given}
        scratch = version.scratch(SimpleNamespace(**given)) if version.scratch else {}
        yield given, truth, {name: np.empty(shape) for name, shape in scratch.items()}


def argument_lines(exercise, ladder):
    """A line for each parameter: its type, its shape, and whether it is read or written; or what a
    number is."""
    _, parameters = signature(exercise)
    names, tables = version_of(exercise, ladder).args.split(), list(tables_of(exercise, ladder))
    given, truth, scratch = tables[0]
    rows = []
    for parameter, name in zip(parameters, names):
        label = re.findall(r"\w+", parameter)[-1]
        if "*" not in parameter:
            values = {table[0][name] for table in tables}
            same = len(values) == 1 and type(given[name]) is not int
            rows_of_tokens = name == "N" and all(t[0]["N"] == t[0].get("B", 0) * t[0].get("T", 0)
                                                 for t in tables)
            step = math.gcd(*values) if type(given[name]) is int and len(values) > 1 else 1
            rows.append(
                (label, "a number", exercise.shapes.get(label) or ("" if label == name else name) or
                 (f"{given[name]:.6g}" if same else "B*T, the rows" if rows_of_tokens else
                  f"always a multiple of {step}" if step % 4 == 0 else "")))
            continue
        arrays = [{**table[0], **table[1], **table[2]}.get(name) for table in tables]
        kind = next(kind for kind in ("real", "float", "int", "size_t", "AdamW", "low_half")
                    if kind in parameter)
        how = ("written; it is zero at the start" if exercise.zeroed == name else
               "read and changed" if name in truth and name in given else
               "written" if name in truth else "scratch memory" if name in scratch else "read")
        if any(array is None for array in arrays):
            rows.append((label, kind, "null in fp32"))
        else:
            shape = exercise.shapes.get(label) or symbols(
                given, [{k: v for k, v in table[0].items() if type(v) is int} for table in tables],
                [array.shape for array in arrays])
            rows.append((label, f"{kind} ({shape})", how))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"{label:{widths[0]}}  {what:{widths[1]}}  {how}".rstrip() for label, what, how in rows]


def formula_lines(ladder):
    """The source of the formulas that the kernel's .py imports, and of those that they call."""
    wanted, queue = [], [
        value for value in vars(importlib.import_module(f"dev.lab.kernels.{ladder.name}")).values()
        if getattr(value, "__module__", "") in (formulas.__name__, gpt2_numpy.__name__)]
    while queue:
        function = queue.pop()
        if function not in wanted:
            wanted.append(function)
            queue += [getattr(formulas, name) for name in function.__code__.co_names
                      if callable(getattr(formulas, name, None))]
    wanted.sort(key=lambda function: (function.__module__ == formulas.__name__,
                                      function.__code__.co_firstlineno))
    return [line for function in wanted
            for line in inspect.getsource(function).rstrip().splitlines()]


WAYS = (("threads", "each thread takes one item: (size_t)blockIdx.x * blockDim.x + threadIdx.x"),
        ("threads / 32", "each warp of 32 threads takes one: blockIdx.x * (blockDim.x / 32) + "
         "threadIdx.x / 32"),
        ("1", "each block takes one: blockIdx.x"))


def ways(exercise, threads):
    """The lines on how BLOCK can share out the items of an exercise."""
    if exercise.items == "1":
        return [f"    BLOCK({threads}, 1)    there is one block, and its {threads} threads share "
                "the item"]
    one = exercise.alone
    lines = [f"    {f'BLOCK({threads}, {covers})':27} {text}"
             for covers, text in WAYS[: 1 if one else 3]]
    if exercise.plane:
        columns, rows = exercise.plane.split(", ")
        tile = (f"each block takes a tile of out: 32 columns (of {columns}) and 32 rows (of "
                f"{rows}).",
                "With x = threadIdx.x % 32 and y = threadIdx.x / 32, a thread takes the number",
                "in column blockIdx.x * 32 + x and row blockIdx.y * 32 + y.")
        lines += [f"    {first:27} {text}"
                  for first, text in zip(("BLOCK(1024, 32, 32)", "", ""), tile)]
    if not one or exercise.plane or "shuffle" in exercise.helpers:
        lines.append("A thread's number in its warp is its lane: threadIdx.x % 32.")
    return lines


@functools.cache  # it computes all problems of the exercise
def template(name):
    """The text of my_<name>.cu."""
    exercise, ladder = find_exercise(name), find_ladder(name)
    block, parameters = signature(exercise)
    threads = re.search(r"\d+", block)[0]
    summary = ladder.summary
    if "OC" in version_of(exercise, ladder).args.split():
        summary = summary.replace("4C", "OC")
    comment = [f"Exercise {name}: {exercise.teaches}", "", "Compute", f"    {summary}"]
    formula = formula_lines(ladder) if exercise.numpy else []
    if formula:
        comment += ["", "In NumPy", *(f"    {line}" for line in formula)]
    if exercise.note:
        comment += ["", *exercise.note]
    arguments = argument_lines(exercise, ladder)
    comment += ["", "Arguments", *(f"    {line}" for line in arguments)]
    if any(re.search(r"\breal\b", line) for line in arguments):
        comment.append("    real is float, or bf16 of 16 bits.")
    if any("HS" in line for line in [*arguments, *exercise.note]) and not any(
            line.split()[0] in ("HS", "head") for line in arguments):
        comment.append("    HS, the channels of a head, is a constant: it may stand in float "
                       "sum[HS].")
    comment.append("    Arrays are stored row by row: the last index varies fastest.")
    version = version_of(exercise, ladder)
    items, shared = version.items.replace("//", "/"), version.shared.replace("//", "/")
    comment += ["", f"Items: {items}. An item is {exercise.item}."]
    if exercise.items != "1":
        comment += [f"BLOCK({threads}, items) gives each block {threads} threads, and says how "
                    f"many items they share; there, threads means {threads}.",
                    "The grid gets enough blocks for all items. The last block may have threads "
                    "for which there is no item."]
    comment += ways(exercise, threads)
    helpers = [HELPERS[helper].replace("{shared}", shared) for helper in exercise.helpers.split()]
    comment += ["", "You may use", *(f"    {helper}" for helper in helpers)]
    comment += ["", f"Check it with:    {command(f'{PREFIX}{name}.cu')}",
                f"For a hint:       {command(name)} --hint"]
    wrapped = [line for text in comment for line in
               textwrap.wrap(text, 116,
                             subsequent_indent=" " * (len(text) - len(text.lstrip()) + 4)) or [""]]
    head = "".join(f"// {line}".rstrip() + "\n" for line in wrapped)
    listed = textwrap.fill(", ".join(each.replace(" ", "\0") for each in parameters), 112,
                           initial_indent="    ", subsequent_indent="    ").replace("\0", " ")
    return f'{head}\n{block}\nextern "C" __global__ void {PREFIX}{name}(\n{listed}) {{\n\n}}\n'


def write_template(name, folder="."):
    """Writes my_<name>.cu into a folder and returns its path. Raises UserError."""
    return write_new(Path(folder) / f"{PREFIX}{name}.cu", template(name))


def write_new(path, text):
    """Writes a file that is not there yet, and returns its path. Raises UserError."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists already, and is left as it is; move it away to begin "
                        f"again, or check it with: {command(path)}") from None
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); use a copy of the "
                        "repository in a folder of your own") from None
    return path
