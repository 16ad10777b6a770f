"""Test -sl and -sg against z-scores from llm.c's own program, and runs that resume with other
windows.

dev/lab/kernels/outliers.py has the kernel's formula in NumPy, and dev/tests/test_resume.py skips
updates in a run.
"""
import json
import re
import shutil

import numpy as np

from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.devices import make_device
from dev.features.outliers import SOURCE, WINDOW
from dev.tests.checks import EXACT, check, fast
from dev.tests.models import model_class
from dev.tests.trainings import place_of, token_files, trained
from train_gpt2 import Verdict

SMALL = Config(maxT=8, V=11, L=1, NH=2, C=64, Vp=32)


@fast
def test_z_scores(device_name):
    """In a series of losses with one outlier, the z-scores are those that llm.c prints, also when
    they are read some steps later, and only the outlier's update is skipped. The same with
    norms."""
    device = (Emulated("fp32", SMALL, [SOURCE], only=("judge", "skip_outliers"))
              if device_name != "cuda" else make_device("cuda", "fp32", SMALL, beside=[SOURCE]))
    for limits, loss_first in ((("-sl", "11"), True), (("-sg", "11"), False)):
        model = model_class(GPT2, *limits)(SMALL, device, 1, 8)
        found, updates = [], []
        for i in range(152):
            values = 5.0 if i == 150 else 3 + 0.01 * (i % 7), 1.0
            loss, norm = values if loss_first else values[::-1]
            device.put(model.adam.verdict, Verdict(norm=0, loss=loss, update=0, stopped=0))
            device.put(model.adam.gradient_norm[:1], [norm])
            model.start_step()
            model.judge()
            found.append(model.z_scores(model.step))
            updates.append(bool(model.verdict().update))
        z, others = np.array(found).T[:: 1 if loss_first else -1]
        name = limits[0]
        yield f"{name}: none", np.isnan(z[:128]), np.full(128, True), EXACT
        yield (f"{name}: z-scores", z[[128, 150, 151]], (-0.489751907, 11.1962549, -0.0313269258),
               1e-5)
        yield f"{name}: z-scores of equal values", others[128:], np.zeros(24), EXACT
        later = [model.z_scores(step) for step in range(152 - WINDOW + 1, 153)]
        yield f"{name}: read later", np.float32(later), np.float32(found[-WINDOW:]), EXACT
        check(f"{name}: one is skipped", updates == [i != 150 for i in range(152)])


# ---- Runs


def test_runs(device_name, folder):
    """A checkpoint has windows if its run has a limit. A run can resume from a checkpoint with
    windows, as all older ones are, and from one without."""
    token_files(folder)
    plain = folder / "plain"
    place = dict(device=place_of(device_name))
    trained(plain, "--dtype", "fp32", "-n", 2, "-x", 2, **place)
    notes = json.loads((plain / "run_00000002.json").read_text())
    check("no limit: no windows", not notes.keys() & {"windows", "seen"})

    # These say that all losses and norms were 0.5 or 0.51, so the next step is an outlier.
    windows = np.tile(0.5 + 0.01 * (np.arange(WINDOW) % 2), (2, 1))
    given = notes | dict(windows=windows.tolist(), seen=[3 * WINDOW + 5])
    for name, before, flags, skips, says in (
            ("windows", given, ("-sl", 3), True, False),
            ("windows of norms", given, ("-sg", 3), True, False),
            ("a high limit", given, ("-sl", 1e4), False, False),
            ("no windows", notes, ("-sl", 3), False, True),
            ("windows and no limit", given, (), False, False)):
        output = shutil.copytree(plain, folder / name)
        (output / "run_00000002.json").write_text(json.dumps(before))
        text = trained(output, "-y", 1, "-x", 3, *flags, **place)
        for what, wish, words in (("the step is skipped", skips, "WARNING: step 3: no update"),
                                  ("they begin empty", says, "are never skipped")):
            found = words in text
            check(f"{name}: {what}: {wish}", found == wish, text * (found != wish))
        after = json.loads((output / "run_00000003.json").read_text())
        if not flags:
            check(f"{name}: they are gone", not after.keys() & {"windows", "seen"})
            continue
        found = re.search(r"^step +3/3 \| loss (\S+) \| norm +(\S+) ", text, re.M)
        wish, seen = (np.array(before.get("windows", np.zeros((2, WINDOW)))),
                      before.get("seen", [0]))
        wish[:, seen[0] % WINDOW] = [float(x) for x in found.groups()]
        check(f"{name}: one more seen", after["seen"] == [seen[0] + 1], after["seen"])
        yield f"{name}: afterwards", np.array(after["windows"]), wish, 1e-5
