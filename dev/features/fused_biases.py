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

import numpy as np

from dev.common.cuda_source import without_comments
from dev.features.devices import address_of
from dev.features.feature import Feature, header_switches, is_fast, kernels_of
from train_gpt2 import PARTIAL_ROWS, Row, ceil_div, layernorm_backward_launch

SOURCE = kernels_of(__file__)
OUTPUT = SOURCE.with_suffix(".cuh")  # in place of kernels.cu's struct Output


def output_switches(output, *included):
    """Compile kernels.cu with another struct Output, whose file includes others."""
    return header_switches("OUTPUT", output, *included)


def kernels_with_output(sources):
    """The names of kernels whose first argument is an Output."""
    text = "".join(path.read_text("utf-8") for path in sources)
    return {*re.findall(r"(\w+)\(\s*Output\b", without_comments(text))}


class SummedOutputs:
    """A mixin in front of a device: kernels get an Output with a place for sums of columns."""
    OUTPUT = OUTPUT,  # the file with the struct, and those that it includes
    column_sums = None  # where the next kernels leave them; None: nowhere

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, beside)
        self.outputs = kernels_with_output([*c.SOURCES, *beside])

    def switches(self):
        return [*super().switches(), *output_switches(*self.OUTPUT)]

    def launch(self, name, items, *args, **more):
        """As Cuda.launch."""
        if name in self.outputs:
            struct = np.array(self.output(args[0]), np.uint64)
            args = struct.view(f"V{struct.nbytes}"), *args[1:]
        super().launch(name, items, *args, **more)

    def output(self, array):
        """The fields of an array's struct Output, 8 bytes each."""
        return [address_of(array), 0 if self.column_sums is None else address_of(self.column_sums)]


def with_summed_outputs(device):
    """A subclass of a device that has such outputs."""
    return type(device.__name__, (SummedOutputs, device), {})


class FusedBiases:
    """GPT-2 on such a device. In the backward pass, `begun` is a bias's gradient whose sums have
    begun: (db, rows of back.sums, OC). The next norm finishes it."""
    begun = None, 0, 0

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        sums = Row("sums", (B * ceil_div(T, 64) + 1, 3 * c.C))  # of 64+ rows of dqkv, or of dfch
        partials = Row("partials", (3, PARTIAL_ROWS, c.C))
        return tables | {"backward": [row for row in tables["backward"] if row.name != "partials"]
                         + [partials, sums]}

    def bias_backward(self, dout, y):
        """As GPT2.bias_backward, of fc and qkv alone: the gradient of the stream has been summed
        for the other two by the norm that wrote it."""
        if y.name == "fc":
            self.begun = y.db, self.sum_rows(dout), y.db.size
        if y.name == "qkv":  # attention_backward has summed dout
            B, T = self.BT
            self.begun = y.db, B * ceil_div(T, self.device.attention_sizes.rows), y.db.size

    def sum_rows(self, dout):
        """Sum shares of the rows of dout (N,OC) in back.sums. Returns how many."""
        N, OC = dout.shape
        shares = max(1, min(64, N // 256))
        self.device.launch("sum_rows", (OC, shares), self.back.sums, dout, N, OC)
        return shares

    def attention_backward(self, *arrays):
        """As GPT2.attention_backward. The rows of dqkv that a block writes are summed, too."""
        self.device.column_sums = self.back.sums
        super().attention_backward(*arrays)
        self.device.column_sums = None

    def norm_backward(self, dx, dout, y):
        """As GPT2.norm_backward. Also sums the rows of the new dx for the linear layer that made
        the branch before the norm, and finishes the gradient that has begun."""
        N, C = y.inp.shape
        device, d = self.device, self.back
        blocks, threads, shared = layernorm_backward_launch(device, N)
        db, rows, OC = self.begun
        self.begun = None, 0, 0
        device.launch("layernorm_backward", blocks, dx, d.partials, dout, y.inp, y.w, y.mean,
                      y.rstd, N, threads=threads, shared=shared)
        device.launch("add_all_partials", (max(C, OC), 4), y.dw, y.db, self.bias_before(y), db,
                      d.partials, d.sums, blocks, C, rows, OC, self.micro > 0)

    def bias_before(self, y):
        """The gradient of the bias of the linear layer whose output this norm has added to x."""
        if y.name == "ln2":
            return self.layers[y.l][0].attproj.db
        return self.layers[y.l - 1][0].fcproj.db if y.l else None


# FP8 brings an Output of its own, with sums of columns too, which does not drop numbers
FEATURE = Feature(
    "fused biases", lambda flags, ranks: not flags.dropout if flags.dtype == "fp8"
    else is_fast(flags), FusedBiases,
    device=lambda flags: None if flags.dtype == "fp8" else SummedOutputs, only="GPT2",
    sources=(SOURCE,), chapter="fused biases")
