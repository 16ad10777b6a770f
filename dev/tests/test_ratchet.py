"""A ratchet: how large the top-level files are and how much they import may go down, and never up.

    python dev/tests/test_ratchet.py

LIMITS holds today's figures. A figure above its limit fails. So does a limit that was raised since the last commit, or
by it. Where a figure is below its limit, a line says which limit to write. Imports are read from the source, so those
within functions count too.
"""
import ast
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP))
from test_gpt2 import EXACT, check, run, summary  # noqa: E402

THIS = "dev/tests/test_ratchet.py"

FEATURE = re.compile("fp8|zero.?1|recompute|replay|hellaswag|nvtx|llama|tensor.?map|smoothing|checkpoint.every", re.I)
LIMITS = {
    "train_gpt2.py: bytes": 96262,
    "train_gpt2.py: widest line": 100,
    "train_gpt2.py: imports from dev/": 2,
    "train_gpt2.py: names from prepro_tinyshakespeare": 8,
    "train_gpt2.py: lines before Faster that name a feature": 0,
    "kernels.cu: bytes": 80441,
    "kernels.cu: widest line": 120,
    "prepro_tinyshakespeare.py: bytes": 9480,
    "prepro_tinyshakespeare.py: widest line": 100,
    "modules in the largest circle of imports": 2,
}


@functools.cache
def imports_of(path):
    """Every import statement of a file, also within functions: a list of (module, name) each. `import module` has the
    name ""."""
    statements = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            statements.append([(alias.name, "") for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            statements.append([(node.module or "", alias.name) for alias in node.names])
    return statements


def graph_of(top):
    """{module: modules of the project that it imports}. A program's own folder, and dev/, come before the top level in
    its search path, so a bare name is looked up there too."""
    paths = {".".join(path.relative_to(top).with_suffix("").parts): path
             for path in (*top.glob("*.py"), *top.glob("dev/**/*.py"))}
    graph = {}
    for module, path in paths.items():
        folders = ["", f"{module.rpartition('.')[0]}.".lstrip("."), "dev."]
        graph[module] = {found for statement in imports_of(path)
                         for name, part in statement for folder in folders for found in
                         (f"{folder}{name}", f"{folder}{name}.{part}") if found in paths} - {module}
    return graph


def circles(graph):
    """The strongly connected components of a graph, largest first: sets of modules that reach each other."""
    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {module: reached(module) for module in graph}
    found = {frozenset({module, *(other for other in reach[module] if module in reach[other])}) for module in graph}
    return sorted(found, key=len, reverse=True)


def figures(top):
    """What LIMITS limits, as it is now."""
    found = {}
    for name in ("train_gpt2.py", "kernels.cu", "prepro_tinyshakespeare.py"):
        data = (top / name).read_bytes()
        found[f"{name}: bytes"] = len(data)
        found[f"{name}: widest line"] = max(map(len, data.decode().splitlines()))
    imports = imports_of(top / "train_gpt2.py")
    found["train_gpt2.py: imports from dev/"] = sum(
        any(module.split(".")[0] == "dev" for module, _ in statement) for statement in imports)
    found["train_gpt2.py: names from prepro_tinyshakespeare"] = len(
        {name for statement in imports for module, name in statement if module == "prepro_tinyshakespeare"})
    before = (top / "train_gpt2.py").read_text("utf-8").split("\n# ---- Faster")[0].splitlines()
    found["train_gpt2.py: lines before Faster that name a feature"] = sum(bool(FEATURE.search(line)) for line in before)
    found["modules in the largest circle of imports"] = len(circles(graph_of(top))[0])
    return found


def limits_in(text):
    """The table LIMITS of a version of this file."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "LIMITS":
            return ast.literal_eval(node.value)
    return {}


def committed_limits(top):
    """The lowest limits of the last two commits: where all is committed, the last one's are those of this file. Where
    git or a commit is missing, there are none."""
    lowest = {}
    for commit in ("HEAD", "HEAD^"):
        try:
            done = subprocess.run(["git", "show", f"{commit}:{THIS}"], cwd=top, capture_output=True, text=True)
        except OSError:
            return {}
        if done.returncode == 0:
            for name, limit in limits_in(done.stdout).items():
                lowest[name] = min(limit, lowest.get(name, limit))
    return lowest


def faults(found, limits, committed):
    """A line for each figure above its limit, and for each limit that has been raised or dropped."""
    return [*(f"{name}: {value:,}, at most {limits.get(name, 0):,} allowed" for name, value in found.items()
              if value > limits.get(name, 0)),
            *(f"{name}: the limit was raised from {before:,} to {limits[name]:,}; it may only be lowered"
              for name, before in committed.items() if name in limits and limits[name] > before),
            *(f"{name}: the limit is missing; it was {before:,}" for name, before in committed.items()
              if name not in limits)]


def ratchet():
    """Every figure is within its limit, and no limit has been raised. Prints which limits could be lowered."""
    found, committed = figures(TOP), committed_limits(TOP)
    wrong = faults(found, LIMITS, committed)
    for name in {**found, **committed}:
        own = [line for line in wrong if line.startswith(f"{name}: ")]
        check(name, not own, "; ".join(own) or f"{found[name]:,} of {LIMITS[name]:,}")
    for name, value in found.items():
        if value < LIMITS.get(name, 0):
            print(f"{name}: the limit can be lowered by {LIMITS[name] - value:,}, to {value:,}")


FILES = {  # a small tree: train_gpt2 imports dev.a and back, and dev.a imports dev.deep.b and back
    "train_gpt2.py": "import os  # FP8\nfrom prepro_tinyshakespeare import (x,\n    y)\n"
                     "def f():\n    from dev.a import g\n    import dev.deep.b\n    text = 'from dev import c'\n",
    "dev/a.py": "import train_gpt2\ndef g():\n    from dev.deep import b\n",
    "dev/deep/b.py": "def h():\n    import a\n",
    "dev/test_a.py": "import a, train_gpt2\n",
    "prepro_tinyshakespeare.py": "x = y = 1\n", "kernels.cu": "//\n// \u00e9\u00e9\n",
}


def counting():
    """The figures of a small tree, counted by hand, and what a ratchet says about them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        found = figures(Path(folder))
        check("no git, no limits of a last commit", committed_limits(Path(folder)) == {})
    for name, wish in (("train_gpt2.py: imports from dev/", 2), ("train_gpt2.py: names from prepro_tinyshakespeare", 2),
                       ("train_gpt2.py: lines before Faster that name a feature", 1), ("kernels.cu: bytes", 11),
                       ("kernels.cu: widest line", 5),
                       ("modules in the largest circle of imports", 3)):
        yield name, found[name], wish, EXACT
    before = {"a": 5, "b": 5, "c": 5, "d": 5}
    wrong = faults({"a": 5, "b": 6, "c": 4, "e": 1}, {"a": 5, "b": 5, "c": 6}, before)
    wish = ["b: 6, at most 5 allowed", "e: 1, at most 0 allowed",
            "c: the limit was raised from 5 to 6; it may only be lowered", "d: the limit is missing; it was 5"]
    check("what a ratchet refuses", wrong == wish, wrong)
    text = Path(__file__).read_text(encoding="utf-8")
    check("the table is read from the source", limits_in(text) == LIMITS)


def test_ratchet():
    run("counting:", counting)
    run("ratchet:", ratchet)


if __name__ == "__main__":
    test_ratchet()
    sys.exit(summary())
