"""The trainer's most important tests, in one precision, and its program: three steps and a resume.

    pytest dev/tests/test_trainer.py

Kernels are compiled once, for dev/fixtures/gpt2_tiny.bin in fp32. test_gpt2.py has all precisions
and sizes.
"""
import re
import subprocess
import sys
from importlib import util

import pytest

import test_gpt2
from dev.features.seams import GPT2
from dev.lab.ladder import find_ladder
from dev.tests import models, steps
from dev.tests.checks import FIXTURES, TINY, TOP, check, fast
from dev.tests.trainings import call, check_resumed, command, token_files

DTYPE, C, NH = "fp32", 64, 2  # of the fixture
STEPS = (steps.micro_batches, steps.accumulated_steps, steps.repeated_steps,
         steps.clipped_gradients, steps.other_ways, steps.computed_again, steps.moments_in_bf16,
         steps.smaller_batches, steps.next_logits)


@fast
def test_lint():
    """ruff finds nothing."""
    if not util.find_spec("ruff"):
        pytest.skip("ruff is not installed")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=TOP,
                          text=True, capture_output=True)
    check("ruff", done.returncode == 0, (done.stdout + done.stderr) * done.returncode)


@fast
@pytest.mark.parametrize("test", [test_gpt2.finite_differences, test_gpt2.rounding,
                                  test_gpt2.two_halves, test_gpt2.numpy_beside_pytorch],
                         ids=lambda test: test.__name__)
def test_formulas(test):
    return test()


@pytest.fixture
def device():
    return models.device_of("emulated", DTYPE, C, NH)


@fast
def test_kernels(device):
    """The kernels that do not depend on the model's sizes, and so are in every compiled library."""
    names = [name for name in test_gpt2.KERNELS if not find_ladder(name).compiled_for]
    models.check_kernels("emulated", DTYPE, names, ((C, NH),))


@fast
def test_pytorch_dump(device):
    """Logits, loss, gradients and ten losses of the fixture, against PyTorch's."""
    where = "emulated", DTYPE, True, GPT2
    models.check_dump(where, TINY, FIXTURES / "gpt2_tiny_debug_state.bin", fp32_bound=1e-5)


@fast
def test_matmul(device):
    return test_gpt2.matmul(device, 27, 96, 288)


@fast
def test_forward_pass(device):
    return test_gpt2.forward_pass(device, C, NH)


@fast
@pytest.mark.parametrize("test", STEPS, ids=lambda test: test.__name__)
def test_steps(device, test):
    return test(device)


# ---- The program


def train(*flags):
    """Train in fp32. Returns the output and the line of the error."""
    return call("--device", "cpu", "--dtype", DTYPE, *flags)[1:]


@fast
def test_three_steps_and_a_resume(folder):
    """Three steps print three losses and leave a checkpoint. A run that stops after three steps and
    resumes ends with the bytes of a run of six."""
    token_files(folder)
    flags = command("cpu", folder, folder / "six", "-x", 6, "-n", 3, "-s", 0)[5:]
    text, error = train(*flags)
    losses = re.findall(r"^step +\d+/6 \| loss (\S+) ", text, re.M)
    check("six steps", not error and len(losses) == 6 and
          all(0 < float(loss) < 7 for loss in losses), error or losses)
    check_resumed("six steps", folder / "six", lambda copy: train(*flags, "-o", copy, "-y", 1), 6)
