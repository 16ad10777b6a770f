"""Results that take long to compute, such as compiled kernels, are kept in ~/.cache/train_gpt2."""
import json
import os
from pathlib import Path

from prepro_tinyshakespeare import UserError, replace_file


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"


def read_cache(name):
    """The dict that is cached under a name, or {}."""
    try:
        return json.loads((cache_folder() / f"{name}.json").read_text())
    except (OSError, ValueError):  # not there yet, or damaged
        return {}


def write_cache(name, values):
    """Merge a dict into the one cached under a name, if the folder can be written."""
    try:
        text = json.dumps(read_cache(name) | values)
        replace_file(cache_folder() / f"{name}.json", [text.encode()])
    except (OSError, UserError):
        pass
