"""The kernel lab: each kernel in several versions, from the most naive to the best, checked and
timed.

    python -m dev.lab                            # lists the kernels
    python -m dev.lab layernorm_forward          # lists the versions of one kernel
    python -m dev.lab layernorm_forward 2        # checks version 2, and times it
    python -m dev.lab layernorm_forward --all    # the same for all its versions, and prints a table
    python -m dev.lab --all                      # all kernels; writes RESULTS.md and ladders.svg
    python -m dev.lab --check                    # only checks all versions, at small odd shapes
    python -m dev.lab --check --races            # looks for races in all versions, at a small shape
    python -m dev.lab --exercise                 # lists the exercises, and what you solved
    python -m dev.lab --exercise gelu_forward --hint      # prints the next hint
    python -m dev.lab --exercise gelu_forward --solution  # shows how your file differs from one
    python -m dev.lab --exercise repair:row_sum  # writes a kernel with a bug, to find and mend
    python -m dev.lab --exercise my_gelu_forward.cu       # checks what you wrote
    python -m dev.lab --exercise my_gelu_forward.cu --page    # a page that plays its launch

The versions of a kernel are in kernels/NAME.cu, which is compiled after kernels.cu. NAME.py beside
it has the inputs, the launches, and what NumPy computes from the same inputs. Without a GPU the CPU
device checks everything, and nothing is timed. A version that fails gets an error line and no row
in the table. The others still run, and the exit status is 1.
"""
import argparse
import difflib
import os
import textwrap
from pathlib import Path

from dev.common.program import run_main
from dev.cpu import races
from dev.cpu.host import compiler_of
from dev.common.gpus import capability, has_gpu
from dev.lab import timing
from dev.lab.ladder import DTYPES, KERNELS, LAB, asked_sizes, find_ladder, kernel_names
from dev.lab.workers import Failure, Task, failures_only, one_line, run_ladders
from train_gpt2 import UserError, read_kernels


def did_you_mean(what, names):
    near = difflib.get_close_matches(what, names, 1, 0.4)
    return f"{f'did you mean {near[0]}? ' if near else ''}without a name, all are listed"


def known_kernel(name):
    names = kernel_names()
    if name not in names:
        raise UserError(f"no kernel {name}; {did_you_mean(name, names)}")
    return name


def list_kernels():
    for name in kernel_names():
        try:
            ladder = find_ladder(name)
        except Exception as e:  # whatever is wrong in its .py
            print(f"{name:30} error: {one_line(e)}")
            continue
        count = len(ladder.versions)
        print(f"{name:30} {count} version{'s' if count > 1 else ' '} {ladder.shape:32} "
              f"{ladder.summary}")


def list_versions(ladder):
    print(f"{ladder.name}: {ladder.summary}\n{ladder.shape}")
    for number, version in enumerate(ladder.versions, 1):
        print(f"  {number}  {' '.join(version.dtypes):14} {version.what}")


def refuse(message):
    raise UserError(f"{message}; --help lists the flags")


def read_flags(arguments):
    parser = argparse.ArgumentParser(prog="python -m dev.lab", allow_abbrev=False,
                                     description="Check and time the versions of a kernel.")
    parser.add_argument("kernel", nargs="?",
                        help="its name (default: list them, or with --all or --check take all)")
    parser.add_argument("version", nargs="?", type=int,
                        help="its number (default: list them, or take all)")
    parser.add_argument("--all", action="store_true", help="run all versions, and print the table")
    parser.add_argument("--check", action="store_true", help="only check, at small odd shapes")
    parser.add_argument("--races", action="store_true",
                        help="with --check: look at each access, and find races")
    parser.add_argument("--shape",
                        help="sizes that differ from the default, such as B=8,T=1024,C=768")
    parser.add_argument("--dtype", choices=DTYPES,
                        help="only this one (default: all that a version has)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where --all writes RESULTS.md "
                        "and ladders.svg (default: dev/lab if it ran all kernels)")
    parser.add_argument("--exercise", nargs="?", const="", metavar="NAME or FILE",
                        help="list the exercises, write the file of one, or check such a file")
    parser.add_argument("--hint", action="store_true",
                        help="with --exercise NAME: print the next hint")
    parser.add_argument("--solution", nargs="?", type=int, const=0, metavar="N",
                        help="with --exercise NAME: the difference between your file and version N "
                        "of the lab (default: the simplest)")
    parser.add_argument("--page", action="store_true",
                        help="with --exercise FILE: write a page that plays a small launch of it")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        help="where (default: cuda if there is a GPU)")
    parser.error = refuse
    flags = parser.parse_args(arguments)
    of_ladders = flags.kernel or flags.check or flags.all or flags.shape or flags.dtype
    if flags.exercise is not None and of_ladders:
        raise UserError("--exercise takes a name or a file itself, and no other flag than --hint, "
                        "--solution, --page and --device: --exercise residual_forward")
    more = {"--hint": flags.hint, "--solution": flags.solution is not None, "--page": flags.page}
    more = [name for name, given in more.items() if given]
    if more and not flags.exercise:
        raise UserError(f"{more[0]} needs the name of an exercise or your file: --exercise NAME "
                        f"{more[0]}")
    if len(more) > 1:
        raise UserError(f"{' and '.join(more)}: expected one of them at a time")
    if flags.page and not flags.exercise.endswith(".cu"):
        raise UserError(f"--page draws a launch of your file: --exercise my_{flags.exercise}.cu "
                        "--page")
    if flags.races and (not flags.check or flags.device == "cuda"):
        raise UserError("--races is for --check on the CPU: --check --races --device cpu")
    if flags.out and not flags.all:
        raise UserError("--out is where --all writes its results: add --all")
    if flags.shape and not flags.kernel:
        raise UserError("--shape needs the name of a kernel, since sizes differ between kernels")
    if flags.kernel and flags.kernel.isdecimal():
        raise UserError(f"{flags.kernel} is a number; expected a kernel's name before it, as in: "
                        "gelu_forward 2")
    return flags


def main(arguments=None):
    flags = read_flags(arguments)
    device = flags.device or ("cuda" if has_gpu() and not flags.races else "cpu")
    if flags.exercise is not None:
        return exercise(flags, device)
    chosen = [known_kernel(flags.kernel)] if flags.kernel else kernel_names()
    ladder, sizes = find_ladder(flags.kernel) if flags.kernel else None, None
    if flags.version is not None and not 1 <= flags.version <= len(ladder.versions):
        raise UserError(f"{flags.kernel} has versions 1 to {len(ladder.versions)}, not "
                        f"{flags.version}")
    if flags.shape:
        sizes = asked_sizes(flags.shape, ladder)
    if not (flags.version or flags.all or flags.check or flags.shape or flags.dtype):
        list_versions(ladder) if ladder else list_kernels()
        return 0
    timed = device == "cuda" and not flags.check
    if not timed and not flags.check:
        print(f"On the CPU versions are checked{'' if flags.shape else ' at small shapes'}, and "
              "not timed.")
    if device == "cuda" and not has_gpu():
        raise UserError("--device cuda: there is no GPU here; without the flag, the CPU checks the "
                        "versions")
    if device == "cpu":
        # most of the time is the compiler's, and this halves it
        os.environ.setdefault("CXXFLAGS", "-O1")
    if flags.races:
        if not races.finds_races(compiler_of()):
            raise UserError(f"--races: {compiler_of()} cannot build it; it needs g++ 11 or later")
        os.environ["CXXFLAGS"] += f" {races.FLAG}"
    own = DTYPES if device == "cpu" or capability() >= 80 else ("fp32",)
    task = Task(device, {}, sizes, flags.version, (flags.dtype,) if flags.dtype else own, timed,
                bool(flags.kernel), flags.races)
    total, out, ran = failures_only(), flags.out or (None if flags.kernel else LAB), []

    if timed and flags.all and out:
        timing.write(out, [], total)  # refuses now what it would refuse after the first kernel

    def report(name, found, lines):  # what was measured is on disk before the next kernel begins
        nonlocal total
        print("".join(f"{line}\n" for line in lines), end="")
        ran.append(name)
        total = total.plus(found)
        if not flags.kernel:
            wrong = f"{len(found.failures)} wrong" if found.failures else "all right"
            print(f"{name}: {found.checks} checks, {wrong}", flush=True)
        if timed and flags.all:
            print(f"\n{name}: {find_ladder(name).summary}\n{timing.HEADER}"
                  f"{timing.table(name, total)}", flush=True)
        if timed and flags.all and out and total.device:
            timing.write(out, ran, total)

    failures = run_ladders(chosen, task, report)
    if not (flags.kernel or flags.dtype or timed or total.failures or failures):
        files = [KERNELS / f"{name}.cu" for name in chosen]
        missing = read_kernels([path for path in files if path.exists()]).keys() - total.launched
        failures = [Failure(name, None, "", f"{name} is launched by no version")
                    for name in sorted(missing)]
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
        what = f"{flags.kernel}{f' {flags.version}' if flags.version else ''}"
        return (f"nothing was run: {what} has no {flags.dtype}, only "
                f"{', '.join(dtype for dtype in DTYPES if dtype in have)}")
    return f"nothing was run: no version that was asked for does {flags.shape or 'these sizes'}"


def known_exercise(what):
    """The name of an exercise. Raises UserError."""
    from dev.lab.exercises import exercise_names
    names = exercise_names()
    if what not in names:
        if Path(f"{what}.cu").exists():
            raise UserError(f"no exercise {what}; did you mean the file {what}.cu?")
        raise UserError(f"no exercise {what}; {did_you_mean(what, [*names, 'repair'])}")
    return what


def say(lines):
    if any(lines):
        print(textwrap.indent("\n".join(filter(None, lines)), "    "), flush=True)


def exercise(flags, device):
    """--exercise: lists the exercises, writes the file of one, gives a hint or a solution, or
    checks a file. Returns the exit status. Raises UserError."""
    from dev.lab import progress  # what only exercises need takes a third of a second to import
    from dev.lab.exercises import command
    from dev.lab.submission import Submission, write_template
    what = flags.exercise
    if what == "repair" or what.startswith("repair:"):
        return repairs(flags)
    if not what:
        print("\n".join(progress.listed()))
        return 0
    file = Submission(what) if what.endswith(".cu") else None
    name = file.names[0] if file else known_exercise(what)
    if flags.hint:
        print("\n".join(progress.hint(name)))
    elif flags.solution is not None:
        print("\n".join(progress.solution(file or progress.file_of(name), flags.solution)))
    elif flags.page:
        from dev.lab.picture import write_page
        print(f"wrote {write_page(file)}: open it in a browser")
    elif not file:
        path = write_template(name)
        print(f"wrote {path}. Fill in its body, then check it: {command(path)}")
    else:
        return check_file(file, device)
    return 0


def repairs(flags):
    """--exercise repair:NAME: writes the file of a repair, or gives its hint or solution; without a
    name lists them. Returns the exit status. Raises UserError."""
    from dev.lab import repair
    from dev.lab.exercises import command
    if flags.exercise == "repair":
        if flags.hint or flags.solution is not None:
            raise UserError("--exercise repair lists the repairs; expected the name of one before "
                            "--hint or --solution, such as repair:row_sum")
        print("\n".join(repair.listed()))
        return 0
    one = repair.known(flags.exercise)
    if flags.solution:
        raise UserError(f"--solution {flags.solution}: a repair has one solution; leave out the "
                        "number")
    if flags.hint:
        print(one.repair.hint)
    elif flags.solution is not None:
        print("\n".join(repair.solution(one)))
    else:
        path = repair.write_file(one)
        print(f"wrote {path}, which has a bug. Name its line there, mend it, and check it: "
              f"{command(path)}")
    return 0


def check_file(file, device):
    """--exercise FILE: says what is wrong with a Submission, or what it reached. Returns the exit
    status. Raises UserError."""
    from dev.lab import explain, grade, on_gpus, progress, repair
    print(f"{file}: compiled for the CPU, and compared with NumPy ...", flush=True)
    judged = grade.grade_file(file, lambda line: say([line]))
    say([f"it printed: {line}" for line in [*dict.fromkeys(judged.printed)][:10]])
    if judged.lines:
        say([*judged.lines, *repair.verdict(file, False)[0], *judged.drawn])
        if not repair.of(file):
            say([progress.failed(file.exercise.kernel, judged.lines)])
        return 1
    if repair.of(file):
        say(grade.looked_for(judged))
        lines, done = repair.verdict(file, True)
        say([*lines, *([progress.mended(file.exercise.kernel)] if done else [])])
        return 0 if done else 1
    say(grade.looked_for(judged))
    say(explain.warning_lines(file, judged.warnings))
    say(judged.drawn)
    times = None
    counts = progress.counted(file)
    say(counts["report"])
    if device == "cpu":
        say(["It is not timed on a CPU."])
    else:
        lines, remark = on_gpus.sanitize(file)
        say(lines or [remark])
        if lines:
            say([progress.failed(file.exercise.kernel, lines)])
            return 1
        times = on_gpus.measure(file)
        say(on_gpus.standing(times))
    missing = progress.goals_of(counts, judged.gpu, times)
    name, sectors = file.exercise.kernel, progress.sectors_of(counts)
    nexts = progress.note(name, judged.dtypes, sectors, times and times.noted)
    say([missing[0].line if missing else "", *nexts])
    return 0


if __name__ == "__main__":
    run_main(main)
