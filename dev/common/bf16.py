"""Arrays of bfloat16, which NumPy does not have: their bits, as train_gpt2.BF16."""
import numpy as np


def to_bf16(x):
    """fp32 numbers rounded to bfloat16, to nearest with ties to even, as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def joined(upper, lower):
    """fp32 numbers from both of their halves, as train_gpt2.kept_as makes them."""
    return ((upper.astype(np.uint32) << 16) + lower.astype(np.uint32)).view(np.float32)


def master_numbers(model):
    """The fp32 numbers that AdamW updates in a model, on the host, one after another."""
    names = ("param share", "low share") if "param share" in model.arenas else (
        "parameters", "low bits")
    upper, lower = map(model.arenas.get, names)
    upper = model.device.get(upper.view(model.device.real))
    return upper if lower is None else joined(upper, model.device.get(lower.view(np.int16)))
