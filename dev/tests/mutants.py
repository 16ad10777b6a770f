"""Do the tests of the kernels bite? Change one line of a kernel at a time, and see that its tests
fail.

    python -m dev.tests.mutants                    # all mutants; the last line counts the survivors
    python -m dev.tests.mutants adamw              # those of one kernel
    python -m dev.tests.mutants --draw 6           # six, drawn by the commit: for CI

A mutant is a one-line change to kernels.cu, to one of dev/'s .cu files, or to a file of the kernel
lab: those of mutant_table.py, and each barrier removed. It is made in a copy of the repository,
where the lab checks one kernel on the CPU until the first failure: all of its versions for a file
of the lab, else the trainer's. Mutants of FP8 must be noticed by a test of dev/tests/test_fp8.py,
those of bf16_sums.cu by one of test_ranks.py, those of fused_biases.cu by one of
test_fused_biases.py. A mutant that passes has survived: the lab needs a better problem. The
unchanged kernel must pass.
"""
import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev.common.cuda_source import without_comments
from dev.common.program import run_main
from dev.features.order import SOURCES
from dev.tests.mutant_table import (AS_HOPPER, BARRIERS, FP8, FP8_OUTPUT, FUSED_TESTS, KERNELS,
                                    LLAMA, OUT_OF_BOUNDS, SUMS, TABLE, TILES, UNSEEN, Mutant)
from train_gpt2 import UserError

TOP = Path(__file__).resolve().parents[2]

LAB = "dev/lab/kernels"
# Files whose barriers are taken away in other files' tests, if at all.
OWN_TESTS = "hopper.cuh", "turns.cuh"
BARRIER = re.compile(r"__sync(threads|warp)\(\);")
DEFINITION = re.compile(r"^(?:extern \"C\" )?(?:__global__|__device__)[^;{]*?(\w+)\(", re.M)


def barriers(every=False):
    """A Mutant for each barrier in the .cu files that is not in UNSEEN, or for every one. Its kind
    has the barrier's number in its function."""
    for file in (KERNELS, LLAMA, *(str(path.relative_to(TOP)) for path in (
            *SOURCES, TOP / FP8_OUTPUT, TOP / TILES, *sorted((TOP / LAB).glob("*.cu"))))):
        if Path(file).name in OWN_TESTS:
            continue
        text = code_of((TOP / file).read_text(encoding="utf-8"))
        starts = [(found.start(), found[1]) for found in DEFINITION.finditer(text)]
        counts = {}
        for found in BARRIER.finditer(text):
            function = [name for start, name in starts if start < found.start()][-1]
            counts[function] = number = counts.get(function, 0) + 1
            if every or (function, number) not in UNSEEN:
                shared = not file.startswith(LAB)
                if shared and function not in BARRIERS:
                    own_test = f"dev/tests/test_{Path(file).stem}.py"
                    if (TOP / own_test).exists():  # which breaks its barriers, if anything does
                        continue
                    raise UserError(f"{file}: {function} has a barrier: test it in {own_test}, or "
                                    "add it to BARRIERS in mutant_table.py")
                kernel, dtype = (BARRIERS[function] if shared else Path(file).stem,
                                 "fp8" if file == FP8 else "fp32")
                yield Mutant(f"barrier {number}", kernel, dtype, function, found[0], "", file)


def code_of(text):
    """The text with blanks for comments and launch bounds, so that places in it stay the same."""
    return re.sub(r"__launch_bounds__\(.*?\)", lambda found: " " * len(found[0]),
                  without_comments(text))


def mutated(mutant):
    """The mutant's file, changed. Raises SystemExit unless the place is found exactly once."""
    text, at = place_of(mutant)
    return text[:at] + mutant.new + text[at + len(mutant.old) :]


def line_of(mutant):
    """The number of the line that a mutant changes."""
    text, at = place_of(mutant)
    return text.count("\n", 0, at) + 1


def place_of(mutant):
    """(the mutant's file as it is, where it changes). Raises SystemExit unless the place is found
    exactly once."""
    text = (TOP / mutant.file).read_text(encoding="utf-8")
    code, begin, end = code_of(text), 0, len(text)
    if mutant.where:
        name = mutant.where if "(" in mutant.where else f"{mutant.where}("
        begins = [found.start() for found in re.finditer(re.escape(name), code)]
        begin = next((at for at in begins if re.search("__(device|global)__",
                                                       code[code.rfind("\n", 0, at) : at])
                      # No call and no prototype.
                      and re.match(r"[^;{]*\{", code[at:])), min(begins, default=-1))
        end = code.find("\n}\n", begin)
    number = re.fullmatch(r"barrier (\d+)", mutant.kind)
    places = [begin + found.start()
              for found in re.finditer(re.escape(mutant.old), code[begin:end])]
    if number:
        places = [begin + found.start()
                  for found in BARRIER.finditer(code[begin:end])][int(number[1]) - 1 :][:1]
    if begin < 0 or len(places) != 1:
        sys.exit(f"{mutant.file}, {mutant.where}: {mutant.old!r} is there {len(places)} times, and "
                 "must be once")
    return text, places[0]


# ---- In a copy: check one kernel until its first failure


def check_kernel(name, dtype, trainer_only):
    """Check a kernel's versions, or only the trainer's. Returns None, or a line with what is
    wrong."""
    from dev.lab.bench import Bench
    from dev.lab.ladder import describe_choice, find_ladder, model_of, parse_sizes
    from dev.lab.workers import device_of
    ladder = find_ladder(name)
    versions = ([version for version in ladder.versions if version.trainer and trainer_only] or
                ladder.versions)
    checks = 0
    for text in (*ladder.checks, *(ladder.trainer_checks if trainer_only else ())):
        sizes = parse_sizes(text)
        if AS_HOPPER in os.environ.get("CXXFLAGS", "") and sizes.get("HS") not in range(64, 129, 8):
            continue  # as everywhere
        device = device_of("emulated", dtype, *model_of(ladder, sizes), (name,))
        bench = Bench(ladder, device, sizes)
        for version in versions:
            for choice in version.choices(device, few=True) if bench.fits(version) else ():
                checks += 1
                try:
                    comparison = bench.check(version, choice)
                except Exception as e:
                    return (f"{version.what}, {text} {describe_choice(choice)}: "
                            f"{' '.join(str(e).split())}")
                if comparison.place is not None:
                    return f"{version.what}, {text} {describe_choice(choice)}: {comparison}"
    return None if checks else "nothing was checked"


# ---- The program


class Copy:
    """A copy of the repository's code, to mutate."""

    def __init__(self, folder):
        self.top = Path(folder)
        shutil.copytree(TOP / "dev", self.top / "dev", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*TOP.glob("*.py"), TOP / "pyproject.toml", TOP / KERNELS):
            shutil.copy(path, self.top)

    def check(self, kernel, dtype, file, flag="", kind="", seconds=600):
        """Check a kernel in the copy. Returns None, or a line with what is wrong."""
        environment = os.environ | {
            "PYTHONPATH": str(self.top), "XDG_CACHE_HOME": str(self.top / "cache"),
            "OMP_NUM_THREADS": "1",
            # -O1 compiles in half of the time.
            "OPENBLAS_NUM_THREADS": "1", "CXXFLAGS": f"-O1 {flag}"}
        if kind == OUT_OF_BOUNDS:
            library = subprocess.run([
                "g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout
            environment |= {"CXXFLAGS": "-O1 -fsanitize=address", "LD_PRELOAD": library.strip(),
                            "ASAN_OPTIONS": "detect_leaks=0"}
        whose = "all" if file.startswith("dev/lab/") else "trainer"
        command = [sys.executable, "-m", "dev.tests.mutants", kernel, "--check-here", dtype, whose]
        test = "test_fp8" if dtype == "fp8" else "test_ranks" if file == SUMS else (
            "test_fused_biases" if kernel in FUSED_TESTS else None)
        if test:
            command = [sys.executable, "-m", "pytest", f"dev/tests/{test}.py::test_{kernel}",
                       "--device", "emulated"]
        try:
            done = subprocess.run(command, env=environment, cwd=self.top, capture_output=True,
                                  text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"did not end within {seconds} s"
        if "could not compile" in done.stdout + done.stderr:
            sys.exit(f"a mutant of {kernel} does not "
                     f"compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if done.returncode < 0:
            return f"ended by signal {-done.returncode}"
        if "ERROR: AddressSanitizer" in done.stderr:
            return re.search("ERROR: AddressSanitizer.*", done.stderr)[0]
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return None if done.returncode == 0 else last[0] if last else "failed"


def try_mutant(mutant, change=True):
    """Check a mutant's kernel in a copy, changed or as it is. Returns None, or a line with what is
    wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder)
        if change:
            (copy.top / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        return copy.check(mutant.kernel, mutant.dtype, mutant.file, mutant.flag, mutant.kind)


def title(mutant):
    change = f"{mutant.old} -> {mutant.new or 'nothing'}"
    where = f"{Path(mutant.file).name}{' ' * bool(mutant.flag)}{mutant.flag}, {mutant.where}"
    return f"{mutant.kernel:28} {mutant.dtype} {mutant.kind:13} {where}: {change}"


def main():
    parser = argparse.ArgumentParser(description="Change kernels, and see that their tests fail.")
    parser.add_argument("kernel", nargs="?", help="only the mutants of this kernel of the lab")
    parser.add_argument("--draw", type=int, metavar="N", help="only N, drawn by the commit")
    parser.add_argument("--list", action="store_true", help="print them and do nothing")
    parser.add_argument("--check-here", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.check_here:
        wrong = check_kernel(flags.kernel, flags.check_here[0], flags.check_here[1] == "trainer")
        print(wrong or "right")
        return 1 if wrong else 0
    mutants = [*TABLE, *barriers()]
    for mutant in mutants:
        mutated(mutant)
    if flags.kernel:
        mutants = [mutant for mutant in mutants if mutant.kernel == flags.kernel]
        if not mutants:
            raise UserError(f"there is no mutant of a kernel {flags.kernel}; --list lists them all")
    if flags.draw:
        commit = subprocess.run(["git", "-C", TOP, "rev-parse",
                                 "HEAD"], capture_output=True, text=True).stdout.strip()
        print(f"{flags.draw} of {len(mutants)} mutants, drawn by the commit {commit[:10]}")
        mutants = random.Random(commit).sample(mutants, min(flags.draw, len(mutants)))
    if flags.list:
        print("\n".join(map(title, mutants)))
        return 0
    began, survivors = time.monotonic(), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # A mutant for each way in which a kernel is checked.
        ways = {(mutant.kernel, mutant.dtype, mutant.file, mutant.flag,
                 mutant.kind == OUT_OF_BOUNDS): mutant for mutant in mutants}
        for way, wrong in zip(ways, pool.map(lambda mutant: try_mutant(mutant,
                                                                       False), ways.values())):
            if wrong:
                sys.exit(f"{' '.join(way[:4])} fails as it is, so its mutants say nothing: {wrong}")
        for mutant, wrong in zip(mutants, pool.map(try_mutant, mutants)):
            result = "killed  " if wrong else "SURVIVED"
            print(f"{result} {title(mutant)}\n         {wrong or ''}".rstrip(), flush=True)
            survivors += [mutant] * (not wrong)
    print(f"{len(mutants)} mutants, {len(survivors)} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    run_main(main)
