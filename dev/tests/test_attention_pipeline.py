"""Test attention's forward pass in a pipeline, dev/features/hopper/attention_pipeline.cu, for heads
of 64 channels.

On a Hopper GPU: also at a size where its blocks have many turns.
"""
import functools
import os
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common import gpus
from dev.common.gpus import capability
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features.base import Training
from dev.features.devices import device_class
from dev.features.hopper import attention_pipeline
from dev.features.hopper.attention_pipeline import (
    KERNEL, PipelinedForward, is_faster, launch_forward)
from dev.features.order import FEATURES
from dev.lab import heads
from dev.lab.bench import Bench
from dev.lab.ladder import Ladder, SwitchedConfig, Version, parse_sizes
from dev.tests.checks import EXACT, check
from dev.tests.hopper import check_hopper
from dev.tests.models import AS_HOPPER, check_compiled
from train_gpt2 import UserError

CXXFLAGS = AS_HOPPER
# Slabs without queries, several turns of 4 blocks on a CPU, and a block in the middle
CHECKS = ("B=1,T=1,NH=3,NKV=1", "B=2,T=33,NH=3,NKV=3", "B=1,T=64,NH=1,NKV=1",
          "B=2,T=150,NH=9,NKV=3", "B=1,T=520,NH=3,NKV=3")
RACE_SIZES = ("B=1,T=70,NH=9,NKV=9",)


def runs_on(device_name):
    return device_name != "cuda" or capability() == 90


def run(device, a):
    launch_forward(device, a.out, a.lse, a.qkv.reshape(a.B * a.T, -1), a.scale, a.B, a.T, a.NH)


VERSION = Version("in a pipeline", run, threads=())
LADDER = Ladder(functools.partial(heads.forward_problem, HS=64, with_lse=1), "B=8,T=1024,NH=12",
                CHECKS, (VERSION,), fp32="lse", sums="out lse", limits=heads.ATTENTION_LIMITS,
                limits_of=dict(lse=heads.LSE_LIMITS))


@functools.cache
def make(name, group, sources=attention_pipeline.SOURCES, flags=AS_HOPPER):
    """A device for heads of 64 channels. Raises UserError unless it is Hopper, or a CPU like it."""
    check_hopper(name, attention_pipeline.SOURCE)
    c, kind = SwitchedConfig(C=128, NH=2, group=group), device_class(name)
    if name == "emulated":
        kind = functools.partial(Emulated, only={KERNEL, "attention_forward"})
    return kind("bf16", c, sources)


def checked(name, text, *how):
    """(whether the results are right at a size, what is said)."""
    sizes = parse_sizes(text)
    device = make(name, sizes["NH"] // sizes["NKV"], *how)
    try:
        found = Bench(LADDER, device, sizes).check(VERSION, {})
        return found.place is None, str(found)
    except (AssertionError, UserError) as e:
        return False, str(e)


def test_results(device_name):
    """out and lse, at odd sizes and with heads that share keys."""
    large = "B=4,T=1000,NH=40,NKV=40", "B=2,T=1024,NH=40,NKV=40"
    for text in CHECKS + large * (device_name == "cuda"):
        check(f"pipelined attention {text}", *checked(device_name, text))


def test_compiled():
    """For sm_90a nothing spills, the tensor cores do not wait, and a block fits."""
    check_compiled(SwitchedConfig(C=768, NH=12), attention_pipeline.SOURCES, [KERNEL],
                   attention_pipeline.THREADS, attention_pipeline.SHARED)


def test_choice():
    """The trainer's kernel computes short rows, and what would leave many multiprocessors without
    work; and all on a device without this one."""
    gpu = SimpleNamespace(multiprocessors=132, kernels={KERNEL})
    for B, T, wish in ((32, 1024, True), (16, 1024, True), (8, 2048, True), (8, 1024, False),
                       (4, 1024, False), (64, 256, False), (32, 511, False)):
        check(f"{B=} {T=}", is_faster(gpu, B, T, 12) == wish)
    launched = []
    gpu.launch = lambda name, *args, **more: launched.append(name)
    plain = type("Plain", (), dict(attention_forward=lambda self, *args: launched.append("plain")))
    model = type("Model", (PipelinedForward, plain), {})()
    model.device, model.config = gpu, SimpleNamespace(NH=12)
    for B, kernels in ((32, {KERNEL}), (8, {KERNEL}), (32, ())):
        model.BT, gpu.kernels = (B, 1024), kernels
        model.attention_forward(None, None, None)
    check("launched", launched == [KERNEL, "plain", "plain"], launched)


def test_others():
    """Heads of other sizes, other dtypes, ReLU, documents and GPUs other than Hopper are not
    affected."""
    run = Training(SimpleNamespace())
    run.layers, run.Device = [attention_pipeline.FEATURE], lambda dtype, c, beside: beside
    for gpu, dtype, C, wish in ((90, "bf16", 128, 2), (90, "fp8", 128, 2), (90, "bf16", 256, 0),
                                (90, "tf32", 128, 0), (80, "bf16", 128, 0), (100, "bf16", 128, 0)):
        run.config, run.flags = SimpleNamespace(C=C, NH=2), SimpleNamespace(dtype=dtype)
        with mock.patch.object(gpus, "capability", return_value=gpu):
            yield f"files for {gpu} {dtype} {C // 2}", np.array(len(run.make_device())), wish, EXACT
    [row] = [feature for feature in FEATURES if feature.name == "pipelined attention"]
    for device, plain, attention, documents, wish in (
            ("cuda", 0, "softmax", 0, True), ("cuda", 0, "relu", 0, False),
            ("cuda", 1, "softmax", 0, False), ("cpu", 0, "softmax", 0, False),
            ("cuda", 0, "softmax", 1, False)):
        flags = SimpleNamespace(device=device, plain=plain, attention=attention,
                                document_mask=documents)
        check(f"asked for, {flags}", bool(row.asked(flags, None)) == wish)


def wrong(sources=attention_pipeline.SOURCES, race=False):
    """The first wrong result of these sources, or what a CPU says, or "". race: look for races."""
    flags = f"{AS_HOPPER} {races.FLAG}" if race else AS_HOPPER
    with mock.patch.dict(os.environ, CXXFLAGS=flags):
        results = (checked("emulated", text, tuple(sources), flags)
                   for text in (RACE_SIZES if race else CHECKS))
        return next((said or "wrong" for right, said in results if not right), "")
