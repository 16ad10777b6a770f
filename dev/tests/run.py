"""Run the tests.

    python -m dev.tests.run                    # all programs of tests, two at a time, as CI does
    python -m dev.tests.run plot recipes       # those of them with one of these words in their names
    python -m dev.tests.run --fast             # what can be said within a minute, on two cores, after a change
    python -m dev.tests.run --fast schedules   # of that, the tests with this word in their names, with all they say

Both run on the CPU, and end with a line `N passed, N failed`. The exit status is 1 if any failed.

--full, the default, runs PROGRAMS, each a process, with one thread each, since two of them share the cores. It prints
the last line of each that passes, and all that a program printed if it fails.

--fast runs functions of the same files, by name, in two processes: see its tables, WITHOUT_KERNELS and WITH_KERNELS.
Kernels are compiled once, for the fixture's model in fp32. It prints what fails, and the ten that took longest.
"""
import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

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


# ---- The fast ones

MODEL = "fp32", 64, 2  # all that --fast compiles kernels for: dtype, C and NH of dev/fixtures/gpt2_tiny.bin
FOLDER, DEVICE = "a folder of its own", "the CPU, compiled for MODEL"  # arguments that stand for these


class Fast(NamedTuple):
    file: str
    tests: str  # names of functions, with blanks between them
    arguments: tuple = ()
    prepare: str = ""  # a function of the same file that fills FOLDER first


WITHOUT_KERNELS = (  # while another process compiles the kernels
    Fast("dev.tests.run", "lint counting"),
    Fast("dev.tests.test_budgets", "budgets counting"),
    # Formulas, and numbers
    Fast("test_gpt2", "finite_differences rounding two_halves numpy_beside_pytorch"),
    Fast("dev.tests.test_llama3", "finite_differences"),
    # Schedules, files, refusals, of the trainer and of the programs around it
    Fast("dev.tests.test_files", "bad_files packed_batches first_parameters schedules samples numpy_program "
         "random_numbers token_order limits steps_of_a_graph "
         "late_reports top_level_files tensor_maps_of_a_gpu", ("cpu", FOLDER)),
    Fast("dev.tests.test_llama3", "sizes bad_files", ("cpu", FOLDER)),
    Fast("dev.tests.test_convert", "round_trips other_types one_file configs refusals replaced_files", (FOLDER,)),
    Fast("dev.tests.test_hf_tokenizer", "tokenizers", (FOLDER,)),
    Fast("dev.tests.test_prepro", "files refusals", (FOLDER,)),
    Fast("dev.tests.test_benchmark", "tables"),
    Fast("dev.tests.test_benchmark", "jobs llmc", (FOLDER,)),
    Fast("dev.tests.test_convert_llama3", "round_trips other_types configs refusals", (FOLDER,)),
    Fast("dev.tests.test_tokens", "test_tokens"),
    Fast("dev.tests.test_data", "tables local_shards refusals", (FOLDER,)),
    Fast("dev.tests.test_hellaswag", "good_files bad_files rules", (FOLDER,)),
    Fast("dev.tests.test_sample", "formula windows characters"),
    Fast("dev.tests.test_recipes", "sizes nodes", (FOLDER,)),
    Fast("dev.tests.test_plot", "logs tokens_and_speed numbers reference_lines sparklines panels", (FOLDER,)),
    Fast("dev.tests.test_meeting", "what_launchers_say"),
    Fast("dev.tests.test_meeting", "strangers impostors", (FOLDER,)),
    Fast("dev.tests.test_lab", "judging inputs"),
    Fast("dev.tests.test_lab", "written", (FOLDER,)),
    Fast("dev.tests.test_exercise", "on_gpu standings", (FOLDER,)),
)
WITH_KERNELS = (
    Fast("dev.tests.run", "kernels", (DEVICE,)),
    Fast("test_gpt2", "matmul", (DEVICE, 27, 96, 288)),
    Fast("test_gpt2", "forward_pass", (DEVICE, *MODEL[1:])),
    Fast("dev.tests.run", "pytorch_dump", (DEVICE,)),
    Fast("dev.tests.test_files", "micro_batches accumulated_steps repeated_steps clipped_gradients other_ways "
         "computed_again moments_in_bf16 smaller_batches next_logits", (DEVICE,)),
    Fast("dev.tests.test_files", "profiler_ranges models_too_large faults_of_a_gpu", ("cpu", FOLDER)),
    Fast("dev.tests.test_outliers", "z_scores", ("cpu",)),
    Fast("dev.tests.test_sample", "as_the_trainer"),
    # The program: three steps, a resume, and a refusal of each kind
    Fast("dev.tests.run", "three_steps_and_a_resume refusals", (FOLDER,)),
    Fast("dev.tests.test_runs", "overfitted_batch", ("cpu", FOLDER), "token_files"),
)


def counting():
    """What a program's last lines and exit status count as."""
    from test_gpt2 import check
    for text, status, wish in (("OK x\n12 passed, 3 failed\n", 1, (12, 3)), ("12 passed, 0 failed\n", 0, (12, 0)),
                               ("3 passed, 0 failed\n4 passed, 0 failed\n", 1, (4, 1)),
                               ("12 checks, 2 wrong", 1, (10, 2)), ("Killed", 137, (0, 1)), ("fine\n", 0, (1, 0)),
                               ("I say 5 passed, 0 failed", 1, (0, 1))):
        check(f"{text!r} and status {status}", counts_in(text, status) == wish, counts_in(text, status))
    found = all_programs()
    check("each program is there, once", len({*found}) == len(found) and all(
        (TOP / f"{program.replace('.', '/')}.py").exists() for program in found if program[:4] != "lab "), found)


def lint():
    """ruff finds nothing."""
    from test_gpt2 import check
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not ruff:
        print("skipped: ruff is not installed")
        return
    done = subprocess.run([ruff, "check", "--no-cache", "--config", ".ruff.toml", "."], cwd=TOP, text=True,
                          capture_output=True)
    check("ruff", done.returncode == 0, (done.stdout + done.stderr) * done.returncode)


def kernels(device):
    """The kernels that are compiled for no size, and so with any model's."""
    import test_gpt2
    from dev.lab.kernel import find_kernel
    names = [name for name in test_gpt2.KERNELS if not find_kernel(name).compiled_for]
    test_gpt2.test_kernels("cpu", device.dtype, names=names, models=(MODEL[1:],))


def pytorch_dump(device):
    """Logits, loss, gradients and ten losses of the fixture, as PyTorch computed them."""
    import test_gpt2
    state = test_gpt2.FIXTURES / "gpt2_tiny_debug_state.bin"
    where = "cpu", device.dtype, True, test_gpt2.GPT2
    test_gpt2.test_dump(where, test_gpt2.FIXTURES / "gpt2_tiny.bin", state, fp32_bound=1e-5)


def train(*flags):
    """(what a training prints, the message of its UserError or ""). It runs in this process, which saves its start."""
    import train_gpt2
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            train_gpt2.main(["--device", "cpu", "--dtype", MODEL[0], *map(str, flags)])
        except train_gpt2.UserError as e:
            return said.getvalue(), str(e)
    return said.getvalue(), ""


def three_steps_and_a_resume(folder):
    """Three steps print three losses and leave a checkpoint. A run that stops after three steps and resumes ends in the
    bytes of one of six."""
    from dev.tests.test_runs import bytes_of, command, same, token_files
    from test_gpt2 import check
    token_files(folder)
    flags = command("cpu", folder, folder / "six", "-x", 6, "-n", 3, "-s", 0)[5:]
    text, error = train(*flags)
    losses = re.findall(r"^step +\d+/6 \| loss (\S+) ", text, re.M)
    check("six steps", not error and len(losses) == 6 and all(0 < float(loss) < 7 for loss in losses), error or losses)
    shutil.copytree(folder / "six", folder / "three")
    for path in (folder / "three").glob("*_00000006*"):
        path.unlink()
    train(*flags, "-o", folder / "three", "-y", 1)
    same(bytes_of(folder / "three", 6), bytes_of(folder / "six", 6), "six steps, resumed after three")


def refusals(folder):
    """One of each kind: a flag, a value, flags that exclude each other, files, sizes, a folder, a loss."""
    from dev.tests.test_runs import command, token_files
    from test_gpt2 import check
    token_files(folder)
    (folder / "noise.bin").write_bytes(bytes(2000))
    flags = command("cpu", folder, folder / "out", "-x", 2)[5:]
    _, error = train(*flags)
    check("what is not refused", not error, error)
    flags = [*flags, "-o", folder / "other"]
    for wish, *more in (("--nonsense", "--nonsense"), ("--batch-size.* 0: ", "-b", 0), ("1.5", "-t", 1.5),
                        ("--clip.* nan: ", "--clip", "nan"), ("--moments.*'fp16'", "--moments", "fp16"),
                        ("-d 24: expected a multiple of .*B.T = 16", "-d", 24),
                        ("maxT = 40", "-t", 41, "-d", 82),
                        ("nonsense", "-e", "nonsense"), ("absent.bin", "-j", folder / "absent.bin"),
                        ("noise.bin", "-i", folder / "noise.bin"), ("noise.bin", "-e", folder / "noise.bin"),
                        ("--top-k: expected --sample too", "--top-k", 3), ("expected --device cuda", "--nvtx", 1),
                        ("--dtype fp8 --plain 1: ", "--dtype", "fp8", "--plain", 1),
                        ("holds an earlier run", "-o", folder / "out"),
                        ("-x 1: expected 2 or more", "-o", folder / "out", "-y", 1, "-x", 1),
                        ("the loss of step 2 is", "-l", "1e30")):
        _, error = train(*flags, *more)
        check(f"refused: {wish}", re.search(wish, error) and "\n" not in error, error or "it was accepted")


class Result(NamedTuple):
    name: str
    seconds: float
    passed: int
    failed: int
    text: str  # what it printed


def run_test(file, name, arguments, prepare):
    """In a process of the pool: run a test. A test that needs a package that is not installed is skipped."""
    begun, said = time.monotonic(), io.StringIO()
    title, here = f"{file}: {name}", os.getcwd()
    try:
        import test_gpt2
        before = dict(test_gpt2.counts)
        with contextlib.redirect_stdout(said), tempfile.TemporaryDirectory() as folder:
            module = importlib.import_module(file)
            if prepare:
                getattr(module, prepare)(Path(folder))
            given = [Path(folder).resolve() if argument == FOLDER else
                     test_gpt2.device_of("cpu", *MODEL) if argument == DEVICE else argument for argument in arguments]
            test_gpt2.run(f"{name.replace('_', ' ')}:", getattr(module, name), *given)
        passed, failed = (test_gpt2.counts[ok] - before[ok] for ok in (True, False))
    except ModuleNotFoundError as e:
        said.write(f"skipped: {e.name} is not installed\n")
        passed = failed = 0
    finally:
        os.chdir(here)
    return Result(title, time.monotonic() - begun, passed, failed, said.getvalue())


def compile_kernels():
    import test_gpt2
    begun, said = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(said):
        test_gpt2.device_of("cpu", *MODEL)
    return Result("kernels.cu, compiled", time.monotonic() - begun, 0, 0, "")


def with_word(name, words):
    """Whether a name has one of the words, or there are none."""
    return not words or any(word in name for word in words)


def fast(words):
    """Run the fast tests, or those of them with one of these words in their names. Returns the exit status."""
    first, second = ([(row.file, name, row.arguments, row.prepare) for row in table for name in row.tests.split()
                      if with_word(f"{row.file}: {name}", words)] for table in (WITHOUT_KERNELS, WITH_KERNELS))
    if not first + second:
        sys.exit(f"error: {' '.join(words)}: expected words in the names of tests, such as schedules")
    import test_gpt2  # noqa: F401  (which both processes then have)
    begun, results = time.monotonic(), []
    with ProcessPoolExecutor(2) as pool:
        compiled = pool.submit(compile_kernels) if second else None
        jobs = [pool.submit(run_test, *job) for job in first]
        if compiled:
            results.append(compiled.result())
        jobs += [pool.submit(run_test, *job) for job in second]
        for job in as_completed(jobs):
            result = job.result()
            results.append(result)
            wrong = [line for line in result.text.splitlines() if line.startswith(("FAIL", "skipped"))]
            if words or wrong:
                print("\n".join([f"== {result.name}", *([result.text.rstrip()] if words else wrong)]), flush=True)
    print(f"\n{len(jobs)} tests in {time.monotonic() - begun:.0f} s; the slowest:")
    for result in sorted(results, key=lambda result: -result.seconds)[:10]:
        print(f"{result.seconds:7.1f} s  {result.name}")
    return summary(sum(result.passed for result in results), sum(result.failed for result in results))


def main():
    parser = argparse.ArgumentParser(description="Run the tests.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--full", action="store_true", help="all programs of tests, two at a time (the default)")
    kinds.add_argument("--fast", action="store_true", help="what can be said within a minute")
    parser.add_argument("words", nargs="*", help="only what has one of these in its name")
    flags = parser.parse_args()
    if flags.fast:
        return fast(flags.words)
    programs = [program for program in all_programs() if with_word(program, flags.words)]
    if not programs:
        sys.exit(f"error: {' '.join(flags.words)}: expected words in these: {', '.join(all_programs())}")
    return full(programs)


if __name__ == "__main__":
    sys.modules["dev.tests.run"] = sys.modules["__main__"]  # not another copy of it, for its own tests
    sys.exit(main())
