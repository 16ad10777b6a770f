"""Test log.jsonl, and --log with modules that stand in for TensorBoard and wandb; with the real
TensorBoard and wandb if they are installed. On the CPU only."""
import json
import math
import re
import sys
from unittest import mock

import numpy as np
import pytest

from dev.features import base, loggers
from dev.features.checkpoints.json_log import JsonLog, shortest
from dev.tests.checks import TINY, check, fast
from dev.tests.trainings import (LENGTHS, check_error, file_of, killed_in, random_examples,
                                 token_files, trained)

CALL = """
def call(name, /, *args, **more):
    with open(r"{calls}", "a") as file:
        file.write(json.dumps([name, args, more]) + "\\n")
"""
RECORD = """
class {0}(dict):
    def __init__(self, **values):
        super().__init__(values)
"""
WANDB = """
class Settings(dict): pass
class Run:
    step = {rows}
    def __init__(self, id, dir, **more):
        self.id, self.dir = id, f"{dir}/wandb/offline-run-2-{id}/files"
    def define_metric(self, *args, **more): call("define_metric", *args, **more)
    def log(self, values):
        if {breaks} and values["step"] == 5: raise ConnectionError("no\\nnetwork")
        call("log", values)
    def finish(self, **more): call("finish", **more)
def init(**more):
    if {refuses}: raise RuntimeError("No API key configured.")
    call("init", **more)
    return Run(**more)
"""
EVENTS = """
class EventFileWriter:
    def __init__(self, folder, flush_secs): call("open", folder)
    def add_event(self, event): call("event", event)
    def close(self): call("close")
"""
STAND_INS = {
    "wandb/__init__.py": WANDB, "tensorboard/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py":
        RECORD.format("Event") + "class SessionLog(dict):\n    START = 1\n",
    "tensorboard/compat/proto/summary_pb2.py":
        RECORD.format("Summary") + RECORD.format("Value") + "Summary.Value = Value\n",
    "tensorboard/compat/proto/tensor_pb2.py":
        "def TensorProto(dtype, string_val): return [text.decode() for text in string_val]\n",
    "tensorboard/compat/proto/types_pb2.py": "DT_STRING = 7\n",
    "tensorboard/plugins/text/metadata.py": "def create_summary_metadata(**more): return 'text'\n",
    "tensorboard/summary/writer/event_file_writer.py": EVENTS}


@pytest.fixture(autouse=True)
def data(folder):
    token_files(folder)
    (folder / "hellaswag.bin").write_bytes(file_of(random_examples(257, LENGTHS[:3])))


@pytest.fixture
def stand_in(folder, monkeypatch):
    """stand_in(breaks, refuses, rows) makes modules that stand in for the real ones, with so many
    rows on the server, and calls() reads what was called."""
    calls = folder / "calls.jsonl"

    def make(breaks=False, refuses=False, rows=0):
        for name, text in STAND_INS.items():
            path = folder / "modules" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            values = dict(calls=calls, breaks=breaks, refuses=refuses, rows=rows)
            parts = [CALL.replace("{calls}", str(calls)), text]
            for key, value in values.items():
                parts = [part.replace(f"{{{key}}}", str(value)) for part in parts]
            path.write_text("import json\n" + "".join(parts))
        forget()

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in loggers.LOGS]:
            del sys.modules[name]

    def read():
        found = [json.loads(line) for line in calls.read_text().splitlines()]
        calls.unlink()
        return found

    # Python would take a module of the same size, written in the same second, for the one it has
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(folder / "modules")
    make.calls = read
    yield make
    forget()


def train(output, *flags, **more):
    every = () if "-y" in flags else ("-x", 6, "-v", 4, "-m", 2, "-s", 3, "-g", 2)
    return trained(output, *every, *flags, **more)


def lines_of(output, name="log.jsonl"):
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def without_times(lines):
    return [{key: value for key, value in line.items() if key not in ("time", "ms", "tok_per_s")}
            for line in lines]


@fast
def test_json_log(folder):
    """log.jsonl has what is printed; a run that is killed and resumed has the same lines."""
    whole, parts = folder / "whole", folder / "parts"
    flags = ("-n", 2, "--hellaswag", folder / "hellaswag.bin", "-t", 24)
    text = train(whole, *flags)
    lines = lines_of(whole)
    steps = [line for line in lines if "loss" in line]
    printed = re.findall(r"step +(\d+)/6 \| loss (\S+) \| norm +(\S+) \| lr (\S+) \| +(\S+) ms \| +"
                         r"(\S+) tok/s \| (\S+) tokens", text)
    for line, row in zip(steps, printed, strict=True):
        wish = [float(number.replace(",", "")) for number in row]
        found = [line[key] for key in ("step", "loss", "norm", "lr", "ms", "tok_per_s", "tokens")]
        check(f"step {row[0]}", np.allclose(found, wish, rtol=5e-3, atol=1e-4), found)
    check("loss: all digits", abs(steps[0]["loss"] - float(printed[0][1])) < 1e-6)
    others = [(line["step"], [*line][2]) for line in lines if "loss" not in line]
    check("validations, scores and samples, in order", others == [
        (0, "val_loss"), (3, "sample"), (4, "val_loss"), (4, "hellaswag"), (6, "val_loss"),
        (6, "hellaswag"), (6, "sample")], others)
    val = [line["val_loss"] for line in lines if "val_loss" in line]
    wish = [float(number) for number in re.findall(r"val loss (\S+)", text)]
    check("val losses", len(val) == len(wish) and np.allclose(val, wish, rtol=1e-6), val)
    scores = [f"{line['hellaswag']:.6f}" for line in lines if "hellaswag" in line]
    check("scores", scores == re.findall(r"HellaSwag: \d/3 = (\S+)", text) != ["0.000000"] * 2,
          scores)
    samples = [line["sample"] for line in lines if "sample" in line]
    check("samples", samples == re.findall(r"---\n(.*)\n---", text), samples)
    text = train(folder / "controlled", "--temperature", 0.5)
    samples = [line["sample"] for line in lines_of(folder / "controlled") if "sample" in line]
    check("controlled samples", samples == re.findall(r"---\n(.*)\n---", text) != [], samples)
    times = [line["time"] for line in lines]
    check("times", times == sorted(times) and 0 <= times[-1] - times[0] < 100)

    with killed_in(5):
        train(parts, *flags)
    killed = lines_of(parts)
    train(parts, "-y", 1)
    check("resumed: the same lines", without_times(lines_of(parts)) == without_times(lines))
    old = lines_of(parts, "log.jsonl.old")
    again = [line for line in killed if line["step"] - ("loss" in line) >= 4]
    check("what is done again is in .old", old == again and len(old) == 3, old)
    before = (whole / "log.jsonl").read_bytes()
    train(whole, "-y", 1)
    check("a finished run: the file stays", (whole / "log.jsonl").read_bytes() == before)
    check_error("holds an earlier run", "--device", "cpu", "-e", TINY, "-o", whole)


def test_damaged_lines(folder):
    """Lines that are no step's move to .old, with a warning; so does a cut last line, without."""
    good = b'{"step": 1, "loss": 2.5}\n{"step": 1, "val_loss": 2.0}\n'
    for name, bad, warns in (("cut", b'{"step": 2, "lo', False),
                             ("cut at its end", b'{"step": 1}', False), ("list", b"[1]\n", True),
                             ("no step", b'{"loss": 2}\n', True), ("text", b"\xff\xfe\n", True),
                             ("a text as step", b'{"step": "2"}\n', True)):
        (folder / "log.jsonl").write_bytes(good + bad + (good if warns else b""))
        with mock.patch("dev.features.checkpoints.main_log.say") as say:
            JsonLog(folder, 2, False).write('{"step": 3}')
        found = (folder / "log.jsonl").read_bytes()
        check(f"{name}: the file", found == good * (1 + warns) + b'{"step": 3}\n', found)
        old = (folder / "log.jsonl.old").read_bytes()
        check(f"{name}: .old", old == bad.rstrip(b"\n") + b"\n", old)
        wish = r".*log.jsonl: line 3 is .*; expected one such as \{\"step\": 1.* 1 such lines move"
        said = "".join(str(args[0]) for args, _ in say.call_args_list)
        check(f"{name}: a warning", bool(re.match(f"WARNING: {wish}", said)) == warns, said)
        (folder / "log.jsonl.old").unlink()
    for value, wish in ((np.float32(0.1), 0.1), (1 / 3, 0.33333334), (math.nan, None),
                        (-math.inf, None), (0.0, 0.0)):
        check(f"{value} is {wish}", shortest(value) == wish)


@fast
def test_tensorboard_calls(folder, stand_in):
    """The events are those of log.jsonl, also of a resumed run, which replaces what there was."""
    stand_in()
    output = folder / "run"
    for flags in (("-n", 2, "--log", "tensorboard"), ("-y", 1)):
        train(output, *flags)
        (start, *events, end) = stand_in.calls()
        check("opened and closed", start == ["open", [str(output)], {}] and end[0] == "close",
              start)
        first, *events = [event for _, [event], _ in events]
        check("drops all", (first["step"], first["session_log"]) == (0, dict(status=1)), first)
        found = [(event["step"], event["wall_time"], {
            each["tag"]: each.get("simple_value", each.get("tensor"))
            for each in event["summary"]["value"]}) for event in events]
        wish = [(line.pop("step"), line.pop("time"), line) for line in lines_of(output)]
        wish = [(*at, {key: [value] if key == "sample" else value for key, value in line.items()})
                for *at, line in wish]
        check(f"events {flags}", found == wish, found)
        (output / "DONE_00000006").unlink()


@fast
def test_wandb_calls(folder, stand_in):
    """The lines of log.jsonl, on an x axis of steps; a resumed run, even one without a checkpoint,
    has the same id."""
    stand_in()
    output = folder / "run"
    with killed_in(1):
        train(output, "-n", 2, "--log", "wandb")
    first, *_, end = stand_in.calls()
    name, args, more = first
    check("init", more["name"] == "run" and more["project"] == "train_gpt2" and
          more["resume"] == "allow" and more["config"]["learning_rate"] == 1e-2, first)
    check("an end by an error", end == ["finish", [], dict(exit_code=1)], end)
    train(output, "-y", 1)
    found = stand_in.calls()
    check("the same id at the start", found[0][2]["id"] == more["id"], found[0])
    check("x axis", found[1:3] == [["define_metric", ["step"], {}],
                                   ["define_metric", ["*"], dict(step_metric="step")]], found[1:3])
    logged = [values for name, [values], _ in found[3:-1]]
    wish = [line for line in lines_of(output) if line.pop("time")]
    check("values", logged == wish, logged)
    check("a good end", found[-1] == ["finish", [], dict(exit_code=0)], found[-1])
    own, before = (output / f"wandb/offline-run-{i}-{more['id']}" for i in (2, 1))
    own.mkdir(parents=True), before.mkdir()
    for rows in (0, 10):  # offline, and with those on the server that the dead run has sent
        stand_in(rows=rows)
        (output / "DONE_00000006").unlink()
        train(output, "-y", 1)
        calls = stand_in.calls()
        check("the same id after 4", calls[0][2]["id"] == more["id"])
        logged = [values for name, [values], _ in calls[3:-1]]
        wish = [line for line in lines_of(output) if line.pop("time")][rows:]
        check(f"{rows} rows: the others are sent again", logged == wish != [], logged)
    found = sorted(path.name for path in own.parent.iterdir())
    check("the dead run has another name", found == [own.name, f"old-run-1-{more['id']}"], found)
    with mock.patch.dict("os.environ", WANDB_PROJECT="p", WANDB_NAME="n"):
        train(folder / "named", "--log", "tensorboard,wandb", "-x", 1)
    calls = stand_in.calls()
    more = next(more for name, _, more in calls if name == "init")
    check("wandb's variables", (more["project"], more["name"]) == ("p", "n"), more)
    check("both", [calls[0][0], calls[-2][0], calls[-1][0]] == ["open", "close", "finish"], calls)


def test_failures(folder, stand_in, monkeypatch):
    """A log that fails is reported, and training goes on; one that cannot start is an error before
    the folder has a run."""
    stand_in(breaks=True)
    text = train(folder / "breaks", "--log", "wandb,tensorboard")
    check("a warning, once", text.count(
        "WARNING: --log wandb ends here: ConnectionError: no network\n") == 1, text[-500:])
    check("training goes on", "\n6 steps in " in text)
    calls = [name for name, *_ in stand_in.calls()]
    check("the other log is complete", calls.count("event") == 12, calls)
    stand_in(refuses=True)
    text = train(folder / "refuses", "--log", "wandb", status=1)
    check("no login", text.endswith("error: --log wandb: No API key configured. (WANDB_MODE=offline"
                                    " needs neither a login nor a network)\n"), text[-300:])
    check("... and no run", not any((folder / "refuses").iterdir()))
    with mock.patch.object(base.Training, "make_model", side_effect=ZeroDivisionError):
        stand_in()
        with pytest.raises(ZeroDivisionError):
            train(folder / "unmade", "--log", "wandb")
    check("closed if the model cannot be made", stand_in.calls()[-1][2] == dict(exit_code=1))
    (folder / "empty" / "wandb").mkdir(parents=True)  # such as wandb's own folder
    monkeypatch.setattr(sys, "path", [str(folder / "empty")])
    sys.modules.pop("wandb", None), sys.path_importer_cache.clear()
    for flags, wish in ((("--log", "wandb"), "--log wandb: .*not installed: pip install wandb"),
                        (("--log", "tensorboard"), "--log tensorboard: .*pip install tensorboard"),
                        (("--log", "mlflow"), "--log: mlflow: expected tensorboard or wandb, or"),
                        (("--log", "wandb,wandb"), "--log: wandb,wandb: expected")):
        text = train(folder / "none", *flags, status=1)
        check(f"refused: {flags}", re.fullmatch(f"error: {wish}.*\n", text), text)
    check_error("--log: expected --output too", "--device", "cpu", "-e", TINY, "--log", "wandb")


# ---- With the real ones


def test_real_tensorboard(folder):
    """TensorBoard reads the curves of a run that was killed and resumed, without a point twice."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output, scored = folder / "run", ("--hellaswag", folder / "hellaswag.bin", "-t", 24)
    with killed_in(5):
        train(output, "-n", 2, "--log", "tensorboard", "-s", 4, *scored)
    train(output, "-y", 1)
    found = [len([*output.glob(f"events.out.{name}.*")]) for name in ("tfevents", "old")]
    check("files", found == [1, 1], found)
    read = accumulator.EventAccumulator(str(output))
    read.Reload()
    for tag in ("loss", "norm", "lr", "tok_per_s", "val_loss", "hellaswag"):
        found = [(each.step, each.value) for each in read.Scalars(tag)]
        wish = [(line["step"], line[tag]) for line in lines_of(output) if tag in line]
        check(tag, [step for step, _ in found] == [step for step, _ in wish] and
              np.allclose([x for _, x in found], [x for _, x in wish]), found)
    texts = [each.tensor_proto.string_val[0].decode() for each in read.Tensors("sample")]
    check("samples", texts == [line["sample"] for line in lines_of(output) if "sample" in line])


def test_real_wandb(folder):
    """wandb takes an offline run, and a resumed one replaces it."""
    pytest.importorskip("wandb")
    with mock.patch.dict("os.environ", WANDB_MODE="offline", WANDB_SILENT="true"):
        text = train(folder / "run", "-n", 6, "--log", "wandb") + train(folder / "run", "-y", 1)
    check("no warning", "WARNING: --log" not in text, text)
    found = [len([*(folder / "run/wandb").glob(f"{name}-run-*")]) for name in ("offline", "old")]
    check("a run", found == [1, 1], found)
