"""Test the doctor: what it says of machines that lack something."""
import contextlib
import ctypes
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from dev.tests.checks import TOP, check
from dev.tools import doctor


def driver(cuda=13000, capability=90, error=0, name=b"H200"):
    """NVIDIA's driver with one GPU."""
    numbers = {75: capability // 10, 76: capability % 10}

    def version(value):
        value._obj.value = cuda

    def attribute(value, number, gpu):
        value._obj.value = numbers[number]

    def name_of(text, size, gpu):
        text.value = name
        return 0

    return SimpleNamespace(cuInit=lambda flags: error, cuDriverGetVersion=version,
                           cuDeviceGetName=name_of, cuDeviceGetAttribute=attribute)


def cupy(version="14.2.0", cuda=13020, free=2**34, nccl=True):
    """{name: module} of a CuPy whose kernel works."""
    out = [0.0]

    def kernel(code, name):
        return lambda grid, block, args: args[0].__setitem__(0, 1.0)

    def library(path):
        return SimpleNamespace(available=nccl)

    runtime = SimpleNamespace(runtimeGetVersion=lambda: cuda)
    parts = SimpleNamespace(runtime=runtime, nccl=library("nccl"),
                            Device=lambda: SimpleNamespace(mem_info=(free, 2**34)))
    module = SimpleNamespace(__version__=version, cuda=parts, RawKernel=kernel,
                             zeros=lambda n, dtype: out)
    return {"cupy": module, "cupy.cuda": parts,
            "cupy_backends.cuda.libs": SimpleNamespace(cublas=None)}


def machine(gpu=None, modules=None, names=("cupy-cuda13x",), maps="libcublasLt.so.13", **variables):
    """(exit status, output) of the doctor on a machine of which this is different from here."""
    def load(path):
        if gpu is None:
            raise OSError(f"{path}: cannot open shared object file")
        return gpu

    def distributions():
        return [SimpleNamespace(metadata={"Name": name}) for name in names]

    said, read = io.StringIO(), Path.read_text
    text = {"/proc/self/maps": maps, "/proc/driver/nvidia/version": "Module  550.54.15  Tue"}
    with contextlib.ExitStack() as patches:
        for patch in (
                mock.patch.object(ctypes, "CDLL", load), mock.patch.dict(os.environ, variables),
                mock.patch.dict(sys.modules, modules or {"cupy": None}),
                mock.patch.object(doctor.metadata, "distributions", distributions),
                mock.patch.object(Path, "exists", lambda path: True),
                mock.patch.object(Path, "read_text",
                                  lambda path, *more: text.get(str(path)) or read(path, *more)),
                contextlib.redirect_stdout(said)):
            patches.enter_context(patch)
        os.chdir(TOP)
        status = doctor.main()
    return status, said.getvalue()


OLD = "#!/bin/sh\necho 'error: unrecognized command line option -std=c++17' >&2; exit 1\n"
NO_CPU = dict(PATH="/nowhere", CXX="")
CASES = (  # (name, the machine, exit status, how lines begin: regular expressions)
    ("all is well", dict(gpu=driver(), modules=cupy()), 0, [
        "ok  GPU .*H200, compute capability 9.0: fp32: yes.*fp8: yes; attention by wgmma",
        "ok  driver .*CUDA 13.0 by 550.54.15", "ok  CuPy .*14.2.0",
        "ok  a kernel ran .*16.0 of 16.0 GiB", "ok  cuBLASLt", "ok  NCCL",
        "--device cuda would train", "--device cpu would train"]),
    ("a T4", dict(gpu=driver(13000, 75, name=b"T4"), modules=cupy()), 0, [
        "ok  GPU .*7.5: fp32: yes; bf16, tf32: no, from 8.0 on; fp8: no, from 8.9 on$",
        "--device cuda would train"]),
    ("a V100", dict(gpu=driver(13000, 70), modules=cupy()), 0, [
        "NO  GPU .*7.0: fp32: no.* -> train with --device cpu",
        "--device cuda lacks: GPU, CuPy, a kernel"]),
    ("no driver", dict(modules=cupy()), 0, [
        "NO  driver .*libcuda.so.1.* -> .*install its driver",
        "NO  CuPy .*not looked at: it needs: GPU",
        "--device cuda lacks: driver", "--device cpu would train"]),
    ("neither a driver nor a compiler", dict(NO_CPU), 1, [
        r"NO  compiler neither .* -> apt install g\+\+", "--device cuda lacks: driver",
        "--device cpu lacks: compiler"]),
    ("a GPU and no compiler", dict(gpu=driver(), modules=cupy(), **NO_CPU), 0, [
        "--device cuda would train", "--device cpu lacks: compiler"]),
    ("an absent CXX", dict(CXX="absent"), 1, ["NO  compiler CXX=absent: absent is not"]),
    ("hidden GPUs", dict(gpu=driver(error=100), modules=cupy()), 0, [
        "NO  GPU .*error 100 -> unset CUDA_VISIBLE_DEVICES", "--device cuda lacks: GPU"]),
    ("an updated driver", dict(gpu=driver(error=803), modules=cupy()), 0, [
        "NO  GPU .* -> .*reboot"]),
    ("no CuPy", dict(gpu=driver(), names=()), 0, [
        "NO  CuPy .*not installed -> pip install -r requirements.txt",
        "NO  a kernel not looked at: it needs: CuPy"]),
    ("no CuPy, an old driver", dict(gpu=driver(12040), names=()), 0, [
        "NO  CuPy .* -> pip install 'cupy-cuda12x"]),
    ("a broken CuPy", dict(gpu=driver()), 0, [
        "NO  CuPy .*cupy.* -> pip install -r requirements.txt"]),
    ("a driver too old for CuPy", dict(gpu=driver(12040), modules=cupy()), 0, [
        "ok  driver .*CUDA 12.4",
        "NO  CuPy .*14.2.0 needs CUDA 13, the driver knows 12 -> "
        r"pip uninstall -y cupy-cuda13x; pip install 'cupy-cuda12x\[ctk\]>=14.2' numpy "
        r"'tiktoken>=0.13'"]),
    ("CuPy for CUDA 12", dict(gpu=driver(12040), modules=cupy(cuda=12090),
                              names=["cupy-cuda12x"]), 0, [
        "ok  CuPy .*for CUDA 12", "--device cuda would train"]),
    ("two CuPys", dict(gpu=driver(), modules=cupy(),
                       names=["cupy-cuda13x", "numpy", "cupy-cuda12x"]), 0, [
        "NO  CuPy .*cupy-cuda12x and cupy-cuda13x -> "
        "pip uninstall -y cupy-cuda12x cupy-cuda13x; pip install -r"]),
    ("an old CuPy", dict(gpu=driver(), modules=cupy("13.6.0")), 0, [
        "NO  CuPy .*13.6.0; expected 14.2 or later -> pip"]),
    ("an old CuPy for CUDA 12", dict(gpu=driver(12040, 75), modules=cupy("13.6.0", cuda=12090),
                                     names=["cupy-cuda12x"]), 0, [
        "NO  CuPy .*13.6.0; expected .* -> pip uninstall -y cupy-cuda12x; pip install "
        "'cupy-cuda12x"]),
    ("a full GPU", dict(gpu=driver(), modules=cupy(free=2**29)), 0, [
        "NO  a kernel .*0.5 of 16.0 GiB .* -> .*nvidia-smi"]),
    ("no NCCL", dict(gpu=driver(), modules=cupy(nccl=False)), 0, [
        'NO  NCCL .*--gpus 2 .* -> pip install "nvidia-nccl', "--device cuda would train"]),
    ("no cuBLASLt", dict(gpu=driver(), modules=cupy(), maps="libm.so"), 0, [
        "NO  cuBLASLt .*--plain 1", "--device cuda would train"]),
    ("no NumPy", dict(gpu=driver(), modules={**cupy(), "numpy": None}), 1, [
        "NO  NumPy .* -> pip install -r", "--device cuda lacks: NumPy",
        "--device cpu lacks: NumPy"]),
    ("an old tiktoken", dict(modules={"tiktoken": SimpleNamespace(__version__="0.12.0")}), 1, [
        "NO  tiktoken 0.12.0; expected 0.13 or later -> pip"]),
)


def test_machines():
    """On each machine it names what is wrong, and what to do; each line is one line."""
    compiled = "" if os.environ.get("CXX") else doctor.compiler()  # once is enough
    for name, given, status, wishes in CASES:
        own = {} if given.keys() & {"CXX", "PATH"} else dict(find=lambda: compiled)
        rows = [row._replace(**own) if row.what == "compiler" else row for row in doctor.ROWS]
        with mock.patch.object(doctor, "ROWS", rows):
            found, text = machine(**given)
        missing = [wish for wish in wishes if not re.search(f"^{wish}", text, re.M)]
        check(name, found == status and not missing, missing and f"{found}, no {missing} in {text}")


def test_whole_program(folder):
    """As a program, with an old compiler, with none, and without NumPy."""
    compiler = folder / "old-g++"
    compiler.write_text(OLD)
    compiler.chmod(0o755)
    (folder / "numpy.py").write_text("raise ImportError('No module named numpy')")
    empty = tempfile.mkdtemp(dir=folder)
    for name, variables, status, wish in (
            ("as it is", {}, 0, "ok  compiler .*\n(.*\n)*--device cpu would train"),
            ("an old compiler", dict(CXX=str(compiler)), 1,
             "NO  compiler .*old-g.. cannot .*: error: unrecognized .*c..17 -> .* set CXX to"),
            ("one that makes nothing", dict(CXX="true"), 1, "NO  compiler true .*made no library"),
            ("one that cannot link", dict(CXXFLAGS='"-labsent one"'), 1,
             "NO  compiler .*g.. cannot .*: .*cannot find -labsent one.* -> "),
            ("no compiler", dict(CXX="", PATH=empty), 1, "NO  compiler neither g"),
            ("no NumPy", dict(PYTHONPATH=str(folder)), 1,
             "NO  NumPy .*No module named numpy -> pip install")):
        hidden = dict(CUDA_VISIBLE_DEVICES="")
        done = subprocess.run([sys.executable, "-m", "dev.tools.doctor"], cwd=TOP, text=True,
                              capture_output=True, env={**os.environ, **hidden, **variables})
        ok = done.returncode == status and re.search(wish, done.stdout) and not done.stderr
        said = f"{done.returncode}, {done.stdout}, {done.stderr}"
        check(f"program: {name}", ok, "" if ok else said)
    (folder / "numpy.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, "-m", "dev.tools.doctor"], cwd=TOP, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(folder)})
    check("Ctrl-C", (done.returncode, done.stderr) == (130, "interrupted\n"), done)
