"""Time training steps on a CPU beside PyTorch's, in turns.

    pip install -r requirements.txt -r dev/requirements.txt
    python -m dev.bench.on_cpu            # five minutes, two of them for torch.compile
    python -m dev.bench.on_cpu --rows laptop --rounds 10

Rows: nanoGPT's recipe for a laptop (4 layers, 4 heads, C=128, T=64, B=12, 65 words), and GPT-2 124M
at B=4, T=64, both in fp32. Each of these is a process of its own: ours with the kernels as loops
(--device cpu), in the first row also kernels.cu emulated (--device emulated), PyTorch, and PyTorch
with torch.compile, both with its fastest AdamW (fused). All start from the same weights, train on
the same random tokens, and clip the gradient's norm to 1: the losses, in the table, agree.

The processes take turns: each does some steps while the others wait. A time is the median over all
of its steps, without those of its first turn; the factor is that over PyTorch's better median.
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
ADAMW = dict(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)
FLAGS = [
    (None, "--rows", ("all", *ROWS), "all", "only this row"),
    (None, "--rounds", "count", 5, "turns of each, after the first")]


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

    def step():
        loss = loss_of(weights, *(torch.from_numpy(x.astype(np.int64)) for x in next(data)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, ADAMW["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

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


def start(name, row):
    """A job's process. PyTorch is imported first, and its threads wait as they like: what
    prepro_tinyshakespeare.py sets is for our kernels."""
    torch = "import torch; " * (name not in ("cpu", "emulated"))
    code = f"{torch}from dev.bench import on_cpu; on_cpu.work({name!r}, {row!r})"
    own = {key: value for key, value in os.environ.items() if key not in WAITING}
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


def measure(row, rounds):
    """{a job's name: (ms of all its steps, losses)}, in turns."""
    *_, steps = ROWS[row]
    jobs = {name: start(name, row) for name, (_, _, rows) in JOBS.items() if row in rows}
    found = {name: ([], []) for name in jobs}
    try:
        for i in range(rounds + 1):
            for name, job in jobs.items():
                times, loss = turn(job, max(1, int(steps * JOBS[name][1])))
                if i:
                    found[name][0].extend(times)
                    found[name][1].append(loss)
                print(f"{row}, turn {i}: {JOBS[name][0]}: {np.median(times):.1f} ms",
                      file=sys.stderr, flush=True)
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    return found


def main(arguments=None):
    """Everything from the flags to the tables. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    if not importlib.util.find_spec("torch"):
        raise UserError("torch is not installed, and it is what this program times beside ours: "
                        "pip install -r dev/requirements.txt")
    for row in ROWS if flags.rows == "all" else [flags.rows]:
        found = measure(row, flags.rounds)
        medians = {name: float(np.median(times)) for name, (times, _) in found.items()}
        best = min(medians["eager"], medians["compiled"])
        c, B, T, _ = ROWS[row]
        print(f"\n| {row}: {c.L} layers, C={c.C}, V={c.V}, B={B}, T={T} | ms | factor | fastest | "
              "last loss |\n| --- | ---: | ---: | ---: | ---: |")
        for name, (times, losses) in found.items():
            print(f"| {JOBS[name][0]} | {medians[name]:.1f} | {medians[name] / best:.2f} | "
                  f"{min(times):.1f} | {losses[-1]:.5f} |", flush=True)


if __name__ == "__main__":
    run_main(main)
