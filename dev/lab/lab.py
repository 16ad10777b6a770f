"""The kernel lab: each kernel in several versions, from the most naive to the best, checked and timed.

    python -m dev.lab                            # lists the kernels
    python -m dev.lab layernorm_forward          # lists its versions
    python -m dev.lab layernorm_forward 2        # checks version 2 against NumPy, and times it over block sizes
    python -m dev.lab layernorm_forward --all    # does so with all its versions, and prints the ladder
    python -m dev.lab --all                      # does so with all kernels, and writes RESULTS.md and ladders.svg
    python -m dev.lab --check                    # only checks, all versions of all kernels at small odd shapes
    python -m dev.lab --exercise                 # lists the kernels as exercises: see exercise.py

The versions of a kernel are in the .cu file of its name, which is compiled after kernels.cu. The .py beside it says
what they are given, how they are launched, and what NumPy makes of the same inputs. Without a GPU everything is checked
on the CPU device, and nothing is timed. A version that fails, or whose result is wrong, gets an error line, and an
error in the table. The others go on, and the exit status is 1.
"""
import argparse
import contextlib
import difflib
import functools
import inspect
import multiprocessing
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from prepro_tinyshakespeare import UserError
from prepro_tinyshakespeare import run as run_main

from dev.lab import results, timing  # after prepro_tinyshakespeare, which says how NumPy's threads wait
from dev.lab.kernel import (DTYPES, Bench, find_kernel, kernel_names, launched_by, model_of,
                             noting, parse_sizes, words)
from dev.common.devices import make_device
from dev.features import has_gpu
from train_gpt2 import Config, read_kernels

LAB = Path(__file__).resolve().parent
KERNELS = LAB / "kernels"
BESIDE = [LAB.parent / f"{name}.cu" for name in ("llama3/llama3", "precision/moments", "variants/outliers")]

# ---------------------------------------------------------------------------------------------------------------------
# In a worker: one kernel after the other. What a kernel does to its process, it does to the worker alone.


class Task(NamedTuple):
    """What to do with a kernel."""
    device: str  # "cpu" or "cuda"
    compiled: dict  # {(dtype, C, NH): the names of the kernels whose files are compiled together}
    sizes: dict | None  # as asked for; None takes the kernel's own
    number: int | None  # of the version; None takes all
    dtypes: tuple
    timed: bool
    verbose: bool  # a line for each check and timing


class Failure(NamedTuple):
    """What went wrong with a version, or, if that has no number, with the kernel."""
    kernel: str
    number: int | None
    dtype: str
    what: str
    line: str


class Report(NamedTuple):
    """What a worker has found out about one kernel."""
    checks: int
    failures: list
    timings: list
    library: dict  # {(kernel, dtype): (name, seconds)}
    launched: set  # the names of all kernels that were launched
    device: dict  # what is to be said of it

    def plus(self, other):
        return Report(*(a | b if isinstance(a, (set, dict)) else a + b for a, b in zip(self, other)))


def nothing(*failures):
    """A Report of nothing but failures."""
    return Report(0, list(failures), [], {}, set(), {})


def files_of(names):
    """What is compiled behind kernels.cu for these kernels."""
    every = dict.fromkeys(name for first in names for name in (first, *find_kernel(first).beside))
    own = [KERNELS / f"{name}.cu" for name in every]
    return [*BESIDE, LAB / "tiles.cu", *(path for path in own if path.exists())]


@functools.cache
def device_of(name, dtype, C, NH, compiled):
    """A device with kernels.cu, features' files and the lab's of some kernels. A CPU's has only what they may launch,
    which takes the compiler half of the time."""
    files, c = files_of(compiled), Config(C=C, NH=NH)
    if name == "cuda":
        return make_device(name, dtype, c, beside=files)
    from dev.cpu.device import Cpu
    return Cpu(dtype, c, files, only=launched_by(compiled, read_kernels([*Config.SOURCES, *files])))


def shapes_of(kernel, task):
    """The sizes that a task asks for."""
    if task.sizes:
        return [{**parse_sizes(kernel.shape), **task.sizes}]
    return [parse_sizes(kernel.shape)] if task.timed else [parse_sizes(text) for text in kernel.checks]


def numbers_of(kernel, dtype, number=None):
    """The numbers of the versions that have a dtype, or of those only the one that is asked for."""
    return [n for n, version in enumerate(kernel.versions, 1) if dtype in version.dtypes and number in (None, n)]


def is_lost(device):
    """Whether a kernel's fault, such as an address that does not exist, has taken the GPU from this process."""
    try:
        if device.name == "cuda":
            device.gpu.synchronize()
        return False
    except Exception:
        return True


def run_kernel(kernel, task, say, doing, ceilings):
    """Do a task with one kernel. say(line) prints, and doing(what) notes what is being done, in case it is the last
    thing to be done. Returns a Report."""
    report, stream, checks, device = nothing(), None, 0, None

    def fail(number, dtype, what, line):
        if line not in {failure.line for failure in report.failures}:  # a wrong row is wrong in each dtype
            report.failures.append(Failure(kernel.name, number, dtype, what, line))
            say(f"error: {line}")

    def failed(number, dtype):
        return any((number, dtype) == (failure.number, failure.dtype) for failure in report.failures)

    for sizes in shapes_of(kernel, task):
        for dtype in task.dtypes:
            numbers = numbers_of(kernel, dtype, task.number)
            if not numbers:
                continue
            where = ",".join(f"{key}={value}" for key, value in sizes.items()) + f" {dtype}"
            doing(f"{kernel.name}, {where}")
            try:
                key = dtype, *model_of(kernel, sizes)
                device = device_of(task.device, *key, task.compiled[key])
                if task.device == "cuda" and not stream:  # the lab's own, since CuPy's default one cannot be recorded
                    stream = device.cupy.cuda.Stream(non_blocking=True)
                with stream or contextlib.nullcontext():
                    bench = Bench(kernel, device, sizes, *([timing.cold(device)] if task.timed else []))
                    for number in numbers:
                        version = kernel.versions[number - 1]
                        if bench.fits(version) and not failed(number, dtype):
                            doing(f"{kernel.name} {number}, {where}")
                            checks += run_version(bench, number, task, f"{kernel.name} {number}", where, fail, say,
                                                  report, ceilings)
                        if is_lost(device):
                            raise RuntimeError("a kernel's fault")
                    if task.timed:
                        time_library(bench, report, say)
            except Exception as e:  # one kernel's failure is no reason not to run the others
                lost = "the GPU is lost: " if device and is_lost(device) else ""
                fail(None, dtype, "", f"{kernel.name}, {where}: {lost}{one_line(e)}")
                return report._replace(checks=checks)
            if task.device == "cuda":
                with contextlib.suppress(Exception):
                    report.device.update(results.describe(device, ceilings))
                    device.cupy.get_default_memory_pool().free_all_blocks()
                    device.cupy.get_default_pinned_memory_pool().free_all_blocks()
    return report._replace(checks=checks)


def one_line(e):
    text = " ".join(str(e).split())
    return text if isinstance(e, (AssertionError, UserError)) else f"{type(e).__name__}: {text}"


def run_version(bench, number, task, title, where, fail, say, report, ceilings):
    """Check a version with each choice and, if timed, time it. Returns the number of checks."""
    version, device, timings, checks = bench.kernel.versions[number - 1], bench.device, [], 0
    with noting(device, report.launched):
        for choice in version.choices(device, few=not task.timed):
            own = version.trainer and not any(value is not None for value in choice.values())
            setting = f"{title}: {where} {words(choice)}".rstrip()
            checks += 1
            try:
                verdict = bench.check(version, choice)
                if verdict.place is not None:
                    fail(number, device.dtype, version.what, f"{setting}: {verdict}")
                    break
                line = f"{setting}: {verdict}"
                if task.timed:
                    seconds = timing.time_rounds(device, list(bench.launches(version, choice)), version.recorded)
                    timings.append(timing.timing_of(bench, version, number, words(choice), own, seconds, ceilings))
                    line += f", {1e6 * seconds:,.1f} us, {timings[-1].rate}, {timings[-1].share:.1%} of the ceiling"
                if task.verbose:
                    say(line)
            except Exception as e:  # one version's failure is no reason not to run the others
                if isinstance(e, UserError):
                    fail(number, device.dtype, version.what, f"{title}: {e}")
                else:
                    fail(number, device.dtype, version.what, f"{setting}: {one_line(e)}")
                break
    best = min(timings, key=lambda t: t.seconds, default=None)
    report.timings.extend(t for t in timings if t is best or t.own)
    if best and version.library:
        report.library[bench.kernel.name, device.dtype] = version.library, best.seconds
    return checks


def time_library(bench, report, say):
    try:
        seconds = timing.time_torch(bench)
    except Exception as e:  # a library's failure is no reason to measure nothing
        say(f"PyTorch could not do {bench.kernel.name} in {bench.device.dtype}: {one_line(e)}")
        return
    if seconds:
        report.library.setdefault((bench.kernel.name, bench.device.dtype), ("PyTorch", seconds))


def serve(connection):
    """A worker's life: a kernel's name and a Task come in; lines, what is being done, and a Report go out."""
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
        if task.device == "cuda":  # NVRTC takes half a minute for each, and a core
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(device_of, "cuda", *key, names) for key, names in task.compiled.items()]:
                    done.exception()  # is raised again by the kernel that it is about
        try:
            report = run_kernel(find_kernel(name), task, say, doing, ceilings)
        except Exception as e:  # of the kernel's own .py
            line = f"{name}.py: {one_line(e)}"
            say(f"error: {line}")
            report = nothing(Failure(name, None, "", "", line))
        connection.send(("report", report))


# ---------------------------------------------------------------------------------------------------------------------
# In front of the workers


class Worker:
    """A process that runs kernels. If one of them ends it, the next kernel gets another."""

    def __init__(self, threads):
        self.threads, self.process = threads, None

    def start(self):
        self.connection, theirs = multiprocessing.Pipe()
        if self.threads:
            os.environ.update(OMP_NUM_THREADS=str(self.threads), OPENBLAS_NUM_THREADS=str(self.threads))
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
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
            return nothing(Failure(name, None, "", "", line))

    def stop(self):
        if self.process:
            self.connection.close()
            self.process.join()
            self.process = None


def first_error(e):
    """A compiler's first error: file, line and what it says."""
    found = re.search(r"([\w.]+[:(]\d+.*\berror\b.*)", str(e))
    return found[1] if found else one_line(e)


def keys_of(name, task):
    """What a kernel is compiled for in a task: {(dtype, C, NH): True}."""
    kernel = find_kernel(name)
    return {(dtype, *model_of(kernel, sizes)): True for sizes in shapes_of(kernel, task) for dtype in task.dtypes
            if numbers_of(kernel, dtype, task.number)}


def compile_together(names, task):
    """The names of the kernels that can be run, {key: those that are compiled for it}, and the Failures of the others.
    Here a CPU's are compiled, so that the workers find them in the cache. A GPU's worker compiles by itself."""
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
            failures.append(Failure(name, None, "", "", f"{name}.py: {one_line(e)}"))
    error = compile_all(plan(good)) if task.device == "cpu" else None
    if error:  # each by itself, to see whose fault it is
        alone = {name: compile_all(dict.fromkeys([*keys_of(name, task)][:1], (name,))) for name in good}
        good = [name for name in good if not alone[name]]
        failures += [Failure(name, None, "", "", first_error(e)) for name, e in alone.items() if e]
        if not good or compile_all(plan(good)):
            raise error
    return good, plan(good), failures


def run_kernels(names, task, report):
    """Do a task with kernels, on a CPU several at a time. report(name, Report, lines) is called behind each, in their
    order. Returns the Failures of those that cannot be run."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def asked_sizes(text, kernel):
    """{name: number} of --shape. Raises UserError. Some must be multiples, so that every row starts on 16 bytes."""
    sizes, known = parse_sizes(text), list(inspect.signature(kernel.problem).parameters)[1:]
    for name, size in sizes.items():
        if name not in known:
            raise UserError(f"--shape {text}: {kernel.name} has no size {name}; expected some of {', '.join(known)}")
        multiple = {"C": 32, "HS": 16, "H": 8, "Vp": 8, "n": 32}.get(name, 1)
        if size % multiple or size == 0 and name in parse_sizes(kernel.shape):
            wish = f"a multiple of {multiple}" if multiple > 1 else "at least 1"
            raise UserError(f"--shape {text}: expected {name} to be {wish}")
    return sizes


def nearest(name, names):
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no kernel {name}; {hint}without a name, all are listed")
    return name


def list_kernels(names):
    for name in names:
        try:
            kernel = find_kernel(name)
        except Exception as e:  # whatever stands in its .py
            print(f"{name:30} error: {one_line(e)}")
            continue
        count = len(kernel.versions)
        print(f"{name:30} {count} version{'s' if count > 1 else ' '} {kernel.shape:32} {kernel.summary}")


def list_versions(kernel):
    print(f"{kernel.name}: {kernel.summary}\n{kernel.shape}")
    for number, version in enumerate(kernel.versions, 1):
        print(f"  {number}  {' '.join(version.dtypes):14} {version.what}")


def refuse(message):
    raise UserError(f"{message}; --help lists the flags")


def read_flags(arguments):
    parser = argparse.ArgumentParser(description="Check and time the versions of a kernel.", allow_abbrev=False)
    parser.add_argument("kernel", nargs="?", help="its name (default: list them, or with --all or --check take all)")
    parser.add_argument("version", nargs="?", type=int, help="its number (default: list them, or take all)")
    parser.add_argument("--all", action="store_true", help="run all versions, and print the ladder")
    parser.add_argument("--check", action="store_true", help="only check, at small odd shapes")
    parser.add_argument("--shape", help="sizes that differ from the default, such as B=8,T=1024,C=768")
    parser.add_argument("--dtype", choices=DTYPES, help="only in this one (default: all that a version has)")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="where --all writes RESULTS.md and ladders.svg (default: dev/lab if of all kernels)")
    parser.add_argument("--exercise", nargs="?", const="", metavar="NAME or FILE",
                        help="list the exercises, write the file of one, or judge such a file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: cuda if there is a GPU)")
    parser.error = refuse
    flags = parser.parse_args(arguments)
    if flags.exercise is not None and (flags.kernel or flags.check or flags.all or flags.shape or flags.dtype):
        raise UserError("--exercise takes a name or a file itself, and no other flag than --device: "
                        "--exercise residual_forward")
    if flags.out and not flags.all:
        raise UserError("--out is where --all writes its results: add --all")
    if flags.shape and not flags.kernel:
        raise UserError("--shape needs the name of a kernel: sizes differ from one to the other")
    if flags.kernel and flags.kernel.isdecimal():
        raise UserError(f"{flags.kernel} is a number; expected a kernel's name before it, as in: gelu_forward 2")
    return flags


def main(arguments=None):
    flags = read_flags(arguments)
    if flags.exercise is not None:
        from dev.lab import exercise
        return exercise.main(flags.exercise, flags.device or ("cuda" if has_gpu() else "cpu"))
    names, device = kernel_names(), flags.device or ("cuda" if has_gpu() else "cpu")
    chosen = [nearest(flags.kernel, names)] if flags.kernel else names
    kernel, sizes = find_kernel(flags.kernel) if flags.kernel else None, None
    if flags.version is not None and not 1 <= flags.version <= len(kernel.versions):
        raise UserError(f"{flags.kernel} has versions 1 to {len(kernel.versions)}, not {flags.version}")
    if flags.shape:
        sizes = asked_sizes(flags.shape, kernel)
    if not (flags.version or flags.all or flags.check or flags.shape or flags.dtype):
        list_versions(kernel) if kernel else list_kernels(names)
        return 0
    timed = device == "cuda" and not flags.check
    if not timed and not flags.check:
        print(f"On the CPU versions are checked{'' if flags.shape else ' at small shapes'}, and not timed.")
    if device == "cuda" and not has_gpu():
        raise UserError("--device cuda: there is no GPU here; leave the flag out, and the CPU checks the versions")
    if device == "cpu":
        os.environ.setdefault("CXXFLAGS", "-O1")  # most of the time is the compiler's, and this halves it
    task = Task(device, {}, sizes, flags.version, (flags.dtype,) if flags.dtype else DTYPES, timed, bool(flags.kernel))
    total, out, ran = nothing(), flags.out or (None if flags.kernel else LAB), []

    if timed and flags.all and out:
        results.write(out, [], total)  # refuses now what it would refuse after the first kernel

    def report(name, found, lines):  # what was measured is on disk before the next kernel begins
        nonlocal total
        print("".join(f"{line}\n" for line in lines), end="")
        ran.append(name)
        total = total.plus(found)
        if not flags.kernel:
            wrong = f"{len(found.failures)} wrong" if found.failures else "all right"
            print(f"{name}: {found.checks} checks, {wrong}", flush=True)
        if timed and flags.all:
            print(f"\n{name}: {find_kernel(name).summary}\n{results.table(name, total)}", flush=True)
        if timed and flags.all and out and total.device:
            results.write(out, ran, total)

    failures = run_kernels(chosen, task, report)
    for failure in failures:
        print(f"error: {failure.line}", flush=True)
    if not (flags.kernel or flags.dtype or timed or total.failures or failures):
        files = [KERNELS / f"{name}.cu" for name in names]
        missing = read_kernels([path for path in files if path.exists()]).keys() - total.launched
        failures = [Failure(name, None, "", "", f"{name} is launched by no version") for name in sorted(missing)]
        print("".join(f"error: {failure.line}\n" for failure in failures), end="")
    failures += total.failures
    if not total.checks and not failures:
        raise UserError(nothing_run(kernel, flags))
    print(f"{total.checks} checks, {len(failures)} wrong")
    return 1 if failures else 0


def nothing_run(kernel, flags):
    """A line that says why a task had nothing to do."""
    have = {dtype for version in kernel.versions for dtype in version.dtypes
            if flags.version in (None, kernel.versions.index(version) + 1)}
    if flags.dtype and flags.dtype not in have:
        return (f"nothing was run: {flags.kernel}{f' {flags.version}' if flags.version else ''} has no {flags.dtype}, "
                f"only {', '.join(dtype for dtype in DTYPES if dtype in have)}")
    return f"nothing was run: no version that was asked for does {flags.shape or 'these sizes'}"


if __name__ == "__main__":
    run_main(main)
