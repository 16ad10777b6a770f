"""Test --best and --patience with validation losses from a script: which file is kept, when a run
stops, and that a run that is killed and resumed does the same. On the CPU only."""
import json
import re
import time
from unittest import mock

import pytest

from dev.features import base
from dev.features.checkpoints import background_writer
from dev.tests.checks import TINY, check, fast
from dev.tests.trainings import call, check_error, killed_in, ran, trained

LOSSES = (5, 4, 3, 3.5, 2, 2.5, 2.6)  # after 0, 2, 4 .. 12 steps: the lowest is that of 8
RISING = (5, 4, 3, 3.5, 3.1, 3.2, 1)  # 4 is the lowest for a while

pytestmark = pytest.mark.usefixtures("token_data")


def train(output, losses, *flags, **more):
    """Train with these validation losses. Returns what is printed, with an error's line."""
    every = () if "-y" in flags else ("-x", 12, "-v", 2, "-m", 1)
    with mock.patch.object(base.Training, "total_loss",
                           lambda self, batches: losses[self.model.step // 2]):
        return trained(output, *every, *flags, **more)


def names(output, pattern="best_*"):
    return sorted(path.name for path in output.glob(pattern))


def steps_of(output):
    """The lines of log.jsonl that are of training steps, by their steps."""
    lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "loss" in line]


@fast
def test_best_is_kept(folder):
    """The file has the weights of the lowest loss, and outlasts the checkpoint of that step."""
    every, few = folder / "every", folder / "few"
    train(every, LOSSES, "-n", 4)
    check("without --best: no file", names(every) == [])
    text = train(few, LOSSES, "--best", "-n", 4, "-nk", 1, "--ema", 0.5)
    check("its name", names(few) == ["best_00000008.bin"], names(few))
    check("it is announced", f"wrote {few}/best_00000008.bin, of the lowest val loss" in text)
    best = few / "best_00000008.bin"
    same = best.read_bytes() == (every / "model_00000008.bin").read_bytes()
    check("the weights after 8 steps, and not their average", same)
    left = names(few, "*_0*[28]*")
    wish = [best.name, *(f"{name}_00000012{end}" for name, end in (
        ("ema", ".bin"), ("model", ".bin"), ("run", ".json"))), "state_00000012_00000.bin"]
    check("-nk 1 removes all else of step 8", left == ["DONE_00000012", *wish], left)
    for flags in (("-x", 2), ("--sample", "", "-g", 2, "--temperature", 0)):
        ran("--device", "cpu", "-e", best, "-i", folder / "part_train_0.bin", "-v", 0, "-s", 0,
            "-t", 8, *flags)


def test_killed_and_resumed(folder):
    """The best file that a checkpoint knows is there until the next one; what a run finds again is
    the same, and if it finds nothing better, that one stays."""
    for name, losses, wish in (("again", LOSSES, "best_00000008.bin"),
                               ("worse", (5, 4, 3) + 4 * (3.5,), "best_00000004.bin")):
        output = folder / name
        with killed_in(9):
            train(output, LOSSES, "--best", 1, "-n", 5)
        check(f"{name}: killed", names(output) == ["best_00000004.bin", "best_00000008.bin"],
              names(output))
        noted = json.loads((output / "run_00000005.json").read_text())["lowest"]
        check(f"{name}: noted", noted == dict(best=4, loss=3, waited=0, judged=4), noted)
        train(output, losses, "-y", 1)
        check(f"{name}: the end", names(output) == [wish], names(output))
    (folder / "again" / "best_00000008.bin").unlink()
    text = train(folder / "again", 8 * LOSSES, "-y", 1, "-x", 14)
    check("a best file is missing: a warning", re.search(
        "WARNING: .*best_00000008.bin is not there: the lowest val loss counts from here", text))
    check("... and the next is written", names(folder / "again") == ["best_00000012.bin"],
          names(folder / "again"))


def test_not_written(folder):
    """A best file that cannot be written: a warning, and the next one that is lower than the one
    before is written. The run goes on."""
    def replace_file(path, parts):
        if path.name == "best_00000008.bin":
            time.sleep(0.2)  # the run goes on meanwhile
            raise OSError(28, "No space left on device")
        replace(path, parts)

    replace, output = background_writer.replace_file, folder / "full"
    with mock.patch.object(background_writer, "replace_file", replace_file):
        text = train(output, LOSSES, "--best")
    check("a warning", "WARNING: no best_00000008.bin: [Errno 28] No space left" in text, text)
    check("a later one", names(output) == ["best_00000010.bin"], names(output))


@fast
def test_patience(folder):
    """The run stops after N validations without a new lowest loss, and saves as at its end."""
    output = folder / "run"
    text = train(output, RISING, "--best", "--patience", 2, "-n", 5, "-s", 100, "-g", 3)
    wish = ("\nstopped after 8 of 12 steps: the lowest val loss is 3.000000 after step 4, and 2 "
            "validations since were not below it (--patience)\n")
    check("it stops", wish in text, text[-500:])
    check("with a sample, once", text.count("generating:") == 1)
    check("with a summary", "\n8 steps in " in text)
    check("with a checkpoint", names(output, "DONE*") == ["DONE_00000005", "DONE_00000008"])
    check("with the best", names(output) == ["best_00000004.bin"])

    text = train(output, RISING, "-y", 1)
    check("resumed: it stops again", "stopped after 8 of 12" in text and
          steps_of(output) == [*range(1, 9)], text[-500:])
    text = train(output, RISING, "-y", 1, "--patience", 3)
    check("with more patience: it goes on", "stopped after 10 of 12" in text, text[-500:])
    train(output, RISING, "-y", 1, "--patience", 0)
    check("without: to the end", steps_of(output) == [*range(1, 13)] and
          names(output) == ["best_00000012.bin"], names(output))


def test_patience_is_restored(folder):
    """Killed between two validations without a new best: the first still counts after a resume,
    and the validation that is done twice counts once."""
    output = folder / "run"
    with killed_in(7):
        train(output, RISING, "--patience", 2, "-n", 3)
    text = train(output, RISING, "-y", 1)
    check("it stops after 8", "after step 6, from" in text and "stopped after 8 of 12" in text,
          text[-500:])
    check("without --best: no file", names(output) == [])
    alone = folder / "alone"
    text = train(alone, RISING, "--patience", 2, "-n", 0)
    left = sorted(path.name for path in alone.iterdir())
    wish = ["log.jsonl", "main.log", "model_00000008.bin", "run_00000000.json"]
    check("without -n: the weights", left == wish, left)
    text = train(folder / "equal", (5, 4, 3, 3, 3, 1, 1), "--patience", 2)
    check("an equal loss is no new lowest", "stopped after 8 of 12" in text, text[-500:])
    text = train(folder / "last", (6, 5, 4, 3, 2, 2, 2), "--patience", 2)
    check("at the last step: a normal end", "stopped after" not in text and "\n12 steps in" in text)
    with mock.patch.object(base.Training, "total_loss", lambda self, batches: float("nan")):
        text = "".join(call("--device", "cpu", "-e", TINY, "-i", folder / "part_train_0.bin", "-j",
                            folder / "part_val_0.bin", "-b", 2, "-t", 8, "-x", 12, "-v", 2, "-m", 1,
                            "-s", 0, "--patience", 3)[1:])
    check("without -o, and NaN is never the lowest", "stopped after 4 of 12" in text, text[-300:])


def test_refused(folder):
    """One line for each mistake."""
    output, flags = folder / "run", ("-e", TINY, "-i", folder / "part_train_0.bin", "-t", 8)
    for more, wish in ((("--best",), "--best: expected --output too"),
                       (("--best", "-o", output, "-v", 0), "--best: .* -v 0 .*expected another -v"),
                       (("--patience", 2, "-m", 0), "--patience: .* -m 0 .*expected another -m"),
                       (("--patience", -1), "--patience: -1: expected at least 0")):
        check_error(wish, "--device", "cpu", *flags, *more)
    train(output, LOSSES, "--best", "-n", 6)
    path = output / "run_00000012.json"
    notes = json.loads(path.read_text())
    for lowest in (3, dict(best=4), notes["lowest"] | dict(loss="low")):
        path.write_text(json.dumps(notes | dict(lowest=lowest)))
        text = train(output, LOSSES, "-y", 1, "-x", 14, status=1)
        check(f"damaged: {lowest}", re.search("run_00000012.json: lowest is .*; expected null, or "
                                              "the numbers best, loss", text), text)
