"""How long a version takes on a GPU, how long a library takes, and the least time in which the GPU could do it."""
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.lab.inputs import stored
from dev.lab.ladder import describe_choice
from train_gpt2 import BF16


def cold(device):
    """The number of sets that a timing goes round, as a function of their bytes. Together they are more than twice as
    large as L2, so that nothing of a set is left there when its turn comes again."""
    return lambda nbytes: min(1024, 2 * device.gpu.attributes["L2CacheSize"] // nbytes + 1)


def time_rounds(device, works, recorded=True):
    """Seconds a launch, the median of several rounds over all sets; works[i]() launches on set i.

    A launch from Python takes longer than many of these kernels, so a round is a graph that is replayed between two
    CUDA events. It has at least 32 launches, so that the events and the start of the graph do not count. There are as
    many rounds as fit into 50 ms, at least 3 and at most 20. Launches of more than 10 ms are timed one by one. What
    cannot be recorded is launched from Python, which is as exact if a launch takes the GPU longer than the host.
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
    """Seconds that PyTorch takes, on the same stream and sets; None if it is not installed or has no such function."""
    ladder, device = bench.ladder, bench.device
    try:
        import torch
    except ImportError:
        return None
    if not ladder.torch:
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
        return time_rounds(device, [ladder.torch(torch, x) for x in tensors])


def ceiling(device, what, ceilings):
    """For "copy" the bytes per second, read and written, of copies of 1 GiB in device memory; for a dtype the FLOPs per
    second of cuBLAS's product of two 8192 x 8192 matrices. ceilings {what: rate} keeps what was measured before."""
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
    """The time of one version in one dtype, with one choice."""
    kernel: str
    number: int
    dtype: str
    what: str
    choice: str  # in words
    own: bool  # whether the trainer launches it like this
    seconds: float
    rate: str  # GB/s or TFLOP/s, in words
    bound: str  # "bytes" or "FLOPs", whichever takes longer
    share: float  # of the rate that the device allows


def timing_of(bench, version, number, choice, own, seconds, ceilings):
    """A Timing. The least possible time is that of moving each byte once at the copy bandwidth, or of the FLOPs at the
    matmul rate, whichever is longer."""
    least, bound = bench.traffic / ceiling(bench.device, "copy", ceilings), "bytes"
    rate = f"{bench.traffic / seconds / 1e9:,.0f} GB/s"
    if bench.flops:
        products = bench.flops / ceiling(bench.device, bench.device.dtype, ceilings)
        least, bound = max((least, bound), (products, "FLOPs"))
        rate = f"{bench.flops / seconds / 1e12:,.2f} TFLOP/s"
    return Timing(bench.ladder.name, number, bench.device.dtype, version.what, describe_choice(choice), own, seconds,
                  rate, bound, least / seconds)
