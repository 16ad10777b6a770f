"""Verify a run with --exact 1: make its steps again on this machine, and compare their hashes.

    python -m dev.tools.verify out                          # all steps that out/log.jsonl has
    python -m dev.tools.verify out --from 100 --to 109      # from the checkpoint before step 100
    python -m dev.tools.verify out --device emulated        # through kernels.cu itself, on a CPU

It reads log.jsonl, and the newest checkpoint before the first step: run_*.json, model_*, state_*
and DONE_*, or run_00000000.json alone. Arguments behind -- go to the trainer, such as -i, if the
tokens lie elsewhere.

A hash that differs says in which step, and its parts in which tensors; the run's checkpoint of that
step, in which number. Which kernel made it is found by two machines, the run's and another. Each
hashes all that each kernel of the step writes:

    python -m dev.tools.verify out --trace 57                       # writes out/trace_00000057.npz
    python -m dev.tools.verify out --trace 57 --against that.npz    # the first kernel that differs
    python -m dev.tools.verify out --trace 57 --line 41             # with the numbers of line 41
"""
import contextlib
import hashlib
import io
import json
import tempfile
from pathlib import Path

import numpy as np

from dev.common.config import read_parameters
from dev.common.flags import argument, parse_flags, split_versions
from dev.common.program import run_main
from dev.features import order
from dev.features.base import GPT2
from dev.features.checkpoints.checkpoint_files import FILES, steps_of
from dev.features.devices import ON_CPU
from dev.features.exact.exact import pieces_of
from dev.features.replay import Watch
from train_gpt2 import UserError, replace_file

FLAGS = [
    (None, "run", argument("RUN"), None, "the folder of a run with --exact 1 (its -o)"),
    (None, "--from", "count", 1, "the first step to verify"),
    (None, "--to", "count", None, "the last (default: the last of log.jsonl)"),
    (None, "--device", ("cuda", *ON_CPU), None, "where to compute (default: as the trainer)"),
    (None, "--trace", "count", None, "write down a hash of all that kernels of this step write"),
    (None, "--against", "name", None, "a trace of the same step, to compare with"),
    (None, "--line", "count or 0", -1, "of the trace: keep its numbers too"),
]


class Differs(UserError):
    """A step is not that of the log, or of a trace."""

    def __init__(self, step, how):
        super().__init__(f"step {step} differs: {how}")


class Trace(Watch):
    """Notes each array that a kernel or a product writes: (text, hash)."""

    def __init__(self, model, line):
        super().__init__(model)
        self.line, self.lines, self.numbers = line, [], np.zeros(0, np.float32)

    def look(self, array, writer):
        values = self.model.device.get(array)
        if len(self.lines) == self.line:
            self.numbers = values
        self.lines.append((f"{writer} in {self.part or 'the update'} wrote {self.name_of(array)}",
                           hashlib.sha256(values.tobytes()).hexdigest()))


class Replayed:
    """Training that makes the steps of a run's rows again. Raises Differs at the first other
    one."""

    def ends(self, done):
        return super().ends(done) or done >= self.last

    def saves(self, done):
        return False

    def learning_rate(self, step):
        rate, lr = super().learning_rate(step), np.float32(self.rows[step + 1]["lr"])
        if rate != lr and not self.flags.minutes:
            raise Differs(step + 1, f"its learning rate is {lr} in log.jsonl, and the run's flags "
                          f"give {rate}")
        return lr

    def make_model(self):
        model = super().make_model()
        self.trace, step = Trace(model, self.line), model.train_step

        def traced(*batches, **settings):
            with self.trace if model.step + 1 == self.traced else contextlib.nullcontext():
                step(*batches, **settings)

        model.train_step = traced
        for name in ("activations", "backward"):  # a kernel leaves the end of a larger array alone
            model.device.zero(model.arenas[name])
        return model

    def report(self, step, verdict):
        super().report(step, verdict)
        row, pieces = self.rows[step.number], pieces_of(self.config)
        if self.traced or step.noted["hash"] == row["hash"]:
            return
        here, there = (np.array([*parts["parts"]]).reshape(-1, 4) for parts in (step.noted, row))
        names = [f"{name} of layer {l}" if l is not None else name
                 for (name, l, _), bad in zip(pieces, (here != there).any(axis=1)) if bad]
        loss = f"is {verdict.loss:.9g} here and {row['loss']} in log.jsonl"
        raise Differs(step.number, f"the loss "
                      f"{'is the same' if verdict.loss == np.float32(row['loss']) else loss}; "
                      f"{len(names)} of {len(pieces)} parameters differ after it: "
                      f"{', '.join(names[:5])}; {self.first_number(step.number)}")

    def first_number(self, step):
        """The first number that differs from the run's checkpoint of this step."""
        path = self.run_folder / FILES["model"].format(step)
        for name, values in read_parameters(path, self.config) if path.exists() else ():
            place = first_difference(self.device.get(getattr(self.model.params, name)), values)
            if place:
                return f"first {name}{place} in {path.name}"
        return f"--trace {step}, here and where the run was made, finds the kernel"


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
    for path in run.glob(f"*_{start:08d}*"):
        if start or path.name.startswith("run_"):
            (folder / path.name).symlink_to(path.resolve())
    if not any(folder.iterdir()):
        raise UserError(f"{run / FILES['run'].format(start)}: is not there; expected the run's "
                        "flags, with which a replay begins")
    flags, table = order.read_flags([*"-y 1 -n 0 -v 0 -s 0 --graph 0 -o".split(), str(folder),
                                     *arguments], GPT2)
    return order.make_training(flags, table, GPT2, front=(Replayed,)), start


def compared(flags, trace):
    """Write the trace of a step to the run's folder, or compare it. Returns a line, or raises
    Differs."""
    step, path = flags.trace, Path(flags.run) / f"trace_{flags.trace:08d}.npz"
    if not flags.against:
        file = io.BytesIO()
        np.savez(file, lines=trace.lines, line=flags.line, numbers=trace.numbers)
        replace_file(path, [file.getvalue()])
        return f"wrote {path}: hashes of {len(trace.lines)} arrays that its kernels wrote"
    with np.load(flags.against) as file:
        lines, line, numbers = file["lines"].tolist(), file["line"], file["numbers"]
    for i, (here, there) in enumerate(zip(trace.lines, lines)):
        if [*here] != there:
            place = (first_difference(trace.numbers, numbers) if line == flags.line == i else
                     f"; --line {i}, here and there, shows its numbers")
            raise Differs(step, f"the first array is line {i} of {len(lines)}: {here[0]}{place}")
    return f"step {step}: all {len(lines)} arrays that its kernels wrote are the same"


def main(arguments=None):
    """Everything from the flags to the verdict. Raises UserError."""
    names, others, more = split_versions(arguments, FLAGS)
    flags = parse_flags(__doc__, FLAGS, [*names, *others])
    run = Path(flags.run)
    rows, first = rows_of(run), flags.trace or vars(flags)["from"]
    last = flags.trace or flags.to or max(rows)
    if missing := [step for step in range(first, last + 1) if step not in rows] or first > last:
        raise UserError(f"--from {first} --to {last}: expected steps that log.jsonl has, up to "
                        f"{max(rows)}; it lacks {missing}")
    more += ["--device", flags.device] if flags.device else []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        training, start = resumed(run, first, Path(folder), more)
        training.rows, training.last, training.run_folder = rows, last, run
        training.line, training.traced = flags.line, flags.trace
        training.run()
    print(compared(flags, training.trace) if flags.trace else
          f"steps {start + 1} to {last} verified on {training.device}: the same {last - start} "
          f"hashes, the last {rows[last]['hash']}")


if __name__ == "__main__":
    run_main(main)
