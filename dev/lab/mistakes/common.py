"""What the mistakes of several exercises share: what a Mistake is, and how sums go wrong."""
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np


class Mistake(NamedTuple):
    """numbers(a) -> {output: wrong numbers}; or places(a, found) -> {output: True where it is wrong}."""
    why: str
    numbers: Callable = None
    places: Callable = None


def of(formula, *rows):
    """Mistakes in a formula, from rows ("the sentence", {piece: what stands in its place})."""
    return [Mistake(why, partial(formula, **pieces)) for why, pieces in rows]


# ---- Sums, as they go wrong in every exercise


def whole(x):
    return x.sum(-1, keepdims=True)


def average(x):
    return x.mean(-1, keepdims=True)


def by_lanes(x, f=np.sum, width=1):
    """At each place of a row the sum (or maximum) of the numbers of its lane. A lane has `width` numbers next to each
    other, and then those that come 32 * width later."""
    C = x.shape[-1]
    turns = -(-C // (32 * width))
    rows = np.full((*x.shape[:-1], turns * 32 * width), 0.0 if f is np.sum else -np.inf)
    rows[..., :C] = x
    lanes = f(f(rows.reshape(*x.shape[:-1], turns, 32, width), -1), -2)
    return np.tile(lanes.repeat(width, -1), turns)[..., :C]


PARTS = (("has only its last term. Write += and not =", slice(-1, None)),
         ("leaves out its last term. Where does the loop end?", slice(None, -1)),
         ("leaves out its first term. Where does the loop begin?", slice(1, None)))


def sums(formula, piece, name, divide=False):
    """Mistakes in a sum over a row. divide: the piece is an average, so it is divided by C."""
    def part_of(part, x):
        return whole(x[..., part]) / (x.shape[-1] if divide else 1)

    def lanes(width, x):
        return by_lanes(x, width=width) / (x.shape[-1] if divide else 1)

    rows = [(f"{name} {why}", {piece: partial(part_of, part)}) for why, part in PARTS]
    rows += [(f"{name} is each lane's own: is warp_sum missing?",
              {piece: partial(lanes, width)}) for width in (1, 4)]
    return of(formula, *rows)


def parts(formula, name):
    """Mistakes in a sum whose formula takes the part of the terms that is added up."""
    return of(formula, *((f"{name} {why}", dict(part=part)) for why, part in PARTS))


# ---- In fp32 e^x is infinite from x = 89 on, and 0 below -104


def exp32(x):
    return np.exp(np.float32(x)).astype(np.float64)


def largest(x):
    return x.max(-1, keepdims=True)


def nought(x):
    return np.zeros_like(x[..., :1])
