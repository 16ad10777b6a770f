"""--config FILE: flags from a file. Flags on the command line win.

A .toml file has a line for each flag, under its long name, with - or _:

    model = "d12"
    learning-rate = 6e-4
    batch_size = 32
    shuffle = true                # or 1

A .json file is a run's own run_*.json: its flags, except its folder, its machine (--device, --gpus)
and what is done instead of training. So `--config log/run_00000000.json -o again` repeats the run
of log/. With -y 1 the flags of a file count as given: they replace those of the run.
"""
import argparse
import difflib
import json
from pathlib import Path

from dev.common.flags import TYPES, with_values
from dev.features.checkpoints.run_json import is_flag
from dev.features.feature import Feature, Flag
from train_gpt2 import UserError


def parse(path):
    """{name: value} of a file. Raises UserError."""
    try:
        text = Path(path).read_text("utf-8-sig")
        if path.endswith(".json"):
            return json.loads(text)
        import tomllib
        return tomllib.loads(text)
    except ModuleNotFoundError:
        raise UserError(f"--config {path}: Python before 3.11 reads no TOML: expected a newer "
                        "one, or a .json file") from None
    except OSError as e:
        raise UserError(f"--config {path}: could not be read ({e.strerror}); expected a .toml "
                        "file, or a run_*.json") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: is no text in UTF-8; expected a .toml file, or a "
                        "run_*.json") from None
    except (ValueError, RecursionError) as e:
        kind = "a run_*.json" if path.endswith(".json") else 'TOML such as learning-rate = 6e-4'
        raise UserError(f"--config {path}: {e}; expected {kind}") from None


def flags_of_run(path, notes, table):
    """{name: value} of the flags in a run_*.json that another run may have. Raises UserError."""
    flags = notes.get("flags") if isinstance(notes, dict) else None
    if not isinstance(flags, dict):
        raise UserError(f'--config {path}: has no "flags"; expected a run_*.json of this program, '
                        "or a .toml file")
    taken = {flag.key for flag in table if flag.restored and flag.key not in ("output", "resume")
             and flag.group != "instead of training"}
    known = {flag.key for flag in table}
    return {name: value for name, value in flags.items()
            if value is not None and (name in taken or name not in known)}


def expected(flag, value):
    """What a flag may have in a file, if it cannot have this value."""
    kind = TYPES.get(flag.kind, flag.kind)
    if isinstance(kind, tuple):
        return " or ".join(f'"{choice}"' for choice in kind)
    if flag.kind == "switch":
        return "true or false"
    try:
        kind(str(value))
    except argparse.ArgumentTypeError as e:  # a number out of range, for example
        return str(e).partition("expected ")[2]
    except ValueError:
        pass
    return dict(int="a whole number", float="a number").get(kind.__name__, "text in quotes")


def value_of(where, flag, value):
    """A value from a file, as the command line would have it. Raises UserError."""
    if flag.kind == "switch" and isinstance(value, bool):
        return int(value)
    if not is_flag(flag.kind, value):
        shown = json.dumps(value, default=str)
        raise UserError(f"{where} is {shown:.60}; expected {expected(flag, value)}")
    kind = TYPES.get(flag.kind, flag.kind)
    return value if isinstance(kind, tuple) else kind(str(value))


def with_file(flags, table):
    """The flags, and of those that were not given what the file of --config has. Raises
    UserError."""
    path = flags.config
    if path is None:
        return flags
    found = parse(path)
    if path.endswith(".json"):
        found = flags_of_run(path, found, table)
    by_key = {flag.key: flag for flag in table if flag.key != "config"}
    seen, added = {}, dict(config=None)  # run_*.json has the flags themselves
    for name, value in found.items():
        key = name.replace("-", "_")
        if key not in by_key:
            near = difflib.get_close_matches(key, by_key, 1)
            hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
            raise UserError(f"--config {path}: {name}: there is no such flag; expected long names "
                            f"of --help, such as learning-rate{hint}")
        if key in seen:
            raise UserError(f"--config {path}: {name} and {seen[key]} are the same flag: expected "
                            "one of them")
        seen[key] = name
        value = value_of(f"--config {path}: {name}", by_key[key], value)
        if getattr(flags, key) is None:
            added[key] = value
    return with_values(flags, **added)


FEATURE = Feature("config", lambda flags, ranks: False, flags=(
    Flag(None, "--config", "name", None, "flags from a TOML file (long names: learning-rate = "
         "6e-4), or from a run's run_*.json; those on the command line win",
         "data and model", after="--output", replayed=False, restored=False, may_differ=True),))
