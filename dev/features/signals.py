"""Ctrl-C, SIGTERM or SIGHUP (a terminal that closes): the run finishes its step, saves the weights,
skips the last validation and sample, and exits with status 128 + the signal's number. A second
Ctrl-C ends it at once. So does any signal before the first step is finished, since there is nothing
to save. In a library call, Ctrl-C alone is handled: it is KeyboardInterrupt in the end.
"""
import contextlib
import os
import select
import signal
import threading

from dev.features.declare import Feature

PATIENCE = 10  # seconds without a finished step, after which a run says what takes so long


def numbers():
    """The signals that end a run. SIGHUP stays ignored, as by nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP][: 2 if ignored else 3]


@contextlib.contextmanager
def handled(handler, numbers):
    """While entered, this is the handler of these signals."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


def stop_signals(came, program):
    """Signals append their number to `came`. A second Ctrl-C ends the program; in a library call it
    is KeyboardInterrupt at once."""
    expected = numbers() if program else [signal.SIGINT]

    def handler(number, frame):
        came.append(number)
        for other in expected:  # a scheduler and a launcher may both send SIGTERM
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL if program else signal.default_int_handler)
        with contextlib.suppress(OSError):  # print may be interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C once more leaves at once\n")

    return handled(handler, expected)


@contextlib.contextmanager
def beginning(training):
    """A signal ends the process at once. A thread waits for it, since Python's handlers would wait
    for a kernel of a minute; and it says what takes long."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        if not select.select([reader], [], [], PATIENCE)[0]:
            training.say(f"no step is finished yet: {training.doing}; Ctrl-C leaves at once")
        for number in os.read(reader, 1):  # none if the first step is finished
            with contextlib.suppress(OSError):
                os.write(2, b"\ninterrupted before the end of the first step\n")
            os._exit(128 + number)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    with handled(lambda number, frame: None, numbers()):
        signal.set_wakeup_fd(writer)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            os.close(writer)


class Stopped(Exception):
    """Leaves the loop: a signal has come, and the weights are saved."""


class Stoppable:
    """Training that a signal can stop."""
    program = True  # and no library call

    def __init__(self, flags, Model):
        super().__init__(flags, Model)
        self.signals = []  # the numbers of the signals that have come
        self.stopping = False  # whether the run ends because of one
        self.handlers = contextlib.ExitStack()
        self.begun = False  # whether a step is finished
        self.doing = ""

    def run(self):
        with self.handlers:  # set in train(); before that, Ctrl-C ends the program
            status = super().run()
        return 128 + self.signals[0] if self.signals else status

    def train(self):
        """As Training.train; to a caller such as Kept.train, a signal looks like a normal end."""
        self.handle(beginning(self) if self.program else stop_signals(self.signals, False))
        with contextlib.suppress(Stopped):
            super().train()
        if self.signals:
            self.say(f"interrupted after {self.model.step} of {self.steps} steps; "
                     f"{self.what_is_left()}")

    def handle(self, signals):
        self.handlers.close()
        if threading.current_thread() is threading.main_thread():  # no other one may do that
            self.handlers.enter_context(signals)

    def report(self, queued, verdict):
        super().report(queued, verdict)
        if self.program and not self.begun:
            self.handle(stop_signals(self.signals, True))
        self.begun = True

    def told_to_stop(self, done):
        """Called once before each step, and once after the last."""
        return bool(self.signals)

    def pause(self, done, batches):
        self.stopping = self.told_to_stop(done)
        self.doing = "it validates (-v 0: never)"
        super().pause(done, batches)
        if self.stopping:
            raise Stopped
        self.doing = f"it computes {self.total_batch:,} tokens (-d)"

    def validates(self, done):
        return super().validates(done) and not self.stopping

    def samples(self, done):
        return super().samples(done) and not self.stopping

    def saves(self, done):
        return super().saves(done) or self.stopping

    def what_is_left(self):
        """What can be done after an interruption."""
        return ("without -o the weights are lost" if self.program else
                "the KeyboardInterrupt has the model")


FEATURE = Feature("signals", training=Stoppable)
