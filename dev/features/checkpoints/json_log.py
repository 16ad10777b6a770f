"""log.jsonl in -o, beside main.log: a line of JSON for each step, validation, score and sample,
with all that is known of it.

    {"step": 0, "time": 1764100000.12, "val_loss": 10.852234}
    {"step": 1, "time": 1764100000.17, "loss": 10.843712, "norm": 5.3127, "lr": 0.0003,
     "ms": 52.103, "tok_per_s": 1257823, "tokens": 65536}                         (on one line)
    {"step": 20, "time": 1764100001.43, "hellaswag": 0.2945}
    {"step": 20, "time": 1764100001.71, "sample": "First Citizen: ..."}

step counts the steps that are made, as on the terminal: the loss of line 1 is that of the first
step (s:0 in main.log), and a val_loss of step 20 is of the weights after 20 steps. time is in
seconds since 1970. A step whose update was skipped (-sl, -sg) also has "skipped": true. A number
that is not finite is null, and so is the loss of a step in which no target counts (--mask), which
main.log has as nan.

A line is written when it is known, and never changed. A run that resumes moves the lines of what it
does again to log.jsonl.old. pandas.read_json("log.jsonl", lines=True) reads the file.
"""
import json
import math
import time

import numpy as np

from dev.features.checkpoints.main_log import MainLog
from dev.features.checkpoints.training import KEPT
from dev.features.feature import Feature


class JsonLog(MainLog):
    """log.jsonl in a folder."""
    NAME, LINE = "log.jsonl", '{"step": 1, "loss": 10.8437}'

    def step_of(self, line):
        """As MainLog's, which counts steps from 0."""
        try:
            found = json.loads(line)
            step = found["step"] - ("loss" in found)
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return step if line.endswith(b"\n") and isinstance(step, int) else None


def shortest(value):
    """A number of fp32 with the digits that tell it from others; None if it is not finite."""
    return float(str(np.float32(value))) if math.isfinite(value) else None


class Noted:
    """Writes log.jsonl, and tells its lines."""

    def note(self, run, step, **values):
        """Write down what is known after this many steps."""
        if run.rank == 0:
            line = json.dumps(dict(step=step, time=round(time.time(), 3)) | values)
            run.folder.json_log.write(line)
            run.tell("noted", line)

    def stepped(self, run, step):
        verdict, total = step.verdict, run.total_batch
        skipped = {} if verdict.update else dict(skipped=True)
        self.note(run, step.number, loss=shortest(verdict.loss), norm=shortest(verdict.norm),
                  lr=shortest(step.rate), ms=round(1e3 * step.seconds, 3),
                  tok_per_s=round(total / step.seconds), tokens=step.number * total, **skipped,
                  **getattr(step, "noted", {}))

    def validated(self, run, done, loss):
        self.note(run, done, val_loss=shortest(loss))

    def scored(self, run, done, score):
        self.note(run, done, hellaswag=score)

    def sampled(self, run, text):
        self.note(run, run.model.step, sample=text)


FEATURE = Feature("log.jsonl", KEPT.asked, observer=Noted)
