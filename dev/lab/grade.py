"""Judging a student's kernel on the CPU, in several processes (trial.py). card.py runs it on a GPU.

For each dtype one process compares the results with NumPy, with the threads in several orders, under the compiler's
sanitizers, which see accesses out of bounds. Another one looks for races: see dev/cpu/races.py. One more compiles the
file for GPUs, where NVRTC is installed. As soon as a complaint is sure and no other process can have a better one, all
end, and the student reads it.

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
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dev.common.nvrtc import has_nvrtc
from dev.cpu import races
from dev.cpu.device import compiler_of
from dev.lab import on_gpus, waste
from dev.lab.explain import complaint_lines, printed_lines, quoted, warning_lines
from dev.lab.ladder import LAB
from dev.lab.submission import code_of, read_submission
from dev.lab.trial import BOUNDS, GPU, RACES
from prepro_tinyshakespeare import UserError

TOP = LAB.parents[1]
LIMITS = {None: 6, BOUNDS: 6, RACES: 10, GPU: 60}  # seconds of the processor for one size
GRACE = 20  # seconds in which other processes may still find a better explanation than the first
# What UBSan looks for and AddressSanitizer sees anyway: a quarter of the time to compile.
SEEN_BY_ASAN = "null,object-size,pointer-overflow,vptr,nonnull-attribute,returns-nonnull-attribute"
TENSOR_CORES = r"\b(mma\w*|load_matrices\w*|multiply_transposed|TF32)\b|\btiles::"  # words for which tf32 is not fp32

# ---- In front of the processes


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
    return {"CXXFLAGS": f"-Og -g1 -fsanitize=address,undefined -fno-sanitize={SEEN_BY_ASAN} -fno-sanitize-recover=all",
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=0:malloc_context_size=1",
            "UBSAN_OPTIONS": "print_stacktrace=1"}


def race_variables():
    """The environment variables for a run that finds races, or None if the compiler cannot."""
    compiler = compiler_of()
    return {"CXXFLAGS": f"-Og {races.FLAG} {races.STEPS}"} if compiler and races.finds_races(compiler) else None


class Processes:
    """The processes of one check. `end` stops all."""

    def __init__(self):
        self.running, self.over, self.lock = set(), False, threading.Lock()

    def run(self, job, variables=None, begun=lambda: None):
        """(events, exit status, stderr) of a job in a process of its own; None if it was stopped. begun() is called
        when it has compiled the file."""
        environment = {**os.environ, "LC_ALL": "C.UTF-8",
                       **(variables or {"CXXFLAGS": os.environ.get("CXXFLAGS", "")})}
        with self.lock, tempfile.TemporaryFile() as said:
            if self.over:
                return None
            process = subprocess.Popen([sys.executable, "-m", "dev.lab.trial", json.dumps(job)], cwd=TOP,
                                       env=environment, stdout=subprocess.PIPE, stderr=said.fileno(),
                                       start_new_session=True)
            self.running.add(process)
            said = os.fdopen(os.dup(said.fileno()), "rb")
        events = []
        with process.stdout, said:
            for line in process.stdout:
                if line.startswith(b"{"):
                    events.append(json.loads(line))
                    if events[-1]["event"] == "compiled":
                        begun()
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


# What a complaint is about. What comes first may be the cause of what comes later, and is said before it.
COMPILER, GPU_COMPILER, LAUNCH, ACCESS, RACE, RESULT, WASTE, SLOW = range(8)
KINDS = {"stuck": ACCESS, "found race": RACE, "waste": WASTE, "outside": RESULT, "race": RESULT, "wrong": RESULT}


def complaint_of(path, result, look_for):
    """((its place in the list above, lines) of a process's complaint; None if it has none), and whether it got to its
    end. Raises UserError."""
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
        loops = [quoted(path, i) for i, line in enumerate(code_of(path).splitlines(), 1)
                 if re.search(r"\b(for|while)\b", line)]
        return (WASTE, [*waste.too_long_lines(one, loops), f"at the sizes {begun['sizes']}, in {begun['dtype']}"]), True
    lines = complaint_lines(path, events, status, stderr, look_for == BOUNDS)
    if not lines:
        return None, lines is not None
    told = [event for event in events if event["event"] == "complaint"]
    if told and KINDS[told[0]["kind"]] in (ACCESS, RESULT):
        warnings = [event["warnings"] for event in events if event["event"] == "compiled"]
        lines += warning_lines(path, max(warnings, default=""))[:4]
    if any(event["event"] == "compiler" for event in events):
        return (COMPILER, lines), True
    if status in (-signal.SIGALRM, -signal.SIGVTALRM):
        return (SLOW, lines), False
    return (KINDS[told[0]["kind"]] if told else ACCESS, lines), True


class Judgement(NamedTuple):
    """What is said of a student's file."""
    lines: list  # what is wrong; [] if the file is right
    looked: dict  # {BOUNDS, RACES, GPU: whether it was looked for, to the end}
    dtypes: list  # in which it was judged
    gpu: list  # for each GPU and dtype the facts of on_gpus.judge: registers, spilled, shared, blocks, ...
    remarks: list = ()  # lines to print after "right"
    warnings: str = ""  # what g++ says of a right file, for explain.py to put into lines
    printed: list = ()  # what the kernel has printed, in one of the processes


def dtypes_of(path):
    """The dtypes to check a file in: tf32 is fp32 unless the file uses tensor cores."""
    _, version = read_submission(path)
    return [*version.dtypes, *["tf32"] * ("fp32" in version.dtypes and bool(re.search(TENSOR_CORES, code_of(path))))]


def grade_file(path):
    """The Judgement of a student's file. Raises UserError."""
    path = path.resolve()
    dtypes = dtypes_of(path)
    variables = {BOUNDS: sanitizer_variables(), RACES: race_variables()}
    job = dict(compile=[str(path)], run=[str(path)], compare=True, waste=True, races=bool(variables[RACES]))
    # (what to look for, its dtypes, the first kind of complaint that may come of it)
    jobs = [*[(GPU, dtypes, GPU_COMPILER)] * has_nvrtc(),
            *((look_for if variables[look_for] else None, [dtype], kind) for dtype in dtypes
              for look_for, kind in ((BOUNDS, COMPILER), (RACES, RACE)) if variables[look_for] or look_for == BOUNDS)]
    looked = {BOUNDS: bool(variables[BOUNDS]), RACES: bool(variables[RACES]), GPU: has_nvrtc()}
    processes, news, found, facts, remarks, warnings, printed = Processes(), queue.SimpleQueue(), [], [], [], [], []
    waiting = {i: kind for i, (_, _, kind) in enumerate(jobs)}  # the first kind of complaint that may still come

    def work(i):
        look_for, some, _ = jobs[i]
        own = dict(job, look_for=look_for, dtypes=some, limit=LIMITS[look_for])
        try:
            news.put((i, processes.run(own, variables.get(look_for), lambda: news.put((i, None)))))
        except Exception as e:
            news.put((i, e))

    with ThreadPoolExecutor(max(2, os.cpu_count())) as pool:
        try:
            for i in sorted(waiting, key=lambda i: jobs[i][:2] != (RACES, ["fp32"])):  # it counts version 1's work, too
                pool.submit(work, i)
            while waiting:
                try:
                    i, result = news.get(timeout=GRACE if found and not may_be_race(min(found)) else None)
                except queue.Empty:
                    return Judgement(min(found)[2], looked, dtypes, facts, printed=printed)
                look_for = jobs[i][0]
                if result is None:  # it is compiled
                    waiting[i] = max(waiting[i], ACCESS)
                elif isinstance(result, Exception):
                    raise result
                else:
                    del waiting[i]
                    complaint, ended = complaint_of(path, result, look_for)
                    if complaint and not (complaint[0] == SLOW and look_for == RACES):
                        found.append((complaint[0], i, complaint[1]))
                    elif not ended and look_for in looked:
                        looked[look_for] = False
                    if not (ended or complaint) and look_for in (BOUNDS, None):
                        raise UserError(f"{path}: could not be checked: {' '.join(result[2].split())[-300:]}")
                    facts += [fact for event in result[0] for fact in event.get("facts", ())]
                    warnings += [event["warnings"] for event in result[0] if event["event"] == "compiled"]
                    remarks += [event["text"] for event in result[0] if event["event"] == "remark"]
                    printed = printed or printed_lines(result[2])
                if found and is_sure(min(found)[:2], waiting, jobs):
                    return Judgement(min(found)[2], looked, dtypes, facts, printed=printed)
        finally:
            processes.end()
    remarks = [*([on_gpus.remark(facts)] if facts else []), *remarks]
    return Judgement([], looked, dtypes, facts, remarks, max(warnings, default=""), printed)


def may_be_race(complaint):
    """Whether results varied with the order of threads: what the race finder will say is worth waiting for."""
    return complaint[2][0].startswith("its result depends on the order")


def is_sure(complaint, waiting, jobs):
    """Whether no process that still runs may have a better complaint than this (kind, number of its job)."""
    if complaint[0] == WASTE:  # the others take too long
        return True
    if complaint[0] == SLOW:  # the counts of steps may say why
        return not any(jobs[i][0] == RACES and "fp32" in jobs[i][1] for i in waiting)
    return all(complaint < (kind, i) for i, kind in waiting.items())


def looked_for(judged):
    """The lines that say in what a file is right, what was looked for, and what was not."""
    dtypes, looked = judged.dtypes, judged.looked
    return [
        f"right, at all sizes, in {', '.join(dtypes[:-1])}{' and ' * (len(dtypes) > 1)}{dtypes[-1]}",
        "no access is out of bounds" if looked[BOUNDS] else
        "accesses were not checked: this compiler has no AddressSanitizer",
        "no two threads are in a race" if looked[RACES] else
        "races were looked for, but not to the end, since that took too long" if race_variables() else
        "races were not looked for, which needs g++ 11: only other orders of the threads were tried",
        *judged.remarks,
        *([] if looked[GPU] else ["whether a GPU's compiler takes it was not checked: pip install -r requirements.txt "
                                  "brings CuPy and NVRTC"])]
