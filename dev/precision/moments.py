"""For --moments bf16: where the numbers that AdamW has here stand among all parameters of a model. See moments.cu.

A number's random bits depend on its place among all parameters of the model, tensor by tensor as in memory. With
--zero 1 a rank has pieces of them, and still gives each number the same bits.
"""
from pathlib import Path

from train_gpt2 import layout

KERNELS = Path(__file__).resolve().with_name("moments.cu")


def places(c, ranks):
    """(3, tensors), of the tensors that AdamW has here: the place of a tensor's first number among all parameters, the
    numbers of a piece, and how far it is from a piece to that of the next layer."""
    whole = c.parameter_table()
    starts = [start // 4 for start in layout(whole)]
    if not ranks.zero:
        return [starts[:-1], *[[row.size for row in whole]] * 2]
    from dev.ranks import cut
    found = []
    for row, start in zip(whole, starts):
        layers, piece, tail = cut(row, ranks.count)
        size = row.size // layers
        found += [(start + ranks.rank * piece, piece, size)] * (piece > 0)
        found += [(start + ranks.count * piece, tail, size)] * (tail > 0 and ranks.rank == 0)
    return [*zip(*found)]
