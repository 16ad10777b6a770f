"""Test --ema against the recurrence in NumPy, and runs that save the average and resume with it. On
the CPU only."""
import functools

import numpy as np
import pytest

from dev.common.bf16 import master_numbers
from dev.common.config import Config, draw_parameters
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.ema import SOURCE
from dev.features.outliers import SOURCE as OUTLIERS
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.models import model_class
from dev.tests.trainings import check_resumed, trained
from train_gpt2 import pack_batch

CONFIG = Config(maxT=23, V=251, L=2, NH=2, C=64, Vp=264)


def averaged_model(dtype, decay):
    device = make_device("emulated", dtype, CONFIG, beside=[SOURCE, OUTLIERS])
    model = model_class(GPT2, "--ema", f"{decay}", "-sl", "3")(CONFIG, device, 3, 17)
    model.set_parameters(draw_parameters(CONFIG, 1))
    model.begin_average()
    return model


def average_of(model):
    return model.device.get(model.arenas["average"].view(np.float32))


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("decay", (0, 0.6, 0.999))
def test_recurrence(dtype, decay):
    """A few steps against the recurrence in float64; then a step that -sl skips, and one whose
    gradient is not finite."""
    model, rng = averaged_model(dtype, decay), np.random.default_rng(2)
    expected = master_numbers(model).astype(np.float64)
    yield "begins as the parameters", average_of(model), master_numbers(model), EXACT
    batch = pack_batch(*rng.integers(CONFIG.V, size=(2, 3, 17), dtype=np.int32))
    for _ in range(5):
        before = master_numbers(model)
        model.train_step(batch, learning_rate=1e-2)
        check("parameters move", (master_numbers(model) != before).mean() > 0.5)
        expected = decay * expected + (1 - decay) * master_numbers(model)
    yield "after 5 steps", average_of(model), expected, 1e-7
    if decay == 0:
        yield "without memory", average_of(model), master_numbers(model), EXACT
    else:
        apart = np.linalg.norm(average_of(model) - master_numbers(model))
        check("is no copy of the parameters", apart > 1e-3 * np.linalg.norm(expected), f"{apart}")

    # The windows say that all losses were 0.5 or 0.51, so this one is an outlier.
    average, parameters = average_of(model), master_numbers(model)
    model.device.put(model.adam.windows, np.full((2, 128), 0.5) + 0.01 * (np.arange(128) % 2))
    model.device.put(model.adam.seen, [128])
    model.train_step(batch, learning_rate=1e-2)
    check("a step is skipped", not model.verdict().update and not model.verdict().stopped)
    yield "skipped: parameters", master_numbers(model), parameters, EXACT
    yield "skipped: average", average_of(model), average, EXACT
    model.params.lnfb[...] = 0xFF80 if dtype == "bf16" else -np.inf
    model.train_step(batch, learning_rate=1e-2)
    check("a step is not finite", model.verdict().stopped)
    yield "not finite: average", average_of(model), average, EXACT


# ---- Runs


def names(output):
    return sorted(path.name for path in output.glob("*_0*"))


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_runs(token_data, folder, dtype):
    """A run that stops and resumes leaves the same bytes; old averages are removed with their
    checkpoints."""
    whole, plain = folder / f"{dtype} whole", folder / f"{dtype} plain"
    flags = "--dtype", dtype, "-n", 2
    text = trained(whole, *flags, "-x", 4, "--ema", 0.75)
    check("the arena is in the tables", "\naverage      | " in text)
    # --ema keeps its value
    parts, _ = check_resumed(dtype, whole, 4)
    same = ((whole / "ema_00000004.bin").read_bytes() ==
            (parts / "ema_00000004.bin").read_bytes())
    check(f"{dtype}: 4 steps and 2 + 2: the average", same)
    model, ema = (whole / f"{name}_00000004.bin" for name in ("model", "ema"))
    check("ema: another file", ema.read_bytes() != model.read_bytes())
    check("ema: a checkpoint", Config.from_file(ema) == Config.from_file(model))
    check("ema: fp32", ema.stat().st_size == 1024 + 4 * sum(
        row.size for row in Config.from_file(ema).parameter_table()))

    (parts / "ema_00000004.bin").unlink()
    text = trained(parts, "-y", 1, "-x", 5, status=1)
    check("a file is missing: an error", "ema_00000004.bin: is not there" in text)
    trained(plain, *flags, "-x", 4)
    check("without --ema: no file", not [*plain.glob("ema*")])
    same = model.read_bytes() == (plain / model.name).read_bytes()
    check("without --ema: the same parameters", same)
    state = (plain / "state_00000004_00000.bin").read_bytes()
    # The average is the last parameters, or those of step 4.
    decay = 0 if dtype == "fp32" else 0.9999999
    text = trained(plain, "-y", 1, "-x", 6, "-v", 0, "-s", 0, "--ema", decay, "-nk", 1)
    check("begun later: a warning", "begins after step 4" in text)
    left = ["DONE_00000006", "ema_00000006.bin", "model_00000006.bin", "run_00000000.json",
            "run_00000006.json", "state_00000006_00000.bin"]
    check("checkpoints before it are gone", names(plain) == left, names(plain))
    found, begun = (np.frombuffer(data, "<f4") for data in (
        (plain / "ema_00000006.bin").read_bytes()[1024:], state))
    begun = begun[-len(found) :]
    apart = np.linalg.norm(found - begun) / np.linalg.norm(begun)
    check("begun later: with fp32 parameters", apart < 1e-6 or dtype == "fp32", f"{apart:.1e}")
    if dtype == "fp32":
        ema, model = (plain / f"{name}_00000006.bin" for name in ("ema", "model"))
        check("D = 0: the parameters", ema.read_bytes() == model.read_bytes())
        trained(whole, "-y", 1, "-x", 6, "-v", 0, "-s", 0, "-nk", 1)
        check("averages before it are gone", names(whole) == left, names(whole))
        text = trained(folder / "alone", *flags, "-n", 0, "-x", 2, "--ema", 0.5)
        left = ["ema_00000002.bin", "model_00000002.bin", "run_00000000.json"]
        check("no -n: at the end", names(folder / "alone") == left, names(folder / "alone"))


def test_refused():
    """--ema with ZeRO is refused on several ranks."""
    sharded = functools.partial(model_class, GPT2, "--ema", 0.9, "-z", 1)
    sharded()  # one process has no shares, and is not refused
    check_refusal("--zero 1", "expected --zero 0", functools.partial(sharded, count=2))
