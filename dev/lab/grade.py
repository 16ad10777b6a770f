"""Judging a student's kernel on the CPU, in several processes, one for each thing to look for and
each dtype: trial.py is one of them.

For each dtype one process compares the results with NumPy, with the threads in several orders,
under the compiler's sanitizers, which see accesses out of bounds. Another one looks for races: see
dev/cpu/races.py. One more compiles the file for GPUs, where NVRTC is installed. As soon as a
complaint is sure and no other process can have a better one, all end, and the student reads it.
"""
import contextlib
import json
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

from dev.common.compiler import compiler_of, words_of
from dev.common.nvrtc import has_nvrtc
from dev.cpu import races
from dev.lab import on_gpus
from dev.lab.explain import LOOP, complaint_lines, printed_lines, waiting_lines, warning_lines
from dev.lab.ladder import LAB
from dev.lab.trial import BOUNDS, FIRST, GPU, LIMIT, RACES, too_long_lines
from train_gpt2 import UserError

TOP = LAB.parents[1]
GRACE = 20  # seconds in which other processes may still find a better explanation than the first
# What UBSan looks for and AddressSanitizer sees anyway: a quarter of the time to compile.
SEEN_BY_ASAN = "null,object-size,pointer-overflow,vptr,nonnull-attribute,returns-nonnull-attribute"


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
            process = subprocess.Popen([sys.executable, "-m", "dev.lab.trial", json.dumps(job)],
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


# What a complaint is about. What comes first may be the cause of what comes later, and is said
# before it.
COMPILER, GPU_COMPILER, LAUNCH, ACCESS, RACE, RESULT, WASTE, SLOW = range(8)
KINDS = {"stuck": ACCESS, "found race": RACE, "waste": WASTE, "outside": RESULT, "race": RESULT,
         "wrong": RESULT, "unset": RESULT, "kept": RESULT, "deep": RESULT}


def complaint_of(file, result, job):
    """((its place in the list above, lines) of the complaint of a Job's process; None if it has
    none), and whether it got to its end. Raises UserError."""
    events, status, stderr = result
    if job.look_for == GPU:
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
    lines = complaint_lines(file, events, status, stderr, job.look_for == BOUNDS)
    if lines and job.arch:
        lines.append(f"where __CUDA_ARCH__ is {job.arch}")
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


def variables_of(job, variables):
    """The environment variables of a Job. variables: those of what is looked for."""
    own = variables.get(job.look_for)
    if not job.arch:
        return own
    return {**(own or {}),
            "CXXFLAGS": f"{(own or {}).get('CXXFLAGS', '')} -D__CUDA_ARCH__={job.arch}"}


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
    job = dict(compile=[path], run=[path], waste=True, races=bool(variables[RACES]))
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
        own = dict(job, look_for=jobs[i].look_for, dtypes=jobs[i].dtypes, limit=LIMIT)
        try:
            news.put((i, processes.run(own, variables_of(jobs[i], variables),
                                       lambda event: news.put((i, event)))))
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
                    complaint, ended = complaint_of(file, result, jobs[i])
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
