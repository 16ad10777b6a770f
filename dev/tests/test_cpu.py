"""Test the CPU device: how kernels are compiled, and in which order threads run."""
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from dev.common.cache import cache_folder, read_cache, write_cache
from dev.common.cuda_source import checked_kernels
from dev.cpu.host import compiler_of, openmp_of
from dev.features.devices import make_device
from dev.lab.bench import orders as thread_orders
from dev.tests.checks import EXACT, check, check_refusal, refusal
from dev.tests.small_kernels import of_files
from train_gpt2 import replace_file

KERNEL_FILE = """
#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
BLOCK(32, threads)
extern "C" __global__ void fill(float* out, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
extern "C" __global__ void without_block(float* out) { out[0] = 1.0f; }
"""


def test_kernel_files(device_name, folder):
    """A kernel without a BLOCK, and a launch with too few arguments or too many, are refused."""
    path = folder / "kernels.cu"
    path.write_text(KERNEL_FILE)
    device = make_device(device_name, "fp32", of_files(path), plain=True)
    out = device.empty(4 * 50).view(np.float32)
    device.put(out, np.zeros(50))
    device.launch("fill", 40, out, 3, 40)
    yield "a kernel of 40 items", device.get(out), np.float32([3] * 40 + [0] * 10), EXACT
    check_refusal("kernel", "no kernel without_block with a BLOCK", device.launch, "without_block",
                  1, out)
    check_refusal("kernel", "2 arguments", device.launch, "fill", 40, out, 3)
    check_refusal("kernel", "4 arguments", device.launch, "fill", 40, out, 3, 40, 5)
    # A copy shares the library, except with -g, since a debugger shows the source's path.
    if device_name != "cuda":
        (folder / "copy").mkdir()
        copied = shutil.copy(path, folder / "copy")
        for flag, wish in (("-O1", 1), ("-O1 -g1", 2)):
            with mock.patch.dict("os.environ", CXXFLAGS=flag):
                found = {make_device("emulated", "fp32", of_files(file)).library._name
                         for file in (path, Path(copied))}
            check(f"a copy of the kernels, {flag}: libraries", len(found) == wish, len(found))
    path.write_text(KERNEL_FILE.replace("float value", "double value"))
    check_refusal("kernel", "fill: double value: expected a pointer.* int, float", checked_kernels,
                  [path])
    for block in ("size", "4 *", "threads / 0", "0 * threads"):
        path.write_text(KERNEL_FILE.replace("BLOCK(32, threads)", f"BLOCK(32, {block})"))
        check_refusal("kernel", "BLOCK over .*: .*: expected arithmetic in threads and W",
                      checked_kernels, [path])


LAUNCH = """
import sys
from pathlib import Path
import numpy as np
from dev.common.program import run_main
from dev.features.devices import make_device
from dev.tests.small_kernels import of_files

def main():
    device = make_device("emulated", "fp32", of_files(Path(sys.argv[1])))
    out = np.zeros(40, np.float32)
    device.launch("fill", 40, out, 3, 40)
    print("sum", int(out.sum()))

run_main(main)
"""


def test_cached_libraries(device_name, folder):
    """A library in the cache that is damaged is compiled again, and not loaded: the system would
    kill the process. A cache that cannot be used is one line that names XDG_CACHE_HOME."""
    path = folder / "kernels.cu"
    path.write_text(KERNEL_FILE)

    def launched(cache=folder, **variables):
        variables = os.environ | {"CXXFLAGS": "-O1", "XDG_CACHE_HOME": str(cache)} | variables
        done = subprocess.run([sys.executable, "-c", LAUNCH, path], env=variables,
                              capture_output=True, text=True)
        return (done.returncode, "compiling" in done.stdout,
                (done.stdout + done.stderr).splitlines()[-1:])

    check("compiled once", launched() == (0, True, ["sum 120"]))
    check("then loaded", launched() == (0, False, ["sum 120"]))
    [library], [seal], [shared], [_] = (list(folder.glob(f"train_gpt2/{name}")) for name in (
        "kernels_*.so", "kernels_*.txt", "runtime_*.o", "ahead_*.h"))
    data, notes = library.read_bytes(), seal.read_bytes()
    check("no other file stays", len([*library.parent.iterdir()]) == 4, [*library.parent.iterdir()])
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 1
    for what, file, content in (
            ("half of it", library, data[: len(data) // 2]),
            ("its first page", library, data[:4096]),
            ("nothing", library, b""), ("zeros", library, bytes(len(data))),
            ("a flipped bit", library, flipped),
            ("no library", library, None), ("no checksum", seal, None),
            ("an empty checksum", seal, b""),
            ("half a checksum", seal, notes[:32]),
            ("a checksum of zeros", seal, bytes(len(notes)))):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        found = launched()
        check(f"compiled again: {what}", found == (0, True, ["sum 120"]), found)
        check(f"and then loaded: {what}", launched() == (0, False, ["sum 120"]))
    shared.write_bytes(shared.read_bytes()[:4096])
    library.unlink()
    check("compiled again: half of what is shared", launched() == (0, True, ["sum 120"]))

    compiler = Path(compiler_of())
    (folder / "my tools").symlink_to(compiler.parent)
    found = launched(CXX=f'env "{folder}/my tools/{compiler.name}" -O1', CXXFLAGS="-DNOBODY='1 2'")
    check("CXX of several words", found == (0, True, ["sum 120"]), found)
    found = launched(CXX="absent -O1")
    check("CXX=absent -O1", "error: CXX=absent -O1: absent is not there" in found[2][0], found)

    shared = "/dev/shm"  # which containers mount with noexec
    if os.access(shared, os.W_OK) and os.statvfs(shared).f_flag & getattr(os, "ST_NOEXEC", 0):
        with tempfile.TemporaryDirectory(dir=shared) as cache:
            found = launched(cache)
        check(f"{shared}, with noexec", found[0] == 1 and "XDG_CACHE_HOME" in found[2][0], found)
    with mock.patch("ctypes.CDLL", side_effect=OSError("x.so: failed to map segment from shared "
                                                       "object")):
        check_refusal("a disk with noexec", "x.so: failed to map.*noexec; set XDG_CACHE_HOME",
                      cpu_of, folder, KERNEL_FILE)
    with mock.patch("ctypes.CDLL", side_effect=OSError("x.so: undefined symbol: f")):
        check("a function without a body",
              "could not compile" in refusal(cpu_of, folder, KERNEL_FILE))
    found = launched(path)  # a file, not a folder
    check("a cache that is a file", found[0] == 1 and "XDG_CACHE_HOME" in found[2][0], found)
    with mock.patch.dict("os.environ"), mock.patch("pwd.getpwuid", side_effect=KeyError):
        for name in ("HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        check_refusal("no home", "HOME is not set, .* set XDG_CACHE_HOME", cache_folder)
        write_cache("x", {"a": 1})
        check("no home: nothing is cached", read_cache("x") == {})
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=str(folder)):
        for text in ("[1]", "null", '{"a": ', "\0\0", ""):
            (folder / "train_gpt2/x.json").write_text(text)
            check(f"a damaged cache of numbers: {text!r}", read_cache("x") == {})
        write_cache("x", {"a": 1})
        check("is replaced", read_cache("x") == {"a": 1})


def test_without_openmp(folder):
    """A compiler that knows -fopenmp, and has no header or library for it: one core, which each run
    says, until OpenMP is there. Its messages are in English."""
    compiler, path = folder / "c++", folder / "kernels.cu"
    path.write_text(KERNEL_FILE)
    one = of_files(path)

    def said(script, flag="-O1"):
        compiler.write_text(f'#!/bin/sh\n{script}\nexec "{compiler_of()}" "$@"\n')
        compiler.chmod(0o755)
        openmp_of.cache_clear()  # as in another process
        variables = dict(CXXFLAGS=flag, XDG_CACHE_HOME=str(folder), CXX=str(compiler))
        with (mock.patch.dict("os.environ", variables),
              contextlib.redirect_stdout(io.StringIO()) as output):
            out, device = np.zeros(40, np.float32), make_device("emulated", "fp32", one, plain=True)
            device.launch("fill", 40, out, 3, 40)
        check("the kernels run", out.sum() == 120)
        return "compiling" in output.getvalue(), "one core" in output.getvalue()

    without = """case " $* " in
        *" -E "*) ;;
        *" -fopenmp "*) echo "cannot find -lomp" >&2; exit 1
    esac"""
    check("one core", said(without) == (True, True))
    check("and later", said(without) == (False, True))
    check("OpenMP is installed: compiled again", said("") == (True, False))
    check("and later", said("") == (False, False))
    apple = """case " $* " in
        *" -E "*) ;;
        *" -Xclang -fopenmp -lomp -I/opt/homebrew/opt/libomp/include -L/opt/"*) touch "$0.threads"
            for word; do  # as g++ knows it
                shift
                case "$word" in -Xclang|-lomp|*/libomp/*) ;; *) set -- "$@" "$word";; esac
            done;;
        *" -fopenmp "*) echo "unsupported option '-fopenmp'" >&2; exit 1
    esac"""
    found = said(apple, "-O1 -DAPPLE")
    check("Apple's compiler, with libomp", found == (True, False) and
          (folder / "c++.threads").exists(), found)
    check("another flag is bad", openmp_of(compiler_of(), "-fopenmp", "-bad") == ("-fopenmp",))
    message = refusal(said, 'test "$LC_ALL" = C.UTF-8 || exec false; printf "\\377" >&2', "-bad")
    check("English, though bytes are not UTF-8", message and "-bad" in message, message)


def test_same_pid(folder):
    """Two programs write a file at once, in containers that share a folder: both are process 1."""
    def chunks():
        yield b"outer"
        replace_file(folder / "x", [b"inner"])

    replace_file(folder / "x", chunks())
    check("the last one stays, whole", (folder / "x").read_bytes() == b"outer")
    check("and no other file", len([*folder.iterdir()]) == 1)


ORDER_FILE = """
#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
template <int a, int b> struct Numbers { float x[a * b]; };
BLOCK(128, threads)
extern "C" __global__ void turns(int* turn, int* count) {
    int i = 2 * blockDim.x * blockIdx.x + threadIdx.x;
    turn[i] = count[blockIdx.x]++;
    __syncwarp();
    turn[i + blockDim.x] = count[blockIdx.x]++;
}
BLOCK(32, 1)
extern "C" __global__ void leftovers(float* out) {
    __shared__ __align__(16) float x[32], y[2][32];  // two of them
    __shared__ Numbers<4, 8> z;
    int i = threadIdx.x;
    out[32 * blockIdx.x + i] =
        x[i] == x[i] || y[0][i] == y[0][i] || y[1][i] == y[1][i] || z.x[i] == z.x[i];
    x[i] = y[0][i] = y[1][i] = z.x[i] = 1.0f;
}
BLOCK(32, 1)
extern "C" __global__ void copies(float* out, float* from) {
    __shared__ float to[4][32];
    int t = threadIdx.x;
    auto read = [&](int when) {
        for (int group = 0; group < 4; group++) out[(4 * when + group) * 32 + t] = to[group][t];
    };
    for (int group = 0; group < 4; group++) {
        to[group][t] = -1.0f;
        copy4(&to[group][t], from + 32 * group + t, group != 1 || t % 2 == 0);
        if (group < 3) copies_end();
    }
    read(0);
    wait_for_copies<1>();
    read(1);
    from[64 + t] = 5.0f;
    wait_for_copies<0>();
    read(2);
    copies_end();
    wait_for_copies<0>();
    read(3);
}
"""


def cpu_of(folder, text):
    """A CPU device compiled from this text, in a cache of its own."""
    path = folder / "kernels.cu"
    path.write_text(text)
    with mock.patch.dict("os.environ", CXXFLAGS="-O1", XDG_CACHE_HOME=str(folder)):
        return make_device("emulated", "fp32", of_files(path), plain=True)


def test_orders(device_name, folder):
    """In which order threads run, when copies arrive, and that each block's shared memory starts as
    NaN."""
    if device_name == "cuda":
        return
    device = cpu_of(folder, ORDER_FILE)

    # When each of a block's 70 threads runs, before and after it waits for its warp.
    def turns(order, block=0):
        turn, count = np.full((2, 2, 70), -1, np.int32), np.zeros(2, np.int32)
        device.set_order(order)
        device.launch("turns", 140, turn, count, threads=70)
        return turn[block]

    # A warp does both before the next one starts. In the order forward, lane 0 is the last to go on
    # after the wait.
    lanes = np.arange(32)
    yield "forward", turns("forward")[0], np.r_[lanes, 64 + lanes, 128 + lanes[:6]], EXACT
    forward_again = (32 + (lanes + 1) % 32, 96 + (lanes + 1) % 32, 134 + (lanes[:6] + 1) % 6)
    yield "forward, after a wait", turns("forward")[1], np.concatenate(forward_again), EXACT
    reverse = np.r_[76 + lanes[::-1], 12 + lanes[::-1], lanes[5::-1]]
    yield "reverse", turns("reverse"), [reverse, reverse + np.repeat([32, 6], [64, 6])], EXACT
    shuffled = {seed: turns(seed) for seed in (1, 2, 3, "4", 2**31 - 1)}
    yield "a shuffle again", turns(3), shuffled[3], EXACT
    firsts = set()
    for seed, (before, after) in shuffled.items():
        warps = [slice(0, 32), slice(32, 64), slice(64, 70)]
        first = [min(before[warp]) for warp in warps]
        firsts.add(tuple(np.argsort(first)))
        whole = all(sorted(before[w]) + sorted(after[w]) == [*range(f, f + 2 * (w.stop - w.start))]
                    for w, f in zip(warps, first))
        check(f"shuffle {seed}: warp by warp", whole, f"{first}")
        ranks = [tuple(np.argsort(turn[w])) for w in warps for turn in (before, after)]
        check(f"shuffle {seed}: lanes are shuffled anew",
              len({*ranks, (*lanes,), (*lanes[::-1],)}) == 8)
    check("each block is shuffled in its own way", (turns(1, block=1)[0] != shuffled[1][0]).any())
    yield "and all are reversed alike", turns("reverse", block=1), turns("reverse"), EXACT
    check("warps are shuffled", len(firsts) > 2, f"{firsts}")
    device.set_order("forward")
    for order in ("backward", 0, -1, 1.5, 2**31, ""):
        check_refusal("order", f"order is {order}: expected forward, reverse, or a",
                      device.set_order, order)
    with mock.patch.dict("os.environ", CUDA_ON_CPU_ORDER="x"):
        check_refusal("order", "CUDA_ON_CPU_ORDER is x: expected forward", cpu_of, folder,
                      ORDER_FILE)
    with mock.patch.dict("os.environ", CUDA_ON_CPU_ORDER="reverse"):
        device = cpu_of(folder, ORDER_FILE)
    turn, count = np.zeros(140, np.int32), np.zeros(1, np.int32)
    device.launch("turns", 70, turn, count, threads=70)
    yield "reverse by CUDA_ON_CPU_ORDER", turn[:70], reverse, EXACT

    out = np.ones((5, 32), np.float32)
    for again in range(2):
        device.launch("leftovers", 5, out)
        yield f"shared memory that outlives a block {again}", out, np.zeros((5, 32)), EXACT
    for order in thread_orders():
        nan, source = np.full((4, 4,
                               32), np.nan), np.arange(128, dtype=np.float32).reshape(4, 32) + 1
        nan[1:, 0], nan[1:, 1], nan[3, 3] = (source[0], np.where(lanes % 2 == 0, source[1], 0),
                                             source[3])
        out = np.zeros((4, 4, 32), np.float32)
        device.set_order(order)
        device.launch("copies", 1, out, source)
        check(f"copies land where they are waited for, in order {order}",
              np.array_equal(out, nan, equal_nan=True))
