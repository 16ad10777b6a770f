"""Running a student's kernel on the CPU, in processes of its own, since it may crash or never end. card.py runs it on a
GPU.

One process looks for accesses out of bounds, with the compiler's sanitizers, and another one for races: see
dev/cpu/races.py. At the same time a third compares the results with NumPy, with the threads in several orders.

    python -m dev.lab.grade JOB  # such a process: JSON in, a line of JSON for each event out
"""
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np  # after prepro_tinyshakespeare, which says how its threads wait

from dev.cpu import races
from dev.cpu.device import Cpu, compiler_of
from dev.lab.bench import GUARD, Bench
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import EXERCISES, checks_of
from dev.lab.explain import complaint_lines
from dev.lab.ladder import LAB
from dev.lab.submission import code_of, exercise_of, read_submission
from prepro_tinyshakespeare import UserError
from train_gpt2 import Config

TOP = LAB.parents[1]
MODEL = Config(C=768, NH=12)  # kernels.cu is compiled for it: HS is 64
LIMIT = 60  # seconds for the checks of one size
BOUNDS, RACES = "bounds", "races"  # what a process looks for

# ---- In a process of its own


def build(paths, dtype, only):
    """The CPU with these students' kernels. Raises UserError."""
    with contextlib.redirect_stdout(None):
        return Cpu(dtype, MODEL, [LAB / "tiles.cu", *paths], only)


def unreadable(bench):
    """A context in which AddressSanitizer treats the guards around outputs as out of bounds."""
    @contextlib.contextmanager
    def poisoned():
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
    return poisoned()


def send(**what):
    print(json.dumps(what), flush=True)


def child(job):
    """Do a job: {"compile": paths of files to compile together, "run": those to run, "look_for": BOUNDS, RACES or None,
    "dtypes", "limit": seconds}. Prints a line of JSON for each event."""
    paths = [Path(path) for path in job["compile"]]
    only = {exercise_of(path)[1] for path in paths}
    wrong = set()
    for dtype in job["dtypes"]:
        if wrong.issuperset(job["run"]):
            return
        try:
            device = build(paths, dtype, only)
        except UserError as e:
            send(event="compiler" if "could not compile" in str(e) else "refusal", text=str(e), dtype=dtype)
            return
        for path in job["run"]:
            ladder, version = read_submission(Path(path))
            if dtype not in version.dtypes or path in wrong:
                continue
            kernel = device.kernels[exercise_of(Path(path))[1]]
            for bench, sizes, threads in launches_of(EXERCISES[ladder.name], ladder, device, version, kernel):
                choice = dict(threads=threads)
                where = ",".join(f"{key}={value}" for key, value in sizes.items())
                where += f", in blocks of {threads} threads" * (threads != kernel.threads)
                send(event="begins", file=path, sizes=where, dtype=dtype, limit=job["limit"], arrays={
                    name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
                    for name, array in vars(bench.sets[0]).items() if isinstance(array, np.ndarray)})
                signal.alarm(job["limit"])
                complaint = (launched(bench, version, choice, job["look_for"]) if job["look_for"] else
                             checked(bench, version, choice, Path(path)))
                signal.alarm(0)
                if complaint:
                    send(event="complaint", file=path, **complaint)
                    wrong.add(path)
                    break
            else:
                send(event="right", file=path, dtype=dtype)


def launches_of(exercise, ladder, device, version, kernel):
    """(Bench, sizes, threads) to check: the exercise's sizes, one with several blocks if none of these has them, and
    the one with most blocks with another block size too, if the file allows it."""
    covers, many, most = int(kernel.covers[0](kernel.threads, device.W)), None, 0
    checks = checks_of(exercise, ladder)
    if device.races:  # it takes 50 times as long
        checks = [sizes for sizes in checks if sizes.get("T", 0) <= 150] or checks
    for sizes in checks:
        bench = Bench(ladder._replace(compiled_for=""), device, sizes)
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
        yield Bench(ladder._replace(compiled_for=""), device, many), many, threads


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


def checked(bench, version, choice, path):
    """What is wrong with a version, as a dict, or None."""
    try:
        comparison = bench.check(version, choice)
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


# ---- In front of that process


def sanitizer_variables():
    """The environment variables for a run under the sanitizers, or None if the compiler has none."""
    compiler, found = compiler_of() or "g++", []
    for library in ("libasan.so", "libubsan.so"):
        with contextlib.suppress(OSError):
            done = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True)
            path = done.stdout.strip()
            if os.path.isabs(path) and os.path.exists(path):
                found.append(path)
    if len(found) < 2:
        return None
    return {"CXXFLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all", "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def race_variables():
    """The environment variables for a run that finds races, or None if the compiler cannot."""
    compiler = compiler_of()
    return {"CXXFLAGS": f"-O1 {races.FLAG}"} if compiler and races.finds_races(compiler) else None


def run_child(job, variables=None):
    """(events, exit status, stderr) of a job in a process of its own."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", **(variables or {"CXXFLAGS": os.environ.get("CXXFLAGS", "")})}
    done = subprocess.run([sys.executable, "-m", "dev.lab.grade", json.dumps(job)],
                          capture_output=True, cwd=TOP, env=environment)
    events = [json.loads(line) for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    return events, done.returncode, done.stderr.decode(errors="replace")


def grade_file(path):
    """(the lines that say what is wrong or [], {what was looked for: whether it was}) of a student's file. Raises
    UserError."""
    path = path.resolve()
    read_submission(path)
    job = dict(compile=[str(path)], run=[str(path)], look_for=None, limit=LIMIT)
    variables = {BOUNDS: sanitizer_variables(), RACES: race_variables()}
    with ThreadPoolExecutor(2) as pool:
        runs = {look_for: pool.submit(run_child, dict(job, look_for=look_for, dtypes=["fp32"]), more)
                for look_for, more in variables.items() if more}
        result = run_child(dict(job, dtypes=["fp32", "bf16"]))
        lines = complaint_lines(path, *result, False)
        found = {look_for: complaint_lines(path, *done.result(), look_for == BOUNDS) for look_for, done in runs.items()}
    looked = {look_for: found.get(look_for) is not None for look_for in variables}
    for look_for, complaint in found.items():
        slow = complaint and complaint[0].startswith(("it is stuck", "it did not end"))
        looked[look_for] &= not slow
        if complaint and not (slow and lines is not None):
            return complaint, looked
    if lines is None:
        raise UserError(f"{path}: could not be checked: {' '.join(result[2].split())[-300:]}")
    return lines, looked


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
