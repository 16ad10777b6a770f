"""A ladder: a kernel's problem, its inputs, and its versions from the most naive to the best.

kernels/gelu_forward.py, and so on, stands beside gelu_forward.cu and holds LADDER, a Ladder.
"""
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import random
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config
from train_gpt2 import BF16, UserError, to_float

LAB = Path(__file__).resolve().parent
KERNELS = LAB / "kernels"
DTYPES = ("fp32", "tf32", "bf16")  # tf32 differs from fp32 only for versions that use tensor cores
LAUNCH_GAP = ("the memory is idle while a launch begins and ends, which takes two or three "
              "microseconds")


def threads_of(device, name):
    """How many threads a kernel's BLOCK says, or None if there is no such kernel."""
    return device.kernels[name].threads if name in device.kernels else None


class Version(NamedTuple):
    """One way to compute the outputs of a kernel. `items` and `shared` are expressions in the names
    of a problem, as in "N*C". Four more names can be used: W, the numbers of type real in 16 bytes;
    itemsize, the bytes of a real; threads; and what is in `more`."""
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (device, a) that launches several
    # How many items BLOCK divides among blocks; with a comma, along x and along y.
    items: str = None
    threads: tuple = (64, 128, 256, 512, 1024)  # block sizes to try; (): the size in BLOCK
    args: str = None  # the names of the kernel's arguments, if not those of the Ladder
    shared: str = "0"  # bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # other choices, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = {}  # {dtype: limit}, if not the Ladder's; a comment there gives the reason
    sums: str = ""  # outputs that count among the Ladder's `sums` in this version only
    # The trainer's: also launched as the trainer does, with None for each choice.
    trainer: bool = False
    # It adds with float atomics, so its bits depend on the order of the threads.
    atomics: bool = False
    library: str = ""  # the library that it calls
    recorded: bool = True  # a graph can record its launches; CuPy's cuBLAS refuses that
    fits: Callable = None  # a -> whether it can do this problem
    held_back: str | dict = {}  # why it is below 85% of its ceiling, in all dtypes or {dtype: why}

    def choices(self, device, few=False):
        """All combinations of choices: {"threads": 256, ...}. With few, only the first and the last
        of the threads, and the first two of the blocks."""
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

    def launch(self, device, a, ladder):
        if callable(self.run):
            self.run(device, a)
            return
        if self.run not in device.kernels:
            raise UserError(f"no kernel {self.run} with a BLOCK over it, and {ladder.name}.py "
                            "launches it")
        items, shared = (eval(expression, {}, vars(a)) for expression in (self.items, self.shared))
        names = (self.args or ladder.args).split()
        for name in names:
            if not hasattr(a, name):
                raise UserError(f"{ladder.name}.py has an argument {name} for {self.run}, which is "
                                "no size, input or output of its problem")
        args = [getattr(a, name) for name in names]
        device.launch(self.run, items, *args, threads=a.threads, shared=shared)


class Ladder(NamedTuple):
    """A kernel's problem, and its versions from the most naive to the best. problem(draw, **sizes)
    returns {name: input} and {name: truth}. Inputs are numbers, None, integer arrays, or arrays of
    float64 that the Draw has rounded. A truth is float64: where it is ANY, any result is right, and
    where it is NaN or infinite, the result must be the same. An output that is also an input is
    updated in place. A third dictionary may say how large the terms of an output are: see
    compare_output."""
    problem: Callable
    shape: str  # the sizes to time
    checks: tuple  # small odd sizes at which every version is checked that fits
    versions: tuple
    args: str = ""  # the names of the kernels' arguments, if most versions have the same
    # The arrays that are fp32 in every dtype; the others are of type real, as in kernels.cu.
    fp32: str = ""
    exact: str = ""  # the outputs that must have the bits of the rounded truth
    sums: str = ""  # the outputs that are sums whose terms may cancel: see compare_output
    made_of: dict = {}  # {output: a function of a}, for an output that no kernel writes
    trainer_checks: tuple = ()  # more sizes, for the trainer's version only
    # "C" or "HS", if kernels.cu must be compiled for that size; "HS, GROUP, RELU": see Compiled.
    compiled_for: str = ""
    beside: tuple = ()  # other kernels of the lab whose .cu must be compiled too
    limits: dict = {}  # {dtype: limit of the relative error}, if not KERNEL_LIMIT
    limits_of: dict = {}  # {output: such limits}, if one has its own
    flops: Callable = None  # a -> its FLOPs
    traffic: Callable = None  # a -> its bytes, if not each input and output once
    torch: Callable = None  # the same in PyTorch: (torch, tensors) -> a function
    name: str = ""  # the file's
    summary: str = ""  # the first paragraph of the file's docstring


@functools.cache
def find_ladder(name):
    """The Ladder of a kernel. Raises what a wrong file raises."""
    module = importlib.import_module(f"dev.lab.kernels.{name}")
    summary = " ".join(module.__doc__.split("\n\n")[0].split())
    return module.LADDER._replace(name=name, summary=summary)


def kernel_names():
    """The names of all kernels, sorted: of each .py in kernels/."""
    return sorted(path.stem for path in KERNELS.glob("*.py"))


def launched_by(names, known):
    """Which of the known kernels these ladders may launch: those named in their .py, or in a module
    of the lab that it imports. _inp and _weight are endings that a .py adds to a name."""
    texts, missing = {}, list(names)
    while missing:
        name = missing.pop()
        paths = [path for path in (KERNELS / f"{name}.py", LAB / f"{name}.py") if path.exists()]
        if paths and name not in texts:
            texts[name] = paths[0].read_text(encoding="utf-8").split("\nEXERCISE = ")[0]
            imports = re.findall(r"from dev\.lab(?:\.kernels)?(?:\.(\w+))? import [(\s]*(\w+)",
                                 texts[name])
            missing += [module or name for module, name in imports if module != "exercises"]
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


def text_of(sizes):
    """"B=8,T=1024" of {"B": 8, "T": 1024}."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def names_of(sizes):
    """{name: number} with the names that problems derive from their sizes, in fp32, as attributes:
    for the expressions in a Version."""
    rows = sizes.get("B", 1) * sizes.get("T", 1)
    heads = sizes.get("NH", 1) + sizes.get("NKV", 0)
    derived = dict(N=rows, OC=4 * sizes.get("C", 0), n=rows * sizes.get("C", 0), HS=64, NKV=1,
                   heads=heads, W=4, itemsize=4)
    return SimpleNamespace(**{**derived, **sizes})


def asked_sizes(text, ladder):
    """{name: number} of --shape. Some must be multiples, so that every row starts on 16 bytes.
    Raises UserError."""
    sizes, known = parse_sizes(text), list(inspect.signature(ladder.problem).parameters)[1:]
    for name, size in sizes.items():
        if name not in known:
            raise UserError(f"--shape {text}: {ladder.name} has no size {name}; expected some of "
                            f"{', '.join(known)}")
        multiple = {"C": 32, "HS": 16, "H": 8, "Vp": 8, "n": 32}.get(name, 1)
        if size % multiple or size == 0 and name in parse_sizes(ladder.shape):
            wish = f"a multiple of {multiple}" if multiple > 1 else "at least 1"
            raise UserError(f"--shape {text}: expected {name} to be {wish}")
    return sizes


class Compiled(NamedTuple):
    """What kernels.cu is compiled for: rows of C numbers, heads of C / NH, attention with `group`
    query heads to each head of keys and values, and with ReLU in place of softmax."""
    C: int
    NH: int
    group: int = 1
    relu: int = 0


MODELS = (Compiled(768, 12), Compiled(96, 3), Compiled(1600, 20), Compiled(4096, 32))


def model_of(ladder, sizes, models=MODELS):
    """What to compile kernels.cu for: the first of these models, (C, NH), that fits the sizes, or
    else one made for them, with the switches of the ladder. Few are better, since each compilation
    takes seconds."""
    size, *switches = ladder.compiled_for.split(", ")
    more = {}
    if "GROUP" in switches and "NKV" in sizes:
        more["group"] = sizes["NH"] // sizes["NKV"]
    if "RELU" in switches:
        more["relu"] = sizes.get("relu",
                                 inspect.signature(ladder.problem).parameters["relu"].default)
    for C, NH, *_ in models:
        if size in ("", "C" if sizes.get("C") == C else "HS" if sizes.get("HS") == C // NH else ""):
            return Compiled(C, NH, **more)
    return Compiled(*((sizes["C"], sizes["C"] // 32) if size == "C" else (32 * sizes["HS"], 32)),
                    **more)


@dataclasses.dataclass(frozen=True)
class SwitchedConfig(Config):
    """The Config of a Compiled: switches that have their default in kernels.cu are left out."""
    group: int = 1
    relu: int = 0

    def switches(self):
        more = {f"-DGROUP={self.group}": self.group > 1, "-DRELU=1": self.relu}
        return [*super().switches(), *(switch for switch, there in more.items() if there)]


def config_of(C, NH, group=1, relu=0):
    """The Config to compile kernels.cu with."""
    return SwitchedConfig(C=C, NH=NH, group=group, relu=relu)


def describe_choice(choice):
    """"threads=256, rows=2", or "as the trainer does"."""
    chosen = {key: value for key, value in choice.items() if value is not None}
    return (", ".join(f"{key}={value}" for key, value in chosen.items()) or
            "as the trainer does" * bool(choice))


# ---- Inputs: seeded numbers, rounded as the device stores them


def stored(values, dtype):
    """An array rounded to a dtype of the device."""
    return to_bf16(values) if dtype == BF16 != values.dtype else values.astype(dtype)


def bf16(x):
    """x rounded to the 8 bits of a bfloat16's mantissa, to nearest with ties to even, but in
    float64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(256 * mantissa), exponent - 8)


def f32(x):
    """x rounded to fp32, but in float64: the input of a kernel, ready for a formula."""
    return np.float32(x).astype(np.float64)


def as_stored(truth, dtype):
    """A truth rounded to a dtype of the device, but in float64; ANY stays ANY."""
    with np.errstate(over="ignore"):
        return np.where(truth == ANY, ANY, to_float(stored(truth, dtype)).astype(np.float64))


POOL = 2**22 + 1  # numbers drawn for an array; a larger one repeats them, and its rows still differ


class Draw:
    """Seeded inputs. draw(*shape) gives normal numbers, rounded as real stores them, in float64."""

    def __init__(self, in_bf16, seed=1337):
        self.rng, self.in_bf16 = np.random.default_rng(seed), in_bf16
        self.real = bf16 if in_bf16 else f32  # rounds to what real stores

    def pool(self, *shape):
        """The normal numbers of an array, but at most POOL of them."""
        return self.rng.standard_normal(min(math.prod(shape), POOL))

    def normal(self, *shape):
        return np.resize(self.pool(*shape), shape)

    def __call__(self, *shape, scale=1.0):
        return np.resize(self.real(scale * self.pool(*shape)), shape)

    def fp32(self, *shape, scale=1.0):
        return np.resize(f32(scale * self.pool(*shape)), shape)

    def rows(self, N, C):
        """(N,C) in fp32, hard for a norm: rows of deviation 10 to 0.001, where an eps of 1e-5
        counts; every third row has a mean of 50 deviations, so that E[x^2] - E[x]^2 cancels."""
        deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
        return f32(deviation * (self.normal(N, C) + mean))

    def words(self, V, *shape):
        return self.rng.integers(V, size=shape, dtype=np.int32)


def in_parts(f, *arrays, step=None):
    """f over the arrays' first axis, `step` of it at a time and on all cores, so that temporaries
    stay small. f returns an array, or a tuple of arrays, with the same first axis."""
    step = step or max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    if isinstance(results[0], np.ndarray):
        return np.concatenate(results)
    return [*map(np.concatenate, zip(*results))]


ANY = 1.5e300  # in a truth: any value is right. No fp32 is as large.
# As the size of a sum's terms: this number is copied from an input, and must have its bits.
COPIED = -1.0
ODD_SHAPES = ("B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")

GROW = "B T C OC V H n NH NKV".split()  # the sizes that a check may raise; Vp follows V


def larger(checks, text):
    """Sizes that are larger than those of all checks, [{name: number}], and drawn by a text: the
    same text gives the same sizes. A size that is the same in all checks stays. Steps are those of
    the checks, so that C stays a multiple of 32; a size that goes by steps of 1 becomes odd."""
    rng = random.Random(zlib.crc32(text.encode()))
    drawn = dict(max(checks, key=lambda sizes: math.prod(sizes.get(name, 1) for name in GROW)))
    every = {name: [sizes[name] for sizes in checks if name in sizes] for name in drawn}
    for name in (name for name in GROW
                 if name in drawn and len(set(every[name])) > 1 and name != "B"):
        # a whole vocabulary in each row takes too long: its check has few rows
        step, most = math.gcd(*every[name]), max(size for size in every[name] if size < 10000)
        drawn[name] = most + step * rng.randint(1, max(2, min(most // (8 * step), 500)))
        drawn[name] += step == 1 and drawn[name] % 2 == 0
    if "NKV" in drawn:  # each key head has as many query heads
        drawn["NKV"] = max(every["NKV"]) + rng.randint(0, 1)
        drawn["NH"] = drawn["NKV"] * -(-(max(every["NH"]) + 1) // drawn["NKV"])
    if "Vp" in drawn:
        step = math.gcd(*every["Vp"])
        drawn["Vp"] = -(-drawn["V"] // step) * step + step * rng.randint(0, 128 // step)
    if "B" in drawn:
        rows = max(sizes["B"] * sizes["T"] for sizes in checks)
        drawn["B"] = 1 if {"NH", "V"} & drawn.keys() else rng.randint(1, 2)
        drawn["T"] = max(drawn["T"], rows // drawn["B"] + rng.randint(1, 9))
    return drawn
