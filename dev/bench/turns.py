"""What does a change save? Time the steps of several versions of the trainer, in turns.

    python -m dev.bench.turns HEAD~1 .                             # a commit, and the working tree
    python -m dev.bench.turns . ". --dtype fp8" -- -e d12 -b 32    # flags of one, and of all

GPUs of the same model differ by several percent, and each gets slower as it warms up. So this
alternates between runs of the versions, on one GPU. A version is a commit, a folder with a copy of
this repository, or . for the working tree. It may be followed by flags of its own; flags for all
versions come after --. Each run is a process of its own: 40 steps (or -x), on random tokens that
are distributed like words. A run's time is the median of the last two thirds of its steps. A
version's time is the median of its runs, and its factor is that time divided by the first
version's. All versions share the cache of cuBLASLt's algorithms, so equal products use the same
one.
"""
import io
import os
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dev.bench.benchmark import write_words
from dev.common.flags import parse_flags, split_versions
from dev.common.program import run_main
from train_gpt2 import UserError

TOP = Path(__file__).resolve().parents[2]
FLAGS = [(None, "--rounds", "count", 3, "runs of each version")]


def unpack(version, folder):
    """The path of a version's tree. A commit is unpacked into this folder. Raises UserError."""
    if version == ".":
        return TOP
    if (Path(version) / "train_gpt2.py").exists():
        return Path(version).resolve()
    try:
        done = subprocess.run(["git", "-C", TOP, "archive", version], capture_output=True)
    except FileNotFoundError:
        raise UserError(f"{version}: a commit needs git, which is not installed: give folders "
                        "instead") from None
    if done.returncode:
        raise UserError(f"{version}: expected a commit, a folder with train_gpt2.py, or . for the "
                        f"working tree: {done.stderr.decode().strip()}")
    to = Path(tempfile.mkdtemp(dir=folder))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # before Python 3.11.4 there are no filters, which keep files within the folder
        archive.extractall(to, **(dict(filter="data") if hasattr(tarfile, "data_filter") else {}))
    return to


def time_run(top, flags):
    """(ms of a step, the last loss) of a run of the trainer in a folder. Raises UserError."""
    done = subprocess.run([sys.executable, top / "train_gpt2.py", *flags], capture_output=True,
                          text=True)
    steps = re.findall(r"^step .*\| loss (\S+) .*\| +([\d.]+) ms", done.stdout, re.M)
    if done.returncode or not steps:
        raise UserError(f"train_gpt2.py {shlex.join(flags)}: expected steps, found status "
                        f"{done.returncode}:\n{done.stderr.strip() or done.stdout.strip()}")
    return statistics.median(float(ms) for _, ms in steps[len(steps) // 3 :]), steps[-1][0]


def main(arguments=None):
    """Everything from the flags to the table. Raises UserError."""
    names, own, shared = split_versions(arguments, FLAGS)
    rounds = parse_flags(__doc__, FLAGS, own).rounds
    try:
        versions = [(name, flags) for name, *flags in map(shlex.split, names)]
    except ValueError as e:
        raise UserError(f"{names}: expected commits, folders or ., with flags: {e}") from None
    if not versions:
        raise UserError("no version is given: expected commits, folders or .; --help says more")
    with tempfile.TemporaryDirectory() as folder:
        tokens = os.path.join(folder, "tokens.bin")
        write_words(tokens, 2**21 + 1)
        tops, found = [unpack(name, folder) for name, _ in versions], [[] for _ in versions]
        for i in range(rounds):
            for top, (name, flags), runs in zip(tops, versions, found):
                common = f"-x 40 -v 0 -s 0 -i {tokens} -j {tokens}".split()
                runs.append(time_run(top, [*common, *shared, *flags]))
                print(f"round {i + 1} of {rounds}: {shlex.join([name, *flags])}: "
                      f"{runs[-1][0]:.2f} ms", file=sys.stderr)
    medians = [statistics.median(ms for ms, _ in runs) for runs in found]
    print(f"\n| `{shlex.join(shared)}` | ms | factor | runs | last loss |\n"
          "| --- | ---: | ---: | --- | ---: |")
    for version, runs, ms in zip(names, found, medians):
        times, losses = [f"{ms:.2f}" for ms, _ in runs], sorted({loss for _, loss in runs})
        print(f"| {version} | {ms:.3f} | {ms / medians[0]:.4f} | {', '.join(times)} | "
              f"{', '.join(losses)} |")


if __name__ == "__main__":
    run_main(main)
