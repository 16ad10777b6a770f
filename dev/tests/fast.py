"""The fast tests: functions from all test files, by name, and a few of their own, in two processes.

Kernels are compiled once, for the fixture's model in fp32. `python -m dev.tests.run --fast` runs this.
"""
import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from dev.features.seams import GPT2
from dev.lab.ladder import find_ladder
from dev.tests import checks, models, trainings
from dev.tests.checks import TOP, check
from dev.tests.run import all_programs, counts_in
from dev.tests.trainings import bytes_of, call, command, same, token_files

MODEL = "fp32", 64, 2  # all that --fast compiles kernels for: dtype, C and NH of dev/fixtures/gpt2_tiny.bin
DEVICE = "the CPU, compiled for MODEL"  # as an argument, it stands for that device


class Fast(NamedTuple):
    module: str
    tests: str  # names of functions, separated by spaces
    arguments: tuple = None  # default: those that a test's parameters name
    prepare: str = ""  # a function in trainings.py that fills a test's folder first


WITHOUT_KERNELS = (  # while another process compiles the kernels
    Fast("dev.tests.fast", "lint counting"),
    Fast("dev.tests.test_budgets", "budgets counting"),
    # Formulas, and numbers
    Fast("test_gpt2", "finite_differences rounding two_halves numpy_beside_pytorch"),
    Fast("dev.tests.test_llama3", "finite_differences"),
    # Schedules, files and refusals, of the trainer and of the programs around it
    Fast("dev.tests.test_files", "bad_files packed_batches first_parameters schedules samples numpy_program "
         "random_numbers token_order limits"),
    Fast("dev.tests.test_gpu", "steps_of_a_graph late_reports tensor_maps_of_a_gpu files_of_a_run"),
    Fast("dev.tests.test_command_line", "top_level_files"),
    Fast("dev.tests.test_llama3", "sizes bad_files"),
    Fast("dev.tests.test_convert", "round_trips other_types one_file configs refusals replaced_files"),
    Fast("dev.tests.test_convert_llama3", "round_trips other_types configs refusals"),
    Fast("dev.tests.test_hf_tokenizer", "tokenizers"),
    Fast("dev.tests.test_prepro", "files refusals"),
    Fast("dev.tests.test_benchmark", "tables jobs llmc"),
    Fast("dev.tests.test_tokens", "words_and_ids files refusals"),
    Fast("dev.tests.test_fineweb", "tables local_shards refusals"),
    Fast("dev.tests.test_same", "files runs"),
    Fast("dev.tests.test_hellaswag", "good_files bad_files rules"),
    Fast("dev.tests.test_sample", "formula windows characters"),
    Fast("dev.tests.test_recipes", "sizes nodes"),
    Fast("dev.tests.test_plot", "logs tokens_and_speed numbers reference_lines sparklines panels"),
    Fast("dev.tests.test_meeting", "what_launchers_say strangers impostors"),
    Fast("dev.lab.tests.test_lab", "judging inputs written"),
    Fast("dev.lab.tests.test_progress", "lists what_is_kept goals_of_figures hints on_gpu standings leaderboards "
         "refusals"),
    Fast("dev.lab.tests.test_judge", "sizes launches order"),
)
WITH_KERNELS = (
    Fast("dev.tests.fast", "kernels pytorch_dump", (DEVICE,)),
    Fast("test_gpt2", "matmul", (DEVICE, 27, 96, 288)),
    Fast("test_gpt2", "forward_pass", (DEVICE, *MODEL[1:])),
    Fast("dev.tests.steps", "micro_batches accumulated_steps repeated_steps clipped_gradients other_ways "
         "computed_again moments_in_bf16 smaller_batches next_logits", (DEVICE,)),
    Fast("dev.tests.test_gpu", "profiler_ranges models_too_large faults_of_a_gpu"),
    Fast("dev.tests.test_outliers", "z_scores"),
    Fast("dev.tests.test_sample", "as_the_trainer"),
    # The program: three steps, a resume, and a refusal of each kind
    Fast("dev.tests.fast", "three_steps_and_a_resume refusals"),
    Fast("dev.tests.test_resume", "overfitted_batch", None, "token_files"),
)


def counting():
    """How a program's last lines and exit status are counted."""
    for text, status, wish in (("OK x\n12 passed, 3 failed\n", 1, (12, 3)), ("12 passed, 0 failed\n", 0, (12, 0)),
                               ("3 passed, 0 failed\n4 passed, 0 failed\n", 1, (4, 1)),
                               ("12 checks, 2 wrong", 1, (10, 2)), ("Killed", 137, (0, 1)), ("fine\n", 0, (1, 0)),
                               ("I say 5 passed, 0 failed", 1, (0, 1))):
        check(f"{text!r} and status {status}", counts_in(text, status) == wish, counts_in(text, status))
    found = all_programs()
    check("each program is there, once", len({*found}) == len(found) and all(
        importlib.util.find_spec(program.split()[0]) for program in found), found)


def lint():
    """ruff finds nothing."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not ruff:
        print("skipped: ruff is not installed")
        return
    done = subprocess.run([ruff, "check", "--no-cache", "--config", ".ruff.toml", "."], cwd=TOP, text=True,
                          capture_output=True)
    check("ruff", done.returncode == 0, (done.stdout + done.stderr) * done.returncode)


def kernels(device):
    """The kernels that do not depend on the model's sizes, and so are in every compiled library."""
    KERNELS = importlib.import_module("test_gpt2").KERNELS
    names = [name for name in KERNELS if not find_ladder(name).compiled_for]
    models.check_kernels("cpu", device.dtype, names, (MODEL[1:],))


def pytorch_dump(device):
    """Logits, loss, gradients and ten losses of the fixture, against PyTorch's."""
    state, where = checks.FIXTURES / "gpt2_tiny_debug_state.bin", ("cpu", device.dtype, True, GPT2)
    models.check_dump(where, checks.TINY, state, fp32_bound=1e-5)


def train(*flags):
    """Train in fp32. Returns the output and the line of the error."""
    return call("--device", "cpu", "--dtype", MODEL[0], *flags)[1:]


def three_steps_and_a_resume(folder):
    """Three steps print three losses and leave a checkpoint. A run that stops after three steps and resumes ends with
    the bytes of a run of six."""
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
    """One refusal of each kind: a flag, a value, flags that exclude each other, files, sizes, a folder, a loss."""
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
        check(f"refused: {wish}", re.fullmatch(f".*{wish}.*\n", error), error or "it was accepted")


class Result(NamedTuple):
    name: str
    seconds: float
    passed: int
    failed: int
    text: str  # what it printed


def run_test(module, name, arguments, prepare):
    """Run a test, in a process of the pool. If it needs a package that is not installed, it is skipped."""
    begun, said, before = time.monotonic(), io.StringIO(), dict(checks.counts)
    try:
        with contextlib.redirect_stdout(said):
            test = getattr(importlib.import_module(module), name)
            if arguments is None:
                checks.run_tests([test], prepare=prepare and getattr(trainings, prepare))
            else:
                given = [models.device_of("cpu", *MODEL) if argument == DEVICE else argument for argument in arguments]
                checks.run(f"{name.replace('_', ' ')}:", test, *given)
    except ModuleNotFoundError as e:
        said.write(f"skipped: {e.name} is not installed\n")
    passed, failed = (checks.counts[ok] - before[ok] for ok in (True, False))
    return Result(f"{module}: {name}", time.monotonic() - begun, passed, failed, said.getvalue())


def compile_kernels():
    begun = time.monotonic()
    with contextlib.redirect_stdout(None):
        models.device_of("cpu", *MODEL)
    return Result("kernels.cu, compiled", time.monotonic() - begun, 0, 0, "")


def fast(words, with_word, summary):
    """Run the fast tests, or those with one of these words in their names. Returns the exit status."""
    first, second = ([(row.module, name, row.arguments, row.prepare) for row in table for name in row.tests.split()
                      if with_word(f"{row.module}: {name}", words)] for table in (WITHOUT_KERNELS, WITH_KERNELS))
    if not first + second:
        sys.exit(f"error: {' '.join(words)}: expected words in the names of tests, such as schedules")
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
