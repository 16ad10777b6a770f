"""Attention's gradient with five products instead of seven, for heads of 64 channels on Hopper in
bf16. attention_five64.cu says how. One kernel sums out * dout in each row; the other does the
rest."""
import numpy as np

from dev.common import gpus
from dev.features.feature import Feature, is_fast, kernels_of
from dev.features.hopper.attention_five import HOPPER
from train_gpt2 import Row, carve, ceil_div

SOURCE = kernels_of(__file__)
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
KERNEL = "attention_backward_five64"
HS, ROWS, THREADS = 64, 128, 384  # channels of a head; keys of a block, queries of a tile; threads
# Keys and values of two blocks; two tiles of queries and of dout; two of dscores; a part of dq
SHARED = 2 * (4 * ROWS * HS + 4 * ROWS * HS + 2 * ROWS * ROWS) + 4 * ROWS * HS


def five_table(B, T, NH):
    """What the kernels need besides the trainer's arrays.

        dq      the sums of its parts, as wgmma leaves them
        stats   lse and delta of a tile's queries
        turns   tickets drawn; blocks of keys that added to a half of a tile
    """
    tiles = B * NH * ceil_div(T, ROWS)
    return [Row("dq", (tiles, ROWS * HS)), Row("stats", (tiles, 2, ROWS)),
            Row("turns", (1 + 2 * tiles,), np.int32)]


def blocks_of_keys(B, T, NKV):
    return B * NKV * ceil_div(T, ROWS)


def launch_delta(device, views, lse, out, dout, B, T, NH):
    """Make stats from lse (B*NH,T), out and dout (B*T,C), and clear turns."""
    device.launch(f"{KERNEL}_delta", B * NH * ceil_div(T, ROWS), views.stats, views.turns, lse, out,
                  dout, T, NH)


def launch_five(device, views, dqkv, qkv, dout, scale, B, T, NH, NKV):
    """dqkv (B*T,QKV) from qkv and dout (B*T,C)."""
    device.launch(KERNEL, min(blocks_of_keys(B, T, NKV), device.multiprocessors), dqkv, views.dq,
                  views.turns, views.stats, qkv, dout, scale, T, NH, B * NKV, threads=THREADS,
                  shared=SHARED)
