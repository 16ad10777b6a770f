"""The folder of a training run, -o: its log, its checkpoints, and how the run goes on from the newest of them.

A checkpoint that a run can go on from is four files, which are there in this order and go in the opposite one:

    model_00000500.bin          the parameters after 500 steps, as llm.c has them
    state_00000500_00000.bin    llm.c's state: AdamW's moments, fp32 parameters, the position in the data; one each rank
    run_00000500.json           what llm.c has no place for: flags, data, outlier windows, the products' algorithms
    DONE_00000500               empty; the others are whole

The trainer imports this if it is given -o. Its numbers are copied to the host while training waits, and written behind
the training by a thread.
"""
import contextlib
import fcntl
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

from prepro_tinyshakespeare import (HEADER_BYTES, FileKind, UserError, available_memory, make_header,
                                    read_header, replace_file, say, to_float)
from train_gpt2 import ALONE, Row, mapped, matrices

# ---- llm.c's checkpoint


def in_file_order(c, views, real):
    """The tensors of a checkpoint as a file has them, matrix by matrix: arrays of the device, or zeros."""
    for row in c.file_table(real):
        parts = matrices(getattr(views, row.name) if hasattr(views, row.name) else np.zeros(row.size, row.dtype))
        yield from (part.reshape(-1)[: row.size // len(parts)] for part in parts)


def checkpoint_parts(model):
    """What a checkpoint of a model consists of: headers, then the parameters."""
    c, real = model.config, model.device.real
    yield from c.headers(next(version for version, dtype in c.STORED.items() if dtype == real))
    yield from in_file_order(c, model.params, real)


# ---- llm.c's state file

STATE = FileKind("state", 20240527, (1,), "restore it, or remove the DONE_ file of its step")
SEED = 13371337  # of llm.c's stochastic rounding, at its start. This trainer's depends on --seed and the step alone


def shuffle_record(P, n):
    """How a state file has a shuffle: the order of P files, the order of the n batches of the file that is being read,
    and the Mersenne Twister that made them."""
    return np.dtype([("P", "<u8"), ("files", "<i4", (P,)), ("n", "<u8"), ("order", "<i4", (n,)), ("seed", "<u8"),
                     ("left", "<i4"), ("next", "<u4"), ("key", "<u4", 624), ("matrix", "<u4", 2)])


def state_table(c, count, rank):
    """The tensors that a state file has, three times: whole ones; or, of a share of several ranks, the pieces of all
    layers of a tensor, as in llm.c, and at the end of rank 0's the tails (see dev/ranks.py)."""
    if not count:
        return c.file_table()
    from dev.ranks import cut
    in_memory = {row.name: row for row in c.parameter_table()}
    rows = [in_memory.get(row.name, row) for row in c.file_table()]  # words may be padded in memory alone
    cuts = [(row.name, *cut(row, count)) for row in rows]
    return [Row(name, (layers * piece,)) for name, layers, piece, _ in cuts] + [
        Row(f"{name}_tail", (layers * tail,)) for name, layers, _, tail in cuts if tail and not rank]


def of_share(table, views):
    """The tensors of a share, or zeros for what is none, as a state file has them."""
    for row in table:
        yield getattr(views, row.name)[: row.size] if hasattr(views, row.name) else np.zeros(row.size, row.dtype)


def state_parts(model, position):
    """What a state file consists of: arrays of the device's and the host's."""
    c, ranks = model.config, model.ranks
    header = make_header(STATE, 1, ranks.count, ranks.rank, 1, position.shuffle)  # 1: with fp32 parameters
    header[10] = model.step
    header.view("<u8")[[10, 11, 15, 16]] = SEED, SEED, position.place, position.next
    yield header
    for sets in ([model.m], [model.v], model.originals):
        table = state_table(c, ranks.count, ranks.rank) if ranks.zero else None
        for halves in zip(*(of_share(table, s) if table else in_file_order(c, s, np.float32) for s in sets)):
            for start in range(0, halves[0].size, 2**20):  # a device has little memory for what becomes fp32 there
                yield to_float(*(half[start : start + 2**20] for half in halves))
    if position.shuffle:
        P, n, (_, key, used, *_) = len(position.files), len(position.order), position.rng  # used: of 624 numbers
        yield np.array([(P, position.files, n, position.order, 0, max(1, 625 - used), used, key, (0, 0x9908B0DF))],
                       shuffle_record(P, n))


class State:
    """A state file, of one process or of a rank, of a model of config c. Raises UserError if it is damaged."""

    def __init__(self, path, c):
        self.path, header = path, read_header(path, STATE)
        self.count, self.rank, self.shuffle, self.step = header[2], header[3], header[5], header[10]
        self.place, self.next = np.array(header, "<i4").view("<u8")[15:17].tolist()
        self.sets = 2 + header[4]  # m, v, and perhaps the parameters
        size, sizes = os.path.getsize(path), []
        for shared in (0, self.count) if self.count > 1 else (0,):
            self.table = state_table(c, shared, self.rank)
            self.nbytes = sum(row.nbytes for row in self.table)
            self.end, self.shared, self.record = HEADER_BYTES + self.sets * self.nbytes, shared > 0, None
            self.record = self.read_record() if self.shuffle else None
            sizes.append(self.end + (self.record.nbytes if self.record is not None else 0))
            if size == sizes[-1] and (self.record is not None or not self.shuffle):
                return
        raise UserError(f"{path}: truncated, or of a model of another size, or of another --shuffle than it says: "
                        f"{size:,} bytes; expected {' or '.join(f'{each:,}' for each in sizes)}: {STATE.remedy}")

    def read_record(self):
        """The shuffle at the end of the file, or None if there is no such thing."""
        [P] = np.fromfile(self.path, "<u8", 1, offset=self.end) if self.end < os.path.getsize(self.path) else [2**62]
        if P > 2**24:
            return None
        n = np.fromfile(self.path, "<u8", 1, offset=self.end + 8 + 4 * int(P))
        if not len(n) or n[0] > 2**32:
            return None
        found = np.fromfile(self.path, shuffle_record(int(P), int(n[0])), 1, offset=self.end)
        return found[0] if len(found) else None

    def tensors(self, i):
        """(name, values) of its m, v or parameters, mapped into memory."""
        return mapped(self.path, self.table, HEADER_BYTES + i * self.nbytes)


def whole_tensors(states, i, c):
    """(name, values) of the m, v or parameters that the state files of all ranks have together."""
    if not states[0].shared:
        yield from states[0].tensors(i)
        return
    shares = [dict(state.tensors(i)) for state in states]
    for row in c.parameter_table():
        layers, tail = max(1, row.layers), shares[0].get(f"{row.name}_tail", np.zeros(0, np.float32))
        parts = [share[row.name].reshape(layers, -1) for share in shares] + [tail.reshape(layers, -1)]
        yield row.name, np.concatenate(parts, axis=1).reshape(row.whole_shape)


def load_state(path_of, model, data):
    """Set a model, and its data's position, to where a run stopped, of which path_of(rank) are the state files.
    Parameters stay if they have none. Raises UserError if a file is damaged, or of other data or batches."""
    c, ranks, P = model.config, model.ranks, len(data.paths)
    states = [State(path_of(0), c)]
    states += [State(path_of(rank), c) for rank in range(1, states[0].count)]
    for rank, state in enumerate(states):
        wish = [states[0].count, rank, int(data.shuffle), states[0].step, states[0].shared]
        if [state.count, state.rank, state.shuffle, state.step, state.shared] != wish or state.place >= P:
            raise UserError(f"{state.path}: of rank {state.rank} of {state.count}, after step {state.step}, with "
                            f"--shuffle {state.shuffle}, in file {state.place}; expected rank {rank} of {wish[0]}, "
                            f"step {wish[3]}, --shuffle {wish[2]} and one of the {P} files of -i")
    as_before = len(states) == ranks.count
    load_position(states[min(ranks.rank, len(states) - 1)], data, as_before, ranks.rank < len(states))
    known = {row.name for row in c.parameter_table()}
    for i, sets in enumerate([[model.m], [model.v], model.originals][: states[0].sets]):
        tensors = whole_tensors(states, i, c)
        if sets is not model.originals:
            tensors = ((name, values) for name, values in tensors if name in known)
        model.set_tensors(tensors, sets)
    model.step = states[0].step
    if not as_before:
        say(f"WARNING: the run had {len(states)} ranks until step {model.step}, and has {ranks.count} from now on: the "
            "data goes on with the next file, or with an only one from its beginning")


def load_position(state, data, as_before, known):
    """Set data's position to that of a state file; or, if the number of ranks was another, to the file after it, in the
    order that the rank had, or, if it is not known, would have had."""
    P, position, record = len(data.paths), data.position(), state.record
    if data.shuffle:
        if record["P"] != P or sorted(record["files"]) != list(range(P)):
            raise UserError(f"{state.path}: of other data than the {P} files of -i: expected those of its run")
        if known:
            position.files = record["files"].tolist()
            position.rng = "MT19937", record["key"], 624 if record["left"] == 1 else int(record["next"])
    position.place, position.next = state.place, state.next
    if as_before:
        batches = data.batches_of[position.files[position.place]]
        if state.next > batches or data.shuffle and record["n"] != batches:
            raise UserError(f"{state.path}: has {record['n'] if data.shuffle else state.next} batches of file "
                            f"{state.place}, and -i, -b and -t make {batches}: expected those of its run")
        position.order = record["order"].tolist() if data.shuffle else position.order
        data.files = position.files
        data.open(position.place)
        data.next = position.next
        if data.shuffle:  # or else open() has made it
            data.order = position.order
        data.rng.set_state(position.rng)
    else:
        data.files, data.place = position.files, position.place
        data.rng.set_state(position.rng)
        data.next_file()


# ---- Files that are written behind the training

CHUNK = 2**26  # bytes that are copied to the host, and written, at a time
WHOLE, END = object(), object()  # stand in the writer's queue behind a file, and behind all of them


def host_memory(device, nbytes):
    """Memory of the host's, page-locked if it is for a GPU, whose copies are then several times as fast."""
    if device.name == "cpu":
        return np.empty(nbytes, np.uint8)
    import cupyx
    return cupyx.empty_pinned(nbytes, np.uint8)


class Writer:
    """Writes files in a thread. save() returns when all numbers are in the host's memory, in chunks that are allocated
    once, here. Where the host has little, there are few, and save() waits until some are written."""

    def __init__(self, device, nbytes, sharers=1):
        self.free, self.filled, self.thread = queue.SimpleQueue(), queue.SimpleQueue(), None
        for _ in range(max(2, min(-(-nbytes // CHUNK) + 1, available_memory() // 3 // sharers // CHUNK))):
            self.free.put(host_memory(device, CHUNK))

    def save(self, files, finish):
        """Write files, {path: an iterable of arrays}. Then the thread calls finish(None); or, if that or a file fails,
        finish(the exception)."""
        self.wait()
        self.thread = threading.Thread(target=self.write, args=(list(files), finish), daemon=True)
        begun = time.perf_counter()
        self.thread.start()
        try:
            for parts in files.values():
                self.copy(parts)
        finally:
            self.waited = time.perf_counter() - begun
            self.filled.put(END)

    def wait(self):
        if self.thread:
            self.thread.join()

    def copy(self, parts):
        """Copy the arrays of a file to chunks, for the thread to write."""
        chunk, used = self.free.get(), 0
        for part in parts:
            rest = part.reshape(-1).view(np.uint8)
            while rest.size:
                count = min(rest.size, CHUNK - used)
                to = chunk[used : used + count]
                if isinstance(rest, np.ndarray):
                    to[...] = rest[:count]
                else:
                    rest[:count].get(out=to)
                rest, used = rest[count:], used + count
                if used == CHUNK:
                    self.filled.put((chunk, used))
                    chunk, used = self.free.get(), 0
        self.filled.put((chunk, used))
        self.filled.put(WHOLE)

    def chunks(self):
        """The bytes of the next file."""
        while (item := self.filled.get()) is not WHOLE:
            if item is END:
                self.filled.put(END)
                raise RuntimeError("the numbers could not be copied")
            chunk, used = item
            try:
                yield chunk[:used]
            finally:  # also if it could not be written
                self.free.put(chunk)

    def write(self, paths, finish):
        failure = None
        try:
            for path in paths:
                with contextlib.closing(self.chunks()) as chunks:
                    replace_file(path, chunks)
        except BaseException as e:  # whatever it is, the training goes on
            failure = e
        for item in iter(self.filled.get, END):  # after a failure, save() still fills chunks, and waits for free ones
            if item is not WHOLE:
                self.free.put(item[0])
        try:
            finish(failure)
        except BaseException as e:
            finish(e)


# ---- The folder

CHECKPOINT = "model_{:08d}.bin", "state_{:08d}_{:05d}.bin", "run_{:08d}.json", "DONE_{:08d}"  # in the order of writing
MUST_AGREE = {"model": "-e", "batch_size": "-b", "seq_len": "-t", "total_batch": "-d", "shuffle": "--shuffle",
              "overfit": "-a"}
MAY_DIFFER = ("output", "train_data", "val_data", "resume", "checkpoint_every", "checkpoints_kept", "graph", "nvtx",
              "checkpoints_major", "val_every", "val_batches", "sample_every", "sample_tokens", "hellaswag", "sample",
              "temperature", "top_k", "dry_run", "replay", "seed", "gpus", "zero", "log_ranks")  # others: a warning


class RunFolder:
    """-o. step: of the newest whole checkpoint, or None. checkpoint: with -y 1, that one's parameters, or None. Of
    several ranks, each writes its own state, and the first all the rest."""

    def __init__(self, flags, ranks=ALONE):
        self.ranks = ranks
        self.path, self.flags, self.step, self.checkpoint, self.writer = Path(flags.output), flags, None, None, None
        self.news, self.failed, self.full, self.unwritten = [], None, False, b""
        try:
            if flags.sample is None:
                self.path.mkdir(parents=True, exist_ok=True)
            steps = ranks.exchange(self.steps(), "the checkpoints")[0]
        except OSError as e:
            raise UserError(f"-o {self.path}: {e.strerror}; expected a folder to write to") from None
        if steps and not flags.resume and flags.sample is None:
            raise UserError(f"-o {self.path}: holds checkpoints of another run, up to step {steps[-1]}: go on from "
                            "that with -y 1, or give another folder")
        if flags.resume and steps:
            self.step, self.checkpoint = steps[-1], self.file(0, steps[-1])
            for path in (self.file(i, self.step) for i in range(2)):
                if not path.exists():
                    raise UserError(f"{self.file(3, self.step)}: is there, and {path.name} is not: restore that, or "
                                    "remove the former to go on from an older checkpoint")
            self.run = self.read_notes(self.file(2, self.step))
            for name, value in self.run["flags"].items() if self.run else ():  # as then, where nothing else is said
                if name not in ("device", "gpus", "log_ranks") and getattr(flags, name, value) is None:
                    setattr(flags, name, value)

    def file(self, i, step, rank=0):
        return self.path / CHECKPOINT[i].format(step, rank)

    def steps(self):
        """The steps of the whole checkpoints, in order."""
        return sorted(int(path.name[5:]) for path in self.path.iterdir() if re.fullmatch(r"DONE_\d{8}", path.name))

    def remove(self, step):
        for i in reversed(range(len(CHECKPOINT))):
            for path in sorted(self.path.glob(CHECKPOINT[i].format(step, 0).replace("_00000.bin", "_?????.bin"))):
                path.unlink(missing_ok=True)

    def begin(self, model, data):
        """Go on from the checkpoint, if there is one, and open the log."""
        self.data = [[Path(path).name, os.path.getsize(path)] for path in data.paths]
        if self.ranks.rank:
            name, *_ = self.ranks.exchange(None, "the folder")
            if not (self.path / name).exists():
                raise UserError(f"-o {self.path}: {socket.gethostname()} does not see what rank 0 has there: expected "
                                "a folder that all ranks share")
            self.ranks.exchange(None, "a look at the folder")
            if self.checkpoint:
                self.go_on(model, data)
            if self.flags.checkpoint_every:
                self.prepare(model)
            return
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"-o {self.path}: another run is writing to this folder: end it, or give another") from None
        except OSError:  # a file system without locks
            pass
        mark = self.path / f"main.log.{os.getpid()}.tmp"  # goes with what a killed run has left, below
        mark.touch()
        self.ranks.exchange(mark.name, "the folder")
        self.ranks.exchange(None, "a look at the folder")
        if self.checkpoint:
            self.go_on(model, data)
        for path in [*self.path.iterdir()]:  # what a run has left that was killed while it wrote or removed files
            state = re.fullmatch(r"state_(\d{8})_\d{5}\.bin", path.name)
            if re.fullmatch(r"(main\.log|(model|state|run|replay|DONE)_\d{8}.*)\.\d+\.tmp|ranks_[0-9a-f]{12}.*",
                            path.name):
                path.unlink()
            elif state and not self.file(3, int(state[1])).exists():
                self.remove(int(state[1]))
        path, kept = self.path / "main.log", []
        if self.flags.resume and path.exists():  # what the run is going to log again is taken out
            kept = [line for line in path.read_text().splitlines(keepends=True)
                    if (found := re.match(r"s:(\d+) .*\n", line)) and int(found[1]) < (self.step or 0)]
        replace_file(path, ["".join(kept).encode()])
        self.file_of_log = open(path, "ab", buffering=0)
        if self.flags.checkpoint_every:
            self.prepare(model)

    def prepare(self, model):
        """Make a writer with room for a whole checkpoint."""
        if not self.writer:
            c, ranks = model.config, self.ranks
            state = 3 * sum(row.nbytes for row in state_table(c, ranks.count if ranks.zero else 0, ranks.rank))
            parameters = 0 if ranks.rank else sum(row.nbytes for row in c.file_table(model.device.real))
            self.writer = Writer(model.device, state + parameters, ranks.here)

    def go_on(self, model, data):
        """Set a model and its data to where the newest checkpoint was written. Raises UserError if its run had other
        data or batches."""
        state, device, run = self.file(1, self.step), model.device, self.run
        if run:
            self.compare(self.file(2, self.step))
            device.put(model.adam.windows, run["windows"])
            device.put(model.adam.seen, run["seen"])
            products = run["products"]
            if products["of"] and products["of"] == getattr(device, "cache", None):
                sets = {key: value for key, value in device.choices.items() if key.endswith("False)")}
                device.choices = sets | products["algorithms"]  # what adds takes the choice of what sets
            elif products["of"]:
                say(f"WARNING: algorithms of matrix products were chosen for {products['of']}: this device chooses its "
                    "own, and bits may differ")
        else:
            say(f"WARNING: there is no {self.file(2, self.step)}: flags and data of that run are not known, and "
                "windows of outliers are empty")
        load_state(lambda rank: self.file(1, self.step, rank), model, data)
        device.go_on(run["scales"] if run else [])
        if model.step != self.step:
            raise UserError(f"{state}: of step {model.step}; expected {self.step}, as its name says")
        say(f"resumed      | after step {self.step}, from {state} (-y)")

    def read_notes(self, path):
        """What a run_*.json says, or None if there is none. Raises UserError."""
        try:
            run = json.loads(path.read_text())
            names = "flags", "data", "windows", "seen", "products"
            return {**{name: run[name] for name in names}, "scales": run.get("scales", [])}  # which only FP8 has
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path}: could not be read ({e}): restore it, or remove it to go on without") from None

    def compare(self, notes):
        """Raise UserError if the run had other data or batches, or has more steps, and warn of other flags."""
        run = self.run
        if self.step > self.flags.steps:
            raise UserError(f"-x {self.flags.steps}: expected {self.step} or more, the steps of {self.checkpoint}")
        if run["data"] != self.data:
            before, now = next((pair for pair in zip(run["data"], self.data) if pair[0] != pair[1]),
                               (f"{len(run['data'])} files", f"{len(self.data)} files"))
            raise UserError(f"{notes}: of a run on {before}, and -i is {now}: expected the same names and sizes")
        others = read_header(self.file(1, self.step), STATE)[2] != self.ranks.count  # then the data's place is another
        for name, now in vars(self.flags).items():
            before = run["flags"].get(name, now)
            if before != now and name in MUST_AGREE and not (others and name in ("batch_size", "total_batch")):
                flag = MUST_AGREE[name]
                raise UserError(f"{notes}: of a run with {flag} {before}, and now it is {now}: expected the same")
            rounds = name == "seed" and self.flags.moments == "bf16"
            if before != now and (rounds or name not in MAY_DIFFER):
                flag = f"--{name.replace('_', '-')}"
                say(f"WARNING: {flag} was {before} until step {self.step}, and is {now} from now on")

    def log(self, line):
        """Append a line to main.log, in llm.c's form: s is the step, from 0; trl a training loss; lr the learning rate;
        norm the gradient's; tel a validation loss; eval HellaSwag's share of right answers. If the disk is full, lines
        wait until they can be written."""
        if self.ranks.rank:
            return self.tell()
        self.unwritten += f"{line}\n".encode()
        try:
            self.unwritten = self.unwritten[self.file_of_log.write(self.unwritten) :]
            self.full = self.full and bool(self.unwritten)
        except OSError as e:
            if not self.full:
                self.news.append(f"WARNING: main.log could not be written ({e.strerror}); its lines wait until it can")
            self.full = True
        self.tell()

    def tell(self):
        """Say what the writer has done since."""
        while self.news:
            say(self.news.pop(0))

    def save(self, model, position, whole=False, prunes=True):
        """Write a checkpoint: a whole one, or only the parameters. One that is there already stays. prunes: whether old
        ones are removed behind it, which a run that went wrong still needs."""
        self.prepare(model)
        self.writer.wait()
        step, begun, device, rank = model.step, time.perf_counter(), model.device, self.ranks.rank
        if whole and self.file(3, step).exists() or rank and not whole:
            return
        files = {self.file(0, step): checkpoint_parts(model)} if not rank else {}
        if whole:
            files[self.file(1, step, rank)] = state_parts(model, position)
        notes = dict(step=step, flags=vars(self.flags), data=self.data, windows=device.get(model.adam.windows).tolist(),
                     seen=device.get(model.adam.seen).tolist(), scales=device.state(),
                     products=dict(of=getattr(device, "cache", None), algorithms=dict(getattr(device, "choices", {}))))

        def finish(failure):
            failure = failure and (str(failure) or type(failure).__name__)
            if whole and not self.agreed:  # whether all ranks' states are there
                self.agreed = True
                failure = next(filter(None, self.ranks.exchange(failure, f"the checkpoint of step {step}")), None)
                if not (failure or rank):
                    try:
                        replace_file(self.file(2, step), [json.dumps(notes, indent=1).encode()])
                        replace_file(self.file(3, step), [])
                    except UserError as e:
                        failure = str(e)
                failure = self.ranks.exchange(failure, f"the end of the checkpoint of step {step}")[0]
            if failure:
                self.failed = f"no checkpoint of step {step}: {failure}"
                if whole and not rank:
                    self.remove(step)  # what there is of it; the disk may be full
                newest = f"; the newest whole one is of step {self.steps()[-1]}" if self.steps() else ""
                self.news.append(f"WARNING: {self.failed}{newest}")
                return
            self.failed = None
            seconds, waited = time.perf_counter() - begun, self.writer.waited
            state = " and its state" if whole and not rank else ""
            self.news.append(f"wrote {next(iter(files))}{state} in {seconds:.1f} s, for which training waited "
                             f"{waited:.2f} s")
            if whole and prunes and not rank:
                try:
                    self.prune()
                except OSError as e:
                    self.news.append(f"WARNING: an old checkpoint could not be removed ({e})")

        self.step, self.agreed = step, False
        self.writer.save(files, finish)

    def prune(self):
        """Remove old checkpoints, but for the -nk newest and those of multiples of -nm."""
        kept, major = self.flags.checkpoints_kept, self.flags.checkpoints_major
        for step in self.steps()[:-kept] if kept else ():
            if not major or step % major:
                self.remove(step)

    def close(self):
        """Wait for the writer. Raises UserError if the last checkpoint could not be written."""
        if self.writer:
            self.writer.wait()
        self.tell()
        if not self.ranks.rank:
            os.close(self.lock)
        if self.failed and sys.exc_info()[0] is None:
            raise UserError(self.failed)
