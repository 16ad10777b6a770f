"""The order of features: what the program can do beyond training on one GPU.

A feature is a module of dev/features with subclasses of the model (train_gpt2.GPT2), of the
training (train_gpt2.Training) or of a device, which override methods and call super(). Its
declaration, see declare.py, says which flags ask for it. The classes of the features that a run
asks for are stacked in the order of FEATURES, the first outermost, on top of the plain program's,
and make classes for this run only. Features that only listen are observers, beside the stack.

train_gpt2.main calls program here. Without this file it still trains on a GPU.
"""
from dev.common.program import run_main
import train_gpt2
from dev.common import gpus
from dev.common.flags import parse_flags, with_values
from dev.common.gpus import has_gpu
from dev.features import (
    best, chat, config_file, devices, doubts, dropout, dry_run, ema, file_kinds, first_run, fit,
    fused_biases, hellaswag_score, kv_cache, label_smoothing, late_reports, loggers, masked,
    moments, muon, nvtx, outliers, overfit, own_sizes, peak, products, recompute, relu_attention,
    replay, sample, schedule, shuffled_loader, signals, start, terminal, tokenizer)
from dev.features.checkpoints import json_log, newest, training
from dev.features.checkpoints.run_folder import RunFolder
from dev.features.declare import Flag, key_of, stack, trains
from dev.features.fp8 import fp8, fp8_all, fp8_all_llama, fp8_gelu, fp8_head
from dev.features.hopper import attention_five, gelu_products, swiglu_products, symmetric
from dev.features.output import go_on_without_output
from dev.features.ranks import bf16_sums, launch, ranks, zero
from dev.features.ranks.environment import launched
from dev.features.seams import GPT2, Training
from train_gpt2 import UserError

# What wraps stands above what it wraps: make_model of the first ends last.
FEATURES = [
    terminal.PRINTING, doubts.FEATURE, file_kinds.FEATURE, peak.FEATURE, nvtx.FEATURE,
    dry_run.FEATURE, chat.ANSWERS, chat.FEATURE, sample.FEATURE, kv_cache.FEATURE,
    hellaswag_score.FEATURE, overfit.FEATURE, fp8_head.FEATURE, fp8.FEATURE, config_file.FEATURE,
    loggers.FEATURE, best.FEATURE, outliers.FEATURE, masked.FEATURE, bf16_sums.FEATURE,
    zero.FEATURE, ranks.FEATURE, sample.CONTROLLED, training.KEPT, json_log.FEATURE,
    training.RESUMED, first_run.INTERRUPTED, signals.FEATURE, tokenizer.FEATURE, dropout.FEATURE,
    replay.FEATURE, ema.FEATURE, symmetric.FEATURE, muon.FEATURE, moments.FEATURE, recompute.INSIDE,
    recompute.LAYERS, label_smoothing.FEATURE, recompute.HINT, fit.FEATURE, first_run.FEATURE,
    own_sizes.FEATURE, fp8_gelu.FEATURE, fp8_all.FEATURE, fp8_all_llama.FEATURE, fp8.PRODUCTS,
    relu_attention.FEATURE, schedule.FEATURE, shuffled_loader.FEATURE, late_reports.FEATURE,
    gelu_products.FEATURE, swiglu_products.FEATURE, fused_biases.FEATURE, attention_five.FEATURE,
    products.FEATURE, start.TIMED, start.LATER, devices.NO_GRAPH, devices.CPU, terminal.FEATURE]
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
    defaults = {key_of(row): row[3] for row in table} | dict(dtype=default_dtype(flags.device))
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
    """Raise UserError if a flag is empty, or was given without the one that it needs."""
    def called(name):
        return f"--{name.replace('_', '-')}"

    for flag in table:
        if getattr(flags, flag.key) == "" and flag.key != "sample":
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
