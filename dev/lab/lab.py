"""The kernel lab: each kernel in several versions, from the most naive to the best, checked and timed.

    python -m dev.lab                            # lists the kernels
    python -m dev.lab layernorm_forward          # lists the versions of one kernel
    python -m dev.lab layernorm_forward 2        # checks version 2 against NumPy, and times it for several block sizes
    python -m dev.lab layernorm_forward --all    # the same for all its versions, and prints a table
    python -m dev.lab --all                      # the same for all kernels, and writes RESULTS.md and ladders.svg
    python -m dev.lab --check                    # only checks all versions of all kernels, at small odd shapes
    python -m dev.lab --check --races            # looks for races in all versions of all kernels, at one small shape
    python -m dev.lab --exercise                 # lists the exercises: see exercises.py

The versions of a kernel are in kernels/NAME.cu, which is compiled after kernels.cu. NAME.py beside it has the inputs,
the launches, and what NumPy computes from the same inputs. Without a GPU the CPU device checks everything, and nothing
is timed. A version that fails gets an error line and no row in the table. The others still run, and the exit status
is 1.
"""
import argparse
import difflib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from dev.cpu import races
from dev.cpu.device import compiler_of
from dev.features import has_gpu  # after prepro_tinyshakespeare, which says how NumPy's threads wait
from dev.lab import results
from dev.lab.ladder import DTYPES, KERNELS, LAB, find_ladder, kernel_names, parse_sizes
from dev.lab.workers import Failure, Task, failures_only, one_line, run_ladders
from prepro_tinyshakespeare import UserError
from train_gpt2 import read_kernels


def asked_sizes(text, ladder):
    """{name: number} of --shape. Some must be multiples, so that every row starts on 16 bytes. Raises UserError."""
    sizes, known = parse_sizes(text), list(inspect.signature(ladder.problem).parameters)[1:]
    for name, size in sizes.items():
        if name not in known:
            raise UserError(f"--shape {text}: {ladder.name} has no size {name}; expected some of {', '.join(known)}")
        multiple = {"C": 32, "HS": 16, "H": 8, "Vp": 8, "n": 32}.get(name, 1)
        if size % multiple or size == 0 and name in parse_sizes(ladder.shape):
            wish = f"a multiple of {multiple}" if multiple > 1 else "at least 1"
            raise UserError(f"--shape {text}: expected {name} to be {wish}")
    return sizes


def known_kernel(name):
    names = kernel_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no kernel {name}; {hint}without a name, all are listed")
    return name


def list_kernels():
    for name in kernel_names():
        try:
            ladder = find_ladder(name)
        except Exception as e:  # whatever is wrong in its .py
            print(f"{name:30} error: {one_line(e)}")
            continue
        count = len(ladder.versions)
        print(f"{name:30} {count} version{'s' if count > 1 else ' '} {ladder.shape:32} {ladder.summary}")


def list_versions(ladder):
    print(f"{ladder.name}: {ladder.summary}\n{ladder.shape}")
    for number, version in enumerate(ladder.versions, 1):
        print(f"  {number}  {' '.join(version.dtypes):14} {version.what}")


def refuse(message):
    raise UserError(f"{message}; --help lists the flags")


def read_flags(arguments):
    parser = argparse.ArgumentParser(prog="python -m dev.lab", description="Check and time the versions of a kernel.",
                                     allow_abbrev=False)
    parser.add_argument("kernel", nargs="?", help="its name (default: list them, or with --all or --check take all)")
    parser.add_argument("version", nargs="?", type=int, help="its number (default: list them, or take all)")
    parser.add_argument("--all", action="store_true", help="run all versions, and print the table")
    parser.add_argument("--check", action="store_true", help="only check, at small odd shapes")
    parser.add_argument("--races", action="store_true", help="with --check: look at each access, and find races")
    parser.add_argument("--shape", help="sizes that differ from the default, such as B=8,T=1024,C=768")
    parser.add_argument("--dtype", choices=DTYPES, help="only this one (default: all that a version has)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where --all writes RESULTS.md and ladders.svg "
                        "(default: dev/lab if it ran all kernels)")
    parser.add_argument("--exercise", nargs="?", const="", metavar="NAME or FILE",
                        help="list the exercises, write the file of one, or check such a file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: cuda if there is a GPU)")
    parser.error = refuse
    flags = parser.parse_args(arguments)
    if flags.exercise is not None and (flags.kernel or flags.check or flags.all or flags.shape or flags.dtype):
        raise UserError("--exercise takes a name or a file itself, and no other flag than --device: "
                        "--exercise residual_forward")
    if flags.races and (not flags.check or flags.device == "cuda"):
        raise UserError("--races is for --check on the CPU: --check --races --device cpu")
    if flags.out and not flags.all:
        raise UserError("--out is where --all writes its results: add --all")
    if flags.shape and not flags.kernel:
        raise UserError("--shape needs the name of a kernel, since sizes differ between kernels")
    if flags.kernel and flags.kernel.isdecimal():
        raise UserError(f"{flags.kernel} is a number; expected a kernel's name before it, as in: gelu_forward 2")
    return flags


def main(arguments=None):
    flags = read_flags(arguments)
    device = flags.device or ("cuda" if has_gpu() and not flags.races else "cpu")
    if flags.exercise is not None:
        return exercise(flags.exercise, device)
    chosen = [known_kernel(flags.kernel)] if flags.kernel else kernel_names()
    ladder, sizes = find_ladder(flags.kernel) if flags.kernel else None, None
    if flags.version is not None and not 1 <= flags.version <= len(ladder.versions):
        raise UserError(f"{flags.kernel} has versions 1 to {len(ladder.versions)}, not {flags.version}")
    if flags.shape:
        sizes = asked_sizes(flags.shape, ladder)
    if not (flags.version or flags.all or flags.check or flags.shape or flags.dtype):
        list_versions(ladder) if ladder else list_kernels()
        return 0
    timed = device == "cuda" and not flags.check
    if not timed and not flags.check:
        print(f"On the CPU versions are checked{'' if flags.shape else ' at small shapes'}, and not timed.")
    if device == "cuda" and not has_gpu():
        raise UserError("--device cuda: there is no GPU here; without the flag, the CPU checks the versions")
    if device == "cpu":
        os.environ.setdefault("CXXFLAGS", "-O1")  # most of the time is the compiler's, and this halves it
    if flags.races:
        if not races.finds_races(compiler_of()):
            raise UserError(f"--races: {compiler_of()} cannot build it; it needs g++ 11 or later")
        os.environ["CXXFLAGS"] += f" {races.FLAG}"
    task = Task(device, {}, sizes, flags.version, (flags.dtype,) if flags.dtype else DTYPES, timed, bool(flags.kernel),
                flags.races)
    total, out, ran = failures_only(), flags.out or (None if flags.kernel else LAB), []

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
            print(f"\n{name}: {find_ladder(name).summary}\n{results.table(name, total)}", flush=True)
        if timed and flags.all and out and total.device:
            results.write(out, ran, total)

    failures = run_ladders(chosen, task, report)
    if not (flags.kernel or flags.dtype or timed or total.failures or failures):
        files = [KERNELS / f"{name}.cu" for name in chosen]
        missing = read_kernels([path for path in files if path.exists()]).keys() - total.launched
        failures = [Failure(name, None, "", f"{name} is launched by no version") for name in sorted(missing)]
    print("".join(f"error: {failure.line}\n" for failure in failures), end="")
    failures += total.failures
    if not total.checks and not failures:
        raise UserError(nothing_run(ladder, flags))
    print(f"{total.checks} checks, {len(failures)} wrong")
    return 1 if failures else 0


def nothing_run(ladder, flags):
    """A line that says why a task had nothing to do."""
    have = {dtype for number, version in enumerate(ladder.versions, 1) for dtype in version.dtypes
            if flags.version in (None, number)}
    if flags.dtype and flags.dtype not in have:
        return (f"nothing was run: {flags.kernel}{f' {flags.version}' if flags.version else ''} has no {flags.dtype}, "
                f"only {', '.join(dtype for dtype in DTYPES if dtype in have)}")
    return f"nothing was run: no version that was asked for does {flags.shape or 'these sizes'}"


def exercise(what, device):
    """--exercise: lists the exercises, writes the file of one, or checks a file. Returns the exit status. Raises
    UserError."""
    from dev.lab import exercises, grade, submission, template
    names = exercises.exercise_names()
    if not what:
        for i, name in enumerate(names, 1):
            print(f"{i:2}  {name:30} {exercises.EXERCISES[name].teaches}")
        print(f"\n{exercises.command('NAME')} writes a file to fill in, and --exercise FILE checks it.")
        return 0
    if not what.endswith(".cu"):
        if what not in names:
            if Path(f"{what}.cu").exists():
                raise UserError(f"no exercise {what}; did you mean the file {what}.cu?")
            near = difflib.get_close_matches(what, names, 1, 0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"no exercise {what}; {hint}without a name, all are listed")
        path = template.write_template(what)
        print(f"wrote {path}. Fill in its body, then check it: {exercises.command(path)}")
        return 0
    path = Path(what)
    submission.exercise_of(path)
    print(f"{path}: compiled for the CPU, and compared with NumPy ...", flush=True)
    judged = grade.grade_file(path)
    if judged.lines:
        print(textwrap.indent("\n".join(filter(None, judged.lines)), "    "))
        return 1
    print(textwrap.indent("\n".join(grade.looked_for(judged)), "    "))
    if device == "cpu":
        print("    There is no GPU here, so it is not timed.")
        return 0
    return subprocess.run([sys.executable, "-m", "dev.lab.grade", "--time", str(path.resolve())]).returncode
