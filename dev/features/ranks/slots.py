"""--zero 1 where the ranks share memory: gradients are written to where they are summed.

Each parameter has an owner, the rank with its moments, and each rank a slot for its gradient in the
owner's memory. The product that makes the gradient of a weight writes it there, through NVLink. The
owner adds up the slots, in the order of ranks, and updates the parameters; from its share the
others copy them while they compute the next step's layers. So no kernel of NCCL runs beside the
backward pass. A step has three meetings, where all ranks wait for each other:

    slots are filled          and all have copied the parameters: owners may change these
    norms of shares are there
    shares are updated        and slots read: they may be filled again

To a kernel, the slots of a rank are one array as the gradients are, whose pieces lie in the memory
of their owners (peers.py). Pieces are cut without regard to tensors, which lie in an arena without
gaps, and go to the ranks in turn, so that a product's result goes to all of them. What a product
does not set at once, as other kernels' gradients, and those that several micro-batches add up, is
copied there behind the last backward pass. A state file has llm.c's shares, for which all ranks
exchange their own. Validations, samples and state files need whole parameters: one more meeting.

Muon, --moments bf16, --sums bf16, and ranks that share no memory do without: the line "sums" at the
start says so. Slots take 4 bytes a parameter.
"""
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.features.devices import address_of
from dev.features.feature import Feature, Flag, kernels_of
from dev.features.ranks.peers import piece_bytes
from dev.features.ranks.ranks import cut
from train_gpt2 import Row, UserError, ceil_div, kept_as, offsets

SOURCE, MEETING = kernels_of(__file__), kernels_of(__file__).with_name("meet.cu")


class Stretch(NamedTuple):
    """Some of the numbers of all parameters, from start to stop: a matrix of a layer, or a whole
    tensor."""
    start: int
    stop: int
    l: int  # a matrix's layer; None: biases, norms, embeddings, the head
    gradient: object
    slot: object


def stretches_of(table, gradients, slot):
    """[Stretch], given the parameters' table, views of gradients, and an array as long."""
    found = []
    for row, begun in zip(table, offsets(table)):
        of_layers = row.layers > 0 and len(row.shape) == 2
        size = row.size // (row.layers if of_layers else 1)
        for l in range(row.size // size):
            start = begun // 4 + l * size
            whole = getattr(gradients, row.name)
            found.append(Stretch(start, start + size, l if of_layers else None,
                                 whole[l] if of_layers else whole,
                                 slot[start : start + size].reshape(row.shape) if of_layers
                                 else None))
    return found


def joined(stretches):
    """[(start, stop)] of stretches, which are one where they touch."""
    found = []
    for each in stretches:
        if found and found[-1][1] == each.start:
            found[-1] = found[-1][0], each.stop
        else:
            found.append((each.start, each.stop))
    return found


def parts_in(start, stop, piece):
    """(index of a piece, start, stop) of the parts of numbers `start` to `stop` in pieces."""
    while start < stop:
        i = start // piece
        end = min(stop, (i + 1) * piece)
        yield i, start, end
        start = end


class Slotted:
    """The model of a rank with slots, a mixin in front of Sharded."""

    # ---- Who owns which numbers

    @classmethod
    def piece_of(cls, table):
        """Numbers of a piece, given a table of all parameters."""
        nbytes = 4 * sum(row.size for row in table)
        return piece_bytes(nbytes, cls.ranks.count, cls.ranks.peers.unit) // 4

    @classmethod
    def parts_of(cls, table):
        """{name: [(rank, where in the tensor, where in the rank's share of it, how many)]}: the
        parts of each tensor of a table that lie in a piece."""
        count, piece, begun, parts = cls.ranks.count, cls.piece_of(table), 0, {}
        for row in table:
            had, parts[row.name] = [0] * count, []
            for i, start, stop in parts_in(begun, begun + row.size, piece):
                rank, size = i % count, stop - start
                parts[row.name].append((rank, start - begun, had[rank], size))
                had[rank] += size
            begun += row.size
        return parts

    @classmethod
    def share(cls, table):
        """As Sharded.share. A tensor of which this rank has nothing is not there."""
        sizes = {name: sum(size for rank, *_, size in parts if rank == cls.ranks.rank)
                 for name, parts in cls.parts_of(table).items()}
        return [Row(row.name, (sizes[row.name],), row.dtype, decay=row.decay)
                for row in table if sizes[row.name]]

    def cuts(self, *args):
        return ()  # nothing for the collectives

    @classmethod
    def tables(cls, c, device, B, T):
        """As Sharded.tables, with the slots here: as many bytes as the gradients have."""
        tables = super().tables(c, device, B, T)
        return tables | {"slots": [Row("all_ranks", (offsets(tables["gradients"])[-1] // 4,))]}

    def own_tables(self, *args):
        """tables, without what peers allocate."""
        return {name: table for name, table in type(self).tables(*args).items() if name != "slots"}

    def __init__(self, *args, **keywords):
        self.tables = self.own_tables
        super().__init__(*args, **keywords)
        peers, arenas, table = self.ranks.peers, self.arenas, self.config.parameter_table()
        self.parts, self.piece = self.parts_of(table), self.piece_of(table)
        size = arenas["gradients"].nbytes // 4
        pieces = ceil_div(ceil_div(size, self.piece), self.count)  # that a rank has
        nbytes = arenas.pop("param share").nbytes  # peers allocate it, where others can read it
        self.masters[0] = None  # which had views of it
        peers.release()
        try:
            slots = [slot.view(np.float32) for slot in peers.striped(4 * size)]
            self.each = [share.view(self.device.real) for share in peers.shared(
                pieces * self.piece * np.dtype(self.device.real).itemsize)]
        except OSError as e:
            raise UserError(f"the ranks' shared memory has no room for slots ({e}): expected "
                            "a smaller -b, a larger /dev/shm for CPUs, a higher ulimit -n, or "
                            "--slots 0") from None
        arenas["param share"] = self.each[self.rank].view(np.uint8)[:nbytes]
        self.masters[0] = self.share_views("param share")
        self.slots, self.shares = peers.addresses(slots), peers.addresses(self.each)
        self.all_slots, self.slot = slots, slots[self.rank]  # all: NumPy unmaps what nobody holds
        self.stretches = stretches_of(table, self.grads, self.slot)
        self.meet()  # once before a step is recorded

    def meet(self):
        """Wait for all ranks. norms = the first number of each one's gradient_norm."""
        self.ranks.peers.meet(self.device, self.norms, self.adam.gradient_norm[:1])

    # ---- Parameters and moments

    def keep_share(self, views):
        for name, parts in self.parts.items():
            whole = getattr(self.grads, name).reshape(-1)
            for rank, start, at, size in parts:
                if rank == self.rank:
                    own = getattr(views, name)[at : at + size]
                    own[...] = kept_as(whole[start : start + size], own.dtype)

    def as_saved(self, kept):
        """As Sharded.as_saved: from shares to llm.c's, by way of whole tensors in the gradients'
        memory."""
        saved, begun, via = [], 0, self.ranks.via
        for views in kept:
            found = SimpleNamespace()
            # a rank may have no piece of a small model, but rank 0 has one
            own = next((own.dtype.str for own in vars(views).values()), None)
            dtype = np.dtype(self.ranks.peers.meeting.exchange(own, "a state file")[0])
            for row in self.config.parameter_table():
                nbytes = row.size * dtype.itemsize
                whole = self.arenas["gradients"][begun : begun + nbytes].view(dtype)
                begun += nbytes
                with via.fork():
                    for rank, start, at, size in self.parts[row.name]:
                        own = (getattr(views, row.name)[at : at + size] if rank == self.rank
                               else None)
                        via.copy_from(rank, own, whole[start : start + size])
                via.join()
                layers, piece, tail = cut(row, self.count, self.rank)
                layers = whole.reshape(layers, -1)
                setattr(found, row.name, layers[:, self.rank * piece :][:, :piece].reshape(-1))
                setattr(found, f"{row.name}_tail", layers[:, self.count * piece :].reshape(-1))
            saved.append(found)
        return saved

    # ---- The whole parameters

    def gather(self):
        if self.behind:
            self.meet()
        super().gather()

    def gather_part(self, part):
        self.ranks.via.beside(lambda: self.copy_part(part))

    def copy_part(self, part):
        """Copy the parameters of a layer's matrices from their owners' shares; None: all others."""
        params = self.arenas["parameters"].view(self.device.real)
        for start, stop in joined(each for each in self.stretches if each.l == part):
            self.device.launch("gather_shares", stop - start, params, self.shares, start,
                               stop - start, self.piece, self.count)

    def embedding_forward(self):
        if self.gathering:
            self.meet()
        super().embedding_forward()

    # ---- A step

    def micro_step(self):
        if self.micro == self.micros - 1:
            self.device.slots = {address_of(each.gradient): each.slot for each in self.stretches
                                 if each.slot is not None}
        super().micro_step()

    def sum_part(self, part):
        """Nothing is left to be summed."""

    def queue_sums(self):
        """The end of a step's last backward pass. Products have taken the slots that they have
        filled."""
        super().queue_sums()
        gradients, left = self.arenas["gradients"].view(np.float32), self.device.slots
        self.device.slots = {}
        for start, stop in joined(each for each in self.stretches if each.slot is None
                                  or address_of(each.gradient) in left):
            self.device.launch("fill_slot", stop - start, self.slot[start:], gradients[start:],
                               stop - start)

    def embedding_backward(self):
        super().embedding_backward()
        if self.summing:
            self.meet()

    def update_pass(self):
        gradients = self.arenas["grad share"].view(np.float32)
        self.device.launch("add_slots", gradients.size, gradients, self.slots, gradients.size,
                           self.piece, self.rank, self.count)
        super().update_pass()

    def gather_norms(self, own):
        self.meet()


class IntoSlots:
    """A mixin in front of a device. A product that sets a gradient writes it into its slot."""
    slots = {}  # {address of a gradient that one product sets: its slot}

    def matmul(self, out, *args, **more):
        if self.slots and not more.get("accumulate"):
            out = self.slots.pop(address_of(out), out)
        super().matmul(out, *args, **more)


def why_none(flags, ranks):
    """Why a run with --zero 1 has no slots, and collectives sum its gradients, or ""."""
    needs = {"slots": 1, "sums": "fp32", "moments": "fp32", "optimizer": "adamw"}
    other = [f"--{name} {getattr(flags, name)}" for name, value in needs.items()
             if getattr(flags, name) != value]
    return " ".join(other) or ("" if ranks.peers else ranks.apart or "no memory is shared")


def has_slots(flags, ranks):
    return ranks and flags.zero and not why_none(flags, ranks)


FEATURE = Feature(
    "slots", has_slots, Slotted, sources=(SOURCE,), flags=(
        Flag(None, "--slots", "switch", 1, "0: with --zero 1, sum gradients by NCCL (or MPI) even "
             "where the ranks share memory", "several GPUs", after="--zero", restored=False,
             may_differ=True),))
PRODUCTS = Feature(
    "products into slots", has_slots, device=IntoSlots, sources=(MEETING,),
    compiled=lambda flags, config: flags.device == "cuda")
