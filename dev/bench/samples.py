"""Time the tokens of samples.

    python -m dev.bench.samples                          # GPT-2 124M, random weights
    python -m dev.bench.samples --batch 128 --context 16
    python -m dev.bench.samples -e gpt2_124M.bin --device cpu --dtype fp32 --context 500

A row each: greedy tokens, and tokens drawn with temperature 1. --batch texts of --context random
tokens go on side by side, for some tokens first that are not counted. Each time is the best of
--rounds: on a shared machine others make it longer, and nothing makes it shorter.
"""
import itertools
import os
import time
from types import SimpleNamespace

import numpy as np

from dev.common.config import Config, draw_parameters, read_parameters
from dev.common.flags import parse_flags
from dev.common.gpus import has_gpu
from dev.common.program import run_main
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.feature import stack
from dev.features.kv_cache import AHEAD, SOURCE, Cached
from dev.features.sample import coins_of
from train_gpt2 import UserError

FLAGS = [
    ("-e", "--model", "name", "d12", "checkpoint, or descriptor"),
    ("-b", "--batch", "count", 1, "texts side by side"),
    (None, "--context", "count", 16, "tokens of each text before the first that is timed"),
    (None, "--tokens", "count", 128, "tokens that are timed"),
    (None, "--rounds", "count", 3, "how often"),
    (None, "--device", ("cuda", "cpu"), None, "where to compute"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "default: bf16, on a CPU fp32")]
FIRST = 3 * AHEAD - 1  # tokens until graphs are recorded, and AHEAD are drawn at a time


def texts_of(flags, c):
    length = max(1, flags.context - FIRST)
    return np.random.default_rng(1).integers(c.V, size=(flags.batch, length)).tolist()


def ours(flags, c, tensors):
    """(temperature, the least seconds of a token of each text), greedy and drawn."""
    device = make_device(flags.device, flags.dtype, c, beside=[SOURCE])
    B, T = flags.batch, c.maxT
    Model = stack(GPT2, [Cached], dict(rows_of=lambda *args: B, flags=SimpleNamespace()))
    model = Model(c, device, 1, T)
    model.set_parameters(tensors)
    for temperature in (0.0, 1.0):
        found = []
        for _ in range(flags.rounds):
            coins = [coins_of(seed) for seed in range(B)]
            steps = model.continued(texts_of(flags, c), T, coins, temperature, 0, 1.0)
            list(itertools.islice(steps, FIRST))
            start = time.perf_counter()
            list(itertools.islice(steps, flags.tokens))
            found.append((time.perf_counter() - start) / flags.tokens)
        yield temperature, min(found)


def main():
    flags = parse_flags(__doc__, FLAGS)
    flags.device = flags.device or ("cuda" if has_gpu() else "cpu")
    flags.dtype = flags.dtype or ("bf16" if flags.device == "cuda" else "fp32")
    from_file = os.path.isfile(flags.model) or flags.model.endswith(".bin")
    c = (Config.from_file if from_file else Config.from_descriptor)(flags.model)
    if max(flags.context, FIRST + 1) + flags.tokens > c.maxT:
        raise UserError(f"--context {flags.context} --tokens {flags.tokens}: expected at most maxT "
                        f"= {c.maxT} tokens in all")
    tensors = {name: np.array(values) for name, values in (
        read_parameters(flags.model, c) if from_file else draw_parameters(c, 42))}
    first = max(flags.context, FIRST + 1)
    print(f"{flags.model}, {flags.dtype}, {flags.device}: {flags.batch} texts, tokens {first} to "
          f"{first + flags.tokens - 1}")

    for temperature, seconds in ours(flags, c, tensors.items()):
        print(f"temperature {temperature:.0f} {1e3 * seconds:9.3f} ms a token "
              f"{flags.batch / seconds:12,.0f} tok/s", flush=True)


if __name__ == "__main__":
    run_main(main)
