"""the queries and keys of qkv (B,T,NH+2NKV,HS), in place, pairs of channels turned by an angle for
each position"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import rotate
from dev.lab.kernels.rope_table import angles, cosines_and_sines
from dev.lab.ladder import COPIED, LAUNCH_GAP, Ladder, Version, f32

# With such a theta, all pairs of a head turn by large angles. Their two channels are neighbours, or
# half a head apart.
TURNS = tuple(f"{sizes},theta=3,half={half}" for half in (0, 1) for sizes in (
    "B=1,T=1,NH=1,NKV=1,HS=64", "B=2,T=33,NH=6,NKV=2,HS=32", "B=1,T=70,NH=4,NKV=1,HS=80"))
# The trainer's alone.
ODD_TURNS = tuple(f"{sizes},theta=3,half={half}" for half in (0, 1) for sizes in (
    "B=70,T=2,NH=1,NKV=1,HS=2", "B=2,T=5,NH=5,NKV=5,HS=2", "B=3,T=7,NH=3,NKV=1,HS=6",
    "B=1,T=70,NH=8,NKV=1,HS=64",
    "B=2,T=9,NH=2,NKV=1,HS=80", "B=3,T=17,NH=4,NKV=2,HS=128"))


def turned(draw, sign, B, T, NH, NKV, HS, theta, half):
    """(the inputs without qkv, qkv, the rotated qkv, the size of its terms)."""
    heads, angle = NH + NKV, angles(T, HS, theta)
    qkv = draw(B, T, NH + 2 * NKV, HS)
    expected, size = qkv.copy(), np.full(qkv.shape, COPIED)
    expected[:, :, :heads] = rotate(qkv[:, :, :heads], sign * angle, half)
    pairs = qkv[:, :, :heads].reshape(B, T, heads, *((2, HS // 2) if half else (HS // 2, 2)))
    length = np.linalg.norm(pairs, axis=-2 if half else -1, keepdims=True)
    size[:, :, :heads] = np.broadcast_to(length, pairs.shape).reshape(B, T, heads, HS)
    inputs = dict(N=B * T, heads=heads, row=(NH + 2 * NKV) * HS, half=half, theta=float(theta),
                  table=f32(cosines_and_sines(angle)))
    return inputs, qkv, expected, size


def problem(draw, B, T, NH, NKV, HS, theta=500000, half=0):
    inputs, qkv, expected, size = turned(draw, 1, B, T, NH, NKV, HS, theta, half)
    return dict(inputs, qkv=qkv), dict(qkv=expected), dict(qkv=size)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=32,NKV=8,HS=64", TURNS, trainer_checks=ODD_TURNS, compiled_for="HS",
    fp32="table", sums="qkv", args="qkv table N T heads row half",
    traffic=lambda a: 2 * a.N * a.heads * a.HS * a.itemsize, versions=(
        Version("one thread per pair, which computes its angle", "rope_forward1", "N*heads*HS // 2",
                args="qkv theta N T heads row half"),
        Version("a table of cosines and sines", "rope_forward2", "N*heads*HS // 2"),
        Version("16 bytes per lane: the trainer's", "rope_forward", "N*heads*HS", trainer=True,
                held_back=LAUNCH_GAP),
    ))


def formula(a):
    """Also of the way back, which turns dqkv."""
    name, sign = ("qkv", 1) if hasattr(a, "qkv") else ("dqkv", -1)
    x, angle, heads = getattr(a, name), sign * angles(a.T, a.HS, a.theta), a.heads
    new = x.copy()
    new[:, :, :heads] = rotate(x[:, :, :heads], angle, a.half)
    return {name: new}


def overwritten(x, new, angle, half, heads):
    """new, with the second number of each pair computed from the first one's new value."""
    both = slice(0, x.shape[-1] // 2), slice(x.shape[-1] // 2, None)
    first, second = both if half else (slice(0, None, 2), slice(1, None, 2))
    right = x[:, :, :heads, second] * np.cos(angle)[:, None]
    new[:, :, :heads, second] = new[:, :, :heads, first] * np.sin(angle)[:, None] + right
    return new


SHAPES = dict(qkv="B,T,NH+2*NKV,HS", dqkv="B,T,NH+2*NKV,HS",
              heads="NH + NKV: those that are turned", row="(NH + 2*NKV) * HS",
              half="1: numbers i and i + HS/2 of a head are a pair; 0: 2i and 2i + 1")
SOME_TURNS = tuple(f"B=2,T=33,NH=6,NKV=2,HS=64,theta=3,half={half}" for half in (0, 1))


def mistakes_of(whither):
    return (
        ("the second number was computed from the first one's new value. Read both before you "
         "write", "{name: new}",
         "{name: overwritten(x, new, angle, a.half, heads)}"),
        (f"the pairs are turned {whither}: the sign of sin is wrong", "heads], angle",
         "heads], -angle"),
        ("`half` says which two numbers are a pair: neighbours, or numbers HS/2 apart", "a.half",
         "1 - a.half"),
        ("the values are turned too: only the first `heads` heads are", "a.heads",
         "a.heads + a.NKV"))


EXERCISE = Exercise(
    "rope_forward2", "pairs: a thread reads two numbers and writes two", "a pair",
    ("Turning (x, y) by an angle gives (x cos - y sin, x sin + y cos). table has cos and sin "
     "side by side.",
     "Read both numbers before you write one."),
    checks=SOME_TURNS, axes="b t head c", shapes=SHAPES,
    formula=formula, mistakes=mistakes_of("backward"))
