"""Results that take long to compute, such as compiled kernels, are kept in ~/.cache/train_gpt2."""
import json
import os
from pathlib import Path

from train_gpt2 import UserError, replace_file


def cache_folder():
    """Raises UserError if there is no home folder either. A folder that others can write would not
    do: they could put a library there."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"
    except RuntimeError:  # as in a container that runs as a user whom it does not know
        raise UserError(f"HOME is not set, and user {os.getuid()} has no home folder, so nothing "
                        "can be cached; set XDG_CACHE_HOME to a folder that can be "
                        "written") from None


def read_cache(name):
    """The dict that is cached under a name, or {}."""
    try:
        found = json.loads((cache_folder() / f"{name}.json").read_text())
    except (OSError, ValueError, UserError):  # not there yet, or damaged, or no folder for it
        return {}
    return found if isinstance(found, dict) else {}


def write_cache(name, values):
    """Merge a dict into the one cached under a name, if the folder can be written."""
    try:
        text = json.dumps(read_cache(name) | values)
        replace_file(cache_folder() / f"{name}.json", [text.encode()])
    except (OSError, UserError):
        pass
