"""Does a student's kernel do far more work than the lab's first version of the same signature?

The race finder counts it, exactly: bytes of arrays that are read and written, and steps. Both
kernels run at the same sizes. What version 1 does is kept in ~/.cache/train_gpt2.
"""
import contextlib
import math

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.cpu import races
from dev.cpu.device import Cpu
from dev.lab.bench import Bench
from dev.lab.exercises import EXERCISES, version_of
from dev.lab.submission import MODEL
from dev.lab.workers import sources_of

READS, STEPS = 16, 64  # refused above this many times version 1's work
REMARK = 4  # times as many bytes are said; and a quarter of the steps or idle blocks that are refused
OF_THREAD = 64, 4000  # bytes and steps of a thread that do not count: index, sums over the block
IDLE = 1 / 16  # of the blocks, and of their threads, at least this part must touch an array;
FEW = 4  # or more than so many of each block
SPARE = 10**8  # steps that any kernel may take: a few seconds
CACHE = "version1_work"


class Reference:
    """Version 1 of an exercise, in a library of its own that finds races."""

    def __init__(self, ladder):
        self.exercise, self.ladder = EXERCISES[ladder.name], ladder._replace(compiled_for="")
        with contextlib.redirect_stdout(None):
            self.device = Cpu("fp32", MODEL, sources_of([ladder.name]), {self.exercise.like})

    def work(self, sizes):
        """The races.Work of a launch at these sizes; None if it does not fit them."""
        key = f"{self.device.path.stem} {self.exercise.like} {sizes}"
        if key not in (cached := read_cache(CACHE)):
            cached = {key: self.counted(sizes)}
            write_cache(CACHE, cached)
        return races.Work(*cached[key]) if cached[key] else None

    def counted(self, sizes):
        version = version_of(self.exercise, self.ladder)
        bench = Bench(self.ladder, self.device, sizes)
        if not bench.fits(version):
            return None
        if self.exercise.zeroed:
            self.device.zero(getattr(bench.sets[0], self.exercise.zeroed))
        threads = min(self.device.kernels[self.exercise.like].threads, self.device.max_threads)
        launch = next(bench.launches(version, dict(threads=threads)))
        races.work(self.device.library)
        launch()
        return races.work(self.device.library)


def limits(one):
    """(the steps from which on races are not looked for, those at which the process ends) beside
    version 1's Work."""
    enough = STEPS // 2 * (one.steps if one else 0) + SPARE
    return enough, 4 * enough


def times(x):
    return "once" if round(x, 1) == 1 else f"{x:,.0f} times" if x >= 10 else f"{x:.1f} times"


def found(bench, kernel, threads, items, own, one):
    """What is wasted in a launch: (the share of what would be refused, lines), the worst first. own
    and one: the Work of the student's kernel and of version 1; items: how many, along x, or (along x,
    along y)."""
    a = bench.sets[0]
    numbers = sum(array.nbytes for name, array in vars(a).items()
                  if isinstance(array, np.ndarray) and name in bench.inputs) or 1
    covered = [int(covers(threads, bench.device.W)) for covers in kernel.covers]
    counts = items if isinstance(items, tuple) else (items,)
    blocks = math.prod(-(-count // cover) for count, cover in zip(counts, covered))
    busy = max(own.blocks, 1)
    free_bytes, free_steps = (free * blocks * threads for free in OF_THREAD)

    def share(own, one, limit, free):
        return max(own - free, 0) / (limit * max(one, 1))

    rows = [
        (share(own.read, one.read, READS, free_bytes), [
            f"it reads each number of its inputs {times(own.read / numbers)} on average, and "
            f"version 1 of the lab {times(one.read / numbers)}",
            "usually: every thread loops over what one of them should do, or over all rows"]),
        (share(own.written, one.written, READS, free_bytes), [
            f"it writes {times(own.written / max(one.written, 1))} as many bytes as version 1 of the "
            "lab",
            "usually: it stores in a loop what it could add up in a variable"]),
        (share(own.steps, one.steps, STEPS, free_steps), [
            f"it takes {times(own.steps / max(one.steps, 1))} as many steps as version 1 of the "
            "lab",
            "usually: every thread loops over everything, to do a part of it"])]
    if blocks >= 32 and one.blocks:
        rows.insert(0, (blocks * IDLE / busy, [
            f"{blocks - own.blocks:,} of {blocks:,} blocks do nothing",
            f"BLOCK says that a block covers {math.prod(covered):,}, so {blocks:,} blocks are launched. But "
            f"{busy:,} of them do all the work, {round(math.prod(counts) / busy):,} items each: write "
            "that in BLOCK"]))
        few = own.threads <= FEW * busy
        rows.insert(1, (few * busy * threads * IDLE / max(own.threads, 1), [
            f"of the {threads} threads of a block {threads - round(own.threads / busy)} do nothing",
            f"BLOCK({threads}, threads) would give each of them an item. Or let them share the block's"]))
    return sorted(rows, key=lambda row: -min(row[0], 1))


def complaint(*facts):
    """What is refused, as a dict with lines, or None; and a remark on less, or None."""
    share, lines = found(*facts)[0]
    if share > 1:
        return dict(kind="waste", lines=[f"it is slow: {lines[0]}", lines[1]]), None
    return None, lines[0] if share > REMARK / READS else None


def too_long_lines(one, loops):
    """The lines on a launch that came to the limit of steps. loops: the student's lines with one."""
    most = limits(one)[1]
    many = f"{most / max(one.steps, 1):,.0f} times as many" if one else f"{most:,}"
    beside = " as version 1 of the lab" if one else ""
    return [f"it is slow: it takes more than {many} steps{beside}", *loops,
            "usually: a loop has no end, or every thread loops over everything, to do a part of it"]
