"""Ctrl-C or SIGTERM ends a run after its step: without a validation or a sample, the weights are
saved, and the exit status is 128 + the signal's number. A second Ctrl-C ends the program at once.
"""
import contextlib
import os
import signal


@contextlib.contextmanager
def stop_signals():
    """A list that gets the number of the first Ctrl-C or SIGTERM. A second Ctrl-C ends the
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
    """Ends the loop: a signal has come, and the weights are saved."""


class Stoppable:
    """Training that a signal ends."""

    def __init__(self, flags, Model):
        super().__init__(flags, Model)
        self.signals = []  # the numbers of the signals that have come
        self.stopping = False  # one of them ends the run
        self.handlers = contextlib.ExitStack()

    def run(self):
        with self.handlers:  # from train() on; before that, Ctrl-C ends the program
            status = super().run()
        return 128 + self.signals[0] if self.signals else status

    def train(self):
        """As Training.train. What wraps this, such as Kept.train, sees an end like any other."""
        self.signals = self.handlers.enter_context(stop_signals())
        with contextlib.suppress(Stopped):
            super().train()
        if self.signals:
            self.say(f"interrupted after {self.model.step} of {self.flags.steps} steps; "
                     f"{self.what_is_left()}")

    def told_to_stop(self, done):
        """Asked once before each step, and once after the last."""
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
        """What there is of a run that was interrupted."""
        return "without -o the weights are lost"
