"""Mistakes in exercises about indices: permutations, copies of heads, embeddings, rotations."""
from functools import partial

import numpy as np

from dev.lab.formulas import rotate
from dev.lab.kernels.rope_table import angles, cosines_and_sines
from dev.lab.mistakes.common import Mistake, of, parts



def same_numbers(a, axes, shape):
    return dict(out=a.inp.transpose(axes).reshape(shape))


def back(x, axes, shape):
    """x (with the numbers of shape) seen as the result of a transposition, and turned back."""
    return x.reshape([shape[i] for i in axes]).transpose(np.argsort(axes))


ORDER = "they are inp's numbers in the order of inp: build another index for reading than for writing"
BACK = "the numbers go the other way: take the index of out apart, and build that of inp"


def permutation(axes, *rows):
    def unchanged(a):
        return dict(out=a.inp.reshape(a.truth["out"].shape))

    def backward(a):
        return dict(out=back(a.inp, axes, a.inp.shape).reshape(a.truth["out"].shape))

    def other(order, a):
        return dict(out=a.inp.transpose(order).reshape(a.truth["out"].shape))

    return [Mistake(ORDER, unchanged), *(Mistake(why, partial(other,
                                                              order)) for why, order in rows),
            Mistake(BACK, backward)]


def repeated(a, head=lambda h, a: h // (a.NH // a.NKV), which=(0, 1)):
    q, kv = a.inp[:, :, : a.NH], a.inp[:, :, a.NH :].reshape(a.B, a.T, 2, a.NKV, a.HS)
    copies = kv[:, :, list(which)][:, :, :, head(np.arange(a.NH), a)]
    return dict(out=np.concatenate([q[:, :, None], copies], 2))


MODULO = "NH / NKV heads next to each other share a key head: it is h / (NH / NKV), and not h % NKV"


def modulo(h, a):
    return h % a.NKV


REPEATED = of(
    repeated, (MODULO, dict(head=modulo)),
    ("the values are copies of the keys: they come NKV heads later", dict(which=(0, 0))),
    ("keys and values are exchanged", dict(which=(1, 0))),
    ("all heads are copies of the first key and value head", dict(head=lambda h, a: h * 0)))


def summed(a, part=slice(None), axis=4):
    """axis: of a group's copies, in (B,T,2,NKV,copies,HS); with 3, in (B,T,2,copies,NKV,HS)."""
    copies = a.NH // a.NKV
    kv = a.dout[:, :, 1:].reshape(a.B, a.T, 2, *((a.NKV, copies) if axis == 4 else (copies, a.NKV)),
                                  a.HS)
    if axis == 4:
        kv = kv[:, :, :, :, part]
    return dict(dinp=np.concatenate([a.dout[:, :, 0], kv.sum(axis).reshape(a.B, a.T, 2 * a.NKV,
                                                                           a.HS)], 2))


SUMMED = [
    *of(summed, (MODULO, dict(axis=3)),
        ("only the first copy is there: add up all NH / NKV of them", dict(part=slice(0, 1)))),
    *parts(summed, "the sum of the copies")]


def embedding(a, tokens=lambda a: a.tokens, position=lambda a, row: row % a.T, wpe=1):
    rows = np.arange(a.N)
    each = a.wte[tokens(a).reshape(-1)] + wpe * a.wpe[position(a, rows)]
    return dict(out=each.reshape(a.B, a.T, a.C))


EMBEDDING = [
    *of(embedding, ("wpe is not added", dict(wpe=0)),
        ("each sequence has its own tokens: tokens[row], and not tokens[row % T]",
         dict(tokens=lambda a: np.broadcast_to(a.tokens[:1], a.tokens.shape))),
        ("the row of wpe is the position, row % T, and not row / T",
         dict(position=lambda a, row: row // a.T % a.T))),
    Mistake("this is wpe alone: wte is not added",
            lambda a: dict(out=np.broadcast_to(a.wpe, (a.B, a.T, a.C))))]


def embedding_gradient(a, dwte=1, position=lambda a, row: row % a.T):
    new, rows = dict(dwte=a.dwte.copy(), dwpe=a.dwpe.copy()), a.dout.reshape(a.N, a.C)
    np.add.at(new["dwte"], a.tokens.reshape(-1), dwte * rows)
    np.add.at(new["dwpe"], position(a, np.arange(a.N)), rows)
    return new


def of_one_position(a, found):
    """Rows that a single position wrote, whichever was the last."""
    alone = {name: np.zeros(numbers.shape, bool) for name, numbers in found.items()}
    for row, (token, dout) in enumerate(zip(a.tokens.reshape(-1), a.dout.reshape(a.N, a.C))):
        for name, place in (("dwte", token), ("dwpe", row % a.T)):
            alone[name][place] |= np.isclose(found[name][place], dout, rtol=1e-5)
    return alone


EMBEDDING_GRADIENT = [
    *of(embedding_gradient, ("it subtracts where it should add", dict(dwte=-1)),
        ("the row of dwpe is the position, row % T, and not row / T",
         dict(position=lambda a, row: row // a.T % a.T))),
    Mistake("each row has what one position wrote: several have the same token or the same t, so "
            "add with atomicAdd",
            places=of_one_position)]


# ---- Rotations


def table(a, angle=None, order=lambda angle: cosines_and_sines(angle)):
    return dict(table=order(angles(a.T, a.HS, a.theta) if angle is None else angle(a)))


def with_exponent(factor, a):
    frequency = np.float64(a.theta) ** (factor * np.arange(0, a.HS, 2) / a.HS)
    return np.arange(a.T)[:, None] * frequency


def off_with_position(a, found):
    """The error grows with the position, and is small."""
    near = abs(found["table"] - a.truth["table"]) < 0.02
    return dict(table=near & (np.arange(a.T)[:, None] >= 4))


TABLE = [
    *of(table,
        ("cosines and sines are exchanged", dict(order=lambda x: cosines_and_sines(np.pi / 2 - x))),
        ("cosine and sine of a pair are neighbours: table[2 * i] and table[2 * i + 1]",
         dict(order=lambda x: np.concatenate([np.cos(x), np.sin(x)], -1))),
        ("the exponent is 2i/HS: the 2 is left out", dict(angle=partial(with_exponent, -0.5))),
        ("it is t / theta^(2i/HS), and not t * theta^(2i/HS)",
         dict(angle=partial(with_exponent, 1)))),
    Mistake("the error grows with the position: t multiplies the rounding error of the frequency. "
            "Compute the power in double, round it to float, and divide in float: "
            "1.0f / (float)pow(...)",
            places=off_with_position)]


def turned(name, sign, a, half=lambda half: half, heads=lambda a: a.heads, overwritten=False,
           turn=None):
    x, heads = getattr(a, name), heads(a)
    angle, new = angles(a.T, a.HS, a.theta), x.copy()
    new[:, :, :heads] = rotate(x[:, :, :heads], (sign if turn is None else turn) * angle,
                               half(a.half))
    if overwritten:
        first = (slice(0, a.HS // 2), slice(a.HS // 2, None)) if a.half else (slice(0, None, 2),
                                                                              slice(1, None, 2))
        left, right = new[:, :, :heads, first[0]], x[:, :, :heads, first[1]]
        new[:, :, :heads, first[1]] = sign * left * np.sin(angle)[:, None] + right * np.cos(angle)[:, None]
    return {name: new}


def turns(name, sign, whither):
    return of(
        partial(turned, name, sign),
        ("the second number was computed from the first one's new value. Read both before you "
         "write",
         dict(overwritten=True)),
        (f"the pairs are turned {whither}: the sign of sin is wrong", dict(turn=-sign)),
        ("`half` says which two numbers are a pair: neighbours, or numbers HS/2 apart",
         dict(half=lambda half: 1 - half)),
        ("the values are turned too: only the first `heads` heads are",
         dict(heads=lambda a: a.heads + a.NKV)))
