"""dlogits (N,Vp) = (probs - 1 at the target) * dlosses (N)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.kernels.softmax_forward import WORDS, in_packs, padded
from dev.lab.ladder import Ladder, Version, in_parts
from train_gpt2 import UserError


def problem(draw, B, T, V, Vp):
    """What is beyond V is NaN. Raises UserError."""
    def gradient(probs, targets, dlosses):
        return padded(dlosses[:, None] * (probs[:, :V] - (np.arange(V) == targets[:, None])), Vp)

    if V > Vp:
        raise UserError(f"expected V = {V} not to exceed Vp = {Vp}")
    N = B * T
    probs, targets, dlosses = abs(draw(N, Vp)), draw.words(V, N), draw.fp32(N)
    probs[:, V:] = np.nan
    targets[-1] = V - 1
    return (dict(N=N, probs=probs, targets=targets, dlosses=dlosses),
            dict(dlogits=in_parts(gradient, probs, targets, dlosses)))


LADDER = Ladder(
    problem, "B=8,T=1024,V=50257,Vp=50304", (*WORDS, "B=1,T=3,V=257,Vp=257"),
    args="dlogits dlosses probs targets N V Vp", fp32="dlosses", versions=(
        Version("one thread per number", "crossentropy_softmax_backward1", "N*Vp"),
        Version("16 bytes per lane", "crossentropy_softmax_backward2", "Vp, N", fits=in_packs),
    ))


EXERCISE = Exercise(
    "crossentropy_softmax_backward1", "padding: columns that must be zero", "a number of dlogits",
    ("The gradient is (probability - 1 at the target) * dlosses[row].",
     "The columns from V to Vp - 1 are padding."),
    padded="dlogits", mistakes=(
        ("the 1 at the target is not subtracted", " - (np.arange(V) == targets[:, None])", ""),
        ("the 1 at the target is added instead of subtracted", "- (np.arange", "+ (np.arange"),
        ("dlosses is left out", "dlosses[:, None] * ", ""),
        ("each row has its own target: targets[row]", "targets[:, None]", "targets[:1, None]"),
        ("each row has its own loss: dlosses[row]", "dlosses[:, None]", "dlosses[:1, None]")))
