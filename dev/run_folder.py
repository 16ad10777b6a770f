"""The folder of a training run, -o: its log, its checkpoints, and how the run goes on from the newest of them.

A checkpoint that a run can go on from is four files, which are there in this order and go in the opposite one:

    model_00000500.bin          the parameters after 500 steps, as llm.c has them
    state_00000500_00000.bin    llm.c's state: AdamW's moments, fp32 parameters, the position in the data; one each rank
    run_00000500.json           what llm.c has no place for: flags, data, outlier windows, the products' algorithms
    DONE_00000500               empty; the others are whole

A run writes run_00000000.json at its start, so that it can go on as itself before it has a checkpoint. Nothing that an
earlier run has written is overwritten. Lines of main.log whose steps are made again move to main.log.old.

The trainer imports this if it is given -o. Its numbers are copied to the host while training waits, and written behind
the training by a thread.
"""
import argparse
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import queue
import re
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

from prepro_tinyshakespeare import (FLAGS, HEADER_BYTES, FileKind, UserError, available_memory,
                                    count_tokens, files_of, make_header, read_header, replace_file, say,
                                    to_float)
from train_gpt2 import ALONE, WINDOW, Config, Row, mapped, matrices, read_parameters

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

STATE = FileKind("state", 20240527, (1,), "restore it")
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


class Damage(UserError):
    """A checkpoint is damaged."""


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


def read_states(path_of, c):
    """The state files of all ranks of a run, path_of(rank). Raises UserError unless they belong together."""
    states = [State(path_of(0), c)]
    states += [State(path_of(rank), c) for rank in range(1, states[0].count)]
    first = states[0]
    for rank, state in enumerate(states):
        if [state.count, state.rank, state.step, state.shared] != [first.count, rank, first.step, first.shared]:
            raise Damage(f"{state.path}: of rank {state.rank} of {state.count}, after step {state.step}; expected rank "
                         f"{rank} of {first.count}, step {first.step}, and the same --zero: {STATE.remedy}")
    return states


def finite(path, kind, tensors):
    """The same (name, values). Raises Damage at a number that is not finite."""
    from dev.replay import bad_place
    for name, values in tensors:
        at = bad_place(values)
        if at is not None:
            value = to_float(np.array(values[at]).reshape(1))[0]
            raise Damage(f"{path}: {kind} {name} is {value} at {[int(x) for x in at]}; expected finite numbers")
        yield name, values


def finite_sets(states, c):
    """whole_tensors of all that state files have, of which each must be finite."""
    for i, kind in enumerate(("AdamW's m of", "AdamW's v of", "the fp32 parameter")[: states[0].sets]):
        yield finite(states[0].path, kind, whole_tensors(states, i, c))


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


def load_state(path_of, model, data, had=None):
    """Set a model, and its data's position, to where a run stopped, of which path_of(rank) are the state files. had:
    that run's B, if it is known. Parameters stay if they have none. Raises Damage if a file is damaged, or of other
    data, and UserError if it does not fit this B."""
    c, ranks, P = model.config, model.ranks, len(data.paths)
    states = read_states(path_of, c)
    for state in states:
        if state.shuffle != int(data.shuffle) or state.place >= P:
            raise Damage(f"{state.path}: with --shuffle {state.shuffle}, in file {state.place}; expected --shuffle "
                         f"{int(data.shuffle)} and one of the {P} files of -i")
    as_before = len(states) == ranks.count
    load_position(states[min(ranks.rank, len(states) - 1)], data, as_before, ranks.rank < len(states), had)
    known = {row.name for row in c.parameter_table()}
    for tensors, sets in zip(finite_sets(states, c), ([model.m], [model.v], model.originals)):
        if sets is not model.originals:
            tensors = ((name, values) for name, values in tensors if name in known)
        model.set_tensors(tensors, sets)
    model.step = states[0].step
    if not as_before:
        say(f"WARNING: the run had {len(states)} ranks until step {model.step}, and has {ranks.count} from now on: the "
            "data goes on with the next file, or with an only one from its beginning")


def load_position(state, data, as_before, known, had=None):
    """Set data's position to that of a state file; or, if the number of ranks was another, to the file after it, in the
    order that the rank had, or, if it is not known, would have had."""
    P, position, record = len(data.paths), data.position(), state.record
    if data.shuffle:
        if record["P"] != P or sorted(record["files"]) != list(range(P)):
            raise Damage(f"{state.path}: of other data than the {P} files of -i: expected those of its run")
        if known:
            position.files = record["files"].tolist()
            position.rng = "MT19937", record["key"], 624 if record["left"] == 1 else min(int(record["next"]), 624)
    if as_before:
        file = position.files[state.place]
        place, order = translated(state, data, file, had or data.B)
        data.files = position.files
        data.open(state.place)
        data.next = place
        if data.shuffle:  # or else open() has made it
            data.order = order
        data.rng.set_state(position.rng)
    else:
        data.files, data.place = position.files, state.place
        data.rng.set_state(position.rng)
        data.next_file()


def translated(state, data, file, had):
    """(how many batches of a file are done, the order of all), of a state whose run had another B. Each of its batches
    becomes several smaller ones, so that the same tokens follow. What fills no batch of that run comes last."""
    path, before = data.paths[file], data.size // data.B * had  # tokens of a batch of that run
    batches, done = (count_tokens(path)[0] - 1) // before, state.next * before
    if state.next > batches or data.shuffle and sorted(state.record["order"]) != list(range(batches)):
        count = state.record["n"] if data.shuffle else state.next
        raise Damage(f"{state.path}: has {count} batches of file {state.place}, or an order that has one twice; -i, "
                     f"-b and -t make {batches}: expected those of its run")
    if data.shuffle and data.B != had and data.ranks.count > 1:
        raise UserError(f"-b {data.B}: the run had -b {had}, and with --shuffle each rank has an order of its own for "
                        f"batches of that size: expected -b {had}, or another number of ranks")
    if done % data.size or data.shuffle and before % data.size:
        raise UserError(f"-b {data.B}: the run had -b {had}, and stopped after {done:,} tokens of {path}, where no "
                        f"batch of -b {data.B} ends: expected -b {had}, or a number that divides it")
    parts, order = before // data.size, []
    if data.shuffle:
        order = [i * parts + part for i in state.record["order"].tolist() for part in range(parts)]
        order += range(len(order), data.batches_of[file])
        if data.B != had:
            say(f"WARNING: the order of {path} stays, with each batch of -b {had} cut into {parts}; files after it are "
                f"shuffled in batches of -b {data.B}")
    return done // data.size, order


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
OF_A_RUN = re.compile(r"main\.log(\.old)?|(model|state|run|DONE|replay)_\d{8}(_\d{5})?(\.\w+)?")  # never overwritten
LEFT = re.compile(r"(main\.log.*|(model|state|run|replay|DONE)_\d{8}.*)\.\d+\.tmp|ranks_[0-9a-f]{12}.*")  # by a kill
MUST_AGREE = {"model": "-e", "seq_len": "-t", "total_batch": "-d", "shuffle": "--shuffle", "overfit": "-a"}
MAY_DIFFER = ("output", "train_data", "val_data", "resume", "checkpoint_every", "checkpoints_kept", "graph", "nvtx",
              "checkpoints_major", "val_every", "val_batches", "sample_every", "sample_tokens", "hellaswag", "sample",
              "temperature", "top_k", "dry_run", "replay", "seed", "gpus", "zero", "log_ranks")  # others: a warning
PATHS = {"train_data": "-i", "val_data": "-j", "hellaswag": "--hellaswag", "model": "-e"}


def sketch(path):
    """A hash of a file's size and of 16 parts of it: whole checkpoints and data take too long to read."""
    size, digest = os.path.getsize(path), hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        for i in range(16):
            file.seek(i * size // 16)
            digest.update(file.read(2**16))
    return digest.hexdigest()[:12]


def from_anywhere(name, value):
    """A flag's value, which if it is a path, or a pattern, is found from any folder."""
    if value is None or name not in PATHS or name == "model" and not (os.path.exists(value) or value.endswith(".bin")):
        return value
    return os.path.join(glob.escape(os.getcwd()) if set(value) & {*"*?["} else os.getcwd(), value)


def numbers(values, shape):
    """Whether values, of a JSON file, are numbers of this shape."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        return False
    return array.dtype.kind in "iuf" and array.shape == shape


def is_flag(kind, value):
    """Whether a flag of this kind, a type or choices, may have a value."""
    if value is None or isinstance(kind, tuple):
        return value is None or value in kind
    try:
        return not isinstance(value, bool) and kind(str(value)) == value
    except (argparse.ArgumentTypeError, ValueError):
        return False


def is_data(files):
    return isinstance(files, list) and all(
        isinstance(file, list) and [type(x) for x in file] in ([str, int], [str, int, str]) for file in files)


def is_choice(products):
    """Whether these are the algorithms of products, as a device has chosen them."""
    if not (isinstance(products, dict) and isinstance(products.get("algorithms"), dict)):
        return False
    return isinstance(products.get("of"), str | None) and all(
        isinstance(x, list) and all(type(number) is int and 0 <= number < 2**64 for number in x)
        for x in products["algorithms"].values())


FIELDS = {"flags": (lambda x: isinstance(x, dict), "names and values"), "data": (is_data, "[[name, bytes, hash], ...]"),
          "windows": (lambda x: numbers(x, (2, WINDOW)), f"2 lists of {WINDOW} numbers"),
          "seen": (lambda x: numbers(x, (1,)), "[a number]"),
          "products": (is_choice, '{"of": a device, "algorithms": {product: whole numbers}}'),
          "scales": (lambda x: x == [] or isinstance(x, list) and numbers(x, (len(x),)), "numbers")}


def read_notes(path):
    """What a run_*.json says, or None if there is none. Raises UserError."""
    def wrong(what):
        return UserError(f"{path}: {what}: restore it, or remove it to go on without")

    try:
        run = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise wrong(f"could not be read ({e})") from None
    if not isinstance(run, dict):
        raise wrong(f"is {json.dumps(run):.40}; expected the fields {', '.join(FIELDS)}")
    run.setdefault("scales", [])  # which only FP8 has
    fields = [(name, run.get(name), good(run.get(name)), wish) for name, (good, wish) in FIELDS.items()]
    if fields[0][2]:
        keys = [(long.removeprefix("--").replace("-", "_"), kind) for _, long, kind, *_ in FLAGS]
        fields += [(f"flags.{key}", run["flags"].get(key), is_flag(kind, run["flags"].get(key)), "a value that "
                    f"{MUST_AGREE.get(key, '--' + key.replace('_', '-'))} may have") for key, kind in keys]
    for name, value, good, wish in fields:
        if not good:
            found = f"is {json.dumps(value):.40}" if name in run or "." in name else "is missing"
            raise wrong(f"{name} {found}; expected {wish}")
    return run


class RunFolder:
    """-o. step: of the newest whole checkpoint, or None. checkpoint: with -y 1, that one's parameters, or None. run:
    what it says of its run. Of several ranks, each writes its own state, and the first all the rest."""

    def __init__(self, flags, ranks=ALONE, kind=Config):
        self.ranks, self.kind = ranks, kind
        self.path, self.flags, self.step, self.checkpoint, self.writer = Path(flags.output), flags, None, None, None
        self.news, self.failed, self.full, self.unwritten, self.run = [], None, False, b"", None
        try:
            steps, started = ranks.exchange(None if ranks.rank else self.look(), "the checkpoints")[0]
        except OSError as e:
            raise UserError(f"-o {self.path}: {e.strerror}; expected a folder to write to") from None
        self.has_state = bool(steps)
        if not flags.resume or not (steps or started):
            return
        if steps:
            self.step, self.checkpoint = steps[-1], self.file(0, steps[-1])
        self.notes = self.file(2, self.step or 0)
        self.run = read_notes(self.notes)
        before = self.run["flags"] if self.run else {}
        restored = [name for name in before if name not in ("device", "gpus", "log_ranks")
                    and getattr(flags, name, before[name]) is None]
        for name in restored:  # as then, where nothing else is said
            setattr(flags, name, before[name])
        for name in PATHS if flags.sample is None else ():
            value = before.get(name)
            needed = name in restored and {"model": not steps and os.path.isabs(value or ""),
                                           "val_data": flags.val_every != 0}.get(name, True)
            if needed and value and not any(map(os.path.exists, files_of(value))):
                raise UserError(f"{self.notes}: its run had {PATHS[name]} {value}, which is not there: restore it, or "
                                f"give {PATHS[name]}")
        total, every = before.get("steps") or 0, before.get("checkpoint_every")
        if every == 0 and total > (self.step or 0) and self.file(0, total).exists():  # the end of a run without -n
            if flags.steps == total:
                self.step, self.checkpoint, self.has_state = total, self.file(0, total), False
            elif not steps:
                raise UserError(f"-y 1: nothing is left to do: {self.path} has the weights of all {total} steps (-x "
                                f"{total}), and no state, which only -n writes: train on from them with -e "
                                f"{self.file(0, total)} and another -o")

    def look(self):
        """(the steps of whole checkpoints, whether a run has said its flags). Raises UserError if the run may not begin
        here, if it cannot go on from the newest checkpoint, or if nothing can be written."""
        flags, path = self.flags, self.path
        names = sorted(entry.name for entry in path.iterdir()) if path.exists() or flags.sample is not None else []
        steps, started = self.steps() if names else [], self.file(2, 0).name in names
        if flags.sample is not None:
            return steps, started
        own = [name for name in names if OF_A_RUN.fullmatch(name)]
        if names:
            os.close(self.locked())
        listed = ", ".join(own[:3]) + ", ..." * (len(own) > 3)
        if own and not flags.resume:
            raise UserError(f"-o {path}: holds an earlier run ({listed}), which is never overwritten: go on from that "
                            "with -y 1, or give another folder")
        if own and not (steps or started):
            raise UserError(f"-y 1: {path} holds {listed}, and neither a whole checkpoint nor {self.file(2, 0).name}, "
                            "which has a run's flags since its start: there is nothing to go on from; give another -o")
        if flags.resume and not own and not (flags.model or flags.train_data):
            raise UserError(f"-y 1: {path} holds no run to go on from: expected the folder of one, or -e or -i, to "
                            "start one there")
        if steps:
            try:
                self.check(steps[-1])
            except UserError as e:
                raise UserError(f"{e}{self.older(steps[-1])}") from None
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"main.log.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
        return steps, started

    def locked(self):
        """The folder, opened, and locked against other runs. Raises UserError if one is writing there."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"-o {self.path}: another run is writing to this folder: end it, or give another") from None
        except OSError:  # a file system without locks
            pass
        return lock

    def file(self, i, step, rank=0):
        return self.path / CHECKPOINT[i].format(step, rank)

    def steps(self):
        """The steps of the checkpoints that are whole, by their DONE files, in order."""
        return sorted(int(path.name[5:]) for path in self.path.iterdir() if re.fullmatch(r"DONE_\d{8}", path.name))

    def check(self, step, numbers=False):
        """Raise UserError unless a checkpoint's files are there and have their sizes; numbers: and are finite."""
        for path in (self.file(i, step) for i in range(2)):
            if not path.exists():
                raise Damage(f"{self.file(3, step)}: is there, and {path.name} is not: restore that")
        c = self.kind.from_file(self.file(0, step))
        states = read_states(lambda rank: self.file(1, step, rank), c)
        if states[0].step != step:
            raise Damage(f"{states[0].path}: of step {states[0].step}; expected {step}, as its name says")
        read_notes(self.file(2, step))
        if numbers:
            for tensors in (self.parameters(step, c), *finite_sets(states, c)):
                for _ in tensors:
                    pass

    def parameters(self, step, c):
        """(name, values) of a checkpoint's parameters. Raises Damage at a number that is not finite."""
        return finite(self.file(0, step), "the parameter", read_parameters(self.file(0, step), c))

    def older(self, step):
        """What to do where the checkpoint of a step is damaged, the newest: the rest of an error."""
        damaged = [step]
        for other in reversed(self.steps()):
            if other >= step:
                continue
            try:
                self.check(other, numbers=True)
            except UserError:
                damaged.append(other)
                continue
            command = shlex.join(["rm", *(str(self.file(3, each)) for each in damaged)])
            return f"; the checkpoint of step {other} is whole: after `{command}`, -y 1 goes on from that"
        return "; there is no older checkpoint that is whole"

    def remove(self, step):
        for i in reversed(range(len(CHECKPOINT))):
            for path in sorted(self.path.glob(CHECKPOINT[i].format(step, 0).replace("_00000.bin", "_?????.bin"))):
                if path != self.file(2, 0):  # with which the run goes on where there is no checkpoint
                    path.unlink(missing_ok=True)

    def begin(self, model, data):
        """Go on from the checkpoint, or the start, if the run is there already, and open the log."""
        self.data = [[Path(path).name, os.path.getsize(path), sketch(path)] for path in data.paths]
        if self.ranks.rank:
            name, *_ = self.ranks.exchange(None, "the folder")
            if not (self.path / name).exists():
                raise UserError(f"-o {self.path}: {socket.gethostname()} does not see what rank 0 has there: expected "
                                "a folder that all ranks share")
            self.ranks.exchange(None, "a look at the folder")
            self.go_on(model, data)
            if self.flags.checkpoint_every:
                self.prepare(model)
            return
        self.lock, mark = self.locked(), self.path / f"main.log.{os.getpid()}.tmp"
        mark.touch()
        try:
            self.begin_first(model, data, mark)
        except BaseException:
            os.close(self.lock)
            raise
        finally:
            mark.unlink(missing_ok=True)

    def begin_first(self, model, data, mark):
        """begin() of rank 0. The mark is a file that the others are to see."""
        self.ranks.exchange(mark.name, "the folder")
        self.ranks.exchange(None, "a look at the folder")
        self.go_on(model, data)
        for path in [*self.path.iterdir()]:  # what a run has left that was killed while it wrote or removed files
            state = re.fullmatch(r"state_(\d{8})_\d{5}\.bin", path.name)
            if LEFT.fullmatch(path.name):
                path.unlink()
            elif state and not self.file(3, int(state[1])).exists():
                self.remove(int(state[1]))
        if self.step is None:
            self.write_notes(self.notes_of(model))
        self.open_log(model.step)
        if self.flags.checkpoint_every:
            self.prepare(model)

    def open_log(self, step):
        """Open main.log to append to it. Lines that the run is going to log again, or that are none, go to
        main.log.old."""
        path, old, finished = self.path / "main.log", self.path / "main.log.old", step >= self.flags.steps
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [re.match(rb"s:(\d{1,9}) [ -~]*\n", line) for line in lines]
        stays = [bool(match) and (finished or int(match[1]) < step) for match in found]
        broken = [i for i, match in enumerate(found[:-1]) if not match]  # a kill may have cut the last
        if broken:
            say(f"WARNING: {path}: line {broken[0] + 1} is {lines[broken[0]][:40]!r}; expected one such as s:0 "
                f"trl:10.8522; {len(broken)} such lines move to {old.name}")
        if not all(stays):
            with open(old, "ab") as file:
                file.write(b"".join(line.rstrip(b"\n") + b"\n" for line, stay in zip(lines, stays) if not stay))
            replace_file(path, [line for line, stay in zip(lines, stays) if stay])
        self.file_of_log = open(path, "ab", buffering=0)

    def prepare(self, model):
        """Make a writer with room for a whole checkpoint."""
        if not self.writer:
            c, ranks = model.config, self.ranks
            state = 3 * sum(row.nbytes for row in state_table(c, ranks.count if ranks.zero else 0, ranks.rank))
            parameters = 0 if ranks.rank else sum(row.nbytes for row in c.file_table(model.device.real))
            self.writer = Writer(model.device, state + parameters, ranks.here)

    def go_on(self, model, data):
        """Set a model and its data to where the newest checkpoint was written, or leave them at the start of a run that
        has none. Raises UserError if its run had other data or batches."""
        device, run, flags = model.device, self.run, self.flags
        if run:
            self.compare()
            device.put(model.adam.windows, run["windows"])
            device.put(model.adam.seen, run["seen"])
            products = run["products"]
            if products["of"] and products["of"] == getattr(device, "cache", None):
                sets = {key: value for key, value in device.choices.items() if key.endswith("False)")}
                device.choices = sets | products["algorithms"]  # what adds takes the choice of what sets
            elif products["of"]:
                say(f"WARNING: algorithms of matrix products were chosen for {products['of']}: this device chooses its "
                    "own, and bits may differ")
            if self.step is None:
                say(f"resumed      | at the start: {self.path} has no checkpoint, and the flags of its run (-y)")
        elif self.checkpoint:
            say(f"WARNING: there is no {self.notes}: flags and data of that run are not known, and windows of outliers "
                "are empty")
        if self.has_state:
            state = self.file(1, self.step)
            try:
                for _ in self.parameters(self.step, model.config):  # of which fp32 ones may be loaded instead
                    pass
                load_state(lambda rank: self.file(1, self.step, rank), model, data,
                           run["flags"].get("batch_size") if run else None)
            except Damage as e:
                raise UserError(f"{e}{self.older(self.step) if run else ''}") from None
            say(f"resumed      | after step {self.step}, from {state} (-y)")
        if self.checkpoint:
            device.go_on(run["scales"] if run else [])
            model.step = self.step
            if self.step >= flags.steps:
                flags.val_every = flags.sample_every = 0
                more = "a larger -x goes on" if self.has_state else f"{self.checkpoint} has the weights"
                say(f"nothing is left to do: all {self.step} steps are made (-x {flags.steps}); {more}")

    def compare(self):
        """Raise UserError if the run had other data or batches, or has more steps, and warn of other flags."""
        run, step = self.run, self.step or 0
        if step > self.flags.steps:
            raise UserError(f"-x {self.flags.steps}: expected {step} or more, the steps of {self.checkpoint}")
        pairs = [(then, now[: len(then)]) for then, now in zip(run["data"], self.data)]  # an older version has no hash
        if len(run["data"]) != len(self.data) or any(then != now for then, now in pairs):
            before, now = next((pair for pair in pairs if pair[0] != pair[1]),
                               (f"{len(run['data'])} files", f"{len(self.data)} files"))
            raise UserError(f"{self.notes}: of a run on {before}, and -i is {now}: expected the same names, sizes and "
                            "hashes of what the files hold")
        count = read_header(self.file(1, step), STATE)[2] if self.has_state else run.get("ranks", self.ranks.count)
        for name, now in vars(self.flags).items():
            before = run["flags"].get(name, now)
            if name == "model" and before:  # of a checkpoint, it does not matter where the first weights were
                before, now = (Path(path).name if self.checkpoint else os.path.abspath(path) for path in (before, now))
            if before in (now, None if name == "model" else now):
                continue
            if name in MUST_AGREE and not (count != self.ranks.count and name == "total_batch"):
                flag = MUST_AGREE[name]
                raise UserError(f"{self.notes}: of a run with {flag} {before}, and now it is {now}: expected the same")
            rounds = name == "seed" and self.flags.moments == "bf16"
            if rounds or name not in MAY_DIFFER:
                say(f"WARNING: --{name.replace('_', '-')} was {before} until step {step}, and is {now} from now on")

    def notes_of(self, model):
        """What run_*.json says of a run: all that it goes on with, but for llm.c's files."""
        device, flags = model.device, {name: from_anywhere(name, x) for name, x in vars(self.flags).items()}
        return dict(step=model.step, ranks=self.ranks.count, flags=flags, data=self.data,
                    windows=device.get(model.adam.windows).tolist(), seen=device.get(model.adam.seen).tolist(),
                    scales=device.state(), products=dict(of=getattr(device, "cache", None),
                                                         algorithms=dict(getattr(device, "choices", {}))))

    def write_notes(self, notes):
        replace_file(self.file(2, notes["step"]), [json.dumps(notes, indent=1).encode()])

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
        step, begun, rank = model.step, time.perf_counter(), self.ranks.rank
        if whole and self.file(3, step).exists() or rank and not whole:
            return
        files = {self.file(0, step): checkpoint_parts(model)} if not rank else {}
        if whole:
            files[self.file(1, step, rank)] = state_parts(model, position)
        notes = self.notes_of(model)

        def finish(failure):
            failure = failure and (str(failure) or type(failure).__name__)
            if whole and not self.agreed:  # whether all ranks' states are there
                self.agreed = True
                failure = next(filter(None, self.ranks.exchange(failure, f"the checkpoint of step {step}")), None)
                if not (failure or rank):
                    try:
                        self.write_notes(notes)
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
