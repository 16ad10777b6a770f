"""Compile kernels.cu with NVRTC for several GPUs, without one, and print what ptxas made of each kernel.

    python dev/compile_kernels.py            # sm_80 sm_90a sm_100 sm_120
    python dev/compile_kernels.py sm_90a

A table for each dtype, a row a kernel: registers a thread and bytes of static shared memory, for each GPU, at a head
size of 64. A kernel that spills more than a few registers to memory, or that needs so many that its block cannot be
launched, is an error, with exit status 1; so it is at a head size of 128, which is compiled for the last GPU named. For
that one the kernel lab's files are compiled too: some of its naive versions may spill.
"""
import re
import sys
from pathlib import Path

import cupy  # noqa: F401  (finds and loads NVRTC)
from cupy_backends.cuda.libs import nvrtc

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))
from train_gpt2 import LAUNCH, NVRTC_OPTIONS, read_kernels, switches  # noqa: E402

ENTRY = re.compile(r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
                   r"(?:.*?(\d+) bytes smem)?")
SPILLED = 64  # bytes that a kernel may spill: a few numbers, where it has taken all registers
REGISTERS = 65536  # of a multiprocessor, and so the most that one block can have


def compile_for(gpu, dtype, C, NH, source):
    """{kernel: (registers, bytes of shared memory, bytes spilled)} of kernels.cu on a GPU such as sm_90a."""
    program = nvrtc.createProgram(source, "kernels.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch={gpu}", "--ptxas-options=-v", *NVRTC_OPTIONS, *switches(dtype, C, NH)])
    except nvrtc.NVRTCError:
        sys.exit(f"{gpu}: NVRTC could not compile kernels.cu:\n{nvrtc.getProgramLog(program)}")
    report = {}
    for entry in nvrtc.getProgramLog(program).split("Compiling ")[1:]:
        name, stores, loads, registers, shared = ENTRY.search(entry.replace("\n", " ")).groups()
        report[name] = int(registers), int(shared or 0), int(stores) + int(loads)
    return report


def faults_of(report, where):
    """What is wrong with the kernels of a report, a line each."""
    for name, (registers, _, spilled) in report.items():
        if spilled > SPILLED:
            yield f"{where}: {name} spills {spilled} bytes"
        if registers * LAUNCH[name][0] > REGISTERS:
            yield f"{where}: {name} needs {registers} registers for each of {LAUNCH[name][0]} threads"


def main():
    gpus = sys.argv[1:] or ["sm_80", "sm_90a", "sm_100", "sm_120"]
    source = (TOP / "kernels.cu").read_text(encoding="utf-8")
    print(f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}: registers a thread, bytes of shared memory")
    lab = sorted((TOP / "dev/cuda").glob("*.cu"), key=lambda path: path.name != "tiles.cu")  # which the others use
    lab = "".join(path.read_text(encoding="utf-8") for path in lab)
    faults = []
    for dtype in ("fp32", "tf32", "bf16"):
        reports = {gpu: compile_for(gpu, dtype, 768, 12, source) for gpu in gpus}
        print(f"\n{dtype:24}" + "".join(f"{gpu:>14}" for gpu in gpus))
        for name in read_kernels(source):
            print(f"{name:24}" + "".join("{:8}{:6}".format(*reports[gpu][name]) for gpu in gpus))
        for gpu, report in reports.items():
            faults += faults_of(report, f"{gpu} {dtype}")
        faults += faults_of(compile_for(gpus[-1], dtype, 1024, 8, source), f"{gpus[-1]} {dtype} HS=128")
        compile_for(gpus[-1], dtype, 768, 12, source + lab)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
