"""The line of a step ends with the share of the GPU's peak FLOP/s that it reaches."""
import functools

from dev.features.feature import Feature

# Dense FLOPs of a multiprocessor per clock, from NVIDIA's architecture white papers
FLOPS_PER_CLOCK = {  # by compute capability
    75: dict(fp32=128),
    80: dict(fp32=128, tf32=1024, bf16=2048), 86: dict(fp32=256, tf32=256, bf16=512),
    89: dict(fp32=256, tf32=256, bf16=512, fp8=1024),
    90: dict(fp32=256, tf32=2048, bf16=4096, fp8=8192),
    100: dict(fp32=256, tf32=4096, bf16=8192, fp8=16384),
    120: dict(fp32=256, tf32=256, bf16=512, fp8=1024)}


def peak_flops(device):
    """FLOP/s in the device's dtype; 0 if unknown, and for a CPU."""
    if device.name != "cuda":
        return 0
    flops = FLOPS_PER_CLOCK.get(device.capability, {}).get(device.dtype, 0)
    return flops * device.multiprocessors * device.gpu.attributes["ClockRate"] * 1e3  # from kHz


def flops_per_token(c, T):
    """FLOPs to train on one token: 6 for each weight of a matrix product (2 forward, 4 backward),
    and 12*L*C for each of the T/2 tokens that attention sees on average (Chowdhery et al. 2022,
    appendix B, halved since it is causal)."""
    layers = sum(row.size for row in c.parameter_table() if row.decay and row.layers)
    weights = layers + c.Vp * c.C  # the head's
    return 6 * weights + 6 * c.L * c.C * T


def peak_of(device):
    """The end of a device's name."""
    peak = peak_flops(device)
    return f", peak {peak / 1e12:.0f} TFLOP/s" if peak else ""


class Titled:
    """A device with its peak in its name."""

    @functools.cached_property
    def peak(self):
        return peak_flops(self)  # CuPy asks the driver for some hundred numbers

    def __str__(self):
        return super().__str__() + peak_of(self)


def share_of_peak(run, seconds):
    """The share of its device's peak that a step of so many seconds reaches; 0 if unknown."""
    tokens = run.total_batch // run.count  # of this device
    flops = tokens * flops_per_token(run.config, run.model.T)
    return run.device.peak and flops / seconds / run.device.peak


FEATURE = Feature("peak", device=Titled)
