"""Attention's gradient with five products, attention_five.cu, beside the trainer's with seven.

    python -m dev.bench.time_five                       # on a Hopper GPU: checks, then times
    python -m dev.bench.time_five --shape B=8,T=2048,NH=16 --try AT_ONCE=8,AT_ONCE=32
    CXXFLAGS="-O1 -DHOPPER" python -m dev.bench.time_five --device cpu          # only checks
    CXXFLAGS="-O1 -DHOPPER -fsanitize=thread" \\
        python -m dev.bench.time_five --device cpu --shape T=150                # looks for races

Both are checked against NumPy at small sizes, where a GPU must also give the same bits twice, and a
CPU in each order of threads. Times are medians in microseconds: of all kernels together, of each of
them, and of cuDNN's gradient if PyTorch is installed.
"""
import dataclasses
import functools
import os

import numpy as np

from dev.common.gpus import capability
from dev.common.flags import parse_flags
from dev.cpu.emulated import Emulated
from dev.features.devices import device_class
from dev.features.fused_biases import SOURCE as FUSED, SummedOutputs
from dev.features.hopper.attention_five import (
    HOPPER, ROWS, SOURCES, five_table, launch_delta, launch_dq, launch_five)
from dev.lab import heads, timing
from dev.lab.bench import Bench
from dev.lab.ladder import ANY, Ladder, SwitchedConfig, Version, parse_sizes
from prepro_tinyshakespeare import UserError, run_main
from train_gpt2 import read_kernels, to_float

CHECKS = ("B=1,T=1,NH=2,NKV=2", "B=2,T=33,NH=3,NKV=3", "B=1,T=150,NH=2,NKV=2",
          "B=2,T=300,NH=3,NKV=3", "B=1,T=260,NH=4,NKV=2", "B=1,T=200,NH=2,NKV=1,relu=1",
          "B=1,T=140,NH=2,NKV=2,cold=1",
          "B=1,T=640,NH=2,NKV=2")
SHAPE = "B=8,T=2048,NH=16,NKV=16"
SMALL = dict(B=1, T=150, NH=2, NKV=2)  # on a CPU
FLAGS = [
    (None, "--device", ("cpu", "cuda"), "cuda", "cpu: only checks"),
    (None, "--shape", str, None, "sizes to time, or on a CPU to check: B=8,T=2048,NH=16"),
    (None, "--no-check", "switch", 0, "1: only time"),
    (None, "--try", str, "AT_ONCE=16", "what to compile with, in turn: AT_ONCE=8,AT_ONCE=32"),
]


@dataclasses.dataclass(frozen=True)
class Config128(SwitchedConfig):
    """Heads of 128 channels."""
    C: int = 256
    NH: int = 2
    defined: tuple = ()  # such as "AT_ONCE=8", for attention_five.cu

    def switches(self):
        return [*super().switches(), *(f"-D{each}" for each in self.defined)]


def problem(draw, B, T, NH, NKV, HS, relu=0, cold=0):
    return heads.backward_problem(draw, B, T, NH, NKV, HS, relu, cold)


def scratch(a):
    blocks, sizes = -(-a.T // ROWS), {row.name: row.shape for row in five_table(a.B, a.T, a.NH)}
    return sizes | dict(sums=(a.B, blocks, a.NH + 2 * a.NKV, a.HS), delta=(a.B, a.NH, a.T))


def tiled(a, x):
    return x.reshape(a.B * a.T, -1)


def whole_numbers(a):
    """The arrays, with turns as int32: the ladder makes all scratch float."""
    a.turns = a.turns.view(np.int32)
    return a


def delta(device, a):
    launch_delta(device, whole_numbers(a), a.lse, a.out, a.dout, a.B, a.T, a.NH)


def with_sums(run):
    """A version whose kernels also sum columns, as in a training step."""
    @functools.wraps(run)
    def work(device, a):
        device.column_sums = a.sums
        run(device, a)
        device.column_sums = None
    return work


def gradients(device, a):
    launch_five(device, whole_numbers(a), a.dqkv, tiled(a, a.qkv), tiled(a, a.dout), a.scale, a.B,
                a.T, a.NH, a.NKV)


@with_sums
def round_dq(device, a):
    launch_dq(device, a, a.dqkv, a.scale, a.B, a.T, a.NH)


@with_sums
def five(device, a):
    delta(device, a)
    gradients(device, a)
    launch_dq(device, a, a.dqkv, a.scale, a.B, a.T, a.NH)


seven = with_sums(heads.trainers_backward)
trainers_q = with_sums(heads.trainers_backward_q)
trainers_kv = with_sums(heads.trainers_backward_kv)


VERSIONS = [Version(what, run, threads=(), scratch=scratch) for what, run in (
    ("five products", five), ("seven products, the trainer's", seven))]
# turns is filled with bytes of 255, like all scratch: attention_backward_five_delta must clear it.
LADDER = Ladder(problem, SHAPE, CHECKS, tuple(VERSIONS), fp32="lse delta dq stats sums turns",
                sums="dqkv", limits=heads.ATTENTION_LIMITS,
                flops=lambda a: 10 * heads.pairs_seen(a) * a.HS,
                torch=heads.torch_backward)


def check_hopper(name, source):
    """Raise UserError unless a device is Hopper, or a CPU that does the same."""
    like_hopper = "-DHOPPER" in os.environ.get("CXXFLAGS", "").split()
    if not like_hopper if name != "cuda" else capability() != HOPPER:
        raise UserError(f"{source.name} is for Hopper: expected such a GPU, or --device cpu with "
                        "CXXFLAGS=\"-O1 -DHOPPER\"")


@functools.cache
def make(name, *defined, group=1, relu=0):
    """A device for heads of 128 channels. Raises UserError unless it is Hopper, or a CPU like
    it."""
    check_hopper(name, SOURCES[-1])
    c = Config128(group=group, relu=relu, defined=defined)
    sources, kind = [FUSED, *SOURCES], device_class(name)
    if name != "cuda":
        only = {kernel for kernel in read_kernels([*c.SOURCES, *sources])
                if kernel.startswith(("attention_b", "attention_f"))}
        kind = type("Few", (Emulated,), dict(
            __init__=functools.partialmethod(Emulated.__init__, only=only)))
    return type("Summed", (SummedOutputs, kind), {})("bf16", c, sources)


def make_for(name, text, *defined):
    """The same for sizes in words, with their switches."""
    sizes = parse_sizes(text)
    return make(name, *defined, group=sizes["NH"] // sizes["NKV"], relu=sizes.get("relu", 0))


def bench_for(device, text, **changes):
    """The bench for sizes in words."""
    return Bench(LADDER._replace(**changes), device, {**parse_sizes(text), "HS": 128})


def check_sums(bench, a):
    """Raises AssertionError unless the sums of each block's rows are those of dqkv."""
    dqkv, found = (to_float(bench.device.get(x)).astype(np.float64)
                   for x in (bench.sets[0].dqkv, bench.scratch.sums))
    rows = np.pad(dqkv, ((0, 0), (0, -a.T % 128), (0, 0), (0, 0)))
    wish = rows.reshape(a.B, -1, 128, a.NH + 2 * a.NKV, a.HS)
    off = abs(found - wish.sum(2)) - 1e-5 * abs(wish).sum(2)
    assert (off <= 0).all(), f"sums{np.unravel_index(off.argmax(), off.shape)} is wrong"


def check(device, text, versions=VERSIONS):
    """Check versions at a size. Returns how many are wrong."""
    bench, wrong = bench_for(device, text), 0
    for version in versions:
        try:
            found = bench.check(version, {})
            assert found.place is None, str(found)
            check_sums(bench, bench.given)
            said = str(found)
        except (AssertionError, UserError) as e:
            wrong, said = wrong + 1, f"error: {e}"
        print(f"{text}: {version.what}: {said}", flush=True)
    return wrong


def drawn(draw, B, T, NH, NKV, HS):
    """Inputs to time: of out and lse the forward pass comes first, and no truth."""
    inputs = heads.sizes_of(B, T, NH, NKV, HS, relu=0) | dict(
        qkv=draw(B, T, NH + 2 * NKV, HS), dout=draw(B, T, NH, HS), out=np.zeros((B, T, NH, HS)),
        lse=np.zeros((B, NH, T)))
    return inputs, dict(dqkv=np.full((B, T, NH + 2 * NKV, HS), ANY))


def filled_bench(device, text):
    """The bench for sizes in words, after the forward pass."""
    bench = bench_for(device, text, problem=drawn)
    heads.trainers_forward(device, bench.sets[0])
    return bench


def same(bench):
    """How far both versions are apart, by Frobenius norm, and whether five gives the same bits in
    each of ten runs, in words."""
    cupy, a, results = bench.device.cupy, bench.sets[0], []
    for version in (*VERSIONS[::-1], *VERSIONS[:1] * 10):
        work = next(bench.launches(version, {}))
        bench.fill(a, ["dqkv"])  # with NaN
        work()
        results.append(a.dqkv.copy())
        if len(results) > 2:
            results.pop()
            if not (results[-1].view(np.int16) == a.dqkv.view(np.int16)).all():
                return "error: five products gave other bits in another run"
    seven_, five_ = (to_float(x).astype(np.float32) for x in results[:2])
    off = float(cupy.linalg.norm((five_ - seven_).ravel()) / cupy.linalg.norm(seven_.ravel()))
    verdict = "the same bits ten times" if off < 1e-2 else "error"
    return f"{verdict}: {off:.1e} from seven products"


def time(device, text, defined, peers):
    """Print the times at a size. Returns whether results are wrong."""
    bench = filled_bench(device, text)

    def seconds(run):
        works = bench.launches(VERSIONS[0]._replace(run=run), {})
        return f"{1e6 * timing.time_rounds(device, list(works)):.0f}"

    said = same(bench)
    print(said, flush=True)
    for _ in range(2):
        words = [f"five {seconds(five)}: delta {seconds(delta)}, dq {seconds(round_dq)}"]
        if peers:
            words += [f"seven {seconds(seven)}: q {seconds(trainers_q)}, kv {seconds(trainers_kv)}"]
            library = timing.time_torch(bench)
            words += [f"cuDNN {1e6 * library:.0f}"] * bool(library)
        print(f"{text}, {' '.join(defined)}, us: {'; '.join(words)}", flush=True)
    return said.startswith("error")


def sizes_in_words(sizes):
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    asked = parse_sizes(flags.shape) if flags.shape else {}
    known = parse_sizes(SHAPE)
    if not asked.keys() <= known.keys() or min(asked.values(), default=1) < 1:
        raise UserError(f"--shape {flags.shape}: expected sizes from 1 on, of {', '.join(known)}")
    if "NH" in asked:
        asked.setdefault("NKV", asked["NH"])
    asked = (SMALL if flags.device != "cuda" else known) | asked
    if asked["NH"] % asked["NKV"]:
        raise UserError(f"--shape {flags.shape}: expected NH, {asked['NH']}, to be a multiple of "
                        f"NKV, {asked['NKV']}")
    wrong, checks = 0, CHECKS
    if flags.device != "cuda" and flags.shape:
        checks = [sizes_in_words(asked)]
    for i, tried in enumerate(getattr(flags, "try").split(",")):
        defined = tried.split("+")
        device = make_for(flags.device, sizes_in_words(asked), *defined)
        if not flags.no_check:
            wrong += sum(check(make_for(flags.device, text, *defined), text)
                         for text in (checks if i == 0 else checks[-1:]))
        if device.name == "cuda" and not wrong:
            stream = device.cupy.cuda.Stream(non_blocking=True)  # the default is not recorded
            with stream:
                wrong += time(device, sizes_in_words(asked), defined, i == 0)
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
