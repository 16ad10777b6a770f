"""--zero 1, ZeRO stage 1 (Rajbhandari et al. 2020): each of several ranks has AdamW's moments and
fp32 parameters for only a share of the model.

A rank gets the summed gradients of its share, and updates the share. For matrix products all ranks
keep the whole parameters, and have to gather what the others have updated. The next step does that
layer by layer, in its first micro-batch: while layer l computes, layer l + 1 arrives. A validation,
a sample or a checkpoint needs all layers at once, so ShardedTraining gathers them first.

A share has a piece of each layer of each tensor, as in llm.c, so all ranks have the same work:

    one layer of a tensor    | piece of rank 0 | piece of rank 1 | ... | tail |
    the share of rank 1      | piece of layer 0 | piece of layer 1 | ... | zeros |

Tensors of a share are padded to a multiple of 32 numbers. If the ranks do not divide a layer, its
pieces are multiples of 8 numbers, and rank 0 has the rest, the tails, as tensors of their own.

An optimizer may need layers of some tensors whole: a model names these tensors as `uncut`. Then
each rank has as many whole layers as the others, the first rank the first of them, and the first
ranks one more of those that are left. Such a layer is summed at its rank, and sent from there.
"""
import numpy as np

from dev.features.feature import Feature, Flag
from dev.features.ranks.ranks import cut, cut_layers
from dev.features.ranks.slots import why_none
from train_gpt2 import LOW, Row, carve, kept_as, update_table

TENSOR = 32  # numbers: 64 bytes in bf16, on which tensors in arenas are aligned


def share_of(table, ranks, uncut=()):
    """The table of this rank's share of the tensors of a table. uncut: as in cut."""
    rows = []
    for row in table:
        layers, piece, tail = cut(row, ranks.count, ranks.rank, uncut)
        for name, size in ((row.name, layers * piece), (f"{row.name}_tail", layers * tail)):
            if size:
                size = -(-size // TENSOR) * TENSOR
                rows.append(Row(name, (size,), row.dtype, decay=row.decay))
    return rows


class Sharded:
    """The model of a rank that has a share of AdamW's numbers, a mixin in front of Ranked. Whole
    tensors are read into the gradients' memory, from which the share is taken."""
    behind = False  # whether params lacks the last update
    gathering = False  # whether the forward pass gathers the layers that it comes to

    @classmethod
    def tables(cls, c, device, B, T):
        """As GPT2.tables, with AdamW's tensors for the share only, and two more: the share's summed
        gradients, and its parameters as they are sent."""
        tables = super().tables(c, device, B, T)
        for name in ("adam m", "adam v"):
            tables[name] = cls.share(tables[name])
        own = {row.name: row for row in update_table(tables["adam m"])}
        tables["update"] = [own.get(row.name, row) for row in tables["update"]]
        if "low bits" in tables:
            tables["low share"] = cls.share(tables.pop("low bits"))
        norms = Row("norms", (-(-cls.ranks.count // 4) * 4,))  # of shares; global_norm reads fours
        return tables | {"grad share": cls.share(tables["gradients"]),
                         "param share": cls.share(tables["parameters"]), "share norms": [norms]}

    @classmethod
    def share(cls, table):
        """The table of this rank's share of a table's tensors."""
        return share_of(table, cls.ranks, cls.uncut)

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        arenas = [name for name in ("param share", "low share") if name in self.arenas]
        self.masters = [self.share_views(name) for name in arenas]
        # arrays of gather_part
        self.gathers = self.by_layers(self.cuts(self.params, self.masters[0]))
        self.norms = self.arenas["share norms"].view(np.float32)[: -(-self.count // 4) * 4]

    def share_views(self, arena):
        """Views of an arena that has this rank's share of each parameter."""
        dtype = {"param share": self.device.real, "low share": LOW}.get(arena, np.float32)
        return carve(self.arenas[arena], self.share(self.config.parameter_table(dtype)))

    def cuts(self, whole, share):
        """(row, l, all pieces, own piece, tail, own tail) of each layer of each tensor. Those that
        this rank's share does not have are None."""
        for row, l, pieces, tail in cut_layers(self.config, whole, self.count, self.uncut):
            own, rest = (getattr(share, row.name + end, None) for end in ("", "_tail"))
            piece = len(pieces) // self.count
            if row.name in self.uncut:
                rank, of_piece, at = self.place_of_layer(row, l)
                tensor = own if of_piece else rest
                own, rest = None, tensor if rank == self.rank else None
            else:
                at = l
            yield (row, l, pieces, None if own is None else own[l * piece : (l + 1) * piece],
                   tail, None if rest is None else rest[at * len(tail) : (at + 1) * len(tail)])

    def place_of_layer(self, row, l):
        """(rank, whether in its piece or its tail, index there) of a layer of an uncut tensor."""
        each = row.layers // self.count
        if l < each * self.count:
            return l // each, True, l % each
        return l - each * self.count, False, 0

    def as_saved(self, kept):
        """Views of this rank's share as a state file has them. All ranks call this."""
        return kept

    def keeper(self, row, part):
        """The rank that keeps the tail of a layer of a tensor; part: as in by_layers."""
        return self.place_of_layer(row, part)[0] if row.name in self.uncut else 0

    # ---- Parameters and moments

    def set_tensors(self, tensors, kept):
        """As GPT2.set_tensors, from whole tensors; this rank keeps its share of them."""
        whole = [self.grads, self.params] if kept is self.masters else [self.grads]
        super().set_tensors(tensors, whole)
        for views in kept:
            self.keep_share(views)

    def keep_share(self, views):
        """Set views of this rank's share from the whole tensors in the gradients' memory."""
        for _, _, pieces, own, tail, rest in self.cuts(self.grads, views):
            if own is not None:
                part = pieces[self.rank * len(own) :][: len(own)]
                own[...] = kept_as(part, own.dtype)
            if rest is not None:
                rest[...] = kept_as(tail, rest.dtype)

    # ---- The whole parameters

    def gather(self):
        """Gather all parameters, if a step has updated them. All ranks call this before anything
        but a step reads parameters."""
        if self.behind:
            for part in (None, *range(self.config.L)):
                self.gather_part(part)
            self.ranks.via.join()
            self.behind = False

    def gather_part(self, part):
        """Queue the gathering of a layer's parameters; None: the embeddings'."""
        via = self.ranks.via
        with via.fork():
            for row, pieces, own, tail, rest in self.gathers[part]:
                if pieces.size:
                    via.gather(own, pieces)
                if tail.size:
                    via.copy_from(self.keeper(row, part), rest, tail)

    def train_step(self, *batches, **adamw):
        super().train_step(*batches, **adamw)
        self.behind = True

    def micro_step(self):
        """Only the first micro-batch gathers. It always does: a graph cannot know whether a
        validation has gathered everything already."""
        self.gathering = self.micro == 0
        super().micro_step()
        self.gathering = False

    def embedding_forward(self):
        if self.gathering:
            self.gather_part(None)
            self.wait_and_gather(0)
        super().embedding_forward()

    def layer_forward(self, l):
        if self.gathering:
            self.wait_and_gather(l + 1)
        super().layer_forward(l)

    def wait_and_gather(self, l):
        """Wait for what was queued last, and queue the next layer, l, if there is one."""
        self.ranks.via.join()
        if l < self.config.L:
            self.gather_part(l)

    # ---- A step

    def cut_gradients(self):
        return self.cuts(self.grads, self.share_views("grad share"))

    def sum_part(self, part):
        """Each rank gets the sums of its own pieces."""
        via = self.ranks.via
        for row, pieces, own, tail, rest in self.sums[part]:
            if pieces.size:
                via.sum_pieces(pieces, own)
            if tail.size:
                via.sum_at(self.keeper(row, part), tail, rest)

    def update_pass(self):
        """As GPT2.update_pass, for this rank's share."""
        arenas = self.arenas
        gradients = arenas["grad share"]
        self.norm_of(gradients)
        self.judge()
        self.adamw(arenas["param share"], arenas.get("low share"), gradients, arenas["adam m"],
                   arenas["adam v"])

    def norm_of(self, gradients):
        """As GPT2.norm_of, then adam.gradient_norm[0] = the norm of all shares' norms."""
        super().norm_of(gradients)
        norm = self.adam.gradient_norm
        self.gather_norms(norm[:1])
        self.device.launch("global_norm", 1, norm, self.norms, self.norms.size)

    def gather_norms(self, own):
        """norms = that of each rank's share."""
        with self.ranks.via.fork():
            self.ranks.via.gather(own, self.norms[: self.count])
        self.ranks.via.join()


class ShardedTraining:
    """The run of such a model. Whatever reads parameters between steps is here: all ranks gather
    them first, even where only one rank reads."""

    def announce(self):
        super().announce()
        why = why_none(self.flags, self.ranks)
        where = f"by collectives, not in --slots: {why}" if why else f"in slots: {self.ranks.peers}"
        print(f"sums         | {where}")

    def validate(self, done):
        self.model.gather()
        return super().validate(done)

    def sample(self):
        self.model.gather()
        super().sample()

    def save(self, done, batches):
        self.model.gather()
        super().save(done, batches)

    def give_up(self, queued, verdict):
        self.model.gather()
        super().give_up(queued, verdict)

    def explain_outlier(self, queued, scores):
        self.model.gather()
        super().explain_outlier(queued, scores)


FEATURE = Feature(
    "zero", lambda flags, ranks: ranks and flags.zero, Sharded, ShardedTraining, flags=(
        Flag("-z", "--zero", "switch", 0, "1: each rank has only a share of AdamW's moments and "
             "fp32 parameters (ZeRO)", "several GPUs", after="--gpus", may_differ=True),))
