"""Test the lab's exercises: the lab's own versions solve them, and each planted mistake is
explained."""
import os
import re
from unittest import mock

import pytest

from dev.lab import grade
from dev.lab.exercises import ORDER, exercise_names
from dev.lab.ladder import KERNELS
from dev.lab.submission import template
from dev.lab.tests.changed_students import STUDENTS
from dev.lab.tests.student import (
    LAYERNORM, NUMBER, SOFTMAX, body_of, complaints, exercise, filled, run_child, said, solution)
from dev.tests.checks import TOP, check

# ---- Solutions


def grade_together(folder, texts, look_for=None, dtypes=("fp32",), **more):
    """{name: complaint lines} of files that are compiled together."""
    paths = {name: folder / f"{name}.cu" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    found = complaints(paths.values(), grade.Job(look_for, [*dtypes], 0),
                       {grade.BOUNDS: grade.sanitizer_variables()}, **more)
    return {name: complaint[1] if (complaint := found[path][0]) else []
            for name, path in paths.items() if path in found}


def test_solutions(folder):
    """The lab's own versions are right."""
    names = exercise_names()
    for name, lines in grade_together(folder,
                                      {f"my_{name}": solution(name) for name in names}).items():
        check(f"{name}: the lab's version solves it", lines == [], "" if lines == [] else lines)
    missing = set(ORDER) - set(names)
    check("every exercise's kernel is in the lab", not missing, missing or "")


@pytest.mark.longest
def test_drawn(folder):
    """Of each exercise's solution the race finder makes a drawing."""
    variables = grade.race_variables()
    if not variables:
        pytest.skip("this compiler finds no races")
    paths = [folder / f"my_{name}.cu" for name in exercise_names()]
    for path, name in zip(paths, exercise_names()):
        path.write_text(solution(name))
    every = [str(path) for path in paths]
    events, *_ = run_child(dict(compile=every, run=every, look_for=grade.RACES, limit=60,
                                dtypes=["fp32"], waste=True, races=True), variables)
    lines, begun = {}, ""
    for event in events:
        begun = event["file"] if event["event"] == "begins" else begun
        if event["event"] == "drawn" and event["lines"]:
            lines[begun] = event["lines"]
    for path in every:
        found = lines.get(path, [])
        check(path, len(found) > 1 and found[0].startswith("who writes ") and
              "block 0: thread" in found[1], found)


def test_forgotten(folder):
    """Without blockIdx.x each exercise is wrong, even with the largest block; a plane also without
    blockIdx.y."""
    texts = {}
    for name in exercise_names():
        head, block, kernel = re.split(r"^(BLOCK.*\n)", solution(name), flags=re.M)
        if name != "global_norm":  # which has one block
            kernel = re.sub(r"\bfirst_number\(\)",
                            "(W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x))", kernel)
            assert "blockIdx.x" in kernel, name
            block = re.sub(r"\d+(?=, threads\))", "1024", block)
            texts[f"my_{name}"] = head + block + kernel.replace("blockIdx.x", "0")
    for x, y in (("blockIdx.x", "0"), ("0", "blockIdx.y")):
        body = PLANE.replace("blockIdx.x", x).replace("blockIdx.y", y)
        suffix = f"_without_{'y' if y == '0' else 'x'}"
        texts[f"my_matmul_forward{suffix}"] = filled("matmul_forward", body, suffix,
                                                     block="BLOCK(1024, 32, 32)")
    texts["my_matmul_forward_right"] = filled("matmul_forward", PLANE, "_right",
                                              block="BLOCK(1024, 32, 32)")
    found = grade_together(folder, texts, dtypes=("bf16",))
    found |= grade_together(folder, {name: text for name, text in texts.items()
                                     if name not in found})  # which have no bf16
    check("all have run", found.keys() == texts.keys(), texts.keys() - found.keys())
    for name, lines in found.items():
        ok = lines and re.match("wrong: |it has a race: |it writes |its result depends on the "
                                "order ", lines[0])
        check(f"{name} without blockIdx", lines == [] if name.endswith("right") else ok,
              lines or "it was accepted")


# ---- Mistakes


RESIDUAL = body_of(KERNELS / "residual_forward.cu", "residual_forward1")
# One warp per row.
WARPS = body_of(STUDENTS / "softmax_forward_warps_return_early.cu", "my_softmax_forward")
WARP_NORM = """
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, start = threadIdx.x % 32;
    if (row >= N) return;
    float m = 0.0f, variance = 0.0f;
    for (int c = start; c < C; c += 32) m += residual[(size_t)row * C + c];
    m = warp_sum(m) / C;
    for (int c = start; c < C; c += 32) variance += powf(residual[(size_t)row * C + c] - m, 2.0f);
    float s = 1.0f / sqrtf(warp_sum(variance) / C + 1e-5f);
    for (size_t i = (size_t)row * C + start; i < (size_t)(row + 1) * C; i += 32) {
        from_float(copy[i], residual[i]);
        from_float(out[i], (residual[i] - m) * s * to_float(weight[i % C]) + to_float(bias[i % C]));
    }
    if (start == 0) mean[row] = m, rstd[row] = s;
"""
GELU = NUMBER + """
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    from_float(out[i], 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))));
"""
# A block of 64 threads per row of the residual stream, whose sum is made in shared memory: for
# rmsnorm's square root.
BLOCK_ROW = """
    __shared__ float part[64];
    size_t start = (size_t)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += 64) {
        float x = residual[start + c] + to_float(branch[start + c]);
        residual[start + c] = x;
        from_float(copy[start + c], x);
        sum += x * x;
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    float s = 1.0f / sqrtf(part[0] / C + eps);
    for (int c = threadIdx.x; c < C; c += 64)
        from_float(out[start + c], residual[start + c] * s * to_float(weight[c]));
    if (threadIdx.x == 0) rstd[blockIdx.x] = s;
"""


# A block takes a tile of out.
PLANE = """
    int oc = blockIdx.x * 32 + threadIdx.x % 32, n = blockIdx.y * 32 + threadIdx.x / 32;
    if (oc >= OC || n >= N) return;
    float sum = to_float(bias[oc]);
    for (int c = 0; c < C; c++)
        sum += to_float(inp[(size_t)n * C + c]) * to_float(weight[(size_t)oc * C + c]);
    from_float(out[(size_t)n * OC + oc], sum);
"""


class Mistake:
    def __init__(self, name, kernel, body, wish, *change, block="", dtypes=("fp32",)):
        """change: what is replaced by what in a right body. wish: what the complaint says, a
        regular expression."""
        assert not change or body.count(change[0]) == 1, f"{name}: {body.count(change[0])}"
        self.name, self.kernel, self.wish, self.block, self.dtypes = (name, kernel, wish, block,
                                                                      dtypes)
        self.body = body.replace(*change) if change else body


# The same, with a block of 32 x 32 threads in mind.
PLANE_Y = PLANE.replace("threadIdx.x / 32", "threadIdx.y")
PLANE_Y = PLANE_Y.replace("threadIdx.x % 32", "threadIdx.x")
ROW, WARP = "BLOCK(64, 1)", "BLOCK(256, threads / 32)"
RUNS = (  # that the comparison with NumPy finds; test_causes.py has more wrong numbers
    Mistake("empty body", "residual_forward", "\n", "out.0,0. was never written, expected "
            "-?[0-9.]+ where:.*nothing was written to out"),
    Mistake("grid too small", "residual_forward", RESIDUAL, "end of out was never written. .*BLOCK",
            block="BLOCK(256, 2 * threads)"),
    Mistake("bound of rows", "residual_forward", RESIDUAL,
            "out.0,27. was never written.*bound of the if",
            "(size_t)N * C)", "N)"),
    Mistake("no blockIdx", "residual_forward", RESIDUAL,
            "out.2,64. was never written.*leaves out blockIdx",
            "(size_t)blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
    Mistake("no blockIdx in a norm", "layernorm_forward", LAYERNORM,
            "out.1024,0. was never .*leaves out blockIdx",
            "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x", block="BLOCK(1024, threads)"),
    Mistake("a block size in the index", "residual_forward", RESIDUAL, None, "blockDim.x", "256"),
    Mistake("right by the block size", "residual_forward", RESIDUAL,
            "never written.*in blocks of 64 threads",
            "blockDim.x", "(blockDim.x * blockDim.x >> 7)", block="BLOCK(128, threads)"),
    Mistake("comment behind BLOCK", "residual_forward", RESIDUAL, None,
            block="BLOCK(256, threads)  // a thread (of 256), a number"),
    Mistake("relative error", "residual_forward", RESIDUAL, "expected [-0-9.]+ where:", "+ to",
            "+ 2 * to"),
    Mistake("overflow", "gelu_forward", NUMBER + """
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]), u = 0.7978845608f * (x + 0.044715f * x * x * x);
    from_float(out[i], x / 2 * (1 + (expf(u) - expf(-u)) / (expf(u) + expf(-u))));
""", "is nan, .*inp is .* there.*why: e.u is infinite"),
    Mistake("no maximum", "softmax_forward", SOFTMAX, "row 25 of 27, column 0.*row of inp has "
            "numbers from -20.*Subtract the row's largest number",
            "top = fmaxf(top, to_float(x[v]))", "top = 0.0f"),
    Mistake("last column", "softmax_forward", SOFTMAX, "column 256, the last before V = 257.*last "
            "columns were never written", "v < Vp; v++)", "v < Vp; v++) if (v != V - 1)"),
    Mistake("lanes", "softmax_forward", WARPS, None, block=WARP),
    Mistake("lanes of a norm", "layernorm_forward", WARP_NORM, None, block=WARP),
    Mistake("no warp_sum", "softmax_forward", WARPS, "is warp_sum missing", "sum = warp_sum(sum);",
            "", block=WARP),
    Mistake("no warp_max", "softmax_forward", WARPS, "is warp_max missing", "top = warp_max(top);",
            "", block=WARP),
    Mistake("neither warp_sum nor warp_max", "softmax_forward",
            WARPS.replace("top = warp_max(top);", ""),
            "is warp_sum missing", "sum = warp_sum(sum);", "", block=WARP),
    Mistake("warp_sum of a wrong sum", "softmax_forward", WARPS, "compare the sums over the row",
            "sum += expf",
            "sum += 1 + expf", block=WARP),
    Mistake("return before warp_max", "softmax_forward", WARPS,
            "stuck in (__shfl_xor_sync|warp_max).* (17|34) of the 64 threads .*line \\d+: top = "
            "warp_max.top.;",
            "if (row >= N) return;",
            "if (row >= N || lane > 16) return;",
            block="BLOCK(64, threads / 32)"),
    Mistake("cancels", "layernorm_forward", LAYERNORM, "a mean of \\d+ deviations.*mean.2 cancels",
            "variance += (x[c] - m) * (x[c] - m);", "variance += x[c] * x[c] - m * m;"),
    Mistake("cut off", "residual_forward", NUMBER + """
    if (i >= (size_t)N * C) return;
    float x = to_float(inp1[i]) + to_float(inp2[i]);
#ifdef BF16
    out[i].bits = __float_as_uint(x) >> 16;
#else
    out[i] = x;
#endif
""", "in bf16.*|bf16 was cut off", dtypes=("fp32", "bf16")),
    Mistake("block of a row", "rmsnorm_forward", BLOCK_ROW, None, block=ROW),
    Mistake("race without barrier", "rmsnorm_forward", BLOCK_ROW,
            "depends on the order .*reads what another",
            "        __syncthreads();\n    }\n    float", "    }\n    float",
            block=ROW),
    Mistake("race before the sum", "rmsnorm_forward", BLOCK_ROW,
            "depends on the order .*no barrier",
            "    part[threadIdx.x] = sum;\n    __syncthreads();", "    part[threadIdx.x] = sum;",
            block=ROW),
    Mistake("barrier in an if", "rmsnorm_forward", BLOCK_ROW, "stuck in __syncthreads: \\d+ of the "
            "64 threads .*line \\d+: if .threadIdx.x < half. .*inside an if",
            "half) part[threadIdx.x] += part[threadIdx.x + half];\n        __syncthreads();",
            "half) { part[threadIdx.x] += part[threadIdx.x + half]; __syncthreads(); }", block=ROW),
    Mistake("return before a barrier", "rmsnorm_forward", BLOCK_ROW, "stuck in __syncthreads: 40 "
            "of the 64 threads .*threads 40-63 have returned", "    float sum = 0.0f;\n",
            "    float sum = 0.0f;\n    if (threadIdx.x >= 40) return;\n", block=ROW),
    Mistake("warp_sum in an if", "rmsnorm_forward", BLOCK_ROW, "stuck in .*warp_sum.* "
            "line \\d+: if .threadIdx.x % 32 < 20. sum = ",
            "    float s =", "    if (threadIdx.x % 32 < 20) sum = warp_sum(sum);\n    float s =",
            block=ROW),
    Mistake("outside of out", "residual_forward", RESIDUAL,
            "writes out.2592., .* out.2591. .27 rows of 96 ",
            "if (i < (size_t)N * C)", "if (i >= (size_t)N * C) from_float(out[i], 0.0f); else"),
    Mistake("blocks of two dimensions", "matmul_forward", PLANE_Y, "^wrong: out.1,0. was never "
            "written, expected [-0-9.]+ blocks are one-dimensional .*as in BLOCK.1024, 32, 32.*"
            r"line \d+: int oc = (?!.*usually)", block="BLOCK(1024, 32, 32)"),
    Mistake("rows by blockIdx.y", "residual_forward", """
    int row = blockIdx.y * blockDim.y + threadIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
    size_t i = (size_t)row * C + c;
    if (row < N && c < C) from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
""", r"^wrong: out.1,0. was never .* the grid are one-dimensional .* i / C.*line \d+: int row"),
    Mistake("threadIdx.y is 0", "residual_forward", RESIDUAL, None, "+ threadIdx.x;",
            "+ threadIdx.x + threadIdx.y;"),
    Mistake("input changed", "residual_forward", RESIDUAL, "changed inp1", "if (i <",
            "if (i == 7) const_cast<real*>(inp1)[i] = real(); if (i <"),
)
BOUNDS = (  # that the sanitizers find
    Mistake("write past the end", "residual_forward", RESIDUAL,
            "(writes|reads) (out|inp1|inp2).2592., .*2591. .27 rows of 96 .* line \\d+: if .i <= ",
            "if (i <", "if (i <="),
    Mistake("no bound", "residual_forward", RESIDUAL, "(writes|reads) .*.2592., .*line \\d+: from",
            "if (i < (size_t)N * C) ", ""),
    Mistake("read past the end", "layernorm_forward", LAYERNORM,
            "reads residual.2592., .* residual.2591.*line \\d+: for .int c = 0; c <= C; c\\+\\+. m",
            "c < C; c++) m", "c <= C; c++) m"),
    Mistake("read before the beginning", "residual_forward", RESIDUAL,
            "reads inp2.-1., .* inp2.0. line", "inp2[i]",
            "inp2[(long)i - 1]"),
    Mistake("guarded output", "residual_forward", RESIDUAL, "writes out.2592., .*line",
            "if (i < (size_t)N * C)", "if (i >= (size_t)N * C) from_float(out[i], 0.0f); else"),
    Mistake("shared array", "rmsnorm_forward", BLOCK_ROW, "index 64 .*float .64.*line",
            "float s = 1.0f / sqrtf(part[0]", "float s = 1.0f / sqrtf(part[64 - threadIdx.x]",
            block=ROW),
    Mistake("null pointer", "residual_forward", RESIDUAL, "(null|does not exist).*line \\d+",
            "to_float(inp2[i])",
            "to_float(((const real*)nullptr)[i])"),
)
ALONE = (  # that are compiled alone
    Mistake("no semicolon", "residual_forward", RESIDUAL,
            "not compile: expected .*;.*line before.* line \\d+: ",
            "threadIdx.x;", "threadIdx.x"),
    Mistake("unknown name", "residual_forward", RESIDUAL,
            "not compile: inp3 is declared nowhere((?!or at).)*line \\d+: if", "inp2", "inp3"),
    Mistake("no closing brace", "residual_forward", RESIDUAL, "a { has no }: .* 2 of { and 1 of }$",
            "if (i <",
            "{ if (i <"),
    Mistake("no opening brace", "residual_forward", RESIDUAL,
            "a } has no {: .* 1 of { and 2 of } .*line \\d+",
            "i]));\n", "i])); }\n"),
    Mistake("real is no float", "gelu_forward", GELU,
            "in bf16: .*line \\d+: float x.*write to_float.inp.i..",
            "to_float(inp[i])", "inp[i]", dtypes=("fp32", "bf16")),
    Mistake("real is no float, nor what it is stored to", "gelu_forward", GELU,
            "in bf16: .*write to_float.inp.i..",
            "from_float(out[i], 0.5f", "out[i] = 0 * tanhf(inp[i]) + (0.5f",
            dtypes=("fp32", "bf16")),
    Mistake("float is no real", "gelu_forward", GELU, "in bf16: .*write from_float.out.i., ...",
            "from_float(out[i], 0.5f", "out[i] = (0.5f", dtypes=("fp32", "bf16")),
    Mistake("endless loop", "residual_forward", RESIDUAL, "within 2 seconds.* line \\d+", "if (i <",
            "for (volatile int n = 0; n < 1; n *= 2) {}\n    if (i <"),
)


def test_mistakes(folder):
    """Each mistake gets its own explanation."""
    def text(key, m):
        return filled(m.kernel, m.body, key.removeprefix(m.kernel), block=m.block)

    def check_all(table, look_for=None, dtypes=("fp32",), **more):
        every = {f"my_{m.kernel}_{i}": m for i, m in enumerate(table)}
        texts = {name: text(name.removeprefix("my_"), m) for name, m in every.items()}
        found = grade_together(folder, texts, look_for, dtypes, **more)
        for name, m in every.items():
            lines = found[name]
            ok = lines == [] if m.wish is None else lines and re.search(m.wish, said(lines))
            check(f"mistake: {m.name}", ok, "" if ok else lines)

    check_all(RUNS, dtypes=("fp32", "bf16"))
    if grade.sanitizer_variables():
        check_all(BOUNDS, grade.BOUNDS)
    else:
        print("skipped: this compiler has no AddressSanitizer")
    for m in ALONE:
        check_all([m], dtypes=m.dtypes, limit=2)


# ---- Files and the command line


def refused(folder, name, wish, *arguments):
    status, _, error = exercise(folder, *arguments)
    check(f"refusal: {name}", status == 1 and re.fullmatch(f"error: .*{wish}.*\n", error), error)


def test_files(folder):
    """The files that the command writes, and what it refuses."""
    status, text, _ = exercise(folder)
    names = re.findall(r"^ *\d+  (\w+)", text, re.M)
    check("the list, from easy to hard",
          status == 0 and names[0] == "residual_forward" and names.index("attention_backward") >
          names.index("attention_forward") > names.index("softmax_forward"), names[:3])
    status, text, _ = exercise(folder, "softmax_forward")
    path = folder / "my_softmax_forward.cu"
    check("a file is written", status == 0 and path.exists(), text.strip())
    for name, text, wishes in (
            ("softmax_forward", path.read_text(), (
                r"out \(N,Vp\) = softmax\(inp\)", r"out +real \(N,Vp\) +written",
                "inp +real .* read",
                "--exercise softmax_forward --hint", "def softmax", r"warp_sum\(x\)",
                r"BLOCK\(32, threads\)\nextern",
                r"my_softmax_forward\(\n? *real\* out")),
            ("gelu_forward", template("gelu_forward"), (
                r"out \(N,OC\) = gelu", r"x/2 \(1 \+ tanh\(u\)\), with u")),
            ("matmul_forward", template("matmul_forward"), (
                r"32 columns \(of OC\) and 32 rows", "x = threadIdx.x % 32",
                r"BLOCK\(1024, 32, 32\)(.*\n){3}.*lane"))):
        for wish in wishes:
            check(f"{name} says {wish}", re.search(wish, text))
    for name in exercise_names():
        text = template(name)
        shapes = re.findall(r"(?:real|float|int|size_t) \(([^)]*)\)", text)
        check(f"{name}: its file", shapes and max(map(len, text.splitlines())) <= 120, shapes)

    body = RESIDUAL.replace("if (i < (size_t)N * C) ", "")
    first = template("residual_forward").replace("{\n\n}", f"{{{body}}}").splitlines()
    line = next(f"line {i}: {text.strip()}" for i, text in enumerate(first, 1)
                if "from_float(out[i], to_" in text)
    check("the README's first line", line in (TOP / "dev/lab/README.md").read_text(), line)

    written = path.read_text()
    path.write_text(written + "// mine\n")
    refused(folder, "never over a file", "my_softmax_forward.cu exists", "softmax_forward")
    check("  which is left", path.read_text().endswith("// mine\n"))
    refused(folder, "unknown exercise", "sofmax_forward; did you mean softmax_forward",
            "sofmax_forward")
    refused(folder, "file that is not there", "my_nothing.cu: .*read.*; .*NAME. writes",
            "my_nothing.cu")
    refused(folder, "a file's name without its end", "the file my_softmax_forward.cu",
            "my_softmax_forward")
    with mock.patch("builtins.open", side_effect=PermissionError(13, "Permission denied")):
        refused(folder, "folder that cannot be written", "written .Permission denied.",
                "gelu_forward")
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=os.devnull):
        refused(folder, "a cache that cannot be written", "null/train_gpt2.*XDG_CACHE_HOME",
                path.name)
    (folder / "my_rmsnorm_forwrd.cu").write_text("int main() {}\n")
    refused(folder, "a name like the file's", "such as my_rmsnorm_forward;", "my_rmsnorm_forwrd.cu")
    block, rest = written[written.index("\nBLOCK("):].split("\n", 2)[1:]
    whole = f"{block}\n{rest}"
    for name, wish, text in (
            ("file without a kernel", "no kernel of an exercise", "int main() {}\n"),
            ("kernel without BLOCK", "my_softmax_forward .*BLOCK", rest),
            ("missing parameter", r"wrong parameters, .*\); expected .real\* out",
             whole.replace("int V, ", "")),
            ("parameter", "my_softmax_forward .* double V.*; expected .*int V, int Vp",
             whole.replace("int V", "double V")),
            ("another name", "expected one such as my_softmax_forward;",
             whole.replace("softmax_f", "softmaxf")),
            ("two kernels", "one kernel of an exercise",
             whole + whole.replace("my_softmax", "my_gelu", 1)),
            *((wrong, wish, f"// one\n/* two\n*/\n{wrong}\n{rest}") for wrong, wish in (
                ("BLOCK(2048, threads)", "at most 1024"),
                ("BLOCK(32, 1, 1)", "BLOCK.threads, items"),
                ("BLOCK(256)", r"line 4: BLOCK\(256\): expected BLOCK\(threads, items\), .*number"),
                ("BLOCK(256 threads)", r"line 4: BLOCK\(256 threads\): expected BLOCK"),
                ("BLOCK(B, threads)  // B",
                 r"line 4: BLOCK\(B, threads\): expected BLOCK.* number"),
                ("BLOCK(64, (threads / 32))",
                 r"line 4: .*\): expected BLOCK.* without parentheses"),
                ("BLOCK(16 * 16, 16, 16)", r"a number, such as BLOCK\(256, 16, 16\)"),
                ("BLOCK(dim3(16, 8), threads)",
                 r"a number, such as BLOCK\(128, threads\); blocks are one-dimensional"),
                ("BLOCK(32, thread)", "BLOCK over my_softmax_forward: .*'thread'"),
                ("BLOCK(32, 0 * threads)", "BLOCK over my_softmax_forward: .*nothing")))):
        (folder / "other.cu").write_text(text)
        refused(folder, name, wish, "other.cu")


def test_whole(folder):
    """The command checks a file from end to end, also without a sanitizer."""
    path, right = folder / "my_residual_forward.cu", filled("residual_forward", RESIDUAL)
    sanitizer = grade.sanitizer_variables()
    path.write_text(right)
    status, text, _ = exercise(folder, path.name)
    check("right", status == 0 and "right, at all sizes, in fp32 and bf16" in text, text)
    check("its accesses", ("no access is out of bounds" in text) == (sanitizer is not None), text)
    check("its races",
          ("no two threads are in a race" in text) == (grade.race_variables() is not None), text)
    check("  and who writes what", not grade.race_variables() or re.search(
        r"\n    who writes out in blocks 0 and 1 of 11, .*\n"
        r"      out\[0\]  block 0: threads 0-95\n", text), text)
    path.write_text(right, encoding="utf-8-sig")  # as some editors do, with a byte order mark
    with mock.patch.multiple("dev.lab.grade", sanitizer_variables=lambda: None,
                             race_variables=lambda: None):
        status, text, _ = exercise(folder, path.name)
    check("no sanitizer, no hooks", status == 0 and re.search(
        "no AddressSanitizer\n.*races were not looked for, which needs g.. 11", text), text)
    path.write_text(filled("rmsnorm_forward",
                           BLOCK_ROW.replace("part[threadIdx.x] = sum;\n    __syncthreads();",
                                                                "part[threadIdx.x] = sum;"),
                           block=ROW))
    status, text, _ = exercise(folder, path.name)
    check("a race", status == 1 and (not grade.race_variables() or re.search(
        r"race on part\[32\]:\n.*line \d+: if .*half\].*\n.*line \d+: part\[threadIdx.x\] = sum",
        text)), text)
    path.write_text(right.replace(") + to", ") - to"))
    with mock.patch("dev.lab.grade.sanitizer_variables", return_value=None):
        status, text, _ = exercise(folder, path.name)
    check("wrong", status == 1 and "wrong: out[0,0]" in text, text)
    check("  and drawn",
          not grade.race_variables() or "out[0]  block 0: threads 0-95" in text, text)
