"""--dtype fp8 with --fp8 all on Hopper: the MLP's two products that meet GELU write twins.

cuBLASLt's FP8 product writes bf16, which another kernel reads to apply GELU and to write two twins.
The kernels here, fp8_gelu.cu, multiply one tile while they do the rest to another. Bytes moved for
each number of an (N,4C) array, beside the products' inputs:

                        fp8_all.py                              here
    GELU                2 written, 2 read, 2 written            1 + 2 written
    its gradient        2 written, 4 read, 2 written            1 read, 2 written

The one byte is GELU's derivative, which stands for fch: nothing else would read that.

Sums are not promoted, as in the products that these replace: see fp8.py. Where the sizes do not
fit, as in a sample, fp8_all.py's kernels do the same, with fch itself. So both passes of a
step use the same ones.
"""
import ctypes

import numpy as np

from dev.features.feature import Feature, is_fast, is_hopper, kernels_of
from dev.features.fp8.fp8 import GRADIENT, INPUT
from dev.features.hopper.gelu_products import SOURCES as BESIDE
from train_gpt2 import UserError, address, aligned_bytes, pointer

SOURCE = kernels_of(__file__)
SOURCES = (*BESIDE[:2], SOURCE)
HEIGHT = WIDTH = 128  # of a tile of the result
STAGES = 5  # of 128 channels
THREADS = 640


def fits(N, OC, C):
    """Whether the kernels can multiply (N,C) by (C,OC)."""
    return N % HEIGHT == 0 and OC % (2 * WIDTH) == 0 and C % 16 == 0


def plan(device, N, OC):
    """(blocks, bytes of shared memory). There is a block a multiprocessor, unless there are fewer
    tiles; their number is even. In shared memory are stages of two operands, and the two twins of
    two tiles."""
    tiles = N // HEIGHT * (OC // WIDTH)
    return (min(device.multiprocessors // 2 * 2, tiles),
            STAGES * (HEIGHT + WIDTH) * 128 + 2 * 2 * HEIGHT * WIDTH)


def multiply(device, name, twins, scale, outputs, factors, scales):
    """Launch one of the two kernels. twins: plain (N,OC) and transposed (OC,N), u1, which it
    writes, and their scale; outputs: slopes and bias, or sums and slopes, as in fp8_gelu.cu;
    factors: twins (N,C) and (OC,C), u1; scales: theirs."""
    (N, OC), C = twins[0].shape, factors[0].shape[1]
    blocks, shared = plan(device, N, OC)
    device.launch(name, blocks, *map(device.paired_map, twins), scale, *outputs,
                  *map(device.paired_map, factors), *scales, N, OC, C, threads=THREADS,
                  shared=shared)


class PairedMaps:
    """A mixin in front of FastCuda."""

    def paired_map(self, array):
        """The 128 bytes that tell Hopper's copy engine how to copy boxes of 64 rows and 128 bytes
        of an array (rows,columns), rows a multiple of 16. In shared memory the first 8 of each 16
        rows are the even ones; then come the odd ones. The copy engine counts bytes in pairs."""
        key = "paired", array.data.ptr, array.shape
        if key not in self.maps:
            rows, row = array.shape[0], array.strides[0]
            made = aligned_bytes(128)

            def numbers(kind, *values):
                return (kind * len(values))(*values)

            status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
                ctypes.c_void_p(made.ctypes.data), 9, 4,  # bf16; pair of bytes, and which row it is
                address(array), numbers(ctypes.c_uint64, row // 2, 8, 2, rows // 16),
                numbers(ctypes.c_uint64, 2 * row, row, 16 * row),
                numbers(ctypes.c_uint32, 64, 8, 2, 4), numbers(ctypes.c_uint32, 1, 1, 1, 1),
                0, 3, 2, 0)  # as train_gpt2.FastCuda.tensor_map
            if status:
                raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: "
                                f"{array.shape} at {pointer(array):x}; expected --fp8 head")
            self.maps[key] = made
        return self.maps[key].view("V128")


def bytes_in(array):
    """Memory for a byte of each number of an array, which only a run's first step has in bf16."""
    return array.reshape(-1).view(np.uint8)[: array.size].reshape(array.shape)


class GeluTwins:
    """GPT-2 on such a device, in front of Fp8All. Twins of (N,4C) arrays are in fch_gelu's memory,
    since the buffer has the twin of the product's other side; GELU's derivative is in fch's."""

    def fits(self, wide, narrow):
        """Whether the kernels can make an array (N,4C), given one (N,C)."""
        return self.device.hopper and self.device.calibrated and fits(*wide.shape, narrow.shape[1])

    def linear_forward(self, out, inp, y, gelu=None):
        """As Fp8All.linear_forward."""
        if gelu is None or not self.fits(out, inp):
            return super().linear_forward(out, inp, y, gelu=gelu)
        self.make_twins("matmul_gelu_fp8", gelu, self.kept.fcproj[y.l], (bytes_in(out), y.b),
                        INPUT, inp, y)

    def linear_backward(self, dinp, dout, inp, y, dgelu_at=None):
        """As Fp8All.linear_backward."""
        if dgelu_at is None or not self.fits(dinp, dout):
            return super().linear_backward(dinp, dout, inp, y, dgelu_at=dgelu_at)
        self.bias_backward(dout, y)
        self.weight_backward(dout, inp, y)
        self.make_twins("matmul_dgelu_fp8", dinp, self.kept.gradient,
                        (self.back.sums, bytes_in(dgelu_at)), GRADIENT, dout, y)

    def make_twins(self, name, out, across, outputs, kind, array, y):
        """Launch one of the kernels, for the twins of out (N,4C), plain and transposed."""
        device, twin = self.device, bytes_in(out)
        left, right, scales = device.factors(kind, array, y)
        multiply(device, name, (twin, across), device.scale(*device.reader), outputs,
                 (left, right.T), scales)
        device.stored(out, twin)


FEATURE = Feature(
    "fp8 GELU products", lambda flags, ranks: (
        is_fast(flags) and flags.dtype == "fp8" and flags.fp8 == "all"), GeluTwins,
    device=PairedMaps, only="GPT2", sources=SOURCES,
    compiled=is_hopper, chapter="FP8 GELU products")
