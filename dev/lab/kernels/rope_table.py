"""table (T,HS) = the cosines and sines of t / theta^(2i/HS)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import frequencies
from dev.lab.ladder import Ladder, Version
from dev.lab.mistakes import Mistake


def angles(T, HS, theta, factor=1):
    """(T,HS/2), rounded to fp32."""
    return (np.arange(T, dtype=np.float32)[:, None] * frequencies(HS, theta, factor)).astype(
        np.float64)


def cosines_and_sines(angle):
    """(T,HS), cosine and sine side by side, of angles (T,HS/2)."""
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(len(angle), -1)


def problem(draw, T, HS, theta=500000, factor=1):
    """factor is that of Llama 3.1's scaling."""
    table = cosines_and_sines(angles(T, HS, theta, factor))
    return (dict(theta=float(theta), factor=float(factor)), dict(table=table),
            dict(table=np.ones_like(table)))


SCALED = tuple(f"T={T},HS={HS},theta={theta},factor={factor}"
               for theta, factor in ((500000, 1), (500000, 8), (500000, 32), (10000, 1))
               for T, HS in ((1, 2), (7, 2), (33, 6), (9000, 32), (8192, 64), (4097, 80),
                             (9001, 128)))

LADDER = Ladder(
    problem, "T=8192,HS=64", ("T=1,HS=64", "T=33,HS=32,theta=10000", "T=5000,HS=128"),
    trainer_checks=SCALED, compiled_for="HS", fp32="table", sums="table",
    limits=dict(fp32=1e-6, bf16=1e-6), traffic=lambda a: 4 * a.T * a.HS, versions=(
        Version("one thread per pair", "rope_table1", "T*HS // 2", args="table theta T",
                fits=lambda a: a.factor == 1),
        Version("a block computes the powers once: the trainer's", "rope_table", "T*HS // 2",
                args="table theta factor T", trainer=True,
                held_back="there are so few that the launch and the powers of a block take longer"),
    ))


def with_exponent(factor, T, HS, theta):
    """The angles t * theta^(factor * i/HS)."""
    return np.arange(T)[:, None] * np.float64(theta) ** (factor * np.arange(0, HS, 2) / HS)


def off_with_position(a, found):
    """The error grows with the position, and is small."""
    near = abs(found["table"] - a.truth["table"]) < 0.02
    return dict(table=near & (np.arange(a.T)[:, None] >= 4))


EXERCISE = Exercise(
    "rope_table1", "where fp32 is not enough", "a pair of numbers of table",
    ("Thread i has position i / (HS/2) and pair i % (HS/2).",
     "The power needs double: pow((double)theta, ...). Round it to float, and divide 1.0f by it."),
    helpers="trigonometry", checks=("T=33,HS=64", "T=5000,HS=64"), numpy=False,
    note=("Row t has the cosine and the sine of the angle of each pair i, side by side:",
          "    power = theta^(2i/HS) in double, rounded to float",
          "    angle = t * (1 / power) in float",
          "    table[t, 2i] = cos(angle) and table[t, 2i + 1] = sin(angle)"),
    mistakes=(
        ("cosines and sines are exchanged", "angles(", "np.pi / 2 - angles("),
        ("cosine and sine of a pair are neighbours: table[2 * i] and table[2 * i + 1]",
         "cosines_and_sines(angles(T, HS, theta, factor))",
         "np.concatenate([f(angles(T, HS, theta)) for f in (np.cos, np.sin)], -1)"),
        ("the exponent is 2i/HS: the 2 is left out", "angles(T, HS, theta, factor)",
         "with_exponent(-0.5, T, HS, theta)"),
        ("it is t / theta^(2i/HS), and not t * theta^(2i/HS)", "angles(T, HS, theta, factor)",
         "with_exponent(1, T, HS, theta)"),
        Mistake("the error grows with the position: t multiplies the rounding error of the "
                "frequency. Compute the power in double, round it to float, and divide in float: "
                "1.0f / (float)pow(...)", places=off_with_position)))
