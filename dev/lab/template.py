"""The file that an exercise begins with: the task and the arguments as a comment, and an empty kernel."""
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np  # after prepro_tinyshakespeare, which says how its threads wait

from dev import gpt2_numpy
from dev.lab import formulas
from dev.lab.exercises import EXERCISES, HELPERS, PREFIX, command, version_of
from dev.lab.ladder import Draw, find_ladder, parse_sizes
from dev.lab.submission import signature
from prepro_tinyshakespeare import UserError


def symbols(given, checks_given, shapes):
    """The shape of an array in the names of the problem, right for all checks, such as "N,Vp"."""
    names = [name for name, value in given.items() if type(value) is int and all(name in each for each in checks_given)]
    terms = [*names, *(f"{a}+1" for a in names), *(f"{a}*{b}" for a, b in itertools.product("234", names)),
             *(f"{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"3*{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"({a}+2*{b})" for a, b in itertools.permutations(names, 2)),
             *(f"({a}+2*{b})*{c}" for a, b, c in itertools.permutations(names, 3))]

    def symbol(sizes):
        values = [dict(each) for each in checks_given]
        if len(set(sizes)) == 1 and sizes[0] < 4:
            return str(sizes[0])
        preferred = sorted(terms, key=lambda term: (len(term) > 2, term not in ("N", "B", "T")))
        good = [term for term in preferred if [eval(term, {}, value) for value in values] == list(sizes)]
        return re.sub(r"^\(([^()]*)\)$", r"\1", good[0]) if good else str(sizes[0])

    return ",".join(symbol(sizes) for sizes in zip(*shapes))


def tables_of(exercise, ladder):
    """For each check the inputs and the truths of the problem, and the scratch memory of the exercise."""
    for sizes in map(parse_sizes, ladder.checks):
        given, truth, *_ = ladder.problem(Draw(False), **sizes)
        version = version_of(exercise, ladder)
        given = {**sizes, **given}
        scratch = version.scratch(SimpleNamespace(**given)) if version.scratch else {}
        yield given, truth, {name: np.empty(shape) for name, shape in scratch.items()}


def argument_lines(exercise, ladder):
    """A line for each parameter: its type, its shape, and whether it is read or written; or what a number is."""
    _, parameters = signature(exercise)
    names, tables = version_of(exercise, ladder).args.split(), list(tables_of(exercise, ladder))
    given, truth, scratch = tables[0]
    rows = []
    for parameter, name in zip(parameters, names):
        label = re.findall(r"\w+", parameter)[-1]
        if "*" not in parameter:
            values = {table[0][name] for table in tables}
            same = len(values) == 1 and type(given[name]) is not int
            rows_of_tokens = name == "N" and all(t[0]["N"] == t[0].get("B", 0) * t[0].get("T", 0) for t in tables)
            rows.append((label, "a number", exercise.shapes.get(label) or ("" if label == name else name) or (
                f"{given[name]:.6g}" if same else "B*T, the rows" if rows_of_tokens else "")))
            continue
        arrays = [{**table[0], **table[1], **table[2]}.get(name) for table in tables]
        kind = next(kind for kind in ("real", "float", "int", "size_t", "AdamW", "low_half") if kind in parameter)
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
    wanted, queue = [], [value for value in vars(importlib.import_module(f"dev.lab.kernels.{ladder.name}")).values()
                         if getattr(value, "__module__", "") in (formulas.__name__, gpt2_numpy.__name__)]
    while queue:
        function = queue.pop()
        if function not in wanted:
            wanted.append(function)
            queue += [getattr(formulas, name) for name in function.__code__.co_names
                      if callable(getattr(formulas, name, None))]
    wanted.sort(key=lambda function: (function.__module__ == formulas.__name__, function.__code__.co_firstlineno))
    return [line for function in wanted for line in inspect.getsource(function).rstrip().splitlines()]


WAYS = (("threads", "each thread takes one item: (size_t)blockIdx.x * blockDim.x + threadIdx.x"),
        ("threads / 32", "each warp of 32 threads takes one: blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32"),
        ("1", "each block takes one: blockIdx.x"))


def ways(exercise, threads):
    """The lines on how BLOCK can share out the items of an exercise."""
    if exercise.items == "1":
        return [f"    BLOCK({threads}, 1)    there is one block, and its {threads} threads share the item"]
    one = exercise.item.startswith(("a number", "a pair"))  # too little work for a warp
    lines = [f"    {f'BLOCK({threads}, {covers})':27} {text}" for covers, text in WAYS[: 1 if one else 3]]
    if exercise.plane:
        columns, rows = exercise.plane.split(", ")
        tile = (f"each block takes a tile of out: 32 columns (of {columns}) and 32 rows (of {rows}).",
                "With x = threadIdx.x % 32 and y = threadIdx.x / 32, a thread takes the number",
                "in column blockIdx.x * 32 + x and row blockIdx.y * 32 + y.")
        lines += [f"    {first:27} {text}" for first, text in zip(("BLOCK(1024, 32, 32)", "", ""), tile)]
    if not one or exercise.plane or "shuffle" in exercise.helpers:
        lines.append("A thread's number in its warp is its lane: threadIdx.x % 32.")
    return lines


@functools.cache  # it computes all problems of the exercise
def template(name):
    """The text of my_<name>.cu."""
    exercise, ladder = EXERCISES[name], find_ladder(name)
    block, parameters = signature(exercise)
    threads = re.search(r"\d+", block)[0]
    first = importlib.import_module(f"dev.lab.kernels.{name}").__doc__.strip().splitlines()
    if "OC" in version_of(exercise, ladder).args.split():
        first = [line.replace("4C", "OC") for line in first]
    comment = [f"Exercise {name}: {exercise.teaches}", "", "Compute", *(f"    {line}" for line in first)]
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
        comment.append("    HS, the channels of a head, is a constant: it may stand in float sum[HS].")
    comment.append("    Arrays are stored row by row: the last index varies fastest.")
    version = version_of(exercise, ladder)
    items, shared = version.items.replace("//", "/"), version.shared.replace("//", "/")
    comment += ["", f"Items: {items}. An item is {exercise.item}."]
    if exercise.items != "1":
        comment += [f"BLOCK({threads}, items) gives each block {threads} threads, and says how many items they "
                    f"share; there, threads means {threads}.",
                    "The grid gets enough blocks for all items. The last block may have threads for which there "
                    "is no item."]
    comment += ways(exercise, threads)
    helpers = [HELPERS[helper].replace("{shared}", shared) for helper in exercise.helpers.split()]
    comment += ["", "You may use", *(f"    {helper}" for helper in helpers)]
    comment += ["", f"Check it with:    {command(f'{PREFIX}{name}.cu')}",
                f"For a hint:       {command(name)} --hint"]
    wrapped = [line for text in comment for line in
               textwrap.wrap(text, 116, subsequent_indent=" " * (len(text) - len(text.lstrip()) + 4)) or [""]]
    head = "".join(f"// {line}".rstrip() + "\n" for line in wrapped)
    listed = textwrap.fill(", ".join(each.replace(" ", "\0") for each in parameters), 112, initial_indent="    ",
                           subsequent_indent="    ").replace("\0", " ")
    return f'{head}\n{block}\nextern "C" __global__ void {PREFIX}{name}(\n{listed}) {{\n\n}}\n'


def write_template(name, folder="."):
    """Writes my_<name>.cu into a folder and returns its path. Raises UserError."""
    path, text = Path(folder) / f"{PREFIX}{name}.cu", template(name)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists already, and is left as it is; move it away to begin again, or check it with: "
                        f"{command(path)}") from None
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); use a copy of the repository in "
                        "a folder of your own") from None
    return path
