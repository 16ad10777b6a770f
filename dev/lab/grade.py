"""Judging a student's kernel on the CPU, in several processes, one for each thing to look for and
each dtype.

    python -m dev.lab.grade JOB  # JSON in, a line of JSON for each event out

JOB: {"compile": paths of files to compile together, "run": those to run, "look_for": BOUNDS, RACES,
GPU or None, "compare": whether to compare results with NumPy too, "races": whether another process
looks for races, "dtypes", "limit": seconds for one size}.

For each dtype one process compares the results with NumPy, with the threads in several orders,
under the compiler's sanitizers, which see accesses out of bounds. Another one looks for races: see
dev/cpu/races.py. One more compiles the file for GPUs, where NVRTC is installed. As soon as a
complaint is sure and no other process can have a better one, all end, and the student reads it.
"""
import contextlib
import ctypes
import functools
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.common.compiler import compiler_of, words_of
from dev.common.nvrtc import has_nvrtc
from dev.common.student_text import with_unset
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.lab import drawing, large, on_gpus
from dev.lab.bench import GUARD, Bench
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import EXERCISES, checks_of, version_of
from dev.lab.explain import (LOOP, complaint_lines, functions_of, printed_lines, waiting_lines,
                             warning_lines)
from dev.lab.ladder import LAB, larger, names_of, parse_sizes
from dev.lab.submission import MODEL, Submission, own_labels
from dev.lab.workers import sources_of
from train_gpt2 import UserError

TOP = LAB.parents[1]
BOUNDS, RACES, GPU = "bounds", "races", "gpu"  # what a process looks for
FIRST = "first"  # no more than whether one small size is right: it compiles in half of the time
# Seconds of the processor for one size. The slowest of the tests' right kernels takes 5 on one
# computer and 14 to 18 on another. A loop without an end comes to the limit of steps first, where
# the race finder counts them.
LIMIT = 60
GRACE = 20  # seconds in which other processes may still find a better explanation than the first
# What UBSan looks for and AddressSanitizer sees anyway: a quarter of the time to compile.
SEEN_BY_ASAN = "null,object-size,pointer-overflow,vptr,nonnull-attribute,returns-nonnull-attribute"

# ---- In front of the processes


def sanitizer_variables():
    """The environment variables for a run under the sanitizers, or None if the compiler has
    none."""
    compiler, found = compiler_of() or "g++", []
    for library in ("libasan.so", "libubsan.so"):
        with contextlib.suppress(OSError):
            done = subprocess.run([*words_of(compiler), f"-print-file-name={library}"],
                                  capture_output=True, text=True)
            path = done.stdout.strip()
            if os.path.isabs(path) and os.path.exists(path):
                found.append(path)
    if len(found) < 2:
        return None
    return {"CXXFLAGS": f"-Og -g1 -fsanitize=address,undefined -fno-sanitize={SEEN_BY_ASAN} "
            "-fno-sanitize-recover=all -DCHOSEN_POISON",
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=0:malloc_context_size=1",
            "UBSAN_OPTIONS": "print_stacktrace=1"}


def race_variables():
    """The environment variables for a run that finds races, or None if the compiler cannot."""
    if (compiler := compiler_of()) and races.finds_races(compiler):
        return {"CXXFLAGS": f"-Og {races.FLAG} {races.STEPS}"}
    return None


class Processes:
    """The processes of one check. `end` stops all."""

    def __init__(self):
        self.running, self.over, self.lock = set(), False, threading.Lock()

    def run(self, job, variables=None, heard=lambda event: None):
        """(events, exit status, stderr) of a job in a process of its own; None if it was stopped.
        heard(event) is called for each event as it comes."""
        environment = {**os.environ, "LC_ALL": "C.UTF-8",
                       **(variables or {"CXXFLAGS": os.environ.get("CXXFLAGS", "")})}
        with self.lock, tempfile.TemporaryFile() as said:
            if self.over:
                return None
            process = subprocess.Popen([sys.executable, "-m", "dev.lab.grade", json.dumps(job)],
                                       cwd=TOP, env=environment, stdout=subprocess.PIPE,
                                       stderr=said.fileno(), start_new_session=True)
            self.running.add(process)
            said = os.fdopen(os.dup(said.fileno()), "rb")
        events = []
        with process.stdout, said:
            for line in process.stdout:
                if line.startswith(b"{"):
                    events.append(json.loads(line))
                    heard(events[-1])
            process.wait()
            said.seek(0)
            err = said.read().decode(errors="replace")
        with self.lock:
            self.running.remove(process)
            return None if self.over else (events, process.returncode, err)

    def end(self):
        with self.lock:
            self.over = True
            for process in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its compiler, too


def run_child(job, variables=None):
    """(events, exit status, stderr) of a job in a process of its own."""
    return Processes().run(job, variables)


# What a complaint is about. What comes first may be the cause of what comes later, and is said
# before it.
COMPILER, GPU_COMPILER, LAUNCH, ACCESS, RACE, RESULT, WASTE, SLOW = range(8)
KINDS = {"stuck": ACCESS, "found race": RACE, "waste": WASTE, "outside": RESULT, "race": RESULT,
         "wrong": RESULT, "unset": RESULT, "kept": RESULT, "deep": RESULT}


def complaint_of(file, result, look_for):
    """((its place in the list above, lines) of a process's complaint; None if it has none), and
    whether it got to its end. Raises UserError."""
    events, status, stderr = result
    if look_for == GPU:
        said = next((event for event in events if event["event"] == "gpu"), None)
        if not said:
            return None, False
        return ((GPU_COMPILER, said["refused"]) if said["refused"] else
                (LAUNCH, said["launch"]) if said["launch"] else None), True
    if status == -signal.SIGXCPU:
        begun = [event for event in events if event["event"] == "begins"][-1]
        one = begun["one"] and races.Work(*begun["one"])
        return (WASTE, [*(waiting_lines(file) or too_long_lines(one, file.quoted_with(LOOP))),
                        f"at the sizes {begun['sizes']}, in {begun['dtype']}"]), True
    lines = complaint_lines(file, events, status, stderr, look_for == BOUNDS)
    if not lines:
        return None, lines is not None
    told = [event for event in events if event["event"] == "complaint"]
    if told and KINDS[told[0]["kind"]] in (ACCESS, RESULT):
        warnings = [event["warnings"] for event in events if event["event"] == "compiled"]
        lines += warning_lines(file, max(warnings, default=""))[:4]
    if any(event["event"] == "compiler" for event in events):
        return (COMPILER, lines), True
    if status in (-signal.SIGALRM, -signal.SIGVTALRM):
        return (SLOW, lines), False
    return (KINDS[told[0]["kind"]] if told else ACCESS, lines), True


class Job(NamedTuple):
    """What a process does."""
    look_for: str
    dtypes: list
    first: int  # the first kind of complaint that may come of it
    arch: int = 0  # __CUDA_ARCH__, if it is another than that of an A100


ARCHES = 750, 900, 1200  # others that a file may ask for: of a T4, an H100, an RTX 5070


def jobs_of(file, variables):
    """The Jobs for a Submission, the first to be run first."""
    def job(look_for, dtype, first, arch=0):
        return Job(look_for if variables[look_for] else None, [dtype], first, arch)

    # the first line of the answer is fp32's; the race finder counts version 1's work, too
    jobs = [job(BOUNDS, file.dtypes[0], COMPILER)]
    jobs += [job(RACES, file.dtypes[0], RACE)] * bool(variables[RACES])
    jobs += [Job(GPU, file.dtypes, GPU_COMPILER)] * has_nvrtc()
    for dtype in file.dtypes[1:]:
        jobs.append(job(BOUNDS, dtype, COMPILER))
        jobs += [job(RACES, dtype, RACE)] * bool(variables[RACES])
    if "__CUDA_ARCH__" in file.code:
        jobs += [job(BOUNDS, file.dtypes[0], COMPILER, arch) for arch in ARCHES]
    return jobs


class Judgement(NamedTuple):
    """What is said of a student's file."""
    lines: list  # what is wrong; [] if the file is right
    looked: dict  # {BOUNDS, RACES, GPU: whether it was looked for, to the end}
    dtypes: list  # in which it was judged
    gpu: list  # for each GPU and dtype the facts of on_gpus.judge: registers, blocks and others
    remarks: list = ()  # lines to print after "right"
    warnings: str = ""  # what g++ says of a right file, for explain.py to put into lines
    printed: list = ()  # what the kernel has printed, in one of the processes
    drawn: list = ()  # lines that draw a launch of two blocks, if it came so far


def grade_file(file, say=None):
    """The Judgement of a Submission. say(line) is called with what is known, as it goes. Raises
    UserError."""
    path, dtypes = str(file.path), file.dtypes
    if lines := on_gpus.bound_lines(file):
        return Judgement(lines, {}, dtypes, [])
    variables = {BOUNDS: sanitizer_variables(), RACES: race_variables()}
    job = dict(compile=[path], run=[path], compare=True, waste=True, races=bool(variables[RACES]))
    jobs = jobs_of(file, variables)
    looked = {BOUNDS: bool(variables[BOUNDS]), RACES: bool(variables[RACES]), GPU: has_nvrtc()}
    processes, news = Processes(), queue.SimpleQueue()
    found, facts, remarks, warnings, printed, drawn = [], [], [], [], [], {}
    # the first kind of complaint that may still come
    waiting = {i: job.first for i, job in enumerate(jobs)}
    begun = time.monotonic()

    def refused():
        lines = best(found, jobs)[2]
        return Judgement(lines, looked, dtypes, facts, printed=printed,
                         drawn=drawing_of(drawn, lines))

    told = set()

    def tell(line):
        if say and line and line not in told:
            told.add(line)
            say(f"{time.monotonic() - begun:5.1f} s  {line}")

    def first_answer():
        processes.run(dict(job, look_for=FIRST, dtypes=dtypes[:1], limit=5), {"CXXFLAGS": "-O0"},
                      lambda event: news.put((None, event)))

    def work(i):
        look_for, some, _, arch = jobs[i]
        own = dict(job, look_for=look_for, dtypes=some, limit=LIMIT)
        own_variables = variables.get(look_for)
        if arch:
            own_variables = {**(own_variables or {}), "CXXFLAGS": (own_variables or {}).get(
                "CXXFLAGS", "") + f" -D__CUDA_ARCH__={arch}"}
        try:
            news.put((i, processes.run(own, own_variables, lambda event: news.put((i, event)))))
        except Exception as e:
            news.put((i, e))

    with ThreadPoolExecutor(max(2, os.cpu_count())) as pool:
        try:
            if say:
                pool.submit(first_answer)
            for i in waiting:
                pool.submit(work, i)
            while waiting:
                explained = found and not may_be_race(best(found, jobs))
                try:
                    i, result = news.get(timeout=GRACE if explained else None)
                except queue.Empty:
                    return refused()
                if i is None:
                    tell(first_line(dtypes[0], result))
                    continue
                look_for = jobs[i].look_for
                if isinstance(result, dict):
                    if result["event"] == "drawn":
                        drawn[result["sizes"], result["name"]] = result["lines"]
                    if result["event"] == "compiled":
                        waiting[i] = max(waiting[i], ACCESS)
                    tell(progress_line(jobs[i], result))
                elif result is None:
                    del waiting[i]
                elif isinstance(result, Exception):
                    raise result
                else:
                    del waiting[i]
                    complaint, ended = complaint_of(file, result, look_for)
                    if complaint and jobs[i].arch:
                        complaint[1].append(f"where __CUDA_ARCH__ is {jobs[i].arch}")
                    if complaint and not (complaint[0] == SLOW and look_for == RACES):
                        found.append((complaint[0], i, complaint[1]))
                    elif not ended and look_for in looked:
                        looked[look_for] = False
                    if not (ended or complaint) and look_for in (BOUNDS, None):
                        raise UserError(f"{file}: could not be checked: "
                                        f"{' '.join(result[2].split())[-300:]}")
                    facts += [fact for event in result[0] for fact in event.get("facts", ())]
                    warnings += [event["warnings"] for event in result[0]
                                 if event["event"] == "compiled"]
                    remarks += [event["text"] for event in result[0] if event["event"] == "remark"]
                    printed = printed or printed_lines(result[2])
                if found and is_sure(best(found, jobs)[:2], waiting, jobs):
                    return refused()
        finally:
            processes.end()
    remarks = [*([on_gpus.remark(facts)] if facts else []), *on_gpus.double_lines(file, facts),
               *dict.fromkeys(remarks)]
    return Judgement([], looked, dtypes, facts, remarks, max(warnings, default=""), printed,
                     drawing_of(drawn))


def drawing_of(drawn, wrong=()):
    """The lines of a drawing, of {(sizes, output): lines}: of the output and at the sizes that the
    lines on what is wrong name; where nothing is, of the first output, at the first sizes with two
    blocks."""
    if wrong:
        where = re.findall(r"^at the sizes (.*), in \w+$", "\n".join(wrong), re.M)
        at = {name: lines for (sizes, name), lines in drawn.items() if sizes in where}
        named = [lines for name, lines in at.items() if re.search(rf"\b{name}\[", wrong[0])]
        return next(iter([*named, *at.values()]), [])
    first = next((name for _, name in drawn), None)
    every = [lines for (_, name), lines in drawn.items() if name == first and lines]
    return next((lines for lines in every if "in blocks 0 and 1" in lines[0]), [*[[]], *every][-1])


def progress_line(job, event):
    """What an event says of a Job that goes well, or ""."""
    name = " ".join([*job.dtypes, *[f"for __CUDA_ARCH__ {job.arch}"] * bool(job.arch)])
    if event["event"] == "passed" and job.look_for != RACES:
        return f"{name}, {event['sizes']}: right"
    if event["event"] == "right":
        return (f"{name}: no two threads are in a race" if job.look_for == RACES else
                f"{name}: right at all sizes")
    if event["event"] == "gpu" and not (event["refused"] or event["launch"]):
        return "NVRTC compiles it for an A100 and an H100"
    return ""


def first_line(dtype, event):
    """What an event of FIRST says, or ""."""
    if event["event"] == "passed":
        return f"{dtype}, {event['sizes']}: right"
    wrong = event["event"] == "complaint" and event["kind"] == "wrong"
    return f"{dtype}: wrong, {event['text']}; why is looked for" if wrong else ""


def may_be_race(complaint):
    """Whether results varied with the order of threads: what the race finder will say is worth
    waiting for."""
    return complaint[2][0].startswith("its result depends on the order")


def turn_of(job):
    """Whose complaints are said first: fp32's, then those of other dtypes and GPUs. So nobody waits
    for bf16 to hear that fp32 is wrong."""
    if job.look_for == GPU:
        return 0, 0
    return job.arch, ("fp32", "bf16", "tf32").index(job.dtypes[0])


def best(found, jobs):
    """The complaint to say, of some (kind, number of its job, lines)."""
    return min(found, key=lambda complaint: (turn_of(jobs[complaint[1]]), complaint[:2]))


def is_sure(complaint, waiting, jobs):
    """Whether no process that still runs may have a better complaint than this (kind, number of its
    job)."""
    if complaint[0] == WASTE:  # the others take too long
        return True
    if complaint[0] == SLOW:  # the counts of steps may say why
        return not any(jobs[i].look_for == RACES and "fp32" in jobs[i].dtypes for i in waiting)
    own = turn_of(jobs[complaint[1]]), complaint
    return all(own < (turn_of(jobs[i]), (kind, i)) for i, kind in waiting.items())


def looked_for(judged):
    """The lines that say in what a file is right, what was looked for, and what was not."""
    dtypes, looked = judged.dtypes, judged.looked
    return [
        "right, at all sizes, in "
        f"{', '.join(dtypes[:-1])}{' and ' * (len(dtypes) > 1)}{dtypes[-1]}",
        "no access is out of bounds" if looked[BOUNDS] else
        "accesses were not checked: this compiler has no AddressSanitizer",
        "no two threads are in a race" if looked[RACES] else
        "races were looked for, but not to the end, since that took too long"
        if race_variables() else
        "races were not looked for, which needs g++ 11: only other orders of the threads were "
        "tried",
        *judged.remarks,
        *([] if looked[GPU] else ["whether a GPU's compiler takes it was not checked: pip install "
                                  "-r requirements.txt brings CuPy and NVRTC"])]


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
        self.exercise, self.ladder = EXERCISES[ladder.name], ladder._replace(compiled_for="")
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
        rooms = threads if EXERCISES[bench.ladder.name].alone else min(
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


# ---- In a process of its own, since a kernel may crash or never end

# Orders of a block's threads in which results are compared; the last is a shuffle.
ORDERS = "forward", "reverse", 1
# Seconds of the processor after which no other order is tried, if the race finder runs too.
PATIENCE = 0.5


def build(paths, dtype, only):
    """The CPU with these students' kernels. Raises UserError."""
    with contextlib.redirect_stdout(None):
        return Emulated(dtype, MODEL, [LAB / "tiles.cu", *paths], only, paths)


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
    files = {path: Submission(path) for path in job["compile"]}
    if job["look_for"] == GPU:
        for path, file in files.items():
            lines, facts = on_gpus.judge(file, job["dtypes"])
            send(event="gpu", file=path, refused=lines, launch=on_gpus.launch_lines(file, facts),
                 facts=facts)
        return
    wrong, only = set(), {file.run for file in files.values()}
    for dtype in job["dtypes"]:
        if wrong.issuperset(job["run"]):
            return
        try:
            device = build([file.path for file in files.values()], dtype, only)
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
    if device.races and "fence" in file.code:
        device.library.races_fences()
    if device.races and re.search(ANNOUNCED, file.code):
        device.library.races_announced()
    counts = job.get("waste") and device.races and device.dtype == "fp32"
    reference, passed = Reference(ladder) if counts else None, False
    for bench, sizes, threads in launches_of(file, device, kernel):
        choice = dict(threads=threads)
        where = ",".join(f"{key}={value}" for key, value in sizes.items())
        where += f", in blocks of {threads} threads" * (threads != kernel.threads)
        one = reference and reference.work(sizes)
        arrays = {name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
                  for name, array in vars(bench.sets[0]).items() if isinstance(array, np.ndarray)}
        send(event="begins", file=str(file.path), sizes=where, dtype=device.dtype,
             limit=job["limit"], one=one, arrays=arrays)
        # of this process, however busy the computer is
        signal.setitimer(signal.ITIMER_VIRTUAL, job["limit"])
        complaint = None
        if job["look_for"] == RACES or not job.get("compare", not job["look_for"]):
            if device.races:
                races.work(device.library, *step_limits(one))
            around = (sketched(bench, file, kernel, threads, where) if counts else
                      contextlib.nullcontext())
            with around:
                complaint = launched(bench, version, choice, job["look_for"])
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
    where = ",".join(f"{key}={value}" for key, value in sizes.items())
    send(event="begins", file=str(file.path), sizes=f"{where}, of README's training", one=None,
         dtype=device.dtype, limit=job["limit"], arrays={
             name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
             for name, array in arrays.items()})
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


def launched(bench, version, choice, look_for):
    """Launch once. The sanitizers end this process if they find something; a race is returned."""
    work = next(bench.launches(version, choice))
    with unreadable(bench) if look_for == BOUNDS else contextlib.nullcontext():
        try:
            work()
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
