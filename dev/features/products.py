"""Matrix products use the fastest of cuBLASLt's algorithms, timed when a product first comes up.

cuBLASLt sorts the algorithms it offers by an estimate. Another than its first is often faster: a
step of the 124M model at B=32 takes 52.7 ms with timed algorithms, and 53.4 ms with the first ones.
Choices are saved, so that later runs add in the same order: same seed, same bits.
"""
import ctypes
import re

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.features.feature import Feature, is_fast
from dev.features.peak import peak_of


class TimedProducts:
    """A mixin in front of FastCuda."""
    CANDIDATES = 8  # algorithms that are timed

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, beside)
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        versions = self.library.cublasLtGetVersion(), self.cupy.cuda.runtime.driverGetVersion()
        name = f"{self}".removesuffix(peak_of(self)) + peak_of(self)  # a run's name has it already
        self.cache = re.sub(r"\W+", "_", f"matmul {name} {versions}")
        self.choices = read_cache(self.cache)  # {product: algorithm}, of earlier runs too

    def algorithm(self, plan, out, a, b, accumulate, epilogue):
        """As FastCuda.algorithm: the chosen one."""
        return self.choose(self.name_of(out, a, b, epilogue), plan, accumulate, out, a, b)

    def name_of(self, out, a, b, epilogue):
        """What is known of a product, but for addresses: its name in the cache."""
        return out.shape, a.shape, a.strides, b.strides, out.itemsize, epilogue["EPILOGUE"]

    def choose(self, name, plan, accumulate, out, a, b):
        """The fastest algorithm. An accumulating product cannot be timed, since repeating it
        changes out. It reuses the plain product's choice, or takes the first algorithm offered."""
        own = str((*name, accumulate))
        known = self.choices.get(own) or self.choices.get(str((*name, False)))
        if known:
            return np.array(known, np.uint64)
        from cupyx.profiler import benchmark

        def thrice(algorithm):
            for _ in range(3):
                self.multiply(plan, algorithm, out, a, b, False)

        algorithms = self.algorithms(plan, self.CANDIDATES)
        times = [benchmark(thrice, (algorithm,), n_repeat=3, n_warmup=1).gpu_times.min()
                 for algorithm in algorithms if not accumulate]
        best = algorithms[int(np.argmin(times or [0]))]
        chosen = {own: best[:8].tolist()}  # the first 8 of its 12 numbers matter
        self.choices |= chosen
        write_cache(self.cache, chosen)
        return best


FEATURE = Feature("products", lambda flags, ranks: is_fast(flags), device=TimedProducts,
                  chapter="timed products")
