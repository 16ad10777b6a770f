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
from types import SimpleNamespace

import numpy as np

from dev.features.declare import Feature
from dev.features.devices import address_of
from dev.features.fp8.fp8 import GRADIENT, INPUT, TILE, padded, transposed
from train_gpt2 import Row, carve

SHARED = "ln1", "ln2", "fch_gelu"  # bf16 arrays for a run's first step; fch_gelu has dgelu, too
LONG_SUM = 16384  # sums over this many tokens or more are promoted


class Fp8All:
    """GPT-2 with such layers. It stands behind Fp8Model, which has begun the layer, and in front
    of FusedBiases."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables, N, C = super().tables(c, device, B, T), B * T, c.C
        stride, each = padded(N), dict(dtype=np.uint8, layers=c.L)
        return tables | {
            "activations": [row._replace(layers=1) if row.name in SHARED else row
                            for row in tables["activations"]],
            "fp8 kept": [  # transposed twins, with tokens along the rows
                Row("ln1", (C, stride), **each), Row("atty", (C, stride), **each),
                Row("ln2", (C, stride), **each), Row("fch_gelu", (4 * C, stride), **each),
                Row("gradient", (4 * C, stride), np.uint8)]}  # of the output in question

    def set_batch(self, batch):
        before = self.BT
        super().set_batch(batch)
        if self.BT != before:
            table = self.tables(self.config, self.device, *self.BT)["fp8 kept"]
            self.kept = carve(self.arenas["fp8 kept"], table)
            a = self.layers[0][2]
            self.device.twins_only = {address_of(x)
                                      for x in (a.ln1, a.ln2, a.fch_gelu, self.back.dqkv)}

    def layer_forward(self, l):
        """As GPT2.layer_forward; each product's input is transposed and kept."""
        device = self.device
        if not device.calibrated:
            return super().layer_forward(l)
        p, _, a = self.layers[l]
        kept, branch = self.kept_of(l), self.acts.branch
        added = branch if l else None
        self.norm_to_twins(a.ln1, kept.ln1, p.qkvw, a.ln1_mean, a.ln1_rstd, a.ln1_inp, added,
                           p.ln1w, p.ln1b)  # (N,C)
        device.matmul(a.qkv, a.ln1, p.qkvw.T, bias=p.qkvb)  # (N,C) @ (C,3C) -> (N,3C)
        self.attention_forward(a.atty, a.lse, a.qkv)  # (N,3C) -> (N,C)
        twin = device.twin_of(a.atty, device.tensor(INPUT, p.attprojw))
        transposed(device, kept.atty, twin)
        device.matmul(branch, a.atty, p.attprojw.T, bias=p.attprojb)  # (N,C) @ (C,C) -> (N,C)

        self.norm_to_twins(a.ln2, kept.ln2, p.fcw, a.ln2_mean, a.ln2_rstd, a.ln2_inp, branch,
                           p.ln2w, p.ln2b)  # (N,C)
        self.mlp_forward(a, p, kept)

    def norm_to_twins(self, out, kept, weight, mean, rstd, copy, branch, *parameters):
        """As GPT2.norm_forward. Of out, which a product with this weight reads, only the twin is
        stored, and kept, the transposed twin."""
        device, (N, C), x = self.device, out.shape, self.acts.residual
        tensor = device.tensor(INPUT, weight)
        device.launch("residual_layernorm_to_fp8", N, device.twin[: N * C], kept,
                      device.scale(*tensor), mean, rstd, copy, x, branch, *parameters, N,
                      kept.shape[1])
        device.ready = address_of(out), tensor

    def mlp_forward(self, a, p, kept):
        """The branch (N,C) of the MLP, given ln2."""
        device = self.device
        device.matmul(a.fch, a.ln2, p.fcw.T, bias=p.fcb)  # (N,C) @ (C,4C) -> (N,4C)
        gelu = device.tensor(INPUT, p.fcprojw)
        device.launch_both("gelu_to_fp8", a.fch_gelu, gelu, kept.fch_gelu, (a.fch,))
        device.matmul(self.acts.branch, a.fch_gelu, p.fcprojw.T, bias=p.fcprojb)  # -> (N,C)

    def layer_backward(self, l):
        """As GPT2.layer_backward. In the first step's passes in bf16, layers share their inputs, so
        weights get wrong gradients, which nobody reads; those of activations are right."""
        device = self.device
        if not device.calibrated:
            return super().layer_backward(l)
        p, g, a = self.layers[l]
        kept, d, matmul = self.kept_of(l), self.back, device.matmul
        dx, dinp = d.dresidual, d.dinp
        fcb = self.mlp_backward(p, g, a, kept)
        self.norm_backward(dx, g.ln2w, g.ln2b, dinp, a.ln2_inp, p.ln2w, a.ln2_mean, a.ln2_rstd,
                           g.attprojb, fcb)

        self.transpose_gradient(dx, p.attprojw)
        self.weight_gradient(g.attprojw, p.attprojw, kept.atty)  # (C,N) @ (N,C) -> (C,C)
        matmul(dinp, dx, p.attprojw)  # datty: (N,C) @ (C,C) -> (N,C)
        qkvb = self.attention_backward_summed(g.qkvb, dinp, a.atty, a.lse, a.qkv)  # -> (N,3C)
        self.transpose_gradient(d.dqkv, p.qkvw)
        self.weight_gradient(g.qkvw, p.qkvw, kept.ln1)  # (3C,N) @ (N,C) -> (3C,C)
        matmul(dinp, d.dqkv, p.qkvw)  # dln1: (N,3C) @ (3C,C) -> (N,C)
        self.norm_backward(dx, g.ln1w, g.ln1b, dinp, a.ln1_inp, p.ln1w, a.ln1_mean, a.ln1_rstd,
                           self.bias_before(l), qkvb)

    def mlp_backward(self, p, g, a, kept):
        """dln2 in back.dinp, and the gradients of the MLP's parameters, given that of the stream.
        Returns what finishes the gradient of fcb: see FusedBiases.norm_backward."""
        device, d, matmul = self.device, self.back, self.device.matmul
        dx, dgelu = d.dresidual, a.fch_gelu
        self.transpose_gradient(dx, p.fcprojw)
        self.weight_gradient(g.fcprojw, p.fcprojw, kept.fch_gelu)  # (C,N) @ (N,4C) -> (C,4C)
        matmul(dgelu, dx, p.fcprojw)  # (N,C) @ (C,4C) -> (N,4C)
        dfch = dgelu
        device.launch_both("gelu_backward_to_fp8", dfch, device.tensor(GRADIENT, p.fcw),
                           self.kept.gradient, (d.sums, dgelu, a.fch))
        self.weight_gradient(g.fcw, p.fcw, kept.ln2)  # (4C,N) @ (N,C) -> (4C,C)
        matmul(d.dinp, dfch, p.fcw)  # dln2: (N,4C) @ (4C,C) -> (N,C)
        return g.fcb, -(-len(dfch) // TILE), g.fcb.size  # the blocks' sums, in d.sums

    def kept_of(self, l):
        """The transposed twins of layer l."""
        return SimpleNamespace(**{name: getattr(self.kept, name)[l]
                                  for name in ("ln1", "atty", "ln2", "fch_gelu")})

    def transpose_gradient(self, dout, weight):
        """kept.gradient = the transposed twin of dout, the gradient of what a product with this
        weight has computed."""
        twin = self.device.twin_of(dout, self.device.tensor(GRADIENT, weight))
        transposed(self.device, self.kept.gradient, twin)

    def weight_gradient(self, dweight, weight, inp):
        """dweight = dout.T @ inp, or += in later micro-batches, of transposed twins: kept.gradient
        and inp."""
        device = self.device
        dout = self.kept.gradient[: len(dweight)]
        scales = [device.scale(*device.tensor(kind, weight)) for kind in (GRADIENT, INPUT)]
        device.matmul(dweight, dout, inp.T, accumulate=self.micro > 0, scales=scales,
                      promote=dout.shape[1] >= LONG_SUM)


FEATURE = Feature(
    "fp8 all", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 == "all", Fp8All,
    only="GPT2",
    excludes={other: "--fp8 all: is for GPT-2 without --recompute and --dropout: expected --fp8 "
                     "head"
              for other in ("recompute 1", "recompute 2", "dropout")})
