"""Whatever the program can do beyond training on one device: the table of features.

A feature is a module under dev/ with subclasses of the model (train_gpt2.GPT2) or of the training
(train_gpt2.Training), which override methods and call super(). The table says which flags bring
which of them. They are stacked in the order of the table, the first outermost, on the classes that
the plain program would use; the result is a class of this run alone. What two features need of each
other is a small class of its own: it is in PAIRS, and goes in front of both.

train_gpt2.main calls run_with. Without this file it trains all the same.
"""
import importlib
from collections.abc import Callable
from typing import NamedTuple

from dev.ranks.launchers import launched
from prepro_tinyshakespeare import UserError

FLAGS = [  # rows as train_gpt2.FLAGS has them; one of the same name takes the place of that
    ("-o", "--output", "name", None, "new folder for main.log and checkpoints; one comes at the "
     "end (default: none)"),
    ("-n", "--checkpoint-every", "count or 0", 0, "steps between checkpoints that -y 1 can go on "
     "from; 0 for none"),
    ("-nk", "--checkpoints-kept", "count or 0", 0, "keep the N newest of them; 0: all"),
    ("-nm", "--checkpoints-major", "count or 0", 0, "also keep every M-th step's; 0: none"),
    ("-y", "--resume", "switch", 0, "1: go on with the run in -o, from its newest whole checkpoint "
     "or its start"),
    ("-m", "--val-batches", "count or -1", None, "batches of a validation, at most, each B*T, of "
     "all ranks together; -1: all (default: 20)"),
    ("-b", "--batch-size", "count", None, "B, sequences in a micro-batch of a rank "
     "(default: 4)"),
    ("-d", "--total-batch", "count", None, "tokens in a step of all ranks, a multiple of B*T times "
     "their number: gradients are accumulated over micro-batches (default: one of each rank)"),
    (None, "--gpus", "count", None, "train on N of this machine's GPUs; 1: alone (default: alone, "
     "or as one of the ranks that torchrun, srun or mpirun has started)"),
    ("-z", "--zero", "switch", 0, "1: each of several ranks has a share of AdamW's moments and "
     "fp32 parameters (ZeRO)"),
    (None, "--log-ranks", "switch", 0, "1: each rank but the first adds what it prints to "
     "-o/rank_*.txt"),
    (None, "--dtype", ("fp32", "tf32", "bf16", "fp8"), None, "tf32: fp32, products in TF32; fp8: "
     "bf16, the layers' products in FP8 (default: bf16; on a CPU fp32)"),
    (None, "--moments", ("fp32", "bf16"), "fp32", "AdamW's; bf16 takes half the memory, with "
     "stochastic rounding"),
    (None, "--recompute", "level", 0, "1: compute norms and what is inside of the MLP again: less "
     "memory, slower; 2: all of a layer but attention: least memory, slowest"),
    (None, "--label-smoothing", "share", 0.0, "E: train on targets of 1-E for the right word and "
     "E/V for each of the V words; validations are without"),
    ("-sl", "--loss-limit", "rate", 0.0, "skip an update if the z-score of its loss in the last "
     "128 is above this; 0: none"),
    ("-sg", "--norm-limit", "rate", 0.0, "the same for its norm"),
    (None, "--ema", "share", None, "D: keep an average of the weights, ema = D*ema + (1-D)*weights "
     "after each update, and write it to -o as ema_*.bin (default: none)"),
    (None, "--nvtx", "switch", 0, "1: on a GPU, NVTX ranges by layer and kernel, for a profiler; "
     "it implies --graph 0"),
    (None, "--hellaswag", "name", None, "file of dev/data/hellaswag.py to score at each validation "
     "but the first"),
    (None, "--sample", str, None, "go on with this text, for -g tokens, and do not train"),
    (None, "--temperature", "rate", 1.0, "of --sample: below 1 likely tokens are likelier still; "
     "0: only the likeliest"),
    (None, "--top-k", "count or 0", 0, "of --sample: choose among the K likeliest tokens; 0: all"),
    (None, "--dry-run", "switch", 0, "1: print sizes and an estimate of the time, and do not "
     "train"),
    (None, "--replay", "name", None, "find what was not finite in a step, from the file that a run "
     "wrote of it"),
]
GROUPS = {"--checkpoint-every": "runs that can go on", "--gpus": "several GPUs",
          "--moments": "less memory", "--label-smoothing": "another loss",
          "--loss-limit": "more on the update", "--nvtx": "more to see",
          "--sample": "instead of training"}  # as train_gpt2.GROUPS

NEEDS = {  # flags that mean nothing without another one
    "checkpoint_every": "output", "resume": "output", "checkpoints_kept": "checkpoint_every",
    "checkpoints_major": "checkpoints_kept", "temperature": "sample", "top_k": "sample",
    "log_ranks": "output", "ema": "output"}


class Feature(NamedTuple):
    name: str
    asked: Callable  # of the flags and the ranks (None: one process), whether they bring it
    model: str = ""  # the subclass, as module:class
    training: str = ""


def trains(flags):
    return flags.sample is None and not flags.dry_run


# What wraps stands above what it wraps: make_model of the first row ends last.
FEATURES = [
    Feature("terminal", lambda flags, ranks: True, training="dev.terminal:Terminal"),
    Feature("files", lambda flags, ranks: True, training="dev.files:Named"),
    Feature("peak", lambda flags, ranks: True, training="dev.runs.peak:Peak"),
    Feature("nvtx", lambda flags, ranks: flags.nvtx, training="dev.runs.nvtx:Annotated"),
    Feature("dry run", lambda flags, ranks: flags.dry_run, training="dev.runs.dry_run:DryRun"),
    Feature("sample", lambda flags, ranks: flags.sample is not None,
            training="dev.runs.sample:Sampling"),
    Feature("hellaswag", lambda flags, ranks: flags.hellaswag,
            training="dev.runs.hellaswag:Scored"),
    Feature("fp8", lambda flags, ranks: flags.dtype == "fp8", "dev.precision.fp8:Fp8Model",
            "dev.precision.fp8:Fp8Training"),
    Feature("zero", lambda flags, ranks: ranks and flags.zero, "dev.ranks.zero:Sharded"),
    Feature("ranks", lambda flags, ranks: ranks, "dev.ranks.ranks:Ranked",
            "dev.ranks.ranks:RankedTraining"),
    Feature("runs", lambda flags, ranks: flags.output and trains(flags),
            training="dev.runs.folder:Kept"),
    Feature("checkpoint", lambda flags, ranks: flags.output and flags.sample is not None
            and not flags.dry_run, training="dev.runs.folder:Resumed"),
    Feature("signals", lambda flags, ranks: True, training="dev.runs.signals:Stoppable"),
    Feature("tokenizer", lambda flags, ranks: True, training="dev.runs.tokenizer:Tokenized"),
    Feature("outliers", lambda flags, ranks: flags.loss_limit or flags.norm_limit,
            "dev.update.outliers:Outliers", "dev.update.outliers:OutliersTraining"),
    Feature("explain", lambda flags, ranks: True, training="dev.runs.replay:Explained"),
    Feature("moments", lambda flags, ranks: flags.moments == "bf16",
            "dev.precision.moments:Bf16Moments", "dev.precision.moments:Bf16MomentsTraining"),
    Feature("average", lambda flags, ranks: flags.ema is not None,
            "dev.update.average:Averaged", "dev.update.average:AveragedTraining"),
    Feature("recompute 1", lambda flags, ranks: flags.recompute == 1,
            "dev.precision.recompute:RecomputeInside"),
    Feature("recompute 2", lambda flags, ranks: flags.recompute == 2,
            "dev.precision.recompute:RecomputeLayers"),
    Feature("label smoothing", lambda flags, ranks: flags.label_smoothing,
            "dev.losses.label_smoothing:Smoothed", "dev.losses.label_smoothing:SmoothedTraining"),
    Feature("hint", lambda flags, ranks: flags.recompute != 2,
            "dev.precision.recompute:RecomputeHint"),
]
# {names of features: (the model's subclass, the training's)}. A model's class counts as a feature.
PAIRS = {
    ("recompute 1", "Llama3"): ("dev.precision.recompute:LlamaInside", ""),
    ("recompute 2", "Llama3"): ("dev.precision.recompute:LlamaLayers", ""),
    ("fp8", "ranks"): ("dev.precision.fp8:Fp8Ranked", ""),
    ("fp8", "explain"): ("", "dev.precision.fp8:Fp8Explained"),
    ("hellaswag", "runs"): ("", "dev.runs.hellaswag:ScoredAndKept"),
    ("hellaswag", "ranks"): ("", "dev.runs.hellaswag:ScoredByRanks"),
    ("moments", "zero"): ("dev.precision.moments:ShardedMoments", ""),
    ("explain", "runs"): ("", "dev.runs.replay:ExplainedAndKept"),
    ("explain", "ranks"): ("", "dev.ranks.ranks:RanksExplained"),
    ("average", "runs"): ("", "dev.update.average:AveragedAndKept"),
}
EXCLUDES = {  # {names of features that do not go together: why, and what to do}
    ("average", "zero"): "--ema --zero 1: the average is of whole parameters, and ZeRO keeps a "
                         "share of them: expected --zero 0",
}


def load(path):
    """The object of a path such as dev.ranks.ranks:Ranked."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def stack(base, layers, own):
    """A subclass of base, with these (paths of classes, the first outermost) in front of it, and
    own, {attribute: value}."""
    bases = *(load(path) for path in layers if path), base
    return type(base.__name__, bases, own)


def attach(flags, Training, Model, ranks=None, folder=None):
    """(training, model): the classes of a run with the features that its flags bring. Sets the
    defaults of features' flags."""
    for _, name, _, default, _ in FLAGS:
        key = name.removeprefix("--").replace("-", "_")
        if getattr(flags, key) is None:
            setattr(flags, key, default)
    asked = {feature.name: feature for feature in FEATURES if feature.asked(flags, ranks)}
    names = asked.keys() | {kind.__name__ for kind in Model.__mro__}
    for pair, why in EXCLUDES.items():
        if names >= {*pair}:
            raise UserError(why)
    pairs = [PAIRS[pair] for pair in PAIRS if names >= {*pair}]
    layers = [*pairs, *((feature.model, feature.training) for feature in asked.values())]
    models, trainings = zip(*layers)
    return (stack(Training, trainings, dict(ranks=ranks, folder=folder)),
            stack(Model, models, dict(ranks=ranks, flags=flags)))


def check_needs(flags):
    """Raise UserError if one of the flags was given without the one that it needs."""
    def called(name):
        return f"--{name.replace('_', '-')}"

    for name, needed in NEEDS.items():
        known = flags.resume and needed.startswith("checkpoint")  # by the run that goes on
        if getattr(flags, name) and getattr(flags, needed) in (None, 0) and not known:
            raise UserError(f"{called(name)}: expected {called(needed)} too; --help says what they "
                            "do")
    if flags.hellaswag and flags.val_every == 0:
        raise UserError("--hellaswag: is scored at each validation, and -v 0 makes none: expected "
                        "another -v")


def run_with(flags, Training, Model, table):
    """What train_gpt2.main does with its flags, of this table. Returns the exit status."""
    check_needs(flags)
    if flags.replay:
        return load("dev.runs.replay:replay")(flags, lambda: attach(flags, Training, Model))
    if launched() if flags.gpus is None else flags.gpus > 1:
        start = load("dev.ranks.launch:start")
        return start(flags, lambda ranks: train(flags, Training, Model, table, ranks))
    return train(flags, Training, Model, table)


def train(flags, Training, Model, table, ranks=None):
    """Train, as one of several ranks or alone."""
    folder = None
    if flags.output and not flags.dry_run:  # to go on, it sets what is not given as it was
        folder = load("dev.runs.folder:RunFolder")(flags, ranks, Model.Config, table)
    training, model = attach(flags, Training, Model, ranks, folder)
    return training(flags, model).run()
