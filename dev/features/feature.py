"""What a feature says of itself. Its module ends with a Feature, and order.py finds all of them: it
makes --help, a run's classes and all other tables from them."""
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common import gpus
from dev.common.flags import Flag


def always(*args):
    return True


class Pair(NamedTuple):
    """Classes for two features that must know each other: they go in front of both."""
    other: str  # the name of the other feature, or of an architecture
    model: type = None
    training: type = None
    device: type = None
    observer: type = None
    sources: tuple = ()
    compiled: Callable = always
    chapter: str = ""


class Feature(NamedTuple):
    name: str
    asked: Callable = always  # (flags, ranks) -> whether to use it; ranks is None for one process
    # Classes without a base, in front of GPT2 and Training of base.py and of a device of
    # devices.py. device may be a function of the flags, which returns such a class or None.
    model: type = None
    training: type = None
    device: object = None
    observer: type = None  # it has a method for each thing of Training.tell that it listens to
    only: str = ""  # the one architecture that it is for
    flags: tuple[Flag, ...] = ()
    sources: tuple = ()  # CUDA files, which are compiled behind kernels.cu
    compiled: Callable = always  # (flags, config) -> whether they are
    chapter: str = ""  # what a run on a GPU calls it, if it is there for speed alone
    pairs: tuple = ()
    excludes: dict = {}  # {feature or architecture that it does not go with: why, and what to do}
    refuses: Callable = lambda flags: ""  # (flags) -> why they do not go together, or ""
    saved: tuple = ()  # files of a run's folder: ema of ema_00000500.bin
    outlasts: tuple = ()  # the same for files that stay when their step's checkpoint is removed
    left: str = ""  # a regular expression of files that a kill leaves there
    state: dict = {}  # {field of run_*.json: (whether a value is good, what is expected)}


def trains(flags):
    return flags.sample is None and not flags.dry_run


def is_fast(flags):
    return flags.device == "cuda" and not flags.plain and not getattr(flags, "exact", 0)


def is_hopper(flags, c):
    """Whether the GPU has what our own products use, and attention its kernels for Hopper."""
    return gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8)


def kernels_of(file):
    """The CUDA file beside a feature's module, whose __file__ is given."""
    return Path(file).resolve().with_suffix(".cu")


def header_switches(macro, path, *included):
    """Have kernels.cu include a file, which may include others, where it asks for this macro.
    Compilers' caches know flags, but not included files: so the files' checksum is a flag."""
    version = zlib.crc32(b"".join(each.read_bytes() for each in (path, *included)))
    return [f"-I{path.parent}", f"-D{macro}=<{path.name}>", f"-D{macro}_VERSION={version}"]


def numbers(values, shape):
    """Whether values, from JSON, are numbers of this shape."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        return False
    return array.dtype.kind in "iuf" and array.shape == shape


def stack(base, classes, own=()):
    """A subclass of base, with these classes in front of it, the first outermost, and own
    attributes."""
    return type(base.__name__, (*filter(None, classes), base), dict(own))
