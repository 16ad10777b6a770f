"""How pytest runs the tests, in dev/tests and dev/lab/tests: see "Tests" in dev/README.md."""
import functools
import inspect
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

# Before NumPy is imported: kernels compile in half the time, and processes share the cores.
os.environ |= {"CXXFLAGS": "-O1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}

from dev.cpu import races
from dev.cpu.host import compiler_of
from dev.features.order import has_gpu
from dev.lab import workers
from dev.tests import checks, models, trainings

# The longest files begin, so that two processes end together. Those of SPLIT are not kept whole.
FIRST = ["test_" + x for x in
         "ranks programs trainer llama3 students kills exercise races resume".split()]
SPLIT = "test_programs", "test_trainer", "test_llama3", "test_planted"


def pytest_addoption(parser):
    parser.addoption("--device", choices=("emulated", "cuda"),
                     help="default: kernels.cu emulated on the CPU, and a GPU if any")
    more = dict(kills=0, checked=1, numbers=0, plant=-1, checkpoint="", state="")
    for name, default in more.items():
        parser.addoption(f"--{name}", type=type(default), default=default, help="see long tests")


def pytest_configure(config):
    checks.silent = config.option.verbose < 1
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored in a background, and so by our programs
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if getattr(config.option, "dist", "no") == "load":  # -n: a file's tests share a process
        config.option.dist, config.option.loadscopereorder = "loadgroup", False


def pytest_generate_tests(metafunc):
    if "device_name" in metafunc.fixturenames:
        chosen, fits = metafunc.config.option.device, getattr(metafunc.module, "runs_on", bool)
        names = [chosen] if chosen else ["emulated", *["cuda"] * has_gpu()]
        metafunc.parametrize("device_name", [name for name in names if fits(name)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: [*FIRST, item.path.stem].index(item.path.stem))
    for item in items:
        if hasattr(item.obj, "fast"):
            item.add_marker("fast")
        if item.path.stem not in SPLIT:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """pytest collects no generators, but a function that returns one."""
    if name.startswith("test_") and inspect.isgeneratorfunction(obj):
        test = functools.wraps(obj)(lambda *given: obj(*given))
        setattr(collector.obj, name, test)
        return collector.ihook.pytest_pycollect_makeitem(collector=collector, name=name, obj=test)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test, which may be a generator. It goes on to its end, and fails if a check did."""
    checks.failed.clear()
    try:
        given = (pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters)
        checks.compare(checks.title(pyfuncitem.originalname), pyfuncitem.obj(*given))
    except BaseException as e:
        print(*checks.failed, sep="\n")
        if not checks.failed and (name := checks.missing(e)):
            pytest.skip(f"{name} is not installed")
        raise
    return not checks.failed or pytest.fail("\n".join(checks.failed), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def own_devices(request):
    """A file compiles with its own CXXFLAGS, if it has any, and finds no devices of other files."""
    models.made.clear(), models.launched.clear(), workers.device_of.cache_clear()
    own = getattr(request.module, "CXXFLAGS", os.environ["CXXFLAGS"])
    with mock.patch.dict(os.environ, CXXFLAGS=own):
        yield


@pytest.fixture(autouse=True)
def nothing_remains():
    """Working directory and environment stay; random numbers are those of every run."""
    checks.seed()
    here = os.getcwd()
    with mock.patch.dict(os.environ):
        yield
    os.chdir(here)


@pytest.fixture
def folder(nothing_remains):
    """A folder of the test's own."""
    with TemporaryDirectory() as path:
        yield Path(path).resolve()


@pytest.fixture
def token_data(folder):
    """Files of tokens for trainings in the test's folder."""
    trainings.token_files(folder)


@pytest.fixture
def race_finder():
    """Skip the test if the compiler finds no races."""
    if not races.finds_races(compiler_of()):
        pytest.skip(f"{compiler_of()} cannot look for races")
