"""CUDA's rules, of which a CPU knows nothing: what orders memory, what nobody has written, what a
GPU would do. Each is tested with files of students/, a few compiled together; test_students judges
each file by itself, as a student does it.
"""
import ctypes
import re
import resource

import pytest

from dev.common.nvrtc import has_nvrtc
from dev.common.student_text import with_unset
from dev.cpu import host
from dev.lab import grade, large, on_gpus
from dev.lab.exercises import PREFIX
from dev.lab.submission import Submission
from dev.lab.tests.changed_students import texts
from dev.lab.tests.student import said
from dev.lab.tests.test_students import mistake
from dev.tests.checks import check, fast

# What a process looks for, and in which dtype: the files that it judges. Those behind + end it.
TOGETHER = (
    (grade.RACES, "fp32", """row_sum_ballot_is_no_fence row_sum_shfl_and_syncwarp
     row_sum_all_lanes_store_the_same softmax_forward_any_is_no_barrier
     fused_residual_forward_ldg_of_the_stream rope_forward_ldg_of_the_table
     row_sum_volatile_sums_fenced row_sum_volatile_sums_no_fence"""),
    (grade.RACES, "fp32", "row_sum_recursion_a_call_a_number row_sum_pairwise_recursion"),
    (grade.RACES, "fp32", """transpose_swizzled_tile attention_backward_atomics
     attention_forward_heads_share_scores encoder_backward_half_atomic"""),
    (grade.BOUNDS, "fp32", """group_scale_shuffle_from_missing_lane group_scale_shared_unset
     group_scale_maximum_unset shift_maximum_of_output group_scale_shfl_down_guarded
     group_scale_unset_and_unread
     crossentropy_forward_shared_flag_unset rope_table_fast_sin global_norm_total_not_reset
     global_norm_total_set_back softmax_forward_unsigned_index softmax_forward_malloc_a_row
     softmax_forward_malloc_a_word transpose_swizzled_tile
     prefix_sum_shfl_up_of_a_warp shift_through_shared
     + crossentropy_forward_int_row prefix_sum_row_of_1600 transpose_thread_y"""),
    (grade.BOUNDS, "bf16", "+ shift_float_cast"),
)
VARIABLES = {grade.BOUNDS: grade.sanitizer_variables, grade.RACES: grade.race_variables}


def renamed(text, number):
    """A file whose kernel and variables of the whole GPU have names of their own, so that several
    can be compiled together."""
    text = re.sub(rf"\b({PREFIX}\w+)\(", rf"\1_{number}(", text)
    for name in re.findall(r"^__device__ [\w ]*?(\w+)(?:\[.*?\])?;", text, re.M):
        text = re.sub(rf"\b{name}\b", f"{name}_{number}", text)
    return text


@pytest.mark.parametrize("job", TOGETHER, ids=lambda job: f"{job[0]} {job[1]} {job[2].split()[-1]}")
def test_rules(job, folder):
    """Files that keep a rule are accepted, and those that do not are refused with its words."""
    look_for, dtype, names = job
    variables, every = VARIABLES[look_for](), texts()
    if variables is None:
        pytest.skip("this compiler has no sanitizers")
    paths, ends = {}, names.partition("+")[2].split()
    for number, name in enumerate(names.replace("+", "").split()):
        paths[name] = folder / f"{name}.cu"
        paths[name].write_text(renamed(every[name], number), "utf-8")
    together = [name for name in paths if name not in ends]
    for run in [together, *([name] for name in ends)]:
        if not run:
            continue
        result = grade.run_child(dict(
            compile=[str(path) for path in paths.values()], run=[str(paths[name]) for name in run],
            look_for=look_for, dtypes=[dtype], limit=30, compare=True, waste=False, races=True),
            variables)
        for name in run:
            file = Submission(paths[name])
            events, status, stderr = result
            own = [event for event in events if event.get("file", str(file.path)) == str(file.path)]
            complaint, _ = grade.complaint_of(file, (own, status, stderr), look_for)
            lines = complaint[1] if complaint else []
            right = any(event["event"] == "right" for event in own)
            wrong = mistake(paths[name], lines) if lines or right else f"no answer: {stderr[-300:]}"
            check(name, not wrong, wrong)
            if name == "row_sum_ballot_is_no_fence":
                wish = ("in this order: thread 1 of block 0 writes .*, then thread 0 of block 0 "
                        "reads .* or in the other: thread 0 of block 0 reads what nobody has set")
                check("  and what a GPU may do", re.search(wish, said(lines)), lines)
            if name == "row_sum_all_lanes_store_the_same":
                remarks = said([event["text"] for event in own if event["event"] == "remark"])
                wish = r"same number.*line \d+: out\[row\]"
                check("  and it is remarked", re.search(wish, remarks), remarks)


@fast
def test_launch_bounds(folder):
    """A __launch_bounds__ below BLOCK is refused at once; one as large is not."""
    for name, wish in (("row_sum_launch_bounds_too_small", "128.*256"),
                       ("layernorm_forward_launch_bounds_by_name", "64.*128"),
                       ("row_sum_launch_bounds_by_name", None),
                       ("gqa_forward_launch_bounds", None)):
        path = folder / f"{name}.cu"
        path.write_text(texts()[name], "utf-8")
        lines = on_gpus.bound_lines(Submission(path))
        check(name, re.search(wish, said(lines)) if wish else not lines, lines)


def test_memory_of_a_thread(folder):
    """Arrays of a thread, of which a GPU has no room for all threads that it can hold."""
    if not has_nvrtc():
        pytest.skip("CuPy and NVRTC are not installed")
    path = folder / "my_softmax_forward.cu"
    text = texts()["softmax_forward_row_of_a_thread"]
    for size, wish in (
            (50304, r"201,\d+ bytes.*221,184 threads.*45 GB on an A100.*line 8: float e"),
            (5030, "")):
        path.write_text(text.replace("50304", str(size)), "utf-8")
        file = Submission(path)
        lines, facts = on_gpus.judge(file, ["fp32"])
        found = said(lines or on_gpus.launch_lines(file, facts))
        check(f"{size} floats", re.search(wish, found) if wish else not found, found or facts)


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
