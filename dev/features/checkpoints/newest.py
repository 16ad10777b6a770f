"""-e FOLDER: the newest complete checkpoint of a run.

A checkpoint is complete when it has a DONE file. A run without -n writes only its weights and no
such file; then its newest weights are taken, which are complete since a file appears when it is
written.
"""
import os
import sys
from pathlib import Path

from dev.features.checkpoints.checkpoint_files import FILES, steps_of
from dev.features.declare import Feature
from prepro_tinyshakespeare import UserError


def newest_checkpoint(folder):
    """The path of the weights, or None if there are none."""
    folder = Path(folder)
    saved = steps_of(folder, r"model_(\d{8})\.bin")
    whole = [step for step in steps_of(folder, r"DONE_(\d{8})") if step in saved]
    steps = whole or saved
    return str(folder / FILES["model"].format(steps[-1])) if steps else None


class Newest:
    """Training that starts from a run's folder."""

    def choose_model(self):
        name = self.flags.model
        if name and os.path.isdir(name) and not self.is_descriptor(name):
            found = newest_checkpoint(name)
            self.flags.model = found or name
            if found and self.flags.sample is not None:  # a training prints its model
                print(f"model {found} (-e)", file=sys.stderr, flush=True)
        super().choose_model()

    def is_descriptor(self, name):
        """Whether it names a model from scratch, such as d12."""
        try:
            self.Model.Config.from_descriptor(name)
        except UserError:
            return False
        return True


FEATURE = Feature("newest", training=Newest)
