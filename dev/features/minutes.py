"""--minutes M: the run ends after M minutes of steps, and its rate falls with the time.

The schedules are those of -k, over as many steps as M minutes would have at the mean speed until
now: after a share of the minutes the rate is that after the same share of -x's steps. Validations,
samples and checkpoints do not count.

A machine is never as fast twice, so log.jsonl is the record: a run that resumes (-y 1) makes the
steps that stand there with the rates, and the milliseconds, that stand there, and ends with the
same bits. Steps after the record follow the clock. run_*.json has the milliseconds until its
checkpoint.
"""
import json

import numpy as np

from dev.features.checkpoints.json_log import JsonLog
from dev.features.checkpoints.resume import OF_RATE
from dev.features.feature import Feature, Flag, Pair, trains

MANY = 2**40  # more steps than any run makes


class ByTime:
    """Training that the clock ends."""
    milliseconds = 0.0  # of its steps so far
    planned = 0  # -x's steps, an estimate before the first
    recorded = {}  # {step, from 0: (its rate, its milliseconds)} of those that are made again

    def train(self):
        self.planned, self.steps = self.steps, MANY  # the loop reads this once
        super().train()

    def pause(self, done, batches):
        self.steps = self.steps_after(done)
        super().pause(done, batches)

    def learning_rate(self, step):
        rate = super().learning_rate(step)
        return np.float32(self.recorded[step][0]) if step in self.recorded else rate

    def over(self):
        """The share of the minutes that is over."""
        return self.milliseconds / (60000 * self.flags.minutes)

    def steps_after(self, done):
        """How many steps the run will have, as far as is known after `done`."""
        over = self.over()
        if over >= 1:
            return done
        return max(done + 1, round(done / over) if over else self.planned)

    def steps_take(self, done, mean):
        return max(0, 1 - self.over()) * 60 * self.flags.minutes

    def announce(self):
        super().announce()
        print(f"minutes      | {self.flags.minutes:g} (--minutes), after which the run ends, "
              "instead of -x's steps")

    def state(self, model):
        return super().state(model) | dict(milliseconds=self.milliseconds)

    def set_state(self, model, notes):
        super().set_state(model, notes)
        self.milliseconds = float(notes.get("milliseconds", 0))
        if self.milliseconds:  # otherwise -x's steps are the estimate
            self.steps = self.steps_after(notes.get("step", 0))


class Timekeeper:
    """Counts the time of steps, in milliseconds as in log.jsonl. A step that is made again has the
    time that it took first."""

    def stepped(self, run, step):
        if step.number - 1 in run.recorded:
            step.seconds = run.recorded[step.number - 1][1] / 1e3
        run.milliseconds += round(1e3 * step.seconds, 3)


class ByTimeAndKept:
    """Reads the record before the run's folder moves its lines away."""

    def make_model(self):
        record = recorded_steps(self.folder.path / JsonLog.NAME)
        model = super().make_model()
        before, now = (self.folder.notes or {}).get("flags", {}), self.settled()
        names = {*OF_RATE, "minutes"} - {"steps"}
        if all(before.get(name) == now[name] for name in names):  # otherwise it is another run's
            self.recorded = {step: row for step, row in record.items() if step >= model.step}
        return model


def recorded_steps(path):
    """{step, from 0: (rate, milliseconds)} of a log.jsonl."""
    found = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            found[row["step"] - 1] = float(row["lr"]), float(row["ms"])
        except (ValueError, LookupError, TypeError):  # a validation or a sample, or cut by a kill
            continue
    return found


FEATURE = Feature(
    "minutes", lambda flags, ranks: flags.minutes and trains(flags), training=ByTime,
    observer=Timekeeper, pairs=(Pair("runs", training=ByTimeAndKept),),
    excludes={"ranks": "--minutes: each rank has a clock of its own: expected one process, or -x"},
    flags=(Flag(None, "--minutes", "amount", 0.0, "M: end after M minutes of steps, instead of -x "
                "steps; the rate falls with the time; 0: -x steps", "how long, and what is shown",
                after="--steps", replayed=False),),
    state={"milliseconds": (lambda x: type(x) in (int, float) and x >= 0, "a number from 0")})
