"""The harness of all tests: it counts checks, runs test functions, and checks that bad calls are refused.

A test is a function. It calls check(), or yields (name, found, expected, limit). Its parameters say what it needs:
`device_name`, or `folder`, which is a folder of its own.
"""
import argparse
import inspect
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dev.features.order import has_gpu
from dev.lab.bench import BF16_LIMIT, KERNEL_LIMIT
from dev.lab.ladder import f32, stored
from prepro_tinyshakespeare import UserError
from train_gpt2 import BF16, to_float

TOP = Path(__file__).resolve().parents[2]
FIXTURES = TOP / "dev/fixtures"
TINY = FIXTURES / "gpt2_tiny.bin"  # V = 331, L = 2, NH = 2, C = 64, maxT = 40
# for the programs that tests start
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))

EXACT = 0  # the same bits
PEERS = "torch", "transformers"  # a test that needs these is skipped where they are not installed
counts = {True: 0, False: 0}


def check(name, ok, detail=""):
    """Count a check, and print its line."""
    counts[bool(ok)] += 1
    print(f"{'OK  ' if ok else 'FAIL'} {name:64} {detail}", flush=True)


def run(name, test, *args):
    """Run a test, which calls check() or yields (tensor, found, expected, limit); the default limit is that of a
    kernel. It draws the same random numbers whatever ran before. An exception counts as a failed check."""
    global rng
    rng, begun = np.random.default_rng(1337), time.monotonic()
    try:
        for tensor, found, expected, *limit in test(*args) or ():
            found = np.asarray(found)
            [limit] = limit or [BF16_LIMIT if found.dtype == BF16 else KERNEL_LIMIT]
            if limit == EXACT:
                bits = f"u{found.itemsize}"
                differ = np.count_nonzero(found.view(bits) != stored(np.asarray(expected), found.dtype).view(bits))
                check(f"{name} {tensor}", differ == 0, f"{differ} of {found.size} differ" if differ else "same bits")
            else:
                assert found.shape == np.shape(expected), f"{tensor} {found.shape}, expected {np.shape(expected)}"
                error = np.linalg.norm(to_float(found) - np.float64(expected)) / (np.linalg.norm(expected) or 1)
                check(f"{name} {tensor}", error <= limit, f"{error:.1e} {'<=' if error <= limit else '> '} {limit:.1e}")
    except ModuleNotFoundError as e:
        if e.name not in PEERS:
            check(name, False, e)
        print(f"skipped: {name} needs {e.name}, which is not installed")
    except Exception as e:
        check(name, False, f"{type(e).__name__}: {e}")
    if time.monotonic() - begun > 1:
        print(f"took {time.monotonic() - begun:.1f} s: {name}")


def normal(*shape):
    """Normal numbers, as fp32 stores them."""
    return f32(rng.standard_normal(shape))


def words(V, *shape):
    return rng.integers(V, size=shape, dtype=np.int32)


def finite_difference(name, f, df, *inputs):
    """A gradient, and the central difference of its function in a random direction."""
    dout, steps = normal(*f(*inputs).shape), [1e-6 * normal(*x.shape) for x in inputs]
    ahead, behind = (f(*(x + sign * s for x, s in zip(inputs, steps))) for sign in (1, -1))
    found = sum((gradient * s).sum() for gradient, s in zip(df(dout, *inputs), steps))
    return name, found, (dout * (ahead - behind)).sum() / 2, 1e-6


def summary():
    """Print how many checks have passed and failed. Returns the exit status."""
    print(f"{counts[True]} passed, {counts[False]} failed")
    return 1 if counts[False] else 0


def numbers_of(tensors):
    """All numbers of (name, values) pairs, one flat array."""
    return np.concatenate([values.ravel() for _, values in tensors])


def refusal(function, *args):
    """The message of the UserError that a call raises, or None."""
    try:
        function(*args)
    except UserError as e:
        return str(e)


def check_refusal(name, wish, function, *args):
    """Check that a call is refused in one line that matches `wish` (a regular expression)."""
    message = refusal(function, *args)
    check(f"{name}: {wish}", message and re.fullmatch(f".*{wish}.*", message), message)


def header_refusal(found, *kinds):
    """The message (a regular expression) about a file whose first two numbers fit none of these kinds."""
    wishes = (re.escape(f"[{kind.magic}, {' or '.join(map(str, kind.versions))}]") for kind in kinds)
    return f"begins with {re.escape(str([*found]))}; expected .*{'.*'.join(wishes)}.*: {kinds[0].remedy}"


# ---- A test file as a program


def run_tests(tests, device_name="cpu", prepare=None, **given):
    """Run tests. Each gets those of these that its parameters name: device_name; folder, a folder of its own, which
    prepare(folder) fills; and the given ones."""
    def prepared(test, values):
        if prepare:
            prepare(values["folder"])
        yield from test(**{name: values[name] for name in inspect.signature(test).parameters if name in values}) or ()

    here = os.getcwd()
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            values = {"device_name": device_name, "folder": Path(folder).resolve()} | given
            run(test.__name__.replace("_", " ") + ":", prepared, test, values)
            os.chdir(here)


def run_program(tests, prepare=None, fits=None, **numbers):
    """The main program of a test file. It runs on each device that fits. numbers: more flags, with their defaults.
    Exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one (default: the CPU, and a GPU if any)")
    parser.add_argument("--only", choices=[test.__name__ for test in tests], metavar="TEST", help="only this test")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    flags = parser.parse_args()
    given = {name: getattr(flags, name) for name in numbers}
    names = [flags.device] if flags.device else ["cpu", *["cuda"] * has_gpu()]
    for place, name in enumerate(name for name in names if not fits or fits(name)):
        run_tests([test for test in tests if flags.only in (None, test.__name__)
                   and (not place or "device_name" in inspect.signature(test).parameters)], name, prepare, **given)
    sys.exit(summary())
