"""Test what differs on a GPU of compute capability 7.5, such as a T4: only fp32, and products
without tensor cores.

test_trainer.py tests attention as on such a GPU. capped.py runs a program as on one.
"""
import contextlib
import os
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.common.nvrtc import has_nvrtc
from dev.cpu.emulated import Emulated
from dev.common import gpus
from dev.features import order
from dev.features.devices import Cuda, make_device
from dev.tests import checks
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.small_kernels import launch

PRODUCTS = """
// left and right (16,8) += a (16,16) times the left and the right half of b (16,16), by one warp.
BLOCK(32, threads)
extern "C" __global__ void products(float* left, float* right, const float* a, const float* b) {
    int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    float l[4], r[4];
    Pair x[4], y[4];
    for (int i = 0; i < 4; i++) {
        int at = (g + i / 2 * 8) * 8 + 2 * q + i % 2;
        l[i] = left[at], r[i] = right[at];
        const float* of_a = a + (g + i % 2 * 8) * 16 + 2 * q + i / 2 * 8;
        const float* of_b = b + (2 * q + i % 2 * 8) * 16 + g + i / 2 * 8;
        x[i] = {of_a[0], of_a[1]}, y[i] = {of_b[0], of_b[16]};
    }
    mma_pair(l, r, x, y);
    for (int i = 0; i < 4; i++) {
        int at = (g + i / 2 * 8) * 8 + 2 * q + i % 2;
        left[at] = l[i], right[at] = r[i];
    }
}
"""


def test_products(device_name, folder):
    """A warp's two products of tiles, by the CPU's mma, by Turing's, and by a GPU's own."""
    path = folder / "products.cu"
    path.write_text(PRODUCTS)
    devices = {}
    if device_name == "cuda":
        devices["this GPU's"] = make_device("cuda", "fp32", Config(), beside=[path])
    else:
        for name, flags in (("the CPU's", "-O1"), ("Turing's", "-O1 -DTURING")):
            with mock.patch.dict(os.environ, CXXFLAGS=flags), contextlib.redirect_stdout(None):
                devices[name] = Emulated("fp32", Config(), [path], only=["products"])
    drawn = [checks.normal(*shape) for shape in ((16, 8), (16, 8), (16, 16), (16, 16))]
    whole = [np.rint(4 * x) for x in drawn]  # their sums are exact
    for name, device in devices.items():
        for kind, given, limit in (("fp32", drawn, 1e-6), ("whole numbers", whole, EXACT)):
            left, right, a, b = map(np.float64, given)
            found = launch(device, "products", 32, *map(np.float32, given))[:2]
            yield f"{name}, of {kind}", np.hstack(found), np.hstack([left, right]) + a @ b, limit


def driver(capability):
    """NVIDIA's driver with one GPU of this compute capability; with 0, without one."""
    def attribute(value, number, gpu):
        value._obj.value = {75: capability // 10, 76: capability % 10}[number]

    return SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)


def test_dtypes():
    """Without --dtype a T4 trains in fp32, and newer GPUs in bf16. What a GPU cannot do is refused
    in one line."""
    for capability, wish in ((0, "bf16"), (70, "fp32"), (75, "fp32"), (80, "bf16"), (120, "bf16")):
        with mock.patch("ctypes.CDLL", lambda name, capability=capability: driver(capability)):
            found = gpus.capability(), order.has_gpu(), order.default_dtype("cuda")
            check(f"default on {capability}", found == (capability, capability > 0, wish), found)
            check(f"default on a CPU beside {capability}", order.default_dtype("cpu") == "fp32")
    with mock.patch("ctypes.CDLL", side_effect=OSError):
        check("no driver", (gpus.capability(), order.has_gpu()) == (0, False))
    error = type("Error", (Exception,), {})
    for capability, dtype, wish in (
            (75, "bf16", "bf16 needs .* 8.0, and .* 7.5: try another --dtype"),
            (75, "tf32", "tf32 needs .* 8.0, and .* 7.5: try another --dtype"),
            (70, "fp32", "fp32 needs .* 7.5, and .* 7.0: .*--device cpu needs no GPU")):
        check_refusal(f"{dtype} on {capability}", wish, cuda_on, capability, dtype, error)
    try:
        cuda_on(75, "fp32", error)
    except AttributeError as e:  # what comes after the refusals
        check("fp32 on 75", "RawModule" in str(e), e)


def cuda_on(capability, dtype, error):
    """Make the trainer's Cuda on a GPU of which only this is known."""
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=error)
    figures = dict(MultiProcessorCount=40, MaxSharedMemoryPerBlockOptin=65536)
    gpu = SimpleNamespace(compute_capability=f"{capability}", attributes=figures)
    cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(CUDADriverError=error),
                           Device=lambda: gpu)
    cublas = SimpleNamespace(CUBLASError=error, CUBLAS_COMPUTE_32F=0,
                             CUBLAS_COMPUTE_32F_FAST_TF32=1)
    modules = {"cupy": SimpleNamespace(cuda=cuda),
               "cupy_backends.cuda.libs": SimpleNamespace(cublas=cublas)}
    with mock.patch.dict(sys.modules, modules):
        Cuda(dtype, Config())


def test_compiled():
    """Every kernel that trains compiles for 7.5 without spills, with its blocks in 64 KB."""
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    from dev.bench import compile_kernels as those
    for more in (those.FEATURES, [path for path in those.FEATURES if path != those.FUSED]):
        report, faults = those.compile_for("sm_75", "fp32", those.SMALL, more, spilled=0)
        check(f"sm_75 fp32, {len(more)} files beside", report and not faults, faults)
    shared = max(report[name][1] for name in report if name != "draw_tokens")  # it asks for no more
    check("sm_75: shared memory that kernels declare", shared <= 16384, shared)
