"""Time the tokens of samples, beside PyTorch's and transformers' with static caches.

    python -m dev.bench.samples                          # GPT-2 124M, random weights
    python -m dev.bench.samples --batch 128 --context 16
    python -m dev.bench.samples -e gpt2_124M.bin --device cpu --dtype fp32 --context 500

A row each: greedy tokens, and tokens drawn with temperature 1 (ours alone). --batch texts of
--context random tokens go on side by side, for some tokens first that are not counted. Each time
is the best of --rounds: on a shared machine others make it longer, and nothing makes it shorter.
PyTorch is a decoder of its own, written below, compiled into a CUDA graph on a GPU and eager on a
CPU; transformers is generate() with cache_implementation="static", and left out if it is not
installed. All have the same weights.
"""
import importlib.util
import itertools
import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np

from dev.bench.torch_training import parameters_of
from dev.common.config import Config, draw_parameters, read_parameters
from dev.common.flags import parse_flags
from dev.common.gpus import has_gpu
from dev.common.program import run_main
from dev.features.declare import stack
from dev.features.devices import make_device
from dev.features.kv_cache import AHEAD, SOURCE, Cached
from dev.features.sample import coins_of
from dev.features.seams import GPT2
from train_gpt2 import UserError

FLAGS = [
    ("-e", "--model", "name", "d12", "checkpoint, or descriptor"),
    ("-b", "--batch", "count", 1, "texts side by side"),
    (None, "--context", "count", 16, "tokens of each text before the first that is timed"),
    (None, "--tokens", "count", 128, "tokens that are timed"),
    (None, "--rounds", "count", 3, "how often"),
    (None, "--device", ("cuda", "cpu"), None, "where to compute"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "default: bf16, on a CPU fp32"),
    (None, "--alone", "switch", 0, "1: without PyTorch and transformers")]
FIRST = 3 * AHEAD - 1  # tokens until graphs are recorded, and AHEAD are drawn at a time


def texts_of(flags, c):
    length = max(1, flags.context - FIRST)
    return np.random.default_rng(1).integers(c.V, size=(flags.batch, length)).tolist()


def best(flags, begin):
    """The least seconds of a token of each text, after begin() has returned a function that makes
    some tokens, as it is asked, and waits for them."""
    found = []
    for _ in range(flags.rounds):
        make = begin()
        make(FIRST)
        start = time.perf_counter()
        make(flags.tokens)
        found.append((time.perf_counter() - start) / flags.tokens)
    return min(found)


def ours(flags, c, tensors):
    device = make_device(flags.device, flags.dtype, c, beside=[SOURCE])
    B, T = flags.batch, c.maxT
    Model = stack(GPT2, [Cached], dict(rows_of=lambda *args: B, flags=SimpleNamespace()))
    model = Model(c, device, 1, T)
    model.set_parameters(tensors)

    def begin(temperature):
        coins = [coins_of(seed) for seed in range(B)]
        steps = model.continued(texts_of(flags, c), T, coins, temperature, 0, 1.0)

        def make(count):
            for _ in itertools.islice(steps, count):
                pass

        return make

    for temperature in (0.0, 1.0):
        yield f"ours, temperature {temperature:.0f}", best(flags, partial(begin, temperature))


def place_of(flags):
    """(PyTorch's device, its type of numbers)."""
    import torch
    torch.set_float32_matmul_precision("high" if flags.dtype == "tf32" else "highest")
    return flags.device, torch.bfloat16 if flags.dtype == "bf16" else torch.float32


def pytorch(flags, c, tensors):
    import torch
    from torch.nn import functional as F
    place, dtype = place_of(flags)
    B, T, HS = flags.batch, c.maxT, c.C // c.NH
    weights = {name: [x.detach().to(dtype) for x in values]
               for name, values in parameters_of(c, tensors, place).items()}
    [wte], [wpe], [lnfw], [lnfb] = (weights[name] for name in ("wte", "wpe", "lnfw", "lnfb"))
    of_layers = [row.name for row in c.parameter_table() if row.layers]
    layers = [SimpleNamespace(**{name: weights[name][l] for name in of_layers})
              for l in range(c.L)]
    keys, values = torch.zeros(2, c.L, B, c.NH, T, HS, dtype=dtype, device=place).unbind()
    seen = torch.ones(T, T, dtype=torch.bool, device=place).tril()[:, None, None, None]

    def step(tokens, position):  # (B), (1) -> (B)
        x = wte[tokens] + wpe[position]
        for l, p in enumerate(layers):
            qkv = F.linear(F.layer_norm(x, (c.C,), p.ln1w, p.ln1b), p.qkvw, p.qkvb)
            q, k, v = qkv.view(B, 3, c.NH, 1, HS).unbind(1)
            keys[l].index_copy_(2, position, k)
            values[l].index_copy_(2, position, v)
            y = F.scaled_dot_product_attention(q, keys[l], values[l], attn_mask=seen[position][0])
            x = x + F.linear(y.view(B, c.C), p.attprojw, p.attprojb)
            h = F.linear(F.layer_norm(x, (c.C,), p.ln2w, p.ln2b), p.fcw, p.fcb)
            x = x + F.linear(F.gelu(h, approximate="tanh"), p.fcprojw, p.fcprojb)
        return F.linear(F.layer_norm(x, (c.C,), lnfw, lnfb), wte).argmax(-1)

    texts = torch.tensor(texts_of(flags, c), device=place)
    tokens, position = texts[:, -1].clone(), torch.zeros(1, dtype=torch.long, device=place)

    def advance():
        tokens.copy_(step(tokens, position))
        position.add_(1)

    if place == "cuda":  # compile's own graphs refuse a cache that is written
        step = torch.compile(step, fullgraph=True)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            for _ in range(3):
                advance()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                advance()
        advance = graph.replay

    def begin():
        tokens.copy_(texts[:, -1])
        position.fill_(texts.shape[1] - 1)

        def make(count):
            with torch.inference_mode():
                for _ in range(count):
                    advance()
            tokens.cpu()  # waits

        return make

    yield "PyTorch, greedy", best(flags, begin)


def with_transformers(flags, c, tensors):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    place, dtype = place_of(flags)
    # of these sizes, and with weights of its own: values change no time
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=c.V, n_positions=c.maxT, n_embd=c.C, n_layer=c.L, n_head=c.NH))
    model = model.to(place, dtype).eval()
    texts = torch.tensor(texts_of(flags, c), device=place)
    texts = torch.cat([texts, texts[:, :1].repeat(1, FIRST)], 1)

    def seconds(count):
        start = time.perf_counter()
        model.generate(texts, attention_mask=torch.ones_like(texts), do_sample=False,
                       cache_implementation="static", min_new_tokens=count, max_new_tokens=count,
                       pad_token_id=0).cpu()
        return time.perf_counter() - start

    seconds(flags.tokens)  # compiles
    # the difference leaves out the pass over the text
    pairs = [(seconds(flags.tokens), seconds(1)) for _ in range(flags.rounds)]
    yield "transformers, greedy", min(a for a, _ in pairs) / (flags.tokens - 1) - (
        min(b for _, b in pairs) / (flags.tokens - 1))


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
    peers = [] if flags.alone else [("torch", pytorch), ("transformers", with_transformers)]
    for package, measure in [(None, ours), *peers]:
        if package and not importlib.util.find_spec(package):
            print(f"{package} is not installed")
            continue
        for name, seconds in measure(flags, c, tensors.items()):
            print(f"{name:24} {1e3 * seconds:9.3f} ms a token {flags.batch / seconds:12,.0f} tok/s",
                  flush=True)


if __name__ == "__main__":
    run_main(main)
