"""Test attention's gradient with five products, dev/gpu/attention_five.cu, for heads of 128 channels on Hopper.

    python -m dev.tests.test_five                      # on the CPU, as on Hopper
    python -m dev.tests.test_five --device cuda        # on a Hopper GPU: also the same bits in ten runs
    python -m dev.tests.test_five --planted            # on the CPU: with each of these faults the checks have to fail
"""
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.features import FEATURES, capability
from dev.gpu import attention_five
from dev.gpu.attention_five import FiveProducts
from dev.lab.bench import BF16_LIMIT
from dev.tests import checks
from dev.tests.checks import EXACT, check
from dev.tools import time_five
from train_gpt2 import GPT2, pack_batch, to_float

SECONDS = 90  # that checks with a fault may take: some never end
AS_HOPPER, RACES = "-O1 -DHOPPER", "-O1 -DHOPPER -fsanitize=thread"
A_RACE = "a part is stored before it was read"  # only the race finder sees it
PLANTED = (  # (what is wrong, a place in attention_five.cu, the same with a fault)
    ("no part is added", "turn > 0);\n                lines_read", "false);\n                lines_read"),
    ("the first part is added", "turn > 0);\n                lines_read", "true);\n                lines_read"),
    ("a turn is not waited for", "while (*adders < turn) {}", ""),
    ("turns are not cleared", "if (threadIdx.x == 0) turns[1 + blockIdx.x] = 0;", ""),
    ("one warpgroup's half of dq", "half = (own.slab - own.first) / 64;", "half = 0;"),
    ("dscores of a tile, not of the one before", "(n + 1) % 2 * DSCORES", "n % 2 * DSCORES"),
    ("the mask of one slab", "if (query >= own.slab + SLAB) return;", "if (query >= own.slab) return;"),
    ("delta of the row before", "delta[row] = t < T ? sum", "delta[row] = t < T - 1 ? sum"),
    ("dk without its factor", "dk[e] *= scale", "dk[e] *= 1.0f"),
    ("dq without its factor", "x.x[0][n][1] = scale * four.y;", "x.x[0][n][1] = four.y;"),
    ("the sums of half of the rows", "i < SHARES; i++) sum", "i < SHARES / 2; i++) sum"),
    (A_RACE, "if (n >= 2) mbarrier_wait(part_read[n % 2], (n / 2 + 1) % 2);", ""),
    ("a tile is loaded before all are done", "if (n >= FIVE_STAGES) mbarrier_wait(done, (n - FIVE_STAGES) % 2);", ""),
)


def results(device_name):
    """dqkv and its sums, at odd sizes, with heads that share keys, with ReLU and with huge scores."""
    device = time_five.make(device_name)
    for text in time_five.CHECKS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            wrong = time_five.check(device, text, time_five.VERSIONS[:1])
        check(f"five products {text}", not wrong, said.getvalue().strip().rpartition(": ")[2])


def races(device_name):
    """The kernels have no race, at a size with several tiles and blocks."""
    if device_name == "cpu":
        check("no race", *checked("B=1,T=260,NH=2,NKV=2", RACES))


def checked(text, flags, source=attention_five.SOURCE):
    """(whether five products are right at a size, what is said), with the CPU's kernels compiled from a source."""
    said = io.StringIO()
    with (mock.patch.object(time_five, "SOURCE", source), mock.patch.dict(os.environ, CXXFLAGS=flags),
          contextlib.redirect_stdout(said)):
        wrong = time_five.check(time_five.make("cpu"), text, time_five.VERSIONS[:1])
    return not wrong, said.getvalue().strip().rpartition("products: ")[2]


def bits(device_name):
    """Two runs give the same bits, on a GPU in which blocks of many heads wait for each other."""
    if device_name == "cuda":
        device = time_five.make("cuda")
        with device.cupy.cuda.Stream(non_blocking=True):
            said = time_five.same(time_five.filled_bench(device, "B=4,T=1000,NH=16,NKV=16"))
        check("the same bits ten times", said.startswith("the same"), said)


def model(device_name):
    """A model with this feature has the gradient that the plain one has, for batches of two shapes."""
    device, found = time_five.make(device_name), []
    for kind in (GPT2, type("Five", (FiveProducts, GPT2), {})):
        of_model = kind(time_five.Config128(maxT=300, V=50, Vp=64, L=1, NH=2, C=256), device, 2, 300)
        launched, results, draw = [], [], np.random.default_rng(1)
        with noted(device, launched):
            for B, T in ((2, 300), (1, 140)):
                of_model.set_batch(pack_batch(*np.zeros((2, B, T), np.int32)))
                a, back = of_model.layers[0][2], of_model.back
                for array in (a.qkv, back.dinp):
                    device.put(array, to_bf16(np.float32(draw.standard_normal(array.shape))))
                of_model.attention("attention_forward", a.atty, a.lse, a.qkv)
                of_model.attention_backward(a.qkv, a.lse, a.atty, back.dinp)
                blocks, width = B * -(-T // device.attention_sizes.rows), a.qkv.shape[1]
                sums = device.get(back.sums).reshape(-1)[: blocks * width]
                results += to_float(device.get(back.dqkv)), sums.reshape(blocks, width).sum(0)
        found.append((results, {*launched}))
    (plain, by_plain), (five, by_five) = found
    check("the plain one takes seven products", "attention_backward_q" in by_plain and "attention_five" not in by_plain)
    check("with the feature it takes five", "attention_five" in by_five and "attention_backward_q" not in by_five)
    for name, one, other in zip(("dqkv", "sums", "dqkv, another shape", "sums, another shape"), five, plain):
        yield name, one, other, BF16_LIMIT


def noted(device, launched):
    """Has the device's launch also append each kernel's name to launched."""
    launch = device.launch

    def with_note(name, *args, **sizes):
        launched.append(name)
        launch(name, *args, **sizes)

    return mock.patch.object(device, "launch", with_note)


def others(device_name):
    """Heads of other sizes, other dtypes and GPUs other than Hopper are not affected; a GPU asks for the feature."""
    for hopper, C in ((True, 128), (False, 256)):
        base = type("Base", (), dict(tables=classmethod(lambda cls, *sizes: {})))
        kind = type("Five", (FiveProducts, base), {})
        tables = kind.tables(SimpleNamespace(C=C, NH=2), SimpleNamespace(hopper=hopper), 1, 64)
        yield f"no arena, {hopper=} {C=}", np.array(len(tables)), 0, EXACT
    [row] = [feature for feature in FEATURES if feature.name == "five products"]
    for device, plain, wish in (("cuda", 0, True), ("cuda", 1, False), ("cpu", 0, False)):
        asked = bool(row.asked(SimpleNamespace(device=device, plain=plain), None))
        yield f"asked for, {device} {plain=}", np.array(asked), wish, EXACT


def planted():
    """With each fault the checks have to fail, or to hang. Returns how many do not."""
    missed = 0
    for i, (what, *_) in enumerate(PLANTED):
        try:
            done = subprocess.run([sys.executable, "-m", __spec__.name, "--plant", str(i)], timeout=SECONDS)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = "it hangs"
        print(f"{'MISSED' if status == 0 else 'found '} {what}{'' if status in (0, 1) else f': {status}'}", flush=True)
        missed += status == 0
    return missed


def plant(i):
    """Check with one fault. Returns 1 if that is noticed."""
    what, right, wrong = PLANTED[i]
    text = attention_five.SOURCE.read_text("utf-8")
    assert text.count(right) == 1, f"{right!r} is there {text.count(right)} times"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention_five.cu"
        path.write_text(text.replace(right, wrong), "utf-8")
        sizes, flags = (("B=1,T=260,NH=2,NKV=2",), RACES) if what == A_RACE else (time_five.CHECKS, AS_HOPPER)
        return int(not all(checked(text, flags, path)[0] for text in sizes))


if __name__ == "__main__":
    os.environ["CXXFLAGS"] = AS_HOPPER
    if "--planted" in sys.argv:
        sys.exit(planted())
    if "--plant" in sys.argv:
        sys.exit(plant(int(sys.argv[-1])))
    checks.run_program((results, races, bits, model, others), fits=lambda name: name == "cpu" or capability() == 90)
