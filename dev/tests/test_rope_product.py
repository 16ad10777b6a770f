"""Test Llama's product with RoPE of dev/features/hopper/rope_product.cu: on a CPU as on Hopper, and
on a Hopper GPU.

    pytest dev/tests/test_rope_product.py -k planted --faults 99   # all planted faults
"""
import contextlib
import os
from unittest import mock

import numpy as np
import pytest

from dev.common.bf16 import to_bf16
from dev.common.gpus import capability
from dev.cpu.emulated import Emulated
from dev.features.devices import FastCuda
from dev.features.hopper import rope_product
from dev.lab.bench import BF16_LIMIT
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import check
from dev.tests.models import in_each_order, on_device
from dev.tests.test_gelu_products import with_fault
from train_gpt2 import to_float

HS = 128
SIZES = (  # N, OC, C, T, rotated
    (1, 64, 64, 1, 0), (129, 192, 64, 43, 128), (300, 256, 192, 300, 128),
    (2700, 320, 64, 900, 256))
# What is wrong, in rope_product.cu
FAULTS = (
    ("the sine with the other sign", "before * turn[i] - y", "before * turn[i] + y"),
    ("values rotated too", "if (c < rotated)", "if (true)"),
    ("the table's row of another token", "(r % T) * HS", "((r + 1) % T) * HS"),
    ("positions go on in the next sequence", "(r % T) * HS", "min(r, T - 1) * HS"),
    ("pairs of the first channels in all", "(column + 32 * first + 32) % HS", "column % HS"),
    ("rows below the result", "if (r >= sizes.N) continue;\n        const", "const"),
    ("columns beyond the result", "if (at.column + 32 * part >= sizes.H) continue;", ""),
    ("the upper rows again", "eight / 2 * LONG / 8 + part / 3", "part / 3"),
    ("columns of a half in another order", "i % 4 * 3 + part % 3", "i % 4 * 3 + (part + 1) % 3"),
)


@pytest.fixture
def faults(pytestconfig):
    return pytestconfig.option.faults


def device_for(device_name, sources=rope_product.SOURCES):
    """The device, with the kernel alone on a CPU; None if its GPU is no Hopper."""
    c = Config3(C=2 * HS, NH=2, NKV=1)
    if device_name == "cuda":
        return FastCuda("bf16", c, sources) if capability() == 90 else None
    with mock.patch.dict(os.environ, CXXFLAGS="-O1 -DHOPPER"), contextlib.redirect_stdout(None):
        return Emulated("bf16", c, sources, only={"matmul_rope"})


def rotated_product(device, N, OC, C, T, rotated):
    """(the kernel's result, that of NumPy in float64), or "outside" if more rows were written."""
    draw = np.random.default_rng(N)
    inp, w = (to_bf16(np.float32(draw.standard_normal(shape))) for shape in ((N, C), (OC, C)))
    angle = draw.uniform(-4, 4, (T, HS // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(T, HS).astype(np.float32)
    room = on_device(device, np.full((N + 256, OC), 0xffff, np.uint16))
    rope_product.multiply_rope(device, room[:N], on_device(device, inp), on_device(device, w),
                               on_device(device, table), T, rotated)
    if (device.get(room[N:]) != 0xffff).any():
        return "outside"
    wish = np.float64(to_float(inp)) @ np.float64(to_float(w)).T
    for start in range(0, rotated, HS):
        x, y = wish[:, start : start + HS : 2].copy(), wish[:, start + 1 : start + HS : 2].copy()
        cosine, sine = np.cos(angle)[np.arange(N) % T], np.sin(angle)[np.arange(N) % T]
        wish[:, start : start + HS : 2] = x * cosine - y * sine
        wish[:, start + 1 : start + HS : 2] = x * sine + y * cosine
    return to_float(device.get(room[:N])), wish


def test_product(device_name):
    """At sizes with ragged rows and columns, with and without rotated heads, and where sequences
    end within a tile."""
    device = device_for(device_name)
    for sizes in SIZES if device else ():
        for order, (found, wish) in in_each_order(device, rotated_product, device, *sizes):
            yield f"{sizes} {order}", found, wish, BF16_LIMIT


def test_planted(folder, faults):
    """The first so many planted faults are found."""
    for what, old, new in FAULTS[:faults]:
        device = device_for("emulated", with_fault(rope_product.SOURCES, old, new, folder))
        results = rotated_product(device, 300, 320, 64, 100, 128)
        right = results != "outside" and (
            abs(results[0] - results[1]).max() < BF16_LIMIT * abs(results[1]).max())
        check(what, not right)
