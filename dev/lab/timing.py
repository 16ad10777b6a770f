"""How long a version of a kernel takes on a GPU, how long a library takes, and the least that the GPU could take."""
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.lab.kernel import stored
from train_gpt2 import BF16


def cold(device):
    """How many sets of so many bytes a timing goes round: together they are more than twice the L2, so that none of a
    set is left in it when its turn comes again."""
    return lambda nbytes: min(1024, 2 * device.gpu.attributes["L2CacheSize"] // nbytes + 1)


def time_rounds(device, works, recorded=True):
    """Seconds a launch, the median of several rounds over all sets; works[i]() launches on set i.

    To launch from Python takes longer than many of these kernels, so a round is recorded as a graph and replayed, with
    a CUDA event before and behind: at least 32 launches, so that neither the events nor the start of the graph count,
    and as many rounds as fit into 50 ms, at least 3 and at most 20. What takes more than 10 ms is timed one by one.
    What cannot be recorded is launched from Python. That is as good if a launch keeps the GPU longer than the host.
    """
    events, stream = [device.cupy.cuda.Event() for _ in range(2)], device.cupy.cuda.get_current_stream()

    def elapsed(work):
        events[0].record()
        work()
        events[1].record()
        events[1].synchronize()
        return device.cupy.cuda.get_elapsed_time(*events) / 1e3

    once = elapsed(works[-1])
    if once > 0.01:
        return float(np.median([elapsed(work) for work in (3 * works)[:3]]))
    count = len(works) * math.ceil(32 / len(works) if once < 1e-3 else 1)

    def launch_all():
        for i in range(count):
            works[i % len(works)]()

    if recorded:
        stream.begin_capture()
        try:
            launch_all()
        finally:
            launch_all = stream.end_capture().launch
    launch_all()
    rounds = min(20, max(3, round(0.05 / (count * max(once, 1e-6)))))
    return float(np.median([elapsed(launch_all) for _ in range(rounds)])) / count


def time_torch(bench):
    """Seconds that PyTorch takes for the kernel, on the same stream, sets and terms; None if it is not installed or has
    no such function."""
    kernel, device = bench.kernel, bench.device
    try:
        import torch
    except ImportError:
        return None
    if not kernel.torch:
        return None

    def tensor(value):
        if not isinstance(value, device.cupy.ndarray) or value.dtype == np.uint64:
            return value
        if value.dtype == BF16:
            return torch.as_tensor(value.view(np.int16), device="cuda").view(torch.bfloat16)
        return torch.as_tensor(value, device="cuda")

    torch.backends.cuda.matmul.allow_tf32 = device.dtype == "tf32"
    with torch.cuda.stream(torch.cuda.ExternalStream(device.cupy.cuda.get_current_stream().ptr)):
        tensors = [SimpleNamespace(**{name: tensor(value) for name, value in vars(a).items()}) for a in bench.sets]
        return time_rounds(device, [kernel.torch(torch, x) for x in tensors])


def ceiling(device, what, ceilings):
    """The bytes a second, read and written, of copies of 1 GiB within the device's memory; or the FLOPs a second of
    cuBLAS's product of two matrices of 8192 x 8192 in the device's dtype. ceilings {"copy" or dtype: rate} keeps what
    has been measured."""
    if what in ceilings:
        return ceilings[what]
    if what == "copy":
        # Not in a graph, in which the same copies reach two thirds of the rate.
        one, two, cupy, times = device.empty(2**30), device.empty(2**30), device.cupy, []
        for _ in range(10):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            two.data.copy_from_device_async(one.data, one.nbytes)
            end.record()
            end.synchronize()
            times.append(1e-3 * cupy.cuda.get_elapsed_time(start, end))
        ceilings[what] = 2 * one.nbytes / float(np.median(times))
    else:
        n, real = 8192, np.dtype(device.real)
        out, one, two = (device.empty(n * n * real.itemsize).view(real).reshape(n, n) for _ in range(3))
        for array in (one, two):
            device.put(array, np.resize(stored(np.random.default_rng(0).standard_normal(2**20 + 1), real), (n, n)))
        ceilings[what] = 2 * n**3 / time_rounds(device, [lambda: device.matmul(out, one, two.T)])
    return ceilings[what]


class Timing(NamedTuple):
    """What one version takes in one dtype, with one of its choices."""
    kernel: str
    number: int
    dtype: str
    what: str
    choice: str  # in words
    own: bool  # whether that is how the trainer launches it
    seconds: float
    rate: str  # GB/s or TFLOP/s, in words
    bound: str  # "bytes" or "FLOPs": of which the device needs longer
    share: float  # of what the device's bandwidth and matmul rate allow


def timing_of(bench, version, number, choice, own, seconds, ceilings):
    """A Timing. The ceiling is the time that the device needs at least: to move each byte once at its copy bandwidth,
    or to do the FLOPs at its matmul rate, whichever is longer."""
    least, bound = bench.traffic / ceiling(bench.device, "copy", ceilings), "bytes"
    rate = f"{bench.traffic / seconds / 1e9:,.0f} GB/s"
    if bench.flops:
        products = bench.flops / ceiling(bench.device, bench.device.dtype, ceilings)
        least, bound = max((least, bound), (products, "FLOPs"))
        rate = f"{bench.flops / seconds / 1e12:,.2f} TFLOP/s"
    return Timing(bench.kernel.name, number, bench.device.dtype, version.what, choice, own, seconds, rate, bound,
                  least / seconds)
