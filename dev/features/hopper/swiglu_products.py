"""Llama's two products with SwiGLU by kernels of our own, swiglu_products.cu, on Hopper in bf16.

As cuBLASLt's epilogues know no SwiGLU, kernels of the trainer apply it between two products, and
read and write the MLP's hidden channels once more for that. Here the product that makes up and gate
also makes up * silu(gate), and the product that would make its gradient makes those of up and gate.

dev/tests/hopper.py has what their tests check with.
"""
from dev.features.feature import Feature, is_fast, is_hopper, kernels_of
from dev.features.hopper.gelu_products import (LONG, SHARED, SHORT, THREADS, blocks_for, fits,
                                               map_of_fours, maps)

SOURCE = kernels_of(__file__)
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)


def multiply_swiglu(device, fch, fch_swiglu, inp, w):
    """fch (N,2H) = inp (N,C) @ w.T, w (2H,C), and fch_swiglu (N,H) = up * silu(gate)."""
    blocks = blocks_for(device, fch_swiglu, 2 * SHORT, LONG // 2)
    device.launch("matmul_swiglu", blocks, fch, fch_swiglu, *maps(device, inp),
                  map_of_fours(device, w, LONG // 8), *fch_swiglu.shape, inp.shape[1],
                  threads=THREADS, shared=SHARED)


def multiply_dswiglu(device, dfch, dout, w, fch):
    """dfch (N,2H), the gradients of up and gate, from that of the MLP's output, dout (N,C), with w
    (C,H) and fch (N,2H). dfch may be fch."""
    N, H = len(dfch), w.shape[1]
    blocks = blocks_for(device, dfch[:, :H], 2 * SHORT, LONG)
    device.launch("matmul_dswiglu", blocks, *maps(device, dfch, dout, w, fch), N, H,
                  dout.shape[1], threads=THREADS, shared=SHARED)


class SwigluProducts:
    """A model whose products with SwiGLU that fit are multiplied by our kernels."""

    def hidden_forward(self, y, a):
        """As Llama3.hidden_forward."""
        if self.device.hopper and fits(a.ln2, y.fc.w, a.fch_swiglu, a.fch):
            multiply_swiglu(self.device, a.fch, a.fch_swiglu, a.ln2, y.fc.w)
        else:
            super().hidden_forward(y, a)

    def hidden_backward(self, y, a, dx):
        """As Llama3.hidden_backward."""
        if not (self.device.hopper and fits(dx, y.fcproj.w, a.fch_swiglu, a.fch)):
            return super().hidden_backward(y, a, dx)
        dfch = a.fch  # becomes its own gradient
        self.linear_backward(dfch, dx, a.fch_swiglu, y.fcproj)  # (N,C) -> (N,2H)
        return dfch

    def linear_backward(self, dinp, dout, inp, y, **more):
        """As GPT2.linear_backward; twice as wide as the layer's input, dinp is fch."""
        if dinp.shape == inp.shape:
            return super().linear_backward(dinp, dout, inp, y, **more)
        self.device.matmul(y.dw, dout.T, inp, accumulate=self.micro > 0)
        multiply_dswiglu(self.device, dinp, dout, y.w, dinp)


FEATURE = Feature(
    "swiglu products", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16",
    SwigluProducts, only="Llama3", sources=SOURCES,
    compiled=is_hopper, chapter="SwiGLU products")
