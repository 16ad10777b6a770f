"""Say what of this machine the program can use, and what to do about the rest.

    python -m dev.tools.doctor

Behind an arrow is the step that helps. The exit status is 0 if a training would start, on a GPU or
on the CPU. This needs Python, and nothing else.
"""
import ctypes
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dev.common.compiler import NATIVE, compiler_of, missing, words_of

PIP, GPP = "pip install -r requirements.txt", "apt install g++ (macOS: xcode-select --install)"
DRIVER = ("with an NVIDIA GPU, install its driver 580 or later (WSL2: in Windows; a notebook: "
          "choose a GPU); without one, train with --device cpu")
DTYPES = {75: "fp32", 80: "bf16, tf32", 89: "fp8"}  # by the least compute capability


class Wrong(Exception):
    """What was found; and the step that helps, if it is not the row's."""


def above(version, *least, remedy=None):
    if [int(n) for n in re.findall(r"\d+", version)[:2]] < [*least]:
        text = f"{version}; expected {'.'.join(map(str, least))} or later"
        raise Wrong(*filter(None, (text, remedy)))
    return version


def compiler():
    name, source = compiler_of(), "dev/cpu/kernels.cpp"
    if why := missing(name):
        raise Wrong(why)
    with TemporaryDirectory() as folder:
        made = Path(folder, "kernels.so")
        command = [*words_of(name), "-std=c++17", *NATIVE, "-fPIC", "-shared",
                   *words_of(os.environ.get("CXXFLAGS", ""))]
        done = subprocess.run([*command, "-O0", source, "-o", made], capture_output=True, text=True,
                              errors="replace", env=os.environ | {"LC_ALL": "C"})
        if done.returncode or not made.exists():
            said = re.findall("^.*(?:error|cannot).*", done.stderr, re.M) or ["it made no library"]
            raise Wrong(f"{name} cannot compile {source}: {said[0]}",
                        f"{GPP}, or set CXX to another compiler")
    return name


def driver():
    cuda, version = ctypes.c_int(), Path("/proc/driver/nvidia/version")  # in WSL2 there is no file
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    own = re.search(r"\s\d{3}\.[\d.]+", version.read_text()) if version.exists() else None
    return f"CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10}" + (f" by{own[0]}" if own else "")


def gpu():
    cuda, name = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(100)
    if error := cuda.cuInit(0) or cuda.cuDeviceGetName(name, 100, 0):
        raise Wrong(f"the driver reports error {error}", "unset CUDA_VISIBLE_DEVICES, which may "
                    "hide it" if error == 100 else "see nvidia-smi, and reboot")
    major, minor = ctypes.c_int(), ctypes.c_int()
    for number, attribute in ((major, 75), (minor, 76)):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    own = 10 * major.value + minor.value
    found = f"{name.value.decode()}, compute capability {own / 10}: " + "; ".join(
        f"{dtype}: {'yes' if own >= least else f'no, from {least / 10} on'}"
        for least, dtype in DTYPES.items()) + "; attention by wgmma" * (own == 90)
    if own < min(DTYPES):
        raise Wrong(found, "train with --device cpu")
    return found


def cupy():  # made for one CUDA, which the driver has to know
    named = {str(d.metadata["Name"]) for d in metadata.distributions()}
    names = sorted(name for name in named if re.fullmatch(r"cupy(-cuda.*)?", name))
    again, knows = f"pip uninstall -y {' '.join(names)}; " * bool(names), int(driver()[5:7])
    again += PIP if knows > 12 else "pip install 'cupy-cuda12x[ctk]>=14.2' numpy 'tiktoken>=0.13'"
    if len(names) != 1:
        raise Wrong(" and ".join(names) or "is not installed", again)
    from cupy import __version__, cuda
    needs = cuda.runtime.runtimeGetVersion() // 1000
    if needs > knows:
        raise Wrong(f"{__version__} needs CUDA {needs}, the driver knows {knows}", again)
    return f"{above(__version__, 14, 2, remedy=again)}, for CUDA {needs}"


def kernel():
    from cupy import RawKernel, cuda, zeros
    out = zeros(1, "f")
    RawKernel('extern "C" __global__ void f(float* x) { *x = 1; }', "f")((1,), (1,), (out,))
    free, total = cuda.Device().mem_info
    found = f"ran on the GPU; {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    if float(out[0]) != 1:
        raise Wrong("gave a wrong number", "see nvidia-smi, and reboot")
    if free < 2**30:
        raise Wrong(found, "see in nvidia-smi who has the memory")
    return found + "; train -e d6 -b 1" * (free < 2**32)


def cublaslt():
    from cupy_backends.cuda.libs import cublas  # noqa: F401  (loads it, as the trainer does)
    if "libcublasLt.so" not in Path("/proc/self/maps").read_text():
        raise Wrong("CuPy has loaded none")


def nccl():
    from cupy.cuda import nccl
    if not nccl.available:
        raise Wrong("is not there, so --gpus 2 and more do not work")


class Row(NamedTuple):
    what: str
    find: object  # a function: what was found; an exception if that is not enough
    remedy: str
    needed: str = ""  # by a training on cpu, cuda
    after: str = ""  # what must be right before this can be looked for


ROWS = [
    Row("Python", lambda: above(sys.version.split()[0], 3, 10), "install it", "cpu cuda"),
    Row("NumPy", lambda: above(import_module("numpy").__version__, 1, 26), PIP, "cpu cuda"),
    Row("tiktoken", lambda: above(import_module("tiktoken").__version__, 0, 13), PIP, "cpu cuda"),
    Row("compiler", compiler, GPP, "cpu"),
    Row("driver", driver, DRIVER, "cuda"),
    Row("GPU", gpu, "", "cuda", "driver"),
    Row("CuPy", cupy, PIP, "cuda", "GPU"),
    Row("a kernel", kernel, PIP, "cuda", "CuPy"),
    Row("cuBLASLt", cublaslt, f"{PIP}; or train with --plain 1", "", "CuPy"),
    Row("NCCL", nccl, 'pip install "nvidia-nccl-cu13>=2.27.7,<3"', "", "CuPy"),
]


def main():
    warnings.simplefilter("ignore")
    right, lacks = {"": True}, {"cuda": [], "cpu": []}
    for row in ROWS:
        right[row.what], remedy = right[row.after], ""
        try:
            found = f"not looked at: it needs: {row.after}"
            if right[row.after]:
                found = row.find() or "is there"
        except Exception as e:  # a broken installation may raise anything
            args = e.args if isinstance(e, Wrong) else str(e).strip().splitlines()[:1]
            found, remedy = (*(args or [type(e).__name__]), row.remedy)[:2]
            right[row.what] = False
        print(f"{'ok' if right[row.what] else 'NO'}  {row.what:9}{found}"
              + (f" -> {remedy}" if remedy else ""))
        for place in row.needed.split():
            lacks[place] += [] if right[row.what] else [row.what]
    for device, lacking in lacks.items():
        print(f"--device {device}", f"lacks: {', '.join(lacking)}" if lacking else "would train")
    return 0 if [] in lacks.values() else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(print("interrupted", file=sys.stderr) or 130)
