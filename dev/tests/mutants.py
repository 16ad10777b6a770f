"""Do the tests of the kernels bite? Plant one fault at a time in a kernel, and see that its tests
fail.

    python -m dev.tests.mutants                     # all faults; the last line counts the survivors
    python -m dev.tests.mutants adamw               # those of one kernel, or of a file for Hopper
    python -m dev.tests.mutants --draw 6            # six, drawn by the commit: for CI
    python -m dev.tests.mutants --draw 6 --seed 1   # six others

A fault is a change of kernels.cu, of one of dev/'s .cu files, or of a file of the kernel lab: those
of mutant_table.py, and each barrier removed. It is made in a copy of the repository, where a check
has to fail: the lab's of one kernel on the CPU, until the first failure, of all of its versions for
a file of the lab, else of the trainer's; a test of dev/tests/test_fp8.py for FP8, of test_ranks.py
for bf16_sums.cu, of test_fused_biases.py for fused_biases.cu, of test_documents.py for those of
documents; or wrong() of the tests of kernels for Hopper, which a CPU emulates. A fault that is not
found has survived: its check needs a better problem. The unchanged kernel must pass.
"""
import argparse
import importlib
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

from dev.common.cache import cache_folder
from dev.common.cuda_source import without_comments
from dev.common.program import run_main
from dev.features.order import SOURCES
from dev.tests.checks import TOP
from dev.tests.mutant_table import (AS_HOPPER, BARRIERS, DOCUMENTS, FP8, FP8_OUTPUT, FUSED_TESTS,
                                    HOPPER, KERNELS, LLAMA, OUT_OF_BOUNDS, RACE, SIGHT, SUMS, TABLE,
                                    TILES, UNSEEN, Fault)
from train_gpt2 import UserError

LAB = "dev/lab/kernels"
# Files whose barriers are taken away in other files' tests, if at all.
OWN_TESTS = "hopper.cuh", "turns.cuh", "meet.cu"
FOR_HOPPER = {fault.kernel for fault in HOPPER}
BARRIER = re.compile(r"__sync(threads|warp)\(\);")
DEFINITION = re.compile(r"^(?:extern \"C\" )?(?:__global__|__device__)[^;{]*?(\w+)\(", re.M)


def barriers(every=False):
    """A Fault for each barrier in the .cu files that is not in UNSEEN, or for every one. `what` has
    the barrier's number in its function."""
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
                yield Fault(kernel, function, found[0], "", what=f"barrier {number}", dtype=dtype,
                            file=file)


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
    # A text with a comment is looked for in the comments, too.
    code, begin, end = text if "//" in mutant.old else code_of(text), 0, len(text)
    if mutant.where:
        name = mutant.where if "(" in mutant.where else f"{mutant.where}("
        begins = [found.start() for found in re.finditer(re.escape(name), code)]
        begin = next((at for at in begins if re.search("__(device|global)__",
                                                       code[code.rfind("\n", 0, at) : at])
                      # No call and no prototype.
                      and re.match(r"[^;{]*\{", code[at:])), min(begins, default=-1))
        end = code.find("\n}\n", begin)
    number = re.fullmatch(r"barrier (\d+)", mutant.what)
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


def check_here(name, dtype, how):
    """Check a kernel's versions, with how="trainer" only the trainer's; or, with how="hopper" or
    RACE, the kernels of a file for Hopper. Returns "", or what is wrong."""
    if how in ("hopper", RACE):
        return importlib.import_module(f"dev.tests.test_{name}").wrong(race=how == RACE)
    trainer_only = how == "trainer"
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
    return "" if checks else "nothing was checked"


# ---- The program


class Copy:
    """A copy of the repository's code, to mutate."""

    def __init__(self, folder):
        self.top = Path(folder)
        shutil.copytree(TOP / "dev", self.top / "dev", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*TOP.glob("*.py"), TOP / "pyproject.toml", TOP / KERNELS):
            shutil.copy(path, self.top)


def way_of(mutant):
    """How a fault is to be found: the program and its arguments, CXXFLAGS, and seconds. Some of
    those for Hopper hang. Faults that are found in the same way share one check of what is
    right."""
    kernel, dtype, file = mutant.kernel, mutant.dtype, mutant.file
    test = "test_fp8" if dtype == "fp8" else "test_ranks" if file == SUMS else (
        "test_documents" if file in (SIGHT, DOCUMENTS) else
        "test_fused_biases" if kernel in FUSED_TESTS else None)
    # -O1 compiles in half of the time.
    flags = "-O1 -fsanitize=address" if mutant.said == OUT_OF_BOUNDS else f"-O1 {mutant.flag}"
    if test:
        return ("pytest", f"dev/tests/{test}.py::test_{kernel}", "--device", "emulated"), flags, 600
    how = "all" if file.startswith(LAB) else "trainer"
    if kernel in FOR_HOPPER:
        how = RACE if mutant.said == RACE else "hopper"
    return (("dev.tests.mutants", kernel, "--check-here", dtype, how), flags,
            150 if how == "hopper" and not mutant.said else 900)


def wrong_by(way, top, own):
    """Check in this way in a copy of the repository, where kernels are compiled anew if it is a
    copy of its own. Returns "", or a line with what is wrong."""
    arguments, flags, seconds = way
    environment = os.environ | {"PYTHONPATH": str(top), "OMP_NUM_THREADS": "1",
                                "OPENBLAS_NUM_THREADS": "1", "CXXFLAGS": flags}
    if own:
        environment["XDG_CACHE_HOME"] = str(top / "cache")
        (top / "cache/train_gpt2").mkdir(parents=True)
        for path in cache_folder().glob("runtime_*.o"):  # no fault changes it
            (top / "cache/train_gpt2" / path.name).symlink_to(path)
    if "address" in flags:
        library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True,
                                 text=True).stdout
        environment |= {"LD_PRELOAD": library.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    try:
        done = subprocess.run([sys.executable, "-m", *arguments], env=environment, cwd=top,
                              capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds} s"
    if "could not compile" in done.stdout + done.stderr:
        sys.exit(f"a fault of {arguments[1]} does not "
                 f"compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    if "ERROR: AddressSanitizer" in done.stderr:
        return re.search("ERROR: AddressSanitizer.*", done.stderr)[0]
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return "" if done.returncode == 0 else last[0] if last else "failed"


def try_fault(mutant):
    """Plant a fault in a copy, and check. Returns (whether it was found, what is wrong)."""
    with tempfile.TemporaryDirectory() as folder:
        top = Copy(folder).top
        (top / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        wrong = wrong_by(way_of(mutant), top, True)
    if mutant.said in ("", OUT_OF_BOUNDS):
        return bool(wrong), wrong
    return (mutant.said in wrong if mutant.said in (RACE, "stuck") else mutant.said == wrong), wrong


def survivors(mutants):
    """Plant faults, each alone, and print what is found. Returns those that are not. Exits with a
    message if a check fails without a fault."""
    missed, ways = [], list(dict.fromkeys(map(way_of, mutants)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for way, wrong in zip(ways, pool.map(lambda way: wrong_by(way, TOP, False), ways)):
            if wrong:
                sys.exit(f"{' '.join(way[0])} fails as it is, so faults say nothing: {wrong}")
        for mutant, (found, wrong) in zip(mutants, pool.map(try_fault, mutants)):
            result = "killed  " if found else "SURVIVED"
            print(f"{result} {title(mutant)}\n         {wrong}".rstrip(), flush=True)
            missed += [mutant] * (not found)
    return missed


def title(mutant):
    what = mutant.what or mutant.said
    where = ", ".join(filter(None, (Path(mutant.file).name, mutant.flag, mutant.where, what)))
    change = f"{where}: {mutant.old} -> {mutant.new or 'nothing'}"
    return f"{mutant.kernel:28} {mutant.dtype} {' '.join(change.split())}"


def main():
    parser = argparse.ArgumentParser(description="Change kernels, and see that their tests fail.")
    parser.add_argument("kernel", nargs="?", help="only the mutants of this kernel of the lab")
    parser.add_argument("--draw", type=int, metavar="N", help="only N, drawn by the commit")
    parser.add_argument("--seed", help="draw by this, and not by the commit")
    parser.add_argument("--list", action="store_true", help="print them and do nothing")
    parser.add_argument("--check-here", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.check_here:
        wrong = check_here(flags.kernel, *flags.check_here)
        print(" ".join(wrong.split()) or "right")
        return 1 if wrong else 0
    mutants = [*TABLE, *barriers(), *HOPPER]
    for mutant in mutants:
        mutated(mutant)
    if flags.kernel:
        mutants = [mutant for mutant in mutants if mutant.kernel == flags.kernel]
        if not mutants:
            raise UserError(f"there is no mutant of a kernel {flags.kernel}; --list lists them all")
    if flags.draw:
        seed = flags.seed or subprocess.run(
            ["git", "-C", TOP, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        print(f"{flags.draw} of {len(mutants)} faults, drawn by {seed[:10]}")
        mutants = random.Random(seed).sample(mutants, min(flags.draw, len(mutants)))
    if flags.list:
        print("\n".join(map(title, mutants)))
        return 0
    began, missed = time.monotonic(), survivors(mutants)
    print(f"{len(mutants)} faults, {len(missed)} survived, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    run_main(main)
