"""bfloat16, which NumPy does not have: arrays hold its bits, as train_gpt2.BF16."""
import numpy as np


def to_bf16(x):
    """fp32 rounded to bfloat16's bits, to nearest with ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def joined(upper, lower):
    """fp32 from its two halves, as train_gpt2.kept_as makes them."""
    return ((upper.astype(np.uint32) << 16) + lower.astype(np.uint32)).view(np.float32)


def master_numbers(model):
    """A model's fp32 parameters, which AdamW updates, flat and on the host."""
    names = ("param share", "low share") if "param share" in model.arenas else (
        "parameters", "low bits")
    upper, lower = map(model.arenas.get, names)
    upper = model.device.get(upper.view(model.device.real))
    return upper if lower is None else joined(upper, model.device.get(lower.view(np.int16)))
