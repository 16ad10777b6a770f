"""How long work still takes: on a terminal in a line that is drawn again, in a log once. Both go to
stderr, since stdout has what a program finds."""
import sys
import time

PATIENCE = 10  # seconds of work, after which a program says how long it still takes
REDRAWN = 0.1  # seconds between two drawings of the line


def duration(seconds):
    """A time for a person: "3 h 20 min", "4 min 10 s" or "9 s"."""
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def progress(share=None, seconds_left=None):
    """On a terminal, draw a bar and the time left, if it is known; without a share, erase it."""
    if sys.stderr.isatty():
        bar = "" if share is None else f"[{'#' * int(40 * share):40}] {share:4.0%}"
        left = "" if seconds_left is None else f", {duration(seconds_left)} left"
        print(f"\r\x1b[K{bar}{left}", end="", file=sys.stderr, flush=True)


class TimeLeft:
    """Says how long a piece of work still takes, if it takes more than ten seconds."""

    def __init__(self):
        self.begun = time.perf_counter()
        self.drawn = None  # when it was said last

    def seconds(self, done, total):
        """The seconds that are left when `done` of `total` are done; None in the first ten."""
        taken = time.perf_counter() - self.begun
        return taken * (total / done - 1) if done and taken >= PATIENCE else None

    def __call__(self, done, total):
        """Called now and then, when `done` of `total` are done."""
        now, left = time.perf_counter(), self.seconds(done, total)
        if done >= total:
            progress()
        elif left is not None and (self.drawn is None or now - self.drawn >= REDRAWN):
            if self.drawn is None and not sys.stderr.isatty():
                print(f"{duration(left)} left", file=sys.stderr, flush=True)
            self.drawn = now
            progress(done / total, left)

    def over(self, parts, total, size=len):
        """Yield the parts of some work, and say how long the others take. size(part) is its share
        of the total."""
        done = 0
        try:
            for part in parts:
                yield part
                done += size(part)
                self(done, total)
        finally:
            progress()
