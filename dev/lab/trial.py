"""A process that runs students' kernels on the CPU, since a kernel may crash or never end.

    python -m dev.lab.trial JOB  # JSON in, a line of JSON for each event out

JOB: {"compile": paths of files to compile together, "run": those to run, "look_for": BOUNDS, RACES,
GPU or None, "races": whether another process looks for races, "waste": whether wasted work is
looked for, "dtypes", "limit": seconds for one size}. Results are compared with NumPy's, except
where races are looked for. grade.py starts these processes, and judges by what they say.
"""
import contextlib
import ctypes
import functools
import json
import math
import os
import re
import signal
import sys
import time

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.common.student_text import with_unset
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.lab import drawing, large, on_gpus
from dev.lab.bench import GUARD, Bench
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import checks_of, find_exercise, version_of
from dev.lab.explain import functions_of
from dev.lab.ladder import LAB, larger, names_of, parse_sizes, text_of
from dev.lab.submission import MODEL, Submission, own_labels
from dev.lab.workers import sources_of
from train_gpt2 import UserError

BOUNDS, RACES, GPU = "bounds", "races", "gpu"  # what a process looks for
FIRST = "first"  # no more than whether one small size is right: it compiles in half of the time
# Seconds of the processor for one size. The slowest of the tests' right kernels takes 5 on one
# computer and 14 to 18 on another. A loop without an end comes to the limit of steps first, where
# the race finder counts them.
LIMIT = 60

# ---- Waste: does a kernel do far more work than the lab's first version of the same signature? The
# race finder counts it, exactly: bytes of arrays that are read and written, and steps. Both kernels
# run at the same sizes. What version 1 does is kept in ~/.cache/train_gpt2.

READS, STEPS = 16, 64  # refused above this many times version 1's work
# So many times as many bytes are said; and a quarter of the steps or idle blocks that are refused.
REMARK = 4
OF_THREAD = 64, 4000  # bytes and steps of a thread that do not count: index, sums over the block
IDLE = 1 / 16  # of the blocks, and of their threads, at least this part must touch an array;
FEW = 4  # or more than so many of each block
SPARE = 10**8  # steps that any kernel may take: a few seconds
CACHE = "version1_work"


class Reference:
    """Version 1 of an exercise, in a library of its own that finds races."""

    def __init__(self, ladder):
        self.exercise, self.ladder = find_exercise(ladder.name), ladder._replace(compiled_for="")
        with contextlib.redirect_stdout(None):
            self.device = Emulated("fp32", MODEL, sources_of([ladder.name]), {self.exercise.like})

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


def step_limits(one):
    """(the steps from which on races are not looked for, those at which the process ends) beside
    version 1's Work."""
    enough = STEPS // 2 * (one.steps if one else 0) + SPARE
    return enough, 4 * enough


def times(x):
    return "once" if round(x, 1) == 1 else f"{x:,.0f} times" if x >= 10 else f"{x:.1f} times"


def blocks_of(kernel, items, threads, W):
    """(the blocks of a launch; its items, and those that a block covers, along each axis)."""
    covered = [int(covers(threads, W)) for covers in kernel.covers]
    counts = items if isinstance(items, tuple) else (items,)
    return math.prod(-(-count // cover) for count, cover in zip(counts, covered)), counts, covered


def wasted(bench, kernel, threads, items, own, one):
    """What is wasted in a launch: (the share of what would be refused, lines), the worst first. own
    and one: the Work of the student's kernel and of version 1; items: how many, along x, or (along
    x, along y)."""
    a = bench.sets[0]
    numbers = sum(array.nbytes for name, array in vars(a).items()
                  if isinstance(array, np.ndarray) and name in bench.inputs) or 1
    blocks, counts, covered = blocks_of(kernel, items, threads, bench.device.W)
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
            f"it writes {times(own.written / max(one.written, 1))} as many bytes as version 1 of "
            "the lab",
            "usually: it stores in a loop what it could add up in a variable"]),
        (share(own.steps, one.steps, STEPS, free_steps), [
            f"it takes {times(own.steps / max(one.steps, 1))} as many steps as version 1 of the "
            "lab",
            "usually: every thread loops over everything, to do a part of it"])]
    if blocks >= 32 and one.blocks:
        rows.insert(0, (blocks * IDLE / busy, [
            f"{blocks - own.blocks:,} of {blocks:,} blocks do nothing",
            f"BLOCK says that a block covers {math.prod(covered):,}, so {blocks:,} blocks are "
            f"launched. But {busy:,} of them do all the work, {round(math.prod(counts) / busy):,} "
            "items each: write that in BLOCK"]))
        few = own.threads <= FEW * busy
        # a block of an item that is a row has work for as many threads as there are numbers
        rooms = threads if find_exercise(bench.ladder.name).alone else min(
            threads, (one.read + one.written) / 4 / blocks)
        rows.insert(1, (few * busy * rooms * IDLE / max(own.threads, 1), [
            f"of the {threads} threads of a block {threads - round(own.threads / busy)} do nothing",
            f"BLOCK({threads}, threads) would give each of them an item. Or let them share the "
            "block's"]))
    return sorted(rows, key=lambda row: -min(row[0], 1))


def waste_of(*facts):
    """What is refused, as a dict with lines, or None; and a remark on less, or None."""
    share, lines = wasted(*facts)[0]
    if share > 1:
        return dict(kind="waste", lines=[f"it is slow: {lines[0]}", lines[1]]), None
    return None, lines[0] if share > REMARK / READS else None


def too_long_lines(one, loops):
    """The lines on a launch that came to the limit of steps. loops: the student's lines with
    one."""
    most = step_limits(one)[1]
    many = f"{most / max(one.steps, 1):,.0f} times as many" if one else f"{most:,}"
    beside = " as version 1 of the lab" if one else ""
    return [f"it is slow: it takes more than {many} steps{beside}", *loops,
            "usually: a loop has no end, or every thread loops over everything, to do a part of it"]


# ---- The process

# Orders of a block's threads in which results are compared; the last is a shuffle.
ORDERS = "forward", "reverse", 1
# Seconds of the processor after which no other order is tried, if the race finder runs too.
PATIENCE = 0.5


@contextlib.contextmanager
def unreadable(bench):
    """A context in which AddressSanitizer treats the guards around outputs as out of bounds."""
    ours = ctypes.CDLL(None)
    parts = [(memory.ctypes.data + at, GUARD) for memory in bench.guarded.values()
             for at in (0, memory.nbytes - GUARD)]
    for address, size in parts:
        ours.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))
    try:
        yield
    finally:
        for address, size in parts:
            ours.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))


def send(**what):
    print(json.dumps(what), flush=True)


def begins(job, device, file, where, arrays, one=None):
    """Say that a launch begins at some sizes, and where its arrays are."""
    send(event="begins", file=str(file.path), sizes=where, dtype=device.dtype, one=one,
         limit=job["limit"], arrays={
             name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
             for name, array in arrays.items() if isinstance(array, np.ndarray)})


def child(job):
    """Do a job. Prints a line of JSON for each event."""
    files = {path: Submission(path) for path in job["compile"]}
    if job["look_for"] == GPU:
        for path, file in files.items():
            lines, facts = on_gpus.judge(file, job["dtypes"])
            send(event="gpu", file=path, refused=lines, launch=on_gpus.launch_lines(file, facts),
                 facts=facts)
        return
    wrong, only = set(), {file.run for file in files.values()}
    paths = [file.path for file in files.values()]
    for dtype in job["dtypes"]:
        if wrong.issuperset(job["run"]):
            return
        try:
            with contextlib.redirect_stdout(None):
                device = Emulated(dtype, MODEL, [LAB / "tiles.cu", *paths], only, paths)
        except UserError as e:
            send(event="compiler" if "could not compile" in str(e) else "refusal", text=str(e),
                 dtype=dtype)
            return
        send(event="compiled", dtype=dtype, warnings=getattr(device, "warnings", ""))
        for path in job["run"]:
            if dtype not in files[path].version.dtypes or path in wrong:
                continue
            if complaint := run_all(job, device, files[path]):
                send(event="complaint", file=path, dtype=dtype, **complaint)
                wrong.add(path)
            else:
                send(event="right", file=path, dtype=dtype)


# What reads a number that others write by atomics.
ANNOUNCED = r"\bvolatile\b|\b__ldc[gv]\b|\batomic\w+\s*\([^;]*,\s*0(?:\.0*)?f?\s*\)"


def run_all(job, device, file):
    """What is wrong with a student's kernel, as a dict, or None."""
    ladder, version = file.ladder, file.version
    drawn = larger(checks_of(file.exercise, ladder), file.code)
    kernel, remarks = device.kernels[file.run], {}
    device.library.missing_lane((ctypes.c_uint * 3)())  # what another file has left
    device.library.heap_most()
    if device.races and "fence" in file.code:
        device.library.races_fences()
    if device.races and re.search(ANNOUNCED, file.code):
        device.library.races_announced()
    counts = job.get("waste") and device.races and device.dtype == "fp32"
    reference, passed = Reference(ladder) if counts else None, False
    for bench, sizes, threads in launches_of(file, device, kernel):
        choice = dict(threads=threads)
        where = text_of(sizes) + f", in blocks of {threads} threads" * (threads != kernel.threads)
        one = reference and reference.work(sizes)
        begins(job, device, file, where, vars(bench.sets[0]), one)
        # of this process, however busy the computer is
        signal.setitimer(signal.ITIMER_VIRTUAL, job["limit"])
        complaint = None
        if job["look_for"] == RACES:
            races.work(device.library, *step_limits(one))
            around = (sketched(bench, file, kernel, threads, where) if counts else
                      contextlib.nullcontext())
            with around:
                complaint = launched(bench, version, choice)
            if one and not complaint:
                items = eval(version.items, {}, vars(bench.given))
                own = races.work(device.library)
                complaint, remark = waste_of(bench, kernel, threads, items, own, one)
                # the sizes of the last checks are larger
                remarks = {remark: where} if remark else remarks
        else:
            seconds = 0 if job["look_for"] == FIRST else PATIENCE if job.get("races") else math.inf
            complaint = kept_between_launches(bench, version, choice, file) or checked(
                bench, version, choice, file.code, job["look_for"], drawn == sizes, seconds,
                not passed)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        complaint = complaint or too_much_heap(device, file)
        if complaint:
            return complaint
        if not passed:
            send(event="passed", sizes=where)
        if job["look_for"] == FIRST:
            return None
        passed = True
    if device.races:
        if complaint := too_deep(device, file):
            return complaint
        for line in stored_alike(device, file):
            send(event="remark", file=str(file.path), text=line)
    elif complaint := at_large_sizes(job, device, file):
        return complaint
    for remark, where in remarks.items():
        send(event="remark", file=str(file.path), text=f"{remark} (at the sizes {where})")
    return None


# A GPU gives each thread 1,024 bytes for calls that return, unless its program asks for more, and a
# call takes 16 of them at least.
MOST_DEEP = 1024 // 16


def too_deep(device, file):
    """What is wrong with functions that call themselves, as a dict, or None."""
    deep = device.library.races_deepest()
    if deep <= MOST_DEEP:
        return None
    return dict(kind="deep", lines=[
        f"its calls are {deep:,} deep: a GPU gives each thread a stack of 1,024 bytes, where a "
        f"call takes at least 16, so no more than {MOST_DEEP} fit", *recursive_lines(file),
        "usually: a function calls itself for each number. Halve the work in each call, or write a "
        "loop"])


HEAP = 8 * 2**20  # bytes of a GPU's heap
IN_FLIGHT = 132 * 2048  # threads that an H100 runs at a time


def too_much_heap(device, file):
    """What is wrong with a kernel whose threads take more by malloc or new than a GPU has, as a
    dict, or None."""
    device.library.heap_most.restype = ctypes.c_size_t
    if device.races or not (most := device.library.heap_most()):
        return None
    names = names_of(parse_sizes(file.ladder.shape))
    items = eval(file.version.items.split(",")[0], {}, vars(names))
    blocks = -(-items // int(file.kernel.covers[0](file.kernel.threads, device.W)))
    threads = min(blocks * file.kernel.threads, IN_FLIGHT)
    if threads * most <= HEAP:
        return None
    return dict(kind="deep", lines=[
        f"a thread takes {most:,} bytes of the heap, and at the lab's sizes {threads:,} threads "
        f"run at a time: {threads * most / 2**20:,.1f} MB. A GPU's heap has 8 MB, unless its "
        "program asks for more; then malloc returns a null pointer",
        *file.quoted_with(r"\bmalloc\s*\(|\bnew\b")[:1],
        "usually: keep the numbers in out, or compute them twice"])


def recursive_lines(file):
    """The quoted line of a function that calls itself."""
    for name in functions_of(file):
        for body in re.finditer(rf"\b{name}\s*\([^;{{}}()]*\)\s*\{{(.*?)^\}}", file.code,
                                re.S | re.M):
            if re.search(rf"\b{name}\s*\(", body[1]):
                return [file.quoted(file.code[: body.start()].count("\n") + 1)]
    return []


def stored_alike(device, file):
    """A remark where all lanes of a warp store one number in one place."""
    device.library.races_alike.restype = ctypes.c_size_t
    if at := device.library.races_alike():
        own = [line for place in races.lines_of(device.path, [at]) for name, line in place
               if os.path.abspath(name) == str(file.path)]
        yield ("several lanes of a warp store the same number in one place: let one of them do it: "
               f"if (threadIdx.x % 32 == 0) ... ({file.quoted(own[0])})" if own else
               "several lanes of a warp store the same number in one place: let one of them do it")


def at_large_sizes(job, device, file):
    """What is wrong at the trainer's own sizes, as a dict, or None."""
    sizes = large.sizes_of(file)
    if not sizes or job["look_for"] != BOUNDS or device.dtype != "fp32":
        return None
    try:
        arrays = large.arrays_of(file, device.real)
    except (OSError, ValueError):
        return None
    begins(job, device, file, f"{text_of(sizes)}, of README's training", arrays)
    try:
        found = large.launch(device, file, arrays)
    except UserError as e:
        return dict(kind="stuck", text=str(e))
    return found and dict(kind="wrong", text=wrong_number(*found), lines=[
        "usually: an index of 32 bits wrapped. There are more than 2^31 numbers, and 2^33 bytes: "
        "write size_t i, and (size_t)row * Vp"])


def launches_of(file, device, kernel):
    """(Bench, sizes, threads) to check: the exercise's sizes, one with several blocks if none of
    these has them, and the one with most blocks with another block size too, if the file allows it.
    Last sizes that are larger than all of these, drawn by the code: nobody can know them, and a
    second check has them again."""
    covers, many, most = int(kernel.covers[0](kernel.threads, device.W)), None, 0
    ladder, version = file.ladder, file.version
    checks, given = checks_of(file.exercise, ladder), ladder._replace(compiled_for="")
    drawn = larger(checks, file.code)
    if device.races:  # it takes 50 times as long
        checks = [sizes for sizes in checks if sizes.get("T", 0) <= 150] or checks
    for sizes in checks:
        bench = Bench(given, device, sizes)
        if not bench.fits(version):
            continue
        items = eval(version.items.split(",")[0], {}, vars(bench.given))
        if items > most:
            many, most = sizes, items
        yield bench, sizes, kernel.threads
        name = "OC" if version.items == "OC" else "B"
        if sizes is checks[-1] and most <= 2 * covers and name in many:  # more of it is more items
            checks.append({**many, name: -(-(2 * covers + 1) // most) * many[name]})
    for threads in version.threads[1:]:
        yield Bench(given, device, many), many, threads
    bench = None if device.races else Bench(given, device, drawn)
    if bench and bench.fits(version):
        yield bench, drawn, kernel.threads


# A variable of the whole GPU that a kernel may change
DEVICE_VARIABLE = (r"^\s*(?:static\s+)?__device__\s+(?!.*\b(?:const|constexpr)\b)(?:volatile\s+)?"
                   r"\w[\w\s]*?\b\w+\s*(?:\[[^\]]*\]\s*)*(?:=[^;]*)?;")


def kept_between_launches(bench, version, choice, file):
    """What is wrong in a second launch that was right in the first one, as a dict, or None."""
    lines = file.quoted_with(DEVICE_VARIABLE)
    if not lines or bench.device.races:
        return None
    try:
        first, second = (bench.check(version, choice, ORDERS[:1]) for _ in range(2))
    except (AssertionError, UserError):
        return None  # it is said by what follows
    if first.place is not None or second.place is None:
        return None
    said = wrong_number(second, False)
    return dict(kind="kept", text=f"{said}, in the second launch; the first was right", lines=[
        "its variable keeps its value from launch to launch, and is not set back:", *lines[:2],
        "usually: the last block sets a counter back to 0, as it is the last to use it"])


@contextlib.contextmanager
def sketched(bench, file, kernel, threads, where):
    """A context around a launch, behind which a drawing of each output is sent."""
    items = eval(file.version.items, {}, vars(bench.given))
    blocks = blocks_of(kernel, items, threads, bench.device.W)[0]
    labels = own_labels(file.exercise, file.ladder)
    with contextlib.ExitStack() as noting:
        found = {name: noting.enter_context(drawing.noted(bench.device, getattr(
            bench.sets[0], name))) for name in bench.written}
        try:
            yield
        finally:
            noting.close()
            for name, who in found.items():
                label = labels.get(name, name)
                send(event="drawn", name=label, sizes=where, lines=drawing.lines_of(
                    label, who[0], blocks, threads, where))


def launched(bench, version, choice):
    """What is wrong with a launch that looks for races, as a dict, or None."""
    try:
        next(bench.launches(version, choice))()
    except races.Race as e:
        return dict(kind="found race", what=e.what, why=e.why, bits=e.bits, barrier=e.barrier,
                    sides=[[side.told(False), side.places] for side in (e.first, e.second)])
    except UserError as e:
        return dict(kind="stuck", text=str(e))
    return None


def orders_within(seconds):
    """ORDERS, until these seconds of the processor are over. It is said which comes: what ends in
    the first and not in another waits for a block, or a thread, that comes later there."""
    begun = time.process_time()
    for order in ORDERS:
        taken = time.process_time() - begun
        if order == ORDERS[0] or taken < seconds:
            if order != ORDERS[0]:
                send(event="order", order=order)
                signal.setitimer(signal.ITIMER_VIRTUAL, max(10, 50 * taken))
            yield order
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)


def checked(bench, version, choice, code, look_for=None, drawn=False, seconds=math.inf,
            is_first=False):
    """What is wrong with a version, as a dict, or None. drawn: at sizes for which no limit was
    tried. seconds: after which no other order of the threads is tried. is_first: at the smallest
    sizes."""
    around = (lambda: unreadable(bench)) if look_for == BOUNDS else contextlib.nullcontext
    loose = 8 if drawn else 1
    try:
        comparison = bench.check(version, choice, orders_within(seconds), around, loose)
    except UserError as e:
        return dict(kind="stuck", text=str(e))
    except AssertionError as e:
        text = str(e)
        name = re.sub(r"wrote outside of ", "", text)
        if name in bench.guarded:
            return dict(kind="outside", **outside(bench, name))
        return dict(kind="race", text=text)
    found = not drawn and (is_first or may_read_poison(code)) and (
        with_poison(bench, version, choice, around, loose, comparison))
    if found:
        return dict(kind="unset", text=wrong_number(found[0], False), kinds=found[1],
                    lane=found[2], hidden=comparison.place is None)
    if comparison.place is None:
        return None
    facts = facts_of(bench, comparison, code)
    return dict(kind="wrong", text=wrong_number(comparison, facts.never_there),
                lines=describe_wrong(facts))


# In what nobody has written, once each: large numbers, since a maximum hides a NaN, a minimum hides
# the one that is large and positive, and a sum hides 0. As floats, pairs of bf16 and doubles.
POISONS = 0x7F617F61, 0xFF61FF61, 0
NAN = 2**32 - 1
UNSET = "shared", "variables", "lanes", "outputs"  # the kinds of it; the first three as in cuda.h


@functools.cache
def may_read_poison(code):
    """Whether a text without comments has something that is not set at the start, or a shuffle."""
    return bool(re.search(r"__shared__|\bDYNAMIC_SHARED\b|_sync\s*\(", code)
                or " UNSET(" in with_unset(code))


def with_poison(bench, version, choice, around, loose, first):
    """(a wrong Comparison, the UNSET that it comes from, [file, line, thread, lane] of a shuffle
    from a lane outside of its mask) if a result depends on what nobody has written; or None. first:
    the Comparison with NaN there, which may be wrong already."""
    library = bench.device.library
    library.missing_lane.restype = ctypes.c_char_p

    def run(*bits):
        *others, bench.unwritten = bits
        library.set_poison(*map(ctypes.c_uint, others))
        try:
            comparison = bench.check(version, choice, ORDERS[:1], around, loose)
        finally:
            library.set_poison(*[ctypes.c_uint(NAN)] * 3)
            bench.unwritten = NAN
        return comparison, [bench.result(bench.sets[0], name).tobytes() for name in bench.truth]

    def wrong(*bits):
        comparison, numbers = run(*bits)
        return (comparison.place is not None if first.place is None else numbers != before) and (
            comparison)

    with contextlib.suppress(AssertionError, UserError):
        before = first.place is not None and run(*[NAN] * 4)[1]
        # numbers that are never written differ, too, and have sentences of their own
        outputs = first.place is None
        for poison in POISONS:
            if comparison := wrong(poison, poison, poison, poison if outputs else NAN):
                kinds = [kind for i, kind in enumerate(UNSET if outputs else UNSET[:3])
                         if wrong(*(poison if i == j else NAN for j in range(4)))]
                numbers = (ctypes.c_uint * 3)()
                name = library.missing_lane(numbers)
                return (first if first.place is not None else comparison, kinds or [*UNSET],
                        name and [name.decode(), *numbers])
    return None


def outside(bench, name):
    """The number outside of an array that was written: {"name", "number", "shape"}."""
    memory = bench.guarded[name]
    array = getattr(bench.sets[0], name, None)
    array = getattr(bench.scratch, name) if array is None else array
    changed = np.flatnonzero(memory != 255)
    before, after = changed[changed < GUARD], changed[changed >= memory.nbytes - GUARD]
    at = after[0] - GUARD if after.size else before[-1] - GUARD
    return dict(name=name, number=int(at // array.itemsize), shape=array.shape)


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
