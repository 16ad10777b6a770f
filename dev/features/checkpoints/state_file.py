"""llm.c's state file, such as state_00000500_00000.bin: what a run needs besides the parameters in
order to resume. It has AdamW's moments, the fp32 parameters, and the position in the data, with the
state of the shuffle. Each rank has a file of its own. A file of version 2 has another optimizer's
numbers in the same places, and other shares: see dev/features/muon.py.
"""
import os
from types import SimpleNamespace

import numpy as np

from dev.common.bf16 import joined
from dev.common.files import checked_header
from dev.features import muon
from dev.features.ranks.ranks import cut
from dev.features.replay import bad_place
from train_gpt2 import (HEADER_BYTES, FileKind, Row, UserError, carve, make_header, to_float,
                        whole_shape)

UNCUT = {1: (), muon.STATE_VERSION: muon.HIDDEN}  # tensors with whole layers, by version
STATE = FileKind("state", 20240527, tuple(UNCUT), "restore it")
SEED = 13371337  # llm.c's stochastic rounding starts from it; ours uses --seed and the step


class Damage(UserError):
    """A checkpoint is damaged."""


def shuffle_record(P, n):
    """The shuffle at the end of a state file: the order of P files, the order of the n batches of
    the file being read, and the Mersenne Twister that made them."""
    return np.dtype([("P", "<u8"), ("files", "<i4", (P,)), ("n", "<u8"), ("order", "<i4", (n,)),
                     ("seed", "<u8"), ("left", "<i4"), ("next", "<u4"), ("key", "<u4", 624),
                     ("matrix", "<u4", 2)])


def state_table(c, count, rank, version):
    """The tensors of a state file, which come three times: m, v, parameters. With count = 0 they
    are whole. Otherwise they are a rank's share, as in llm.c: a tensor's pieces of all layers, and
    at the end of rank 0's file the tails (see dev/features/ranks/zero.py). version: tells which
    tensors' layers are whole."""
    if not count:
        return c.file_table()
    in_memory = {row.name: row for row in c.parameter_table()}
    # words may be padded in memory alone
    cuts = [(row.name, *cut(in_memory.get(row.name, row), count, rank, UNCUT[version]))
            for row in c.file_table()]
    return [Row(name, (layers * piece,)) for name, layers, piece, _ in cuts] + [
        Row(f"{name}_tail", (layers * tail,))
        for name, layers, _, tail in cuts if tail]


def moments_of(model):
    """[views of AdamW's m], [views of its v]."""
    tables = model.tables(model.config, model.device, model.B, model.T)
    return [[carve(model.arenas[name], tables[name])] for name in ("adam m", "adam v")]


def completed(c, views):
    """The views, with zeros of the host for parameters that have none: Muon lacks some of v."""
    absent = {row.name: np.zeros(whole_shape(row), row.dtype) for row in c.parameter_table()
              if not hasattr(views, row.name)}
    return SimpleNamespace(**absent, **vars(views))


# ---- Writing


def of_share(table, views):
    """The tensors of a share, in the order of a state file; zeros for those it does not have."""
    for row in table:
        absent = np.zeros(0 if hasattr(views, row.name) else row.size, row.dtype)
        yield getattr(views, row.name, absent)[: row.size]


def state_parts(model, position, shared=False):
    """The arrays that make up a state file, of the device or the host. shared: the model is a rank
    that has only a share of AdamW's numbers."""
    c, count, rank = model.config, model.count, model.rank
    version = model.state_version
    header = make_header(STATE.magic, version, count, rank, 1, position.shuffle)  # has parameters
    header[10] = model.step
    header.view("<u8")[[10, 11, 15, 16]] = SEED, SEED, position.place, position.next
    yield header
    table = state_table(c, count, rank, version) if shared else None
    for kept in (*moments_of(model), model.masters):
        kept = model.as_saved(kept) if shared else kept
        for halves in zip(*(of_share(table, views) if shared
                            else c.file_parts(completed(c, views)) for views in kept)):
            halves = [half.reshape(-1) for half in halves]
            for start in range(0, halves[0].size, 2**20):  # a device has little memory for more
                parts = [half[start : start + 2**20] for half in halves]
                yield joined(*parts) if len(parts) == 2 else to_float(*parts)
    if position.shuffle:
        P, n, (_, key, used, *_) = len(position.files), len(position.order), position.rng
        yield np.array([(P, position.files, n, position.order, 0, max(1, 625 - used), used, key,
                         (0, 0x9908B0DF))], shuffle_record(P, n))  # used: of 624 numbers


# ---- Reading


class State:
    """A state file of a model of config c. Raises UserError if it is damaged."""

    def __init__(self, path, c):
        self.path, header = path, checked_header(path, STATE)
        self.version, self.count, self.rank = header[1:4]
        self.shuffle, self.step = header[5], header[10]
        self.place, self.next = np.array(header, "<i4").view("<u8")[15:17].tolist()
        self.sets = 2 + header[4]  # m, v, and perhaps the parameters
        size, sizes = os.path.getsize(path), []
        for shared in (0, self.count) if self.count > 1 else (0,):
            self.table = state_table(c, shared, self.rank, self.version)
            self.shared = shared > 0
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
        """The shuffle at the end of the file; None if there cannot be one."""
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
        """(name, values) of its m (i = 0), v or parameters, mapped into memory."""
        start = HEADER_BYTES + i * self.nbytes
        for row in self.table:
            yield row.name, np.memmap(self.path, row.dtype, "r", start, whole_shape(row))
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


def whole_tensors(states, i, c):
    """(name, values) of the m, v or parameters, put together from the files of all ranks."""
    if not states[0].shared:
        yield from states[0].tensors(i)
        return
    shares = [dict(state.tensors(i)) for state in states]
    for row in c.parameter_table():
        layers = 1 if row.name in UNCUT[states[0].version] else max(1, row.layers)
        parts = [share[name].reshape(layers, -1) for name in (row.name, f"{row.name}_tail")
                 for share in shares if name in share]
        whole = np.concatenate(parts, axis=1)
        yield row.name, whole.reshape(whole_shape(row))


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
    """The m, v and perhaps parameters: for each a generator of finite (name, values)."""
    kinds = "AdamW's m of", "AdamW's v of", "the fp32 parameter"
    for i, kind in enumerate(kinds[: states[0].sets]):
        yield finite(states[0].path, kind, whole_tensors(states, i, c))
