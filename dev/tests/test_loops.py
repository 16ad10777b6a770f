"""The loops of --device cpu, in dev/cpu/kernels.cpp, dev/llama3/llama3.cpp, dev/features/*.cpp:
against NumPy's formulas; against PyTorch; and with several numbers of threads. What they do not
know is emulated."""
import contextlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.bench import on_cpu
from dev.common.config import Config
from dev.common.cuda_source import parameters_of
from dev.cpu.device import LOOP_KINDS, Cpu, loops_of, numpy_has_accelerate, read_loops
from dev.cpu.emulated import KERNELS, Emulated
from dev.features.base import GPT2
from dev.features.feature import stack
from dev.features.recompute import LLAMA_SOURCE as RECOMPUTE_LLAMA, SOURCE as RECOMPUTE
from dev.features.relu_attention import ReluAttention
from dev.lab import formulas
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests import test_llama3, test_trainer
from dev.tests.checks import (EXACT, TOP, check, check_refusal, fast, normal, output_of, run,
                              words)
from dev.tests.models import (FIXTURES, check_dump, check_kernels, check_launched, device_of,
                              launched, poisoned_model)
from dev.tests.steps import check_steps
from train_gpt2 import BF16, pack_batch, read_kernels, to_float, whole_shape

DTYPES = "fp32", "bf16"
SOURCES = [*Config3.SOURCES, RECOMPUTE, RECOMPUTE_LLAMA]  # whose kernels all have loops


def runs_on(device_name):
    return device_name != "cuda"


@fast
def test_names():
    """Each kernel has a loop, whose arguments are the kernel's, of the same types and names, and
    then some that Cpu knows."""
    for path in SOURCES:
        kernels, loops = read_kernels([path]), read_loops(loops_of(path).read_text("utf-8"))
        check(f"{path.name}: loops", kernels.keys() <= loops.keys(),
              f"none for {kernels.keys() - loops.keys()}")
        for name in kernels.keys() & loops.keys():
            wish = [(p.name, LOOP_KINDS.get(p.kind, p.kind), p.array, p.const)
                    for p in parameters_of(kernels[name])]
            found = [(p.name, p.kind, p.array, p.const)
                     for p in parameters_of(SimpleNamespace(parameters=loops[name]))]
            more = {name for name, *_ in found[len(wish) :]}
            check(f"{name}: arguments", found[: len(wish)] == wish, found)
            check(f"{name}: further arguments",
                  more <= {"C", "HS", "GROUP", "blocks", "heads", "documents"}, more)


@fast
def test_table_of_kernels():
    """The table at the top of kernels.cu has all of its kernels in their order, with the threads of
    their blocks, and rates that RESULTS.md measured first."""
    head, kernels = KERNELS.read_text("utf-8").split("*/")[0], read_kernels([KERNELS])
    rows = re.findall(r"^  (\w+) +\S.*? +(\d+)  (?:memory|latency|tensor cores) *([\d.]*)",
                      head, re.M)
    check("names", [name for name, *_ in rows] == [*kernels], rows)
    results = (TOP / "dev/RESULTS.md").read_text("utf-8")
    for name, threads, rate in rows:
        if name != "layernorm_backward":  # whose launch chooses them
            check(f"{name}: threads", int(threads) == kernels[name].threads, threads)
        if rate:
            measured = re.search(rf"^\| {name} \|.* ([\d.]+) T\S+/s \|", results, re.M)[1]
            digits = len(rate.partition(".")[2])
            check(f"{name}: rate", f"{float(measured):.{digits}f}" == rate, measured)


# ---- Against formulas, and models against PyTorch's


@pytest.mark.parametrize("dtype", DTYPES)
def test_formulas(dtype):
    """Each loop at all sizes of the kernel lab, as test_trainer.py tests the kernels themselves."""
    others = {"relu_attention_forward", "adamw_bf16"}  # have none
    check_kernels("cpu", dtype, [name for name in test_trainer.KERNELS if name not in others],
                  test_trainer.COMPILED_FOR)
    check_kernels("cpu", dtype, test_llama3.KERNELS, test_llama3.COMPILED_FOR, architecture=Llama3)
    test_trainer.check_model("cpu", dtype)
    for state in ("llama_gqa", "llama_tied"):
        check_dump(("cpu", dtype, True, Llama3), FIXTURES / f"{state}.bin",
                   FIXTURES / f"{state}_debug_state.bin", fp32_bound=1e-5)
    for architecture in (GPT2, Llama3):
        check_steps("cpu", dtype, True, architecture)
    # By check_steps; global_norm has no version in bf16.
    launched.update({"residual_layernorm_into", "residual_rmsnorm_into", "global_norm"})
    check_launched(SOURCES)


def made(device, shape, dtype, values=np.nan):
    array = device.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    array[...] = values if dtype != BF16 else (np.float32(values).view(np.uint32) >> 16)
    return array


def test_extremes():
    """Numbers at which a formula overflows, or loses all digits."""
    device = Cpu("fp32", Config(C=64, NH=2))
    x = np.float32([[-1e4, -100, -88, -20, -1e-30, 0, 1e-30, 20, 88, 100, 1e4, np.nan, 3, -3, 1]])
    out, dout = np.empty_like(x), np.ones_like(x)
    device.launch("gelu_forward", x.size, out, x, 1, x.size)
    device.launch("gelu_backward", x.size, dout, x, 1, x.size)
    nan = np.isnan(x)
    check("gelu: a NaN stays one", np.array_equal(np.isnan(out), nan)
          and np.array_equal(np.isnan(dout), nan))
    yield "gelu", out[~nan], formulas.gelu(np.float64(x[~nan])), 1e-6
    yield "gelu's derivative", dout[~nan], formulas.dgelu(1, np.float64(x[~nan])), 1e-6

    V, targets = 37, np.int32([0, 36, 5, 7])
    logits = np.float32(normal(4, 40)) * np.float32([[1], [1e4], [1], [1]])
    logits[0] += 1e4
    logits[2, 5:9] = -np.inf, 90, -1e30, -200
    logits[3, 8] = np.nan
    truth = np.float64(logits[:, :V])
    losses = np.empty(4, np.float32)
    device.launch("fused_classifier", 4, logits, losses, targets, 0.5, 4, V, 40, 1, 0)
    with np.errstate(invalid="ignore"):
        wish = formulas.dcross_entropy(targets, np.full(4, 0.5), truth)
    check("classifier: a NaN is in the loss, -infinity too",
          np.isnan(losses[3]) and losses[2] == np.inf)
    yield "classifier", losses[:2], formulas.cross_entropy(targets[:2], truth[:2]), 1e-5
    yield "dlogits", logits[:3, :V], wish[:3], 1e-6
    yield "padding", logits[:, V:], np.zeros((4, 3)), EXACT

    # Norms: rows that differ by no more than the root of epsilon, and rows far from 0
    N, C = 3, 64
    x = np.float32(normal(N, C)) * np.float32([[3e-3], [1], [1e-6]]) + np.float32([[0], [500], [0]])
    weight, bias = (np.float32(normal(C)) for _ in range(2))
    out, copy = np.empty((2, N, C), np.float32)
    mean, rstd = np.empty((2, N), np.float32)
    device.launch("residual_layernorm_forward", N, out, mean, rstd, copy, x, None, weight, bias, N)
    wish = formulas.layernorm(*map(np.float64, (x, weight, bias)))
    for n, limit in enumerate((2e-6, 2e-4, 2e-6)):
        yield f"layernorm of row {n}", out[n], wish[n], limit

    n = 64  # AdamW: an epsilon next to nothing, a second moment of 0
    adam = [made(device, n, np.float32, x) for x in (1, 0, 0, 0)]
    adam[1][: n // 2] = 1e-20
    settings = np.float32([0.1, 0.1, 0.001, 10, 1000, 1e-37, 0, 0])
    device.launch("adamw", n, adam[0], None, *adam[1:], np.uint64([0, n]), np.int32([0]), 1, n,
                  settings, np.float32([1, 1, 1, 0]))
    check("adamw: without a gradient nothing changes", (adam[0][n // 2 :] == 1).all())
    check("adamw: all is finite", all(np.isfinite(array).all() for array in adam))


def test_timed_steps():
    """The steps that dev/bench/on_cpu.py times, ours and PyTorch's, are the same training."""
    c = Config(maxT=8, V=65, L=2, NH=2, C=64, Vp=96)
    steps = [on_cpu.torch_step(False, c, 2, 8), on_cpu.our_step("cpu", c, 2, 8)]
    wish, found = ([step() for _ in range(4)] for step in steps)
    yield "losses", np.array(found), np.array(wish), 1e-5
    times = {("cpu", "own"): 3, ("eager", "own"): 5, ("compiled", "own"): 4,
             ("cpu", "avx2"): 6, ("eager", "avx2"): 8, ("compiled", "avx2"): 9}
    table = output_of(on_cpu.print_table, "laptop", {
        job: ([2 * ms, ms, ms / 2], [1.0]) for job, ms in times.items()})
    check("factors over the better of PyTorch's at a width", re.findall(
        r"^\| [^|]+ \| (?:own|avx2) \| [\d.]+ \| ([\d.]+)", table, re.M) ==
        ["0.75", "1.25", "1.00", "0.75", "1.00", "1.12"], table)


# ---- Any width, and any number of threads


@pytest.mark.parametrize("level, needs", (("x86-64", "sse2"), ("x86-64-v3", "avx2"),
                                          ("x86-64-v4", "avx512f")))
def test_widths(level, needs):
    """A step with vectors of 4, 8 and 16 numbers, if the processor has them: the same, up to
    rounding."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or needs not in cpuinfo.read_text().split():
        pytest.skip(f"the processor has no {needs}, or is not known")
    c, found = Config(L=1, maxT=64, V=251, Vp=288, C=96, NH=3), []
    batch, values = pack_batch(*words(c.V, 2, 3, 45)), [
        (row.name, np.float32(0.2 * normal(*whole_shape(row)))) for row in c.parameter_table()]
    for flags in ("", f"-march={level}"):
        with mock.patch.dict("os.environ", CXXFLAGS=flags):
            model = GPT2(c, Cpu("fp32", c), 3, 45)
        model.set_parameters(values)
        model.train_step(batch, learning_rate=0.0, clip=0.0)
        found.append((model.device.path, model.arenas["gradients"].view(np.float32)))
    (path, wish), (other, gradients) = found
    check("another library", other != path, path)
    yield "gradients", gradients, wish, 1e-5


def skip_without_openmp():
    if not hasattr(Cpu("fp32", Config(C=64, NH=2)).library, "omp_set_num_threads"):
        pytest.skip("the compiler has no OpenMP")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype):
    """The same bits with one thread and with several, products included."""
    skip_without_openmp()
    for Model, sizes in ((GPT2, dict(C=128, NH=4, Vp=288)), (GPT2, dict(C=96, NH=3, Vp=288)),
                         (Llama3, dict(C=64, NH=4, NKV=2))):
        c = Model.Config(L=2, maxT=64, V=251, **sizes)
        device, found = Cpu(dtype, c), []
        batch = pack_batch(*words(c.V, 2, 3, 45))
        for threads in (1, 3, 2):
            device.library.omp_set_num_threads(threads)
            model = Model(c, device, 3, 45)
            model.set_parameters([(row.name, np.float32(np.sin(np.arange(row.size)) * 0.2).reshape(
                whole_shape(row))) for row in c.parameter_table()])
            for name in ("activations", "backward"):
                device.zero(model.arenas[name])
            for _ in range(2):
                model.train_step(batch, learning_rate=1e-2, clip=1.0)
            found.append(model.arenas)
        device.library.omp_set_num_threads(1)
        for name in found[0]:
            for more in found[1:]:
                yield f"{Model.__name__} C={c.C}, {name}", more[name], found[0][name], EXACT


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype):
    """Products that are cut into blocks, with tiles and parts of K left over at their ends, and all
    that may follow a product. The same bits with any number of threads."""
    skip_without_openmp()
    device = Cpu(dtype, Config(C=64, NH=2))
    if numpy_has_accelerate():
        pytest.skip("NumPy multiplies, with threads of its own")
    real, limit = device.real, 1e-6 if dtype == "fp32" else 5e-3

    def array(rows, columns, transposed=False):
        shape = (columns, rows) if transposed else (rows, columns)
        found = made(device, shape, real, normal(*shape))
        return found.T if transposed else found

    def product(dtype=real, **options):
        out = made(device, (I, J), dtype, start)
        device.matmul(out, a, b, **options)
        return out

    for (I, K, J), transposed in itertools.product(((715, 300, 70), (69, 531, 801)), (0, 1)):
        a, b, start = array(I, K, transposed), array(K, J, transposed), normal(I, J)
        bias, before, found = array(1, J)[0], array(I, J), []
        for threads in (1, 2, 3, 11):
            device.library.omp_set_num_threads(threads)
            gelu = made(device, (I, J), real)
            found.append([product(), product(bias=bias), product(np.float32, accumulate=True),
                          product(bias=bias, gelu=gelu), gelu, product(dgelu_at=before)])
        device.library.omp_set_num_threads(1)
        truth = np.float64(to_float(a)) @ np.float64(to_float(b))
        biased = truth + to_float(bias)
        wishes = (truth, biased, start + truth, biased, formulas.gelu(biased),
                  formulas.dgelu(truth, np.float64(to_float(before))))
        names = "plain", "bias", "accumulate", "before gelu", "gelu", "dgelu_at"
        for name, wish, *arrays in zip(names, wishes, *found):
            name = f"{I}x{K}x{J} {transposed}, {name}"
            yield name, arrays[0], wish, limit
            error = np.abs(to_float(arrays[0]) - wish).max() / np.abs(wish).max()
            check(f"{name}: each number", error <= limit, error)
            for more in arrays[1:]:
                yield f"{name}, with threads", more, arrays[0], EXACT


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_products(dtype):
    """Products of a few rows, columns or numbers, of matrices with gaps, and NaNs that stay in
    their row and column. Each row has the same bits as in a product of its own."""
    device = Cpu(dtype, Config(C=64, NH=2))
    for I, K, J in ((1, 1, 1), (1, 70, 33), (7, 5, 31), (8, 257, 32), (9, 3, 65), (33, 512, 1)):
        wide = [made(device, shape, device.real, normal(*shape))
                for shape in ((2 * I, K + 3), (K + 3, 2 * I), (2 * J, K + 3), (K + 3, 2 * J))]
        lefts = [wide[0][:I, :K], wide[0][::2, 3:], wide[1][:K, :I].T, wide[1][3:, ::2].T]
        rights = [wide[2][:J, :K].T, wide[2][::2, 3:].T, wide[3][:K, :J], wide[3][3:, ::2]]
        for i, j in itertools.product(range(4), range(4)):
            a, b, name = lefts[i], rights[j], f"{I}x{K}x{J}, {i}, {j}"
            out, row = np.full((2, I, J), np.nan, np.float32)
            device.matmul(out, a, b)
            yield name, out, np.float64(to_float(a)) @ np.float64(to_float(b)), 1e-6
            if not numpy_has_accelerate():
                device.matmul(row[-1:], a[-1:], b)
                yield f"{name}, the last row", row[-1], out[-1], EXACT
    a, b = np.ones((9, 40), np.float32), np.ones((40, 70), np.float32)
    a[8, 39] = b[0, 69] = np.nan
    out = np.empty((9, 70), np.float32)
    Cpu("fp32", Config(C=64, NH=2)).matmul(out, a, b)
    check("NaNs", np.isnan(out).sum() == 78 and (out[:8, :69] == 40).all(), out)
    with pytest.raises(AssertionError, match="sizes differ"):
        device.matmul(out, made(device, (9, 41), device.real), made(device, (40, 70), device.real))
    with pytest.raises(AssertionError, match="out's rows"):
        device.matmul(out.T, *(made(device, shape, device.real) for shape in ((70, 4), (4, 9))))


# ---- What loops do not know


def test_emulates():
    """A switch that loops do not know has all kernels emulated, and the device says so; a kernel
    without a loop is emulated alone."""
    c = Config(C=64, NH=2)
    check("loops are what the device says", "loops" in str(Cpu("fp32", c)), Cpu("fp32", c))
    for flags, order, mixins in (("-O1 -DTURING", "", []), ("-O1", "3", []),
                                 ("-O1", "", [ReluAttention])):
        environment = {"CXXFLAGS": flags, "CUDA_ON_CPU_ORDER": order}
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(None):
            device = stack(Cpu, mixins)("fp32", c)
        check(f"{environment}: emulated", device.emulated and not device.loops
              and "thread by thread for" in str(device), device)
    for flags, known in (("-O1 -DNDEBUG", True), ("-O1 -D NDEBUG=1", True), ("-DHOPPER=1", False),
                         ("-D RELU", False), ("-fsanitize=thread", False)):
        with mock.patch.dict(os.environ, CXXFLAGS=flags), mock.patch.object(
                Cpu, "compile"), mock.patch.object(Cpu, "emulate"):
            device = Cpu("fp32", c)
        check(f"{flags}: {'loops' if known else 'emulated'}", (not device.unknown) == known, device)
    found, batch = [], pack_batch(*words(257, 2, 2, 20))
    for name in ("cpu", "emulated"):
        model = poisoned_model(device_of(name, "fp32", 64, 2), 2, 20, moments="bf16")
        for _ in range(2):
            model.train_step(batch, learning_rate=1e-2, seed=1)
        found.append(model)
    yield "loss with bf16 moments", *(model.verdict().loss for model in found), 1e-5
    check("which a kernel rounds", found[0].device.emulated and found[0].device.loops)


def test_accelerate():
    """Where NumPy has Accelerate, it multiplies; so it does what the loop does not know."""
    for dtype in DTYPES:
        device = Cpu(dtype, Config(C=64, NH=2))
        for has in False, True:
            with mock.patch("dev.cpu.device.numpy_has_accelerate", return_value=has):
                run(f"{dtype} matmul", test_trainer.matmul, device, 27, 96, 288)
        with mock.patch.object(device, "library"), mock.patch(
                "dev.cpu.device.numpy_has_accelerate", return_value=True):
            x = made(device, (4, 4), device.real, np.eye(4))
            device.matmul(out := made(device, (4, 4), np.float32), x, x)
            yield f"{dtype}: by NumPy", out, np.eye(4), EXACT
    device.matmul(out, np.eye(4, dtype=np.float32), x)  # left is of fp32, right of bf16
    yield "of two types", out, np.eye(4), EXACT


def test_edited_kernels(folder):
    """A loop is not used for a kernel whose parameters somebody has edited."""
    text, path = KERNELS.read_text("utf-8"), folder / "kernels.cu"
    declared = "gelu_forward(Output out, const real* __restrict__ inp, int N, int OC)"
    assert text.count(declared) == 1
    edited = type("Edited", (Config,), dict(SOURCES=(path,)))(C=64, NH=2)
    for before, after in ((", int OC)", ")"), ("int N, int OC", "int OC, int N"),
                          ("int N", "float N"), ("int OC)", "int OC, int more)"),
                          ("real* __restrict__ inp", "float* inp"), ("Output out", "Output to")):
        path.write_text(text.replace(declared, declared.replace(before, after)), "utf-8")
        with mock.patch("dev.cpu.device.KERNELS", path):
            check_refusal(f"{before} {after}", r"gelu_forward: the kernel has real\* .*; its loop "
                          r"has real\* out, real\* inp, int N, int OC: .*--device emulated", Cpu,
                          "fp32", edited)


FAST = (1, 1), (np.nan, 1), (1, np.nan), (-np.inf, 1), (1, np.inf)  # losses and norms


def judged():
    """For each device and each of FAST, whether judge lets the parameters be updated."""
    found, c = [], Config(C=64, NH=2)
    for device in Cpu("fp32", c), Emulated("fp32", c, only={"judge"}):
        for loss, norm in FAST:
            verdict = np.float32([0, loss, 0, 0])
            device.launch("judge", 1, verdict, np.float32([norm]))
            found.append(int(verdict[2]))
    return found


def test_fast_math():
    """judge sees a NaN and an infinity, whatever CXXFLAGS say. In a process of its own: a library
    of -Ofast makes the smallest numbers 0 for all that come after it."""
    code = "from dev.tests.test_loops import judged; print(judged())"
    done = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True,
                          env=os.environ | dict(CXXFLAGS="-O1 -Ofast"))
    check("verdicts", done.stdout.splitlines()[-1:] == [f"{[1, 0, 0, 0, 0] * 2}"],
          done.stdout + done.stderr)
