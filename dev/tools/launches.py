"""What the host launches in a training step on a GPU that is not here, and whether that GPU can run it.

The trainer's own device gets a GPU's figures, from dev/common/gpus.py, and notes launches instead of running them.
"""
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

from dev.common.gpus import GPUS, REGISTERS, attributes_of, blocks_that_fit, digits, registers_of_block
from train_gpt2 import GPT2, SIZES, Cuda, pack_batch, read_kernels


class Launch(NamedTuple):
    kernel: str
    grid: tuple
    threads: int
    shared: int  # bytes of dynamic shared memory


class Noting(Cuda):
    """A GPU that notes launches. arrays: the values of the arrays that launches read (see SIZES)."""

    def __init__(self, capability, arrays, *args):
        self.arrays, self.launched = arrays, []
        cuda = mock.MagicMock()
        for name in ("CUDARuntimeError", "CUDADriverError", "CompileException"):
            for place in (cuda.runtime, cuda.driver, cuda.compiler):
                setattr(place, name, type(name, (Exception,), {}))
        cuda.Device = lambda: SimpleNamespace(compute_capability=digits(capability),
                                              attributes=attributes_of(GPUS[capability]))
        fake = SimpleNamespace(cuda=cuda)
        with mock.patch.dict(sys.modules, {"cupy": fake}):
            super().__init__(*args)

    def compile(self, sources):
        self.kernels = read_kernels(sources)
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

    def launch(self, name, items, *args, threads=None, shared=0):
        grid, (threads,), _ = self.kernels[name].plan(items, args, self.W, threads)
        self.launched.append(Launch(name, grid, threads, shared))


def launches_of(capability, dtype, c, arrays, Model=GPT2, B=4, T=1024):
    """The set of the launches of a training step and of a forward pass."""
    device = Noting(capability, arrays, dtype.replace("fp8", "bf16"), c)
    model = Model(c, device, B, T)
    tokens = np.zeros((B, T), np.int32)
    with mock.patch.object(model, "report", lambda: SimpleNamespace(loss=0)):
        model.train_step(pack_batch(tokens, tokens))
        model.forward(tokens, tokens)
    return set(device.launched)


def faults_of_launches(capability, launches, used):
    """Why a GPU would refuse launches: texts. used {kernel: Used}: what the compiler says."""
    gpu, faults = GPUS[capability], []
    for launch in sorted(launches):
        own = used[launch.kernel]
        if not blocks_that_fit(gpu, own, launch.threads, launch.shared):
            faults.append(
                f"an {gpu.name} cannot launch {launch.kernel}: its blocks have {launch.threads} threads, "
                f"{registers_of_block(own, launch.threads):,} registers of {REGISTERS:,}, and "
                f"{own.shared + launch.shared:,} bytes of shared memory of {gpu.of_block:,}")
        if max(launch.grid[1:], default=1) > 65535 or launch.grid[0] >= 2**31:
            faults.append(f"{launch.kernel}: no GPU has a grid of {launch.grid} blocks")
    return faults
