"""Which C++ compiler the environment asks for: CXX and CXXFLAGS, split as make's shell splits them.
This needs Python, and nothing else: see dev/tools/doctor.py."""
import os
import platform
import shlex
import shutil

FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas",
         "-fPIC", "-shared", "-fopenmp"]
if platform.machine() in ("x86_64", "AMD64"):  # else half of AVX-512's vectors
    FLAGS.append("-mprefer-vector-width=512")


def words_of(text):
    """The words of a command line. If a quote is never closed, quotes mean nothing."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def compiler_of():
    """The C++ compiler, or the CXX that is asked for, such as "ccache g++"; None if there is
    none."""
    return os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("clang++")


def missing(compiler):
    """Why there is no such compiler, or ""."""
    if not compiler:
        return "neither g++ nor clang++ is there"
    program = words_of(compiler)[0]
    return "" if shutil.which(program) else f"CXX={compiler}: {program} is not there"


def flags_asked_for():
    """CXXFLAGS, with which, even if -ffast-math is one of them, judge sees a NaN."""
    return [*words_of(os.environ.get("CXXFLAGS", "")), "-fno-finite-math-only"]
