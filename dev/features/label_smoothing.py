"""--label-smoothing E: the target is the right word with probability 1 - E, and otherwise a random
one of the V words (Szegedy et al. 2016, section 7). So the model gains nothing by pushing one logit
far above the others:

    t = (1 - E) * (1 at the right word, else 0) + E / V
    loss = -sum(t * log(softmax(logits)))       gradient = softmax(logits) - t

Only the training loss is smoothed. Validations and HellaSwag use the plain loss, so they compare
with other runs. See label_smoothing.cu.
"""
from dev.features.feature import Feature, Flag, kernels_of

SOURCE = kernels_of(__file__)


class Smoothed:
    """A model whose training loss is smoothed."""

    def loss_forward(self, rows, logits, with_gradient=False):
        if not with_gradient:
            super().loss_forward(rows, logits)
            return
        c, N = self.config, len(logits)
        targets = self.batch.targets.reshape(-1)[rows]
        self.device.launch("smoothed_classifier", N, logits, self.acts.losses[rows], targets,
                           self.token_weight(), self.flags.label_smoothing, N, c.V, c.Vp)


FEATURE = Feature(
    "label smoothing", lambda flags, ranks: flags.label_smoothing, Smoothed, sources=(SOURCE,),
    flags=(
        Flag(None, "--label-smoothing", "fraction", 0.0, "E: train on targets of 1-E for the right "
             "word plus E/V for each of the V words; validations do not",
             "experiments, and the seed", after="--attention"),))
