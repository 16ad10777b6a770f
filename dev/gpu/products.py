"""Matrix products use the fastest of cuBLASLt's algorithms, timed when a product first comes up.

cuBLASLt sorts the algorithms it offers by an estimate. Another than its first is often faster. In
a training step the GPU draws all the power that it may, and lowers its clock; then the algorithm is
fastest that spends the least energy, often not the one that is fastest for a moment. So each is
timed under load. Choices are saved, so that later runs add in the same order: same seed, same bits.
"""
import ctypes
import re

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.gpu.peak import peak_of


class TimedProducts:
    """A mixin in front of FastCuda."""
    CANDIDATES = 8  # algorithms that are timed
    LOAD = 0.05  # seconds of each before it is timed, and while it is

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, beside)
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        versions = self.library.cublasLtGetVersion(), self.cupy.cuda.runtime.driverGetVersion()
        name = f"{self}".removesuffix(peak_of(self)) + peak_of(self)  # a run's name has it already
        self.cache = re.sub(r"\W+", "_", f"products {name} {versions}")
        self.choices = read_cache(self.cache)  # {product: algorithm}, of earlier runs too

    def choose(self, name, plan, accumulate, out, a, b):
        """As FastCuda.choose. An accumulating product cannot be timed, since repeating it changes
        out. It reuses the plain product's choice, or takes the first algorithm offered."""
        own = str((*name, accumulate))
        known = self.choices.get(own) or self.choices.get(str((*name, False)))
        if known:
            return np.array(known, np.uint64)
        algorithms, times = self.algorithms(name, plan, self.CANDIDATES), [0]
        if len(algorithms) > 1 and not accumulate:
            times = [self.seconds(plan, algorithm, out, a, b) for algorithm in algorithms]
        best = algorithms[int(np.argmin(times))]
        chosen = {own: best[:8].tolist()}  # the first 8 of its 12 numbers matter
        self.choices |= chosen
        write_cache(self.cache, chosen)
        return best

    def seconds(self, plan, algorithm, out, a, b):
        """The time of ten products under load: the GPU has been busy with the same ones before, and
        has settled at the clock that its power allows them."""
        from cupyx.profiler import benchmark
        graphs = {}

        def ten():
            for _ in range(10):
                self.multiply(plan, algorithm, False, out, a, b)

        def tens(n):
            for _ in range(n):
                self.repeat(graphs, "ten", ten)

        once = benchmark(tens, (1,), n_repeat=1, n_warmup=2).gpu_times.min()
        n = min(100, 1 + int(self.LOAD / once))  # small products draw little power
        return benchmark(tens, (n,), n_repeat=1, n_warmup=1).gpu_times.min() / n


def with_timed_products(device):
    """A subclass of FastCuda that times algorithms."""
    return type(device.__name__, (TimedProducts, device), {})


class Timed:
    """Training on such a device."""

    def device_class(self):
        return with_timed_products(super().device_class())
