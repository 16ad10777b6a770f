"""Flags that a run may have and that are hardly meant: it begins with a warning for each."""
from dev.features.feature import Feature


def doubts(run):
    """What is odd about a Training's flags, and what it leads to."""
    flags, data, steps = run.flags, run.train_data, run.steps
    held = data.per_epoch * data.size
    if 0 < steps < flags.warmup and flags.schedule != "constant":
        yield (f"-u {flags.warmup} -x {steps}: the warmup is longer than the run, whose learning "
               "rate never gets to -l")
    if flags.val_every and not flags.val_batches:
        yield f"-v {flags.val_every} -m 0: a validation without batches: none is made"
    if flags.sample_every and not flags.sample_tokens:
        yield f"-s {flags.sample_every} -g 0: a sample without tokens: none is drawn"
    if run.total_batch > held and not flags.overfit:
        yield (f"-d {run.total_batch}: a step has more tokens than the {held:,} in batches of "
               f"{data.pattern}: it reads some of them again")


class Doubtful:
    """Says so."""

    def prepared(self, run):
        for doubt in doubts(run):
            run.say(f"WARNING: {doubt}")


FEATURE = Feature("doubts", observer=Doubtful)
