"""losses (N) of logits (N,Vp), which become their gradient dloss * (softmax - 1 at the target)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import cross_entropy, dcross_entropy
from dev.lab.kernels.crossentropy_forward import MISTAKES, classifier_problem, fused_classifier
from dev.lab.kernels.softmax_forward import WORDS, padded
from dev.lab.ladder import Ladder, Version, in_parts
from dev.lab.mistakes import exp32, largest, sums, whole


def problem(draw, B, T, V, Vp):
    def both(targets, x):
        dlosses = np.full(len(targets), dloss)
        return cross_entropy(targets, x[:, :V]), padded(dcross_entropy(targets, dlosses, x[:, :V]),
                                                        Vp)

    N = B * T
    logits, targets, terms = classifier_problem(draw, N, V, Vp)
    dloss = float(np.float32(1 / N))
    losses, dlogits = in_parts(both, targets, logits)
    return (dict(N=N, dloss=dloss, logits=logits, targets=targets),
            dict(losses=losses, logits=dlogits), dict(losses=terms))


def trainers(device, a):
    fused_classifier(device, a, with_gradient=True)


LADDER = Ladder(
    problem, "B=8,T=1024,V=50257,Vp=50304",
    (*WORDS, "B=1,T=3,V=257,Vp=264", "B=1,T=3,V=128256,Vp=128256"),
    trainer_checks=("B=1,T=5,V=384,Vp=384", "B=1,T=7,V=4096,Vp=4224"),
    args="logits losses targets dloss N V Vp", fp32="losses", sums="losses", versions=(
        Version("one thread per row, four passes", "classifier_fused1", "N", threads=(32, 128),
                limits=dict(fp32=1e-4, bf16=1e-4)),  # a sum of 50,257 numbers one by one
        Version("one block per row, three passes", "classifier_fused2", "N",
                threads=(256, 512, 1024)),
        Version("two passes", "classifier_fused3", "N", threads=(256, 512, 1024)),
        Version("16 bytes per lane, one row in shared memory", "classifier_fused4",
                "min(blocks, N)", threads=(512, 1024), shared="Vp*itemsize",
                more=dict(blocks=(2, 132, 264)), fits=lambda a: a.Vp <= 50304 and a.Vp % a.W == 0),
        Version("two rows in shared memory, or as much of one as fits: the trainer's", trainers,
                threads=(256, 512, 1024), more=dict(rows=(None, 0, 0.7, 1, 2)), trainer=True),
    ))


def formula(a):
    x = a.logits[:, : a.V]
    top = largest(x)
    e = exp32(x - top)
    hot = np.arange(a.V) == a.targets[:, None]
    losses = (np.log(whole(e)) + top)[:, 0] - x[np.arange(a.N), a.targets]
    return dict(losses=losses, logits=padded(a.dloss * (e / whole(e) - hot), a.Vp))


EXERCISE = Exercise(
    "classifier_fused1", "a loss and its gradient in place: what to read first", "a row",
    ("The gradient is dloss * (softmax - 1 at the target), and 0 in the columns from V to Vp - 1.",
     "Read the target's logit before you overwrite it."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math",
    rows=("logits", "logits losses", "range"), padded="logits", formula=formula, mistakes=(
        MISTAKES[0],
        ("the target's logit was read when the gradient stood there already. Read it before",
         " - x[np", " - (a.dloss * (e / whole(e) - hot))[np"),
        *MISTAKES[1:],
        ("the 1 at the target is not subtracted", " - hot", ""),
        ("the sign is the other one: it is softmax minus 1 at the target", "a.dloss", "-a.dloss"),
        ("dloss is left out", "a.dloss * ", ""),
        *sums("e / whole(e)", "the sum of the exponentials")))
