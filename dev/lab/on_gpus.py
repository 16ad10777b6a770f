"""What GPUs say of a student's kernel, without having one: NVRTC's errors, registers, spills and shared
memory, and how many of its blocks fit on a multiprocessor."""
import re

from dev.common.gpus import REGISTERS, STATIC, GPUS as ALL_GPUS, blocks_that_fit
from dev.common.nvrtc import NotCompiled, compile_cuda, include_flags
from dev.common.student_text import for_gpu
from dev.features.devices import Cuda
from dev.lab.explain import quoted, shared_lines
from dev.lab.ladder import LAB, parse_sizes
from dev.lab.submission import MODEL, code_of, exercise_of, read_submission
from train_gpt2 import read_kernels

WARPS = 64  # of a multiprocessor, on both GPUs
GPUS = {"sm_80": ALL_GPUS["8.0"], "sm_90a": ALL_GPUS["9.0"]}

# What usually causes an error of NVRTC that g++ does not see: (what its message says, what to do)
CAUSES = (
    ("execution space|__host__ function",
     "a function that a kernel calls needs __device__ in front of it"),
    ("must have a constant value|variable-length",
     "an array's size must be a number that the compiler knows, such as 256. Take the largest that "
     "can come, or keep the numbers somewhere else"),
    ("exception", "a GPU has no exceptions: test with an if"),
    ("namespace .std|could not open source file|identifier .std",
     "the C++ library is not there on a GPU. Use arrays, and CUDA's own functions such as fmaxf"),
)


def program(path, run):
    """CUDA text with the student's kernel as the only one: of kernels.cu and the lab's tiles only
    functions are left, so that it compiles in a fraction of a second."""
    def without_kernels(text):
        text = re.sub(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^()]*\)\s*)?',
                      "__device__ inline void ", text)
        return text.replace("__grid_constant__", "")

    texts = {each: without_kernels(each.read_text("utf-8")) for each in (*MODEL.SOURCES, LAB / "tiles.cu")}
    texts[path] = for_gpu(path.read_text("utf-8-sig"))
    return "".join(f'#line 1 "{each}"\n{text}\n' for each, text in texts.items())


def switches(gpu, dtype):
    hopper = ["-DHOPPER"] * (gpu == "sm_90a" and dtype == "bf16")
    return [*Cuda.OPTIONS, f"-D{dtype.upper()}", *hopper, *MODEL.switches(), *include_flags()]


def judge(path, dtypes):
    """Compile a student's file for both GPUs. Returns (the lines that say why a GPU does not compile it, or [];
    [the facts of each GPU and dtype])."""
    ladder, version = read_submission(path)
    run = exercise_of(path)[1]
    text, threads, found = program(path, run), read_kernels([path])[run].threads, []
    for gpu in GPUS:
        for dtype in dtypes:
            try:
                _, used, _ = compile_cuda(text, gpu, switches(gpu, dtype))
            except NotCompiled as e:
                return error_lines(path, str(e), dtype), []
            sizes = {**parse_sizes(ladder.shape), "HS": 64, "threads": threads,
                     "itemsize": 2 if dtype == "bf16" else 4}
            dynamic = eval(version.shared, {}, sizes)
            found.append(dict(gpu=gpu, dtype=dtype, threads=threads, dynamic=dynamic, **used[run]._asdict(),
                              blocks=blocks_that_fit(GPUS[gpu], used[run], threads, dynamic)))
    return [], found


def error_lines(path, log, dtype):
    """The lines on NVRTC's first error in a student's file."""
    if too_much := re.search(r"uses too much shared data \((0x[0-9a-f]+) bytes", log):
        return [*shared_lines(path, int(too_much[1], 16)), f"in {dtype}"]
    match = re.search(rf"{re.escape(str(path))}\((\d+)\): (?:catastrophic )?error: (.*)", log)
    if not match:
        other = re.search(r"error\s*: (.*)", log)
        return ["it does not compile for a GPU: " + (other[1] if other else log.strip().splitlines()[-1])]
    cause = next((text for words, text in CAUSES if re.search(words, match[2])), None)
    message = re.split(r"\. Consider|, and host functions are", match[2])[0]
    lines = [f"it does not compile for a GPU{' in bf16' if dtype == 'bf16' else ''}: {message}",
             quoted(path, int(match[1]))]
    return [*lines, *([f"usually: {cause}"] if cause else [])]


def launch_lines(path, facts):
    """The lines that say why a GPU cannot launch the kernel, or []."""
    worst = next((each for each in facts if not each["blocks"]), None)
    if not worst:
        return []
    threads, registers, shared = worst["threads"], worst["registers"], worst["shared"]
    at = f"on {GPUS[worst['gpu']].name}s, in {worst['dtype']}"
    code = code_of(path).splitlines()
    declared = [quoted(path, i) for i, line in enumerate(code, 1) if "__shared__" in line]
    if shared > STATIC:
        return [*shared_lines(path, shared), at]
    if shared + worst["dynamic"] > GPUS[worst["gpu"]].of_block:
        return [f"it cannot be launched: a block has {shared:,} bytes in __shared__ arrays and {worst['dynamic']:,} of "
                f"dynamic shared memory, and {GPUS[worst['gpu']].of_block:,} are there", *declared, at]
    return [f"no GPU can launch it: a thread needs {registers} registers, so {threads} threads need "
            f"{registers * threads:,}, and a multiprocessor has {REGISTERS:,}",
            *(quoted(path, i) for i, line in enumerate(code, 1) if re.match(r"\s*BLOCK\(", line)),
            f"try fewer threads in BLOCK, or __launch_bounds__({threads}) after void, with "
            "which the compiler uses fewer registers", at]


def occupancy(facts):
    """The share of a multiprocessor's warps that run at a time."""
    return facts["blocks"] * -(-facts["threads"] // 32) / WARPS


def remark(facts):
    """A line on registers, spills, shared memory and occupancy on an H100, of the dtype that needs most."""
    worst = max((each for each in facts if each["gpu"] == "sm_90a"), key=lambda f: (-f["blocks"], f["registers"]))
    spilled = max(each["spilled"] for each in facts)
    blocks, shared = worst["blocks"], worst["shared"] + worst["dynamic"]
    return (f"{worst['registers']} registers, {f'{spilled} bytes of spills' if spilled else 'no spills'}, {shared:,} "
            f"bytes of shared memory: {blocks} {'blocks' if blocks > 1 else 'block'} of {worst['threads']} threads "
            f"{'fit' if blocks > 1 else 'fits'} on a multiprocessor of an H100 (occupancy "
            f"{100 * occupancy(worst):.0f}%)")
