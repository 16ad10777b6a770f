"""The gradients of biases without a pass over memory of their own.

The bias of a linear layer gets the sum of the rows of the gradient of the layer's output. The
trainer reads that gradient once more for it. Here the kernel that writes it also sums it, while it
is in registers, and one launch finishes the sums of a norm and of one bias:

    attprojb, fcprojb    layernorm_backward writes the gradient of the stream, which theirs is
    qkvb                 attention's gradient
    fcb                  a kernel of its own, sum_rows, or the product of gelu_products.py

That saves 36 launches a step and 1% of its time. fused_biases.cu has the kernels; kernels.cu is
compiled with fused_biases.cuh, whose Output carries where the sums of columns go.
"""
import re
import zlib
from pathlib import Path

import numpy as np

from dev.common.cuda_source import without_comments
from dev.features.declare import Feature, is_fast
from dev.features.devices import address_of
from train_gpt2 import PARTIAL_ROWS, Row, ceil_div, layernorm_backward_launch

SOURCE = Path(__file__).resolve().with_suffix(".cu")
OUTPUT = SOURCE.with_suffix(".cuh")  # in place of kernels.cu's struct Output


def output_switches(output):
    """Compile kernels.cu with another struct Output. Compilers' caches know flags, but not included
    files: so the file's checksum is a flag."""
    return [f"-I{output.parent}", f"-DOUTPUT=<{output.name}>",
            f"-DOUTPUT_VERSION={zlib.crc32(output.read_bytes())}"]


def kernels_with_output(sources):
    """The names of kernels whose first argument is an Output."""
    text = "".join(path.read_text("utf-8") for path in sources)
    return {*re.findall(r"(\w+)\(\s*Output\b", without_comments(text))}


class SummedOutputs:
    """A mixin in front of a device: kernels get an Output with a place for sums of columns."""
    column_sums = None  # where the next kernels leave them; None: nowhere

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, beside)
        self.outputs = kernels_with_output([*c.SOURCES, *beside])

    def switches(self):
        return [*super().switches(), *output_switches(OUTPUT)]

    def launch(self, name, items, *args, **more):
        """As Cuda.launch."""
        if name in self.outputs:
            sums = 0 if self.column_sums is None else address_of(self.column_sums)
            struct = np.array([address_of(args[0]), sums], np.uint64)
            args = struct.view("V16"), *args[1:]
        super().launch(name, items, *args, **more)


def with_summed_outputs(device):
    """A subclass of a device that has such outputs."""
    return type(device.__name__, (SummedOutputs, device), {})


class FusedBiases:
    """GPT-2 on such a device. In the backward pass, `summed` is a gradient whose sums have begun:
    (dbias, rows of back.sums, OC)."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        sums = Row("sums", (B * ceil_div(T, 64) + 1, 3 * c.C))  # of 64+ rows of dqkv, or of dfch
        partials = Row("partials", (3, PARTIAL_ROWS, c.C))
        return tables | {"backward": [row for row in tables["backward"] if row.name != "partials"]
                         + [partials, sums]}

    def layer_backward(self, l):
        """As GPT2.layer_backward."""
        p, g, a = self.layers[l]
        d, matmul, adds = self.back, self.device.matmul, self.micro > 0
        dx = d.dresidual
        dln2 = datty = dln1 = d.dinp
        matmul(g.fcprojw, dx.T, a.fch_gelu, accumulate=adds)  # (C,N) @ (N,4C) -> (C,4C)
        dfch = a.fch_gelu
        matmul(dfch, dx, p.fcprojw, dgelu_at=a.fch)  # (N,C) @ (C,4C) -> (N,4C)
        fcb = self.bias_backward(g.fcb, dfch)  # (N,4C) -> (4C)
        matmul(g.fcw, dfch.T, a.ln2, accumulate=adds)  # (4C,N) @ (N,C) -> (4C,C)
        matmul(dln2, dfch, p.fcw)  # (N,4C) @ (4C,C) -> (N,C)
        self.norm_backward(dx, g.ln2w, g.ln2b, dln2, a.ln2_inp, p.ln2w, a.ln2_mean, a.ln2_rstd,
                           g.attprojb, fcb)

        matmul(g.attprojw, dx.T, a.atty, accumulate=adds)  # (C,N) @ (N,C) -> (C,C)
        matmul(datty, dx, p.attprojw)  # (N,C) @ (C,C) -> (N,C)
        qkvb = self.attention_backward_summed(g.qkvb, datty, a.atty, a.lse, a.qkv)
        matmul(g.qkvw, d.dqkv.T, a.ln1, accumulate=adds)  # (3C,N) @ (N,C) -> (3C,C)
        matmul(dln1, d.dqkv, p.qkvw)  # (N,3C) @ (3C,C) -> (N,C)
        self.norm_backward(dx, g.ln1w, g.ln1b, dln1, a.ln1_inp, p.ln1w, a.ln1_mean, a.ln1_rstd,
                           self.bias_before(l), qkvb)

    def bias_before(self, l):
        """The gradient of the bias of the MLP whose output layer l's first norm has added."""
        return self.layers[l - 1][1].fcprojb if l else None

    def last_norm_backward(self):
        """As GPT2.last_norm_backward."""
        p, g, a, d = self.params, self.grads, self.acts, self.back
        self.device.zero(d.dresidual)
        self.norm_backward(d.dresidual, g.lnfw, g.lnfb, d.dinp, a.lnf_inp, p.lnfw, a.lnf_mean,
                           a.lnf_rstd, g.fcprojb[-1])

    def norm_backward(self, dx, dweight, dbias, dout, inp, weight, mean, rstd, dbias_before=None,
                      summed=(None, 0, 0)):
        """As GPT2.norm_backward. Also makes dbias_before, the sum of the rows of the new dx, unless
        None, and finishes the gradient that `summed` began."""
        C, N, device, d = self.config.C, len(inp), self.device, self.back
        blocks, threads, shared = layernorm_backward_launch(device, N)
        other, rows, OC = summed
        device.launch("layernorm_backward", blocks, dx, d.partials, dout, inp, weight, mean, rstd,
                      N, threads=threads, shared=shared)
        device.launch("add_all_partials", (max(C, OC), 4), dweight, dbias, dbias_before, other,
                      d.partials, d.sums, blocks, C, rows, OC, self.micro > 0)

    def bias_backward(self, dbias, dout):
        """Begin dbias (OC), the sum of the rows of dout (N,OC): sum shares of the rows."""
        N, OC = dout.shape
        shares = max(1, min(64, N // 256))
        self.device.launch("sum_rows", (OC, shares), self.back.sums, dout, N, OC)
        return dbias, shares, OC

    def attention_backward_summed(self, dbias, dout, out, lse, qkv):
        """attention_backward, which begins dbias (3C) too: a block's rows are summed together."""
        (B, T), device = self.BT, self.device
        device.column_sums = self.back.sums
        self.attention_backward(self.back.dqkv, dout, out, lse, qkv)
        device.column_sums = None
        return dbias, B * ceil_div(T, device.attention_sizes.rows), dbias.size


# FP8 brings an Output of its own, with sums of columns too
FEATURE = Feature(
    "fused biases", lambda flags, ranks: (is_fast(flags) or flags.dtype == "fp8")
    and not flags.dropout, FusedBiases,
    device=lambda flags: None if flags.dtype == "fp8" else SummedOutputs, only="GPT2",
    sources=(SOURCE,), chapter="fused biases")
