"""Do two commits compute the same numbers, bit by bit?

    python -m dev.tests.same HEAD~1 .            # a commit and the working tree: all cases
    python -m dev.tests.same main . --only fp8   # those whose name matches this regular expression
    python -m dev.tests.same main . --code       # only the code of kernels, which NVRTC compiles

Each case trains a small model for a few steps, first with OLD, then with NEW. It compares the
printed losses and norms, main.log, samples, and every file in -o: checkpoints and state files byte
by byte, naming the first tensor and number that differ, and run_*.json field by field. NEW resumes
OLD's checkpoints, and must end with the same bytes as OLD. Other printed words may differ. Both
share compiled kernels and cuBLASLt's choices.
"""
import collections
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dev.bench.turns import unpack
from dev.common.flags import parse_flags, split_names
from dev.common.program import run_main
from dev.tests.jobs import MPI, MPIRUN
from dev.tests.same_cases import CASES, USUAL, data_files
from dev.tests.same_compare import compare, compare_code
from dev.tests.trainings import without
from train_gpt2 import UserError

PROGRAMS = {"gpt2": "train_gpt2", "llama": "dev.llama3.train_llama3"}
# -ffp-contract=off: else the compiler may fuse a product and a sum in one tree and not in the
# other. With an order --device cpu runs kernels.cu, not its loops.
ENVIRONMENT = MPI | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                     "CXXFLAGS": "-O1 -ffp-contract=off", "CUDA_ON_CPU_ORDER": "forward",
                     "TRAIN_GPT2_WAIT": "120", "PYTHONDONTWRITEBYTECODE": "1"}
FLAGS = [(None, "--only", "name", "", "cases whose name has this, a regular expression"),
         (None, "--code", "switch", 0, "only the code of kernels"),
         (None, "--device", ("cpu", "cuda"), None, "default: cuda if there is a GPU"),
         (None, "--jobs", "count", None, "cases at a time (default: 2 on a CPU, 6 on a GPU)")]


def command(case, device, flags, ranks, more):
    """The command line of a run in the case's folder."""
    words = [sys.executable, "-m", PROGRAMS[case.model.split("_")[0]], "--device", device]
    if case.usual:
        words += ["-e", f"../../data/{case.model}.bin", *USUAL.split()]
    words += [*case.flags.split(), *flags.split(), *more]
    if ranks > 1 and device == "cpu":
        words = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *words]
    return words + ["--gpus", str(ranks)] * (ranks > 1 and device == "cuda")


def run_case(case, device, tree, side, olds):
    """Run a case with a tree. Its runs are written under `side`, and resume those under `olds`.
    Returns (exit statuses, the seconds it took)."""
    folder, begun, statuses = side / case.name, time.monotonic(), []
    folder.mkdir(parents=True)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree)}
    environment["CXXFLAGS"] += f" {case.cxx}"
    every = int(re.findall(r"-n (\d+)", f"{USUAL} {case.flags}")[-1])
    for i, (flags, ranks) in enumerate([("", case.ranks), *case.then]):
        more = ["-o", f"run{i}"] * case.usual
        if i:  # as if it had been killed before later steps
            more += ["-y", "1"]
            without(olds / case.name / f"run{i - 1}", folder / f"run{i}",
                    *range(i * every + 1, 150))
        with open(folder / f"out{i}.txt", "w") as out:
            statuses.append(subprocess.run(
                command(case, device, flags, ranks, more), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=environment, cwd=folder).returncode)
        if statuses[-1]:
            break
    return statuses, time.monotonic() - begun


def dtype_of(case):
    return re.findall(r"--dtype (\S+)", f"{USUAL} {case.flags}")[-1]


def report(name, found, count, seconds=0.0):
    """Print the line of a case. Returns whether it differs."""
    rest = f"{count:4} compared {seconds:6.1f} s"
    if found:
        rest = "; ".join(found[:4]) + f"; and {len(found) - 4} more" * (len(found) > 4)
    print(f"{'DIFFERS' if found else 'same   '}  {name:28} {rest}", flush=True)
    return bool(found)


def main(arguments=None):
    names, own = split_names(sys.argv[1:] if arguments is None else arguments, FLAGS)
    flags, begun, results = parse_flags(__doc__, FLAGS, own), time.monotonic(), []
    if len(names) != 2:
        raise UserError(f"{' '.join(names) or 'nothing'}: expected OLD and NEW, each a commit, a "
                        "folder, or . for the working tree")
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    gpus = listed.count("UUID: GPU")
    device = flags.device or ("cuda" if gpus else "cpu")
    jobs = flags.jobs or (2 if device == "cpu" else 6)
    cases = [case for case in CASES if not flags.code
             and re.search(flags.only, case.name) and case.needs in ("", device)
             and max(case.ranks, *(ranks for _, ranks in case.then), 1) <=
             (gpus if device == "cuda" else 3)]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(
            jobs) as pool:
        old, new = (unpack(name, folder) for name in names)
        olds, news = (Path(folder) / side for side in ("old", "new"))
        data_files(Path(folder) / "data")
        # Of a dtype one at a time, since the first compiles what the next ones use, and on a GPU
        # chooses their algorithms
        of_dtype = lambda dtype: {case.name: run_case(case, device, old, olds, olds)
                                  for case in cases if dtype_of(case) == dtype}
        before = dict(collections.ChainMap(*pool.map(of_dtype, {*map(dtype_of, cases)})))
        print(f"OLD took {time.monotonic() - begun:.0f} s for {len(cases)} cases", flush=True)
        again = pool.map(lambda case: run_case(case, device, new, news, olds), cases)
        for case, (ended, seconds) in zip(cases, again):
            found = compare(case, (olds, news), (before[case.name][0], ended))
            results.append(report(case.name, *found, seconds))
        if flags.code or not flags.only:
            results += [report(*row) for row in compare_code(old, new, jobs)]
    passed, failed = (results.count(kind) for kind in (False, True))
    print(f"{passed} passed, {failed} failed, in {time.monotonic() - begun:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    run_main(main)
