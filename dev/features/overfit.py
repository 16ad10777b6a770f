"""--overfit: train on the first batch of -j over and over. The loss falls to nearly 0 if the model
can learn anything at all."""
from dev.features.feature import Feature, Flag


class Overfit:
    """Training on one batch."""

    def data_paths(self):
        _, val = super().data_paths()
        return val, val

    def next_batches(self):
        self.train_data.restart()
        return super().next_batches()


FEATURE = Feature("overfit", lambda flags, ranks: flags.overfit, training=Overfit, flags=(
    Flag("-a", "--overfit", "switch", 0, "1: train on the first batch of -j over and over",
         "experiments, and the seed", must_agree=True),))
