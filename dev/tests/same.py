"""Do two commits compute the same numbers, bit by bit?

    python -m dev.tests.same HEAD~1 .            # a commit and the working tree: all cases
    python -m dev.tests.same main . --quick      # some of them, in three minutes on two cores
    python -m dev.tests.same main . --only fp8   # those whose name matches this regular expression
    python -m dev.tests.same main . --code       # only the machine code of kernels

Each case trains a small model for a few steps, first with OLD, then with NEW. It compares the
printed losses and norms, main.log, samples, and every file in -o: checkpoints and state files byte
by byte, naming the first tensor and number that differ, and run_*.json field by field. NEW resumes
OLD's checkpoints, and must end with the same bytes as OLD. Other printed words may differ.

Both trees are copied to the same folder, one after the other, so that they share compiled kernels
and cuBLASLt's choices. --keep FOLDER keeps the runs there.
"""
import argparse
import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from dev.common.cache import cache_folder
from dev.tests.same_cases import CASES, USUAL, data_files
from dev.tests.same_code import compare_code, texts
from dev.tests.same_compare import compare

TOP = Path(__file__).resolve().parents[2]
PROGRAMS = {"gpt2": "train_gpt2", "llama": "dev.llama3.train_llama3"}
# -ffp-contract=off: else the compiler may fuse a product and a sum in one tree and not in the
# other.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
               "CXXFLAGS": "-O1 -ffp-contract=off",
               "CUDA_ON_CPU_ORDER": "forward",  # --device cpu then runs kernels.cu, not its loops
               "TRAIN_GPT2_WAIT": "120", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "PYTHONDONTWRITEBYTECODE": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}

# ---- Running one tree


@contextlib.contextmanager
def place_for_trees():
    """A folder for the trees that no other same.py uses now. The first is best: its kernels are
    compiled already."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    for i in itertools.count():
        with open(cache / f"same_lock{i or ''}", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield cache / f"same_tree{i or ''}"
            return


def copy(tree, place):
    """Copy a tree's code: a folder, or a commit."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if not os.path.isdir(tree):
        archive = subprocess.run(["git", "archive", tree], cwd=TOP, check=True, stdout=-1).stdout
        subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
        return
    shutil.copytree(Path(tree) / "dev", place / "dev",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*Path(tree).glob("*.py"), *Path(tree).glob("*.cu")):
        shutil.copy(path, place)


def command(case, device, flags, ranks, more):
    """The command line of a run in the case's folder."""
    words = [sys.executable, "-m", PROGRAMS[case.model.split("_")[0]], "--device", device]
    if case.usual:
        words += ["-e", f"../../data/{case.model}.bin", *USUAL.split()]
    words += [*case.flags.split(), *flags.split(), *more]
    if ranks > 1 and device == "cpu":
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        words = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *words]
    return words + ["--gpus", str(ranks)] * (ranks > 1 and device == "cuda")


def run_case(case, device, place, side, olds):
    """Run a case with the tree in the folder `place`. Its runs are written under `side`, and resume
    those under `olds`. Returns the seconds it took."""
    folder, begun, statuses = side / case.folder, time.monotonic(), []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(place)}
    environment["CXXFLAGS"] += f" {case.cxx}"
    every = int(re.findall(r"-n (\d+)", f"{USUAL} {case.flags}")[-1])
    for i, (flags, ranks) in enumerate([("", case.ranks), *case.then]):
        more = ["-o", f"run{i}"] * case.usual
        if i:
            more += ["-y", "1"]
            shutil.copytree(olds / case.folder / f"run{i - 1}", folder / f"run{i}")
            for path in (folder / f"run{i}").iterdir():  # as if it had been killed before these
                found = re.match(r"[a-zA-Z]+_(\d{8})", path.name)
                if found and int(found[1]) > i * every:
                    path.unlink()
        with open(folder / f"out{i}.txt", "w") as out, open(folder / f"err{i}.txt", "w") as err:
            try:
                statuses.append(subprocess.run(
                    command(case, device, flags, ranks, more), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=err, env=environment, cwd=folder, timeout=900).returncode)
            except subprocess.TimeoutExpired:
                statuses.append(124)
        if statuses[-1]:
            break
    (folder / "case.json").write_text(json.dumps(dict(statuses=statuses)))
    return time.monotonic() - begun


# ---- The program


def run_tree(tree, place, cases, device, side, olds, jobs):
    """Copy a tree, and run the cases with it. Yields the seconds of each."""
    copy(tree, place)
    locks, warm = {}, set()

    def work(case):
        """Run a case; alone if it compiles what others use, or on a GPU chooses a dtype's
        algorithms."""
        dtype, moments = (re.findall(rf"{flag} (\S+)", case.flags)[-1:]
                          for flag in ("--dtype", "--moments"))
        kind = (*dtype,) if device == "cuda" else (case.model.split("_")[0], *dtype, *moments,
                                                   case.cxx)
        alone = kind not in warm or device == "cuda" and side == olds
        with locks.setdefault(kind, threading.Lock()) if alone else contextlib.nullcontext():
            seconds = run_case(case, device, place, side, olds)
        warm.add(kind)
        return seconds

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, cases)


def report(name, found, count, seconds=0.0):
    """Print the line of a case. Returns whether it differs, or None if it was skipped."""
    result = {True: "DIFFERS", False: "same   ", None: "skipped"}[
        differs := None if found is None else bool(found)]
    rest = f"{count:4} compared {seconds:6.1f} s"
    if found is None:
        rest = "set TIKTOKEN_CACHE_DIR: see the README"
    elif found:
        rest = "; ".join(found[:4]) + f"; and {len(found) - 4} more" * (len(found) > 4)
    print(f"{result}  {name:28} {rest}", flush=True)
    return differs


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="a commit, or a folder: . for the working tree")
    parser.add_argument("new")
    parser.add_argument("--quick", action="store_true", help="only some of the cases")
    parser.add_argument("--only", default="",
                        help="cases whose name has this, a regular expression")
    parser.add_argument("--code", action="store_true", help="only the machine code")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--jobs", type=int,
                        help="cases at a time (default: 2 on a CPU, 6 on a GPU)")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    flags = parser.parse_args()
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    gpus = listed.count("UUID: GPU")
    device = flags.device or ("cuda" if gpus else "cpu")
    cases = [case for case in CASES if (case.quick or not flags.quick) and not flags.code
             and re.search(flags.only, case.name) and case.needs in ("", device)
             and max(case.ranks, *(ranks for _, ranks in case.then), 1) <=
             (gpus if device == "cuda" else 3)]
    results, jobs = [], flags.jobs or (2 if device == "cpu" else 6)
    begun = time.monotonic()
    with place_for_trees() as place, tempfile.TemporaryDirectory() as temporary:
        work = (flags.keep or Path(temporary)).resolve()
        olds, news = work / "old", work / "new"
        data_files(work / "data")
        for _ in run_tree(flags.old, place, cases, device, olds, olds, jobs):
            pass
        old_texts = texts(place)
        print(f"OLD took {time.monotonic() - begun:.0f} s for {len(cases)} cases", flush=True)
        again = run_tree(flags.new, place, cases, device, news, olds, jobs)
        for seconds, case in zip(again, cases):
            results.append(report(case.name, *compare(case, olds, news), seconds))
        new_texts = texts(place)
    if flags.code or not (flags.only or flags.quick):
        results += [report(*row) for row in compare_code(old_texts, new_texts, jobs)]
    passed, failed = (results.count(kind) for kind in (False, True))
    print(f"{passed} passed, {failed} failed, in {time.monotonic() - begun:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
