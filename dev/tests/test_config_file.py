"""Test --config: TOML and a run's own run_*.json, beside flags on the command line and -y 1."""
import contextlib
import io
import json
import re
import sys
from unittest import mock

import pytest

import train_gpt2
from dev.features import config_file, order
from dev.features.base import GPT2
from dev.features.order import table_of_flags
from dev.tests.checks import FIXTURES, TINY, check, fast
from dev.tests.trainings import LLAMA, call, check_error, ran, trained

pytestmark = pytest.mark.usefixtures("token_data")


def toml_in(folder, *more, **values):
    """A file with the flags of a small run, and more lines. Values replace those of the same
    name."""
    pytest.importorskip("tomllib")
    values = {"model": str(TINY), "train-data": f"{folder}/part_train_0.bin",
              "val_data": f"{folder}/part_val_0.bin", "batch-size": 2, "seq-len": 8, "steps": 3,
              "val-every": 0, "sample_every": 0, "learning_rate": 1e-2, "device": "cpu"} | values
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    (folder / "run.toml").write_text("\n".join([*lines, *more]) + "\n")
    return folder / "run.toml"


def flags_of(output, step=0):
    return json.loads((output / f"run_{step:08d}.json").read_text())["flags"]


@fast
def test_toml(folder):
    """A run by a file is that of the same flags; flags win, and -y 1 knows those of the file."""
    file, output, plain = toml_in(folder, overfit=True, dtype="fp32"), folder / "a", folder / "b"
    file.write_text(file.read_text(), "utf-8-sig", newline="\r\n")  # as Windows' editors do
    ran("--config", file, "-o", output, "-n", 2)
    trained(plain, "-x", 3, "-a", "--dtype", "fp32", "-n", 2)
    model = "model_00000003.bin"
    same = (output / model).read_bytes() == (plain / model).read_bytes()
    check("the same weights", same)
    found, wish = ({**flags_of(each), "output": 0} for each in (output, plain))
    check("the same flags", found == wish, found.items() ^ wish.items())
    check("types", type(found["learning_rate"]) is float and found["overfit"] == 1 and
          type(found["overfit"]) is int)

    text = ran("--config", file, "-l", 5e-3, "--steps", 4, "-a", 0)
    check("flags win", "step    4/4 " in text and "lr 5.00e-03" in text and "val_0.bin: " not in
          text, text[-500:])
    (folder / "run.toml").unlink()
    text = ran("-o", output, "-y", 1, "-x", 4, "--device", "cpu")
    check("-y 1 without the file", "step    4/4 " in text and "lr 1.00e-02" in text, text[-500:])
    (folder / "more.toml").write_text("steps = 5\nlearning-rate = 0.5\nresume = true\n")
    text = ran("-o", output, "--config", folder / "more.toml", "--device",
                    "cpu")
    check("-y 1 with a file: as if given", "step    5/5 " in text and "lr 5.00e-01" in text and
          "WARNING: --learning-rate was 0.01 until step 4, and is 0.5" in text, text)
    (folder / "more.toml").write_text("seq_len = 4\n")
    error = call("-o", output, "-y", 1, "--config", folder / "more.toml", "--device", "cpu")[2]
    check("-y 1 with another -t", "of a run with -t 8, and now it is 4" in error, error)
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        order.main(["--help"])
    check("--help", re.search("--config STR +flags from a TOML file", shown.getvalue()))


def test_notes(folder):
    """A run_*.json repeats its run into another folder, on GPT-2 and Llama."""
    for name, model, program in (("gpt2", TINY, "train_gpt2"),
                                 ("llama", FIXTURES / "llama_tied.bin", LLAMA)):
        first, again, other = (folder / f"{name} {i}" for i in range(3))
        trained(first, "-e", model, "-i", folder / "part_train_*.bin", "-d", 32, "-x", 3, "-n", 2,
                "-v", 2, "-m", 1, "--label-smoothing", 0.1, program=program)
        notes = first / "run_00000002.json"
        notes.write_text(notes.read_text(), "utf-8-sig", newline="\r\n")
        ran("--config", notes, "-o", again, "--device", "cpu",
                 program=program)
        for file in ("model_00000003.bin", "state_00000003_00000.bin", "main.log"):
            same = (first / file).read_bytes() == (again / file).read_bytes()
            check(f"{name} again: {file}", same)
        text = ran("--config", notes, "-o", other, "--device", "cpu",
                        "-x", 1, program=program)
        check(f"{name}: flags win", "step    1/1 " in text)
    text = ran("--config", notes, "--device", "cpu", "-n", 0, program=LLAMA)
    check("without -o it does not write into the folder", "wrote" not in text, text)
    ran("--config", notes, "--device", "cpu", "--sample", "", "-g", 1,
                    "--temperature", 0, "-n", 0, program=LLAMA)


@fast
def test_refused(folder):
    """One line names the file, the flag, and what is expected."""
    def check_line(path, wish):
        check_error(f"--config {path}: {wish}$", "--config", path, early=True)

    for line, wish in (
            ("learning_rat = 1", "learning_rat: there is no such flag; .*did you mean "
             r"learning-rate\?"),
            ("[training]\nsteps = 3", "training: there is no such flag; expected long names.*"),
            ('x = 3', "x: there is no such flag; expected long names of --help, such as .*"),
            ('config = "a.toml"', "config: there is no such flag.*"),
            ('learning-rate = "3e-4"', 'learning-rate is "3e-4"; expected a number'),
            ("weight-decay = -1", "weight-decay is -1; expected at least 0 and finite"),
            ("clip = inf", "clip is Infinity; expected at least 0 and finite"),
            ("beta1 = 1.5", "beta1 is 1.5; expected at least 0 and below 1"),
            ("warmup = 2.5", "warmup is 2.5; expected a whole number"),
            ("warmup = true", "warmup is true; expected a whole number"),
            ("warmup = -1", "warmup is -1; expected at least 0"),
            ("eps = [1, 2]", r"eps is \[1, 2\]; expected a number"),
            ("output = 3", "output is 3; expected text in quotes"),
            ("best = 3", "best is 3; expected true or false"),
            ('schedule = "cosin"', 'schedule is "cosin"; expected "cosine" or "linear" or .*'),
            ('log = "mlflow"', 'log is "mlflow"; expected tensorboard or wandb, or both .*'),
            ("ema = 2000-01-01", 'ema is "2000-01-01"; expected a number'),
            ("clip = 1\nbatch-size = 2\nbatch_size = 3",
             "batch_size and batch-size are the same flag: expected one of them"),
            ("clip 1", ".*at line 1.*; expected TOML such as learning-rate = 6e-4"),
            ("clip = 1\nclip = 1", ".*; expected TOML such as .*")):
        pytest.importorskip("tomllib")
        (folder / "a.toml").write_text(line)
        check_line(folder / "a.toml", wish)
    for text, wish in (("3", 'has no "flags"; expected a run_.*.json.*'),
                       ("{}", 'has no "flags"; .*'), ('{"flags": 1}', 'has no "flags"; .*'),
                       ("{", ".*line 1.*; expected a run_.*.json"),
                       ('{"flags": {"steps": "3"}}', 'steps is "3"; expected a whole number'),
                       ('{"flags": {"step": 3}}', r"step: .*; .*did you mean steps\?")):
        (folder / "a.json").write_text(text)
        check_line(folder / "a.json", wish)
    check_line(folder / "none.toml", "could not be read .*; expected a .toml file, or a "
               "run_.*.json")
    (folder / "a.toml").write_bytes(b"\xff")
    check_line(folder / "a.toml", "is no text in UTF-8; expected a .toml file, .*")
    with mock.patch.dict(sys.modules, tomllib=None):
        (folder / "a.toml").write_text("clip = 1")
        check_line(folder / "a.toml", "Python before 3.11 reads no TOML: .*")
    (folder / "a.toml").write_text("checkpoints-kept = 2")
    error = call("--config", folder / "a.toml")[2]
    check("needs", error == "error: --checkpoints-kept: expected --checkpoint-every too; --help "
          "says what they do\n", error)


def test_every_flag():
    """Each flag's default is a value that a file may have."""
    table, _ = table_of_flags(train_gpt2.FLAGS, GPT2.Config)
    [clip] = [flag for flag in table if flag.key == "clip"]
    check("a whole number for a rate", repr(config_file.value_of("here", clip, 1)) == "1.0")
    for flag in table:
        if flag.default is not None:
            found = config_file.value_of("here", flag, flag.default)
            check(flag.name, found == flag.default and type(found) is type(flag.default), found)
        elif flag.kind == "switch":
            check(flag.name, config_file.value_of("here", flag, False) == 0)
