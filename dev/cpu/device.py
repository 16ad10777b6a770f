"""--device cpu: in place of CUDA's kernels the loops of kernels.cpp, and of another .cpp beside its
.cu. A kernel without a loop is emulated: see emulated.py."""
import ctypes
import functools
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.common.cores import physical_cores, usable_cores
from dev.common.cuda_source import check_arrays, checked_kernels, parameters_of
from dev.cpu import races
from dev.cpu.emulated import ALWAYS, HEADERS, KERNELS, Emulated
from dev.cpu.host import FLAGS, Host, compiled, flags_asked_for, loaded, round_to_tf32
from train_gpt2 import BF16, SIZES, UserError

LOOPS = Path(__file__).resolve().parent / "kernels.cpp"
C_TYPES = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float,
           "size_t": ctypes.c_size_t}
# the switches that loops know
KNOWN = re.compile(r"-D(FP32|TF32|BF16|(CHANNELS|HS|GROUP)=\d+|SIGHT\S+)|-I\S+")
LOOP_KINDS = {"Output": "real", "TileMap": "real", "low_half": "int16_t"}  # a loop's of a kernel's


def loops_of(path):
    """The file with the loops of a CUDA file."""
    return LOOPS if path == KERNELS else path.with_suffix(".cpp")


def read_loops(text):
    """{name: texts of its parameters} of C++ functions."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return {name: [part.strip() for part in parameters.split(",")]
            for name, parameters in re.findall(r"^void (\w+)\(([^)]*)\) \{", text, re.M)}


def last_word(text):
    return re.findall(r"\w+", text)[-1]


def told(parameters):
    """Parameters (texts) as a kernel and its loop must agree on them: ["real* out", "int N"]."""
    return [f"{LOOP_KINDS.get(p.kind, p.kind)}{'*' * p.array} {p.name}"
            for p in parameters_of(SimpleNamespace(parameters=parameters))]


class Loop(NamedTuple):
    kernel: object  # the train_gpt2.Kernel in whose place it stands
    function: object  # of the library
    scalars: list  # for each of the kernel's parameters int or float, or None for an array
    more: list  # further arguments: numbers, or None for the count of blocks or heads


class Cpu(Host):
    """The CPU, all of its cores. dtype, c, beside: as for train_gpt2.Cuda. CXX names the compiler
    and CXXFLAGS adds flags to it. Raises UserError."""
    hopper, emulator = False, Emulated
    INSTEAD = ""  # how loops begin that take another's place
    multiprocessors = 16  # shares of a sum over rows: each costs a row of partial sums
    # A loop takes any row, and an item of attention is a head.
    attention_sizes = SimpleNamespace(rows=2**30, threads=1, shared_forward=0, shared_backward=0)
    layernorm_sizes = SimpleNamespace(threads=1, row_threads=1, shared_of_row=1)

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c)
        always = [path for path in ALWAYS if path.exists()] if KERNELS in c.SOURCES else []
        self.config, self.sources = c, [*dict.fromkeys([*c.SOURCES, *always, *beside])]
        self.kernels = checked_kernels(self.sources)
        self.loops, self.library, self.threads_taken = {}, None, ""
        self.emulated = None  # the device for kernels without a loop, made when one is launched
        self.unknown = self.unknown_switch()
        if self.unknown:  # all kernels
            self.emulated = self.emulate()
            for name in ("hopper", "multiprocessors", *SIZES):
                setattr(self, name, getattr(self.emulated, name))
        else:
            self.compile()

    def __str__(self):
        how = f"kernels.cu thread by thread for {self.unknown}" if self.unknown else "plain loops"
        return f"{super().__str__()}, {how}{self.threads_taken}"

    def unknown_switch(self):
        """What loops cannot do, of the kernels' switches and what the environment asks of the
        emulated device; or None."""
        given = " ".join(os.environ.get("CXXFLAGS", "").split())
        text = "".join(path.read_text("utf-8") for path in (*self.sources, *HEADERS))
        tests = re.findall(r"^ *# *(?:el)?if([^/\n]*)", text, re.M)
        tested = {*re.findall(r"\w+", " ".join(tests))}
        asked = [flag for flag, name in re.findall(r"(?<!\S)(-D ?(\w+)\S*)", given)
                 if name in tested]  # -DNDEBUG, say, is nothing to a kernel
        asked += [races.FLAG] * (races.FLAG in given.split())
        order = os.environ.get("CUDA_ON_CPU_ORDER")
        return next((flag for flag in [*self.switches(), *asked] if not KNOWN.fullmatch(flag)),
                    f"CUDA_ON_CPU_ORDER={order}" if order else None)

    def compile(self):
        """Compile the loops, for any model, and find a loop for each kernel that has one."""
        files = [*self.AHEAD,
                 *(path for path in map(loops_of, self.sources) if path.exists())]
        texts = {path: path.read_text("utf-8") for path in files}
        flags = [*FLAGS, "-fno-trapping-math", *self.CONTRACTION,
                 *["-DBF16"] * (self.real == BF16), *flags_asked_for()]
        debugged = any(flag.startswith("-g") for flag in flags)
        source = "".join(f'#line 1 "{path if debugged else path.name}"\n{text}\n'
                         for path, text in texts.items())
        self.path, _ = compiled("the kernels' loops", flags, source)
        self.library = loaded(self.path, "the kernels' loops")
        values = dict(re.findall(r"-D(CHANNELS|HS|GROUP)=(\d+)", " ".join(self.switches())))
        values = {"C": int(values["CHANNELS"]), "HS": int(values["HS"]),
                  "GROUP": int(values.get("GROUP", 1)), "blocks": None, "heads": None,
                  "documents": self.documents}
        for name, parameters in read_loops(source).items():
            function = getattr(self.library, name)
            function.restype = None
            function.argtypes = [C_TYPES.get(text.split()[0], ctypes.c_void_p) if "*" not in text
                                 else ctypes.c_void_p for text in parameters]
            name = name.removeprefix(self.INSTEAD)
            if name in self.kernels:
                kernel = self.kernels[name]
                count = len(kernel.parameters)
                wish, found = told(kernel.parameters), told(parameters[:count])
                if wish != found or any(last_word(text) not in values
                                        for text in parameters[count:]):
                    raise UserError(f"{name}: the kernel has {', '.join(wish)}; its loop has "
                                    f"{', '.join(told(parameters))}: change the loop likewise, or "
                                    "use --device emulated, which runs kernels.cu itself")
                scalars = [{"int": int, "float": float, "size_t": int}.get(text.split()[0])
                           for text in kernel.parameters]
                more = [values[last_word(text)] for text in parameters[count:]]
                self.loops[name] = Loop(kernel, function, scalars, more)
        if hasattr(self.library, "omp_set_num_threads") and "OMP_NUM_THREADS" not in os.environ:
            self.threads_taken = take_faster_threads(self, physical_cores(), usable_cores())

    def emulate(self, only=None):
        """The emulated device for these kernels."""
        return self.emulator(self.dtype, self.config, self.sources, only, given=self.switches())

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel's loop over all of its items, or the kernel itself."""
        if name not in self.loops:
            if self.emulated is None and name in self.kernels:
                self.emulated = self.emulate(self.kernels.keys() - self.loops.keys())
            if self.emulated is None:
                raise UserError(f"kernels.cu: there is no kernel {name} with a BLOCK(...) over it")
            return self.emulated.launch(name, items, *args, threads=threads, shared=shared)
        kernel, function, scalars, more = self.loops[name]
        if len(args) != len(scalars):
            kernel.configure(items, args, self.W)  # which says so
        check_arrays(kernel, args, self.real)
        count = items[-1] if isinstance(items, tuple) else items
        function(*(to(arg) if to else address(arg) for to, arg in zip(scalars, args)),
                 *(count if x is None else x for x in more))

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As train_gpt2.Cuda.matmul."""
        known = a.dtype == b.dtype == self.real and out.dtype in (np.float32, self.real)
        if self.library is None or not known or numpy_has_accelerate():
            return super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at)
        assert out.shape + b.shape[:1] == (a.shape[0], b.shape[1], a.shape[1]), "sizes differ"
        assert out.flags.c_contiguous, "the loop takes out's rows to be one behind the other"
        if self.dtype == "tf32":
            a, b = round_to_tf32(a), round_to_tf32(b)
        is_sum = accumulate or out.dtype != self.real  # the gradient of a parameter, in fp32
        outs = (None, out) if is_sum else (out, None)
        self.library.multiply(*map(address, outs), *placed(a), *placed(b), *out.shape, a.shape[1],
                              accumulate, *map(address, (bias, dgelu_at, gelu)))


found_faster = {}  # {a library's path: a number of threads}


def take_faster_threads(device, single, every):
    """Let a device have one thread a core, `single` of them, or every one, whichever multiply
    faster: two threads of a core share its arithmetic, so that the second may only be in the way.
    Returns what to say of it."""
    if single == every:
        return ""
    if device.path not in found_faster:
        left, right, out = np.zeros((3, 512, 512), device.real)
        seconds = dict.fromkeys((single, every), float("inf"))
        for _ in range(4):  # by turns; the first ones start threads
            for count in seconds:
                device.library.omp_set_num_threads(count)
                begun = time.perf_counter()
                device.matmul(out, left, right)
                seconds[count] = min(seconds[count], time.perf_counter() - begun)
        found_faster[device.path] = min(seconds, key=seconds.get)
    device.library.omp_set_num_threads(found_faster[device.path])
    taken = "one thread" if found_faster[device.path] == single else "all threads"
    return f", with {taken} of a core, which was faster"


def placed(matrix):
    """(where a matrix begins, the numbers from a row to the next, and from a column)."""
    stored = matrix if matrix.flags.c_contiguous else matrix.T  # whose address is found faster
    return address(stored), *(stride // matrix.itemsize for stride in matrix.strides)


def address(array):
    """Where an array begins; 0 for None."""
    if array is None:
        return 0
    try:  # in a fifth of the time, and a step asks 600 times
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError):  # it has gaps, or no numbers, or cannot be written
        return array.__array_interface__["data"][0]


@functools.cache
def numpy_has_accelerate():
    """Whether NumPy multiplies with Accelerate, macOS's library, which uses a unit of Apple's
    processors that a compiler does not: then NumPy multiplies, and nothing promises the same bits
    for any number of threads."""
    return "accelerate" in str(np.show_config(mode="dicts")).lower()
