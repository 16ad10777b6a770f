"""--best 1 keeps the weights of the lowest validation loss so far in -o, as best_SSSSSSSS.bin; S is
the number of steps. It is a checkpoint like model_*.bin: -e and --sample take it. --patience N
ends the training after N validations in a row without a new lowest loss, as after its last step:
with a sample, and the last weights. This is for small data sets, where the validation loss falls
and then rises again.

A new best file is written and renamed before the old one is removed. While a run goes on there may
be two: if it is killed, it resumes from a checkpoint, and the best of that time has to be there. So
that one stays until the next new best after the next checkpoint, or the run's end. -nk never
removes a best file.

Both judge the weights, as validations do. With --ema they do not judge the average, which -o has
beside each checkpoint: best_*.bin are weights, too. run_*.json has the lowest loss so far and the
number of validations since, so a resumed run (-y 1) goes on counting. All ranks have the same loss,
and rank 0 writes the file.
"""
import json
import math
import re

from dev.common.config import checkpoint_parts
from dev.features.checkpoints.checkpoint_files import FILES
from dev.features.feature import Feature, Flag, Pair, trains

FILE = "best_{:08d}.bin"
# best: the step of the lowest loss; waited: validations since; judged: the last one's step
FIELDS = dict(best=int, loss=float, waited=int, judged=int)


class Judged:
    """Training that knows its lowest validation loss, and may stop when it rises."""
    lowest = dict(best=-1, loss=math.inf, waited=0, judged=-1)

    def validate(self, done):
        loss, before = super().validate(done), self.lowest
        if done > before["judged"]:  # a resumed run validates once more where it stopped
            if loss < before["loss"]:
                self.lowest = dict(best=done, loss=loss, waited=0, judged=done)
                self.found_best(done, before)
            else:
                self.lowest = before | dict(waited=before["waited"] + 1, judged=done)
        return loss

    def found_best(self, done, before):
        """Called at a new lowest loss. before: what was known of the one before."""

    def gives_up(self):
        return 0 < (self.flags.patience or 0) <= self.lowest["waited"]

    def due(self, done, every):
        """As at the end, if this is the end."""
        return super().due(done, every) or every > 0 and self.gives_up()

    def saves(self, done):
        return super().saves(done) or self.gives_up()

    def ends(self, done):
        return super().ends(done) or self.gives_up()

    def pause(self, done, batches):
        super().pause(done, batches)
        if self.gives_up() and done < self.steps:
            lowest = self.lowest
            self.say(f"stopped after {done} of {self.steps} steps: the lowest val loss is "
                     f"{lowest['loss']:.6f} after step {lowest['best']}, and {lowest['waited']} "
                     "validations since were not below it (--patience)")


class JudgedAndKept:
    """The best weights in a run's folder."""
    writing = False  # whether a best file is being written

    def validate(self, done):
        if self.writing:  # the lowest loss is known when it is done, or has failed
            self.folder.writer.wait()
        return super().validate(done)

    def state(self, model):
        return super().state(model) | dict(lowest=self.lowest if self.lowest["best"] >= 0 else None)

    def set_state(self, model, notes):
        super().set_state(model, notes)
        lowest = notes.get("lowest") or self.lowest
        path = self.folder.path / FILE.format(max(0, lowest["best"]))
        if self.flags.best and lowest["best"] >= 0 and not path.exists():
            self.say(f"WARNING: {path} is not there: the lowest val loss counts from here (--best)")
        else:
            self.lowest = lowest

    def found_best(self, done, before):
        super().found_best(done, before)
        if not self.flags.best or self.rank:
            return
        folder, model = self.folder, self.model
        folder.prepare(self, model)
        views, real = self.weights(model)[FILES["model"]]
        path = folder.path / FILE.format(done)

        def finish(failure):
            self.writing = False
            if failure:
                self.lowest = before  # so that a later one is written
                folder.news.append(f"WARNING: no {path.name}: {failure}")
            else:
                folder.news.append(f"wrote {path}, of the lowest val loss")
                self.remove_worse()

        folder.writer.wait()  # for a checkpoint
        self.writing = True
        folder.writer.save({path: checkpoint_parts(model.config, views, real)}, finish)

    def remove_worse(self, done=False):
        """Remove best files but for the newest, and for that of the newest checkpoint unless the
        run is done."""
        folder, stay = self.folder, {self.lowest["best"]}
        for step in [] if done else folder.steps()[-1:]:
            noted = json.loads(folder.file("run", step).read_bytes()).get("lowest")
            stay.add(noted and noted["best"])
        for path in folder.path.glob("best_*.bin"):
            match = re.fullmatch(r"best_(\d{8})\.bin", path.name)
            if match and int(match[1]) not in stay:
                path.unlink(missing_ok=True)

    def train(self):
        super().train()  # waits for the writer
        newest = self.folder.path / FILE.format(self.lowest["best"])
        if self.flags.best and not self.rank and newest.exists():
            self.remove_worse(done=True)


def is_lowest(x):
    """Whether this is what run_*.json has: FIELDS, or None before the first validation."""
    return x is None or isinstance(x, dict) and x.keys() == FIELDS.keys() and all(
        type(x[name]) in (kind, int) for name, kind in FIELDS.items())


def refuses(flags):
    name = "--best" if flags.best else "--patience" if flags.patience else ""
    for flag, value in (("-v", flags.val_every), ("-m", flags.val_batches)):
        if name and value == 0:
            return (f"{name}: is judged by validations, and {flag} 0 makes none: expected another "
                    f"{flag}")
    return ""


FEATURE = Feature(
    "best", lambda flags, ranks: (flags.best or flags.patience) and trains(flags), training=Judged,
    pairs=(Pair("runs", training=JudgedAndKept),), flags=(
        Flag(None, "--best", "switch", 0, "1: keep the weights of the lowest validation loss in -o "
             "as best_*.bin", "checkpoints and resuming", after="--resume", needs="output",
             replayed=False, may_differ=True),
        Flag(None, "--patience", "count or 0", 0, "stop after N validations in a row without a "
             "new lowest loss; 0: never", "how long, and what is shown", after="--val-batches",
             replayed=False, may_differ=True)),
    outlasts=("best",), refuses=refuses,
    state={"lowest": (is_lowest, f"null, or the numbers {', '.join(FIELDS)}")})
