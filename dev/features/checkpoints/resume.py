"""How a run resumes (-y 1): with its own flags, its model, and its place in the data.

A run that is killed and resumed ends with the same bits as one that was not, if the batch and the
ranks stay the same. With another -b the same tokens follow where that is possible. With another
number of ranks the data continues with the next file.
"""
import copy
import json
import os
import sys

import numpy as np

from dev.common.config import count_tokens
from dev.common.files import checked_header, paths_of
from dev.common.flags import with_older, with_values
from dev.features.checkpoints.run_json import read_notes
from dev.features.checkpoints.state_file import STATE, Damage, finite_sets, moments_of, read_states
from dev.features.terminal import say
from train_gpt2 import UserError

# The trainer's flags that a resumed run may change without a warning. Features declare theirs.
MAY_DIFFER = "val_every", "sample_every", "sample_tokens"
OF_RATE = "learning_rate", "schedule", "warmup", "final_fraction", "steps"

# ---- Before the model is made


def choose_checkpoint(folder, steps):
    """Choose what the run of a RunFolder resumes from, of whole checkpoints of these steps or its
    start, and restore the flags that were not given. Raises UserError."""
    flags = folder.flags
    if steps:
        folder.step, folder.checkpoint = steps[-1], folder.file("model", steps[-1])
    folder.notes_path = path = folder.file("run", folder.step or 0)
    folder.notes = read_notes(path, folder.table, folder.features)
    before = with_older(folder.notes["flags"], folder.table) if folder.notes else {}
    warn_of_unknown(path, before, folder.table, sys.stdout if flags.sample is None else sys.stderr)
    restored = [flag.key for flag in folder.table
                if flag.restored and flag.key in before and getattr(flags, flag.key, 0) is None]
    folder.flags = flags = with_values(flags, **{name: before[name] for name in restored})
    for flag in folder.table if flags.sample is None else ():
        if not flag.path:
            continue
        name, value = flag.key, before.get(flag.key)
        needed = name in restored and {
            "model": not steps and os.path.isabs(value or ""),
            "val_data": flags.val_every != 0}.get(name, True)
        files = paths_of(value) if value and flag.short in ("-i", "-j") else [value]
        if needed and value and not any(map(os.path.exists, files)):
            raise UserError(f"{path}: its run had {flag.short} {value}, which is not there: "
                            f"restore it, or give {flag.short}")
    total, every = before.get("steps") or 0, before.get("checkpoint_every")
    weights = folder.file("model", total)
    if every == 0 and total > (folder.step or 0) and weights.exists():  # it ended, without -n
        if flags.steps == total:
            folder.step, folder.checkpoint, folder.has_state = total, weights, False
        elif not steps:
            raise UserError(f"-y 1: nothing is left to do: {folder.path} has the weights of all "
                            f"{total} steps (-x {total}), and no state, which only -n writes: "
                            f"train on from them with -e {weights} and another -o")


def warn_of_unknown(path, before, table, file):
    """Warn of flags in a file that this program does not have, as those of a newer version."""
    known = {flag.key for flag in table}
    unknown = [f"{name} {json.dumps(value):.40}" for name, value in before.items()
               if name not in known and value is not None]
    if unknown:
        print(f"WARNING: {path}: there is no such flag as {', '.join(unknown)}: this run goes on "
              "without", file=file, flush=True)


def check_batch(folder, training):
    """Raise UserError if another -b, -t or number of ranks does not go with the -d of the run."""
    notes, flags, T, count = folder.notes or {}, training.flags, training.T, training.count
    before, size = notes.get("flags", {}), count * flags.batch_size * T
    total = before.get("total_batch")
    ranks = notes.get("ranks", count)
    pairs = [(f"-b {before.get('batch_size')}", f"-b {flags.batch_size}"),
             (f"-t {before.get('seq_len')}", f"-t {T}"),
             (f"{ranks} rank{'s' * (ranks > 1)}", f"{count} rank{'s' * (count > 1)}")]
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if total and total == flags.total_batch and total % size and changed:
        had, now = (" ".join(side) for side in zip(*changed))
        raise UserError(f"{now}: the run had {had}, and {total} tokens a step (-d), which is no "
                        f"multiple of ranks*B*T = {size}: expected {had}, or sizes that divide it")


# ---- When it is made


def resume(folder, training, model):
    """Set a model and its data to where the checkpoint was written; leave them at the start of a
    run that has none. Raises UserError if the run had other data or batches."""
    device, notes = model.device, folder.notes
    if notes:
        check_same_run(folder, training)
        set_products(device, notes["products"])
        if folder.step is None:
            say(f"resumed      | at the start: {folder.path} has no checkpoint, and the flags of "
                "its run (-y)")
    elif folder.checkpoint:
        say(f"WARNING: there is no {folder.notes_path}: flags and data of that run are not known")
    if folder.has_state:
        state = folder.file("state", folder.step)
        try:
            for _ in folder.parameters(folder.step, model.config):  # the state may replace them
                pass
            load_state(lambda rank: folder.file("state", folder.step, rank), model,
                       training.train_data, notes["flags"].get("batch_size") if notes else None)
        except Damage as e:
            raise UserError(f"{e}{folder.older(folder.step) if notes else ''}") from None
        say(f"resumed      | after step {folder.step}, from {state} (-y)")
    if folder.checkpoint:
        training.set_state(model, notes or {})
        model.step = folder.step
        if folder.step >= training.steps:
            folder.ended = True
            more = ("a larger -x goes on" if folder.has_state else
                    f"{folder.checkpoint} has the weights")
            say(f"nothing is left to do: all {folder.step} steps are made (-x {training.steps}); "
                f"{more}")


def set_products(device, products):
    """Make a device use the algorithms that the run used, if they are of this device."""
    of = products.get("of")
    if of and of == getattr(device, "cache", None):
        sets = {key: value for key, value in device.choices.items() if key.endswith("False)")}
        # An accumulating product uses the choice of the plain one.
        device.choices = sets | products["algorithms"]
    elif of:
        say(f"WARNING: algorithms of matrix products were chosen for {of}: this device chooses "
            "its own, and bits may differ")


def check_same_run(folder, training):
    """Raise UserError if the run had other data or batches, or is beyond -x. Warn if other flags
    have changed."""
    notes, path, step = folder.notes, folder.notes_path, folder.step or 0
    if step > training.steps:
        raise UserError(f"-x {training.steps}: expected {step} or more, the steps of "
                        f"{folder.checkpoint}")
    pairs = [(then, now[: len(then)])  # an older version has no hash
             for then, now in zip(notes["data"], folder.data)]
    if len(notes["data"]) != len(folder.data) or any(then != now for then, now in pairs):
        counts = f"{len(notes['data'])} files", f"{len(folder.data)} files"
        before, now = next((pair for pair in pairs if pair[0] != pair[1]), counts)
        raise UserError(f"{path}: of a run on {before}, and -i is {now}: expected the same names, "
                        "sizes and hashes of what the files hold")
    count = notes.get("ranks", folder.count)
    if folder.has_state:
        count = checked_header(folder.file("state", step), STATE)[2]
    declared = {flag.key: flag for flag in folder.table}
    for name, now in training.settled().items():
        flag = declared[name]
        before = notes["flags"].get(name, now)
        if name == "model" and before:
            # Once there is a checkpoint, it does not matter where the first weights were.
            short = os.path.basename if folder.checkpoint else os.path.abspath
            before, now = short(before), short(now)
        if before in (now, None if name == "model" else now):
            continue
        if flag.must_agree and not (count != folder.count and name == "total_batch"):
            raise UserError(f"{path}: of a run with {flag.short} {before}, and now it is {now}: "
                            "expected the same")
        may_differ = flag.may_differ
        if callable(may_differ):
            may_differ = may_differ(training.flags)
        if not may_differ and name not in MAY_DIFFER:
            say(f"WARNING: {flag.name} was {before} until step {step}, and is {now} from now on")
    if step:
        check_rate(training, notes["flags"], declared, step)


def check_rate(training, before, declared, step):
    """Warn if the next step has another learning rate than it had with the flags before."""
    now = training.settled()
    other = {name: before[name] for name in OF_RATE if before.get(name, now[name]) != now[name]}
    old = copy.copy(training)
    old.flags, old.steps = with_values(training.flags, **other), other.get("steps", training.steps)
    with np.errstate(all="ignore"):  # a run of warmup alone has no rate after its end
        rates = [f"{run.learning_rate(step):.2e}" for run in (old, training)]
    if rates[0] != rates[1]:
        flags = [" ".join(f"{declared[name].short} {values[name]}" for name in other)
                 for values in (before, now)]
        say(f"WARNING: the learning rate of step {step + 1} was {rates[0]} ({flags[0]}), and is "
            f"{rates[1]} now ({flags[1]})")


def load_state(path_of, model, data, had=None):
    """Set a model, and its position in the data, from the state files path_of(rank) of a run. had:
    that run's B, if it is known. Parameters stay as they are if the files have none. Raises Damage
    if a file is damaged or of other data, and UserError if the position does not fit this B."""
    c, P = model.config, len(data.paths)
    states = read_states(path_of, c)
    for state in states:
        if state.version != model.state_version:
            names = {1: "adamw", 2: "muon"}
            raise UserError(f"{state.path}: a state of --optimizer {names[state.version]}; "
                            f"expected one of --optimizer {names[model.state_version]}: give that "
                            "flag, or train on from the weights with -e and another -o")
        if state.shuffle != int(data.shuffle) or state.place >= P:
            raise Damage(f"{state.path}: with --shuffle {state.shuffle}, in file {state.place}; "
                         f"expected --shuffle {int(data.shuffle)} and one of the {P} files of -i")
    as_before, known = len(states) == model.count, model.rank < len(states)
    load_position(states[min(model.rank, len(states) - 1)], data, as_before, known, had)
    names = {row.name for row in c.parameter_table()}
    for tensors, kept in zip(finite_sets(states, c), (*moments_of(model), model.masters)):
        if kept is not model.masters:
            tensors = ((name, values) for name, values in tensors if name in names)
        model.set_tensors(tensors, kept)
    model.step = states[0].step
    if not as_before:
        say(f"WARNING: the run had {len(states)} ranks until step {model.step}, and has "
            f"{model.count} from now on: the data goes on with the next file, or with an only one "
            "from its beginning")


# ---- The position in the data


def load_position(state, data, as_before, known, had=None):
    """Set data's position to that of a state file. If the number of ranks has changed, not
    as_before, it is the start of the next file, in the rank's own order; not known: a new rank,
    which gets the order it would have had."""
    P, position, record = len(data.paths), data.position(), state.record
    if data.shuffle:
        if record["P"] != P or sorted(record["files"]) != list(range(P)):
            raise Damage(f"{state.path}: of other data than the {P} files of -i: expected those of "
                         "its run")
        if known:
            used = 624 if record["left"] == 1 else min(int(record["next"]), 624)
            position.files = record["files"].tolist()
            position.rng = "MT19937", record["key"], used
    if as_before:
        file = position.files[state.place]
        place, order = translated(state, data, file, had or data.own)
        data.files = position.files
        data.open(state.place)
        data.next = place
        if data.shuffle:  # otherwise open() has made it
            data.order = order
        data.rng.set_state(position.rng)
    else:
        data.files, data.place = position.files, state.place
        data.rng.set_state(position.rng)
        data.next_file()


def translated(state, data, file, had):
    """(batches of a file that are done, the order of all), from a state whose run had B = had. If B
    is smaller now, each of its batches becomes several, so that the same tokens follow; tokens that
    filled no batch of that run come last."""
    path, before = data.paths[file], data.size // data.own * had  # tokens of a batch of that run
    batches, done = (count_tokens(path, data.c)[0] - 1) // before, state.next * before
    whole = not data.shuffle or sorted(state.record["order"]) == list(range(batches))
    if state.next > batches or not whole:
        count = state.record["n"] if data.shuffle else state.next
        raise Damage(f"{state.path}: has {count} batches of file {state.place}, or an order that "
                     f"has one twice; -i, -b and -t make {batches}: expected those of its run")
    if data.shuffle and data.own != had and data.size > data.own * data.T:
        raise UserError(f"-b {data.own}: the run had -b {had}, and with --shuffle each rank has an "
                        f"order of its own for batches of that size: expected -b {had}, or another "
                        "number of ranks")
    if done % data.size or data.shuffle and before % data.size:
        raise UserError(f"-b {data.own}: the run had -b {had}, and stopped after {done:,} tokens "
                        f"of {path}, where no batch of -b {data.own} ends: expected -b {had}, or a "
                        "number that divides it")
    parts, order = before // data.size, []
    if data.shuffle:
        order = [i * parts + part for i in state.record["order"].tolist() for part in range(parts)]
        order += range(len(order), data.batches_of[file])
        if data.own != had:
            say(f"WARNING: the order of {path} stays, with each batch of -b {had} cut into "
                f"{parts}; files after it are shuffled in batches of -b {data.own}")
    return done // data.size, order
