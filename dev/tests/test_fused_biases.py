"""Test the sums of rows that kernels take along, dev/features/fused_biases.cu, at the sizes of the
lab's kernels."""
import contextlib
import functools
import os
from unittest import mock

import pytest

from dev.cpu import races
from dev.cpu.host import compiler_of
from dev.features.devices import device_class
from dev.features.fused_biases import SOURCE, SummedOutputs
from dev.common.gpus import capability
from dev.lab import heads
from dev.lab.bench import Bench
from dev.lab.heads import ATTENTION_LIMITS
from dev.lab.kernels.matmul_backward_bias import bias_shares
from dev.lab.ladder import DTYPES, Ladder, Version, config_of, find_ladder, model_of, parse_sizes
from dev.tests.checks import check
from dev.tests.models import ATTENTION, emulated_with, rounds_alone
from train_gpt2 import PARTIAL_ROWS, layernorm_backward_launch

KERNELS = {*ATTENTION, "layernorm_backward", "sum_rows", "add_all_partials"}
HEADS_OF_HOPPER = ("B=1,T=130,NH=2,HS=64", "B=2,T=150,NH=3,HS=80", "B=1,T=150,NH=2,HS=128")


def attention_problem(draw, B, T, NH, HS, cold=0):
    """Attention's gradient, and dqkvb (3,NH,HS) += its sum over rows."""
    inputs, truth, terms = heads.backward_problem(draw, B, T, NH, NH, HS, cold=cold)
    dqkvb = draw.fp32(3 * NH * HS)
    rows, sizes = (x["dqkv"].reshape(B * T, -1) for x in (truth, terms))
    return (inputs | dict(dqkvb=dqkvb), truth | dict(dqkvb=dqkvb + rows.sum(0)),
            terms | dict(dqkvb=abs(dqkvb) + (sizes**2).sum(0) ** 0.5))


def attention_with_sums(device, a):
    device.column_sums = a.sums
    heads.trainers_backward(device, a)
    device.column_sums = None
    rows, width = a.B * -(-a.T // device.attention_sizes.rows), 3 * a.NH * a.HS
    device.launch("add_all_partials", (width, 4), None, None, None, a.dqkvb, None, a.sums, 0, 0,
                  rows, width, True)


def layernorm_with_sums(device, a):
    blocks, threads, shared = layernorm_backward_launch(device, a.N)
    device.launch("layernorm_backward", blocks, a.dresidual, a.partials, a.dout, a.inp, a.weight,
                  a.mean, a.rstd, a.N, threads=threads, shared=shared)
    device.launch("add_all_partials", (a.C, 3), a.dweight, a.dbias, a.before, None, a.partials,
                  None, blocks, a.C, 0, 0, True)


def sums_of_rows(device, a):
    shares = bias_shares(a.N)
    device.launch("sum_rows", (a.OC, shares), a.partials, a.dout, a.N, a.OC)
    device.launch("add_all_partials", (a.OC, 4), None, None, None, a.dbias, None, a.partials, 0, 0,
                  shares, a.OC, True)


def version(run, scratch):
    return Version("with sums", run, threads=(), dtypes=DTYPES, scratch=scratch)


ATTENTION_LADDER = Ladder(
    attention_problem, "", heads.LONG_HEADS, compiled_for="HS", fp32="lse delta sums dqkvb",
    sums="dqkv dqkvb", trainer_checks=(*heads.ODD_HEADS, "B=1,T=33,NH=2,HS=64,cold=1"),
    limits=ATTENTION_LIMITS | dict(tf32=2e-3), name="attention",
    versions=(version(attention_with_sums, lambda a: heads.delta_scratch(a) |
                      dict(sums=(a.B * -(-a.T // 64), 3 * a.NH * a.HS))),))
LADDERS = dict(
    layernorm_backward=version(layernorm_with_sums,
                               lambda a: dict(partials=(3, PARTIAL_ROWS, a.C))),
    matmul_backward_bias=version(sums_of_rows, lambda a: dict(partials=(bias_shares(a.N), a.OC))))


@functools.cache
def device_for(device_name, dtype, flags, model):
    kind = device_class("cuda") if device_name == "cuda" else emulated_with(KERNELS)
    with (mock.patch.dict(os.environ, CXXFLAGS=f"{os.environ.get('CXXFLAGS', '')} {flags}"),
          contextlib.redirect_stdout(None)):
        return type("Summed", (SummedOutputs, kind), {})(dtype, config_of(*model), [SOURCE])


def checked(device_name, dtype, ladder, run, texts, flags="", where=""):
    for text in texts:
        sizes = parse_sizes(text)
        if device_name == "cuda" and capability() < 80 and (sizes.get("HS", 0) > 64 or
                                                            sizes.get("C", 0) > 4096):
            continue
        title = f"{ladder.name} {text} {dtype}{where}:"
        try:
            device = device_for(device_name, dtype, flags, model_of(ladder, sizes))
            verdict = Bench(ladder, device, sizes).check(run, {})
            check(title, verdict.place is None, verdict)
        except Exception as e:
            check(title, False, f"{type(e).__name__}: {e}")


def dtypes_of(device_name):
    return DTYPES if device_name != "cuda" or capability() >= 80 else DTYPES[:1]


def test_attention(device_name):
    """The sums of dq, dk and dv, in blocks of every kind."""
    [run] = ATTENTION_LADDER.versions
    texts = (*ATTENTION_LADDER.checks, *ATTENTION_LADDER.trainer_checks)
    for dtype in dtypes_of(device_name):
        some = ATTENTION_LADDER.checks[-1:] if rounds_alone(device_name, dtype) else texts
        checked(device_name, dtype, ATTENTION_LADDER, run, some)
    if device_name != "cuda":
        checked("emulated", "bf16", ATTENTION_LADDER, run, HEADS_OF_HOPPER, "-DHOPPER",
                " as on Hopper")
        checked("emulated", "fp32", ATTENTION_LADDER, run, ("B=1,T=70,NH=2,HS=64",), "-DTURING",
                " as on Turing")


def test_rows(device_name):
    """The sums of the new dresidual, and of the rows of any array."""
    for name, run in LADDERS.items():
        ladder = find_ladder(name)
        for dtype in dtypes_of(device_name)[::2]:
            checked(device_name, dtype, ladder, run, (*ladder.checks, *ladder.trainer_checks))


@pytest.mark.parametrize("HS", (pytest.param(64, marks=pytest.mark.longest), 80,
                                pytest.param(128, marks=pytest.mark.longest)))
def test_no_races(HS):
    """Warps leave their sums where others' rows were not."""
    [run] = ATTENTION_LADDER.versions
    if races.finds_races(compiler_of()):
        checked("emulated", "bf16", ATTENTION_LADDER, run, (f"B=1,T=150,NH=2,HS={HS}",),
                f"-O1 {races.FLAG} -DHOPPER", " races")
