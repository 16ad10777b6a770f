"""-e FOLDER: the newest complete checkpoint of a run.

A checkpoint is complete when it has a DONE file. A run without -n writes only its weights and no
such file; then its newest weights are taken, which are complete since a file appears when it is
written.
"""
import os
import sys
from pathlib import Path

from dev.common.flags import with_values
from dev.features.checkpoints.checkpoint_files import FILES, steps_of
from train_gpt2 import UserError


def newest_checkpoint(folder):
    """The path of the weights, or None if there are none."""
    folder = Path(folder)
    saved = steps_of(folder, r"model_(\d{8})\.bin")
    whole = [step for step in steps_of(folder, r"DONE_(\d{8})") if step in saved]
    steps = whole or saved
    return str(folder / FILES["model"].format(steps[-1])) if steps else None


def with_checkpoint(flags, kind):
    """The flags, with the newest checkpoint of an -e that is a run's folder. kind: the model's
    Config."""
    name = flags.model
    if not name or not os.path.isdir(name) or is_descriptor(name, kind):
        return flags
    found = newest_checkpoint(name)
    if found and flags.sample is not None:  # a training prints its model
        print(f"model {found} (-e)", file=sys.stderr, flush=True)
    return with_values(flags, model=found or name)


def is_descriptor(name, kind):
    """Whether it names a model from scratch, such as d12."""
    try:
        kind.from_descriptor(name)
    except UserError:
        return False
    return True
