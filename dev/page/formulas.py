"""The trainer's own tables and formulas as data: the page computes with them what --dry-run prints.

The tables are asked for with letters in place of sizes. A Letter notes what is done with it, so a
tensor's bytes become an expression such as "4*(N*C)", which JavaScript and Python both understand.
"""
import builtins
import contextlib
import itertools
import math
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.bench.step_by_kernel import read_table
from dev.common.config import Config
from dev.common.gpus import GPUS, digits
from dev.features import muon, order
from dev.features.base import GPT2
from dev.features.dry_run import SHARE, flops_again
from dev.features.peak import FLOPS_PER_CLOCK, flops_per_token
from train_gpt2 import BF16, HERE, UserError, offsets

SIZES = "maxT", "V", "L", "NH", "C", "Vp"  # G: the number of GPUs


class Letter:
    """A size that is not known yet, or what was computed from some. The page's sizes divide: heads
    the channels, 32 the channels, GPUs the layers and 32. So a remainder is 0."""
    compared = []  # (one, other) of the comparisons so far, all of which were said to be true

    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        return isinstance(other, Letter) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    def __float__(self):
        return 1.0  # of the first parameters' deviations, which no size depends on

    def __neg__(self):
        return Letter(f"(-{self.text})")

    def __add__(self, other):
        return self if other == 0 else Letter(f"({self.text}+{text_of(other)})")

    def __sub__(self, other):
        return Letter(f"({self.text}-{text_of(other)})")

    def __mul__(self, other):
        one, many = self.text, text_of(other)
        if whole := re.fullmatch(rf"Math\.floor\((\w+)/{re.escape(one)}\)", many):
            return Letter(whole[1])  # NH * (C // NH)
        return 0 if many == "0" else self if many == "1" else Letter(f"({one}*{many})")

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other):
        count = text_of(other)
        return 1 if self.text == count else Letter(f"Math.floor({self.text}/{count})")

    def __rfloordiv__(self, other):
        return Letter(f"Math.floor({other}/{self.text})")

    def __mod__(self, other):
        return 0

    def __divmod__(self, other):
        return self // other, 0

    def __lt__(self, other):
        return len(self.text) < len(other.text)  # of Muon's matrices: C, and not 4C

    def __gt__(self, other):
        self.compared.append((self, other))
        return True


def text_of(x):
    return x.text if isinstance(x, Letter) else str(int(x))


def with_letters(name):
    """max, min or range, which also takes Letters. Of such a range only the first number matters:
    that of Muon's first batch, its largest."""
    plain = getattr(builtins, name)

    def work(*values, **more):
        values = [*values[0]] if len(values) == 1 and name != "range" else values
        if not any(isinstance(value, Letter) for value in values):
            return plain(values, **more) if name != "range" else plain(*values)
        return [0] if name == "range" else Letter(f"Math.{name}({','.join(map(text_of, values))})")
    return work


@contextlib.contextmanager
def letters():
    """Inside, max, min and range take Letters."""
    names = "max", "min", "range"
    with mock.patch.multiple(builtins, **{name: with_letters(name) for name in names}):
        yield


CHOICES = dict(dtype=("fp32", "bf16", "fp8"), recompute=(0, 1, 2), moments=("fp32", "bf16"),
               optimizer=("adamw", "muon"), zero=(0, 1))


def flags_of(**chosen):
    """The trainer's flags for some choices."""
    return [x for name, value in chosen.items() for x in (f"--{name}", str(value))]


def model_class(chosen, ranks=1):
    """The model of a training with these choices, on a CPU; of several ranks without slots, whose
    pieces are no formulas. Raises UserError."""
    flags, table = order.read_flags(flags_of(**chosen, device="cpu"), GPT2)
    flags.sample_every = 0  # whose cache is not a training's
    group = SimpleNamespace(count=ranks, rank=1, peers=None, apart="") if chosen["zero"] else None
    return order.classes_of(flags, table, GPT2, group)[1]


def device_of(chosen):
    """A device as far as tables ask for one."""
    return SimpleNamespace(real=np.float32 if chosen["dtype"] == "fp32" else BF16, name="cpu",
                           dtype=chosen["dtype"], hopper=False)


def arenas_of(model, device, c):
    """[[arena, bytes, {tensor: bytes}]] of a model, as expressions."""
    with letters():
        del Letter.compared[:]
        tables = model.tables(c, device, Letter("B"), Letter("T"))
        found = [[arena, text_of(offsets(table)[-1]),
                  {row.name: text_of(row.nbytes) for row in table}]
                 for arena, table in tables.items()]
    for needed, room in Letter.compared:  # Muon's workspace, unless the logits have room for it
        for arena in found:
            if arena[0] == "muon":
                arena[1:] = [f"({text_of(needed)}>{text_of(room)})*{text}" if i == 0 else text
                             for i, text in enumerate(arena[1:])]
    return found


def formulas():
    """What the page computes with: "tables", indices of "arenas" by choices, or why the trainer
    refuses them; "parameters"; "flops" and "again", of a token; "muon", FLOPs of an update."""
    c = Config(**{name: Letter(name) for name in SIZES})
    arenas, tables = [], {}
    for values in itertools.product(*CHOICES.values()):
        chosen = dict(zip(CHOICES, values))
        try:
            own = arenas_of(model_class(chosen, Letter("G")), device_of(chosen), c)
        except UserError as e:
            tables[" ".join(map(str, values))] = str(e)
            continue
        arenas += [arena for arena in own if arena not in arenas]
        tables[" ".join(map(str, values))] = [arenas.index(arena) for arena in own]
    with letters():
        groups = muon.groups_of(muon.parts_of(c))
        update = sum(muon.Orthogonal().flops_of(sum(part.count for part in parts), *shape)
                     for shape, parts in groups.items())
        return dict(arenas=arenas, tables=tables, flops=text_of(flops_per_token(c, Letter("T"))),
                    parameters=text_of(sum(row.size for row in c.parameter_table())),
                    again=text_of(flops_again(c)), muon=text_of(update))


# ---- What was measured


CONSTANT = "adamw", "global_norm", "judge", "add_all_partials", "memset"  # whatever B and T are
ATTENTION = {  # arrays (N,C) that it reads and writes: q, k, v, the output, and gradients of some
    "attention_forward": 3 + 1, "attention_forward_pipeline": 3 + 1,
    "attention_backward_q": 3 + 1 + 1 + 1, "attention_backward_kv": 3 + 1 + 2}


def facts_of(label, launches, c, B, T):
    """Of a row of the measured step, whose dtype is bf16: how its work "grows", with the tokens N,
    with N*T or not; the "bytes" of a product's matrices, or of attention's arrays; "again", the
    share of its launches that --recompute 2 makes once more; whether it can be "fp8"."""
    N, C = B * T, c.C
    again = {f"matmul {N} x {3 * C} x {C}": c.L, f"matmul {N} x {C} x {C}": c.L,
             f"matmul {N} x {4 * C} x {C} + GELU": c.L, "residual_layernorm_forward": 2 * c.L}
    shape = [int(size) for size in re.findall(r"\d+", label)] if "matmul" in label else []
    numbers = sum(math.prod(shape) // size for size in shape) or N * C * ATTENTION.get(label, 0)
    return dict(grows="N*T" if label in ATTENTION else "1" if label in CONSTANT else "N",
                bytes=2 * numbers, again=again.get(label, 0) / launches,
                fp8=len(shape) == 3 and not label.endswith(f"{c.Vp} x {C}"))


def measured():
    """What dev/RESULTS.md says of the 124M step: {title, gpu, day, commit, rate (FLOP/s of a large
    product), copy (bytes/s), step (ms), steps: {GPU: ms of the newest such step}, sizes, and rows:
    [{name, launches, ms, work, unit, share (of the ceiling), and facts_of it}]}."""
    text = (HERE / "dev/RESULTS.md").read_text("utf-8")
    title, shares = read_table(text)
    head = re.search(r"^## (\S+), one (.+?), commit (\w+)$", text, re.M)
    rates = re.search(r"bf16 (\d+)\s+TFLOP/s\).*?rate of a copy \(([\d.]+)\s+TB/s\)", text, re.S)
    whole = re.search(r"As one graph the step takes ([\d.]+) ms", text)
    sizes = re.fullmatch(r"124M bf16 B=(\d+)", title)
    if not (head and rates and whole and sizes):
        raise UserError("dev/RESULTS.md: its first section lacks the rates of a product and of a "
                        "copy, or the time of a step; dev/bench/benchmark.py writes them")
    rows = re.findall(r"^\| (\w.*?) \| (\d+) \| [\d.]+ \| ([\d.]+) \| [\d.]+% \| ([\d.e-]+) "
                      r"(GFLOP|GB) \| [\d.]+ TF?[LOPB/s]+ \| \d+% \|$", text, re.M)
    share = {name: part for name, _, part in shares}
    if {row[0] for row in rows} != {*share}:
        raise UserError("dev/RESULTS.md: the table of kernels has rows without a rate")
    c, B, T = Config(), int(sizes[1]), 1024
    steps = {head[2].split()[1]: float(whole[1])}
    for gpu, ms in re.findall(r"one (H\d+) in one call.*?^\| " + title + r" \| ([\d.]+) ", text,
                              re.M | re.S):
        steps.setdefault(gpu, float(ms))
    return dict(title=title, gpu=head[2], day=head[1], commit=head[3], steps=steps,
                rate=float(rates[1]) * 1e12, copy=float(rates[2]) * 1e12, step=float(whole[1]),
                sizes=dict(L=c.L, NH=c.NH, HS=c.C // c.NH, V=c.V, B=B, T=T),
                rows=[dict(name=name, launches=int(launches), ms=float(ms),
                           work=float(work) * 1e9, unit=unit, share=share[name],
                           **facts_of(name, int(launches), c, B, T))
                      for name, launches, ms, work, unit in rows])


# NVIDIA's figure of the H200, which else is an H100
OTHERS = {"H200": ("H100", 141 * 10**9)}


def gpus(steps):
    """[{name, memory, flops: {dtype: FLOPs a clock}}] of all GPUs that dev/ knows; of one that only
    a step was measured on, those of its like, times their measured steps."""
    found = {gpu.name: dict(name=gpu.name, memory=gpu.memory, flops={
        dtype: count * gpu.multiprocessors
        for dtype, count in FLOPS_PER_CLOCK[int(digits(capability))].items()})
             for capability, gpu in GPUS.items()}
    for name, (like, memory) in OTHERS.items():
        if name in steps and like in steps:
            faster = steps[like] / steps[name]
            found[name] = dict(name=name, memory=memory, flops={
                dtype: count * faster for dtype, count in found[like]["flops"].items()})
    return [*found.values()]


def exported():
    """All that the page's parts on memory, time and other models need."""
    known = measured()
    return dict(formulas=formulas(), measured=known, gpus=gpus(known["steps"]),
                share=SHARE["cuda"], choices=CHOICES)
