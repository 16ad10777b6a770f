"""Devices by name, for features, tools and tests: the trainer's GPU with more CUDA files than
kernels.cu, and --device and --graph 0, since train_gpt2.py only knows GPUs and graphs."""
import train_gpt2
from dev.common.config import Config
from dev.common.cuda_source import check_arrays
from dev.cpu.device import Cpu
from dev.cpu.emulated import Emulated
from dev.features.feature import Feature, Flag, stack
from train_gpt2 import UserError


class Beside:
    """A mixin in front of the trainer's devices. beside: CUDA files to compile behind those of the
    config."""

    def __init__(self, dtype, c, beside=()):
        self.sources = [*c.SOURCES, *beside]
        try:
            super().__init__(dtype or "bf16", c)
        except UserError as e:
            raise UserError(f"{e}; --device cpu needs no GPU") from None

    def compile(self, sources):
        _, *more = sources  # kernels.cu is in self.sources
        super().compile([*self.sources, *more])

    def launch(self, name, items, *args, **sizes):
        if name in self.kernels:
            check_arrays(self.kernels[name], args, self.real)
        super().launch(name, items, *args, **sizes)


class Cuda(Beside, train_gpt2.Cuda):
    """train_gpt2.Cuda with more files."""


class FastCuda(Beside, train_gpt2.FastCuda):
    """train_gpt2.FastCuda with more files."""


# The CPU's devices: kernels as loops; and kernels.cu itself, thread by thread
ON_CPU = {"cpu": Cpu, "emulated": Emulated}


def device_class(name, plain=False):
    """The class of the device "cuda", "cpu" or "emulated"; plain: without train_gpt2.py's section
    "Faster"."""
    if name != "cuda":
        return ON_CPU[name]
    from dev.features.products import TimedProducts
    return Cuda if plain else stack(FastCuda, [TimedProducts])


def make_device(name, dtype, c, plain=False, beside=()):
    """A device; for the arguments see Cuda, Cpu and Emulated."""
    return device_class(name, plain)(dtype, c, beside)


def on_cpu(name, dtype, c, only=None):
    """The device "cpu" or "emulated" for the trainer's own Config. only: the kernels that are
    emulated (default: all)."""
    c = Config(**vars(c))
    return Cpu(dtype, c) if name == "cpu" else Emulated(dtype, c, only=only)


def address_of(array):
    """Where an array starts in memory, a GPU's or the host's: a number."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class WithoutGraphs:
    """A mixin in front of a device that would record a step's launches."""

    def repeat(self, graphs, key, work):
        work()


class OnCpu:
    """Training on the CPU device."""

    def find_length(self):
        T = super().find_length()
        return T if self.flags.seq_len else min(T, 64)


NO_GRAPH = Feature("no graph", lambda flags, ranks: not flags.graph, device=WithoutGraphs, flags=(
    Flag(None, "--graph", "switch", 1, "0: on a GPU, launch kernels one by one instead of as a "
         "graph", "the machine", after="--plain", may_differ=True),))
CPU = Feature("cpu", lambda flags, ranks: flags.device in ON_CPU, training=OnCpu, flags=(
    Flag(None, "--device", ("cuda", *ON_CPU), None, "where to compute (default: cuda if there is a "
         "GPU, else cpu); emulated: kernels.cu itself on the CPU, slow", "the machine",
         restored=False),
    Flag("-t", "--seq-len", "count", None, "T, tokens in a sequence (default: 1024 on a GPU, 64 on "
         "a CPU)", must_agree=True)))
