"""A GPU's run starts sooner: a thread compiles the kernels of samples, half of all code, while the
run begins without them. And the run says how long it took to start, and for what.

A file of CUDA is compiled behind kernels.cu, whose functions it uses. Here they are compiled once
more, without its kernels, which takes NVRTC a fifth of a second.
"""
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dev.features import kv_cache
from dev.features.feature import Feature, is_fast, trains
from train_gpt2 import UserError, read_kernels, source_of

KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*?\)\s*)?(?=\w+\()', re.S)
PATIENCE = 1  # seconds of silence


def functions_alone(text):
    """CUDA source whose kernels are functions that nobody calls: compilers drop them."""
    return KERNEL.sub("__device__ void ", text).replace("__grid_constant__", "")


def age():
    """Seconds since this process began, on Linux."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        begun = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - begun


class Timed:
    """A mixin in front of Cuda: it knows when it began, and how long it compiled."""

    def __init__(self, *args):
        self.begun = age()
        super().__init__(*args)

    def compile(self, sources):
        line = "compiling the kernels, once for these sizes"  # stdout may be a sample's text
        says = threading.Timer(PATIENCE, print, [line], dict(file=sys.stderr))
        says.start()
        begun = time.perf_counter()
        try:
            super().compile(sources)
        finally:
            says.cancel()  # after an error, too: a timer would outlive the program's last line
        self.compiled_in = time.perf_counter() - begun


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
        self.awaited = read_kernels([kv_cache.SOURCE])
        later = ThreadPoolExecutor(1).submit(self.compile_samples)
        super().compile(sources)
        self.kernels |= self.awaited
        self.functions = Awaited(self.functions, later)

    def compile_samples(self):
        """{name: function} of the kernels of samples."""
        self.gpu.use()  # a thread begins with the first GPU
        module = self.module_of(self.helpers + source_of(kv_cache.SOURCE))
        try:
            return {name: module.get_function(name) for name in self.awaited}
        except self.cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile {kv_cache.SOURCE.name}:\n{e}") from None


class Told:
    """Says how long the start took."""

    def prepared(self, run):
        if not trains(run.flags):
            return
        device = run.device
        waited = age() - device.begun - device.compiled_in
        run.say(f"start        | {device.begun:.1f} s for Python, {device.compiled_in:.1f} s for "
                f"the kernels, {waited:.1f} s for the GPU and the data")


TIMED = Feature("start", lambda flags, ranks: flags.device == "cuda" and not flags.dry_run,
                device=Timed, observer=Told)
LATER = Feature(
    "samples later", lambda flags, ranks: is_fast(flags) and kv_cache.asked(flags, ranks),
    device=SamplesLater, chapter="samples' kernels later")
