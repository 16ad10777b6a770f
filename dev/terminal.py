"""The terminal: a bar that shows how far a run is, under the lines that it prints.

The bar goes to stderr, and only if that is a terminal, so that no log file gets it.
"""
import os
import sys

import numpy as np

from train_gpt2 import duration


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
        done, steps = queued.number, self.flags.steps
        progress(done / steps, (steps - done) * float(np.median(self.times[-100:])))
