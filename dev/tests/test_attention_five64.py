"""Test attention's gradient with five products for heads of 64 channels,
dev/features/hopper/attention_five64.cu."""
import functools
import os
from unittest import mock

import numpy as np

from dev.common.gpus import capability
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.devices import device_class
from dev.features.feature import stack
from dev.features.fused_biases import SOURCE as FUSED, SummedOutputs
from dev.features.hopper import attention_five64
from dev.features.hopper.attention_five64 import (
    HS, KERNEL, five_table, launch_delta, launch_five)
from dev.lab import heads
from dev.lab.bench import Bench
from dev.lab.ladder import Ladder, SwitchedConfig, Version, parse_sizes
from dev.tests.checks import check
from dev.tests.hopper import check_hopper, in_float64, sums_of_rows
from dev.tests.models import AS_HOPPER
from train_gpt2 import UserError

CXXFLAGS = AS_HOPPER
CHECKS = ("B=1,T=1,NH=3,NKV=1", "B=2,T=33,NH=3,NKV=3", "B=1,T=128,NH=1,NKV=1",
          "B=1,T=200,NH=4,NKV=2", "B=2,T=300,NH=3,NKV=3", "B=1,T=140,NH=2,NKV=2,cold=1",
          "B=1,T=520,NH=3,NKV=3")
RACE_SIZES = ("B=1,T=150,NH=3,NKV=3",)


def runs_on(device_name):
    return device_name != "cuda" or capability() == 90


def scratch(a):
    sizes = {row.name: row.shape for row in five_table(a.B, a.T, a.NH)}
    return sizes | dict(sums=(a.B, -(-a.T // 64), a.NH + 2 * a.NKV, HS))


def run(device, a):
    a.turns = a.turns.view(np.int32)
    qkv, dout = (x.reshape(a.B * a.T, -1) for x in (a.qkv, a.dout))
    device.column_sums = a.sums
    launch_delta(device, a, a.lse, a.out, a.dout, a.B, a.T, a.NH)
    launch_five(device, a, a.dqkv, qkv, dout, a.scale, a.B, a.T, a.NH, a.NKV)
    device.column_sums = None


VERSION = Version("five products", run, threads=(), scratch=scratch)


def problem(draw, B, T, NH, NKV, cold=0):
    return heads.backward_problem(draw, B, T, NH, NKV, HS=HS, cold=cold)


LADDER = Ladder(problem, "B=8,T=1024,NH=12,NKV=12", CHECKS, (VERSION,),
                fp32="lse delta dq stats sums turns", sums="dqkv", limits=heads.ATTENTION_LIMITS)


@functools.cache
def make(name, group, sources=attention_five64.SOURCES, flags=AS_HOPPER):
    """A device for heads of 64 channels. Raises UserError unless it is Hopper, or a CPU like it."""
    check_hopper(name, attention_five64.SOURCE)
    c, kind = SwitchedConfig(C=128, NH=2, group=group), device_class(name)
    if name == "emulated":
        kind = type("Few", (Emulated,), dict(__init__=functools.partialmethod(
            Emulated.__init__, only={KERNEL, f"{KERNEL}_delta"})))
    return stack(kind, [SummedOutputs])("bf16", c, [FUSED, *sources])


def checked(name, text, *how):
    """(whether the results are right at a size, what is said)."""
    sizes = parse_sizes(text)
    device = make(name, sizes["NH"] // sizes["NKV"], *how)
    try:
        bench = Bench(LADDER, device, sizes)
        found = bench.check(VERSION, {})
        a = bench.given
        dqkv, of_blocks = in_float64(device, bench.sets[0].dqkv, bench.scratch.sums)
        for b, rows in enumerate(dqkv.reshape(a.B, a.T, -1)):
            wish, sums = sums_of_rows(rows, 64), of_blocks[b].reshape(-1, rows.shape[1])
            assert (abs(sums - wish) <= 1e-5 * sums_of_rows(abs(rows), 64)).all(), "sums"
        return found.place is None, str(found)
    except (AssertionError, UserError) as e:
        return False, str(e)


def test_results(device_name):
    """dqkv and its sums, at odd sizes and with heads that share keys."""
    large = "B=4,T=1000,NH=12,NKV=12", "B=2,T=2048,NH=32,NKV=8"
    for text in CHECKS + large * (device_name == "cuda"):
        check(f"five products {text}", *checked(device_name, text))


def wrong(sources=attention_five64.SOURCES, race=False):
    """The first wrong result of these sources, or what a CPU says, or "". race: look for races."""
    flags = f"{AS_HOPPER} {races.FLAG}" if race else AS_HOPPER
    with mock.patch.dict(os.environ, CXXFLAGS=flags):
        results = (checked("emulated", text, tuple(sources), flags)
                   for text in (RACE_SIZES if race else CHECKS))
        return next((said or "wrong" for right, said in results if not right), "")
