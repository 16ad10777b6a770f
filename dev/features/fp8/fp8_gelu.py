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
from pathlib import Path

import numpy as np

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from dev.features.devices import address_of
from dev.features.fp8.fp8 import GRADIENT, INPUT, WEIGHT
from dev.features.hopper.gelu_products import SOURCES as BESIDE
from prepro_tinyshakespeare import UserError
from train_gpt2 import address, aligned_bytes, pointer

SOURCE = Path(__file__).resolve().with_suffix(".cu")
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


class GeluTwins:
    """GPT-2 on such a device, in front of Fp8All. Twins of (N,4C) arrays stand in fch_gelu's
    memory, while the buffer has the twin of the product's other side."""

    def fits(self, a):
        return self.device.hopper and fits(*a.fch.shape, a.ln2.shape[1])

    def mlp_forward(self, a, p, kept):
        """As Fp8All.mlp_forward."""
        if not self.fits(a):
            return super().mlp_forward(a, p, kept)
        device = self.device
        inp = device.twin_of(a.ln2, device.tensor(INPUT, p.fcw))
        twin = self.hidden_twin(a)
        multiply(device, "matmul_gelu_fp8", (twin, kept.fch_gelu),
                 device.scale(*device.tensor(INPUT, p.fcprojw)), (self.slopes(a), p.fcb),
                 (inp, self.weight_twin(p.fcw, False)), self.scales(INPUT, p.fcw))
        device.matmul(self.acts.branch, twin, self.weight_twin(p.fcprojw, False).T, bias=p.fcprojb,
                      scales=self.scales(INPUT, p.fcprojw))  # (N,4C) @ (4C,C) -> (N,C)

    def mlp_backward(self, p, g, a, kept):
        """As Fp8All.mlp_backward."""
        if not self.fits(a):
            return super().mlp_backward(p, g, a, kept)
        device, d = self.device, self.back
        self.transpose_gradient(d.dresidual, p.fcprojw)
        self.weight_gradient(g.fcprojw, p.fcprojw, kept.fch_gelu)  # (C,N) @ (N,4C) -> (C,4C)
        dout = device.twin_of(d.dresidual, device.tensor(GRADIENT, p.fcprojw))
        twin = self.hidden_twin(a)
        multiply(device, "matmul_dgelu_fp8", (twin, self.kept.gradient),
                 device.scale(*device.tensor(GRADIENT, p.fcw)), (d.sums, self.slopes(a)),
                 (dout, self.weight_twin(p.fcprojw, True)), self.scales(GRADIENT, p.fcprojw))
        self.weight_gradient(g.fcw, p.fcw, kept.ln2)  # (4C,N) @ (N,C) -> (4C,C)
        device.matmul(d.dinp, twin, self.weight_twin(p.fcw, True).T,
                      scales=self.scales(GRADIENT, p.fcw))  # dln2: (N,4C) @ (4C,C) -> (N,C)
        return g.fcb, len(twin) // HEIGHT, g.fcb.size

    def hidden_twin(self, a):
        """Memory for a twin (N,4C): only a run's first step has fch_gelu in bf16."""
        N, OC = a.fch_gelu.shape
        return a.fch_gelu.reshape(-1).view(np.uint8)[: N * OC].reshape(N, OC)

    def slopes(self, a):
        """Memory for GELU's derivative (N,4C), in bytes: that of fch, which only a run's first step
        has."""
        return a.fch.reshape(-1).view(np.uint8)[: a.fch.size]

    def weight_twin(self, weight, backward):
        """The twin of a weight (OC,C); for the backward pass that of the transposed one."""
        return self.device.weights[address_of(weight)].twins[backward]

    def scales(self, kind, weight):
        """The scales of a product's two factors: of this kind of tensor, and of the weight."""
        device = self.device
        return [device.scale(*device.tensor(each, weight)) for each in (kind, WEIGHT)]


FEATURE = Feature(
    "fp8 GELU products", lambda flags, ranks: (
        is_fast(flags) and flags.dtype == "fp8" and flags.fp8 == "all"), GeluTwins,
    device=PairedMaps, only="GPT2", sources=SOURCES,
    compiled=lambda flags, c: gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8),
    chapter="FP8 GELU products")
