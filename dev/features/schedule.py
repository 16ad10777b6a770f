"""--schedule: learning rate schedules other than the cosine.

    linear      it falls linearly
    constant    it stays the same, without a warmup
    wsd         warmup, stable, decay: it stays the same until the last fifth of the steps, then
                falls as 1 - sqrt (Hagele et al. 2024, section 4)
"""
import numpy as np

from dev.features.feature import Feature, Flag


class Scheduled:
    """Training with one of these schedules, or the trainer's."""

    def learning_rate(self, step):
        f, flags = np.float32, self.flags
        rate, steps, warmup = f(flags.learning_rate), self.steps, flags.warmup
        if flags.schedule == "constant":
            return rate
        if step < warmup or flags.schedule == "cosine":
            return super().learning_rate(step)
        least = rate * f(flags.final_fraction)
        if flags.schedule == "linear":
            return rate - f(step - warmup) / f(steps - warmup) * (rate - least)
        begin = int(f(0.8) * f(steps))
        if step < begin:
            return rate
        share = f(step - begin) / f(steps - begin)  # of the way down
        return least + (f(1) - np.sqrt(share)) * (rate - least)


def refuses(flags):
    q = flags.final_fraction or 0
    return f"-q {q}: the learning rate would rise to {q} times -l: expected at most 1" * (q > 1)


FEATURE = Feature(
    "schedule", lambda flags, ranks: flags.schedule != "cosine" or flags.resume,  # it tells both
    training=Scheduled, refuses=refuses, flags=(
        Flag("-k", "--schedule", ("cosine", "linear", "constant", "wsd"), "cosine", "how the "
             "learning rate falls; wsd: at the end", "the update", after="--learning-rate"),
        Flag("-u", "--warmup", "count or 0", 0, "steps in which the rate rises; a constant rate "
             "does not")))
