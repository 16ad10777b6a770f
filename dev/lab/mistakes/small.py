"""Mistakes in the small exercises: a neighbour's number, sums of rows, a transpose, groups."""
import numpy as np

from dev.lab.mistakes.common import Mistake, average, of, parts


def row_sums(a, part=slice(None)):
    return dict(out=a.inp[:, part].sum(-1))


def running(a, first=0):
    """first: how many numbers a running sum is behind."""
    sums = np.cumsum(a.inp, -1)
    return dict(out=np.pad(sums, ((0, 0), (first, 0)))[:, : a.C])


def scaled(a, size=abs, top=np.max, divide=np.divide):
    n = a.inp.size
    groups = np.full(-(-n // 32) * 32, np.nan)
    groups[:n] = size(a.inp)
    most = np.array([top(group[np.isfinite(group)]) for group in groups.reshape(-1, 32)])
    return dict(out=divide(a.inp, most.repeat(32)[:n]))


SHIFT = [
    Mistake("column 0 has the last number of the row before: it must be 0",
            lambda a: dict(out=np.r_[0, a.inp.reshape(-1)[:-1]].reshape(a.inp.shape))),
    Mistake("column 0 is not 0: it has inp's own number",
            lambda a: dict(out=np.concatenate([a.inp[:, :1], a.inp[:, :-1]], -1))),
    Mistake("the numbers moved left, but must move right: out[n,c] = inp[n,c-1]",
            lambda a: dict(out=np.pad(a.inp, ((0, 0), (0, 1)))[:, 1:])),
    Mistake("nothing moved: out[n,c] must be inp[n,c-1]",
            lambda a: dict(out=a.inp))]
ROW_SUM = [*parts(row_sums, "the sum"),
           Mistake("this is the average: do not divide by C", lambda a: dict(out=average(a.inp)[:, 0]))]
TRANSPOSE = [Mistake("nothing is transposed: column c of inp must become row c of out",
                     lambda a: dict(out=a.inp.reshape(a.truth["out"].shape)))]
GROUP_SCALE = of(
    scaled, ("the largest |inp| is meant: fabsf is missing", dict(size=lambda x: x)),
    ("it multiplies by the group's largest |inp| instead of dividing", dict(divide=np.multiply)),
    ("this is divided by the sum of the group, and not by its largest", dict(top=np.sum)))
PREFIX_SUM = [
    Mistake("each sum leaves out its own number: out[n,c] must include inp[n,c]", lambda a: running(a, 1)),
    Mistake("these are inp's numbers: nothing is added up", lambda a: dict(out=a.inp)),
    Mistake("the sum runs on into the next row: each row must start again from 0",
            lambda a: dict(out=np.cumsum(a.inp.reshape(-1)).reshape(a.inp.shape)))]
