"""Attention's gradient with five products instead of seven: for heads of 128 channels, on Hopper in
bf16. attention_five.cu says how.

Three kernels replace the trainer's two: the first sums out * dout in each row, the second
multiplies, and the third scales and rounds dq, whose parts the second has added up in fp32.
"""
from pathlib import Path

import numpy as np

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from train_gpt2 import Row, carve, ceil_div

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE)
HOPPER = 90  # its compute capability
HS, ROWS, TILE = 128, 128, 64  # channels of a head, keys of a block, queries of a tile
THREADS = 384
# Keys and values; two tiles of queries and of dout; two of dscores; and two parts of dq
SHARED = 2 * (2 * ROWS * HS + 4 * TILE * HS + 2 * ROWS * TILE) + 4 * 2 * TILE * HS


def five_table(B, T, NH):
    """What the kernels need besides the trainer's arrays."""
    tiles = B * NH * -(-T // TILE)
    return [Row("dq", (tiles, TILE * HS)),           # the sums of its parts, as wgmma leaves them
            Row("stats", (tiles, 2, TILE)),          # lse and delta of a tile's queries
            Row("turns", (1 + tiles,), np.int32)]    # tickets drawn; blocks that added to a tile


def launch_delta(device, views, lse, out, dout, B, T, NH):
    """Make stats from lse (B*NH,T), out and dout (B*T,C), and clear turns."""
    device.launch("attention_backward_five_delta", B * NH * -(-T // TILE), views.stats,
                  views.turns, lse, out, dout, T, NH)


def launch_five(device, views, dqkv, qkv, dout, scale, B, T, NH, NKV):
    """dk and dv, and dq before it is scaled."""
    device.launch("attention_backward_five", ceil_div(T, ROWS) * B * NKV, dqkv, views.dq,
                  views.turns, views.stats, qkv, dout, scale, T, NH, threads=THREADS,
                  shared=SHARED)


def launch_dq(device, views, dqkv, scale, B, T, NH):
    """dq scaled, rounded and stored in dqkv."""
    device.launch("attention_backward_five_dq", ceil_div(T, ROWS) * B * NH, dqkv, views.dq, scale,
                  T, NH, threads=256, shared=2 * (ROWS + TILE) * HS)


class FiveProducts:
    """A model whose attention's gradient takes five products, if the device and its heads allow."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        if not (device.hopper and c.C // c.NH == HS):
            return tables
        return tables | {"five": five_table(B, T, c.NH)}

    def attention_backward(self, dqkv, dout, out, lse, qkv):
        """As GPT2.attention_backward."""
        if "five" not in self.arenas:
            super().attention_backward(dqkv, dout, out, lse, qkv)
            return
        (B, T), c = self.BT, self.config
        views = carve(self.arenas["five"], five_table(B, T, c.NH))
        launch_delta(self.device, views, lse, out, dout, B, T, c.NH)
        launch_five(self.device, views, dqkv, qkv, dout, self.scale, B, T, c.NH, c.NKV)
        launch_dq(self.device, views, dqkv, self.scale, B, T, c.NH)


FEATURE = Feature(
    "five products", lambda flags, ranks: is_fast(flags), FiveProducts, sources=SOURCES,
    compiled=lambda flags, c: (gpus.capability() == HOPPER and flags.dtype in ("bf16", "fp8")
                               and c.C // c.NH == HS),
    chapter="attention in five products")
