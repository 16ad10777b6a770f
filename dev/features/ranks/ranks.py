"""Several processes, ranks, train one model (data parallelism). Each has a GPU, or some of a CPU's
cores.

Each rank has the whole model and its own part of each batch. Gradients are summed over all ranks
during the backward pass: as soon as those of some layers are complete, their sums are queued, and
the GPU continues with the layers below. The sums are part of the captured graph. The loss is
divided by the number of ranks before the backward pass, so the sums are means.

    RankedTraining    when the ranks of a run wait for each other, and what they agree on
    Ranked            the model, which sums gradients in the last micro-batch of a step
    Ranks             all ranks, as one of them sees them

launch.py turns a process into a rank. collectives.py has the sums, by NCCL or MPI. meeting.py
carries small messages between ranks, and with --zero 1 zero.py divides AdamW's work among them.
"""
import hashlib
import itertools
import os
import sys
from pathlib import Path

import numpy as np

from dev.common.files import paths_of
from dev.common.flags import with_values
from dev.features.feature import Feature, Flag
from dev.features.ranks.collectives import Mpi, Nccl
from dev.features.ranks.peers import find

PIECE = 8  # numbers: 16 bytes in bf16, which kernels load together
EMBEDDINGS = "wte", "wpe"  # their gradients are complete last


class Ranks:
    """All ranks, as one of them sees them. rank: its index; count: how many there are; local: its
    index on its machine; here: how many are on it; via: the collectives. exchange and agree are
    Meeting's. shares: whether to look for memory that they share."""

    peers, apart = None, ""  # the memory that they share, or why they share none

    def __init__(self, meeting, device, local, shares=False):
        self.meeting, self.rank, self.count = meeting, meeting.rank, meeting.count
        self.local, self.here = local, meeting.here
        self.exchange, self.agree = meeting.exchange, meeting.agree
        self.via = (Nccl if device == "cuda" else Mpi)(meeting, local)
        if shares:
            self.peers, self.apart = find(meeting, self.via)

    def __str__(self):
        machines = len({host for host, *_ in self.meeting.people.values()})
        where = f" of {machines} machines" if machines > 1 else ""
        return f"{self.count} ranks{where}"

    def in_turn(self, work):
        """work(), first by one rank of each machine. The others then find what it has compiled or
        downloaded."""
        if self.local:
            self.exchange(None, "what one rank of a machine does first")
        done = work()
        if not self.local:
            self.exchange(None, "what one rank of a machine does first")
        return done


# ---- A step


def cut(row, count, rank=0, uncut=()):
    """(layers, numbers of a piece, numbers of a rank's tail) of a tensor. Each of its layers is cut
    into one piece per rank. If the ranks do not divide a layer, pieces are multiples of PIECE, and
    the rest is the tail, of rank 0. uncut: names of tensors that are cut between layers only, as if
    they had one: a piece is several layers, and of those that are left a rank has one as tail."""
    if row.name in uncut:
        each, left = divmod(row.layers, count)
        size = row.size // row.layers
        return 1, each * size, size if rank < left else 0
    layers = max(1, row.layers)
    size = row.size // layers
    piece = size // count if size % count == 0 else size // (count * PIECE) * PIECE
    return layers, piece, 0 if rank else size - count * piece


def cut_layers(c, views, count, uncut=()):
    """(row, l, all pieces, tail) of each layer of each tensor, from views of whole tensors. A layer
    of a tensor that is uncut is all tail."""
    for row in c.parameter_table():
        piece = 0 if row.name in uncut else cut(row, count)[1]
        for l, matrix in enumerate(getattr(views, row.name).reshape(max(1, row.layers), -1)):
            yield row, l, matrix[: count * piece], matrix[count * piece :]


class Ranked:
    """The model of one of several ranks, a mixin of GPT2. The class has an attribute `ranks`."""
    rank = property(lambda self: self.ranks.rank)
    count = property(lambda self: self.ranks.count)
    summing = False  # whether the backward pass sums its gradients over all ranks
    # Bytes of gradients that are summed in one launch. Its blocks wait for those of the other GPUs,
    # and the backward pass waits for the multiprocessors that they hold: so launches should be few.
    # But what is summed last has no work beside it.
    at_once = 2**27

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.sums = self.by_layers(self.cut_gradients())  # arrays of sum_part
        self.ready = []  # layers with complete gradients, whose sums are not queued yet

    def by_layers(self, cuts):
        """{layer: [(row, *arrays)]} from (row, l, *arrays); None: of the embeddings. What is above
        the last layer counts as part of it."""
        found = {}
        for row, l, *arrays in cuts:
            if not row.layers:
                l = None if row.name in EMBEDDINGS else self.config.L - 1
            found.setdefault(l, []).append((row, *arrays))
        return found

    def cut_gradients(self):
        """(row, l, all pieces, where this rank gets sums of them, tail, where it gets those) of
        each layer of each tensor."""
        for row, l, pieces, tail in cut_layers(self.config, self.grads, self.count):
            yield row, l, pieces, pieces, tail, tail

    def token_weight(self):
        """As GPT2's; in a step the ranks add up their micro-batches, too."""
        return 1 / (len(self.acts.losses) * self.micros * self.sharing)

    def micro_step(self):
        """Gradients are summed only here, in the last micro-batch. Other backward passes are local:
        a rank may do them alone."""
        self.sharing = self.count
        self.summing = self.micro == self.micros - 1
        super().micro_step()
        self.summing = False
        self.sharing = 1

    def layer_backward(self, l):
        super().layer_backward(l)
        if self.summing:
            self.ready.append(l)
            waiting = sum(pieces.nbytes + tail.nbytes for part in self.ready
                          for _, pieces, _, tail, _ in self.sums.get(part, ()))
            if waiting >= self.at_once:
                self.queue_sums()

    def embedding_backward(self):
        """The end of the backward pass, which waits for all sums."""
        super().embedding_backward()
        if self.summing:
            self.ready.append(None)
            self.queue_sums()
            self.ranks.via.join()

    def queue_sums(self):
        """Queue the sums of the gradients that are ready, in one launch; None among them: of the
        last in a step."""
        with self.ranks.via.fork():
            for part in self.ready:
                self.sum_part(part)
            if None in self.ready:
                self.sum_last()
        self.ready = []

    def sum_part(self, part):
        """The sums of a layer's gradients; None: the embeddings'."""
        via = self.ranks.via
        for _, pieces, _, tail, _ in self.sums[part]:
            if pieces.size:
                via.sum(pieces)
            if tail.size:
                via.sum(tail)

    def sum_last(self):
        """Extend this with whatever else the ranks share before the update."""
        self.ranks.via.sum(self.adam.verdict[1:2])  # the loss

    def try_products(self, B, backward):
        """Do the passes of a step or a validation with B sequences, which chooses algorithms for
        their products. Extend this for products of a feature."""
        tokens = np.random.default_rng(0).integers(0, self.config.V, (B, self.T), np.int32)
        self.forward(tokens, tokens)
        if backward:
            self.loss_pass(with_gradient=True)
            self.backward_pass()
            self.verdict()


# ---- A run


def partial_hash(path):
    """A hash of a file's size and 16 parts of it: checkpoints and data take too long to read."""
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
    """The names of the modules under dev/ that are imported or define the objects' classes, without
    tests."""
    names = {kind.__module__ for x in objects for kind in type(x).__mro__} | {*sys.modules}
    return {name for name in names if name.startswith("dev.") and ".test_" not in name
            and getattr(sys.modules[name], "__file__", None)}


def code_of(modules):
    """{name of a file: its path} of modules, and of CUDA files beside them."""
    found = {}
    for name in modules:
        path, folder = Path(sys.modules[name].__file__), "/".join(name.split(".")[:-1])
        for file in (path, *path.parent.glob("*.cu*"), *path.parent.glob("*.h")):
            found[f"{folder}/{file.name}"] = file
    return found


class RankedTraining:
    """The run of one of several ranks, a mixin of Training. The class has an attribute `ranks`."""
    rank, count = Ranked.rank, Ranked.count

    def __init__(self, flags):
        super().__init__(flags)
        self.modules = modules_of()  # now, before a rank imports what the others do not need

    def announce(self):
        super().announce()
        print(f"ranks        | {self.ranks}")

    def make_device(self):
        return self.ranks.in_turn(super().make_device)

    def data_paths(self):
        return self.ranks.in_turn(super().data_paths)

    def make_model(self):
        model = super().make_model()
        self.check_same(model)
        self.choose_products(model)
        return model

    def check_same(self, model):
        """Raise UserError, on all ranks, unless they have the same flags, code, data and
        checkpoint."""
        program, device = Path(sys.modules["train_gpt2"].__file__), model.device
        files = [program, program.with_name("prepro_tinyshakespeare.py"), *model.config.SOURCES,
                 *self.train_data.inputs(),
                 *(self.inputs_of(self.val_data, self.paths[1]) if self.flags.val_every else ()),
                 *filter(os.path.isfile, (sys.argv[0], self.name))]
        files = {Path(path).name: path for path in files}
        files |= code_of(self.modules | modules_of(device))
        self.ranks.meeting.expect_same({
            "the device": str(device), "the model": str(model.config), "the step": model.step,
            **flags_of(with_values(self.flags, **self.settled())),
            **{f"the file {name}": partial_hash(path) for name, path in files.items()}})

    def inputs_of(self, data, path):
        """The files of a loader; the trainer's own has just one."""
        return data.inputs() if hasattr(data, "inputs") else paths_of(path)

    def choose_products(self, model):
        """Let rank 0 do the passes of a step and of a validation, which time algorithms, and send
        its choices to the others. A product that comes up later on another rank alone takes the
        first algorithm offered."""
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
        """Whether any rank has a signal. All ranks ask before each step, so they notice one that
        hangs. They tell each other if something takes longer than a step."""
        opens = self.train_data.next + self.grad_accum > len(self.train_data.order)  # the next file
        pauses = self.validates(done) or self.samples(done) or self.saves(done)
        return self.ranks.agree(self.signals, pauses or opens)

    def total_loss(self, batches):
        """Each rank takes every N-th batch, possibly none."""
        own = itertools.islice(batches, self.rank, None, self.count)
        return sum(self.ranks.exchange(super().total_loss(own), "a validation"))

    def sample(self):
        if self.rank == 0:
            super().sample()


FEATURE = Feature("ranks", lambda flags, ranks: ranks, Ranked, RankedTraining, flags=(
    Flag("-b", "--batch-size", "count", 4, "B, sequences in a rank's micro-batch"),
    Flag("-d", "--total-batch", "count", None, "tokens in a step, a multiple of B*T times the "
         "number of ranks: gradients are accumulated over micro-batches (default: one micro-batch "
         "per rank)", must_agree=True),
    Flag("-m", "--val-batches", "count or -1", 20, "at most this many batches of B*T in a "
         "validation, over all ranks; -1: all", may_differ=True),
    Flag(None, "--gpus", "count", None, "train on N of this machine's GPUs (default: 1, or the "
         "ranks that torchrun, srun or mpirun has started)", "several GPUs", restored=False,
         may_differ=True),
    Flag(None, "--log-ranks", "switch", 0, "1: each rank except the first appends its output to "
         "-o/rank_*.txt", "several GPUs", needs="output", restored=False, may_differ=True)),
    left="ranks_[0-9a-f]{12}.*")
