"""Which C++ compiler the environment asks for. This needs Python, and nothing else."""
import os
import platform
import shlex
import shutil
import sys

# The flag for this processor. Apple's clang++ may not know it on ARM, and compiles for an M1 then.
NATIVE = [] if (sys.platform, platform.machine()) == ("darwin", "arm64") else ["-march=native"]


def words_of(text):
    """The words of CXX or CXXFLAGS, as make's shell splits them, if all quotes are closed."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def compiler_of():
    """The compiler, or the CXX that is asked for, such as "ccache g++"; None if there is none."""
    return os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("clang++")


def missing(compiler):
    """Why there is no such compiler, or ""."""
    if not compiler:
        return "neither g++ nor clang++ is there"
    program = words_of(compiler)[0]
    return "" if shutil.which(program) else f"CXX={compiler}: {program} is not there"
