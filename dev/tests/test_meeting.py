"""Test how ranks find each other, speak, and notice that one is gone: without a trainer, MPI or a
GPU.

Meetings are held in threads of this process, or, where one may kill another, in small processes. A
stranger knows the protocol from dev/features/ranks/meeting.py's first lines alone. Jobs of the
trainer itself are in dev/tests/test_rank_jobs.py.
"""
import contextlib
import hmac
import os
import re
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dev.features.ranks import launch
from dev.features.ranks.environment import launched
from dev.features.ranks.meeting import Meeting, Point, first_host
from dev.tests.checks import TOP, check, check_refusal, fast
from train_gpt2 import UserError


@pytest.fixture(autouse=True, scope="module")
def an_end():
    signal.alarm(150)  # if ranks in threads wait for each other, nothing else ends them
    yield
    signal.alarm(0)
    for job in started:
        job.kill()


def test_statuses(tmp_path):
    """On a GPU a rank ends its process with its run's status, 0 if the run returns none; with 1
    after an error."""
    found = []

    def failing(ranks):
        raise UserError("planted")

    with mock.patch.dict(sys.modules, cupy=mock.Mock()), mock.patch.multiple(
            launch, launched=lambda: ("nobody", 0, 1, 0, 1), Meeting=mock.Mock(),
            Ranks=lambda *_, **__: SimpleNamespace(via=SimpleNamespace(leave=found.append))):
        for work in (lambda ranks: None, lambda ranks: 0, lambda ranks: 3, failing):
            flags = SimpleNamespace(gpus=None, device="cuda", output=str(tmp_path), zero=0)
            launch.start(flags, work)
    check("statuses", found == [0, 0, 3, 1], found)


@fast
def test_what_launchers_say():
    """Their variables, alone and within each other; and lists of hosts as Slurm writes them."""
    ompi = {f"OMPI_COMM_WORLD_{name}": str(i)
            for i, name in enumerate(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), 4)}
    torchrun = dict(RANK="3", WORLD_SIZE="16", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8")
    slurm = dict(SLURM_PROCID="9", SLURM_NTASKS="16", SLURM_LOCALID="1")
    mpich = dict(PMI_RANK="2", PMI_SIZE="4", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2")
    for name, environment, wish in (
            ("nobody", {}, None), ("torchrun", torchrun, (3, 16, 1, 8)),
            ("Open MPI", ompi, (4, 5, 6, 7)),
            ("srun", slurm, (9, 16, 1, 1)), ("MPICH", mpich, (2, 4, 0, 2)),
            ("torchrun in a step", torchrun | slurm, (3, 16, 1, 8)),
            ("Open MPI in a step", ompi | slurm, (4, 5, 6, 7)),
            ("MPICH in a step", mpich | slurm, (2, 4, 0, 2)),
            ("srun with PMI", slurm | dict(PMI_RANK="9", PMI_SIZE="16"), (9, 16, 1, 1)),
            ("a step of its own size", slurm | dict(SLURM_STEP_NUM_TASKS="12"), (9, 12, 1, 1)),
            ("a shell of salloc",
             dict(SLURM_NTASKS="16", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"), None),
            ("torchrun, alone", torchrun | dict(WORLD_SIZE="1"), None),
            ("srun, alone", slurm | dict(SLURM_NTASKS="1"), None)):
        found = launched(environment)
        check(f"launched by {name}", (found and found[1:]) == wish, f"{found}")
    for nodes, wish in (("gpu[03-05,9],login1", "gpu03"), ("a1,b2", "a1"), ("n7", "n7"), ("", ""),
                        ("c3-[001,004]", "c3-001"), ("r[1-2]n[3-4]", "r1n3"),
                        ("gpu[7]-ib,x", "gpu7-ib")):
        check(f"the first of {nodes!r}", first_host(nodes) == wish, first_host(nodes))


@fast
def test_strangers(folder):
    """Ranks find each other by a file of their user's. Others are not let in, and stop nobody.
    Later nothing listens.
    """
    ranks = [Meeting.__new__(Meeting) for _ in range(3)]
    with mock.patch.dict(os.environ, {"TRAIN_GPT2_WAIT": "15"}), ThreadPoolExecutor(6) as pool:
        join = lambda rank: pool.submit(ranks[rank].__init__, rank, 3, 3, folder)
        first = join(0)
        while not (files := [*folder.glob("ranks_*[0-9a-f]")]):
            time.sleep(0.01)
        mode = stat.S_IMODE(files[0].stat().st_mode)
        check("the file is its owner's alone", mode == 0o600 and len(files) == 1, f"{mode:o}")
        host, port, token = files[0].read_text().split()
        address = host, int(port)

        def come(rank, count, word=token):
            """Whether rank 0 lets in who says this, and proves that it knows the token too."""
            with socket.create_connection(address, timeout=10) as link:
                numbers = struct.pack("<II", rank, count)
                proof = hmac.digest(word.encode(), link.recv(32, socket.MSG_WAITALL) + numbers,
                                    "sha256")
                link.sendall(numbers + proof)
                return link.recv(32, socket.MSG_WAITALL) == hmac.digest(word.encode(), proof,
                                                                        "sha256")

        silent = socket.create_connection(address)
        with socket.create_connection(address) as garbage:
            garbage.sendall(secrets.token_bytes(4000))
        for name, *words in (("with another token", 1, 3, "another"), ("of another count", 1, 4),
                             ("that is rank 0", 0, 3), ("beyond the count", 3, 3),
                             ("far beyond it", 2**32 - 1, 3)):
            check(f"a stranger {name} is not let in", not come(*words))
        second = join(1)
        while not getattr(ranks[1], "links", {}):
            time.sleep(0.01)
        check("who comes twice is not let in", not come(1, 3))
        check("rank 0 waits for all", not first.done() and not second.done())
        for each in (first, second, join(2)):
            each.result(20)
        silent.close()
        try:
            socket.create_connection(address, timeout=1).close()
            check("nobody listens when all are there", False)
        except OSError:
            check("nobody listens when all are there", not any(folder.iterdir()))

        def talk(meeting):
            """Exchange 22 subjects at once, in another order on each rank."""
            subjects = [str(i * (meeting.rank + 1) % 23) for i in range(1, 23)]
            with ThreadPoolExecutor(22) as threads:
                answers = threads.map(lambda name: (name, meeting.exchange([meeting.rank, name],
                                                                           name)), subjects)
                return dict(answers)

        wish = {str(i): [[rank, str(i)] for rank in range(3)] for i in range(1, 23)}
        check("several subjects at once", list(pool.map(talk, ranks)) == [wish] * 3)
        long = list(pool.map(lambda meeting: meeting.exchange("x" * 10**6 * meeting.rank, "much"),
                             ranks))
        check("long messages", [list(map(len, one)) for one in long] == 3 * [[0, 10**6, 2 * 10**6]])
        stops = [[], [15], []]
        told = list(pool.map(lambda meeting: meeting.agree(stops[meeting.rank], False), ranks))
        check("a signal of one rank stops all", told == [True] * 3 and stops == [[15]] * 3,
              f"{stops}")
        list(pool.map(Meeting.leave, ranks))
        check("all part", not any(meeting.watcher.is_alive() for meeting in ranks))


@fast
def test_impostors(folder):
    """A rank trusts neither a program that answers in rank 0's place, nor a file that others could
    have written."""
    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                link.sendall(bytes(32))
                link.recv(40, socket.MSG_WAITALL)
                link.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        known = {"TRAIN_GPT2_PORT": str(server.getsockname()[1]), "TRAIN_GPT2_TOKEN": "word",
                 "TRAIN_GPT2_WAIT": "1"}
        pool.submit(answer, server)
        with mock.patch.dict(os.environ, known):
            check_refusal("an impostor", r"rank 1 of 2 has not been let in at .* \(another program "
                          r"answers there\)", Meeting, 1, 2, 2, None)
        server.shutdown(socket.SHUT_RDWR)
    point = Point(2, 2, folder)
    point.path.write_text("127.0.0.1 1 word")
    for mode in (0o644, 0o620, 0o600):
        point.path.chmod(mode)
        try:
            found = point.find()
        except ValueError:
            found = None
        check(f"a file of mode {mode:o}", found == (("127.0.0.1", 1) if mode == 0o600 else None),
              f"{found}")


started = []  # processes, none of which outlives the tests


def children(folder, text, count, *words):
    """Start a program as each of so many ranks, after these lines."""
    folder.mkdir()
    path = folder / "child.py"
    path.write_text(f"import os, signal, sys, time\nsys.path.insert(0, {str(TOP)!r})\n"
                    "import dev.features.ranks.launch, dev.features.ranks.meeting\nrank = "
                    f"int(sys.argv[1])\n{text}")
    jobs = [subprocess.Popen([sys.executable, path, str(
        rank), *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)
            for rank in range(count)]
    started.extend(jobs)
    return jobs


HANGS = """
dev.features.ranks.meeting.SILENCE, dev.features.ranks.meeting.BEAT = 2, 0.2
what, who = sys.argv[2:]
meeting = dev.features.ranks.meeting.Meeting(rank, 3, 3, ".")
meeting.exchange(None, "the start")
print("here", flush=True)
if what == "late" and rank != int(who):
    meeting.exchange(rank, "the next step", 1)
if what == "all":
    meeting.deadline = time.monotonic() + 1
time.sleep(60)
"""


def test_hangs(folder):
    """Who does not come, or gives no sign of life, is named and killed, and all the others end.
    They say the same if somebody else has killed it, after three quarters of the time."""
    late, silent = "process {pid} has not come to the next step, where others have waited for 1", (
        "process {pid}, has given no sign of life for [23]")
    cases = [("late", 2, late), ("late", 0, late), ("stopped", 1, silent), ("stopped", 0, silent),
             ("stopped, killed", 1, silent.replace("[23]", "[123]")),
             ("all", 0, "no rank comes to the next step: rank 0, 1, 2 at its end")]
    jobs = [children(folder / f"{what} {rank}", HANGS, 3, what, str(rank))
            for what, rank, _ in cases]
    for (what, rank, _), job in zip(cases, jobs):
        for process in job:
            process.stdout.readline()
        if "stopped" in what:
            job[rank].send_signal(signal.SIGSTOP)
        if "killed" in what:
            time.sleep(1.5)
            job[rank].kill()
    for (what, rank, wish), job in zip(cases, jobs):
        texts = [process.communicate(timeout=30)[1] for process in job]
        line = f"rank {rank} on {socket.gethostname()}, {wish}" if what != "all" else wish
        line = rf"error: {line.format(pid=job[rank].pid)}.*; this ends all 3 ranks\n"
        check(f"{what} {rank}: a line says so", any(re.fullmatch(line, text) for text in texts)
              and not any("is gone" in text for text in texts), "".join(texts).strip())
        codes = [process.returncode for process in job]
        hung = codes.pop(rank) if what != "all" else 1
        check(f"{what} {rank}: all end", set(codes) == {1} and hung in (1, -9)["stopped" in what :],
              f"{codes}, {hung}")


GPUS = """
dev.features.ranks.launch.SILENCE, how = 1, sys.argv[2]
rank = os.environ.get("RANK")
if rank is None:
    sys.exit(dev.features.ranks.launch.launch(3, "cuda"))
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
line = [*map(os.environ.get, names), len(os.environ["TRAIN_GPT2_TOKEN"]), os.getpid()]
os.write(1, (" ".join(map(str, line)) + chr(10)).encode())
if how == "one killed" and rank == "2":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "one fails" and rank == "1":
    sys.exit(3)
if how in ("one killed", "a signal", "killed itself"):
    time.sleep(60)
"""


def runs(process):
    """Whether a process runs: if nobody asks for its status, it stays as a zombie, Z."""
    try:
        return Path("/proc", process, "stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def test_gpus(folder):
    """--gpus tells its processes their ranks, passes signals on, and leaves none behind."""
    for how, number, status in (("all end", 0, 0), ("one fails", 0, 3), ("one killed", 0, 1),
                                ("a signal", signal.SIGTERM, 1), ("a signal", signal.SIGHUP, 1),
                                ("killed itself", signal.SIGKILL, -signal.SIGKILL)):
        [job] = children(folder / f"{how} {number}", GPUS, 1, how)
        lines = sorted(job.stdout.readline().split() for _ in range(3))
        if number:
            job.send_signal(number)
        errors = job.communicate(timeout=30)[1]  # until all have closed their end of it
        variables = [f"{rank} {rank} 3 3 127.0.0.1 32".split() for rank in range(3)]
        time.sleep(0.2)
        left = [line[-1] for line in lines if runs(line[-1])]
        for what, ok in (("variables", [line[:-1] for line in lines] == variables),
                         ("nothing is left", not left),
                         ("exit status", job.returncode == status),
                         ("who was killed",
                          ("rank 2 was ended by SIGKILL" in errors) == (how == "one killed"))):
            check(f"--gpus, {how}: {what}", ok,
                  f"{lines}, {left}, {job.returncode}, {errors}" * (not ok))
