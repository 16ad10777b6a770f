"""Test the programs around training runs: dev/tools/compare_training.py, dev/tools/turns.py, dev/tools/sweep.py,
dev/recipes/ and, where PyTorch is installed, dev/tools/torch_training.py.

    python -m dev.tests.test_training
"""
import contextlib
import importlib.util
import io
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import train_gpt2
from dev.features import attach, set_defaults, table_of_flags
from dev.gpu.peak import flops_per_token, peak_flops
from dev.ranks.environment import launched
from dev.tests.checks import EXACT, check, check_refusal, run, summary
from dev.tools import compare_training, sweep, turns
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import Config, parse_flags

TOP = Path(__file__).resolve().parents[2]
TINY = TOP / "dev/fixtures/gpt2_tiny.bin"
FLAGS, _ = table_of_flags(train_gpt2.FLAGS, Config)  # all of the trainer's
LOG = """s:0 tel:11.0092
s:0 trl:11.0091 lr:0.000001 norm:15.37
s:1 trl:10.5000 lr:0.000002 norm:7.25
s:2 tel:9.0000
s:2 eval:0.2945
s:1 trl:10.2500 lr:0.000002 norm:7.00
s:2 trl:nan lr:0.000003 norm:inf
"""


def output_of(function, *args):
    """What a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return out.getvalue()


# ---- Two logs


def logs(folder):
    """What a log says is read, by its name or its folder's; the comparison's figures are those of a count by hand."""
    (folder / "a").mkdir()
    path = folder / "a" / "main.log"
    path.write_text(LOG)
    for place in (path, folder / "a"):
        log = compare_training.read_log(place)
        check(f"a log, given as {place.name}", (log["tel"], log["eval"]) == ({0: 11.0092, 2: 9.0}, {2: 0.2945}), log)
        check("a later line of a step wins", (log["trl"][1], log["norm"][1]) == (10.25, 7.0), log["trl"])
        check("a loss that is no number", math.isnan(log["trl"][2]) and math.isinf(log["norm"][2]))
    for wish, content in (("line 2 is 'step 1'; expected lines such as", "s:0 tel:1.0\nstep 1\n"),
                          ("line 1 is 's:0 trl:x", "s:0 trl:x lr:1 norm:1\n"), ("line 1 is ''", "\n"),
                          ("line 1 is 's:0 lol:1'", "s:0 lol:1\n"),
                          ("line 1 is 's:0 tel:1.0 and more'", "s:0 tel:1.0 and more\n"), ("is no text", b"\xff\xfe"),
                          ("could not be read .*; expected a main.log", None)):
        path = folder / "bad.log"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        check_refusal("log", f"{path}: .*{wish}", compare_training.read_log, path)

    one, other = {0: 9.0, 1: 4.0, 2: 3.0, 3: 2.0, 7: 1.0}, {0: 8.0, 1: 4.5, 2: 3.25, 3: 2.5, 4: 100.0}
    whole = compare_training.compare(one, other, 50)
    yield "the last 2 steps", compare_training.compare(one, other, 2), (2.5, 2.875, 1.0, 0, 4), 1e-15
    yield "all steps", whole, (4.5, 4.5625, 1.0, 0, 4), 1e-15
    other[1] = 6.0
    yield "the largest gap", compare_training.compare(one, other, 1), (2.0, 2.5, 2.0, 1, 4), 1e-15
    check_refusal("logs", "no training step in common", compare_training.compare, one, {5: 1.0}, 50)

    for name, losses in (("one", one), ("other", other)):
        lines = [f"s:{step} trl:{loss:.4f} lr:0.000300 norm:1.00\n" for step, loss in losses.items()]
        (folder / f"{name}.log").write_text("s:0 tel:5.0000\n" + "".join(lines))
    found = output_of(compare_training.main, [str(folder / "one.log"), str(folder / "other.log"), "--last", "2"])
    wish = ("mean over the last 2 of 4 steps: 2.5000 and 2.8750, a difference of -0.3750\n"
            "the largest difference at a step: 2.0000, at step 1\n")
    check("compare_training.py", found == wish, found)
    for arguments in ([], ["a"], ["--last", "2"], ["a", "--last", "2"]):
        check_refusal("compare_training.py", "expected two main.log", compare_training.main, arguments)
    check_refusal("compare_training.py", "--last: 0: expected at least 1", compare_training.main,
                  ["a", "b", "--last", "0"])


# ---- The sweep


def rows_of_sweep(folder):
    """Each row is what train_gpt2.py takes, says all that a step depends on, and has a folder of its own."""
    for device, rows in sweep.ROWS.items():
        parsed = [sweep.flags_of(row, device) for row in rows]
        check(f"{device}: {len(rows)} rows, of known flags", len(rows) >= 8)
        check(f"{device}: all say -e, -b, -t, -x and -l", all(
            {"-e", "-b", "-t", "-x", "-l"} <= {*row.split()} for row in rows))
        names = {sweep.folder_of(folder, row).name for row in rows}
        check(f"{device}: each has its own folder", len(names) == len(rows) and all(
            re.fullmatch(r"[\w.+-]+", name) for name in names), names)
        check(f"{device}: the whole validation file", all(flags.val_batches == -1 for flags in parsed))
        check(f"{device}: warmups are shorter than runs", all((flags.warmup or 0) < flags.steps for flags in parsed))
    check_refusal("sweep", "--nonsense 1; --help", sweep.flags_of, "-e d3 --nonsense 1", "cpu")
    for row, wish in (("-e d3 -b 4 -t 64 -x 9 -l 1", "-e d3 -b 4 -t 64"),
                      ("-l 1 -d 512 -b 2 -e d2", "-d 512 -b 2 -e d2")):
        check(f"shape: {wish}", sweep.shape_of(row) == wish, sweep.shape_of(row))


def sections(folder):
    """A section of a device takes its old one's place, and leaves all else alone."""
    path = folder / "sweep.md"
    for device, section in (("cpu", "one\n"), ("cuda", "two\n"), ("cpu", "three\nlines\n")):
        sweep.replace_section(path, device, section)
    wish = (sweep.HEAD + "\n<!-- cpu: begin -->\nthree\nlines\n<!-- cpu: end -->\n"
            "\n<!-- cuda: begin -->\ntwo\n<!-- cuda: end -->\n")
    check("sections of two devices", path.read_text() == wish, repr(path.read_text()))


def tables(folder):
    """The table's figures are those of the logs, counted by hand, and the best row at the end is the first."""
    good, better = "-e d2 -b 2 -t 8 -x 12 -l 1 -q 1", "-e d2 -b 4 -t 8 -d 64 -x 20 -l 2 -q 1"
    for row, ms, lowest, final in ((good, 250.0, 2.5, 4.0), (better, 1500.0, 3.5, 3.5)):
        own, speed = (sweep.folder_of(folder, name) for name in (row, f"speed {sweep.shape_of(row)}"))
        own.mkdir()
        speed.mkdir()
        steps = sweep.flags_of(row, "cpu").steps
        lines = [f"s:0 tel:9.0000\ns:5 tel:{lowest:.4f}\n",
                 *(f"s:{step} trl:{100 + step:.4f} lr:0.1 norm:1.00\n" for step in range(steps)),
                 f"s:{steps} tel:{final}\n"]
        (own / "main.log").write_text("".join(lines))
        (speed / "output.txt").write_text(f"step\n12 steps in 9.9 s, median {ms} ms, 5 tok/s; training loss 2 -> 1\n")
    rows, failures = [good, "-e d9 -x 1", better], {"-e d9 -x 1": "the loss is nan"}
    found = sweep.table(rows, failures, "cpu", folder, 1000).splitlines()
    wish = [f"| `{better}` | 1.28 | 30 | 3.5000 | 3.5000, 5 | 114.5000 |",  # 20 * 64 / 1000; 20 * 1.5; steps 10 to 19
            f"| `{good}` | 0.19 | 3 | 4.0000 | 2.5000, 5 | 106.5000 |",  # 12 * 16 / 1000; 12 * 0.25; steps 2 to 11
            "| `-e d9 -x 1` | | | the loss is nan | | |"]
    check("a table", found[-3:] == wish, found[-3:])
    own = sweep.folder_of(folder, good)
    text = (own / "main.log").read_text()
    for part in (text.replace("s:12 tel", "s:11 tel"), text.replace("s:7 trl", "s:6 trl")):
        (own / "main.log").write_text(part)
        check_refusal("sweep", f"{own}/main.log: expected 12 steps and a validation after them; remove",
                      sweep.result_of, good, "cpu", own)
    (speed / "output.txt").write_text("killed\n")
    check_refusal("sweep", f"{speed}/output.txt: has no line such as .*; remove", sweep.median_of, speed)


def whole_sweep(folder):
    """A sweep of three tiny runs, of which one diverges, writes its table. A second sweep makes only that one again."""
    write_tokens(folder / "t_train.bin", np.arange(400) % 257)
    write_tokens(folder / "t_val.bin", np.arange(50) % 257)
    rows = [f"-e {TINY} -b 2 -t 8 -x 3 -l {rate} -q 1" for rate in ("1e-2", "1e30", "1e-3")]
    arguments = ["--device", "cpu", "--jobs", "2", "--train-data", str(folder / "t_train.bin"), "--folder",
                 str(folder / "runs"), "--results", str(folder / "sweep.md")]
    with mock.patch.dict(sweep.ROWS, cpu=rows):
        found = output_of(sweep.main, arguments)
        check("sweep.py: three to make", "3 runs, 3 of them to make, 2 at a time" in found, found)
        text = (folder / "sweep.md").read_text()
        lines = [line for line in text.splitlines() if line.startswith("| `")]
        order = [re.search(r"-l (\S+)", line)[1] for line in lines]
        finals = [float(line.split("|")[4]) for line in lines[:2]]
        check("sweep.py: sorted, what diverged at the end", len(order) == 3 and order[-1] == "1e30"
              and finals == sorted(finals), order)
        check("sweep.py: why it diverged", re.search(r"\| the loss of step [23] is nan", lines[-1]), lines[-1])
        kept = {path.name for path in folder.glob("runs/**/*") if path.is_file()}
        check("sweep.py: logs and outputs alone are kept", kept == {"main.log", "output.txt"}, kept)
        times = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/output.txt")}
        check("sweep.py: outputs of two runs and of a shape", len(times) == 3, times.keys())
        found = output_of(sweep.main, arguments)
        check("sweep.py: one to make again", "3 runs, 1 of them to make" in found, found)
        again = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/output.txt")}
        check("sweep.py: those that are done are left alone", again == times)
        check("sweep.py: the same table again", (folder / "sweep.md").read_text() == text)


# ---- Recipes

NODES = "gpt2_124M_slurm", "gpt2_124M_torchrun"
SIZES = {"gpt2_124M": "d12", "gpt2_350M": "d24", "gpt2_774M": "d36", "gpt2_1558M": "d48"}
EPOCH = 10_255_324_043  # tokens in the 103 files of FineWeb's 10B
REFERENCE = 3.2722  # the validation loss at which llm.c's 124M ended


def run_recipe(folder, path, *further, status=0, **environment):
    """Run a recipe where each program that it starts prints its own name and arguments, and ends with this status."""
    for program in (folder / "bin" / name for name in ("python", "srun", "torchrun", "scontrol")):
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {program.name} "$@"\nexit {status}\n')
        program.chmod(0o755)
    copy = folder / "dev" / "recipes" / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, copy)
    return subprocess.run([copy, *further], capture_output=True, text=True, cwd="/",
                          env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | environment)


def recipe_flags(folder, path, *further):
    """The arguments with which a recipe runs train_gpt2.py, or what it says on stderr where it does not."""
    done = run_recipe(folder, path, *further)
    return (done.stdout.splitlines()[1:], "") if done.returncode == 0 else ([], done.stderr)


def recipes(folder):
    """Each says what it lacks. Its flags are train_gpt2.py's. Its time and loss follow from the figures it names."""
    paths = [path for path in sorted((TOP / "dev/recipes").glob("*.sh")) if path.stem not in NODES]
    measured = (TOP / "dev/RESULTS.md").read_text(encoding="utf-8")
    check("four recipes", {path.stem for path in paths} == {*SIZES}, paths)
    law = {}
    for path in paths:
        name, text = path.stem, path.read_text(encoding="utf-8")
        flat = re.sub(r"\n#\s*", " ", text)
        size = "100B" if name == "gpt2_1558M" else "10B"
        data = folder / "data" / f"fineweb{size}"
        _, error = recipe_flags(folder, path)
        if not data.exists():
            wish = (f"error: data/fineweb{size} has no token files; "
                    f"python -m dev.data.fineweb --version {size} makes them\n")
            check(f"{name}: without its data", error == wish, repr(error))
            data.mkdir(parents=True)
            (data / "fineweb_train_000001.bin").touch()
            check(f"{name}: without the file to validate on", recipe_flags(folder, path)[1] == wish)
            (data / "fineweb_val_000000.bin").touch()
        questions = folder / "data/hellaswag/hellaswag_val.bin"
        questions.parent.mkdir(exist_ok=True)
        questions.unlink(missing_ok=True)
        _, error = recipe_flags(folder, path)
        wish = "error: data/hellaswag/hellaswag_val.bin is not here; python -m dev.data.hellaswag makes it\n"
        check(f"{name}: without HellaSwag", error == wish, repr(error))
        questions.touch()
        words, error = recipe_flags(folder, path, "-x", "7")
        check(f"{name}: runs train_gpt2.py, and the pattern goes on as it is", words[:3] == [
            "train_gpt2.py", "-i", f"data/fineweb{size}/fineweb_train_*.bin"], f"{words[:3]} {error}")
        flags = parse_flags("", FLAGS, words[1:])
        check(f"{name}: flags that are given win", flags.steps == 7)
        flags = parse_flags("", FLAGS, recipe_flags(folder, path)[0][1:])
        check(f"{name}: its folder", flags.output == f"log_{name}" and f"{flags.output}/ gets main.log" in text)
        check(f"{name}: -d is a multiple of B*T", flags.total_batch % (flags.batch_size * flags.seq_len) == 0)
        check(f"{name}: sequences of a validation, llm.c's", flags.val_batches * flags.batch_size == 160 * 64)
        check(f"{name}: its steps, as it says", f"{flags.steps:,} of {flags.total_batch:,} tokens" in flat)
        if size == "10B":
            yield f"{name}: steps of an epoch", flags.steps, EPOCH // flags.total_batch, EXACT
        c, tokens = Config.from_descriptor(flags.model), flags.steps * flags.total_batch
        [hours, rate] = re.search(r"time +([\d.]+) hours.*? at ([\d,]+) tokens/s", flat).groups()
        rate = int(rate.replace(",", ""))
        if name == "gpt2_774M":
            [whence] = re.findall(r"RESULTS.md, ([\d,]+) tokens/s", flat)
            check(f"{name}: the figure of RESULTS.md", f"| {whence} |" in measured, whence)
            medium = Config.from_descriptor("d24")
            ratio = flops_per_token(medium, 1024) / flops_per_token(c, 1024)
            yield f"{name}: at the same FLOP/s", rate, int(whence.replace(",", "")) * ratio, 1e-5
        else:
            label = re.search(r"RESULTS.md, (.*? B=\d+)", flat)[1]
            check(f"{name}: the figure of RESULTS.md", re.search(
                rf"^\| {label} \| [\d.]+ \| {rate:,} \|", measured, re.MULTILINE), f"{label}: {rate:,}")
        yield f"{name}: hours", float(hours), tokens / rate / 3600, 0.01
        check(f"{name}: the size of its name", flags.model == SIZES[name], flags.model)
        N = sum(row.size for row in c.parameter_table())
        law[name] = 406.4 / N**0.34 + 410.7 / tokens**0.28
    for path in paths:
        text, name = path.read_text(encoding="utf-8"), path.stem
        loss = float(re.search(r"validation loss of (?:about )?([\d.]+)", text)[1])
        below = float((re.search(r"it is ([\d.]+) below 124M's", text) or [0, 0])[1])
        yield f"{name}: by the law below 124M", below, law["gpt2_124M"] - law[name], 0.002
        check(f"{name}: the loss that follows", abs(REFERENCE - below - loss) < 0.006, loss)


def recipes_of_nodes(folder):
    """Those of two nodes start the ranks of the launcher with the flags of the one that they are named after."""
    slurm, torchrun = (TOP / "dev/recipes" / f"{name}.sh" for name in NODES)
    one = slurm.with_name("gpt2_124M.sh")
    for name in ("fineweb10B/fineweb_train_000001.bin", "fineweb10B/fineweb_val_000000.bin",
                 "hellaswag/hellaswag_val.bin"):
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).touch()
    alone = parse_flags("", FLAGS, recipe_flags(folder, one)[0][1:])
    job = dict(SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(folder), SLURM_CPUS_PER_TASK="8")
    node = dict(NODE_RANK="1", MASTER_ADDR="node0", TRAIN_GPT2_TOKEN="secret")
    for path, environment, launcher in (
            (slurm, job, ["srun", "--cpus-per-task=8", "--kill-on-bad-exit=0", "python"]),
            (torchrun, node, ["torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=node0",
                              "--master-port=29500"])):
        words = run_recipe(folder, path, "-x", "7", **environment).stdout.splitlines()
        check(f"{path.stem}: its launcher", words[: len(launcher) + 1] == [*launcher, "train_gpt2.py"], words[:8])
        flags = parse_flags("", FLAGS, words[len(launcher) + 1 :])
        changed = {name for name, value in vars(alone).items() if value != getattr(flags, name)}
        check(f"{path.stem}: what it changes", changed == {"batch_size", "val_batches", "zero", "steps"}, changed)
        tokens = 16 * flags.batch_size * flags.seq_len
        check(f"{path.stem}: 16 ranks have the tokens of a step", tokens == flags.total_batch, tokens)
        sequences = flags.val_batches * flags.batch_size  # of all ranks
        check(f"{path.stem}: sequences of a validation, llm.c's", sequences == 160 * 64, sequences)
        for name in environment.keys() & {*node, "SLURM_JOB_ID"}:
            done = run_recipe(folder, path, **environment | {name: ""})
            check(f"{path.stem}: without {name}", done.returncode == 1 and not done.stdout
                  and re.fullmatch(r"error: .*; expected .*\n", done.stderr), repr(done.stderr))

    for status, wish in ((143, ["scontrol", "requeue", "7"]), (1, [])):  # after SIGTERM, and after an error
        done = run_recipe(folder, slurm, status=status, **job)
        found = done.stdout.splitlines()
        found = found[found.index("scontrol") :] if "scontrol" in found else []
        check(f"{slurm.stem}: when ranks end with {status}", (done.returncode, found) == (status, wish), found)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", slurm.read_text(encoding="utf-8"), re.MULTILINE))
    wish = dict(nodes="2", signal="TERM@120", requeue="") | {"ntasks-per-node": "8", "gpus-per-node": "8"}
    check(f"{slurm.stem}: what it asks for", wish.items() <= options.items(), options)
    told = dict(SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="9", SLURM_LOCALID="1", PMI_RANK="9", PMI_SIZE="16")
    check("a rank of srun, whose PMI says no rank on the machine", launched(told) == ("srun", 9, 16, 1, 1),
          launched(told))


# ---- PyTorch's twin, where PyTorch is

LOSS_LIMIT, NORM_LIMIT = 5e-6, 1e-4  # relative, in the first 8 steps of a tiny model in fp32
COMMON = f"-e {TINY} -b 2 -t 16 -x 8 -v 4 -m 2 -l 1e-2 --device cpu"
TWINS = [  # further flags, each a branch of the loop
    "", "-d 96", "-d 64 --clip 0.5", "--clip 0", "--clip 100", "-u 3 -q 0.1", "-k linear -u 2 -q 0", "-k constant -u 3",
    "-k wsd -q 0.2", "-c 0.3", "--beta1 0.8 --beta2 0.95 --eps 1e-4", "--shuffle 1", "-m -1 -v 3", "-a 1 -d 64",
    "-b 3 -t 33",
    "-e d1 --seed 7 -l 1e-3 -x 3",
]


def step_losses(text):
    """(training losses and norms, validation losses) that a run printed, with more digits than its log has."""
    steps = re.findall(r"\| loss (\S+) \| norm +(\S+)", text)
    return np.float64(steps), np.float64(re.findall(r"val loss (\S+)", text))


def twins(folder):
    """Both trainers print the same losses and norms, with each flag that changes a step, and write the same log."""
    from dev.tools import torch_training

    for part in range(3):
        tokens = np.random.default_rng(part).integers(257, size=400 + 40 * part)
        write_tokens(folder / f"t_train_{part}.bin", tokens)
    write_tokens(folder / "t_val.bin", np.random.default_rng(9).integers(257, size=300))
    one, three = folder / "t_train_1.bin", folder / "t_train_*.bin"
    for flags, data in itertools.chain(((flags, one) for flags in TWINS), [("-d 64", three), ("--shuffle 0", three)]):
        arguments = f"{COMMON} -i {data} -j {folder / 't_val.bin'} {flags} -s 0 -o".split()
        name = f"{flags or 'defaults'}{' of three files' * (data == three)}"
        ours, val = step_losses(output_of(train_gpt2.main, [*arguments, str(folder / "ours")]))
        other, other_val = step_losses(output_of(torch_training.main, [*arguments, str(folder / "torch")]))
        yield f"{name}: losses", other[:, 0], ours[:, 0], LOSS_LIMIT
        yield f"{name}: norms", other[:, 1], ours[:, 1], NORM_LIMIT
        yield f"{name}: validation", other_val, val, LOSS_LIMIT
        steps = [{kind: values.keys() for kind, values in compare_training.read_log(folder / output).items()}
                 for output in ("ours", "torch")]
        check(f"{name}: steps of both logs", steps[0] == steps[1])
    arguments = f"{COMMON} -i {one} -j {folder / 't_val.bin'}".split()
    for wish, *more in (("--attention relu: PyTorch's twin does not", "--attention", "relu"),
                        ("-d 33: expected a multiple of .*B.T = 32", "-d", "33"),
                        ("-t 41: expected at most .* 40", "-t", "41"),
                        ("--dtype tf32: PyTorch has it on a GPU alone", "--dtype", "tf32"),
                        ("-sl 2.0: PyTorch's twin does not", "-sl", "2"),
                        ("-y 1: PyTorch's twin does not", "-y", "1"),
                        (f"-o {one}: .* could not be written", "-o", str(one)),
                        ("--nonsense 1; --help", "--nonsense", "1"),
                        ("step 2/8: the loss is nan", "-l", "1e30")):
        check_refusal("torch_training.py", wish, output_of, torch_training.main, [*arguments, *more])
    bf16 = step_losses(output_of(torch_training.main, [*arguments, "--dtype", "bf16"]))[0][:, 0]
    fp32 = step_losses(output_of(torch_training.main, arguments))[0][:, 0]
    check("bf16 is not fp32, and near it", 1e-5 < np.abs(bf16 - fp32).max() < 0.1, np.abs(bf16 - fp32).max())


class Ranks:
    """A rank that is a thread of this process. Its ranks share a list of what each gives."""
    here = 1

    def __init__(self, rank, count, given, barrier):
        self.rank, self.count, self.given, self.barrier = rank, count, given, barrier

    def exchange(self, value, about):
        self.barrier.wait(20)  # all have taken what was given before
        self.given[self.rank] = value
        self.barrier.wait(20)
        return [*self.given]

    def agree(self, stop, pauses):
        return False

    def in_turn(self, work):
        return work()


class OneToken(train_gpt2.GPT2):
    """A model whose loss on a batch is the mean of its tokens. seen: the first tokens of all sequences it was given."""
    step, seen = 0, []
    memory = classmethod(lambda cls, *sizes: (0, 0, 0))

    def __init__(self, config, device, B, T):
        self.config, self.device, self.B, self.T = config, device, B, T

    def set_parameters(self, tensors):
        pass

    def forward(self, tokens, targets):
        self.seen.extend(tokens[:, 0].tolist())
        return float(np.float32(tokens.mean() / 3))


def validations(folder):
    """A validation takes the same sequences, each once, and prints the same loss on any number of ranks: where they do
    not divide its batches, where some ranks have none, and where -b shrinks to fit the file."""
    T, longer, shorter = 8, 31, 6  # sequences of the files
    first = np.random.default_rng(3).permutation(200)[:longer]  # tokens of the sequences
    for name, count in (("val", longer), ("short_val", shorter), ("train", longer)):
        write_tokens(folder / f"{name}.bin", np.append(np.repeat(first[:count], T), 1))
    for name, batches, sequences in (("val", 5, 20), ("val", 2, 8), ("val", -1, 28), ("short_val", -1, 4)):
        arguments = (f"--device cpu --dtype fp32 -e {TINY} -b 4 -t {T} -x 0 -s 0 -i {folder / 'train.bin'} "
                     f"-j {folder / name}.bin -m {batches}").split()
        for count in (1, 2, 3, 4):
            given, barrier, OneToken.seen = [None] * count, threading.Barrier(count), []

            def work(rank, count=count, given=given, barrier=barrier, arguments=arguments):
                ranks = Ranks(rank, count, given, barrier) if count > 1 else None
                flags = parse_flags("", FLAGS, arguments, defaults=False)
                set_defaults(flags, FLAGS, Config)
                Training, _ = attach(flags, train_gpt2.Training, OneToken, ranks)
                Training(flags, OneToken).run()

            jobs = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
            with (mock.patch("dev.runs.signals.stop_signals", lambda: contextlib.nullcontext([])),
                  mock.patch("dev.ranks.ranks.RankedTraining.check_same", lambda *args: None)):
                text = output_of(lambda jobs=jobs: [*(job.start() for job in jobs), *(job.join() for job in jobs)])
            what, wish = f"{name}, -m {batches}, {count} ranks", first[:sequences].tolist()
            check(f"{what}: its sequences", sorted(OneToken.seen) == sorted(wish), OneToken.seen)
            losses = re.findall(r"^val loss (\S+)$", text, re.MULTILINE)
            check(f"{what}: its loss", losses == [f"{np.mean(wish) / 3:.6f}"] * count, losses)


def share_of_peak(folder):
    """NVIDIA's data sheets have these peaks; a step's line has the share, and the device's line the peak."""
    for name, capability, count, clock, peaks in (  # the clock that the data sheet is for, in MHz
            ("A100", 80, 108, 1410, dict(fp32=19.5, tf32=156, bf16=312)),
            ("RTX 3090", 86, 82, 1695, dict(fp32=35.6, tf32=35.6, bf16=71)),
            ("RTX 4090", 89, 128, 2520, dict(fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3)),
            ("H100 SXM", 90, 132, 1830, dict(tf32=494.7, bf16=989.4, fp8=1978.9)),
            ("another", 70, 80, 1380, dict(bf16=0))):
        for dtype, peak in peaks.items():
            device = SimpleNamespace(name="cuda", capability=capability, dtype=dtype, multiprocessors=count,
                                     gpu=SimpleNamespace(attributes={"ClockRate": 1000 * clock}))
            yield f"peak of {name} in {dtype}", peak_flops(device) / 1e12, peak, 5e-3
    check("a CPU has none", peak_flops(SimpleNamespace(name="cpu")) == 0)
    products = 12 * 12 * 768**2 + 768 * 50304  # 12 C^2 in each layer, and the head
    pairs = 2 * 2 * 12 * 768 * 1024 / 2  # q.k and weights @ v, with half of 1,024 tokens
    yield "FLOPs of a token of GPT-2", flops_per_token(Config(), 1024), 3 * (2 * products + pairs), EXACT

    write_tokens(folder / "tokens.bin", range(100))
    arguments = (f"--device cpu -e {TINY} -b 2 -t 8 -d 32 -x 3 -v 0 -s 0 -i {folder / 'tokens.bin'} "
                 f"-j {folder / 'tokens.bin'}").split()
    with mock.patch("dev.gpu.peak.peak_flops", lambda device: 25e7):
        text = output_of(train_gpt2.main, arguments)
    check("the device's line", re.search(r"^device .*, fp32, peak 0 TFLOP/s \(", text, re.M), text[:99])
    found = re.findall(r"([\d,]+) tok/s \| +([\d.]+)% of peak \| \d+ tokens$", text, re.M)
    speeds, shares = ([float(x.replace(",", "")) for x in column] for column in zip(*found))
    yield "steps with a share", len(shares), 3, EXACT
    for speed, share in zip(speeds, shares):
        yield "the share of peak, in %", share, 100 * speed * flops_per_token(Config.from_file(TINY), 8) / 25e7, 5e-2
    text = output_of(train_gpt2.main, arguments)
    check("without a peak", re.search(r" tok/s \| 96 tokens$", text, re.M) and "peak" not in text, text)


def steps_by_turns(folder):
    """A version's time is the median of its runs, beside the first's. A run's is that of its later steps. A commit's
    files are unpacked, and flags behind those of all win."""
    times, seen = {".": iter((10.0, 30.0, 11.0)), "HEAD": iter((22.0, 5.0, 40.0, 20.0, 21.0))}, []

    def time_run(top, flags):
        version = "." if top == turns.TOP else "HEAD"
        seen.append((version, (top / "kernels.cu").exists(), flags[:6], flags[10:]))
        return next(times[version]), f"loss of {version}"

    with mock.patch.object(turns, "time_run", time_run):
        table = output_of(turns.main, ["HEAD -b 8", ".", "--rounds", "3", "--", "-b", "4"]).splitlines()[-2:]
    check("two versions", table == ["| HEAD -b 8 | 22.000 | 1.0000 | 22.00, 5.00, 40.00 | loss of HEAD |",
                                    "| . | 11.000 | 0.5000 | 10.00, 30.00, 11.00 | loss of . |"], table)
    rounds = [("HEAD", True, "-x 40 -v 0 -s 0".split(), ["-b", "4", "-b", "8"]),
              (".", True, "-x 40 -v 0 -s 0".split(), ["-b", "4"])] * 3
    check("by turns", seen == rounds, seen)
    with mock.patch.object(turns, "time_run", time_run):
        table = output_of(turns.main, ["HEAD", "HEAD", "--rounds", "1"]).splitlines()[-2:]
    check("a version twice", [row.split(" | ")[1] for row in table] == ["20.000", "21.000"], table)
    flags = f"--device cpu -e {TINY} -b 1 -t 8 -x 3 -v 0 -s 0 -i {folder / 't.bin'} -j {folder / 't.bin'}".split()
    write_tokens(folder / "t.bin", np.arange(100, dtype=np.uint16) % 50)
    ms, loss = turns.time_run(turns.TOP, flags)
    printed = [line.split(" | ") for line in output_of(train_gpt2.main, flags).splitlines() if line.startswith("step ")]
    check("a run of the trainer", ms > 0 and printed[-1][1] == f"loss {loss}", f"{ms} {loss} {printed[-1]}")
    lines = "".join(f"step {i}/6 | loss {i}.5 | norm 1 | lr 1 | {ms:8.2f} ms | 9 tok/s\n"
                    for i, ms in enumerate((900, 800, 4, 2, 30, 5), 1))
    with mock.patch.object(subprocess, "run", lambda *args, **more: mock.Mock(stdout=lines, stderr="", returncode=0)):
        check("a run's time", turns.time_run(turns.TOP, []) == (4.5, "6.5"))
        lines = "tables"
        check_refusal("turns.py", "expected steps, and found status 0:\ntables", turns.time_run, turns.TOP, [])
    with mock.patch.dict(os.environ, PATH=str(folder)):
        check_refusal("turns.py", "HEAD: a commit needs git", turns.unpack, "HEAD", folder)
    for wish, *arguments in (("nothing: expected a commit, a folder with train_gpt2.py, or . for", "nothing"),
                             (".*: expected commits, folders or ., with flags", ". -o it's"),
                             (".*: expected commits, folders or .", ""),
                             ("train_gpt2.py .* found status 1:\nerror: .*--nonsense", ".", "--", "--nonsense", "1")):
        check_refusal("turns.py", wish, output_of, turns.main, arguments)


def test_training():
    """All of these, each in a folder of its own."""
    torch = importlib.util.find_spec("torch")
    for test in (logs, rows_of_sweep, sections, tables, whole_sweep, recipes, recipes_of_nodes,
                 validations, share_of_peak, steps_by_turns, *([twins] if torch else [])):
        with tempfile.TemporaryDirectory() as folder:
            run(f"training, {test.__name__.replace('_', ' ')}:", test, Path(folder))
    if not torch:
        print("PyTorch is not installed: dev/tools/torch_training.py is not tested")


if __name__ == "__main__":
    test_training()
    sys.exit(summary())
