"""losses (N) = -log(softmax(logits (N,Vp)) at the target), over the first V columns"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
from dev.lab.formulas import cross_entropy
from dev.lab.kernels.softmax_forward import WORDS, logits_of
from dev.lab.ladder import Ladder, Version, in_parts
from dev.lab.mistakes import OVERFLOW, exp32, largest, sums, whole
from train_gpt2 import classifier_launch


def classifier_problem(draw, N, V, Vp):
    """(logits, targets, the size of the terms of a loss): as in logits_of; the logit of the first
    target is -200, so that its probability is 0 in fp32, but not its loss."""
    logits, targets = logits_of(draw, N, V, Vp), draw.words(V, N)
    targets[-1] = V - 1
    if N > 1:
        logits[0, targets[0]] = -200
    return logits, targets, 1 + abs(logits[np.arange(N), targets])


def problem(draw, B, T, V, Vp):
    N = B * T
    logits, targets, terms = classifier_problem(draw, N, V, Vp)
    losses = in_parts(lambda targets, x: cross_entropy(targets, x[:, :V]), targets, logits)
    return (dict(N=N, dloss=0.0, logits=logits, targets=targets), dict(losses=losses),
            dict(losses=terms))


def fused_classifier(device, a, with_gradient):
    """With the trainer's own grid, or with a block for two rows, and shared memory for `rows` rows
    if they fit."""
    blocks, room, shared = classifier_launch(device, a.N, a.Vp, with_gradient)
    if a.rows is not None:
        blocks, room = -(-a.N // 2), min(int(a.rows * a.Vp) // a.W * a.W,
                                         device.max_shared // 16 * a.W)
        shared = room * 16 // a.W
    device.launch("fused_classifier", blocks, a.logits, a.losses, a.targets, a.dloss, a.N, a.V,
                  a.Vp, with_gradient, room, threads=a.threads, shared=shared)


def torch_cross_entropy(torch, x):
    logits, targets = x.logits[:, :x.V], x.targets.long()
    return lambda: torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def trainers(device, a):
    fused_classifier(device, a, with_gradient=False)


LADDER = Ladder(
    problem, "B=8,T=1024,V=50257,Vp=50304", WORDS,
    trainer_checks=("B=1,T=3,V=257,Vp=264", "B=1,T=5,V=384,Vp=384", "B=1,T=7,V=4096,Vp=4224"),
    args="losses logits targets N V Vp", fp32="losses", sums="losses", versions=(
        Version("one thread per row, two passes", "crossentropy_forward1", "N", threads=(32, 128)),
        Version("one block per row", "crossentropy_forward2", "N", threads=(256, 512, 1024)),
        Version("one pass, 16 bytes per lane: the trainer's", trainers, threads=(256, 512, 1024),
                more=dict(rows=(None, 0, 2)), trainer=True, held_back={
                    "bf16": "with 1,024 threads per multiprocessor has two rows, and idles where "
                    "they end: blocks of 256 take 203 us"}),
    ), torch=torch_cross_entropy)


def formula(a):
    x = a.logits[:, : a.V]
    top = largest(x)
    e = exp32(x - top)
    return dict(losses=(np.log(whole(e)) + top)[:, 0] - x[np.arange(a.N), a.targets])


MISTAKES = (
    (OVERFLOW, "largest(x)", "0 * largest(x)"),
    ("the largest number is not added back behind the logarithm", " + top", ""),
    ("the target's logit is not subtracted", " - x[np", " - 0 * x[np"),
    ("the target's logit is added instead of subtracted", " - x[np", " + x[np"),
    ("the logarithm is to base 2: use logf", "np.log", "np.log2"),
    ("the logarithm is to base 10: use logf", "np.log", "np.log10"),
    *sums("log(whole(e))", "the sum of the exponentials"))


EXERCISE = Exercise(
    "crossentropy_forward1", "a loss without overflow: log(sum(exp))", "a row",
    ("The loss is log(sum of exp(x - largest)) + largest - x[target].",
     "Only the first V columns count."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math",
    rows=("logits", "losses", "range"),
    repair=Repair(2, "logf(sum) + top", "logf(sum)",
                  "The sum is of e^(x - top). What is its logarithm?"),
    formula=formula, mistakes=MISTAKES)
