"""What a run prints: the trainer's lines, under them a progress bar with the time left, and a
summary. The bar goes to stderr, and only if that is a terminal, to keep it out of log files, which
have the time left once.
"""
import sys
import time

import numpy as np

from dev.common.time_left import duration, progress
from dev.features.feature import Feature
from dev.features.peak import share_of_peak
from train_gpt2 import Printer


def say(line):
    """Print a line at once, in place of the bar."""
    progress()
    print(line, flush=True)


class Terminal(Printer):
    """Prints lines in place of the bar."""

    def parts(self, run, step):
        parts, share = super().parts(run, step), share_of_peak(run, step.seconds)
        if np.isnan(step.verdict.loss):  # see masked.py
            parts[1] = "loss -"
        return [*parts[:-1], f"{share:5.1%} of peak", parts[-1]] if share else parts

    def say(self, run, line):
        progress()
        super().say(run, line)


class Paced:
    """Training that knows how long its last validation and its last sample took."""

    def __init__(self, flags):
        super().__init__(flags)
        self.took = {}  # seconds

    def validate(self, done):
        return self.clocked("validation", super().validate, done)

    def sample(self):
        return self.clocked("sample", super().sample)

    def clocked(self, what, work, *args):
        begun = time.perf_counter()
        found = work(*args)
        self.took[what] = time.perf_counter() - begun
        return found

    def steps_take(self, done, mean):
        """The seconds of the steps that are left, if one takes `mean` seconds."""
        return (self.steps - done) * mean


def typical(times):
    """The mean of the middle: without the fifth that is fastest, and the fifth that is slowest,
    among which is the first step."""
    cut = len(times) // 5
    return float(np.mean(sorted(times)[cut : len(times) - cut]))


def times_left(done, steps, every):
    """How often something that comes every so many steps, and at the end, still comes when step
    `done` was made, before the pause that follows it."""
    return steps // every - (done - 1) // every + (steps % every > 0)


class Progress:
    """The bar, the time left from the tenth step on, and a summary at the end."""
    KNOWN = 10  # steps after which the time that is left is known

    def __init__(self):
        self.times, self.losses = [], []  # of the steps of this run

    def stepped(self, run, step):
        self.times.append(step.seconds)
        self.losses += [step.verdict.loss] * (not np.isnan(step.verdict.loss))
        left = None
        if len(self.times) >= self.KNOWN:
            mean = typical(self.times[-100:])
            pauses = self.pauses(run, step.number)
            left = run.steps_take(step.number, mean) + sum(
                count * (seconds or 0) for _, count, seconds in pauses)
        if len(self.times) == self.KNOWN and left:
            run.tell("expected", sum(self.times) + left)
            if not (sys.stdout.isatty() and sys.stderr.isatty()):
                run.say(f"estimate     | {duration(left)} left: {run.steps - step.number} steps of "
                        f"{1e3 * mean:.2f} ms{said(pauses)}")
        progress(step.number / run.steps, left)

    def pauses(self, run, done):
        """[(what, how often it comes from now on, the seconds that the last took, or None)]."""
        flags = run.flags
        every = {"validation": flags.val_batches and flags.val_every,
                 "sample": flags.sample_tokens and flags.sample_every}
        return [(what, times_left(done, run.steps, each), run.took.get(what))
                for what, each in every.items() if each]

    def ended(self, run):
        times, losses = self.times, self.losses
        if times:
            median = float(np.median(times))
            loss = f"{losses[0]:.6f} -> {losses[-1]:.6f}" if losses else "-"
            run.say(f"{len(times)} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
                    f"{run.total_batch / median:,.0f} tok/s; training loss {loss}")


def said(pauses):
    """The end of a sentence about the pauses between steps."""
    return "".join(f", {count} {what}{'s'[:count - 1]}" +
                   (" on top" if seconds is None else f" of {seconds:.1f} s")
                   for what, count, seconds in pauses)


PRINTING = Feature("printing", observer=Terminal)
FEATURE = Feature("terminal", training=Paced, observer=Progress)
