"""Test that the kernels of samples are compiled apart, that parameters are drawn ahead, and that a
run knows how long it took to start."""
import subprocess
import sys
import time
from concurrent.futures import Future
from unittest import mock

import pytest

import train_gpt2
from dev.common.config import Config
from dev.common.nvrtc import compile_cuda, has_nvrtc
from dev.features import kv_cache, start
from dev.features.documents import SIGHT
from dev.features.dropout import DroppedOutputs
from dev.features.feature import header_switches, stack
from dev.features.fused_biases import output_switches
from dev.tests.checks import check, check_refusal, fast
from train_gpt2 import UserError, read_kernels, source_of

FIRST = """
struct Map { char bytes[128]; };
__device__ float doubled(float x) { return 2 * x; }
BLOCK(256, threads)
extern "C" __global__ void __launch_bounds__(256, (8 > 4 ? 2
    : 1)) ours(float* out, const __grid_constant__ Map map) { *out = doubled(map.bytes[0]); }
extern "C" __global__ void plain(int* x) { *x = 1; }
"""
SECOND = 'extern "C" __global__ void later(float* out) { *out = doubled(*out); }'


@fast
def test_functions_alone():
    """Behind the functions of other files a program has its own kernels only."""
    if not has_nvrtc():
        pytest.skip("needs NVRTC, which is not installed")
    block = "#define BLOCK(...)\n"
    for code, expected in ((FIRST, ["ours", "plain"]),
                           (start.functions_alone(FIRST), [])):
        _, used, _ = compile_cuda(block + code + SECOND, "sm_86", ["--split-compile=0"])
        check(f"kernels: {expected}", sorted(used) == sorted([*expected, "later"]), [*used])


def test_behind_features():
    """Samples' kernels compile behind kernels.cu, whatever features have it include."""
    if not has_nvrtc():
        pytest.skip("needs NVRTC, which is not installed")
    flags = [*train_gpt2.Cuda.OPTIONS, "-DBF16", *output_switches(*DroppedOutputs.OUTPUT),
             *header_switches("SIGHT", SIGHT), *Config().switches()]
    code = start.functions_alone(source_of(train_gpt2.KERNELS)) + source_of(kv_cache.SOURCE)
    _, used, _ = compile_cuda(code, "sm_86", flags)
    check("its kernels", used.keys() == read_kernels([kv_cache.SOURCE]).keys(), [*used])


class Gpu:
    """What SamplesLater asks of train_gpt2.Cuda."""

    def __init__(self, dtype, c, beside=()):
        self.gpu = mock.Mock()
        self.sources, self.launched = [*c.SOURCES, *beside], []
        self.compile([train_gpt2.KERNELS])

    def compile(self, sources):
        self.kernels = train_gpt2.read_kernels(self.sources)
        self.functions = dict.fromkeys(self.kernels, "compiled")

    def launch(self, name):
        self.launched.append((name, self.functions[name]))


@fast
def test_first_launch_waits():
    """The other kernels do not wait for kv_cache.cu, its own do, and an error comes to them."""
    config, running = mock.Mock(SOURCES=[train_gpt2.KERNELS]), Future()
    with mock.patch.object(start, "ThreadPoolExecutor", return_value=mock.Mock(
            submit=lambda work: running)):
        device = stack(Gpu, [start.SamplesLater])("fp32", config, [kv_cache.SOURCE])
        failing = stack(Gpu, [start.SamplesLater])("fp32", config, [kv_cache.SOURCE])
    check("the main program is without it", kv_cache.SOURCE not in device.sources)
    check("its kernels are known", {"token_pass", "adamw"} <= device.kernels.keys())
    device.launch("adamw")
    running.set_result({"token_pass": "compiled later"})
    device.launch("token_pass")
    check("launched", device.launched == [("adamw", "compiled"), ("token_pass", "compiled later")],
          device.launched)
    failing.functions.later = Future()
    failing.functions.later.set_exception(UserError("NVRTC could not compile kv_cache.cu"))
    check_refusal("an error", "could not compile kv_cache.cu", failing.launch, "token_pass")


@fast
def test_failed_compilation():
    """A run whose kernels do not compile says nothing more."""
    class Failing:
        def compile(self, sources):
            raise UserError("NVRTC could not compile kernels.cu")

    timer = mock.Mock()
    with mock.patch.object(start.threading, "Timer", return_value=timer):
        device = object.__new__(stack(Failing, [start.Timed]))
        device.ends = {}
        check_refusal("an error", "could not compile", device.compile, [])
    check("started and cancelled", (timer.start.call_count, timer.cancel.call_count) == (1, 1))


@fast
def test_drawn_ahead():
    """Parameters are there before the device is, and are handed over one by one. Those of a large
    model, and --exact's, are drawn when they are asked for."""
    pairs = [("wte", 1), ("wpe", 2)]
    config = mock.Mock()
    plain = type("Plain", (), dict(
        config=config, flags=mock.Mock(exact=0),
        make_device=lambda run: run.early and [*run.early.result(9)],
        first_parameters=lambda run: iter(pairs)))
    config.parameter_table.return_value = [mock.Mock(size=2**27)] * 3
    run = stack(plain, [start.Drawn])()
    check("not those of a large model", run.make_device() is None)
    check("they are drawn later", [*run.first_parameters()] == pairs)
    config.parameter_table.return_value.pop()
    run.flags.exact = 1
    check("not those of --exact", run.make_device() is None)
    run.flags.exact = 0
    with mock.patch.object(start.threading, "Thread", wraps=start.threading.Thread) as thread:
        check("drawn before there is a device", run.make_device() == pairs)
    check("a program that ends does not wait", thread.call_args.kwargs["daemon"])
    check("all, in order", [*run.first_parameters()] == pairs)
    check("none stays in memory", not run.early.result())


@fast
def test_told_once():
    """The first step ends the start, whose parts are told."""
    run = mock.Mock(device=mock.Mock(ends={"Python": 0.5, "CuPy": 0.8}))
    told = start.Told()
    with mock.patch.object(start, "age", side_effect=[1.0, 1.8]):
        told.prepared(run)
        for _ in range(2):
            told.stepped(run, None)
    run.say.assert_called_once_with("start        | 1.8 s to the first step: 0.5 s for Python, 0.3 "
                                    "s for CuPy, 0.2 s for the data, 0.8 s for the model and the "
                                    "step")


def test_age():
    """A process knows its age, to two ticks of the kernel's clock and the start of Python."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    program = "import time; time.sleep(0.3); from dev.features.start import age; print(age())"
    before = time.perf_counter()
    found = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True,
                                 cwd=start.__file__.partition("/dev/")[0], text=True).stdout)
    check("age", 0.28 < found < time.perf_counter() - before + 0.03, found)
