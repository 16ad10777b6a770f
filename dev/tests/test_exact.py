"""--exact 1 (dev/features/exact): the same bits from kernels.cu, on a GPU or emulated, and from the
CPU's loops; what a run of it writes down; and dev/tools/verify.py, which finds planted changes."""
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.common.nvrtc import BODY, has_nvrtc, messages_and_ptx
from dev.cpu.device import Cpu
from dev.cpu.emulated import KERNELS, Emulated
from dev.features.base import GPT2
from dev.features.devices import FastCuda
from dev.features.exact import exact
from dev.features.exact.exact import ARITHMETIC, SOURCE, ExactLoops
from dev.features.feature import stack
from dev.tests.checks import (EXACT, TINY, TOP, check, check_refusal, fast, normal,
                              output_of)
from dev.tests.models import model_class, on_device
from dev.tests.trainings import TRAINER, call, check_error, ran, token_files
from train_gpt2 import pack_batch, source_of

VERIFY = "dev.tools.verify"
CLASSES = {"cpu": Cpu, "emulated": Emulated, "cuda": FastCuda}
FUNCTIONS = """
BLOCK(256, threads)
extern "C" __global__ void functions(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = expf(x[i]), out[n + i] = power_of_2(x[i]);
    out[2 * n + i] = logf(x[i]), out[3 * n + i] = log2f(x[i]);
}
"""


def device_for(name, c, beside=(SOURCE,), **more):
    return stack(CLASSES[name], [exact.DEVICES[name]])("fp32", c, [*beside], **more)


def only(device_name, *kernels):
    """The argument that saves the emulator all other kernels."""
    return dict(only=kernels) if device_name == "emulated" else {}


def test_functions(device_name, folder):
    """e^x, 2^x and logarithms are right but for the last two bits, and beyond fp32's numbers 0,
    infinite or NaN. Their bits are those that every machine had."""
    path = folder / "functions.cu"
    path.write_text(FUNCTIONS)
    device = device_for(device_name, Config(), [path], **only(device_name, "functions"))
    # numbers of all sizes and both signs, those near 1, and no numbers
    x = np.concatenate([np.arange(0x00800000, 0x7F800000, 199999, np.uint32),
                        np.arange(0x3F000000, 0x3FC00000, 4999, np.uint32)]).view(np.float32)
    x = np.concatenate([x, -x, np.float32([0, np.inf, -np.inf, np.nan])])
    out = on_device(device, np.zeros((4, x.size), np.float32))
    device.launch("functions", x.size, out, on_device(device, x), x.size)
    found = device.get(out)
    with np.errstate(all="ignore"):
        for name, got in zip(("exp", "exp2", "log", "log2"), found):
            wish = getattr(np, name)(np.float64(x))
            # e^x is 0 or infinite somewhat before it has to be
            wish = np.where(wish > 1.6e38, np.inf, np.where(wish < 1.2e-38, 0, wish)
                            ) if "exp" in name else wish
            got = np.where((got > 1.6e38) & ("exp" in name), np.inf, got)
            close = np.isclose(got, wish, 2.5e-7, 1.2e-38, equal_nan=True)
            check(name, close.all(), (x[~close][:3], got[~close][:3]))
    bits = exact.hash_of(np.where(np.isnan(found), 0, found).tobytes())
    check("the bits of every machine", bits == "c214276b559f0fd5", bits)


def test_product(device_name):
    """A product by large and by small tiles, in each layout, with a bias or added: the right
    numbers, and the bits of the CPU's loop."""
    device = device_for(device_name, Config(C=64, NH=2),
                        **only(device_name, "exact_product", "exact_small_product"))
    loops = device_for("cpu", Config(C=64, NH=2))

    def drawn(*shape):
        return normal(*shape).astype(np.float32)

    for I, J, K in ((4, 4, 4), (132, 68, 20), (1, 260, 36), (8, 136, 301)):
        k, i = K // 4 * 4, -(-I // 4) * 4
        for name, left, right in (("forward", drawn(I, k), drawn(J, k).T),
                                  ("dinp", drawn(I, k), drawn(k, J)),
                                  ("dweight", drawn(K, i).T, drawn(K, J))):
            bias, before = drawn(J), drawn(len(left), J)
            for enough, adds in itertools.product((0, 10**9), (False, True)):
                out = on_device(device, before)
                views = (on_device(device, x.T).T if x.flags.f_contiguous else on_device(device, x)
                         for x in (left, right))
                exact.launch_product(device, out, *views, None if adds else
                                     on_device(device, bias), adds, enough)
                wish = before.copy()
                loops.matmul(wish, left, right, None if adds else bias, adds)
                yield f"{name} {I}x{J}x{K} {enough} {adds}", device.get(out), wish, EXACT
        yield f"{I}x{J}x{K}", wish, before + np.float64(left) @ right, 1e-6


def trained_by(name, c, B, T):
    """A model after two steps of two micro-batches, on a device."""
    model = model_class(GPT2, "--exact", 1)(c, device_for(name, c), B, T)
    model.set_parameters(first_parameters(c))
    rng = np.random.default_rng(7)
    for _ in range(2):
        batches = [pack_batch(*rng.integers(c.V, size=(2, B, T), dtype=np.int32)) for _ in range(2)]
        model.train_step(*batches, learning_rate=0.01, weight_decay=0.1, clip=0.5)
    return model


def first_parameters(c):
    run = exact.ExactTraining()
    run.flags, run.config, run.from_file = SimpleNamespace(seed=5), c, False
    return run.first_parameters()


# Heads of odd sizes and rows of one, two and many tiles; a word's long runs; a head of short tiles;
# rows of four warps
@pytest.mark.parametrize("L,NH,C,B,T,V", [(2, 16, 96, 7, 37, 3), (1, 1, 128, 2, 70, 300),
                                          (1, 41, 1312, 1, 66, 9)])
def test_step(device_name, L, NH, C, B, T, V):
    """Two steps by kernels and by loops: all gradients, moments and parameters have the same bits,
    and so do the sums of the parameters' bits."""
    c = Config(maxT=T + 3, V=V, L=L, NH=NH, C=C, Vp=-(-V // 8) * 8)
    kernels, loops = (trained_by(name, c, B, T) for name in (device_name, "cpu"))
    for arena in ("gradients", "adam m", "adam v", "parameters"):
        for name, wish in vars(loops.views(arena)).items():
            found = kernels.device.get(getattr(kernels.views(arena), name))
            yield f"{arena} {name}", found, wish, EXACT
            check(f"{arena} {name}: finite", np.isfinite(found).all())
    check("verdicts", kernels.verdict() == loops.verdict(), kernels.verdict())
    found = kernels.device.get(kernels.adam.sums)
    check("sums", (found == loops.adam.sums).all() and len({*found.tolist()}) == len(found))
    parameters = np.concatenate([x.ravel() for x in vars(loops.params).values()])
    piece = [int(x) for x in loops.adam.pieces[1:3]]
    yield "a sum of bits", found[1:2], [sum_of_bits(parameters, *piece)], EXACT


def sum_of_bits(numbers, first, end):
    total = 0
    for i in range(first, end):
        x = i << 32 | int(numbers[i : i + 1].view(np.uint32)[0])
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        total += x ^ x >> 31
    return np.uint64(total % 2**64)


@fast
def test_host():
    """What the host computes: powers and cosines are right and need no C library; the first
    numbers are normal; 1/sqrt(HS) is no close call, whose rounding a C library could change."""
    for beta in (0.9, 0.95, 0.999):
        for n in (1, 2, 7, 1000, 123456):
            wish = beta**n
            check(f"{beta}^{n}", abs(exact.Power(beta)**n - wish) <= 1e-10 * wish)
    x = np.linspace(0, math.pi, 101)
    yield "cosine", [exact.cosine(each) for each in x], np.cos(x), 1e-14
    for HS in range(1, 257):
        near = [np.float32(HS**-0.5 * (1 + error)) for error in (-1e-15, 1e-15)]
        check(f"1/sqrt({HS})", near[0] == near[1])
    drawn = dict(first_parameters(Config(V=999, Vp=1000, L=2, NH=2, C=64)))
    x = np.float64(drawn["wte"][:999]) / 0.02
    check("normal", abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02 and abs((x**4).mean() - 2.9)
          < 0.1, (x.mean(), x.std(), (x**4).mean()))
    bits = exact.hash_of(b"".join(values.tobytes() for values in drawn.values()))
    check("the numbers of every machine", bits == "4c423ea6817ce1ae", bits)
    check("padding, ones and zeros", not drawn["wte"][999:].any() and (drawn["ln1w"] == 1).all()
          and not drawn["fcb"].any())


def test_compiled():
    """A GPU's code has multiply-adds in products alone, and no approximation."""
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    text = "".join(map(source_of, (ARITHMETIC, KERNELS, SOURCE)))
    for gpu, C, HS in (("sm_80", 128, 32), ("sm_90a", 768, 64)):
        flags = [*exact.ExactCuda.OPTIONS, "-DFP32", f"-DCHANNELS={C}", f"-DHS={HS}"]
        _, ptx = messages_and_ptx(text, gpu, flags)
        bodies = {body[1]: body[0] for body in BODY.finditer(ptx)}
        fused = {name for name, body in bodies.items() if "fma.rn" in body}
        check(f"{gpu}: fmaf", fused == {"attention_forward", "attention_backward_q",
                                        "attention_backward_kv", "exact_product",
                                        "exact_small_product"}, fused)
        check(f"{gpu}: no approximation", len(bodies) == 20 and not
              any(word in ptx for word in (".approx", ".ftz", "mma.sync", ".f64")), len(bodies))


def test_program_of_gpu(folder):
    """What a GPU loads was compiled with these options alone, and once."""
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    from cupy.cuda import compiler
    device = SimpleNamespace(
        OPTIONS=exact.ExactCuda.OPTIONS, capability=90, switches=lambda: ["-DFP32"],
        cupy=SimpleNamespace(__version__="14", RawModule=lambda path: path))
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=str(folder)), mock.patch.object(
            compiler, "_get_arch_for_options_for_nvrtc", lambda arch: ("-arch=sm_90", "cubin")
            ), mock.patch.object(
            compiler, "_NVRTCProgram", side_effect=compiler._NVRTCProgram) as programs:
        paths = [exact.ExactCuda.module_of(device, "") for _ in range(2)]
    check("once", programs.call_count == 1 and len(set(paths)) == 1, paths)
    with open(paths[0], "rb") as file:
        check("a program of the GPU", file.read(4) == b"\x7fELF")


def arguments_of(folder, device="cpu"):
    return [str(x) for x in (
        "--device", device, "--exact", 1, "-e", TINY, "-i", folder / "part_train_0.bin", "-b", 2,
        "-t", 8, "-d", 32, "-x", 8, "-v", 0, "-s", 0, "-l", 1e-2, "-c", 0.1, "-u", 3, "-q", 0.1)]


def run_of(folder, output, *flags, device="cpu"):
    return ran(*arguments_of(folder, device), "-o", folder / output, *flags)


def rows_of(path):
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


LAST = "d1d5a622212b7e3e"  # the last hash of run_of on every machine


def test_runs(device_name, folder):
    """A run on any device, by one thread and two, with another compiler or instruction set, or
    stopped and resumed, has the same hashes: those that every machine had."""
    token_files(folder)
    run_of(folder, "whole", "-n", 3)
    wish = [row["hash"] for row in rows_of(folder / "whole")]
    check("the last hash", len(wish) == 8 and wish[-1] == LAST, wish[-1])
    said = run_of(folder, "device", device=device_name)
    found = [row["hash"] for row in rows_of(folder / "device")]
    check(f"on {device_name}", found == wish and f"{LAST} after step 8" in said, found)
    run = shutil.copytree(folder / "whole", folder / "resumed")
    for path in run.glob("*_00000008*"):  # a kill before the last checkpoint
        path.unlink()
    ran("--device", "cpu", "-y", 1, "-o", run)
    check("resumed", [row["hash"] for row in rows_of(folder / "resumed")] == wish)
    cases = [("two threads", dict(OMP_NUM_THREADS="2")), ("-O3", dict(CXXFLAGS="-O3")),
             ("without AVX", dict(CXXFLAGS="-O1 -mno-avx -mno-fma"))]
    cases += [("clang++", dict(CXX="clang++"))] if shutil.which("clang++") else []
    for name, changes in cases if device_name != "cuda" else ():
        done = subprocess.run([sys.executable, "-m", TRAINER, *arguments_of(folder)], text=True,
                              capture_output=True, env=os.environ | changes)
        check(name, LAST in done.stdout, done.stdout[-200:] + done.stderr[-200:])


def verified(*arguments):
    status, out, error = call(*arguments, "--device", "cpu", program=VERIFY)
    return status, out + error


def test_verify(folder):
    """A run is verified from its start and from a checkpoint. A rate, a bit of a weight and a
    constant that were changed are found where they were changed."""
    token_files(folder)
    run = folder / "run"
    run_of(folder, "run", "-n", 3)
    for arguments, wish in (((), f"steps 1 to 8 verified on the CPU.* the same 8 hashes.* {LAST}"),
                            (("--from", 5, "--to", 7), "steps 4 to 7 .* the same 4 hashes")):
        status, said = verified(run, *arguments)
        check(f"verified {arguments}", status == 0 and exact.re.search(wish, said), said)

    # A rate that is off by 1e-9, by a log that says so, and by one that hides it
    before = exact.ExactTraining.learning_rate

    def other_rate(self, step):
        return before(self, step) + np.float32(1e-9) * (step == 4)

    with mock.patch.object(exact.ExactTraining, "learning_rate", other_rate):
        run_of(folder, "rate", "-n", 3)
    check_error("step 5 differs: its learning rate is 0.00914.*, and the run's flags give 0.00914",
                folder / "rate", "--device", "cpu", program=VERIFY)
    change_log(folder / "rate", 5, lr=rows_of(run)[4]["lr"])
    check_error(r"step 5 differs: the loss is the same; \d+ of 28 parameters differ after it: wte, "
                ".*; --trace 5, here", folder / "rate", "--device", "cpu", program=VERIFY)

    # A bit of a weight, after step 6, of which there is a checkpoint
    report = exact.ExactTraining.report

    def flipped(self, step, verdict):
        if step.number == 6:
            self.model.params.fcw[1].reshape(-1).view(np.uint32)[77] ^= 1
            self.model.sum_bits()
        report(self, step, verdict)

    with mock.patch.object(exact.ExactTraining, "report", flipped):
        run_of(folder, "bit", "-n", 3)
    check_error(r"step 6 differs: the loss is the same; 1 of 28 parameters differ after it: fcw of "
                r"layer 1; first fcw\[1, 1, 13\], of 1 of 32768 numbers that differ: .* here, .* "
                "there in model_00000006.bin", folder / "bit", "--device", "cpu", program=VERIFY)

    # A constant of the exponential, which attention uses first
    changed = folder / "exact.cuh"
    changed.write_text(ARITHMETIC.read_text().replace("5.0000001201e-1f", "5.001e-1f"))
    with mock.patch.object(ExactLoops, "AHEAD", (changed,)):
        run_of(folder, "constant", "-n", 3)
        trace = verified(folder / "constant", "--trace", 1, "--line", 7)
    check("the trace", "wrote" in trace[1] and trace[0] == 0, trace[1])
    status, said = verified(folder / "constant")
    check("a constant", status == 1 and "step 1 differs" in said, said)
    path = folder / "constant/trace_00000001.npz"
    check_error(r"step 1 differs: the first array is line 7 of \d+: kernel attention_forward in "
                r"layer_forward, layer 0 wrote atty\[.*\], of \d+ of 1024 numbers that differ: "
                ".* here, .* there", folder / "constant", "--trace", 1, "--line", 7,
                "--against", path, "--device", "cpu", program=VERIFY)
    status, said = verified(run, "--trace", 1)
    status, said = verified(run, "--trace", 1, "--against", run / "trace_00000001.npz")
    check("the same trace", status == 0 and "all" in said and "are the same" in said, said)


def change_log(run, step, **values):
    rows = rows_of(run)
    rows[step - 1] |= values
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@fast
def test_page():
    """The page's small programs print what it says, and the third, which is another number on each
    machine, how many of a million numbers differ."""
    text = (TOP / "dev/tools/recipes/exact.md").read_text("utf-8")
    said = [output_of(exec, program, {}).strip()
            for program in exact.re.findall("```python\n(.*?)```", text, exact.re.S)]
    check("programs", all(f"# {line}\n" in text for line in said[:2]) and len(said) == 3
          and 0 <= int(said[2]) < 10**6, said)


def test_refused(folder):
    """What does not go together is refused in one line."""
    token_files(folder)
    base = "--device", "cpu", "--exact", 1, "-e", "1x2x32", "-i", folder / "part_train_0.bin"
    for flags, wish in ((("--dtype", "bf16"), "--exact 1 --dtype bf16: expected --dtype fp32"),
                        (("--optimizer", "muon"), "--exact 1: .* --optimizer muon"),
                        (("--dropout", 0.1), "--exact 1: .* --dropout"),
                        (("--moments", "bf16"), "--exact 1: .* --moments"),
                        (("--recompute", 1), "--exact 1: .* --recompute")):
        check_error(wish, *base, *flags)
    check_error("--exact 1: does not go with Llama 3", *base[:4], "-e", "1x2x32", *base[6:],
                program="dev.llama3.train_llama3")
    check_error("log.jsonl: has no hashes", folder, program=VERIFY)
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2"):
        check_refusal("ranks", "several processes", exact_with_ranks)


def exact_with_ranks():
    model_class(GPT2, "--exact", 1, count=2)
