"""How long a version takes on a GPU, how long a library takes, and the least time in which the GPU
could do it; and what the lab writes of that: a table for each kernel, RESULTS.md, and a chart.
"""
import datetime
import hashlib
import math
import re
import subprocess
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.lab.ladder import DTYPES, LAB, describe_choice, find_ladder, stored
from train_gpt2 import BF16, UserError, replace_file


def cold(device):
    """The number of sets that a timing goes round, as a function of their bytes. Together they are
    more than twice as large as L2, so that nothing of a set is left there when its turn comes
    again."""
    return lambda nbytes: min(1024, 2 * device.gpu.attributes["L2CacheSize"] // nbytes + 1)


def time_rounds(device, works, recorded=True):
    """Seconds a launch, the median of several rounds over all sets; works[i]() launches on set i.

    A launch from Python takes longer than many of these kernels, so a round is a graph that is
    replayed between two CUDA events. It has at least 32 launches, so that the events and the start
    of the graph do not count. There are as many rounds as fit into 50 ms, at least 3 and at most
    20. Launches of more than 10 ms are timed one by one. What cannot be recorded is launched from
    Python, which is as exact if a launch takes the GPU longer than the host.
    """
    events, stream = ([device.cupy.cuda.Event() for _ in range(2)],
                      device.cupy.cuda.get_current_stream())

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
    """Seconds that PyTorch takes, on the same stream and sets; None if it is not installed or has
    no such function."""
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
        tensors = [SimpleNamespace(**{name: tensor(value) for name, value in vars(a).items()})
                   for a in bench.sets]
        return time_rounds(device, [ladder.torch(torch, x) for x in tensors])


def ceiling(device, what, ceilings):
    """For "copy" the bytes per second, read and written, of copies of 1 GiB in device memory; for a
    dtype the FLOPs per second of cuBLAS's product of two 8192 x 8192 matrices. ceilings {what:
    rate} keeps what was measured before."""
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
        out, one, two = (device.empty(n * n * real.itemsize).view(real).reshape(n, n)
                         for _ in range(3))
        for array in (one, two):
            device.put(array, np.resize(stored(np.random.default_rng(0).standard_normal(2**20 + 1),
                                               real), (n, n)))
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
    """A Timing. The least possible time is that of moving each byte once at the copy bandwidth, or
    of the FLOPs at the matmul rate, whichever is longer."""
    least, bound = bench.traffic / ceiling(bench.device, "copy", ceilings), "bytes"
    rate = f"{bench.traffic / seconds / 1e9:,.0f} GB/s"
    if bench.flops:
        products = bench.flops / ceiling(bench.device, bench.device.dtype, ceilings)
        least, bound = max((least, bound), (products, "FLOPs"))
        rate = f"{bench.flops / seconds / 1e12:,.2f} TFLOP/s"
    return Timing(bench.ladder.name, number, bench.device.dtype, version.what,
                  describe_choice(choice), own, seconds, rate, bound, least / seconds)


# ---- Tables, RESULTS.md and the chart

HEADER = ("| kernel | version | fp32 | tf32 | bf16 | what holds it back |\n"
          "| --- | --- | --- | --- | --- | --- |\n")
IMAGES = LAB.parent / "images"
ENOUGH = 0.85  # of the ceiling; a last version below this says why


def describe_gpu(device, ceilings):
    """{name: words} of a GPU, its driver, and its ceilings."""
    runtime = device.cupy.cuda.runtime
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.split()
    rates = [f"copies {ceilings['copy'] / 1e12:.2f} TB/s"] if "copy" in ceilings else []
    rates += [f"products {ceilings[dtype] / 1e12:,.1f} TFLOP/s in {dtype}" for dtype in DTYPES
              if dtype in ceilings]
    cuda = divmod(runtime.runtimeGetVersion(), 1000)
    return {"device": str(device).split(",")[0], "driver": driver[0] if driver else "unknown",
            "cuda": f"{cuda[0]}.{cuda[1] // 10}", "rates": ", ".join(rates)}


def commit():
    """The commit that is checked out, in words."""
    git = ["git", "-C", str(LAB), "describe", "--always", "--abbrev=10", "--match=",
           "--dirty=, with changes"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def table(name, report):
    """The rows of one kernel in the Markdown table, one for each version. What failed has none."""
    timings = [t for t in report.timings if t.kernel == name]
    numbers, rows = sorted({t.number for t in timings}), ""
    for number in numbers:
        own = [t for t in timings if t.number == number]
        cells = [name if number == numbers[0] else "", f"{number}: {own[0].what}",
                 *(cell([t for t in own if t.dtype == dtype], report) for dtype in DTYPES),
                 held_back(name, report) if number == numbers[-1] else ""]
        rows += f"| {' | '.join(cells)} |\n"
    return rows


def cell(timings, report):
    """How long a version takes in one dtype. If the trainer's own launch is not the fastest, the
    fastest follows."""
    parts = []
    for t in sorted(timings, key=lambda t: not t.own):
        library, seconds = report.library.get((t.kernel, t.dtype), ("", None))
        parts.append(", ".join(filter(None, (
            f"{1e6 * t.seconds:,.1f} us", f"{t.share:.1%} of {t.bound}",
            f"{seconds / t.seconds:.0%} of {library}" if seconds else "", t.choice))))
    return "; ".join(parts)


def held_back(name, report):
    """Why the last version is below ENOUGH of its ceiling: for the dtypes in which it is, the
    reasons from its row in the kernel's .py. If the trainer launches it, that launch counts.
    Nothing is said if the last version failed."""
    reasons = {}
    for dtype in DTYPES:
        number, version = max(enumerate(find_ladder(name).versions, 1),
                              key=lambda v: (dtype in v[1].dtypes, v[0]))
        timings = [t for t in report.timings
                   if (t.kernel, t.dtype, t.number) == (name, dtype, number)]
        last = max(timings, key=lambda t: t.own, default=None)
        if last and last.share < ENOUGH:
            reason = version.held_back
            if not isinstance(reason, str):
                reason = reason.get(dtype, "not explained yet")
            reasons.setdefault(reason, []).append(dtype)
    return "; ".join(f"{', '.join(dtypes)}: {reason}" for reason, dtypes in reasons.items())


MARK = re.compile(r"<!-- written by dev\.lab --all, (\w+) -->\n(.*)<!-- end of what dev\.lab "
                  r"writes -->\n", re.S)
INTRO = """# The kernel lab's timings

Each kernel's versions, timed on a GPU by `python -m dev.lab --all`, which writes all between the
two marks. README.md in this folder says how it measures and what the ceiling is; `python -m dev.lab
KERNEL` says what a kernel computes, and at which sizes it is timed.

"""


def mark(body):
    return (f"<!-- written by dev.lab --all, {hashlib.sha256(body.encode()).hexdigest()[:16]} "
            f"-->\n{body}<!-- end of what dev.lab writes -->\n")


def is_unchanged(text):
    """Whether the text between the marks is what the lab wrote there."""
    found = MARK.search(text)
    return bool(found) and mark(found[2]) == found[0]


def write(folder, names, report):
    """Put the table of kernels between the marks of a folder's RESULTS.md, leave the rest as it
    is, and draw ladders.svg, that of dev/lab in dev/images. Without names, only check that this can
    be done. Raises UserError if the text between the marks was edited, or the folder cannot be
    made."""
    path = folder / "RESULTS.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {folder}: no folder can be made there ({e.strerror}); choose "
                        "another") from None
    text = path.read_text(encoding="utf-8") if path.exists() else f"{INTRO}{mark('')}"
    if not is_unchanged(text):
        raise UserError(f"{path}: the text between the lab's marks was edited by hand, so it is no "
                        "measurement; move the file away, or choose another --out")
    if not names:
        return
    d = report.device
    body = (f"\n{d['device']}, driver {d['driver']}, CUDA {d['cuda']}, {datetime.date.today()}, "
            f"commit {commit()}. Ceilings, measured in the same run: {d['rates']}.\n\n{HEADER}")
    body += "".join(table(name, report) for name in names)
    replace_file(path, [MARK.sub(lambda _: mark(f"{body}\n"), text).encode()])
    draw_chart((IMAGES if folder == LAB else folder) / "ladders.svg", names, report.timings)


def draw_chart(path, names, timings):
    """An SVG with a row for each kernel: the share of the ceiling that each version reaches, in its
    first dtype, on a logarithmic scale. The last version is black."""
    left, right, row, lowest = 240, 860, 22, 1e-4

    def x(share):
        return left + (right - left) * (1 - math.log(max(min(share, 1), lowest)) / math.log(lowest))

    drawn = []
    for name in names:
        best = {}
        for t in timings:
            if t.kernel == name:
                best.setdefault(t.number, t.share)
        if best:
            drawn.append((name, best))
    bottom = row * (len(drawn) + 1)
    svg = ([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 40} {bottom + 40}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
            'fill="white"/>'])
    for share in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1):
        svg.append(f'<path d="M{x(share):.0f} {row / 2}V{bottom}" stroke="#ccc"/>'
                   f'<text x="{x(share):.0f}" y="{bottom + 16}" '
                   f'text-anchor="middle">{100 * share:g}%</text>')
    svg.append(f'<text x="{left}" y="{bottom + 34}">the least possible time as a share of the '
               'measured one</text>')
    for i, (name, best) in enumerate(drawn, 1):
        svg.append(f'<text x="{left - 14}" y="{row * i + 4}" text-anchor="end">{name}</text>')
        for number, share in best.items():
            fill, ink = ("black", "white") if number == max(best) else ("white", "black")
            svg.append(f'<circle cx="{x(share):.1f}" cy="{row * i}" r="8" fill="{fill}" '
                       f'stroke="black"/><text x="{x(share):.1f}" y="{row * i + 4}" '
                       f'text-anchor="middle" fill="{ink}">{number}</text>')
    replace_file(path, ["\n".join([*svg, "</svg>\n"]).encode()])
