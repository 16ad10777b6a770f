"""table (T,HS) = the cosines and sines of t / theta^(2i/HS)"""
import numpy as np

from dev.lab.formulas import frequencies
from dev.lab.ladder import Ladder, Version


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
