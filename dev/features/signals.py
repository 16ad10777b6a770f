"""Ctrl-C or SIGTERM: the run finishes its step, saves the weights, skips the last validation and
sample, and exits with status 128 + the signal's number. A second Ctrl-C ends it at once.
"""
import contextlib
import os
import signal

from dev.features.declare import Feature


@contextlib.contextmanager
def stop_signals():
    """A list that receives the number of the first Ctrl-C or SIGTERM. A second Ctrl-C ends the
    program."""
    came, numbers = [], (signal.SIGINT, signal.SIGTERM)

    def handler(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler and a launcher may both send it
        with contextlib.suppress(OSError):  # print may be interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C once more leaves at once\n")

    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield came
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


class Stopped(Exception):
    """Leaves the loop: a signal has come, and the weights are saved."""


class Stoppable:
    """Training that a signal can stop."""

    def __init__(self, flags, Model):
        super().__init__(flags, Model)
        self.signals = []  # the numbers of the signals that have come
        self.stopping = False  # whether the run ends because of one
        self.handlers = contextlib.ExitStack()

    def run(self):
        with self.handlers:  # set in train(); before that, Ctrl-C ends the program
            status = super().run()
        return 128 + self.signals[0] if self.signals else status

    def train(self):
        """As Training.train; to a caller such as Kept.train, a signal looks like a normal end."""
        self.signals = self.handlers.enter_context(stop_signals())
        with contextlib.suppress(Stopped):
            super().train()
        if self.signals:
            self.say(f"interrupted after {self.model.step} of {self.steps} steps; "
                     f"{self.what_is_left()}")

    def told_to_stop(self, done):
        """Called once before each step, and once after the last."""
        return bool(self.signals)

    def pause(self, done, batches):
        self.stopping = self.told_to_stop(done)
        super().pause(done, batches)
        if self.stopping:
            raise Stopped

    def validates(self, done):
        return super().validates(done) and not self.stopping

    def samples(self, done):
        return super().samples(done) and not self.stopping

    def saves(self, done):
        return super().saves(done) or self.stopping

    def what_is_left(self):
        """What can be done after an interruption."""
        return "without -o the weights are lost"


FEATURE = Feature("signals", training=Stoppable)
