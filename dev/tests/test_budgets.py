"""Budgets: how large the top-level files may be, what they may import, and how their Python is
written.

A feature does not raise a budget: it belongs under dev/. Every line that is read runs, which
test_one_program.py holds, and none stands twice: bodies of the trainer under dev/ are counted. If a
figure is far below its budget, there is room for something that a reader needs.
"""
import ast
import functools
import re
import tempfile
from itertools import pairwise
from pathlib import Path

from dev.tests.checks import EXACT, TOP, check, fast

FEATURE = re.compile(
    "fp8|zero.?1|recompute|replay|hellaswag|nvtx|llama|tensor.?map|smoothing|checkpoint.every",
    re.I)
BUDGETS = {
    "train_gpt2.py: bytes": 83000,
    "train_gpt2.py: bytes before Faster": 71500,
    "train_gpt2.py: lines": 1500,  # these two without empty ones
    "train_gpt2.py: lines before the mark": 500,
    "train_gpt2.py: bodies that stand again under dev/": 0,
    "train_gpt2.py: widest line": 100,
    "train_gpt2.py: line of class GPT2": 310,
    "train_gpt2.py: lines of the loop": 36,
    "train_gpt2.py: percent of assignments to several names": 8,
    "train_gpt2.py: hooks": 0,
    "train_gpt2.py: lines of main": 60,
    "train_gpt2.py: imports from dev/": 1,
    "train_gpt2.py: imports from prepro_tinyshakespeare": 0,
    "train_gpt2.py: lines before Faster that name a feature": 0,
    "train_gpt2.py: habits": 0,
    "kernels.cu: bytes": 83700,
    "kernels.cu: bytes before Faster": 73800,
    "kernels.cu: widest line": 100,
    "kernels.cu: lines": 1699,
    "prepro_tinyshakespeare.py: bytes": 4500,
    "prepro_tinyshakespeare.py: widest line": 100,
    "modules in the largest circle of imports": 1,
    "lines that write into flags": 0,
}


@functools.cache
def imports_of(path):
    """Every import statement of a file, also those within functions: a list of (module, name) for
    each statement. For `import module` the name is ""."""
    statements = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            statements.append([(alias.name, "") for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            statements.append([(node.module or "", alias.name) for alias in node.names])
    return statements


def graph_of(top):
    """{module: modules of the project that it imports}. A bare name is also looked up in the
    module's own folder and in dev/."""
    paths = {".".join(path.relative_to(top).with_suffix("").parts): path
             for path in (*top.glob("*.py"), *top.glob("dev/**/*.py"))}
    graph = {}
    for module, path in paths.items():
        folders = ["", f"{module.rpartition('.')[0]}.".lstrip("."), "dev."]
        graph[module] = {found for statement in imports_of(path)
                         for name, part in statement for folder in folders for found in
                         (f"{folder}{name}", f"{folder}{name}.{part}") if found in paths} - {module}
    # The two mains hand over to these; no other arrow goes up.
    for module, above in (("train_gpt2", "dev.features.order"),
                          ("prepro_tinyshakespeare", "dev.data.own_text")):
        graph.get(module, set()).discard(above)
    return graph


def circles(graph):
    """The strongly connected components of a graph, largest first: sets of modules that reach each
    other."""
    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {module: reached(module) for module in graph}
    found = {frozenset({module, *(other for other in reach[module] if module in reach[other])})
             for module in graph}
    return sorted(found, key=len, reverse=True)


# ---- How the trainer's Python is written


def names_of(target):
    """How many names an assignment to this target sets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return sum(map(names_of, target.elts))
    return 1


def is_text(node):
    return (isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and
            isinstance(node.value, str))


def targets_of(node):
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.For, ast.comprehension)) else []


def habits(text):
    """[(line, habit)] of Python that one has to read three times."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
            found.append((node.lineno, "a call of what a call returns"))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found.append((node.lineno, "a lambda with a name"))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            found.append((node.lineno, "a conditional expression as a statement"))
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and
            any(map(is_text, (node.left, node.right)))):
            found.append((node.lineno, "text times a condition"))
        found += [(target.lineno, f"{names_of(target)} names set at once")
                  for target in targets_of(node) if names_of(target) > 3]
        if isinstance(node, ast.FunctionDef):
            found += [(inner.lineno, "a closure with defaults") for inner in ast.walk(node)
                      if inner is not node and isinstance(inner, (ast.FunctionDef, ast.Lambda)) and
                      inner.args.defaults]
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                lines = [getattr(node, "lineno", 0), *(statement.lineno for statement in body)]
                found += [(line, "two statements on a line") for before, line in pairwise(lines)
                          if before == line]
    return found


# Words that stood in the trainer for somebody else: another architecture, or a feature
HOOKS = re.compile(r"\bNKV\b|\brelu\b|% row\.layers|header=None|\*more\)|def "
                   r"choose\b|\bPADDED\b|beside=|\*beside|\"level\"|SOURCES|def device_class|"
                   r"of_layer")


def several_names(text):
    """The percentage of assignments that set several names."""
    assignments = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    several = sum(isinstance(node.targets[0], ast.Tuple) for node in assignments)
    return 100 * several / max(1, len(assignments))


def is_flags(node):
    """Whether this is `flags`, or `self.flags` of whatever."""
    return getattr(node, "id", getattr(node, "attr", "")) == "flags"


# Where flags that are left open are made what a training has: others read it there
DECIDE = "train_gpt2.py", "base.py", "resume.py"


def writes_into_flags(text, decides=False):
    """The lines that change flags, which stay what was asked for; or, unless the file decides them,
    that read flags.steps or flags.total_batch, which may be left open: a training has its own."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and is_flags(node.value):
            left_open = node.attr in ("steps", "total_batch")
            if left_open and not decides or not isinstance(node.ctx, ast.Load):
                found.append(node.lineno)
        if isinstance(node, ast.Call):
            of_vars = (isinstance(node.func, ast.Attribute) and node.func.attr == "update" and
                       isinstance(node.func.value, ast.Call) and
                       any(map(is_flags, node.func.value.args)))
            if of_vars or getattr(node.func, "id", "") == "setattr" and is_flags(node.args[0]):
                found.append(node.lineno)
    return found


def lines_of(text, name):
    """How many lines the first function of this name has; 0 if there is none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node.end_lineno - node.lineno + 1
    return 0


MARK = "# ---- You may stop there"


@functools.cache
def bodies(text):
    """The bodies of all functions with three statements or more, without their docstrings."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if sum(isinstance(each, ast.stmt) for part in body for each in ast.walk(part)) >= 3:
                found.add("\n".join(map(ast.unparse, body)))
    return found


def figures(top):
    """The current figures, under the names in BUDGETS."""
    found, texts = {}, {}
    for name in ("train_gpt2.py", "kernels.cu", "prepro_tinyshakespeare.py"):
        data = (top / name).read_bytes()
        texts[name] = data.decode()
        found[f"{name}: bytes"] = len(data)
        found[f"{name}: widest line"] = max(map(len, texts[name].splitlines()))
    found["kernels.cu: lines"] = len(texts["kernels.cu"].splitlines())
    imports, text = imports_of(top / "train_gpt2.py"), texts["train_gpt2.py"]
    found["train_gpt2.py: imports from dev/"] = sum(
        any(module.split(".")[0] == "dev" for module, _ in statement) for statement in imports)
    found["train_gpt2.py: imports from prepro_tinyshakespeare"] = sum(
        module == "prepro_tinyshakespeare" for statement in imports for module, _ in statement)
    for name, mark in (("train_gpt2.py", "\n# ---- Faster"), ("kernels.cu", "\n// ---- Faster")):
        found[f"{name}: bytes before Faster"] = len(texts[name].split(mark)[0].encode())
    for name, part in (("lines", text), ("lines before the mark", text.split(MARK)[0])):
        found[f"train_gpt2.py: {name}"] = sum(bool(line.strip()) for line in part.splitlines())
    again = [name for path in sorted(top.glob("dev/**/*.py")) for name in
             bodies(text) & bodies(path.read_text(encoding="utf-8"))]
    found["train_gpt2.py: bodies that stand again under dev/"] = len(again)
    before = text.split("\n# ---- Faster")[0].splitlines()
    found["train_gpt2.py: lines before Faster that name a feature"] = sum(bool(FEATURE.search(line))
                                                                          for line in before)
    found["train_gpt2.py: line of class GPT2"] = next(
        (number for number, line in enumerate(before, 1) if line.startswith("class GPT2")), 0)
    found["train_gpt2.py: lines of the loop"] = lines_of(text, "train")
    found["train_gpt2.py: lines of main"] = lines_of(text, "main")
    found["train_gpt2.py: percent of assignments to several names"] = several_names(text)
    found["train_gpt2.py: hooks"] = sum(bool(HOOKS.search(line)) for line in text.splitlines())
    found["train_gpt2.py: habits"] = len(habits(text))
    found["modules in the largest circle of imports"] = len(circles(graph_of(top))[0])
    found["lines that write into flags"] = sum(len(lines) for _, lines in writers(top))
    return found


def writers(top):
    """[(the path of the trainer or of a feature, its lines that write into flags)]."""
    paths = top / "train_gpt2.py", *sorted(top.glob("dev/features/**/*.py"))
    return [(path, writes_into_flags(path.read_text(encoding="utf-8"), path.name in DECIDE))
            for path in paths]


@fast
def test_budgets():
    """Every figure is within its budget."""
    found = figures(TOP)
    check("a figure for each budget", found.keys() == BUDGETS.keys(), found.keys() ^ BUDGETS.keys())
    for name, value in found.items():
        check(name, value <= BUDGETS[name], f"{value:,} of {BUDGETS[name]:,}")
    for line, habit in habits((TOP / "train_gpt2.py").read_text(encoding="utf-8")):
        print(f"train_gpt2.py:{line}: {habit}")
    for path, lines in writers(TOP):
        for number in lines:
            print(f"{path}:{number}: writes into flags; settled() of base.py, or with_values()")
    for number, line in enumerate((TOP / "train_gpt2.py").read_text(encoding="utf-8").splitlines(),
                                  1):
        if HOOKS.search(line):
            print(f"train_gpt2.py:{number}: a hook: {line.strip()}")


FILES = {  # a small tree: train_gpt2 imports dev.a and back, and dev.a imports dev.deep.b and back
    "train_gpt2.py": "import os  # FP8\nfrom prepro_tinyshakespeare import (x,\n    y)\n"
                     "def f():\n    from dev.a import g\n    import dev.deep.b\n    text = 'from "
           "dev import c'\nclass GPT2: pass\n\n# ---- Faster\ndef main():\n\n    f()()\n",
    "dev/a.py": "import train_gpt2\ndef g():\n    from dev.deep import b\n"
                "def again():\n    \"A text.\"\n    from dev.a import g\n    import dev.deep.b\n"
                "    text = 'from dev import c'\n",
    "dev/deep/b.py": "def h():\n    import a\n",
    "dev/test_a.py": "import a, train_gpt2\n",
    "prepro_tinyshakespeare.py": "x = y = 1\n",
           "kernels.cu": "//\n// \u00e9\u00e9\n// ---- Faster on\n",
}
HABITS = """
f()()
g = lambda x: x
f() if x else y
text = "a" * (x > 1)
a, (b, c), d = x
for a, b, c, d in x: pass
def f():
    return [lambda i=i: i for i in x]
x = 1; y = 2
a, b, c = (lambda x, y=1: x), 2 * 3, [a for a, b in f(x)]
"""
WRITES = """
flags.steps = 1
self.flags.a, b = 1, 2
vars(run.flags).update(a=1)
setattr(flags, "a", 1)
rest = total / self.flags.total_batch
rest = flags.steps - 1
rest = self.flags.warmup + flag.flags_of(1).steps
self.flags = flags
vars(self.notes).update(flags=1)
"""


@fast
def test_counting():
    """The figures of a small tree, which were counted by hand, and the habits in a few lines."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        found = figures(Path(folder))
    for name, wish in (("train_gpt2.py: imports from dev/", 2),
                       ("train_gpt2.py: imports from prepro_tinyshakespeare", 2),
                       ("train_gpt2.py: lines before Faster that name a feature", 1),
                       ("kernels.cu: bytes", 29),
                       ("kernels.cu: bytes before Faster", 10), ("kernels.cu: widest line", 17),
                       ("train_gpt2.py: line of class GPT2", 8), ("train_gpt2.py: lines", 11),
                       ("train_gpt2.py: lines before the mark", 11),
                       ("train_gpt2.py: bodies that stand again under dev/", 1),
                       ("train_gpt2.py: lines of main", 3),
                       ("train_gpt2.py: habits", 2),
                       ("modules in the largest circle of imports", 3)):
        yield name, found[name], wish, EXACT
    lines = [line for line, _ in habits(HABITS)]
    for decides, wish in ((False, [2, 3, 4, 5, 6, 7]), (True, [2, 3, 4, 5])):
        written = sorted(writes_into_flags(WRITES, decides))
        check(f"writes into flags, {decides=}", written == wish, written)
    check("habits", sorted(lines) == [2, 3, 4, 5, 6, 7, 7, 9, 10], lines)
