"""Test what keeps a run: checkpoints, resuming, signals, a full disk, and steps that are not finite.

    python -m dev.tests.test_runs                  # on the CPU, and on a GPU if there is one
    python -m dev.tests.test_runs --device cpu     # only on this one
    python -m dev.tests.test_runs --kills 200      # more kills than the usual 20

Trainings are small, and run in child processes that get signals. A state file is read by a parser of llm.c's format of
its own, which shares no code with the trainer's.
"""
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.checkpoints.main_log import MainLog
from dev.checkpoints.run_folder import RunFolder
from dev.checkpoints.state_file import STATE
from dev.lab.kernels.adamw import halves
from dev.runs.replay import largest_gradients, repeat
from dev.tests.checks import EXACT, check, header_refusal, run_program, words
from dev.tests.models import FIXTURES, device_of, gradients, poisoned_model
from dev.tests.trainings import LLAMA, bytes_of, call, command, parse_state, same, token_files, train, without
from train_gpt2 import Config, batch_table, carve, pack_batch

TOP = Path(__file__).resolve().parents[2]
TINY = FIXTURES / "gpt2_tiny.bin"  # V = 331, L = 2, NH = 2, C = 64, maxT = 40


# ---- llm.c's state file, read by hand: see section a of its formats


def state_files(device_name, folder):
    """Every field of a state file, with and without shuffling, against what the run must have come to."""
    N = sum(row.size for row in Config.from_file(TINY).parameter_table())
    counts = [333, 300, 170]
    for shuffle in (1, 0):
        output = folder / f"shuffle_{shuffle}"
        train(device_name, folder, output, "--shuffle", shuffle, "--dtype", "fp32", "-n", 7)
        for step in (7, 12):
            fields, data, at = parse_state(output / f"state_{step:08d}_00000.bin")
            name = f"shuffle {shuffle}, step {step}:"
            yield f"{name} header", fields["header"], (20240527, 1, 1, 0, 1, shuffle), EXACT
            yield f"{name} step, other fields", [fields["step"], len(fields["zeros"])], [step, 0], EXACT
            # What the loader has come to: 2 micro-batches of 16 tokens a step, by an independent walk over the shards.
            twister = np.random.RandomState(42)

            def permute(items, twister=twister, first=len if shuffle else lambda items: 0):
                for i in range(first(items) - 1, 0, -1):
                    j = int(np.frombuffer(twister.bytes(4), "<u4")[0]) % (i + 1)
                    items[i], items[j] = items[j], items[i]

            shards = [0, 1, 2]
            permute(shards)
            shard, sample = 0, 0
            order = list(range((counts[shards[0]] - 1) // 16))
            permute(order)
            for _ in range(2 * step):
                if sample == len(order):
                    shard, sample = shard + 1, 0
                    if shard == 3:
                        shard = 0
                        permute(shards)
                    order = list(range((counts[shards[shard]] - 1) // 16))
                    permute(order)
                sample += 1
            yield f"{name} shard, sample", [fields["shard"], fields["sample"]], [shard, sample], EXACT
            m, v, master = np.frombuffer(data[at : at + 12 * N], "<f4").reshape(3, N)
            at += 12 * N
            model = np.frombuffer((output / f"model_{step:08d}.bin").read_bytes()[1024:], "<f4")
            yield f"{name} master weights are the model's", master, model, EXACT
            check(f"{name} m has both signs, v has one", (m < 0).any() and (m > 0).any() and (v >= 0).all() and v.any())
            if shuffle:
                yield f"{name} shards", struct.unpack_from("<Q3i", data, at), [3, *shards], EXACT
                n = struct.unpack_from("<Q", data, at + 20)[0]
                yield f"{name} samples", struct.unpack_from(f"<{n}i", data, at + 28), order, EXACT
                at += 28 + 4 * n
                seed, left, following = struct.unpack_from("<QiI", data, at)
                _, key, used, *_ = twister.get_state()
                yield f"{name} seed, left, next", [seed, left, following], [0, 625 - used, used], EXACT
                yield f"{name} twister", struct.unpack_from("<624I", data, at + 16), key, EXACT
                yield f"{name} matrix", struct.unpack_from("<2I", data, at + 2512), [0, 0x9908B0DF], EXACT
                at += 2520
            check(f"{name} size", len(data) == at, f"{len(data)} == {at}")


# ---- Runs that stop, and go on


def resumed_runs(device_name, folder):
    """A run that goes on from a checkpoint ends with the same bytes, of GPT-2 and of Llama 3, in several micro-batches:
    also from a state that llm.c would have written, and where outliers are skipped."""
    for name, flags, keywords in (
            ("fp32", ("--dtype", "fp32"), {}), ("bf16", ("--dtype", "bf16"), {}), ("in order", ("--shuffle", 0), {}),
            ("fp8", ("--dtype", "fp8"), {}), ("plain", ("--plain", 1), {}),
            ("bf16 moments", ("--moments", "bf16", "--dtype", "fp32"), {}),
            ("Llama", (), dict(trainer=LLAMA, model=FIXTURES / "llama_gqa.bin")),
            ("tied Llama in bf16", ("--dtype", "bf16", "--moments", "bf16"),
             dict(trainer=LLAMA, model=FIXTURES / "llama_tied.bin"))):
        whole = folder / name
        train(device_name, folder, whole, *flags, "-n", 7, **keywords)
        expected = bytes_of(whole, 12)
        again = without(whole, folder / f"{name} again", 12)
        text = train(device_name, folder, again, *flags, "-n", 7, "-y", 1, **keywords)
        same(bytes_of(again, 12), expected, f"{name} resumed")
        ok = "after step 7" in text and "step    8/" in text and "step    7" not in text
        check(f"{name} resumed: it says so", ok, text[-300:] * (not ok))

    _, data, at = parse_state(folder / "bf16 moments/state_00000012_00000.bin")
    N = sum(row.size for row in Config.from_file(TINY).parameter_table())
    m, v, master = np.frombuffer(data[at : at + 12 * N], "<u4").reshape(3, N)
    check("bf16 moments: exact in fp32", not ((m | v) & 0xFFFF).any() and (m != 0).mean() > 0.5 < (v != 0).mean())
    check("bf16 moments: parameters are not rounded", (master & 0xFFFF).any())
    again, model = without(folder / "bf16", folder / "bf16, rounded otherwise", 12), "model_00000007.bin"
    _, data, at = parse_state(again / "state_00000007_00000.bin")
    master, written = np.frombuffer(data, "<f4", N, at + 8 * N), np.fromfile(again / model, "<u2", offset=1024)
    yield "bf16: a checkpoint's parameters, of its state's", written, halves(master.astype(np.float64))[0], EXACT
    written = (master.view(np.uint32) >> 16).astype(np.uint16)  # as other programs may
    (again / model).write_bytes((again / model).read_bytes()[:1024] + written.tobytes())
    train(device_name, folder, again, "--dtype", "bf16", "-n", 7, "-y", 1)
    same(bytes_of(again, 12), bytes_of(folder / "bf16", 12), "bf16, rounded otherwise")
    again = without(folder / "bf16 moments", folder / "fp32 moments", 12)
    text = train(device_name, folder, again, "--dtype", "fp32", "--moments", "fp32", "-n", 7, "-y", 1)
    check("moments of another type: a warning", "WARNING: --moments was bf16 until step 7, and is fp32 from" in text)
    check("moments of another type: other bits", bytes_of(again, 12) != bytes_of(folder / "bf16 moments", 12))
    again = without(folder / "bf16 moments", folder / "another seed", 12)
    text = train(device_name, folder, again, "--dtype", "fp32", "--moments", "bf16", "--seed", 5, "-n", 7, "-y", 1)
    check("moments rounded by another seed: a warning", "WARNING: --seed was 42 until step 7, and is 5 from" in text)

    flags = "--shuffle", 0, "-x", 26, "-n", 11, "--dtype", "fp32"  # after 11 it is in file 1, after 22 in file 2
    train(device_name, folder, folder / "files", *flags)
    for gone in ((26,), (22, 26)):
        again = without(folder / "files", folder / f"files again {len(gone)}", *gone)
        train(device_name, folder, again, *flags, "-y", 1)
        expected = bytes_of(folder / "files", 26)
        same(bytes_of(again, 26), expected, f"files in order, resumed after {33 - 11 * len(gone)}")

    whole = folder / "fp32"
    again = without(whole, folder / "by its notes", 12)
    status, _, error = call("--device", device_name, "-o", again, "-y", 1)
    check("resumed with the flags of its notes: status", status == 0, error)
    same(bytes_of(again, 12), bytes_of(whole, 12), "resumed with the flags of its notes")
    foreign = without(whole, folder / "llm.c", 12)
    (foreign / "run_00000007.json").unlink()
    state = foreign / "state_00000007_00000.bin"
    data = bytearray(state.read_bytes())
    data[-2520:-2512] = b"\x5a" * 8  # llm.c leaves the seed as it finds it
    data[80:96] = b"\x5b" * 16  # its stochastic rounding
    state.write_bytes(data)
    text = train(device_name, folder, foreign, "--dtype", "fp32", "-n", 7, "-y", 1)
    same({**bytes_of(foreign, 12)}, bytes_of(whole, 12), "llm.c's state resumed")
    check("llm.c's state resumed: a line says that there is no json", "WARNING: there is no" in text)

    bare = without(whole, folder / "no master", 12)
    state, N = bare / "state_00000007_00000.bin", (len(data) - 1024) // 12
    N = sum(row.size for row in Config.from_file(TINY).parameter_table())
    data = state.read_bytes()
    header = np.frombuffer(data[:1024], "<i4").copy()
    header[4] = 0
    state.write_bytes(header.tobytes() + data[1024 : 1024 + 8 * N] + data[1024 + 12 * N :])
    train(device_name, folder, bare, "--dtype", "fp32", "-n", 7, "-y", 1)
    same(bytes_of(bare, 12), bytes_of(whole, 12), "a state without master weights")

    flags = "-n", 133, "-x", 140, "-sl", 0.1, "-sg", 1.5, "-v", 0, "-s", 0
    whole = folder / "outliers"
    text = train(device_name, folder, whole, *flags)
    skipped = [int(step) for step in re.findall(r"WARNING: step (\d+): no update: loss", text)]
    check("outliers: none in the first 128 steps, some after step 133, not all",
          skipped and 128 < skipped[0] and 133 < skipped[-1] and len(skipped) < 12, f"{skipped}")
    report = re.search(r"outlier +\| z-scores: loss -?\d+.\d\d, norm -?\d+.\d\d; repeated with the weights after step "
                       r"\d+: the gradient's norm is \S+ of which d\w+.* batches: .*part_train_\d.bin, tokens \d+ to",
                       text)
    check("outliers: large gradients and the place in the data are named", report, text[-300:] * (not report))
    again = without(whole, folder / "outliers again", 140)
    train(device_name, folder, again, *flags, "-y", 1)
    same(bytes_of(again, 140), bytes_of(whole, 140), "outliers resumed")
    blind = without(whole, folder / "outliers blind", 140)
    (blind / "run_00000133.json").unlink()
    train(device_name, folder, blind, *flags, "-y", 1)
    check("outliers: without their windows the run is another", bytes_of(blind, 140) != bytes_of(whole, 140))


def kept_checkpoints(device_name, folder):
    """-nk keeps the newest, -nm its multiples; -o alone writes parameters alone."""
    kept = folder / "kept"
    train(device_name, folder, kept, "-n", 1, "-nk", 2, "-nm", 4)
    for pattern in ("DONE_*", "model_*", "state_*", "run_*"):
        found = sorted(int(re.search(r"\d{8}", path.name)[0]) for path in kept.glob(pattern))
        start = [0] * (pattern == "run_*")  # the flags of the run since its start
        yield f"kept {pattern}", found, [*start, 4, 8, 11, 12], EXACT
    gone = []
    output = RunFolder(SimpleNamespace(output=kept, resume=1, checkpoint_every=1, sample=None, val_every=0))
    with mock.patch.object(Path, "unlink", lambda path, **_: gone.append(path.name)):
        output.remove(12)
    names = ["DONE_00000012", "run_00000012.json", "state_00000012_00000.bin", "model_00000012.bin"]
    yield "DONE goes first", gone == names, True, EXACT
    alone = folder / "alone"
    train(device_name, folder, alone, "-n", 0)
    wish = ["main.log", "model_00000012.bin", "run_00000000.json"]
    yield "-o alone", sorted(path.name for path in alone.iterdir()) == wish, True, EXACT


def overfitted_batch(device_name, folder):
    """-a 1 trains on the first batch of the validation's, again and again."""
    output = folder / "overfit"
    train(device_name, folder, output, "-a", 1, "-d", 16, "-m", 1, "-v", 1, "-k", "constant", "-c", 0)
    lines = (output / "main.log").read_text().splitlines()
    tel = [line.split(":")[2] for line in lines if " tel:" in line]
    trl = [line.split(":")[2].split()[0] for line in lines if " trl:" in line]
    yield "overfit: the training loss is the validation's", tel[:12] == trl, True, EXACT
    yield "overfit: it falls", float(trl[-1]) < 0.7 * float(trl[0]), True, EXACT


def whole_ones(output):
    """The steps of the checkpoints that DONE files promise, after checking that their files have the right sizes."""
    N = sum(row.size for row in Config.from_file(TINY).parameter_table())
    steps = sorted(int(path.name[5:]) for path in output.glob("DONE_????????"))
    for step in steps:
        sizes = [(output / f"{name}_{step:08d}{end}").stat().st_size
                 for name, end in (("model", ".bin"), ("state", "_00000.bin"))]
        good = sizes[0] in (1024 + 2 * N, 1024 + 4 * N) and sizes[1] > 1024 + 12 * N + 2520
        assert good, f"step {step}: sizes {sizes}"
        json.loads((output / f"run_{step:08d}.json").read_text())
    return steps


def killed_runs(device_name, folder, kills):
    """A run that is killed at random moments, again and again, and goes on each time, ends with the same bytes."""
    flags, steps = ("-x", 40, "-n", 1, "-nk", 2, "--dtype", "fp32"), 40
    whole, output, chance = folder / "whole", folder / "killed", random.Random(1)
    begun = time.perf_counter()
    train(device_name, folder, whole, *flags)
    seconds, expected, killed, writing = time.perf_counter() - begun, bytes_of(whole, steps), 0, 0
    while killed < kills:
        child = subprocess.Popen(command(device_name, folder, output, *flags, "-y", 1), stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(chance.uniform(0.2, 1) * seconds)
        while killed % 2 and child.poll() is None and not any(output.glob("*.tmp")):
            pass  # every second kill hits a file that is being written
        child.kill()
        if child.wait() == 0:
            same(bytes_of(output, steps), expected, f"after {killed} kills")
            shutil.rmtree(output)
        else:
            assert child.returncode == -signal.SIGKILL, child.stderr.read().decode()
            killed += 1
            writing += any(output.glob("*.tmp"))
            whole_ones(output)
    train(device_name, folder, output, *flags, "-y", 1)
    same(bytes_of(output, steps), expected, f"after {killed} kills")
    yield "what is left of files: none", len([*output.glob("*.tmp")]), 0, EXACT
    yield "the newest two are left", whole_ones(output), [39, 40], EXACT
    check("a fourth of the kills came while a file was being written", writing >= kills // 4, f"{writing} of {killed}")


def signals(device_name, folder):
    """SIGTERM and Ctrl-C end a run after its step, with a checkpoint from which it goes on. A second Ctrl-C ends it."""
    flags = "-x", 60, "-n", 0, "-v", 0, "-s", 0
    train(device_name, folder, folder / "whole", *flags[:2], "-n", 60, *flags[4:])
    expected = bytes_of(folder / "whole", 60)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        output = folder / signal.Signals(number).name
        child = subprocess.Popen(command(device_name, folder, output, *flags), stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.DEVNULL)
        for line in child.stdout:
            if line.startswith("step    5/"):
                child.send_signal(number)
        yield f"{output.name}: exit status", child.wait(), status, EXACT
        stopped = whole_ones(output)
        check(f"{output.name}: a whole checkpoint", len(stopped) == 1 and 5 <= stopped[0] < 60, f"{stopped}")
        train(device_name, folder, output, *flags[:2], "-n", 60, *flags[4:], "-y", 1)
        same(bytes_of(output, 60), expected, f"{output.name} resumed")

    output = folder / "tee"  # which has gone away with the same Ctrl-C
    endless = command(device_name, folder, output, *flags, "-x", 2000)
    child = subprocess.Popen(endless, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.PIPE)
    for line in child.stdout:
        if line.startswith("step    5/"):
            break
    child.stdout.close()
    child.stderr.close()
    child.send_signal(signal.SIGINT)
    yield "Ctrl-C with tee: exit status", child.wait(60), 130, EXACT
    check("Ctrl-C with tee: a whole checkpoint", len(whole_ones(output)) == 1)

    output = folder / "twice"
    child = subprocess.Popen(command(device_name, folder, output, "-d", 16 * 20000, "-v", 0), stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    while not (output / "main.log").exists():
        time.sleep(0.01)
    text = train(device_name, folder, output, status=1)
    refused = re.search("error: .*another run is writing to this folder", text)
    check("a second run in the folder is refused", refused, text)
    child.send_signal(signal.SIGINT)
    for line in child.stderr:
        if "once more leaves at once" in line:
            break
    child.send_signal(signal.SIGINT)
    yield "Ctrl-C twice: the signal ends it", child.wait(20), -signal.SIGINT, EXACT
    yield "Ctrl-C twice: no checkpoint", whole_ones(output), [], EXACT


def full_disks(device_name, folder):
    """A disk that is full leaves the last whole checkpoint, is reported, and does not end the training."""
    output = folder / "full"
    train(device_name, folder, folder / "enough")
    without(folder / "enough", output, 9, 12)
    limit = (output / "state_00000006_00000.bin").stat().st_size - 1000  # room for parameters, and not for a state

    def little_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(command(device_name, folder, output, "-y", 1), capture_output=True, text=True,
                          preexec_fn=little_room)
    yield "full disk: exit status", done.returncode, 1, EXACT
    warnings = re.findall(r"WARNING: no checkpoint of step (\d+): .*state.*File too large.*newest whole one is of step "
                          "6", done.stdout)
    check("full disk: each checkpoint that fails is reported", warnings == ["9", "12"], f"{warnings}")
    ok = re.fullmatch("error: no checkpoint of step 12: .*\n", done.stderr)
    check("full disk: the end says so too", ok, done.stderr)
    check("full disk: the training went on", "step   12/12" in done.stdout)
    yield "full disk: whole checkpoints", whole_ones(output), [3, 6], EXACT
    rest = sorted(path.name for path in output.iterdir()
                  if not re.search("0000000[36]|main.log|run_00000000", path.name))
    check("full disk: nothing else is left", rest == [], f"{rest}")
    train(device_name, folder, output, "-y", 1)
    same(bytes_of(output, 12), bytes_of(folder / "enough", 12), "after a full disk")

    limit = 50_000  # not even for parameters: each checkpoint fails, and the writer's memory must not run out
    again = without(folder / "enough", folder / "fuller", 9, 12)
    resumed = command(device_name, folder, again, "-y", 1, "-n", 1)
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=60,
                          preexec_fn=little_room)
    yield "fuller disk: failures", done.stdout.count("WARNING: no checkpoint of step"), 6, EXACT
    yield "fuller disk: whole checkpoints", whole_ones(again), [3, 6], EXACT

    lines, room = [], iter((0, 5, None, 100, 100))  # bytes that can be written, time after time

    def write(data):
        count = next(room)
        if count is None:
            raise OSError(28, "No space left on device")
        lines.append(data[:count])
        return len(data[:count])

    log = MainLog(folder, 0, False)
    log.file = SimpleNamespace(write=write)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for i in range(5):
            log.write(f"line {i}")
    yield "lines of the log wait for room", b"".join(lines) == b"line 0\nline 1\nline 2\nline 3\nline 4\n", True, EXACT
    yield "which is said once", said.getvalue().count("WARNING: main.log could not be written"), 1, EXACT

    crash = ("import sys; import train_gpt2, dev.checkpoints.background_writer as r\n"
             "def broken(*args): raise ZeroDivisionError('a crash')\n"
             "r.replace_file, real = lambda path, chunks: real(path, chunks) if '00000000' in path.name else broken(), "
             "r.replace_file\n"
             "train_gpt2.run(lambda: train_gpt2.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", crash, *command(device_name, folder, folder / "crash")[3:]], text=True,
                          capture_output=True)
    check("a crash of the writer is seen", "WARNING: no checkpoint of step 3: a crash" in done.stdout and
          done.returncode == 1 and "step   12/12" in done.stdout, done.stdout[-300:] + done.stderr[-300:])


def refusals(device_name, folder):
    """Each thing that is wrong with a run to go on with is one line."""
    good = folder / "good"
    train(device_name, folder, good, "-x", 3)

    def damage(action):
        broken = folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(good, broken)
        action(broken)
        return broken

    def cut(name, size):
        return lambda path: os.truncate(path / name, size)

    def change(at, value):
        def action(path):
            with open(path / "state_00000003_00000.bin", "r+b") as file:
                file.seek(at if at >= 0 else (path / "state_00000003_00000.bin").stat().st_size + at)
                file.write(struct.pack("<i", value))
            (path / "run_00000003.json").unlink()
        return action

    other = folder / "other"
    other.mkdir()
    for path in folder.glob("part_*"):
        shutil.copy(path, other)
    os.truncate(other / "part_train_1.bin", 1024 + 2 * 299)
    data = bytearray((other / "part_train_1.bin").read_bytes())
    data[8:12] = struct.pack("<i", 299)
    (other / "part_train_1.bin").write_bytes(data)
    nothing, N = (lambda path: None), sum(row.size for row in Config.from_file(TINY).parameter_table())
    for wish, action, *flags in (
            (r"-t 8, and now it is 4: expected", nothing, "-t", 4),
            (r"-d 32, and now it is 64: expected", nothing, "-d", 64),
            (r"--shuffle 1, and now it is 0: expected", nothing, "--shuffle", 0),
            (r"a run on \['part_train_0.bin', 1690, '\w+'\], and -i is \['part_val_0.bin'", nothing, "-a", 1),
            (r"a run on \['part_train_1.bin', 1624, '\w+'\], and -i is \['part_train_1.bin', 1622, ", nothing,
             "-i", other / "part_train_*.bin"),
            (r"a run on 3 files, and -i is 2 files|a run on", nothing, "-i", folder / "part_train_[01].bin"),
            (r"-e .*gpt2_tiny.bin, and now it is d2: expected the same", nothing, "-e", "d2"),
            (r"DONE_00000003: is there, and model_00000003.bin is not", lambda p: (p / "model_00000003.bin").unlink()),
            (r"DONE_00000003: is there, and state_00000003_00000.bin is not",
             lambda p: (p / "state_00000003_00000.bin").unlink()),
            (r"run_00000003.json: could not be read", cut("run_00000003.json", 40)),
            (r"state_00000003_00000.bin: its header of 1000 bytes .*expected 1024",
             cut("state_00000003_00000.bin", 1000)),
            (r"truncated, or of a model of another size", cut("state_00000003_00000.bin", 1024 + 12 * N)),
            (r"or of a model of another size, .* bytes; expected 1,5",
             cut("state_00000003_00000.bin", 1024 + 12 * N + 2580)),
            (r"state_00000003_00000.bin: .*" + header_refusal((7, 1), STATE), change(0, 7)),
            (r"state_00000003_00000.bin: .*" + header_refusal((20240527, 2), STATE), change(4, 2)),
            (r"state_00000003_00001.bin: could not be read", change(8, 2)),
            (r"of rank 1 of 1, .* expected rank 0 of 1", change(12, 1)),
            (r"of another --shuffle than it says", change(20, 0)),
            (r"in file 3", change(120, 3)), (r"has \d+ batches", change(128, 99)),
            (r"of step 4; expected 3, as its name says", change(40, 4)),
            (r"holds an earlier run \(DONE_00000003, main.log, .*go on from that with -y 1", nothing, "-y", 0),
            (r"-x 2: expected 3 or more, the steps of .*model_00000003.bin", nothing, "-x", 2),
            (r"run_00000003.json: data is missing; expected",
             lambda p: (p / "run_00000003.json").write_text('{"flags": {}}')),
            (r"model_00000003.bin: 9,999 bytes; expected \d", cut("model_00000003.bin", 9999))):
        flags = flags if "-y" in flags else [*flags, "-y", 1]
        text = train(device_name, folder, damage(action), "-x", 3, *flags, status=1)
        line = text.splitlines()[-1]
        check(f"refused: {wish[:50]}", re.search(f"^error: .*{wish}", line) and text.count("error: ") == 1, line)
    for wish, action, *flags in ((r"WARNING: --learning-rate was 0.01 until step 3, and is 0.02 from now on", nothing,
                                  "-l", 0.02),
                                 (r"WARNING: --batch-size was 2 until step 3, and is 1 from now on", nothing, "-b", 1),
                                 (r"WARNING: --steps was 3 until step 3, and is 4", nothing, "-x", 4)):
        text = train(device_name, folder, damage(action), "-x", 3, *flags, "-y", 1)
        check(f"warned: {wish}", wish in text, text[-200:])
    for flags in (("--dry-run",), ("--dry-run", 1), ("--dry-run", "-v", 0)):
        text = train(device_name, folder, folder / "dry", "-n", 0, *flags)
        ok = re.search(r"checkpoint +\| +0.00 GiB, and 0.00 GiB of state.*\nestimate +\| 12 steps of about", text)
        ok = ok and not (folder / "dry").exists() and "step    1" not in text
        check(f"{flags}: sizes and an estimate", ok, text[-300:])
    for wish, flags in ((r"--checkpoint-every: expected --output too", ("-n", 3)),
                        (r"--resume: expected --output too", ("-y", 1)),
                        (r"--checkpoints-kept: expected --checkpoint-every too", ("-nk", 3)),
                        (r"--checkpoints-major: expected --checkpoints-kept too", ("-nm", 3)),
                        (r"--hellaswag: is scored at each validation", ("--hellaswag", "x.bin", "-v", 0)),
                        (r"--top-k: expected --sample too", ("--top-k", 3)),
                        (r"--sample: expected -e too", ("--sample", "O")),
                        (r"--output: expected a name, found nothing", ("-o", "")),
                        (r"--replay .*absent.npz: could not be read", ("--replay", folder / "absent.npz")),
                        (r"--replay .*part_val_0.bin: could not be read", ("--replay", folder / "part_val_0.bin"))):
        *_, error = call("--device", device_name, *flags)
        check(f"refused: {wish}", re.fullmatch(f"error: .*{wish}.*\n", error), error)


def steps_that_are_not_finite(device_name, folder):
    """A step that is not finite ends a run in one line, which names where that began, and leaves what repeats it."""
    c = Config.from_file(TINY)

    def planted(name, index, value):
        """The fixture with a number planted in a parameter."""
        data, start = bytearray(TINY.read_bytes()), 1024
        for row in c.parameter_table():
            if row.name == name:
                start += 4 * int(np.ravel_multi_index(index, row.whole_shape))
                break
            start += row.nbytes
        data[start : start + 4] = struct.pack("<f", value)
        path = folder / f"{name}_{value}.bin"
        path.write_bytes(data)
        return path

    for wish, flags, model in (
            (r"is \S+ in \w+\[.*\].* wrote in \w+", ("-l", "1e30"), TINY),
            (r"the parameter fcb is not finite at \[1, 7\], before this step", (), planted("fcb", (1, 7), np.inf)),
            (r"the parameter lnfw is not finite at \[5\], before this step", (), planted("lnfw", (5,), np.nan)),
            (r"is \S+ in lnf\[\d+, 5\] \(token \d of sequence \d\), which kernel residual_layernorm_forward wrote "
             "in last_norm_forward; micro-batch 0", (), planted("lnfw", (5,), 3e38)),
            (r"every number of the step is finite, and the gradient's norm is \d\.\d+e\+2\d, whose square .* d", (),
             planted("wte", (300, 0), 1e25))):  # a word that is never in the data: its logits are large
        output = folder / Path(model).stem
        text = train(device_name, folder, output, *flags, "--dtype", "fp32", "-v", 0, model=model, status=1)
        line = text.splitlines()[-1]
        ok = re.search(f"^error: the loss of step \\d+ is .*{wish}.*part_train_", line)
        check(f"not finite: {wish[:60]}", ok, line)
        told = re.search(rf"^WARNING: .*{wish.split(', before')[0]}: no step", text, re.M)
        check("not finite: a parameter is named when it is read", bool(told) == ("before this step" in wish), text)
        [kept] = output.glob("replay_*.npz")
        step = int(kept.stem[-8:])
        check("not finite: the step", step == (1 if flags else 0) and f"loss of step {step + 1} is" in line, f"{step}")
        check("not finite: the checkpoint before it is whole", whole_ones(output)[-1] == step, f"{step}")
        status, text, error = call("--device", device_name, "--replay", kept)
        found = re.search(wish, text)
        check("not finite: --replay finds it again", status == 0 and found and found[0] in line, text + error)

    output = folder / "later"
    train(device_name, folder, output, "-x", 6, "-n", 6, "-nk", 1, "--dtype", "fp32")
    before = bytes_of(output, 6)
    train(device_name, folder, output, "-x", 12, "-n", 6, "-nk", 1, "--dtype", "fp32", "-y", 1, "-l", 1e30, status=1)
    steps = whole_ones(output)
    check("not finite: the last good checkpoint stays", steps[0] == 6 and len(steps) == 2, f"{steps}")
    before.pop("main.log")
    same({name: (output / name).read_bytes() for name in before}, before, "the last good checkpoint")

    place = device_of(device_name, "fp32", 64, 2)
    model = poisoned_model(place, 2, 20)
    batches = [pack_batch(*batch) for batch in words(257, 2, 2, 2, 20)]
    for kernel, nth, argument, wish in (
            ("encoder_forward", 1, 0, r"in residual\[2, 3\] \(token 2 of sequence 0\), .* embedding_forward; .* 1"),
            ("attention_forward", 1, 0, r"in atty\[2, 3\] .* attention_forward wrote in layer_forward, layer 1; .* 0"),
            ("attention_forward", 2, 0, r"in atty\[2, 3\] .* attention_forward wrote in layer_forward, layer 0; .* 1"),
            ("fused_classifier", 0, 1, r"in losses\[37\] .* fused_classifier wrote in loss_forward"),
            ("add_loss", 0, 0, r"in verdict\[1\], which kernel add_loss wrote in mean_loss"),
            ("layernorm_backward", 2, 0, r"in dresidual\[2, 3\] .* wrote in layer_backward, layer 1"),
            ("attention_backward_kv", 1, 0, r"in dqkv\[0, 131\] .* wrote in layer_backward, layer 0"),
            ("encoder_backward_wte", 0, 0, r"in dwte\[2, 3\], which .* embedding_backward; micro-batch 0")):
        seen = []

        def launch(name, items, *args, kernel=kernel, nth=nth, argument=argument, seen=seen, **keywords):
            type(place).launch(place, name, items, *args, **keywords)
            seen.append(name)
            if name == kernel and seen.count(name) == nth + 1:
                spoilt = args[argument]
                spoilt.reshape(-1)[min(131, spoilt.size - 3)] = np.nan

        with mock.patch.object(place, "launch", launch):
            found = repeat(model, batches)
        check(f"planted in {kernel} {nth}", found and re.search(wish, found), found or "nothing was found")
    products = []

    def matmul(out, *args, **keywords):
        type(place).matmul(place, out, *args, **keywords)
        products.append(out)
        if len(products) == 2:
            out[2, 3] = np.inf

    with mock.patch.object(place, "matmul", matmul):
        found = repeat(model, batches)
    ok = re.search(r"inf in branch\[2, 3\] .*, which a matrix product wrote in layer_forward, layer 0; .* 0", found)
    check("planted in a product", ok, found)
    check("nothing planted: nothing is found", repeat(model, batches) is None)
    for _ in range(2):
        model.train_step(*batches)
    check("nothing planted: nor after two steps", repeat(model, batches) is None)
    norms = dict((name, norm) for norm, name in largest_gradients(model))
    expected = gradients(model, *[(batch.tokens, batch.targets) for batch in (
        carve(data, batch_table(*shape)) for data, shape in batches)])
    for name, gradient in expected.items():
        row = next(row for row in model.config.parameter_table() if row.name == name)
        for l in range(max(1, row.layers)):
            wish = np.linalg.norm(np.float64(gradient[l] if row.layers else gradient)) / len(batches)
            yield f"norm of d{name} {l}", norms[f"d{name}" + f" of layer {l}" * (row.layers > 0)], wish


TESTS = (state_files, resumed_runs, kept_checkpoints, overfitted_batch, signals, full_disks, refusals,
         steps_that_are_not_finite, killed_runs)

if __name__ == "__main__":
    run_program(TESTS, token_files, kills=20)
