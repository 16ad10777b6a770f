"""A ladder: a kernel's problem, and its versions from the most naive to the best.

kernels/gelu_forward.py, and so on, stands beside gelu_forward.cu and holds LADDER, a Ladder.
"""
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dev.common.config import Config
from prepro_tinyshakespeare import UserError

LAB = Path(__file__).resolve().parent
KERNELS = LAB / "kernels"
DTYPES = ("fp32", "tf32", "bf16")  # tf32 differs from fp32 only for versions that use tensor cores
LAUNCH_GAP = "the memory is idle while a launch begins and ends, which takes two or three microseconds"


def threads_of(device, name):
    """How many threads a kernel's BLOCK says, or None if there is no such kernel."""
    return device.kernels[name].threads if name in device.kernels else None


class Version(NamedTuple):
    """One way to compute the outputs of a kernel. `items` and `shared` are expressions in the names of a problem, as in
    "N*C". Four more names can be used: W, the numbers of type real in 16 bytes; itemsize, the bytes of a real; threads;
    and what is in `more`."""
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (device, a) that launches several
    items: str = None  # how many items BLOCK divides among blocks; with a comma, along x and along y
    threads: tuple = (64, 128, 256, 512, 1024)  # block sizes to try; (): the size in BLOCK
    args: str = None  # the names of the kernel's arguments, if not those of the Ladder
    shared: str = "0"  # bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # other choices, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = {}  # {dtype: limit}, if not the Ladder's; a comment there gives the reason
    sums: str = ""  # outputs that count among the Ladder's `sums` in this version only
    trainer: bool = False  # the trainer's: also launched as the trainer does, with None for each choice
    atomics: bool = False  # it adds with float atomics, so its bits depend on the order of the threads
    library: str = ""  # the library that it calls
    recorded: bool = True  # a graph can record its launches; CuPy's cuBLAS refuses that
    fits: Callable = None  # a -> whether it can do this problem
    held_back: str | dict = {}  # why it is below 85% of its ceiling, in all dtypes or {dtype: why}

    def choices(self, device, few=False):
        """All combinations of choices: {"threads": 256, ...}. With few, only the first and the last of the
        threads, and the first two of the blocks."""
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
            raise UserError(f"no kernel {self.run} with a BLOCK over it, and {ladder.name}.py launches it")
        items, shared = (eval(expression, {}, vars(a)) for expression in (self.items, self.shared))
        names = (self.args or ladder.args).split()
        for name in names:
            if not hasattr(a, name):
                raise UserError(f"{ladder.name}.py has an argument {name} for {self.run}, which is no size, input or "
                                "output of its problem")
        args = [getattr(a, name) for name in names]
        device.launch(self.run, items, *args, threads=a.threads, shared=shared)


class Ladder(NamedTuple):
    """A kernel's problem, and its versions from the most naive to the best. problem(draw, **sizes) returns
    {name: input} and {name: truth}. Inputs are numbers, None, integer arrays, or arrays of float64 that the Draw has
    rounded. A truth is float64: where it is ANY, any result is right, and where it is NaN or infinite, the result must
    be the same. An output that is also an input is updated in place. A third dictionary may say how large the terms of
    an output are: see compare_output."""
    problem: Callable
    shape: str  # the sizes to time
    checks: tuple  # small odd sizes at which every version is checked that fits
    versions: tuple
    args: str = ""  # the names of the kernels' arguments, if most versions have the same
    fp32: str = ""  # the arrays that are fp32 in every dtype; the others are of type real, as in kernels.cu
    exact: str = ""  # the outputs that must have the bits of the rounded truth
    sums: str = ""  # the outputs that are sums whose terms may cancel: see compare_output
    made_of: dict = {}  # {output: a function of a}, for an output that no kernel writes
    trainer_checks: tuple = ()  # more sizes, for the trainer's version only
    compiled_for: str = ""  # "C" or "HS", if kernels.cu must be compiled for that size; "HS, GROUP, RELU": see Compiled
    beside: tuple = ()  # other kernels of the lab whose .cu must be compiled too
    limits: dict = {}  # {dtype: limit of the relative error}, if not KERNEL_LIMIT
    limits_of: dict = {}  # {output: such limits}, if one has its own
    flops: Callable = None  # a -> its FLOPs
    traffic: Callable = None  # a -> its bytes, if not each input and output once
    torch: Callable = None  # the same in PyTorch: (torch, tensors) -> a function
    name: str = ""  # the file's
    summary: str = ""  # the first line of the file's docstring


@functools.cache
def find_ladder(name):
    """The Ladder of a kernel. Raises what a wrong file raises."""
    module = importlib.import_module(f"dev.lab.kernels.{name}")
    return module.LADDER._replace(name=name, summary=module.__doc__.strip().splitlines()[0])


def kernel_names():
    """The names of all kernels, sorted: of each .py in kernels/."""
    return sorted(path.stem for path in KERNELS.glob("*.py"))


def launched_by(names, known):
    """Which of the known kernels these ladders may launch: those named in their .py, or in a module of the lab that it
    imports. _inp and _weight are endings that a .py adds to a name."""
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


def asked_sizes(text, ladder):
    """{name: number} of --shape. Some must be multiples, so that every row starts on 16 bytes. Raises UserError."""
    sizes, known = parse_sizes(text), list(inspect.signature(ladder.problem).parameters)[1:]
    for name, size in sizes.items():
        if name not in known:
            raise UserError(f"--shape {text}: {ladder.name} has no size {name}; expected some of {', '.join(known)}")
        multiple = {"C": 32, "HS": 16, "H": 8, "Vp": 8, "n": 32}.get(name, 1)
        if size % multiple or size == 0 and name in parse_sizes(ladder.shape):
            wish = f"a multiple of {multiple}" if multiple > 1 else "at least 1"
            raise UserError(f"--shape {text}: expected {name} to be {wish}")
    return sizes


class Compiled(NamedTuple):
    """What kernels.cu is compiled for: rows of C numbers, heads of C / NH, attention with `group` query heads to each
    head of keys and values, and with ReLU in place of softmax."""
    C: int
    NH: int
    group: int = 1
    relu: int = 0


MODELS = (Compiled(768, 12), Compiled(96, 3), Compiled(1600, 20), Compiled(4096, 32))


def model_of(ladder, sizes, models=MODELS):
    """What to compile kernels.cu for: the first of these models, (C, NH), that fits the sizes, or else one made for
    them, with the switches of the ladder. Few are better, since each compilation takes seconds."""
    size, *switches = ladder.compiled_for.split(", ")
    more = {}
    if "GROUP" in switches and "NKV" in sizes:
        more["group"] = sizes["NH"] // sizes["NKV"]
    if "RELU" in switches:
        more["relu"] = sizes.get("relu", inspect.signature(ladder.problem).parameters["relu"].default)
    for C, NH, *_ in models:
        if size in ("", "C" if sizes.get("C") == C else "HS" if sizes.get("HS") == C // NH else ""):
            return Compiled(C, NH, **more)
    return Compiled(*((sizes["C"], sizes["C"] // 32) if size == "C" else (32 * sizes["HS"], 32)), **more)


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
    return ", ".join(f"{key}={value}" for key, value in chosen.items()) or "as the trainer does" * bool(choice)
