"""--exact 1 (dev/features/exact): the same bits from kernels.cu, on a GPU or emulated, and from the
CPU's loops; what a run of it writes down; and dev/tools/verify.py, which finds planted changes."""
import contextlib
import itertools
import json
import math
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.common.nvrtc import BODY, has_nvrtc
from dev.cpu import host
from dev.cpu.device import Cpu
from dev.cpu.emulated import KERNELS
from dev.features.base import GPT2
from dev.features.devices import ON_CPU, FastCuda
from dev.features.exact import exact
from dev.features.exact.exact import ARITHMETIC, SOURCE, ExactLoops, ExactTraining
from dev.features.feature import stack
from dev.tests.checks import EXACT, TOP, check, check_refusal, fast, normal, output_of, with_numbers
from dev.tests.models import model_class, on_device
from dev.tests.small_kernels import kernel, launch
from dev.tests.trainings import check_error, check_resumed, ran, token_files, trained
from train_gpt2 import pack_batch, source_of

VERIFY, ON = dict(program="dev.tools.verify"), ("--", "--device", "cpu")
FUNCTIONS = kernel("functions", "float* out, const float* x, int n", """    if (i >= n) return;
    out[i] = expf(x[i]), out[n + i] = power_of_2(x[i]);
    out[2 * n + i] = logf(x[i]), out[3 * n + i] = log2f(x[i]);
""")


def device_for(name, c, *only, source=SOURCE):
    """An exact device. only: the kernels that will be launched, if they are emulated."""
    more = dict(only=only) if name == "emulated" and only else {}
    kind = stack((ON_CPU | dict(cuda=FastCuda))[name], [exact.DEVICES[name]])
    return kind("fp32", c, [source], **more)


def test_functions(device_name, folder):
    """e^x, 2^x and logarithms are right but for the last two bits, and beyond fp32's numbers 0,
    infinite or NaN. Their bits are those that every machine had."""
    path = folder / "functions.cu"
    path.write_text(FUNCTIONS)
    device = device_for(device_name, Config(), "functions", source=path)
    # numbers of all sizes and both signs, those near 1, and no numbers
    x = np.concatenate([np.arange(0x00800000, 0x7F800000, 199999, np.uint32),
                        np.arange(0x3F000000, 0x3FC00000, 4999, np.uint32)]).view(np.float32)
    x = np.concatenate([x, -x, np.float32([0, np.inf, -np.inf, np.nan])])
    found, _ = launch(device, "functions", x.size, np.zeros((4, x.size), np.float32), x, x.size)
    with np.errstate(all="ignore"):
        for name, got in zip(("exp", "exp2", "log", "log2"), found):
            wish = getattr(np, name)(np.float64(x))
            if "exp" in name:  # it is 0 or infinite somewhat before it has to be
                wish = np.where(wish > 1.6e38, np.inf, np.where(wish < 1.2e-38, 0, wish))
                got = np.where(got > 1.6e38, np.inf, got)
            close = np.isclose(got, wish, 2.5e-7, 1.2e-38, equal_nan=True)
            check(name, close.all(), (x[~close][:3], got[~close][:3]))
    bits = exact.hash_of(np.where(np.isnan(found), 0, found).tobytes())
    check("the bits of every machine", bits == "c214276b559f0fd5", bits)


def test_product(device_name):
    """A product by large tiles and by small ones, in each layout, with a bias or added: the right
    numbers, and the bits of the CPU's loop."""
    c = Config(C=64, NH=2)
    device = device_for(device_name, c, "exact_product", "exact_small_product")
    loops = device_for("cpu", c)

    def drawn(*shape):
        return normal(*shape).astype(np.float32)

    for I, J, K in ((4, 4, 4), (132, 68, 20), (8, 136, 300)):
        for layout, adds, device.enough in itertools.product((0, 1, 2), (False, True), (0, 10**9)):
            left = drawn(K, I).T if layout == 2 else drawn(I, K)
            right = drawn(K, J) if layout else drawn(J, K).T
            before, bias, found = drawn(I, J), None if adds else drawn(J), []
            for each in (device, loops):
                on = [on_device(each, x.T).T if x.flags.f_contiguous else on_device(each, x)
                      for x in (left, right)]
                out = on_device(each, before)
                each.matmul(out, *on, None if adds else on_device(each, bias), adds)
                found.append(each.get(out))
            name = f"{I}x{J}x{K}, layout {layout}, {adds}, {device.enough}"
            yield f"{name}: the loop's", *found, EXACT
            yield name, found[0], np.float64(left) @ right + (before if adds else bias), 1e-6


def first_parameters(c):
    run = SimpleNamespace(flags=SimpleNamespace(seed=5), config=c, from_file=False)
    return ExactTraining.first_parameters(run)


def trained_by(device, c, B, T, *flags):
    """A model after two steps of two micro-batches, on a device."""
    model = model_class(GPT2, *flags)(c, device, B, T)
    model.set_parameters(first_parameters(c))
    rng = np.random.default_rng(7)
    for _ in range(2):
        batches = [pack_batch(*rng.integers(c.V, size=(2, B, T), dtype=np.int32)) for _ in range(2)]
        model.train_step(*batches, learning_rate=0.01, weight_decay=0.1, clip=0.5)
    return model


# Heads of odd sizes and rows of one, two and many tiles; a word's long runs; words of two turns of
# a block; a head of short tiles; rows of four warps; products by large tiles, and by small ones
@pytest.mark.parametrize("L,NH,C,B,T,V,enough", [
    (2, 16, 96, 7, 37, 3, 0), (1, 1, 128, 2, 70, 4200, 99), (1, 41, 1312, 1, 66, 9, 99)])
def test_step(device_name, L, NH, C, B, T, V, enough):
    """Two steps by kernels and by loops: all gradients, moments and parameters have the same bits,
    and so do the sums of the parameters' bits. They are nearly those of a plain run."""
    c = Config(maxT=T + 3, V=V, L=L, NH=NH, C=C, Vp=-(-V // 8) * 8)
    device, cpu = device_for(device_name, c), device_for("cpu", c)
    device.enough = enough
    if device_name == "emulated" and C > 1000:  # its products would take minutes
        device.matmul = cpu.matmul
    kernels, loops = (trained_by(each, c, B, T, "--exact", 1) for each in (device, cpu))
    plain = trained_by(Cpu("fp32", c), c, B, T)
    for arena in ("gradients", "adam m", "adam v", "parameters"):
        for name, wish in vars(loops.views(arena)).items():
            found = kernels.device.get(getattr(kernels.views(arena), name))
            yield f"{arena} {name}", found, wish, EXACT
            if arena == "gradients":
                yield f"plain {name}", found, getattr(plain.grads, name), 1e-3
    check("verdicts", kernels.verdict() == loops.verdict(), kernels.verdict())
    found = kernels.device.get(kernels.adam.sums)
    check("sums differ", len(found) == len({*found.tolist()}))
    yield "the loops' sums", found, loops.adam.sums, EXACT
    first, end = (int(x) for x in loops.adam.pieces[1:3])
    x = np.arange(first, end, dtype=np.uint64) << 32
    x |= loops.arenas["parameters"].view(np.uint32)[first:end]
    x = (x ^ x >> 30) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> 27) * np.uint64(0x94D049BB133111EB)
    yield "a sum of bits", found[1:2], [(x ^ x >> 31).sum()], EXACT


@fast
def test_host():
    """What the host computes: powers and cosines are right and need no C library; the first
    numbers are normal; 1/sqrt(HS) is no close call, whose rounding a C library could change."""
    for beta, n in itertools.product((0.9, 0.95, 0.999), (1, 2, 7, 1000, 123456)):
        yield f"{beta}^{n}", exact.Power(beta)**n, beta**n, 1e-10
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


@pytest.mark.parametrize("gpu,C,HS", [(80, 128, 32), (90, 768, 64)])
def test_compiled(gpu, C, HS, folder):
    """What CuPy compiles for a GPU, once, has multiply-adds in products alone, and no
    approximation."""
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    from cupy.cuda import compiler
    device = SimpleNamespace(
        OPTIONS=exact.ExactCuda.OPTIONS, capability=gpu, switches=lambda: [
            "-DFP32", f"-DCHANNELS={C}", f"-DHS={HS}"],
        cupy=SimpleNamespace(__version__="14", RawModule=lambda path: path))
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder)), mock.patch.object(
            compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{gpu}", "ptx")
            ), mock.patch.object(
            compiler, "_NVRTCProgram", side_effect=compiler._NVRTCProgram) as programs:
        path, again = (exact.ExactCuda.module_of(device, source_of(KERNELS) + source_of(SOURCE))
                       for _ in range(2))
    check("once", programs.call_count == 1 and path == again, path)
    with open(path) as file:
        ptx = file.read()
    bodies = {body[1]: body[0] for body in BODY.finditer(ptx)}
    fused = {name for name, body in bodies.items() if "fma.rn" in body}
    check("fmaf", fused == {"attention_forward", "attention_backward_q", "attention_backward_kv",
                            "exact_product", "exact_small_product"}, fused)
    check("no approximation", len(bodies) == 20 and not any(
        word in ptx for word in (".approx", ".ftz", "mma.sync", ".f64")), len(bodies))


LAST = "d1d5a622212b7e3e"  # the last hash of run_of on every machine


def run_of(folder, name, *flags, device="cpu"):
    """Make a run in a folder. Returns what it prints, and its hashes."""
    said = trained(folder / name, "--exact", 1, "-d", 32, "-x", 8, "-c", 0.1, "-u", 3, "-q", 0.1,
                   *flags, device=device)
    return said, hashes_of(folder / name)


def hashes_of(run):
    return [json.loads(line)["hash"] for line in (run / "log.jsonl").read_text().splitlines()]


def test_runs(device_name, folder):
    """A run on any device, by one thread or more, with another compiler or instruction set, or
    stopped and resumed, has the same hashes: those that every machine had."""
    token_files(folder)
    _, wish = run_of(folder, "whole", "-n", 3)
    check("the last hash", len(wish) == 8 and wish[-1] == LAST, wish[-1])
    resumed, _ = check_resumed("exact", folder / "whole", 8)
    check("resumed", hashes_of(resumed) == wish)
    one = mock.patch.object(host, "usable_cores", lambda: 1)
    cases = {device_name: contextlib.nullcontext(), "one thread": one}
    for name, changes in {"-O3": dict(CXXFLAGS="-O3"), "clang++": dict(CXX="clang++"),
                          "no AVX": dict(CXXFLAGS="-O1 -mno-avx -mno-fma")}.items():
        if device_name != "cuda" and shutil.which(changes.get("CXX", "g++")):
            cases[name] = mock.patch.dict(os.environ, changes)
    for name, case in cases.items():
        with case:
            said, found = run_of(folder, name, device=device_name if name == device_name else "cpu")
        check(name, found == wish and f"{LAST} after step 8" in said, (found, said))
        check("one", name != "one thread" or os.cpu_count() == 1 or "1 thread on" in said, said)


def test_verify(folder):
    """A run is verified from its start and from a checkpoint. A rate, a bit of a weight and a
    constant that were changed are found where they were changed."""
    token_files(folder)
    run, constant, trace = folder / "run", folder / "constant", folder / "1.npz"
    run_of(folder, "run", "-n", 3)
    for arguments, wish in (((), f"steps 1 to 8 verified on the CPU.* the same 8 hashes.* {LAST}"),
                            (("--from", 5, "--to", 7), "steps 4 to 7 .* the same 4 hashes")):
        said = ran(run, *arguments, *ON, **VERIFY)
        check(f"verified {arguments}", re.search(wish, said), said)
    state = run / "state_00000003_00000.bin"
    state.write_bytes(with_numbers(state.read_bytes(), **{"_-1": 7}))
    check_error("the checkpoint of step 3 has other weights than log.jsonl's: 1 parameters differ: "
                "lnfb", run, "--from", 4, *ON, **VERIFY)
    rate, report = ExactTraining.learning_rate, ExactTraining.report

    def other_rate(self, step):
        return rate(self, step) + np.float32(1e-9) * (step == 4)

    def flipped(self, step, verdict):
        if step.number == 6:
            self.model.params.fcw[1].reshape(-1).view(np.uint32)[77] ^= 1
            self.model.sum_bits()
        report(self, step, verdict)

    for name, new, wish in (
            ("learning_rate", other_rate, "step 5 differs: its learning rate is 0.00914.* in "
             "log.jsonl, and the run's flags give 0.00914"),
            ("report", flipped, r"step 6 differs: the loss is the same; after it 1 parameters "
             r"differ: fcw of layer 1; first fcw\[1, 1, 13\], of 1 of 32768 numbers that differ: "
             ".* here, .* there in model_00000006.bin")):
        with mock.patch.object(ExactTraining, name, new):
            run_of(folder, name, "-n", 3)
        check_error(wish, folder / name, *ON, **VERIFY)

    # A constant of the exponential, which attention uses first
    changed = folder / "exact.cuh"
    changed.write_text(ARITHMETIC.read_text().replace("5.0000001201e-1f", "5.001e-1f"))
    with mock.patch.object(ExactLoops, "AHEAD", (changed,)):
        run_of(folder, "constant")
        said = ran(constant, "--trace", trace, "--line", 7, *ON, **VERIFY)
    check("the trace", "wrote" in said, said)
    check_error("step 1 differs: the loss is .* here, .* there; after it 2. parameters differ: "
                "wte, .*; --from 1 --trace FILE, here and", constant, *ON, **VERIFY)
    check_error(r"step 1 differs: first in line 7 of \d+, kernel attention_forward in "
                r"layer_forward, layer 0 wrote atty\[.*\], of \d+ of 1024 numbers that differ: "
                ".* here, .* there", constant, "--trace", trace, "--line", 7, *ON, **VERIFY)
    trace = run, "--from", 7, "--trace", folder / "7.npz"  # behind a checkpoint
    ran(*trace, *ON, **VERIFY)
    said = ran(*trace, "--", "--device", "emulated", **VERIFY)
    check("the same trace", re.search(r"step 7: all \d\d+ arrays .* are the same", said), said)
    with np.load(folder / "7.npz") as file:
        np.savez(folder / "7.npz", **{**file, "lines": file["lines"][:-1]})
    check_error(r"step 7 differs: first in line (?P<n>\d+) of (?P=n), ", *trace, *ON, **VERIFY)
    check_error("--line 3: expected --trace FILE", run, "--line", 3, *ON, **VERIFY)


@fast
def test_page():
    """The page's small programs print what it says, and the third, which is another number on each
    machine, how many of a million numbers differ."""
    text = (TOP / "dev/tools/recipes/exact.md").read_text("utf-8")
    said = [output_of(exec, program, {}).strip()
            for program in re.findall("```python\n(.*?)```", text, re.S)]
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
                        (("--document-mask", 1), "--exact 1: .* --document-mask"),
                        (("--recompute", 1), "--exact 1: .* --recompute")):
        check_error(wish, *base, *flags)
    check_error("--exact 1: does not go with Llama 3", *base, program="dev.llama3.train_llama3")
    check_error("log.jsonl: has no hashes", folder, **VERIFY)
    check_refusal("ranks", "several processes",
                  lambda: model_class(GPT2, "--exact", 1, count=2))
