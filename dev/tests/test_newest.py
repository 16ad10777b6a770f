"""Test dev/features/checkpoints/newest.py: -e FOLDER, the newest complete checkpoint of a run."""
import json
import os
import re
import shutil
from pathlib import Path

from dev.features.checkpoints.newest import newest_checkpoint
from dev.tests.checks import TINY, check, check_refusal
from dev.tests.trainings import ran
from dev.tools import score
from prepro_tinyshakespeare import write_tokens


def test_newest(folder):
    """The newest checkpoint with a DONE file; without any, the newest weights."""
    def checkpoint(run, step, *names):
        run.mkdir(exist_ok=True)
        for name in names:
            path = run / f"{name}_{step:08d}{'.bin' if name == 'model' else ''}"
            shutil.copy(TINY, path) if name == "model" else path.touch()

    def found(run):
        path = newest_checkpoint(run)
        return path and Path(path).relative_to(run).as_posix()

    run, weights = folder / "run", folder / "weights"
    checkpoint(run, 9, "model", "DONE")
    checkpoint(run, 100, "model", "DONE")
    check("the newest", found(run) == "model_00000100.bin", found(run))
    checkpoint(run, 300, "model")  # a run that was killed before its state was written
    checkpoint(run, 200, "DONE")
    for name in ("model_00000400.bin.77ab.tmp", "DONE_00000400.77.tmp", "ema_00000500.bin",
                 "model_x.bin", "DONE_0000100"):
        (run / name).touch()
    check("newer ones are not complete", found(run) == "model_00000100.bin", found(run))
    (run / "DONE_00000300").touch()
    check("until they are", found(run) == "model_00000300.bin", found(run))
    for step in (2, 10):
        checkpoint(weights, step, "model")
    check("weights alone", found(weights) == "model_00000010.bin", found(weights))
    (folder / "none").mkdir()
    check("no weights", found(folder / "none") is None)

    os.chdir(folder)
    write_tokens("tokens.bin", range(200))
    flags = ("--device", "cpu", "-i", "tokens.bin", "-j", "tokens.bin", "-b", 1, "-t", 8, "-x", 1,
             "-v", 0, "-s", 0)
    text = ran("--device", "cpu", "-e", "run", "--sample", "", "-g", 1)
    check("--sample says which", "model run/model_00000300.bin (-e)\n" in text, text)
    text = ran(*flags, "-e", "run/", "-o", "out", "-n", 1)
    check("training says which",
          re.search(r"^model +\| run/model_00000300.bin \(-e\)", text, re.M), text)
    kept = json.loads(Path("out/run_00000000.json").read_text())["flags"]["model"]
    check("and keeps which", kept == str(run / "model_00000300.bin"), kept)
    text = ran(*flags, "-x", 2, "-e", "run", "-o", "out", "-y", 1)
    check("a resumed run", "step    2/2" in text, text)
    Path("questions.bin").touch()
    check_refusal("score.py takes it", "questions.bin: its header of 0 bytes", score.main,
                  ["-e", "run", "--data", "questions.bin"])
    (folder / "d1").mkdir()
    checkpoint(folder / "d1", 1, "model", "DONE")
    text = ran(*flags, "-e", "d1", "--dry-run")
    check("a descriptor stays one", "d1 (-e)" in text and "L=1" in text, text)
