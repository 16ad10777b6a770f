"""How long a kernel would take on GPUs that are not here, as a range.

    python -m dev.lab.predict  # compares the ranges with the lab's own times, in some minutes

The CPU has counted at a small size what the warps ask of the memory (traffic.py), and NVRTC has
compiled the kernel. The counts are scaled to the lab's size, and give each part of a GPU its time:
device memory, L1, the banks of shared memory, instructions, doubles, atomics, and the wait for
loads where few warps are there to hide it. If the parts work at the same time, the slowest decides;
if they wait for each other, their times add up. The range reaches from a good case to a bad one.
"""
import itertools
import math
import re
from typing import NamedTuple

from dev.common.gpus import GB, GPUS, MB, Gpu, blocks_that_fit
from dev.common.nvrtc import Used, compile_cuda
from dev.common.program import run_main
from dev.cpu.traffic import SECTOR
from dev.lab import on_gpus
from dev.lab.exercises import EXERCISES, exercise_names, version_of
from dev.lab.ladder import LAB, config_of, find_ladder, model_of, names_of, parse_sizes
from dev.lab.submission import TENSOR_CORES
from dev.lab.traffic import sizes_of, traffic_of
from dev.lab.workers import sources_of
from train_gpt2 import read_kernels


class Card(NamedTuple):
    """A GPU. NVIDIA's data sheets and whitepapers give these figures."""
    gpu: Gpu
    bandwidth: float  # bytes of device memory a second
    clock: float  # Hz, boost
    lanes: int  # of a multiprocessor, that compute in fp32
    doubles: int  # that compute in fp64
    sectors: int  # that L1 gives a warp in a clock, if they are of one line


CARDS = (Card(GPUS["7.5"], 320e9, 1.59e9, 64, 2, 2),
         Card(GPUS["8.9"]._replace(name="RTX 4070", multiprocessors=46, l2=36 * MB,
                                   memory=12 * GB), 504e9, 2.475e9, 128, 2, 4),
         Card(GPUS["9.0"], 3.35e12, 1.98e9, 128, 64, 4))
MEASURED = CARDS[-1]._replace(gpu=GPUS["9.0"]._replace(name="H200"), bandwidth=4.8e12)

LATENCY, HIT = 700e-9, 20e-9  # seconds until a load comes from device memory, and from L1
AT_ONCE = 0.25  # of the latency, if a thread has several loads under way; else all of it
OWN = 0.5  # of the instructions, if PTX has twice as many as the GPU's code
BESIDE = 0.5  # of the time of the other parts, if they partly wait for each other
STORED = 4  # clocks that a store takes for a sector of which it writes a part, in a bad case
CHANGES = 8, 2  # lanes a clock that change one number by atomics, in a good case and in a bad one
SLOWER = 1.15  # than its bandwidth is device memory, in a bad case
LAUNCH = 1e-6, 3e-6  # seconds


class Moves(NamedTuple):
    """What all warps of a launch ask of the memory."""
    requests: float  # one for each load, store or atomic of a warp
    waits: float  # requests for loads and atomics of global memory
    sectors: float  # of global memory, of all requests
    least: float  # what they would be if the same bytes lay side by side
    stored: float  # the sectors of stores beyond the least
    fewest: float  # sectors, if each that is touched were moved once, and once more to write it
    turns: float  # of shared memory
    alike: float  # lanes of atomics whose warp changes one number several times


def moves_of(traffic, ladder, sizes):
    """The Moves at the lab's size, from the Traffic at some {name: number}."""
    work, size = growth(ladder, sizes)
    own = [c for c in traffic.counts if not c.shared]
    alike = sum(c.lanes for c in own if c.kind == "atomic" and meet(c.sample))
    return Moves(*(work * sum(numbers) for numbers in (
        (c.requests for c in traffic.counts),
        (c.requests for c in own if c.kind != "store"),
        (c.cost for c in own), (min(c.cost, c.least) for c in own),
        (max(c.cost - c.least, 0) for c in own if c.kind == "store"),
        (traffic.fewest * size / work,), (c.cost for c in traffic.counts if c.shared), (alike,))))


def meet(sample):
    """Whether lanes of a Sample touch the same place."""
    places = [place for place in sample.at if place is not None]
    return len(set(places)) < len(places)


def growth(ladder, sizes):
    """(times as much work, times as many bytes) at the lab's size as at another. In a product work
    grows with the third power of its sides, and bytes with the second."""
    exercise = EXERCISES[ladder.name]

    def work(some):
        if ladder.flops:
            return ladder.flops(names_of(some))
        if exercise.alone:
            return eval(version_of(exercise, ladder).items, {}, vars(names_of(some)))
        return math.prod(size for name, size in some.items() if name not in ("V", "NKV"))

    times = work(parse_sizes(ladder.shape)) / work(sizes)
    return times, times ** (2 / 3) if ladder.flops else times


def parts_of(card, moves, code, blocks, threads, dynamic=0):
    """{what a launch takes time for: (seconds in a good case, in a bad one)}. code: the Used of its
    kernel, whose registers are another GPU's; dynamic: bytes of shared memory of a block."""
    gpu, clocks = card.gpu, card.gpu.multiprocessors * card.clock
    held = max(1, blocks_that_fit(gpu, code, threads, dynamic)) * gpu.multiprocessors
    warps = max(1, min(blocks, held)) * -(-threads // 32)
    issued = moves.requests * code.instructions / max(code.accesses, 1) / clocks
    double = moves.requests * code.doubles / max(code.accesses, 1) * 32 / card.doubles / clocks
    memory = moves.fewest * SECTOR / card.bandwidth
    missing = min(1, moves.fewest / max(moves.sectors, 1))
    wait = moves.waits / warps * (missing * LATENCY + (1 - missing) * HIT)
    # each may be in a line of its own
    scattered = moves.sectors - moves.least + (STORED - 1) * moves.stored
    changes = [moves.alike / lanes / card.clock for lanes in CHANGES]
    return {"device memory": (memory, SLOWER * memory),
            "sectors from L1": (moves.sectors / card.sectors / clocks,
                                (moves.least / card.sectors + scattered) / clocks),
            "banks of shared memory": (moves.turns / clocks,) * 2,
            "instructions": (OWN * issued / (card.lanes / 32), issued / (card.lanes / 32)),
            "doubles": (OWN * double, double), "atomics on one number": tuple(changes),
            "waiting for loads": (AT_ONCE * wait, wait)}


def range_of(parts):
    """(seconds in a good case, in a bad one, the part that takes most of it)."""
    bad = {name: times[1] for name, times in parts.items()}
    worst = max(bad, key=bad.get)
    most = bad[worst] + BESIDE * (sum(bad.values()) - bad[worst])
    return max(good for good, _ in parts.values()) + LAUNCH[0], 1.1 * most + LAUNCH[1], worst


def blocks_of(kernel, ladder, items, threads):
    """The blocks of a launch in fp32 at the lab's size. items: an expression, as in a Version."""
    names = {**vars(names_of(parse_sizes(ladder.shape))), "threads": threads}
    counts = eval(items, {}, names)
    counts = counts if isinstance(counts, tuple) else (counts,)
    return math.prod(-(-count // max(1, int(covers(threads, 4))))
                     for count, covers in itertools.zip_longest(counts, kernel.covers,
                                                                fillvalue=lambda *_: 1))


def lines_of(file, moves, facts):
    """A line for each GPU on a student's kernel. moves: a list of the numbers of its Moves; facts:
    those of on_gpus.judge. [] if something is not known."""
    if not moves or not facts or re.search(TENSOR_CORES, file.code):
        return []
    facts = {each["gpu"]: each for each in facts if each["dtype"] == "fp32"}
    threads, rows = file.kernel.threads, []
    blocks = blocks_of(file.kernel, file.ladder, file.version.items, threads)
    for card in CARDS:
        each = facts["sm_90a" if card.gpu.name == "H100" else "sm_80"]
        code = Used(*(each[name] for name in Used._fields))
        if not blocks_that_fit(card.gpu, code, threads, each["dynamic"]):
            rows.append(f"  {card.gpu.name:9} a block does not fit: it has too many registers or "
                        "too much shared memory")
            continue
        low, high, worst = range_of(parts_of(card, Moves(*moves), code, blocks, threads,
                                             each["dynamic"]))
        rows.append(f"  {card.gpu.name:9} {in_words(low)} to {in_words(high)}, most of it for "
                    f"{worst}")
    return ["estimated time on a GPU (not measured) at the lab's sizes, "
            f"{file.ladder.shape}, in fp32:", *rows]


def in_words(seconds):
    """Such as "23 us" or "1.4 ms"."""
    value, unit = (1e6 * seconds, "us") if seconds < 0.9995e-3 else (1e3 * seconds, "ms")
    value = float(f"{value:.2g}")
    return f"{value:g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


# ---- How good is it? The lab's own versions, beside their times in RESULTS.md


def measured():
    """(kernel, version, threads or None, seconds) of RESULTS.md's fp32 rows: the fastest of each
    version that is one kernel of an exercise, with no choice but its threads, on no tensor
    cores."""
    text, best = (LAB / "RESULTS.md").read_text(encoding="utf-8"), {}
    for section in text.split("\n## ")[1:]:
        name = section.split(" ", 1)[0]
        for number, choice, time in re.findall(
                r"^\| (\d+) \| fp32 \|[^|]*\| ([^|]*) \| ([\d.,]+) us", section, re.M):
            version = find_ladder(name).versions[int(number) - 1] if name in EXERCISES else None
            if (not version or callable(version.run) or version.library or version.more
                    or "tf32" in version.dtypes):  # which only tensor cores tell from fp32
                continue
            threads = re.fullmatch(r"threads=(\d+)", choice)
            found = float(time.replace(",", "")), threads and int(threads[1])
            best[name, int(number)] = min(best.get((name, int(number)), found), found,
                                          key=lambda row: row[0])
    for (name, number), (time, threads) in best.items():
        if name in exercise_names():
            yield name, number, threads, 1e-6 * time


def estimated(name, number, threads=None):
    """(seconds in a good case, in a bad one, the part that takes most) of a version of the lab on
    an H200; None for one on tensor cores. Raises UserError, NotCompiled."""
    ladder = find_ladder(name)
    version, sizes = ladder.versions[number - 1], sizes_of(ladder)
    config = config_of(*model_of(ladder, parse_sizes(ladder.shape)))
    paths = [*config.SOURCES, *sources_of([name])]
    text = "".join(on_gpus.without_kernels(path.read_text("utf-8"), version.run) for path in paths)
    _, used, _ = compile_cuda(text, "sm_90a", on_gpus.switches("sm_90a", "fp32", config))
    kernel = read_kernels(paths)[version.run]
    threads = threads or kernel.threads
    names = {**vars(names_of(parse_sizes(ladder.shape))), "threads": threads}
    moves = moves_of(traffic_of((name, number), sizes), ladder, sizes)
    return range_of(parts_of(MEASURED, moves, used[version.run],
                             blocks_of(kernel, ladder, version.items, threads), threads,
                             eval(version.shared, {}, names)))


def main():
    """Print the estimate of each version beside its time, and the share that is within."""
    widths, within = [], 0
    for name, number, threads, seconds in measured():
        low, high, worst = estimated(name, number, threads)
        within += low <= seconds <= high
        widths.append(high / low)
        print(f"{name:30} {number}  {in_words(seconds):>8}  {in_words(low):>8} to "
              f"{in_words(high):>8}  {'' if low <= seconds <= high else 'outside, '}{worst}",
              flush=True)
    print(f"{within} of {len(widths)} times are within the range; its upper end is "
          f"{sorted(widths)[len(widths) // 2]:.1f} times the lower one (median)")
    return 0


if __name__ == "__main__":
    run_main(main)
