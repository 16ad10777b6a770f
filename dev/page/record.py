"""Records one real training step of a tiny GPT-2, launch by launch, for the page: who called it,
what it read and wrote, and every access of its threads. The device is emulated: kernels.cu runs on
the CPU thread by thread (dev/cpu/emulated.py), and dev/cpu/traffic.h notes each request.
"""
import ast
import base64
import inspect
import json
import re
import sys
import textwrap
import zlib

import numpy as np

import train_gpt2
from dev.common.config import Config
from dev.common.cuda_source import parameters_of
from dev.cpu.device import Cpu
from dev.cpu.traffic import BLOCK_MEETS, KINDS, CountingCpu, trace
from train_gpt2 import ADAMW, GPT2, KERNELS, DataLoader, Training, offsets

TEXT = ("Shall I compare thee to a summer's day? Thou art more lovely and more temperate: "
        "Rough winds do shake the darling buds of May")  # Shakespeare, sonnet 18
WORD = 4  # bytes: all that is recorded is fp32, or integers of 32 bits
BYTES = 256  # the vocabulary
LOAD, STORE, ATOMIC, COPY = range(len(KINDS))


def packed(data):
    """Bytes, compressed, as text."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


# ---- A trace, as the page reads it


def requests_of(trace, arrays):
    """[[line, block, warp, kind, space, bytes of a lane, cost, least, words]] of a Trace's requests
    and barriers. arrays: {index of an argument: (address, bytes)}. space is such an index, or
    -1 - i for shared variable i; cost and least are sectors, or turns of shared memory; words has
    for each lane the index of its word in the array, or None."""
    found = []
    for pc, block, warp, kind, space, size, lanes, cost, least, _, at in trace.rows.tolist():
        if kind >= BLOCK_MEETS:
            found.append([pc, block, warp, kind, 0, 0, 0, 0, []])
            continue
        at = [int(address) if lanes >> i & 1 else None for i, address in enumerate(at)]
        first, own, begin = next(x for x in at if x is not None), -space, 0
        if not space:
            own, begin = next(((i, start) for i, (start, nbytes) in arrays.items()
                               if start <= first < start + nbytes), (None, 0))
        if own is not None:  # else it is the library's own
            words = [None if x is None else (x - begin) // WORD for x in at]
            found.append([site_of(trace.places[pc])[1], block, warp, kind, own, size, cost, least,
                          words])
    return found


def words_touched(requests, kinds, places):
    """[(arena, its words)] that requests of these kinds touched, sorted. places: of each argument,
    see Recording.place."""
    found = {}
    for _, _, _, kind, space, size, _, _, words in requests:
        if kind in kinds and space >= 0 and places[space]:
            arena, start = places[space]["arena"], places[space]["start"]
            found.setdefault(arena, set()).update(
                start + word + i for word in words if word is not None for i in range(size // WORD))
    return [(arena, np.array(sorted(words))) for arena, words in found.items()]


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
        places = [self.place(x) for x in args]
        requests = requests_of(found, {
            i: (array.__array_interface__["data"][0], array.nbytes)
            for i, array in enumerate(args) if isinstance(array, np.ndarray)})
        encoded = packed(json.dumps(requests, separators=(",", ":")).encode())
        if encoded not in self.known_traces:
            self.known_traces[encoded] = len(self.traces)
            self.traces.append(dict(spaces=found.spaces, data=encoded))
        arguments = [dict(name=p.name, **(place or {}), value=None if isinstance(
            x, np.ndarray) or x is None else float(x))
            for p, x, place in zip(parameters_of(kernel), args, places)]
        self.note(name, words_touched(requests, (LOAD, ATOMIC, COPY), places),
                  words_touched(requests, (STORE, ATOMIC), places), arguments,
                  trace=self.known_traces[encoded], grid=[*grid], block=[*block], shared=shared)

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
    """{name: about_kernel} of the kernels that were launched."""
    lines = KERNELS.read_text("utf-8").splitlines()
    return {name: about_kernel(lines, name)
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
