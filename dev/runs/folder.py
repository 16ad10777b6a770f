"""The folder of a training run, -o: its log, its checkpoints, and how the run goes on from the
newest of them.

A checkpoint that a run can go on from has these files, which are written in this order and removed
in the opposite one:

    model_00000500.bin          the parameters after 500 steps, as llm.c has them; with --ema,
                                ema_00000500.bin has their average
    state_00000500_00000.bin    llm.c's state: AdamW's moments, fp32 parameters, the position in the
                                data; one each rank
    run_00000500.json           what llm.c has no place for: flags, data, the products' algorithms;
                                with -sl or -sg, the last losses and norms
    DONE_00000500               empty; the others are whole

A run writes run_00000000.json at its start, so that it can go on as itself before it has a
checkpoint. Nothing that an earlier run has written is overwritten. Lines of main.log whose steps
are made again move to main.log.old.

Numbers are copied to the host while training waits, and written behind the training by a thread. Of
several ranks, each writes its own state, and the first all the rest.
"""
import argparse
import contextlib
import fcntl
import glob
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

from dev.common.bf16 import joined
from dev.cpu.device import available_memory
from dev.data.shuffled_loader import files_of
from dev.common.file_kinds import check_kind, read_header
from dev.ranks.ranks import cut, sketch
from dev.runs.replay import bad_place
from dev.runs.terminal import say
from dev.variants.outliers import WINDOW
from prepro_tinyshakespeare import UserError, make_header, replace_file
from train_gpt2 import (FLAGS, HEADER_BYTES, TYPES, Config, FileKind, Row, checkpoint_parts, count_tokens,
                        carve, read_parameters, to_float)

# ---- llm.c's state file

STATE = FileKind("state", 20240527, (1,), "restore it")
SEED = 13371337  # of llm.c's stochastic rounding, at its start. Ours depends on --seed and the step


def shuffle_record(P, n):
    """How a state file has a shuffle: the order of P files, the order of the n batches of the file
    that is being read, and the Mersenne Twister that made them."""
    return np.dtype([("P", "<u8"), ("files", "<i4", (P,)), ("n", "<u8"), ("order", "<i4", (n,)),
                     ("seed", "<u8"), ("left", "<i4"), ("next", "<u4"), ("key", "<u4", 624),
                     ("matrix", "<u4", 2)])


def state_table(c, count, rank):
    """The tensors that a state file has, three times: whole ones; or, of a share of several ranks,
    the pieces of all layers of a tensor, as in llm.c, and at the end of rank 0's the tails (see
    dev/ranks/zero.py)."""
    if not count:
        return c.file_table()
    in_memory = {row.name: row for row in c.parameter_table()}
    # words may be padded in memory alone
    cuts = [(row.name, *cut(in_memory.get(row.name, row), count)) for row in c.file_table()]
    return [Row(name, (layers * piece,)) for name, layers, piece, _ in cuts] + [
        Row(f"{name}_tail", (layers * tail,))
        for name, layers, _, tail in cuts if tail and not rank]


def of_share(table, views):
    """The tensors of a share, or zeros for what is none, as a state file has them."""
    for row in table:
        absent = np.zeros(0 if hasattr(views, row.name) else row.size, row.dtype)
        yield getattr(views, row.name, absent)[: row.size]


def state_parts(model, position, shared=False):
    """What a state file consists of: arrays of the device's and the host's. shared: AdamW has a
    share of the tensors, as one of several ranks."""
    c, count, rank = model.config, model.count, model.rank
    header = make_header(STATE.magic, 1, count, rank, 1, position.shuffle)  # 1: fp32 parameters too
    header[10] = model.step
    header.view("<u8")[[10, 11, 15, 16]] = SEED, SEED, position.place, position.next
    yield header
    table = state_table(c, count, rank) if shared else None
    for kept in (*moments_of(model), model.master):
        for halves in zip(*(of_share(table, views) if shared else c.file_parts(views) for views in kept)):
            halves = [half.reshape(-1) for half in halves]
            for start in range(0, halves[0].size, 2**20):  # a device has little memory for more
                parts = [half[start : start + 2**20] for half in halves]
                yield joined(*parts) if len(parts) == 2 else to_float(*parts)
    if position.shuffle:
        P, n, (_, key, used, *_) = len(position.files), len(position.order), position.rng
        yield np.array([(P, position.files, n, position.order, 0, max(1, 625 - used), used, key,
                         (0, 0x9908B0DF))], shuffle_record(P, n))  # used: of 624 numbers


def moments_of(model):
    """[views of AdamW's m], [views of its v]."""
    tables = model.tables(model.config, model.device, model.B, model.T)
    return [[carve(model.arenas[name], tables[name])] for name in ("adam m", "adam v")]


class Damage(UserError):
    """A checkpoint is damaged."""


class State:
    """A state file, of one process or of a rank, of a model of config c. Raises UserError if it is
    damaged."""

    def __init__(self, path, c):
        self.path, header = path, read_header(path, STATE)
        self.count, self.rank, self.shuffle, self.step = (header[i] for i in (2, 3, 5, 10))
        self.place, self.next = np.array(header, "<i4").view("<u8")[15:17].tolist()
        self.sets = 2 + header[4]  # m, v, and perhaps the parameters
        size, sizes = os.path.getsize(path), []
        for shared in (0, self.count) if self.count > 1 else (0,):
            self.table, self.shared = state_table(c, shared, self.rank), shared > 0
            self.nbytes = sum(row.nbytes for row in self.table)
            self.end = HEADER_BYTES + self.sets * self.nbytes
            self.record = self.read_record() if self.shuffle else None
            sizes.append(self.end + (self.record.nbytes if self.record is not None else 0))
            if size == sizes[-1] and (self.record is not None or not self.shuffle):
                return
        raise UserError(f"{path}: truncated, or of a model of another size, or of another "
                        f"--shuffle than it says: {size:,} bytes; expected "
                        f"{' or '.join(f'{each:,}' for each in sizes)}: {STATE.remedy}")

    def read_record(self):
        """The shuffle at the end of the file, or None if there is no such thing."""
        if self.end >= os.path.getsize(self.path):
            return None
        P = np.fromfile(self.path, "<u8", 1, offset=self.end)
        if not len(P) or P[0] > 2**24:
            return None
        n = np.fromfile(self.path, "<u8", 1, offset=self.end + 8 + 4 * int(P[0]))
        if not len(n) or n[0] > 2**32:
            return None
        record = shuffle_record(int(P[0]), int(n[0]))
        found = np.fromfile(self.path, record, 1, offset=self.end)
        return found[0] if len(found) else None

    def tensors(self, i):
        """(name, values) of its m, v or parameters, mapped into memory."""
        start = HEADER_BYTES + i * self.nbytes
        for row in self.table:
            yield row.name, np.memmap(self.path, row.dtype, "r", start, row.whole_shape)
            start += row.nbytes


def read_states(path_of, c):
    """The state files of all ranks of a run, path_of(rank). Raises UserError unless they belong
    together."""
    states = [State(path_of(0), c)]
    states += [State(path_of(rank), c) for rank in range(1, states[0].count)]
    first = states[0]
    for rank, state in enumerate(states):
        found = state.count, state.rank, state.step, state.shared
        if found != (first.count, rank, first.step, first.shared):
            raise Damage(f"{state.path}: of rank {state.rank} of {state.count}, after step "
                         f"{state.step}; expected rank {rank} of {first.count}, step {first.step}, "
                         f"and the same --zero: {STATE.remedy}")
    return states


def finite(path, kind, tensors):
    """The same (name, values). Raises Damage at a number that is not finite."""
    for name, values in tensors:
        at = bad_place(values)
        if at is not None:
            value = to_float(np.array(values[at]).reshape(1))[0]
            raise Damage(f"{path}: {kind} {name} is {value} at {[int(x) for x in at]}; expected "
                         "finite numbers")
        yield name, values


def finite_sets(states, c):
    """whole_tensors of all that state files have, of which each must be finite."""
    kinds = "AdamW's m of", "AdamW's v of", "the fp32 parameter"
    for i, kind in enumerate(kinds[: states[0].sets]):
        yield finite(states[0].path, kind, whole_tensors(states, i, c))


def whole_tensors(states, i, c):
    """(name, values) of the m, v or parameters that the state files of all ranks have together."""
    if not states[0].shared:
        yield from states[0].tensors(i)
        return
    shares = [dict(state.tensors(i)) for state in states]
    for row in c.parameter_table():
        layers = max(1, row.layers)
        tail = shares[0].get(f"{row.name}_tail", np.zeros(0, np.float32))
        parts = [share[row.name].reshape(layers, -1) for share in shares]
        whole = np.concatenate([*parts, tail.reshape(layers, -1)], axis=1)
        yield row.name, whole.reshape(row.whole_shape)


def load_state(path_of, model, data, had=None):
    """Set a model, and its data's position, to where a run stopped, of which path_of(rank) are the
    state files. had: that run's B, if it is known. Parameters stay if they have none. Raises Damage
    if a file is damaged, or of other data, and UserError if it does not fit this B."""
    c, P = model.config, len(data.paths)
    states = read_states(path_of, c)
    for state in states:
        if state.shuffle != int(data.shuffle) or state.place >= P:
            raise Damage(f"{state.path}: with --shuffle {state.shuffle}, in file {state.place}; "
                         f"expected --shuffle {int(data.shuffle)} and one of the {P} files of -i")
    as_before, known = len(states) == model.count, model.rank < len(states)
    load_position(states[min(model.rank, len(states) - 1)], data, as_before, known, had)
    names = {row.name for row in c.parameter_table()}
    for tensors, kept in zip(finite_sets(states, c), (*moments_of(model), model.master)):
        if kept is not model.master:
            tensors = ((name, values) for name, values in tensors if name in names)
        model.set_tensors(tensors, kept)
    model.step = states[0].step
    if not as_before:
        say(f"WARNING: the run had {len(states)} ranks until step {model.step}, and has "
            f"{model.count} from now on: the data goes on with the next file, or with an only one "
            "from its beginning")


def load_position(state, data, as_before, known, had=None):
    """Set data's position to that of a state file; or, if the number of ranks was another, to the
    file after it, in the order that the rank had, or, if it is not known, would have had."""
    P, position, record = len(data.paths), data.position(), state.record
    if data.shuffle:
        if record["P"] != P or sorted(record["files"]) != list(range(P)):
            raise Damage(f"{state.path}: of other data than the {P} files of -i: expected those of "
                         "its run")
        if known:
            used = 624 if record["left"] == 1 else min(int(record["next"]), 624)
            position.files = record["files"].tolist()
            position.rng = "MT19937", record["key"], used
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
    """(how many batches of a file are done, the order of all), of a state whose run had another B.
    Each of its batches becomes several smaller ones, so that the same tokens follow. What fills no
    batch of that run comes last."""
    path, before = data.paths[file], data.size // data.B * had  # tokens of a batch of that run
    batches, done = (count_tokens(path, data.c)[0] - 1) // before, state.next * before
    whole = not data.shuffle or sorted(state.record["order"]) == list(range(batches))
    if state.next > batches or not whole:
        count = state.record["n"] if data.shuffle else state.next
        raise Damage(f"{state.path}: has {count} batches of file {state.place}, or an order that "
                     f"has one twice; -i, -b and -t make {batches}: expected those of its run")
    if data.shuffle and data.B != had and data.size > data.B * data.T:
        raise UserError(f"-b {data.B}: the run had -b {had}, and with --shuffle each rank has an "
                        f"order of its own for batches of that size: expected -b {had}, or another "
                        "number of ranks")
    if done % data.size or data.shuffle and before % data.size:
        raise UserError(f"-b {data.B}: the run had -b {had}, and stopped after {done:,} tokens of "
                        f"{path}, where no batch of -b {data.B} ends: expected -b {had}, or a "
                        "number that divides it")
    parts, order = before // data.size, []
    if data.shuffle:
        order = [i * parts + part for i in state.record["order"].tolist() for part in range(parts)]
        order += range(len(order), data.batches_of[file])
        if data.B != had:
            say(f"WARNING: the order of {path} stays, with each batch of -b {had} cut into "
                f"{parts}; files after it are shuffled in batches of -b {data.B}")
    return done // data.size, order


# ---- Files that are written behind the training

CHUNK = 2**26  # bytes that are copied to the host, and written, at a time
WHOLE, END = object(), object()  # stand in the writer's queue behind a file, and behind all of them


def host_memory(device, nbytes):
    """Memory of the host's, page-locked if it is for a GPU, whose copies are then several times as
    fast."""
    if device.name == "cpu":
        return np.empty(nbytes, np.uint8)
    import cupyx
    return cupyx.empty_pinned(nbytes, np.uint8)


class Writer:
    """Writes files in a thread. save() returns when all numbers are in the host's memory, in chunks
    that are allocated once, here. Where the host has little, there are few, and save() waits until
    some are written."""

    def __init__(self, device, nbytes, sharers=1):
        self.free, self.filled, self.thread = queue.SimpleQueue(), queue.SimpleQueue(), None
        room = available_memory() // 3 // sharers // CHUNK
        for _ in range(max(2, min(-(-nbytes // CHUNK) + 1, room))):
            self.free.put(host_memory(device, CHUNK))

    def save(self, files, finish):
        """Write files, {path: an iterable of arrays}. Then the thread calls finish(None); or, if
        that or a file fails, finish(the exception)."""
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
        # After a failure, save() still fills chunks, and waits for free ones.
        for item in iter(self.filled.get, END):
            if item is not WHOLE:
                self.free.put(item[0])
        try:
            finish(failure)
        except BaseException as e:
            finish(e)


# ---- What run_*.json says

CHECKPOINT = ("model_{:08d}.bin", "state_{:08d}_{:05d}.bin", "run_{:08d}.json",
              "DONE_{:08d}")  # in the order of writing
# Names of files that are never overwritten, and of what a kill leaves
OF_A_RUN = re.compile(r"main\.log(\.old)?|(model|ema|state|run|DONE|replay)_\d{8}(_\d{5})?(\.\w+)?")
LEFT = re.compile(r"(main\.log.*|(model|ema|state|run|replay|DONE)_\d{8}.*)\.\d+\.tmp"
                  r"|ranks_[0-9a-f]{12}.*")
# Flags, when a run goes on: what must agree, and what may differ. Of others there is a warning.
MUST_AGREE = {"model": "-e", "seq_len": "-t", "total_batch": "-d", "shuffle": "--shuffle",
              "overfit": "-a"}
MAY_DIFFER = ("output", "train_data", "val_data", "resume", "checkpoint_every", "checkpoints_kept",
              "graph", "nvtx", "checkpoints_major", "val_every", "val_batches", "sample_every",
              "sample_tokens", "hellaswag", "sample", "temperature", "top_k", "dry_run", "replay",
              "seed", "gpus", "zero", "log_ranks")
PATHS = {"train_data": "-i", "val_data": "-j", "hellaswag": "--hellaswag", "model": "-e"}


def from_anywhere(name, value):
    """A flag's value, which if it is a path, or a pattern, is found from any folder."""
    if value is None or name not in PATHS:
        return value
    if name == "model" and not (os.path.exists(value) or value.endswith(".bin")):
        return value
    here = os.getcwd()
    return os.path.join(glob.escape(here) if set(value) & {*"*?["} else here, value)


def numbers(values, shape):
    """Whether values, of a JSON file, are numbers of this shape."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        return False
    return array.dtype.kind in "iuf" and array.shape == shape


def is_flag(kind, value):
    """Whether a flag of this kind, a type or choices, may have a value."""
    kind = TYPES.get(kind, kind)
    if value is None or isinstance(kind, tuple):
        return value is None or value in kind
    try:
        return not isinstance(value, bool) and kind(str(value)) == value
    except (argparse.ArgumentTypeError, ValueError):
        return False


def is_data(files):
    kinds = [str, int], [str, int, str]
    return isinstance(files, list) and all(
        isinstance(file, list) and [type(x) for x in file] in kinds for file in files)


def is_choice(products):
    """Whether these are the algorithms of products, as a device has chosen them."""
    if not (isinstance(products, dict) and isinstance(products.get("algorithms"), dict)):
        return False
    return isinstance(products.get("of"), str | None) and all(
        isinstance(x, list) and all(type(number) is int and 0 <= number < 2**64 for number in x)
        for x in products["algorithms"].values())


FIELDS = {"flags": (lambda x: isinstance(x, dict), "names and values"),
          "data": (is_data, "[[name, bytes, hash], ...]"),
          "windows": (lambda x: numbers(x, (2, WINDOW)), f"2 lists of {WINDOW} numbers"),
          "seen": (lambda x: numbers(x, (1,)), "[a number]"),
          "products": (is_choice, '{"of": a device, "algorithms": {product: whole numbers}}'),
          "scales": (lambda x: x == [] or isinstance(x, list) and numbers(x, (len(x),)), "numbers")}
OF_FEATURES = "windows", "seen", "scales"  # which a run without -sl, -sg, or FP8 need not have


def read_notes(path, table):
    """What a run_*.json says, or None if there is none. table: the rows of all flags. Raises
    UserError."""
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
    fields = [(name, run.get(name), good(run.get(name)), wish)
              for name, (good, wish) in FIELDS.items() if name in run or name not in OF_FEATURES]
    for _, long, kind, *_ in table if isinstance(run.get("flags"), dict) else ():
        key = long.removeprefix("--").replace("-", "_")
        value, flag = run["flags"].get(key), MUST_AGREE.get(key, long)
        fields.append((f"flags.{key}", value, is_flag(kind, value),
                       f"a value that {flag} may have"))
    for name, value, good, wish in fields:
        if not good:
            there = name in run or "." in name
            found = f"is {json.dumps(value):.40}" if there else "is missing"
            raise wrong(f"{name} {found}; expected {wish}")
    return run


# ---- The folder


class RunFolder:
    """-o. step: of the newest whole checkpoint, or None. checkpoint: with -y 1, that one's
    parameters, or None. run: what it says of its run. ranks: None of a process that is alone; kind:
    the model's Config; table: the rows of all flags."""

    def __init__(self, flags, ranks=None, kind=Config, table=tuple(FLAGS)):
        self.ranks, self.kind, self.table = ranks, kind, [*table]
        self.rank, self.count = (ranks.rank, ranks.count) if ranks else (0, 1)
        self.path, self.flags, self.step, self.checkpoint = Path(flags.output), flags, None, None
        self.writer, self.run, self.failed, self.news = None, None, None, []
        self.full, self.unwritten = False, b""
        try:
            found = None if self.rank else self.look()
            steps, started = self.exchange(found, "the checkpoints")[0]
        except OSError as e:
            raise UserError(f"-o {self.path}: {e.strerror}; expected a folder to write "
                            "to") from None
        self.has_state = bool(steps)
        if not flags.resume or not (steps or started):
            return
        if steps:
            self.step, self.checkpoint = steps[-1], self.file(0, steps[-1])
        self.notes = self.file(2, self.step or 0)
        self.run = read_notes(self.notes, self.table)
        before = self.run["flags"] if self.run else {}
        restored = [name for name in before if name not in ("device", "gpus", "log_ranks")
                    and getattr(flags, name, before[name]) is None]
        for name in restored:  # as then, where nothing else is said
            setattr(flags, name, before[name])
        for name in PATHS if flags.sample is None else ():
            value = before.get(name)
            needed = name in restored and {
                "model": not steps and os.path.isabs(value or ""),
                "val_data": flags.val_every != 0}.get(name, True)
            if needed and value and not any(map(os.path.exists, files_of(value))):
                raise UserError(f"{self.notes}: its run had {PATHS[name]} {value}, which is not "
                                f"there: restore it, or give {PATHS[name]}")
        total, every = before.get("steps") or 0, before.get("checkpoint_every")
        ended = every == 0 and total > (self.step or 0) and self.file(0, total).exists()
        if ended:  # without -n, and so without a state
            if flags.steps == total:
                self.step, self.checkpoint, self.has_state = total, self.file(0, total), False
            elif not steps:
                raise UserError(f"-y 1: nothing is left to do: {self.path} has the weights of all "
                                f"{total} steps (-x {total}), and no state, which only -n writes: "
                                f"train on from them with -e {self.file(0, total)} and another -o")

    def exchange(self, value, about):
        """[what each rank gives], when all have come here. about: what an error calls it."""
        return self.ranks.exchange(value, about) if self.ranks else [value]

    def look(self):
        """(the steps of whole checkpoints, whether a run has said its flags). Raises UserError if
        the run may not begin here, if it cannot go on from the newest checkpoint, or if nothing can
        be written."""
        flags, path = self.flags, self.path
        there = path.exists() or flags.sample is not None
        names = sorted(entry.name for entry in path.iterdir()) if there else []
        steps, started = self.steps() if names else [], self.file(2, 0).name in names
        if flags.sample is not None:
            return steps, started
        own = [name for name in names if OF_A_RUN.fullmatch(name)]
        if names:
            os.close(self.locked())
        listed = ", ".join(own[:3]) + ", ..." * (len(own) > 3)
        if own and not flags.resume:
            raise UserError(f"-o {path}: holds an earlier run ({listed}), which is never "
                            "overwritten: go on from that with -y 1, or give another folder")
        if own and not (steps or started):
            raise UserError(f"-y 1: {path} holds {listed}, and neither a whole checkpoint nor "
                            f"{self.file(2, 0).name}, which has a run's flags since its start: "
                            "there is nothing to go on from; give another -o")
        if flags.resume and not own and not (flags.model or flags.train_data):
            raise UserError(f"-y 1: {path} holds no run to go on from: expected the folder of one, "
                            "or -e or -i, to start one there")
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
        """The folder, opened, and locked against other runs. Raises UserError if one is writing
        there."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"-o {self.path}: another run is writing to this folder: end it, or "
                            "give another") from None
        except OSError:  # a file system without locks
            pass
        return lock

    def file(self, i, step, rank=0):
        return self.path / CHECKPOINT[i].format(step, rank)

    def steps(self):
        """The steps of the checkpoints that are whole, by their DONE files, in order."""
        return sorted(int(path.name[5:]) for path in self.path.iterdir()
                      if re.fullmatch(r"DONE_\d{8}", path.name))

    def check(self, step, numbers=False):
        """Raise UserError unless a checkpoint's files are there and have their sizes; numbers: and
        are finite."""
        for path in (self.file(i, step) for i in range(2)):
            if not path.exists():
                raise Damage(f"{self.file(3, step)}: is there, and {path.name} is not: restore "
                             "that")
        check_kind(self.file(0, step), self.kind.FILE)
        c = self.kind.from_file(self.file(0, step))
        states = read_states(lambda rank: self.file(1, step, rank), c)
        if states[0].step != step:
            raise Damage(f"{states[0].path}: of step {states[0].step}; expected {step}, as its "
                         "name says")
        read_notes(self.file(2, step), self.table)
        if numbers:
            for tensors in (self.parameters(step, c), *finite_sets(states, c)):
                for _ in tensors:
                    pass

    def parameters(self, step, c):
        """(name, values) of a checkpoint's parameters. Raises Damage at a number that is not
        finite."""
        path = self.file(0, step)
        return finite(path, "the parameter", read_parameters(path, c))

    def older(self, step):
        """What to do where the checkpoint of a step is damaged, the newest: the rest of an
        error."""
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
            return (f"; the checkpoint of step {other} is whole: after `{command}`, -y 1 goes on "
                    "from that")
        return "; there is no older checkpoint that is whole"

    def remove(self, step):
        for i in reversed(range(len(CHECKPOINT))):
            pattern = CHECKPOINT[i].format(step, 0).replace("_00000.bin", "_?????.bin")
            pattern = pattern.replace("model_", "*_")  # also the others of Kept.weights
            for path in sorted(self.path.glob(pattern)):
                # the run goes on with run_00000000.json without a checkpoint
                if OF_A_RUN.fullmatch(path.name) and path != self.file(2, 0):
                    path.unlink(missing_ok=True)

    def begin(self, training, model):
        """Go on from the checkpoint, or the start, if the run is there already, and open the
        log."""
        self.data = [[Path(path).name, os.path.getsize(path), sketch(path)]
                     for path in training.train_data.paths]
        if self.rank:
            name, *_ = self.exchange(None, "the folder")
            if not (self.path / name).exists():
                raise UserError(f"-o {self.path}: {socket.gethostname()} does not see what rank 0 "
                                "has there: expected a folder that all ranks share")
            self.exchange(None, "a look at the folder")
            self.go_on(training, model)
            if self.flags.checkpoint_every:
                self.prepare(training, model)
            return
        self.lock, mark = self.locked(), self.path / f"main.log.{os.getpid()}.tmp"
        mark.touch()
        try:
            self.begin_first(training, model, mark)
        except BaseException:
            os.close(self.lock)
            raise
        finally:
            mark.unlink(missing_ok=True)

    def begin_first(self, training, model, mark):
        """begin() of rank 0. The mark is a file that the others are to see."""
        self.exchange(mark.name, "the folder")
        self.exchange(None, "a look at the folder")
        self.go_on(training, model)
        for path in [*self.path.iterdir()]:  # left by a kill while files were written or removed
            state = re.fullmatch(r"state_(\d{8})_\d{5}\.bin", path.name)
            if LEFT.fullmatch(path.name):
                path.unlink()
            elif state and not self.file(3, int(state[1])).exists():
                self.remove(int(state[1]))
        if self.step is None:
            self.write_notes(self.notes_of(training, model))
        self.open_log(model.step)
        if self.flags.checkpoint_every:
            self.prepare(training, model)

    def open_log(self, step):
        """Open main.log to append to it. Lines that the run is going to log again, or that are
        none, go to main.log.old."""
        path, old = self.path / "main.log", self.path / "main.log.old"
        finished = step >= self.flags.steps
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [re.match(rb"s:(\d{1,9}) [ -~]*\n", line) for line in lines]
        stays = [bool(match) and (finished or int(match[1]) < step) for match in found]
        broken = [i for i, match in enumerate(found[:-1]) if not match]  # a kill may cut the last
        if broken:
            say(f"WARNING: {path}: line {broken[0] + 1} is {lines[broken[0]][:40]!r}; expected one "
                f"such as s:0 trl:10.8522; {len(broken)} such lines move to {old.name}")
        if not all(stays):
            gone = [line.rstrip(b"\n") + b"\n" for line, stay in zip(lines, stays) if not stay]
            with open(old, "ab") as file:
                file.write(b"".join(gone))
            replace_file(path, [line for line, stay in zip(lines, stays) if stay])
        self.file_of_log = open(path, "ab", buffering=0)

    @property
    def shared(self):
        """Whether each of several ranks has a share of AdamW's numbers."""
        return self.count > 1 and bool(self.flags.zero)

    def prepare(self, training, model):
        """Make a writer with room for a whole checkpoint."""
        if not self.writer:
            c = model.config
            table = state_table(c, self.count if self.shared else 0, self.rank)
            whole = [] if self.rank else [c.file_table(real)
                                          for _, real in training.weights(model).values()]
            nbytes = sum(row.nbytes for rows in (*3 * [table], *whole) for row in rows)
            self.writer = Writer(model.device, nbytes, self.ranks.here if self.ranks else 1)

    def go_on(self, training, model):
        """Set a model and its data to where the newest checkpoint was written, or leave them at the
        start of a run that has none. Raises UserError if its run had other data or batches."""
        device, run, flags = model.device, self.run, self.flags
        if run:
            self.compare()
            self.set_products(device, run["products"])
            if self.step is None:
                say(f"resumed      | at the start: {self.path} has no checkpoint, and the flags of "
                    "its run (-y)")
        elif self.checkpoint:
            say(f"WARNING: there is no {self.notes}: flags and data of that run are not known")
        if self.has_state:
            state = self.file(1, self.step)
            try:
                # The model may be loaded from the state's fp32 parameters instead of these.
                for _ in self.parameters(self.step, model.config):
                    pass
                load_state(lambda rank: self.file(1, self.step, rank), model, training.train_data,
                           run["flags"].get("batch_size") if run else None)
            except Damage as e:
                raise UserError(f"{e}{self.older(self.step) if run else ''}") from None
            say(f"resumed      | after step {self.step}, from {state} (-y)")
        if self.checkpoint:
            training.set_state(model, run or {})
            model.step = self.step
            if self.step >= flags.steps:
                flags.val_every = flags.sample_every = 0
                more = ("a larger -x goes on" if self.has_state else
                        f"{self.checkpoint} has the weights")
                say(f"nothing is left to do: all {self.step} steps are made (-x {flags.steps}); "
                    f"{more}")

    def set_products(self, device, products):
        """Have a device multiply with the algorithms that the run had, if they are for it."""
        of = products.get("of")
        if of and of == getattr(device, "cache", None):
            sets = {key: value for key, value in device.choices.items() if key.endswith("False)")}
            # What adds takes the choice of what sets.
            device.choices = sets | products["algorithms"]
        elif of:
            say(f"WARNING: algorithms of matrix products were chosen for {of}: this device chooses "
                "its own, and bits may differ")

    def compare(self):
        """Raise UserError if the run had other data or batches, or has more steps, and warn of
        other flags."""
        run, flags, step = self.run, self.flags, self.step or 0
        if step > flags.steps:
            raise UserError(f"-x {flags.steps}: expected {step} or more, the steps of "
                            f"{self.checkpoint}")
        pairs = [(then, now[: len(then)])  # an older version has no hash
                 for then, now in zip(run["data"], self.data)]
        if len(run["data"]) != len(self.data) or any(then != now for then, now in pairs):
            counts = f"{len(run['data'])} files", f"{len(self.data)} files"
            before, now = next((pair for pair in pairs if pair[0] != pair[1]), counts)
            raise UserError(f"{self.notes}: of a run on {before}, and -i is {now}: expected the "
                            "same names, sizes and hashes of what the files hold")
        count = run.get("ranks", self.count)
        if self.has_state:
            count = read_header(self.file(1, step), STATE)[2]
        for name, now in vars(flags).items():
            before = run["flags"].get(name, now)
            if name == "model" and before:
                # Behind a checkpoint it does not matter where the first weights were.
                short = os.path.basename if self.checkpoint else os.path.abspath
                before, now = short(before), short(now)
            if before in (now, None if name == "model" else now):
                continue
            if name in MUST_AGREE and not (count != self.count and name == "total_batch"):
                raise UserError(f"{self.notes}: of a run with {MUST_AGREE[name]} {before}, and now "
                                f"it is {now}: expected the same")
            rounds = name == "seed" and flags.moments == "bf16"
            if rounds or name not in MAY_DIFFER:
                say(f"WARNING: --{name.replace('_', '-')} was {before} until step {step}, and is "
                    f"{now} from now on")

    def notes_of(self, training, model):
        """What run_*.json says of a run: all that it goes on with, but for llm.c's files."""
        device = model.device
        return dict(step=model.step, ranks=self.count,
                    flags={name: from_anywhere(name, x) for name, x in vars(self.flags).items()},
                    data=self.data, **training.state(model),
                    products=dict(of=getattr(device, "cache", None),
                                  algorithms=dict(getattr(device, "choices", {}))))

    def write_notes(self, notes):
        replace_file(self.file(2, notes["step"]), [json.dumps(notes, indent=1).encode()])

    def log(self, line):
        """Append a line to main.log, in llm.c's form: s is the step, from 0; trl a training loss;
        lr the learning rate; norm the gradient's; tel a validation loss; eval HellaSwag's share of
        right answers. If the disk is full, lines wait until they can be written."""
        if self.rank:
            return self.tell()
        self.unwritten += f"{line}\n".encode()
        try:
            self.unwritten = self.unwritten[self.file_of_log.write(self.unwritten) :]
            self.full = self.full and bool(self.unwritten)
        except OSError as e:
            if not self.full:
                self.news.append(f"WARNING: main.log could not be written ({e.strerror}); its "
                                 "lines wait until it can")
            self.full = True
        self.tell()

    def tell(self):
        """Say what the writer has done since."""
        while self.news:
            say(self.news.pop(0))

    def save(self, training, position, whole=False, prunes=True):
        """Write a checkpoint: a whole one, or only the parameters. One that is there already stays.
        prunes: whether old ones are removed behind it, which a run that went wrong still needs."""
        model = training.model
        self.prepare(training, model)
        self.writer.wait()
        step, begun = model.step, time.perf_counter()
        if whole and self.file(3, step).exists() or self.rank and not whole:
            return
        files = {} if self.rank else {
            self.path / name.format(step): checkpoint_parts(model.config, views, real)
            for name, (views, real) in training.weights(model).items()}
        if whole:
            files[self.file(1, step, self.rank)] = state_parts(model, position, self.shared)
        notes, agreed = self.notes_of(training, model), False

        def finish(failure):
            nonlocal agreed
            failure = failure and (str(failure) or type(failure).__name__)
            if whole and not agreed:  # whether all ranks' states are there
                agreed = True
                failures = self.exchange(failure, f"the checkpoint of step {step}")
                failure = next(filter(None, failures), None)
                if not (failure or self.rank):
                    try:
                        self.write_notes(notes)
                        replace_file(self.file(3, step), [])
                    except UserError as e:
                        failure = str(e)
                failure = self.exchange(failure, f"the end of the checkpoint of step {step}")[0]
            if failure:
                self.failed = f"no checkpoint of step {step}: {failure}"
                if whole and not self.rank:
                    self.remove(step)  # what there is of it; the disk may be full
                steps = self.steps()
                newest = f"; the newest whole one is of step {steps[-1]}" if steps else ""
                self.news.append(f"WARNING: {self.failed}{newest}")
                return
            self.failed = None
            seconds, waited = time.perf_counter() - begun, self.writer.waited
            state = " and its state" if whole and not self.rank else ""
            self.news.append(f"wrote {next(iter(files))}{state} in {seconds:.1f} s, for which "
                             f"training waited {waited:.2f} s")
            if whole and prunes and not self.rank:
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
        if not self.rank:
            os.close(self.lock)
        if self.failed and sys.exc_info()[0] is None:
            raise UserError(self.failed)


# ---- The training


class Resumed:
    """A run that begins with the checkpoint which its folder has for it."""

    def choose_model(self):
        flags, given = self.flags, self.flags.model
        flags.model = str(self.folder.checkpoint or given)
        super().choose_model()
        flags.model = given  # for run_*.json


class Kept(Resumed):
    """Training that keeps a log and checkpoints in a folder, and goes on from them."""

    def data_paths(self):
        self.flags.train_data, self.flags.val_data = paths = super().data_paths()
        return paths

    def weights(self, model):
        """{name of a file: (views of whole parameters, their type)}, which rank 0 writes into each
        checkpoint. A feature may add to them; OF_A_RUN knows the names."""
        return {CHECKPOINT[0]: (model.params, model.device.real)}

    def make_model(self):
        model = super().make_model()
        self.folder.begin(self, model)
        return model

    def train(self):
        try:
            super().train()
        finally:
            self.folder.close()

    def next_batches(self):
        if self.flags.overfit:
            self.train_data.restart()
        position = self.train_data.position()
        batches = super().next_batches()
        batches.position = position
        return batches

    def saves(self, done):
        return super().saves(done) or done > 0 and self.due(done, self.flags.checkpoint_every)

    def save(self, done, batches):
        if self.model.step != self.folder.step:  # more than -x if a finished run goes on
            whole = self.flags.checkpoint_every or self.stopping
            self.folder.save(self, batches.position, whole)

    def validate(self, done):
        loss = super().validate(done)
        self.folder.log(f"s:{done} tel:{loss:.4f}")
        return loss

    def report(self, queued, verdict):
        super().report(queued, verdict)
        self.folder.log(f"s:{queued.number - 1} trl:{verdict.loss:.4f} lr:{queued.rate:.6f} "
                        f"norm:{verdict.norm:.2f}")

    def give_up(self, queued, verdict):
        self.model.step = queued.number - 1  # no later one has made an update
        self.folder.save(self, queued.batches.position, whole=True, prunes=False)
        super().give_up(queued, verdict)

    def what_is_left(self):
        return "-y 1 goes on from there"
