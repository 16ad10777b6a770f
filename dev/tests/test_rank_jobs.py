"""Test how jobs of several ranks begin and end: refusals, signals, and ranks that die or hang.

dev/tests/test_ranks.py has what ranks compute and save, dev/tests/test_meeting.py what needs no
training.
"""
import os
import re
import secrets
import shutil
import socket
import time

import numpy as np
import pytest

from dev.common.config import read_parameters
from dev.features.checkpoints.resume import load_state
from dev.features.data_loader import FilesLoader
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import EXACT, FIXTURES, TINY, TOP, check
from dev.tests.jobs import (BRIEF, POISONED, SMALL, at_call, begin, counts_of, data_files, end,
                            train, wrapped)
from dev.tests.models import device_of
from dev.tests.trainings import LLAMA, check_same, done_steps

TIED = FIXTURES / "llama_tied.bin"

# ---- How a job begins


runs_on = counts_of


@pytest.fixture(autouse=True)
def data(folder):
    data_files(folder)


def by_hand(device_name, folder, output, ranks, count, *flags):
    """Start some of so many ranks, each by itself, as a launcher would. Returns their jobs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [begin(device_name, 1, folder, output, *SMALL, *flags, environment={
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TRAIN_GPT2_PORT": str(port), "TRAIN_GPT2_TOKEN": "a token", "TRAIN_GPT2_WAIT": "3"})
            for rank in ranks]


def test_refusals(device_name, folder):
    """What is wrong with a job is one line, before its first step, and nothing of it is left."""
    other, copy = folder / "other", folder / "copy"
    for path in (other, copy):
        path.mkdir()
    shutil.copy(TINY, folder)
    for path in (*folder.glob("part_*"), TINY):
        shutil.copy(path, other)
    for path in (other / "part_train_1.bin", other / TINY.name):
        data = bytearray(path.read_bytes())
        data[1200] ^= 1
        path.write_bytes(data)
    for name in ("train_gpt2.py", "kernels.cu", "dev"):
        (copy / name).symlink_to(TOP / name)
    code = (TOP / "prepro_tinyshakespeare.py").read_text()
    (copy / "prepro_tinyshakespeare.py").write_text(f"{code}# other code\n")
    others_code = f"top = {str(copy)!r} if rank == 1 else top"
    elsewhere = f"os.chdir({str(other)!r} if rank == 1 else {str(folder)!r})"
    for wish, early, *flags in (
            ("rank 1 on .*: --dry-run is 1, and on rank 0 None",
             "sys.argv += ['--dry-run'] * (rank == 1)"),
            (r"rank 1 on .*: the file part_train_1.bin is \w+, and on rank 0 \w+: exp", elsewhere,
             "-i",
             "part_train_*.bin"),
            (r"rank 1 on .*: the file gpt2_tiny.bin is \w+, and on rank 0 \w+: exp", elsewhere,
             "-e", TINY.name),
            (r"rank 1 on .*: the file prepro_tinyshakespeare.py is \w+, and on", others_code),
            (r"-d 40: expected a multiple of processes\*B\*T = 16", "", "-d", 40),
            (r"part_train_1.bin: 149 tokens; expected 161", "", "-i", folder / "part_train_1.bin",
             "-b", 10),
            *[("several ranks on CPUs need MPI, which is not there",
               "sys.modules['mpi4py'] = None"),
              ("--gpus 3: Open MPI has started 2 ranks: expected no", "", "--gpus",
               3)] * (device_name != "cuda")):
        output = folder / "out" / secrets.token_hex(4)
        text = train(device_name, 2, folder, output, *SMALL, *flags, trainer=wrapped(folder, early),
                     status=1)
        lines = set(re.findall("^error: .*", text, re.M))
        ok = len(lines) == 1 and re.search(wish, *lines) and "step    1/" not in text
        check(f"refused: {wish[:54]}", ok, text[-300:] * (not ok))

    for wish, ranks, count, *flags in (
            ("rank 1, 3 of 4 has not come to 127.0.0.1:.* in 3 s: expected all to be started",
             (0, 2), 4),
            ("rank 1 of 2 has not been let in at 127.0.0.1:.* in 3 s .*: expected rank 0 to run",
             (1,), 2),
            *[("MPI has made this rank 0 of 1, and the launcher rank 0 of 2: on CPUs", (0, 1), 2),
              ("--gpus 2: there is no GPU, or --device cpu", (0,), 1, "--gpus",
               2)] * (device_name != "cuda")):
        since = time.monotonic()
        jobs = by_hand(device_name, folder, folder / "hand", ranks, count, *flags)
        text = "".join([end(job, 1, "no job") for job in jobs])
        ok = re.search(f"error: .*{wish}", text) and time.monotonic() - since < 20
        check(f"refused: {wish[:54]}", ok, text[-300:] * (not ok))


def test_threads(device_name, folder):
    """NumPy has no more threads on a rank than its share of the cores, though it was imported
    before anybody knew of ranks. The process stays the same one, which the launcher knows."""
    if device_name == "cuda":
        return
    program = wrapped(folder, early="""
if "FIRST" not in os.environ:
    os.environ["FIRST"] = str(os.getpid())
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
""", late="""
def meeting(*args):
    same, count = os.environ["FIRST"] == str(os.getpid()), len(os.listdir("/proc/self/task"))
    print(f"{same} {count} threads", flush=True)
    os._exit(0)
dev.features.ranks.launch.Meeting = meeting
""")
    names = dict(RANK="1", SIZE="2", LOCAL_RANK="1", LOCAL_SIZE="2")
    text = train(device_name, 1, folder, folder / "out", trainer=program, environment={
        f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    share = max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() // 2))
    check("threads of one of two ranks", text == f"True {share} threads\n", text)


# ---- How a job ends


def test_lost_ranks(device_name, folder):
    """A rank that is killed, stopped, raises or hangs ends its job. A line says who and why."""
    host, connect = socket.gethostname(), "Mpi" if device_name != "cuda" else "Nccl"
    gone = ", is gone: it was killed, or crashed"
    late = (r"(, has given no sign of life| has not come to the next step, where others have "
            r"waited) for \d s")
    layer = "train_gpt2.GPT2.layer_backward"  # of which a step has two
    for case, (fault, rank, where, number, wish) in enumerate((
            ("os.kill(os.getpid(), 9)", 0, layer, 11, gone),  # the next, while others wait for it
            ("time.sleep(1); os.kill(os.getpid(), 9)", 1,
             f"dev.features.ranks.ranks.{connect}.__init__", 1, gone),
            ("1 / 0", 1, "dev.features.data_loader.FilesLoader.batch", 6,
             ": ZeroDivisionError: division by zero"),
            ("os.kill(os.getpid(), signal.SIGSTOP)", 1, layer, 11, late),
            ("time.sleep(99)", 1, layer, 11, None))):
        fault_at = at_call(where, number, fault, rank)
        program = wrapped(folder, late=f"dev.features.ranks.meeting.SILENCE = 3\n{fault_at}")
        since = time.monotonic()
        text = train(device_name, 2, folder, folder / f"out {case}", *BRIEF, "-x", 10**6,
                     "-i", folder / "part_val_0.bin", "--graph", 0, trainer=program, status=1)
        seconds = time.monotonic() - since
        wish = (rf"rank {rank} on {host}, process \d+{wish}" if wish else
                r"no rank comes to the next step: rank 0 at \w+.py:\d+; rank 1 at ranks.py:\d+")
        line = re.search(f"^error: {wish}; this ends all 2 ranks$", text, re.M)
        check(f"{fault} in {where} of rank {rank}", line and seconds < 30,
              f"{seconds:.1f} s, {line[0] if line else text[-300:]}")


def test_signals(device_name, folder):
    """SIGTERM to one rank ends all after their step, with a checkpoint from which they go on: a
    Llama in bf16, with ZeRO, and with tails if there are three ranks."""
    count, output = counts_of(device_name)[-1], folder / "stopped"
    flags = *SMALL, "-x", 6, "-z", 1, "--dtype", "bf16", "--moments", "bf16"
    llama = dict(trainer=LLAMA, model=TIED)
    train(device_name, count, folder, folder / "whole", *flags, "-n", 6, **llama)
    fault = at_call("dev.features.data_loader.FilesLoader.batch", 7,
                    "os.kill(os.getpid(), signal.SIGTERM)")
    program = wrapped(folder, late=fault, Model="dev.llama3.train_llama3.Llama3")
    text = train(device_name, count, folder, output, *flags, trainer=program, model=TIED,
                 status=143)
    step = int(re.search("interrupted after (\\d+) of", text)[1])
    c = Llama3.Config.from_file(TIED)
    place = device_of(device_name, "bf16", c.C, c.NH, architecture=Llama3, group=c.NH // c.NKV)
    model, data = Llama3(c, place, 1, 8), FilesLoader(folder / "part_train_*.bin", 1, 8, c, 1)
    load_state(lambda rank: output / f"state_{step:08d}_{rank:05d}.bin", model, data)
    for name, values in read_parameters(output / f"model_{step:08d}.bin", c):
        if hasattr(model.params, name):
            found = place.get(getattr(model.params, name)).reshape(-1)[: values.size]
            wish = values.reshape(-1)
            yield f"{name} of the model, and rounded from the states", found, wish, EXACT
    train(device_name, count, folder, output, *flags, "-n", 6, "-y", 1, **llama)
    check_same("after SIGTERM to rank 1, resumed", output, folder / "whole", 6, count)


def test_not_finite(device_name, folder):
    """A number that is not finite on one rank ends the job. The line names the rank, which keeps
    its batches. With --zero, all ranks first gather the parameters, to look at the step."""
    program, output = wrapped(folder, late=f"""{POISONED}
real, latest = train_gpt2.GPT2.embedding_forward, 0
def poisoned(self):
    global latest
    real(self)
    latest = max(latest, self.step)  # also when the step is done again
    if rank == 1 and latest == 5:
        self.acts.residual[2, 3] = float("nan")
train_gpt2.GPT2.embedding_forward = poisoned
"""), folder / "out"
    text = train(device_name, 2, folder, output, *BRIEF, "-n", 3, "-z", 1, "--graph", 0,
                 trainer=program, status=1)
    line = re.search(r"^error: the loss of step 5 is nan .*: on rank 1, the first number that is "
                     r"not finite is nan in .*\[2, .*; batches: \S*part_train_(\d).bin, tokens "
                     r"(\d+) to ", text, re.M)
    check("not finite on rank 1: a line", line and text.count("error: ") == 1,
          "" if line else text[-400:])
    with np.load(output / "replay_00000004.npz") as file:
        kept = file["tokens"][0].reshape(-1)
    tokens = np.fromfile(folder / f"part_train_{line[1]}.bin", "<u2", offset=1024)
    wish = tokens[int(line[2]) :][:8].astype(np.int32)
    yield "on rank 1: the batch that is kept", kept, wish, EXACT
    yield "on rank 1: checkpoints", done_steps(output), [3, 4], EXACT
