"""The code of one version of a kernel, collected from all files: what `lab.py KERNEL --show N` prints.

A CUDA file is cut into pieces: macros, types, constants, functions and kernels, each with the comment directly above
it. A version needs the kernels that it launches, and a piece needs those whose names are in it. The names are searched
for in the text, and no compiler is asked. So now and then there is a piece too many.
"""
import inspect
import re
from pathlib import Path
from typing import NamedTuple

from dev.lab import heads
from prepro_tinyshakespeare import UserError

COMMENT_OR_QUOTE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.S)
BEFORE_A_NAME = re.compile(r"BLOCK\(.*\)\n|template <.*>\n|__launch_bounds__\(.*?\)|__align__\(.*?\)")
LOCAL = re.compile(r"\b(?:int|float|double|bool|unsigned|size_t|real|auto)[*&]* [*&(]*(\w+)|, (\w+)(?:\[\w*\])* = ")


class Piece(NamedTuple):
    path: Path
    text: list  # the file's lines
    bare: list  # the same, without what is in comments and in quotes
    lines: range  # its own, counted from 0, with those of the comment above
    scopes: tuple  # of each #if and each namespace around it, the numbers of the lines that open and close it
    space: str  # the namespace, or ""
    kind: str  # "macro", "type", "constant", "function", "kernel" or "comment"
    names: tuple


def declared(code):
    """The kind and the names of what a piece declares. An operator goes by the name of its first argument's type."""
    kind, code = "kernel" if "__global__" in code else "function", BEFORE_A_NAME.sub("", code)
    head = re.split("[{=;]", code)[0]
    if found := re.match(r"#define (\w+)", code):
        return "macro", (found[1],)
    if found := re.match(r"using (\w+) =|struct [^{]*?(\w+) \{", code) or re.search(r"operator\W+(\w+)", head):
        return "type", (found[found.lastindex],)
    if not head.startswith("static_assert") and (found := re.search(r"\b(\w+)\(", head)):
        return kind, (found[1],)
    return "constant", tuple(re.findall(r"(\w+)(?:\[\w*\])* = ", code) or re.findall(r"(\w+)(?:\[\])?;", code))


def is_whole(lines):
    """Whether a piece that begins with these lines ends with them."""
    if lines[0][0] == "#":
        return not lines[-1].endswith("\\")  # a last line that is a quotation alone is blank here
    code = "\n".join(lines).rstrip()
    return code[-1] in ";}" and sum(map(code.count, "([{")) == sum(map(code.count, ")]}"))


def pieces_of(path):
    """The Pieces of a CUDA file. A comment at its end is one too, and has the file's name."""
    text = path.read_text(encoding="utf-8")
    bare = COMMENT_OR_QUOTE.sub(lambda found: re.sub(".", " ", found[0]), text).splitlines()
    text, pieces, scopes, space, begin, n = text.splitlines(), [], [], "", 0, 0
    while n < len(text):
        first, n = n, n + 1
        line, with_comment = bare[first], range(begin, n)
        if not line.strip():
            begin = begin if text[first].strip() else n  # of the comment over what follows
            continue
        if opening := re.match(r"#if|namespace (\w+)", line):
            scopes.append([*with_comment])
            space = opening[1] or space
        elif line.startswith(("#e", "}")):
            scopes[-1] += with_comment
            if not line.startswith("#el"):
                scopes.pop()
            space = "" if line[0] == "}" else space
        else:
            n = next((n for n in range(n, len(text)) if is_whole(bare[first:n])), len(text))
            code = "\n".join(bare[first:n])
            pieces.append(Piece(path, text, bare, range(begin, n), tuple(scopes), space, *declared(code)))
        begin = n
    end = range(begin, len(text))
    return [*pieces, Piece(path, text, bare, end, (), "", "comment", (path.name,))] if end else pieces


def needed(pieces, names):
    """The pieces of these names at the top level, and all those that they need, in their order."""
    known, found, todo = {}, set(), [("", name) for name in names]
    for i, piece in enumerate(pieces):
        for name in piece.names:
            known.setdefault((piece.space, name), []).append(i)
    while todo:
        for i in {*known.get(todo.pop(), ())} - found:
            found.add(i)
            piece = pieces[i]
            code = "\n".join(piece.bare[n] for lines in (piece.lines, *piece.scopes) for n in lines)
            local = {name for names in LOCAL.findall(code) for name in names}
            spaces = [piece.space, *re.findall(r"using namespace (\w+)", code), ""]
            for before, space, name, after in re.findall(r"(<?)(?:\b(\w+)::)?\b([A-Za-z_]\w*)\b(?=([(<]?))", code):
                key = next(((s, name) for s in ([space] if space else spaces) if (s, name) in known), None)
                kind = pieces[known[key][0]].kind if key else None
                if kind == "function":  # it is called or an argument of a template, or else that is a variable
                    todo += [key] if (before or after) and f"auto {name} = [" not in code else []
                elif kind and (kind != "constant" or space or name not in local):
                    todo.append(key)
    return [pieces[i] for i in sorted(found)]


def printed(pieces):
    """The lines of pieces, as they are in their files. Where something is left out stand the file and the line."""
    lines, last = [], (None, -1)
    for path in dict.fromkeys(piece.path for piece in pieces):
        own = [piece for piece in pieces if piece.path == path]
        text = own[0].text
        for n in sorted({n for piece in own for lines in (piece.lines, *piece.scopes) for n in lines}):
            between = text[last[1] + 1 : n]
            if path != last[0] or any(line.strip() for line in between) and not re.match("#e|}", text[n]):
                lines += ["", f"// {path.name}:{n + 1}"]
            elif between and not between[-1].strip():
                lines.append("")
            lines.append(text[n])
            last = path, n
    return lines


def launchers(run, kernels):
    """The Python functions of the lab that launch a version, as text, and which of these kernels they launch."""
    run = getattr(run, "func", run)  # of a functools.partial
    todo, text, names = [run.__globals__[run.__qualname__.split(".")[0]]], [], set()  # or the function that made it
    given = ["", *(cell.cell_contents for cell in run.__closure__ or ())]  # to that, such as a version's name
    for function in todo:
        lines, first = inspect.getsourcelines(function)
        source, known = "".join(lines), vars(heads) | function.__globals__
        text = ["", f"# {Path(inspect.getsourcefile(function)).name}:{first}", *source.splitlines(), *text]
        for called in map(known.get, re.findall(r"(\w+)\(", source)):
            if inspect.isfunction(called) and called.__module__.startswith("dev.lab.") and called not in todo:
                todo.append(called)
        words = ["", *re.findall(r'"(?:{\w+})?(\w+)"', source)]  # "name", and the end of f"{name}_inp"
        names |= kernels & {f"{start}{end}" for start in given for end in words}
    return text, names


def show(kernel, number, paths):
    """The text to print. paths: the CUDA files, in the order in which they are compiled. Raises UserError."""
    version, pieces = kernel.versions[number - 1], [piece for path in paths for piece in pieces_of(path)]
    kernels = {name for piece in pieces if piece.kind == "kernel" for name in piece.names}
    text, names = launchers(version.run, kernels) if callable(version.run) else ([], {version.run})
    if names - kernels:
        raise UserError(f"no kernel {version.run} with a BLOCK over it, and {kernel.name}.py launches it")
    text = [f"// {kernel.name} {number}: {version.what}", f"// {kernel.summary}", *text]
    if version.library:
        text += ["", f"// The rest is the code of {version.library}."]
    return "\n".join(text + printed(needed(pieces, [*names, f"{kernel.name}.cu" if version.trainer else ""])))
