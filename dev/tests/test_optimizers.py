"""Test dev/bench/optimizers.py: which runs it makes, in which order, and that a run is the one that
the trainer makes with the same flags."""
import re
from unittest import mock

from dev.bench import optimizers
from dev.tests.checks import check
from dev.tests.trainings import call, token_files

RATE = 0.02  # Muon's


def finish(a_round, losses):
    """Results of a round's runs, whose losses these are, in turn."""
    return [dict(setting=values, loss=loss) for values, loss in zip(a_round, losses, strict=True)]


def test_rounds():
    """With --long 1, after the table come seeds of the best setting of each optimizer, and Muon's
    with fewer steps, each run once; then nothing. The repository's rows have the first two
    rounds."""
    table = {"adamw": [(1, {}), (2, {}), (3, dict(schedule="wsd"))], "muon": [(4, {}), (5, {})]}
    with mock.patch.multiple(optimizers, LONG=table, LONG_SHARES={"adamw": (1,), "muon": (0.5, 1)}):
        first = optimizers.remaining(600, [], 1)
        check("the table", [(values["learning_rate"], values["muon_lr"], values["steps"])
                            for values in first] ==
              [(1, 0, 600), (2, 0, 600), (3, 0, 600), (2e-3, 4, 600), (2e-3, 5, 600)], first)
        some = finish(first[:2], (7.0, 6.0))
        check("what is left of it", optimizers.remaining(600, some, 1) == first[2:])
        results = finish(first, (7.0, 6.0, 9.0, 4.0, 3.0))
        second = optimizers.remaining(600, results, 1)
        wish = [("muon", 5, 300, 42)]
        for seed in (43, 44):
            wish += [("adamw", 0, 600, seed), ("muon", 5, 300, seed), ("muon", 5, 600, seed)]
        found = [(values["optimizer"], values["muon_lr"], values["steps"], values["seed"])
                 for values in second]
        check("seeds and shares", found == wish, found)
        check("AdamW's best", {values["learning_rate"] for values in second
                               if values["optimizer"] == "adamw"} == {2})
        check("the end", optimizers.remaining(600, results + finish(second, range(7)), 1) == [])
    check("another number of steps is another run",
          len(optimizers.remaining(300, results, 1)) == sum(map(len, optimizers.LONG.values())))
    rows = optimizers.read(optimizers.Path(optimizers.__file__).with_suffix(".jsonl"))
    left = optimizers.remaining(300, rows, 0)
    check("the first two rounds were measured", all(
        (values["seed"], values["steps"]) != (42, 300) for values in left), left)


def trained(folder, *flags):
    """The last validation loss that the trainer prints."""
    status, text, error = call(
        "--device", "cpu", "--dtype", "fp32", "-e", "2x2x64", "-b", 2, "-t", 8, "-d", 16, "-x", 5,
        "-v", 5, "-m", 3, "-s", 0, "-i", folder / "part_train_0.bin", "-j",
        folder / "part_val_0.bin", "-q", 0, "-c", 0.1, "--beta1", 0.9, "--beta2", 0.95, "--clip", 1,
        "--shuffle", 0, *flags)
    check(f"{flags}: trains", status == 0, error)
    return float(re.findall(r"val loss +([\d.]+)", text)[-1])


def test_runs(folder):
    """Runs on one model, one after another, have the losses of separate runs of the trainer; so
    neither keeps anything of the one before, and Muon's coefficients are those of the setting,
    or Jordan's."""
    token_files(folder)
    table = {"adamw": [(0.01, dict(schedule="wsd", warmup=0.4))],
             "muon": [(RATE, dict(learning_rate=0.01, muon_coefficients="polar-express")),
                      (RATE, dict(learning_rate=0.01)),
                      (RATE, dict(learning_rate=0.01, muon_momentum=0.5))]}
    path = folder / "results.jsonl"
    asked = ("--long", 1, "-x", 5, "--device", "cpu", "--dtype", "fp32", "-e", "2x2x64", "-b", 2,
             "-t", 8, "-m", 3, "-i", folder / "part_train_0.bin", "-j", folder / "part_val_0.bin",
             "--results", path)
    muon = ("--optimizer", "muon", "--muon-lr", RATE, "-l", 0.01, "-k", "linear", "-u", 0)
    with mock.patch.multiple(optimizers, LONG=table, LONG_SHARES=dict(adamw=(1,)), SEEDS=(42,)):
        status, text, error = call(*asked, program="dev.bench.optimizers")
        check("status", status == 0, error)
        rows = optimizers.read(path)
        check("again: nothing is left to run", call(
            *asked, program="dev.bench.optimizers")[1].count("\n") == 2 + len(rows))
    wish = [trained(folder, "-l", 0.01, "-k", "wsd", "-u", 2, "--seed", 42)]
    wish += [trained(folder, *muon, "--seed", 42, *more) for more in (
        ("--muon-coefficients", "polar-express"), ("--muon-coefficients", "jordan"),
        ("--muon-coefficients", "jordan", "--muon-momentum", 0.5))]
    check("all losses differ", len(set(wish)) == 4, wish)
    for row, loss in zip(rows, wish, strict=True):
        name = optimizers.describe(row["setting"])
        check(name, abs(row["loss"] - loss) < 1e-4, (row["loss"], loss))
        check(f"{name}: in the table", f"{name} | {row['loss']:.4f}" in text)
