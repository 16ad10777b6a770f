"""What a run prints: the trainer's lines, under them a progress bar, and a summary. The bar goes to
stderr, and only if that is a terminal, to keep it out of log files.
"""
import sys

import numpy as np

from dev.features.feature import Feature
from dev.features.peak import share_of_peak
from train_gpt2 import Printer


def duration(seconds):
    """A time for a person: "3 h 20 min", "4 min 10 s" or "9 s"."""
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def progress(share=None, seconds_left=0):
    """Draw the bar and the time left; without a share, erase it."""
    if sys.stderr.isatty():
        bar = "" if share is None else (f"[{'#' * int(40 * share):40}] {share:4.0%}, "
                                        f"{duration(seconds_left)} left")
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


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


class Progress:
    """The bar, an estimate after twenty steps, and a summary at the end."""

    def __init__(self):
        self.times, self.losses = [], []  # of the steps of this run

    def stepped(self, run, step):
        self.times.append(step.seconds)
        self.losses += [step.verdict.loss] * (not np.isnan(step.verdict.loss))
        left, median = run.steps - step.number, float(np.median(self.times[-100:]))
        if len(self.times) == 20:
            run.say(f"estimate     | {left + 20} steps of {1e3 * median:.2f} ms take "
                    f"{duration((left + 20) * median)}; validations, samples and checkpoints come "
                    "on top")
        progress(step.number / run.steps, left * median)

    def ended(self, run):
        times, losses = self.times, self.losses
        if times:
            median = float(np.median(times))
            loss = f"{losses[0]:.6f} -> {losses[-1]:.6f}" if losses else "-"
            run.say(f"{len(times)} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
                    f"{run.total_batch / median:,.0f} tok/s; training loss {loss}")


PRINTING = Feature("printing", observer=Terminal)
FEATURE = Feature("terminal", observer=Progress)
