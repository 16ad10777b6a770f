"""Verify a run with --exact 1: make its steps again on this machine, and compare their hashes.

    python -m dev.tools.verify out                         # all steps of out/log.jsonl
    python -m dev.tools.verify out --from 100 --to 109     # from the checkpoint before step 100
    python -m dev.tools.verify out -- --device emulated    # behind -- are the trainer's flags

It reads log.jsonl, and of the newest checkpoint before the first step run_*.json, model_*, state_*
and DONE_*, or else run_00000000.json. A hash that differs gives the step, its parts give the
tensors, and the run's checkpoint of that step, if there is one, the number. To find the kernel,
trace the step on both machines: the first writes a hash of each array that a kernel writes, the
other compares:

    python -m dev.tools.verify out --from 57 --trace 57.npz             # on both
    python -m dev.tools.verify out --from 57 --trace 57.npz --line 41   # line 41 with its numbers
"""
import contextlib
import io
import json
import tempfile
from itertools import zip_longest
from pathlib import Path

import numpy as np

from dev.common.config import read_parameters
from dev.common.flags import argument, parse_flags, split_versions
from dev.common.program import run_main
from dev.features import order
from dev.features.base import GPT2
from dev.features.checkpoints.checkpoint_files import FILES, steps_of
from dev.features.exact.exact import hash_of, parts_of, pieces_of
from dev.features.replay import Watch
from train_gpt2 import UserError, replace_file

FLAGS = [
    (None, "run", argument("RUN"), None, "the folder of a run with --exact 1 (its -o)"),
    (None, "--from", "count", 1, "the first step to verify"),
    (None, "--to", "count", None, "the last (default: the last of log.jsonl)"),
    (None, "--trace", "name", None, "a file of what kernels write in step --from: written, or, if "
     "it is there, compared with"),
    (None, "--line", "count or 0", -1, "of the trace: its numbers, too"),
]


class Trace(Watch):
    """Notes each array that a kernel or a product writes: [text, hash]."""

    def __init__(self, model, line):
        super().__init__(model)
        self.line, self.lines, self.numbers = line, [], np.zeros(0, np.float32)

    def look(self, array, writer):
        values = self.model.device.get(array)
        if len(self.lines) == self.line:
            self.numbers = values
        self.lines.append([f"{writer} in {self.part or 'the update'} wrote {self.name_of(array)}",
                           hash_of(values.tobytes())])


class Replayed:
    """Training that makes the steps of a run's rows again. Raises UserError at the first other
    one."""

    def ends(self, done):
        return super().ends(done) or done >= self.last

    def learning_rate(self, step):
        rate, noted = super().learning_rate(step), np.float32(self.rows[step + 1]["lr"])
        if rate != noted and not self.flags.minutes:
            raise UserError(f"step {step + 1} differs: its learning rate is {noted} in log.jsonl, "
                            f"and the run's flags give {rate}")
        if self.model and step + 1 == self.traced:  # -y 1 compares rates before there is a model
            for name in ("activations", "backward"):  # unwritten ends of arrays must hash alike
                self.device.zero(self.model.arenas[name])
            self.trace = Trace(self.model, self.line).__enter__()
        return noted

    def train(self):
        start = self.model.step
        self.model.sum_bits()  # the state has brought the weights
        if start and (differ := self.differing(start)):
            raise UserError(f"the checkpoint of step {start} has other weights than log.jsonl's: "
                            f"{differ}; verify from an earlier step")
        super().train()

    def report(self, step, verdict):
        super().report(step, verdict)
        number, row = step.number, self.rows[step.number]
        if not self.traced and step.noted["hash"] != row["hash"]:
            loss = (f"{verdict.loss:.9g} here, {row['loss']} there"
                    if verdict.loss != np.float32(row["loss"]) else "the same")
            raise UserError(f"step {number} differs: the loss is {loss}; after it "
                            f"{self.differing(number)}; {self.first_number(number)}")

    def differing(self, step):
        """Which parameters' bits are not those of log.jsonl, or ""."""
        parts = parts_of(self.device.get(self.model.adam.sums)).split()
        rows = zip(pieces_of(self.config), parts, self.rows[step]["parts"].split())
        names = [name if l is None else f"{name} of layer {l}"
                 for (name, l, _), here, there in rows if here != there]
        return f"{len(names)} parameters differ: {', '.join(names[:5])}" if names else ""

    def first_number(self, step):
        """The first number that differs from the run's checkpoint of this step."""
        path = self.run_folder / FILES["model"].format(step)
        for name, values in read_parameters(path, self.config) if path.exists() else ():
            place = first_difference(self.device.get(getattr(self.model.params, name)), values)
            if place:
                return f"first {name}{place} in {path.name}"
        return f"--from {step} --trace FILE, here and where the run was made, finds the kernel"


def first_difference(here, there):
    """"[2, 3], of 1 of 9 numbers that differ: 0.5 here, 0.25 there" of two arrays, or ""."""
    bad = here.view(np.uint32) != there.view(np.uint32)
    at = np.unravel_index(int(bad.argmax()), here.shape)
    return (f"[{', '.join(map(str, at))}], of {bad.sum()} of {bad.size} numbers that differ: "
            f"{here[at]:.9g} here, {there[at]:.9g} there") if bad.any() else ""


def rows_of(run):
    """{step: its row} of a run's log.jsonl. Raises UserError if it has no hashes."""
    path, rows = run / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # cut by a kill
            rows.append(json.loads(line))
    rows = {row["step"]: row for row in rows if "hash" in row}
    if not rows:
        raise UserError(f"{path}: has no hashes; expected the log of a run with --exact 1 and -o")
    return rows


def resumed(run, first, folder, arguments):
    """(a Training that goes on from the run's newest checkpoint before step `first`, in a folder of
    links, how many steps it has made)."""
    start = max((step for step in steps_of(run, r"DONE_(\d{8})") if step < first), default=0)
    for path in run.glob(f"*_{start:08d}*" if start else FILES["run"].format(0)):
        (folder / path.name).symlink_to(path.resolve())
    flags, table = order.read_flags(["-y", "1", "-n", "0", "-v", "0", "-s", "0", "--graph", "0",
                                     "-o", str(folder), *arguments], GPT2)
    return order.make_training(flags, table, GPT2, front=(Replayed,)), start


def compared(path, trace, step):
    """Write the trace of a step to a file, or compare it with that of the file. Returns a line, or
    raises UserError."""
    if not path.exists():
        file = io.BytesIO()
        np.savez(file, lines=trace.lines, line=trace.line, numbers=trace.numbers)
        replace_file(path, [file.getvalue()])
        return f"wrote {path}: {len(trace.lines)} arrays that the kernels of step {step} wrote"
    with np.load(path) as file:
        lines, line, numbers = file["lines"].tolist(), file["line"], file["numbers"]
    for i, (here, there) in enumerate(zip_longest(trace.lines, lines, fillvalue=("nothing", ""))):
        if here != there:
            place = (first_difference(trace.numbers, numbers) if line == trace.line == i else
                     f"; a trace with --line {i}, here and there, shows its numbers")
            raise UserError(f"step {step} differs: first in line {i} of {len(lines)}, "
                            f"{here[0]}{place}")
    return f"step {step}: all {len(lines)} arrays that its kernels wrote are the same"


def main(arguments=None):
    """Everything from the flags to the verdict. Raises UserError."""
    names, others, more = split_versions(arguments, FLAGS)
    flags = parse_flags(__doc__, FLAGS, [*names, *others])
    if flags.line >= 0 and not flags.trace:
        raise UserError(f"--line {flags.line}: expected --trace FILE, too")
    run, first = Path(flags.run), vars(flags)["from"]
    rows = rows_of(run)
    last = first if flags.trace else flags.to or max(rows)
    if first > last or not rows.keys() >= {*range(first, last + 1)}:
        raise UserError(f"--from {first} --to {last}: expected steps that log.jsonl has, up to "
                        f"{max(rows)}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        training, start = resumed(run, first, Path(folder), more)
        training.rows, training.last, training.run_folder = rows, last, run
        training.line, training.traced = flags.line, flags.trace and first
        training.run()
    print(compared(Path(flags.trace), training.trace, first) if flags.trace else
          f"steps {start + 1} to {last} verified on {training.device}: the same {last - start} "
          f"hashes, the last {rows[last]['hash']}")


if __name__ == "__main__":
    run_main(main)
