"""Compare AdamW and Muon: train the same model on the same tokens with a table of settings, and
keep each run's result.

    python -m dev.data.english && python -m dev.data.fineweb --input data/english.jsonl
    python -m dev.bench.optimizers -i data/english/english_train_000001.bin \\
        -j data/english/english_val_000000.bin
    python -m dev.bench.optimizers --results dev/bench/optimizers.jsonl --show 1    # measured

Settings come in rounds: rates; what these suggest, with schedules and warmups; then the best of
each optimizer with more seeds, and Muon for fewer steps, in which it may still reach AdamW's final
loss; then the best of each with GPT-2 355M. With --long 1 only the best settings of runs of 300
steps begin, and then come seeds and fewer steps:

    python -m dev.bench.optimizers --long 1 -x 600 --results long.jsonl -i ... -j ...

A line of the results file is a run: its setting, its validation losses, and its times. Runs that
are in the file are not made again, so the program can be stopped, and continues where it was;
--seconds stops it before the first run that would last longer. Runs that follow each other with the
same optimizer and sizes share a device and a model, which saves compiling.

A schedule ends at a rate of 0, so only the last validation of a run says what its number of steps
achieves. That is why Muon's runs with fewer steps are runs of their own.
"""
import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.common.config import draw_parameters
from dev.common.flags import parse_flags, with_values
from dev.common.program import run_main
from dev.features.order import attach, table_of_flags, with_defaults
from dev.features.seams import GPT2, Training
from train_gpt2 import FLAGS as TRAINERS, UserError, replace_file

RATES = {"adamw": (5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3),
         "muon": (0.005, 0.01, 0.015, 0.02, 0.03, 0.04)}
REST = 2e-3  # AdamW's rate beside Muon
SHORTER = dict(muon_coefficients="polar-express")
MORE = {  # settings that the first round suggests: (rate of the hidden matrices, changes)
    "adamw": [
        (5e-4, dict(beta2=0.99)),
        (5e-4, dict(beta2=0.9)),
        (2.5e-4, dict(schedule="wsd")),
        (5e-4, dict(schedule="wsd")),
        (7e-4, dict(schedule="wsd")),
        (1e-3, dict(schedule="wsd")),
        (5e-4, dict(schedule="wsd", warmup=0.3)),
        (1e-3, dict(schedule="wsd", warmup=0.3)),
        (2e-3, dict(schedule="wsd", warmup=0.3)),
        (1e-3, dict(schedule="wsd", warmup=0.4)),
        (1e-3, dict(schedule="wsd", warmup=0.5)),
        (1.5e-3, dict(schedule="wsd", warmup=0.5)),
        (2e-3, dict(schedule="wsd", warmup=0.5))],
    "muon": [
        (0.04, dict(schedule="wsd")),
        (0.04, dict(learning_rate=1e-3)),
        (0.04, dict(learning_rate=4e-3)),
        (0.0072, dict(muon_scale="rms")),  # for 768 x 768, where original is 1 and rms 5.54
        (0.04, dict(schedule="wsd", learning_rate=4e-3)),
        (0.03, dict(schedule="wsd", learning_rate=4e-3)),
        (0.06, dict(schedule="wsd", learning_rate=4e-3)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, muon_momentum=0.9)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, muon_momentum=0.85)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, **SHORTER)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, seed=43, **SHORTER)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, seed=44, **SHORTER))]}
LONG = {  # the best of the settings above, and neighbours of what was best in 600 steps
    "muon": [
        (0.04, dict(schedule="wsd", learning_rate=8e-3, muon_momentum=0.9, **SHORTER)),
        (0.04, dict(schedule="wsd", learning_rate=8e-3, **SHORTER))],
    "adamw": [
        (1e-3, dict(schedule="wsd", warmup=0.4)),
        (1e-3, dict(schedule="wsd", warmup=0.3)),
        (1e-3, dict(schedule="wsd", warmup=0.2)),
        (1.5e-3, dict(schedule="wsd", warmup=0.3)),
        (5e-4, dict(schedule="wsd", warmup=0.4)),
        (2e-3, dict(schedule="wsd", warmup=0.4)),
        (1e-3, dict(schedule="linear", warmup=0.1))]}
SEEDS = 42, 43, 44
SHARES = {"adamw": (1,), "muon": (1, 0.67, 0.5, 0.45, 0.33)}  # of the steps, in the third round
LONG_SHARES = {"adamw": (1,), "muon": (0.5, 0.4, 0.33, 1)}
OF_EARLIER = "jordan"  # Muon's coefficients, where a setting does not name any
LARGE = dict(model="d24", batch_size=16)  # in the fourth round, for 5/6 of the steps
COMMON = dict(beta1=0.9, clip=1.0, final_fraction=0.0)
FLAGS = [
    ("-i", "--train-data", "name", None, "token file to train on"),
    ("-j", "--val-data", "name", None, "token file to validate on"),
    ("-e", "--model", "name", "d12", "the model"),
    ("-b", "--batch-size", "count", 32, "sequences in a step"),
    ("-t", "--seq-len", "count", 1024, "tokens in a sequence"),
    ("-x", "--steps", "count", 300, "steps of a run"),
    ("-m", "--val-batches", "count", 16, "batches of a validation"),
    (None, "--device", ("cuda", "cpu"), "cuda", "where to compute"),
    (None, "--dtype", ("fp32", "bf16"), "bf16", "precision"),
    (None, "--results", str, "optimizers.jsonl", "file of results, which is continued"),
    (None, "--long", "switch", 0, "1: only the best settings of runs of 300 steps"),
    (None, "--seconds", "count", 86400, "start no run that would last longer"),
    (None, "--show", "switch", 0, "1: print the table, and train nothing")]


# ---- Which runs


def setting(optimizer, rate, steps, **changes):
    """A run's flags. rate: of the hidden matrices."""
    rates = (dict(learning_rate=rate, muon_lr=0.0) if optimizer == "adamw" else
             dict(learning_rate=REST, muon_lr=rate))
    usual = dict(optimizer=optimizer, **rates, schedule="linear", steps=steps, seed=SEEDS[0],
                 muon_momentum=0.95, muon_scale="original", beta2=0.95, weight_decay=0.1,
                 warmup=0.1)  # the last is a share of the steps
    return usual | changes


def first_round(steps):
    return [setting(optimizer, rate, steps) for optimizer, rates in RATES.items()
            for rate in rates]


def settings_of(table, steps):
    return [setting(optimizer, rate, steps, **changes) for optimizer, rows in table.items()
            for rate, changes in rows]


def with_seeds(shares, steps, results, earlier):
    """The best of the earlier settings with each seed, and for shares of the steps."""
    for seed in SEEDS:
        for optimizer in shares:
            values = best(optimizer, results, earlier)
            for share in shares[optimizer]:
                yield values | dict(steps=round(share * steps), seed=seed)


def with_355m(steps, results, earlier):
    for optimizer in MORE:
        yield best(optimizer, results, earlier) | LARGE | dict(steps=round(5 / 6 * steps))


def best(optimizer, results, among):
    """The setting of an optimizer with the lowest loss, among some settings."""
    keys = {key_of(values) for values in among if values["optimizer"] == optimizer}
    found = [row for row in results if key_of(row["setting"]) in keys]
    return min(found, key=lambda row: row["loss"])["setting"]


def key_of(values):
    return json.dumps(values, sort_keys=True)


def rounds_of(steps, results, long):
    """Each round's settings. A round begins when the one before it has all results."""
    if long:
        earlier = settings_of(LONG, steps)
        yield earlier
        yield with_seeds(LONG_SHARES, steps, results, earlier)
    else:
        yield first_round(steps)
        yield settings_of(MORE, steps)
        earlier = [*first_round(steps), *settings_of(MORE, steps)]
        yield with_seeds(SHARES, steps, results, earlier)
        yield with_355m(steps, results, earlier)


def remaining(steps, results, long):
    """The settings of the first unfinished round that have no result yet."""
    done = {key_of(row["setting"]) for row in results}
    for a_round in rounds_of(steps, results, long):
        left = [values for values in a_round if key_of(values) not in done]
        if left:
            return left
    return []


# ---- A run


class Quiet:
    """A run whose losses and times are kept."""

    def validates(self, done):
        return done > 0 and super().validates(done)

    def report(self, queued, verdict):
        self.seconds.append(time.perf_counter() - queued.begun)
        if verdict.stopped:
            raise FloatingPointError

    def validate(self, done):
        begun = time.perf_counter()
        self.curve.append((done, round(super().validate(done), 6)))
        self.validating += time.perf_counter() - begun
        return self.curve[-1][1]


def kind_of(values, asked):
    """(optimizer, model, B, coefficients) of a setting: runs of one kind share a model."""
    return (values["optimizer"], values.get("model", asked.model),
            values.get("batch_size", asked.batch_size),
            values.get("muon_coefficients", OF_EARLIER))


class Runs:
    """All runs of a kind: one device and one model, which starts anew."""

    def __init__(self, kind, asked):
        self.kind = kind
        optimizer, model, batch_size, coefficients = kind
        table, _ = table_of_flags(TRAINERS, GPT2.Config)
        flags = parse_flags("", table, [], defaults=False)
        given = dict(device=asked.device, dtype=asked.dtype, model=model,
                     train_data=asked.train_data, val_data=asked.val_data,
                     batch_size=batch_size, seq_len=asked.seq_len, steps=asked.steps,
                     val_batches=asked.val_batches, sample_every=0, optimizer=optimizer,
                     schedule="linear", val_every=asked.steps, **COMMON)
        if optimizer == "muon":
            given["muon_coefficients"] = coefficients
        flags, _ = with_defaults(with_values(flags, **given), table, GPT2.Config)
        Run, Model = attach(flags, Training, GPT2)
        self.training = type("Run", (Quiet, Run), {})(Model.flags)
        self.training.observers = []  # none prints
        self.training.prepare()
        self.model = self.training.model = self.training.make_model()
        self.device = self.training.device
        self.start = {}  # {seed: {arena: its bytes at the start}}

    def begin(self, values):
        """Set flags and model to the start of a run."""
        model, training, steps = self.model, self.training, values["steps"]
        more = dict(warmup=round(values["warmup"] * steps), val_every=max(1, steps // 5))
        flags = with_values(training.flags, **values | more)
        training.flags = model.flags = flags
        training.steps = steps
        for name in ("adam m", "adam v"):
            self.device.zero(model.arenas[name])
        self.device.zero(model.adam.verdict)
        arenas = [name for name in ("parameters", "low bits") if name in model.arenas]
        if flags.seed not in self.start:
            model.set_parameters(draw_parameters(model.config, flags.seed))
            self.start = {flags.seed: {name: model.arenas[name].copy() for name in arenas}}
        for name in arenas:
            model.arenas[name][...] = self.start[flags.seed][name]
        model.step = 0
        model.graphs.clear()  # a setting may be an argument of a recorded launch
        self.training.train_data.restart()
        self.training.curve, self.training.seconds, self.training.validating = [], [], 0.0

    def run(self, values):
        """A run's result."""
        self.begin(values)
        training, begun = self.training, time.perf_counter()
        try:
            training.train()
            loss = training.curve[-1][1]
        except FloatingPointError:
            loss = float("inf")
        whole = time.perf_counter() - begun
        return dict(setting=values, loss=loss, curve=training.curve,
                    seconds=round(whole - training.validating, 3),
                    step_ms=round(1e3 * float(np.median(training.seconds)), 3),
                    device=str(self.device), tokens=training.total_batch)


# ---- The table

FIELDS = {"setting", "loss", "curve", "seconds", "step_ms", "device", "tokens"}  # of a result


def describe(values):
    rates = f"{values['learning_rate']:g}"
    if values["optimizer"] == "muon":
        rates = f"{values['muon_lr']:g} ({values['muon_scale']}), {rates}"
    usual = setting("adamw", 0, 0)
    for name in ("muon_momentum", "beta2", "weight_decay", "warmup"):
        if values[name] != usual[name]:
            rates += f", {name} {values[name]:g}"
    for name in sorted(values.keys() - usual.keys()):
        rates += f", {name} {values[name]}"
    return (f"{values['optimizer']} | {rates} | {values['schedule']} | {values['steps']} | "
            f"{values['seed']}")


def show(results):
    """Print the results as a table of Markdown."""
    print("| optimizer | rates | schedule | steps | seed | val loss | s | ms a step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in results:
        print(f"| {describe(row['setting'])} | {row['loss']:.4f} | {row['seconds']:.1f} | "
              f"{row['step_ms']:.2f} |")


def read(path):
    """The results in a file."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if not all(isinstance(row, dict) and FIELDS <= row.keys() for row in rows):
            raise ValueError(f"a line lacks one of {', '.join(sorted(FIELDS))}")
        return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: could not be read as results ({e}); expected lines of JSON, "
                        "which this program writes: give another --results") from None


def main(arguments=None):
    started = time.perf_counter()
    asked = parse_flags(__doc__, FLAGS, arguments)
    path = Path(asked.results)
    results = read(path)
    if asked.show:
        return show(results)
    if not (asked.train_data and asked.val_data):
        raise UserError("expected -i and -j, the token files to train and to validate on: python "
                        "-m dev.data.english and dev.data.fineweb make them")
    runs, longest = SimpleNamespace(kind=None), 0.0
    while left := remaining(asked.steps, results, asked.long):
        values = left[0]
        kind = kind_of(values, asked)
        if kind != runs.kind:
            runs = None
            gc.collect()  # frees its memory before the next model asks for its own
            runs = Runs(kind, asked)
        if time.perf_counter() - started + 1.2 * longest > asked.seconds:
            print(f"{len(left)} runs of this round are left: start again to continue")
            return None
        begun = time.perf_counter()
        results.append(runs.run(values))
        longest = max(longest, time.perf_counter() - begun)
        replace_file(path, ["".join(json.dumps(row) + "\n" for row in results).encode()])
        print(f"{describe(values)} | {results[-1]['loss']:.4f} | {results[-1]['seconds']:.1f} s | "
              f"{results[-1]['step_ms']:.2f} ms", flush=True)
    return show(results)


if __name__ == "__main__":
    run_main(main)
