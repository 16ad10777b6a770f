"""--dry-run: print the tables, the bytes of a checkpoint, and an estimate of the time, and exit.
Nothing is compiled: a product needs a library alone.
"""
import time

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.time_left import duration
from dev.features import muon
from dev.features.feature import Feature, Flag
from dev.features.peak import flops_per_token
from train_gpt2 import BF16

# A training step reaches this share of the FLOP/s of one of its matrix products alone: 0.62 for the
# 124M model in bf16 on an H200, 0.7 for the 1558M model, and 0.4 to 0.7 on two CPU cores.
SHARE = {"cuda": 0.65, "cpu": 0.5}


def product_rate(device, c, B, T):
    """FLOP/s of the product (B*T, C) @ (C, 4C), the largest of a layer, timed on the device."""
    real, N = np.dtype(device.real), max(2048, min(B * T, 16384))  # fewer: mostly the launch
    out, inp, weight = (
        device.empty(real.itemsize * rows * columns).view(real).reshape(rows, columns)
        for rows, columns in ((N, 4 * c.C), (N, c.C), (4 * c.C, c.C)))
    for array in (inp, weight):  # not zeros, which take less power and so run at a higher clock
        values = np.random.default_rng(0).standard_normal(array.shape, np.float32)
        device.put(array, to_bf16(values) if real == BF16 else values)

    def seconds(count):
        device.get(out[:1])  # waits
        begun = time.perf_counter()
        for _ in range(count):
            device.matmul(out, inp, weight.T)
        device.get(out[:1])
        return time.perf_counter() - begun

    seconds(1)  # chooses an algorithm
    count = max(1, min(200, int(0.1 / max(seconds(1), 1e-6))))
    return 2 * N * 4 * c.C * c.C * count / min(seconds(count) for _ in range(3))


def flops_again(c):
    """FLOPs for a token by which --recompute 2 does the products of a layer's forward pass again,
    except the last."""
    return 2 * sum(row.size for row in c.parameter_table()
                   if row.decay and row.layers and row.name != "fcprojw")


class NoKernelsOnGpu:
    """A GPU without kernels, in front of its class."""

    def compile(self, sources):
        self.kernels, self.functions = {}, {}
        self.cublas.setMathMode(self.gpu.cublas_handle, 16)  # and so it is loaded


class NoKernelsOnCpu:
    """The same of a CPU, whose products are then NumPy's."""

    def unknown_switch(self):
        return None  # with any CXXFLAGS

    def compile(self, *sources):
        pass


class DryRun:
    """A run that only prints what it would be."""

    def run(self):
        self.prepare()
        c, device, flags = self.config, self.device, self.flags
        B, T = flags.batch_size, self.T
        numbers, size = sum(row.size for row in c.file_table()), np.dtype(device.real).itemsize
        print(f"checkpoint   | {size * numbers / 2**30:6.2f} GiB, and {12 * numbers / 2**30:.2f} "
              "GiB of state (-n, -nk)")
        rate = product_rate(device, c, B, T) * SHARE[device.name]
        flops = flops_per_token(c, T) + flops_again(c) * (flags.recompute == 2)
        of_update = muon.flops_of(c, device) if flags.optimizer == "muon" else 0  # AdamW's are few
        seconds = (self.total_batch * flops + of_update) / self.count / rate
        print(f"estimate     | {self.steps} steps of about {1e3 * seconds:,.0f} ms, "
              f"{self.total_batch / seconds:,.0f} tok/s, take about "
              f"{duration(self.steps * seconds)}, by the speed of a matrix product"
              + " in bf16" * (flags.dtype == "fp8")
              + ", without what sums over ranks take" * (self.count > 1))
        return 0


def without_kernels(flags):
    return NoKernelsOnGpu if flags.device == "cuda" else NoKernelsOnCpu


FEATURE = Feature("dry run", lambda flags, ranks: flags.dry_run, training=DryRun,
                  device=without_kernels, flags=(
    Flag(None, "--dry-run", "switch", 0, "1: print sizes and an estimate of the time, and do not "
         "train", "instead of training", after="--sample", replayed=False, may_differ=True),))
