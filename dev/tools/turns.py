"""What does a change save? Time the steps of several versions of the trainer by turns.

    python -m dev.tools.turns HEAD~1 .                             # a commit, and the working tree
    python -m dev.tools.turns . ". --dtype fp8" -- -e d12 -b 32    # flags of a version, and behind -- those of all

GPUs of one kind differ by several percent, and one differs from itself as it gets warm. So versions are compared by
runs that follow each other, more than once. A version is a commit, `.`, or a folder that holds a tree of this
repository, with flags of its own. Each run is a process of its own, with 40 steps unless -x says otherwise, on random
tokens that are distributed as words are. Its time is the median of its last two thirds of steps, and a version's is the
median of its runs. The factor is that time divided by the first version's. Products that are the same in two versions
get the same algorithm of cuBLASLt, from one cache.
"""
import argparse
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

from dev.tools.benchmark import write_words
from prepro_tinyshakespeare import UserError, run
from train_gpt2 import number

TOP = Path(__file__).resolve().parents[2]


def unpack(version, folder):
    """The folder of a version: a tree that is there, as the working tree is for ".", or a new one in this folder, with
    a commit's files. Raises UserError."""
    if version == ".":
        return TOP
    if (Path(version) / "train_gpt2.py").exists():
        return Path(version).resolve()
    try:
        done = subprocess.run(["git", "-C", TOP, "archive", version], capture_output=True)
    except FileNotFoundError:
        raise UserError(f"{version}: a commit needs git, which is not installed: give folders, or flags of . alone"
                        ) from None
    if done.returncode:
        raise UserError(f"{version}: expected a commit, a folder with train_gpt2.py, or . for the working tree: "
                        f"{done.stderr.decode().strip()}")
    to = Path(tempfile.mkdtemp(dir=folder))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(to, filter="data")
    return to


def time_run(top, flags):
    """(ms of a step, the last loss) of a run of the trainer in a folder. Raises UserError."""
    done = subprocess.run([sys.executable, top / "train_gpt2.py", *flags], capture_output=True, text=True)
    steps = re.findall(r"^step .*\| loss (\S+) .*\| +([\d.]+) ms", done.stdout, re.M)
    if done.returncode or not steps:
        raise UserError(f"train_gpt2.py {shlex.join(flags)}: expected steps, and found status {done.returncode}:\n"
                        f"{done.stderr.strip() or done.stdout.strip()}")
    return statistics.median(float(ms) for _, ms in steps[len(steps) // 3 :]), steps[-1][0]


def main(arguments=None):
    """Everything from the flags to the table. Raises UserError."""
    arguments = sys.argv[1:] if arguments is None else arguments
    own, shared = arguments, []
    if "--" in arguments:
        own, shared = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [-h] [--rounds N] VERSION ... [-- FLAG ...]")
    parser.add_argument("versions", nargs="+", metavar="VERSION",
                        help='a commit, a folder or ., with flags: ". --dtype fp8"')
    parser.add_argument("--rounds", type=number(int, 1), default=3, help="runs of each (default: 3)")
    given = parser.parse_args(own)
    try:
        versions = [(name, flags) for name, *flags in map(shlex.split, given.versions)]
    except ValueError as e:
        raise UserError(f"{given.versions}: expected commits, folders or ., with flags: {e}") from None
    with tempfile.TemporaryDirectory() as folder:
        tokens = os.path.join(folder, "tokens.bin")
        write_words(tokens, 2**21 + 1)
        tops, found = [unpack(name, folder) for name, _ in versions], [[] for _ in versions]
        for i in range(given.rounds):
            for top, (name, flags), runs in zip(tops, versions, found):
                runs.append(time_run(top, [*f"-x 40 -v 0 -s 0 -i {tokens} -j {tokens}".split(), *shared, *flags]))
                print(f"round {i + 1} of {given.rounds}: {shlex.join([name, *flags])}: {runs[-1][0]:.2f} ms",
                      file=sys.stderr)
    medians = [statistics.median(ms for ms, _ in runs) for runs in found]
    print(f"\n| `{shlex.join(shared)}` | ms | factor | runs | last loss |\n| --- | ---: | ---: | --- | ---: |")
    for version, runs, ms in zip(given.versions, found, medians):
        print(f"| {version} | {ms:.3f} | {ms / medians[0]:.4f} | {', '.join(f'{ms:.2f}' for ms, _ in runs)} | "
              f"{', '.join(sorted({loss for _, loss in runs}))} |")


if __name__ == "__main__":
    run(main)
