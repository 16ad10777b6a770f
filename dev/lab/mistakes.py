"""Usual mistakes: NumPy's formula of an exercise with a text of its source changed, so that it
computes the numbers that come of the mistake.

If a student's numbers are those of the formula without eps, then eps is missing; causes.py
compares. An exercise has rows ("the sentence", what stands there, what stands in its place), with
more pairs of texts if more has to change. Each text is once in the formula, which is the `problem`
of the kernel's Ladder. If that calls other functions, or has no sums as a warp adds them up, the
exercise has a function `formula` of its own. It gets the problem, a: its sizes, its inputs in
float64, and a.truth {output: numbers}, and returns {output: numbers}. Where rounding decides the
numbers, a row is a Mistake with the places that are wrong. Changed texts may use all names of this
file.
"""
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dev.lab.ladder import Draw, find_ladder


class Mistake(NamedTuple):
    """numbers(a) -> {output: wrong numbers}; or places(a, found) -> {output: True where it is
    wrong}."""
    why: str
    numbers: Callable = None
    places: Callable = None


@functools.cache
def changed(formula, *texts):
    """The function with texts of its source replaced: old, new, old, new ..."""
    source = inspect.getsource(formula)
    for old, new in zip(texts[::2], texts[1::2]):
        if source.count(old) != 1:
            raise ValueError(f"{formula.__module__}: {old!r} is {source.count(old)} times in "
                             f"{formula.__name__}, expected once")
        source = source.replace(old, new)
    names = {**globals(), **formula.__globals__}
    exec(compile(source, formula.__module__, "exec"), names)
    return names[formula.__name__]


def numbers_of(exercise, texts, a):
    """The outputs of a changed formula."""
    if exercise.formula:
        return changed(exercise.formula, *texts)(a)
    problem = find_ladder(exercise.kernel).problem
    names = [*inspect.signature(problem).parameters][1:]
    sizes = {name: getattr(a, name) for name in names if hasattr(a, name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy in threads: it is 0/0 by intention
        return changed(problem, *texts)(Draw(a.itemsize == 2), **sizes)[1]


def mistakes_of(exercise):
    """The Mistakes of an exercise, in the order of its rows."""
    return [row if isinstance(row, Mistake) else
            Mistake(row[0], functools.partial(numbers_of, exercise, row[1:]))
            for row in exercise.mistakes]


# ---- Sentences that several exercises share

OVERFLOW = ("in fp32 e^x is infinite from x = 89 on, and 0 below x = -104. Subtract the row's "
            "largest number before exp")
ORDER = ("they are inp's numbers in the order of inp: build another index for reading than for "
         "writing")
BACK = "the numbers go the other way: take the index of out apart, and build that of inp"
MODULO = "NH / NKV heads next to each other share a key head: it is h / (NH / NKV), and not h % NKV"


# ---- Sums, as they go wrong in every exercise

PARTS = (("has only its last term. Write += and not =", "-1:"),
         ("leaves out its last term. Where does the loop end?", ":-1"),
         ("leaves out its first term. Where does the loop begin?", "1:"))


def parts(old, new, name):
    """Rows of a sum: in `new`, {} is the part of the terms that is added up."""
    return tuple((f"{name} {why}", old, new.format(part)) for why, part in PARTS)


def sums(old, name):
    """Rows of a sum over a row, which `old` computes by whole(terms)."""
    rows = [(why, rf"whole((\1)[..., {part}])") for why, part in PARTS]
    rows += [("is each lane's own: is warp_sum missing?", rf"by_lanes(\1, width={width})")
             for width in (1, 4)]
    return tuple((f"{name} {why}", old, re.sub(r"whole\((.*?)\)", new, old)) for why, new in rows)


def whole(x):
    return x.sum(-1, keepdims=True)


def largest(x):
    return x.max(-1, keepdims=True)


def by_lanes(x, f=np.sum, width=1):
    """At each place of a row the sum (or maximum) of the numbers of its lane. A lane has `width`
    numbers next to each other, and then those that come 32 * width later."""
    C = x.shape[-1]
    turns = -(-C // (32 * width))
    rows = np.full((*x.shape[:-1], turns * 32 * width), 0.0 if f is np.sum else -np.inf)
    rows[..., :C] = x
    lanes = f(f(rows.reshape(*x.shape[:-1], turns, 32, width), -1), -2)
    return np.tile(lanes.repeat(width, -1), turns)[..., :C]


# ---- Functions

erf = np.vectorize(math.erf)


def exp32(x):
    """In fp32 e^x is infinite from x = 89 on, and 0 below -104."""
    return np.exp(np.float32(x)).astype(np.float64)
