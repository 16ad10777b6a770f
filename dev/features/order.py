"""The table of features: what the program can do beyond training on one GPU.

A feature is a module under dev/ with subclasses of the model (train_gpt2.GPT2) or of the training
(train_gpt2.Training), which override methods and call super(). The table says which flags need
which features. Their classes are stacked in the table's order, the first outermost, on top of the
plain program's, and make a class for this run only. If two features have to know each other, PAIRS
has a small class that goes in front of both.

train_gpt2.main calls main here. Without this file it still trains on a GPU.
"""
import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import train_gpt2
from dev.common.flags import parse_flags
from dev.features.ranks.environment import launched
from dev.features.seams import GPT2, Training
from prepro_tinyshakespeare import UserError

FLAGS = [  # rows as in train_gpt2.FLAGS, which replace its rows of the same name
    ("-i", "--train-data", "name", None, "token file to train on, or a quoted pattern for "
     "several (default: tinyshakespeare, prepared if missing)"),
    ("-j", "--val-data", "name", None, "token file to validate on, or a pattern (default: -i's, "
     "with val for train)"),
    ("-e", "--model", "name", None, "checkpoint; or, from scratch, {descriptors} (default: {file} "
     "if it is here, else {large} on a GPU and {small} on a CPU)"),
    ("-o", "--output", "name", None, "new folder for main.log and checkpoints; the last step "
     "is always saved (default: none)"),
    ("-n", "--checkpoint-every", "count or 0", 0, "steps between checkpoints that -y 1 can resume; "
     "0: none"),
    ("-nk", "--checkpoints-kept", "count or 0", 0, "keep the N newest checkpoints; 0: all"),
    ("-nm", "--checkpoints-major", "count or 0", 0, "also keep those of every M-th step; 0: none"),
    ("-y", "--resume", "switch", 0, "1: resume the run in -o, from its newest complete checkpoint "
     "or its start"),
    ("-b", "--batch-size", "count", 4, "B, sequences in a rank's micro-batch"),
    ("-d", "--total-batch", "count", None, "tokens in a step, a multiple of B*T times the number "
     "of ranks: gradients are accumulated over micro-batches (default: one micro-batch per rank)"),
    ("-t", "--seq-len", "count", None, "T, tokens in a sequence (default: 1024 on a GPU, 64 on a "
     "CPU)"),
    ("-k", "--schedule", ("cosine", "linear", "constant", "wsd"), "cosine", "how the learning rate "
     "falls; wsd: at the end"),
    ("-u", "--warmup", "count or 0", 0, "steps in which the rate rises; a constant rate does not"),
    ("-m", "--val-batches", "count or -1", 20, "at most this many batches of B*T in a "
     "validation, over all ranks; -1: all"),
    ("-a", "--overfit", "switch", 0, "1: train on the first batch of -j over and over"),
    (None, "--attention", ("softmax", "relu"), "softmax", "relu: max(0, q.k / sqrt(HS))"),
    (None, "--shuffle", "switch", None, "1: batches in llm.c's random order (default: 1 for "
     "several files)"),
    (None, "--seed", "count or 0", 42, "of the initial parameters, of --moments bf16's "
     "rounding, and of --sample (whose default is a random one)"),
    (None, "--device", ("cpu", "cuda"), None, "where to compute (default: cuda if there is a GPU)"),
    (None, "--dtype", ("fp32", "tf32", "bf16", "fp8"), None, "tf32: fp32, products in TF32; fp8: "
     "bf16, the layers' products in FP8 (default: bf16; on a CPU, and a GPU before 8.0, fp32)"),
    (None, "--fp8", ("layers", "head", "all"), None, "for --dtype fp8: layers: products of the "
     "layers, but no gradients of weights; head: the head's backward products too; all: those "
     "gradients too (default: all; Llama 3 and --recompute: head; --label-smoothing: layers)"),
    (None, "--graph", "switch", 1, "0: on a GPU, launch kernels one by one instead of as a graph"),
    (None, "--gpus", "count", None, "train on N of this machine's GPUs (default: 1, or the ranks "
     "that torchrun, srun or mpirun has started)"),
    ("-z", "--zero", "switch", 0, "1: each rank has only a share of AdamW's moments and fp32 "
     "parameters (ZeRO)"),
    (None, "--sums", ("fp32", "bf16"), "fp32", "bf16: ranks send gradients in bf16, half of the "
     "bytes"),
    (None, "--log-ranks", "switch", 0, "1: each rank except the first appends its output to "
     "-o/rank_*.txt"),
    (None, "--moments", ("fp32", "bf16"), "fp32", "bf16 halves the memory of AdamW's moments, with "
     "stochastic rounding"),
    (None, "--recompute", "level", 0, "1: compute norms and the inside of the MLP again in the "
     "backward pass: less memory, slower; 2: all of a layer except attention: least memory, "
     "slowest"),
    (None, "--label-smoothing", "share", 0.0, "E: train on targets of 1-E for the right word plus "
     "E/V for each of the V words; validations do not"),
    ("-sl", "--loss-limit", "rate", 0.0, "skip a step's update if its loss has a z-score above "
     "this among the last 128; 0: never"),
    ("-sg", "--norm-limit", "rate", 0.0, "the same for the gradient's norm"),
    (None, "--ema", "share", None, "D: keep a moving average of the weights, ema = D*ema + "
     "(1-D)*weights after each update, and write it to -o as ema_*.bin (default: none)"),
    (None, "--nvtx", "switch", 0, "1: on a GPU, NVTX ranges by layer and kernel, for a profiler; "
     "implies --graph 0"),
    (None, "--hellaswag", "name", None, "file of dev/data/hellaswag.py: score the model at each "
     "validation except the first"),
    (None, "--sample", str, None, "continue this text by -g tokens, and do not train"),
    (None, "--temperature", "rate", 1.0, "for --sample: below 1 makes likely tokens likelier; 0: "
     "always the likeliest"),
    (None, "--top-k", "count or 0", 0, "for --sample: draw from the K likeliest tokens; 0: all"),
    (None, "--dry-run", "switch", 0, "1: print sizes and an estimate of the time, and do not "
     "train"),
    (None, "--replay", "name", None, "replay a step that gave a NaN or infinity, from a run's "
     "replay_*.npz"),
]
GROUPS = {  # {headline in --help: flags}
    "data and model": ("train-data", "val-data", "model", "output", "shuffle"),
    "checkpoints and resuming": ("checkpoint-every", "checkpoints-kept", "checkpoints-major",
                                 "resume"),
    "the size of a step": ("batch-size", "total-batch", "seq-len"),
    "the update": ("learning-rate", "schedule", "warmup", "final-fraction", "weight-decay", "beta1",
                   "beta2", "eps", "clip", "loss-limit", "norm-limit", "ema"),
    "how long, and what is shown": ("steps", "val-every", "val-batches", "sample-every",
                                    "sample-tokens", "hellaswag", "nvtx"),
    "experiments, and the seed": ("overfit", "attention", "label-smoothing", "seed"),
    "the machine": ("device", "dtype", "fp8", "plain", "graph"),
    "several GPUs": ("gpus", "zero", "sums", "log-ranks"),
    "less memory": ("moments", "recompute"),
    "instead of training": ("sample", "temperature", "top-k", "dry-run", "replay")}

# Defaults without -e and -i, tuned on tinyshakespeare: a minute on two cores, seconds on a GPU
SCRATCH = {"cpu": dict(steps=250, learning_rate=1e-3, warmup=25, final_fraction=0.1, beta2=0.95,
                       val_every=50, sample_every=125),
           "cuda": dict(batch_size=2, steps=1200, learning_rate=2e-4, warmup=120,
                        final_fraction=0.3, val_every=100, sample_every=400)}
DESCRIPTORS = "d12, d24, d36, d48 or another depth"

NEEDS = {  # {flag: the one that it is useless without}
    "checkpoint_every": "output", "resume": "output", "checkpoints_kept": "checkpoint_every",
    "checkpoints_major": "checkpoints_kept", "temperature": "sample", "top_k": "sample",
    "log_ranks": "output", "ema": "output"}


class Feature(NamedTuple):
    name: str
    asked: Callable  # (flags, ranks) -> whether to use it; ranks is None for one process
    model: str = ""  # the subclass, as module:class
    training: str = ""
    only: str = ""  # the one architecture that it is for


def trains(flags):
    return flags.sample is None and not flags.dry_run


def is_fast(flags):
    return flags.device == "cuda" and not flags.plain


# What wraps stands above what it wraps: make_model of the first row ends last.
FEATURES = [
    Feature("terminal", lambda flags, ranks: True, training="dev.features.terminal:Terminal"),
    Feature("files", lambda flags, ranks: True, training="dev.features.file_kinds:Named"),
    Feature("peak", lambda flags, ranks: True, training="dev.features.peak:Peak"),
    Feature("nvtx", lambda flags, ranks: flags.nvtx, training="dev.features.nvtx:Annotated"),
    Feature("dry run", lambda flags, ranks: flags.dry_run, training="dev.features.dry_run:DryRun"),
    Feature("sample", lambda flags, ranks: flags.sample is not None,
            training="dev.features.sample:Sampling"),
    Feature("hellaswag", lambda flags, ranks: flags.hellaswag,
            training="dev.features.hellaswag_score:Scored"),
    Feature("overfit", lambda flags, ranks: flags.overfit,
            training="dev.features.overfit:Overfit"),
    Feature("fp8 head", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 != "layers",
            "dev.features.fp8.fp8_head:Fp8Head"),
    Feature("fp8", lambda flags, ranks: flags.dtype == "fp8", "dev.features.fp8.fp8:Fp8Model",
            "dev.features.fp8.fp8:Fp8Training"),
    Feature("bf16 sums", lambda flags, ranks: ranks and flags.sums == "bf16",
            "dev.features.ranks.sums:Bf16Sums", "dev.features.ranks.sums:Bf16SumsTraining"),
    Feature("zero", lambda flags, ranks: ranks and flags.zero, "dev.features.ranks.zero:Sharded",
            "dev.features.ranks.zero:ShardedTraining"),
    Feature("ranks", lambda flags, ranks: ranks, "dev.features.ranks.ranks:Ranked",
            "dev.features.ranks.ranks:RankedTraining"),
    Feature("runs", lambda flags, ranks: flags.output and trains(flags),
            training="dev.features.checkpoints.training:Kept"),
    Feature("checkpoint", lambda flags, ranks: flags.output and flags.sample is not None
            and not flags.dry_run, training="dev.features.checkpoints.training:Resumed"),
    Feature("signals", lambda flags, ranks: True, training="dev.features.signals:Stoppable"),
    Feature("tokenizer", lambda flags, ranks: True, training="dev.features.tokenizer:Tokenized"),
    Feature("outliers", lambda flags, ranks: flags.loss_limit or flags.norm_limit,
            "dev.features.outliers:Outliers", "dev.features.outliers:OutliersTraining"),
    Feature("explain", lambda flags, ranks: True, training="dev.features.replay:Explained"),
    Feature("ema", lambda flags, ranks: flags.ema is not None,
            "dev.features.ema:Averaged", "dev.features.ema:AveragedTraining"),
    Feature("moments", lambda flags, ranks: flags.moments == "bf16",
            "dev.features.moments:Bf16Moments", "dev.features.moments:Bf16MomentsTraining"),
    Feature("recompute 1", lambda flags, ranks: flags.recompute == 1,
            "dev.features.recompute:RecomputeInside", "dev.features.recompute:RecomputeTraining"),
    Feature("recompute 2", lambda flags, ranks: flags.recompute == 2,
            "dev.features.recompute:RecomputeLayers", "dev.features.recompute:RecomputeTraining"),
    Feature("label smoothing", lambda flags, ranks: flags.label_smoothing,
            "dev.features.label_smoothing:Smoothed",
            "dev.features.label_smoothing:SmoothedTraining"),
    Feature("hint", lambda flags, ranks: flags.recompute != 2,
            "dev.features.recompute:RecomputeHint"),
    Feature("memory", lambda flags, ranks: True, "dev.features.fit:Fitting",
            "dev.features.fit:FittingTraining"),
    Feature("fp8 all", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 == "all",
            "dev.features.fp8.fp8_all:Fp8All"),
    Feature("relu", lambda flags, ranks: flags.attention == "relu",
            training="dev.features.relu_attention:Relu"),
    Feature("schedule", lambda flags, ranks: flags.schedule != "cosine",
            training="dev.features.schedule:Scheduled"),
    Feature("loader", lambda flags, ranks: True, training="dev.features.shuffled_loader:Shuffled"),
    Feature("late reports", lambda flags, ranks: is_fast(flags),
            training="dev.features.late_reports:LateReports"),
    Feature("five products", lambda flags, ranks: is_fast(flags),
            "dev.features.hopper.attention_five:FiveProducts",
            "dev.features.hopper.attention_five:FiveProductsTraining"),
    Feature("gelu products", lambda flags, ranks: is_fast(flags) and flags.dtype == "bf16",
            "dev.features.hopper.gelu_products:SummedProducts",
            "dev.features.hopper.gelu_products:GeluProducts", "GPT2"),
    Feature("fused biases", lambda flags, ranks: is_fast(flags) or flags.dtype == "fp8",
            "dev.features.fused_biases:FusedBiases",
            "dev.features.fused_biases:FusedBiasesTraining", "GPT2"),
    Feature("products", lambda flags, ranks: is_fast(flags),
            training="dev.features.products:Timed"),
    Feature("no graph", lambda flags, ranks: not flags.graph,
            training="dev.features.devices:OneByOne"),
    Feature("cpu", lambda flags, ranks: flags.device == "cpu",
            training="dev.features.devices:OnCpu"),
]
# {names of features: (the model's subclass, the training's)}; the model's class counts as a feature
PAIRS = {
    ("recompute 1", "Llama3"): ("dev.features.recompute:LlamaInside", ""),
    ("recompute 2", "Llama3"): ("dev.features.recompute:LlamaLayers",
                                "dev.features.recompute:LlamaLayersTraining"),
    ("fp8", "Llama3"): ("dev.features.fp8.fp8:Fp8Llama", ""),
    ("fp8", "ranks"): ("dev.features.fp8.fp8:Fp8Ranked", ""),
    ("fp8", "zero"): ("dev.features.fp8.fp8:Fp8Sharded", ""),
    ("fp8", "explain"): ("", "dev.features.fp8.fp8:Fp8Explained"),
    ("hellaswag", "runs"): ("", "dev.features.hellaswag_score:ScoredAndKept"),
    ("hellaswag", "ranks"): ("", "dev.features.hellaswag_score:ScoredByRanks"),
    ("moments", "zero"): ("dev.features.moments:ShardedMoments", ""),
    ("explain", "runs"): ("", "dev.features.replay:ExplainedAndKept"),
    ("explain", "ranks"): ("", "dev.features.ranks.ranks:RanksExplained"),
    ("ema", "runs"): ("", "dev.features.ema:AveragedAndKept"),
}
EXCLUDES = {  # {names of features that do not go together: why, and what to do}
    ("ema", "zero"): "--ema --zero 1: the average is of whole parameters, and ZeRO keeps a "
                         "share of them: expected --zero 0",
    ("fp8 head", "label smoothing"): "--fp8 head or all with --label-smoothing: the classifier for "
                                     "FP8 has no smoothing: expected --fp8 layers",
    **{("fp8 all", other): "--fp8 all: is for GPT-2 without --recompute: expected --fp8 head"
       for other in ("Llama3", "recompute 1", "recompute 2")},
}


def load(path):
    """The object of a path such as dev.features.ranks.ranks:Ranked."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def stack(base, layers, own):
    """A subclass of base, with these layers (paths of classes, the first outermost) in front of it,
    and own attributes."""
    bases = *(load(path) for path in layers if path), base
    return type(base.__name__, bases, own)


def key_of(row):
    """The name of a row's flag among the attributes of flags."""
    return row[1].removeprefix("--").replace("-", "_")


def table_of_flags(plain, kind):
    """(rows of all flags, in the order of GROUPS; {first flag: headline}). plain: the trainer's
    rows; kind: the model's Config."""
    file, large = kind.MODELS
    names = dict(file=file, large=large, small=small(large),
                 descriptors=getattr(kind, "DESCRIPTORS", DESCRIPTORS))
    rows = {row[1]: (*row[:4], row[4].format(**names)) for row in [*plain, *FLAGS]}
    table = [rows.pop(f"--{name}") for group in GROUPS.values() for name in group]
    assert not rows, f"without a group: {[*rows]}"
    return table, {f"--{group[0]}": headline for headline, group in GROUPS.items()}


def small(descriptor):
    """The descriptor of the model that is trained from scratch on a CPU."""
    return descriptor.replace("d12", "d3")


def set_defaults(flags, table, kind):
    """Set flags that were not given. kind: the model's Config."""
    file, descriptor = kind.MODELS
    on_cpu, given = flags.device == "cpu", flags.model or os.path.isfile(file) and file
    defaults = {key_of(row): row[3] for row in table}
    defaults |= dict(model=given or (small(descriptor) if on_cpu else descriptor),
                     dtype=default_dtype(flags.device))
    if not given and (on_cpu or not flags.train_data):
        defaults |= SCRATCH[flags.device]
    for name, value in defaults.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)


def capability():
    """The first GPU's compute capability as NVIDIA's driver reports it, 75 for 7.5; 0 without a
    GPU. Importing CuPy would take a second."""
    found = {75: ctypes.c_int(), 76: ctypes.c_int()}  # the driver's numbers for 7 and 5 of 7.5
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        for attribute, value in found.items():
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    return 10 * found[75].value + found[76].value


def has_gpu():
    return capability() > 0


def default_dtype(device):
    """A CPU is fast in fp32 only, and GPUs before 8.0 have nothing else."""
    return "fp32" if device == "cpu" or 0 < capability() < 80 else "bf16"


def attach(flags, Training, Model, ranks=None, folder=None):
    """(training, model): the classes of a run, with the features that its flags ask for. Sets the
    defaults of features' flags."""
    for row in FLAGS:
        if getattr(flags, key_of(row)) is None:
            setattr(flags, key_of(row), row[3])
    in_turn = ("all", "head", "layers") if flags.dtype == "fp8" and not flags.fp8 else (flags.fp8,)
    for level in in_turn:  # until one goes with the other flags
        flags.fp8 = level
        asked = {feature.name: feature for feature in FEATURES
                 if feature.asked(flags, ranks) and feature.only in ("", Model.__name__)}
        names = asked.keys() | {kind.__name__ for kind in Model.__mro__}
        why = next((why for pair, why in EXCLUDES.items() if names >= {*pair}), None)
        if not why:
            break
    else:
        raise UserError(why)
    pairs = [PAIRS[pair] for pair in PAIRS if names >= {*pair}]
    layers = [*pairs, *((feature.model, feature.training) for feature in asked.values())]
    models, trainings = zip(*layers)
    return (stack(Training, trainings, dict(ranks=ranks, folder=folder)),
            stack(Model, models, dict(ranks=ranks, flags=flags)))


def check_needs(flags):
    """Raise UserError if a flag is empty, or was given without the one that it needs."""
    def called(name):
        return f"--{name.replace('_', '-')}"

    empty = [name for name, value in vars(flags).items() if value == "" and name != "sample"]
    if empty:
        raise UserError(f"{called(empty[0])}: expected a name, found nothing")
    for name, needed in NEEDS.items():
        known = flags.resume and needed.startswith("checkpoint")  # from the resumed run
        if getattr(flags, name) and getattr(flags, needed) in (None, 0) and not known:
            raise UserError(f"{called(name)}: expected {called(needed)} too; --help says what they "
                            "do")
    if flags.hellaswag and flags.val_every == 0:
        raise UserError("--hellaswag: is scored at each validation, and -v 0 makes none: expected "
                        "another -v")


def main(arguments=None, Model=GPT2):
    """Train an architecture as the arguments say. Returns the exit status."""
    table, groups = table_of_flags(train_gpt2.FLAGS, Model.Config)
    flags = parse_flags("Train from raw kernels.", table, arguments, defaults=False, groups=groups)
    check_needs(flags)
    if trains(flags) and not flags.replay:
        load("dev.features.output:go_on_without_output")()
    flags.device = flags.device or ("cuda" if has_gpu() else "cpu")

    def train(ranks=None):
        """Train, alone or as one of several ranks."""
        folder = None
        if flags.sample is not None:
            load("dev.features.sample:draw_seed")(flags)
        if flags.output and not flags.dry_run:  # with -y 1 this restores flags
            folder = load("dev.features.checkpoints.run_folder:RunFolder")(
                flags, ranks, Model.Config, table)
        training, model = classes(ranks, folder)
        return training(flags, model).run()

    def classes(*more):
        set_defaults(flags, table, Model.Config)
        if flags.fp8 not in (None, "layers") and flags.dtype != "fp8":
            raise UserError(f"--fp8 {flags.fp8} --dtype {flags.dtype}: expected --dtype fp8")
        return attach(flags, Training, Model, *more)

    if flags.replay:
        return load("dev.features.replay:replay")(flags, classes)
    if launched() if flags.gpus is None else flags.gpus > 1:
        return load("dev.features.ranks.launch:start")(flags, train)
    return train()
