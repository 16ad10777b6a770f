"""Run the tests.

    python -m dev.tests.run                    # all programs of tests, two at a time, as CI does
    python -m dev.tests.run plot scaling       # those of them with one of these words in their names
    python -m dev.tests.run --fast             # what can be said within a minute, on two cores, after a change
    python -m dev.tests.run --fast schedules   # of that, the tests with this word in their names, with all they say

Both run on the CPU, and end with a line `N passed, N failed`. The exit status is 1 if any failed.

--full, the default, runs PROGRAMS, each a process, with one thread each, since two of them share the cores. It prints
the last line of each that passes, and all that a program printed if it fails.

--fast runs functions of the same files, by name, in two processes: see its tables, WITHOUT_KERNELS and WITH_KERNELS.
Kernels are compiled once, for the fixture's model in fp32. It prints what fails, and the ten that took longest.
"""
import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

# Before the imports of what reads these: kernels are compiled in half of the time, and processes share two cores.
os.environ |= {"CXXFLAGS": "-O1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# ---- All programs, the longest first. Test files that are not here run too, behind these.

PROGRAMS = (
    "lab fp32, sanitized", "test_gpt2", "dev.tests.test_ranks", "dev.tests.test_llama3", "dev.tests.test_runs",
    "dev.tests.test_run_folder", "lab tf32", "lab bf16", "dev.tests.test_exercise", "dev.tests.test_lab",
    "dev.tests.test_training", "dev.tests.test_meeting", "dev.tests.test_convert", "dev.tests.test_convert_llama3",
    "dev.tests.test_tokens", "dev.tests.test_plot", "dev.tests.test_fp8",
)
LEFT_OUT = {"dev.tests.test_files"}  # test_gpt2 runs it


def library_of(name):
    """The path of a library of the compiler's, such as a sanitizer's."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command_of(program):
    """(arguments of Python, variables of the environment) of a program. The lab checks all versions of all kernels, the
    trainer's too, at small odd shapes: in fp32 under AddressSanitizer and UndefinedBehaviorSanitizer."""
    if not program.startswith("lab "):
        return ["-m", program], {}
    dtype, _, sanitized = program.removeprefix("lab ").partition(", ")
    more = {"CXXFLAGS": "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all",
            "ASAN_OPTIONS": "detect_leaks=0",
            "LD_PRELOAD": f"{library_of('libasan.so')} {library_of('libubsan.so')}"} if sanitized else {}
    return ["-m", "dev.lab", "--check", "--dtype", dtype], more


def all_programs():
    """PROGRAMS, and behind them the test files that are not among them."""
    found = sorted(f"dev.tests.{path.stem}" for path in (TOP / "dev/tests").glob("test_*.py"))
    return [*PROGRAMS, *(path for path in found if path not in {*PROGRAMS, *LEFT_OUT})]


COUNTS = re.compile(r"^(\d+) (?:passed, (\d+) failed|checks, (\d+) wrong)$", re.M)


def counts_in(text, status):
    """(checks that passed, checks that failed) by the last line of a program that counts. One without such a line, or
    whose exit status is 1 in spite of it, counts as a failure."""
    found = [match for match in COUNTS.finditer(text)][-1:]
    if not found:
        return (0, 1) if status else (1, 0)
    first, failed, wrong = (int(number or 0) for number in found[0].groups())
    failed, passed = (failed, first) if found[0][2] else (wrong, first - wrong)
    return passed, failed or int(status != 0)


def run_program(program):
    """Run a program, and print what it came to. Returns (checks that passed, checks that failed)."""
    arguments, more = command_of(program)
    begun = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], cwd=TOP, env=os.environ | more, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.rstrip().splitlines() or [""]
    said = [f"== {program}: {time.monotonic() - begun:.0f} s", *(lines if done.returncode else lines[-1:])]
    if done.returncode:
        said.append(f"== {program} FAILED, exit status {done.returncode}")
    print("\n".join(said), flush=True)
    return counts_in(done.stdout, done.returncode)


def full(programs):
    """Run programs, two at a time. Returns the exit status."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(programs, pool.map(run_program, programs)))
    for program, (_, failed) in found.items():
        if failed:
            print(f"FAIL {program}")
    return summary(*(sum(numbers) for numbers in zip(*found.values())))


def summary(passed, failed):
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def with_word(name, words):
    """Whether a name has one of the words, or there are none."""
    return not words or any(word in name for word in words)


def main():
    parser = argparse.ArgumentParser(description="Run the tests.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--full", action="store_true", help="all programs of tests, two at a time (the default)")
    kinds.add_argument("--fast", action="store_true", help="what can be said within a minute")
    parser.add_argument("words", nargs="*", help="only what has one of these in its name")
    flags = parser.parse_args()
    if flags.fast:
        from dev.tests.fast import fast  # which imports NumPy, when the environment is set
        return fast(flags.words, with_word, summary)
    programs = [program for program in all_programs() if with_word(program, flags.words)]
    if not programs:
        sys.exit(f"error: {' '.join(flags.words)}: expected words in these: {', '.join(all_programs())}")
    return full(programs)


if __name__ == "__main__":
    sys.exit(main())
