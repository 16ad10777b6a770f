"""Plant the faults of mutant_table.PLANTED in the kernels for Hopper, on a CPU that emulates it,
and see that their checks find each one.

    pytest dev/tests/test_planted.py                       # some
    pytest dev/tests/test_planted.py -m longest -k swiglu  # all of a file
"""
import importlib
import multiprocessing

import pytest

from dev.tests.checks import check
from dev.tests.mutant_table import PLANTED

# For the checks: with some faults they hang; where something must be said, a slow machine has time.
TO_HANG, TO_SAY = 150, 900
SOME = {"gelu_products": 3, "swiglu_products": 3, "symmetric": 1}  # of each file so many


def with_fault(sources, old, new, folder):
    """The sources with a replacement in the one that has this text, copied to a folder."""
    texts = {path: path.read_text("utf-8") for path in sources}
    assert sum(text.count(old) for text in texts.values()) == 1, old
    copies = [folder / path.name for path in sources]
    for copy, text in zip(copies, texts.values()):
        copy.write_text(text.replace(old, new), "utf-8")
    return copies


def said_of(wrong, *args, seconds=TO_SAY):
    """What wrong() returns, in a process of its own: it may hang or crash."""
    pool = multiprocessing.get_context("fork").Pool(1)
    try:
        return pool.apply_async(wrong, args).get(seconds)
    except multiprocessing.TimeoutError:
        return "hangs"
    finally:
        pool.terminate()


def find(name, folder, count=None):
    """Plant the first faults of a file."""
    wrong = importlib.import_module(f"dev.tests.test_{name}").wrong
    [sources, _] = wrong.__defaults__
    said = said_of(wrong)
    check("without a fault", said == "", said)
    for what, old, new, *wish in PLANTED[name][:count]:
        [wish] = wish or [""]
        said = said_of(wrong, with_fault(sources, old, new, folder), wish == "race",
                       seconds=TO_SAY if wish else TO_HANG)
        part = wish in ("stuck", "race", "")
        check(f"{name}: {what}", said and wish in said if part else said == wish, said)


@pytest.mark.parametrize("name", SOME)
def test_some(name, folder):
    find(name, folder, SOME[name])


@pytest.mark.longest
@pytest.mark.parametrize("name", PLANTED)
def test_all(name, folder):
    find(name, folder)


@pytest.mark.parametrize("name", [name if name == "gelu_products" else
                                  pytest.param(name, marks=pytest.mark.longest)
                                  for name in PLANTED])
def test_no_races(name):
    """No access is a race."""
    wrong = importlib.import_module(f"dev.tests.test_{name}").wrong
    said = said_of(wrong, wrong.__defaults__[0], True)
    check(f"{name}: no races", said == "", said)
