"""--moments bf16: AdamW's moments are bf16, which halves their memory. See moments.cu.

They are rounded stochastically. A number's random bits depend on the seed, the step, and the
number's index among all parameters in memory. So they are the same with --zero 1, where a rank has
only pieces of the tensors.
"""

import numpy as np

from dev.features.base import Counted
from dev.features.feature import Feature, Flag, Pair, kernels_of
from dev.features.ranks.ranks import cut
from train_gpt2 import BF16, Row, offsets

SOURCE = kernels_of(__file__)


def in_bf16(tables):
    """A model's tables, with moments in bf16. "places" has for each tensor that is updated here:
    the index of its first number among all parameters; the numbers of a piece; and the distance
    from a piece to that of the next layer."""
    moments = [row._replace(dtype=BF16) for row in tables["adam m"]]
    update = [row for row in tables["update"] if row.name != "places"]
    return tables | {"adam m": moments, "adam v": moments,
                     "update": [*update, Row("places", (3, len(moments)), np.uint64)]}


class Bf16Moments(Counted):
    """A model with bf16 moments."""

    @classmethod
    def tables(cls, c, device, B, T):
        return in_bf16(super().tables(c, device, B, T))

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.device.put(self.adam.places, self.places())

    def places(self):
        """(3, tensors), see in_bf16. A whole tensor is one piece."""
        table = self.config.parameter_table()
        sizes = [row.size for row in table]
        return [[start // 4 for start in offsets(table)[:-1]], sizes, sizes]

    def adamw(self, parameters, low, gradients, m, v):
        n, a = gradients.nbytes // 4, self.adam
        self.device.launch("adamw_bf16", n, parameters, low, gradients, m, v, a.starts, a.decayed,
                           a.decayed.size, n, a.settings, a.verdict, a.places, a.counter)


class ShardedMoments:
    """With --zero 1: a rank has the moments of its share of each tensor."""

    @classmethod
    def tables(cls, c, device, B, T):
        return in_bf16(super().tables(c, device, B, T))

    def places(self):
        table, found = self.config.parameter_table(), []
        for row, start in zip(table, offsets(table)):
            layers, piece, tail = cut(row, self.count)
            size, first = row.size // layers, start // 4
            if piece:
                found.append((first + self.rank * piece, piece, size))
            if tail and self.rank == 0:
                found.append((first + self.count * piece, tail, size))
        return [*zip(*found)]


FEATURE = Feature(
    "moments", lambda flags, ranks: flags.moments == "bf16", Bf16Moments, sources=(SOURCE,), flags=(
        Flag(None, "--moments", ("fp32", "bf16"), "fp32", "bf16 halves the memory of AdamW's "
             "moments, with stochastic rounding", "less memory"),
        Flag(None, "--seed", "count or 0", 42, "of the initial parameters, of --moments bf16's "
             "rounding, of --dropout, and of --sample (whose default is a random one)",
             may_differ=lambda flags: flags.moments != "bf16" and not flags.dropout)),
    pairs=(Pair("zero", ShardedMoments),))
