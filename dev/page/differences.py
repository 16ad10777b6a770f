"""The gradient, believed: losses that the trainer computes when one parameter is changed a little,
for the page to set beside the backward pass."""
import math

import numpy as np

from train_gpt2 import pack_batch

COUNT = 200  # parameters
STEPS = 0.1, 0.03, 0.01  # h


def chosen(config, tokens, count=COUNT, seed=0):
    """[(name, layer or None, index)] of `count` parameters, as many of each tensor as of another.
    Of wte only rows of words that occur, in tokens."""
    random = np.random.default_rng(seed)
    tensors = [(row, l) for row in config.parameter_table() for l in range(max(1, row.layers))]
    found = []
    for i, (row, l) in enumerate(tensors):
        share = count // len(tensors) + (i < count % len(tensors))
        size = math.prod(row.shape)
        places = random.choice(size, min(share, size), replace=False)
        if row.name == "wte":
            words = random.choice(np.unique(tokens), share)
            places = words * row.shape[1] + random.integers(0, row.shape[1], share)
        found += [(row.name, l if row.layers else None, int(place)) for place in places]
    return found


def mean_loss(model):
    """The mean loss of the batch that is set. The trainer's own is rounded to fp32; its tokens'
    losses are added up here in float64, or their difference would be lost."""
    model.forward_pass()
    model.loss_pass()
    return float(model.device.get(model.acts.losses).astype(np.float64).mean())


def differences(model, tokens, targets, count=COUNT):
    """For each chosen parameter {name, layer, index, losses: [[h, loss(w + h), loss(w - h)]]}. The
    model stays as it was."""
    model.set_batch(pack_batch(tokens, targets))
    rows = []
    for name, layer, index in chosen(model.config, tokens, count):
        whole = getattr(model.params, name)
        own = (whole if layer is None else whole[layer]).reshape(-1)
        kept = own[index]
        losses = []
        for h in STEPS:
            pair = []
            for sign in (1, -1):
                own[index] = kept + np.float32(sign * h)
                pair.append((float(own[index]) - float(kept), mean_loss(model)))
            (up, above), (down, below) = pair
            losses.append([(up - down) / 2, above, below])
        own[index] = kept
        rows.append(dict(name=name, layer=layer, index=index, losses=losses))
    return rows
