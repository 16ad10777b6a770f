"""run_00000500.json, a checkpoint's notes: what a run needs to resume, and llm.c's files have no
place for. Its fields are in FIELDS, and in the declarations of features as state.
"""
import argparse
import json
import os

from dev.common.flags import TYPES
from train_gpt2 import UserError


def from_anywhere(name, value):
    """A flag's path or pattern, made absolute, to be found from any folder."""
    if value is None:
        return value
    if name == "model" and not (os.path.isfile(value) or value.endswith(".bin")):
        return value
    return os.path.join(os.getcwd(), value)


def notes_of(training, model, data, table):
    """The notes of a run. data: [[name, bytes, hash], ...] of its token files; table: all Flags."""
    device, paths = model.device, {flag.key for flag in table if flag.path}
    return dict(step=model.step, ranks=training.count,
                flags={name: from_anywhere(name, x) if name in paths else x
                       for name, x in training.settled().items()},
                data=data, **training.state(model),
                products=dict(of=getattr(device, "cache", None),
                              algorithms=dict(getattr(device, "choices", {}))))


# ---- Reading, which checks every field


def is_flag(kind, value):
    """Whether a flag of this kind, a type or choices, may have a value."""
    kind = TYPES.get(kind, kind)
    if value is None or isinstance(kind, tuple):
        return value is None or value in kind
    try:
        return not isinstance(value, bool) and kind(str(value)) == value
    except (argparse.ArgumentTypeError, ValueError):
        return False


def is_data(files):
    kinds = [str, int], [str, int, str]
    return isinstance(files, list) and all(
        isinstance(file, list) and [type(x) for x in file] in kinds for file in files)


def is_choice(products):
    """Whether these are a device and the algorithms that it chose for products."""
    if not (isinstance(products, dict) and isinstance(products.get("algorithms"), dict)):
        return False
    return isinstance(products.get("of"), str | None) and all(
        isinstance(x, list) and all(type(number) is int and 0 <= number < 2**64 for number in x)
        for x in products["algorithms"].values())


FIELDS = {  # {name: (whether a value is good, what is expected)}
    "flags": (lambda x: isinstance(x, dict), "names and values"),
    "data": (is_data, "[[name, bytes, hash], ...]"),
    "products": (is_choice, '{"of": a device, "algorithms": {product: whole numbers}}')}


def read_notes(path, table, features=()):
    """The notes in a file, or None if it does not exist. table: all Flags; features: whose state it
    may have. Raises UserError."""
    def wrong(what):
        return UserError(f"{path}: {what}: restore it, or remove it to go on without")

    try:
        notes = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise wrong(f"could not be read ({e})") from None
    if not isinstance(notes, dict):
        raise wrong(f"is {json.dumps(notes):.40}; expected the fields {', '.join(FIELDS)}")
    state = {name: row for feature in features for name, row in feature.state.items()
             if name in notes}
    fields = [(name, notes.get(name), good(notes.get(name)), wish)
              for name, (good, wish) in (FIELDS | state).items()]
    for flag in table if isinstance(notes.get("flags"), dict) else ():
        value = notes["flags"].get(flag.key)
        fields.append((f"flags.{flag.key}", value, is_flag(flag.kind, value),
                       f"a value that {flag.short if flag.must_agree else flag.name} may have"))
    for name, value, good, wish in fields:
        if not good:
            there = name in notes or "." in name
            found = f"is {json.dumps(value):.40}" if there else "is missing"
            raise wrong(f"{name} {found}; expected {wish}")
    return notes
