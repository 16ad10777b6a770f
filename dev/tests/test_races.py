"""Test that races are found, and nothing else: in small kernels, in all versions of the lab, and
where a barrier counts for nothing. dev/lab/tests/test_students.py has those in students' files.
"""
import os
import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.devices import make_device
from dev.features.fp8.fp8 import SOURCE as FP8, with_fp8
from dev.lab import workers
from dev.lab.bench import Bench
from dev.lab.ladder import find_ladder, kernel_names, model_of, parse_sizes
from dev.tests import mutants
from dev.tests.checks import check, refusal
from dev.tests.models import emulated_with
from dev.tests.small_kernels import numbered
from train_gpt2 import BF16

pytestmark = pytest.mark.usefixtures("race_finder")
CXXFLAGS = FLAGS = f"-O1 {races.FLAG}"
HEAD = """#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
struct half { unsigned short bits; };
struct Two { half x[2]; };
__device__ float scratch[256];
"""
SHARED, WARP, BLOCKS, ATOMIC, COPY = ("no __syncthreads.. comes between",
                                      "of one warp, and no __syncwarp",
                                      "Blocks run in any order",
                                      "An atomic access does not protect", "on its way")
WITHIN = f"block (.) .*block \\1 .*({SHARED}|{WARP})"  # of one block
BETWEEN = r"block (.) .*block (?!\1)"


class Small(NamedTuple):
    """A kernel of four blocks of 64 threads. Lines that end in //! must be named."""
    name: str
    wish: str  # what is said, or "" if nothing
    body: str


def variants(body, *rows):
    """The same kernel with other texts in it: (name, wish, a text, what is there in its place, more
    of both)."""
    for name, wish, *texts in rows:
        changed = body
        for old, new in zip(texts[::2], texts[1::2]):
            assert changed.count(old) == 1, (name, old)
            changed = changed.replace(old, new)
        yield Small(name, wish, changed)


OF_BLOCK, OF_WARP = "__syncthreads();\n", "__syncwarp();\n"
FENCE = "        __threadfence();\n"
SMALL = (
    Small("one sum for all threads", rf"sum: .*{SHARED}", """
    __shared__ float sum;
    sum = inp[i];  //!
    out[i] = 2 * sum;
"""),
    *variants("""
    __shared__ float sum;
    if (t == 0) sum = inp[b];  //!
    out[i] = sum;  //!
""",
              ("a sum that one thread writes", rf"sum: .*thread 0 .*({SHARED}|{WARP})"),
              ("a volatile sum, which waits for nobody", rf"sum: .*thread 0 .*({SHARED}|{WARP})",
               "__shared__", "volatile __shared__"),
              ("and waits", "", "out[i]", f"{OF_BLOCK} out[i]")),
    Small("scratch of all threads", rf"scratch.0.: .*{WITHIN}", """
    scratch[0] = inp[i];  //!
    out[i] = scratch[0];
"""),
    *variants("""
    if (t != 5) return;
    scratch[t] = inp[i];  //!
    out[i] = scratch[t];
""",
              ("scratch of a thread of each block", rf"scratch.5.: .*{BETWEEN}.*{BLOCKS}"),
              ("scratch of each thread", "", "if (t != 5) return;", "", "scratch[t] =",
               "scratch[i] =", "= scratch[t]", "= scratch[i]")),
    *variants("""
    __shared__ float part[64];
    part[t] = inp[i];  //!
    out[i] = part[63 - t];  //!
""",
              ("no __syncthreads", rf"part.\d+.: .*{WITHIN}"),
              ("a barrier for one branch only", rf"part.\d+.: .*{SHARED}", "out[i]",
               f"if (i < 0) {OF_BLOCK} out[i]", "63 - t", "(t + 32) % 64"),
              ("no __syncwarp", rf"part.\d+.: .*{WARP}", "63 - t", "t ^ 1"),
              ("__syncwarp", "", "63 - t", "t ^ 1", "out[i]", f"{OF_WARP} out[i]"),
              ("__syncwarp between two warps", rf"part.\d+.: .*{SHARED}", "63 - t", "t ^ 32",
               "out[i]", f"{OF_WARP} out[i]"),
              ("a float race beside an unrelated atomic", rf"part.\d+.: .*{SHARED}", "    part[t]",
               "    atomicAdd(counter, 1);\n    part[t]"),
              ("dynamic shared memory", rf"more.\d+.: .*{SHARED}", "__shared__ float part[64]",
               "DYNAMIC_SHARED(float, more)", "part[t]", "more[t]", "part[63", "more[63"),
              ("16 bytes at once", rf"part.\d+.: .*{WITHIN}", "float part",
               "__align__(16) float part", "out[i] = part[63 - t];",
               "out[i] = reinterpret_cast<uint4*>(part + (4 * t + 32) % 64)->x;")),
    Small("no __syncthreads before the next round", rf"part.\d+.: .*{SHARED}", """
    __shared__ float part[64];
    for (int round = 0; round < 2; round++) {
        part[t] = inp[i] + round;  //!
        __syncthreads();
        out[i] += part[63 - t];  //!
    }
"""),
    Small("two buffers", "", """
    __shared__ float part[2][64];
    for (int round = 0; round < 4; round++) {
        part[round % 2][t] = inp[i] + round;
        __syncthreads();
        out[i] += part[round % 2][63 - t];
    }
"""),
    Small("one of two buffers too early", rf"part.1,\d+.: .*{SHARED}", """
    __shared__ float part[2][64];
    part[0][t] = inp[i];
    __syncthreads();
    part[1][t] = part[0][63 - t];  //!
    out[i] = part[1][(t + 32) % 64];  //!
"""),
    Small("shuffles", "", """
    float x = inp[i];
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    out[i] = x;
"""),
    *variants("""
    __shared__ float sum;
    if (t == 0) sum = 0.0f;
    __syncthreads();
    atomicAdd(&sum, inp[i]);  //!
    out[i] = sum;  //!
""",
              ("an atomic sum, read too early", rf"sum: .*{ATOMIC}"),
              ("atomics alone", "", "out[i] = sum;",
               f"{OF_BLOCK} if (t == 0) atomicAdd(out, sum);")),
    *variants("""
    if (t % 2) atomicAdd(out, inp[i]);  //!
    else out[0] += inp[i];  //!
""",
              ("a sum half atomic", rf"out.0.: .*atomically.*{ATOMIC}"),
              ("a sum by blocks, half atomic", rf"out.0.: .*{BETWEEN}.*{ATOMIC}", "    if (t % 2)",
               "    if (t) return;\n    if (b % 2 == 0)")),
    Small("blocks that write one place", rf"out.0.: .*{BETWEEN}.*{BLOCKS}", """
    if (t == 0) out[0] = inp[b];  //!
"""),
    Small("a block that reads what another one writes", rf"out.\d+.: .*{BLOCKS}", """
    out[i] = inp[i];  //!
    __syncthreads();
    if (t == 0 && b > 0) out[256 + i] = out[i - 1];  //!
"""),
    Small("neighbours of 16 bits", "", """
    low[i].bits = t;
    out[i] = low[i].bits;
"""),
    Small("two of 16 bits at once", rf"low.\d+.: .*{WARP}", """
    low[i].bits = t;  //!
    if (t % 2 == 0) *reinterpret_cast<Two*>(low + i) = Two{};  //!
"""),
    *variants("""
    __shared__ bool last;
    if (t == 0) {
        scratch[b] = inp[i];  //!
        __threadfence();
        last = atomicAdd(counter, 1) == gridDim.x - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (last && t == 0) for (int j = 0; j < gridDim.x; j++) out[0] += scratch[j];  //!
""",
              ("the last block adds up", ""),
              ("the last block without a fence", rf"scratch.\d+.: .*{BLOCKS}", FENCE, ""),
              ("the last block, with the fence too early", rf"scratch.\d+.: .*{BLOCKS}", FENCE, "",
               "        scratch[b]", f"{FENCE}        scratch[b]")),
    *variants("""
    __shared__ bool last;
    scratch[i] = inp[i];  //!
    __syncthreads();
    if (t == 0) {
        __threadfence();
        last = atomicAdd(counter, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) for (int j = t; j < 192; j += 64) out[j] = scratch[j];  //!
""",
              ("the last block, and all threads store", "", "192", "256", "scratch[j]",
               "scratch[255 - j]"),
              ("the last block, and each thread fences", "", FENCE, "", "    __syncthreads();\n    "
               "if (t", f"{FENCE}    __syncthreads();\n    if (t", "192", "256", "scratch[j]",
               "scratch[255 - j]"),
              ("the last block, which does not wait for its own", rf"scratch.\d+.: .*{BLOCKS}",
               "    __syncthreads();\n    if (t", "    if (t")),
    *variants("""
    if (b == 3 && t > 0) return;
    out[i] = scratch[0];  //!
    if (t % 32) return;
    __threadfence();
    if (atomicAdd(counter, 1) == 6) scratch[0] = 1.0f;  //!
""",
              ("the first lane of a warp fences, and others have read",
               rf"scratch.0.: .*{BLOCKS}"),
              ("the first lane of a warp fences, behind all", "", "    if (t % 32)",
               f"    if (b < 3) {OF_WARP}    if (t % 32)"),
              ("each thread fences what it has read", "", "if (t % 32) return;", "", "6", "192")),
    Small("a counter, and every block reads", rf"scratch.\d+.: .*{BLOCKS}", """
    if (t) return;
    scratch[b] = inp[i];  //!
    __threadfence();
    atomicAdd(counter, 1);
    for (int j = 0; j < gridDim.x; j++) out[b] += scratch[j];  //!
"""),
    *variants("""
    if (t) return;
    if (b > 0) while (*(volatile int*)counter < b) {}
    out[0] += inp[b];  //!
    __threadfence();
    *(volatile int*)counter = b + 1;
""",
              ("a flag", ""),
              ("a flag without a fence", rf"out.0.: .*{BLOCKS}", "    __threadfence();\n", "")),
    *variants("""
    __shared__ float part[64];
    copy4(part + t, inp + i, true);  //!
    copies_end();
    wait_for_copies<0>();
    out[i] = part[63 - t];  //!
""",
              ("a copy of one's own", "", "63 - t", "t"),
              ("a copy, and all wait", "", "out[i]", f"{OF_BLOCK} out[i]"),
              ("a copy that is not waited for",
               rf"part.\d+.: .*copies asynchronously to.*{COPY}", "wait_for_copies<0>();\n",
               OF_BLOCK, "63 - t", "t"),
              ("a copy that only its thread waits for",
               rf"part.\d+.: .*copies asynchronously to.*{SHARED}")),
    Small("a copy of the next round that comes too early",
          rf"part.\d+.: .*copies asynchronously to.*{SHARED}", """
    __shared__ float part[64];
    for (int round = 0; round < 2; round++) {
        copy4(part + t, inp + i, true);  //!
        copies_end();
        wait_for_copies<0>();
        __syncthreads();
        out[i] += part[63 - t];  //!
    }
"""),
    Small("a copy whose source changes", rf"inp.\d+.: .*copies asynchronously from.*{COPY}", """
    __shared__ float part[64];
    copy4(part + t, inp + i, true);  //!
    copies_end();
    inp[i] = 0.0f;  //!
    wait_for_copies<0>();
    out[i] = part[t];
"""),
)


def test_small_kernels(folder):
    """In small kernels: the place, both lines, and why; or nothing."""
    kernels, marked = numbered(folder / "small.cu", HEAD, [small.body for small in SMALL])
    device = make_device("emulated", "fp32", kernels, plain=True)
    for order in ("forward", "reverse", 1):
        device.set_order(order)
        for number, (name, wish, _) in enumerate(SMALL):
            if order != "forward" and "counter" in SMALL[number].body:
                # A block that waits for one that has not begun; a last block that is not the last.
                continue
            out, inp = np.ones(512, np.float32), np.arange(512, dtype=np.float32)
            counter, low = np.zeros(4, np.int32), np.zeros(512, np.uint16)
            found, lines = "", set()
            try:
                device.launch(f"kernel{number}", 256, out, inp, counter, low, shared=256)
            except races.Race as e:
                found, lines = str(e), {side.places[0][1] for side in (e.first, e.second)}
            ok = re.search(f"has a race on {wish}", found) if wish else not found
            check(f"{order}: {name}", ok and (lines == marked[number] or not wish),
                  f"{found}; lines {lines}, expected {marked[number]}")


TURNS = """
    __shared__ unsigned long long all;
    volatile int* turn = counter;
    if (t == 0) hopper::mbarrier_start(all, 64);
    __syncthreads();
    if (t == 0) {
        while (*turn < b) {}
        __threadfence();
    }
    hopper::mbarrier_arrive(all);
    hopper::mbarrier_wait(all, 0);
    scratch[t] += inp[i];  //!
    __syncthreads();
    if (t == 0) {
        __threadfence();
        *turn = b + 1;
    }
"""


def test_mbarriers(folder):
    """What a thread has learned of other blocks it hands on at an mbarrier."""
    bodies = {"": TURNS, "no turn": TURNS.replace("while (*turn < b) {}", ""),
              "no mbarrier": TURNS.replace("hopper::mbarrier_wait(all, 0);", "")}
    kernels, _ = numbered(folder / "turns.cu", HEAD, bodies.values())
    with mock.patch.dict(os.environ, CXXFLAGS=f"{FLAGS} -DHOPPER"):
        device = make_device("emulated", "bf16", kernels, plain=True)
    for number, name in enumerate(bodies):
        out, inp = np.ones(512, np.float32), np.ones(512, np.float32)
        counter, found = np.zeros(4, np.int32), ""
        try:
            device.launch(f"kernel{number}", 256, out, inp, counter, np.zeros(512, np.uint16))
        except races.Race as e:
            found = str(e)
        check(name or "turns", bool(found) == bool(name) and "scratch" in (found or "scratch"),
              found)


def compiled_lab():
    """(the task, the names of the kernels) of the lab, compiled."""
    task = workers.Task("cpu", {}, None, None, ("fp32",), False, False, True)
    names, compiled, failures = workers.compile_together(kernel_names(), task)
    check("the lab is compiled", not failures, failures)
    return task._replace(compiled=compiled), names


def test_lab(folder):
    """All versions of the lab's kernels, the trainer's among them, are without races."""
    task, names = compiled_lab()
    for name in names:
        report = workers.run_ladder(find_ladder(name), task, lambda line: None, lambda what: None,
                                    {})
        check(f"{name}: {report.checks} launches", report.checks and not report.failures,
              report.failures or "")


# Where a kernel's usual shape does not come by a barrier: (function, number) -> sizes.
SIZES = {("layernorm_backward", 1): "B=2,T=10,C=1600", ("sum_over_row", 1): "B=1,T=5,C=4096",
         ("encoder_backward_wte", 2): "B=5,T=50,C=32,V=3,share=0",
         ("gram4", 3): "B=1,T=140,C=32"}  # with a tile that is turned
ON_HOPPER = {("arrivals_start", 1): "arrivals_start() {\n    __shared__",
             ("wait_for_tiles", 2): "wait_for_tiles(Arrivals& arrivals) {",
             ("store_rows", 1): "store_rows"}
APART = "see barriers_of_others"
NOT_FOUND = {  # (function, number): why not
    ("block_reduce", 2): "no race: where the trainer calls two of a kind, a barrier is between "
               f"them; {APART}",
    ("store_turned", 1): APART, ("gelu_backward_to_fp8", 1): APART,
}


def test_barriers(folder):
    """Each barrier that counts for nothing is noticed, in a run of the kernel as it is."""
    task, _ = compiled_lab()
    for mutant in mutants.barriers(every=True):
        barrier = mutant.where, int(mutant.what.split()[1])
        if barrier in NOT_FOUND:
            continue
        ladder, dtype, flag = find_ladder(mutant.kernel), "fp32", ""
        if barrier in ON_HOPPER:
            mutant = mutant._replace(what="barrier 1", where=ON_HOPPER[barrier])
        if barrier in ON_HOPPER or mutant.where == "matmul_forward6":
            dtype, flag = "bf16", " -DHOPPER"
        sizes = parse_sizes(SIZES[barrier]) if barrier in SIZES else workers.shape_for_races(ladder)
        key = (dtype, *model_of(ladder, sizes))
        with mock.patch.dict(os.environ, CXXFLAGS=FLAGS + flag):
            device = workers.device_of("emulated", *key, task.compiled.get(key, (mutant.kernel,)))
        found = without_barrier(device, ladder, sizes, mutant)
        check(f"{Path(mutant.file).name}, {barrier[0]}, barrier {barrier[1]}", found, found)


TWICE = """
BLOCK(64, threads)
extern "C" __global__ void twice(float* out, const float* inp) {
    float x = block_reduce<warp_sum>(inp[threadIdx.x], 0.0f);
    out[threadIdx.x] = block_reduce<warp_sum>(x, 0.0f);
}
"""


def test_barriers_of_others(folder):
    """The same for two that no kernel of the lab comes by."""
    (folder / "twice.cu").write_text(TWICE)
    twice = Emulated("fp32", Config(C=64, NH=1), [folder / "twice.cu"], {"twice"})
    only = {"transpose_fp8", "gelu_backward_to_fp8"}
    in_fp8 = with_fp8(emulated_with(only))("fp8", Config(C=64, NH=1), (FP8,))
    numbers = np.ones((2, 64), np.float32)
    twins, weights, scales = (np.zeros((2, 64, 64), np.uint8), np.zeros((64, 64), BF16),
                              np.ones((1, 4), np.float32))
    sums = np.zeros((1, 64), np.float32)
    for device, barrier, name, *arguments in (
            (twice, ("block_reduce", 2), "twice", 64, *numbers),
            (in_fp8, ("gelu_backward_to_fp8", 1), "gelu_backward_to_fp8", 1, *twins, scales, sums,
             weights, weights, 64, 64, 64),
            (in_fp8, ("store_turned", 1), "transpose_fp8", 1, *twins, 64, 64, 64)):
        [mutant] = (m for m in mutants.barriers(every=True)
                    if (m.where, int(m.what.split()[1])) == barrier)
        device.launch(name, *arguments)
        device.library.races_ignore(mutant.file.encode(), mutants.line_of(mutant))
        found = refusal(device.launch, name, *arguments)
        check(f"{name}: {mutant.where}, {mutant.what}", found and "has a race" in found, found)


def without_barrier(device, ladder, sizes, mutant):
    """The first race in a ladder's versions if a barrier counts for nothing, or None. What has a
    number is of that version, and what has none of a late one."""
    bench, number = Bench(ladder, device, sizes), re.search(r"_\w+?(\d)", mutant.where)
    versions = ladder.versions[int(number[1]) - 1 :][:1] if number else ladder.versions[::-1]
    device.library.races_ignore(mutant.file.encode(), mutants.line_of(mutant))
    try:
        for version in versions:
            for choice in version.choices(device, few=True) if bench.fits(version) else ():
                try:
                    bench.check(version, choice)
                except races.Race as e:
                    return str(e)
    finally:
        device.library.races_ignore(None, 0)
