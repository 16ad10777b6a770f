"""-sl X, -sg X: skip the update of a step whose loss (-sl, --loss-limit) or gradient's norm (-sg,
--norm-limit) is an outlier. A value's z-score is

    z = (value - mean) / standard deviation        over the last 128 steps, this one included

and the update is skipped if z is above X, as in llm.c. So a bad batch harms neither the weights nor
AdamW's moments. The first 128 steps of a run are never skipped.

The device decides, because the host may read a step's loss only after the next step is queued. All
ranks have the same loss and norm, so they decide alike. A checkpoint's run_*.json has the last 128
losses and norms. If they are missing, a warning says so, and they are collected anew.
"""

import numpy as np

from dev.features.base import Counted
from dev.features.feature import Feature, Flag, kernels_of, numbers
from train_gpt2 import Row

SOURCE = kernels_of(__file__)
WINDOW = 128  # steps, as in outliers.cu


class Outliers(Counted):
    """A model that skips the updates of outliers."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        rows = [Row("windows", (2, WINDOW), np.float64),  # the last losses and norms
                Row("seen", (1,), np.int32),  # how many there have been so far
                Row("z_scores", (WINDOW, 2))]  # of loss and norm; those of step s at s % WINDOW
        return tables | {"update": tables["update"] + rows}

    def judge(self):
        super().judge()
        adam, flags = self.adam, self.flags
        self.device.launch("skip_outliers", 32, adam.verdict, adam.windows, adam.seen,
                           adam.z_scores, flags.loss_limit, flags.norm_limit, adam.counter[1:])

    def z_scores(self, step):
        """(z-score of the loss, of the norm) of a recent step; NaN in the first 128."""
        return self.device.get(self.adam.z_scores[step % WINDOW]).tolist()


class OutliersTraining:
    """A run of such a model. replay.py's Explained, below it in dev/features/order.py, says what
    is large in an outlier."""

    def report(self, queued, verdict):
        counts = not np.isnan(verdict.loss)  # see masked.py
        if counts and not (verdict.update or verdict.stopped):
            self.say(f"WARNING: step {queued.number}: no update: loss {verdict.loss:.6f}, norm "
                     f"{verdict.norm:.6f}")
            loss, norm = self.model.z_scores(queued.number)
            self.explain_outlier(queued, f"z-scores: loss {loss:.2f}, norm {norm:.2f}")
        super().report(queued, verdict)

    def state(self, model):
        windows, seen = map(model.device.get, (model.adam.windows, model.adam.seen))
        return super().state(model) | dict(windows=windows.tolist(), seen=seen.tolist())

    def set_state(self, model, notes):
        super().set_state(model, notes)
        if notes.keys() >= {"windows", "seen"}:
            model.device.put(model.adam.windows, notes["windows"])
            model.device.put(model.adam.seen, notes["seen"])
        else:
            self.say(f"WARNING: -sl, -sg: the checkpoint has no losses and norms of the steps "
                     f"before: the next {WINDOW} are never skipped")


FEATURE = Feature(
    "outliers", lambda flags, ranks: flags.loss_limit or flags.norm_limit, Outliers,
    OutliersTraining, sources=(SOURCE,), flags=(
        Flag("-sl", "--loss-limit", "amount", 0.0, "skip a step's update if its loss has a z-score "
             "above this among the last 128; 0: never", "the update", replayed=False),
        Flag("-sg", "--norm-limit", "amount", 0.0, "the same for the gradient's norm", "the update",
             replayed=False)),
    state={"windows": (lambda x: numbers(x, (2, WINDOW)), f"2 lists of {WINDOW} numbers"),
           "seen": (lambda x: numbers(x, (1,)), "[a number]")})
