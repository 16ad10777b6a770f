"""What does a change save? Time the steps of several versions of the trainer by turns.

    python dev/turns.py HEAD~1 .                             # a commit, and the working tree
    python dev/turns.py . ". --dtype fp8" -- -e d12 -b 32    # flags of a version, and behind -- those of all

GPUs of one kind differ by several percent, and one differs from itself as it gets warm. So a version is compared with
another by runs that follow each other, more than once. A version is a commit, or `.`, and its flags. Each run is a
process of its own, on random tokens that are distributed as words are. Its time is the median of its last two thirds of
steps. A version's is the median of its runs, and the factor is that of the first version's. All choose cuBLASLt's
algorithms from one cache, so that what differs is not the choice.
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

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))
from dev.benchmark import write_words  # noqa: E402
from prepro_tinyshakespeare import UserError, run  # noqa: E402


def unpack(version, folder):
    """The folder of a version: the working tree for ".", else a commit's files, in this folder. Raises UserError."""
    if version == ".":
        return TOP
    done = subprocess.run(["git", "-C", TOP, "archive", version], capture_output=True)
    if done.returncode:
        raise UserError(f"{version}: expected a commit, or . for the working tree: {done.stderr.decode().strip()}")
    to = Path(folder, re.sub(r"\W", "_", version))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(to, filter="data")
    return to


def time_run(top, flags):
    """(ms of a step, the last loss) of a run of the trainer in a folder. Raises UserError."""
    done = subprocess.run([sys.executable, "train_gpt2.py", *flags], cwd=top, capture_output=True, text=True)
    steps = re.findall(r"^step .*\| loss (\S+) .*\| +([\d.]+) ms", done.stdout, re.M)
    if done.returncode or not steps:
        raise UserError(f"train_gpt2.py {shlex.join(flags)} in {top} ended with status {done.returncode}:\n"
                        f"{done.stderr.strip()}")
    return statistics.median(float(ms) for _, ms in steps[len(steps) // 3 :]), steps[-1][0]


def main(arguments=None):
    """Everything from the flags to the table. Raises UserError."""
    arguments = sys.argv[1:] if arguments is None else arguments
    own, shared = arguments, []
    if "--" in arguments:
        own, shared = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help='a commit or ., with flags: ". --dtype fp8"')
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    given = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        tokens = os.path.join(folder, "tokens.bin")
        write_words(tokens, 2**21 + 1)
        found = {}  # {version: [(ms, loss), ...]}
        tops = {version: unpack(shlex.split(version)[0], folder) for version in given.versions}
        for i in range(given.rounds):
            for version, top in tops.items():
                flags = [*f"-x 40 -v 0 -s 0 -i {tokens} -j {tokens}".split(), *shared, *shlex.split(version)[1:]]
                found.setdefault(version, []).append(time_run(top, flags))
                print(f"round {i + 1} of {given.rounds}: {version}: {found[version][-1][0]:.2f} ms", file=sys.stderr)
    first = None
    print(f"\n| `{shlex.join(shared)}` | ms | factor | runs | last loss |\n| --- | ---: | ---: | --- | ---: |")
    for version, runs in found.items():
        ms, losses = statistics.median(ms for ms, _ in runs), sorted({loss for _, loss in runs})
        first = first or ms
        print(f"| {version} | {ms:.3f} | {ms / first:.4f} | {', '.join(f'{ms:.2f}' for ms, _ in runs)} | "
              f"{', '.join(losses)} |")


if __name__ == "__main__":
    run(main)
