"""What a kernel of the lab is, what its versions are given, and how their results are judged.

gelu_forward.py, and so on, stands beside gelu_forward.cu and holds KERNEL: a Kernel with its problem and its versions.
The lab, its exercises, test_gpt2.py and dev/tests/test_llama3.py check versions with the Bench that is at the end
here.
"""
import contextlib
import functools
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.common.bf16 import to_bf16
from prepro_tinyshakespeare import UserError
from train_gpt2 import BF16, to_float

LAB = Path(__file__).resolve().parent
KERNELS = LAB / "kernels"
DTYPES = ("fp32", "tf32", "bf16")
ALL = DTYPES  # the dtypes of a version that uses tensor cores; to the others tf32 is fp32

# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def stored(values, dtype):
    """An array rounded to a dtype of the devices."""
    return to_bf16(values) if dtype == BF16 != values.dtype else values.astype(dtype)


def bf16(x):
    """x rounded to the 8 bits of a bfloat16's mantissa, to nearest with ties to even, but in float64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(256 * mantissa), exponent - 8)


def f32(x):
    """x rounded to fp32, but in float64: what a kernel is given, ready for a formula."""
    return np.float32(x).astype(np.float64)


def as_stored(truth, dtype):
    """A truth rounded to a dtype of the devices, but in float64, and ANY where it is ANY."""
    with np.errstate(over="ignore"):
        return np.where(truth == ANY, ANY, to_float(stored(truth, dtype)).astype(np.float64))


POOL = 2**22 + 1  # numbers drawn for an array; a larger one repeats them, no two of its rows alike


class Draw:
    """Seeded inputs. draw(*shape) are normal numbers as real stores them, in float64."""

    def __init__(self, in_bf16, seed=1337):
        self.rng, self.in_bf16 = np.random.default_rng(seed), in_bf16
        self.real = bf16 if in_bf16 else f32  # rounds to what real stores

    def pool(self, *shape):
        """As many normal numbers as an array takes, but at most POOL."""
        return self.rng.standard_normal(min(math.prod(shape), POOL))

    def normal(self, *shape):
        return np.resize(self.pool(*shape), shape)

    def __call__(self, *shape, scale=1.0):
        return np.resize(self.real(scale * self.pool(*shape)), shape)

    def fp32(self, *shape, scale=1.0):
        return np.resize(f32(scale * self.pool(*shape)), shape)

    def rows(self, N, C):
        """(N,C) in fp32 that hurt a norm: rows of deviation 10 to 0.001, where an eps of 1e-5 counts; every third has
        a mean of 50 deviations, whose square would cancel."""
        deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
        return f32(deviation * (self.normal(N, C) + mean))

    def words(self, V, *shape):
        return self.rng.integers(V, size=shape, dtype=np.int32)


def in_parts(f, *arrays, step=None):
    """f over the arrays' first axis, `step` of it at a time and on all cores, so that no temporary is as large as the
    arrays. f returns an array or a tuple of them, whose first axis is the same."""
    step = step or max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    return np.concatenate(results) if isinstance(results[0], np.ndarray) else [*map(np.concatenate, zip(*results))]


ANY = 1.5e300  # in a truth: any value will do. No fp32 is as large.
COPIED = -1.0  # as the size of a sum's terms: it is no sum here, but a number of the inputs
ROWS = ("B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")  # odd shapes of (B,T,C)

# ---------------------------------------------------------------------------------------------------------------------
# A kernel and its versions


def threads_of(device, name):
    """How many threads a kernel's BLOCK says, or None if there is no such kernel."""
    return device.kernels[name].threads if name in device.kernels else None


class Version(NamedTuple):
    """One way to compute a kernel's outputs. `items` and `shared` are expressions in the names of a problem, as in
    "N*C". Four more names can be used: W, the numbers of type real in 16 bytes; itemsize, the bytes of a real; threads;
    and what is in `more`."""
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (device, a) that launches several
    items: str = None  # what the kernel's BLOCK shares out; with a comma, how many along x and how many along y
    threads: tuple = (64, 128, 256, 512, 1024)  # of a block, to try; () takes as many as BLOCK says
    args: str = None  # the names of the kernel's arguments, if not those of the Kernel
    shared: str = "0"  # bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # what else can be chosen, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = {}  # {dtype: limit}, if not the Kernel's; a comment there gives the reason
    sums: str = ""  # outputs that are such as the Kernel's `sums` in this version alone
    trainer: bool = False  # whether it trains. It is also launched as the trainer does: all that can be chosen is None
    atomics: bool = False  # whether it adds with float atomics, so that its bits depend on the order of the threads
    library: str = ""  # its name, if that is what it calls
    recorded: bool = True  # whether a graph can hold its launches; CuPy's cuBLAS refuses that
    fits: Callable = None  # a -> whether it does this problem
    held_back: dict = {}  # {dtype: why it is below 85% of what bounds it}, after "... us;"

    def choices(self, device, few=False):
        """Each combination of what can be chosen: {"threads": 256, ...}. If few, of the threads only the first and the
        last, and of the blocks the first two."""
        threads = self.threads or (() if callable(self.run) else (threads_of(device, self.run),))
        tries = ({"threads": threads} if threads else {}) | self.more
        if few:
            kept = {"threads": slice(None, None, max(1, len(threads) - 1)), "blocks": slice(2)}
            tries = {name: values[kept.get(name, slice(None))] for name, values in tries.items()}
        combinations = [dict(zip(tries, values)) for values in itertools.product(*tries.values())]
        if not self.trainer:
            return combinations
        own = dict.fromkeys(tries)
        return [own, *(choice for choice in combinations if choice != own)]

    def launch(self, device, a, kernel):
        if callable(self.run):
            self.run(device, a)
            return
        if self.run not in device.kernels:
            raise UserError(f"no kernel {self.run} with a BLOCK over it, and {kernel.name}.py launches it")
        items, shared = (eval(expression, {}, vars(a)) for expression in (self.items, self.shared))
        names = (self.args or kernel.args).split()
        for name in names:
            if not hasattr(a, name):
                raise UserError(f"{kernel.name}.py has an argument {name} for {self.run}, which is no size, input or "
                                "output of its problem")
        args = [getattr(a, name) for name in names]
        device.launch(self.run, items, *args, threads=a.threads, shared=shared)


class Kernel(NamedTuple):
    """A kernel of the lab. Its problem(draw, **sizes) returns {name: input} and {name: truth}. Inputs are numbers,
    None, integer arrays, or arrays of float64 that the Draw has rounded. A truth is float64: where it is ANY the result
    may be anything, and where it is NaN or infinite the result must be so too. An output that is among the inputs too
    is updated in place. A third dictionary may say how large the terms of an output are: see compare."""
    problem: Callable
    shape: str  # the sizes to time
    checks: tuple  # small odd sizes, that every version is checked at if it fits
    versions: tuple
    args: str = ""  # the names of the kernels' arguments, if most versions have the same
    fp32: str = ""  # the arrays that are fp32 in every dtype; the others are real, as kernels.cu calls it
    exact: str = ""  # the outputs that must have the truth's bits, once it is rounded
    sums: str = ""  # the outputs that are sums of terms which may cancel: see compare
    made_of: dict = {}  # {output: a -> what a's other outputs make of it}, if no kernel writes it
    trainer_checks: tuple = ()  # more sizes, for the trainer's version alone
    compiled_for: str = ""  # "C" or "HS", if kernels.cu is compiled for that size of it
    beside: tuple = ()  # other kernels of the lab whose .cu must be compiled too
    limits: dict = {}  # {dtype: limit of what the arithmetic errs by}, if not KERNEL_LIMIT
    limits_of: dict = {}  # {output: such limits}, if one has its own
    flops: Callable = None  # a -> the FLOPs that it takes
    traffic: Callable = None  # a -> its bytes, if they are not those of each input and output once
    torch: Callable = None  # what PyTorch would do, for comparison: (torch, tensors) -> a function
    name: str = ""  # the file's
    summary: str = ""  # the first line of the file's docstring


@functools.cache
def find_kernel(name):
    """The Kernel of a file. Raises what a wrong file raises."""
    module = importlib.import_module(f"dev.lab.kernels.{name}")
    return module.KERNEL._replace(name=name, summary=module.__doc__.strip().splitlines()[0])


def kernel_names():
    """The names of all kernels, sorted: of each .py in kernels/."""
    return sorted(path.stem for path in KERNELS.glob("*.py"))


def launched_by(names, known):
    """Which of the known kernels these kernels of the lab may launch: those whose names are in their .py, or in what
    that imports of the lab. Some names end in what the .py puts behind others."""
    texts, missing = {}, list(names)
    while missing:
        name = missing.pop()
        paths = [path for path in (KERNELS / f"{name}.py", LAB / f"{name}.py") if path.exists()]
        if paths and name not in texts:
            texts[name] = paths[0].read_text(encoding="utf-8")
            imports = re.findall(r"from dev\.lab(?:\.kernels)?(?:\.(\w+))? import (\w+)", texts[name])
            missing += [module or name for module, name in imports]
    text = "".join(texts.values())
    return [name for name in known if re.sub("_(inp|weight)$", "", name) in text]


def parse_sizes(text):
    """{"B": 8, "T": 1024} of "B=8,T=1024". Raises UserError."""
    sizes = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not (value.isascii() and value.isdecimal()):
            raise UserError(f"{text}: {part!r} is no size; expected one such as T=1024")
        sizes[name] = int(value)
    return sizes


MODELS = ((768, 12), (96, 3), (1600, 20), (4096, 32))  # (C, NH) that kernels are compiled for, with HS = C / NH


def model_of(kernel, sizes, models=MODELS):
    """The (C, NH) that kernels.cu is compiled for, where it must be for some size of this problem. As few as possible,
    since each takes a compiler some seconds."""
    for C, NH in models:
        if kernel.compiled_for in ("", "C" if sizes.get("C") == C else "HS" if sizes.get("HS") == C // NH else ""):
            return C, NH
    return (sizes["C"], sizes["C"] // 32) if kernel.compiled_for == "C" else (32 * sizes["HS"], 32)


# ---------------------------------------------------------------------------------------------------------------------
# Judging results

# The largest relative errors of a tensor, by Frobenius norm. A kernel by itself errs by 1e-7 to 2e-6, and without one
# of its terms by far more than its limit; stored in bf16, whose 8 bits are off by 1.5e-3 when they are rounded and by
# 3e-3 when they are cut off, it may err by BF16_LIMIT. Inside of attention, weights are rounded to TF32 or bf16 too.
KERNEL_LIMIT, BF16_LIMIT = 1e-5, 2.2e-3
# Attention in fp32 on a GPU is sums that tensor cores truncate: 1e-5 for 128 channels of a head.
ATTENTION_LIMITS = {"fp32": 2 * KERNEL_LIMIT, "tf32": 5e-4, "bf16": 3e-3}
HANDFUL = 8  # times the limit of a whole tensor, by which the arithmetic of one element may be off


class Comparison(NamedTuple):
    """What is said of one output: its relative error and the limit of that; and what is wrong, if anything is."""
    name: str
    error: float
    limit: float
    place: tuple = None  # of the first wrong element
    found: float = None
    expected: float = None

    def __str__(self):
        if self.place is None:
            return f"right, {self.error:.0e} of {self.limit:.0e}"
        place = ",".join(map(str, self.place))
        return (f"{self.name}[{place}] is {self.found:.9g}, expected {self.expected:.9g} (relative error of all "
                f"{self.error:.1e}, limit {self.limit:.1e})")


def compare(np_, name, array, truth, limit, kind=None, terms=None):
    """The Comparison of an output with its truth, by NumPy or CuPy.

    The relative error of the whole, by Frobenius norm, must be within the limit of its arithmetic, or BF16_LIMIT if it
    is stored in bf16. And each element must be right: it may be off by its own rounding, and by HANDFUL times the
    limit, relative to its own size. A sum whose terms cancel is no better than they are: so kind "sums" measures the
    latter against the size of the terms too. If nothing is said of that, it is the row's, by the root of its mean
    square; where it is said to be COPIED, no bit may differ. With kind "exact" none may differ anywhere.
    """
    found, in_bf16 = to_float(array).astype(np.float64), array.dtype == BF16
    cared = truth != ANY
    finite = cared & np_.isfinite(truth)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        off = np_.where(finite, np_.abs(found - truth), 0)
    size = np_.where(finite, np_.abs(truth), 0)
    norm = float(np_.sqrt((size**2).sum()))
    error, whole = float(np_.sqrt((off**2).sum())) / (norm or 1), max(limit, BF16_LIMIT if in_bf16 else 0)
    if kind == "exact":
        allowed, whole = 0, 0
    else:
        if kind != "sums":
            terms = 0
        elif terms is None:
            terms = np_.sqrt((size**2).mean(-1, keepdims=True))
        allowed = 1.01 * (2**-8 if in_bf16 else 2**-24) * size + HANDFUL * limit * (size + terms) + 1e-30
        allowed = allowed * (terms != COPIED)
    same_kind = (np_.isnan(found) & np_.isnan(truth)) | (found == truth)
    bad = cared & ~np_.where(finite, off <= allowed, same_kind)
    if not bool(bad.any()):
        if error <= whole:
            return Comparison(name, error, whole)
        bad = finite & (off > whole * size)
    first = int(np_.argmax(bad))
    place = tuple(map(int, np.unravel_index(first, truth.shape)))
    return Comparison(name, error, whole, place, float(found.reshape(-1)[first]), float(truth.reshape(-1)[first]))


# ---------------------------------------------------------------------------------------------------------------------
# A problem on a device


@functools.lru_cache(1)  # the dtypes of one kernel follow each other, and tf32 is given what fp32 is
def problem_of(problem, sizes, in_bf16):
    inputs, truth, *terms = problem(Draw(in_bf16), **dict(sizes))
    return {**dict(sizes), **inputs}, truth, *(terms or [{}])


def orders():
    """In which orders the threads of a block run on a CPU, one after the other; the last is a shuffle. Under a
    sanitizer, which is slow and looks for something else, the first alone."""
    return ("forward",) if "-fsanitize" in os.environ.get("CXXFLAGS", "") else ("forward", "reverse", 1)


GUARD = 2**15  # bytes before and behind an array that is written, more than a row


class Bench:
    """A kernel's problem on a device: sets of arrays, all alike, to launch its versions on, of which the first is
    checked. What is written lies between guards. What is only read ends where its allocation does, for a sanitizer to
    see. The lab times versions on more sets than one, so that what a launch reads is not in a cache."""

    def __init__(self, kernel, device, sizes, sets=lambda nbytes: 1):
        """sizes {name: number}; sets(bytes of a set) says how many of them there are to be. Raises UserError if the
        sizes do not fit the kernel."""
        self.kernel, self.device = kernel, device
        self.np = device.cupy if device.name == "cuda" else np
        given, truth, terms = problem_of(kernel.problem, tuple(sizes.items()), device.real == BF16)
        arrays = {name: values for name, values in given.items() if isinstance(values, np.ndarray)}
        self.given = SimpleNamespace(**given, W=device.W, itemsize=np.dtype(device.real).itemsize)
        self.written = {name: x for name, x in truth.items() if name not in kernel.made_of}
        self.shapes = {name: values.shape for name, values in {**self.written, **arrays}.items()}
        self.types = {name: self.type_of(name, arrays.get(name)) for name in self.shapes}
        exact = {name: as_stored(truth[name], self.types[name]) for name in kernel.exact.split() if name in truth}
        self.truth, self.terms = ({name: self.np.asarray(values) for name, values in table.items()}
                                  for table in ({**truth, **exact}, terms))
        self.traffic = sum(self.types[name].itemsize * values.size for table in (arrays, self.written)
                           for name, values in table.items())  # each input is read once, and each output written once
        self.inputs = {}  # on the device, for the sets to be filled from
        for name, values in arrays.items():
            self.inputs[name], _ = self.allocate(values.shape, self.types[name])
            device.put(self.inputs[name], stored(values, self.types[name]))
        nbytes = sum(self.types[name].itemsize * math.prod(shape) for name, shape in self.shapes.items())
        self.guarded, self.sets = {}, []  # {name: an array with its guards, as bytes}
        for i in range(sets(nbytes)):
            a = SimpleNamespace(**vars(self.given))
            for name, shape in self.shapes.items():
                guarded = i == 0 and name in self.written
                array, memory = self.allocate(shape, self.types[name], GUARD if guarded else 0)
                setattr(a, name, array)
                if guarded:
                    self.guarded[name] = memory
            self.fill(a, self.shapes)
            self.sets.append(a)
        if kernel.traffic:
            self.traffic = kernel.traffic(self.sets[0])
        self.flops = kernel.flops(self.sets[0]) if kernel.flops else 0

    def type_of(self, name, values=None):
        """What an array is stored in: integers as they are, the rest as real, unless the Kernel says fp32."""
        if values is not None and values.dtype.kind in "iu":
            return values.dtype
        return np.dtype(np.float32 if name in self.kernel.fp32.split() else self.device.real)

    def allocate(self, shape, dtype, guard=0):
        """An array, and all the memory around it, which are bytes of 255."""
        size = math.prod(shape) * dtype.itemsize
        memory = self.device.empty(size + 2 * guard)
        memory[...] = 255
        return memory[guard : guard + size].view(dtype).reshape(shape), memory

    def fill(self, a, names):
        """Give arrays of a set their inputs, or NaN to those that have none."""
        for name in names:
            array = getattr(a, name)
            if name in self.inputs:
                array[...] = self.inputs[name]
            else:
                array.reshape(-1).view(np.uint8)[...] = 255

    def fits(self, version):
        return self.device.dtype in version.dtypes and (not version.fits or version.fits(self.given))

    def result(self, a, name):
        """What a set has come to."""
        return self.kernel.made_of[name](a) if name in self.kernel.made_of else getattr(a, name)

    def launches(self, version, choice):
        """A function for each set that launches a version with one choice of what can be chosen. Its scratch memory,
        which all sets share, is made of guarded arrays too."""
        scratch = version.scratch(SimpleNamespace(**{**vars(self.given), **choice})) if version.scratch else {}
        self.scratch = SimpleNamespace()
        self.guarded = {name: memory for name, memory in self.guarded.items() if name in self.truth}
        for name, shape in scratch.items():
            array, self.guarded[name] = self.allocate(shape, self.type_of(name), GUARD)
            setattr(self.scratch, name, array)
        for a in self.sets:
            every = SimpleNamespace(**{**vars(a), **vars(self.scratch), **choice})
            yield functools.partial(version.launch, self.device, every, self.kernel)

    def check(self, version, choice):
        """Launch a version on the first set, fresh, on a CPU in several orders. Returns the Comparison that is worst.
        Raises AssertionError, in words, if a version has a race, writes outside of an array, or changes an input."""
        work, first, a = next(self.launches(version, choice)), {}, self.sets[0]
        on_cpu = self.device.name == "cpu"
        for memory in self.guarded.values():
            memory[...] = 255
        for order in orders() if on_cpu else ("forward", "forward"):  # a GPU's own changes from run to run
            self.fill(a, self.shapes)
            self.fill(self.scratch, vars(self.scratch))
            if on_cpu:
                self.device.set_order(order)
            try:
                work()
            finally:
                if on_cpu:
                    self.device.set_order("forward")
            if not (version.atomics or version.library):
                self.compare_orders(a, first, order)
        self.wait()
        for name, memory in self.guarded.items():
            assert bool((memory[:GUARD] == 255).all() and (memory[-GUARD:] == 255).all()), f"wrote outside of {name}"
        for name in self.inputs.keys() - self.truth.keys():
            array, before = (x.reshape(-1).view(np.uint8) for x in (getattr(a, name), self.inputs[name]))
            assert bool((array == before).all()), f"changed {name}, which is only to be read"
        kinds = {**dict.fromkeys(f"{self.kernel.sums} {version.sums}".split(), "sums"),
                 **dict.fromkeys(self.kernel.exact.split(), "exact")}
        limit = {**dict.fromkeys(DTYPES, KERNEL_LIMIT), **self.kernel.limits, **version.limits}[self.device.dtype]
        own = {name: limits[self.device.dtype] for name, limits in self.kernel.limits_of.items()}
        comparisons = [compare(self.np, name, self.result(a, name), truth, own.get(name, limit), kinds.get(name),
                               self.terms.get(name)) for name, truth in self.truth.items()]
        return max(comparisons, key=lambda c: (c.place is not None, c.error / (c.limit or 1)))

    def compare_orders(self, a, first, order):
        """Raises AssertionError unless each output has the same bits as in the first order."""
        for name in self.written:
            array, bits = getattr(a, name), f"u{self.types[name].itemsize}"
            wish = first.setdefault(name, array.copy())
            for place in self.np.argwhere(array.view(bits) != wish.view(bits))[:1].tolist():
                found, expected = (float(to_float(x[tuple(place)])) for x in (array, wish))
                orders = (f"when threads run in the order {order}", "in the order forward") if order != "forward" else (
                    "in a second run", "in the first")
                raise AssertionError(f"has a race: {name}{place} is {found:.9g} {orders[0]}, and {expected:.9g} "
                                     f"{orders[1]}")

    def wait(self):
        """Wait for all work of a GPU. Raises what its kernels have raised."""
        if self.device.name == "cuda":
            self.device.gpu.synchronize()


@contextlib.contextmanager
def noting(device, launched):
    """Within this, the names of the kernels that a device launches are added to a set."""
    launch = device.launch

    def launch_and_note(name, *args, **options):
        launched.add(name)
        launch(name, *args, **options)

    device.launch = launch_and_note
    try:
        yield
    finally:
        device.launch = launch


def words(choice):
    """What was chosen, for a person: "threads=256"; or "as the trainer does"."""
    chosen = {key: value for key, value in choice.items() if value is not None}
    return ", ".join(f"{key}={value}" for key, value in chosen.items()) or "as the trainer does" * bool(choice)
