"""The CPU as a device for train_gpt2.py, with the verbs of train_gpt2.Cuda: g++ or clang++ compile
kernels.cu behind cuda.h, and NumPy's BLAS multiplies matrices."""
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from prepro_tinyshakespeare import UserError, replace_file

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

from dev.common.bf16 import to_bf16
from dev.common.cache import cache_folder
from dev.common.cuda_source import check_arrays, checked_kernels
from dev.common.student_text import for_cpu
from dev.cpu import races
from dev.cpu.places import with_calls
from train_gpt2 import BF16, SIZES, Cuda, FastCuda, aligned_bytes, to_float

HEADER = Path(__file__).resolve().parent / "cuda.h"
HEADERS = sorted(HEADER.parent.glob("*.h"))  # cuda.h includes the others
KERNELS = HEADER.parents[2] / "kernels.cu"
# Always compiled with it, so that a run with --moments bf16 or --sums bf16 needs no other library
# than one without.
ALWAYS = [HEADER.parents[1] / name for name in ("features/moments.cu", "features/ranks/sums.cu")]
# Of a student's file: a loop without an end stays, what he forgot to set shows, and a stuck block
# tells its lines.
FOR_STUDENTS = ("-fno-finite-loops", "-ftrivial-auto-var-init=pattern", "-fno-crossjumping",
                "-fno-tree-tail-merge")
ALWAYS_FOR_STUDENTS = ("-g1", "-DTELL_PLACES", "-Wextra", "-Wno-unused-parameter",
                       "-Wno-sign-compare")
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


def round_to_tf32(x):
    """x rounded to TF32's 10 bits of mantissa, half away from zero, as tensor cores want their
    inputs."""
    return np.where(np.isnan(x), x, ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32))


def checksum(library, warnings):
    """Of a compiled library (bytes) and the compiler's warnings. The system maps a library that was
    cut off, and the process dies when it reads beyond the end."""
    return hashlib.sha256(library + warnings.encode()).hexdigest()


@functools.cache
def flags_for_students(compiler):
    """The flags that a compiler knows of those for students' files."""
    def known(flag):
        return not subprocess.run([compiler, "-Werror", flag, "-E", "-x", "c++", os.devnull],
                                  capture_output=True).returncode
    return [*filter(known, FOR_STUDENTS), *ALWAYS_FOR_STUDENTS]


def compiler_of():
    """The C++ compiler, or the CXX that is asked for; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


class Cpu:
    """The CPU, all of its cores. CUDA_ON_CPU_ORDER says in which order the threads of a block run:
    see set_order.

    dtype: "fp32" (the default), "tf32" or "bf16"; c and beside as for train_gpt2.Cuda. CXX names
    the compiler and CXXFLAGS adds flags to it: with CXXFLAGS="-O0 -g" a debugger stops in a
    kernel's lines. only: the names of the kernels that will be launched, which saves the compiler
    the others; without it, all. With -fsanitize=thread in CXXFLAGS every launch is searched for
    races: see races.py. students: those of the files that somebody is learning with: they may write
    what a file for nvcc may, and `warnings` is what the compiler says. Raises UserError.
    """
    name, max_shared = "cpu", 227 * 1024 - 1024  # bytes, as on an H100
    # no more blocks than this share a sum: each of them costs a row of partial sums
    multiprocessors = 4
    max_threads = 256  # of a block, unless the caller chooses: at a barrier each costs 25 ns
    Fault = ()  # a kernel that goes wrong here is a UserError, or a signal

    def __init__(self, dtype, c, beside=(), only=None, students=()):
        always = [path
                  for path in ALWAYS if path.exists()] if KERNELS in c.SOURCES and not only else []
        sources = [*dict.fromkeys([*c.SOURCES, *always, *beside])]
        self.dtype, self.compiled_for, self.HS = dtype or "fp32", c.switches(), c.C // c.NH
        self.students, self.warnings = [*students], ""
        self.kernels = {name: kernel for name, kernel in checked_kernels(sources).items()
                        if not only or name in only}
        self.real = np.float32 if self.dtype in ("fp32", "tf32") else BF16
        self.hopper = "-DHOPPER" in os.environ.get("CXXFLAGS", "").split()  # bf16 alone
        self.races = races.FLAG in os.environ.get("CXXFLAGS", "").split()  # does it look for them?
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        # a loss that is not finite is reported once, by the training loop
        np.seterr(over="ignore", invalid="ignore")
        self.path = self.build(sources)
        try:
            self.library = ctypes.CDLL(str(self.path))
        except OSError as e:
            if re.search("map segment|not permitted|denied", str(e)):
                raise UserError(f"{e}: the disk may be mounted with noexec; set XDG_CACHE_HOME to "
                                "a folder from which libraries can be loaded") from None
            # a function has no body
            raise UserError(f"{compiler_of()} could not compile kernels.cu:\n{e}") from None
        self.set_order(os.environ.get("CUDA_ON_CPU_ORDER") or "forward", "CUDA_ON_CPU_ORDER")
        for name in self.kernels:
            function = getattr(self.library, f"launch_{name}")
            function.restype = ctypes.c_char_p
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        for name, fields in SIZES.items():
            values = (ctypes.c_int * len(fields)).in_dll(self.library, name)
            setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
        # 4 MiB: a matmul's result on its way to being added, still in cache
        self.scratch = np.empty(2**20, np.float32)

    def __str__(self):
        return f"the CPU, {os.cpu_count()} cores, {self.dtype}"

    def switches(self):
        """As train_gpt2.Cuda.switches."""
        return [f"-D{self.dtype.upper()}", *self.compiled_for]

    def build(self, sources):
        """The path of the shared library, compiled if there is none for these files, flags and this
        processor."""
        compiler = compiler_of()
        if not compiler or not shutil.which(compiler):
            found = (f"CXX={compiler} is not there" if compiler
                     else "neither g++ nor clang++ is there")
            raise UserError(f"{found}, and a CPU needs a C++ compiler to run the kernels: install "
                            "one (Debian, Ubuntu: apt install g++; macOS: xcode-select "
                            "--install), or train on a GPU")
        flags = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-U_FORTIFY_SOURCE",
                 "-Wall", "-Wno-unknown-pragmas", "-fPIC", "-shared",
                 "-fopenmp", *self.switches(), *os.environ.get("CXXFLAGS", "").split()]
        if self.races:
            flags.remove("-fopenmp")
            flags += races.MORE_FLAGS
        libraries = ["-x", "none", *races.LIBRARIES] if self.races else []
        if self.students:
            flags += flags_for_students(compiler)
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

        def program(called):
            """What is compiled, with files called as called(path) says."""
            return "".join([
                f'#include "{called(HEADER)}"\n',
                *(f'#line 1 "{called(path)}"\n{text}\n' for path, text in texts.items()),
                *(f"using namespace {name};\n" for name in spaces),  # in which kernels may be
                *(f"CPU_KERNEL({name})\n" for name in self.kernels)])

        # Copies of the repository share libraries, unless a flag names a folder or a debugger is to
        # find lines of one.
        debugged = self.students or any(flag.startswith("-g") for flag in flags)
        source, named = program(str), program(str if debugged else lambda path: path.name)
        # -### prints what the driver would run, and so what -march=native means on this processor.
        target = subprocess.run([compiler, *flags, "-E", "-###", "-x", "c++", os.devnull],
                                capture_output=True).stderr
        key = hashlib.sha256(b"\0".join([named.encode(), *(path.read_bytes() for path in HEADERS),
                                         target]))
        cache = cache_folder()
        library = cache / f"kernels_{key.hexdigest()[:16]}.so"
        seal = library.with_suffix(".txt")  # written last
        try:
            sealed, self.warnings = seal.read_text(encoding="utf-8").split("\n", 1)
            if sealed == checksum(library.read_bytes(), self.warnings):
                return library
        except (OSError, ValueError):  # not there yet, or damaged
            pass
        print(f"compiling kernels.cu with {compiler}, once", flush=True)
        temporary = cache / f"{library.name}.{os.getpid()}"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            try:
                # again without OpenMP, if the compiler has none; or with recursion, if it is there
                for _ in range(3):
                    done = subprocess.run([compiler, *flags, "-x", "c++", "-", *libraries, "-o",
                                           temporary], input=source, text=True, capture_output=True)
                    if done.returncode == 0:
                        compiled = temporary.read_bytes()
                        self.warnings = done.stderr if self.students else ""
                        replace_file(library, [compiled])
                        text = f"{checksum(compiled, self.warnings)}\n{self.warnings}"
                        replace_file(seal, [text.encode()])
                        return library
                    if "recursive inlining" in done.stderr and "-DWITH_RECURSION" not in flags:
                        flags.append("-DWITH_RECURSION")
                        continue
                    if "openmp" not in done.stderr or "-fopenmp" not in flags:
                        break
                    flags.remove("-fopenmp")
                    print(f"{compiler} has no OpenMP: the kernels run on one core")
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as e:
            raise UserError(f"{cache}: compiled kernels could not be kept there ({e.strerror}); "
                            "set XDG_CACHE_HOME to a folder that can be written") from None
        except UserError as e:
            raise UserError(f"{e}; set XDG_CACHE_HOME to a folder on another disk") from None
        raise UserError(f"{compiler} could not compile kernels.cu:\n{done.stderr.strip()}")

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

    def empty(self, nbytes):
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {nbytes:,} bytes more; choose a smaller -b, -t or -e"
                            ) from None

    def put(self, array, values):
        array[...] = np.reshape(values, array.shape)

    def get(self, array):
        return array.copy()

    def zero(self, array):
        array.fill(0)

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over its items, each block with `shared` bytes of dynamic shared memory."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: there is no kernel {name} with a BLOCK(...) over it")
        kernel, given = self.kernels[name], args
        args = FastCuda.with_tensor_maps(self, name, args)
        threads = threads or min(kernel.threads, self.max_threads)
        grid, block, args = kernel.plan(items, args, self.W, threads)
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

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As train_gpt2.Cuda.matmul; what is accumulated has neither bias nor GELU."""
        if self.dtype == "tf32":
            a, b = round_to_tf32(a), round_to_tf32(b)
        if self.real == BF16:
            a, b = to_float(a), to_float(b)
        if accumulate:
            rows = max(1, self.scratch.size // out.shape[-1])
            for i in range(0, out.shape[0], rows):
                product = self.scratch[: out[i : i + rows].size].reshape(-1, out.shape[-1])
                out[i : i + rows] += np.matmul(a[i : i + rows], b, out=product)
            return
        product = np.matmul(a, b, out=out if out.dtype == np.float32 else None)
        if bias is not None:
            product += to_float(bias)
        if product is not out:
            out[...] = to_bf16(product)
        self.gelu_of_product(out, gelu, dgelu_at)

    def gelu_of_product(self, out, gelu, dgelu_at):
        """As on a GPU, in the same verbs."""
        Cuda.gelu_of_product(self, out, gelu, dgelu_at)

    def repeat(self, graphs, key, work):
        """Do work()."""
        work()
