"""Time training steps on a CPU beside PyTorch's, in turns.

    pip install -r requirements.txt -r dev/requirements.txt
    python -m dev.bench.on_cpu            # five minutes, two of them for torch.compile
    python -m dev.bench.on_cpu --rows laptop --rounds 10
    python -m dev.bench.on_cpu --width both    # at AVX2, too: few laptops have AVX-512

Rows: nanoGPT's recipe for a laptop (4 layers, 4 heads, C=128, T=64, B=12, 65 words), and GPT-2 124M
at B=4, T=64, both in fp32. Each of these is a process of its own: ours with the kernels as loops
(--device cpu), in the first row also kernels.cu emulated (--device emulated), PyTorch, and PyTorch
with torch.compile, both with its fastest AdamW (fused). All start from the same weights, train on
the same random tokens, and clip the gradient's norm to 1: the losses, in the table, agree. Each
has a thread a core, or all of them, whichever is faster.

The processes take turns: each does some steps while the others wait. A time is the median over all
of its steps, without those of its first turn; the factor is that over PyTorch's better median at
the same width.
"""
import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np

from dev.common.config import Config, draw_parameters
from dev.common.cores import physical_cores, usable_cores
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.features.base import GPT2
from dev.features.devices import make_device
from train_gpt2 import HERE, UserError, pack_batch

WAITING = ("OPENBLAS_THREAD_TIMEOUT", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
ROWS = {  # name: (Config, B, T, steps of a turn)
    "laptop": (Config(maxT=64, V=65, L=4, NH=4, C=128, Vp=128), 12, 64, 20),
    "124M": (Config(), 4, 64, 2)}
JOBS = {  # name: (its title, steps of a turn for one of the first row's, the rows)
    "cpu": ("ours, `--device cpu`", 1, ROWS),
    "emulated": ("ours, `--device emulated`", 1 / 10, ["laptop"]),
    "eager": ("PyTorch", 1, ROWS),
    "compiled": ("PyTorch, `torch.compile`", 1, ROWS)}
# Vectors of 8 numbers, where a processor may have 16, for all that computes: our kernels, PyTorch,
# and the two libraries that multiply for it.
AVX2 = dict(CXXFLAGS="-march=x86-64-v3", ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2",
            MKL_ENABLE_INSTRUCTIONS="AVX2")
WIDTHS = {"own": {}, "avx2": AVX2}
ADAMW = dict(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)
FLAGS = [
    (None, "--rows", ("all", *ROWS), "all", "only this row"),
    (None, "--rounds", "count", 5, "turns of each, after the first"),
    (None, "--width", ("both", *WIDTHS), "own", "of vectors: the processor's, or AVX2's")]


def batches(c, B, T):
    """Random (tokens, targets), always the same ones."""
    rng = np.random.default_rng(42)
    while True:
        tokens = rng.integers(c.V, size=(B, T + 1), dtype=np.int32)
        yield tokens[:, :-1], tokens[:, 1:]


def our_step(device_name, c, B, T):
    """A function that makes a step and returns its loss."""
    model, data = GPT2(c, make_device(device_name, "fp32", c), B, T), batches(c, B, T)
    model.set_parameters(draw_parameters(c, 42))

    def step():
        model.train_step(pack_batch(*next(data)), **ADAMW)
        return model.verdict().loss

    return step


def torch_step(compiled, c, B, T):
    """The same in PyTorch."""
    import torch

    from dev.bench.torch_training import make_adamw, model_of, parameters_of
    weights = parameters_of(c, draw_parameters(c, 42), "cpu")
    parameters = [p for of_name in weights.values() for p in of_name]
    optimizer = make_adamw(c, weights, SimpleNamespace(**ADAMW), lr=ADAMW["learning_rate"],
                           fused=True)
    loss_of, weights = model_of(c, weights)
    data = batches(c, B, T)
    loss_of = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def seconds(threads):
        torch.set_num_threads(threads)
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun

    def step():
        loss = loss_of(weights, *(torch.from_numpy(x.astype(np.int64)) for x in next(data)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, ADAMW["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    counts = {physical_cores(), usable_cores()}
    if len(counts) > 1:
        step()  # which allocates, and compiles
        torch.set_num_threads(min(counts, key=lambda count: min(seconds(count) for _ in range(3))))
    return step


def work(name, row):
    """A job's process: for each number on stdin it makes so many steps, and prints their ms and the
    last loss."""
    c, B, T, _ = ROWS[row]
    step = our_step(name, c, B, T) if name in ("cpu", "emulated") else torch_step(
        name == "compiled", c, B, T)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begun = time.perf_counter()
            loss = step()
            times.append(1e3 * (time.perf_counter() - begun))
        print(json.dumps([times, loss]), flush=True)


def start(name, row, width):
    """A job's process. PyTorch is imported first, and its threads wait as they like: what
    prepro_tinyshakespeare.py sets is for our kernels."""
    torch = "import torch; " * (name not in ("cpu", "emulated"))
    code = f"{torch}from dev.bench import on_cpu; on_cpu.work({name!r}, {row!r})"
    own = {key: value for key, value in os.environ.items() if key not in WAITING} | WIDTHS[width]
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True,
                            stdout=subprocess.PIPE, cwd=HERE, env=own)


def turn(job, steps):
    """(ms of each step, the last loss) of a turn. Raises UserError."""
    job.stdin.write(f"{steps}\n")
    job.stdin.flush()
    for line in job.stdout:
        if line.startswith("["):
            return json.loads(line)
    raise UserError(f"{job.args[-1]}: failed, see above")


def measure(row, rounds, widths):
    """{(a job's name, its width): (ms of all its steps, losses)}, in turns."""
    *_, steps = ROWS[row]
    jobs = {(name, width): start(name, row, width) for width in widths
            for name, (_, _, rows) in JOBS.items()
            if row in rows and (name != "emulated" or width == widths[0])}
    found = {job: ([], []) for job in jobs}
    try:
        for i in range(rounds + 1):
            for (name, width), job in jobs.items():
                times, loss = turn(job, max(1, int(steps * JOBS[name][1])))
                if i:
                    found[name, width][0].extend(times)
                    found[name, width][1].append(loss)
                print(f"{row}, {width} width, turn {i}: {JOBS[name][0]}: {np.median(times):.1f} ms",
                      file=sys.stderr, flush=True)
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    return found


def print_table(row, found):
    """The table of a row, from what measure has found."""
    medians = {job: float(np.median(times)) for job, (times, _) in found.items()}
    c, B, T, _ = ROWS[row]
    print(f"\n| {row}: {c.L} layers, C={c.C}, V={c.V}, B={B}, T={T} | width | ms | factor | "
          "fastest | last loss |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for (name, width), (times, losses) in found.items():
        ms = medians[name, width]
        best = min(medians[other, width] for other in ("eager", "compiled"))
        print(f"| {JOBS[name][0]} | {width} | {ms:.1f} | {ms / best:.2f} | {min(times):.1f} | "
              f"{losses[-1]:.5f} |", flush=True)


def main(arguments=None):
    """Everything from the flags to the tables. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    if not importlib.util.find_spec("torch"):
        raise UserError("torch is not installed, and it is what this program times beside ours: "
                        "pip install -r dev/requirements.txt")
    for row in ROWS if flags.rows == "all" else [flags.rows]:
        print_table(row, measure(row, flags.rounds,
                                 [*WIDTHS] if flags.width == "both" else [flags.width]))


if __name__ == "__main__":
    run_main(main)
