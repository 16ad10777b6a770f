"""Where a run finds its tokens."""
import os

from dev.data.first_text import prepare_repository
from dev.data.text import both
from prepro_tinyshakespeare import prepare_tinyshakespeare
from train_gpt2 import DATA, UserError, other_part

SPELLINGS = [DATA, *(f"data/{name}/{name}_{{}}.bin"  # as prepro's --name writes them
                     for name in ("tinyshakespeare", "tiny_shakespeare"))]


def data_paths(train, val):
    """The paths of the tokens to train and to validate on. If one is None, it is named like the
    other: see other_part. If both are None, they are tinyshakespeare's, in the spelling that was
    written last. It is prepared if it is missing; without a network they are the bytes of this
    program's own text. Raises UserError."""
    if train or val:
        return [train or other_part(val, "val", "train"), val or other_part(train, "train", "val")]
    found = [paths for paths in map(both, SPELLINGS) if all(map(os.path.exists, paths))]
    if found:
        return max(found, key=lambda paths: os.path.getmtime(paths[0]))
    try:
        prepare_tinyshakespeare()
        return both(DATA)
    except UserError as e:
        print(f"WARNING: {e}. Training on the bytes of this program's own text instead.")
    return prepare_repository()
