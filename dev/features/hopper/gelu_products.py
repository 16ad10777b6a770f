"""The MLP's two products with GELU by kernels of our own, gelu_products.cu, on Hopper in bf16.

cuBLASLt applies GELU where a product ends, while the tensor cores wait. The kernels here multiply
one tile while they apply GELU to another. The one of the backward pass also sums its columns, of
192 rows at a time, from which the gradient of fcb is made: a pass over memory less. A product of
65536 x 768 x 3072 on an H200 takes 645 us in cuBLASLt, and 519 here; in the backward pass 647 and
100 more for the sums, and 571 here with them. Without GELU it takes 450. Our times are from another
call than cuBLASLt's.

dev/tests/hopper.py has what their tests check with.
"""
import ctypes

from dev.features.feature import Feature, is_fast, is_hopper, kernels_of
from train_gpt2 import BF16, UserError, aligned_bytes, ceil_div

SOURCE = kernels_of(__file__)
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
SHORT, LONG = 128, 192  # sides of a tile; forward it is wide, in the backward pass high
# Bytes of shared memory: in the backward pass four stages of 64 channels of two operands, and eight
# boxes of 64 x 64; forward five stages, which are fewer bytes.
SHARED = 2 * (4 * (SHORT + LONG) * 64 + 8 * 64 * 64)
THREADS = 384


def fits(a, w, *results):
    """Whether the kernels can multiply these: bf16, whole rows of channels one after another."""
    return (all(x.dtype == BF16 and x.flags.c_contiguous for x in (a, w, *results))
            and a.shape[1] % 64 == 0 and results[0].shape[1] % 64 == 0)


def blocks_for(device, out, down, right):
    """How many blocks multiply: one a multiprocessor, unless there are fewer tiles. Two are a
    cluster, whose two tiles have `down` rows and `right` columns."""
    N, OC = out.shape
    return 2 * min(device.multiprocessors // 2, ceil_div(N, down) * ceil_div(OC, right))


def maps(device, *arrays):
    """Tensor maps by which TMA loads and stores boxes of 64 rows and 64 columns of these."""
    return [device.tensor_map(x, *x.shape) for x in arrays]


def map_of_fours(device, w, rows=LONG // 4):
    """A tensor map by which TMA loads one of each four rows of w (OC,C), `rows` of them: as
    FastCuda.tensor_map's of C channels of a head, with 4 heads and OC / 4 tokens, but with boxes of
    fewer tokens."""
    OC, C = w.shape
    if device.name == "cpu":
        return device.tensor_map(w.reshape(OC // 4, 4 * C), OC // 4, C)
    key = "fours", w.data.ptr, w.shape, rows
    if key not in device.maps:
        made = aligned_bytes(128)
        longs = ctypes.c_uint64
        ints = ctypes.c_uint32
        status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(made.ctypes.data), 9, 4, ctypes.c_void_p(w.data.ptr),
            (longs * 4)(C, 4, OC // 4, 1), (longs * 3)(2 * C, 8 * C, 2 * C * OC),
            (ints * 4)(64, 1, rows, 1), (ints * 4)(1, 1, 1, 1), 0, 3, 2, 0)
        if status:
            raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: {w.shape}; "
                            f"{device.AVOID}")
        device.maps[key] = made
    return device.maps[key].view("V128")


def multiply_gelu(device, fch, fch_gelu, inp, w, bias):
    """fch (N,OC) = inp (N,C) @ w.T + bias, w (OC,C), and fch_gelu (N,OC) = gelu(fch)."""
    device.launch("matmul_gelu", blocks_for(device, fch, 2 * SHORT, LONG), fch, fch_gelu, bias,
                  *maps(device, inp), map_of_fours(device, w), *fch.shape, inp.shape[1],
                  threads=THREADS, shared=SHARED)


def multiply_dgelu(device, dfch, sums, dout, w, fch):
    """dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)). sums (blocks of LONG rows, OC),
    unless None: of each block the sums of dfch's columns."""
    device.launch("matmul_dgelu", blocks_for(device, dfch, LONG, 2 * SHORT),
                  *maps(device, dfch), sums, *maps(device, dout, w, fch), *dfch.shape,
                  dout.shape[1], threads=THREADS, shared=SHARED)


class OwnGelu:
    """A mixin in front of FastCuda: products with GELU that fit are multiplied by our kernels."""
    sums = None  # where sums of columns go: fp32, a row for each LONG rows of the result
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

    def linear_backward(self, *arrays, **more):
        self.device.sums = self.back.sums
        super().linear_backward(*arrays, **more)

    def sum_rows(self, dout):
        """As FusedBiases.sum_rows."""
        return ceil_div(len(dout), LONG) if self.device.summed is dout else super().sum_rows(dout)


FEATURE = Feature(
    "gelu products", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16", SummedProducts,
    device=OwnGelu, only="GPT2", sources=SOURCES,
    compiled=is_hopper, chapter="GELU products")
