"""The MLP's two products with GELU by kernels of our own, gelu_products.cu, on Hopper in bf16.

cuBLASLt applies GELU where a product ends, while the tensor cores wait. The kernels here multiply
one tile while they apply GELU to another. The one of the backward pass also sums its columns, of
128 rows at a time, from which the gradient of fcb is made: a pass over memory less. A product of
65536 x 768 x 3072 on an H200 takes 645 us in cuBLASLt and 570 to 590 here; in the backward pass 647
and 100 more for the sums, and here 663 with them. Without GELU it takes 450.

dev/bench/time_kernels.py checks the kernels and times them beside cuBLASLt.
"""
from pathlib import Path

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from train_gpt2 import BF16, ceil_div

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
HEIGHT = WIDTH = 128  # of a tile of the result
STAGES = 5  # of 64 channels, that fit shared memory
THREADS = 384


def fits(a, w, *results):
    """Whether the kernels can multiply these: bf16, whole rows of channels one after another."""
    return (all(x.dtype == BF16 and x.flags.c_contiguous for x in (a, w, *results))
            and a.shape[1] % 64 == 0 and results[0].shape[1] % 64 == 0)


def plan(device, out):
    """(blocks, bytes of shared memory). There is a block a multiprocessor, unless there are fewer
    tiles; their number is even. In shared memory are stages of two operands, and two results."""
    N, OC = out.shape
    tiles = -(-N // HEIGHT) * 2 * -(-OC // (2 * WIDTH))
    return (min(device.multiprocessors // 2 * 2, tiles),
            2 * (STAGES * (HEIGHT + WIDTH) * 64 + 2 * HEIGHT * WIDTH))


def maps(device, *arrays):
    """Tensor maps by which TMA loads and stores boxes of 64 rows and 64 columns of these."""
    return [device.tensor_map(x, *x.shape) for x in arrays]


def multiply_gelu(device, fch, fch_gelu, inp, w, bias):
    """fch (N,OC) = inp (N,C) @ w.T + bias, w (OC,C), and fch_gelu (N,OC) = gelu(fch)."""
    blocks, shared = plan(device, fch)
    device.launch("matmul_gelu", blocks, *maps(device, fch, fch_gelu), bias, *maps(device, inp, w),
                  *fch.shape, inp.shape[1], threads=THREADS, shared=shared)


def multiply_dgelu(device, dfch, sums, dout, w, fch):
    """dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)). sums (blocks of HEIGHT rows, OC),
    unless None: of each block the sums of dfch's columns."""
    blocks, shared = plan(device, dfch)
    device.launch("matmul_dgelu", blocks, *maps(device, dfch), sums, *maps(device, dout, w, fch),
                  *dfch.shape, dout.shape[1], threads=THREADS, shared=shared)


class OwnGelu:
    """A mixin in front of FastCuda: products with GELU that fit are multiplied by our kernels."""
    sums = None  # where sums of columns go: fp32, a row for each HEIGHT rows of the result
    summed = None  # the array whose columns have just been summed
    fused_gelu = True  # whether GELU is part of its product; FastCuda sets it

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        self.summed = None
        own = self.hopper and self.fused_gelu and not accumulate
        if own and gelu is not None and bias is not None and fits(a, b.T, out, gelu):
            multiply_gelu(self, out, gelu, a, b.T, bias)
        elif own and dgelu_at is not None and bias is None and fits(a, b, out, dgelu_at):
            multiply_dgelu(self, out, self.sums, a, b, dgelu_at)
            self.summed = out if self.sums is not None else None
        else:
            super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at)


def with_own_gelu(device):
    """A subclass of FastCuda that has these kernels."""
    return type(device.__name__, (OwnGelu, device), {})


class SummedProducts:
    """A model on such a device: the product that computed dfch has summed it for its bias."""

    def layer_backward(self, l):
        self.device.sums = getattr(self.back, "sums", None)  # not there with --dropout
        super().layer_backward(l)

    def bias_backward(self, dbias, dout):
        """As GPT2.bias_backward."""
        if self.device.summed is not dout:
            return super().bias_backward(dbias, dout)
        return dbias, ceil_div(len(dout), HEIGHT), dout.shape[1]


FEATURE = Feature(
    "gelu products", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16", SummedProducts,
    device=OwnGelu, only="GPT2", sources=SOURCES,
    compiled=lambda flags, c: gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8),
    chapter="GELU products")
