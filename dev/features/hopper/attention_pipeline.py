"""Attention's forward pass for heads of 64 channels, on Hopper in bf16: four warpgroups share the
keys and values that a fifth one loads. attention_pipeline.cu says how."""
from pathlib import Path

from dev.common import gpus
from dev.features import documents
from dev.features.feature import Feature, is_fast
from dev.features.hopper.attention_five import HOPPER
from train_gpt2 import ceil_div

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE)
KERNEL = "attention_forward_pipeline"
HS, ROWS, THREADS = 64, 256, 640  # channels of a head, queries of a turn, threads of a block
STAGES = 6  # tiles of 64 keys and values
SHARED = 2 * (2 * ROWS + 2 * STAGES * 64) * HS  # queries of two turns; keys and values


def pairs_of_turns(B, T, NH):
    return B * NH * ceil_div(ceil_div(T, ROWS), 2)


def is_faster(device, B, T, NH):
    """Whether rows are long enough, and all blocks have about as many turns. On an H200 with 12
    heads and T=1024 that is so for B=16 and 32, and not for 4 and 8."""
    pairs, blocks = pairs_of_turns(B, T, NH), device.multiprocessors
    return T >= 2 * ROWS and 4 * ceil_div(pairs, blocks) * blocks <= 5 * pairs


def launch_forward(device, out, lse, qkv, scale, B, T, NH):
    """out (B*T,C) and lse (B*NH,T) from qkv (B*T,QKV): as the trainer's attention_forward."""
    device.launch(KERNEL, min(pairs_of_turns(B, T, NH), device.multiprocessors), out, lse, qkv,
                  scale, T, NH, B * NH, threads=THREADS, shared=SHARED)


class PipelinedForward:
    """A model whose attention is computed so, where that is faster."""

    def attention_forward(self, out, lse, qkv):
        B, T = self.BT
        if KERNEL in self.device.kernels and is_faster(self.device, B, T, self.config.NH):
            launch_forward(self.device, out, lse, qkv, HS**-0.5, B, T, self.config.NH)
        else:
            super().attention_forward(out, lse, qkv)


FEATURE = Feature(
    "pipelined attention", lambda flags, ranks: (is_fast(flags) and flags.attention == "softmax"
                                                 and not documents.asked(flags, ranks)),
    PipelinedForward, sources=SOURCES,
    compiled=lambda flags, c: (gpus.capability() == HOPPER and flags.dtype in ("bf16", "fp8")
                               and c.C // c.NH == HS),
    chapter="attention in a pipeline")
