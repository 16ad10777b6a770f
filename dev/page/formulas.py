"""The trainer's own tables and formulas as data: the page computes with them what --dry-run prints.

The tables are asked for with letters in place of sizes. A Letter notes what is done with it, so a
tensor's bytes become an expression such as ["*", 4, ["*", "N", "C"]], which the page evaluates.
"""
import builtins
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.bench.step_by_kernel import read_table
from dev.common.config import Config
from dev.common.gpus import GPUS, digits
from dev.features import moments, recompute
from dev.features.feature import stack
from dev.features.dry_run import SHARE, flops_again
from dev.features.peak import FLOPS_PER_CLOCK, flops_per_token
from dev.features.base import GPT2
from train_gpt2 import BF16, HERE, UserError, offsets

SIZES = "maxT", "V", "L", "NH", "C", "Vp"


class Letter:
    """A size that is not known yet, or what was computed from some."""

    def __init__(self, tree):
        self.tree = tree

    def __float__(self):
        return 1.0  # of the first parameters' deviations, which no size depends on

    def __neg__(self):
        return Letter(["-", 0, self.tree])


def tree_of(x):
    return x.tree if isinstance(x, Letter) else int(x)


def operation(sign, swapped=False):
    def of_two(one, other):
        if swapped:
            one, other = other, one
        return Letter([sign, tree_of(one), tree_of(other)])
    return of_two


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//")):
    setattr(Letter, f"__{_name}__", operation(_sign))
    setattr(Letter, f"__r{_name}__", operation(_sign, swapped=True))


def with_letters(sign, plain):
    """max or min, which also takes Letters."""
    def choose(*values, **more):
        if not any(isinstance(value, Letter) for value in values):
            return plain(*values, **more)
        return Letter([sign, *map(tree_of, values)])
    return choose


def in_letters(work):
    """work() in which max and min take Letters."""
    with mock.patch.object(builtins, "max", with_letters("max", max)), \
         mock.patch.object(builtins, "min", with_letters("min", min)):
        return work()


RECOMPUTE = {0: (), 1: (recompute.RecomputeInside,), 2: (recompute.RecomputeLayers,)}
MOMENTS = {"fp32": (), "bf16": (moments.Bf16Moments,)}
REAL = {"fp32": np.float32, "bf16": BF16}


def model_class(level, moments_dtype):
    """The model with --recompute and --moments."""
    return stack(GPT2, [*MOMENTS[moments_dtype], *RECOMPUTE[level]])


def tables_in_letters():
    """{"dtype recompute moments": {arena: {"total": bytes, "tensors": {name: bytes}}}}."""
    c = Config(**{name: Letter(name) for name in SIZES})
    B, T = Letter("B"), Letter("T")
    found = {}
    for dtype, level, of_moments in itertools.product(REAL, RECOMPUTE, MOMENTS):
        tables = model_class(level, of_moments).tables(c, SimpleNamespace(real=REAL[dtype]), B, T)
        found[f"{dtype} {level} {of_moments}"] = {
            arena: dict(total=tree_of(offsets(table)[-1]),
                        tensors={row.name: tree_of(row.nbytes) for row in table})
            for arena, table in tables.items()}
    return found


def formulas():
    """What the page computes with: {"tables", "parameters", "flops" and "again" of a token}."""
    c = Config(**{name: Letter(name) for name in SIZES})

    def all_of_them():
        return dict(tables=tables_in_letters(),
                    parameters=tree_of(sum(row.size for row in c.parameter_table())),
                    flops=tree_of(flops_per_token(c, Letter("T"))), again=tree_of(flops_again(c)))
    return in_letters(all_of_them)


def value_of(tree, sizes):
    """The value of an expression, as the page computes it."""
    if isinstance(tree, str):
        return sizes[tree]
    if not isinstance(tree, list):
        return tree
    sign, *parts = tree
    values = [value_of(part, sizes) for part in parts]
    if sign in ("max", "min"):
        return {"max": max, "min": min}[sign](values)
    one, other = values
    return {"+": one + other, "-": one - other, "*": one * other,
            "//": one // other if other else 0}[sign]


def measured():
    """What dev/RESULTS.md says of the 124M step: {title, gpu, commit, rate (FLOP/s of a large
    product), copy (bytes/s), step (ms), rows: [{name, launches, ms, work, unit, share}]}."""
    text = (HERE / "dev/RESULTS.md").read_text("utf-8")
    title, shares = read_table(text)
    head = re.search(r"^## (\S+), one (.+?), commit (\w+)$", text, re.M)
    rates = re.search(r"bf16 (\d+)\s+TFLOP/s\).*?rate of a copy \(([\d.]+)\s+TB/s\)", text, re.S)
    whole = re.search(r"As one graph the step takes ([\d.]+) ms", text)
    if not (head and rates and whole):
        raise UserError("dev/RESULTS.md: its first section lacks the rates of a product and of a "
                        "copy, or the time of a step; dev/bench/benchmark.py writes them")
    rows = re.findall(r"^\| (\w.*?) \| (\d+) \| [\d.]+ \| ([\d.]+) \| [\d.]+% \| ([\d.e-]+) "
                      r"(GFLOP|GB) \| [\d.]+ TF?[LOPB/s]+ \| \d+% \|$", text, re.M)
    share = {name: part for name, _, part in shares}
    if {row[0] for row in rows} != {*share}:
        raise UserError("dev/RESULTS.md: the table of kernels has rows without a rate")
    return dict(title=title, gpu=head[2], day=head[1], commit=head[3],
                rate=float(rates[1]) * 1e12, copy=float(rates[2]) * 1e12, step=float(whole[1]),
                rows=[dict(name=name, launches=int(launches), ms=float(ms),
                           work=float(work) * 1e9, unit=unit, share=share[name])
                      for name, launches, ms, work, unit in rows])


def gpus():
    """[{name, memory, flops: {dtype: FLOPs a clock}}] of all GPUs that dev/ knows."""
    return [dict(name=gpu.name, memory=gpu.memory, flops={
        dtype: count * gpu.multiprocessors
        for dtype, count in FLOPS_PER_CLOCK[int(digits(capability))].items()})
            for capability, gpu in GPUS.items()]


def exported():
    """All that the page's parts on memory, time and other models need."""
    return dict(formulas=formulas(), measured=measured(), gpus=gpus(), share=SHARE["cuda"])
