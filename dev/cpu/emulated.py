"""--device emulated: g++ or clang++ compile kernels.cu itself behind cuda.h, and the CPU runs it
thread by thread: for tests of kernels, debuggers and sanitizers. device.py is for training."""
import ctypes
import functools
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.common.compiler import words_of
from dev.common.cuda_source import check_arrays, checked_kernels
from dev.common.student_text import for_cpu
from dev.cpu import races
from dev.cpu.host import FLAGS, Host, compiled, flags_asked_for, found_compiler, loaded
from dev.cpu.places import with_calls
from train_gpt2 import SIZES, FastCuda, UserError, aligned_bytes

HEADER = Path(__file__).resolve().parent / "cuda.h"
HEADERS = sorted(HEADER.parent.glob("*.h"))  # cuda.h includes the others
RUNTIME = HEADER.with_name("launch.h")  # but for this one, which is linked
KERNELS = HEADER.parents[2] / "kernels.cu"
# Always compiled with it, so that a run with --moments bf16, --sums bf16, --optimizer muon or
# --recompute 1 needs no other library than one without.
ALWAYS = [HEADER.parents[1] / f"features/{name}.cu"
          for name in ("moments", "ranks/bf16_sums", "muon", "recompute")]
# Of a student's file: a loop without an end stays, what he forgot to set shows, and a stuck block
# tells its lines.
FOR_STUDENTS = ("-fno-finite-loops", "-ftrivial-auto-var-init=pattern", "-fno-crossjumping",
                "-fno-tree-tail-merge")
ALWAYS_FOR_STUDENTS = ("-g1", "-Wextra", "-Wno-unused-parameter",
                       "-Wno-sign-compare", "-Wno-attributes")
# of a kernel of this name
GLOBAL = re.compile(r"__global__(?=\s+void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+))")


def with_poison(text):
    """CUDA text in which cuda.h's POISON(name) follows, on the same line, each __shared__
    variable's declaration."""
    def add(declaration):
        if declaration[0].startswith("/"):  # a comment, which may speak of __shared__ too
            return declaration[0]
        bare = re.sub(r"<[^;]*>|\[[^]]*\]|\([^)]*\)", "", declaration[0])
        return declaration[0] + "".join(f" POISON({name})"
                                        for name in re.findall(r"(\w+)\s*[,;]", bare))
    return re.sub(r"//[^\n]*|/\*.*?\*/|(?<!extern )\b__shared__\s[^;]*;", add, text, flags=re.S)


@functools.cache
def flags_for_students(compiler):
    """The flags that a compiler knows of those for students' files."""
    def known(flag):
        command = [*words_of(compiler), "-Werror", flag, "-E", "-x", "c++", os.devnull]
        return not subprocess.run(command, capture_output=True).returncode
    return [*filter(known, FOR_STUDENTS), *ALWAYS_FOR_STUDENTS]


class Emulated(Host):
    """The CPU, all of its cores. CUDA_ON_CPU_ORDER says in which order the threads of a block run:
    see set_order.

    dtype, c and beside as for devices.Cuda. CXX names the compiler and CXXFLAGS adds flags to it:
    with CXXFLAGS="-O0 -g" a debugger stops in a kernel's lines. only: the names of the kernels that
    will be launched, which saves the compiler the others; without it, all. given: the switches, if
    not this device's own. With -fsanitize=thread in CXXFLAGS every launch is searched for races:
    see races.py. students: those of the files that somebody is learning with: they may write what a
    file for nvcc may, and `warnings` is what the compiler says. Raises UserError.
    """
    # no more blocks than this share a sum: each of them costs a row of partial sums
    multiprocessors = 4
    max_threads = 256  # of a block, unless the caller chooses: at a barrier each costs 25 ns

    def __init__(self, dtype, c, beside=(), only=None, students=(), given=()):
        super().__init__(dtype, c)
        always = [path
                  for path in ALWAYS if path.exists()] if KERNELS in c.SOURCES and not only else []
        sources = [*dict.fromkeys([*c.SOURCES, *always, *beside])]
        self.students, self.warnings, self.given = [*students], "", [*given]
        self.kernels = {name: kernel for name, kernel in checked_kernels(sources).items()
                        if not only or name in only}
        self.hopper = "-DHOPPER" in os.environ.get("CXXFLAGS", "").split()  # bf16 alone
        self.races = races.FLAG in os.environ.get("CXXFLAGS", "").split()  # does it look for them?
        self.compile(sources)

    def compile(self, sources):
        """Compile these files, unless it is done, and find the kernels."""
        self.path = self.build([*self.AHEAD, *sources])
        self.library = loaded(self.path, "kernels.cu")
        self.set_order(os.environ.get("CUDA_ON_CPU_ORDER") or "forward", "CUDA_ON_CPU_ORDER")
        if self.students:
            self.library.tell_places()
        for name in self.kernels:
            function = getattr(self.library, f"launch_{name}")
            function.restype = ctypes.c_char_p
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        for name, fields in SIZES.items():
            values = (ctypes.c_int * len(fields)).in_dll(self.library, name)
            setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))

    def __str__(self):
        return f"{super().__str__()}, kernels.cu thread by thread"

    def switches(self):
        return self.given or super().switches()

    def build(self, sources):
        """The path of the shared library, compiled if there is none for these files, flags and this
        processor."""
        flags = [*FLAGS, "-U_FORTIFY_SOURCE", *self.CONTRACTION, *self.switches(),
                 *flags_asked_for()]
        if self.races:
            flags.remove("-fopenmp")
            flags += races.MORE_FLAGS
        elif not self.students:  # an inlined call's line is known, which students are told
            flags.append("-DWITH_CALLS")
        libraries = races.LIBRARIES if self.races else []
        own = flags_for_students(found_compiler()) if self.students else []
        texts = {}
        for path in sources:
            text = path.read_text(encoding="utf-8-sig")
            if path in self.students:
                text = for_cpu(text, HEADER.with_name("halves.h"))
            text = with_poison(text)  # what is inline is not compiled until it is called
            texts[path] = GLOBAL.sub(
                lambda found: found[0] if found[1] in self.kernels else "inline", text)

        spaces = dict.fromkeys(name for path, text in texts.items() if path not in self.students
                               for name in re.findall(r"^namespace (\w+) \{", text, re.M))

        def program(called, students=True):
            """What is compiled, with files called as called(path) says; without students', only
            what is the same for all of theirs."""
            return "".join([
                f'#include "{called(HEADER)}"\n',
                "#pragma GCC visibility push(hidden)\n",  # a precompiled header's ends with it
                *(f'#line 1 "{called(path)}"\n{text}\n' for path, text in texts.items()
                  if students or path not in self.students),
                # in which kernels may be
                *(f"using namespace {name};\n" for name in spaces if students),
                *(f"CPU_KERNEL({name})\n" for name in self.kernels if students)])

        # Copies of the repository share libraries, unless a flag names a folder or a debugger is to
        # find lines of one.
        debugged = own or any(flag.startswith("-g") for flag in flags)
        named = program(str if debugged else lambda path: path.name)
        # Students' files are the last, so the compiler can keep what it made of the others.
        ahead = program(str, students=False) if self.students else f'#include "{HEADER}"\n'
        path, self.warnings = compiled("kernels.cu", flags, program(str), named, HEADERS, libraries,
                                       bool(self.students), ahead, RUNTIME, own)
        return path

    def set_order(self, order, name="order"):
        """In which order the threads of a block run in all launches from now on: "forward";
        "reverse"; or a whole number from 1 on, which shuffles the warps, and the lanes of a warp
        anew after each wait. A kernel without races gives the same bits in each. Raises UserError,
        which calls the order by this name."""
        numbers = {"forward": 0, "reverse": -1}
        if order not in numbers and not (re.fullmatch("[0-9]{1,10}", f"{order}")
                                         and 1 <= int(order) < 2**31):
            raise UserError(f"{name} is {order}: expected forward, reverse, or a whole number from "
                            f"1 to {2**31 - 1}, which shuffles the threads")
        self.library.set_order(ctypes.c_int(numbers[order] if order in numbers else int(order)))

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over its items, each block with `shared` bytes of dynamic shared memory."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: there is no kernel {name} with a BLOCK(...) over it")
        kernel, given = self.kernels[name], args
        args = FastCuda.with_tensor_maps(self, name, args)
        threads = threads or min(kernel.threads, self.max_threads)
        grid, block, args = kernel.configure(items, args, self.W, threads)
        if not self.students:
            check_arrays(kernel, args, self.real)

        def at(array):
            return 0 if array is None else array.__array_interface__["data"][0]

        # An array goes by its address, but a scalar, and a struct, of type void, by value.
        by_value = (isinstance(arg, np.generic) or arg is not None and arg.dtype.kind == "V"
                    for arg in args)
        values = [np.asarray(arg if whole else np.uint64(at(arg)))
                  for arg, whole in zip(args, by_value)]
        pointers = (ctypes.c_void_p * len(values))(*map(at, values))
        grid, block = ((ctypes.c_uint * 3)(*(*sizes, 1, 1)[:3]) for sizes in (grid, block))
        named = [(re.findall(r"\w+", text)[-1], x) for text, x in zip(kernel.parameters, given)
                 if isinstance(x, np.ndarray)] if self.races else ()
        if self.races:
            races.watch(self.library, [x for _, x in named])
        error = getattr(self.library, f"launch_{name}")(grid, block, shared, pointers)
        if error:
            raise UserError(f"kernels.cu: {with_calls(error.decode(), self.path, self.students)}")
        if self.races:
            races.check(self.library, self.path, name, named)

    def tensor_map(self, array, T, HS):
        """As train_gpt2.FastCuda.tensor_map; what hopper.h reads is simpler."""
        made = aligned_bytes(128)
        width = array.shape[1]
        made.view(np.uint64)[:4] = array.__array_interface__["data"][0], HS, width // HS, T
        return made.view("V128")

    def paired_map(self, array):
        """As PairedMaps.paired_map of features/fp8/fp8_gelu.py."""
        made, (rows, width) = aligned_bytes(128), array.shape
        made.view(np.uint64)[:5] = (array.__array_interface__["data"][0],
                                    width * array.itemsize // 2, 1, rows, 1)
        return made.view("V128")
