"""Run the tests, on the CPU.

    python -m dev.tests.run                    # all of them, as CI does: a quarter of an hour
    python -m dev.tests.run plot runs          # the programs with one of these words in their names
    python -m dev.tests.run --fast             # the most important, in a minute: after each change
    python -m dev.tests.run --fast schedules   # those of them with this word in their names, with all their output
    python -m dev.tests.run --all              # also every mutant, all GPU architectures, 200 killed runs: hours

It ends with a line `N passed, N failed`; the exit status is 1 if any failed.

Each program is a process with one thread. Two run at a time, the longest first. A program that passes prints one line,
and one that fails everything. The 20 slowest tests are listed at the end. --fast runs functions from the same files in
two processes: see fast.py.
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

# Set before the imports that read these: kernels compile in half the time, and processes share two cores.
os.environ |= {"CXXFLAGS": "-O1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

PROGRAMS = (  # the longest first; the other test files follow
    "dev.tests.test_ranks", "dev.lab --check --dtype fp32, sanitized", "test_gpt2 --device cpu --dtype bf16",
    "dev.tests.test_llama3", "dev.tests.test_kills", "test_gpt2 --device cpu --dtype fp32",
    "dev.lab.tests.test_exercise", "dev.tests.test_races", "dev.tests.test_resume",
    "test_gpt2 --device cpu --dtype tf32",
    "dev.lab --check --dtype bf16", "dev.lab --check --dtype tf32", "dev.lab.tests.test_lab",
)
IN_TEST_GPT2 = {f"dev.tests.test_{name}" for name in ("files", "cpu", "gpu", "command_line")}
LONGEST = (
    "dev.tests.mutants", "dev.bench.compile_kernels", "dev.lab --check --races --dtype bf16",
    "dev.lab --check --races --dtype tf32", "dev.tests.test_kills --only killed_runs --kills 200",
    "dev.tests.test_ranks --only killed_ranks --kills 50", "dev.lab.tests.test_first_evening --checked 99",
    "dev.lab.tests.test_students --all", "dev.tests.test_five --planted",
    "dev.tests.test_gelu_products --only planted --faults 99",
)


def library_of(name):
    """The path of one of the compiler's libraries, such as a sanitizer's."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command_of(program):
    """(arguments for Python, environment variables) of a program. ", sanitized" behind its name means: under
    AddressSanitizer and UndefinedBehaviorSanitizer."""
    command, _, sanitized = program.partition(", ")
    more = {"CXXFLAGS": "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all",
            "ASAN_OPTIONS": "detect_leaks=0",
            "LD_PRELOAD": f"{library_of('libasan.so')} {library_of('libubsan.so')}"} if sanitized else {}
    return ["-m", *command.split()], more


def all_programs():
    """PROGRAMS, and then the other test files."""
    found = sorted(".".join(path.relative_to(TOP).with_suffix("").parts) for path in TOP.glob("dev/**/tests/test_*.py"))
    return [*PROGRAMS, *(path for path in found if path not in {*PROGRAMS, *IN_TEST_GPT2})]


COUNTS = re.compile(r"^(\d+) (?:passed, (\d+) failed|checks, (\d+) wrong)$", re.M)


def counts_in(text, status):
    """(checks that passed, checks that failed), from a program's last line. A nonzero exit status that this line does
    not explain counts as a failure."""
    found = [match for match in COUNTS.finditer(text)][-1:]
    if not found:
        return (0, 1) if status else (1, 0)
    first, failed, wrong = (int(number or 0) for number in found[0].groups())
    failed, passed = (failed, first) if found[0][2] else (wrong, first - wrong)
    return passed, failed or int(status != 0)


def run_program(program):
    """Run a program, and print its last line, or everything if it failed. Returns (checks that passed, checks that
    failed, [(seconds, name)] of its slow tests)."""
    arguments, more = command_of(program)
    begun = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], cwd=TOP, env=os.environ | more, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seconds, lines = time.monotonic() - begun, done.stdout.rstrip().splitlines() or [""]
    said = [f"== {program}: {seconds:.0f} s", *(lines if done.returncode else lines[-1:])]
    if done.returncode:
        said.append(f"== {program} FAILED, exit status {done.returncode}")
    print("\n".join(said), flush=True)
    took = [(float(s), f"{program}: {name}") for s, name in re.findall(r"^took (\S+) s: (.*)$", done.stdout, re.M)]
    return *counts_in(done.stdout, done.returncode), took or [(seconds, program)]


def run_programs(programs):
    """Run these programs, two at a time. Returns the exit status."""
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(programs, pool.map(run_program, programs)))
    slowest = sorted((row for *_, took in found.values() for row in took), reverse=True)[:20]
    print(f"\n{len(programs)} programs in {time.monotonic() - begun:.0f} s; the slowest tests:")
    print("\n".join(f"{seconds:7.1f} s  {name}" for seconds, name in slowest))
    for program, (_, failed, _) in found.items():
        if failed:
            print(f"FAIL {program}")
    return summary(*(sum(row[i] for row in found.values()) for i in (0, 1)))


def summary(passed, failed):
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def with_word(name, words):
    """Whether a name contains one of the words, or there are no words."""
    return not words or any(word in name for word in words)


def main():
    parser = argparse.ArgumentParser(description="Run the tests.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--full", action="store_true", help="all programs of tests, two at a time (the default)")
    kinds.add_argument("--fast", action="store_true", help="the most important, in a minute")
    kinds.add_argument("--all", action="store_true", help="all programs, every mutant, all architectures, 200 kills")
    parser.add_argument("words", nargs="*", help="only what has one of these in its name")
    flags = parser.parse_args()
    if flags.fast:
        from dev.tests.fast import fast  # which imports NumPy, now that the environment is set
        return fast(flags.words, with_word, summary)
    programs = [*all_programs(), *LONGEST * flags.all]
    chosen = [program for program in programs if with_word(program, flags.words)]
    if not chosen:
        sys.exit(f"error: {' '.join(flags.words)}: expected words in these: {', '.join(programs)}")
    return run_programs(chosen)


if __name__ == "__main__":
    sys.exit(main())
