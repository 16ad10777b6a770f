"""Time training steps on a GPU, beside PyTorch, llm.c and the roofline, and kernel by kernel.

    pip install -r requirements.txt -r dev/requirements.txt
    python -m dev.bench.benchmark --llmc FOLDER           # all of it, in nine minutes on an H200
    python -m dev.bench.benchmark --no-torch --rows "B=32"    # only rows at B=32, without PyTorch
    python -m dev.bench.benchmark --rows none --dtype tf32 -b 4   # only kernels, in another dtype

Everything is measured in one call. Each job is a process of its own, so that its memory can be
measured and a failure costs only its own line. Jobs run in the order of ROWS, the most important
first, until --minutes are over. "Ours" is the trainer itself, order.main(), with its flags.

FOLDER has a run.sh that builds llm.c and times `run.sh TOKENS.bin -e d12 -b B -t 1024`. A missing
measurement is a dash in the table, and a line below says why. The tables are written between two
markers in dev/RESULTS.md; python -m dev.tools.draw step then draws the kernels.
"""
import contextlib
import datetime
import functools
import io
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

import train_gpt2
from dev.bench import peers
from dev.bench.benchmark_tables import CHAPTERS, FASTER, TWO_FILES, report
from dev.bench.step_by_kernel import (
    Recorder, by_label, check_tables, recorded_steps, timed_step, work_of_step)
from dev.common.bf16 import to_bf16
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.features import devices, order
from dev.features.base import GPT2
from dev.features.data_loader import FilesLoader
from dev.features.devices import FastCuda, make_device
from dev.features.fp8.fp8 import fp8_device
from dev.features.order import has_gpu
from dev.features.peak import flops_per_token
from dev.llama3.tokens import LLAMA_TOKENS
from dev.llama3.train_llama3 import Config3, Llama3
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import UserError, replace_file


STEPS = 30  # of ours; the median is over all of them, the first two included
PROFILED = 8  # steps whose launches are timed one by one; the first two warm up
TIMEOUT = 150  # seconds, for one process
RESULTS = train_gpt2.HERE / "dev/RESULTS.md"
MARKERS = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


class Row(NamedTuple):
    """A configuration whose steps are timed."""
    model: str
    dtype: str
    B: int
    mode: tuple = ()  # PyTorch's fastest: (torch.compile's mode, attention); (): not timed
    llmc: bool = False
    T: int = 1024
    flags: tuple = ()  # of the trainer, beyond the usual

    @property
    def config(self):
        kind = Config3 if self.model.startswith("llama") else Config
        return kind.from_descriptor(self.model)

    def __str__(self):
        size = sum(row.size for row in self.config.parameter_table())
        name = f"{size / 1e6:.0f}M"
        if type(self.config) is Config3:
            name = self.model.replace("llama", "Llama ").replace(":", " ")
        length = f" T={self.T}" if self.T != 1024 else ""
        return " ".join([f"{name} {self.dtype} B={self.B}{length}", *self.flags])


FIRST = [  # the most important rows
    Row("d12", "bf16", 4, ("reduce-overhead", "cudnn"), llmc=True),
    Row("d12", "bf16", 32, ("default", "flash"), llmc=True),
    Row("d12", "bf16", 64, ("default", "cudnn"), llmc=True),
    Row("d48", "bf16", 8, ("default", "cudnn"), llmc=True),
    *(Row(model, "fp8", B, flags=flags) for model, B in (("d12", 32), ("d48", 8))
      for flags in (("--fp8", "layers"), ())),
    Row("llama3.2:1B", "bf16", 4, ("default", "cudnn"), T=2048),
    Row("d12", "tf32", 4, ("reduce-overhead", "naive")),
    Row("d12", "fp32", 4, ("reduce-overhead", "efficient")),
]
THEN = [  # if there is time left after FASTER
    Row("d24", "bf16", 8, ("default", "cudnn")),
    Row("d12", "bf16", 32, flags=("--recompute", "2")),
]
ROWS = FIRST + THEN
TAKEN_APART = FIRST[:2]  # timed with each of FASTER

FLAGS = [
    (None, "--rows", str, "", f"only rows whose name matches this regular expression, of "
     f"{'; '.join(map(str, ROWS))}; none: only the table of kernels"),
    (None, "--no-torch", "switch", 0, "1: without PyTorch"),
    (None, "--llmc", "name", None, "the folder of a run.sh that builds and times llm.c (default: "
     "without llm.c)"),
    ("-e", "--model", "name", "d12", "GPT-2 of the table of kernels"),
    (None, "--dtype", ("fp32", "tf32", "bf16", "fp8"), "bf16", "its dtype"),
    ("-b", "--batch-size", "count", 32, "its B"),
    (None, "--minutes", "amount", 9.0, "start nothing after this many, and stop what runs"),
    (None, "--commit", str, None, "what the report says was measured (default: git's HEAD)"),
    (None, "--out", "name", None, "write the new text there (default: dev/RESULTS.md)"),
    (None, "--job", str, None, "for this program's own processes"),
]


# ---- Jobs, each of which is a process


def write_words(path, count, V=Config.V, **kind):
    """Write a file of random tokens, distributed like words: a word's probability is inversely
    proportional to its rank."""
    write_tokens(path, (V ** np.random.default_rng(42).random(count)).astype(np.int32), **kind)


def tokens_of(row, folder):
    """The path of a row's tokens in a folder. Writes the file if it is missing."""
    c = row.config
    path = f"{folder}/{type(c).__name__}.bin"
    if not os.path.exists(path):
        magic, versions = LLAMA_TOKENS.magic, LLAMA_TOKENS.versions
        kind = dict(magic=magic, version=versions[0], dtype="<u4") if type(c) is Config3 else {}
        with contextlib.redirect_stdout(io.StringIO()):
            write_words(path, 2**18 + 1, c.V, **kind)
    return path


def run_trainer(row, steps, folder, device, *flags):
    """Train with this device class in place of FastCuda, and return what the trainer prints."""
    devices.FastCuda = device
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        order.main([*flags_of(row, steps, folder), "--device", "cuda", *row.flags, *flags],
                   Llama3 if type(row.config) is Config3 else GPT2)
    return output.getvalue()


def flags_of(row, steps, folder):
    """The flags of a run that only trains."""
    tokens = tokens_of(row, folder)
    return ["-e", row.model, "--dtype", row.dtype, "-b", str(row.B), "-t", str(row.T),
            "-x", str(steps), "-v", "0", "-s", "0", "-i", tokens, "-j", tokens]


def run_two_files(row, steps, folder, device, plain):
    """Train with the two files alone, without dev/. Returns what they print."""
    train_gpt2.FastCuda = device
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        flags = train_gpt2.parse_flags([*flags_of(row, steps, folder), "--plain", str(plain)])
        train_gpt2.Training(flags).run()
    return output.getvalue()


def median_of(output):
    """The median of the steps' times, without the first, in which algorithms are chosen and a graph
    is recorded."""
    return float(np.median([float(ms) for ms in re.findall(r"\| +([\d.]+) ms \|", output)][4:]))


def words_of(row, folder):
    """The mean number of distinct tokens in a batch."""
    data = FilesLoader(tokens_of(row, folder), row.B, row.T, row.config)
    return round(np.mean([np.unique(data.next_batch()[0]).size for _ in range(data.per_epoch)]))


def time_ours(row, folder):
    """The trainer's step: its ms, memory and FLOPs, and the bytes of the kernels that are not
    counted in FLOPs (None for Llama, whose kernels step_by_kernel does not know)."""
    ms, c, moved = median_of(run_trainer(row, STEPS, folder, Recorder)), row.config, None
    import cupy
    if type(c) is Config:
        work = work_of_step(recorded_steps()[0], c, row.B, row.T, words_of(row, folder))
        moved = sum(amount for _, unit, amount in work if unit == "B")
    return dict(ms=ms, memory=cupy.get_default_memory_pool().total_bytes(), bytes=moved,
                flops=row.B * row.T * flops_per_token(c, row.T))


def time_faster(row, folder, count):
    """The ms of a step with the first `count` of FASTER added to the plain device: the parts of the
    section Faster, then the chapters of dev/."""
    class Some(train_gpt2.FastCuda):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.fused_gelu = count > 1 and self.fused_gelu

        def repeat(self, graphs, key, work):
            super().repeat(graphs, key, work) if count > 2 else work()

    if count < TWO_FILES + 1:
        return dict(ms=median_of(run_two_files(row, STEPS, folder, Some, int(count == 0))))
    left_out = CHAPTERS[count - TWO_FILES :]
    order.FEATURES = [feature for feature in order.FEATURES if feature.name not in left_out]
    return dict(ms=median_of(run_trainer(row, STEPS, folder, FastCuda)))


def time_kernels(row, folder):
    """The launches of a step, by label."""
    Recorder.timed = True
    run_trainer(row, PROFILED, folder, Recorder)
    step, ms = timed_step()
    return by_label(work_of_step(step, row.config, row.B, row.T, words_of(row, folder)), ms)


def find_ceilings(dtypes):
    """What this GPU can do: bytes/s of a copy, reads and writes counted, and FLOP/s of an 8192^3
    product in each dtype."""
    import cupy
    size, rates = 8192, {}

    def seconds(work, *arguments, repeats=20):
        times = []
        for _ in range(repeats + 5):  # the first ones wake the GPU up
            before, after = cupy.cuda.Event(), cupy.cuda.Event()
            before.record()
            work(*arguments)
            after.record()
            after.synchronize()
            times.append(1e-3 * cupy.cuda.get_elapsed_time(before, after))
        return float(np.median(times[5:]))

    a, b = (np.random.default_rng(i).standard_normal((size, size), np.float32) for i in range(2))
    for dtype in dtypes:
        device = (fp8_device("cuda", Config()) if dtype == "fp8"
                  else make_device("cuda", dtype, Config()))
        arrays = [device.empty(size * size * np.dtype(device.real).itemsize)
                  .view(device.real).reshape(size, size) for _ in range(3)]
        for array, values in zip(arrays, (a, b)):
            device.put(array, values if device.real == np.float32 else to_bf16(values))
        product = device.matmul
        if dtype == "fp8":
            scale = cupy.array([1, 1, 0, 0], np.float32)  # fp8_output.cuh's struct
            twins = [device.empty(size * size).reshape(size, size) for _ in range(2)]
            for array, twin in zip(arrays, twins):
                device.launch("to_fp8", array.size, array, array.size, twin, scale)
            arrays[:2] = twins
            scales = scale[:1], scale[:1]
            product = functools.partial(device.multiply_twins, scales=scales, bias=None)
        rates[dtype] = 2 * size**3 / seconds(product, arrays[2], arrays[0], arrays[1].T)
    source, target = device.empty(2**30), device.empty(2**30)
    copy = seconds(target.data.copy_from_device_async, source.data, 2**30)
    version = cupy.cuda.runtime.runtimeGetVersion()
    return dict(copy=2 * 2**30 / copy, rates=rates, gpu=str(device).split(",")[0],
                versions=f"CuPy {cupy.__version__} with CUDA {version // 1000}."
                         f"{version % 1000 // 10}")


def time_torch(row, folder):
    return peers.torch_step(row, row.config, tokens_of(row, folder))


def time_llmc(row, folder, script):
    return peers.llmc_step(row, tokens_of(row, folder), script)


JOBS = {job.__name__: job for job in (
    time_ours, time_faster, time_kernels, find_ceilings, time_torch, time_llmc)}


def run_job(end, name, *arguments):
    """Run a job in a process of its own, which is stopped at `end`. Returns its result, or a str
    that says why there is none."""
    shown, begun = " ".join([name, *map(str, arguments[:1])]), time.perf_counter()
    if end <= begun:
        return "not run, --minutes were over"
    print(f"{shown} ... ", end="", flush=True)
    job = subprocess.Popen([sys.executable, "-m", __spec__.name, "--job",
                            json.dumps([name, *arguments])], text=True, start_new_session=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, said = job.communicate(timeout=min(TIMEOUT, end - begun))
        if job.returncode == 0:
            result = json.loads(out.splitlines()[-1])
        else:
            errors = [line for line in said.splitlines() if "error" in line.lower()]
            result = f"failed: {errors[-1].strip()[:300] if errors else job.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # and the processes that it has started
        job.communicate()
        result = "stopped, it took too long"
    shown = f"{result['ms']:.2f} ms" if isinstance(result, dict) and "ms" in result else result
    seconds = time.perf_counter() - begun
    print(f"{shown if isinstance(shown, str) else 'done'} ({seconds:.0f} s)", flush=True)
    return result


# ---- The program


def output_of(*command):
    with contextlib.suppress(OSError):
        done = subprocess.run(command, text=True, capture_output=True, cwd=train_gpt2.HERE)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def title_of(flags, found, torch):
    """The report's headline, and the line of versions below it."""
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    commit = flags.commit or output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    versions = {f"PyTorch {peer['version']}" for peer in torch.values() if isinstance(peer, dict)}
    command = shlex.join(["python", "-m", "dev.bench.benchmark", *sys.argv[1:]])
    versions = [found["versions"], f"Python {platform.python_version()}", *versions]
    return (f"## {datetime.date.today()}, one {found['gpu']}, commit {commit}\n\n`{command}`, "
            f"driver {driver[0] if driver else 'unknown'}, {', '.join(versions)}.")


def measure(flags, rows, profiled, folder):
    """Run all jobs, in their order. Returns the arguments of report() from rows to ceilings."""
    end = time.perf_counter() + 60 * flags.minutes
    job, ours, torch, llmc = functools.partial(run_job, end), {}, {}, {}
    script = os.path.abspath(flags.llmc) if flags.llmc else None
    builder = None  # of llm.c, while our first jobs run
    if script and os.path.exists(f"{script}/run.sh") and any(row.llmc for row in rows):
        builder = peers.build_llmc(script)
    ceilings = job("find_ceilings", sorted({row.dtype for row in [*rows, profiled]}))
    if isinstance(ceilings, str):
        raise UserError(f"the ceilings could not be measured: {ceilings}")
    kernels = job("time_kernels", profiled, folder)

    def beside_peers(row):
        ours[row] = job("time_ours", row, folder)
        if row.mode and not flags.no_torch:
            torch[row] = job("time_torch", row, folder)
        if row.llmc and script:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if builder:
                    builder.wait(max(0, end - time.perf_counter()))
            llmc[row] = job("time_llmc", row, folder, script)

    for row in filter(FIRST.__contains__, rows):
        beside_peers(row)
    faster = {row: [job("time_faster", row, folder, count) for count in range(len(FASTER))]
              for row in rows if row in TAKEN_APART}
    for row in filter(THEN.__contains__, rows):
        beside_peers(row)
    return rows, ours, torch, llmc, faster, profiled, kernels, ceilings


def chosen(rows, pattern):
    """The rows whose names match. Raises UserError."""
    try:
        return [row for row in rows if re.search(pattern, str(row))]
    except re.error as e:
        raise UserError(f"--rows {pattern}: is no regular expression ({e})") from None


def check_gpu():
    if not has_gpu():
        raise UserError("NVIDIA's driver reports no GPU, and only a GPU is measured: check "
                        "nvidia-smi")


def main(arguments=None):
    """Everything from the flags to the file. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    rows = chosen(ROWS, flags.rows)
    check_gpu()
    if flags.job:
        name, first, *more = json.loads(flags.job)
        print(json.dumps(JOBS[name](first if name == "find_ceilings" else Row(*first), *more)))
        return
    before = RESULTS.read_text(encoding="utf-8")
    if [before.count(marker) for marker in MARKERS] != [1, 1]:
        raise UserError(f"{RESULTS}: expected {' and '.join(MARKERS)}, once each, where the tables "
                        "belong")
    wanted = Row(flags.model, flags.dtype, flags.batch_size)
    profiled = next((row for row in ROWS if row[:3] == wanted[:3] and not row.flags), wanted)
    check_tables()
    with tempfile.TemporaryDirectory() as folder:
        for row in {type(row.config): row for row in [*rows, profiled]}.values():
            tokens_of(row, folder)
        found = measure(flags, rows, profiled, folder)
    _, _, torch, *_, ceilings = found
    text = report(title_of(flags, ceilings, torch), *found, steps=(STEPS, PROFILED - 2),
                  before=Recorder.HEAD_START)
    print(f"\n{text}\n")
    head, tail = before.split(MARKERS[0])[0], before.split(MARKERS[1])[1]
    out = flags.out or RESULTS
    replace_file(out, [f"{head}{MARKERS[0]}\n{text}\n{MARKERS[1]}{tail}".encode()])
    print(f"wrote {out}")


if __name__ == "__main__":
    run_main(main)
