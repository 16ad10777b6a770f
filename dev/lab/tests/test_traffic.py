"""Test the count of memory traffic: small kernels whose sectors and turns one counts by hand, an
exercise, and drawings.
"""
import contextlib
import functools
import io
from typing import NamedTuple
from unittest import mock

import numpy as np

from dev.cpu import traffic as counted
from dev.lab import traffic
from dev.lab.ladder import find_ladder, text_of
from dev.lab.submission import Submission
from dev.lab.tests.student import SOFTMAX, filled
from dev.tests.checks import check, check_refusal
from dev.tests.small_kernels import numbered

HEAD = """#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
struct half { unsigned short bits; };
struct alignas(8) Two { float x[2]; };
struct alignas(16) Four { float x, y, z, w; };
__device__ float table[64];
"""


class Small(NamedTuple):
    """A kernel of two blocks of 64 threads, which are four warps. The lines that end in //! are
    counted: {kind: (requests, sectors or turns, the least, requests with lanes missing)}."""
    name: str
    wish: dict
    body: str


TRANSPOSE = """
    __shared__ float tile[32][32];
    for (int r = t / 32; r < 32; r += 2) tile[r][t % 32] = inp[32 * r + t % 32];
    __syncthreads();
    for (int r = t / 32; r < 32; r += 2) {
        float x = tile[t % 32][r];  //!
        out[1024 * b + 32 * r + t % 32] = x;
    }
"""
SMALL = (
    Small("side by side", dict(load=(4, 16, 16, 0), store=(4, 16, 16, 0)), """
    out[i] = inp[i];  //!
"""),
    Small("every second", dict(load=(4, 32, 16, 0), store=(4, 16, 16, 0)), """
    out[i] = inp[2 * i];  //!
"""),
    Small("32 apart", dict(load=(4, 16, 16, 0), store=(4, 128, 16, 0)), """
    out[32 * i] = inp[i];  //!
"""),
    Small("4 bytes beside a sector", dict(load=(4, 20, 16, 0), store=(4, 20, 16, 0)), """
    out[i + 1] = inp[i + 7];  //!
"""),
    Small("all lanes the same", dict(load=(4, 4, 4, 0)), """
    float x = inp[9];  //!
    out[i] = x;
"""),
    Small("backwards", dict(load=(4, 16, 16, 0)), """
    float x = inp[200 - i - 73];  //!
    out[i] = x;
"""),
    Small("16 bytes", dict(load=(4, 64, 64, 0), store=(4, 64, 64, 0)), """
    reinterpret_cast<Four*>(out)[i] = reinterpret_cast<Four*>(inp)[i];  //!
"""),
    Small("16 bytes, used one by one", dict(load=(4, 64, 64, 0)), """
    Four four = reinterpret_cast<Four*>(inp)[i];  //!
    out[i] = four.x + four.y * four.z + four.w;
"""),
    Small("8 bytes", dict(load=(4, 32, 32, 0)), """
    Two two = reinterpret_cast<Two*>(inp)[i];  //!
    out[i] = two.x[0] * two.x[1];
"""),
    Small("2 bytes", dict(load=(4, 8, 8, 0)), """
    unsigned bits = low[i].bits;  //!
    out[i] = bits;
"""),
    Small("a variable of the library", dict(load=(4, 16, 16, 0)), """
    float x = table[t];  //!
    out[i] = x;
"""),
    Small("__ldcg", dict(load=(4, 16, 16, 0)), """
    float x = __ldcg(inp + i);  //!
    out[i] = x;
"""),
    Small("threads that return", dict(load=(4, 13, 13, 0)), """
    if (i >= 100) return;
    float x = inp[i];  //!
    out[i] = x;
"""),
    Small("half a warp", dict(store=(4, 8, 8, 4)), """
    out[i] = inp[i];
    if (t % 32 < 16) out[i + 1024] = 2;  //!
"""),
    Small("one lane after a shuffle", dict(store=(4, 4, 4, 4)), """
    float x = __shfl_xor_sync(~0u, 1.0f, 1);
    if (t % 32 == 0) out[i] = x;  //!
"""),
    Small("a loop that lanes leave one by one", dict(load=(124, 124, 124, 124)), """
    float sum = 0;
    for (int k = 0; k < t % 32; k++) sum += inp[k];  //!
    out[i] = sum;
"""),
    Small("lanes that take turns, and meet", dict(load=(8, 32, 16, 8)), """
    float sum = 0;
    for (int k = 0; k < 2; k++) {
        if (k == t % 2) sum += inp[i];  //!
        __syncwarp();
    }
    out[i] = sum;
"""),
    Small("both sides of an if", dict(load=(8, 32, 16, 8)), """
    float x;
    if (t % 2) x = inp[i];  //!
    else x = 2 * inp[i];  //!
    out[i] = x;
"""),
    Small("warps that wait for each other", dict(load=(128, 512, 512, 0)), """
    float sum = 0;
    for (int k = 0; k < 32; k++) {
        sum += inp[32 * k + t];  //!
        __syncthreads();
    }
    out[i] = sum;
"""),
    Small("a transpose", dict(load=(64, 2048, 64, 0)), TRANSPOSE),
    Small("with padding", dict(load=(64, 64, 64, 0)), TRANSPOSE.replace("[32][32]", "[32][33]")),
    Small("every second word of shared memory", dict(store=(4, 8, 4, 0)), """
    DYNAMIC_SHARED(float, part);
    float x = inp[i];
    part[2 * t] = x;  //!
    out[i] = part[2 * t];
"""),
    Small("8 bytes of shared memory", dict(store=(4, 8, 8, 0)), """
    __shared__ Two part[64];
    Two two = reinterpret_cast<Two*>(inp)[i];
    part[t] = two;  //!
    out[i] = part[t].x[0];
"""),
    Small("16 bytes of shared memory", dict(store=(4, 16, 16, 0)), """
    __shared__ Four part[64];
    Four four = reinterpret_cast<Four*>(inp)[i];
    part[t] = four;  //!
    out[i] = part[t].x;
"""),
    Small("16 bytes, 5 words apart", dict(load=(4, 16, 16, 0)), """
    DYNAMIC_SHARED(float, part);
    for (int k = 0; k < 20; k++) part[20 * t + k] = inp[k];
    Four four = *reinterpret_cast<Four*>(part + 20 * t);  //!
    out[i] = four.y;
"""),
    Small("16 bytes, all lanes the same", dict(load=(4, 8, 8, 0)), """
    __shared__ Four part[64];
    part[t] = reinterpret_cast<Four*>(inp)[i];
    Four four = part[7];  //!
    out[i] = four.y + four.z;
"""),
    Small("8 bytes, lanes in pairs", dict(load=(4, 4, 4, 0)), """
    __shared__ Two part[64];
    part[t] = reinterpret_cast<Two*>(inp)[i];
    Two two = part[t / 2];  //!
    out[i] = two.x[0] + two.x[1];
"""),
    Small("two halves of a word of shared memory", dict(store=(4, 4, 4, 0)), """
    __shared__ half part[64];
    half x = low[i];
    part[t] = x;  //!
    out[i] = part[t].bits;
"""),
    Small("an atomic of floats", dict(atomic=(4, 4, 4, 0)), """
    float x = inp[i];
    atomicAdd(out + t % 2, x);  //!
"""),
    Small("atomics of integers", dict(atomic=(8, 8, 8, 0)), """
    int x = inp[i] > 0;
    atomicAdd(counter, x);  //!
    atomicMax(counter + 1, i);  //!
"""),
    Small("16 bytes, asynchronously", dict(copy=(8, 80, 80, 0)), """
    __shared__ Four part[64];
    copy_later(part + t, inp + 4 * i, 16);  //!
    copies_end();
    wait_for_copies<0>();
    out[i] = part[t].x;
"""),
)


def test_small_kernels(folder):
    """Small kernels, counted by hand."""
    path = folder / "small.cu"
    kernels, marked = numbered(path, HEAD, [small.body for small in SMALL])
    device = counted.CountingCpu("fp32", kernels)
    for number, (name, wish, _) in enumerate(SMALL):
        arrays = [(key, device.empty(4 * 8192).view(np.float32)) for key in ("out", "inp")]
        arrays += [("counter", device.empty(64).view(np.int32)),
                   ("low", device.empty(512).view(np.uint16))]
        for _, array in arrays:
            array[...] = 1
        work = functools.partial(device.launch, f"kernel{number}", 128, *(x for _, x in arrays),
                                 shared=64 * 80)
        found = counted.count(device, work, arrays, path.name)
        sums = {}
        for c in found.counts:
            if c.line in marked[number]:
                numbers = c.requests, c.cost, c.least, c.partial
                sums[c.kind] = tuple(map(sum, zip(numbers, sums.get(c.kind, (0, 0, 0, 0)))))
        check(f"{name}", sums == wish, f"{sums}, expected {wish}")


def test_an_exercise(folder):
    """A softmax of a thread a row: 27 rows are 27 sectors a load; the report; and a drawing."""
    path = folder / "my_softmax_forward.cu"
    path.write_text(filled("softmax_forward", SOFTMAX))
    at = next(i for i, line in enumerate(path.read_text().splitlines(), 1)
              if "top = fmaxf" in line)
    sizes = dict(B=3, T=9, V=257, Vp=384)
    found = traffic.traffic_of(Submission(path), sizes)
    count = next(c for c in found.counts if c.line == at)
    check("a thread a row", (count.requests, count.each, count.kind) == (257, 27, "load"), count)
    check("the fewest sectors", (found.read, found.written) == (27 * (-(-257 // 8)), 27 * 384 // 8),
          found[1:])
    for head in ("#include <cuda_runtime.h>\n#include <assert.h>\n",
                 "#include <cfloat>\n#include <cuda_bf16.h>\n",
                 "#include <math.h>\n"):
        other = folder / "my_softmax_forward_as_for_nvcc.cu"
        row = SOFTMAX.replace("LOWEST", "-FLT_MAX" if "float" in head else "-INFINITY")
        other.write_text(filled("softmax_forward", row, "_as_for_nvcc", head))
        again = traffic.traffic_of(Submission(other), sizes).total("load")
        check(f"as for nvcc: {head.splitlines()}", again[4:] == found.total("load")[4:], again)
    with mock.patch.object(traffic, "figures_of_version", lambda name, number, *_: {
            **traffic.figures_of(found), "sectors a load": float(number)}):
        said = traffic.report(Submission(path), sizes)
    wish = ([f"  line {at}: 27.0 sectors a load (4.0 would do)   for (int v = 0; v < V; v++) "
             "top", f"yours  version 1  version {len(find_ladder('softmax_forward').versions)}",
             f"  {traffic.PER_BYTE.format('loads')}  "])
    check("the report", all(any(part in line for line in said) for part in wish),
          " ".join(said)[:300])
    readme = (traffic.LAB / "README.md").read_text(encoding="utf-8")
    strange = [row for row in traffic.figures_of(found) if f"| {row} |" not in readme]
    check("the README explains each row of the table", not strange, strange)
    lines = traffic.as_text(count)
    check("a drawing has a row for each sector", len(lines) == 3 + 27 and lines[-1].split() == [
        f"inp[{26 * 384}]", "26", *"......."], " ".join(lines)[:80])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        traffic.main([str(path), "--shape", "B=3,T=9,V=257,Vp=384", "--draw", str(at), "--svg",
                      str(folder / "a.svg")])
    check("--draw and --svg", out.getvalue().splitlines()[:-1] == lines and
          (folder / "a.svg").read_text().count('height="11"') == 27, out.getvalue()[-60:].strip())
    check_refusal("a line without accesses", f"line 1 of .* touches no memory.*these do: {at}",
                  traffic.main,
                  [str(path), "--draw", "1"])


def test_drawings():
    """Bank turns, drawn."""
    def drawn(at, nbytes, kind="load"):
        sample = counted.Sample("tile", 0, 0, nbytes, 4, [at(lane) for lane in range(32)])
        return traffic.as_text(counted.Count("", 1, kind, True, 1, 0, 1, 1, sample))[2:]
    check("side by side: one turn", [line.split()[2:] for line in drawn(lambda i: 4 * i, 4)] == [
        [str(i) for i in range(32)]])
    check("a column: 32 turns", [line.split()[2:] for line in drawn(lambda i: 128 * i, 4)] == [
        [str(i), *"." * 31] for i in range(32)])
    check("16 bytes: four turns",
          [line.split()[2] for line in drawn(lambda i: 16 * i, 16)] == ["0", "8", "16", "24"])
    check("16 bytes in pairs: two turns",
          [line.split()[2] for line in drawn(lambda i: i // 2 * 16, 16)] == ["0-1", "16-17"])
    check("all the same: one turn", [line.split()[2] for line in drawn(lambda i: 0, 4)] == ["0-31"])
    check("but 32 of an atomic", len(drawn(lambda i: 0, 4, "atomic")) == 32)


def test_sizes():
    """Each ladder's sizes for counting fit its problem, and have several blocks' worth of rows."""
    found = {name: text_of(traffic.sizes_of(find_ladder(name))) for name in
             ("softmax_forward", "matmul_forward", "attention_forward", "gqa_forward",
              "global_norm")}
    check("sizes", found == dict(
        softmax_forward="B=3,T=100,V=500,Vp=512", matmul_forward="B=2,T=64,C=128,OC=128",
        attention_forward="B=2,T=128,NH=2,HS=64", gqa_forward="B=2,T=128,NH=2,NKV=1,HS=64",
        global_norm="n=32768"),
        found)
