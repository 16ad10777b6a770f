"""Llama's two products with SwiGLU by kernels of our own, swiglu_products.cu, on Hopper in bf16.

As cuBLASLt's epilogues know no SwiGLU, kernels of the trainer apply it between two products, and
read and write the MLP's hidden channels once more for that. Here the product that makes up and gate
also makes up * silu(gate), and the product that would make its gradient makes those of up and gate.

dev/bench/time_kernels.py checks the kernels and times them beside cuBLASLt and those of the
trainer.
"""
from pathlib import Path

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from dev.features.hopper.gelu_products import THREADS, fits, maps
from train_gpt2 import ceil_div

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
HEIGHT = WIDTH = 128  # of a tile of the result
STAGES = 5  # of 64 channels


def plan(device, N, H, width):
    """(blocks, bytes of shared memory) for tiles with this many columns of up. There is a block a
    multiprocessor, unless there are fewer tiles; their number is even. In shared memory are stages
    of two operands, and two results."""
    tiles = ceil_div(N, HEIGHT) * 2 * ceil_div(H, 2 * width)
    return (min(device.multiprocessors // 2 * 2, tiles),
            2 * (STAGES * (HEIGHT + WIDTH) * 64 + 2 * HEIGHT * WIDTH))


def multiply_swiglu(device, fch, fch_swiglu, inp, w):
    """fch (N,2H) = inp (N,C) @ w.T, w (2H,C), and fch_swiglu (N,H) = up * silu(gate)."""
    N, H = fch_swiglu.shape
    blocks, shared = plan(device, N, H, WIDTH // 2)
    device.launch("matmul_swiglu", blocks, *maps(device, fch, fch_swiglu, inp, w), N, H,
                  inp.shape[1], threads=THREADS, shared=shared)


def multiply_dswiglu(device, dfch, dout, w, fch):
    """dfch (N,2H), the gradients of up and gate, from that of the MLP's output, dout (N,C), with w
    (C,H) and fch (N,2H). dfch may be fch."""
    N, H = len(dfch), w.shape[1]
    blocks, shared = plan(device, N, H, WIDTH)
    device.launch("matmul_dswiglu", blocks, *maps(device, dfch, dout, w, fch), N, H,
                  dout.shape[1], threads=THREADS, shared=shared)


class SwigluProducts:
    """A model whose products with SwiGLU that fit are multiplied by our kernels."""

    def hidden_forward(self, p, a):
        """As Llama3.hidden_forward."""
        if self.device.hopper and fits(a.ln2, p.fcw, a.fch_swiglu, a.fch):
            multiply_swiglu(self.device, a.fch, a.fch_swiglu, a.ln2, p.fcw)
        else:
            super().hidden_forward(p, a)

    def hidden_backward(self, p, g, a, dx):
        """As Llama3.hidden_backward."""
        if not (self.device.hopper and fits(dx, p.fcprojw, a.fch_swiglu, a.fch)):
            return super().hidden_backward(p, g, a, dx)
        dfch = a.fch  # becomes its own gradient
        self.linear_backward(dfch, g.fcprojw, dx, a.fch_swiglu, p.fcprojw)  # (N,C) -> (N,2H)
        return dfch

    def linear_backward(self, dinp, dweight, dout, inp, weight):
        """As Llama3.linear_backward; twice as wide as the layer's input, dinp is fch."""
        if dinp.shape == inp.shape:
            return super().linear_backward(dinp, dweight, dout, inp, weight)
        self.device.matmul(dweight, dout.T, inp, accumulate=self.micro > 0)
        multiply_dswiglu(self.device, dinp, dout, weight, dinp)


FEATURE = Feature(
    "swiglu products", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16",
    SwigluProducts, only="Llama3", sources=SOURCES,
    compiled=lambda flags, c: gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8),
    chapter="SwiGLU products")
