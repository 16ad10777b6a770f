"""Memory that the ranks of a machine share: each reads and writes that of the others.

Of GPUs that see each other, over NVLink or PCI Express, by CUDA's virtual memory: an address range
is mapped to pieces of memory, wherever they lie, and a process passes pieces to another as files.
On CPUs, files in memory. find() tries it before the first step.
"""
import contextlib
import ctypes
import itertools
import os
import socket
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np

from dev.features.ranks.meeting import allow_files, receive
from train_gpt2 import ceil_div

PIECES = 256  # of an arena, that a rank has at most
AT_ONCE = 32  # files in a message
PATIENCE = 20.0  # seconds for files to be passed


def piece_bytes(nbytes, count, unit):
    """The size of a piece, a multiple of `unit`. Pieces of an arena go to the ranks in turn, so all
    of them get parts of each large tensor."""
    return unit * max(1, ceil_div(nbytes, unit * count * PIECES))


def together(meeting, work):
    """work(). If it fails on one rank, all raise OSError. All ranks call this."""
    done, why = None, ""
    try:
        done = work()
    except (OSError, AttributeError, RuntimeError) as e:  # of CuPy, too
        why = str(e) or type(e).__name__
    reasons = [*filter(None, meeting.exchange(why, "shared memory"))]
    if reasons:
        raise OSError(reasons[0])
    return done


def pass_files(meeting, files):
    """Send open files, a list for each rank, to the others. Returns what came from each. Raises
    OSError on all ranks."""
    came = [[] for _ in files]

    def send(path, own):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(PATIENCE)
            link.connect(path)
            link.sendall(struct.pack("<II", meeting.rank, len(own)))
            for i in range(0, len(own), AT_ONCE):
                socket.send_fds(link, [b"f"], own[i : i + AT_ONCE])
                link.recv(1)  # a system limits files that are under way

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/files")
        server.settimeout(PATIENCE)
        server.listen(meeting.count)
        paths = meeting.exchange(f"{folder}/files", "shared memory")
        for rank, path in enumerate(paths):
            if rank != meeting.rank:
                threading.Thread(target=send, args=(path, files[rank]), daemon=True).start()

        def take():
            for _ in range(meeting.count - 1):
                link, _ = server.accept()
                with link:
                    link.settimeout(PATIENCE)
                    rank, count = struct.unpack("<II", receive(link, 8))
                    while len(came[rank]) < count:
                        _, some, *_ = socket.recv_fds(link, 1, AT_ONCE)
                        if not some:
                            raise OSError("no files came")
                        came[rank] += some
                        link.sendall(b"f")

        together(meeting, take)
    return came


class Place(ctypes.Structure):
    """cuda.h's CUmemLocation: a device."""
    _fields_ = [("kind", ctypes.c_int), ("device", ctypes.c_int)]


class Kind(ctypes.Structure):
    """cuda.h's CUmemAllocationProp: memory of a device that can be passed as a file."""
    _fields_ = [("kind", ctypes.c_int), ("passed_as", ctypes.c_int), ("place", Place),
                ("meta", ctypes.c_void_p), ("more", ctypes.c_uint64)]


class Access(ctypes.Structure):
    """cuda.h's CUmemAccessDesc."""
    _fields_ = [("place", Place), ("may", ctypes.c_int)]


class GpuPeers:
    """The memory of all ranks' GPUs, as this rank sees it."""
    FILE, READ_AND_WRITE = 1, 3
    OUT_OF_MEMORY = 2  # of CUDA's errors

    def __init__(self, meeting, via):
        allow_files()  # a piece is one, for each rank that gets it
        self.meeting, self.rank, self.count = meeting, meeting.rank, meeting.count
        self.cupy, self.driver = via.cupy, ctypes.CDLL("libcuda.so.1")
        self.device = self.cupy.cuda.Device().id
        place = Place(1, self.device)
        self.kind, self.access = Kind(1, self.FILE, place), Access(place, self.READ_AND_WRITE)
        unit = ctypes.c_size_t()
        self.call("MemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.kind), 0)
        self.unit, self.boxes = unit.value, None
        self.settle = self.cupy.cuda.runtime.deviceSynchronize
        self.release = self.cupy.get_default_memory_pool().free_all_blocks  # that nobody holds

    def __str__(self):
        return "gradients are written into the memory of other GPUs"

    def call(self, name, *args):
        """Call a function of the driver."""
        status = getattr(self.driver, f"cu{name}")(*args)
        if status:
            raise OSError("no device memory is left" if status == self.OUT_OF_MEMORY else
                          f"cu{name}: CUDA error {status}")

    # ---- Pieces

    def create(self, nbytes):
        """A piece of this GPU's memory."""
        handle = ctypes.c_uint64()
        self.call("MemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes),
                  ctypes.byref(self.kind), ctypes.c_uint64(0))
        return handle

    def to_file(self, handle):
        file = ctypes.c_int()
        self.call("MemExportToShareableHandle", ctypes.byref(file), handle, self.FILE,
                  ctypes.c_uint64(0))
        return file.value

    def from_file(self, file):
        handle = ctypes.c_uint64()
        self.call("MemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file),
                  self.FILE)
        os.close(file)
        return handle

    def exchanged(self, make):
        """(the pieces that make() creates here, a list for each rank; those that came from each).
        All ranks call this."""
        own = together(self.meeting, make)
        files = together(self.meeting, lambda: [
            [] if rank == self.rank else [*map(self.to_file, some)]
            for rank, some in enumerate(own)])
        came = pass_files(self.meeting, files)
        for file in itertools.chain(*files):
            os.close(file)
        return own, together(self.meeting, lambda: [[*map(self.from_file, some)] for some in came])

    def mapped(self, size, pieces):
        """An array of bytes with pieces, {(offset, bytes): piece}."""
        at = ctypes.c_uint64()
        self.call("MemAddressReserve", ctypes.byref(at), ctypes.c_size_t(size),
                  ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        for (offset, each), handle in pieces.items():
            start, each = ctypes.c_uint64(at.value + offset), ctypes.c_size_t(each)
            self.call("MemMap", start, each, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self.call("MemSetAccess", start, each, ctypes.byref(self.access), ctypes.c_size_t(1))
            self.call("MemRelease", handle)  # it stays while it is mapped
        memory = self.cupy.cuda.UnownedMemory(at.value, size, self, self.device)
        return self.cupy.ndarray(size, np.uint8, self.cupy.cuda.MemoryPointer(memory, 0))

    # ---- What ranks share; all call these together

    def shared(self, nbytes):
        """Zeros of each rank, bytes in its own memory: a list of arrays."""
        size = ceil_div(nbytes, self.unit) * self.unit

        def make():
            piece = self.create(size)
            return [[piece] for _ in range(self.count)]

        own, came = self.exchanged(make)
        came[self.rank] = own[self.rank]
        arrays = together(self.meeting, lambda: [self.mapped(size, {(0, size): some[0]})[:nbytes]
                                                 for some in came])
        arrays[self.rank].fill(0)
        self.settle()
        self.meeting.exchange(None, "shared memory")
        return arrays

    def striped(self, nbytes):
        """Memory of each rank whose pieces lie in the ranks' memory in turn, a list of arrays. This
        rank's own is whole, and of the others it has the pieces that lie here."""
        size, count = piece_bytes(nbytes, self.count, self.unit), self.count
        pieces = ceil_div(nbytes, size)
        own, came = self.exchanged(lambda: [
            [self.create(size) for _ in range(self.rank, pieces, count)] for _ in range(count)])
        came[self.rank] = own[self.rank]
        places = [{i: piece for i, piece in zip(range(self.rank, pieces, count), some)}
                  for some in own]
        for owner, some in enumerate(came):
            places[self.rank] |= dict(zip(range(owner, pieces, count), some))
        return together(self.meeting, lambda: [
            self.mapped(pieces * size, {(i * size, size): piece for i, piece in of_rank.items()}
                        )[:nbytes] for of_rank in places])

    def addresses(self, arrays):
        """The addresses of arrays, for a kernel; 0 for None."""
        return self.cupy.array([array.data.ptr for array in arrays], np.uint64)

    def meet(self, device, values, value):
        """Queue a meeting: work that follows waits until all ranks have come here, and sees what
        they have written. values = each rank's value."""
        if self.boxes is None:  # when no step is recorded yet
            self.boxes = self.shared(2 * 8 * self.count)
            self.of_boxes, self.date = self.addresses(self.boxes), self.cupy.zeros(1, np.int32)
        device.launch("meet", 32, self.of_boxes, self.date, values, value, self.rank, self.count)


class HostPeers:
    """The same for processes on the CPUs of a machine."""
    unit = 4096
    settle = release = staticmethod(lambda: None)

    def __init__(self, meeting, via):
        self.meeting, self.rank, self.count = meeting, meeting.rank, meeting.count
        self.ranks = via.ranks

    def __str__(self):
        return "gradients are written into memory that all ranks share"

    def shared(self, nbytes):
        """As GpuPeers.shared."""
        with contextlib.ExitStack() as stack:
            def make():
                folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                file, path = tempfile.mkstemp(dir=folder, prefix="train_gpt2_")
                stack.callback(Path(path).unlink)
                stack.callback(os.close, file)
                os.posix_fallocate(file, 0, nbytes)  # an error, and no crash, if there is no room
                return path

            paths = self.meeting.exchange(together(self.meeting, make), "shared memory")
            arrays = together(self.meeting, lambda: [
                np.memmap(path, np.uint8, "r+", shape=nbytes) for path in paths])
        return [array.view(np.ndarray) for array in arrays]

    striped = shared

    def addresses(self, arrays):
        return np.array([array.ctypes.data for array in arrays], np.uint64)

    def meet(self, device, values, value):
        self.ranks.Allgather(value, values[: self.count])


def find(meeting, via):
    """(the shared memory of all ranks, ""), or (None, why there is none). All ranks call this."""
    Peers = HostPeers if hasattr(via, "MPI") else GpuPeers
    if meeting.here < meeting.count:
        return None, "they are on several machines"
    rank, count = meeting.rank, meeting.count
    try:
        peers = together(meeting, lambda: Peers(meeting, via))
        slots, letters = peers.striped(peers.unit * count), peers.shared(count)

        def write():
            for array in (slots[rank], *(letter[rank : rank + 1] for letter in letters)):
                array[...] = rank + 1
            peers.settle()

        def read():
            for other in range(count):
                if not int(slots[other][rank * peers.unit]) == letters[rank][other] == other + 1:
                    raise OSError(f"rank {rank} does not see what rank {other} writes")

        together(meeting, write)
        together(meeting, read)
        return peers, ""
    except OSError as e:
        return None, str(e)
