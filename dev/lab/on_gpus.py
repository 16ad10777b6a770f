"""A student's kernel on GPUs. Without one: NVRTC's errors, registers, spills and shared memory, and
how many of its blocks fit on a multiprocessor. On one: its time beside the lab's versions, and what
compute-sanitizer says.

    python -m dev.lab.on_gpus time FILE  # checks and times it; prints a line of JSON
    python -m dev.lab.on_gpus once FILE  # launches it once at a small size, for compute-sanitizer
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from dev.common.gpus import GPUS as ALL_GPUS, REGISTERS, STATIC, blocks_that_fit
from dev.common.nvrtc import NotCompiled, compile_cuda, include_flags
from dev.common.student_text import for_gpu
from dev.features.devices import Cuda, device_class
from dev.lab import timing
from dev.lab.bench import Bench
from dev.lab.causes import wrong_number
from dev.lab.exercises import checks_of
from dev.lab.explain import real_line, shared_lines
from dev.lab.ladder import LAB, config_of, model_of, parse_sizes
from dev.lab.submission import MODEL, Submission
from dev.lab.workers import sources_of
from train_gpt2 import UserError

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


def without_kernels(text, but=""):
    """CUDA text with all kernels as plain functions, but for the one of this name."""
    def plain(found):
        return found[0] if found[1] == but else f"__device__ inline void {found[1]}"

    kernel = r'extern "C" __global__ void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+)'
    return re.sub(kernel, plain, text).replace("__grid_constant__", "")


def program(*files):
    """CUDA text with students' kernels as the only ones: of kernels.cu and the lab's tiles only
    functions are left, so that it compiles in a fraction of a second."""
    texts = {each: without_kernels(each.read_text("utf-8"))
             for each in (*MODEL.SOURCES, LAB / "tiles.cu")}
    texts |= {file.path: for_gpu(file.text) for file in files}
    return "".join(f'#line 1 "{each}"\n{text}\n' for each, text in texts.items())


def switches(gpu, dtype, config=MODEL):
    hopper = ["-DHOPPER"] * (gpu == "sm_90a" and dtype == "bf16")
    return [*Cuda.OPTIONS, f"-D{dtype.upper()}", *hopper, *config.switches(), *include_flags()]


def judge(file, dtypes):
    """Compile a Submission for both GPUs. Returns (the lines that say why a GPU does not compile
    it, or []; [the facts of each GPU and dtype])."""
    text, threads, found = program(file), file.kernel.threads, []
    # A helper needs __device__. But NVRTC 13.0 would ask it of a lambda with `auto`, too.
    annotated = not re.search(r"\]\s*\([^()]*\bauto\b", file.code)
    for gpu in GPUS:
        for dtype in dtypes:
            try:
                _, used, _ = compile_cuda(text, gpu, switches(gpu, dtype), annotated)
            except NotCompiled as e:
                return error_lines(file, str(e), dtype), []
            sizes = {**parse_sizes(file.ladder.shape), "HS": 64, "threads": threads,
                     "itemsize": 2 if dtype == "bf16" else 4}
            dynamic, own = eval(file.version.shared, {}, sizes), used[file.run]
            found.append(dict(gpu=gpu, dtype=dtype, threads=threads, dynamic=dynamic,
                              **own._asdict(),
                              blocks=blocks_that_fit(GPUS[gpu], own, threads, dynamic)))
    return [], found


def error_lines(file, log, dtype):
    """The lines on NVRTC's first error in a student's file."""
    if too_much := re.search(r"uses too much shared data \((0x[0-9a-f]+) bytes", log):
        return [*shared_lines(file, int(too_much[1], 16)), f"in {dtype}"]
    match = re.search(rf"{re.escape(str(file.path))}\((\d+)\): (?:catastrophic )?error: (.*)", log)
    if not match:
        other = re.search(r"error\s*: (.*)", log)
        said = other[1] if other else log.strip().splitlines()[-1]
        return [f"it does not compile for a GPU: {said}"]
    cause = next((text for words, text in CAUSES if re.search(words, match[2])), None)
    message = re.split(r"\. Consider|, and host functions are", match[2])[0]
    in_bf16 = " in bf16" if dtype == "bf16" else ""
    lines = [f"it does not compile for a GPU{in_bf16}: {message}", file.quoted(int(match[1]))]
    if in_bf16 and not cause and re.search(r'\breal\b|no operator "', match[2]):
        return [*lines, real_line(lines[1], '="' in match[2])]
    return [*lines, *([f"usually: {cause}"] if cause else [])]


def bound_lines(file):
    """The lines on a __launch_bounds__ that is smaller than the block, or []."""
    found = re.search(rf"__launch_bounds__\s*\(([^(),]*).*?\)\s*(?:void\s+)?{file.run}\s*\(",
                      file.code)
    if not found:
        return []
    bound = found[1].strip()
    for _ in range(3):  # a name of a name
        name = re.escape(bound)
        value = re.search(rf"(?:#\s*define\s+{name}\s+|\b{name}\s*=\s*)(\w+)", file.code)
        bound = value[1] if value else bound
    if not bound.isdecimal() or int(bound) >= file.kernel.threads:
        return []
    return [f"no GPU can launch it: __launch_bounds__({found[1].strip()}) promises blocks of at "
            f"most {bound} threads, and BLOCK asks for {file.kernel.threads}",
            *file.quoted_with(r"^\s*BLOCK\(")[:1], *file.quoted_with("__launch_bounds__")[:1],
            "write the same number in both"]


def double_lines(file, facts):
    """A remark on a kernel that computes in double."""
    most = max((each.get("doubles", 0) for each in facts), default=0)
    if not most:
        return []
    places = file.quoted_with(r"\bdouble\b|\d\.\d*(?![\w.])|"
                              r"\b(?:pow|exp|log|sqrt|sin|cos|tanh)\(")
    return [f"it computes in double, in {most} instruction{'s' * (most > 1)} of its code: an H100 "
            "does one in the time of 2 in float, a T4 of 32, and an RTX 4070 of 64"
            + (f" ({places[0]})" if places else "")]


def launch_lines(file, facts):
    """The lines that say why a GPU cannot launch the kernel, or []."""
    for each in facts:
        gpu, frame = GPUS[each["gpu"]], each.get("frame", 0)
        held = gpu.threads * gpu.multiprocessors
        if frame * held > gpu.memory:
            return [f"it cannot be launched: a thread has {frame:,} bytes of arrays and variables "
                    f"of its own, and a GPU keeps them for the {held:,} threads that it can hold: "
                    f"{frame * held / 1e9:.0f} GB on an {gpu.name}, of {gpu.memory / 1e9:.0f}",
                    *file.quoted_with(r"^\s+\w+ (?:.*, )?\w+\[")[:1], f"in {each['dtype']}"]
    worst = next((each for each in facts if not each["blocks"]), None)
    if not worst:
        return []
    threads, registers, shared = worst["threads"], worst["registers"], worst["shared"]
    dynamic, gpu = worst["dynamic"], GPUS[worst["gpu"]]
    at = f"on {gpu.name}s, in {worst['dtype']}"
    if shared > STATIC:
        return [*shared_lines(file, shared), at]
    if shared + dynamic > gpu.of_block:
        return [f"it cannot be launched: a block has {shared:,} bytes in __shared__ arrays and "
                f"{dynamic:,} of dynamic shared memory, and {gpu.of_block:,} are there",
                *file.quoted_with("__shared__"), at]
    return [f"no GPU can launch it: a thread needs {registers} registers, so {threads} threads "
            f"need {registers * threads:,}, and a multiprocessor has {REGISTERS:,}",
            *file.quoted_with(r"^\s*BLOCK\("),
            f"try fewer threads in BLOCK, or __launch_bounds__({threads}) after void, with "
            "which the compiler uses fewer registers", at]


def occupancy(facts):
    """The share of a multiprocessor's warps that run at a time."""
    return facts["blocks"] * -(-facts["threads"] // 32) / WARPS


def remark(facts):
    """A line on registers, spills, shared memory and occupancy on an H100, of the dtype that needs
    most."""
    worst = max((each for each in facts if each["gpu"] == "sm_90a"),
                key=lambda f: (-f["blocks"], f["registers"]))
    spilled = max(each["spilled"] for each in facts)
    blocks, shared = worst["blocks"], worst["shared"] + worst["dynamic"]
    return (f"{worst['registers']} registers, "
            f"{f'{spilled} bytes of spills' if spilled else 'no spills'}, {shared:,} bytes of "
            f"shared memory: {blocks} {'blocks' if blocks > 1 else 'block'} of {worst['threads']} "
            f"threads {'fit' if blocks > 1 else 'fits'} on a multiprocessor of an H100 (occupancy "
            f"{100 * occupancy(worst):.0f}%)")


# ---- On a GPU


class Times(NamedTuple):
    """How long a student's kernel takes, in fp32 at the sizes of the ladder."""
    card: str  # the GPU's name
    own: float  # seconds
    rungs: list  # [seconds, number, what it is] of each version of the lab

    @property
    def slower(self):
        """The rung that is next slower, or None."""
        return min((rung for rung in self.rungs if rung[0] >= self.own), default=None)

    @property
    def faster(self):
        """The rung that is next faster, or None."""
        return max((rung for rung in self.rungs if rung[0] < self.own), default=None)

    @property
    def noted(self):
        """(card, [microseconds, the number of the slower and of the faster version])."""
        beside = self.slower, self.faster
        return self.card, [1e6 * self.own, *(rung and rung[1] for rung in beside)]


# ---- In a process of its own, since a wrong kernel may spoil the GPU for the process


def compiled(Cuda, c, sources, file):
    """A device with these files and a student's, made ready for NVRTC, with the numbers of its
    lines."""
    options = *Cuda.OPTIONS, "-lineinfo", *include_flags()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / file.path.name
        ready.write_text(for_gpu(file.text), encoding="utf-8")
        return type("Compiled", (Cuda,), dict(OPTIONS=options))("fp32", c, [*sources, ready])


def time_file(file):
    """Check a student's kernel on the GPU, and time it beside the lab's versions. Returns its
    Times. Raises UserError."""
    ladder, mine = file.ladder, file.version
    sizes = parse_sizes(ladder.shape)
    c = config_of(*model_of(ladder, sizes))
    device = compiled(device_class("cuda"), c, sources_of([ladder.name]), file)
    with device.cupy.cuda.Stream(non_blocking=True):
        bench = Bench(ladder, device, sizes, timing.cold(device))

        def seconds(version, choice):
            return timing.time_rounds(device, list(bench.launches(version, choice)))

        choice = dict(threads=mine.threads[0])
        comparison = bench.check(mine, choice, loose=8)  # the limits are those of small sizes
        if comparison.place is not None:
            raise UserError(f"wrong on the GPU: {wrong_number(comparison, False)}")
        own = seconds(mine, choice)
        rungs = [(min(seconds(version, choice) for choice in version.choices(device)), number,
                  version.what)
                 for number, version in enumerate(ladder.versions, 1) if bench.fits(version)]
    return Times(str(device).split(",")[0], own, rungs)


def launch_once(file):
    """Launch a student's kernel once, at the check with most items."""
    ladder, mine = file.ladder, file.version
    device = compiled(device_class("cuda", plain=True), MODEL, [LAB / "tiles.cu"], file)
    device.cupy.cuda.set_allocator(None)  # each array by itself, so that memcheck sees its end
    benches = [Bench(ladder._replace(compiled_for=""), device, sizes, lambda nbytes: 2)
               for sizes in checks_of(file.exercise, ladder)]
    bench = max((bench for bench in benches if bench.fits(mine)),
                key=lambda bench: eval(mine.items.split(",")[0], {}, vars(bench.given)))
    [*bench.launches(mine, dict(threads=mine.threads[0]))][1]()  # the first set has guards
    bench.wait()


# ---- In front of these processes


def run_self(what, file, before=()):
    """(stdout, stderr, exit status) of `python -m dev.lab.on_gpus what FILE`; before: the words of
    a program that runs it."""
    command = [*before, sys.executable, "-m", "dev.lab.on_gpus", what, str(file.path)]
    done = subprocess.run(command, cwd=LAB.parents[1], capture_output=True, text=True,
                          errors="replace")
    return done.stdout, done.stderr, done.returncode


def measure(file):
    """The Times of a Submission. Raises UserError if it is wrong on the GPU, or fails there."""
    out, err, _ = run_self("time", file)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    if not found:
        last = (err.strip().splitlines() or ["it ended without a word"])[-1]
        raise UserError(f"{file}, on the GPU: {last}")
    return Times(*found[0])


def standing(times):
    """The lines that compare a time with those of the versions."""
    slower, faster = times.slower, times.faster
    between = [f"version {number} ({1e6 * time:.1f} us)"
               for time, number, _ in filter(None, (slower, faster))]
    line = f"your {1e6 * times.own:.1f} us "
    if not faster:
        return [line + f"are faster than all versions; the best is {between[0]}"]
    line += (f"are between {between[0]} and {between[1]}" if slower else
             f"are slower than {between[0]}")
    return [line, f"what version {faster[1]} does better: {faster[2]}; the comment above it in the "
            ".cu says why"]


# What compute-sanitizer prints, and the same in words; {0} is the pattern's first group.
SAID = (
    (r"Race reported between (read|write) access.*?and (read|write) access",
     "a race in shared memory: a thread {0}s and another one {1}s, with no barrier between them"),
    (r"Invalid __(\w+)__ (read|write|atomic) of size (\d+) bytes\n(?s:.*)misaligned",
     "a thread {1}s {2} bytes of {0} memory at an address that is not a multiple of {2}"),
    (r"Invalid __(\w+)__ (read|write|atomic) of size (\d+)",
     "a thread {1}s {2} bytes of {0} memory where there is no array"),
    (r"Error: (.*)", "{0}"),
)


def complaint(file, tool, text):
    """The lines on the first error that compute-sanitizer prints, with the student's own lines; []
    if there is none."""
    for part in re.split(r"\n\s*\n", re.sub(r"^=+ ?", "", text, flags=re.M)):
        for pattern, words in SAID:
            if match := re.search(pattern, part, re.I | re.S if "access" in pattern else re.I):
                said = words.format(*(group.lower() for group in match.groups()))
                numbers = re.findall(rf"{re.escape(file.path.name)}:(\d+)", part)
                return [f"compute-sanitizer ({tool}): {said}",
                        *(file.quoted(int(number)) for number in dict.fromkeys(numbers))]
    return []


def sanitize(file):
    """(the lines on what compute-sanitizer finds in a student's kernel, or []; what to say if it
    finds nothing)."""
    program = shutil.which("compute-sanitizer")
    if not program:
        return [], "compute-sanitizer is not in PATH, so it was not asked"
    for tool in ("memcheck", "racecheck"):
        out, err, status = run_self("once", file, (program, "--tool", tool))
        if lines := complaint(file, tool, out):
            return lines, ""
        if status or "SUMMARY" not in out:
            last = [line.strip("= ") for line in (out + err).splitlines() if line.strip("= ")][-1:]
            return [], f"compute-sanitizer ({tool}) did not get to its end: {' '.join(last)}"
    return [], "compute-sanitizer: memcheck and racecheck find nothing"


if __name__ == "__main__":
    what, path = sys.argv[1:]
    try:
        file = Submission(path)
        print(json.dumps(time_file(file))) if what == "time" else launch_once(file)
    except Exception as e:
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        sys.exit(f"{kind}{' '.join(str(e).split())}")
