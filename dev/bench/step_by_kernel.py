"""A training step, kernel by kernel: how long each launch takes, and the bytes or FLOPs it needs.
dev/bench/benchmark.py writes the table, dev/tools/draw.py draws the chart."""
import contextlib
import re
import sys
from types import SimpleNamespace

import numpy as np

from dev.common.cuda_source import parameters_of
from dev.features import order
from dev.features.devices import FastCuda
from dev.llama3.train_llama3 import Config3
from train_gpt2 import UserError, read_kernels

SOURCES = [*Config3.SOURCES, *order.SOURCES]

# A kernel's bytes are those of its arrays, each counted once: read if the parameter is const, else
# written. There are three kinds of exceptions. These arrays are both read and written, and count
# twice:
READ_TOO = {
    "encoder_backward_wte.dwte", "layernorm_backward.dresidual", "gelu_backward.dinp",
    "fused_classifier.logits", "smoothed_classifier.logits", "rmsnorm_backward.dresidual",
    "rope_forward.qkv", "rope_backward.dqkv", "average_parameters.average",
    "scale_by_counted.grads", "adamw.params", "adamw.low", "adamw.m", "adamw.v",
    "adamw_bf16.params", "adamw_bf16.low", "adamw_bf16.m", "adamw_bf16.v",
}
# Of these arrays the kernel touches other bytes than each once: only some, or all of them twice if
# there is a branch to add. a: its arguments by name, its items (along x, along y), and words, the
# number of distinct tokens in a batch.
TOUCHED = {
    "encoder_forward.wte": lambda a: a.words * a.C * a.wte.itemsize,
    "encoder_backward_wte.dwte": lambda a: a.words * a.C * a.dwte.itemsize,
    "residual_layernorm_forward.x": lambda a: a.x.nbytes * (1 if a.branch is None else 2),
    "residual_rmsnorm_forward.x": lambda a: a.x.nbytes * (1 if a.branch is None else 2),
    "rope_forward.qkv": lambda a: a.items[0] * a.qkv.itemsize,
    "rope_backward.dqkv": lambda a: a.items[0] * a.dqkv.itemsize,
    "layernorm_backward.partials": lambda a: a.items[0] * a.partials[:, 0].nbytes,
    "matmul_backward_bias.partials": lambda a: 4 * a.items[1] * a.OC,
    "add_partials.partials": lambda a: 4 * a.items[1] * a.blocks * a.C,
    "sum_rows.sums": lambda a: 4 * a.items[1] * a.OC,
    "add_all_partials.partials": lambda a: 4 * 3 * a.blocks * a.C,
    "add_all_partials.sums": lambda a: 4 * a.rows * a.OC,
    "gelu_backward_to_fp8.sums": lambda a: -(-a.R // 128) * a.C * 4,
}
# FP8 and fused_biases.py pass the output of these kernels by value, in a struct. The argument named
# here is as large.
OUTPUT_LIKE = {"residual_layernorm_forward": "copy", "layernorm_backward": "dout",
               "gelu_forward": "inp", "gelu_backward": "inp"}
# Attention is counted in FLOPs: each kernel's number of products of a (T,T) and a (T,HS) matrix, of
# which half is masked.
OWN_PRODUCTS = {"matmul_gelu": "GELU", "matmul_dgelu": "GELU's gradient",
                "matmul_gelu_fp8": "GELU's twins", "matmul_dgelu_fp8": "its gradient's twins"}
PRODUCTS = {"attention_forward": 2, "attention_backward_q": 3, "attention_backward_kv": 4,
            "attention_backward_five": 5, "attention_forward_pipeline": 2}


class Recording:
    """A mixin for a device: it notes the launches of each step and, if timed, the events before and
    after each of them.

    A step is whatever goes through repeat. A timed step is not launched as a graph. Instead its
    launches queue up behind a few graphs of the same step. So the GPU runs at the clock of a real
    step, and the host is far enough ahead not to affect the times.
    """
    timed = False
    notes = None  # the launches of the current step: (name, items, arguments), event before, after
    steps = []  # the notes of all steps
    HEAD_START = 4  # graphs in front of a timed step

    def event(self):
        if self.timed:
            return self.cupy.cuda.get_current_stream().record(self.cupy.cuda.Event())

    @contextlib.contextmanager
    def noted(self, name, items, arguments):
        notes, self.notes = self.notes, None  # launches inside belong to it, as a product's GELU
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

    def product(self, out, a, b, *arguments):
        with self.noted("matmul", None, (out, a, b)):
            super().product(out, a, b, *arguments)

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


class Recorder(Recording, FastCuda):
    """The trainer's device, recording."""


def recorded_steps():
    """The launches of each step that launched anything. A step replayed as a graph does not."""
    steps = [step for step in Recording.steps if step]
    if not steps:
        raise UserError("train_gpt2.py launched nothing within repeat, where Recording listens")
    return steps


def check_tables():
    """Warn on stderr about rows of the tables above whose kernel or parameter is gone."""
    kernels = read_kernels(SOURCES)
    known = {f"{kernel}.{name}" for kernel in kernels
             for name, *_ in parameters_of(kernels[kernel])} | set(kernels)
    needed = {f"{key.split('.')[0]}.{name}" for key, formula in TOUCHED.items()
              for name in formula.__code__.co_names
              if name not in ("words", "items", "itemsize", "nbytes")}
    needed |= {f"{kernel}.{name}" for kernel, name in OUTPUT_LIKE.items()}
    for stale in sorted((READ_TOO | set(TOUCHED) | needed | {*PRODUCTS, *OWN_PRODUCTS}) - known):
        print(f"WARNING: dev/bench/step_by_kernel.py has a row for {stale}, which no kernel has",
              file=sys.stderr)


def work_of(what, c, B, T, words, kernels):
    """The work of a launch: (label, unit, amount). The unit is "FLOP" for matrix products and
    attention, else "B", bytes."""
    name, items, arguments = what
    if name == "matmul":
        out, a = arguments[:2]
        M, N, K = *out.shape[-2:], a.shape[-1]
        return f"matmul {M} x {N} x {K}", "FLOP", 2 * out.size * K
    if name in OWN_PRODUCTS:
        M, N, K = arguments[-3:]
        return f"matmul {M} x {N} x {K} + {OWN_PRODUCTS[name]}", "FLOP", 2 * M * N * K
    if name == "memset":
        return name, "B", arguments[0].nbytes
    if name in PRODUCTS:
        return name, "FLOP", PRODUCTS[name] * B * T * T * c.C
    total, parameters = 0, parameters_of(kernels[name])
    a = SimpleNamespace(items=items, words=words,
                        **{p[0]: v for p, v in zip(parameters, arguments)})
    for (parameter, _, array, const), value in zip(parameters, arguments):
        if array and value is not None:
            key, twin = f"{name}.{parameter}", 0
            if value.dtype.kind == "V":
                like = getattr(a, OUTPUT_LIKE[name])
                in_fp8 = value.nbytes > 16 and value.view(np.uint64)[1]  # see fp8_output.cuh
                twin, value = like.size if in_fp8 else 0, like
            touched = value.nbytes
            with contextlib.suppress(AttributeError):  # a row that check_tables warns about
                touched = TOUCHED[key](a) if key in TOUCHED else touched
            total += touched * (2 if key in READ_TOO and not const else 1) + twin
    return name, "B", total


def work_of_step(step, c, B, T, words):
    """work_of for each launch of a recorded step."""
    kernels = read_kernels(SOURCES)
    return [work_of(what, c, B, T, words, kernels) for what, *_ in step]


def by_label(work, times):
    """The launches of a step grouped by label, the slowest group first: [{label, unit, number of
    launches, us of the median launch, total ms, total work}]. times: ms of each launch."""
    launches = {}
    for (label, unit, amount), ms in zip(work, times):
        launches.setdefault((label, unit), []).append((float(ms), int(amount)))
    table = []
    for (label, unit), pairs in launches.items():
        of_each, amounts = zip(*pairs)
        table.append(dict(label=label, unit=unit, launches=len(pairs), ms=sum(of_each),
                          us=1e3 * float(np.median(of_each)), work=sum(amounts)))
    return sorted(table, key=lambda kernel: -kernel["ms"])


def timed_step():
    """(launches of a step, ms of each): medians over the timed steps except the first two."""
    import cupy
    steps = recorded_steps()[2:]
    if len({tuple(what[0] for what, *_ in step) for step in steps}) > 1:
        raise UserError("the steps of train_gpt2.py launch different kernels, which cannot be "
                        "averaged")
    ms = [[cupy.cuda.get_elapsed_time(*events) for _, *events in step] for step in steps]
    return steps[0], np.median(ms, axis=0)


def read_table(text):
    """(title, [(label, ms, share of the ceiling)]) of the table of kernels in dev/RESULTS.md."""
    found = re.search(r"^### ([^\n]*), kernel by kernel$(.*?)^\| all ", text, re.M | re.S)
    rows = re.findall(r"^\| (\w.*?) \| \d+ \| [\d.]+ \| ([\d.]+) \| .*\| ([\d.]+)% \|$",
                      found[2] if found else "", re.M)
    if not rows:
        raise UserError("dev/RESULTS.md: has no table of kernels; expected one that "
                        "dev/bench/benchmark.py wrote")
    return found[1], [(label, float(ms), float(share) / 100) for label, ms, share in rows]
