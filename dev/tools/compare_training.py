"""Compare the training losses of two runs, by their main.log.

    python -m dev.tools.compare_training log_ours log_torch   # means of 50 steps, and the largest gap
    python -m dev.tools.compare_training log_ours log_torch --last 20

A run is given by its main.log or by the folder that holds it. Losses have four decimals there, so that two equal runs
may differ by 1e-4 in print. Only steps that both runs have made are compared.
"""
import re
import sys
from pathlib import Path

import numpy as np

from prepro_tinyshakespeare import UserError, run
from train_gpt2 import number, parse_flags

LINE = re.compile(r"s:(\d+) (tel|eval|trl):(\S+)(?: lr:(\S+) norm:(\S+))?")
FLAGS = [(None, "--last", number(int, 1), 50, "steps over which the means are taken")]


def read_log(path):
    """{"trl": {step: training loss}, "tel": {step: validation loss}, "eval": {step: accuracy}, "norm": {step: norm}} of
    a main.log, or of the one in a folder. A later line of a step wins, as after a resumed run. Raises UserError."""
    path = Path(path) / "main.log" if Path(path).is_dir() else Path(path)
    found = {"trl": {}, "tel": {}, "eval": {}, "norm": {}}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "it is no text"
        raise UserError(f"{path}: could not be read ({reason}); expected a main.log, which train_gpt2.py -o writes"
                        ) from None
    for i, line in enumerate(lines, 1):
        try:
            step, kind, value, _, norm = LINE.fullmatch(line).groups()
            found[kind][int(step)] = float(value)
            if norm:
                found["norm"][int(step)] = float(norm)
        except (AttributeError, ValueError):  # no match, or no number
            raise UserError(f"{path}: line {i} is {line[:60]!r}; expected lines such as s:0 trl:10.8522 lr:0.000300 "
                            "norm:5.78 of a main.log, which train_gpt2.py -o writes") from None
    return found


def compare(a, b, last):
    """Of two {step: loss}, both with steps in common: the mean over the last common steps of each, the largest
    difference at one step, and that step; how many steps are common. Raises UserError if none is."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise UserError("the two runs have no training step in common; give two main.log of runs that trained")
    one, other = np.array([[run[step] for step in steps] for run in (a, b)])
    worst = int(np.argmax(np.abs(one - other)))
    return one[-last:].mean(), other[-last:].mean(), abs(one - other)[worst], steps[worst], len(steps)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    paths = arguments[:2]
    if {"-h", "--help"} & {*arguments}:
        paths, arguments = [], ["", "", "--help"]
    elif len(paths) < 2 or any(path.startswith("-") for path in paths):
        raise UserError("expected two main.log, or their folders, before any flag: compare_training.py A B")
    flags = parse_flags(__doc__, FLAGS, arguments[2:])
    mean, other_mean, gap, step, common = compare(*(read_log(path)["trl"] for path in paths), flags.last)
    last = min(flags.last, common)
    print(f"mean over the last {last} of {common} steps: {mean:.4f} and {other_mean:.4f}, "
          f"a difference of {mean - other_mean:+.4f}")
    print(f"the largest difference at a step: {gap:.4f}, at step {step}")


if __name__ == "__main__":
    run(main)
