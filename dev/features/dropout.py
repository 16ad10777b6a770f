"""--dropout P: in training, set a share P of the numbers that enter the residual stream to zero, at
random, and divide the others by 1 - P, so that the mean stays (Srivastava et al. 2014; "inverted").
As in GPT-2 that is the sum of the embeddings, the output of attention and that of the MLP, each
behind its last product; Llama 3 gets it in the same places. GPT-2 also drops weights of attention.
Those exist only inside attention's kernels, which this leaves alone.

Validations, samples and HellaSwag drop nothing.

No mask is stored. Whether a number is dropped is a hash of the seed, the step, the place in the
model, and the number's index in the step's tokens: see dropout.cu. The backward pass, and
--recompute, hash the same again. So a resumed run drops the same numbers, and N ranks drop what one
process drops with N times as many micro-batches. (--replay is one process, and drops what rank 0
dropped.)

A branch is dropped in place, before the norm's kernel adds it to the stream. On the way back the
gradient of the stream goes on unchanged, and a product with a branch's weights reads a dropped copy
of it, back.dbranch. That takes 4 more launches per layer and 8 passes over (N,C) numbers. On a GPU
the norms' kernels themselves do it, by dropout.cuh, with the same numbers: of the passes only the
writing of dbranch is left. FP8 keeps all of them, since other kernels make the copies of gradients
in FP8. Gradients of biases have passes of their own here: fused_biases.py would sum the stream's.
"""
import contextlib

import numpy as np

from dev.features import fused_biases
from dev.features.base import Counted
from dev.features.devices import address_of
from dev.features.feature import Feature, Flag, is_fast, kernels_of
from train_gpt2 import PARTIAL_ROWS, Row

SOURCE = kernels_of(__file__)
OUTPUT = SOURCE.with_suffix(".cuh")  # in place of kernels.cu's struct Output
# What dropout.cuh's struct adds: counter, part, threshold, n, branch, site, scale, key, first
FIELDS = np.dtype("u8, u8, u8, u8, u8, i4, f4, u8, u8")
NONE = np.array([(0, 0, 0, 0, 0, 0, 1, 0, 0)], FIELDS)  # times 1: samples' norms keep a branch

# What makes a branch, and which site of its layer that is
SITES = {"attproj": 1, "fcproj": 2}


class Dropped(Counted):
    """A model that drops numbers in its training passes. Its sites are 0, the embeddings; 2l + 1,
    the output of attention in layer l; 2l + 2, that of its MLP."""
    dropping = True  # False in forward() and next_logits()

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        # In FP8, layernorm_backward leaves three sums of each block; elsewhere fused_biases.py says
        # so itself.
        backward = [row._replace(shape=(3, PARTIAL_ROWS, c.C)) if row.name == "partials" else row
                    for row in tables["backward"]]
        return tables | {"backward": [*backward, Row("dbranch", (B * T, c.C), device.real)],
                         "update": [*tables["update"], Row("part", (1,), np.uint64)]}

    def set_batch(self, batch):
        """Also say which part of the step's tokens it is: micro-batches of one process are in the
        order in which N ranks take them."""
        super().set_batch(batch)
        self.device.put(self.adam.part, [self.micro * self.count + self.rank])

    def drop(self, kernel, out, inp, site):
        """out = inp with the numbers of this site dropped; out may be inp."""
        P = self.flags.dropout
        self.device.launch(kernel, out.size, out, inp, self.adam.counter, self.adam.part, site,
                           round(P * 2**32), 1 / (1 - P), out.size)

    def norm_forward(self, y, branch):
        """As the model's, which adds the branch to the stream."""
        if self.dropping and branch is not None:
            self.drop("drop", branch, branch, 2 * y.l + (y.name == "ln2"))
        super().norm_forward(y, branch)

    def linear_backward(self, dinp, dout, inp, y, **more):
        """As the model's; a product that made a branch gets the branch's gradient in place of the
        stream's."""
        if self.dropping and y.name in SITES:
            dbranch = self.back.dbranch
            self.drop("drop", dbranch, dout, 2 * y.l + SITES[y.name])
            dout = dbranch
        super().linear_backward(dinp, dout, inp, y, **more)

    def embedding_forward(self):
        super().embedding_forward()
        if self.dropping:
            # With --recompute 2 residual has several tensors, and the stream begins in the first.
            x = self.acts.residual.reshape(-1)[: self.acts.branch.size]
            self.drop("drop_stream", x, x, 0)

    def embedding_backward(self):
        if self.dropping:
            dx = self.back.dresidual
            self.drop("drop", dx, dx, 0)
        super().embedding_backward()

    def forward(self, tokens, targets):
        self.dropping = False
        try:
            return super().forward(tokens, targets)
        finally:
            self.dropping = True

    def next_logits(self, tokens):
        self.dropping = False
        try:
            return super().next_logits(tokens)
        finally:
            self.dropping = True


class DroppedOutputs(fused_biases.SummedOutputs):
    """A mixin in front of a device: a norm's kernels drop numbers of a branch."""
    OUTPUT = OUTPUT, fused_biases.OUTPUT
    dropped = NONE  # what they drop

    def output(self, array):
        return [*super().output(array), *self.dropped.view(np.uint64)]


class DroppedInside:
    """A model on such a device: norms do what Dropped does beside them."""

    def drop(self, kernel, out, inp, site):
        """As Dropped.drop, of the stream alone."""
        if kernel == "drop_stream":
            super().drop(kernel, out, inp, site)

    def norm_forward(self, y, branch):
        with self.dropped(y, None):
            super().norm_forward(y, branch)

    def norm_backward(self, dx, dout, y):
        """As the model's. Below the first norm are the embeddings, which read dx."""
        with self.dropped(y, dx if (y.name, y.l) == ("ln1", 0) else self.back.dbranch):
            super().norm_backward(dx, dout, y)

    @contextlib.contextmanager
    def dropped(self, y, gradient):
        """Inside, a kernel of the norm y drops numbers of the branch before it, or makes the
        branch's gradient."""
        P = self.flags.dropout if self.dropping else 0.0
        adam, site = self.adam, 2 * y.l + (y.name == "ln2")
        fields = (address_of(adam.counter), address_of(adam.part), round(P * 2**32), y.out.size,
                  0 if gradient is None else address_of(gradient), site, 1 / (1 - P), 0, 0)
        self.device.dropped = np.array([fields], FIELDS)
        yield
        self.device.dropped = NONE


class DroppedTraining:
    """A run of such a model. A step that is looked at again drops what it dropped before."""

    def give_up(self, queued, verdict):
        self.model.count_step(queued.number)
        super().give_up(queued, verdict)

    def explain_outlier(self, queued, scores):
        self.model.count_step(queued.number)  # the next step may be queued already
        super().explain_outlier(queued, scores)

    def set_state(self, model, notes):
        super().set_state(model, notes)
        model.count_step(notes.get("step", 0) + 1)  # for --replay


FEATURE = Feature(
    "dropout", lambda flags, ranks: flags.dropout, Dropped, DroppedTraining, sources=(SOURCE,),
    flags=(
        Flag(None, "--dropout", "fraction", 0.0, "P: in training, drop a share P of the embeddings "
             "and of each layer's two outputs; attention's weights stay", "the update"),))
INSIDE = Feature(
    "dropout in norms",
    lambda flags, ranks: flags.dropout and is_fast(flags) and flags.dtype != "fp8", DroppedInside,
    device=DroppedOutputs, sources=(fused_biases.SOURCE,))
