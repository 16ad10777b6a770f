"""The kernel lab: each kernel in several versions, from the most naive to the best, checked and timed.

    python dev/cuda/lab.py                            # lists the kernels
    python dev/cuda/lab.py layernorm_forward          # lists its versions
    python dev/cuda/lab.py layernorm_forward 2        # checks version 2 against NumPy, and times it over block sizes
    python dev/cuda/lab.py layernorm_forward --all    # does so with all its versions, and prints the ladder
    python dev/cuda/lab.py --all                      # does so with all kernels, and writes RESULTS.md and ladders.svg
    python dev/cuda/lab.py --check                    # only checks, all versions of all kernels at small odd shapes

The versions of a kernel are in the .cu file of its name, which is compiled after kernels.cu. ladders.py says what they
are given, how they are launched, and what NumPy makes of the same inputs. Without a GPU everything is checked on the
CPU device, and nothing is timed. A version that fails, or whose result is wrong, gets an error line, and an error in
the table. The others go on, and the exit status is 1.
"""
import argparse
import contextlib
import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

LAB = Path(__file__).resolve().parent
sys.path.insert(0, str(LAB.parent.parent))
from prepro_tinyshakespeare import BF16, UserError, has_gpu, read_kernels, replace_file, to_float  # noqa: E402

import numpy as np  # noqa: E402  (after prepro_tinyshakespeare, which has said how its threads are to wait)
from ladders import LADDERS, Draw  # noqa: E402

from test_gpt2 import KERNEL_LIMIT, stored  # noqa: E402
from train_gpt2 import Config, make_device  # noqa: E402

DTYPES = ("fp32", "tf32", "bf16")
HALF_A_UNIT = 2**-8  # the most that rounding to bf16 changes a number, relative to it

# ---------------------------------------------------------------------------------------------------------------------
# A problem: a kernel's inputs at one shape and in one dtype, and what should come out


def parse_shape(text, default=None):
    """The sizes of "B=8,T=1024,C=768", in place of those of a default. Raises UserError. Some must be multiples, so
    that every row starts on 16 bytes."""
    sizes = dict(default or {})
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not value.isdecimal() or int(value) == 0 or default and name not in default:
            wish = ", ".join(f"{key}={size}" for key, size in (default or {"T": 1024}).items())
            raise UserError(f"--shape {text}: {part!r} is no size here; expected some of {wish}")
        sizes[name] = int(value)
    for name, multiple in {"C": 32, "HS": 16, "H": 8, "Vp": 8, "n": 32}.items():
        if sizes.get(name, 0) % multiple:
            raise UserError(f"--shape {text}: expected {name} to be a multiple of {multiple}")
    return sizes


@functools.lru_cache(1)  # the dtypes of one kernel follow each other, and tf32 is given what fp32 is
def problem_of(problem, sizes, bf16):
    """The namespace of sizes, scalars and host arrays that a version is launched from, in float64 or integers, and
    {name: what should come out}. Raises UserError if the sizes do not fit the kernel."""
    a = SimpleNamespace(**dict(sizes))
    return a, problem(a, Draw(bf16))


def type_of(ladder, name, values, real):
    """What an array is stored in on a device: integers as they are, the rest as real, unless the table says fp32."""
    if values is not None and values.dtype.kind in "iu":
        return values.dtype
    return np.dtype(np.float32 if name in ladder.fp32.split() else real)


def allocate(device, shape, dtype):
    return device.empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


class Bench:
    """A kernel's problem on a device: sets of arrays to launch its versions on, of which the first is checked.

    Cold inputs: a timing goes round the sets, which together are more than twice the L2, so that none of a set is left
    in it when its turn comes again.
    """

    def __init__(self, ladder, device, sizes, timed):
        self.ladder, self.device = ladder, device
        self.given, self.expected = problem_of(ladder.problem, tuple(sizes.items()), device.real == BF16)
        arrays = {name: values for name, values in vars(self.given).items() if isinstance(values, np.ndarray)}
        types = {name: type_of(ladder, name, values, device.real)
                 for name, values in {**self.expected, **arrays}.items()}
        self.traffic = sum(types[name].itemsize * values.size for table in (arrays, self.expected)
                           for name, values in table.items())  # each input is read once, and each output written once
        self.inputs = {}  # on the device, for the sets to be filled from
        for name, values in arrays.items():
            self.inputs[name] = allocate(device, values.shape, types[name])
            device.put(self.inputs[name], stored(values, types[name]))
        shapes = {name: values.shape for name, values in {**self.expected, **arrays}.items()}
        size = sum(types[name].itemsize * math.prod(shape) for name, shape in shapes.items())
        self.sets = []
        for _ in range(min(1024, 2 * device.gpu.attributes["L2CacheSize"] // size + 1) if timed else 1):
            a = SimpleNamespace(**vars(self.given), W=device.W, itemsize=np.dtype(device.real).itemsize)
            for name, shape in shapes.items():
                setattr(a, name, allocate(device, shape, types[name]))
            self.fill(a, shapes)
            self.sets.append(a)
        if ladder.traffic:
            self.traffic = ladder.traffic(self.sets[0])
        self.flops = ladder.flops(self.sets[0]) if ladder.flops else 0
        self.truth = {name: device.cupy.asarray(values) if device.name == "cuda" else values
                      for name, values in self.expected.items()}

    def fill(self, a, names):
        """Give arrays of a set their inputs, or NaN to those that have none."""
        for name in names:
            array = getattr(a, name)
            if name in self.inputs:
                array[...] = self.inputs[name]
            else:
                array.reshape(-1).view(np.uint8)[...] = 255

    def launches(self, version, choice):
        """A function for each set that launches a version with one choice of what can be chosen, such as threads.
        Scratch memory is NaN until it is written."""
        shared = SimpleNamespace(**vars(self.sets[0]), **choice)
        scratch = {}
        for name, shape in (version.scratch(shared) if version.scratch else {}).items():
            scratch[name] = allocate(self.device, shape, type_of(self.ladder, name, None, self.device.real))
            self.fill(SimpleNamespace(**scratch), [name])
        for a in self.sets:
            every = SimpleNamespace(**{**vars(a), **scratch, **choice})
            yield functools.partial(version.launch, self.device, every, self.ladder)

    def error(self, version, number, choice, work):
        """Launch a version on the first set, fresh; None, or a line that says what is wrong with its results."""
        self.fill(self.sets[0], self.expected)
        work()
        synchronize(self.device)
        limits = {**{dtype: KERNEL_LIMIT for dtype in DTYPES}, **(version.limits or self.ladder.limits or {})}
        for name, truth in self.truth.items():
            array = getattr(self.sets[0], name)
            limit = max(limits[self.device.dtype], HALF_A_UNIT if array.dtype == BF16 else 0)
            wrong = compare(self.device, array, truth, limit)
            if wrong:
                return f"{self.ladder.name} {number} ({self.device.dtype}, {words(choice)}): {name}{wrong}"


def words(choice):
    """What was chosen, for a person: "threads=256"."""
    return ", ".join(f"{key}={value}" for key, value in choice.items())


OF_ONE = 30  # times the limit of a whole tensor, by which one element may be off: the worst of 20 million is, by 10


def compare(device, array, truth, limit):
    """None if an array is what it should be: its relative error, by Frobenius norm, is within the limit, and no element
    is off by OF_ONE times as much. Else where the first bad element is, and both values. NaN in the truth is any
    value."""
    np_ = device.cupy if device.name == "cuda" else np
    found = to_float(array).astype(np.float64)
    cared = ~np_.isnan(truth)
    off = np_.where(cared, np_.abs(found - truth), 0)
    truth = np_.where(cared, truth, 0)
    scale = float(np_.sqrt((truth**2).sum() / max(1, int(cared.sum()))))
    error = float(np_.sqrt((off**2).sum() / max(1, int(cared.sum())))) / (scale or 1)
    bad = ~(off <= OF_ONE * limit * (np_.abs(truth) + scale))
    if error <= limit and not bool(bad.any()):
        return None
    if not bool(bad.any()):
        bad = off > limit * (np_.abs(truth) + scale)
    first = int(np_.argmax(bad if bool(bad.any()) else off))
    place = ", ".join(map(str, np.unravel_index(first, truth.shape)))
    return (f"[{place}] is {float(found.reshape(-1)[first]):.9g}, expected {float(truth.reshape(-1)[first]):.9g} "
            f"(relative error of all {error:.1e}, limit {limit:.1e})")


# ---------------------------------------------------------------------------------------------------------------------
# Timing


def time_rounds(device, works):
    """Seconds a launch, the median of several rounds over all sets; works[i]() launches on set i.

    To launch from Python takes longer than many of these kernels, so a round is recorded as a graph and replayed, with
    a CUDA event before and behind: at least 32 launches, so that neither the events nor the start of the graph count,
    and as many rounds as fit into 50 ms, at least 3 and at most 20. What takes more than 10 ms is timed one by one.
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
    stream.begin_capture()
    try:
        for i in range(count):
            works[i % len(works)]()
    finally:
        graph = stream.end_capture()
    graph.launch()
    rounds = min(20, max(3, round(0.05 / (count * max(once, 1e-6)))))
    return float(np.median([elapsed(graph.launch) for _ in range(rounds)])) / count


def time_torch(bench):
    """Seconds that PyTorch takes for the kernel, on the same stream, sets and terms; None if it is not installed or has
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
        tensors = [SimpleNamespace(**{name: tensor(value) for name, value in vars(a).items()}) for a in bench.sets]
        return time_rounds(device, [ladder.torch(torch, x) for x in tensors])


CEILINGS = {}  # {"copy": bytes a second, dtype: FLOPs a second}, measured when first needed


def ceiling(device, what):
    """The bytes a second, read and written, of copies of 1 GiB within the device's memory; or the FLOPs a second of
    cuBLAS's product of two matrices of 8192 x 8192 in the device's dtype."""
    if what not in CEILINGS and what == "copy":
        # Not in a graph, in which the same copies reach two thirds of the rate.
        one, two, cupy, times = device.empty(2**30), device.empty(2**30), device.cupy, []
        for _ in range(10):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            two.data.copy_from_device_async(one.data, one.nbytes)
            end.record()
            end.synchronize()
            times.append(1e-3 * cupy.cuda.get_elapsed_time(start, end))
        CEILINGS[what] = 2 * one.nbytes / float(np.median(times))
    elif what not in CEILINGS:
        n, real = 8192, np.dtype(device.real)
        out, one, two = (allocate(device, (n, n), real) for _ in range(3))
        for array in (one, two):
            device.put(array, np.resize(stored(np.random.default_rng(0).standard_normal(2**20 + 1), real), (n, n)))
        CEILINGS[what] = 2 * n**3 / time_rounds(device, [lambda: device.matmul(out, one, two.T)])
    return CEILINGS[what]


class Failure(NamedTuple):
    """What went wrong with a version, or, if that has no number, with the kernel's arrays or its comparison."""
    kernel: str
    number: int | None
    dtype: str
    what: str
    line: str


class Timing(NamedTuple):
    """What one version takes in one dtype, at the best of its choices."""
    kernel: str
    number: int
    dtype: str
    what: str
    choice: dict
    seconds: float
    rate: str  # GB/s or TFLOP/s, in words
    share: float  # of what the device's bandwidth and matmul rate allow


def timing_of(bench, version, number, choice, seconds):
    """A Timing. The ceiling is the time that the device needs at least: to move each byte once at its copy bandwidth,
    or to do the FLOPs at its matmul rate, whichever is longer."""
    least = bench.traffic / ceiling(bench.device, "copy")
    rate = f"{bench.traffic / seconds / 1e9:,.0f} GB/s"
    if bench.flops:
        least = max(least, bench.flops / ceiling(bench.device, bench.device.dtype))
        rate = f"{bench.flops / seconds / 1e12:,.2f} TFLOP/s"
    return Timing(bench.ladder.name, number, bench.device.dtype, version.what, choice, seconds, rate, least / seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Running versions


def model_of(ladder, sizes):
    """The channels and heads (C, NH) that kernels are compiled for. Most kernels work for any C, and share a
    compilation."""
    if ladder.compiled_for_C:
        return sizes["C"], sizes["C"] // (64 if sizes["C"] % 64 == 0 else 32)
    return 12 * sizes.get("HS", 64), 12


launched = set()  # the names of all kernels that were launched


@functools.cache
def device_of(name, dtype, C, NH, kernels):
    """A device with kernels.cu, llama3.cu and the lab's files of some kernels. It notes what it launches."""
    files = (LAB.parent / "llama3/llama3.cu", LAB / "tiles.cu", *(LAB / f"{kernel}.cu" for kernel in kernels))
    device = make_device(name, dtype, Config(C=C, NH=NH), beside=[path for path in files if path.exists()])
    launch = device.launch

    def launch_and_note(kernel, *args, **options):
        launched.add(kernel)
        launch(kernel, *args, **options)

    device.launch = launch_and_note
    return device


def synchronize(device):
    """Wait for all work of a GPU. Raises what its kernels have raised."""
    if device.name == "cuda":
        device.gpu.synchronize()


def run_version(bench, number, timed, show):
    """Check a version with each choice and, if timed, time it. Returns (error lines, the best Timing or None)."""
    version, timings, errors = bench.ladder.versions[number - 1], [], []
    for choice in version.choices(bench.device):
        try:
            works = list(bench.launches(version, choice))
            error = bench.error(version, number, choice, works[0])
            if error:
                errors.append(error)
            elif timed:
                timings.append(timing_of(bench, version, number, choice, time_rounds(bench.device, works)))
        except Exception as e:  # one version's failure is no reason not to run the others
            errors.append(f"{bench.ladder.name} {number} ({bench.device.dtype}, {words(choice)}): {one_line(e)}")
            if is_lost(bench.device):
                break
    best = min(timings, key=lambda t: t.seconds, default=None)
    for t in timings if show else ():
        print(f"  {words(t.choice):28} {1e6 * t.seconds:12,.1f} us {t.rate:>16} {t.share:7.1%} of the ceiling"
              f"{'  <- best' if t is best else ''}")
    return errors, best


def one_line(e):
    return f"{type(e).__name__}: {' '.join(str(e).split())}"


def is_lost(device):
    """Whether a kernel's fault, such as an address that does not exist, has taken the GPU from this process."""
    try:
        synchronize(device)
        return False
    except Exception:
        return True


class Results:
    """What a run of several versions gives: how many there were, the Failures and Timings, the seconds of the
    libraries, {(kernel, dtype): seconds}, and the device's name."""

    def __init__(self):
        self.runs, self.failures, self.timings, self.library, self.device = 0, [], [], {}, None

    def fail(self, *failure):
        self.failures.append(Failure(*failure))
        print(f"error: {self.failures[-1].line}", file=sys.stderr, flush=True)


def run_ladder(ladder, device, sizes, numbers, timed, show, results):
    """Run the versions of a kernel that have the device's dtype and do these sizes, and add to the results."""
    try:
        bench = Bench(ladder, device, sizes, timed)
    except UserError:  # of the sizes that were asked for
        raise
    except Exception as e:
        results.fail(ladder.name, None, device.dtype, "", f"{ladder.name} ({device.dtype}): {one_line(e)}")
        return
    for number in numbers:
        version = ladder.versions[number - 1]
        if is_lost(device):
            return
        if version.fits and not version.fits(bench.given):
            continue
        if show:
            print(f"{ladder.name} {number}, {device.dtype}: {version.what}", flush=True)
        errors, best = run_version(bench, number, timed, show)
        results.runs += 1
        for line in errors:
            results.fail(ladder.name, number, device.dtype, version.what, line)
        if best:
            results.timings.append(best)
        if best and version.library:
            results.library[ladder.name, device.dtype] = best.seconds
        if show and not timed and not errors:
            print("  right")
    if timed and ladder.torch:
        try:
            seconds = time_torch(bench)
        except Exception as e:  # a library's failure is no reason to measure nothing
            print(f"PyTorch could not do {ladder.name} in {device.dtype}: {one_line(e)}")
            return
        if seconds:
            results.library[ladder.name, device.dtype] = seconds


def numbers_of(ladder, dtype, number=None):
    """The numbers of the versions that have a dtype, or of those only the one that is asked for."""
    return [n for n, version in enumerate(ladder.versions, 1) if dtype in version.dtypes and number in (None, n)]


def run(name, ladders, number, shapes, dtypes, timed, show, report):
    """Run all versions of kernels, or the one of this number, on a device of this name, at shapes(ladder). `show`
    prints each timing; report(ladder, results) is called behind each kernel."""
    def wanted(ladder):
        return [(sizes, (dtype, *model_of(ladder, sizes))) for sizes in shapes(ladder) for dtype in dtypes
                if numbers_of(ladder, dtype, number)]

    compiled = {}  # {key: the kernels that are compiled for it, in order}
    for ladder in ladders:
        for _, key in wanted(ladder):
            compiled.setdefault(key, {}).update(dict.fromkeys((ladder.name, *ladder.beside)))
    device_for = lambda key: device_of(name, *key, tuple(compiled[key]))
    if name == "cpu":  # a compiler takes a core
        with ThreadPoolExecutor() as pool:
            list(pool.map(device_for, sorted(compiled, key=lambda key: -len(compiled[key]))))
    results, stream = Results(), None  # a stream of the lab's own, since CuPy's default one cannot be recorded
    for ladder in ladders:
        for sizes, (dtype, *model) in wanted(ladder):
            device = device_for((dtype, *model))
            results.device = str(device).split(",")[0]
            if name == "cuda" and not stream:
                stream = device.cupy.cuda.Stream(non_blocking=True)
            with stream or contextlib.nullcontext():
                run_ladder(ladder, device, sizes, numbers_of(ladder, dtype, number), timed, show, results)
            if is_lost(device):
                results.fail(ladder.name, None, dtype, "", "the GPU is lost to this process: the rest was not run")
                report(ladder, results)
                return results
            if name == "cuda":
                device.cupy.get_default_memory_pool().free_all_blocks()
                device.cupy.get_default_pinned_memory_pool().free_all_blocks()
        report(ladder, results)
    return results


# ---------------------------------------------------------------------------------------------------------------------
# What is printed and written

HEADER = ("| | dtype | what it is | launched with | time | speed-up | rate | of the ceiling | of the library |\n"
          "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n")


def ladder_table(ladder, results):
    """The Markdown table of one kernel: the speed-up is over version 1, in the same dtype if it has it."""
    timings = [t for t in results.timings if t.kernel == ladder.name]
    lines, first = [], {t.dtype: t.seconds for t in timings if t.number == 1}
    for t in sorted(timings, key=lambda t: (DTYPES.index(t.dtype), t.number)):
        start = first.get(t.dtype) or next(iter(first.values()), None)
        speed_up = f"{start / t.seconds:,.1f} x" if start else ""
        of_library = results.library.get((t.kernel, t.dtype))
        cells = (t.number, t.dtype, t.what, words(t.choice), f"{1e6 * t.seconds:,.1f} us", speed_up, t.rate,
                 f"{t.share:.1%}", f"{of_library / t.seconds:.0%}" if of_library else "")
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    for f in results.failures:
        if f.kernel == ladder.name:
            lines.append(f"| {f.number or ''} | {f.dtype} | {f.what} | error: {f.line.replace('|', '/')} | | | | | |\n")
    return HEADER + "".join(lines)


SHORT = "its start and its end, in which the memory is not busy, are some microseconds whatever the size"


def held_back(ladder, results):
    """A sentence for each dtype in which the last version, bound by memory, is below 85% of the ceiling."""
    last, sentences = {t.dtype: t for t in results.timings if t.kernel == ladder.name}, []
    for t in last.values():
        if t.rate.endswith("GB/s") and t.share < 0.85:
            sentences.append(f"\n{t.dtype}: the bytes alone take {1e6 * t.share * t.seconds:.1f} of the "
                             f"{1e6 * t.seconds:.1f} us; {ladder.held_back or SHORT}.\n")
    return "".join(sentences)


def write_results(path, ladders, results):
    """Put all tables between the markers of a Markdown file, and leave the rest of it as it is."""
    begin, end = "<!-- written by lab.py --all -->\n", "<!-- the end of what lab.py writes -->\n"
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Measured\n\n{begin}{end}"
    if begin not in text or end not in text:
        raise UserError(f"{path}: has no lines {begin.strip()!r} and {end.strip()!r} to write between: put them in")
    rates = [f"copies {CEILINGS['copy'] / 1e12:.2f} TB/s"] if "copy" in CEILINGS else []
    rates += [f"cuBLAS {CEILINGS[dtype] / 1e12:,.1f} TFLOP/s in {dtype}" for dtype in DTYPES if dtype in CEILINGS]
    body = f"\n{results.device}. Ceilings, measured in the same run: {', '.join(rates)}.\n"
    for ladder in ladders:
        body += f"\n## {ladder.name} ({ladder.shape})\n\n{ladder.summary}\n\n{ladder_table(ladder, results)}"
        body += held_back(ladder, results)
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    replace_file(path, [f"{head}{begin}{body}\n{end}{tail}".encode()])


def draw_chart(path, ladders, timings):
    """An SVG: for each kernel the share of the ceiling that its versions reach, by their numbers, in the first dtype
    that each has; the last one black. The scale is logarithmic."""
    left, right, row, lowest = 240, 860, 22, 1e-4

    def x(share):
        return left + (right - left) * (1 - math.log(max(min(share, 1), lowest)) / math.log(lowest))

    drawn = []
    for ladder in ladders:
        best = {}
        for t in timings:
            if t.kernel == ladder.name:
                best.setdefault(t.number, t.share)
        if best:
            drawn.append((ladder.name, best))
    bottom = row * (len(drawn) + 1)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 40} {bottom + 40}" font-family="sans-serif" '
           'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for share in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1):
        svg.append(f'<path d="M{x(share):.0f} {row / 2}V{bottom}" stroke="#ccc"/>'
                   f'<text x="{x(share):.0f}" y="{bottom + 16}" text-anchor="middle">{100 * share:g}%</text>')
    svg.append(f'<text x="{left}" y="{bottom + 34}">of the time that the device needs at least</text>')
    for i, (name, best) in enumerate(drawn, 1):
        svg.append(f'<text x="{left - 14}" y="{row * i + 4}" text-anchor="end">{name}</text>')
        for number, share in best.items():
            fill, ink = ("black", "white") if number == max(best) else ("white", "black")
            svg.append(f'<circle cx="{x(share):.1f}" cy="{row * i}" r="8" fill="{fill}" stroke="black"/><text '
                       f'x="{x(share):.1f}" y="{row * i + 4}" text-anchor="middle" fill="{ink}">{number}</text>')
    replace_file(path, ["\n".join([*svg, "</svg>\n"]).encode()])


def list_kernels(ladders):
    for ladder in ladders:
        print(f"{ladder.name:32} {len(ladder.versions)} versions, {ladder.shape:32} {ladder.summary}")


def list_versions(ladder):
    print(f"{ladder.name}: {ladder.summary}\n{ladder.shape}")
    for number, version in enumerate(ladder.versions, 1):
        print(f"  {number}  {' '.join(version.dtypes):14} {version.what}")


def main():
    parser = argparse.ArgumentParser(description="Check and time the versions of a kernel.", allow_abbrev=False)
    parser.add_argument("kernel", nargs="?", help="its name (default: list them, or with --all or --check take all)")
    parser.add_argument("version", nargs="?", type=int, help="its number (default: list them, or take all)")
    parser.add_argument("--all", action="store_true", help="run all versions, and print the ladder")
    parser.add_argument("--check", action="store_true", help="only check, at small odd shapes")
    parser.add_argument("--shape", help="sizes that differ from the default, such as B=8,T=1024,C=768")
    parser.add_argument("--dtype", choices=DTYPES, help="only in this one (default: all that a version has)")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="where --all writes RESULTS.md and ladders.svg (default: dev/cuda if of all kernels)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: cuda if there is a GPU)")
    flags = parser.parse_args()
    name = flags.device or ("cuda" if has_gpu() else "cpu")
    if flags.kernel and flags.kernel not in LADDERS:
        raise UserError(f"no kernel {flags.kernel}; without a name, all are listed")
    ladders = [LADDERS[flags.kernel]] if flags.kernel else list(LADDERS.values())
    if flags.version and not 1 <= flags.version <= len(ladders[0].versions):
        raise UserError(f"{flags.kernel} has versions 1 to {len(ladders[0].versions)}, not {flags.version}")
    if flags.shape and not flags.kernel:
        raise UserError("--shape needs the name of a kernel: sizes differ from one to the other")
    if not (flags.version or flags.all or flags.check):
        list_versions(ladders[0]) if flags.kernel else list_kernels(ladders)
        return 0
    if name == "cpu" and not flags.check:
        print("There is no GPU here: versions are checked on the CPU at small shapes, and not timed.")

    def shapes(ladder):
        if flags.shape:
            return [parse_shape(flags.shape, parse_shape(ladder.shape))]
        if flags.check or name == "cpu":
            return [parse_shape(text) for text in ladder.checks]
        return [parse_shape(ladder.shape)]

    timed, out = name == "cuda" and not flags.check, flags.out or (None if flags.kernel else LAB)

    def report(ladder, results):  # what was measured is on disk before the next kernel begins
        if timed and flags.all:
            print(f"\n{ladder.name}: {ladder.summary}\n{ladder_table(ladder, results)}", flush=True)
        if timed and flags.all and out:
            out.mkdir(parents=True, exist_ok=True)
            done = ladders[: ladders.index(ladder) + 1]
            write_results(out / "RESULTS.md", done, results)
            draw_chart(out / "ladders.svg", done, results.timings)

    results = run(name, ladders, flags.version, shapes, [flags.dtype] if flags.dtype else DTYPES, timed,
                  bool(flags.kernel and not flags.check), report)
    if not (flags.kernel or flags.dtype or results.failures):
        for kernel in sorted(read_kernels([LAB / f"{ladder.name}.cu" for ladder in ladders]).keys() - launched):
            results.fail(kernel, None, "", "", f"{kernel} has no row in ladders.py")
    print(f"{results.runs} runs, {len(results.failures)} wrong")
    return 1 if results.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
