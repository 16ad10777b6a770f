"""Test what is said of mistakes with CUDA's words: a lane that does not come, a race, a word that
is not there.
"""

import os
import re
from unittest import mock

import numpy as np

from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.cpu.host import compiler_of
from dev.lab import drawing
from dev.lab.explain import (compiler_lines, may_happen, printed_lines, unbalanced,
                             warning_lines)
from dev.lab.submission import Submission
from dev.lab.tests.student import said
from dev.tests.checks import check, refusal
from dev.tests.small_kernels import HEAD, built, kernel, launch, of_files
from train_gpt2 import UserError

STUCK = (  # what the kernel does, what is said; {n} is the number of the line that ends in //!
    ("if (t < 16) out[t] = __shfl_sync(0xffffffffu, in[t], 0);  //!",
     "stuck: threads 16-63 have returned; threads 0-15 wait in __shfl_sync at line {n} of"),
    ("if (t < 9) out[t] = slowest(in[t]);",
     "threads 0-8 wait in __shfl_xor_sync at line 4 of words.cu, called at line {n}"),
    ("if (t >= 32) return;\n    out[t] = __shfl_xor_sync(0xffffu, in[t], 1);  //!",
     "threads 16-31 wait in __shfl_xor_sync with the mask 0x0000ffff, which leaves out the lane "
     "that calls, at line {n} "),
    ("if (t < 4) __syncwarp(t < 2 ? 0xfu : 0x7u);  //!",
     "with the mask 0x0000000f, where thread 2 has the mask 0x00000007, at line {n}"),
    ("if (t < 4) out[t] = __any_sync(0x1fu, t);  //!",
     "threads 0-3 wait in __any_sync with the mask 0x0000001f at line {n}"),
    ("if (t < 40) __syncthreads_count(t);  //!",
     "threads 0-39 wait in __syncthreads_count at line {n} of words.cu"),
    ("if (t == 5) assert(in[t] > 2.0f);  //!",
     r"block \(0, 0, 0\), thread 5: assert\(in\[t\] > 2.0f\) is false at line {n}"),
    ("if (t == 6) __trap();  //!", "thread 6: __trap\\(\\) is called at line {n}"),
)


def test_stuck(folder):
    """A lane that does not come, or that a mask leaves out; with the student's own line."""
    text, lines = HEAD, []
    for k, (body, _) in enumerate(STUCK):
        text += kernel(f"stuck{k}", "float* out, const float* in", f"    {body}\n")
        lines.append(text.count("\n") - 1)
    device = built("cpu", folder, text)
    for k, ((body, wish), line) in enumerate(zip(STUCK, lines)):
        found = refusal(device.launch, f"stuck{k}", 64, np.zeros(64, np.float32),
                        np.ones(64, np.float32))
        check(body.split("  //")[0].replace("\n", " "),
              found and re.search(wish.replace("{n}", str(line)), found), found)


LOCK = """    __shared__ int lock;
    __shared__ float sum;
    if (t == 0) lock = 0, sum = 0.0f;
    __syncthreads();
    for (bool done = false; !done;)
        if (atomicCAS(&lock, 0, 1) == 0) {
            sum += in[i];
            __threadfence_block();
            atomicExch(&lock, 0);
            done = true;
        }
    __syncthreads();
    out[i] = sum;
"""
LAST_BLOCK = """    if (t == 0) {
        out[blockIdx.x] = in[i];
        __threadfence();
        if (atomicAdd(counter, 1) == gridDim.x - 1) out[0] = out[1] + out[2];
    }
"""
RACES = (  # what a kernel of two warps does; the place that must be named, or ""
    ("a partial mask", "", """    int half = t / 16 % 2;
    part[t] = in[i];
    __syncwarp(half ? 0xffff0000u : 0xffffu);
    out[i] = part[t ^ 3];
"""),
    ("a partial mask, and who is not in it", "part", """    part[t] = in[i];
    __syncwarp(t / 16 % 2 ? 0xffff0000u : 0xffffu);
    out[i] = part[t ^ 16];
"""),
    ("a partial mask that comes around", "", """    part[t] = in[i];
    if (t % 32 < 8) __syncwarp(0xffu);
    if (t % 32 >= 7 && t % 32 < 12) __syncwarp(0xf80u);
    if (t % 32 == 11) out[i] = part[t - 11];
"""),
    ("shuffles that come around order nothing", "part", """    part[t] = in[i];
    if (t % 32 < 8) __shfl_xor_sync(0xffu, 1, 1);
    if (t % 32 >= 7 && t % 32 < 12) __shfl_sync(0xf80u, 1, 7);
    if (t % 32 == 11) out[i] = part[t - 11];
"""),
    ("three who read, and one is not waited for", "part", """    float x = part[t / 32 * 32];
    if (t % 32 < 2) __syncwarp(3u);
    if (t % 32 == 0) part[t] = x;
"""),
    ("shuffles down order nothing", "part", """    part[t] = in[i];
    __shfl_down_sync(0xffffffffu, 1.0f, 1);
    out[i] = part[t ^ 1];
"""),
    ("a ballot orders nothing", "part", """    part[t] = in[i];
    if (__ballot_sync(0xffffffffu, t == 1)) out[i] = part[t ^ 1];
"""),
    ("a ballot between warps", "part", """    part[t] = in[i];
    __ballot_sync(0xffffffffu, 1);
    out[i] = part[t ^ 32];
"""),
    ("__activemask orders nobody", "part", """    part[t] = in[i];
    if (__activemask()) out[i] = part[t ^ 1];
"""),
    ("__syncthreads_or", "", """    part[t] = in[i];
    if (__syncthreads_or(t == 3)) out[i] = part[t ^ 32];
"""),
    ("atomicMax of floats' bits, and a read behind a barrier", "", """    __shared__ unsigned top;
    if (t == 0) top = 0;
    __syncthreads();
    atomicMax(&top, __float_as_uint(in[i]));
    __syncthreads();
    out[i] = top;
"""),
    ("atomicExch, and a plain read", "flag", """    __shared__ int flag;
    if (t == 0) atomicExch(&flag, 1);
    out[i] = flag;
"""),
    ("volatile shared memory, and __syncwarp", "", """    volatile __shared__ float own[2][64];
    own[1][t] = in[i];
    __syncwarp();
    out[i] = own[1][t ^ 1];
"""),
    ("a sum by atomicCAS, as the guide has it", "", """    unsigned* p = (unsigned*)out;
    unsigned old = *p, before;
    do {
        before = old;
        old = atomicCAS(p, before, __float_as_uint(__uint_as_float(before) + in[i]));
    } while (old != before);
"""),
    ("a plain read, and an atomicCAS elsewhere", "out", """    unsigned* p = (unsigned*)out;
    atomicAdd(p, 1u);
    unsigned old = *p;
    atomicCAS(p + 1, old, old + 1);
"""),
    ("a lock", "", LOCK),
    ("a lock without a fence", "sum", LOCK.replace("            __threadfence_block();\n", "")),
    ("a fence of the block, and another block reads", "out",
     LAST_BLOCK.replace("__threadfence", "__threadfence_block")),
    ("a fence of the GPU, and another block reads", "", LAST_BLOCK),
    ("atomics in turn", "", """    atomicAdd(&out[0], in[i]);
    if (t == 63) atomicAdd(&out[3], in[i]);
"""),
    ("atomics of halves that share a word", "",
     "    atomicAdd((__half*)counter + t % 2, __half(1.0f));\n"),
)


NAN = float("nan")
VALUES = (  # what two threads do; the numbers before the first, before the second and behind it
    ("a write, then a read", "if (t == 0) out[0] = in[3]; if (t == 1) out[9] = out[0];",
     (100, 4, 4)),
    ("a read, then a write", "if (t == 0) out[9] = out[1]; if (t == 1) out[1] = in[4];",
     (101, 101, 5)),
    ("two writes", "if (t == 0) out[0] = in[5]; if (t == 40) out[0] = in[6];", (100, 6, 7)),
    ("a third write", "if (t == 0) out[0] = in[5];\n"
     "    if (t == 40) out[0] = in[6], out[0] = in[9];", (100, 6, 7)),
    ("two writes of a line", "if (t < 2) out[0] = in[7 + t];", (100, 8, 9)),
    ("shared memory", "__shared__ float part[9]; if (t == 0) part[0] = in[2];\n"
     "    if (t == 40) out[9] = part[0];", (NAN, 3, 3)),
    ("eight bytes", "if (t == 0) *(double*)out = 1; if (t == 1) out[9] = *(double*)out;", None),
    ("four bytes and two", "if (t == 0) out[0] = 1; if (t == 1) out[9] = *(short*)out;", None),
)


def race_of(device, name, *args):
    try:
        device.launch(name, 64, *args)
    except races.Race as e:
        return e
    return None


def check_values(device):
    """A race has the numbers that its accesses have found and left."""
    device.set_order("forward")
    for k, (name, _, wish) in enumerate(VALUES):
        found = race_of(device, f"values{k}", 100 + np.arange(64, dtype=np.float32),
                        1 + np.arange(64, dtype=np.float32), np.zeros(4, np.int32))
        bits = found and found.bits
        ok = found and (bits is None if wish is None else bits[1:] == (
            4, None if "shared" in name else "float32") and np.array_equal(
                np.array(bits[0], np.uint32).view(np.float32), wish, equal_nan=True))
        check(f"values: {name}", ok, bits or found)


def check_drawings(device):
    """Who was the last to write each number, by plain stores and by atomics."""
    device.set_order("forward")
    for run, wish in (("values0", {0: 0, 9: 1}), ("values2", {0: 40}), ("values1", {1: 1, 9: 0}),
                      (f"races{[name for name, *_ in RACES].index('atomics in turn')}", {
                          0: 63, 3: 63})):
        out, ones = np.ones(64, np.float32), np.ones(256, np.float32)
        with drawing.noted(device, out) as found:
            race_of(device, run, out, ones, np.zeros(4, np.int32))
        there = {int(i): int(found[0][i]) for i in np.flatnonzero(found[0] >= 0)}
        check(f"who writes in {run}", {i: there.get(i) for i in wish} == wish, there)
    with drawing.noted(device, out) as found:  # of four blocks, which all add to two numbers
        device.launch(run, 256, out, ones, np.zeros(4, np.int32))
    check("block 1 comes before those behind it", found[0][0] == 1024 + 63, found[0][:4])


def test_drawings():
    """Who writes a row, in words; and which rows are drawn."""
    for row, wish in (
            (range(96), "block 0: threads 0-95"),
            ([*range(192, 256), *range(1024, 1056)],
             "block 0: threads 192-255; block 1: threads 0-31"),
            ([*range(32)] * 3, "block 0: threads 0-31 (3 times)"),
            ([*range(32)] * 2 + [0, 1], "block 0: threads 0-31 (2 times); threads 0-1"),
            (np.repeat(np.arange(8), 4), "block 0: threads 0-7, 4 numbers each"),
            (range(1000, 1100), "block 0: threads 1000-1023; block 1: threads 0-75"),
            ([0, 0, 1, 2], "block 0: thread 0, 2 numbers; threads 1-2"),
            ([5] * 45, "block 0: thread 5, 45 numbers"), ([1024 + 7], "block 1: thread 7"),
            (range(0, 1024, 32), "block 0: threads 0-992 by 32"),
            ([3, 2, 1, 0], "block 0: threads 3-0 by -1"), ([0, 5], "block 0: thread 0; thread 5"),
            ([0, 1, -1, -1, 2, 3], "block 0: threads 0-1; nobody, 2 numbers; block 0: threads 2-3"),
            ([0, 9, 3, 7, 1], "block 0: thread 0; thread 9; thread 3; thread 7; ...")):
        found = drawing.in_words(np.array(row))
        check(f"row {list(row)[:6]}", found == wish, found)
    who = np.arange(2592).reshape(27, 96)
    who = who // 256 * 1024 + who % 256
    lines = drawing.lines_of("out", who, 11, 256, "C=96")
    check("two blocks", lines == [
        "who writes out in blocks 0 and 1 of 11, with 256 threads each, at the sizes C=96:",
        "  out[0]  block 0: threads 0-95", "  out[1]  block 0: threads 96-191",
        "  out[2]  block 0: threads 192-255; block 1: threads 0-31",
        "  out[3]  block 1: threads 32-127", "  out[4]  block 1: threads 128-223"], lines)
    who[26, 90:] = -1
    lines = drawing.lines_of("out", who.reshape(3, 9, 96), 11, 256, "C=96")
    check("three axes", lines[1].startswith("  out[0,0]  block 0"), lines)
    check("numbers that nobody writes", lines[-1] == "  nobody writes 6 of 2,592 numbers; the "
          "first is out[2,8,90]", lines)
    lines = drawing.lines_of("norm", np.array([0]), 1, 512, "n=32")
    check("one block", lines == ["who writes norm in the only block, of 512 threads, at the sizes "
                                 "n=32:", "  norm  block 0: thread 0"], lines)
    for one in (-1, 2048):
        lines = drawing.lines_of("out", np.full((2, 3), one), 4, 64, "")
        check(f"neither of the two blocks, but {one}", lines == [], lines)


def test_values(folder):
    """What is said of a race's two orders, with the numbers."""
    path = folder / "my_shift.cu"
    path.write_text("__shared__ float x[3]; int y[3]; extern __shared__ int z[];")
    file = Submission(path)
    one, two = "thread 1 of block 0", "thread 2 of block 0"
    half, three, four = (int(np.float32(x).view(np.uint32)) for x in (0.5, 3, 4))
    for (how, then), what, bits, wish in (
            (("writes", "reads"), "x[1]", ((2**32 - 1, half, half), 4, None), [
                f"in this order: {one} writes 0.5, then {two} reads 0.5",
                f"or in the other: {two} reads what nobody has set, then {one} writes 0.5"]),
            (("reads", "writes"), "out[1]", ((half, half, three), 4, "float32"), [
                f"in this order: {one} reads 0.5, then {two} writes 3",
                f"or in the other: {two} writes 3, then {one} reads 3"]),
            (("writes", "writes"), "out[1]", ((half, three, four), 4, "float32"), [
                f"in this order: {one} writes 3, then {two} writes 4, which stays",
                f"or in the other: {two} writes 4, then {one} writes 3, which stays"]),
            (("writes", "writes"), "out[1]", ((0, 0x3F80, 0x4000), 2, "uint16"), [
                f"in this order: {one} writes 1, then {two} writes 2, which stays",
                f"or in the other: {two} writes 2, then {one} writes 1, which stays"]),
            (("writes", "reads"), "z[1]", ((7, 8, 8), 4, None), [
                f"in this order: {one} writes 8, then {two} reads 8",
                f"or in the other: {two} reads 7, then {one} writes 8"]),
            (("writes", "reads"), "q[1]", ((7, 8, 8), 4, None), [
                f"So {two} may read before {one} has written, and get what was there before; or "
                "after it, and get the new number"]),
            (("writes", "writes"), "out[1]", None, [
                f"So {one} may be the last to write, or {two}, and its number stays"])):
        sides = [(f"{one} {how} it", []), (f"{two} {then} it", [])]
        found = dict(what=what, bits=bits, sides=sides)
        lines = may_happen(found, file)
        check(f"{how}, {then}: {what}, {bits}", lines == wish, lines)
    path.write_text("atomicAdd(&x[3], 1); __shared__ float x[3];")
    found |= dict(what="x[3]", bits=((half, half, half), 4, "float32"))
    lines = may_happen(found, Submission(path))
    check("atomics may have changed it", lines == wish, lines)


def test_new_races(folder):
    """Races with these words, and none where they order; and the numbers at their places."""
    if not races.finds_races(compiler_of()):
        return
    text = HEAD + "#include <cuda_fp16.h>\n"
    for k, (_, body, _) in enumerate(VALUES):
        text += kernel(f"values{k}", "float* out, const float* in, int* counter", f"    {body}\n")
    for k, (_, _, body) in enumerate(RACES):
        body = "    __shared__ float part[64];\n" * ("part" in body) + body
        text += kernel(f"races{k}", "float* out, const float* in, int* counter", body)
    with mock.patch.dict(os.environ, CXXFLAGS=f"-O1 {races.FLAG}"):
        device = built("cpu", folder, text)
    for order in ("forward", "reverse", 5):
        device.set_order(order)
        for k, (name, wish, _) in enumerate(RACES):
            found = refusal(device.launch, f"races{k}", 256, np.ones(256, np.float32),
                            np.ones(256, np.float32), np.zeros(4, np.int32))
            ok = re.search(rf"has a race on {wish}", found or "") if wish else not found
            check(f"{order}: {name}", ok, found)
    check_values(device)
    check_drawings(device)


MESSAGES = (  # the body of a kernel, what is said, and a word of the line that is named
    ("out[t] = cube(in[t]);", "cube is declared nowhere", "cube"),
    ("__syncthread();", "__syncthread is declared nowhere; did you mean __syncthreads",
     "__syncthread"),
    ("out[t] = tenfold(in[t]);", "tenfold is used before .* move its function up", "out.t. = tenf"),
    ("out[t] = __dp4a(1, 2, 3);", "CUDA has __dp4a, and the CPU here has not", "__dp4a"),
    ("out[t] = __fmul_rz(1, in[t]);", "CUDA has __fmul_rz, and .* only _rn", "__fmul_rz"),
    ("out[t] = tex1D<float>(0, 1);", "CUDA has tex1D, and", "tex1D"),
    ("wmma::fill_fragment(1, 2);", "CUDA has wmma::fill_fragment", "wmma"),
    ("auto g = cg::this_thread_block();", "CUDA has cg::this_thread_block, and", "cg::"),
    ("cudaMalloc(&out, 3);", "cudaMalloc is for the program around a kernel", "cudaMalloc"),
    ("message0<<<1, 64>>>(out, in);", "<<< is for the program", "<<<"),
    ("out[t] = __shfl_down(in[t], 1);", "gone from CUDA.*write __shfl_down_sync", "__shfl_down"),
    ("__nv_bfloat16 x = in[t];", "needs a line: #include <cuda_bf16.h>", "__nv_bfloat16"),
    ("float4 x = {}; x = x + x;", "CUDA has no . for float4", "float4"),
    ("long x = 0; atomicAdd(&x, 1);", "atomics take pointers to int", "atomicAdd"),
    ("float2 x = {}; __shfl_sync(~0u, x, 1);", "shuffles move one number", "__shfl_sync"),
)
ALONE = (  # what stops the compiler, or comes after it: what stands above the kernel, its body, ...
    ("float cube(float x);", "out[t] = cube(in[t]);",
     r"cube\(...\) has no body: it is declared, and", "float cube"),
    ("__device__ float cube(float x);", "out[t] = cube(in[t]);", r"cube\(...\) has no body",
     "__device__ float cube"),
    ("", "out[t] = __sqrtf(in[t]);", "__sqrtf.* has no body: neither CUDA nor .*did you mean sqrtf",
     "__sqrtf"),
    ("#include <cooperative_groups.h>", "",
     "CUDA has cooperative_groups.h, and the CPU here has not", "cooperative"),
    ("", 'asm volatile("membar.gl;");', "CUDA has PTX", "asm"),
)


def compiled(path, text):
    """(the device, or None; what the compiler says) of a student's file."""
    path.write_text(text)
    with mock.patch.dict(os.environ, LC_ALL="C.UTF-8"):
        try:
            device = Emulated("fp32", of_files(path), students=[path])
        except UserError as e:
            return None, str(e)
    return device, device.warnings


def test_messages(folder):
    """What is said of words that are not there."""

    def told(body, text, wish, place):
        lines = compiler_lines(Submission(path), text, "fp32")
        ok = re.search(wish, said(lines)) and any(
            re.search(rf"line \d+: .*{place}", line) for line in lines)
        check(body, ok, lines)

    path, text, ends = folder / "words.cu", HEAD, []
    for k, (body, *_) in enumerate(MESSAGES):
        text += kernel(f"message{k}", "float* out, const float* in", f"    {body}\n")
        ends.append(text.count("\n"))
    _, every = compiled(path, text + "__device__ float tenfold(float x) { return 10 * x; }\n")
    for (body, *expected), end in zip(MESSAGES, ends):  # what the compiler says of each kernel
        of_kernel = re.search(
            rf"(?m)^.*words.cu:{end - 1}:\d+: error(?s:.*?)(?=^.*words.cu:{end + 2}|\Z)", every
        )
        told(body, of_kernel[0] if of_kernel else "nothing", *expected)
    for above, body, *expected in ALONE:
        _, text = compiled(path, f"{HEAD}{above}\n" + kernel(
            "alone", "float* out, const float* in", f"    {body}\n"))
        told(f"{above} {body}".strip(), text, *expected)


def test_warnings(folder):
    """Warnings, printf, what is not set, a recursion."""
    path = folder / "words.cu"
    text = """__device__ int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }
""" + kernel("warned", "float* out, const float* in", """    float sum;
    for (int v = 0; v < 3; v++) sum += in[v];
    printf("%d {\\n", t / 32 * t);  // "http://here
    out[t] = sum;
    unsigned n = factorial(3);
    if (n >= 0);
    if (t == 1) for (int v = 0; v < out[64]; ) if (in[v] == 7.0f) out[0] = 1;
""")
    for _ in range(2):  # the second time from the cache
        device, said_of_it = compiled(path, HEAD + text)
        lines = warning_lines(Submission(path), said_of_it)
        for wish in ("sum.* uninitialized line \\d+: .*sum", "empty body .*line \\d+: if .n"):
            check(f"a warning: {wish}", re.search(wish, said(lines)), lines)
    check("a brace in a string is none", unbalanced(text) == "", unbalanced(text))
    out = np.zeros(65, np.float32)
    read, write = os.pipe()
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        launch(device, "warned", 64, out, np.ones(64, np.float32))
    finally:
        os.dup2(kept, 2)
        os.close(write)
    with open(read) as pipe:
        lines = printed_lines(pipe.read())
    check("printf goes to stderr, up to 50 lines", lines[:3] == ["0 {"] * 3 and len(lines) == 51
          and lines[-1] == "only the first 50 lines are shown", lines[:4])
    device.launch("warned", 64, out, np.ones(64, np.float32))
    check("what is not set is no usual number", abs(out[1]) > 1e30, out[:3])
