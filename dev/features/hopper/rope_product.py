"""Llama's product for queries, keys and values by a kernel of our own, rope_product.cu, on Hopper
in bf16.

It rotates queries and keys while it has them in registers, so rope_forward need not read and write
them once more.
"""
from pathlib import Path

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from dev.features.hopper import swiglu_products
from dev.features.hopper.gelu_products import (LONG, SHARED, SHORT, THREADS, blocks_for, fits,
                                               map_of_fours, maps)

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (*swiglu_products.SOURCES, SOURCE)


def multiply_rope(device, out, inp, w, table, T, rotated):
    """out (N,OC) = inp (N,C) @ w.T, w (OC,C), with its first `rotated` columns turned by RoPE's
    table (T,HS): row r as token r % T."""
    device.launch("matmul_rope", blocks_for(device, out, 2 * SHORT, LONG), out,
                  *maps(device, inp), map_of_fours(device, w, LONG // 8), table, *out.shape,
                  inp.shape[1], T, rotated, threads=THREADS, shared=SHARED)


class RopeProduct:
    """A model whose queries and keys are rotated by the product that makes them, if it fits."""

    def qkv_forward(self, p, a):
        """As Llama3.qkv_forward."""
        if not (self.device.hopper and fits(a.ln1, p.qkvw, a.qkv)):
            return super().qkv_forward(p, a)
        c, (_, T) = self.config, self.BT
        rotated = (c.NH + c.NKV) * c.C // c.NH
        multiply_rope(self.device, a.qkv, a.ln1, p.qkvw, self.acts.rope, T, rotated)


FEATURE = Feature(
    "rope product", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16", RopeProduct,
    only="Llama3", sources=SOURCES,
    compiled=lambda flags, c: gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8),
    chapter="a product with RoPE")
