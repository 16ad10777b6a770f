"""Test how runs resume: the fields of state files, the same bytes as without a stop, and smaller
batches.

Trainings are small. A state file is read by a parser of llm.c's format that shares no code with the
trainer's.
"""
import contextlib
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.features import order
from dev.features.checkpoints.resume import check_batch, load_position
from dev.features.checkpoints.run_folder import RunFolder
from dev.features.checkpoints.state_file import shuffle_record
from dev.features.data_loader import FilesLoader
from dev.lab.kernels.adamw import halves
from dev.tests.checks import EXACT, FIXTURES, TINY, check, check_refusal, fast
from dev.tests.states import Walk, parse_state, place_of, read_state
from dev.tests.trainings import (LLAMA, NUMBERS, check_resumed, place_of as place, train, trained,
                                 without)

pytestmark = pytest.mark.usefixtures("token_data")


def test_state_files(device_name, folder):
    """Every field of a state file, with and without shuffling."""
    for shuffle in (1, 0):
        output = folder / f"shuffle_{shuffle}"
        train(device_name, folder, output, "--shuffle", shuffle, "--dtype", "fp32", "-n", 7)
        for step in (7, 12):
            name = f"shuffle {shuffle}, step {step}:"
            fields, sets = read_state(output / f"state_{step:08d}_00000.bin")
            yield f"{name} header", fields["header"], (20240527, 1, 1, 0, 1, shuffle), EXACT
            yield (f"{name} step, other fields", [fields["step"], len(fields["zeros"])], [step, 0],
                   EXACT)
            # 2 micro-batches of 16 tokens a step
            walk = Walk(0, 1, shuffle, B=2, counts=(333, 300, 170)).advance(2 * step)
            check(f"{name} the place in the data", place_of(fields) == walk.state())
            m, v, master = (np.concatenate([part.ravel() for part in parts]) for parts in sets)
            model = np.fromfile(output / f"model_{step:08d}.bin", "<f4", offset=1024)
            yield f"{name} master weights are the model's", master, model, EXACT
            check(f"{name} m has both signs, v has one",
                  (m < 0).any() and (m > 0).any() and (v >= 0).all() and v.any())


def test_resumed_runs(device_name, folder):
    """A run that resumes ends with the same bytes as one that never stopped, GPT-2's and Llama
    3's."""
    for name, flags, keywords in (
            ("fp32", ("--dtype", "fp32"), {}), ("bf16", ("--dtype", "bf16"), {}),
            ("in order", ("--shuffle", 0), {}),
            ("fp8", ("--dtype", "fp8", "--fp8", "all"), {}),
            *[("plain", ("--plain", 1), {})] * (device_name == "cuda"),
            ("bf16 moments", ("--moments", "bf16", "--dtype", "fp32"), {}),
            ("Llama", (), dict(trainer=LLAMA, model=FIXTURES / "llama_gqa.bin")),
            ("tied Llama in bf16", ("--dtype", "bf16", "--moments", "bf16"),
             dict(trainer=LLAMA, model=FIXTURES / "llama_tied.bin"))):
        train(device_name, folder, folder / name, *flags, "-n", 7, **keywords)
        _, text = check_resumed(
            name, folder / name, 12, go_on=lambda copy, flags=flags, keywords=keywords: train(
                device_name, folder, copy, *flags, "-n", 7, "-y", 1, **keywords))
        ok = "after step 7" in text and "step    8/" in text and "step    7" not in text
        check(f"{name} resumed: it says so", ok, text[-300:] * (not ok))
    check_resumed("by its notes", folder / "fp32", 12, device=place(device_name))

    _, data, at = parse_state(folder / "bf16 moments/state_00000012_00000.bin")
    m, v, master = np.frombuffer(data[at : at + 12 * NUMBERS], "<u4").reshape(3, NUMBERS)
    check("bf16 moments: exact in fp32",
          not ((m | v) & 0xFFFF).any() and (m != 0).mean() > 0.5 < (v != 0).mean())
    check("bf16 moments: parameters are not rounded", (master & 0xFFFF).any())
    for flag, was, value in (("--moments", "bf16", "fp32"), ("--seed", 42, 5)):
        copy = without(folder / "bf16 moments", folder / f"another {flag}", 12)
        text = trained(copy, "-y", 1, flag, value, device=place(device_name))
        check(f"another {flag}: a warning",
              f"WARNING: {flag} was {was} until step 7, and is {value} from" in text, text)
        parameters = [(run / "model_00000012.bin").read_bytes()
                      for run in (copy, folder / "bf16 moments")]
        check(f"another {flag}: other bits", parameters[0] != parameters[1])

    # After 11 it is in file 1, after 22 in file 2.
    flags = "--shuffle", 0, "-x", 26, "-n", 11, "--dtype", "fp32"
    train(device_name, folder, folder / "files", *flags)
    for gone in ((26,), (22, 26)):
        check_resumed("files in order", folder / "files", *gone, go_on=lambda copy: train(
            device_name, folder, copy, *flags, "-y", 1))


def test_states_of_others(device_name, folder):
    """A run resumes what llm.c, or another program, may have written instead of its own
    checkpoint."""
    N, path = NUMBERS, folder / "state_00000007_00000.bin"

    def llmc(run):
        (run / "run_00000007.json").unlink()
        data = bytearray((run / path.name).read_bytes())
        data[-2520:-2512] = b"\x5a" * 8  # llm.c leaves the seed as it finds it
        data[80:96] = b"\x5b" * 16  # its stochastic rounding
        (run / path.name).write_bytes(data)

    def no_master(run):
        data = bytearray((run / path.name).read_bytes())
        data[16:20] = bytes(4)
        (run / path.name).write_bytes(data[: 1024 + 8 * N] + data[1024 + 12 * N :])

    def cut_off(run):
        model, (_, data, at) = run / "model_00000007.bin", parse_state(run / path.name)
        master = np.frombuffer(data, "<u4", N, at + 8 * N)
        rounded = halves(master.view("<f4").astype(np.float64))[0]
        written = np.fromfile(model, "<u2", offset=1024)
        check("bf16: a checkpoint's parameters are its state's, rounded",
              np.array_equal(written, rounded))
        model.write_bytes(model.read_bytes()[:1024] + (master >> 16).astype("<u2").tobytes())

    for name, dtype, change in (("llm.c's state", "fp32", llmc),
                                ("a state without master weights", "fp32", no_master),
                                ("parameters rounded otherwise", "bf16", cut_off)):
        whole, flags = folder / dtype, ("--dtype", dtype, "-n", 7)
        if not whole.exists():
            train(device_name, folder, whole, *flags)
        _, text = check_resumed(name, whole, 12, change=change, go_on=lambda copy, flags=flags: (
            train(device_name, folder, copy, *flags, "-y", 1)))
        check(f"{name}: a warning without json",
              ("WARNING: there is no" in text) == (change == llmc), text[:300])


def test_outliers(device_name, folder):
    """Steps that are outliers are skipped and reported, and a run that resumes skips the same."""
    flags, whole = (("-n", 133, "-x", 140, "-sl", 0.1, "-sg", 1.5, "-v", 0, "-s", 0),
                    folder / "outliers")
    text = train(device_name, folder, whole, *flags)
    skipped = [int(step) for step in re.findall(r"WARNING: step (\d+): no update: loss", text)]
    check("outliers: none in the first 128 steps, some after step 133, not all",
          skipped and 128 < skipped[0] and 133 < skipped[-1] and len(skipped) < 12, f"{skipped}")
    report = re.search(r"outlier +\| z-scores: loss -?\d+.\d\d, norm -?\d+.\d\d; .* step \d+: the "
                       r"gradient's norm is \S+ of which d\w+.* batches: .*part_train_\d.bin, "
                       r"tokens \d+ to", text)
    check("outliers: large gradients and the place in the data are named", report,
          text[-300:] * (not report))
    check_resumed("outliers", whole, 140, device=place(device_name))
    copy = without(whole, folder / "without their windows", 140)
    (copy / "run_00000133.json").unlink()
    train(device_name, folder, copy, *flags, "-y", 1)
    check("outliers without their windows: another run", (copy / "main.log").read_bytes() !=
          (whole / "main.log").read_bytes())


def test_kept_checkpoints(device_name, folder):
    """-nk keeps the newest, -nm each of its multiples; -o alone writes parameters only."""
    kept = folder / "kept"
    train(device_name, folder, kept, "-n", 1, "-nk", 2, "-nm", 4)
    for pattern in ("DONE_*", "model_*", "state_*", "run_*"):
        found = sorted(int(re.search(r"\d{8}", path.name)[0]) for path in kept.glob(pattern))
        start = [0] * (pattern == "run_*")  # the flags of the run since its start
        yield f"kept {pattern}", found, [*start, 4, 8, 11, 12], EXACT
    gone = []
    output = RunFolder(SimpleNamespace(output=kept, resume=1, checkpoint_every=1, sample=None,
                                       val_every=0), None, Config, order.FLAGS, order.FEATURES)
    with mock.patch.object(Path, "unlink", lambda path, **_: gone.append(path.name)):
        output.remove(12)
    names = ["DONE_00000012", "run_00000012.json", "state_00000012_00000.bin", "model_00000012.bin"]
    check("DONE goes first", gone == names, gone)
    alone = folder / "alone"
    train(device_name, folder, alone, "-n", 0)
    found = sorted(path.name for path in alone.iterdir())
    wish = ["log.jsonl", "main.log", "model_00000012.bin", "run_00000000.json"]
    check("-o alone", found == wish, found)


@fast
def test_overfitted_batch(device_name, folder):
    """-a 1 trains on the first validation batch, again and again."""
    output = folder / "overfit"
    train(device_name, folder, output, "-a", 1, "-d", 16, "-m", 1, "-v", 1, "-k", "constant", "-c",
          0)
    lines = (output / "main.log").read_text().splitlines()
    tel = [line.split(":")[2] for line in lines if " tel:" in line]
    trl = [line.split(":")[2].split()[0] for line in lines if " trl:" in line]
    check("overfit: the training loss is the validation's", tel[:12] == trl, (tel, trl))
    check("overfit: it falls", float(trl[-1]) < 0.7 * float(trl[0]), trl)


def test_changed_flags(folder):
    """A resumed run says at which rate it goes on, which flags it does not know, and what no longer
    goes with the others. Doubtful flags get a warning each, and others none."""
    def train(output, *flags, **more):
        return trained(output, *(() if "-y" in flags else ("-x", 8, "-n", 6)), *flags, **more)

    def rate(schedule, step, steps):
        """By the formulas of llm.c, for -l 0.01 -q 0.1 -u 2."""
        share, begin = (step - 2) / (steps - 2), int(0.8 * steps)
        fallen = {"cosine": (1 - math.cos(math.pi * share)) / 2, "linear": share,
                  "wsd": max(0, (step - begin) / (steps - begin)) ** 0.5}[schedule]
        return f"{0.01 * (1 - 0.9 * fallen):.2e}"

    def jumps(text):
        return re.findall(r"WARNING: the learning rate of step (\d+) was (\S+) \((.*)\), and is "
                          r"(\S+) now \((.*)\)", text)

    for schedule in ("cosine", "linear", "wsd"):
        flags = "-k", schedule, "-l", 0.01, "-q", 0.1, "-u", 2, "-v", 0, "-s", 0
        text = train(folder / schedule, *flags) + train(folder / schedule, "-y", 1)
        check(f"{schedule}: no doubt, and the same -x", "WARNING" not in text, text)
        text = train(folder / schedule, "-y", 1, "-x", 20, "-n", 30)
        wish = [("9", rate(schedule, 8, 8), "-x 8", rate(schedule, 8, 20), "-x 20")]
        check(f"{schedule}: the rates", jumps(text) == wish, (text[-900:], wish))
    text = train(without(folder / "cosine", folder / "other", 8, 20), "-y", 1, "-k", "linear")
    wish = [("7", rate("cosine", 6, 8), "-k cosine", rate("linear", 6, 8), "-k linear")]
    check("another -k", jumps(text) == wish, (text[-900:], wish))

    notes = folder / "other/run_00000008.json"
    known = json.loads(notes.read_text())
    known["flags"] |= dict(warp=3, old=None, mode="x")
    notes.write_text(json.dumps(known))
    text = train(notes.parent, "-y", 1)
    check("unknown flags", f'WARNING: {notes}: there is no such flag as warp 3, mode "x": this run '
          "goes on without\n" in text, text)
    for flags, wish in (
            (("-b", 4), "-b 4: the run had -b 2, and 16 tokens .*= 32: expected -b 2, or"),
            (("-t", 6), "-t 6: the run had -t 8, and 16 tokens .*= 12: expected -t 8, or"),
            (("-b", 3, "-d", 32), "-d 32: expected a multiple of")):
        text = train(notes.parent, "-y", 1, *flags, status=1)
        check(f"{flags}", re.search(f"error: {wish}", text) and "-d 16" not in text, text)
    training = SimpleNamespace(flags=SimpleNamespace(batch_size=2, total_batch=16), T=8, count=3)
    check_refusal("ranks", "3 ranks: the run had 1 rank, and 16 tokens .*= 48: expected 1 rank, or",
                  check_batch, SimpleNamespace(notes=dict(ranks=1, flags=known["flags"])), training)

    text = train(folder / "odd", "-u", 9, "-v", 1, "-m", 0, "-s", 3, "-g", 0, "-d", 336)
    for wish in ("-u 9 -x 8: the warmup is longer than the run", "-v 1 -m 0: a validation without",
                 "-s 3 -g 0: a sample without", "-d 336: a step has more tokens than the 320 in"):
        check(wish, text.count("WARNING") == 4 and text.count(f"WARNING: {wish}") == 1, text)


def tokens_of(data, count):
    """A loader's next `count` tokens."""
    batches = count // (data.own * data.T)
    return np.concatenate([data.next_batch()[0].ravel() for _ in range(batches)])


def test_smaller_batches(folder):
    """With a smaller -b the same tokens follow; if they cannot, the run is refused."""
    pattern, T = str(folder / "part_train_[01].bin"), 8

    def state_of(data, path="a state"):
        position = data.position()
        P, n = len(data.paths), len(position.order)
        record = np.zeros(1, shuffle_record(P, n))[0]
        record["P"], record["files"], record["n"], record["order"] = (P, position.files, n,
                                                                      position.order)
        _, key, used, *_ = position.rng
        record["key"], record["next"], record["left"] = key, used, max(1, 625 - used)
        return SimpleNamespace(path=path, place=position.place, next=position.next,
                               shuffle=int(data.shuffle), record=record if data.shuffle else None)

    def loader(B, shuffle, rank=0, count=1):
        return FilesLoader(pattern, B, T, Config.from_file(TINY), shuffle, rank, count)

    def go_on(data, state, had):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_position(state, data, True, True, had)
        return said.getvalue()

    for shuffle in (0, 1):
        # Batches of 32 tokens; 10 in the file of 333, then 9 in that of 300.
        for done, B in ((2, 2), (5, 1), (11, 2)):
            whole = loader(4, shuffle)
            tokens_of(whole, done * 32)
            state, less = state_of(whole), loader(B, shuffle)
            said = go_on(less, state, 4)
            left, name = (len(whole.order) - whole.next) * 32, f"shuffle {shuffle}, after {done}:"
            yield f"{name} the same tokens", tokens_of(less, left), tokens_of(whole, left), EXACT
            batches = less.batches_of[less.files[less.place]]
            yield f"{name} each once", sorted(less.order), [*range(batches)], EXACT
            yield f"{name} it is said", f"shuffled in batches of -b {B}" in said, shuffle > 0, EXACT
            again = loader(B, shuffle)
            go_on(again, state_of(less), B)  # a second time
            yield f"{name} and on", tokens_of(again, 160), tokens_of(less, 160), EXACT
    for B, shuffle, done, count in ((3, 0, 1, 1), (3, 1, 3, 1), (8, 1, 2, 1), (2, 1, 2, 2)):
        whole = loader(4, shuffle, count=count)
        tokens_of(whole, done * 32)
        wish = "each rank has an order" if count > 1 else f"stopped after {32 * done} tokens"
        check_refusal(f"shuffle {shuffle}, ranks {count}",
                      f"-b {B}: the run had -b 4, and .*{wish}.*: expected -b 4", go_on,
                      loader(B, shuffle, count=count), state_of(whole), 4)
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

    output = folder / "less"
    train("cpu", folder, output, "-i", pattern, "-x", 3)
    whole = shutil.copytree(output, folder / "as before")
    train("cpu", folder, whole, "-i", pattern, "-y", 1, "-x", 6)
    text = train("cpu", folder, output, "-i", pattern, "-y", 1, "-x", 6, "-b", 1)
    check("-b 1: it is said",
          "WARNING: --batch-size was 2 until step 3, and is 1 from now on" in text, text[-500:])
    logs = [[float(x) for x in re.findall(r"trl:(\S+)", (each / "main.log").read_text())]
            for each in (whole, output)]
    yield "-b 1: losses", logs[1], logs[0], 2e-4
