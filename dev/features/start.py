"""A GPU's run starts sooner: three threads work beside the main one. One makes the GPU's context
while CuPy is imported, one draws the first parameters before there is a model, and one compiles the
kernels of samples, half of all code, once the others are compiled. And the run says how long it
took to its first step, and for what.

A file of CUDA is compiled after kernels.cu, whose functions it uses. For the kernels of samples
these functions are compiled once more, without kernels.cu's own kernels: 0.2 s of NVRTC.
"""
import contextlib
import ctypes
import os
import re
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from dev.features import kv_cache
from dev.features.feature import Feature, is_fast
from train_gpt2 import UserError, read_kernels, source_of

KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*?\)\s*)?(?=\w+\()', re.S)
PATIENCE = 1  # seconds of silence
MOST_AHEAD = 2**28  # parameters that are drawn ahead: GPT-2 124M's, and no more than 1 GiB


def functions_alone(text):
    """CUDA source whose kernels are functions that nobody calls: compilers drop them."""
    return KERNEL.sub("__device__ void ", text).replace("__grid_constant__", "")


def age():
    """Seconds since this process began, on Linux."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        begun = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - begun


def make_context():
    """Make the context of the first GPU, in which CuPy then works. ctypes lets other threads run
    while the driver does."""
    with contextlib.suppress(OSError):  # no driver, of which Cuda speaks
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)


class Timed:
    """A mixin in front of Cuda: it knows when each part of the start ended."""

    def __init__(self, *args):
        self.ends = {"Python": age()}
        if "cupy" not in sys.modules:  # as it is in a rank, which has a GPU of its own
            threading.Thread(target=make_context).start()
        with contextlib.suppress(Exception):  # of which Cuda speaks
            import cupy  # noqa: F401
        self.ends["CuPy"] = age()
        super().__init__(*args)

    def compile(self, sources):
        self.ends["the GPU's context"] = age()
        line = "compiling the kernels, once for these sizes"  # stdout may be a sample's text
        says = threading.Timer(PATIENCE, print, [line], dict(file=sys.stderr))
        says.start()
        try:
            super().compile(sources)
        finally:
            says.cancel()  # after an error, too: a timer would outlive the program's last line
        self.ends["the kernels"] = age()


def draw(early, parameters):
    """Draw all parameters for a Future, in a thread for which a run that fails does not wait."""
    try:
        early.set_result([*parameters])
    except BaseException as e:
        early.set_exception(e)


class Drawn:
    """Training whose first parameters are drawn while the GPU and the data are made ready. They are
    in memory all at once, so those of a large model are not."""
    early = None

    def make_device(self):
        size = sum(row.size for row in self.config.parameter_table())
        if size <= MOST_AHEAD and not self.flags.exact:  # --exact draws its own
            self.early = Future()
            threading.Thread(target=draw, args=(self.early, super().first_parameters()),
                             daemon=True).start()
        return super().make_device()

    def first_parameters(self):
        if self.early is None:
            yield from super().first_parameters()
            return
        while self.early.result():  # one by one, so that none stays in memory
            yield self.early.result().pop(0)


class Awaited(dict):
    """Functions of kernels. A missing one is awaited: `later` is the Future of all the others."""

    def __init__(self, functions, later):
        super().__init__(functions)
        self.later = later

    def __missing__(self, name):
        found = self.later.result()
        self.update(found)
        return found[name]


class SamplesLater:
    """A mixin in front of Cuda: kv_cache.cu is compiled beside the rest, and awaited by the first
    launch of its kernels."""

    def __init__(self, dtype, c, beside=()):
        self.helpers = functions_alone("".join(map(source_of, c.SOURCES)))
        super().__init__(dtype, c, beside)

    def compile(self, sources):
        self.sources.remove(kv_cache.SOURCE)
        super().compile(sources)  # first: NVRTC compiles one program at a time
        self.awaited = read_kernels([kv_cache.SOURCE])
        self.kernels |= self.awaited
        self.functions = Awaited(self.functions,
                                 ThreadPoolExecutor(1).submit(self.compile_samples))

    def compile_samples(self):
        """{name: function} of the kernels of samples."""
        self.gpu.use()  # a thread begins with the first GPU
        module = self.module_of(self.helpers + source_of(kv_cache.SOURCE))
        try:
            return {name: module.get_function(name) for name in self.awaited}
        except self.cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile {kv_cache.SOURCE.name}:\n{e}") from None


class Told:
    """Says when the first step was made, and how long each part of the start took."""
    ends = None

    def prepared(self, run):
        self.ends = run.device.ends | {"the data": age()}

    def stepped(self, run, step):
        if self.ends:
            ends = [*(self.ends | {"the model and the step": age()}).items()]
            parts = ", ".join(f"{end - begun:.1f} s for {name}" for (_, begun), (name, end) in
                              pairwise([("", 0), *ends]))
            run.say(f"start        | {ends[-1][1]:.1f} s to the first step: {parts}")
            self.ends = None


TIMED = Feature("start", lambda flags, ranks: flags.device == "cuda" and not flags.dry_run,
                training=Drawn, device=Timed, observer=Told)
LATER = Feature(
    "samples later", lambda flags, ranks: is_fast(flags) and kv_cache.asked(flags, ranks),
    device=SamplesLater, chapter="samples' kernels later")
