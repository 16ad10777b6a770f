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

from dev.features.feature import Feature

PATIENCE = 10  # seconds without a finished step, after which a run says what takes so long


def numbers():
    """The signals that end a run. SIGHUP stays ignored, as by nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP][: 2 if ignored else 3]


class Stoppable:
    """Training that a signal can stop."""
    program = True  # and no library call

    def __init__(self, flags):
        super().__init__(flags)
        self.signals = []  # the numbers of the signals that have come
        self.enough = False  # whether a library call's callback has said so
        self.stopping = False  # whether the run ends because of either
        self.watched, self.doing = False, ""  # whether no step is finished yet, and why
        self.handlers, self.beginning = contextlib.ExitStack(), contextlib.ExitStack()

    def run(self):
        with self.handlers, self.beginning:  # of train(); before that, Ctrl-C ends the program
            status = super().run()
        return 128 + self.signals[0] if self.signals else status

    def train(self):
        """As Training.train; to a caller such as Kept.train, a signal looks like a normal end."""
        if threading.current_thread() is threading.main_thread():  # no other one may handle any
            for number in numbers() if self.program else [signal.SIGINT]:
                self.handlers.callback(signal.signal, number, signal.signal(number, self.caught))
            if self.program:
                self.begin()
        super().train()
        if self.signals:
            self.say(f"interrupted after {self.model.step} of {self.steps} steps; "
                     f"{self.what_is_left()}")

    def begin(self):
        """Let signals write their number to a pipe, until a step is finished."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self.beginning.callback(os.close, writer)
        self.beginning.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
        self.watched = True
        threading.Thread(target=self.watch, args=[reader], daemon=True).start()

    def watch(self, reader):
        """In a thread, since Python's handlers would wait for a kernel of a minute: say what takes
        long, and end the process at a signal."""
        if not select.select([reader], [], [], PATIENCE)[0]:
            self.say(f"no step is finished yet: {self.doing}; Ctrl-C leaves at once")
        for number in os.read(reader, 1):  # none if a step is finished
            with contextlib.suppress(OSError):
                os.write(2, b"\ninterrupted before the end of the first step\n")
            os._exit(128 + number)
        os.close(reader)

    def report(self, queued, verdict):
        super().report(queued, verdict)
        self.watched = False
        self.beginning.close()

    def caught(self, number, frame):
        """A second Ctrl-C ends the program. In a library call it is KeyboardInterrupt at once."""
        if self.watched:
            return
        self.signals.append(number)
        for other in numbers() if self.program else ():  # a scheduler and a launcher may send it
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL if self.program else signal.default_int_handler)
        with contextlib.suppress(OSError):  # print may be interrupted
            os.write(2, b"\nstopping after this step; Ctrl-C once more leaves at once\n")

    def told_to_stop(self, done):
        """Called once before each step, and once after the last."""
        return bool(self.signals) or self.enough

    def pause(self, done, batches):
        self.stopping = self.told_to_stop(done)
        self.doing = "it validates (-v 0: never)"
        super().pause(done, batches)
        self.doing = f"it computes {self.total_batch:,} tokens (-d)"

    def ends(self, done):
        return super().ends(done) or self.stopping

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
