"""Test dev/tools/recipes/: the flags that the recipes pass to train_gpt2.py, and the figures in
their comments.

Each program that a recipe starts is replaced by one that prints its name and arguments.
"""
import os
import re
import shutil
import subprocess

import train_gpt2
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.data import own_text
from dev.features.order import table_of_flags
from dev.features.peak import flops_per_token
from dev.features.ranks.environment import launched
from dev.tests.checks import EXACT, TOP, check, fast

FLAGS, _ = table_of_flags(train_gpt2.FLAGS, Config)  # of the trainer and its features
SIZES = {"124M": "d12", "350M": "d24", "774M": "d36", "1558M": "d48"}
# Rows of RESULTS.md.
MEASURED = {"124M": "124M bf16 B=64", "350M": "355M bf16 B=8", "1558M": "1558M bf16 B=8"}
EPOCH = 10_255_324_043  # tokens in the 103 files of FineWeb's 10B
REFERENCE = 3.2722  # the final validation loss of llm.c's 124M


def run_recipe(folder, name, *further, status=0, **environment):
    """Run a copy of a recipe. The programs that it starts end with this status."""
    for program in (folder / "bin" / name for name in ("python", "srun", "torchrun", "scontrol")):
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {program.name} "$@"\nexit {status}\n')
        program.chmod(0o755)
    copies = folder / "dev/tools/recipes"
    shutil.copytree(TOP / "dev/tools/recipes", copies, dirs_exist_ok=True)
    return subprocess.run([copies / name, *further], capture_output=True, text=True, cwd="/",
                          env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} |
                          environment)


def make_data(folder, version):
    for name in (f"fineweb{version}/fineweb_train_000001.bin",
                 f"fineweb{version}/fineweb_val_000000.bin",
                 "hellaswag/hellaswag_val.bin"):
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).touch()


def rate_of(label):
    """Tokens/s in the row of dev/RESULTS.md with this label."""
    text = (TOP / "dev/RESULTS.md").read_text(encoding="utf-8")
    return float(
        re.search(rf"^\| {label} \| [\d.]+ \| ([\d,]+) \|", text, re.MULTILINE)[1].replace(",", ""))


@fast
def test_sizes(folder):
    """The flags of each size. Its hours and loss follow from the sources that the comment names."""
    text = (TOP / "dev/tools/recipes/gpt2.sh").read_text(encoding="utf-8")
    table = {size: row.split()
             for size, row in re.findall(r"^# {5}(\d+M) +(\d.*)$", text, re.MULTILINE)}
    check("a row for each size", [*table] == [*SIZES], table)
    models, law = {size: Config.from_descriptor(d) for size, d in SIZES.items()}, {}
    for size, model in SIZES.items():
        version = "100B" if size == "1558M" else "10B"
        for missing in (f"fineweb{version}/fineweb_train_000001.bin",
                        f"fineweb{version}/fineweb_val_000000.bin",
                        "hellaswag/hellaswag_val.bin"):
            make_data(folder, version)
            (folder / "data" / missing).unlink()
            done = run_recipe(folder, "gpt2.sh", size)
            wish = (f"error: data/{missing.split('/fineweb_')[0]}.*; python -m "
                    f"dev.data.{missing[:7]}")
            check(f"{size}: without {missing}", done.returncode == 1 and not done.stdout
                  and re.match(wish, done.stderr), done.stderr)
        make_data(folder, version)
        words = run_recipe(folder, "gpt2.sh", size).stdout.splitlines()
        check(f"{size}: the pattern is not expanded by the shell", words[:4] == [
            "python", "train_gpt2.py", "-i", f"data/fineweb{version}/fineweb_train_*.bin"],
              words[:4])
        flags = parse_flags("", FLAGS, words[2:])
        check(f"{size}: model and folder",
              (flags.model, flags.output) == (model, f"log_gpt2_{size}"), flags)
        check(f"{size}: -d is a multiple of B*T",
              flags.total_batch % (flags.batch_size * flags.seq_len) == 0)
        check(f"{size}: llm.c's sequences of a validation",
              flags.val_batches * flags.batch_size == 160 * 64)
        if version == "10B":
            yield f"{size}: steps of an epoch", flags.steps, EPOCH // flags.total_batch, EXACT
        words = run_recipe(folder, "gpt2.sh", size, "-x", "7").stdout.splitlines()
        check(f"{size}: flags that are given win", parse_flags("", FLAGS, words[2:]).steps == 7)

        tokens, hours, loss, *_ = map(float, (word.rstrip("B") for word in table[size]))
        trained = flags.steps * flags.total_batch
        yield f"{size}: tokens", tokens, trained / 1e9, 5e-3
        rate = rate_of(MEASURED.get(size, MEASURED["350M"]))
        if size not in MEASURED:  # at the same FLOP/s
            rate *= flops_per_token(models["350M"], 1024) / flops_per_token(models[size], 1024)
        yield f"{size}: hours, as far as GPUs are alike", hours, trained / rate / 3600, 0.1
        N = sum(row.size for row in models[size].parameter_table())
        law[size] = 406.4 / N**0.34 + 410.7 / trained**0.28
        yield f"{size}: loss", loss, REFERENCE - law["124M"] + law[size], 3e-3
    below = re.search(r"puts the others ([\d.]+), ([\d.]+) and\n#\s+([\d.]+) below", text).groups()
    for size, figure in zip([*SIZES][1:], below):
        yield f"{size}: below 124M", float(figure), law["124M"] - law[size], 2e-3
    for wrong in ([], ["125M"]):
        done = run_recipe(folder, "gpt2.sh", *wrong)
        check(f"{wrong} is refused", done.returncode == 1 and "expected 124M" in done.stderr,
              done.stderr)


@fast
def test_muon(folder):
    """What the recipe with Muon changes in that of 124M, for one GPU and for eight; its minutes
    follow from the sources that its comment names; flags that are given win."""
    text = (TOP / "dev/tools/recipes/gpt2_muon.sh").read_text(encoding="utf-8")
    done = run_recipe(folder, "gpt2_muon.sh")
    check("without data", done.returncode == 1 and "python -m dev.data.fineweb" in done.stderr,
          done.stderr)
    make_data(folder, "10B")
    alone, own, more = (
        parse_flags("", FLAGS, run_recipe(folder, name, *given).stdout.splitlines()[2:])
        for name, given in (("gpt2.sh", ["124M"]), ("gpt2_muon.sh", []),
                            ("gpt2_muon.sh", ["--gpus", "8", "-x", "7", "-y", "0"])))
    changed = {flag for flag, value in vars(alone).items() if value != getattr(own, flag)}
    check("what it changes", changed == {
        "output", "optimizer", "muon_lr", "learning_rate", "schedule", "warmup", "steps",
        "checkpoint_every"}, changed)
    check("flags that are given win", (more.steps, more.gpus, more.resume) == (7, 8, 0), more)
    check("eight ranks", own.total_batch % (8 * own.batch_size * own.seq_len) == 0)
    check("a sixth of the steps", round(alone.steps / own.steps) == 6)
    minutes = [int(found) for found in re.findall(r"# (\d+) minutes", text)]
    tokens = own.steps * own.total_batch
    yield "one GPU", minutes[0], 1.01 * tokens / rate_of("124M bf16 B=64") / 60, 0.02
    ms = sum(map(int, re.findall(r"(\d+) ms", text)))
    yield "eight GPUs", minutes[1], own.steps * ms / 60e3, 0.02
    results = (TOP / "dev/RESULTS.md").read_text(encoding="utf-8")
    of_gpus = re.findall(r"^\| 124M bf16 B=64 \| ([\d.]+) \| - \|", results, re.MULTILINE)
    check("an H100's", [round(float(x)) for x in of_gpus[:1]] == [107], of_gpus)


@fast
def test_nodes(folder):
    """The recipes for two nodes start a launcher's ranks with the flags of 124M."""
    slurm, torchrun = "gpt2_124M_slurm.sh", "gpt2_124M_torchrun.sh"
    make_data(folder, "10B")
    alone = parse_flags("", FLAGS, run_recipe(folder, "gpt2.sh", "124M").stdout.splitlines()[2:])
    job = dict(SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(folder), SLURM_CPUS_PER_TASK="8")
    node = dict(NODE_RANK="1", MASTER_ADDR="node0", TRAIN_GPT2_TOKEN="secret")
    for name, environment, launcher in (
            (slurm, job, "srun --cpus-per-task=8 --kill-on-bad-exit=0 python"),
            (torchrun, node, "torchrun --nnodes=2 --nproc-per-node=8 --node-rank=1 "
             "--master-addr=node0 --master-port=29500")):
        launcher = [*launcher.split(), "train_gpt2.py"]
        words = run_recipe(folder, name, "-x", "7", **environment).stdout.splitlines()
        check(f"{name}: its launcher", words[: len(launcher)] == launcher, words[:8])
        flags = parse_flags("", FLAGS, words[len(launcher) :])
        changed = {flag for flag, value in vars(alone).items() if value != getattr(flags, flag)}
        check(f"{name}: what it changes", changed == {"batch_size", "val_batches", "zero", "steps"},
              changed)
        tokens = 16 * flags.batch_size * flags.seq_len
        check(f"{name}: 16 ranks have the tokens of a step", tokens == flags.total_batch, tokens)
        sequences = flags.val_batches * flags.batch_size  # of all ranks
        check(f"{name}: llm.c's sequences of a validation", sequences == 160 * 64, sequences)
        for key in environment.keys() & {*node, "SLURM_JOB_ID"}:
            done = run_recipe(folder, name, **environment | {key: ""})
            check(f"{name}: without {key}", done.returncode == 1 and not done.stdout
                  and re.fullmatch(r"error: .*; expected .*\n", done.stderr), done.stderr)

    # After SIGTERM, and after an error.
    for status, wish in ((143, ["scontrol", "requeue", "7"]), (1, [])):
        done = run_recipe(folder, slurm, status=status, **job)
        found = done.stdout.splitlines()
        found = found[found.index("scontrol") :] if "scontrol" in found else []
        check(f"{slurm}: when ranks end with {status}", (done.returncode, found) == (status, wish),
              found)
    text = (TOP / "dev/tools/recipes" / slurm).read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    wish = dict(nodes="2", signal="TERM@120", requeue="") | {"ntasks-per-node": "8",
                                                             "gpus-per-node": "8"}
    check(f"{slurm}: what it asks for", wish.items() <= options.items(), options)
    told = dict(SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="9", SLURM_LOCALID="1", PMI_RANK="9",
                PMI_SIZE="16")
    check("a rank of srun, whose PMI says no rank on the machine",
          launched(told) == ("srun", 9, 16, 1, 1), launched(told))


# In place of python: each call is a line of the file calls. It answers, and leaves losses.
FINE_TUNER = """#!/bin/sh
printf '%s\\t' "$@" >>calls
echo >>calls
case "$*" in
    -\\ *) echo "Who?" ;;
    *--answer*) echo "of $2 $3 $4" ;;
    *-o\\ *) mkdir log
        printf 's:0 tel:4.5\\ns:0 trl:4\\ns:9 tel:4.1\\ns:18 tel:3.5\\n' >log/main.log
        mv log "$(expr "$*" : '.*-o \\([^ ]*\\)')" ;;
esac
"""


@fast
def test_fine_tuning(folder):
    """What the recipe starts, that the flags are the programs' own, and what it prints before and
    after; what is missing is said."""
    (folder / "chats.jsonl").touch()
    shutil.copytree(TOP / "dev/tools/recipes", folder / "dev/tools/recipes")

    def start(*arguments, **environment):
        words = folder / "bin" / "python"
        words.parent.mkdir(exist_ok=True)
        words.write_text(FINE_TUNER)
        words.chmod(0o755)
        (folder / "calls").unlink(missing_ok=True)
        for log in folder.glob("log_chats_*"):
            shutil.rmtree(log)
        done = subprocess.run([folder / "dev/tools/recipes/fine_tune.sh", *arguments], cwd=folder,
                              capture_output=True, text=True, env=os.environ | {
                                  "PATH": f"{words.parent}:{os.environ['PATH']}"} | environment)
        calls = folder / "calls"
        return done, [line.split("\t")[:-1] for line in calls.read_text().splitlines()
                      ] if calls.exists() else []

    (folder / "log_own").mkdir()
    (folder / "log_own/tokenizer.bin").touch()
    (folder / "log_words").mkdir()
    (folder / "log_used_gpt2").mkdir()
    (folder / "used.jsonl").touch()
    gpt2, llama = ["train_gpt2.py"], ["-m", "dev.llama3.train_llama3"]
    for model, files, checkpoint, trainer, prepare, vocab, end in (
            ("gpt2", ["gpt2_124M.bin"], "gpt2_124M.bin", gpt2, "prepro_tinyshakespeare.py", "gpt2",
             ""),
            ("llama", ["llama3.2_1B.bin", "tokenizer.json"], "llama3.2_1B.bin", llama,
             "dev.llama3.tokens", "gpt2", "_llama"),
            ("llama:log_words", ["tokenizer.json"], "log_words", llama, "dev.llama3.tokens", "gpt2",
             "_llama"),
            ("gpt2:log_own", [], "log_own", gpt2, "prepro_tinyshakespeare.py",
             "log_own/tokenizer.bin", ""),
            ("llama:log_own", [], "log_own", llama, "prepro_tinyshakespeare.py",
             "log_own/tokenizer.bin", "_llama")):
        for missing in files:
            (folder / missing).unlink(missing_ok=True)
            done, calls = start(model, "chats.jsonl")
            check(f"{model}: without {missing}", done.returncode == 1 and not calls and
                  done.stderr.startswith(f"error: {missing} is missing;") and
                  done.stderr.count("\n") == 1, done.stderr)
            (folder / missing).touch()
        given = ["-l", "1", "--device", "cpu"]
        done, calls = start(model, "chats.jsonl", *given, ROW="512")
        check(f"{model}: it ends well", done.returncode == 0 and not done.stderr, done.stderr)
        first, question, before, training, after = calls
        check(f"{model}: the programs", prepare in first[:2] and question == ["-", "chats.jsonl"]
              and all(words[: len(trainer)] == trainer for words in (before, training, after)),
              calls)
        prepared = parse_flags("", own_text.FLAGS, first[first.index(prepare) + 1 :])
        check(f"{model}: its tokens",
              (prepared.input, prepared.chat, prepared.name, prepared.row, prepared.vocab) ==
              (["chats.jsonl"], 1, f"chats{end}", 512, vocab), prepared)
        flags = parse_flags("", FLAGS, training[len(trainer) :])
        check(f"{model}: they are read", flags.train_data == f"data/chats{end}/chats{end}_train.bin"
              and flags.seq_len == prepared.row, flags)
        check(f"{model}: the checkpoint, and flags that are given",
              (flags.model, flags.learning_rate, flags.device) == (checkpoint, 1, "cpu"), flags)
        check(f"{model}: -d is a multiple of B*T",
              flags.total_batch % (flags.batch_size * flags.seq_len) == 0)
        for words, asked in ((before, checkpoint), (after, flags.output)):
            asks = parse_flags("", FLAGS, words[len(trainer) :])
            check(f"{model}: {asked} answers", (asks.model, asks.sample, asks.answer, asks.device)
                  == (asked, "Who?", 1, "cpu"), asks)
        said = " ".join(done.stdout.split())
        check(f"{model}: before and after", re.search(
            f"before of .*{checkpoint}.* after of .*{flags.output}.* "
            r"loss .* after step 0: 4\.5 loss .* after step 18: 3\.5$", said), said)
    for arguments, wish in ((["gpt3"], "found gpt3 in place of a model; expected gpt2 or llama"),
                            (["gpt2", "none.jsonl"], "none.jsonl: no such file"),
                            (["llama:none", "chats.jsonl"], "none is missing; expected a checkp"),
                            (["gpt2", "used.jsonl"], "log_used_gpt2 holds an earlier run")):
        done, calls = start(*arguments)
        check(wish, done.returncode == 1 and not calls and wish in done.stderr, done.stderr)
