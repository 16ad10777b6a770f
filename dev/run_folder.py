"""The folder of a training run, -o: its log, its checkpoints, and how the run goes on from the newest of them.

A checkpoint that a run can go on from is four files, which are there in this order and go in the opposite one:

    model_00000500.bin          the parameters after 500 steps, as llm.c has them
    state_00000500_00000.bin    llm.c's state: AdamW's moments, fp32 parameters, the position in the data
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
import sys
import threading
import time
from pathlib import Path

import numpy as np

from prepro_tinyshakespeare import (HEADER_BYTES, FileKind, UserError, available_memory, check_size, make_header,
                                    read_header, replace_file, say)
from train_gpt2 import checkpoint_parts, in_file_order, mapped

# ---- llm.c's state file

STATE = FileKind("state", 20240527, (1,), "restore it, or remove the DONE_ file of its step")
SEED = 13371337  # of llm.c's stochastic rounding, at its start. This trainer rounds to nearest


def shuffle_record(P, n):
    """How a state file has a shuffle: the order of P files, the order of the n batches of the file that is being read,
    and the Mersenne Twister that made them."""
    return np.dtype([("P", "<u8"), ("files", "<i4", (P,)), ("n", "<u8"), ("order", "<i4", (n,)), ("seed", "<u8"),
                     ("left", "<i4"), ("next", "<u4"), ("key", "<u4", 624), ("matrix", "<u4", 2)])


def state_parts(model, position):
    """What a state file consists of: arrays of the device's and the host's."""
    header = make_header(STATE, 1, 1, 0, 1, position.shuffle)  # of process 0 of 1, with fp32 parameters
    header[10] = model.step
    header.view("<u8")[[10, 11, 15, 16]] = SEED, SEED, position.place, position.next
    yield header
    for views in (model.m, model.v, model.originals):
        yield from in_file_order(model.config, views, np.float32)
    if position.shuffle:
        P, n, (_, key, used, *_) = len(position.files), len(position.order), position.rng  # used: of 624 numbers
        yield np.array([(P, position.files, n, position.order, 0, max(1, 625 - used), used, key, (0, 0x9908B0DF))],
                       shuffle_record(P, n))


def load_state(path, model, data):
    """Set a model, and its data's position, to where a run stopped. Parameters stay if the file has none. Raises
    UserError if it is damaged, or of other data or batches."""
    header, table, P = read_header(path, STATE), model.config.file_table(), len(data.paths)
    place, following = np.array(header, "<i4").view("<u8")[15:17].tolist()
    sets, size = [model.m, model.v, model.originals][: 2 + header[4]], sum(row.nbytes for row in table)
    end, position, n = HEADER_BYTES + len(sets) * size, data.position(), 0
    if header[2:4] != [1, 0] or header[5] != data.shuffle or place >= P:
        raise UserError(f"{path}: of process {header[3]} of {header[2]}, with --shuffle {header[5]}, in file {place}; "
                        f"expected process 0 of 1, --shuffle {int(data.shuffle)} and one of the {P} files of -i")
    if data.shuffle:
        start = np.fromfile(path, shuffle_record(P, 0), 1, offset=end)
        if not len(start) or start["P"] != P or sorted(start["files"][0]) != list(range(P)):
            raise UserError(f"{path}: truncated, or of a model of another size, or of other data than the {P} files "
                            "of -i: expected those of its run")
        position.files = start["files"][0].tolist()
        [n] = np.fromfile(path, shuffle_record(P, 0)["n"], 1, offset=end + 8 + 4 * P).tolist()
    batches = data.batches_of[position.files[place]]
    if following > batches or data.shuffle and n != batches:
        raise UserError(f"{path}: has {n or following} batches of file {place}, and -i, -b and -t make {batches}: "
                        "expected those of its run")
    check_size(path, STATE, end + data.shuffle * shuffle_record(P, n).itemsize)

    for i, views in enumerate(sets):
        also = [model.params] if views is model.originals else []
        model.set_tensors(mapped(path, table, HEADER_BYTES + i * size), views, *also)
    if data.shuffle:
        [record] = np.fromfile(path, shuffle_record(P, n), 1, offset=end)
        position.rng = "MT19937", record["key"], 624 if record["left"] == 1 else int(record["next"])
        position.order = record["order"].tolist()
    position.place, position.next, model.step = place, following, header[10]
    data.go_to(position)


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

    def __init__(self, device, nbytes):
        self.free, self.filled, self.thread = queue.SimpleQueue(), queue.SimpleQueue(), None
        for _ in range(max(2, min(-(-nbytes // CHUNK) + 1, available_memory() // 3 // CHUNK))):
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

CHECKPOINT = "model_{:08d}.bin", "state_{:08d}_00000.bin", "run_{:08d}.json", "DONE_{:08d}"  # in the order of writing
MUST_AGREE = {"model": "-e", "batch_size": "-b", "seq_len": "-t", "total_batch": "-d", "shuffle": "--shuffle",
              "overfit": "-a"}
MAY_DIFFER = ("output", "train_data", "val_data", "resume", "checkpoint_every", "checkpoints_kept", "graph",
              "checkpoints_major", "val_every", "val_batches", "sample_every", "sample_tokens", "hellaswag", "sample",
              "temperature", "top_k", "dry_run", "replay", "seed")  # any other flag that differs is a warning


class RunFolder:
    """-o. step: of the newest whole checkpoint, or None. checkpoint: with -y 1, that one's parameters, or None."""

    def __init__(self, flags):
        self.path, self.flags, self.step, self.checkpoint, self.writer = Path(flags.output), flags, None, None, None
        self.news, self.failed, self.full, self.unwritten = [], None, False, b""
        try:
            if flags.sample is None:
                self.path.mkdir(parents=True, exist_ok=True)
            steps = self.steps()
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
                if name != "device" and getattr(flags, name, value) is None:
                    setattr(flags, name, value)

    def file(self, i, step):
        return self.path / CHECKPOINT[i].format(step)

    def steps(self):
        """The steps of the whole checkpoints, in order."""
        return sorted(int(path.name[5:]) for path in self.path.iterdir() if re.fullmatch(r"DONE_\d{8}", path.name))

    def remove(self, step):
        for i in reversed(range(len(CHECKPOINT))):
            self.file(i, step).unlink(missing_ok=True)

    def begin(self, model, data):
        """Go on from the checkpoint, if there is one, and open the log."""
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"-o {self.path}: another run is writing to this folder: end it, or give another") from None
        except OSError:  # a file system without locks
            pass
        self.data = [[Path(path).name, os.path.getsize(path)] for path in data.paths]
        if self.checkpoint:
            self.go_on(model, data)
        for path in [*self.path.iterdir()]:  # what a run has left that was killed while it wrote or removed files
            state = re.fullmatch(r"state_(\d{8})_00000\.bin", path.name)
            if re.fullmatch(r"(main\.log|(model|state|run|replay|DONE)_\d{8}.*)\.\d+\.tmp", path.name):
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
            numbers = sum(row.size for row in model.config.file_table())
            self.writer = Writer(model.device, numbers * (12 + np.dtype(model.device.real).itemsize))

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
        load_state(state, model, data)
        if model.step != self.step:
            raise UserError(f"{state}: of step {model.step}; expected {self.step}, as its name says")
        say(f"resumed      | after step {self.step}, from {state} (-y)")

    def read_notes(self, path):
        """What a run_*.json says, or None if there is none. Raises UserError."""
        try:
            run = json.loads(path.read_text())
            return {name: run[name] for name in ("flags", "data", "windows", "seen", "products")}
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
        for name, now in vars(self.flags).items():
            before = run["flags"].get(name, now)
            if before != now and name in MUST_AGREE:
                flag = MUST_AGREE[name]
                raise UserError(f"{notes}: of a run with {flag} {before}, and now it is {now}: expected the same")
            if before != now and name not in MAY_DIFFER:
                flag = f"--{name.replace('_', '-')}"
                say(f"WARNING: {flag} was {before} until step {self.step}, and is {now} from now on")

    def log(self, line):
        """Append a line to main.log, in llm.c's form: s is the step, from 0; trl a training loss; lr the learning rate;
        norm the gradient's; tel a validation loss; eval HellaSwag's share of right answers. If the disk is full, lines
        wait until they can be written."""
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
        step, begun, device = model.step, time.perf_counter(), model.device
        if whole and self.file(3, step).exists():
            return
        files = {self.file(0, step): checkpoint_parts(model)}
        if whole:
            files[self.file(1, step)] = state_parts(model, position)
        notes = dict(step=step, flags=vars(self.flags), data=self.data, windows=device.get(model.adam.windows).tolist(),
                     seen=device.get(model.adam.seen).tolist(),
                     products=dict(of=getattr(device, "cache", None), algorithms=dict(getattr(device, "choices", {}))))

        def finish(failure):
            if failure:
                self.failed = f"no checkpoint of step {step}: {failure or type(failure).__name__}"
                if whole:
                    self.remove(step)  # what there is of it; the disk may be full
                newest = f"; the newest whole one is of step {self.steps()[-1]}" if self.steps() else ""
                self.news.append(f"WARNING: {self.failed}{newest}")
                return
            if whole:
                replace_file(self.file(2, step), [json.dumps(notes, indent=1).encode()])
                replace_file(self.file(3, step), [])
            self.failed = None
            seconds, waited = time.perf_counter() - begun, self.writer.waited
            self.news.append(f"wrote {self.file(0, step)}{' and its state' * bool(whole)} in {seconds:.1f} s, for "
                             f"which training waited {waited:.2f} s")
            if whole and prunes:
                try:
                    self.prune()
                except OSError as e:
                    self.news.append(f"WARNING: an old checkpoint could not be removed ({e})")

        self.step = step
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
        os.close(self.lock)
        if self.failed and sys.exc_info()[0] is None:
            raise UserError(self.failed)
