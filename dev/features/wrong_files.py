"""Errors about -e, -i and -j say what a file of the wrong kind is (dev/common/files.py), and name
the command that makes a checkpoint, or a token file, of what was given."""
import os
import re
import shlex
from pathlib import Path

from dev.common.files import check_kind, header_of_kinds, paths_of
from dev.features.feature import Feature, Flag
from train_gpt2 import UserError

OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names on the hub without an owner
PREPARE = ("python", "prepro_tinyshakespeare.py", "--input")
ON_HUB = r"[\w-][\w.-]*/[\w-][\w.-]*"  # owner/name
def check_tokens(pattern, *kinds):
    """Raise UserError if what -i or -j names is missing, or no file of tokens of these kinds."""
    for path in paths_of(pattern) if pattern else ():
        check_kind(path, *kinds)
        try:
            header_of_kinds(path, *kinds)
        except UserError as e:
            if not os.path.isfile(path):
                raise
            raise UserError(f"{path}: is no token file; `{shlex.join([*PREPARE, path])}` makes "
                            "one from a text") from e


def remedy(name):
    """What to do about an -e that is no checkpoint, as the end of an error.
    "" if nobody knows."""
    path = Path(name)
    made = ("gpt2_124M.bin"
            if name == "gpt2" else f"{path.resolve().name.removesuffix('.safetensors')}.bin")
    convert = shlex.join(["python", "-m", "dev.tools.convert", name, made])
    if path.is_dir() and not (path / "config.json").is_file():
        return f"; {name} is a folder, and no run's: it has no model_*.bin"
    on_hub = name in OPENAI or re.fullmatch(ON_HUB, name) and not path.parent.is_dir()
    if path.is_dir() or on_hub or name.endswith(".safetensors"):
        return f"; `{convert}` makes a checkpoint of this model"
    return "" if path.exists() else f"; there is no file or folder {name}"


class Named:
    """Training that checks the kinds of -e, -i and -j."""

    def choose_model(self):
        name = self.flags.model
        if not (self.folder and self.folder.checkpoint):  # which the folder has checked
            check_kind(name, self.Model.Config.FILE)
        try:
            super().choose_model()
        except UserError as e:
            found = self.config is not None  # and something else is wrong
            raise UserError(str(e) if found or not name else f"{e}{remedy(name)}") from None

    def data_paths(self):
        flags = self.flags
        try:
            train, val = paths = super().data_paths()
        except UserError:  # of a name, perhaps, where the file itself is wrong
            check_tokens(flags.train_data or flags.val_data, *self.config.TOKEN_FILES)
            raise
        opened = [] if flags.overfit else [train]
        opened += [val] if flags.overfit or flags.val_every else []
        for path in (path for pattern in opened for path in paths_of(pattern)):
            check_kind(path, *self.config.TOKEN_FILES)
        return paths


FEATURE = Feature("files", training=Named, flags=(
    Flag("-e", "--model", "name", None, "checkpoint, or a run's folder: its newest; or, from "
         "scratch, {descriptors}, or layers x heads x channels, such as 6x6x384, with -t's "
         "positions, else 1,024 (default: {file} if it is here, else a small model on bytes: "
         "{small})", path=True,
         must_agree=True),))
