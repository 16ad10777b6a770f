"""A process that runs a student's kernel, since it may crash or never end. grade.py starts several, one for each thing
to look for and each dtype.

    python -m dev.lab.trial JOB  # JSON in, a line of JSON for each event out

JOB: {"compile": paths of files to compile together, "run": those to run, "look_for": BOUNDS, RACES, GPU or None,
"compare": whether to compare results with NumPy too, "races": whether another process looks for races, "dtypes",
"limit": seconds for one size}.
"""
import contextlib
import ctypes
import json
import math
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np  # after prepro_tinyshakespeare, which says how its threads wait

from dev.cpu import races
from dev.cpu.device import Cpu
from dev.lab import on_gpus, waste
from dev.lab.bench import GUARD, Bench
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import EXERCISES, checks_of
from dev.lab.ladder import LAB, larger
from dev.lab.submission import MODEL, code_of, exercise_of, read_submission
from prepro_tinyshakespeare import UserError

BOUNDS, RACES, GPU = "bounds", "races", "gpu"  # what a process looks for
ORDERS = "forward", "reverse", 1  # of a block's threads, in which results are compared; the last is a shuffle
PATIENCE = 0.5  # seconds of the processor after which no other order is tried, if the race finder runs too


def build(paths, dtype, only):
    """The CPU with these students' kernels. Raises UserError."""
    with contextlib.redirect_stdout(None):
        return Cpu(dtype, MODEL, [LAB / "tiles.cu", *paths], only, paths)


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


def child(job):
    """Do a job. Prints a line of JSON for each event."""
    paths = [Path(path) for path in job["compile"]]
    only = {exercise_of(path)[1] for path in paths}
    if job["look_for"] == GPU:
        for path in paths:
            lines, facts = on_gpus.judge(path, job["dtypes"])
            send(event="gpu", file=str(path), refused=lines, launch=on_gpus.launch_lines(path, facts), facts=facts)
        return
    wrong = set()
    for dtype in job["dtypes"]:
        if wrong.issuperset(job["run"]):
            return
        try:
            device = build(paths, dtype, only)
        except UserError as e:
            send(event="compiler" if "could not compile" in str(e) else "refusal", text=str(e), dtype=dtype)
            return
        send(event="compiled", dtype=dtype, warnings=getattr(device, "warnings", ""))
        for path in job["run"]:
            ladder, version = read_submission(Path(path))
            if dtype not in version.dtypes or path in wrong:
                continue
            if complaint := run_all(job, device, Path(path), ladder, version):
                send(event="complaint", file=path, dtype=dtype, **complaint)
                wrong.add(path)
            else:
                send(event="right", file=path, dtype=dtype)


def run_all(job, device, path, ladder, version):
    """What is wrong with a student's kernel, as a dict, or None."""
    drawn = larger(checks_of(EXERCISES[ladder.name], ladder), code_of(path))
    kernel, remarks = device.kernels[exercise_of(path)[1]], {}
    if device.races and "fence" in code_of(path):
        device.library.races_fences()
    reference = waste.Reference(ladder) if job.get("waste") and device.races and device.dtype == "fp32" else None
    for bench, sizes, threads in launches_of(EXERCISES[ladder.name], ladder, device, version, kernel, code_of(path)):
        choice = dict(threads=threads)
        where = ",".join(f"{key}={value}" for key, value in sizes.items())
        where += f", in blocks of {threads} threads" * (threads != kernel.threads)
        one = reference and reference.work(sizes)
        send(event="begins", file=str(path), sizes=where, dtype=device.dtype, limit=job["limit"], one=one, arrays={
            name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
            for name, array in vars(bench.sets[0]).items() if isinstance(array, np.ndarray)})
        signal.setitimer(signal.ITIMER_VIRTUAL, job["limit"])  # of this process, however busy the computer is
        complaint = None
        if job["look_for"] == RACES or not job.get("compare", not job["look_for"]):
            if device.races:
                races.work(device.library, *waste.limits(one))
            complaint = launched(bench, version, choice, job["look_for"])
            if one and not complaint:
                items = eval(version.items, {}, vars(bench.given))
                own = races.work(device.library)
                complaint, remark = waste.complaint(bench, kernel, threads, items, own, one)
                remarks = {remark: where} if remark else remarks  # the sizes of the last checks are larger
        else:
            seconds = PATIENCE if job.get("races") else math.inf
            complaint = checked(bench, version, choice, path, job["look_for"], drawn == sizes, seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if complaint:
            return complaint
    for remark, where in remarks.items():
        send(event="remark", file=str(path), text=f"{remark} (at the sizes {where})")
    return None


def launches_of(exercise, ladder, device, version, kernel, code):
    """(Bench, sizes, threads) to check: the exercise's sizes, one with several blocks if none of these has them, and
    the one with most blocks with another block size too, if the file allows it. Last sizes that are larger than all of
    these, drawn by the code: nobody can know them, and a second check has them again."""
    covers, many, most = int(kernel.covers[0](kernel.threads, device.W)), None, 0
    checks, given = checks_of(exercise, ladder), ladder._replace(compiled_for="")
    drawn = larger(checks, code)
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


def launched(bench, version, choice, look_for):
    """Launch once. The sanitizers end this process if they find something; a race is returned."""
    work = next(bench.launches(version, choice))
    with unreadable(bench) if look_for == BOUNDS else contextlib.nullcontext():
        try:
            work()
        except races.Race as e:
            return dict(kind="found race", what=e.what, why=e.why,
                        sides=[[side.told(False), side.places] for side in (e.first, e.second)])
        except UserError as e:
            return dict(kind="stuck", text=str(e))
    return None


def orders_within(seconds):
    """ORDERS, until these seconds of the processor are over."""
    begun = time.process_time()
    for order in ORDERS:
        if order == ORDERS[0] or time.process_time() - begun < seconds:
            yield order


def checked(bench, version, choice, path, look_for=None, drawn=False, seconds=math.inf):
    """What is wrong with a version, as a dict, or None. drawn: at sizes for which no limit was tried. seconds: after
    which no other order of the threads is tried."""
    around = (lambda: unreadable(bench)) if look_for == BOUNDS else contextlib.nullcontext
    try:
        comparison = bench.check(version, choice, orders_within(seconds), around, 8 if drawn else 1)
    except UserError as e:
        return dict(kind="stuck", text=str(e))
    except AssertionError as e:
        text = str(e)
        name = re.sub(r"wrote outside of ", "", text)
        return dict(kind="outside", **outside(bench, name)) if name in bench.guarded else dict(kind="race", text=text)
    if comparison.place is None:
        return None
    facts = facts_of(bench, comparison, code_of(path))
    return dict(kind="wrong", text=wrong_number(comparison, facts.never_there), lines=describe_wrong(facts))


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
