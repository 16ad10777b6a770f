"""Test that attention as on a Hopper GPU has no races where a head's channels do not fill its
boxes."""
import functools
import os
from unittest import mock

import pytest

from dev.common.config import Config
from dev.cpu import races
from dev.cpu.emulated import Emulated
from dev.lab.bench import Bench
from dev.lab.ladder import find_ladder, parse_sizes
from dev.tests.checks import check, refusal
from dev.tests.models import ATTENTION

pytestmark = pytest.mark.usefixtures("race_finder")
KERNELS = "attention_forward", "attention_backward"
# Of store_rows: zeros behind a head's channels stay in the tile.
ONLY_CHANNELS = "c < HS; c += HEAD_LANES"


def checks(HS, names, only, Model=Config):
    """Yields (name, a function that compares the trainer's version of a kernel with NumPy and looks
    for races)."""
    with mock.patch.dict(os.environ, CXXFLAGS=f"-O1 {races.FLAG} -DHOPPER"):
        device = Emulated("bf16", Model(C=2 * HS, NH=2), only=only)
    for name in names:
        ladder = find_ladder(name)
        version = next(version for version in ladder.versions if version.trainer)
        # Two blocks; two tiles and a part.
        bench = Bench(ladder, device, parse_sizes(f"B=1,T=150,NH=2,HS={HS}"))
        yield name, functools.partial(bench.check, version, {})


def test_heads_of_80_and_96(folder):
    """There are none in heads of two boxes, the second with 16 or 32 channels."""
    for HS in (80, 96):
        for name, run in checks(HS, KERNELS, {*ATTENTION}):
            try:
                verdict = run()
                check(f"{name}, HS={HS}", verdict.place is None, verdict)
            except races.Race as e:
                check(f"{name}, HS={HS}", False, e)


def test_stored_zeros(folder):
    """There is one if whole boxes are stored."""
    text, path = Config.SOURCES[0].read_text("utf-8"), folder / "kernels.cu"
    check("one place", text.count(ONLY_CHANNELS) == 1)
    path.write_text(text.replace(ONLY_CHANNELS, ONLY_CHANNELS.replace("HS", "HP")),
                    encoding="utf-8")
    Faulty = type("Faulty", (Config,), dict(SOURCES=(path,)))
    for name, run in checks(80, KERNELS[:1], {*KERNELS[:1]}, Faulty):
        found = refusal(run)
        check(f"{name} stores whole boxes", found and "has a race on out[" in found, found)
