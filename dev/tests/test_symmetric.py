"""Test Muon's symmetric products of dev/features/hopper/symmetric.cu: on a CPU as on Hopper, and on
a Hopper GPU.
"""
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features import muon
from dev.features.devices import device_class
from dev.features.feature import stack
from dev.features.hopper import symmetric
from dev.features.hopper.symmetric import pairs_of_tiles
from dev.lab.ladder import parse_sizes
from dev.tests import hopper
from dev.tests.checks import EXACT, check
from dev.tests.models import AS_HOPPER, check_in_each_order, on_hopper
from dev.tests.test_muon import KERNELS, hurtful, orthogonalize_on, orthogonalized
from train_gpt2 import BF16, UserError, to_float


def small_device(flags=AS_HOPPER):
    """A CPU with the kernels and Muon's, as on Hopper."""
    return on_hopper(stack(Emulated, [hopper.AnySide, muon.BatchOnCpu]), "bf16",
                     Config(C=768, NH=12), [*symmetric.SOURCES, muon.SOURCE], flags=flags,
                     only={*KERNELS, *hopper.SYMMETRIC_KERNELS})


def device_for(device_name):
    """The device, or None if its GPU is no Hopper."""
    if device_name != "cuda":
        return small_device()
    return on_hopper(stack(device_class("cuda"), [hopper.AnySide, muon.BatchOnGpu]), "bf16",
                     Config(C=768, NH=12), [*symmetric.SOURCES, muon.SOURCE])


def test_products(device_name):
    """The products against NumPy in float64, at sizes with ragged rows, and their symmetry."""
    device = device_for(device_name)
    sizes = [*hopper.SYMMETRIC_CHECKS]
    if device_name == "cuda":  # more tiles than multiprocessors, and an odd number of them alone
        sizes += ["n=15,rows=768,columns=1032", "n=13,rows=1600,columns=640"]
    for text in sizes if device else ():
        a = hopper.drawn_matrices(device, **parse_sizes(text))
        check_in_each_order(text, device, hopper.symmetric_faults, device, a)


def test_bits(device_name):
    """Ten runs give the same bits; in a matrix the others' number does not matter."""
    device = device_for(device_name)
    if not device:
        return
    big = device_name == "cuda"
    a = hopper.drawn_matrices(device, *((20, 768, 768) if big else (3, 264, 272)))
    found = []
    for _ in range(10 if big else 2):
        out = hopper.array_on(device, a.gram.shape, BF16)
        symmetric.multiply(device, out, a.gram, a.poly, add=a.gram, share=0.5, both_sides=True)
        found.append(device.get(out))
    check("same bits", all((each == found[0]).all() for each in found))
    alone = hopper.array_on(device, a.gram[:1].shape, BF16)
    symmetric.multiply(device, alone, a.gram[1:2], a.poly[1:2], add=a.gram[1:2], share=0.5,
                       both_sides=True)
    yield "one matrix of several", device.get(alone)[0], found[0][1], EXACT


def test_tiles():
    """Each tile on or above the diagonal is computed once: counted from the kernel's enumeration,
    as pairs, and one twice if they are odd."""
    for matrices in (1, 2, 3, 12, 48):
        for side in (8, 128, 136, 256, 392, 768, 1600):
            panels = -(-side // 128)
            tiles = matrices * panels * (panels + 1) // 2
            check(f"{matrices} of {side}", pairs_of_tiles(matrices, side) == -(-tiles // 2))


def test_orthogonalize(device_name):
    """Hurtful matrices, with chains and without, against a singular value decomposition: as near to
    it as with the products of other devices, where a bf16 says anything, and their singular values
    within the band."""
    device = device_for(device_name)
    shapes = ((64, 64), (32, 288), (200, 32), (128, 160))
    if device_name == "cuda":
        shapes += ((768, 768), (768, 3072), (3072, 768), (136, 280))
    for rows, columns in shapes if device else ():
        cases = hurtful(rows, columns)
        stored = np.stack([*cases.values()]).astype(np.float32)
        found = orthogonalize_on(device, stored)
        with mock.patch.object(symmetric.OwnSymmetric, "multiplies", lambda *_: False):
            plain = orthogonalize_on(device, stored)
        for what, x, result, beside in zip(cases, stored, found, plain):
            name = f"{rows}x{columns} {what}"
            s = np.linalg.svd(result.astype(np.float64), compute_uv=False)
            check(f"{name}: the largest", s.max() < 1.66, s.max())
            if "rank" in what or what == "zeros":
                check(f"{name}: finite", np.isfinite(result).all())
                continue
            wish = orthogonalized(to_float(to_bf16(x)))
            error = hopper.off(result, wish)
            check(f"{name}: the matrix", error < 0.06, error)
            others = hopper.off(beside, wish)
            check(f"{name}: as others", error < 3 * others, (error, others))


def test_which(device_name):
    """Chains of products are for matrices of which one side is twice the other; other devices'
    products for what does not fit. The result is where it says, gram and poly are enough, and
    flops_of counts the operations: a matrix has one tile."""
    device = small_device()
    multiplied, applied = [], []
    launch, batch = device.launch, device.matmul_batch
    device.launch = lambda name, *args, **more: (multiplied.append(2 * (2 * 128 * 128) * args[-1]),
                                                 launch(name, *args, **more))
    device.matmul_batch = lambda *args: (applied.append(2 * args[0].size * args[1].shape[2]),
                                         batch(*args))

    def count(rows, columns):
        multiplied.clear(), applied.clear()
        side = min(rows, columns)
        x, y = (hopper.array_on(device, (2, rows, columns), BF16) for _ in "xy")
        x[...] = to_bf16(np.eye(rows, columns, dtype=np.float32) / side**0.5)
        made = device.orthogonalize(
            x, y, *(hopper.array_on(device, (2, side, side), BF16) for _ in "gp"),
            np.ones(2, np.float32))
        check(f"{rows}x{columns}: where it is", made is x or made is y)
        wish = orthogonalized(np.eye(rows, columns) / side**0.5, device.coefficients)
        error = hopper.off(to_float(made[1]), wish)
        check(f"{rows}x{columns}: the result", error < 0.04, error)
        check(f"{rows}x{columns}: operations",
              sum(multiplied + applied) == device.flops_of(2, rows, columns))
        return len(multiplied), len(applied)

    check("square", count(64, 64) == (8, 4))
    check("less than twice", count(64, 120) == (8, 4))
    check("twice", count(64, 128) == (2 + 4 + 2 * 3, 2))
    check("tall", count(200, 64) == (12, 2))
    for iterations, chains, products in ((1, 1, 2), (2, 1, 1 + 2 + 3), (3, 1, 1 + 3 + 2 * 3),
                                         (5, 2, 2 + 5 + 3 * 3), (6, 3, 3 + 6 + 3 * 3)):
        device.coefficients = [(3.4445, -4.7750, 2.0315)] * iterations
        check(f"{iterations} iterations", count(64, 128) == (products, chains))
    del device.coefficients
    check("no multiple of 8", count(60, 64) == (0, 12))
    device.smallest = 65
    check("too small", count(64, 128) == (0, 12))
    check("large enough", count(72, 72) == (8, 4))


def test_choice():
    """What the kernels cannot multiply."""
    device = small_device()
    check("multiplies", device.multiplies(64, 136))
    check("rows that TMA cannot address", not device.multiplies(64, 60))
    check("rows of G that TMA cannot address", not device.multiplies(60, 64))
    device.real = np.dtype(np.float32)
    check("fp32", not device.multiplies(64, 136))


SIZES = "n=3,rows=392,columns=136", "n=3,rows=264,columns=264"
RACES = "n=1,rows=136,columns=64", "n=1,rows=16,columns=136", "n=2,rows=136,columns=136"


def wrong(race=False):
    """The first wrong result, or what a CPU says, or "". race: look for races."""
    device = small_device(f"{AS_HOPPER} {races.FLAG}" if race else AS_HOPPER)
    for text in RACES if race else SIZES:
        a = hopper.drawn_matrices(device, **parse_sizes(text))
        try:
            found = hopper.symmetric_faults(device, a)
        except UserError as e:
            return f"{e}"
        bad = next((what for what, error, limit in found if not error <= limit), "")
        if bad:
            return bad.partition(":")[0]
    return ""
