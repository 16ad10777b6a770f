"""Attention's gradient with five products instead of seven: for heads of 128 channels, on Hopper in
bf16. attention_five.cu says how.

Three kernels replace the trainer's two: the first sums out * dout in each row, the second
multiplies, and the third scales and rounds dq, whose parts the second has added up in fp32. With
RoPE, they also replace rope_backward.
"""

import numpy as np

from dev.common import gpus
from dev.features import documents
from dev.features.feature import Feature, is_fast, kernels_of
from train_gpt2 import Row, carve, ceil_div

SOURCE = kernels_of(__file__)
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE)
HOPPER = 90  # its compute capability
HS, ROWS, TILE = 128, 128, 64  # channels of a head, keys of a block, queries of a tile
THREADS = 384
# Keys and values; two tiles of queries and of dout; two of dscores; and two parts of dq
SHARED = 2 * (2 * ROWS * HS + 4 * TILE * HS + 2 * ROWS * TILE) + 4 * 2 * TILE * HS


def five_table(B, T, NH, kept=0):
    """What the kernels need besides the trainer's arrays. kept: for how many blocks of keys sums of
    shares are kept.

        dq      the sums of its parts, as wgmma leaves them
        stats   lse and delta of a tile's queries
        turns   tickets drawn; blocks that added to a tile; shares of a block of keys, summed
        kept    these sums, of dk and dv
    """
    tiles = B * NH * -(-T // TILE)
    table = [Row("dq", (tiles, TILE * HS)), Row("stats", (tiles, 2, TILE)),
             Row("turns", (1 + 2 * tiles,), np.int32)]
    return table + ([Row("kept", (kept, 2 * ROWS * HS))] if kept else [])


def blocks_of_keys(B, T, NKV):
    """How many blocks of ROWS keys there are."""
    return B * NKV * ceil_div(T, ROWS)


def most_shared(device):
    """With more blocks of keys than this, none is shared."""
    return 2 * device.multiprocessors


def shares_for(device, B, T, NH, NKV):
    """How many blocks share the query heads of each block of keys, a divisor of these: the fewest
    that keep all multiprocessors busy to the end, the longest blocks first. Each share costs time,
    too. On an H100 with 12 heads of queries, 2 of keys and T=1024, us with delta and dq: B=4
    with 2, 3 and 6 shares 146, 130 and 168; B=8 with 1, 2 and 3 269, 219 and 236; B=16 with 1 and 2
    480 and 415."""
    group, blocks = NH // NKV, blocks_of_keys(B, T, NKV)
    if blocks > most_shared(device):
        return 1
    most = 3 if 2 * blocks > device.multiprocessors else group
    divisors = [n for n in range(1, most + 1) if group % n == 0]
    enough = device.multiprocessors * 7 // 5
    return next((n for n in divisors[1:] if n * blocks > enough), divisors[-1])


def launch_delta(device, views, lse, out, dout, B, T, NH):
    """Make stats from lse (B*NH,T), out and dout (B*T,C), and clear turns."""
    device.launch("attention_backward_five_delta", B * NH * -(-T // TILE), views.stats,
                  views.turns, lse, out, dout, T, NH)


def launch_five(device, views, dqkv, qkv, dout, rope, scale, B, T, NH, NKV):
    """dk and dv, and dq before it is scaled. rope (T,HS): RoPE's table, by which dk is rotated
    back; or None."""
    shares = shares_for(device, B, T, NH, NKV)
    device.launch("attention_backward_five", shares * blocks_of_keys(B, T, NKV), dqkv, views.dq,
                  views.turns, views.stats, qkv, dout, rope, getattr(views, "kept", None), scale, T,
                  NH, shares, threads=THREADS, shared=SHARED)


def launch_dq(device, views, dqkv, rope, scale, B, T, NH):
    """dq scaled, with rope rotated back, rounded and stored in dqkv."""
    device.launch("attention_backward_five_dq", ceil_div(T, ROWS) * B * NH, dqkv, views.dq, rope,
                  scale, T, NH, threads=256, shared=2 * (ROWS + TILE) * HS)


class FiveProducts:
    """A model whose attention's gradient takes five products, if the device and its heads allow."""

    @classmethod
    def five_table(cls, c, device, B, T):
        """The kernels' table for such batches. Smaller ones may be shared where this one is not."""
        most = min(blocks_of_keys(B, T, c.NKV), most_shared(device)) if c.NKV < c.NH else 0
        return five_table(B, T, c.NH, most)

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        if not (device.hopper and c.C // c.NH == HS):
            return tables
        return tables | {"five": cls.five_table(c, device, B, T)}

    def attention_backward(self, dqkv, dout, out, lse, qkv):
        """As GPT2.attention_backward. With RoPE, also what rope_backward would do next."""
        if "five" not in self.arenas:
            super().attention_backward(dqkv, dout, out, lse, qkv)
            return
        (B, T), c = self.BT, self.config
        scale = (c.C // c.NH) ** -0.5
        rope = getattr(self.acts, "rope", None)
        views = carve(self.arenas["five"], self.five_table(c, self.device, B, T))
        launch_delta(self.device, views, lse, out, dout, B, T, c.NH)
        launch_five(self.device, views, dqkv, qkv, dout, rope, scale, B, T, c.NH, c.NKV)
        launch_dq(self.device, views, dqkv, rope, scale, B, T, c.NH)

    def rope(self, kernel, qkv):
        """As Llama3.rope, but for what attention_backward has done."""
        if kernel != "rope_backward" or "five" not in self.arenas:
            super().rope(kernel, qkv)


FEATURE = Feature(
    "five products", lambda flags, ranks: is_fast(flags) and not documents.asked(flags, ranks),
    FiveProducts, sources=SOURCES,
    compiled=lambda flags, c: (gpus.capability() == HOPPER and flags.dtype in ("bf16", "fp8")
                               and c.C // c.NH == HS),
    chapter="attention in five products")
