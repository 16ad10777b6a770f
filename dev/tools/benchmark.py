"""Measure a training step on a GPU: against PyTorch, against the roofline, without what is there for speed alone, and
kernel by kernel.

    pip install -r requirements.txt -r dev/requirements.txt
    python -m dev.tools.benchmark                             # all of it, in about nine minutes on an H200
    python -m dev.tools.benchmark --no-torch --rows "B=32"    # one row, without the peer
    python -m dev.tools.benchmark --rows none --dtype tf32 -b 4    # only the kernels, of another configuration

Everything it compares is measured in one run, each configuration in a process of its own, so that its memory is its
own, and that one that fails is a line and not the end. Ours is train_gpt2.py's main() itself, with its flags; the
program only listens to the verbs of its device. The tables are written between two markers of dev/RESULTS.md, the
chart of a step's time to dev/images/step_by_kernel.svg.
"""
import argparse
import contextlib
import datetime
import functools
import io
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import train_gpt2
from dev.gpu import products
from dev.common.bf16 import to_bf16
from dev.common.devices import make_device
from dev.features import FLAGS as FEATURE_FLAGS
from dev.features import has_gpu
from dev.common.cuda_source import parameters_of
from dev.precision.fp8 import fp8_device
from dev.gpu.peak import flops_per_token
from prepro_tinyshakespeare import UserError, replace_file, run, write_tokens
from train_gpt2 import Config, DataLoader, FastCuda, read_kernels

TOP = Path(__file__).resolve().parents[2]
T = 1024
STEPS = 30  # of ours, whose median is that of all of them, the first two included
TORCH_WARM_UP, TORCH_STEPS = 5, 20
PROFILED = 8  # steps whose launches are timed one by one, of which the first two only warm up
TIMEOUT = 240  # seconds, for one process
SOURCES = [*Config.SOURCES, TOP / "dev/precision/moments.cu", TOP / "dev/precision/fp8.cu"]
RESULTS, CHART = TOP / "dev/RESULTS.md", "step_by_kernel.svg"
MARKERS = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


class Row(NamedTuple):
    """A configuration of the table of steps."""
    model: str
    dtype: str
    B: int
    modes: tuple  # PyTorch's, the most promising first: (torch.compile's mode, attention)
    flags: tuple = ()  # of train_gpt2.py, beyond the usual; a row with a flag that it does not have is left out

    def __str__(self):
        parameters = sum(row.size for row in Config.from_descriptor(self.model).parameter_table())
        extra = f", {' '.join(self.flags).lstrip('-')}" if self.flags else ""
        return f"{self.model} {parameters / 1e6:.0f}M {self.dtype} B={self.B}{extra}"


GRAPHED, PLAIN = "reduce-overhead", "default"
ROWS = [
    Row("d12", "fp32", 4, ((GRAPHED, "efficient"),)),
    Row("d12", "tf32", 4, ((GRAPHED, "naive"),)),
    Row("d12", "bf16", 4, ((GRAPHED, "cudnn"), (GRAPHED, "flash"))),
    Row("d12", "bf16", 32, ((PLAIN, "flash"), (PLAIN, "cudnn"))),
    Row("d12", "bf16", 32, (), ("--recompute", "2")),
    Row("d12", "fp8", 32, ()),
    Row("d12", "bf16", 64, ((PLAIN, "cudnn"), (PLAIN, "flash"))),
    Row("d24", "bf16", 8, ((PLAIN, "cudnn"),)),
    Row("d48", "bf16", 8, ((PLAIN, "cudnn"),)),
    Row("d48", "fp8", 8, ()),
    Row("d48", "bf16", 32, ((PLAIN, "cudnn"),)),
    Row("d48", "bf16", 32, ((PLAIN, "cudnn"),), ("--recompute", "1")),
]
PLAIN_TOO = ROWS[:4]  # measured with --plain 1 too, and in bf16 with each of FASTER

# What the last section of train_gpt2.py and dev/gpu/products.py add to the plain device, one thing after the other.
FASTER = [
    "the plain device",
    "cuBLASLt, which adds the bias in the product; Hopper's own attention",
    "its algorithms chosen by timing them",
    "GELU in the product too",
    "a step as one graph",
    "a step queued before the last one is reported",
]

# A kernel's bytes are those of its arrays, once: read if the parameter is const, else written. But these are read too:
READ_TOO = {
    "encoder_backward_wte.dwte", "encoder_backward_wpe.dwpe", "layernorm_backward.dresidual", "add_partials.out1",
    "add_partials.out2", "add_partials.out3", "gelu_backward.dinp", "fused_classifier.logits", "adamw.params",
    "adamw.low", "adamw.m", "adamw.v", "adamw_bf16.params", "adamw_bf16.low", "adamw_bf16.m", "adamw_bf16.v",
}
# Of these only a part is touched, as many bytes; a has the kernel's arguments by name, its items, (along x, along
# y), and words, the distinct tokens of a batch.
TOUCHED = {
    "encoder_forward.wte": lambda a: a.words * a.C * a.wte.itemsize,
    "encoder_backward_wte.dwte": lambda a: a.words * a.C * a.dwte.itemsize,
    "layernorm_backward.partials": lambda a: a.items[0] * a.partials[:, 0].nbytes,
    "matmul_backward_bias.dbias": lambda a: a.items[1] * a.OC * a.dbias.itemsize,
    "add_partials.partials": lambda a: a.items[1] * a.N * a.OC * a.partials.itemsize,
}
# FP8 gives these kernels their output by value, in a struct. Here is an argument of the same size.
OUTPUT_LIKE = {"residual_layernorm_forward": "copy", "layernorm_backward": "dout", "gelu_forward": "inp",
               "gelu_backward": "inp"}
# These are bound by FLOPs: how many products of a (T,T) and a (T,HS) matrix, half of it masked, a launch does for each
# head of the whole batch.
PRODUCTS = {"attention_forward": 2, "attention_backward_q": 3, "attention_backward_kv": 4}


# ---------------------------------------------------------------------------------------------------------------------
# What a step launches, and the bytes and FLOPs of it


class Recorder(FastCuda):
    """A FastCuda that notes the launches of each step, and, if it is timed, the events around each of them.

    A step is what goes through repeat. One that is timed is not a graph: its launches wait behind a few graphs of the
    same step. So the GPU runs at a step's clock, and the host, which is well ahead, has no part in the times.
    """
    timed = False
    notes = None  # the launches of the step that is noted now: what, event before, event behind
    steps = []  # those of all steps; what is (name, items, arguments)
    HEAD_START = 4  # graphs

    def event(self):
        return self.cupy.cuda.get_current_stream().record(self.cupy.cuda.Event()) if self.timed else None

    @contextlib.contextmanager
    def noted(self, name, items, arguments):
        notes, self.notes = self.notes, None  # what is launched within is a part of it, as GELU of a product
        before = None if notes is None else self.event()
        yield
        if notes is not None:
            notes.append(((name, items, arguments), before, self.event()))
        self.notes = notes

    def launch(self, name, items, *arguments, **named):
        with self.noted(name, items if isinstance(items, tuple) else (items, 1), arguments):
            super().launch(name, items, *arguments, **named)

    def matmul(self, out, a, b, *arguments, **named):
        with self.noted("matmul", None, (out, a, b)):
            super().matmul(out, a, b, *arguments, **named)

    def product(self, epilogue, out, a, b, *arguments):
        with self.noted("matmul", None, (out, a, b)):
            super().product(epilogue, out, a, b, *arguments)

    def zero(self, array):
        with self.noted("memset", None, (array,)):
            super().zero(array)

    def repeat(self, graphs, key, work):
        for _ in range(self.HEAD_START if self.timed else 0):
            super().repeat(graphs, key, work)
        self.notes = []
        self.steps.append(self.notes)
        if self.timed:
            work()
        else:
            super().repeat(graphs, key, work)
        self.notes = None


def check_tables():
    """Say so on stderr if a table above names what kernels.cu does not have; such rows count for nothing."""
    kernels = read_kernels(SOURCES)
    known = {f"{kernel}.{name}" for kernel in kernels for name, *_ in parameters_of(kernels[kernel])} | set(kernels)
    needed = {f"{key.split('.')[0]}.{name}" for key, formula in TOUCHED.items() for name in formula.__code__.co_names
              if name not in ("words", "items", "itemsize", "nbytes")}
    needed |= {f"{kernel}.{name}" for kernel, name in OUTPUT_LIKE.items()}
    for stale in sorted((READ_TOO | set(TOUCHED) | needed | set(PRODUCTS)) - known):
        print(f"WARNING: dev/tools/benchmark.py has a row for {stale}, which is in no file of kernels", file=sys.stderr)


def work_of(what, c, B, words, kernels, T=T):
    """A launch's label and its work: ("FLOP", how many) for matrix products and attention, else ("B", how many)."""
    name, items, arguments = what
    if name == "matmul":
        out, a = arguments[:2]
        M, N, K = *out.shape[-2:], a.shape[-1]
        return f"matmul {M} x {N} x {K}", "FLOP", 2 * out.size * K
    if name == "memset":
        return name, "B", arguments[0].nbytes
    if name in PRODUCTS:
        return name, "FLOP", PRODUCTS[name] * B * T * T * c.C
    total, parameters = 0, parameters_of(kernels[name])
    a = SimpleNamespace(items=items, words=words, **{p[0]: v for p, v in zip(parameters, arguments)})
    for (parameter, _, array, const), value in zip(parameters, arguments):
        if array and value is not None:
            key, twin = f"{name}.{parameter}", 0
            if value.dtype.kind == "V":  # see Fp8.with_twin
                like, twin = getattr(a, OUTPUT_LIKE[name]), int(value.view(np.uint64)[1] != 0)
                twin, value = twin * like.size, like
            touched = value.nbytes
            with contextlib.suppress(AttributeError):  # a row that check_tables has named
                touched = TOUCHED[key](a) if key in TOUCHED else touched
            total += touched * (2 if key in READ_TOO and not const else 1) + twin
    return name, "B", total


# ---------------------------------------------------------------------------------------------------------------------
# The jobs, each of which is a process


def write_words(path, count):
    """Write a file of so many random tokens: the probability of a word is inversely proportional to its rank."""
    write_tokens(path, (Config().V ** np.random.default_rng(42).random(count)).astype(np.uint16))


def run_trainer(row, steps, tokens, device, *flags):
    """Train with train_gpt2.py, with this class for FastCuda, and return what it prints."""
    train_gpt2.FastCuda, output = device, io.StringIO()
    with contextlib.redirect_stdout(output):
        train_gpt2.main(["-e", row.model, "--dtype", row.dtype, "-b", str(row.B), "-t", str(T), "-x", str(steps),
                         "-v", "0", "-s", "0", "-i", tokens, "-j", tokens, "--device", "cuda", *row.flags, *flags])
    return output.getvalue()


def recorded_steps():
    """What each launch of each step was (see Recorder)."""
    steps = [step for step in Recorder.steps if step]
    if not steps:
        raise UserError("train_gpt2.py launched nothing in Cuda.repeat: mend Recorder")
    return steps


def median_of(output):
    return float(re.search(r"median ([\d.]+) ms", output)[1])


def words_of(row, tokens):
    """The mean number of distinct tokens of a batch."""
    data = DataLoader(tokens, row.B, T, Config())
    return round(np.mean([np.unique(data.next_batch()[0]).size for _ in range(data.batches)]))


def ours_job(row, tokens):
    """A step as the trainer does it: its ms, memory and FLOPs, and the bytes of what is not counted in FLOPs."""
    ms = median_of(run_trainer(row, STEPS, tokens, Recorder))
    import cupy
    c, kernels, words = Config.from_descriptor(row.model), read_kernels(SOURCES), words_of(row, tokens)
    work = [work_of(what, c, row.B, words, kernels)[1:] for what, *_ in recorded_steps()[0]]
    return dict(ms=ms, memory=cupy.get_default_memory_pool().total_bytes(), flops=row.B * T * flops_per_token(c, T),
                bytes=sum(amount for unit, amount in work if unit == "B"))


def faster_job(row, count, tokens):
    """A step's ms with the first `count` things that FASTER adds to the plain device."""
    class Some(FastCuda):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.fused_gelu = count > 2 and self.fused_gelu

    if count < 2:
        products.TimedProducts.CANDIDATES = 1  # the first on offer
    if count < 5:  # each step is waited for
        train_gpt2.FastTraining = train_gpt2.Training
    # Where algorithms are not timed, none may come from a run that did. From 2 on, all have the ones that 2 has chosen.
    os.environ["XDG_CACHE_HOME"] = f"{tokens}.{min(count, 2)}"
    flags = "--plain", str(int(count == 0)), "--graph", str(int(count > 3))
    return dict(ms=median_of(run_trainer(row, STEPS, tokens, Some, *flags)))


def kernels_job(row, tokens):
    """The launches of a step by label: [{label, unit, launches, us (of the median launch), ms and work (of all)}]."""
    Recorder.timed = True
    run_trainer(row, PROFILED, tokens, Recorder)
    import cupy
    recorded = recorded_steps()[2:]
    if len({tuple(what[0] for what, *_ in step) for step in recorded}) > 1:
        raise UserError("the steps of train_gpt2.py differ in what they launch")
    ms = np.median([[cupy.cuda.get_elapsed_time(*events) for _, *events in step] for step in recorded], axis=0)
    c, kernels, words = Config.from_descriptor(row.model), read_kernels(SOURCES), words_of(row, tokens)
    launches = {}
    for (what, *_), time_ in zip(recorded[0], ms):
        label, unit, amount = work_of(what, c, row.B, words, kernels)
        launches.setdefault((label, unit), []).append((float(time_), int(amount)))
    table = []
    for (label, unit), pairs in launches.items():
        times, amounts = zip(*pairs)
        table.append(dict(label=label, unit=unit, launches=len(pairs), us=1e3 * float(np.median(times)), ms=sum(times),
                          work=sum(amounts)))
    return sorted(table, key=lambda kernel: -kernel["ms"])


def ceilings_job(dtypes):
    """What this GPU can do: bytes/s of a copy, read and written, and FLOP/s of an 8192^3 product in each dtype."""
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

    a, b = (np.random.default_rng(i).standard_normal((size, size), dtype=np.float32) for i in range(2))
    for dtype in dtypes:
        device = fp8_device("cuda", Config()) if dtype == "fp8" else make_device("cuda", dtype, Config())
        arrays = [device.empty(size * size * np.dtype(device.real).itemsize).view(device.real).reshape(size, size)
                  for _ in range(3)]
        for array, values in zip(arrays, (a, b)):
            device.put(array, values if device.real == np.float32 else to_bf16(values))
        product = device.matmul
        if dtype == "fp8":
            scale = cupy.array([1, 1, 0, 0], np.float32)  # fp8_output.cuh's struct
            twins = [device.empty(size * size).reshape(size, size) for _ in range(2)]
            for array, twin in zip(arrays, twins):
                device.launch("to_fp8", array.size, array, array.size, twin, scale)
            arrays[:2] = twins
            product = functools.partial(device.multiply_twins, scales=(scale[:1], scale[:1]), bias=None)
        rates[dtype] = 2 * size**3 / seconds(product, arrays[2], arrays[0], arrays[1].T)
    source, target = device.empty(2**30), device.empty(2**30)
    copy = seconds(target.data.copy_from_device_async, source.data, 2**30)
    version = cupy.cuda.runtime.runtimeGetVersion()
    return dict(copy=2 * 2**30 / copy, rates=rates, gpu=str(device).split(",")[0],
                versions=f"CuPy {cupy.__version__} with CUDA {version // 1000}.{version % 1000 // 10}")


def torch_job(row, mode, attention, tokens, device="cuda", steps=TORCH_STEPS):
    """The same for PyTorch, as its users train: dev/tools/torch_reference.py compiled by torch.compile, autocast
    to bf16, the attention named, fused AdamW. Its times include the copy of a new batch and the read of the loss."""
    try:
        import torch
        from dev.tools import torch_reference as reference
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError as e:
        raise UserError(f"{e}: pip install -r dev/requirements.txt, or give --no-torch") from None
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
               "efficient": SDPBackend.EFFICIENT_ATTENTION, "naive": SDPBackend.MATH}[attention]
    c = Config.from_descriptor(row.model)
    # The head is over the padded vocabulary, for speed, as PyTorch's users have it: the padding is never a target.
    shape = reference.Shape(c.maxT, c.Vp, c.L, c.NH, c.C, c.Vp)

    def fused(q, k, v, kind):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def naive(q, k, v, kind):
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT / math.sqrt(c.C // c.NH)).masked_fill(future, -math.inf).softmax(-1) @ v

    reference.attention = naive if attention == "naive" else fused

    class Model(torch.nn.Module):
        """Its parameters are a tensor a layer: sliced out of one for all layers, gradients would be copied."""

        def __init__(self):
            super().__init__()
            self.names = {}
            for name, dims, kind in reference.tensors(shape):
                layers = [None] if len(dims) == 1 or name in ("wte", "wpe") else range(c.L)
                self.names[name] = [name if l is None else f"{name}{l}" for l in layers]
                for each in self.names[name]:
                    mean, std = {"norm": (1, 0), "bias": (0, 0)}.get(kind, (0, 0.02))
                    values = mean + std * torch.randn(dims if layers == [None] else dims[1:], device=device)
                    self.register_parameter(each, torch.nn.Parameter(values))

        def forward(self, x, y):
            weights = {name: [getattr(self, each) for each in names] for name, names in self.names.items()}
            for name in ("wte", "wpe", "lnfw", "lnfb"):
                weights[name], = weights[name]
            return reference.forward(weights, shape, x, y, "softmax")[1]

    torch.manual_seed(42)
    torch.set_float32_matmul_precision("highest" if row.dtype == "fp32" else "high")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    compiled = torch.compile(model, mode=mode)
    data = DataLoader(tokens, row.B, T, c)
    x, y = (torch.empty(row.B, T, dtype=torch.int64, device=device) for _ in range(2))
    times, batch = [], data.next_batch()
    for _ in range(TORCH_WARM_UP + steps):
        start = time.perf_counter()
        for to, values in zip((x, y), batch):
            to.copy_(torch.from_numpy(values))
        with sdpa_kernel([backend]), torch.autocast(device, torch.bfloat16, enabled=row.dtype == "bf16"):
            loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        batch = data.next_batch()  # while the GPU is at work on this one
        value = loss.item()  # waits for all that is queued
        times.append(time.perf_counter() - start)
    if not math.isfinite(value):
        raise UserError(f"PyTorch's loss is {value}")
    return dict(ms=1e3 * float(np.median(times[TORCH_WARM_UP:])), version=torch.__version__, loss=value,
                memory=torch.cuda.max_memory_allocated() if device == "cuda" else 0)


JOBS = {"ours": ours_job, "faster": faster_job, "kernels": kernels_job, "ceilings": ceilings_job, "torch": torch_job}


def run_job(name, *arguments, timeout=TIMEOUT, program=__spec__.name):
    """Run a job of a program in a process of its own, and return its result, or as a str the line that says why there
    is none."""
    if timeout <= 0:
        return "not run, --minutes were over"
    shown = " ".join(str(a) for a in arguments if not str(a).startswith(tempfile.gettempdir()))
    print(f"{name} {shown} ... ", end="", flush=True)
    start = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, "-m", program, "--job", json.dumps([name, *arguments])], text=True,
                              capture_output=True, timeout=timeout)
        if done.returncode == 0:
            result = json.loads(done.stdout.splitlines()[-1])
        else:
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            result = f"failed: {said[-1].strip()[:300] if said else f'exit status {done.returncode}'}"
    except subprocess.TimeoutExpired:
        result = f"stopped after {timeout:.0f} s"
    shown = result if isinstance(result, str) else f"{result['ms']:.2f} ms" if "ms" in result else "done"
    print(f"{shown} ({time.perf_counter() - start:.0f} s)", flush=True)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The tables and the chart


def milliseconds(result):
    return result if isinstance(result, str) else f"{result['ms']:.2f}"


def step_table(rows, ours, faster, torch, ceilings):
    """The Markdown of the table of steps: ours {Row: result}, faster {Row: [result, ...]}, the first of which is the
    plain device's, torch {Row: {mode: result}}."""
    lines = ["| GPT-2 | ours, ms | tok/s | GiB | plain, ms | PyTorch, ms | mode | GiB | ratio | roofline, ms | share |",
             "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        mine = ours[row]
        good = {mode: result for mode, result in torch[row].items() if not isinstance(result, str)}
        best = min(good, key=lambda mode: good[mode]["ms"], default=None)
        cells = [str(row), "failed" if isinstance(mine, str) else milliseconds(mine)] + 9 * [""]
        if row in faster:
            cells[4] = "failed" if isinstance(faster[row][0], str) else milliseconds(faster[row][0])
        if best:
            cells[5:8] = milliseconds(good[best]), " ".join(best), f"{good[best]['memory'] / 2**30:.1f}"
        if not isinstance(mine, str):
            roofline = 1e3 * (mine["flops"] / ceilings["rates"][row.dtype] + mine["bytes"] / ceilings["copy"])
            cells[2:4] = f"{1e3 * row.B * T / mine['ms']:,.0f}", f"{mine['memory'] / 2**30:.1f}"
            cells[8] = f"{good[best]['ms'] / mine['ms']:.2f}" if best else ""
            cells[9:] = f"{roofline:.2f}", f"{roofline / mine['ms']:.0%}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def faster_table(faster):
    """The Markdown of what each of FASTER saves: faster {Row: [result, ...]}."""
    lines = [f"| added, one after the other | {' | '.join(f'{row}, ms | saves' for row in faster)} |",
             f"| --- |{' ---: | ---: |' * len(faster)}"]
    for i, added in enumerate(FASTER):
        cells = [added]
        for results in faster.values():
            both = i and all(isinstance(result, dict) for result in results[i - 1 : i + 1])
            cells += [milliseconds(results[i]), f"{results[i - 1]['ms'] - results[i]['ms']:.2f}" if both else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ceiling_of(kernel, row, ceilings):
    return ceilings["copy"] if kernel["unit"] == "B" else ceilings["rates"][row.dtype]


def kernel_table(row, kernels, ceilings):
    """The Markdown of the table of kernels."""
    total = sum(kernel["ms"] for kernel in kernels)
    lines = ["| kernel | launches | us each | ms a step | share | a launch | rate | of ceiling |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for kernel in kernels:
        rate, unit = kernel["work"] / (1e-3 * kernel["ms"]), kernel["unit"]
        lines.append(f"| {kernel['label']} | {kernel['launches']} | {kernel['us']:.1f} | {kernel['ms']:.3f} | "
                     f"{kernel['ms'] / total:.1%} | {kernel['work'] / kernel['launches'] / 1e9:,.4g} G{unit} | "
                     f"{rate / 1e12:.2f} T{unit}/s | {rate / ceiling_of(kernel, row, ceilings):.0%} |")
    lines.append(f"| all | {sum(kernel['launches'] for kernel in kernels)} | | {total:.3f} | 100.0% | | | |")
    return lines


CEILINGS_TEXT = """{versions}. All of it is of one run, and so are the ceilings: a copy of 1 GiB within the GPU moves
{copy:.2f} TB/s, read and written; a product of 8192 x 8192 matrices does, in TFLOP/s, {rates}."""
STEPS_TEXT = """Whole training steps, T={T}, median. A step includes the copy of its batch to the GPU and the read of
the loss. The tokens are random, distributed as words are. GiB is what each one's allocator took at most. Ours is
`python train_gpt2.py -e MODEL --dtype DTYPE -b B -x {STEPS} -v 0 -s 0`; plain is the same with `--plain 1`. PyTorch is
in the torch.compile mode and with the attention named, bf16 by autocast, with fused AdamW. The ratio is its time to
ours. The roofline is the FLOPs that a step needs at the measured rate of products, and then the bytes of our other
kernels at that of the copy. FLOPs are 6 for a weight and token, and attention's, half of it masked. The share is the
roofline's in our time."""
FASTER_TEXT = """The section Faster adds these to the plain device, one after the other. The last line is the trainer as
it is. From the third line on, algorithms are those that were chosen for it."""
KERNELS_TEXT = """Launched one by one between two events, which cost a little too, right behind {before} whole steps. A
launch's time is the median of {steps} steps, and "us each" is the median over a step's launches.{whole} A kernel's
bytes are those of its arrays, each of them once. What still lies in L2 comes faster than the copy. Matrix products
(M x N x K) and attention are counted in FLOPs: of attention those that the kernel does, also where it computes scores
again."""


def paragraph(text, **values):
    return textwrap.fill(" ".join(text.split()).format(**values), 120, break_long_words=False, break_on_hyphens=False)


def report(rows, ours, faster, torch, profiled, kernels, ceilings, command):
    """The Markdown that goes between the markers."""
    driver = "unknown"
    with contextlib.suppress(OSError, IndexError):
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True,
                                capture_output=True).stdout.split()[0]
    peers = [result for modes in torch.values() for result in modes.values() if isinstance(result, dict)]
    versions = [ceilings["versions"], f"Python {platform.python_version()}",
                *sorted({f"PyTorch {result['version']}" for result in peers})]
    rates = ", ".join(f"{dtype} {rate / 1e12:,.1f}" for dtype, rate in ceilings["rates"].items())
    parts = [f"## {datetime.date.today()}, {ceilings['gpu']} (driver {driver}), `{command}`",
             paragraph(CEILINGS_TEXT, versions=", ".join(versions), copy=ceilings["copy"] / 1e12, rates=rates)]
    if rows:
        tried = [f"- {row}: {' '.join(mode)}: {milliseconds(result)}"
                 for row in rows for mode, result in torch[row].items()]
        parts += [paragraph(STEPS_TEXT, T=T, STEPS=STEPS), "\n".join(step_table(rows, ours, faster, torch, ceilings)),
                  *[f"Ours, {row}: {ours[row]}" for row in rows if isinstance(ours[row], str)],
                  *(["All that was tried of PyTorch, ms:", "\n".join(tried)] if tried else [])]
    whole = {row: results for row, results in faster.items() if len(results) == len(FASTER)}
    if whole:
        parts += ["### What the section Faster saves", paragraph(FASTER_TEXT), "\n".join(faster_table(whole))]
    parts.append(f"### {profiled}, kernel by kernel")
    if isinstance(kernels, str):
        parts.append(kernels)
    else:
        whole = ours.get(profiled)
        whole = f" The whole step, as one graph, takes {whole['ms']:.2f} ms." if isinstance(whole, dict) else ""
        parts += [paragraph(KERNELS_TEXT, before=Recorder.HEAD_START, steps=PROFILED - 2, whole=whole),
                  "\n".join(kernel_table(profiled, kernels, ceilings)), f"![A step's time by kernel]({CHART})"]
    return "\n\n".join(parts)


def group_of(label):
    """The bar of the chart to which a kernel belongs."""
    return "matrix products" if label.startswith("matmul ") else "attention" if label in PRODUCTS else label


def chart(row, kernels, ceilings):
    """An SVG (bytes): a bar for each kernel, as long as its time in a step, dark up to what the ceiling would allow."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "train_gpt2", "font.size": 10,
                                "font.family": "sans-serif"})
    from matplotlib import pyplot

    bars = {}  # label: [ms, ms at the ceiling]
    for kernel in kernels:
        bar = bars.setdefault(group_of(kernel["label"]), [0, 0])
        bar[0] += kernel["ms"]
        bar[1] += 1e3 * kernel["work"] / ceiling_of(kernel, row, ceilings)
    labels = sorted(bars, key=lambda label: bars[label][0])
    total = sum(ms for ms, _ in bars.values())
    figure, axes = pyplot.subplots(figsize=(8.8, 0.9 + 0.27 * len(labels)), layout="constrained")
    for y, label in enumerate(labels):
        ms, least = bars[label]
        dark, light = {"matrix products": ("#1f5fa8", "#b7cfe9"), "attention": ("#b4531a", "#f0cdb5")}.get(
            label, ("#3d7d43", "#c2dfc4"))
        axes.barh(y, ms, color=light, height=0.72)
        axes.barh(y, min(least, ms), color=dark, height=0.72)
        axes.annotate(f"{ms:.2f} ms, {ms / total:.1%}", (ms, y), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlim(0, 1.3 * max(ms for ms, _ in bars.values()))
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_title(f"GPT-2 {row}, T={T}: {total:.1f} ms of kernels a step, {ceilings['gpu']}", loc="left", fontsize=11)
    axes.set_xlabel("ms a step; dark: what it would take at the measured copy bandwidth or matrix product rate")
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})  # white behind it, so that it reads on a dark page too
    return svg.getvalue()


def main():
    """Everything from the flags to the files. Raises UserError."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", metavar="REGEX", default="", help="only the rows of the table of steps whose name "
                       f"matches (default: all): {'; '.join(map(str, ROWS))}")
    flags.add_argument("--no-torch", action="store_true", help="without PyTorch")
    flags.add_argument("-e", "--model", default="d12", help="of the table of kernels (default: d12)")
    flags.add_argument("--dtype", choices=("fp32", "tf32", "bf16", "fp8"), default="bf16",
                       help="its dtype (default: bf16)")
    flags.add_argument("-b", "--batch-size", type=int, default=32, help="its B (default: 32)")
    flags.add_argument("--minutes", type=float, default=10, help="run nothing of PyTorch beyond as many "
                       "(default: 10); each row's first mode comes before any second")
    flags.add_argument("--out", metavar="FILE", help=f"write there, and {CHART} beside it, what would be written to "
                       f"dev/{RESULTS.name}")
    flags.add_argument("--job", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if not has_gpu():
        raise UserError("NVIDIA's driver reports no GPU, and only a GPU is measured here: check nvidia-smi")
    if given.job:
        name, *arguments = json.loads(given.job)
        if name != "ceilings":
            arguments[0] = Row(*arguments[0])
        print(json.dumps(JOBS[name](*arguments)))
        return

    start, out = time.perf_counter(), Path(given.out) if given.out else RESULTS
    before = RESULTS.read_text(encoding="utf-8")
    if [before.count(marker) for marker in MARKERS] != [1, 1]:
        raise UserError(f"{RESULTS}: expected {' and '.join(MARKERS)}, once each, where the tables are to stand")
    try:
        import matplotlib  # noqa: F401  (to know before, not after, all is measured)
    except ImportError:
        raise UserError("matplotlib is not installed, and the chart needs it: "
                        "pip install -r dev/requirements.txt") from None
    try:
        wanted = [row for row in ROWS if re.search(given.rows, str(row))]
    except re.error as e:
        raise UserError(f"--rows {given.rows}: not a regular expression ({e})") from None
    names = {name for _, name, *_ in [*train_gpt2.FLAGS, *FEATURE_FLAGS]}
    rows = [row for row in wanted if names.issuperset(flag for flag in row.flags if flag.startswith("-"))]
    print("".join(f"{row}: left out, train_gpt2.py has no such flag\n" for row in wanted if row not in rows), end="")
    of_kernels = given.model, given.dtype, given.batch_size
    profiled = next((row for row in ROWS if (*row[:3], row.flags) == (*of_kernels, ())), Row(*of_kernels, modes=()))
    check_tables()

    with tempfile.TemporaryDirectory() as folder:
        tokens = f"{folder}/tokens.bin"
        write_words(tokens, 2**18 + 1)
        ceilings = run_job("ceilings", sorted({row.dtype for row in [*rows, profiled]}))
        if isinstance(ceilings, str):
            raise UserError(f"the ceilings could not be measured: {ceilings}")
        ours = {row: run_job("ours", row, tokens) for row in rows}
        faster = {row: [] for row in rows if row in PLAIN_TOO}
        for row, results in faster.items():
            for count in range(len(FASTER) if row.dtype == "bf16" else 1):
                results.append(run_job("faster", row, count, tokens))
        kernels = run_job("kernels", profiled, tokens)
        torch, peers = {row: {} for row in rows}, {}
        for i in range(0 if given.no_torch else max((len(row.modes) for row in rows), default=0)):
            for row in rows:
                if i < len(row.modes):
                    left, peer = start + 60 * given.minutes - time.perf_counter(), (*row[:3], row.modes[i])
                    if peer not in peers:  # it knows nothing of our flags
                        peers[peer] = run_job("torch", row, *row.modes[i], tokens, timeout=min(TIMEOUT, left))
                    torch[row][row.modes[i]] = peers[peer]

    command = shlex.join(["python", "dev/tools/benchmark.py", *sys.argv[1:]])
    text = report(rows, ours, faster, torch, profiled, kernels, ceilings, command)
    print(f"\n{text}\n")
    head, tail = before.split(MARKERS[0])[0], before.split(MARKERS[1])[1]
    replace_file(out, [f"{head}{MARKERS[0]}\n{text}\n{MARKERS[1]}{tail}".encode()])
    print(f"wrote {out}")
    if not isinstance(kernels, str):
        replace_file(out.parent / CHART, [chart(profiled, kernels, ceilings)])
        print(f"wrote {out.parent / CHART}")


if __name__ == "__main__":
    run(main)
