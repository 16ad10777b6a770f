"""--fp8 all: a layer's weight gradients, too, are products of 8-bit numbers.

    dw = dout.T @ inp        twins of the transposed dout and of the transposed inp

So each input of a linear layer has two twins: the forward pass keeps the transposed one for the
backward pass, where it stands for the input itself. Of ln1, ln2, GELU's output, and the gradients
of qkv and fch, only twins are stored, after the first step. That pays for the transposed ones.
Bytes that a layer moves for each number of an (N,C) array, besides products, attention and norms:

                        --fp8 head                            --fp8 all
    ln1, ln2            2*2  as bf16                          2*1  transposed by the norm's kernel
    atty                                                      2    transposed from the twin
    GELU                4*5  bf16 to bf16 and twin            4*4  bf16 to both twins
    its gradient        4*7  two bf16 to bf16 and twin        4*6  two bf16 to both twins
    bias of fc          4*2                                        in the line above
    dqkv                3*2  as bf16                          3*2  transposed from the twin
    dresidual, twice                                          2*2  transposed from the twin
    all                 66                                    54

On Hopper, fp8_gelu.py makes the twins of GELU and of its gradient in the products themselves.

The products sum over all tokens. Over many of them the sums are promoted to fp32 on their way,
since what Hopper's 14 bits lose grows with the number of terms.
"""
import numpy as np

from dev.features.base import SharedLayers
from dev.features.feature import Feature
from dev.features.fp8.fp8 import GRADIENT, INPUT, READERS, TILE, padded, transposed
from train_gpt2 import Row, carve, ceil_div

TWINS_ONLY = {(INPUT, "qkv"), (INPUT, "fc"), (INPUT, "fcproj"), (GRADIENT, "fc"), (GRADIENT, "qkv")}
LONG_SUM = 16384  # sums over this many tokens or more are promoted


class Fp8All(SharedLayers):
    """GPT-2 with such layers. It stands behind Fp8Model, which says which tensor is written, and in
    front of Fp8Products and FusedBiases. In the first step's passes in bf16, layers share their
    inputs, so weights get wrong gradients, which nobody reads; those of activations are right."""
    SHARED = "ln1", "ln2", "fch_gelu"  # bf16, for the first step; fch_gelu has dgelu, too

    @classmethod
    def tables(cls, c, device, B, T):
        tables, N, C = super().tables(c, device, B, T), B * T, c.C
        stride, each = padded(N), dict(dtype=np.uint8, layers=c.L)
        return tables | {
            "fp8 kept": [  # transposed twins of linear layers' inputs, with tokens along the rows
                Row("qkv", (C, stride), **each), Row("attproj", (C, stride), **each),
                Row("fc", (C, stride), **each), Row("fcproj", (4 * C, stride), **each),
                Row("gradient", (4 * C, stride), np.uint8)]}  # of the output in question

    def set_batch(self, batch):
        before = self.BT
        super().set_batch(batch)
        if self.BT != before:
            table = self.tables(self.config, self.device, *self.BT)["fp8 kept"]
            self.kept = carve(self.arenas["fp8 kept"], table)
            self.device.twins_only = TWINS_ONLY

    def norm_forward(self, y, branch):
        """As GPT2.norm_forward. Of out only the twin is stored, and the transposed twin kept."""
        device, x, (N, C) = self.device, self.acts.residual, y.out.shape
        if y.name == "lnf" or not device.calibrated:
            return super().norm_forward(y, branch)
        kept = getattr(self.kept, READERS[y.name])[y.l]
        device.launch("residual_layernorm_to_fp8", N, device.twin[: N * C], kept,
                      device.scale(*device.reader), y.mean, y.rstd, y.inp, x, branch, y.w, y.b, N,
                      kept.shape[1])
        device.stored(y.out)

    def linear_forward(self, out, inp, y, gelu=None):
        """As GPT2.linear_forward. Of GELU's output both twins are made, and not the numbers."""
        device, own = self.device, self.device.calibrated
        if own and y.name == "attproj":  # other inputs have their transposed twins
            transposed(device, self.kept.attproj[y.l], device.twin_of(inp, INPUT, y.name, y.l))
        super().linear_forward(out, inp, y, gelu=None if own else gelu)
        if own and gelu is not None:
            device.launch_both("gelu_to_fp8", gelu, self.kept.fcproj[y.l], (out,))

    def linear_backward(self, dinp, dout, inp, y, dgelu_at=None):
        """As GPT2.linear_backward. The gradient of GELU's output becomes the twins of that of its
        input, and sums of its columns."""
        own = self.device.calibrated
        super().linear_backward(dinp, dout, inp, y, dgelu_at=None if own else dgelu_at)
        if own and dgelu_at is not None:
            self.device.launch_both("gelu_backward_to_fp8", dinp, self.kept.gradient,
                                    (self.back.sums, dinp, dgelu_at))

    def sum_rows(self, dout):
        """As FusedBiases.sum_rows. The kernel that made dout's twins has summed its columns."""
        return ceil_div(len(dout), TILE) if self.device.calibrated else super().sum_rows(dout)

    def weight_backward(self, dout, inp, y):
        """As Fp8Products.weight_backward, of transposed twins: the kept input, and kept.gradient,
        where that of fc is already."""
        device = self.device
        if not device.calibrated:
            return super().weight_backward(dout, inp, y)
        if y.name != "fc":
            transposed(device, self.kept.gradient, device.twin_of(dout, GRADIENT, y.name, y.l))
        multiply_transposed(self, y, self.kept.gradient[: len(y.dw)],
                            getattr(self.kept, y.name)[y.l])


def multiply_transposed(model, y, dout, inp):
    """dw = dout.T @ inp of a linear layer, or += in later micro-batches, of transposed twins."""
    scales = [model.device.scale(kind, y.name, y.l) for kind in (GRADIENT, INPUT)]
    model.device.matmul(y.dw, dout, inp.T, accumulate=model.micro > 0, scales=scales,
                        promote=dout.shape[1] >= LONG_SUM)


FEATURE = Feature(
    "fp8 all", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 == "all", Fp8All,
    only="GPT2",
    excludes={other: "--fp8 all: is for GPT-2 without --recompute and --dropout: expected --fp8 "
                     "head"
              for other in ("recompute 1", "recompute 2", "dropout")})
