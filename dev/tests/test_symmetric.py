"""Test Muon's symmetric products of dev/features/hopper/symmetric.cu: on a CPU as on Hopper, and on
a Hopper GPU.

    pytest dev/tests/test_symmetric.py -k planted --faults 99   # all planted faults
    pytest dev/tests/test_symmetric.py -m longest               # races
"""
import contextlib
import os
from unittest import mock

import numpy as np
import pytest

from dev.tests import hopper
from dev.common.bf16 import to_bf16
from dev.common.config import Config
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.features import muon
from dev.features.declare import stack
from dev.features.devices import device_class
from dev.features.hopper import symmetric
from dev.features.hopper.symmetric import pairs_of_tiles
from dev.lab.ladder import parse_sizes
from dev.tests.checks import EXACT, check
from dev.tests.models import in_each_order
from dev.tests.test_gelu_products import with_fault
from dev.tests.test_muon import KERNELS, hurtful, orthogonalize_on, orthogonalized
from train_gpt2 import BF16, UserError, to_float

# What is wrong, in symmetric.cu or turns.cuh, and what a CPU says or the first wrong result
FAULTS = (
    ("a tile that is not mirrored", "if (terms.both_sides && at.row != at.column) {",
     "if (false) {", "whole"),
    ("mirrored to where it was", "at.column * WIDTH, at.row * HEIGHT, result",
     "at.row * WIDTH, at.column * HEIGHT, result", "whole"),
    ("mirrored when it should not be", "if (terms.both_sides && at", "if (at", "gram"),
    ("a panel that does not turn", "&& k < panel * HEIGHT", "&& false", "poly"),
    ("a panel that turns behind the diagonal", "&& k < panel * HEIGHT", "&& k <= panel * HEIGHT",
     "poly"),
    ("a panel multiplied as it lies behind the diagonal", "at.row * (HEIGHT / 64), step", "0, step",
     "poly"),
    ("both panels turn together", "at.column * (WIDTH / 64), step", "at.row * (WIDTH / 64), step",
     "poly"),
    ("the square of a scale forgotten", "if (kind != SYMMETRIC) s *= s;", "", "scaled"),
    ("a product that is not scaled", "terms.factor *= s, ", "", "scaled"),
    ("an addend that is not scaled", " terms.share *= s,", "", "whole"),
    ("another matrix's scale", "scales[at.matrix]", "scales[0]", "scaled"),
    ("mirrored before TMA has read the tile", "        result_free(group);\n        // A warp's",
     "        // A warp's", "race"),
    ("8 x 8 that are not transposed", "store_matrices_transposed(\n", "store_matrices(\n", "whole"),
    ("boxes not exchanged", "(box % 2 * 2 + box / 2) * BOX", "box * BOX", "whole"),
    ("another warp's columns", "(2 * warp + lane / 8 % 2)", "(2 * (warp ^ 1) + lane / 8 % 2)",
     "whole"),
    ("another matrix's panel for both", "r, at.column * WIDTH, k, at.matrix",
     "r, at.column * WIDTH, k, 0", "gram"),
    ("no tiles alone", "(matrices * alone() + 1) / 2", "0", "gram"),
    ("an odd tile left out", "(matrices * alone() + 1) / 2", "matrices * alone() / 2", "gram"),
    ("rows of the next matrix", "copy_box(boxes + box * BOX, &map, c + box * right, 0, "
     "row + box * down, matrix, full);\n    }\n}\n\n// One",
     "copy_box(boxes + box * BOX, &map, c + box * right, 0, row + box * down, 0, full);\n"
     "    }\n}\n\n// One", "gram"),
    ("one panel where there are two", "columns = pair || !sizes.same", "columns = pair", "of two"),
    ("half of the factor", "terms.factor * two[0]", "0.5f * terms.factor * two[0]", "gram"),
    ("without add", "terms.share * low(more[i])", "0.0f", "poly"),
    ("the diagonal of other warps", "&& k == warp) a", "&& k == (warp ^ 1)) a", "poly"),
    ("half of the diagonal", ", b += diagonal[1];", ";", "poly"),
    ("a diagonal in other tiles", "at.row == at.column && lane / 4", "lane / 4", "poly"),
    ("add arrives before the last result was read",
     "waits.wait_for_place(n);\n        for (int box = 0; box < 4",
     "for (int box = 0; box < 4", "race"),
    ("a result over another", "waits.wait_for_place(2 * done + group);", ";", "race"),
    ("a place that is free before TMA has read it",
     "result_free(group);\n            warp_arrives", "warp_arrives", "race"),
    ("a place that is never free", "warp_arrives(waits.result_read[group]);", "", "stuck"),
    ("nobody waits for add", "mbarrier_wait(waits.add_there[group], done % 2);", ";", "poly"),
    ("half of what is summed", "k < sizes.length; k += 64", "k < sizes.length; k += 128", "stuck"),
    ("no turns", "mbarrier_wait(waits.my_turn[group], (done + (group == 0)) % 2);", "", "stuck"),
    ("stores that nobody waits for at the end", "if (threadIdx.x % 128 == 0) stores_arrive();", "",
     "gram"),
    ("x as if it were x'", "int c = of_columns ? first : k, row = of_columns ? k : first;",
     "int c = k, row = first;", "gram"),
    ("columns as rows for the tensor cores",
     "further(a, (half * BOX + (a_of_rows ? k * 64 : k)) / W)",
     "further(a, (half * BOX + k) / W)", "gram"),
)


@pytest.fixture
def faults(pytestconfig):
    return pytestconfig.option.faults


def small_device(sources=symmetric.SOURCES, flags="-O1 -DHOPPER"):
    """A CPU with the kernels and Muon's, as on Hopper."""
    with mock.patch.dict(os.environ, CXXFLAGS=flags), contextlib.redirect_stdout(None):
        return stack(Emulated, [hopper.AnySide, muon.BatchOnCpu])(
            "bf16", Config(C=768, NH=12), [*sources, muon.SOURCE],
            only={*KERNELS, *hopper.SYMMETRIC_KERNELS})


def device_for(device_name):
    """The device, or None if its GPU is no Hopper."""
    if device_name != "cuda":
        return small_device()
    device = stack(device_class("cuda"), [hopper.AnySide, muon.BatchOnGpu])(
        "bf16", Config(C=768, NH=12), [*symmetric.SOURCES, muon.SOURCE])
    if not device.hopper:
        print("skipped: this GPU is no Hopper")
    return device if device.hopper else None


def test_products(device_name):
    """The products against NumPy in float64, at sizes with ragged rows, and their symmetry."""
    device = device_for(device_name)
    sizes = [*hopper.SYMMETRIC_CHECKS]
    if device_name == "cuda":  # more tiles than multiprocessors, and an odd number of them alone
        sizes += ["n=15,rows=768,columns=1032", "n=13,rows=1600,columns=640"]
    for text in sizes if device else ():
        a = hopper.drawn_matrices(device, **parse_sizes(text))
        for order, found in in_each_order(device, hopper.symmetric_faults, device, a):
            for what, error, limit in found:
                check(f"{text} {order} {what}", error <= limit, f"{error:.1e}")


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


def wrong(device, *sizes):
    """The first wrong result, or "stuck" or a race, or ""."""
    for text in sizes:
        a = hopper.drawn_matrices(device, **parse_sizes(text))
        try:
            found = hopper.symmetric_faults(device, a)
        except UserError as e:
            return f"{e}"
        bad = next((what for what, error, limit in found if not error <= limit), "")
        if bad:
            return bad.partition(":")[0]
    return ""


SIZES = "n=3,rows=392,columns=136", "n=3,rows=264,columns=264"


def test_planted(folder, faults):
    """The first third of so many planted faults is found."""
    check("without a fault", wrong(small_device(), *SIZES) == "")
    for what, old, new, wish in FAULTS[: -(-faults // 3)]:
        sources = with_fault(symmetric.SOURCES, old, new, folder)
        flags = f"-O1 -DHOPPER {races.FLAG}" * (wish == "race") or "-O1 -DHOPPER"
        said = wrong(small_device(sources, flags), *SIZES)
        check(what, wish in said if wish in ("stuck", "race") else said == wish, said)


@pytest.mark.longest
def test_no_races():
    """No access is a race."""
    device = small_device(flags=f"-O1 -DHOPPER {races.FLAG}")
    sizes = "n=1,rows=136,columns=64", "n=1,rows=16,columns=136", "n=2,rows=136,columns=136"
    check("no races", wrong(device, *sizes) == "")
