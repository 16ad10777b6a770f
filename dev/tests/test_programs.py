"""Start programs that check by themselves, and see that they pass.

    pytest dev/tests/test_programs.py -k test_gpt2
    pytest dev/tests/test_programs.py -m longest    # hours
"""
import os
import subprocess
import sys

import pytest

from dev.lab.grade import SEEN_BY_ASAN
from dev.tests.checks import TOP

PROGRAMS = (  # the longest first
    "dev.lab --check --dtype fp32, sanitized", "test_gpt2 --device emulated --dtype bf16",
    "test_gpt2 --device emulated --dtype tf32", "test_gpt2 --device cpu",
    pytest.param("test_gpt2 --device emulated --dtype fp32", marks=pytest.mark.fast))
LONGEST = (  # the lab has the emulated kernels in fp32
    "dev.lab --check --dtype bf16", "dev.lab --check --dtype tf32",
    "dev.tests.mutants", "dev.bench.compile_kernels", "dev.lab --check --races --dtype bf16",
    "dev.lab --check --races --dtype tf32",
    "pytest dev/tests/test_kills.py -k killed_runs --kills 200",
    "pytest dev/tests/test_ranks.py -k killed_ranks --kills 50",
    "pytest dev/lab/tests/test_first_evening.py --checked 99")


def library_of(name):
    """The path of one of the compiler's libraries, such as a sanitizer's."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True,
                          check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("program", [*PROGRAMS, *(pytest.param(x, marks=pytest.mark.longest)
                                                  for x in LONGEST)])
def test_program(program):
    command, _, how = program.partition(", ")
    start, more = ["-m", *command.split()], {}
    if how == "sanitized":
        more = {"CXXFLAGS": "-O0 -g1 -fsanitize=address,undefined "
                f"-fno-sanitize={SEEN_BY_ASAN} -fno-sanitize-recover=all",
                "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=1",
                "LD_PRELOAD": f"{library_of('libasan.so')} {library_of('libubsan.so')}"}
    done = subprocess.run([sys.executable, *start], cwd=TOP, env=os.environ | more, text=True,
                          errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith(("FAIL", "error:", "SURVIVED"))]
    if done.returncode:
        pytest.fail("\n".join([*wrong, *lines[-20:], f"exit status {done.returncode}"]),
                    pytrace=False)
