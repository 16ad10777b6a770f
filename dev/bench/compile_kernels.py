"""Compile kernels.cu with NVRTC for several GPUs, without having one, and print what ptxas reports.

    python -m dev.bench.compile_kernels     # sm_75 (fp32) sm_80 sm_86 sm_89 sm_90a sm_100 sm_120
    python -m dev.bench.compile_kernels sm_90a
    python -m dev.bench.compile_kernels --few   # as CI: all of it for sm_90a, one model for others

For each dtype there is a table with a row for each kernel: registers per thread and bytes of static
shared memory on each GPU, for heads of 64 channels. The exit status is 1 if the compiler warns, if
a kernel spills more than a few registers, if the compiler serializes wgmma, or if a GPU would
refuse a launch of a training step: see launches.py.

The same rules hold for heads of 80, 96 and 128 channels, and for two more models: one with heads of
128 channels and Llama 3's kernels, and one with 4,096 channels. These two are compiled for the last
GPU named, and for sm_90a, where attention has code of its own for such heads. GPT-2's layernorms,
which Llama does not use, may spill there. The kernel lab is compiled too, where naive versions may
spill: for the last GPU only, except for the kernels that use tensor cores.
"""
import dataclasses
import re
import sys
# in threads NVRTC compiles one program at a time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cupy  # noqa: F401  (finds and loads NVRTC)
from cupy_backends.cuda.libs import nvrtc

from dev.bench.launches import faults_of_launches, launches_of, like_hopper
from dev.common.config import Config
from dev.common.flags import parse_flags, split_names
from dev.common.gpus import GPUS, REGISTERS, digits
from dev.common.nvrtc import NotCompiled, compile_cuda
from dev.common.program import run_main
from dev.features import dropout
from dev.features.base import GPT2
from dev.features.devices import Cuda
from dev.features.documents import SIGHT, SOURCE as DOCUMENTS
from dev.features.feature import header_switches
from dev.features.fp8.fp8 import OUTPUT as FP8_OUTPUT, SOURCE as FP8
from dev.features.fp8.fp8_gelu import SOURCES as FP8_GELU
from dev.features.fused_biases import OUTPUT, SOURCE as FUSED, FusedBiases, output_switches
from dev.features.hopper.attention_five import FiveProducts, SOURCES as FIVE
from dev.features.hopper.attention_pipeline import SOURCES as PIPELINE
from dev.features.hopper.gelu_products import SOURCES as GELU
from dev.features.hopper.swiglu_products import SOURCES as SWIGLU
from dev.features.hopper.symmetric import SOURCES as SYMMETRIC
from dev.features.order import SOURCES
from dev.llama3.train_llama3 import Config3, Llama3
from train_gpt2 import UserError, read_kernels

TOP = Path(__file__).resolve().parents[2]
SPILLED = 68  # bytes that a kernel may spill when it has used all its registers
# NVRTC 13.0 spills more of this one: 72 bytes for Hopper, 112 for sm_120
OF_OLDER = {"token_pass": 112} if nvrtc.getVersion() == (13, 0) else {}
SMALL, LARGE_HEADS, LARGE_MODEL = Config(C=768, NH=12), Config(C=1024, NH=8), Config(C=4096, NH=32)
# by channels of a head
HEADS = {64: SMALL, 80: Config(C=960, NH=12), 96: Config(C=1152, NH=12), 128: LARGE_HEADS}
ALL = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
# What --few compiles beside sm_90a: each GPU's dtype, and the channels of a head.
FEW = {"sm_80": ("bf16", 64), "sm_86": ("fp32", 128), "sm_89": ("tf32", 80), "sm_120": ("bf16", 96)}
FLAGS = [(None, "--few", "switch", 0, "sm_90a, and one model for each of a few others")]
CAPABILITIES = {f"sm_{digits(capability)}": capability for capability in GPUS}
LLAMA = Config3.SOURCES[-1]
DTYPES = {"fp32": ["-DFP32"], "tf32": ["-DTF32"], "bf16": ["-DBF16"],
          "fp8": ["-DBF16", *output_switches(FP8_OUTPUT)]}
TURNS = [*GELU, SWIGLU[-1], SYMMETRIC[-1], PIPELINE[-1]]
FEATURES = [LLAMA, *(path for path in SOURCES if path not in (FP8, *FP8_GELU, *FIVE, *TURNS))]
LAB = [TOP / "dev/lab/tiles.cu", *sorted((TOP / "dev/lab/kernels").glob("*.cu"))]
# What multiplies on tensor cores, in which alone fp32 and TF32 differ
LAB_MMA = [LLAMA, *(path for path in LAB if re.search("mma|tiles::", path.read_text("utf-8")))]


def compile_for(gpu, dtype, c, beside=(), spilled=SPILLED, unused=None):
    """({kernel: (registers, bytes of shared memory)}, faults) of kernels.cu and the files beside it
    on a GPU such as sm_90a. Kernels of those files may spill `spilled` bytes, those with `unused`
    in their names any number."""
    hopper = gpu == "sm_90a" and like_hopper("9.0", dtype, c)
    # as its Feature
    beside = [path for path in beside if path != FIVE[-1] or hopper and c.C // c.NH == 128]
    sources, own = [*c.SOURCES, *beside], read_kernels(c.SOURCES)
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    where = " ".join([gpu, dtype, *c.switches()])
    outputs = (dropout.OUTPUT, OUTPUT) if dropout.SOURCE in beside else (OUTPUT,)
    output = output_switches(*outputs) if FUSED in beside and dtype != "fp8" else []
    if beside == [DOCUMENTS]:
        output += header_switches("SIGHT", SIGHT)
    try:
        flags = [*Cuda.OPTIONS, *DTYPES[dtype], *output, *["-DHOPPER"] * hopper, *c.switches()]
        log, used, arrays = compile_cuda(text, gpu, flags)
    except NotCompiled as e:
        return {}, [f"{where}: NVRTC could not compile kernels.cu:\n{e}"]
    kernels, report = read_kernels(sources), {}
    faults = [f"{where}: {name} is not compiled, but the trainer asks for every kernel by its name"
              for name in kernels if name not in used]
    faults += [f"{where}: {line.strip()}" for line in log.splitlines()
               if re.search(r"\bwarning( #|\s*:)|wgmma.*serialized", line)]
    for name, need in used.items():
        report[name] = need.registers, need.shared
        most = OF_OLDER.get(name, SPILLED if name in own else spilled)
        if need.spilled > most and not (unused and unused in name):
            faults.append(f"{where}: {name} spills {need.spilled} bytes")
        # Kernels launched with more threads than their BLOCK says have __launch_bounds__, which
        # ptxas obeys.
        if need.registers * kernels[name].threads > REGISTERS:
            faults.append(f"{where}: {name} needs {need.registers} registers for each of "
                          f"{kernels[name].threads} threads")
    capability = CAPABILITIES.get(gpu.rstrip("af"))
    summed = type("Summed", (FusedBiases, GPT2), {})
    models = [(dataclasses.replace(c, L=1), summed if FUSED in sources else GPT2)]
    if LLAMA in sources:
        models.append((Config3(L=1, NH=c.NH, NKV=c.NH // 2, C=c.C), Llama3))
    if FIVE[-1] in sources:
        models += [(config, type("Five", (FiveProducts, Model), {})) for config, Model in models]
    for config, Model in models if capability else ():
        launches, missing = launches_of(capability, dtype, config, arrays, Model, beside=beside,
                                        hopper=hopper)
        faults += [f"{where}: {fault}"
                   for fault in [*missing, *faults_of_launches(capability, launches, used)]]
    return report, faults


def main():
    gpus, flags = split_names(sys.argv[1:], [])
    few = FEW if parse_flags(__doc__, FLAGS, flags).few else {}
    gpus = gpus or (["sm_90a"] if few else ALL)
    if wrong := [gpu for gpu in gpus if not re.fullmatch(r"sm_\d+[a-z]?", gpu)]:
        raise UserError(f"{wrong[0]}: expected a GPU's architecture, such as sm_90a")
    print(f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}: registers of a thread, bytes of shared "
          "memory")
    others = [job for gpu in sorted({"sm_90a"}.intersection(gpus) | {gpus[-1]}) for job in (
        (gpu, LARGE_HEADS, [*FEATURES, *FIVE]), (gpu, LARGE_MODEL, [LLAMA], SPILLED, "layernorm"))]

    def kinds(dtype):
        """(gpu, the other arguments of compile_for) of each compilation, those of the table
        first."""
        if dtype == "fp8":
            some = [gpu for gpu in gpus if int(re.search(r"\d+", gpu)[0]) >= 89]
            turns = [(gpu, SMALL, [FUSED, FP8, *FP8_GELU], 0) for gpu in some if gpu == "sm_90a"]
            return [*((gpu, SMALL, [FUSED, FP8]) for gpu in some), *turns,
                    *((gpu, model, [FUSED, LLAMA, FP8, *FIVE], SPILLED, "layernorm")
                      for gpu, model, *_ in others if gpu in some)]
        # which has heads of up to 64 channels
        own = [gpu for gpu in gpus if gpu != "sm_75" or dtype == "fp32"]
        as_fp32 = few and dtype == "tf32"  # whose other kernels are compiled already
        lab = {"sm_90a": LAB_MMA, gpus[-1]: LAB_MMA if as_fp32 else LAB}
        more = [(gpu, HEADS[channels]) for gpu, (of, channels) in few.items() if of == dtype]
        if not few:
            more = [(gpu, c) for gpu in own for c in HEADS.values()
                    if c != SMALL and gpu != "sm_75"]
        large = [(gpus[-1], LARGE_HEADS, [LLAMA, FUSED, dropout.SOURCE])] if as_fp32 else others
        turns = [("sm_90a", SMALL, TURNS, 0)] * (dtype == "bf16" and "sm_90a" in own)
        summed = [(gpu, SMALL, [FUSED, *beside]) for gpu in (own[-1:] if few else own)
                  for beside in ([], [dropout.SOURCE])]
        summed += [(gpu, c, [DOCUMENTS]) for gpu in own if gpu == "sm_90a"
                   for c in (SMALL, LARGE_HEADS)]
        return [*((gpu, SMALL, lab.get(gpu, ()), 2**20) for gpu in own), *more, *large, *turns,
                *summed]

    with ProcessPoolExecutor() as pool:
        jobs = {dtype: [(gpu, pool.submit(compile_for, gpu, dtype, *kind))
                        for gpu, *kind in kinds(dtype)] for dtype in DTYPES}
        found = {dtype: [(gpu, *job.result()) for gpu, job in some] for dtype, some in jobs.items()}
    for dtype, some in found.items():
        first = {gpu: report for gpu, report, _ in reversed(some)}  # of each GPU
        table = {gpu: first[gpu] for gpu in gpus if gpu in first}
        print(f"\n{dtype:26}" + "".join(f"{gpu:>12}" for gpu in table))
        for name in read_kernels([*SMALL.SOURCES, *[FP8] * (dtype == "fp8")]):
            print(f"{name:26}" + "".join("{:6}{:6}".format(*report.get(name, "--"))
                                         for report in table.values()))
    faults = [fault for some in found.values() for *_, of_job in some for fault in of_job]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    run_main(main)
