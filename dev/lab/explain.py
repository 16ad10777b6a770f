"""What is said to a student: compiler errors, crashes, stuck blocks and wrong results, in words."""
import math
import re
import signal
from pathlib import Path

from dev.lab.bench import GUARD
from dev.lab.submission import code_of, declared, exercise_of
from prepro_tinyshakespeare import UserError


def line_of(path, text):
    """"line 12: out[i] = x;", the first place in a student's file that a text names, or ""."""
    match = re.search(rf"{re.escape(str(path))}:(\d+)", text)
    return quoted(path, int(match[1])) if match else ""


def quoted(path, number):
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"line {number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else f"line {number}"


def unbalanced(code):
    """A sentence if the braces of a text without comments do not match, or ""."""
    opened, closed = code.count("{"), code.count("}")
    if opened == closed:
        return ""
    return f"a {'{ has no }' if opened > closed else '} has no {'}: the file has {opened} of {{ and {closed} of }}"


def compiler_lines(path, text, dtype):
    """The lines on a compiler's first error in a student's file."""
    match = re.search(rf"{re.escape(str(path))}:(\d+):(?:\d+:)? (?:fatal )?error: (.*)", text)
    line, braces = quoted(path, int(match[1])) if match else "", unbalanced(code_of(path))
    if braces:
        return [f"it does not compile: {braces}", *([f"the compiler noticed it in {line}"] if line else [])]
    if not match:
        other = re.search(r"error: (.*)", text)
        return ["it does not compile: " + (other[1] if other else text.splitlines()[-1])]
    before = " (or at the end of the line before)" if re.search("expected .*['\u2018];['\u2019]", match[2]) else ""
    said = [f"it does not compile{' in bf16' if dtype == 'bf16' else ''}: {match[2]}{before}", line]
    if dtype == "bf16" and re.search(r"\breal\b", match[2]):
        stored = re.search(r"(\w+\[[^\[\]]*\])\s*[-+*/]?=[^=]", line)
        read = re.search(r"(?<!to_float\()\b\w+\[[^\[\]]*\]", line[stored.end(1) if stored else 0 :])
        if stored and "=" in match[2]:
            said.append(f"usually: a real of 16 bits is not a float: write from_float({stored[1]}, ...)")
        else:
            said.append(f"usually: a real of 16 bits is not a float: write to_float({read[0] if read else '...'})")
    return said


def beyond(verb, name, number, shape):
    """The sentence on an access outside of an array, with a single index."""
    if number < 0:
        return f"it {verb} {name}[{number}], and the first is {name}[0]"
    rows = (f" ({shape[0]} rows of {shape[1]} numbers)" if len(shape) == 2 else
            f" ({' x '.join(map(str, shape))} numbers)" if len(shape) > 2 else "")
    return f"it {verb} {name}[{number}], and the last is {name}[{math.prod(shape) - 1}]{rows}"


def sanitizer_lines(path, begun, text):
    """The two lines on a report of AddressSanitizer or UBSan; None if there is none."""
    match = re.search(r"runtime error: (.*)", text)
    if match:
        said = match[1]
        bounds = re.search(r"index (-?\d+) out of bounds for type '(.*)'", said)
        what = (f"index {bounds[1]} is out of bounds: the array is {bounds[2]}" if bounds else
                f"{said.split(',')[0]}: 16 bytes at once need an address that is a multiple of 16"
                if "misaligned" in said else said)
        return [what, line_of(path, text)]
    match = re.search(r"AddressSanitizer: (\S+)", text)
    if not match:
        return None
    access = re.search(r"(READ|WRITE) of size (\d+) at (0x[0-9a-f]+)", text)
    if not access:
        at = re.search(r"unknown address (0x[0-9a-f]+)", text)
        return [f"it reads or writes at an address that does not exist{f' ({at[1]})' if at else ''}: an index "
                "far outside of its array, or a null pointer", line_of(path, text)]
    verb, address = ("reads" if access[1] == "READ" else "writes"), int(access[3], 16)
    near = []
    for name, (begin, nbytes, itemsize, shape) in begun["arrays"].items():
        distance = max(begin - address, address - (begin + nbytes) + 1, 0)
        if 0 < distance <= GUARD:
            near.append((distance, name, (address - begin) // itemsize, shape))
    if not near:
        if "global-buffer-overflow" in text or "stack-buffer-overflow" in text:
            return [f"it {verb} {access[2]} bytes outside of a __shared__ or local array",
                    line_of(path, text)]
        return [f"it {verb} {access[2]} bytes outside of all arrays", line_of(path, text)]
    _, name, number, shape = min(near)
    return [beyond(verb, name, number, shape), line_of(path, text)]


def stuck_lines(path, text):
    """The lines on a block that is stuck, from the message of blocks.h."""
    waits = re.findall(r"threads ([-\d, .]+) wait in (.+?) at line (\d+)", text)
    if not waits:
        return [text.removeprefix("kernels.cu: ")]
    block = re.search(r"block \(\d+, \d+, \d+\)", text)[0]

    def count(ranges):
        ends = [part.split("-") for part in ranges.replace(".", "").split(", ") if part.strip()]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

    who, what, line = waits[0]
    total = declared(path, exercise_of(path)[1]).threads
    code = code_of(path).splitlines()
    inside = 0 < int(line) <= len(code) and re.search(r"__sync|__shfl", code[int(line) - 1])
    calls, where = "block_reduce", f" in {what}"
    if not inside:
        if what != "__syncthreads":
            calls = "warp_sum|warp_max|block_reduce"
        where += f", which is in {'block_reduce' if what == '__syncthreads' else 'warp_sum and the like'}"
    lines = [f"it is stuck{where}: {'some' if '...' in who else count(who)} of the {total} threads of {block} wait "
             "there for the others"]
    numbers = [int(line)] if inside else [i for i, each in enumerate(code, 1) if re.search(rf"\b({calls})\b", each)]
    lines += [quoted(path, number) for number in numbers]
    others = [f"threads {who} wait in {what} at line {line}" for who, what, line in waits[1:]]
    gone = re.search(r"threads ([-\d, .]+) have returned", text)
    if gone:
        others.append(f"threads {gone[1]} have returned")
    if others:
        lines.append("; ".join(others))
    return [*lines, "usually: it is inside an if, after a return, or in a loop that some threads leave earlier.",
            "         All threads of the block (of the warp, for warp_sum and the like) must reach it"]


def race_lines(path, found):
    """The lines on a race: both accesses with their lines, and what to do."""
    lines = [f"it has a race on {found['what']}:"]
    for text, places in found["sides"]:
        own = [line for file, line in places if Path(file) == path] or [0]
        where = quoted(path, own[0]) if own[0] else " ".join(f"{Path(file).name}, line {n}" for file, n in places[:1])
        lines.append(f"    {text}, {where}")
    if "blockIdx" not in code_of(path):
        return [*lines, "The index leaves out blockIdx.x, so every block does the work of the first"]
    return [*lines, found["why"]]


def complaint_lines(path, events, status, stderr, sanitize):
    """The lines on what a run found; [] if the file is right, None if the run says nothing about it."""
    compiler = [event for event in events if event["event"] == "compiler"]
    if compiler:
        return compiler_lines(path, compiler[0]["text"], compiler[0]["dtype"])
    refusal = [event["text"] for event in events if event["event"] == "refusal"]
    if refusal:  # no compiler, or no folder for what it makes
        raise UserError(refusal[0])
    begun = [event for event in events if event["event"] == "begins" and event["file"] == str(path)]
    at = f"at the sizes {begun[-1]['sizes']}, in {begun[-1]['dtype']}" if begun else ""
    told = [event for event in events if event["event"] == "complaint" and event["file"] == str(path)]
    if told:
        kind, text = told[0]["kind"], told[0].get("text", "")
        if kind == "stuck":
            return [*stuck_lines(path, text), at]
        if kind == "found race":
            return [*race_lines(path, told[0]), at]
        if kind == "waste":
            return [*told[0]["lines"], at]
        if kind == "outside":
            return [beyond("writes", told[0]["name"], told[0]["number"], told[0]["shape"]), at]
        if kind == "race":
            shared = "__shared__" in code_of(path)
            cause = ("a missing __syncthreads() between a write to shared memory and another thread's read of it, or "
                     "between that read and the next write" if shared else "two threads write to one place, or one "
                     "reads what another one writes")
            return [f"it {text}" if text.startswith(("has", "changed")) else text, f"usually: {cause}", at]
        return [f"wrong: {text}", *told[0]["lines"], at]
    if status in (-signal.SIGALRM, -signal.SIGVTALRM):
        loops = [str(i) for i, line in enumerate(code_of(path).splitlines(), 1) if re.search(r"\b(for|while)\b", line)]
        which = f": there is one in line {' and in line '.join(loops)}" if loops else ""
        return [f"it did not end within {begun[-1]['limit']} seconds. Which loop has no end?{which}", at]
    if sanitize and begun and status:
        lines = sanitizer_lines(path, begun[-1], stderr)
        if lines:
            return [*filter(None, lines), at]
    if status < 0:
        name = signal.Signals(-status).name
        return [f"it crashed ({name}): most likely an index is far outside of its array", at]
    if any(event["event"] == "right" and event["file"] == str(path) for event in events):
        return []
    if status and begun:
        return [f"it ended its process with status {status}: {' '.join(stderr.strip().splitlines()[-1:])}", at]
    return None
