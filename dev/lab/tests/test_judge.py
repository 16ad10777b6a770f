"""Test that the judge's "right" means right: it refuses what only bf16 does, what no GPU compiles
or launches, arrays fitted to the checks' sizes, and waste; and it accepts right kernels in all
dtypes. And what it needs for that: variables without a value, its processes, arrays of the
trainer's sizes.
"""
import ctypes
import math
import re
import resource
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.bf16 import to_bf16
from dev.common.nvrtc import Used, has_nvrtc
from dev.common.student_text import with_unset
from dev.cpu import host
from dev.cpu.races import Work
from dev.lab import grade, large, on_gpus, trial
from dev.lab.bench import compare_output
from dev.lab.exercises import checks_of, exercise_names, find_exercise
from dev.lab.ladder import KERNELS, Draw, find_ladder, larger
from dev.lab.submission import Submission, signature, ways
from dev.lab.tests.changed_students import texts
from dev.lab.tests.student import (
    LAYERNORM, NUMBER, SOFTMAX, body_of, complaints, filled, run_child, said)
from dev.tests.checks import check, fast

RESIDUAL = NUMBER + """
    if (i >= (size_t)N * C) return;
    from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
"""
BLOCK_A_ROW = body_of(KERNELS / "softmax_forward.cu", "softmax_forward2")
EVERYTHING = NUMBER + """
    for (size_t j = 0; j < (size_t)N * C; j++)
        if (j == i) from_float(out[j], to_float(inp1[j]) + to_float(inp2[j]));
"""
WHOLE_ROW = BLOCK_A_ROW.replace("v = threadIdx.x; v < V; v += blockDim.x", "v = 0; v < V; v++")
ADD = "from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));"
# __shared__ arrays of these sizes, in front of a sum
SHARED = [RESIDUAL.replace(ADD, f"""{declared}
    e0[threadIdx.x] = to_float(inp1[i]);
    from_float(out[i], e0[threadIdx.x] + to_float(inp2[i]));
""") for declared in ("__shared__ float e0[50304];",
                      "__shared__ float e0[8192]; __shared__ float e1[4097];",
                      "__shared__ float e0[8192]; __shared__ float e1[4096];")]
B32, B16, R32, R16 = ((look_for, dtype) for look_for in (grade.BOUNDS, grade.RACES)
                      for dtype in ("fp32", "bf16"))
ALL = B32, B16, R32, R16
TOO_MUCH = (r"its __shared__ arrays have {} bytes, and a block may declare 49,152 line \d+: "
            r"__shared__ .* in {}")
CASES = (  # exercise, BLOCK, body, and what is said, or None, by the processes that can say it
    (ALL, "right", "residual_forward", "", RESIDUAL, None),
    (ALL, "a block a row", "softmax_forward", "BLOCK(256, 1)", BLOCK_A_ROW, None),
    ((B32, R32), "200 KB", "residual_forward", "", SHARED[0], TOO_MUCH.format("201,216", "fp32")),
    ((B16, R32), "two arrays, 4 bytes too large", "residual_forward", "", SHARED[1],
     TOO_MUCH.format("49,156", "")),
    ((B32, R16), "two arrays of 48 KB", "residual_forward", "", SHARED[2], None),
    ((R32,), "a block a row of 1,024 threads", "softmax_forward", "BLOCK(1024, 1)", BLOCK_A_ROW,
     None),
    ((B16,), "a read too far in bf16", "residual_forward", "", RESIDUAL.replace(
        ADD, "float more = sizeof(real) == 2 ? to_float(inp1[i + 1]) : 0.0f; "
        "from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]) + 0 * more);"),
     r"reads inp1.2592., .*line \d+: float more.* in bf16"),
    ((B16,), "16 bytes at an address of 8", "residual_forward", "", RESIDUAL.replace(
        ADD, "if (sizeof(real) == 2 && i % 8 == 0 && i + 12 < (size_t)N * C) "
        "{ uint4 x = *reinterpret_cast<const uint4*>(inp1 + i + 4); if (x.x == 1) i++; }\n    "
        + ADD), r"no multiple of 16\..*line \d+: .*uint4.* in bf16"),
    ((R16,), "two lanes in a word of bf16", "residual_forward", "", RESIDUAL.replace(ADD, """
#ifdef BF16
    float x = to_float(inp1[i]) + to_float(inp2[i]);
    unsigned *word = reinterpret_cast<unsigned*>(out + i / 2 * 2), bits = two_bf16(x, 0.0f);
    *word = i % 2 ? (*word & 0xffff) | bits << 16 : (*word & 0xffff0000) | bits;
#else
    ADD
#endif
""".replace("ADD", ADD)), r"race on out.* in bf16"),
    ((R32,), "a loop over everything", "residual_forward", "", EVERYTHING,
     r"slow: it takes [\d,]+ times as many steps as version 1.*every thread loops"),
    ((R32,), "every thread reads its whole row", "softmax_forward", "BLOCK(256, 1)",
     WHOLE_ROW.replace(
        "top = block_reduce<warp_max>(top, LOWEST);", "").replace(
        "sum = block_reduce<warp_sum>(sum, 0.0f);", ""),
     r"slow: it reads each number of its inputs [\d,]+ times on average, and version 1 .* [\d.]+ "
     r"ti"),
    ((R32,), "a block a number", "residual_forward", "BLOCK(256, 1)", RESIDUAL,
     r"slow: 2,581 of 2,592 blocks do nothing BLOCK says .* covers 1, so .* 236 items each"),
    ((R32,), "a thread of each block", "residual_forward", "BLOCK(256, 1)", f"""
    size_t i = blockIdx.x;
    if (threadIdx.x == 0) {ADD}
""", r"slow: of the 256 threads of a block 255 do nothing BLOCK.256, threads. would give"),
    ((B32,), "an array for the checks' C", "layernorm_forward", "", LAYERNORM.replace(
        "const float* x = residual + (size_t)row * C;", "float x[1600];").replace(
        "m += x[c]", "m += x[c] = residual[(size_t)row * C + c]"),
     r"index 1600 is out of bounds.*line \d+: for .*m \+= x\[c\].*,C=1[6-9]\d\d"),
)
GPU_CASES = (  # the same, of what NVRTC sees
    ("std::vector", SOFTMAX.replace("float top", "std::vector<float> e(V); float top"),
     r"compile for a GPU: .*std.*vector.* line \d+: std::vector.*C\+\+ library"),
    ("a size at run time", SOFTMAX.replace("float top", "float e[V]; e[0] = 0; float top"),
     r"compile for a GPU: .*constant.* line \d+: float e\[V\].*the compiler knows"),
    ("try", SOFTMAX.replace("float top = LOWEST, sum", "float top = LOWEST; try { top = LOWEST; } "
                            "catch (int) {}\n    float sum"),
     r"compile for a GPU: .*exception.* line \d+: .*try.*test with an if"),
    ("200 KB", SOFTMAX.replace("float top", "__shared__ float e[50304];\n    float top").replace(
        "sum += expf", "sum += e[v] = expf").replace("? expf(to_float(x[v]) - top)", "? e[v]"),
     r"__shared__ arrays have 201,\d+ bytes, and a block may declare 49,152 line \d+: .*e\[50304"),
)


def test_cases(folder):
    """Right kernels are accepted, and each fault is refused, by the process that looks for it."""
    variables = {grade.BOUNDS: grade.sanitizer_variables(), grade.RACES: grade.race_variables()}
    if not all(variables.values()):
        pytest.skip("this compiler has no sanitizers")
    for job in ALL:
        look_for, dtype = job
        some = [case for case in CASES if job in case[0]]
        paths = [folder / f"my_{case[2]}_{i}_{look_for}_{dtype}.cu" for i, case in enumerate(some)]
        for path, (_, _, exercise, block, body, _) in zip(paths, some):
            suffix = path.stem.removeprefix(f"my_{exercise}")
            path.write_text(filled(exercise, body, suffix, block=block))
        found = complaints(paths, grade.Job(look_for, [dtype], 0), variables, limit=20, waste=True)
        for path, (_, name, _, _, _, wish) in zip(paths, some):
            complaint, events = found[path]
            if (job, name) == (R32, "right"):
                lines = [event["lines"] for event in events if event["event"] == "drawn"]
                check(f"{name}: it is drawn", said(lines and lines[0]).startswith(
                    "who writes out in blocks 0 and 1 of 11, with 256 threads each, at the sizes "
                    "B=3,T=9,C=96:   out[0]  block 0: threads 0-95   out[1]  block 0: threads "
                    "96-191   out[2]  block 0: threads 192-255; block 1: threads 0-31   "), lines)
            lines = complaint and complaint[1]
            check(f"{look_for} in {dtype}: {name}",
                  not lines if wish is None else re.search(wish, said(lines)), lines)


def test_offered(folder):
    """No BLOCK line that an exercise's file offers is slow by itself, at any size: the threads that
    it gives to an item share its numbers."""
    for name in exercise_names():
        ladder, refused, files = find_ladder(name), [], []
        threads, parameters = signature(find_exercise(name))
        offered = "\n".join(ways(find_exercise(name), re.search(r"\d+", threads)[0]))
        for i, block in enumerate(re.findall(r"^ +(BLOCK\(\d+, .*?\))  ", offered, re.M)):
            path = folder / f"my_{name}_{i}.cu"
            path.write_text(f'{block}\nextern "C" __global__ void my_{name}'
                            f"({', '.join(parameters)}) {{}}\n")
            files.append((block, Submission(path)))
        for sizes in checks_of(find_exercise(name), ladder):
            if sizes.get("T", 0) > 150 or sizes.get("V", 0) > 10000:
                continue
            given, *_ = ladder.problem(Draw(False), **sizes)
            given = SimpleNamespace(**{**sizes, **given, "blocks": 3, "W": 4, "itemsize": 4})
            inputs = {key: x for key, x in vars(given).items() if isinstance(x, np.ndarray)}
            bench = SimpleNamespace(sets=[given], inputs=inputs, ladder=ladder,
                                    device=SimpleNamespace(W=4))
            for block, file in files:
                items, threads = eval(file.version.items, {}, vars(given)), file.kernel.threads
                blocks, counts, _ = trial.blocks_of(file.kernel, items, threads, 4)
                number, every = math.prod(counts), [x.size for x in inputs.values()] or [1]
                most = {"1)": threads, "threads / 32)": 32}.get(block.split(", ", 1)[1], 1)
                one = Work(4 * sum(every), 0, 0, blocks, number)
                own = one._replace(threads=number * max(1, min(most, max(every) // number)))
                share, lines = trial.wasted(bench, file.kernel, threads, items, own, one)[0]
                refused += [[block, sizes, lines]] * (share > 1)
        check(f"{name}: {len(files)} BLOCK lines", files and not refused, refused)


def test_gpus(folder):
    """What NVRTC refuses, with the student's line; what it says of a right kernel."""
    if not has_nvrtc():
        pytest.skip("CuPy and NVRTC are not installed")
    for name, body, wish in GPU_CASES:
        path = folder / "my_softmax_forward.cu"
        path.write_text(filled("softmax_forward", body))
        lines, _ = on_gpus.judge(Submission(path), ["fp32", "bf16"])
        check(f"NVRTC: {name}", re.search(wish, said(lines)), lines)
    helper = "float twice(float x) { return 2 * x; }\n"
    path.write_text(filled("softmax_forward", SOFTMAX.replace("float top", "float top", 1),
                           before=helper))
    lines, _ = on_gpus.judge(Submission(path), ["fp32"])
    check("NVRTC: a helper without __device__", re.search(
        r"host function line \d+: float twice.*__device__ in front", said(lines)), lines)
    path.write_text(filled("softmax_forward", SOFTMAX.replace(
        "float top", "auto twice = [](auto a) { return 2 * a; };\n    float top").replace(
        "top = fmaxf(top, ", "top = fmaxf(top, twice(0.5f) * ")))
    lines, _ = on_gpus.judge(Submission(path), ["fp32"])  # which NVRTC 13.0 takes for the host's
    check("NVRTC: a lambda with auto", not lines, lines)
    path.write_text(filled("softmax_forward", BLOCK_A_ROW, block="BLOCK(256, 1)"))
    lines, facts = on_gpus.judge(Submission(path), ["fp32", "bf16"])
    check("both GPUs, both dtypes", not lines and [(f["gpu"], f["dtype"]) for f in facts] == [
        (gpu, dtype) for gpu in ("sm_80", "sm_90a") for dtype in ("fp32", "bf16")], facts)
    check("shared memory of block_reduce", {f["shared"] for f in facts} <= {128, 256}, facts[0])
    check("the line", re.fullmatch(
        r"\d+ registers, no spills, (128|256) bytes of shared memory: \d blocks of 256 threads fit "
        r"on a multiprocessor of an H100 \(occupancy \d+%\)", on_gpus.remark(facts)),
          on_gpus.remark(facts))


@fast
def test_launches(folder):
    """How many blocks fit on a multiprocessor, by CUDA's rules, worked out by hand."""
    a100, h100 = on_gpus.GPUS["sm_80"], on_gpus.GPUS["sm_90a"]
    for gpu, used, threads, dynamic, wish in (
            (h100, Used(32, 0, 0), 256, 0, 8),  # 64 warps are the limit
            (h100, Used(40, 0, 0), 256, 0, 6),  # 51 warps of 1,280 registers: 48 in four quarters
            (h100, Used(33, 0, 0), 256, 0, 6),  # registers go by eights, so 33 are 40
            (h100, Used(16, 0, 0), 32, 0, 32),  # 32 blocks are the limit
            (h100, Used(64, 0, 0), 1024, 0, 1),  # all registers
            (h100, Used(65, 0, 0), 1024, 0, 0),  # and one more
            (h100, Used(168, 0, 0), 1024, 0, 0),
            (h100, Used(255, 0, 0), 250, 0, 1),  # 250 threads are 8 warps
            (h100, Used(16, 0, 48 * 1024), 256, 0, 4),
            (h100, Used(16, 0, 48 * 1024 + 4), 256, 0, 0),
            (a100, Used(16, 0, 48 * 1024), 256, 0, 3),
            (h100, Used(16, 0, 0), 256, 227 * 1024, 1), (a100, Used(16, 0, 0), 256, 227 * 1024, 0)):
        found = on_gpus.blocks_that_fit(gpu, used, threads, dynamic)
        check(f"{gpu.name}: {tuple(used)}, {threads} threads, {dynamic} bytes", found == wish,
              found)
    path = folder / "my_softmax_forward.cu"
    path.write_text(filled("softmax_forward", SOFTMAX, block="BLOCK(1024, threads)"))
    facts = [dict(gpu="sm_90a", dtype="fp32", threads=1024, dynamic=0, registers=168, spilled=0,
                  shared=0, blocks=0)]
    lines = on_gpus.launch_lines(Submission(path), facts)
    check("too many registers", re.search(
        r"168 registers, so 1024 threads need 172,032, .*65,536 line \d+: "
        r"BLOCK.*__launch_bounds__.1024", said(lines)), lines)


@fast
def test_sizes():
    """The last sizes of a check are larger than all others, of the same kind, and drawn by the
    text."""
    for name in exercise_names():
        checks = checks_of(find_exercise(name), find_ladder(name))
        drawn, again, *others = (larger(checks, text) for text in "aabcde")
        most = {key: max((sizes.get(key, 0) for sizes in checks if sizes.get(key, 0) < 10000),
                         default=0)
                for key in drawn}  # a whole vocabulary takes too long
        fixed = {key for key in drawn if len({sizes.get(key) for sizes in checks}) == 1}
        rows = [sizes["B"] * sizes["T"] for sizes in (drawn, *checks) if "B" in sizes]
        ok = (drawn == again and others.count(drawn) < 4 and
              all(drawn[key] > most[key] for key in drawn.keys() - fixed
                  if key in ("C", "OC", "V", "H", "n", "NH"))
              and all(drawn[key] == most[key] for key in fixed - {"B", "T", "NKV", "NH"})
              and (not rows or rows[0] > max(rows[1:])) and
              (drawn.get("C", 32) % 32 == 0 or any(sizes["C"] % 32 for sizes in checks))
              and drawn.get("Vp", 0) >= drawn.get("V", 0) * ("Vp" in drawn)
              and drawn.get("NH", 1) % drawn.get("NKV", 1) == 0)
        check(f"{name}: {drawn}", ok, most)


def test_roundings():
    """Where all numbers round to bf16 in the same way, as 1/30 does, the rounded truth is right;
    one that is cut off is not."""
    truth = np.full((4, 8), 1 + 0.6 / 128)
    right, cut = to_bf16(truth), (np.float32(truth).view(np.uint32) >> 16).astype(np.uint16)
    assert (right != cut).any()
    for name, array, wish in (("rounded", right, True), ("cut off", cut, False)):
        found = compare_output(np, name, array, truth, 1e-5)
        check(f"the same number in bf16, {name}", (found.place is None) == wish, found)


@fast
def test_order():
    """The surest explanation is said, and nobody waits for a process that cannot have a better
    one."""
    jobs = [grade.Job(look_for, [dtype], 0) for look_for, dtype in (
        (grade.GPU, "fp32"), (grade.BOUNDS, "fp32"), (grade.RACES, "fp32"), (grade.BOUNDS, "bf16"),
        (grade.RACES, "bf16"))]
    compiling, running = grade.COMPILER, grade.ACCESS
    for name, complaint, waiting, wish in (
            ("a compiler error", (grade.COMPILER, 1), {3: compiling, 2: grade.RACE}, True),
            ("NVRTC's, while g++ compiles", (grade.GPU_COMPILER, 0), {1: compiling}, False),
            ("NVRTC's, when g++ has done it", (grade.GPU_COMPILER, 0), {1: running, 2: grade.RACE},
             True),
            ("out of bounds", (grade.ACCESS, 1), {2: grade.RACE, 3: running}, True),
            ("a wrong number, while races are looked for", (grade.RESULT, 1), {2: grade.RACE},
             False),
            ("a race, while accesses are looked at", (grade.RACE, 2), {1: running}, False),
            ("a wrong number, while bf16 compiles", (grade.RESULT, 1),
             {3: compiling, 4: grade.RACE}, True),
            ("bf16's, while races in fp32 are looked for", (grade.ACCESS, 3), {2: grade.RACE},
             False),
            ("waste", (grade.WASTE, 2), {1: running, 3: compiling}, True),
            ("too slow, while steps are counted", (grade.SLOW, 1), {2: grade.RACE}, False),
            ("too slow", (grade.SLOW, 1), {3: running, 4: grade.RACE}, True)):
        check(f"sure: {name}", grade.is_sure(complaint, waiting, jobs) == wish)
    drawn = {("B=1", "out"): ["a"], ("B=2", "out"): ["b"], ("B=2", "rstd"): ["c"]}
    for sizes, wish in (("B=2", ["c"]), ("B=3", [])):
        found = grade.drawing_of(drawn, ["wrong: rstd[3] is 1", f"at the sizes {sizes}, in bf16"])
        check(f"what is drawn of a wrong number at {sizes}", found == wish, found)


def test_facts(folder):
    """The judge as a function: facts for other programs, and what was not looked for."""
    path = folder / "my_residual_forward.cu"
    path.write_text(filled("residual_forward", RESIDUAL))
    with mock.patch.multiple("dev.lab.grade", sanitizer_variables=lambda: None,
                             race_variables=lambda: None, has_nvrtc=lambda: False):
        found = grade.grade_file(Submission(path))
        lines = said(grade.looked_for(found))
    check("right, and nothing was looked for", found.lines == [] and not any(found.looked.values())
          and found.gpu == [] and found.dtypes == ["fp32", "bf16"], found)
    check("  and it says so",
          re.search("accesses were not.*races were not.*GPU.*pip install", lines), lines)
    events, *_ = run_child(dict(compile=[str(path)], run=[str(path)], look_for=grade.FIRST,
                                dtypes=["fp32"], limit=5), {"CXXFLAGS": "-O0"})
    said_first = [line for line in map(partial(grade.first_line, "fp32"), events) if line]
    check("the first answer", said_first == ["fp32, B=3,T=9,C=96: right"], events)
    path.write_text(filled("matmul_forward", NUMBER + "    if (i == 0) mma_tf32;\n"))
    check("tensor cores bring tf32", Submission(path).dtypes == ["fp32", "bf16", "tf32"])


def test_memory_of_a_thread(folder):
    """Arrays of a thread, of which a GPU has room for all threads that it can hold."""
    if not has_nvrtc():
        pytest.skip("CuPy and NVRTC are not installed")
    path = folder / "my_softmax_forward.cu"
    path.write_text(texts()["softmax_forward_row_of_a_thread"].replace("50304", "5030"), "utf-8")
    file = Submission(path)
    lines, facts = on_gpus.judge(file, ["fp32"])
    found = lines or on_gpus.launch_lines(file, facts)
    check("5,030 floats", facts and not found, found or facts)


@fast
def test_unset():
    """Variables of functions that get no value are found, and no others."""
    for text, wish in (
            ("void f() { float a, b[3], c = 1; }", ["a", "b"]),
            ("struct A { int x; float y; };", []), ("union B { int x; };\nint g;", []),
            ("namespace n { int h; __device__ void k() { real m; } }", ["m"]),
            ("void f() { auto l = [&] { double d; }; static int n; extern int e; }", ["d"]),
            ("void f() { const char* s = \"a; int p; \"; for (int i; i < 3;) {} }", []),
            ("void f() { // int z;\n unsigned long long u; if (u) { size_t v; } }", ["u", "v"]),
            ("void f() {\n    struct S { int x; };\n    int y; }", ["y"])):
        found = re.findall(r"UNSET\((\w+)\)", with_unset(text))
        check(text.splitlines()[0], found == wish, found)
        check("  lines stay", with_unset(text).count("\n") == text.count("\n"))


@fast
def test_jobs(folder):
    """The first process is the one that answers first; a branch on __CUDA_ARCH__ brings others."""
    path = folder / "my_residual_forward.cu"
    for name, arches in (("residual_forward_branches_alike", list(grade.ARCHES)),
                         ("residual_forward_linear_thread_number", [])):
        path.write_text(texts()[name], "utf-8")
        jobs = grade.jobs_of(Submission(path), {grade.BOUNDS: {}, grade.RACES: None})
        check(f"{name}: without what the compiler lacks", jobs[0][:2] == (None, ["fp32"]), jobs)
        every = {grade.BOUNDS: {"CXXFLAGS": ""}, grade.RACES: {"CXXFLAGS": ""}}
        jobs = grade.jobs_of(Submission(path), every)
        check(f"{name}: fp32 first", [job[:2] for job in jobs[:2]] == [
            (grade.BOUNDS, ["fp32"]), (grade.RACES, ["fp32"])], jobs)
        found = [job.arch for job in jobs if job.arch]
        check(f"{name}: and each kind of GPU", found == arches, jobs)


def test_precompiled(folder):
    """What others share is compiled once, from the second time on, and no text takes another's."""
    compiler = host.compiler_of()
    if not compiler or "clang" in compiler:
        pytest.skip("g++ alone precompiles headers")
    command, header = [compiler, "-O0", "-fPIC", "-shared"], folder / "shared.h"
    header.write_text("constexpr int two = 2;\n")
    text = f'#include "{header}"\ninline int five() {{ return two + 3; }}\n'
    first = host.precompiled(command, text, folder, [header])
    flags = host.precompiled(command, text, folder, [header])
    check("not the first time", first == [] and len(flags) == 2, [first, flags])
    check("it is there", flags and flags[1].with_suffix(".h.gch").exists())
    source = "extern \"C\" int asked() { return five(); }\n"
    done = host.run_compiler([*command, "-Winvalid-pch", "-Werror", *flags, "-x", "c++", "-", "-o",
                              folder / "a.so"], source)
    check("it is used", done.returncode == 0, done.stderr[-300:])
    check("its function", ctypes.CDLL(str(folder / "a.so")).asked() == 5)
    header.write_text("constexpr int two = 4;\n")
    again = host.precompiled(command, text, folder, [header])
    check("a changed file has none", again == [], again)


@fast
def test_large():
    """Arrays of the trainer's own sizes have addresses and no memory."""
    memory = large.reserved(2**36)
    memory[-1] = 7
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    check("64 GiB, of which a page is there", memory[0] == 0 and memory[-1] == 7 and
          resident < 2**34, resident)
