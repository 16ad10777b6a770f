"""What the host launches in a training step on a GPU that is not here, and whether it can run that.

    python -m dev.bench.launches            # models with long rows or wide heads, on all GPUs of
    python -m dev.bench.launches 8.6 9.0    # dev/common/gpus.py, or on these

The trainer's own device gets a GPU's figures, and notes launches instead of running them. A model
either runs, or is refused in one line before anything is allocated. The exit status is 1 if a GPU
would refuse a launch.
"""
import re
import sys
# in threads NVRTC compiles one program at a time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

from dev.common.config import Config
from dev.common.gpus import (
    GPUS, REGISTERS, attributes_of, blocks_that_fit, digits, registers_of_block)
from dev.common.nvrtc import compile_cuda
from dev.common.program import run_main
from dev.features.base import GPT2
from dev.features.devices import Cuda, FastCuda
from dev.features.fit import Fitting
from dev.features.fp8.fp8 import Fp8, Fp8Llama, Fp8Model, Fp8Products
from dev.features.fp8.fp8_all import Fp8All
from dev.features.fp8.fp8_all_llama import Fp8AllLlama
from dev.features.fp8.fp8_head import Fp8Head
from dev.features.fused_biases import FusedBiases, with_summed_outputs
from dev.llama3.train_llama3 import Llama3
from train_gpt2 import BF16, SIZES, UserError, pack_batch, read_kernels


class Launch(NamedTuple):
    kernel: str
    grid: tuple
    threads: int
    shared: int  # bytes of dynamic shared memory


def most_tensors():
    """How many tensors adamw's bisection can tell apart: its first step is half of them."""
    return 2 * int(re.search(r"int half = (\d+); half > 0; half /= 2",
                             Config.SOURCES[0].read_text("utf-8"))[1])


def column_sums(a, grid):
    """Of attention_backward_q, whose blocks leave a row of sums for each head of queries."""
    if a.column_sums is None:
        return 0, 0
    return grid[0] // a.NH * a.qkv.shape[1], a.column_sums.size


def sums_of_norm(a, grid):
    # 3 with an Output of fused_biases.cuh or fp8_output.cuh
    return (3 if a.dresidual.dtype.kind == "V" else 2) * grid[0] * a.inp.shape[1], a.partials.size


# What a kernel takes for granted: (what, {grid, arguments by name} -> how much is needed, and how
# much there is)
NEEDS = {
    "layernorm_backward": ("numbers of partials", sums_of_norm),
    "rmsnorm_backward": ("numbers of partials",
                         lambda a, grid: (grid[0] * a.inp.shape[1], a.partials.size)),
    "matmul_backward_bias": ("numbers of partials",
                             lambda a, grid: (grid[1] * a.OC, a.partials.size)),
    "sum_rows": ("numbers of sums", lambda a, grid: (grid[1] * a.OC, a.sums.size)),
    "add_partials": ("numbers of partials",
                     lambda a, grid: (grid[1] * a.blocks * a.C, a.partials.size)),
    "add_all_partials": ("numbers of partials",
                         lambda a, grid: (min(3, grid[1]) * a.blocks * a.C, a.partials.size)),
    "attention_backward_q": ("numbers of sums", column_sums),
    "attention_backward_five": ("numbers of turns",
                                lambda a, grid: (1 + a.dq.size // (64 * 128), a.turns.size)),
    "global_norm": ("numbers of norm", lambda a, grid: (2 + grid[0], a.gradient_norm.size)),
    "adamw": ("tensors", lambda a, grid: (a.tensors, most_tensors())),
}


class Noting(Cuda):
    """A GPU that notes launches, and `faults`: what kernels take for granted and do not get. place:
    its compute capability; arrays: the values of the arrays that launches read (see SIZES)."""
    place = arrays = None

    def __init__(self, *args):
        self.launched, self.faults = [], []
        cuda = mock.MagicMock()
        for name in ("CUDARuntimeError", "CUDADriverError", "CompileException"):
            for place in (cuda.runtime, cuda.driver, cuda.compiler):
                setattr(place, name, type(name, (Exception,), {}))
        cuda.Device = lambda: SimpleNamespace(compute_capability=digits(self.place),
                                              attributes=attributes_of(GPUS[self.place]))
        fake = SimpleNamespace(cuda=cuda)
        with mock.patch.dict(sys.modules, {"cupy": fake}):
            super().__init__(*args)

    def __str__(self):
        return f"{GPUS[self.place].name}, {self.dtype}"

    def compile(self, sources):
        self.kernels = read_kernels(self.sources)  # see dev/features/devices.py
        for name, fields in SIZES.items():
            setattr(self, name, SimpleNamespace(**dict(zip(fields, self.arrays[name]))))

    def empty(self, nbytes):
        return np.empty(nbytes, np.uint8)  # never touched, so it takes no memory

    def put(self, array, values):
        pass

    def zero(self, array):
        pass

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        self.gelu_of_product(out, gelu, dgelu_at)

    def multiply_twins(self, *args):
        pass

    def launch(self, name, items, *args, threads=None, shared=0):
        grid, (threads,), _ = self.kernels[name].configure(items, args, self.W, threads)
        self.launched.append(Launch(name, grid, threads, shared))
        names = [re.search(r"\w+$", text)[0] for text in self.kernels[name].parameters]
        what, needs = NEEDS.get(name, ("", lambda a, grid: (0, 0)))
        given = SimpleNamespace(column_sums=getattr(self, "column_sums", None),
                                **dict(zip(names, args)))
        needed, there = needs(given, (*grid, 1))
        if needed > there:
            self.faults.append(f"{name} needs {needed:,} {what}, and there are {there:,}")


class Roomy(Fitting):
    """A model on a GPU with any amount of memory."""

    @classmethod
    def memory(cls, c, device, B, T):
        return 0, 0, B


def launches_of(capability, dtype, c, arrays, Model=GPT2, B=16, T=1024, beside=(), hopper=False):
    """(the set of the launches of a training step and of a forward pass, what their kernels do not
    get). hopper: whether kernels are compiled with -DHOPPER. Raises UserError if the model is
    refused."""
    layers, kinds = [Roomy], [Noting]
    if dtype == "fp8":
        is_llama = issubclass(Model, Llama3)
        fused = [] if is_llama or issubclass(Model, FusedBiases) else [FusedBiases]
        layers = [*[Fp8Llama] * is_llama, Fp8Head, Fp8Model,
                  Roomy, Fp8AllLlama if is_llama else Fp8All, Fp8Products, *fused]
        kinds = [Fp8, Noting]
    kind = type("Device", (*kinds,), dict(place=capability, arrays=arrays))
    if issubclass(Model, FusedBiases) and dtype != "fp8":
        kind = with_summed_outputs(kind)
    device = kind(dtype, c, beside)
    device.hopper = hopper
    model = type("Model", (*layers, Model), {})(c, device, B, T)
    tokens = np.zeros((B, T), np.int32)
    with mock.patch.object(model, "verdict", lambda: SimpleNamespace(loss=0)):
        model.train_step(pack_batch(tokens, tokens))
        model.forward(tokens, tokens)
    return set(device.launched), device.faults


def faults_of_launches(capability, launches, used):
    """Why a GPU would refuse launches: texts. used {kernel: Used}: what the compiler says."""
    gpu, faults = GPUS[capability], []
    for launch in sorted(launches):
        own = used[launch.kernel]
        if not blocks_that_fit(gpu, own, launch.threads, launch.shared):
            faults.append(
                f"{gpu.name}: {launch.kernel} cannot be launched: its blocks have {launch.threads} "
                f"threads, {registers_of_block(own, launch.threads):,} registers of {REGISTERS:,}, "
                f"and {own.shared + launch.shared:,} bytes of shared memory of {gpu.of_block:,}")
        if max(launch.grid[1:], default=1) > 65535 or launch.grid[0] >= 2**31:
            faults.append(f"{launch.kernel}: no GPU has a grid of {launch.grid} blocks")
    return faults


# Models with long rows or wide heads: {dtype: [(C, NH)]}. Some GPUs' shared memory is too small for
# them.
WIDE = {"fp32": [(4160, 65), (5120, 40), (6944, 217), (1152, 8), (1280, 8), (2048, 8)],
        "tf32": [(5120, 40), (1280, 8)],
        "bf16": [(12288, 96), (19328, 302), (2048, 8), (2560, 8)]}


def like_hopper(capability, dtype, c):
    """Whether FastCuda compiles its kernels with -DHOPPER."""
    device = object.__new__(FastCuda)
    vars(device).update(capability=int(digits(capability)), HS=c.C // c.NH,
                        real=np.float32 if dtype in ("fp32", "tf32") else BF16)
    return device.hopper


def compiled(capability, dtype, c):
    """(registers and shared memory of each kernel, arrays for the host, with -DHOPPER?) as FastCuda
    compiles them."""
    hopper = like_hopper(capability, dtype, c)
    text = "".join(path.read_text("utf-8") for path in c.SOURCES)
    flags = [*Cuda.OPTIONS, f"-D{dtype.upper()}", *["-DHOPPER"] * hopper, *c.switches()]
    _, used, arrays = compile_cuda(text,
                                   f"sm_{digits(capability)}{'a' if capability == '9.0' else ''}",
                                   flags)
    return used, arrays, hopper


def verdict(capability, dtype, c, used, arrays, hopper=False):
    """(why this model is refused on a GPU, or ""; faults: what the GPU would refuse in a step)."""
    try:
        launches, missing = launches_of(capability, dtype, c, arrays, B=2, T=64, hopper=hopper)
    except UserError as e:
        return str(e), []
    return "", [*missing, *faults_of_launches(capability, launches, used)]


def verdict_of(capability, dtype, c):
    return verdict(capability, dtype, c, *compiled(capability, dtype, c))


def main():
    wanted = sys.argv[1:] or [*GPUS]
    if wrong := [name for name in wanted if name not in GPUS]:
        raise UserError(f"{wrong[0]}: expected compute capabilities, of {', '.join(GPUS)}")
    failed = False
    with ProcessPoolExecutor() as pool:
        jobs = [(capability, dtype, c, pool.submit(verdict_of, capability, dtype, c))
                for capability in wanted for dtype, shapes in WIDE.items()
                if dtype == "fp32" or capability != "7.5"
                for c in (Config(L=1, C=C, NH=NH) for C, NH in shapes)]
        for capability, dtype, c, job in jobs:
            refusal, faults = job.result()
            failed = failed or bool(faults)
            print(f"{GPUS[capability].name:9} {dtype} C={c.C} NH={c.NH}: "
                  f"{refusal or '; '.join(faults) or 'runs'}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
