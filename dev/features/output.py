"""stdout and stderr of a training. What cannot be written there does not end it: the disk may be
full, or the terminal closed. main.log and the checkpoints are what counts.
"""
import io
import os
import select
import sys


class Steady(io.RawIOBase):
    """The file of a stream, to write to. What cannot be written is dropped, and the first time
    warn(the reason) is called."""

    def __init__(self, stream, warn):
        self.stream, self.warn = stream, warn  # the stream, since without it the file is closed
        self.number = stream.fileno()

    def fileno(self):
        return self.number

    def writable(self):
        return True

    def isatty(self):
        return os.isatty(self.number)

    def write(self, data):
        left = memoryview(data).cast("B")
        size = left.nbytes
        try:
            while left:
                left = left[self.written(left) :]
        except OSError as e:
            warn, self.warn = self.warn, None
            if warn:
                warn(e.strerror)
        return size

    def written(self, data):
        """How many bytes the file took."""
        try:
            return os.write(self.number, data)
        except BlockingIOError:  # another program has set the terminal or pipe not to block
            select.select([], [self.number], [])
            return 0


def steady(stream, warn=None):
    """The stream as a Steady one. What is no file stays as it is: None, or text in memory."""
    try:
        stream.flush()
        raw = Steady(stream, warn)
    except (AttributeError, OSError):
        return stream
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


def go_on_without_output():
    """From now on a stdout or stderr that fails does not end the program."""
    def warn(reason):
        print(f"WARNING: stdout could not be written ({reason}): training goes on; what cannot be "
              "printed is lost, and -o's main.log has the steps", file=sys.stderr)

    sys.stderr = steady(sys.stderr)
    sys.stdout = steady(sys.stdout, warn)
