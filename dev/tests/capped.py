"""Run a program on a large GPU as if it were a smaller one.

    python -m dev.tests.capped 8.6 test_gpt2 --device cuda --dtype bf16
    python -m dev.tests.capped 8.6 train_gpt2 -x 100
    python -m dev.tests.capped 8.6 pytest dev/tests/test_fp8.py --device cuda

The host reads the smaller GPU's figures, from dev/common/gpus.py: compute capability, memory,
multiprocessors. The program's kernels are compiled to PTX for it, as far as the real GPU is newer,
and the driver translates that. A launch that the smaller GPU would refuse is an error here, too.
CuPy and gpus.capability are patched, so the trainer has no line for this. CuPy's own kernels, and
cuBLAS, run as on the real GPU. Processes that the program starts are not capped.
"""
import functools
import runpy
import sys
from contextlib import ExitStack
from unittest import mock

from dev.common import gpus
from dev.common.gpus import GPUS, GB, KB, attributes_of, digits
from dev.common.program import run_main
from train_gpt2 import UserError


def device_like(Device, capability):
    """A subclass of CuPy's Device that has a smaller GPU's figures."""
    gpu = GPUS[capability]

    class Capped(Device):
        compute_capability = digits(capability)

        @property
        def attributes(self):
            return {**super().attributes, **attributes_of(gpu)}

        @property
        def mem_info(self):
            free, total = super().mem_info
            return max(0, gpu.memory - (total - free)), min(gpu.memory, total)

    return Capped


class Checked:
    """A kernel that refuses what the smaller GPU would refuse."""

    def __init__(self, name, kernel, gpu):
        vars(self).update(name=name, kernel=kernel, gpu=gpu)

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def __setattr__(self, name, value):
        setattr(self.kernel, name, value)

    @functools.cached_property
    def declared(self):
        """The bytes of shared memory that the kernel declares itself. CuPy asks the driver each
        time."""
        return self.kernel.shared_size_bytes

    def __call__(self, grid, block, args, shared_mem=0):
        asked, gpu = self.declared + shared_mem, self.gpu
        if asked > gpu.of_block:
            raise UserError(f"{self.name}: a block needs {asked:,} bytes of shared memory, and the "
                            f"{gpu.name} has {gpu.of_block:,}")
        self.kernel(grid, block, args, shared_mem=shared_mem)


class Module:
    """CuPy's RawModule, compiled to PTX."""

    def __init__(self, RawModule, gpu, target, *args, **options):
        self.module, self.gpu, self.target = RawModule(*args, **options), gpu, target

    def patched(self):
        """CuPy compiles a module when its first function is asked for."""
        from cupy.cuda import compiler
        return mock.patch.multiple(
            compiler, _get_arch=lambda: self.target,
            _get_arch_for_options_for_nvrtc=lambda arch=None: (f"-arch=compute_{self.target}",
                                                               "ptx"))

    def get_function(self, name):
        with self.patched():
            return Checked(name, self.module.get_function(name), self.gpu)

    def get_global(self, name):
        with self.patched():
            return self.module.get_global(name)


def capped(capability):
    """A context in which CuPy's GPU looks like one of this compute capability, a key of GPUS."""
    import cupy
    if capability not in GPUS:
        known = ", ".join(f"{key} ({gpu.name})" for key, gpu in GPUS.items())
        raise UserError(f"{capability}: expected a compute capability: {known}")
    try:
        own = cupy.cuda.Device().compute_capability
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise UserError(
            f"{e}: expected a GPU, newer than the one to run as: check nvidia-smi") from None
    target = min(digits(capability), own, key=int)
    context = ExitStack()
    # By the driver.
    context.enter_context(mock.patch.object(gpus, "capability", lambda: int(digits(capability))))
    context.enter_context(mock.patch.object(cupy.cuda, "Device",
                                            device_like(cupy.cuda.Device, capability)))
    context.enter_context(mock.patch.object(
        cupy, "RawModule", functools.partial(Module, cupy.RawModule, GPUS[capability], target)))
    return context


def main():
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        raise UserError(f"expected a compute capability ({', '.join(GPUS)}), a module, and its "
                        "arguments: python -m dev.tests.capped 8.6 test_gpt2 --device cuda")
    capability, module = sys.argv[1:3]
    del sys.argv[:2]
    with capped(capability):
        gpu = GPUS[capability]
        print(f"as on the {gpu.name}: compute capability {capability}, {gpu.of_block // KB} KB of "
              f"shared memory for a block, {gpu.multiprocessors} multiprocessors, "
              f"{gpu.memory // GB} GB", flush=True)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_main(main)
