"""Small CUDA files for tests: a head, kernels from their bodies, a device that has them, launches
with NumPy's arrays."""

import numpy as np

from dev.common.config import Config
from dev.common.student_text import for_gpu
from dev.cpu.emulated import Emulated
from dev.features.devices import make_device

HEAD = """#define BLOCK(threads, ...)
extern "C" { __constant__ int attention_sizes[] = {1, 32, 1, 1}, layernorm_sizes[] = {32, 32, 1}; }
__device__ float slowest(float x) {
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
"""
INCLUDES = "\n".join(f"#include <{name}>" for name in (
    "cuda_bf16.h", "cuda_fp16.h", "math.h", "cstdint", "stdio.h", "assert.h", "float.h", "limits.h",
    "cuda_runtime.h"))


def of_files(*paths):
    """A config whose kernels are in these files alone."""
    return type("Kernels", (Config,), dict(SOURCES=paths))()


def built(device_name, folder, text):
    """A device with the kernels of a student's text."""
    path = folder / "words.cu"
    path.write_text(text if device_name != "cuda" else for_gpu(text))
    kernels = of_files(path)
    if device_name != "cuda":
        return Emulated("fp32", kernels, students=[path])
    return make_device(device_name, "fp32", kernels, plain=True)


def launch(device, name, items, *args, **sizes):
    """Launch with arrays of NumPy. Returns what they are afterwards."""
    there = [device.empty(arg.nbytes).view(arg.dtype).reshape(arg.shape)
             if isinstance(arg, np.ndarray) else arg for arg in args]
    for array, arg in zip(there, args):
        if isinstance(arg, np.ndarray):
            device.put(array, arg)
    device.launch(name, items, *there, **sizes)
    return [device.get(array) for array, arg in zip(there, args) if isinstance(arg, np.ndarray)]


def kernel(name, parameters, body, threads=64):
    return (f'BLOCK({threads}, threads)\nextern "C" __global__ void {name}({parameters}) {{\n'
            "    [[maybe_unused]] int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;\n"
            f"{body}}}\n")


def numbered(path, head, bodies):
    """Write kernels named kernel0, kernel1 .. for blocks of 64 threads. Returns their config, and
    the lines of each that end in //!."""
    text, marked = head, []
    for number, body in enumerate(bodies):
        text += (f'BLOCK(64, threads)\nextern "C" __global__ void kernel{number}('
                 "float* out, float* inp, int* counter, half* low) {\n    [[maybe_unused]] int "
                 "t = threadIdx.x, b = blockIdx.x, i = 64 * b + t;")
        marked.append({text.count("\n") + j + 1 for j, line in enumerate(body.split("\n"))
                       if line.endswith("//!")})
        text += f"{body}}}\n"
    path.write_text(text)
    return of_files(path), marked
