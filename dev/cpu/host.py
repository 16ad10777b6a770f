"""What both devices of the CPU share: the verbs of train_gpt2.Cuda that need no kernel, products by
NumPy's BLAS; and how C++ is compiled, once for these files, flags and this processor."""
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.cache import cache_folder
from dev.common.compiler import NATIVE, compiler_of, missing, words_of
from dev.common.cores import usable_cores
from train_gpt2 import BF16, Cuda, UserError, replace_file, to_float

FLAGS = ["-std=c++17", "-O3", *NATIVE, "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas",
         "-fPIC", "-shared", "-fopenmp"]
if platform.machine() in ("x86_64", "AMD64"):  # else half of AVX-512's vectors
    FLAGS.append("-mprefer-vector-width=512")


# Threads that busy-wait would slow others down, so g++'s sleep, but after some 0.1 ms, since the
# next kernel often comes sooner. Its library reads these when the first kernels are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")


class Host:
    """A device whose memory is the host's: its arrays are NumPy's. dtype: "fp32" (the default),
    "tf32" or "bf16"; c: the model's Config."""
    name, max_shared = "cpu", 227 * 1024 - 1024  # bytes, as on an H100
    Fault = ()  # a kernel that goes wrong here is a UserError, or a signal
    AHEAD = ()  # files to compile ahead of a device's
    CONTRACTION = ()  # flags for C++: whether a product and a sum may become an fmaf

    def __init__(self, dtype, c):
        self.dtype, self.compiled_for, self.HS = dtype or "fp32", c.switches(), c.C // c.NH
        self.real = np.float32 if self.dtype in ("fp32", "tf32") else BF16
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        # where loops of attention find the bounds of documents, if there are any: see documents.py
        self.documents = ctypes.c_void_p()
        # a loss that is not finite is reported once, by the training loop
        np.seterr(over="ignore", invalid="ignore")
        # 4 MiB: a matmul's result on its way to being added, still in cache
        self.scratch = np.empty(2**20, np.float32)

    def __str__(self):
        threads = threads_of(getattr(self, "library", None))
        on = "" if threads == os.cpu_count() else f"{threads} thread{'s'[:threads - 1]} on "
        return f"the CPU, {on}{os.cpu_count()} cores, {self.dtype}"

    def switches(self):
        """As train_gpt2.Cuda.switches."""
        return [f"-D{self.dtype.upper()}", *self.compiled_for]

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


def round_to_tf32(x):
    """x rounded to TF32's 10 bits of mantissa, half away from zero, as tensor cores want their
    inputs."""
    return np.where(np.isnan(x), x, ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32))


def threads_of(library):
    """How many threads run a library's kernels: one without OpenMP. None: emulated ones."""
    if library is None:
        return usable_cores()
    return library.omp_get_max_threads() if hasattr(library, "omp_get_max_threads") else 1


# ---- Compiling


def flags_asked_for():
    """CXXFLAGS, with which, even if -ffast-math is one of them, judge sees a NaN."""
    return [*words_of(os.environ.get("CXXFLAGS", "")), "-fno-finite-math-only"]


def run_compiler(command, source=""):
    """What a compiler has done with a source, and said in English."""
    # A sanitizer's library, preloaded for our kernels, would make the compiler half as fast.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, input=source, capture_output=True, encoding="utf-8",
                          errors="replace", env=env | {"LC_ALL": "C.UTF-8"})


def found_compiler():
    """The compiler. Raises UserError if there is none."""
    compiler = compiler_of()
    if why := missing(compiler):
        raise UserError(f"{why}, and a CPU needs a C++ compiler to run the kernels: install one "
                        "(Debian, Ubuntu: apt install g++; macOS: xcode-select --install), or "
                        "train on a GPU")
    return compiler


def checksum(library, warnings):
    """Of a compiled library (bytes) and the compiler's warnings. The system maps a library that was
    cut off, and the process dies when it reads beyond the end."""
    return hashlib.sha256(library + warnings.encode()).hexdigest()


def compiled(what, flags, source, named=None, files=(), libraries=(), warns=False, ahead="",
             runtime=None, own=()):
    """(the path of a shared library, the compiler's warnings if warns). It is compiled from the
    text `source`, unless it has been with these flags, for the same processor. named: the source,
    if it names files otherwise than the cache should; files: what it includes; ahead: a beginning
    of the source that others share, and runtime: the path of another source that is linked with
    it: both are compiled once, the latter without these flags, the source's `own`."""
    compiler, cache = found_compiler(), cache_folder()

    def library_of(flags):
        key = key_of([*words_of(compiler), *flags, *own], named or source, files)
        return cache / f"kernels_{key}.so"

    library = library_of(flags)
    bare = (flag for flag in flags if not flag.startswith("-D"))  # one answer for all kernels
    if "-fopenmp" in flags and not library.exists():
        # in a library of its own, so that an OpenMP that is installed later is used
        flags = with_openmp(flags, openmp_of(compiler, *bare))
        library = library_of(flags)
    with compiling.setdefault(library, threading.Lock()):  # one thread of this process
        return find_or_compile(what, [*words_of(compiler), *flags], source, library, libraries,
                               warns, ahead, files, runtime, own)


def key_of(command, text, files):
    """What names the results of compiling a text, which includes files, with this command."""
    # -### prints what the driver would run, and so what -march=native means on this processor.
    target = run_compiler([*command, "-E", "-###", "-x", "c++", os.devnull]).stderr
    parts = [text.encode(), *(path.read_bytes() for path in files), target.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def for_all(command, text, files):
    """A command without the switches that neither a text nor the files know, so that it is the same
    for more kernels; nor the folder of a header that such a switch names (-I, -DOUTPUT=<name>)."""
    known = set(re.findall(r"\w+", text + "".join(path.read_text("utf-8") for path in files)))

    def unknown(word):
        switch = re.match(r"-D(\w+)", word)
        return switch and switch[1] not in known

    def leads_nowhere(word, behind):
        return word.startswith("-I") and "=<" in behind and unknown(behind)

    return [word for word, behind in zip(command, [*command[1:], ""])
            if not (unknown(word) or leads_nowhere(word, behind))]


# What g++ says of a function that calls itself, and must be inlined
RECURSIVE = re.compile("recursive inlining|function not considered for inlining")
# with it races.h sees calls, and how deep they are
RECURSION = ["-DWITH_CALLS", "--param=tsan-instrument-func-entry-exit=1"]

compiling = {}  # {a library's path: a lock}


# Apple's clang++ has no such flag, but the compiler within knows it. Homebrew keeps the library
# apart, in one place on ARM and in another on Intel.
APPLE_OPENMP = ("-Xclang", "-fopenmp", "-lomp", *(
    f"{flag}{top}/opt/libomp/{folder}" for top in ("/opt/homebrew", "/usr/local")
    for flag, folder in (("-I", "include"), ("-L", "lib"))))
ONE_CORE = ("-fopenmp-simd",)  # whose loops are still of vectors


def with_openmp(flags, how):
    """The same flags, with `how` in place of -fopenmp."""
    at = flags.index("-fopenmp")  # ours: CXXFLAGS may have another, behind -Xpreprocessor
    return [*flags[:at], *how, *flags[at + 1 :]]


@functools.cache
def openmp_of(compiler, *flags):
    """How a compiler with these flags compiles for all cores; or for one, if it has no OpenMP, or
    not all of it: clang may know the flag and lack the header or the library."""
    def works(how):
        with tempfile.TemporaryDirectory() as folder:
            source = "#ifdef _OPENMP\n#include <omp.h>\nint n = omp_get_max_threads();\n#endif\n"
            return not run_compiler([*words_of(compiler), *with_openmp(flags, how), "-x", "c++",
                                     "-", "-o", f"{folder}/probe.so"], source).returncode
    known = ("-fopenmp",)
    how = next(filter(works, (known, APPLE_OPENMP, ONE_CORE)), known)  # else another flag is bad
    if how == ONE_CORE:
        print(f"{compiler} has no OpenMP: the kernels run on one core. For all of them: brew "
              "install libomp (macOS), apt install libomp-dev (Debian, Ubuntu)", flush=True)
    return how


PRECOMPILED_DAYS = 7  # after which a precompiled header that nobody has used is removed


def precompiled(command, text, cache, files):
    """The flags that include what g++ has made of a text with these flags and files; [] if it
    cannot, and the first time, since a header that is used once costs more than it saves."""
    if "-D__CUDA_ARCH__" in " ".join(command):
        return []  # rare, and a header of its own costs more than it saves
    command = for_all(command, text, files)
    header = cache / f"ahead_{key_of(command, text, files)}.h"
    made = header.with_suffix(".h.gch")
    with compiling.setdefault(made, threading.Lock()):
        if not header.exists():
            replace_file(header, [text.encode()])
            return []
        if not made.exists():
            if not compiled_once([*command, "-x", "c++-header"], text, made):
                return []
            for old in cache.glob("ahead_*"):
                with contextlib.suppress(OSError):
                    if time.time() - old.stat().st_atime > PRECOMPILED_DAYS * 86400:
                        old.unlink()
    with open(made, "rb") as file:  # clang's is refused if a file has another date
        return ["-include", header] if file.read(4) == b"gpch" else []


def compiled_once(command, text, made):
    """Whether a command makes a file of a text."""
    with tempfile.TemporaryDirectory(prefix="compiling_", dir=made.parent) as folder:
        own = Path(folder) / made.stem
        own.write_text(text, encoding="utf-8")
        done = run_compiler([*command, own, "-o", f"{own}.made"])
        if done.returncode or not Path(f"{own}.made").exists():
            return False
        os.replace(f"{own}.made", made)
    return True


def object_of(command, source, cache, files):
    """[the path of what a source that libraries share is compiled to], or [] if it cannot be."""
    text = source.read_text("utf-8")
    command = for_all(command, text, ())
    made = cache / f"runtime_{key_of(command, text, files)}.o"
    with compiling.setdefault(made, threading.Lock()):
        there = made.exists() or compiled_once(
            [*command, f"-I{source.parent}", "-c", "-x", "c++"], text, made)
        return [made] * there


def find_or_compile(what, command, source, library, libraries, warns, ahead, files, runtime, own):
    """As compiled, given the compiler with its flags and the library's path."""
    flags, compiler, cache = [*command, *own], compiler_of(), library.parent
    seal = library.with_suffix(".txt")  # written last
    try:
        sealed, warnings = seal.read_text(encoding="utf-8").split("\n", 1)
        if sealed == checksum(library.read_bytes(), warnings):
            return library, warnings
    except (OSError, ValueError):  # not there yet, or damaged
        pass
    print(f"compiling {what} with {compiler}, once", flush=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compiling_", dir=cache) as folder:
            temporary = Path(folder) / library.name
            ahead = ahead * source.startswith(ahead)
            shared = precompiled(flags, ahead, cache, files) if ahead else []
            for _ in range(2):  # again with recursion, if it is there, or without a damaged object
                objects = object_of(command, runtime, cache, files) if runtime else []
                done = run_compiler([*flags, *shared, "-x", "c++", "-", "-x", "none", *objects,
                                     *libraries, "-o", temporary],
                                    source[len(ahead) * bool(shared):])
                if done.returncode == 0:
                    made, warnings = temporary.read_bytes(), done.stderr if warns else ""
                    replace_file(library, [made])
                    replace_file(seal, [f"{checksum(made, warnings)}\n{warnings}".encode()])
                    return library, warnings
                if RECURSIVE.search(done.stderr):
                    flags, shared = [*flags, *RECURSION], []
                elif any(str(path) in done.stderr for path in objects):
                    objects[0].unlink(missing_ok=True)
                else:
                    break
    except OSError as e:
        raise UserError(f"{cache}: compiled kernels could not be kept there ({e.strerror}); "
                        "set XDG_CACHE_HOME to a folder that can be written") from None
    except UserError as e:
        raise UserError(f"{e}; set XDG_CACHE_HOME to a folder on another disk") from None
    raise UserError(f"{compiler} could not compile {what}:\n{done.stderr.strip()}")


def loaded(path, what):
    """A compiled library, with a thread for each usable core. Raises UserError."""
    try:
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_set_num_threads") and "OMP_NUM_THREADS" not in os.environ:
            library.omp_set_num_threads(usable_cores())
        return library
    except OSError as e:
        if re.search("map segment|not permitted|denied", str(e)):
            raise UserError(f"{e}: the disk may be mounted with noexec; set XDG_CACHE_HOME to a "
                            "folder from which libraries can be loaded") from None
        # a function has no body
        raise UserError(f"{compiler_of()} could not compile {what}:\n{e}") from None
