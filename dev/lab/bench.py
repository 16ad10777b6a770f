"""A ladder's problem on a device, where its versions are checked, and how an output is compared
with its truth."""
import contextlib
import functools
import math
import os
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.lab.ladder import ANY, COPIED, DTYPES, Draw, as_stored, stored
from train_gpt2 import BF16, to_float

# The largest relative errors of a tensor, by Frobenius norm. A right kernel has 1e-7 to 2e-6, and
# one that misses a term far more than the limit. Rounding to bf16's 8 bits gives 1.5e-3, and
# cutting off gives 3e-3.
KERNEL_LIMIT, BF16_LIMIT = 1e-5, 2.2e-3
HANDFUL = 8  # one element may be off by so many times the limit of the whole tensor


class Comparison(NamedTuple):
    """An output beside its truth: the relative error, its limit, and the first wrong element, if
    there is one."""
    name: str
    error: float
    limit: float
    place: tuple = None  # the index of the wrong element
    found: float = None
    expected: float = None

    def __str__(self):
        if self.place is None:
            return f"right, {self.error:.0e} of {self.limit:.0e}"
        place = ",".join(map(str, self.place))
        return (f"{self.name}[{place}] is {self.found:.9g}, expected {self.expected:.9g} (relative "
                f"error of all {self.error:.1e}, limit {self.limit:.1e})")


def compare_output(np_, name, array, truth, limit, kind=None, terms=None):
    """The Comparison of an output with its truth, by NumPy or CuPy.

    The relative error of the whole, by Frobenius norm, must be within the limit, or BF16_LIMIT if
    the output is stored in bf16. And each element may be off by its own rounding plus HANDFUL times
    the limit, relative to its own size. A sum whose terms cancel has the error of its terms: with
    kind "sums" the size of the terms counts too. By default that is the root mean square of the
    row; where terms is COPIED, no bit may differ. With kind "exact" no bit may differ anywhere.
    """
    found, in_bf16 = to_float(array).astype(np.float64), array.dtype == BF16
    cared = truth != ANY
    finite = cared & np_.isfinite(truth)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        off = np_.where(finite, np_.abs(found - truth), 0)
    size = np_.where(finite, np_.abs(truth), 0)
    norm = float(np_.sqrt((size**2).sum()))
    error, whole = (float(np_.sqrt((off**2).sum())) / (norm or 1),
                    max(limit, BF16_LIMIT if in_bf16 else 0))
    if kind == "exact":
        allowed, whole = 0, 0
    else:
        if kind != "sums":
            terms = 0
        elif terms is None:
            terms = np_.sqrt((size**2).mean(-1, keepdims=True))
        allowed = (1.01 * (2**-8 if in_bf16 else 2**-24) * size + HANDFUL * limit * (size + terms) +
                   1e-30)
        allowed = allowed * (terms != COPIED)
    same_kind = (np_.isnan(found) & np_.isnan(truth)) | (found == truth)
    bad = cared & ~np_.where(finite, off <= allowed, same_kind)
    if not bool(bad.any()):
        # If most of the norm is in few numbers, as 1/N in each row.
        if in_bf16 and error > whole and kind != "exact":
            mantissa, exponent = np_.frexp(np_.where(finite, truth, 0))
            rounded = np_.ldexp(np_.rint(256 * mantissa) / 256, exponent)
            rounded -= np_.where(finite, truth, 0)
            whole = max(whole, 1.1 * float(np_.sqrt((np_.where(finite, rounded, 0) ** 2).sum())) /
                        (norm or 1) + limit)
        if error <= whole:
            return Comparison(name, error, whole)
        bad = finite & (off > whole * size)
    first = int(np_.argmax(bad))
    place = tuple(map(int, np.unravel_index(first, truth.shape)))
    return Comparison(name, error, whole, place, float(found.reshape(-1)[first]),
                      float(truth.reshape(-1)[first]))


# The dtypes of one kernel follow each other, and tf32 is given what fp32 is.
@functools.lru_cache(1)
def problem_of(problem, sizes, in_bf16):
    inputs, truth, *terms = problem(Draw(in_bf16), **dict(sizes))
    return {**dict(sizes), **inputs}, truth, *(terms or [{}])


def orders():
    """The orders in which a CPU runs the threads of a block; the last is a shuffle. A sanitizer is
    slow and looks for something else, so it gets one order."""
    return (("forward",)
            if "-fsanitize" in os.environ.get("CXXFLAGS", "") else ("forward", "reverse", 1))


GUARD = 2**15  # bytes before and after an array that is written, more than a row


class Bench:
    """A ladder's problem on a device: sets of arrays, all alike, to launch its versions on. The
    first set is checked; timings use several, so that the inputs of a launch are not in a cache.
    Outputs lie between guards. An input ends where its allocation ends, so that a sanitizer sees an
    access beyond it."""

    def __init__(self, ladder, device, sizes, sets=lambda nbytes: 1):
        """sizes {name: number}; sets(bytes of a set) returns how many sets to make. Raises
        UserError if the sizes do not fit the problem."""
        self.ladder, self.device = ladder, device
        self.np = device.cupy if device.name == "cuda" else np
        given, truth, terms = problem_of(ladder.problem, tuple(sizes.items()), device.real == BF16)
        arrays = {name: values for name, values in given.items() if isinstance(values, np.ndarray)}
        self.given = SimpleNamespace(**given, W=device.W, itemsize=np.dtype(device.real).itemsize)
        self.written = {name: x for name, x in truth.items() if name not in ladder.made_of}
        self.shapes = {name: values.shape for name, values in {**self.written, **arrays}.items()}
        self.types = {name: self.type_of(name, arrays.get(name)) for name in self.shapes}
        exact = {name: as_stored(truth[name], self.types[name]) for name in ladder.exact.split()
                 if name in truth}
        self.truth, self.terms = ({name: self.np.asarray(values) for name, values in table.items()}
                                  for table in ({**truth, **exact}, terms))
        # Each input is read once, and each output written once.
        self.traffic = sum(self.types[name].itemsize * values.size
                           for table in (arrays, self.written) for name, values in table.items())
        self.unwritten = 2**32 - 1  # the bits of what is only written, in words of four bytes
        self.inputs = {}  # on the device, for the sets to be filled from
        for name, values in arrays.items():
            self.inputs[name], _ = self.allocate(values.shape, self.types[name])
            device.put(self.inputs[name], stored(values, self.types[name]))
        nbytes = sum(self.types[name].itemsize * math.prod(shape)
                     for name, shape in self.shapes.items())
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
        if ladder.traffic:
            self.traffic = ladder.traffic(self.sets[0])
        self.flops = ladder.flops(self.sets[0]) if ladder.flops else 0

    def type_of(self, name, values=None):
        """The dtype of an array: integers as they are, the rest real, unless the Ladder says
        fp32."""
        if values is not None and values.dtype.kind in "iu":
            return values.dtype
        return np.dtype(np.float32 if name in self.ladder.fp32.split() else self.device.real)

    def allocate(self, shape, dtype, guard=0):
        """An array, and the memory around it, all of whose bytes are 255."""
        size = math.prod(shape) * dtype.itemsize
        memory = self.device.empty(size + 2 * guard)
        memory[...] = 255
        return memory[guard : guard + size].view(dtype).reshape(shape), memory

    def fill(self, a, names):
        """Fill arrays of a set with their inputs, or with NaN if they have none; or with other bits
        that nobody wrote."""
        for name in names:
            array = getattr(a, name)
            if name in self.inputs:
                array[...] = self.inputs[name]
            else:
                memory = array.reshape(-1).view(np.uint8)
                memory[...] = (255 if self.unwritten == 2**32 - 1 else np.resize(
                    np.frombuffer(np.uint32(self.unwritten), np.uint8), memory.size))

    def fits(self, version):
        return self.device.dtype in version.dtypes and (not version.fits or
                                                        version.fits(self.given))

    def result(self, a, name):
        """An output of a set."""
        return self.ladder.made_of[name](a) if name in self.ladder.made_of else getattr(a, name)

    def launches(self, version, choice):
        """A function for each set that launches a version with one choice. Its scratch memory,
        which all sets share, has guards too."""
        scratch = (version.scratch(SimpleNamespace(**{**vars(self.given), **choice}))
                   if version.scratch else {})
        self.scratch = SimpleNamespace()
        self.guarded = {name: memory for name, memory in self.guarded.items() if name in self.truth}
        for name, shape in scratch.items():
            array, self.guarded[name] = self.allocate(shape, self.type_of(name), GUARD)
            setattr(self.scratch, name, array)
        for a in self.sets:
            every = SimpleNamespace(**{**vars(a), **vars(self.scratch), **choice})
            yield functools.partial(version.launch, self.device, every, self.ladder)

    def check(self, version, choice, in_orders=None, around=contextlib.nullcontext, loose=1):
        """Launch a version on the first set, emulated in several orders, each within a context
        around(). Returns the worst Comparison. Raises AssertionError, with a message, if a version
        has a race, writes outside of an array, or changes an input. loose: a factor for limits that
        were set at other sizes; numbers that cancel may then be off relative to their row."""
        work, first, a = next(self.launches(version, choice)), {}, self.sets[0]
        emulated = hasattr(self.device, "set_order")
        for memory in self.guarded.values():
            memory[...] = 255
        # A GPU's own order varies.
        for order in in_orders or orders() if emulated else ("forward", "forward"):
            self.fill(a, self.shapes)
            self.fill(self.scratch, vars(self.scratch))
            if emulated:
                self.device.set_order(order)
            try:
                with around():
                    work()
            finally:
                if emulated:
                    self.device.set_order("forward")
            if not (version.atomics or version.library):
                self.compare_orders(a, first, order)
        self.wait()
        for name, memory in self.guarded.items():
            assert bool((memory[:GUARD] == 255).all() and
                        (memory[-GUARD:] == 255).all()), f"wrote outside of {name}"
        for name in self.inputs.keys() - self.truth.keys():
            array, before = (x.reshape(-1).view(np.uint8)
                             for x in (getattr(a, name), self.inputs[name]))
            assert bool((array == before).all()), f"changed {name}, which is only to be read"
        kinds = {**(dict.fromkeys(self.truth, "sums") if loose > 1 else {}),
                 **dict.fromkeys(f"{self.ladder.sums} {version.sums}".split(), "sums"),
                 **dict.fromkeys(self.ladder.exact.split(), "exact")}
        limits = {**dict.fromkeys(DTYPES, KERNEL_LIMIT), **self.ladder.limits, **version.limits}
        limit = limits[self.device.dtype]
        own = {name: limits[self.device.dtype] for name, limits in self.ladder.limits_of.items()}
        comparisons = [
            compare_output(self.np, name, self.result(a, name), truth,
                           loose * own.get(name, limit), kinds.get(name), self.terms.get(name))
            for name, truth in self.truth.items()]
        # the worst: one with numbers that were never written, which are NaN, before all others
        return max(comparisons, key=lambda c: (c.place is not None, math.isnan(c.error),
                                               c.error / (c.limit or 1)))

    def compare_orders(self, a, first, order):
        """Raises AssertionError unless each output has the same bits as in the first order."""
        for name in self.written:
            array, bits = getattr(a, name), f"u{self.types[name].itemsize}"
            wish = first.setdefault(name, array.copy())
            for place in self.np.argwhere(array.view(bits) != wish.view(bits))[:1].tolist():
                found, expected = (float(to_float(x[tuple(place)])) for x in (array, wish))
                orders = ((f"when threads run in the order {order}", "in the order forward")
                          if order != "forward" else ("in a second run", "in the first"))
                raise AssertionError(f"has a race: {name}{place} is {found:.9g} {orders[0]}, and "
                                     f"{expected:.9g} {orders[1]}")

    def wait(self):
        """Wait for a GPU to finish. Raises what its kernels have raised."""
        if self.device.name == "cuda":
            self.device.gpu.synchronize()


@contextlib.contextmanager
def noting(device, launched):
    """A context in which the names of the kernels that a device launches are added to a set."""
    launch = device.launch

    def launch_and_note(name, *args, **options):
        launched.add(name)
        launch(name, *args, **options)

    device.launch = launch_and_note
    try:
        yield
    finally:
        device.launch = launch
