"""NVRTC compiles CUDA for any GPU without one. This reads what ptxas says of each kernel:
registers, spills, shared memory.

NVRTC comes with CuPy. has_nvrtc() says whether it is there. In threads NVRTC compiles one program
at a time.
"""
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

ENTRY = re.compile(r"entry function '(\w+)'.*?(\d+) bytes stack frame, "
                   r"(\d+) bytes spill stores, (\d+) bytes spill loads"
                   r".*?Used (\d+) registers"
                   r"(?:(?:(?!Compil).)*?(\d+) bytes smem)?")


# In PTX: a kernel with its body, and what computes in double
BODY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\}", re.M | re.S)
DOUBLE = re.compile(r"^\s*(?:@!?%p\d+ )?(?:add|sub|mul|fma|div|rcp|sqrt|min|max)[.\w]*\.f64\s",
                    re.M)
CONSTANT = re.compile(r"\.const \.align 4 \.b8 (\w+)\[(\d+)\] = \{([\d, ]*)\}")  # in PTX


class Used(NamedTuple):
    """What a kernel needs on a GPU: of each thread registers and bytes that it spills; of each
    block bytes of static shared memory."""
    registers: int
    spilled: int
    shared: int
    doubles: int = 0  # instructions that compute in double
    frame: int = 0  # bytes of a thread's own memory, as for an array that is no register


class NotCompiled(Exception):
    """NVRTC's messages on a program that it refuses."""


def has_nvrtc():
    """Whether CuPy and the NVRTC that it needs are installed."""
    try:
        import cupy  # noqa: F401  (finds and loads NVRTC)
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
        return True
    except Exception:  # CuPy without NVRTC raises errors of several types
        return False


def include_flags():
    """-I for the headers of CUDA that pip has installed, such as cuda_bf16.h."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    found = [path for folder in folders for path in Path(folder).glob("*/include/cuda_bf16.h")]
    return [f"-I{path.parent}" for path in sorted(found)[:1]]


def messages_and_ptx(text, gpu, flags, annotated=False):
    """NVRTC's messages on a program for a GPU such as sm_90a, and its PTX. annotated: refuse
    functions without __device__. Raises NotCompiled."""
    import cupy  # noqa: F401
    from cupy_backends.cuda.libs import nvrtc
    # Beside a driver NVRTC keeps what it has compiled, and says nothing of it the second time.
    anew = ["--no-cache"] if nvrtc.getVersion() >= (12, 9) else []
    # cupy.RawModule does so too. Else NVRTC 13.0 takes a lambda with `auto` for the host's.
    for_device = [] if annotated else ["--device-as-default-execution-space"]
    program = nvrtc.createProgram(text, "kernels.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch={gpu}", "--ptxas-options=-v", *for_device, *anew,
                                       *flags])
    except nvrtc.NVRTCError:
        raise NotCompiled(nvrtc.getProgramLog(program)) from None
    return nvrtc.getProgramLog(program), nvrtc.getPTX(program).decode()


def compile_cuda(*program, **more):
    """(NVRTC's messages, {kernel: Used}, {array: values of the ints that it begins with}) of a
    program, as for messages_and_ptx. The arrays are those in constant memory. Raises
    NotCompiled."""
    (log, ptx), used, arrays = messages_and_ptx(*program, **more), {}, {}
    for entry in log.split("Compiling ")[1:]:
        name, frame, stores, loads, registers, shared = ENTRY.search(
            entry.replace("\n", " ")).groups()
        used[name] = Used(int(registers), int(stores) + int(loads), int(shared or 0),
                          frame=int(frame))
    for body in BODY.finditer(ptx):
        if body[1] in used:
            used[body[1]] = used[body[1]]._replace(doubles=len(DOUBLE.findall(body[0])))
    for name, size, values in CONSTANT.findall(ptx):
        given = bytes(map(int, values.split(",")))  # PTX leaves out zeros at the end
        arrays[name] = memoryview(given.ljust(int(size), b"\0")).cast("i").tolist()
    return log, used, arrays
