"""Processes that check and time the versions of kernels, one kernel after the other.

A kernel that crashes ends its worker only. The error is reported, and the next kernel gets a new
worker.
"""
import contextlib
import functools
import multiprocessing
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dev.features.devices import make_device
from dev.lab import timing
from dev.lab.bench import Bench, noting
from dev.lab.ladder import (KERNELS, LAB, MODELS, config_of, describe_choice, find_ladder,
                            launched_by, model_of, parse_sizes, text_of)
from train_gpt2 import UserError, read_kernels

BESIDE = [LAB.parent / f"{name}.cu" for name in (
    "llama3/llama3", "features/moments", "features/outliers", "features/recompute",
    "features/recompute_llama")]


class Task(NamedTuple):
    """What to do with a kernel."""
    device: str  # "cpu" or "cuda"
    # {(dtype, *Compiled): the names of the kernels whose files are compiled together}.
    compiled: dict
    sizes: dict | None  # as asked for; None takes the kernel's own
    number: int | None  # of the version; None takes all
    dtypes: tuple
    timed: bool
    verbose: bool  # a line for each check and timing
    races: bool = False  # look for races, at one shape


class Failure(NamedTuple):
    """What went wrong with a version, or with the kernel if there is no number."""
    kernel: str
    number: int | None
    dtype: str
    line: str


class Report(NamedTuple):
    """What a worker found out about one kernel."""
    checks: int
    failures: list
    timings: list
    library: dict  # {(kernel, dtype): (name, seconds)}
    launched: set  # the names of all kernels that were launched
    device: dict  # see timing.describe_gpu

    def plus(self, other):
        return Report(*(a | b if isinstance(a, (set, dict)) else a + b
                        for a, b in zip(self, other)))


def failures_only(*failures):
    """A Report of failures and nothing else."""
    return Report(0, list(failures), [], {}, set(), {})


def sources_of(names):
    """The files that are compiled after kernels.cu for these kernels."""
    every = dict.fromkeys(name for first in names for name in (first, *find_ladder(first).beside))
    own = [KERNELS / f"{name}.cu" for name in every]
    return [*BESIDE, LAB / "tiles.cu", *(path for path in own if path.exists())]


@functools.cache
def device_of(name, dtype, C, NH, group, relu, compiled):
    """A device with kernels.cu, the features' files and the lab's files of some kernels. On a CPU
    only the kernels that they may launch are compiled, which halves the time."""
    files, c = sources_of(compiled), config_of(C, NH, group, relu)
    if name == "cuda":
        return make_device(name, dtype, c, beside=files)
    from dev.cpu.emulated import Emulated
    return Emulated(dtype, c, files, only=launched_by(compiled, read_kernels([*c.SOURCES, *files])))


def shapes_of(ladder, task):
    """The sizes of a task."""
    if task.sizes:
        return [{**parse_sizes(ladder.shape), **task.sizes}]
    checks = [parse_sizes(text) for text in ladder.checks]
    if task.races:
        checks = [shape_for_races(ladder)]
    return [parse_sizes(ladder.shape)] if task.timed else checks


def shape_for_races(ladder):
    """A small size with several blocks: of those that kernels.cu is compiled for anyway, the one
    with most rows."""
    checks = [parse_sizes(text) for text in ladder.checks]
    checks = [sizes for sizes in checks
              if model_of(ladder, sizes)[:2] in [model[:2] for model in MODELS[:2]] and
              all(sizes.get(name, 0) <= most
                  for name, most in (("T", 130), ("V", 300), ("OC", 300)))]
    if "T" not in checks[0]:
        return checks[:2][-1]
    return max(checks, key=lambda sizes: sizes.get("B", 1) * sizes["T"])


def numbers_of(ladder, dtype, number=None):
    """The numbers of the versions that have a dtype; with a number, only that one."""
    return [n for n, version in enumerate(ladder.versions, 1)
            if dtype in version.dtypes and number in (None, n)]


def is_lost(device):
    """Whether a kernel's fault, such as an address that does not exist, has taken the GPU from this
    process."""
    try:
        if device.name == "cuda":
            device.gpu.synchronize()
        return False
    except Exception:
        return True


def run_ladder(ladder, task, say, doing, ceilings):
    """Do a task with one kernel. say(line) prints; doing(what) tells the parent what comes next, in
    case it ends this process. Returns a Report."""
    report, stream, checks, device = failures_only(), None, 0, None

    def fail(number, dtype, line):
        # A mistake in the .py fails in each dtype.
        if line not in {failure.line for failure in report.failures}:
            report.failures.append(Failure(ladder.name, number, dtype, line))
            say(f"error: {line}")

    def failed(number, dtype):
        return any((number, dtype) == (failure.number, failure.dtype)
                   for failure in report.failures)

    for sizes in shapes_of(ladder, task):
        for dtype in task.dtypes:
            numbers = numbers_of(ladder, dtype, task.number)
            if not numbers:
                continue
            where = f"{text_of(sizes)} {dtype}"
            doing(f"{ladder.name}, {where}")
            try:
                key = dtype, *model_of(ladder, sizes)
                device = device_of(task.device, *key, task.compiled[key])
                # The lab's own, since CuPy's default one cannot be recorded.
                if task.device == "cuda" and not stream:
                    stream = device.cupy.cuda.Stream(non_blocking=True)
                with stream or contextlib.nullcontext():
                    bench = Bench(ladder, device, sizes,
                                  *([timing.cold(device)] if task.timed else []))
                    for number in numbers:
                        version = ladder.versions[number - 1]
                        if bench.fits(version) and not failed(number, dtype):
                            doing(f"{ladder.name} {number}, {where}")
                            checks += run_version(bench, number, task, f"{ladder.name} {number}",
                                                  where, fail, say, report, ceilings)
                        if is_lost(device):
                            raise RuntimeError("a kernel's fault")
                    if task.timed:
                        time_library(bench, report, say)
            except Exception as e:  # the other kernels still run
                lost = "the GPU is lost: " if device and is_lost(device) else ""
                fail(None, dtype, f"{ladder.name}, {where}: {lost}{one_line(e)}")
                return report._replace(checks=checks)
            if task.device == "cuda":
                with contextlib.suppress(Exception):
                    report.device.update(timing.describe_gpu(device, ceilings))
                    device.cupy.get_default_memory_pool().free_all_blocks()
                    device.cupy.get_default_pinned_memory_pool().free_all_blocks()
    return report._replace(checks=checks)


def one_line(e):
    text = " ".join(str(e).split())
    return text if isinstance(e, (AssertionError, UserError)) else f"{type(e).__name__}: {text}"


def run_version(bench, number, task, title, where, fail, say, report, ceilings):
    """Check a version with each choice and, in a timed task, time it. Returns the number of
    checks."""
    version, device, timings, checks = bench.ladder.versions[number - 1], bench.device, [], 0
    with noting(device, report.launched):
        choices = version.choices(device, few=not task.timed)
        for choice in choices[:: max(1, len(choices) - 1)] if task.races else choices:
            own = version.trainer and not any(value is not None for value in choice.values())
            setting = f"{title}: {where} {describe_choice(choice)}".rstrip()
            checks += 1
            try:
                comparison = bench.check(version, choice)
                if comparison.place is not None:
                    fail(number, device.dtype, f"{setting}: {comparison}")
                    break
                line = f"{setting}: {comparison}"
                if task.timed:
                    seconds = timing.time_rounds(device, list(bench.launches(version, choice)),
                                                 version.recorded)
                    timings.append(timing.timing_of(bench, version, number, choice, own, seconds,
                                                    ceilings))
                    line += (f", {1e6 * seconds:,.1f} us, {timings[-1].rate}, "
                             f"{timings[-1].share:.1%} of the ceiling")
                if task.verbose:
                    say(line)
            except Exception as e:  # the other versions still run
                if isinstance(e, UserError):
                    fail(number, device.dtype, f"{title}: {e}")
                else:
                    fail(number, device.dtype, f"{setting}: {one_line(e)}")
                break
    best = min(timings, key=lambda t: t.seconds, default=None)
    report.timings.extend(t for t in timings if t is best or t.own)
    if best and version.library:
        report.library[bench.ladder.name, device.dtype] = version.library, best.seconds
    return checks


def time_library(bench, report, say):
    try:
        seconds = timing.time_torch(bench)
    except Exception as e:  # the versions are still measured
        say(f"PyTorch could not do {bench.ladder.name} in {bench.device.dtype}: {one_line(e)}")
        return
    if seconds:
        report.library.setdefault((bench.ladder.name, bench.device.dtype), ("PyTorch", seconds))


def serve(connection):
    """A worker's loop: receives a kernel's name and a Task; sends lines, what it is doing, and a
    Report."""
    ceilings = {}

    def say(line):
        connection.send(("line", line))

    def doing(what):
        connection.send(("doing", what))

    while True:
        try:
            name, task = connection.recv()
        except EOFError:
            return
        if task.device == "cuda":  # NVRTC takes half a minute and a core for each
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(device_of, "cuda", *key, names)
                             for key, names in task.compiled.items()]:
                    done.exception()  # raised again when that kernel runs
        try:
            report = run_ladder(find_ladder(name), task, say, doing, ceilings)
        except Exception as e:  # from the kernel's .py
            line = f"{name}.py: {one_line(e)}"
            say(f"error: {line}")
            report = failures_only(Failure(name, None, "", line))
        connection.send(("report", report))


class Worker:
    """A process that runs kernels. If a kernel ends it, the next kernel gets a new one."""

    def __init__(self, threads):
        self.threads, self.process = threads, None

    def start(self):
        self.connection, theirs = multiprocessing.Pipe()
        if self.threads:
            os.environ.update(OMP_NUM_THREADS=str(self.threads),
                              OPENBLAS_NUM_THREADS=str(self.threads))
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, name, task, say):
        """The Report on a kernel; say(line) prints a line."""
        if not self.process:
            self.start()
        doing = name
        try:
            self.connection.send((name, task))
            while True:
                kind, value = self.connection.recv()
                if kind == "report":
                    if any("the GPU is lost" in failure.line for failure in value.failures):
                        self.stop()
                    return value
                if kind == "doing":
                    doing = value
                else:
                    say(value)
        except (EOFError, OSError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            line = f"{doing}: ended its process ({how}); the others go on"
            say(f"error: {line}")
            return failures_only(Failure(name, None, "", line))

    def stop(self):
        if self.process:
            self.connection.close()
            self.process.join()
            self.process = None


def first_error(e):
    """The first error of a compiler: file, line and message."""
    found = re.search(r"([\w.]+[:(]\d+.*\berror\b.*)", str(e))
    return found[1] if found else one_line(e)


def keys_of(name, task):
    """The keys that a task compiles a kernel for: {(dtype, *Compiled): True}."""
    ladder = find_ladder(name)
    return {(dtype, *model_of(ladder, sizes)): True for sizes in shapes_of(ladder, task)
            for dtype in task.dtypes if numbers_of(ladder, dtype, task.number)}


def compile_together(names, task):
    """The names of the kernels that can run, {key: the names compiled together}, and the Failures
    of the others. Those of a CPU are compiled here, so that the workers find them in the cache. A
    GPU's worker compiles for itself."""
    def plan(names):
        compiled = {}
        for name in names:
            for key in keys_of(name, task):
                compiled[key] = (*compiled.get(key, ()), name)
        return compiled

    def compile_all(compiled):
        """None, or the first error."""
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda key: device_of(task.device, *key, compiled[key]),
                              sorted(compiled, key=lambda key: -len(compiled[key]))))
        except UserError as e:
            return e

    good, failures = [], []
    for name in names:
        try:
            keys_of(name, task)
            good.append(name)
        except Exception as e:
            failures.append(Failure(name, None, "", f"{name}.py: {one_line(e)}"))
    error = compile_all(plan(good)) if task.device == "cpu" else None
    if error:  # compile each one alone, to see which is wrong
        alone = {name: compile_all(dict.fromkeys([*keys_of(name, task)][:1], (name,)))
                 for name in good}
        good = [name for name in good if not alone[name]]
        failures += [Failure(name, None, "", first_error(e)) for name, e in alone.items() if e]
        if not good or compile_all(plan(good)):
            raise error
    return good, plan(good), failures


def run_ladders(names, task, report):
    """Do a task with several kernels, on a CPU several at a time. Calls report(name, Report, lines)
    after each, in this order. Returns the Failures of those that cannot run."""
    names, compiled, failures = compile_together(names, task)
    task = task._replace(compiled=compiled)
    count = 1 if task.device == "cuda" or len(names) == 1 else min(len(names), os.cpu_count())
    workers = [Worker(1 if count > 1 else None) for _ in range(count)]
    free = list(workers)

    def run(name):
        worker, lines = free.pop(), []
        try:
            say = functools.partial(print, flush=True) if count == 1 else lines.append
            return name, worker.run(name, task, say), lines
        finally:
            free.append(worker)

    with ThreadPoolExecutor(count) as pool:
        for done in pool.map(run, names):
            report(*done)
    for worker in workers:
        worker.stop()
    return failures
