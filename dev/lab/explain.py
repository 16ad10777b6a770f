"""What is said to a student: compiler errors, crashes, stuck blocks and wrong results, in words.
"""
import difflib
import functools
import math
import re
import signal
from pathlib import Path

import numpy as np

from dev.common.gpus import STATIC
from dev.common.student_text import with_unset
from dev.cpu.emulated import HEADER, KERNELS
from dev.lab.bench import GUARD
from dev.lab.submission import own_labels
from train_gpt2 import UserError, to_float

# ---- Words that the compiler does not know: CUDA's that the CPU here has not, those of host
# programs, and those that nobody has

CUDA_HAS = "CUDA has {word}, and the CPU here has not: "
HOST = "{word} is for the program around a kernel, and the lab is that program here: "
ALONE = HOST + "write the kernel and its helpers alone"
WITHOUT = CUDA_HAS + "a kernel is written without it"
# (what the code says, the sentence); {word} is what was found. The first row that fits counts.
NOT_HERE = [(re.compile(pattern), sentence) for pattern, sentence in (
    (r"\b(?:__half2?|half2|__float2half\w*|__half2float)\b",
     "{word} needs a line: #include <cuda_fp16.h>"),
    (r"\b(?:__)?nv_bfloat162?\b|\b__\w*bfloat16\w*", "{word} needs a line: #include <cuda_bf16.h>"),
    (r"<<<", HOST + "it launches the kernel itself, with the block of your BLOCK line"),
    (r"\bcuda(?:Malloc|Free|Memcpy|Memset|Host|Device|Stream|Event|Launch|Get|Set|Func|Graph)\w*",
     ALONE),
    (r"\b(?:std::cout|int\s+main\s*\()", ALONE),
    (r"\bcooperative_groups(?:\.h)?|\bcg::\w+",
     CUDA_HAS + "for block.sync() write __syncthreads(), for block.thread_rank() threadIdx.x, for "
     "a tile of 32 its lane, threadIdx.x % 32, and __shfl_xor_sync(FULL_WARP, x, step), and for "
     "reduce(...) warp_sum or block_reduce"),
    (r"\b(?:nvcuda|wmma)::\w+|\bmma\.h|\bwmma\b",
     CUDA_HAS + "multiply with loops, or with the lab's multiply(...) of tiles.cu"),
    (r"\bcub(?:::\w+|/[\w./]+)",
     CUDA_HAS + "write warp_sum(x), warp_max(x) or block_reduce<warp_sum>(x, 0.0f)"),
    (r"\bthrust(?:::\w+|/[\w./]+)", WITHOUT),
    (r"\bcu(?:rand|blas|fft|sparse|solver|dnn)\w*(?:\.h)?", WITHOUT),
    (r"\bcuda(?:/std|/[a-z_]+|::(?:std::)?\w+)", CUDA_HAS + "write the plain functions of CUDA"),
    (r"\b__pipeline_\w+|\bcuda_pipeline\w*\.h|\bcp_async\w*",
     CUDA_HAS + "write copy16(shared, global, true), copies_end() and wait_for_copies<0>(), or "
     "plain loads"),
    (r"\b(?:tex[123]D\w*|surf[123]D\w*|cudaTextureObject_t|cudaSurfaceObject_t)\b",
     CUDA_HAS + "read the array itself"),
    (r"\b__nv_fp8\w*|\bcuda_fp8\.h|\bcuda_fp[46]\.h", CUDA_HAS + "numbers here are real or float"),
    (r"\b(?:asm|__asm__)\b",
     CUDA_HAS.replace("{word}", "PTX ({word})") + "write it in C++; many instructions have a "
     "function, such as __popc or __shfl_sync"),
    (r"\b__(?:f|d)\w+_r[zud]\b", CUDA_HAS + "only _rn, which rounds to nearest, is here"),
    (r"\b__(?:u|)dp[24]a\w*|\b__v\w+[24]\b|"
     r"\b__(?:is|cvta)_?\w*(?:[Gg]lobal|[Ss]hared|[Ll]ocal|[Cc]onstant)\w*|"
     r"\b__(?:prof_trigger|brkpt|cluster_\w+|setmaxnreg\w*|nv_\w+)\b|"
     r"\b(?:erfinvf?|erfcinvf?|erfcxf?|normcdfinvf?|cyl_bessel_\w+|norm4df?|rnorm4df?)\b",
     CUDA_HAS + "write it with other functions"),
    (r"\b__(?:shfl(?:_up|_down|_xor)?|ballot|any|all)\b",
     "{word} is gone from CUDA since GPUs of 2017: write {word}_sync(0xffffffff, ...)"))]
C_FUNCTIONS = """
sqrtf expf exp2f logf log2f log10f log1pf expm1f powf sinf cosf tanf tanhf sinhf coshf asinf acosf
atanf atan2f erff erfcf fabsf fmaf fmaxf fminf floorf ceilf roundf rintf truncf cbrtf
hypotf isnan isinf memcpy memset printf assert threadIdx blockIdx blockDim gridDim LOWEST
FULL_WARP INFINITY FLT_MAX float2 float4 int2 int4 uint4""".split()


def not_here(code, about=""):
    """The sentence on the first word of NOT_HERE in code, or "". about: what it must contain."""
    for pattern, sentence in NOT_HERE:
        found = pattern.search(code)
        if found and about in found[0]:
            return sentence.format(word=re.sub(r"\s*\($", "", found[0]))
    return ""


@functools.cache
def known_words():
    """What a student may call: CUDA's functions here, C's, and the helpers of kernels.cu."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(HEADER.parent.glob("*.h"))]
    names = re.findall(r"__device__ (?:[\w:<>*]+ )+(\w+)\(|#define (__\w+)[( ]", "\n".join(texts))
    helpers = re.findall(r"__device__ (?:[\w:<>*]+ )+(\w+)\(", KERNELS.read_text(encoding="utf-8"))
    atomics = [f"atomic{name}" for name in "Add Sub Exch Min Max Inc Dec CAS And Or Xor".split()]
    known = *helpers, *atomics, *C_FUNCTIONS
    return sorted({*(name for pair in names for name in pair if name), *known})


def nearest(name, own=()):
    """Such as "; did you mean __syncthreads?": a known word, or one of his own, that is near; or
    ""."""
    near = difflib.get_close_matches(name, sorted({*known_words(), *own} - {name}), 1, 0.75)
    return f"; did you mean {near[0]}?" if near else ""


# ---- Compiler errors, crashes, stuck blocks and wrong results


def without_strings(code):
    """Code whose strings and characters are blanked: a brace in one is none of the program's."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', lambda found: " " * len(found[0]),
                  code)


def unbalanced(code):
    """A sentence if the braces of a text without comments do not match, or ""."""
    code = without_strings(code)
    opened, closed = code.count("{"), code.count("}")
    if opened == closed:
        return ""
    return (f"a {'{ has no }' if opened > closed else '} has no {'}: the file has {opened} of {{ "
            f"and {closed} of }}")


LOOP = r"\b(for|while)\b"
# What g++, clang++, the linker and the loader say of a function that is declared and has no body.
# [1]: its name, maybe with its type and parameters, or as the linker knows it.
NO_BODY = re.compile("function body not available|undefined reference to [`'\u2018]([^'\u2019]+)|"
                     "hidden symbol [`'\u2018]([^'\u2019]+)['\u2019] isn't defined|"
                     "undefined symbol: (\\w+)")
NOT_INLINED = re.compile("inlining failed in call to .*?['\u2018](?!always_inline)([^'\u2019]+)")
UNDECLARED = re.compile("['\u2018](\\w+)['\u2019] (?:was not declared|has not been declared)|"
                        "use of undeclared identifier ['\u2018](\\w+)")


def without_body(file, text):
    """The lines on a function that is declared and has no body; None if that is not the compiler's
    complaint."""
    found = NO_BODY.search(text)
    if not found:
        return None
    called = next(filter(None, found.groups()), None) or NOT_INLINED.search(text)[1]
    mangled = re.match(r"_Z[A-Z]*?(\d+)(\w+)", called)
    name = mangled[2][: int(mangled[1])] if mangled else re.search(r"(\w+)\s*(?:\(|$)", called)[1]
    lines = file.numbers_with(rf"\b{name}\s*[(<]")
    declarations = file.numbers_with(rf"\w[\w*&\s]*\s[*&]*{name}\s*\([^;{{}}]*\)\s*;")
    calls = file.numbers_with(rf"[=(,]\s*{name}|\breturn\b")
    declared_there = [i for i in lines if i in declarations and i not in calls]
    what = ("it is declared, and defined nowhere" if declared_there else
            "neither CUDA nor your file has one")
    return [f"it does not compile: {name}(...) has no body: "
            f"{what}{nearest(name, functions_of(file))}",
            *(file.quoted(i) for i in sorted({*declared_there[:1], *lines[:2]})[:2])]


def functions_of(file):
    """The functions that a student's file defines."""
    return re.findall(r"\b(\w+)\s*\([^;{}()]*\)\s*\{", file.code)


def undeclared(file, message):
    """What to say of a word that the compiler does not know; "" if that is not its complaint."""
    found = UNDECLARED.search(message)
    if not found:
        return ""
    name = found[1] or found[2]
    if name in functions_of(file):
        return f"{name} is used before it is declared: move its function up"
    near = nearest(name, functions_of(file))
    if not near and "did you mean" in message:
        meant = re.search("did you mean [^?]*", message)[0]
        near = "; " + re.sub("['\u2018\u2019]", "", meant) + "?"
    return f"{name} is declared nowhere{near}"


def types_of_cuda(message):
    """What to say where CUDA has a function, and not for these types; "" if that is not the
    complaint."""
    if not re.search("no match|invalid conversion|cannot convert|ambiguous",
                     message.splitlines()[0]):
        return ""
    if re.search("atomic[A-Z]", message):
        return ("CUDA's atomics take pointers to int, unsigned and unsigned long long, and "
                "atomicAdd also to float and double. Has the pointer, or the value, another type?")
    if re.search("__(shfl|match|reduce)_", message):
        return ("shuffles move one number of 4 or 8 bytes a lane: move the parts of a struct one "
                "by one")
    operator = re.search(
        "no match for ['\u2018]operator(.{1,3})['\u2019].*\\b([a-z]+[1-4])['\u2019]", message)
    if operator:
        return f"CUDA has no {operator[1]} for {operator[2]}: write it for .x, .y and so on"
    return ""


def compiler_lines(file, text, dtype):
    """The lines on a compiler's first error in a student's file."""
    match = re.search(rf"{re.escape(str(file.path))}:(\d+):(?:\d+:)? (?:fatal )?[eE]rror: (.*)",
                      text)
    line, braces = file.quoted(int(match[1])) if match else "", unbalanced(file.code)
    if braces:
        return [f"it does not compile: {braces}",
                *([f"the compiler noticed it in {line}"] if line else [])]
    if lines := without_body(file, text):
        return lines
    if not match:
        if word := not_here(without_strings(file.code)):
            return [f"it does not compile: {word}"]
        other = re.search(r"error: (.*)", text)
        return ["it does not compile: " + (other[1] if other else text.splitlines()[-1])]
    code = file.code.splitlines()[int(match[1]) - 1 : int(match[1])]
    own = UNDECLARED.search(match[2])
    word = not_here(without_strings("".join(code)), (own[1] or own[2]) if own else "")
    if word := word or undeclared(file, match[2]):
        return [f"it does not compile: {word}", line]
    before = (" (or at the end of the line before)"
              if re.search("expected .*['\u2018];['\u2019]", match[2]) else "")
    said = [f"it does not compile{' in bf16' if dtype == 'bf16' else ''}: {match[2]}{before}", line]
    if about := types_of_cuda(match[2] + "\n" + line):
        return [f"it does not compile: {about}", line]
    if dtype == "bf16" and re.search(r"\breal\b", match[2]):
        said.append(real_line(line, "=" in match[2]))
    return said


def real_line(line, assigns):
    """What to write where a line, quoted, takes a real of bf16 for a float. assigns: the compiler
    speaks of an =."""
    stored = re.search(r"(\w+\[[^\[\]]*\])\s*[-+*/]?=[^=]", line)
    read = re.search(r"(?<!to_float\()\b\w+\[[^\[\]]*\]", line[stored.end(1) if stored else 0 :])
    instead = (f"from_float({stored[1]}, ...)" if stored and assigns else
               f"to_float({read[0] if read else '...'})")
    return f"usually: a real of 16 bits is not a float: write {instead}"


def warning_lines(file, text):
    """The compiler's warnings on a student's file, in pairs of lines, the first few: what, and
    where. text: what the compiler said, Emulated.warnings."""
    here, lines = re.escape(str(file.path)), []
    for part in re.split(rf"(?=^{here}:\d+:(?:\d+:)? warning: )", text, flags=re.M)[1:]:
        number, what = re.match(rf"{here}:(\d+):(?:\d+:)? warning: (.*?)(?: \[-W[^\]]*\])?$", part,
                                re.M).groups()
        declared_in = re.search(rf"^{here}:(\d+):.* declared here", part, re.M)  # the place to mend
        what = re.sub("['\u2018\u2019]", "", what)
        place = file.quoted(int((declared_in or [0, number])[1]))
        said = [f"the compiler warns: {what}", place]
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
    """The sentence on UBSan's "load of misaligned address 0x... for type ..., which requires 8 byte
    alignment"."""
    verb = "writes" if said.startswith("store") else "reads"
    wide = re.search(r"requires (\d+) byte alignment", said)
    if not wide:
        return said.split(",")[0]
    return (f"it {verb} {wide[1]} bytes at once, at an address that is no multiple of {wide[1]}. A "
            "GPU stops there: 16 bytes are 4 floats, or 8 reals in bf16. Is the index a multiple "
            "of that, and the length of a row?")


def sanitizer_lines(file, begun, text):
    """The two lines on a report of AddressSanitizer or UBSan; None if there is none."""
    match = re.search(r"runtime error: (.*)", text)
    if match:
        said = match[1]
        bounds = re.search(r"index (-?\d+) out of bounds for type '(.*)'", said)
        overflow = re.search(r"signed integer overflow: (-?\d+) ([-+*]) (-?\d+)", said)
        if overflow:
            return [f"an int overflows: {' '.join(overflow.groups())} is more than an int holds, "
                    "2,147,483,647", file.line_of(text),
                    "usually: write (size_t) in front of the first factor, and size_t for the "
                    "index"]
        what = (f"index {bounds[1]} is out of bounds: the array is {bounds[2]}" if bounds else
                misaligned(said) if "misaligned" in said else said)
        return [what, file.line_of(text)]
    match = re.search(r"AddressSanitizer: (\S+)", text)
    if not match:
        return None
    access = re.search(r"(READ|WRITE) of size (\d+) at (0x[0-9a-f]+)", text)
    if not access:
        at = re.search(r"unknown address (0x[0-9a-f]+)", text)
        where = f" ({at[1]})" if at else ""
        return [f"it reads or writes at an address that does not exist{where}: an index far "
                "outside of its array, or a null pointer", file.line_of(text)]
    verb, address = ("reads" if access[1] == "READ" else "writes"), int(access[3], 16)
    near = []
    for name, (begin, nbytes, itemsize, shape) in begun["arrays"].items():
        distance = max(begin - address, address - (begin + nbytes) + 1, 0)
        if 0 < distance <= GUARD:
            near.append((distance, name, (address - begin) // itemsize, shape))
    if not near:
        if "global-buffer-overflow" in text or "stack-buffer-overflow" in text:
            return [f"it {verb} {access[2]} bytes outside of a __shared__ or local array",
                    file.line_of(text)]
        return [f"it {verb} {access[2]} bytes outside of all arrays", file.line_of(text)]
    _, name, number, shape = min(near)
    own, threads = [], file.kernel.threads
    if len(shape) == 2 and shape[1] < threads and 0 <= number - math.prod(shape) < threads and (
            not file.exercise.alone):
        own = [f"usually: a row has {shape[1]} numbers, and a block {threads} threads: those from "
               f"{shape[1]} on have no column. In a sum they add 0"]
    return [beyond(verb, name, number, shape), file.line_of(text), *own]


def shared_lines(file, shared, most=STATIC):
    """The lines on more static shared memory than a block may have."""
    return [f"no GPU can launch it: its __shared__ arrays have {shared:,} bytes, and a block may "
            f"declare {most:,}", *file.quoted_with("__shared__")]


def stuck_lines(file, text):
    """The lines on a block that cannot go on, from the message of blocks.h."""
    if declares := re.search(r"its __shared__ variables have (\d+) bytes, and a block may declare "
                             r"(\d+)", text):
        return shared_lines(file, *map(int, declares.groups()))
    if nothing := re.search(r"(extern __shared__ (\w+)\[\]) has no bytes.* at line (\d+)", text):
        return [f"{nothing[1]} has no bytes: the lab's launch of this exercise gives a block none",
                file.quoted(int(nothing[3])),
                "write its size there instead, such as __shared__ float "
                f"{nothing[2]}[{file.kernel.threads}];"]
    waits = re.findall(r"threads ([-\d, .]+) wait in (.+?) at line (\d+)( of [^,;]+)?((?:, called "
                       r"at line \d+)*)", text)
    if not waits:
        return [text.removeprefix("kernels.cu: ")]
    block = re.search(r"block \(\d+, \d+, \d+\)", text)[0]

    def count(ranges):
        ends = [part.split("-") for part in ranges.replace(".", "").split(", ") if part.strip()]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

    who, what, line, own, calls = waits[0]
    total, code = file.kernel.threads, file.code.splitlines()
    where, numbers = f" in {what}", [int(line), *map(int, re.findall(r"\d+", calls))]
    if not own and not (0 < int(line) <= len(code) and
                        re.search(r"__sync|__shfl", code[int(line) - 1])):
        # a line of kernels.cu, in a function that the student calls
        inner = "block_reduce" if what == "__syncthreads" else "warp_sum|warp_max|block_reduce"
        helper = "block_reduce" if what == "__syncthreads" else "warp_sum and the like"
        where += f", which is in {helper}"
        numbers = file.numbers_with(rf"\b({inner})\b")
    others = [f"threads {who} wait in {what} at line {line}" for who, what, line, *_ in waits[1:]]
    gone = re.search(r"threads ([-\d, .]+) have returned", text)
    if gone:
        others.append(f"threads {gone[1]} have returned")
    all_of = "block" if "__syncthreads" in what or "block_reduce" in what else "warp"
    rule = (all_of == "block") * (
        ". The lab applies this rule, which holds on every GPU; from compute capability 7.0 on, "
        "a barrier waits only for threads that have not returned")
    return [f"it is stuck{where}: {'some' if '...' in who else count(who)} of the {total} threads "
            f"of {block} wait there for the others", *(file.quoted(number) for number in numbers),
            *(["; ".join(others)] if others else []),
            "usually: it is inside an if, after a return, or in a loop that some threads leave "
            f"earlier. All threads of the {all_of} must reach it" + rule * bool(gone)]


def cast_lines(file, dtype):
    """The lines on a cast of a real* to a float*, which goes wrong in bf16 alone."""
    reals = [re.findall(r"\w+", text)[-1] for text in file.kernel.parameters
             if re.search(r"\breal\b", text)]
    cast = r"(?:\((?:const )?\s*float\s*\*\s*\)|reinterpret_cast<(?:const )?float\s*\*>\(|"
    cast += r"\((?:const )?\s*float[24]\s*\*\s*\)|reinterpret_cast<(?:const )?float[24]\s*\*>\()"
    places = file.quoted_with(rf"{cast}\s*&?\s*\(?(?:{'|'.join(reals)})\b") if reals else []
    if dtype != "bf16" or not places or re.search(r"\bBF16\b|sizeof\s*\(?\s*real", file.code):
        return []
    return ["in bf16 a real has 2 bytes, and this takes two of them for one float:", places[0],
            "read with to_float(x[i]), or with load<n>(p), which knows what a real is"]


def plane_lines(file):
    """The lines on a block, or a grid, that is meant to have two dimensions."""
    tiles = file.exercise.plane and len(file.kernel.covers) == 2
    places = file.quoted_with(rf"\b(?:threadIdx{'' if tiles else '|blockIdx'})\.[yz]\b")
    if not places:
        return []
    if file.exercise.plane:
        return ["blocks are one-dimensional here, so threadIdx.y is always 0. Give BLOCK all "
                "threads of a tile, as in BLOCK(1024, 32, 32), and write x = threadIdx.x % 32 and "
                "y = threadIdx.x / 32:", places[0]]
    return ["blocks and the grid are one-dimensional here, so threadIdx.y and blockIdx.y are "
            "always 0. An item has one number, i = blockIdx.x * blockDim.x + threadIdx.x: in rows "
            "of C numbers its row is i / C, and its column i % C:", places[0]]


def with_plane(file, lines):
    """The lines on a failure, with plane_lines in place of what is guessed of its cause."""
    plane = plane_lines(file)
    if not plane or lines[0].endswith(":") or "has no bytes" in lines[0]:
        return [*lines[:-1], *plane, *lines[-1:]]
    return [lines[0], *plane, *(line for line in lines[1:] if not line.startswith("usually: "))]


def own_names(file, lines):
    """Lines with the arguments' names as they are in a student's file: some have other names in the
    lab."""
    for name, label in own_labels(file.exercise, file.ladder).items():
        if label != name:
            lines = [line if line.startswith("line ") else re.sub(rf"\b{name}\b", label, line)
                     for line in lines]
    return lines


def may_happen(found, file):
    """Lines on what a GPU may do with a race of two plain accesses: the order of this run and the
    other one, with the values if they are known."""
    sides = [re.fullmatch(r"(thread \d+ of block \S+(?: \S+ \S+)?) (writes|reads) it", text)
             for text, _ in found["sides"]]
    if not all(sides):
        return []
    (first, how), (second, then) = (side.groups() for side in sides)
    before, between, after = values_of(found, file)
    if before is None:
        if how == then:
            return [f"So {first} may be the last to write, or {second}, and its number stays"]
        writer, reader = (first, second) if how == "writes" else (second, first)
        return [f"So {reader} may read before {writer} has written, and get what was there before; "
                "or after it, and get the new number"]
    here = f"in this order: {first} {how} {between}, then {second} {then} "
    if how == then:
        return [f"{here}{after}, which stays",
                f"or in the other: {second} writes {after}, then {first} writes {between}, which "
                "stays"]
    if how == "writes":
        return [f"{here}{between}", f"or in the other: {second} reads {before}, then {first} "
                f"writes {between}"]
    return [f"{here}{after}", f"or in the other: {second} writes {after}, then {first} reads "
            f"{after}"]


def values_of(found, file):
    """In words the numbers at the place of a race: before both accesses, between them, and behind
    them; (None, None, None) if their type is not known, or atomics may have changed them."""
    name = re.escape(found["what"].split("[")[0])
    if not found.get("bits") or re.search(rf"\batomic\w+\s*\([^;]*\b{name}\b", file.code):
        return None, None, None
    bits, size, kind = found["bits"]
    if kind is None:  # shared memory, of which the file says the type
        declared = re.search(r"(?:__shared__\s+(?:volatile\s+)?|DYNAMIC_SHARED\(\s*)"
                             rf"(float|real|int|unsigned)\b[^;]*\b{name}\b", file.code)
        kind = declared and dict(real="float32" if size == 4 else "uint16", float="float32",
                                 int="int32", unsigned="uint32")[declared[1]]
    if kind is None or np.dtype(kind).itemsize != size:
        return None, None, None
    numbers = to_float(np.array(bits, np.uint32).astype(f"u{size}").view(kind))
    return ["what nobody has set" if one == 2 ** (8 * size) - 1 and kind != "int32" else
            f"{number:.6g}" for one, number in zip(bits, numbers)]


def race_lines(file, found):
    """The lines on a race: both accesses with their lines, and what to do."""
    lines, numbers = [f"it has a race on {found['what']}:"], []
    for text, places in found["sides"]:
        own = [line for name, line in places if Path(name) == file.path] or [0]
        elsewhere = " ".join(f"{Path(name).name}, line {n}" for name, n in places[:1])
        where = file.quoted(own[0]) if own[0] else elsewhere
        lines.append(f"    {text}, {where}")
        numbers.append(own[0])
    if "blockIdx" not in file.code and file.exercise.items != "1":
        return [*lines,
                "The index leaves out blockIdx.x, so every block does the work of the first."]
    barrier = found["barrier"][1] if Path(found["barrier"][0]) == file.path else 0
    # behind the barrier that both have passed come the lines below it, then those above it
    a, b = sorted(numbers, key=lambda line: (line <= barrier, line))
    between = f"comes between line {a} and line {b}{' of the next turn' * (a > b)}"
    why = found["why"].replace("comes between", between if 0 < a != b > 0 else "comes between")
    return [*lines, why, *may_happen(found, file)]


def without_value(file):
    """The lines of a student's file that declare a variable and give it no value."""
    for number, line in enumerate(file.code.splitlines(), 1):
        for _ in range(3):  # brackets within brackets
            line = re.sub(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", "@", line)
        declared_there = re.match(r"\s*(?:float|double|int|unsigned|size_t)\s+([^;(]*);", line)
        names = declared_there[1].split(",") if declared_there else ()
        if any(re.fullmatch(r"\s*\w+\s*", name) for name in names):
            yield file.quoted(number)


def unset_lines(file, found):
    """The lines on a result that depends on what nobody has written. found: {"kinds": of
    trial.UNSET, "lane": [file, line, thread, lane] or None}."""
    lines = []
    if "lanes" in found["kinds"] and found["lane"]:
        name, line, thread, lane = found["lane"]
        own = Path(name) == file.path
        lines += [f"a shuffle reads from a lane that its mask leaves out: lane {thread % 32} of "
                  f"warp {thread // 32} reads from lane {lane}, and gets any number",
                  file.quoted(line) if own else f"{Path(name).name}, line {line}",
                  "usually: lanes without an item have returned, or the mask is that of an if. "
                  "Keep all lanes, and give those without an item a neutral number"]
    if "variables" in found["kinds"]:
        unset = [file.quoted(i) for i, line in enumerate(with_unset(file.text).splitlines(), 1)
                 if " UNSET(" in line]
        lines += [f"a variable is read before it gets a value: {place}" for place in unset[:2]]
        lines.append("usually: write float sum = 0.0f, or LOWEST for a maximum")
    if "outputs" in found["kinds"]:
        lines += ["it reads an output that it has not written: what is there at the start may be "
                  "any number", "usually: it is on the right of an =, or of a += that should be ="]
    if "shared" in found["kinds"]:
        lines += ["a number of shared memory is read that no thread of the block has written",
                  *file.quoted_with(r"__shared__|DYNAMIC_SHARED")[:2],
                  "usually: only threads with an item, or a column, store, and a loop reads all. "
                  "Let the others store a neutral number, such as 0"]
    return lines


def order_lines(file, text):
    """The lines on what Bench.check says: results that depend on the order of the threads, or a
    changed input."""
    if text.startswith("changed"):
        return [f"it {text}",
                "usually: it is on the left of an =, or an index of another array is far too large"]
    unset = list(without_value(file))[:1]
    usual = "one thread reads what another one writes, and no barrier or atomicAdd orders them"
    if unset:
        usual = "this variable is read before it gets a value: write sum = 0.0f, for example"
    what = text.removeprefix("has a race: ").replace("in the order 1,", "in a random order,")
    return [f"its result depends on the order in which threads run: {what}", *unset,
            f"usually: {usual}"]


def waiting_lines(file, sure=False):
    """The lines on a block that waits in a loop for another one; [] if there is no such loop. sure:
    it ended when the blocks came in order."""
    names = re.findall(r"\bvolatile\b[^;=(]*?\b(\w+)\s*(?:\[[^;]*\])?\s*[;=]", file.code)
    seen = "|".join([r"atomic\w+\(", r"__ldc[gv]\(", r"volatile\b",
                     *(rf"{name}\b" for name in names)])
    places = file.quoted_with(rf"\bwhile\s*\((?:[^()]|\([^()]*\))*?\b(?:{seen})")
    if not (places or sure):
        return []
    if file.exercise.items == "1":
        return ["it does not end: a thread waits in a loop for another one, and here one thread "
                "runs after another. Wait with __syncthreads()", *places[:2]]
    return ["it does not end: block b waits for block b-1, or another one, and CUDA promises no "
            "order of blocks. Those that run may wait for ever for one that gets no place",
            *places[:2], "usually: let the last block that adds to a counter do the rest, or take "
            "the number of a block from atomicAdd, in the order in which they begin"]


def complaint_lines(file, events, status, stderr, sanitize):
    """The lines on what a run found; [] if the file is right, None if the run says nothing about
    it."""
    compiler = [event for event in events if event["event"] == "compiler"]
    if compiler:
        return compiler_lines(file, compiler[0]["text"], compiler[0]["dtype"])
    refusal = [event["text"] for event in events if event["event"] == "refusal"]
    if refusal:  # no compiler, or no folder for what it makes
        raise UserError(refusal[0])
    own = [event for event in events
           if event.get("file") == str(file.path) or event["event"] == "order"]
    lines = failure_lines(file, own, status, stderr, sanitize)
    return with_plane(file, lines) if lines else lines


def failure_lines(file, own, status, stderr, sanitize):
    """The same of a file that compiles, from the events that name it."""
    begun = [event for event in own if event["event"] == "begins"]
    at = [f"at the sizes {begun[-1]['sizes']}, in {begun[-1]['dtype']}" if begun else ""]
    told = [event for event in own if event["event"] == "complaint"]
    if begun and (told or status):
        at = [*cast_lines(file, begun[-1]["dtype"]), *at]
    if told:
        kind, text = told[0]["kind"], told[0].get("text", "")
        if kind == "stuck":
            return [*stuck_lines(file, text), *at]
        if kind == "found race":
            return [*race_lines(file, told[0]), *at]
        if kind in ("waste", "deep"):
            return [*told[0]["lines"], *at]
        if kind == "outside":
            place = (told[0][key] for key in ("name", "number", "shape"))
            return [*own_names(file, [beyond("writes", *place)]), *at]
        if kind == "unset":
            hidden = ", in a run where what nobody wrote had other bits" * told[0]["hidden"]
            return [*own_names(file, [f"wrong: {text}{hidden}"]), *unset_lines(file, told[0]), *at]
        if kind == "race":
            return [*order_lines(file, text), *at]
        return [*own_names(file, [f"wrong: {text}", *told[0]["lines"]]), *at]
    if status in (-signal.SIGALRM, -signal.SIGVTALRM):
        if lines := waiting_lines(file, own[-1]["event"] == "order"):
            return [*lines, *at]
        loops = " and in line ".join(map(str, file.numbers_with(LOOP)))
        which = f" There is one in line {loops}." if loops else ""
        return [f"it did not end within {begun[-1]['limit']} seconds. Does a loop never "
                f"end?{which}", *at]
    if sanitize and begun and status:
        lines = sanitizer_lines(file, begun[-1], stderr)
        if lines:
            return [*own_names(file, filter(None, lines)), *at]
    if status < 0:
        name = signal.Signals(-status).name
        return [f"it crashed ({name}): most likely an index is far outside of its array", *at]
    if any(event["event"] == "right" for event in own):
        return []
    if status and begun:
        return [f"it ended its process with status {status}: "
                f"{' '.join(stderr.strip().splitlines()[-1:])}", *at]
    return None
