"""What is said to a student: compiler errors, crashes, stuck blocks and wrong results, in words."""
import math
import re
import signal
from pathlib import Path

from dev.common.gpus import STATIC
from dev.lab.bench import GUARD
from dev.lab.cuda_words import nearest, not_here
from dev.lab.exercises import EXERCISES, version_of
from dev.lab.ladder import find_ladder
from dev.lab.submission import code_of, declared, exercise_of, signature
from prepro_tinyshakespeare import UserError


def line_of(path, text):
    """"line 12: out[i] = x;", the first place in a student's file that a text names, or ""."""
    match = re.search(rf"{re.escape(str(path))}:(\d+)", text)
    return quoted(path, int(match[1])) if match else ""


def quoted(path, number):
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return f"line {number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else f"line {number}"


def without_strings(code):
    """Code whose strings and characters are blanked: a brace in one is none of the program's."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', lambda found: " " * len(found[0]), code)


def unbalanced(code):
    """A sentence if the braces of a text without comments do not match, or ""."""
    code = without_strings(code)
    opened, closed = code.count("{"), code.count("}")
    if opened == closed:
        return ""
    return f"a {'{ has no }' if opened > closed else '} has no {'}: the file has {opened} of {{ and {closed} of }}"


# What g++, clang++, the linker and the loader say of a function that is declared and has no body. [1]: its name, maybe
# with its type and parameters, or as the linker knows it.
NO_BODY = re.compile("function body not available|undefined reference to [`'\u2018]([^'\u2019]+)|"
                     "hidden symbol [`'\u2018]([^'\u2019]+)['\u2019] isn't defined|undefined symbol: (\\w+)")
NOT_INLINED = re.compile("inlining failed in call to .*?['\u2018](?!always_inline)([^'\u2019]+)")
UNDECLARED = re.compile("['\u2018](\\w+)['\u2019] (?:was not declared|has not been declared)|"
                        "use of undeclared identifier ['\u2018](\\w+)")


def without_body(path, text):
    """The lines on a function that is declared and has no body; None if that is not the compiler's complaint."""
    found = NO_BODY.search(text)
    if not found:
        return None
    called = next(filter(None, found.groups()), None) or NOT_INLINED.search(text)[1]
    mangled = re.match(r"_Z[A-Z]*?(\d+)(\w+)", called)
    name = mangled[2][: int(mangled[1])] if mangled else re.search(r"(\w+)\s*(?:\(|$)", called)[1]
    lines = [i for i, line in enumerate(code_of(path).splitlines(), 1) if re.search(rf"\b{name}\s*[(<]", line)]
    declared_there = [i for i in lines if re.search(rf"\w[\w*&\s]*\s[*&]*{name}\s*\([^;{{}}]*\)\s*;",
                                                    code_of(path).splitlines()[i - 1])
                      and not re.search(rf"[=(,]\s*{name}|\breturn\b", code_of(path).splitlines()[i - 1])]
    what = "it is declared, and defined nowhere" if declared_there else "neither CUDA nor your file has one"
    return [f"it does not compile: {name}(...) has no body: {what}{nearest(name, functions_of(path))}",
            *(quoted(path, i) for i in sorted({*declared_there[:1], *lines[:2]})[:2])]


def functions_of(path):
    """The functions that a student's file defines."""
    return re.findall(r"\b(\w+)\s*\([^;{}()]*\)\s*\{", code_of(path))


def undeclared(path, message):
    """What to say of a word that the compiler does not know; "" if that is not its complaint."""
    found = UNDECLARED.search(message)
    if not found:
        return ""
    name = found[1] or found[2]
    if name in functions_of(path):
        return f"{name} is used before it is declared: move its function up"
    near = nearest(name, functions_of(path))
    if not near and "did you mean" in message:
        near = "; " + re.sub("['\u2018\u2019]", "", re.search("did you mean [^?]*", message)[0]) + "?"
    return f"{name} is declared nowhere{near}"


def types_of_cuda(message):
    """What to say where CUDA has a function, and not for these types; "" if that is not the complaint."""
    if not re.search("no match|invalid conversion|cannot convert|ambiguous", message.splitlines()[0]):
        return ""
    if re.search("atomic[A-Z]", message):
        return ("CUDA's atomics take pointers to int, unsigned and unsigned long long, and atomicAdd also to float and "
                "double. Has the pointer, or the value, another type?")
    if re.search("__(shfl|match|reduce)_", message):
        return "shuffles move one number of 4 or 8 bytes a lane: move the parts of a struct one by one"
    operator = re.search("no match for ['\u2018]operator(.{1,3})['\u2019].*\\b([a-z]+[1-4])['\u2019]", message)
    if operator:
        return f"CUDA has no {operator[1]} for {operator[2]}: write it for .x, .y and so on"
    return ""


def compiler_lines(path, text, dtype):
    """The lines on a compiler's first error in a student's file."""
    match = re.search(rf"{re.escape(str(path))}:(\d+):(?:\d+:)? (?:fatal )?[eE]rror: (.*)", text)
    line, braces = quoted(path, int(match[1])) if match else "", unbalanced(code_of(path))
    if braces:
        return [f"it does not compile: {braces}", *([f"the compiler noticed it in {line}"] if line else [])]
    if lines := without_body(path, text):
        return lines
    if not match:
        if word := not_here(without_strings(code_of(path))):
            return [f"it does not compile: {word}"]
        other = re.search(r"error: (.*)", text)
        return ["it does not compile: " + (other[1] if other else text.splitlines()[-1])]
    code = code_of(path).splitlines()[int(match[1]) - 1 : int(match[1])]
    own = UNDECLARED.search(match[2])
    word = not_here(without_strings("".join(code)), (own[1] or own[2]) if own else "")
    if word := word or undeclared(path, match[2]):
        return [f"it does not compile: {word}", line]
    before = " (or at the end of the line before)" if re.search("expected .*['\u2018];['\u2019]", match[2]) else ""
    said = [f"it does not compile{' in bf16' if dtype == 'bf16' else ''}: {match[2]}{before}", line]
    if about := types_of_cuda(match[2] + "\n" + line):
        return [f"it does not compile: {about}", line]
    if dtype == "bf16" and re.search(r"\breal\b", match[2]):
        stored = re.search(r"(\w+\[[^\[\]]*\])\s*[-+*/]?=[^=]", line)
        read = re.search(r"(?<!to_float\()\b\w+\[[^\[\]]*\]", line[stored.end(1) if stored else 0 :])
        if stored and "=" in match[2]:
            said.append(f"usually: a real of 16 bits is not a float: write from_float({stored[1]}, ...)")
        else:
            said.append(f"usually: a real of 16 bits is not a float: write to_float({read[0] if read else '...'})")
    return said


def warning_lines(path, text):
    """The compiler's warnings on a student's file, in pairs of lines, the first few: what, and where. text: what the
    compiler said, Cpu.warnings."""
    here, lines = re.escape(str(path)), []
    for part in re.split(rf"(?=^{here}:\d+:(?:\d+:)? warning: )", text, flags=re.M)[1:]:
        number, what = re.match(rf"{here}:(\d+):(?:\d+:)? warning: (.*?)(?: \[-W[^\]]*\])?$", part, re.M).groups()
        declared_in = re.search(rf"^{here}:(\d+):.* declared here", part, re.M)  # the place to mend
        said = [f"the compiler warns: {re.sub('[' + chr(0x2018) + chr(0x2019) + chr(39) + ']', '', what)}",
                quoted(path, int((declared_in or [0, number])[1]))]
        lines += said if said[0] not in lines else []
    return lines[:8]


def printed_lines(stderr):
    """What a student's kernel has printed, from the stderr of a process that ran it."""
    return re.findall(r"^printf: (.*)$", stderr, re.M)


def beyond(verb, name, number, shape):
    """The sentence on an access outside of an array, with a single index."""
    if number < 0:
        return f"it {verb} {name}[{number}], and the first is {name}[0]"
    rows = (f" ({shape[0]} rows of {shape[1]} numbers)" if len(shape) == 2 else
            f" ({' x '.join(map(str, shape))} numbers)" if len(shape) > 2 else "")
    return f"it {verb} {name}[{number}], and the last is {name}[{math.prod(shape) - 1}]{rows}"


def misaligned(said):
    """The sentence on UBSan's "load of misaligned address 0x... for type ..., which requires 8 byte alignment"."""
    verb = "writes" if said.startswith("store") else "reads"
    wide = re.search(r"requires (\d+) byte alignment", said)
    if not wide:
        return said.split(",")[0]
    return (f"it {verb} {wide[1]} bytes at once, at an address that is no multiple of {wide[1]}. A GPU stops there: "
            "16 bytes are 4 floats, or 8 reals in bf16. Is the index a multiple of that, and the length of a row?")


def sanitizer_lines(path, begun, text):
    """The two lines on a report of AddressSanitizer or UBSan; None if there is none."""
    match = re.search(r"runtime error: (.*)", text)
    if match:
        said = match[1]
        bounds = re.search(r"index (-?\d+) out of bounds for type '(.*)'", said)
        what = (f"index {bounds[1]} is out of bounds: the array is {bounds[2]}" if bounds else
                misaligned(said) if "misaligned" in said else said)
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


def shared_lines(path, shared, most=STATIC):
    """The lines on more static shared memory than a block may have."""
    code = code_of(path).splitlines()
    return [f"no GPU can launch it: its __shared__ arrays have {shared:,} bytes, and a block may "
            f"declare {most:,}", *(quoted(path, i) for i, line in enumerate(code, 1) if "__shared__" in line)]


def stuck_lines(path, text):
    """The lines on a block that cannot go on, from the message of blocks.h."""
    if declares := re.search(r"its __shared__ variables have (\d+) bytes, and a block may declare (\d+)", text):
        return shared_lines(path, *map(int, declares.groups()))
    waits = re.findall(r"threads ([-\d, .]+) wait in (.+?) at line (\d+)( of [^,;]+)?((?:, called at line \d+)*)", text)
    if not waits:
        return [text.removeprefix("kernels.cu: ")]
    block = re.search(r"block \(\d+, \d+, \d+\)", text)[0]

    def count(ranges):
        ends = [part.split("-") for part in ranges.replace(".", "").split(", ") if part.strip()]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

    who, what, line, own, calls = waits[0]
    total, code = declared(path, exercise_of(path)[1]).threads, code_of(path).splitlines()
    where, numbers = f" in {what}", [int(line), *map(int, re.findall(r"\d+", calls))]
    if not own and not (0 < int(line) <= len(code) and re.search(r"__sync|__shfl", code[int(line) - 1])):
        # a line of kernels.cu, in a function that the student calls
        inner = "block_reduce" if what == "__syncthreads" else "warp_sum|warp_max|block_reduce"
        where += f", which is in {'block_reduce' if what == '__syncthreads' else 'warp_sum and the like'}"
        numbers = [i for i, each in enumerate(code, 1) if re.search(rf"\b({inner})\b", each)]
    others = [f"threads {who} wait in {what} at line {line}" for who, what, line, *_ in waits[1:]]
    gone = re.search(r"threads ([-\d, .]+) have returned", text)
    if gone:
        others.append(f"threads {gone[1]} have returned")
    all_of = "block" if "__syncthreads" in what or "block_reduce" in what else "warp"
    return [f"it is stuck{where}: {'some' if '...' in who else count(who)} of the {total} threads of {block} wait "
            "there for the others", *(quoted(path, number) for number in numbers),
            *(["; ".join(others)] if others else []),
            "usually: it is inside an if, after a return, or in a loop that some threads leave earlier. All threads of "
            f"the {all_of} must reach it"]


def own_names(path, lines):
    """Lines with the arguments' names as they are in a student's file: some have other names in the lab."""
    exercise = EXERCISES[exercise_of(path)[0]]
    _, parameters = signature(exercise)
    names = version_of(exercise, find_ladder(exercise.kernel)).args.split()
    for name, parameter in zip(names, parameters):
        label = re.findall(r"\w+", parameter)[-1]
        if label != name:
            lines = [line if line.startswith("line ") else re.sub(rf"\b{name}\b", label, line) for line in lines]
    return lines


def race_lines(path, found):
    """The lines on a race: both accesses with their lines, and what to do."""
    lines = [f"it has a race on {found['what']}:"]
    for text, places in found["sides"]:
        own = [line for file, line in places if Path(file) == path] or [0]
        where = quoted(path, own[0]) if own[0] else " ".join(f"{Path(file).name}, line {n}" for file, n in places[:1])
        lines.append(f"    {text}, {where}")
    if "blockIdx" not in code_of(path) and EXERCISES[exercise_of(path)[0]].items != "1":
        return [*lines, "The index leaves out blockIdx.x, so every block does the work of the first."]
    return [*lines, found["why"]]


def without_value(path):
    """The lines of a student's file that declare a variable and give it no value."""
    for number, line in enumerate(code_of(path).splitlines(), 1):
        for _ in range(3):  # brackets within brackets
            line = re.sub(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", "@", line)
        declared_there = re.match(r"\s*(?:float|double|int|unsigned|size_t)\s+([^;(]*);", line)
        if declared_there and any(re.fullmatch(r"\s*\w+\s*", name) for name in declared_there[1].split(",")):
            yield quoted(path, number)


def order_lines(path, text):
    """The lines on what Bench.check says: results that depend on the order of the threads, or a changed input."""
    if text.startswith("changed"):
        return [f"it {text}", "usually: it is on the left of an =, or an index of another array is far too large"]
    unset = list(without_value(path))[:1]
    usual = ("this variable is read before it gets a value: write sum = 0.0f, for example" if unset else
             "one thread reads what another one writes, and no barrier or atomicAdd orders them")
    what = text.removeprefix("has a race: ").replace("in the order 1,", "in a random order,")
    return [f"its result depends on the order in which threads run: {what}", *unset, f"usually: {usual}"]


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
            return [*own_names(path, [beyond("writes", told[0]["name"], told[0]["number"], told[0]["shape"])]), at]
        if kind == "race":
            return [*order_lines(path, text), at]
        return [*own_names(path, [f"wrong: {text}", *told[0]["lines"]]), at]
    if status in (-signal.SIGALRM, -signal.SIGVTALRM):
        loops = [str(i) for i, line in enumerate(code_of(path).splitlines(), 1) if re.search(r"\b(for|while)\b", line)]
        which = f" There is one in line {' and in line '.join(loops)}." if loops else ""
        return [f"it did not end within {begun[-1]['limit']} seconds. Does a loop never end?{which}", at]
    if sanitize and begun and status:
        lines = sanitizer_lines(path, begun[-1], stderr)
        if lines:
            return [*own_names(path, filter(None, lines)), at]
    if status < 0:
        name = signal.Signals(-status).name
        return [f"it crashed ({name}): most likely an index is far outside of its array", at]
    if any(event["event"] == "right" and event["file"] == str(path) for event in events):
        return []
    if status and begun:
        return [f"it ended its process with status {status}: {' '.join(stderr.strip().splitlines()[-1:])}", at]
    return None
