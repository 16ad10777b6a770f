"""What races.h has found, in words. A device that is compiled with FLAG looks for races in every
launch."""
import ctypes
import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common.compiler import words_of
from train_gpt2 import UserError

FLAG = "-fsanitize=thread"
# The hooks are races.h's own, so libtsan must not be linked; lines are for the report; one OS
# thread runs all blocks. -fno-tree-sra: a load of 16 bytes whose numbers are used one by one would
# become four loads.
MORE_FLAGS = ("-g1", "-fno-tree-sra", "--param=tsan-distinguish-volatile=1",
              "--param=tsan-instrument-func-entry-exit=0", "-nodefaultlibs")
# instead, behind the source: some may be archives
LIBRARIES = ("-lstdc++", "-lm", "-lgcc_s", "-lgcc", "-lc")
HEADERS = Path(__file__).resolve().parent
SMALL = re.compile(r"\b(load|store|load_master|store_master|load_once|to_float|from_float"
                   r"|operator\[\])[<(]")


@functools.cache
def finds_races(compiler):
    """Whether a compiler can build a device that finds races: g++ from version 11 on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*words_of(compiler), FLAG, *MORE_FLAGS, "-E", "-dM", "-x", "c++", os.devnull]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return (done.returncode == 0 and "__SANITIZE_THREAD__" in done.stdout
            and "__clang__" not in done.stdout)


class Access(NamedTuple):
    """One side of a race."""
    block: tuple  # (x, y, z)
    thread: int
    what: str  # "writes", ...
    atomic: bool
    copies: bool  # asynchronously
    constant: bool  # a read by __ldg
    unfenced: bool  # a read of what another block announced without a fence
    places: list  # [(file, line)], from the innermost function outward

    def told(self, with_place=True):
        """"thread 3 of block 0 writes it (kernels.cu:12)"."""
        block = self.block if any(self.block[1:]) else self.block[0]
        file, line = self.places[0] if self.places else ("?", 0)
        place = f" ({Path(file).name}:{line})" * with_place
        how = " by __ldg" * self.constant
        return f"thread {self.thread} of block {block} {self.what} it{how}{place}"


class Race(UserError):
    """A race: `what`, such as "part[3]", two Accesses, `why` nothing orders them, a sentence, and
    `bits`: (those that were there before the first, before the second and behind it; how many bytes
    of them; the NumPy dtype of the array, or None for shared memory), or None; and `barrier`: the
    (file, line) of the last barrier of their block, or ("", 0)."""

    def __init__(self, kernel, what, first, second, shared, under_way, shuffled=False, bits=None,
                 barrier=("", 0)):
        self.what, self.first, self.second = what, first, second
        self.bits, self.barrier = bits, barrier
        self.why = reason(first, second, shared, under_way, shuffled)
        super().__init__(f"kernels.cu: {kernel} has a race on {what}: {first.told()} and "
                         f"{second.told()}. {self.why}")


def reason(first, second, shared, under_way, shuffled):
    """Why nothing orders two accesses, and what would. shuffled: their warp has shuffled or voted
    since the first."""
    if second.unfenced:
        return ("The block that writes it then writes another place, which this thread has read: a "
                "GPU may show the other place first, and the old number here. Write "
                "__threadfence() between the two")
    if first.constant or second.constant:
        return ("__ldg reads through a cache that does not see what the same launch writes, so a "
                "GPU may give the old number. Read it without __ldg")
    if second.copies and shared and first.what == "writes" and not first.copies:
        return ("An asynchronous copy sees what a thread wrote to shared memory if that thread "
                "then fences (fence.proxy.async) and meets the thread that copies at a barrier")
    if under_way:
        return ("An asynchronous copy may still be on its way there: its thread must wait for it "
                "(wait_for_copies), and then the others for that thread (__syncthreads)")
    why = "Either may come first"
    if first.atomic != second.atomic:
        why = "An atomic access does not protect a place from one that is not atomic"
    elif first.block != second.block:
        why = "Blocks run in any order, and at the same time"
    if first.block != second.block:
        return (f"{why}. Give each block places of its own, or let all of them use atomicAdd "
                "there, or let a block that reads what others wrote wait for them, by "
                "__threadfence and a counter")
    if first.thread // 32 == second.thread // 32:
        why += ": the threads are of one warp, and no __syncwarp() or __syncthreads() comes between"
        if shuffled:
            why += (". A shuffle or a vote does, but it moves registers and orders no memory: "
                    "write __syncwarp() there")
    else:
        why += ": no __syncthreads() comes between"
    return why if shared else f"{why}. Or should each thread have a place of its own?"


STEPS = "-fsanitize-coverage=trace-pc"  # with this flag too, work counts steps; g++ 12 on


class Work(NamedTuple):
    """What a kernel's launches have done: see work.h."""
    read: int  # bytes of arrays
    written: int
    steps: int
    blocks: int  # that have touched an array
    threads: int


def work(library, enough=2**63, most=2**63):
    """The Work of a library's launches since the last call. Beyond `enough` steps races are no
    longer looked for, and at `most` the process ends with SIGXCPU."""
    counts = (ctypes.c_ulong * 5)()
    library.races_work(counts, ctypes.c_ulong(enough), ctypes.c_ulong(most))
    return Work(*counts)


def bounds(array):
    """The addresses of an array's first byte, and behind its last."""
    return (np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils")
            else np.byte_bounds)(array)


def watch(library, arrays):
    """Tell a library which arrays its next launch may use."""
    spans = sorted(bounds(array) for array in arrays if array.size)
    merged = []
    for begin, end in spans:
        if merged and begin < merged[-1][1] + 4:  # words of four bytes are not shared
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    numbers = ctypes.c_size_t * len(merged)
    library.races_watch(len(merged), numbers(*(begin for begin, _ in merged)),
                        numbers(*(end - begin for begin, end in merged)))


def check(library, path, kernel, arrays):
    """Raises a Race if the last launch of a library had one. arrays: [(name, array)]."""
    library.races_found.restype = ctypes.c_char_p
    text = library.races_found()
    if not text:
        return
    found = json.loads(text)
    sides = [found["first"], found["second"]]
    places = lines_of(path, [side["pc"] for side in sides])
    first, second = (Access(tuple(side["block"]), side["thread"], verb(side), bool(side["atomic"]),
                            bool(side["copies"]), bool(side["constant"]),
                            bool(side["unfenced"]), where)
                     for side, where in zip(sides, places))
    raise Race(kernel, name_of(found, path, arrays), first, second, "name" in found,
               bool(sides[0]["under_way"]), bool(found["shuffled"]), bits_of(found, arrays),
               (found["file"], found["line"]))


def bits_of(found, arrays):
    """The bits of a Race, or None where the two accesses differ in size or have more than four
    bytes."""
    sizes = {found[side]["bytes"] for side in ("first", "second")}
    types = [array.dtype.name for _, array in arrays
             if bounds(array)[0] <= found["address"] < bounds(array)[1]]
    if len(sizes) > 1 or max(sizes) > 4:
        return None
    return ((found["first"]["before"], found["second"]["before"], found["after"]), *sizes,
            *(types[:1] or [None]))


def verb(side):
    if side["copies"]:
        return "copies asynchronously to" if side["writes"] else "copies asynchronously from"
    return ("atomically " * bool(side["atomic"]) + ("changes" if side["writes"] else "reads")
            if side["atomic"] else "writes" if side["writes"] else "reads")


def name_of(found, path, arrays):
    """The place of a race, such as "out[3,5]"."""
    if "name" in found:  # __shared__
        return indexed(found["name"], found["at"] // found["item"], found["shape"],
                       many=bool(found["shape"]))
    address = found["address"]
    for name, array in arrays:
        begin = array.__array_interface__["data"][0]
        if begin <= address < begin + array.nbytes and array.flags.c_contiguous:
            number, shape = (address - begin) // array.itemsize, list(array.shape)
            return indexed(name, number, shape)
    symbols = subprocess.run(["nm", "-S", "-C", path], capture_output=True, text=True).stdout
    for start, size, name in re.findall(r"^([0-9a-f]+) ([0-9a-f]+) [bBdDuV] (.*)$", symbols, re.M):
        at = found["in_library"] - int(start, 16)
        if 0 <= at < int(size, 16):
            item = found["second"]["bytes"]
            return indexed(name.split("::")[-1], at // item, [int(size, 16) // item],
                           int(size, 16) > item)
    return "memory"


def indexed(name, number, shape, many=True):
    if not many:
        return name
    place = np.unravel_index(number,
                             shape) if len(shape) > 1 and number < np.prod(shape) else (number,)
    return f"{name or 'shared memory'}[{','.join(map(str, place))}]"


def lines_of(path, pcs):
    """For each address of a library's code the [(file, line)] of the functions that are inlined
    there, innermost first, without those that only load or store, and cuda.h's."""
    said = subprocess.run(["addr2line", "-e", path, "-a", "-i", "-f", "-C", *map(hex, pcs)],
                          capture_output=True, text=True).stdout
    found = []
    for part in re.split(r"^0x[0-9a-f]+\n", said, flags=re.M)[1:]:
        frames = [(function, file, int(line)) for function, file, line in
                  re.findall(r"^(.*)\n(.*):(\d+).*$", part, re.M)]
        frames = [frame for frame in frames if Path(frame[1]).parent != HEADERS] or frames
        own = [frame for frame in frames if not SMALL.search(frame[0])] or frames
        found.append([(file, line) for _, file, line in own])
    return found
