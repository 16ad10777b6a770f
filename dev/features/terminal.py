"""The progress bar, under the lines that a run prints, and its summary. The bar goes to stderr, and
only if that is a terminal, to keep it out of log files.
"""
import sys

import numpy as np

from dev.features.declare import Feature


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


class Terminal:
    """Training with the bar, an estimate after twenty steps, and a summary at the end."""

    def __init__(self, flags):
        super().__init__(flags)
        self.times, self.losses = [], []  # of the steps of this run

    def say(self, line):
        progress()
        super().say(line)

    def train(self):
        super().train()
        self.summarize()

    def summarize(self):
        times, losses = self.times, self.losses
        if times:
            median = float(np.median(times))
            loss = f"{losses[0]:.6f} -> {losses[-1]:.6f}" if losses else "-"
            self.say(f"{len(times)} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
                     f"{self.total_batch / median:,.0f} tok/s; training loss {loss}")

    def speed(self, seconds):
        self.times.append(seconds)
        return super().speed(seconds)

    def report(self, queued, verdict):
        super().report(queued, verdict)
        self.losses += [verdict.loss] * (not np.isnan(verdict.loss))  # see masked.py
        done, steps, median = queued.number, self.steps, float(np.median(self.times[-100:]))
        if len(self.times) == 20:
            count = steps - done + 20
            self.say(f"estimate     | {count} steps of {1e3 * median:.2f} ms take "
                     f"{duration(count * median)}; validations, samples and checkpoints come on "
                     "top")
        progress(done / steps, (steps - done) * median)


FEATURE = Feature("terminal", training=Terminal)
