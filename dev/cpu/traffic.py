"""What the warps of a launch move, by line of the source: traffic.h counts it, on a device that can
find races."""
import contextlib
import ctypes
import json
import os
from typing import NamedTuple

import numpy as np

from dev.cpu import races
from dev.cpu.emulated import Emulated

KINDS = ("load", "store", "atomic", "copy")
SECTOR, BANKS = 32, 32  # bytes; of 4 bytes each
LANES = 32


class Sample(NamedTuple):
    """One request: what each lane of a warp touched."""
    array: str  # the name of the array, or "memory"
    block: int
    warp: int  # in its block
    bytes: int  # of a lane
    item: int  # the bytes of an element of the array
    at: list  # of each lane: the byte of the array, or None if the lane took no part


class Count(NamedTuple):
    """The requests of one kind that a line made. A request is what the lanes of a warp do at once.
    It costs sectors of global memory, and turns of shared memory: see traffic.h."""
    file: str
    line: int
    kind: str  # of KINDS
    shared: bool
    requests: int
    partial: int  # requests in which lanes were missing that do something elsewhere
    cost: int  # sectors or turns of all requests together
    least: int  # what they would be if the same bytes lay side by side
    sample: Sample = None  # a request that cost most

    @property
    def each(self):
        """Sectors or turns a request."""
        return self.cost / self.requests

    @property
    def ideal(self):
        """The same at the least."""
        return self.least / self.requests


class Traffic(NamedTuple):
    """What one run of a kernel moved."""
    counts: list  # a Count for each line and kind, in the order of lines
    read: int  # sectors of global memory that were read at least once
    written: int  # and that were written at least once

    def total(self, *kinds, shared=False):
        """The Count of all lines together, or None if they made no such request."""
        chosen = [c for c in self.counts if c.shared == shared and c.kind in (kinds or KINDS)]
        sums = map(sum, zip(*((c.requests, c.partial, c.cost, c.least) for c in chosen)))
        return Count("", 0, "", shared, *sums) if chosen else None

    @property
    def moved(self):
        """Sectors of global memory, all requests together."""
        return sum(c.cost for c in self.counts if not c.shared)

    @property
    def fewest(self):
        """The same if each sector that was touched were moved once, and once more to write it."""
        return self.read + self.written

    @property
    def partial(self):
        """The share of requests in which lanes are missing."""
        return sum(c.partial for c in self.counts) / (sum(c.requests for c in self.counts) or 1)


class CountingCpu(Emulated):
    """An Emulated whose launches can be counted. Its arrays begin on a sector, as a GPU's do."""

    def __init__(self, *args, **options):
        with counting_flags():
            super().__init__(*args, **options)

    def empty(self, nbytes):
        memory = super().empty(nbytes + 511)
        start = -memory.ctypes.data % 512
        return memory[start : start + nbytes]


@contextlib.contextmanager
def counting_flags():
    """The environment in which a device is compiled so that it can count, and find races."""
    before = os.environ.get("CXXFLAGS")
    os.environ["CXXFLAGS"] = f"-O1 {races.FLAG}"
    try:
        yield
    finally:
        os.environ.pop("CXXFLAGS")
        if before is not None:
            os.environ["CXXFLAGS"] = before


def count(device, work, arrays, own=""):
    """The Traffic of work(), which launches kernels on a CountingCpu. arrays: [(name, array)]; own:
    the name of a file, whose lines count for what they call in other files."""
    library = device.library
    library.traffic_end.restype = ctypes.c_char_p
    device.set_order("forward")  # warp by warp
    library.traffic_begin()
    try:
        work()
    finally:
        text = library.traffic_end()
    read, written, *sites = json.loads(text)
    counts = {}
    for site, places in zip(sites, races.lines_of(device.path, [site[1] for site in sites])):
        name, _, kind, shared, *numbers = site[:8]
        place = next((place for place in places if os.path.basename(place[0]) == own),
                     (*places, ("?", 0))[0])
        key = os.path.basename(place[0]), place[1], KINDS[kind], bool(shared)
        new = Count(*key, *numbers, sample=sample_of(site, arrays))
        counts[key] = added(counts[key], new) if key in counts else new
    counts = sorted(counts.values(),
                    key=lambda c: (c.file != own, c.file, c.line, c.shared, c.kind))
    return Traffic(counts, read, written)


def added(a, b):
    """Two Counts of one line: its instructions together."""
    worst = max(a, b, key=lambda c: c.each)
    return a._replace(requests=a.requests + b.requests, partial=a.partial + b.partial,
                      cost=a.cost + b.cost, least=a.least + b.least, sample=worst.sample)


def sample_of(site, arrays):
    """The Sample in a list of traffic.h's."""
    name, (_, shared), (block, warp, nbytes, begin), at = site[0], site[2:4], site[8:12], site[12:]
    first, item = next(address for address in at if address is not None), min(nbytes, 4)
    if not shared:
        name = "memory"
        for known, array in arrays:
            low, high = races.bounds(array)
            if low <= first < high:
                name, begin, item = known, low, array.itemsize
    return Sample(name or "shared memory", block, warp, nbytes, item,
                  [None if address is None else address - begin for address in at])


# ---- Traces: every request, one after another

TRACED = np.dtype([*((name, np.uint32) for name in (
    "pc", "block", "warp", "kind", "space", "bytes", "lanes", "cost", "least", "unused")),
    ("at", np.uint64, LANES)])  # struct Traced of traffic.h
BLOCK_MEETS, WARP_MEETS = 4, 5  # kinds of TRACED, behind those of KINDS; pc is then a line


class Trace(NamedTuple):
    """The requests and barriers of one launch, warp by warp, in the order in which lanes came to
    them."""
    rows: np.ndarray  # of TRACED; at: addresses, or bytes from the beginning of a shared variable
    spaces: list  # names of shared variables: space 1, 2 ..
    places: dict  # {pc of a request: [(file, line)] from the innermost function outward}


def trace(device, work):
    """The Trace of work(), which launches one kernel on a CountingCpu."""
    library = device.library
    library.traffic_trace.restype = ctypes.c_size_t
    library.traffic_space.restype = ctypes.c_char_p
    device.set_order("forward")  # warp by warp
    library.traffic_begin_trace()
    try:
        work()
    finally:
        library.traffic_end()
    start = ctypes.c_void_p()
    count = library.traffic_trace(ctypes.byref(start))
    rows = np.frombuffer(ctypes.string_at(start, count * TRACED.itemsize), TRACED)
    spaces = []
    while (name := library.traffic_space(len(spaces))) is not None:
        spaces.append(name.decode())
    pcs = np.unique(rows["pc"][rows["kind"] < BLOCK_MEETS]).tolist()
    return Trace(rows, spaces, dict(zip(pcs, races.lines_of(device.path, pcs))) if pcs else {})
