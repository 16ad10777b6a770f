"""Ctrl-C, SIGTERM or SIGHUP (a terminal that closes): the run finishes its step, saves the weights,
skips the last validation and sample, and exits with status 128 + the signal's number. A second
Ctrl-C ends it at once.

Before the first step is finished there is nothing to save: a signal ends the run at once, and what
takes long is said. All of this is the program's. In a library call, Ctrl-C raises KeyboardInterrupt
after the step, and a second one at once.
"""
import contextlib
import os
import select
import signal
import threading

from dev.features.declare import Feature

PATIENCE = 10  # seconds without a finished step, after which a run says what takes so long


def numbers():
    """The signals that end a run. nohup ignores SIGHUP, and then so do we."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def handled_by(handler, numbers):
    """A stack in which this is the handler of these signals. Only the main thread may set any."""
    stack = contextlib.ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            stack.callback(signal.signal, number, signal.signal(number, handler))
    return stack


def stop_signals(came):
    """Signals append their number to `came`, the first that comes. A second Ctrl-C ends the
    program."""
    def handler(number, frame):
        came.append(number)
        for other in numbers():  # a scheduler and a launcher may both send SIGTERM
            signal.signal(other, signal.SIG_DFL if other == signal.SIGINT else signal.SIG_IGN)
        with contextlib.suppress(OSError):  # print may be interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C once more leaves at once\n")

    return handled_by(handler, numbers())


def interrupts(came):
    """The first Ctrl-C appends its number to `came`. A second one is KeyboardInterrupt at once."""
    def handler(number, frame):
        came.append(number)
        signal.signal(number, signal.default_int_handler)

    return handled_by(handler, [signal.SIGINT])


@contextlib.contextmanager
def beginning(training):
    """A signal ends the process at once. A thread waits for it, since Python's handlers would wait
    for a kernel of a minute; and it says what takes long."""
    expected = numbers()
    reader, writer = os.pipe()

    def watch():
        said = None
        while True:
            if not select.select([reader], [], [], PATIENCE)[0]:
                if said != training.doing:
                    said = training.doing
                    training.say(f"still busy with {said}; Ctrl-C leaves at once")
                continue
            number = os.read(reader, 1)
            if not number:
                break
            if number[0] in expected:
                with contextlib.suppress(OSError):
                    os.write(2, b"\ninterrupted before the end of the first step\n")
                os._exit(128 + number[0])
        os.close(reader)

    with handled_by(lambda number, frame: None, expected) as handlers:
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        handlers.callback(os.close, writer)
        handlers.callback(signal.set_wakeup_fd, -1)
        threading.Thread(target=watch, daemon=True).start()
        yield


class Stopped(Exception):
    """Leaves the loop: a signal has come, and the weights are saved."""


class Stoppable:
    """Training that a signal can stop."""
    program = True  # and not a library call

    def __init__(self, flags, Model):
        super().__init__(flags, Model)
        self.signals = []  # the numbers of the signals that have come
        self.stopping = False  # whether the run ends because of one
        self.handlers = contextlib.ExitStack()
        self.doing = ""  # before the first step is finished

    def run(self):
        with self.handlers:  # set in train(); before that, Ctrl-C ends the program
            status = super().run()
        return 128 + self.signals[0] if self.signals else status

    def train(self):
        """As Training.train; to a caller such as Kept.train, a signal looks like a normal end."""
        self.doing = f"the first step, of {self.total_batch:,} tokens (-d)"
        if not self.program:
            self.handlers.enter_context(interrupts(self.signals))
        elif threading.current_thread() is threading.main_thread():
            self.handlers.enter_context(beginning(self))
        with contextlib.suppress(Stopped):
            super().train()
        if self.signals:
            self.say(f"interrupted after {self.model.step} of {self.steps} steps; "
                     f"{self.what_is_left()}")

    def validate(self, done):
        before = self.doing
        self.doing = "the validation before the first step (-v 0: none)"
        loss = super().validate(done)
        self.doing = before
        return loss

    def report(self, queued, verdict):
        super().report(queued, verdict)
        if self.program and self.doing:
            self.doing = ""
            self.handlers.close()
            self.handlers.enter_context(stop_signals(self.signals))

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
        return ("without -o the weights are lost" if self.program else
                "the KeyboardInterrupt has the model")


FEATURE = Feature("signals", training=Stoppable)
