"""Checkpoints are written in the background: training waits only until their numbers are copied to
the host's memory. From there a thread writes them to files.
"""
import contextlib
import queue
import threading
import time

import numpy as np

from dev.common.host_memory import available_memory
from train_gpt2 import replace_file

CHUNK = 2**26  # bytes that are copied to the host, and written, at a time
WHOLE, END = object(), object()  # in the queue after each file, and after the last


def host_memory(device, nbytes):
    """Memory of the host; page-locked for a GPU, which makes its copies several times as fast."""
    if device.name == "cpu":
        return np.empty(nbytes, np.uint8)
    # As cupyx.empty_pinned; to import cupyx takes a quarter of a second beside SciPy.
    return np.frombuffer(device.cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


class Writer:
    """Writes files in a thread. save() returns when all numbers are in the host's memory, in chunks
    that are allocated once, here. If the host has little memory there are few chunks, and save()
    waits until some are written."""

    def __init__(self, device, nbytes, sharers=1):
        self.free, self.filled, self.thread = queue.SimpleQueue(), queue.SimpleQueue(), None
        room = available_memory() // 3 // sharers // CHUNK
        for _ in range(max(2, min(-(-nbytes // CHUNK) + 1, room))):
            self.free.put(host_memory(device, CHUNK))

    def save(self, files, finish):
        """Write files, {path: an iterable of arrays}. Then the thread calls finish(None), or
        finish(the exception) if something fails."""
        self.wait()
        self.thread = threading.Thread(target=self.write, args=(list(files), finish), daemon=True)
        begun = time.perf_counter()
        self.thread.start()
        try:
            for parts in files.values():
                self.copy(parts)
        finally:
            self.waited = time.perf_counter() - begun
            self.filled.put(END)

    def wait(self):
        if self.thread:
            self.thread.join()

    def copy(self, parts):
        """Copy the arrays of a file to chunks, for the thread to write."""
        chunk, used = self.free.get(), 0
        for part in parts:
            rest = part.reshape(-1).view(np.uint8)
            while rest.size:
                count = min(rest.size, CHUNK - used)
                to = chunk[used : used + count]
                if isinstance(rest, np.ndarray):
                    to[...] = rest[:count]
                else:
                    rest[:count].get(out=to)
                rest, used = rest[count:], used + count
                if used == CHUNK:
                    self.filled.put((chunk, used))
                    chunk, used = self.free.get(), 0
        self.filled.put((chunk, used))
        self.filled.put(WHOLE)

    def chunks(self):
        """The bytes of the next file."""
        while (item := self.filled.get()) is not WHOLE:
            if item is END:
                self.filled.put(END)
                raise RuntimeError("the numbers could not be copied")
            chunk, used = item
            try:
                yield chunk[:used]
            finally:  # even if it could not be written
                self.free.put(chunk)

    def write(self, paths, finish):
        failure = None
        try:
            for path in paths:
                with contextlib.closing(self.chunks()) as chunks:
                    replace_file(path, chunks)
        except BaseException as e:  # whatever it is, the training continues
            failure = e
        # After a failure, save() still fills chunks, and waits for free ones.
        for item in iter(self.filled.get, END):
            if item is not WHOLE:
                self.free.put(item[0])
        try:
            finish(failure)
        except BaseException as e:
            finish(e)
