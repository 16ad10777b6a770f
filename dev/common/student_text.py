"""What a student's CUDA file becomes before a compiler reads it, on the CPU and on a GPU.

He may write as for nvcc: include <math.h> and its like, and use FLT_MAX or INFINITY. NVRTC knows no
header of a C library, so the lines that include one are blanked, and HOST_WORDS stand above the
file. Lines keep their numbers.
"""

import re

from dev.common.cuda_source import without_comments

HOST_HEADERS = tuple(
    """assert.h cassert cfloat climits cmath cstddef cstdint cstdio cstdlib cstring float.h limits.h
math.h stddef.h stdint.h stdio.h stdlib.h string.h device_launch_parameters.h cuda_runtime.h
vector_types.h vector_functions.h math_functions.h""".split()
)  # the last five say what both compilers know without them
HALVES = "cuda_bf16.h", "cuda_fp16.h"  # NVRTC finds these in CUDA's own packages
INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)[<"]([\w./]+)[>"]', re.M)
EXTERN = re.compile(
    r"\bextern\s+__shared__\s+(?:(?:__align__|alignas|__attribute__)\s*\(+[^()]*\)+\s*)?"
    r"([\w:][\w:\s]*?)\s+(\w+)\s*\[\s*\]\s*;"
)
HOST_WORDS = dict(
    FLT_MAX="3.402823466e+38f",
    FLT_MIN="1.175494351e-38f",
    FLT_EPSILON="1.192092896e-07f",
    DBL_MAX="1.7976931348623158e+308",
    DBL_MIN="2.2250738585072014e-308",
    DBL_EPSILON="2.2204460492503131e-16",
    CHAR_BIT="8",
    SHRT_MIN="(-32768)",
    SHRT_MAX="32767",
    USHRT_MAX="65535",
    INT_MIN="(-2147483647 - 1)",
    INT_MAX="2147483647",
    UINT_MAX="4294967295u",
    LLONG_MIN="(-9223372036854775807ll - 1)",
    LLONG_MAX="9223372036854775807ll",
    ULLONG_MAX="18446744073709551615ull",
    INT32_MIN="(-2147483647 - 1)",
    INT32_MAX="2147483647",
    UINT32_MAX="4294967295u",
    SIZE_MAX="18446744073709551615ul",
    INFINITY="__int_as_float(0x7f800000)",
    HUGE_VALF="__int_as_float(0x7f800000)",
    NAN="__int_as_float(0x7fffffff)",
    M_E="2.71828182845904523536",
    M_LOG2E="1.44269504088896340736",
    M_LOG10E="0.43429448190325182765",
    M_LN2="0.69314718055994530942",
    M_LN10="2.30258509299404568402",
    M_PI="3.14159265358979323846",
    M_PI_2="1.57079632679489661923",
    M_PI_4="0.78539816339744830962",
    M_1_PI="0.31830988618379067154",
    M_2_PI="0.63661977236758134308",
    M_2_SQRTPI="1.12837916709551257390",
    M_SQRT2="1.41421356237309504880",
    M_SQRT1_2="0.70710678118654752440",
)
HOST_TYPES = dict(
    int8_t="signed char",
    uint8_t="unsigned char",
    int16_t="short",
    uint16_t="unsigned short",
    int32_t="int",
    uint32_t="unsigned int",
    int64_t="long",
    uint64_t="unsigned long",
    intptr_t="long",
    uintptr_t="unsigned long",
)


# A declaration of variables, some of which get no value: (its types and names)
VARIABLES = re.compile(
    r"(?<=[;{}])(\s*)((?:(?:float|double|int|unsigned|long|short|char|bool|size_t|real|float[234]|"
    r"u?int[234]|double2|u?int(?:8|16|32|64)_t)\s+)+)([^;(){}<>?:]*);"
)


def in_functions(code):
    """For each place of a text without comments and strings, whether it lies in a function's body,
    and not in a struct's or a namespace's."""
    inside, kinds, begin = bytearray(len(code)), [False], 0
    for i, letter in enumerate(code):
        inside[i] = kinds[-1]
        if letter == "{":
            before = code[begin:i].strip()
            struct = re.search(r"\b(?:struct|union|class|enum|namespace|extern)\b[^()]*$|=$",
                               before)
            opens = before.endswith((")", "]", "else", "do", "const", "mutable", "noexcept"))
            kinds.append(not struct and (kinds[-1] or opens))
        elif letter == "}" and len(kinds) > 1:
            kinds.pop()
        if letter in ";{}":
            begin = i + 1
    return inside


def with_unset(text):
    """A student's text with cuda.h's UNSET(name) behind the declaration of each variable of a
    function that gets no value: on the CPU it then has the bits that a test chooses."""
    bare = re.sub(
        r'"(?:\\.|[^"\\\n])*"', lambda found: " " * len(found[0]), without_comments(text)
    )
    inside = in_functions(bare)

    def add(found):
        code = bare[found.start() : found.end()]
        if code != found[0] or not inside[found.end() - 1]:
            return found[0]
        names = re.sub(r"\[[^]]*\]", "", found[3]).split(",")
        unset = [name.strip() for name in names if re.fullmatch(r"\s*\w+\s*", name)]
        return found[0] + "".join(f" UNSET({name})" for name in unset)

    return VARIABLES.sub(add, text)


def for_gpu(text):
    """A student's text as NVRTC can compile it. It has more lines above: #line numbers them."""
    words = [
        f"#ifndef {name}\n#define {name} {value}\n#endif\n" for name, value in HOST_WORDS.items()
    ]
    types = [f"typedef {value} {name};\n" for name, value in HOST_TYPES.items()]
    return f"{''.join(words + types)}#line 1\n{without_host_headers(text)}"


def without_host_headers(text):
    return INCLUDE.sub(lambda found: found[0] if found[2] not in HOST_HEADERS else "", text)


def for_cpu(text, halves):
    """A student's text for cuda.h. halves: what to include in place of HALVES."""
    text = with_unset(without_host_headers(text))
    text = INCLUDE.sub(
        lambda found: f'{found[1]}"{halves}"' if found[2] in HALVES else found[0], text
    )
    bare = without_comments(text)

    def shared(found):
        if found[0] != bare[found.start() : found.end()]:
            return found[0]  # in a comment
        of, name, line = found[1], found[2], text.count("\n", 0, found.end()) + 1
        before = bare[: found.start()]
        if before.count("{") > before.count("}"):
            return f"EXTERN_SHARED({of}, {name});" + "\n" * found[0].count("\n")
        return f"\n#define {name} GLOBAL_SHARED({of}, {name})\n#line {line}\n"

    arch = "#ifndef __CUDA_ARCH__\n#define __CUDA_ARCH__ 800\n#endif\n#line 1\n"
    heap = "#define malloc cuda_on_cpu::take\n" if re.search(r"\bmalloc\s*\(", bare) else ""
    heap += "#define new new (cuda_on_cpu::heap)\n" if re.search(r"\bnew\b", bare) else ""
    after = "\n#undef malloc\n#undef new\n" if heap else ""
    return heap + arch + EXTERN.sub(shared, text) + after
