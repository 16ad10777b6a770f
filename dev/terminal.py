"""The terminal: a bar that shows how far a run is, under the lines that it prints.

The bar goes to stderr, and only if that is a terminal, so that no log file gets it.
"""
import os
import sys

import numpy as np


def duration(seconds):
    """A time for a person: "3 h 20 min", "4 min 10 s" or "9 s"."""
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def progress(share=None, seconds_left=0):
    """Draw the bar and the time left; without a share, take it away."""
    if sys.stderr.isatty():
        bar = "" if share is None else (f"[{'#' * int(40 * share):40}] {share:4.0%}, "
                                        f"{duration(seconds_left)} left")
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def say(line):
    """Print a line in the place of the bar, at once."""
    progress()
    try:
        print(line, flush=True)
    except BrokenPipeError:  # `| tee` got the Ctrl-C too: nobody reads, but the run is to be saved
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """Training, with the bar."""

    def say(self, line):
        say(line)

    def report(self, queued, verdict):
        super().report(queued, verdict)
        done, steps, median = queued.number, self.flags.steps, float(np.median(self.times[-100:]))
        if len(self.times) == 20:
            count = steps - done + 20
            self.say(f"estimate     | {count} steps of {1e3 * median:.2f} ms take "
                     f"{duration(count * median)}; validations, samples and checkpoints come on top")
        progress(done / steps, (steps - done) * median)
