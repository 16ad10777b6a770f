"""The features, and the order in which they stack: what the program can do beyond training on one
GPU.

A feature is a module of dev/features with subclasses of the model (train_gpt2.GPT2), of the
training (train_gpt2.Training) or of a device, which override methods and call super(). It ends with
a declaration, see feature.py, that says which flags ask for it. Whoever writes one need not name it
here. The classes of the features that a run asks for are stacked on top of the plain program's, the
first of FEATURES outermost, and make classes for this run only. Features that only listen are
observers, beside the stack.

train_gpt2.main calls program here. Without this file it still trains on a GPU.
"""
import re
from importlib import import_module
from pathlib import Path

import numpy as np

from dev.common.program import run_main
import train_gpt2
from dev.common import gpus
from dev.common.flags import Flag, key_of, parse_flags, with_values
from dev.common.gpus import has_gpu
from dev.features import config_file, devices, first_run, replay, sample
from dev.features.base import GPT2, Training
from dev.features.checkpoints import newest
from dev.features.checkpoints.run_folder import RunFolder
from dev.features.feature import stack, trains
from dev.features.output import go_on_without_output
from dev.features.ranks import launch
from dev.features.ranks.environment import launched
from train_gpt2 import UserError

HERE = Path(__file__).resolve().parent
# {feature: why it stands above those that follow}, the outermost first. All others, by name, stand
# below these, next to the plain program: no two of them change the same thing, which a test holds.
ORDER = {
    "products into slots": "their results go elsewhere, whatever makes them",
    "printing": "a step's line comes before what other observers say of the step",
    "minutes": "knows how many steps there are before all others ask",
    "terminal": "its clock runs around all that a validation or a sample does",
    "nvtx": "its ranges hold all that a pass, a layer or a kernel does",
    "files": "an error of all below about -e, -i or -j may be that of a wrong kind of file",
    "dry run": "its run() ends before a training, a sample or a chat would begin",
    "answers": "its encode() and stop take the place of tokenizer's and sample's",
    "chat": "its run() takes the place of sample's",
    "sample": "its run() takes the place of a training's, which signals watches",
    "kv cache": "its next_logits() takes the place of dropout's: it drops nothing",
    "hellaswag": "scores after best has judged the loss",
    "overfit": "its data_paths() gives -j's to all steps; those below note and check -i's, too",
    "fp8 head": "adds to fp8's table and weights",
    "fp8": "prepares what a pass, a layer or a part below reads, and casts what zero has updated",
    "loggers": "opens its logs before runs begins a folder, and closes them after it",
    "best": "judges after zero has gathered the parameters",
    "outliers": "judges last, after masked targets has skipped steps without targets",
    "masked targets": "wraps any loss, and makes gradients means before zero takes their norm",
    "bf16 sums": "casts before and after the sums of zero and ranks",
    "slots": "its sums and shares take the place of zero's",
    "zero": "its cuts and sums take the place of ranks'; it gathers before runs saves",
    "ranks": "compares what runs has restored; rank 0 alone samples, prepares and downloads",
    "runs": "restores what ema began, and saves before explain ends the run",
    "interrupted first run": "speaks in the place of signals, and samples after it",
    "signals": "sees a signal before late reports asks whether the run pauses",
    "tokenizer": "finds the vocabulary of the paths that own sizes chose",
    "dropout in norms": "does inside a norm what dropout would do before it",
    "dropout": "drops before recompute 2, fp8 and others replace the layer's parts",
    "ema": "averages after the update, be it Muon's or that of bf16 moments",
    "exact": "its cosine takes the place of schedule's, and it sums up bits after any update",
    "symmetric products": "they take the place of Muon's",
    "recompute 2": "computes a layer again without the gathering and counting above",
    "hint": "its half of the error comes before memory's",
    "own sizes": "keeps the paths that loader has found",
    "fp8 GELU products": "they take the place of fp8 all's where the shapes fit",
    "fp8 all": "its gradients of weights take the place of fp8 products'",
    "fp8 all of Llama": "the same",
    "fp8 products": "they take the place of the trainer's",
    "gelu products": "they have the sums of rows that fused biases would make",
    "samples later": "takes kv_cache.cu away before start's clock runs",
    "fused biases": "prepares the sums that attention's kernels make: those of five products, too",
    "documents": "its line of a run comes after a first run's",
}


def declared():
    """{file: its Features} of the modules that declare any; all are imported."""
    found = {}
    for path in sorted(HERE.glob("**/*.py")):
        names = re.findall(r"^(\w+) = Feature\(", path.read_text("utf-8"), re.M)
        if names:
            file = path.relative_to(HERE)
            module = import_module(".".join(("dev.features", *file.with_suffix("").parts)))
            found[file.as_posix()] = module, [getattr(module, name) for name in names]
    return found


DECLARED = declared()
FEATURES = sorted((each for _, features in DECLARED.values() for each in features),
                  key=lambda each: ([*ORDER, each.name].index(each.name), each.name))
FLAGS = [flag for feature in FEATURES for flag in feature.flags]
SOURCES = [*dict.fromkeys(path for feature in FEATURES for each in (feature, *feature.pairs)
                          for path in each.sources)]
# {headline in --help: the trainer's flags, and where those of features go that follow no other}
GROUPS = {
    "data and model": ("train-data", "val-data", "model", "output", ...),
    "checkpoints and resuming": (...,),
    "the size of a step": ("batch-size", "total-batch", "seq-len", ...),
    "the update": ("learning-rate", "warmup", "final-fraction", "weight-decay", "beta1", "beta2",
                   "eps", "clip", ...),
    "how long, and what is shown": ("steps", "val-every", "val-batches", "sample-every",
                                    "sample-tokens", ...),
    "experiments, and the seed": (..., "seed"),
    "the machine": (..., "dtype", "plain"),
    "several GPUs": (...,),
    "less memory": (...,),
    "instead of training": (...,)}

DESCRIPTORS = "d12, d24, d36, d48 or another depth"


def table_of_flags(plain, kind):
    """(all Flags, in the order of --help; {first flag: headline}). plain: the trainer's rows; kind:
    the model's Config."""
    file, _ = kind.MODELS
    names = dict(file=file, small=first_run.describe(),
                 descriptors=getattr(kind, "DESCRIPTORS", DESCRIPTORS))
    flags = {flag.name: flag for flag in [*(Flag(*row) for row in plain), *FLAGS]}
    table, headlines = [], {}
    for headline, group in GROUPS.items():
        own = [flag for flag in FLAGS if flag.group == headline]
        first = [flag.name for flag in own if not flag.after]
        found = [name for each in group for name in (first if each is ... else [f"--{each}"])]
        waiting = [flag for flag in own if flag.after]
        while waiting:  # a flag may follow one that waits too
            flag = next(flag for flag in waiting if flag.after in found)
            found.insert(found.index(flag.after) + 1, flag.name)
            waiting.remove(flag)
        headlines[found[0]] = headline
        table += [flags.pop(name) for name in found]
    assert not flags, f"without a group: {[*flags]}"
    return [flag._replace(text=flag.text.format(**names)) for flag in table], headlines


def with_defaults(flags, table, kind):
    """(the flags with defaults for those that were not given; why they have this model, if -e does
    not say so). kind: the model's Config."""
    chosen, why = first_run.choose(flags, kind)
    defaults = {key_of(row): row[3] for row in table} | dict(
        dtype="fp32" if flags.exact else default_dtype(flags.device))
    return filled(flags, defaults | chosen), why


def filled(flags, defaults):
    """The flags, with defaults for those that were not given."""
    return with_values(flags, **{name: value for name, value in defaults.items()
                                 if getattr(flags, name, None) is None})


def default_dtype(device):
    """A CPU is fast in fp32 only, and GPUs before 8.0 have nothing else."""
    return "fp32" if device in devices.ON_CPU or 0 < gpus.capability() < 80 else "bf16"


def attach(flags, Training, Model, ranks=None, folder=None):
    """(training, model): the classes of a run, with the features that its flags ask for.
    model.flags are these flags, with defaults."""
    flags = filled(flags, {key_of(row): row[3] for row in [*train_gpt2.FLAGS, *FLAGS]})
    check_refused(flags)
    in_turn = ("all", "head", "layers") if flags.dtype == "fp8" and not flags.fp8 else (flags.fp8,)
    for level in in_turn:  # until one goes with the other flags
        flags = with_values(flags, fp8=level)
        asked = [feature for feature in FEATURES
                 if feature.asked(flags, ranks) and feature.only in ("", Model.__name__)]
        names = {*(feature.name for feature in asked), *(kind.__name__ for kind in Model.__mro__)}
        why = next((why for feature in asked for other, why in feature.excludes.items()
                    if other in names), None)
        if not why:
            break
    else:
        raise UserError(why)
    pairs = [pair for feature in asked for pair in feature.pairs if pair.other in names]
    layers = [*pairs, *asked]
    on_device = [layer.device if isinstance(layer.device, type | None) else layer.device(flags)
                 for layer in layers]
    plain = devices.Cuda if flags.plain else devices.FastCuda
    Device = stack(devices.ON_CPU.get(flags.device, plain), on_device)
    model = stack(Model, (layer.model for layer in layers), dict(ranks=ranks, flags=flags))
    own = dict(ranks=ranks, folder=folder, layers=layers, Device=Device, Model=model)
    of_run = [*(layer.training for layer in layers), Model.Training]
    return stack(Training, of_run, own), model


def check_needs(flags, table):
    """Raise UserError if a flag is empty or too large, or was given without the one that it
    needs."""
    def called(name):
        return f"--{name.replace('_', '-')}"

    for flag in table:
        value = getattr(flags, flag.key)
        if isinstance(value, float) and value > np.finfo(np.float32).max:
            raise UserError(f"{flag.name} {value}: expected at most 3.4e38, the most that fp32 has")
        if value == "" and flag.key != "sample":
            what = "a text" if flag.kind is str else "a name"
            raise UserError(f"{called(flag.key)}: expected {what}, found nothing")
    for flag in table:
        known = flags.resume and flag.needs.startswith("checkpoint")  # from the resumed run
        useless = flag.needs and not known and getattr(flags, flag.needs) in (None, 0)
        if useless and getattr(flags, flag.key):
            raise UserError(f"{flag.name}: expected {called(flag.needs)} too; --help says what "
                            "they do")
    check_refused(flags)


def check_refused(flags):
    """Raise UserError if a feature says that flags do not go together."""
    for why in filter(None, (feature.refuses(flags) for feature in FEATURES)):
        raise UserError(why)


def read_flags(arguments, Model):
    """(flags, all Flags) of a command line, for an architecture. Raises UserError."""
    table, groups = table_of_flags(train_gpt2.FLAGS, Model.Config)
    flags = parse_flags("Train from raw kernels.", table, arguments, defaults=False, groups=groups)
    flags = sample.without_text(config_file.with_file(flags, table))
    check_needs(flags, table)
    flags = newest.with_checkpoint(flags, Model.Config)
    device = flags.device or ("cuda" if has_gpu() else "cpu")
    return with_values(flags, device=device), table


def classes_of(flags, table, Model, ranks=None, folder=None):
    """(training, model): as attach, with the defaults of all flags."""
    filled_in, why = with_defaults(flags, table, Model.Config)
    training, model = attach(filled_in, Training, Model, ranks, folder)
    training.why, training.chosen = why, not flags.model
    return training, model


def make_training(flags, table, Model, ranks=None, front=()):
    """The Training of this process, alone or as one of several ranks. front: classes in front of
    its features'. Raises UserError."""
    folder = None
    if flags.sample is not None:
        flags = sample.for_samples(flags)
    if flags.output and not flags.dry_run:
        folder = RunFolder(flags, ranks, Model.Config, table, FEATURES)
        flags = folder.flags  # with -y 1 those of the run, too
    training, model = classes_of(flags, table, Model, ranks, folder)
    return stack(training, front)(model.flags)


def program(Model=GPT2):
    """main(), as a program with the command line's arguments."""
    run_main(lambda: main(None, Model))


def main(arguments=None, Model=GPT2):
    """Train an architecture as the arguments say. Returns the exit status."""
    flags, table = read_flags(arguments, Model)
    if trains(flags) and not flags.replay:
        go_on_without_output()

    def train(ranks=None):
        return make_training(flags, table, Model, ranks).run()

    if flags.replay:
        return replay.replay(flags, table, lambda flags: classes_of(flags, table, Model))
    if launched() if flags.gpus is None else flags.gpus > 1:
        return launch.start(flags, train)
    return train()
