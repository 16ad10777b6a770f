"""Records one real training step of a tiny GPT-2, launch by launch, for the page: who called it,
what it read and wrote, and every access of its threads. The device is emulated: kernels.cu runs on
the CPU thread by thread (dev/cpu/emulated.py), and dev/cpu/traffic.h notes each request.
"""
import ast
import base64
import inspect
import re
import sys
import textwrap
import zlib

import numpy as np

import train_gpt2
from dev.common.config import Config
from dev.common.cuda_source import parameters_of
from dev.cpu.device import Cpu
from dev.cpu.traffic import BLOCK_MEETS, KINDS, LANES, CountingCpu, trace
from train_gpt2 import ADAMW, GPT2, KERNELS, DataLoader, Training, offsets

TEXT = ("Shall I compare thee to a summer's day? Thou art more lovely and more temperate: "
        "Rough winds do shake the darling buds of May")  # Shakespeare, sonnet 18
WORD = 4  # bytes: all that is recorded is fp32, or integers of 32 bits
BYTES = 256  # the vocabulary
LOAD, STORE, ATOMIC, COPY = range(len(KINDS))


def packed(array):
    """An array's bytes, compressed, as text."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()


# ---- A trace, as the page reads it


def words_touched(trace, kinds, begin, count):
    """The indices of those of an array's words, `count` from the address `begin`, that requests of
    these kinds touched, in order."""
    rows = trace.rows
    rows = rows[(rows["space"] == 0) & np.isin(rows["kind"], kinds)]
    touched = np.zeros(count, bool)
    there = rows["lanes"][:, None] >> np.arange(LANES, dtype=np.uint32) & 1 == 1
    first = (rows["at"].astype(np.int64) - begin) // WORD
    for i in range(4):
        index = first + i
        ok = there & (i * WORD < rows["bytes"])[:, None] & (index >= 0) & (index < count)
        touched[index[ok]] = True
    return np.flatnonzero(touched)


def encoded_trace(trace, arrays):
    """A Trace as {"sites": [[file, line]], "spaces": names of shared variables, "rows": count,
    "data": packed columns}. arrays: of each argument None, or (address, bytes). Columns of 32 bits:
    site, or a barrier's line; block; warp; kind; space, which is the argument's index, or -1 - i
    for shared variable i; bytes of a lane; cost and least (sectors, or turns of shared memory);
    lanes, a mask; then for each lane the distance of its word from the word of the lane before."""
    rows = trace.rows
    first = rows["at"][np.arange(len(rows)), np.argmax(
        rows["lanes"][:, None] >> np.arange(LANES, dtype=np.uint32) & 1, axis=1)].astype(np.int64)
    space = np.full(len(rows), -1000, np.int64)
    origin = np.zeros(len(rows), np.int64)
    for i, span in reversed([*enumerate(arrays)]):
        if span:
            inside = (rows["space"] == 0) & (first >= span[0]) & (first < span[0] + span[1])
            space[inside] = i
            origin[inside] = span[0]
    shared = rows["space"] > 0
    space[shared] = -rows["space"][shared].astype(np.int64)
    meets = rows["kind"] >= BLOCK_MEETS
    keep = meets | (space > -1000)  # not what the library itself has
    rows, space, origin, meets = rows[keep], space[keep], origin[keep], meets[keep]
    places = sorted({site_of(places) for places in trace.places.values()})
    number = {pc: places.index(site_of(found)) for pc, found in trace.places.items()}
    site = [pc if meet else number[pc]
            for pc, meet in zip(rows["pc"].tolist(), meets.tolist())]
    there = rows["lanes"][:, None] >> np.arange(LANES, dtype=np.uint32) & 1 == 1
    at = np.where(there, (rows["at"].astype(np.int64) - origin[:, None]) // WORD, 0)
    for lane in range(1, LANES):  # a lane that is missing stays where the one before is
        at[:, lane] = np.where(there[:, lane], at[:, lane], at[:, lane - 1])
    steps = np.diff(at, axis=1, prepend=0)
    columns = [np.array(site, np.int64), rows["block"], rows["warp"], rows["kind"], space,
               rows["bytes"], rows["cost"], rows["least"], rows["lanes"].view(np.int32),
               *steps.T]
    data = np.concatenate([column.astype(np.int32) for column in columns])
    return dict(sites=places, spaces=trace.spaces, rows=len(rows), data=packed(data))


def site_of(places):
    """(file, line) of the innermost function, of [(file, line)]."""
    file, line = places[0] if places else ("?", 0)
    return file.rsplit("/", 1)[-1], line


# ---- What is noted of launches


def source_of(code):
    """{first, lines, doc, in_doc} of a function: its first line's number, its lines, its docstring,
    and the indices of the docstring's first line and of the one behind its last."""
    lines, first = inspect.getsourcelines(code)
    node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    doc = ast.get_docstring(node) or ""
    return dict(first=first, lines=[line.rstrip("\n") for line in lines], doc=doc,
                in_doc=[node.body[0].lineno - 1, node.body[0].end_lineno] if doc else [0, 0])


class Recording:
    """Notes launches on a device that counts (dev/cpu/traffic.py), and the numbers that they leave.
    arenas: {name: a whole array of bytes}; tensors: what lies in them, dicts with name, arena (its
    index), layer, shape, start and words, and kind, "f" for fp32 or "i"; unset: names of arenas
    whose numbers do not count until a launch writes them."""

    def __init__(self, device, arenas, tensors, unset=()):
        self.device, self.arenas, self.tensors = device, arenas, tensors
        self.launches, self.values, self.traces, self.functions = [], [], [], {}
        self.known_traces, self.length, self.names = {}, 0, list(arenas)
        self.initial = [None if self.names[t["arena"]] in unset
                        else self.keep(t["arena"], t["start"], t["words"]) for t in tensors]

    def keep(self, arena, start, count):
        """Copy these words of an arena; where they are among all values."""
        data = self.arenas[self.names[arena]][start * WORD : (start + count) * WORD]
        self.values.append(data.copy())
        self.length += count
        return self.length - count

    def place(self, array):
        """Where an array lies: {arena, start, shape, strides} in words, or None."""
        if not isinstance(array, np.ndarray):
            return None
        address = array.__array_interface__["data"][0]
        for i, memory in enumerate(self.arenas.values()):
            inside = address - memory.ctypes.data
            if 0 <= inside < memory.nbytes:
                bare = array.itemsize != WORD  # an arena's bytes
                return dict(arena=i, start=inside // WORD,
                            shape=[array.nbytes // WORD] if bare else [*array.shape],
                            strides=[1] if bare else [s // WORD for s in array.strides])
        return None

    def stack(self):
        """[(function, line)] of the trainer's functions that are running, outermost first; line 0
        is the def."""
        found, frame = [], sys._getframe(1)
        while frame:
            code = frame.f_code
            if code.co_filename == train_gpt2.__file__:
                if code.co_name not in self.functions:
                    self.functions[code.co_name] = source_of(code)
                found.append((code.co_name, frame.f_lineno - code.co_firstlineno))
            frame = frame.f_back
        return found[::-1]

    def note(self, name, reads, writes, arguments, **more):
        """Note a launch that is done. reads, writes: [(arena, words)], sorted indices of words."""
        written, read = [], []
        for number, tensor in enumerate(self.tensors):
            start, end = tensor["start"], tensor["start"] + tensor["words"]
            for arena, words in writes:
                own = words[(words >= start) & (words < end)]
                for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
                    if arena == tensor["arena"] and len(run):
                        low, high = int(run[0]), int(run[-1]) + 1
                        written.append([number, low - start, high - start,
                                        self.keep(arena, low, high - low)])
            if any(arena == tensor["arena"] and ((words >= start) & (words < end)).any()
                   for arena, words in reads):
                read.append(number)
        for argument in arguments:
            if "arena" in argument:
                own = words_of(argument)
                argument["read"], argument["written"] = (
                    any(arena == argument["arena"] and np.isin(own, words).any()
                        for arena, words in touched) for touched in (reads, writes))
        self.launches.append(dict(name=name, stack=self.stack(), reads=read, writes=written,
                                  arguments=arguments, **more))

    def note_arrays(self, name, reads, writes, **arrays):
        """Note what is no kernel: the names of the arrays that it reads and writes."""
        places = {key: self.place(x) for key, x in arrays.items()}
        words = {key: (p["arena"], words_of(p)) for key, p in places.items() if p}
        self.note(name, [words[key] for key in reads if key in words],
                  [words[key] for key in writes],
                  [dict(name=key, **(places[key] or {}), value=None) if places[key] or x is None
                   else dict(name=key, value=float(x)) for key, x in arrays.items()])

    def launch(self, run, name, items, args, threads=None, shared=0):
        """Note the launch of a kernel, which run() makes."""
        device = self.device
        kernel = device.kernels[name]
        grid, block, _ = kernel.configure(items, args, device.W,
                                          threads or min(kernel.threads, device.max_threads))
        found = trace(device, run)
        spans = [(array.__array_interface__["data"][0], array.nbytes)
                 if isinstance(array, np.ndarray) else None for array in args]
        encoded = encoded_trace(found, spans)
        key = encoded["data"], str(encoded["sites"])
        if key not in self.known_traces:
            self.known_traces[key] = len(self.traces)
            self.traces.append(encoded)
        reads, writes = (
            [(i, words_touched(found, kinds, memory.ctypes.data, memory.nbytes // WORD))
             for i, memory in enumerate(self.arenas.values())]
            for kinds in ((LOAD, ATOMIC, COPY), (STORE, ATOMIC)))
        arguments = [dict(name=p.name, **(self.place(x) or {}), value=None if isinstance(
            x, np.ndarray) or x is None else float(x))
            for p, x in zip(parameters_of(kernel), args)]
        self.note(name, reads, writes, arguments, trace=self.known_traces[key], grid=[*grid],
                  block=[*block], shared=shared)

    def data(self):
        """What the page's scripts read."""
        return dict(arenas=[dict(name=name, bytes=memory.nbytes)
                            for name, memory in self.arenas.items()],
                    tensors=self.tensors, initial=self.initial, launches=self.launches,
                    functions=self.functions, traces=self.traces,
                    loops=dict(multiprocessors=self.device.multiprocessors),
                    values=base64.b64encode(np.concatenate(self.values).tobytes()).decode())


class Recorder(CountingCpu):
    """An emulated device that has all that it does noted, while there is a recording."""
    recording = None

    def launch(self, name, items, *args, **sizes):
        def run():
            super(Recorder, self).launch(name, items, *args, **sizes)

        if self.recording:
            self.recording.launch(run, name, items, args, **sizes)
        else:
            run()

    def matmul(self, out, left, right, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        super().matmul(out, left, right, bias, accumulate)
        if self.recording:
            self.recording.note_arrays(
                "matmul", ["left", "right", "bias", *(["out"] if accumulate else [])], ["out"],
                out=out, left=left, right=right, bias=bias, accumulate=accumulate)
        self.gelu_of_product(out, gelu, dgelu_at)

    def zero(self, array):
        super().zero(array)
        if self.recording:
            self.recording.note_arrays("zero", [], ["array"], array=array)

    def put(self, array, values):
        super().put(array, values)
        if self.recording:
            self.recording.note_arrays("put", [], ["array"], array=array)


def tensors_of(model):
    """The tensors of a model, as a Recording wants them."""
    found = []
    for i, table in enumerate(tables_of(model).values()):
        for row, start in zip(table, offsets(table)):
            words = row.nbytes // WORD // max(1, row.layers)
            found += [dict(name=row.name, arena=i, layer=l if row.layers else None,
                           shape=[*row.shape], start=start // WORD + l * words, words=words,
                           kind="f" if row.dtype == np.float32 else "i")
                      for l in range(max(1, row.layers))]
    return found


def words_of(place):
    """The words of an array, sorted, by its place."""
    at = np.full((), place["start"])
    for size, stride in zip(place["shape"], place["strides"]):
        at = np.add.outer(at, np.arange(size) * stride)
    return np.sort(at.ravel())


def tables_of(model):
    return model.tables(model.config, model.device, model.B, model.T)


# ---- The run


def flags_of(sizes):
    """The trainer's flags for a run of these sizes."""
    return train_gpt2.parse_flags(
        f"-b {sizes['B']} -t {sizes['T']} -l {sizes['rate']} -c {sizes['decay']} "
        f"--seed {sizes['seed']} -v 0 -m 0 -s 0 --dtype fp32 -i text".split())


def run_of(device, config, sizes, text, steps):
    """A train_gpt2.Training over the bytes of a text."""
    run = Training(flags_of(sizes))
    run.config, run.device, run.steps, run.T = config, device, steps, sizes["T"]
    tokens = np.frombuffer(text.encode("latin-1"), np.uint8)
    run.train_data = DataLoader("the text", tokens, sizes["B"], sizes["T"])
    run.observers = []
    run.model = GPT2(config, device, sizes["B"], sizes["T"])
    return run


def config_of(sizes):
    return Config(maxT=sizes["T"], V=BYTES, Vp=BYTES, L=sizes["L"], NH=sizes["NH"], C=sizes["C"])


def record(sizes, text=TEXT):
    """(what the page shows of a step, the model before it on the CPU, the model after it).
    sizes: L, NH, C, B, T, after (steps on the CPU before the one that is recorded), rate, decay and
    seed."""
    config = config_of(sizes)
    before = run_of(Cpu("fp32", config), config, sizes, text, sizes["after"])
    before.model.set_parameters(train_gpt2.draw_parameters(config, sizes["seed"]))
    before.train()
    device = Recorder("fp32", config)
    run = run_of(device, config, sizes, text, sizes["after"] + 1)
    for arena in ("parameters", "adam m", "adam v"):
        run.model.arenas[arena][...] = before.model.arenas[arena]
    run.model.step = sizes["after"]
    run.train_data.next = sizes["after"] % run.train_data.per_epoch
    device.recording = Recording(device, run.model.arenas, tensors_of(run.model),
                                 unset=("activations", "backward"))
    run.train()
    noted, device.recording = device.recording.data(), None
    noted["loops"] |= dict(row_threads=device.layernorm_sizes.row_threads)
    return noted | dict(
        sizes=sizes | dict(V=BYTES, Vp=BYTES, maxT=sizes["T"], N=sizes["B"] * sizes["T"],
                           HS=sizes["C"] // sizes["NH"], parameters=sum(
                               row.size for row in config.parameter_table())),
        text=text, step=run.model.step, settings=[*ADAMW], verdict=run.model.verdict()._asdict(),
        kernels=kernels_of(device.kernels, noted["launches"]), sourceName=KERNELS.name,
        source=KERNELS.read_text("utf-8").splitlines()), before.model, run.model


def kernels_of(kernels, notes):
    """{name: comment, lines (first, last) and parameters} of the kernels that were launched."""
    lines = KERNELS.read_text("utf-8").splitlines()
    return {name: about_kernel(lines, name) | dict(
        threads=kernels[name].threads, parameters=[text.strip()
                                                   for text in kernels[name].parameters])
            for name in {note["name"] for note in notes} & set(kernels)}


def about_kernel(lines, name):
    """{comment, first, last}: the comment over a kernel, and its lines, counted from 1."""
    start = next(i for i, line in enumerate(lines) if re.search(rf"\b{name}\($", line.rstrip())
                 or re.search(rf"__global__.*\b{name}\(", line))
    first = max(i for i in range(start + 1) if lines[i].startswith("BLOCK("))
    last = next(i for i in range(start, len(lines)) if lines[i] == "}")
    top = first
    while top > 0 and not lines[top - 1].startswith("}") and lines[top - 1].strip():
        top -= 1
    comment = [line[2:].removeprefix(" ") for line in lines[top:first] if line.startswith("//")
               and not line.startswith("// ----")]
    return dict(comment=comment, first=first + 1, last=last + 1)
