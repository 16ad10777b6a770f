"""--attention relu: attention weights are max(0, q.k / sqrt(HS)) instead of a softmax (Wortsman et
al. 2023). kernels.cu has both; a switch says which it is compiled for."""
from dev.features.feature import Feature, Flag


class ReluAttention:
    """A mixin in front of a device."""

    def switches(self):
        return [*super().switches(), "-DRELU=1"]


FEATURE = Feature(
    "relu", lambda flags, ranks: flags.attention == "relu", device=ReluAttention, flags=(
        Flag(None, "--attention", ("softmax", "relu"), "softmax", "relu: max(0, q.k / sqrt(HS))",
             "experiments, and the seed", after="--overfit"),))
