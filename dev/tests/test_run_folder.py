"""Test that nothing in a run's folder is lost without a word: who may write to it, what must agree,
damaged files.

Trainings are small, on the CPU, and in this process. dev/tests/test_resume.py compares the bytes of
runs that resume, and dev/tests/test_kills.py has signals and kills.
"""
import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from dev.common.config import Config
from dev.features.checkpoints.state_file import STATE, State
from dev.tests.checks import TINY, check, header_refusal
from dev.tests.trainings import NUMBERS, call, check_error, killed_in, ran

pytestmark = pytest.mark.usefixtures("token_data")


def train(output, *flags):
    """Call the trainer. Returns (its exit status, or 1 for an error; what it printed, and the
    error)."""
    status, *said = call("--device", "cpu", "-o", output, *flags)
    return status, "".join(said)


def flags_in(folder):
    return ["-e", TINY, "-i", folder / "part_train_*.bin", "-j", folder / "part_val_0.bin", "-b", 2,
            "-t", 8, "-d", 32,
            "-x", 6, "-v", 3, "-m", 2, "-s", 0, "-l", 1e-2]


def contents(output):
    """{name: bytes} of a folder, which need not be there."""
    return {path.name: path.read_bytes() for path in sorted(output.glob("*"))}


def refused(name, wish, output, *flags, early=True):
    """Check that a run is refused in one line with the wish in it, and that the folder stays as it
    was. early: before it prints anything."""
    before, there = contents(output), output.exists()
    status, text = train(output, *flags)
    [*lines, error] = text.splitlines()
    ok = status == 1 and re.match(f"error: .*{wish}", error) and (not early or not lines)
    check(f"refused: {name}", ok, text[-400:] * (not ok))
    check(f"refused: {name}: the folder is as it was",
          (contents(output), output.exists()) == (before, there), sorted(contents(output)))


def goes_on(name, output, *flags):
    """Check that a run is not refused. Returns what it printed."""
    return ran("--device", "cpu", "-o", output, *flags)


# ---- Who may write


def test_runs_without_a_checkpoint(folder):
    """-y 1 where there is no checkpoint: the same run from its start, a new one that is told what
    to train, or none."""
    flags, whole, output = flags_in(folder), folder / "whole", folder / "killed"
    train(whole, *flags)
    with killed_in(4):
        train(output, *flags)
    killed = contents(output)
    check("killed before a checkpoint: files", sorted(killed) == [
        "log.jsonl", "main.log", "run_00000000.json"])
    check("killed before a checkpoint: steps in its log", killed["main.log"].count(b"trl:") == 4)
    refused("other data", "and -i is .*part_val_0", output, "-y", 1, "-i",
            folder / "part_val_0.bin", early=False)
    refused("another -t", "-t 8, and now it is 4", output, "-y", 1, "-t", 4, early=False)
    refused("another model", "-e .*gpt2_tiny.bin, and now it is .*d1", output, "-y", 1, "-e", "d1",
            early=False)
    text = goes_on("goes on as itself", output, "-y", 1)
    for name in ("model_00000006.bin", "main.log"):
        check(f"goes on as itself: {name}", contents(output)[name] == contents(whole)[name])
    check("goes on as itself: it says so", "at the start" in text and "gpt2_tiny.bin" in text,
          text[:300])
    check("no line of the log is lost", contents(output)["main.log.old"] == killed["main.log"])

    absent = folder / "absent"
    refused("a folder that is not there", "holds no run to go on from: expected .*-e or -i", absent,
            "-y", 1)
    absent.mkdir()
    refused("an empty folder", "holds no run to go on from: expected .*-e or -i", absent, "-y", 1)
    goes_on("an empty folder, told what to train", absent, "-y", 1, *flags)
    check("... does it",
          contents(absent)["model_00000006.bin"] == contents(whole)["model_00000006.bin"])
    for name in ("main.log", "model_00000006.bin", "state_00000006_00000.bin"):
        older = folder / f"older {name}"
        older.mkdir()
        shutil.copy(whole / (name if name[0] == "m" else "main.log"), older / name)
        refused(f"{name} of an older version",
                f"{name}, and neither a whole checkpoint nor run_00000000.json", older,
                "-y", 1, *flags)

    # At the start, where a checkpoint's run_00000000.json is the run's too.
    stopped = folder / "stopped"
    train(stopped, *flags, "-x", 0, "-n", 1)
    with killed_in(0):
        train(stopped, *flags, "-n", 1, "-nk", 1, "-y", 1)
    check("run_00000000.json", "run_00000000.json" in contents(stopped))
    goes_on("goes on from there", stopped, *flags, "-n", 1, "-nk", 1, "-y", 1)
    logs = "main.log", "log.jsonl", "DONE"
    left = [name for name in contents(stopped) if not name.startswith(logs)]
    wish = ["model_00000006.bin", "run_00000000.json", "run_00000006.json",
            "state_00000006_00000.bin"]
    check("of old checkpoints, run_00000000.json alone is kept", left == wish)


def test_earlier_runs(folder):
    """Without -y 1, a folder with anything of a run in it is refused."""
    flags, one = flags_in(folder), folder / "one"
    train(one, *flags)
    wish = (r"holds an earlier run \(log.jsonl, main.log, model_00000006.bin, \.\.\.\), which is "
            r"never overwritten: go")
    for more in ((), ("-n", 3), ("-x", 9), ("-y", 0)):
        refused(f"a second run with {more}", f"{wish}.* -y 1, or give another folder", one, *flags,
                *more)
    for name in ("main.log", "main.log.old", "log.jsonl", "model_00000003.bin", "run_00000000.json",
                 "state_00000001_00002.bin",
                 "DONE_00000001", "replay_00000004.npz"):
        other = folder / name.replace(".", " ")
        other.mkdir()
        (other / name).write_text("something")
        refused(f"over {name}", f"holds an earlier run \\({name}\\)", other, *flags)
    harmless = folder / "harmless"
    harmless.mkdir()
    for name in ("rank_00001.txt", "ranks_0123456789ab", "output.txt", "main.log.77.tmp",
                 "model_tiny.bin"):
        (harmless / name).write_text("of nobody's run")
    goes_on("with files that no run writes, or ranks alone", harmless, *flags)
    ok = {"rank_00001.txt", "output.txt", "model_tiny.bin"} < contents(harmless).keys()
    check("which stay", ok and "main.log.77.tmp" not in contents(harmless))
    before = contents(one)
    for name, *more in (("--dry-run",
                         "--dry-run"), ("--sample", "--sample", "", "-g", 2, "--dtype", "fp32")):
        # Which needs GPT-2's vocabulary.
        with mock.patch("dev.features.sample.Sampling.run", return_value=0):
            goes_on(name, one, *flags, *more)
        check(f"{name} writes nothing", contents(one) == before)

    path = folder / "a file"
    path.touch()
    refused("-o is a file", "-o .*a file: .*expected a folder to write to", path, *flags)
    (folder / "touch").mkdir()
    for name in ("touch", "mkdir"):
        with mock.patch.object(Path, name, side_effect=OSError(30, "Read-only file system")):
            refused(f"a read-only -o, {name}", f"-o .*{name}: Read-only file system; expected a "
                    "folder to write to", folder / name, *flags)


def test_finished_runs(folder):
    """-y 1 of a run that is done says so, and leaves everything as it is."""
    flags = flags_in(folder)
    for n in (0, 3):
        output = folder / f"finished {n}"
        train(output, *flags, "-n", n)
        before = contents(output)
        for more in ((), flags):
            status, text = train(output, "-y", 1, *more)
            ok = (text.count("nothing is left to do: all 6 steps are made (-x 6)") == 1 and
                  "step    " not in text)
            check(f"-n {n}: nothing is left to do", status == 0 and ok and "val loss" not in text,
                  text[-300:])
            check(f"-n {n}: all is as it was", contents(output) == before,
                  str(sorted(contents(output))))
    # Without these, it is not known how many steps the run was to have.
    for path in output.glob("run_*.json"):
        path.unlink()
    before = contents(output)
    status, text = train(output, *flags, "-y", 1, "-x", 4)
    check("no notes, fewer steps: nothing is done",
          status == 0 and not re.search("val loss|step  |wrote", text), text[-300:])
    after = {name: data for name, data in contents(output).items() if name != "run_00000006.json"}
    check("no notes, fewer steps: all is as it was", after == before)
    goes_on("more steps", output, *flags, "-y", 1, "-x", 7)
    check("more steps: in the log", contents(output)["main.log"].count(b"trl:") == 7)
    refused("more steps, and no state", "nothing is left to do: .* all 6 steps .-x 6., and no "
            "state, .* with -e .*model_00000006.bin and another -o", folder / "finished 0", "-y", 1,
            "-x", 7)


# ---- Data


def test_data_of_a_run(folder):
    """Other data of the same name and size is refused, and paths are found from anywhere."""
    flags, output = flags_in(folder), folder / "data"
    os.chdir(folder)
    train(Path("data"), *flags[:2], "-i", "part_train_*.bin", *flags[6:], "-n", 3, "-x", 3)
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    text = goes_on("paths are found from another folder", Path("../data"), "-y", 1, "-x", 4)
    check("it makes a step", "step    4/4" in text, text[-300:])
    check("of that folder nothing is used", not [*Path().iterdir()])
    os.chdir(folder)
    path = folder / "part_train_1.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-2] + bytes([good[-2] ^ 1, good[-1]]))
    refused("other tokens", r"run_00000004.json: of a run on \['part_train_1.bin', 1624, '\w+'\], "
            r"and -i is \['part_train_1.bin', 1624, '\w+'\]: expected", output, "-y", 1, "-x", 9,
            early=False)
    path.write_bytes(good)
    notes = output / "run_00000004.json"
    had = notes.read_text()
    notes.write_text(had.replace("part_train_*", "part_*_train"))
    refused("no tokens", r"run_00000004.json: its run had -i .*/part_\*_train.bin, which is not "
            r"there: .*give -i", output, "-y", 1, "-x", 9)
    run = json.loads(had)
    run["data"] = [pair[:2] for pair in run["data"]]
    notes.write_text(json.dumps(run))
    goes_on("an older version's notes have no hash", output, "-y", 1, "-x", 5)

    found = folder / "as found"
    with mock.patch.object(Config, "MODELS", ("absent.bin", "d1")):
        train(found, "-i", folder / "part_train_*.bin", "-b", 2, "-t", 8, "-x", 0, "-v", 0, "-s", 0)
    notes = json.loads((found / "run_00000000.json").read_text())["flags"]
    wish = ["d1", str(folder / "part_val_*.bin")]
    check("notes have what was not given", [notes["model"], notes["val_data"]] == wish, f"{notes}")


def test_brackets(folder):
    """A run in a folder [a], on files of a folder [d], resumes there, though these are patterns for
    others' folders."""
    for name in ("[a]", "[d]", "a", "d"):
        (folder / name).mkdir()
    for path in folder.glob("part_*.bin"):
        for name in ("[d]", "d"):
            shutil.copy(path, folder / name)
    decoy = folder / "d" / "part_train_0.bin"
    decoy.write_bytes(decoy.read_bytes()[:-2] + b"\1\0")
    for at, here in enumerate((folder, folder / "[d]")):
        os.chdir(here)
        data = "[d]/" if here == folder else ""
        for kind, train_data in ((
            "file", f"{data}part_train_0.bin"), ("pattern", f"{data}part_train_*.bin")):
            output, whole = folder / "[a]" / f"{kind}_{at}[1]", folder / f"{kind}_{at}"
            (folder / "[a]" / f"{kind}_{at}1").mkdir()
            flags = ["-e", TINY, "-i", train_data, "-j", f"{data}part_val_0.bin",
                     *flags_in(folder)[6:], "-n", 2]
            train(whole, *flags, "-i", folder / Path(train_data).name)
            train(output, *flags, "-nk", 2, "-x", 4)
            text = goes_on(f"{kind} in {here.name}", output, "-y", 1, "-x", 6)
            steps = "after step 4" in text and "6/6" in text
            check(f"{kind} in {here.name}: it makes the last steps", steps, text[-300:])
            found, wish = (contents(each)["model_00000006.bin"] for each in (output, whole))
            check(f"{kind} in {here.name}: the same weights", found == wish)
            names = {f"model_{step:08d}.bin" in contents(output) for step in (4, 6)}
            check(f"{kind} in {here.name}: -nk 2",
                  names == {True} and "model_00000002.bin" not in contents(output))
            os.chdir(folder)
            text = goes_on(f"{kind} in {here.name}, from elsewhere", output, "-y", 1, "-x", 7)
            check(f"{kind} in {here.name}, from elsewhere: a step", "7/7" in text, text[-300:])
            os.chdir(here)
        weights = output / "model_00000006.bin"
        goes_on("-e in [a]", folder / f"from it {at}", "-e", weights, "-i", train_data, *flags[6:],
                "-x", 2, "-n", 1)
        goes_on("-e in [a], resumed", folder / f"from it {at}", "-y", 1, "-x", 3)


# ---- Damage


def test_damaged_notes(folder):
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
            ("windows is .*; expected", of("windows", [["a"] * 128] * 2)),
            ("seen is .*; expected", of("seen", "3")),
            ("seen is null; expected", of("seen", None)),
            (r"seen is \[\]; expected", of("seen", [])),
            ("flags is .*; expected names and values", of("flags", [1, 2])),
            ('flags.batch_size is "two"; expected a value that --batch-size',
             of("flags", {"batch_size": "two"})),
            ("flags.seq_len is -4; expected a value that -t may have",
             of("flags", {**good["flags"], "seq_len": -4})),
            (r"flags.train_data is \[\]; expected",
             of("flags", {**good["flags"], "train_data": []})),
            ('flags.schedule is "cosinus"; expected',
             of("flags", {**good["flags"], "schedule": "cosinus"})),
            ("products is null; expected", of("products", None)),
            ("products is .*; expected", of("products", {"of": 3, "algorithms": {}})),
            ("products is .*; expected", of("products", {"of": "x", "algorithms": {"p": "q"}})),
            ("data is 3; expected", of("data", 3)),
            ("data is .*; expected", of("data", [["a", "b"]])),
            ("scales is .*; expected numbers", of("scales", {"a": 1})),
            ("data is missing; expected", {name: good[name] for name in good if name != "data"})):
        notes.write_text(json.dumps(content))
        refused(wish, f"run_00000003.json: {wish}.*restore it, or remove it", output, "-y", 1, "-x",
                4, *flags[:6])
    notes.write_bytes(b'{"flags": "\xff"}')
    refused("no UTF-8", "run_00000003.json: could not be read", output, "-y", 1, "-x", 4,
            *flags[:6])
    notes.write_text(json.dumps(good))

    path = output / "main.log"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"s:0 trl:\xff\xfe\n"
    path.write_bytes(b"".join(lines) + b"s:1 trl")  # and one that a kill has cut
    text = goes_on("a damaged main.log", output, "-y", 1, "-x", 4)
    wish = (r"WARNING: .*main.log: line 2 is b's:0 trl:\\xff\\xfe\\n'; expected one such as .* 1 "
            r"such lines move to main")
    check("... and is named", re.search(wish, text), text[-700:])
    old = (output / "main.log.old").read_bytes()
    check("... its lines stay", old == lines[1] + lines[-1] + b"s:1 trl\n")
    log = (output / "main.log").read_text()
    check("... the log goes on", re.findall(r"s:(\d+) trl", log) == ["1", "2", "3"])


def test_damaged_checkpoints(folder):
    """Of a damaged checkpoint, a line names the newest older one that is whole, and a command after
    which the run goes on from there."""
    flags, good = flags_in(folder), folder / "good"
    train(good, *flags, "-n", 2, "--dtype", "fp32")
    c, N, starts, at = Config.from_file(TINY), NUMBERS, {}, 0
    for row in c.parameter_table():
        starts[row.name], at = at, at + row.size

    def cut(name, size):
        return lambda path: os.truncate(path / name, size)

    def gone(name):
        return lambda path: (path / name).unlink()

    def put(name, at, value):
        def action(path):
            with open(path / name, "r+b") as file:
                file.seek(at)
                file.write(struct.pack("<i" if isinstance(value, int) else "<f", value))
        return action

    model, state, nan, inf = ("model_00000006.bin", "state_00000006_00000.bin", float("nan"),
                              float("inf"))
    where, shuffle = 1024 + 4 * (starts["fcb"] + 256 + 7), 1024 + 12 * N  # number 7 of layer 1
    early = (
        (f"{model}: 9,999 bytes; expected \\d", cut(model, 9999)),
        (f"{model}: .*{header_refusal((7, 3), Config.FILE)}", put(model, 0, 7)),
        (f"DONE_00000006: is there, and {model} is not", gone(model)),
        (f"DONE_00000006: is there, and {state} is not", gone(state)),
        (f"{state}: its header of 1000 bytes .*expected 1024", cut(state, 1000)),
        (f"{state}: truncated, or of", cut(state, shuffle)),
        (f"{state}: .*{header_refusal((20240527, 3), STATE)}", put(state, 4, 3)),
        (f"{state}: of rank 1 of 1", put(state, 12, 1)),
        (f"{state}: of step 5; expected 6", put(state, 40, 5)),
        ("state_00000006_00001.bin: could not be read", put(state, 8, 2)),
        ("run_00000006.json: could not be read", cut("run_00000006.json", 40)))
    late = (
        (f"{state}: .* bytes; expected 1,5", cut(state, shuffle + 2580)),
        ("of another --shuffle than it says", put(state, 20, 0)),
        (f"{state}: with --shuffle 1, in file 5", put(state, 120, 5)),
        (f"{state}: has .* batches of file", put(state, 128, 99)),
        ("or an order that has one twice", put(state, shuffle + 28, 99)),
        (f"{model}: the parameter fcb is nan at .1, 7.", put(model, where, nan)),
        (f"{state}: AdamW's m of fcb is nan at .1, 7.", put(state, where, nan)),
        (f"{state}: AdamW's v of fcb is -inf at .1, 7.", put(state, where + 4 * N, -inf)),
        (f"{state}: the fp32 parameter fcb is inf at .1, 7.", put(state, where + 8 * N, inf)),
        (f"{state}: AdamW's v of wte is inf", put(state, 1024 + 4 * N, inf)))
    for wish, damage in (*early, *late):
        broken = folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(good, broken)
        damage(broken)
        refused(wish, f"{wish}.*; the checkpoint of step 4 is whole: after `rm .*DONE_00000006'?`, "
                "-y 1 goes on", broken, "-y", 1, "-x", 7, early=(wish, damage) in early)
    (broken / "run_00000006.json").unlink()
    refused("without notes", "AdamW's v of wte is inf.*expected [^`]*$", broken, "-y", 1, *flags,
            early=False)
    shutil.copy(good / "run_00000006.json", broken)
    older = "model_00000004.bin"
    for damage in (cut(older, 99), put("state_00000004_00000.bin", where, nan)):
        damage(broken)
        refused("two are damaged", "; the checkpoint of step 2 is whole: after `rm "
                ".*DONE_00000006'? .*DONE_00000004'?`, -y 1 goes on", broken, "-y", 1, "-x", 7,
                early=False)
        shutil.copy(good / older, broken)
    error = train(broken, "-y", 1)[1]
    subprocess.run(re.search("`(.*)`", error)[1], shell=True, check=True)
    check("after the command: from step 2",
          "after step 2, from" in goes_on("after the command", broken, "-y", 1))
    for name in (model, state, "main.log"):
        check(f"after the command: {name}", contents(broken)[name] == contents(good)[name])
    for step in (2, 4, 6):
        cut(state.replace("6", str(step)), 2000)(broken)
    refused("all are damaged", "there is no older checkpoint that is whole", broken, "-y", 1)
    found = State(good / state, c)
    check("a good state is one", (found.step, found.count) == (6, 1))


# ---- Flags


def test_other_flags(folder):
    """What a run that resumes may change, and what it may not."""
    flags, output = flags_in(folder), folder / "flags"
    train(output, *flags, "-n", 3, "-x", 3)
    before = shutil.copytree(output, folder / "as before")
    for wish, early, *more in (
            ("-d 32, and now it is 64: expected", False, "-d", 64),
            ("--shuffle 1, and now it is 0: expected", False, "--shuffle", 0),
            ("a run on 3 files, and -i is 2 files", False, "-i", folder / "part_train_[01].bin"),
            ("-e .*gpt2_tiny.bin, and now it is d2: expected the same", False, "-e", "d2"),
            ("-x 2: expected 3 or more, the steps of .*model_00000003.bin", False, "-x", 2)):
        refused(wish, wish, output, "-y", 1, *more, early=early)
    for name, was, now, *more in (("learning-rate", 0.01, 0.02, "-l",
                                   0.02), ("steps", 3, 4, "-x", 4)):
        shutil.rmtree(output)
        shutil.copytree(before, output)
        text = goes_on(f"--{name}", output, "-y", 1, *more)
        check(f"--{name}: a warning",
              f"--{name} was {was} until step 3, and is {now} from now on" in text, text)


def test_refusals(folder):
    """Flags that need others, and --dry-run, which writes nothing."""
    for more in (("--dry-run",), ("--dry-run", 1), ("--dry-run", "-v", 0)):
        text = goes_on(more, folder / "dry", *flags_in(folder), "-n", 0, *more)
        ok = re.search(r"checkpoint +\| +0.00 GiB, and 0.00 GiB of state.*\nestimate +\| 6 steps "
                       r"of about", text)
        ok = ok and not (folder / "dry").exists() and "step    1" not in text
        check(f"{more}: sizes and an estimate", ok, text[-300:])
    for wish, *flags in (("--checkpoint-every: expected --output too", "-n", 3),
                         ("--resume: expected --output too", "-y", 1),
                         ("--checkpoints-kept: expected --checkpoint-every too", "-nk", 3),
                         ("--checkpoints-major: expected --checkpoints-kept too", "-nm", 3),
                         ("--hellaswag: is scored at each validation", "--hellaswag", "x.bin", "-v",
                          0),
                         ("--sample: expected -e too", "--sample", "O"),
                         ("--output: expected a name, found nothing", "-o", ""),
                         ("--replay .*absent.npz: could not be read", "--replay",
                          folder / "absent.npz"),
                         ("--replay: the step has its run's --steps: .* --graph", "--replay",
                          folder / "absent.npz", "-x", 3),
                         ("--replay .*part_val_0.bin: could not be read", "--replay",
                          folder / "part_val_0.bin")):
        check_error(wish, "--device", "cpu", *flags, early=True)
