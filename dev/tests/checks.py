"""What tests check: check(), comparisons with a truth, and that bad calls are refused.

pytest runs the tests: see dev/conftest.py.
"""
import contextlib
import io
import os
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dev.lab.bench import BF16_LIMIT, KERNEL_LIMIT
from dev.lab.ladder import f32, stored
from train_gpt2 import BF16, UserError, to_float

TOP = Path(__file__).resolve().parents[2]
FIXTURES = TOP / "dev/fixtures"
TINY = FIXTURES / "gpt2_tiny.bin"  # V = 331, L = 2, NH = 2, C = 64, maxT = 40
# for the programs that tests start
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))

EXACT = 0  # the same bits
PACKAGES = re.findall(r"^\w+", (TOP / "dev/requirements.txt").read_text(), re.M)
failed = []  # the lines of checks that failed
silent = False  # pytest prints the lines of a test that fails


def fast(test):
    """Mark a test as one of the most important, which `pytest -m fast` runs."""
    test.fast = True
    return test


def check(name, ok, detail=""):
    """Note a check that failed, and print its line."""
    line = f"{'OK  ' if ok else 'FAIL'} {name:64} {detail}"
    if not ok:
        failed.append(line)
    if not silent:
        print(line, flush=True)


def seed():
    """Each test draws the same random numbers, whatever ran before."""
    global rng
    rng = np.random.default_rng(1337)


def compare(name, rows):
    """Check what a test yields: (tensor, found, expected, limit). The default limit is that of a
    kernel."""
    for tensor, found, expected, *limit in rows or ():
        found = np.asarray(found)
        [limit] = limit or [BF16_LIMIT if found.dtype == BF16 else KERNEL_LIMIT]
        if limit == EXACT:
            bits = f"u{found.itemsize}"
            differ = np.count_nonzero(found.view(bits) !=
                                      stored(np.asarray(expected), found.dtype).view(bits))
            check(f"{name} {tensor}", differ == 0,
                  f"{differ} of {found.size} differ" if differ else "same bits")
        else:
            assert found.shape == np.shape(
                expected), f"{tensor} {found.shape}, expected {np.shape(expected)}"
            error = np.linalg.norm(to_float(found) - np.float64(expected)) / (
                np.linalg.norm(expected) or 1)
            check(f"{name} {tensor}", error <= limit,
                  f"{error:.1e} {'<=' if error <= limit else '> '} {limit:.1e}")


def run(name, test, *args):
    """Run a test, or a part of one. An exception counts as a failed check."""
    seed()
    try:
        compare(name, test(*args))
    except Exception as e:
        check(name, False, f"{type(e).__name__}: {e}")


def missing(error):
    """The package of dev/requirements.txt whose absence led to an error, or None."""
    while error and not (isinstance(error, ImportError) and error.name in PACKAGES and
                         not find_spec(error.name)):
        error = error.__cause__ or error.__context__
    return error and error.name


def title(name):
    """How the lines of a test begin."""
    return name.removeprefix("test_").replace("_", " ") + ":"


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


def output_of(function, *args):
    """What a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        function(*args)
    return said.getvalue()


@contextlib.contextmanager
def working_in(folder):
    """As contextlib.chdir, which is new in Python 3.11."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


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


def check_bad_files(name, path, cases, function, *args):
    """Check that a call is refused in one line that names the file, for each (what the line says,
    the file's bytes, or None: it is not there). The file is then as before."""
    before = path.read_bytes() if path.exists() else None
    for wish, content in (*cases, (None, before)):
        path.write_bytes(content or b"")
        if content is None:
            path.unlink()
        if wish:
            check_refusal(name, f"{re.escape(str(path))}: .*{wish}", function, *args)


def with_numbers(content, **change):
    """A file's bytes with other 32-bit numbers: _1=5 makes the second one 5."""
    ints = np.frombuffer(content, "<i4").copy()
    for place, value in change.items():
        ints[int(place[1:])] = value
    return ints.tobytes()


def header_refusal(found, *kinds):
    """The message (a regular expression) about a file whose first two numbers fit none of these
    kinds."""
    wishes = (re.escape(f"[{kind.magic}, {' or '.join(map(str, kind.versions))}]")
              for kind in kinds)
    return (f"begins with {re.escape(str([*found]))}; expected .*{'.*'.join(wishes)}.*: "
            f"{kinds[0].remedy}")
