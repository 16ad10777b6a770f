"""Test that a run's folder loses nothing in silence: who may write to it, what is left when it goes on, damaged files.

    python -m dev.tests.test_run_folder

Trainings are small, on the CPU, and calls of train_gpt2.main within this process: no new ones are started. What is
signals, kills, and bits of a run that goes on is in dev/tests/test_runs.py.
"""
import contextlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import train_gpt2
from dev.checkpoints.resume import load_position
from dev.checkpoints.state_file import STATE, State, shuffle_record
from dev.data.shuffled_loader import FilesLoader
from dev.tests.checks import EXACT, check, header_refusal, run_program, words
from dev.tests.models import FIXTURES
from dev.tests.trainings import call
from prepro_tinyshakespeare import UserError, write_tokens
from train_gpt2 import Config, FastTraining, Training

TINY = FIXTURES / "gpt2_tiny.bin"  # V = 331, L = 2, NH = 2, C = 64, maxT = 40


def token_files(folder):
    with contextlib.redirect_stdout(None):
        for i, count in enumerate((333, 300)):
            write_tokens(folder / f"part_train_{i}.bin", words(257, count))
        write_tokens(folder / "part_val_0.bin", words(257, 100))


def train(output, *flags):
    """Call the trainer. Returns (its exit status, or 1 for an error; what it printed, and the error)."""
    status, *said = call("--device", "cpu", "-o", output, *flags)
    return status, "".join(said)


def flags_in(folder):
    return ["-e", TINY, "-i", folder / "part_train_*.bin", "-j", folder / "part_val_0.bin", "-b", 2, "-t", 8, "-d", 32,
            "-x", 6, "-v", 3, "-m", 2, "-s", 0, "-l", 1e-2]


def contents(output):
    """{name: bytes} of a folder, which need not be there."""
    return {path.name: path.read_bytes() for path in sorted(output.glob("*"))}


def refused(name, wish, output, *flags, early=True):
    """Check that a run is refused in one line that has the wish in it, and that it leaves the folder as it was; early:
    before the tables."""
    before, there = contents(output), output.exists()
    status, text = train(output, *flags)
    [*lines, error] = text.splitlines()
    ok = status == 1 and re.match(f"error: .*{wish}", error) and (not early or not lines)
    check(f"refused: {name}", ok, text[-400:] * (not ok))
    same = contents(output) == before and output.exists() == there
    check(f"refused: {name}: the folder is as it was", same, str(sorted(contents(output))) * (not same))


def killed_at(step, output, *flags):
    """A run that ends abruptly in a step, as if it had been killed."""
    train_step = train_gpt2.GPT2.train_step

    def killed(model, *args, **keywords):
        if model.step == step:
            raise ZeroDivisionError
        train_step(model, *args, **keywords)

    with mock.patch.object(train_gpt2.GPT2, "train_step", killed), contextlib.suppress(ZeroDivisionError):
        train(output, *flags)


# ---- Who may write


def runs_without_a_checkpoint(device_name, folder):
    """-y 1 where there is no checkpoint: the same run from its start, a new one that is told what to train, or none."""
    flags, whole, output = flags_in(folder), folder / "whole", folder / "killed"
    train(whole, *flags)
    killed_at(4, output, *flags)
    killed = contents(output)
    yield "killed before a checkpoint: files", sorted(killed) == ["main.log", "run_00000000.json"], True, EXACT
    yield "killed before a checkpoint: steps in its log", killed["main.log"].count(b"trl:"), 4, EXACT
    refused("other data", "and -i is .*part_val_0", output, "-y", 1, "-i", folder / "part_val_0.bin", early=False)
    refused("another -t", "-t 8, and now it is 4", output, "-y", 1, "-t", 4, early=False)
    refused("another model", "-e .*gpt2_tiny.bin, and now it is .*d1", output, "-y", 1, "-e", "d1", early=False)
    status, text = train(output, "-y", 1)
    yield "goes on as itself: status", status, 0, EXACT
    for name in ("model_00000006.bin", "main.log"):
        yield f"goes on as itself: {name}", contents(output)[name] == contents(whole)[name], True, EXACT
    check("goes on as itself: it says so", "at the start" in text and "gpt2_tiny.bin" in text, text[:300])
    yield "no line of the log is lost", contents(output)["main.log.old"] == killed["main.log"], True, EXACT

    absent = folder / "absent"
    refused("a folder that is not there", "holds no run to go on from: expected .*-e or -i", absent, "-y", 1)
    absent.mkdir()
    refused("an empty folder", "holds no run to go on from: expected .*-e or -i", absent, "-y", 1)
    yield "an empty folder, told what to train", train(absent, "-y", 1, *flags)[0], 0, EXACT
    yield "... does it", contents(absent)["model_00000006.bin"] == contents(whole)["model_00000006.bin"], True, EXACT
    for name in ("main.log", "model_00000006.bin", "state_00000006_00000.bin"):
        older = folder / f"older {name}"
        older.mkdir()
        shutil.copy(whole / (name if name[0] == "m" else "main.log"), older / name)
        refused(f"{name} of an older version", f"{name}, and neither a whole checkpoint nor run_00000000.json", older,
                "-y", 1, *flags)

    stopped = folder / "stopped"  # at the start, where a checkpoint's run_00000000.json is the run's too
    train(stopped, *flags, "-x", 0, "-n", 1)
    killed_at(0, stopped, *flags, "-n", 1, "-nk", 1, "-y", 1)
    yield "run_00000000.json", "run_00000000.json" in contents(stopped), True, EXACT
    yield "goes on from there", train(stopped, *flags, "-n", 1, "-nk", 1, "-y", 1)[0], 0, EXACT
    left = [name for name in contents(stopped) if not name.startswith(("main.log", "DONE"))]
    wish = ["model_00000006.bin", "run_00000000.json", "run_00000006.json", "state_00000006_00000.bin"]
    yield "of old checkpoints, run_00000000.json alone is kept", left == wish, True, EXACT


def earlier_runs(device_name, folder):
    """Without -y 1, a folder with anything of a run in it is refused."""
    flags, one = flags_in(folder), folder / "one"
    train(one, *flags)
    wish = r"holds an earlier run \(main.log, model_00000006.bin, run_00000000.json\), which is never overwritten: go"
    for more in ((), ("-n", 3), ("-x", 9), ("-y", 0)):
        refused(f"a second run with {more}", f"{wish}.* -y 1, or give another folder", one, *flags, *more)
    for name in ("main.log", "main.log.old", "model_00000003.bin", "run_00000000.json", "state_00000001_00002.bin",
                 "DONE_00000001", "replay_00000004.npz"):
        other = folder / name.replace(".", " ")
        other.mkdir()
        (other / name).write_text("something")
        refused(f"over {name}", f"holds an earlier run \\({name}\\)", other, *flags)
    harmless = folder / "harmless"
    harmless.mkdir()
    for name in ("rank_00001.txt", "ranks_0123456789ab", "output.txt", "main.log.77.tmp", "model_tiny.bin"):
        (harmless / name).write_text("of nobody's run")
    yield "with files that no run writes, or ranks alone", train(harmless, *flags)[0], 0, EXACT
    ok = {"rank_00001.txt", "output.txt", "model_tiny.bin"} < contents(harmless).keys()
    yield "which stay", ok and "main.log.77.tmp" not in contents(harmless), True, EXACT
    before = contents(one)
    for name, *more in (("--dry-run", "--dry-run"), ("--sample", "--sample", "", "-g", 2, "--dtype", "fp32")):
        with mock.patch("dev.runs.sample.Sampling.run", return_value=0):  # which needs GPT-2's vocabulary
            status, text = train(one, *flags, *more)
        yield f"{name} is not refused", status, 0, EXACT
        yield f"{name} writes nothing", contents(one) == before, True, EXACT

    path = folder / "a file"
    path.touch()
    refused("-o is a file", "-o .*a file: .*expected a folder to write to", path, *flags)
    (folder / "touch").mkdir()
    for name in ("touch", "mkdir"):
        with mock.patch.object(Path, name, side_effect=OSError(30, "Read-only file system")):
            refused(f"a read-only -o, {name}", f"-o .*{name}: Read-only file system; expected a folder to write to",
                    folder / name, *flags)


def finished_runs(device_name, folder):
    """-y 1 of a run that is done says so, and leaves everything as it is."""
    flags = flags_in(folder)
    for n in (0, 3):
        output = folder / f"finished {n}"
        train(output, *flags, "-n", n)
        before = contents(output)
        for more in ((), flags):
            status, text = train(output, "-y", 1, *more)
            ok = text.count("nothing is left to do: all 6 steps are made (-x 6)") == 1 and "step    " not in text
            check(f"-n {n}: nothing is left to do", status == 0 and ok and "val loss" not in text, text[-300:])
            check(f"-n {n}: all is as it was", contents(output) == before, str(sorted(contents(output))))
    for path in output.glob("run_*.json"):  # without these, it is not known how many steps the run was to have
        path.unlink()
    before = contents(output)
    status, text = train(output, *flags, "-y", 1, "-x", 4)
    check("no notes, fewer steps: nothing is done", status == 0 and not re.search("val loss|step  |wrote", text),
          text[-300:])
    after = {name: data for name, data in contents(output).items() if name != "run_00000006.json"}
    yield "no notes, fewer steps: all is as it was", after == before, True, EXACT
    yield "more steps", train(output, *flags, "-y", 1, "-x", 7)[0], 0, EXACT
    yield "more steps: in the log", contents(output)["main.log"].count(b"trl:"), 7, EXACT
    refused("more steps, and no state", "nothing is left to do: .* all 6 steps .-x 6., and no state, .* with -e "
            ".*model_00000006.bin and another -o", folder / "finished 0", "-y", 1, "-x", 7)


# ---- Signals


def stopped_runs(device_name, folder):
    """A signal ends a run after its step, wherever it comes: without a validation or a sample, with a whole checkpoint
    that has the weights of this step, and after the lines of all steps. So it does where lines are late."""
    flags, handlers = [*flags_in(folder), "-s", 1, "-g", 2, "-v", 1], [signal.getsignal(n) for n in (2, 15)]
    train_step, next_batches, validate = train_gpt2.GPT2.train_step, Training.next_batches, Training.validate

    def fetch(device_name, array):
        values = array.copy()
        return lambda: values

    def told_in(method, when):
        def told(first, *args, **keywords):
            if when(first, *args):
                os.kill(os.getpid(), number)
            return method(first, *args, **keywords)
        return told

    with mock.patch("dev.cpu.device.Cpu.fetch", fetch, create=True), contextlib.redirect_stderr(io.StringIO()):
        for base, number in ((Training, signal.SIGTERM), (FastTraining, signal.SIGINT)):
            for name, step, end, method, when in (
                    ("before the first step", 0, "", (Training, "next_batches"),
                     told_in(next_batches, lambda run: run.model.step == 0)),
                    ("in step 3", 3, "", (train_gpt2.GPT2, "train_step"),
                     told_in(train_step, lambda model, *args: model.step == 2)),
                    ("in the last step", 6, "", (train_gpt2.GPT2, "train_step"),
                     told_in(train_step, lambda model, *args: model.step == 5)),
                    ("in the last validation", 6, "val loss, generating, ", (Training, "validate"),
                     told_in(validate, lambda run, done: done == 6))):
                output = folder / f"{base.__name__} {name}"
                with mock.patch.object(*method, when), mock.patch.object(train_gpt2, "Training", base):
                    status, text = train(output, *flags)
                yield f"{output.name}: status", status, 128 + number, EXACT
                said = ", ".join(re.findall(
                    r"^(step +\d+/6|val loss|generating|\d steps in|interrupted after \d of 6 steps; -y 1 goes on from "
                    r"there|wrote .*model_\d+\.bin(?: and its state)?)", text, re.M))
                wish = "".join(f"val loss, {'generating, ' * (i > 0)}step    {i + 1}/6, " for i in range(step))
                wish += f"{end}interrupted after {step} of 6 steps; -y 1 goes on from there, "
                state = " and its state" * (not end)  # else the run was done, and -n is 0
                wish += f"wrote {output / f'model_{step:08d}.bin'}{state}" + f", {step} steps in" * (step > 0)
                check(f"{output.name}: what is said", said == wish, f"{said!r}, expected {wish!r}" * (said != wish))
                if not end:
                    yield f"{output.name}: goes on", train(output, *flags, "-y", 1)[0], 0, EXACT
                yield f"{output.name}: handlers", [signal.getsignal(n) for n in (2, 15)] == handlers, True, EXACT
        status, text = train(folder / "whole", *flags)
        for output in folder.glob("*Training*"):
            name = "model_00000006.bin"
            yield f"{output.name}: its end", contents(output)[name] == contents(folder / "whole")[name], True, EXACT


# ---- Data


def data_of_a_run(device_name, folder):
    """Other data of the same name and size is refused, and paths are found from anywhere."""
    here, flags, output = os.getcwd(), flags_in(folder), folder / "data"
    os.chdir(folder)
    try:
        train(Path("data"), *flags[:2], "-i", "part_train_*.bin", *flags[6:], "-n", 3, "-x", 3)
        (folder / "elsewhere").mkdir()
        os.chdir(folder / "elsewhere")
        status, text = train(Path("../data"), "-y", 1, "-x", 4)
        ok = status == 0 and "step    4/4" in text
        check("paths are found from another folder", ok, text[-300:] * (not ok))
        yield "of that folder nothing is used", len([*Path().iterdir()]), 0, EXACT
    finally:
        os.chdir(here)
    path = folder / "part_train_1.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-2] + bytes([good[-2] ^ 1, good[-1]]))
    refused("other tokens", r"run_00000004.json: of a run on \['part_train_1.bin', 1624, '\w+'\], and -i is "
            r"\['part_train_1.bin', 1624, '\w+'\]: expected", output, "-y", 1, "-x", 9, early=False)
    path.rename(folder / "gone")
    (folder / "part_train_0.bin").rename(folder / "gone 0")
    refused("no tokens", r"run_00000004.json: its run had -i .*/part_train_\*.bin, which is not there: .*give -i",
            output, "-y", 1, "-x", 9)
    path.write_bytes(good)
    (folder / "gone 0").rename(folder / "part_train_0.bin")
    notes = output / "run_00000004.json"
    run = json.loads(notes.read_text())
    run["data"] = [pair[:2] for pair in run["data"]]
    notes.write_text(json.dumps(run))
    yield "an older version's notes have no hash", train(output, "-y", 1, "-x", 5)[0], 0, EXACT

    found = folder / "as found"
    with mock.patch.object(Config, "MODELS", ("absent.bin", "d1")):
        train(found, "-i", folder / "part_train_*.bin", "-b", 2, "-t", 8, "-x", 0, "-v", 0, "-s", 0)
    notes = json.loads((found / "run_00000000.json").read_text())["flags"]
    wish = ["d1", str(folder / "part_val_*.bin")]
    check("notes have what was not given", [notes["model"], notes["val_data"]] == wish, f"{notes}")


def tokens_of(data, count):
    """The next tokens that a loader hands out, so many."""
    return np.concatenate([data.next_batch()[0].ravel() for _ in range(count // (data.B * data.T))])


def smaller_batches(device_name, folder):
    """With a smaller -b the same tokens follow; where they cannot, it is refused."""
    pattern, T = str(folder / "part_train_*.bin"), 8

    def state_of(data, path="a state"):
        position = data.position()
        n, record = len(position.order), np.zeros(1, shuffle_record(2, len(position.order)))[0]
        record["P"], record["files"], record["n"], record["order"] = 2, position.files, n, position.order
        _, key, used, *_ = position.rng
        record["key"], record["next"], record["left"] = key, used, max(1, 625 - used)
        return SimpleNamespace(path=path, place=position.place, next=position.next, shuffle=int(data.shuffle),
                               record=record if data.shuffle else None)

    def loader(B, shuffle, rank=0, count=1):
        return FilesLoader(pattern, B, T, Config.from_file(TINY), shuffle, rank, count)

    def go_on(data, state, had):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_position(state, data, True, True, had)
        return said.getvalue()

    for shuffle in (0, 1):
        for done in (2, 5, 11):  # batches of 32 tokens; 10 in the file of 333, then 9 in that of 300
            whole = loader(4, shuffle)
            tokens_of(whole, done * 32)
            state, less = state_of(whole), loader(2, shuffle)
            said = go_on(less, state, 4)
            left, name = (len(whole.order) - whole.next) * 32, f"shuffle {shuffle}, after {done}:"
            yield f"{name} the same tokens", tokens_of(less, left), tokens_of(whole, left), EXACT
            batches = less.batches_of[less.files[less.place]]
            yield f"{name} each once", sorted(less.order), [*range(batches)], EXACT
            yield f"{name} it is said", "shuffled in batches of -b 2" in said, shuffle > 0, EXACT
            again = loader(2, shuffle)
            go_on(again, state_of(less), 2)  # a second time
            yield f"{name} and on", tokens_of(again, 160), tokens_of(less, 160), EXACT
    for B, shuffle, done, count in ((3, 0, 1, 1), (3, 1, 3, 1), (8, 1, 2, 1), (2, 1, 2, 2)):
        whole = loader(4, shuffle, count=count)
        tokens_of(whole, done * 32)
        wish = "each rank has an order" if count > 1 else f"stopped after {32 * done} tokens"
        try:
            go_on(loader(B, shuffle, count=count), state_of(whole), 4)
            text = ""
        except UserError as e:
            text = str(e)
        ok = re.match(f"-b {B}: the run had -b 4, and .*{wish}.*: expected -b 4, or ", text)
        check(f"-b 4 to {B}, shuffle {shuffle}, ranks {count}", ok, text)
    for B, done in ((8, 2), (3, 3)):
        whole, other = loader(4, 0), loader(B, 0)
        tokens_of(whole, done * 32)
        go_on(other, state_of(whole), 4)
        yield f"-b 4 to {B}, in order", tokens_of(other, 96)[:64], tokens_of(whole, 96)[:64], EXACT
    pairs = [(loader(4, 0, rank, 2), loader(2, 0, rank, 2)) for rank in (0, 1)]
    for whole, less in pairs:
        tokens_of(whole, 64)
        go_on(less, state_of(whole), 4)
    both = [sorted(np.concatenate([tokens_of(pair[i], 32) for pair in pairs])) for i in (0, 1)]
    yield "two ranks, in order: a step's tokens", both[1], both[0], EXACT

    flags, output = flags_in(folder), folder / "less"
    train(output, *flags, "-n", 3, "-x", 3)
    whole = shutil.copytree(output, folder / "as before")
    train(whole, "-y", 1, "-x", 6)
    status, text = train(output, "-y", 1, "-x", 6, "-b", 1)
    yield "-b 1: status", status, 0, EXACT
    check("-b 1: it is said", "WARNING: --batch-size was 2 until step 3, and is 1 from now on" in text, text[-500:])
    logs = [[float(x) for x in re.findall(r"trl:(\S+)", (each / "main.log").read_text())] for each in (whole, output)]
    yield "-b 1: losses", logs[1], logs[0], 2e-4


# ---- Damage


def damaged_notes(device_name, folder):
    """Of a run_*.json and a main.log that are damaged, a line names file and field."""
    flags, output = flags_in(folder), folder / "damaged"
    train(output, *flags, "-n", 3, "-x", 3)
    notes = output / "run_00000003.json"
    good = json.loads(notes.read_text())

    def of(name, value):
        return {**good, name: value}

    for wish, content in (
            (r"is \[\]; expected the fields flags, data", []), (r"is 7; expected the fields", 7),
            ("windows is 5; expected 2 lists of 128 numbers", of("windows", 5)),
            ("windows is .*; expected 2 lists of 128 numbers", of("windows", [[1.0], [2.0, 3.0]])),
            ("windows is .*; expected", of("windows", [["a"] * 128] * 2)), ("seen is .*; expected", of("seen", "3")),
            ("seen is null; expected", of("seen", None)), (r"seen is \[\]; expected", of("seen", [])),
            ("flags is .*; expected names and values", of("flags", [1, 2])),
            ('flags.batch_size is "two"; expected a value that --batch-size', of("flags", {"batch_size": "two"})),
            ("flags.seq_len is -4; expected a value that -t may have", of("flags", {**good["flags"], "seq_len": -4})),
            (r"flags.train_data is \[\]; expected", of("flags", {**good["flags"], "train_data": []})),
            ('flags.schedule is "cosinus"; expected', of("flags", {**good["flags"], "schedule": "cosinus"})),
            ("products is null; expected", of("products", None)),
            ("products is .*; expected", of("products", {"of": 3, "algorithms": {}})),
            ("products is .*; expected", of("products", {"of": "x", "algorithms": {"p": "q"}})),
            ("data is 3; expected", of("data", 3)), ("data is .*; expected", of("data", [["a", "b"]])),
            ("scales is .*; expected numbers", of("scales", {"a": 1})),
            ("data is missing; expected", {name: good[name] for name in good if name != "data"})):
        notes.write_text(json.dumps(content))
        refused(wish, f"run_00000003.json: {wish}.*restore it, or remove it", output, "-y", 1, "-x", 4, *flags[:6])
    notes.write_bytes(b'{"flags": "\xff"}')
    refused("no UTF-8", "run_00000003.json: could not be read", output, "-y", 1, "-x", 4, *flags[:6])
    notes.write_text(json.dumps(good))

    path = output / "main.log"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"s:0 trl:\xff\xfe\n"
    path.write_bytes(b"".join(lines) + b"s:1 trl")  # and one that a kill has cut
    status, text = train(output, "-y", 1, "-x", 4)
    yield "a damaged main.log keeps nobody from resuming", status, 0, EXACT
    wish = r"WARNING: .*main.log: line 2 is b's:0 trl:\\xff\\xfe\\n'; expected one such as .* 1 such lines move to main"
    check("... and is named", re.search(wish, text), text[-700:])
    old = (output / "main.log.old").read_bytes()
    yield "... its lines stay", old == lines[1] + lines[-1] + b"s:1 trl\n", True, EXACT
    log = (output / "main.log").read_text()
    yield "... the log goes on", re.findall(r"s:(\d+) trl", log) == ["1", "2", "3"], True, EXACT


def damaged_checkpoints(device_name, folder):
    """Of the newest checkpoint being damaged, a line names it, the newest older one that is whole, and a command, after
    which the run goes on from that."""
    flags, good = flags_in(folder), folder / "good"
    train(good, *flags, "-n", 2, "--dtype", "fp32")
    c = Config.from_file(TINY)
    N = sum(row.size for row in c.parameter_table())
    starts, at = {}, 0
    for row in c.parameter_table():
        starts[row.name], at = at, at + row.size

    def cut(name, size):
        return lambda path: os.truncate(path / name, size)

    def put(name, at, value, kind="<f"):
        def action(path):
            with open(path / name, "r+b") as file:
                file.seek(at)
                file.write(struct.pack(kind, value))
        return action

    model, state = "model_0000000{}.bin", "state_0000000{}_00000.bin"
    nan, inf = float("nan"), float("inf")
    where = 1024 + 4 * (starts["fcb"] + 256 + 7)  # number 7 of layer 1
    for i, (wish, damage) in enumerate((
            (f"{model.format(6)}: 9,999 bytes; expected \\d", cut(model.format(6), 9999)),
            (f"{model.format(6)}: .*{header_refusal((7, 3), Config.FILE)}", put(model.format(6), 0, 7, "<i")),
            (f"DONE_00000006: is there, and {model.format(6)} is not", lambda path: (path / model.format(6)).unlink()),
            (f"DONE_00000006: is there, and {state.format(6)} is not", lambda path: (path / state.format(6)).unlink()),
            (f"{state.format(6)}: its header of 1000 bytes .*expected 1024", cut(state.format(6), 1000)),
            (f"{state.format(6)}: truncated, or of", cut(state.format(6), 1024 + 12 * N)),
            (f"{state.format(6)}: .*{header_refusal((20240527, 2), STATE)}", put(state.format(6), 4, 2, "<i")),
            (f"{state.format(6)}: of rank 1 of 1", put(state.format(6), 12, 1, "<i")),
            (f"{state.format(6)}: of step 5; expected 6", put(state.format(6), 40, 5, "<i")),
            (f"{state.format(6)}: with --shuffle 1, in file 5", put(state.format(6), 120, 5, "<i")),
            (f"{state.format(6)}: has 18 batches of file 0, or an order that has one twice", put(
                state.format(6), 1024 + 12 * N + 24, 9, "<i")),
            ("run_00000006.json: could not be read", cut("run_00000006.json", 40)),
            (f"{model.format(6)}: the parameter fcb is nan at .1, 7.", put(model.format(6), where, nan)),
            (f"{state.format(6)}: AdamW's m of fcb is nan at .1, 7.", put(state.format(6), where, nan)),
            (f"{state.format(6)}: AdamW's v of fcb is -inf at .1, 7.", put(state.format(6), where + 4 * N, -inf)),
            (f"{state.format(6)}: the fp32 parameter fcb is inf at .1, 7.", put(state.format(6), where + 8 * N, inf)),
            (f"{state.format(6)}: AdamW's v of wte is inf", put(state.format(6), 1024 + 4 * N, inf)))):
        broken = shutil.copytree(good, folder / f"broken {i}")
        damage(broken)
        early = not any(word in wish for word in ("the fp32", "AdamW", "the param", "--shuffle", "batches"))
        refused(wish, f"{folder}.*{wish}.*; the checkpoint of step 4 is whole: after `rm .*DONE_00000006'?`, -y 1 goes "
                "on", broken, "-y", 1, "-x", 7, early=early)
    for damage in (cut(model.format(4), 99), put(state.format(4), where, nan)):
        damage(broken)
        expected = "; the checkpoint of step 2 is whole: after `rm .*DONE_00000006'? .*DONE_00000004'?`, -y 1 goes on"
        refused("two are damaged", expected, broken, "-y", 1, "-x", 7, early=False)
        shutil.copy(good / model.format(4), broken)
    error = train(broken, "-y", 1)[1]
    subprocess.run(re.search("`(.*)`", error)[1], shell=True, check=True)
    status, text = train(broken, "-y", 1)
    yield "after the command: status", status, 0, EXACT
    check("after the command: from step 2", "after step 2, from" in text, text[-500:])
    for name in (model.format(6), state.format(6), "main.log"):
        yield f"after the command: {name}", contents(broken)[name] == contents(good)[name], True, EXACT
    for step in (2, 4, 6):
        cut(state.format(step), 2000)(broken)
    refused("all are damaged", "there is no older checkpoint that is whole", broken, "-y", 1)
    found = State(good / state.format(6), c)
    yield "a good state is one", [found.step, found.count], [6, 1], EXACT


TESTS = (runs_without_a_checkpoint, earlier_runs, finished_runs, stopped_runs, data_of_a_run, smaller_batches,
         damaged_notes, damaged_checkpoints)

if __name__ == "__main__":
    run_program(TESTS, token_files)
