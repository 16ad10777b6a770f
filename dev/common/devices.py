"""Devices by name, for tools and tests; and --device cpu and --graph 0, since train_gpt2.py only
knows GPUs and graphs."""
from dev.cpu.device import Cpu


def device_class(name, plain=False):
    """The class of the device "cuda" or "cpu"; plain: without train_gpt2.py's section "Faster"."""
    if name == "cpu":
        return Cpu
    from dev.gpu.products import with_timed_products
    from train_gpt2 import Cuda, FastCuda
    return Cuda if plain else with_timed_products(FastCuda)


def make_device(name, dtype, c, plain=False, graph=True, beside=()):
    """A device; for the arguments see Cuda and Cpu."""
    device = device_class(name, plain)(dtype, c, beside)
    device.graph = graph  # "Faster" records a step's launches
    return device


def address_of(array):
    """Where an array starts in memory, a GPU's or the host's: a number."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class OneByOne:
    """Training that launches kernels one by one."""

    def make_device(self, *beside):
        device = super().make_device(*beside)
        device.graph = False
        return device


class OnCpu:
    """Training on the CPU device."""
    longest = 64  # T without -t

    def device_class(self):
        return Cpu
