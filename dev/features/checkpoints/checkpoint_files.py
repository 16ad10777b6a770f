"""The files of checkpoints in a folder: their names, which checkpoints are complete or
damaged, and how old ones are removed.
"""
import re
import shlex

from dev.common.config import read_parameters
from dev.common.files import check_kind
from dev.features.checkpoints.run_json import read_notes
from dev.features.checkpoints.state_file import Damage, finite, finite_sets, read_states
from train_gpt2 import UserError

# In the order in which they are written
FILES = {"model": "model_{:08d}.bin", "state": "state_{:08d}_{:05d}.bin", "run": "run_{:08d}.json",
         "DONE": "DONE_{:08d}"}


def steps_of(folder, pattern):
    """The steps, in order, in the names of a folder's files that match a regular expression."""
    found = (re.fullmatch(pattern, path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


class CheckpointFiles:
    """Checkpoints in the folder `path`, of models of a Config `kind`, trained with Flags of a
    `table` by a program with these features. of_a_run: a pattern of names of files that are never
    overwritten; left: of those that a kill leaves behind."""

    def __init__(self, path, kind, table, features):
        self.path, self.kind, self.table, self.features = path, kind, [*table], [*features]
        logs = r"(main\.log|log\.jsonl)"
        words = "|".join(word for feature in features for word in feature.saved + feature.outlasts)
        self.of_a_run = re.compile(rf"{logs}(\.old)?|({words})_\d{{8}}(_\d{{5}})?(\.\w+)?")
        self.outlasting = re.compile("|".join(rf"{word}_\d{{8}}.*" for feature in features
                                              for word in feature.outlasts) or "(?!)")
        left = [feature.left for feature in features if feature.left]
        self.left = re.compile("|".join([rf"({logs}.*|({words})_\d{{8}}.*)\.[0-9a-f]+\.tmp",
                                         *left]))

    def file(self, name, step, rank=0):
        return self.path / FILES[name].format(step, rank)

    def steps(self):
        """The steps of complete checkpoints, which have a DONE file, in order."""
        return steps_of(self.path, r"DONE_(\d{8})")

    def check(self, step, numbers=False):
        """Raise UserError unless a checkpoint's files are there and have their sizes; numbers: and
        are finite."""
        for path in (self.file(name, step) for name in ("model", "state")):
            if not path.exists():
                raise Damage(f"{self.file('DONE', step)}: is there, and {path.name} is not: "
                             "restore that")
        model = self.file("model", step)
        check_kind(model, self.kind.FILE)
        c = self.kind.from_file(model)
        states = read_states(lambda rank: self.file("state", step, rank), c)
        if states[0].step != step:
            raise Damage(f"{states[0].path}: of step {states[0].step}; expected {step}, as its "
                         "name says")
        read_notes(self.file("run", step), self.table, self.features)
        if numbers:
            for tensors in (self.parameters(step, c), *finite_sets(states, c)):
                for _ in tensors:
                    pass

    def parameters(self, step, c):
        """(name, values) of a checkpoint's parameters. Raises Damage at a number that is not
        finite."""
        path = self.file("model", step)
        return finite(path, "the parameter", read_parameters(path, c))

    def older(self, step):
        """The end of an error about a damaged checkpoint, the newest: which older one to use."""
        damaged = [step]
        for other in reversed(self.steps()):
            if other >= step:
                continue
            try:
                self.check(other, numbers=True)
            except UserError:
                damaged.append(other)
                continue
            command = shlex.join(["rm", *(str(self.file("DONE", each)) for each in damaged)])
            return (f"; the checkpoint of step {other} is whole: after `{command}`, -y 1 goes on "
                    "from that")
        return "; there is no older checkpoint that is whole"

    def remove(self, step):
        """Remove a checkpoint, DONE first."""
        for name in reversed(FILES.values()):
            pattern = name.format(step, 0).replace("_00000.bin", "_?????.bin")
            pattern = pattern.replace("model_", "*_")  # and what features write, such as ema_*.bin
            for path in sorted(self.path.glob(pattern)):
                # run_00000000.json stays: the run needs it to resume without a checkpoint
                stays = path == self.file("run", 0) or self.outlasting.fullmatch(path.name)
                if self.of_a_run.fullmatch(path.name) and not stays:
                    path.unlink(missing_ok=True)

    def remove_leftovers(self):
        """Remove what a kill has left of files that were being written or removed."""
        for path in [*self.path.iterdir()]:
            state = re.fullmatch(r"state_(\d{8})_\d{5}\.bin", path.name)
            if self.left.fullmatch(path.name):
                path.unlink()
            elif state and not self.file("DONE", int(state[1])).exists():
                self.remove(int(state[1]))
