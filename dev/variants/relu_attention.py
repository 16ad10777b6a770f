"""--attention relu: attention weights are max(0, q.k / sqrt(HS)) instead of a softmax (Wortsman et
al. 2023)."""


class Relu:
    """A model with ReLU attention."""
    relu = 1
