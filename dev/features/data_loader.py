"""Training on several token files, and --shuffle, in llm.c's random order.

-i may be a pattern such as 'data/fineweb_train_*.bin'. With --shuffle 1, the default for several
files, each epoch shuffles the files and the batches of each. Every rank has its own order.
"""
import os
from types import SimpleNamespace

import numpy as np

from dev.common.config import count_tokens, read_tokens
from dev.common.files import paths_of
from dev.features.feature import Feature, Flag
from train_gpt2 import DataLoader, UserError


def check_pair(given, paths):
    """Raise UserError if one path of a pair, to train and to validate on, was given and is a file,
    and the other is missing, but would match other files as a pattern. given: what the flags say,
    with None for the path that was derived."""
    for derived, path, other, flag in zip(given, paths, reversed(paths), ("-i", "-j")):
        if derived is None and os.path.exists(other) and paths_of(path) != [path]:
            raise UserError(f"{path}: does not exist; expected it beside {other}, or give {flag} "
                            "too")


class FilesLoader(DataLoader):
    """Batches of the token files that match a pattern, epoch after epoch: the trainer's loader of
    one of them after the other. The last, partial batch of each file is skipped."""

    def __init__(self, pattern, B, T, c, shuffle=None, rank=0, count=1):
        self.pattern, self.paths, self.c = pattern, paths_of(pattern), c
        self.rows = slice(rank * B, (rank + 1) * B)  # of a batch that all ranks share
        self.sizes = count * B, T
        self.rank = rank
        self.own = B  # rows of this rank
        self.shuffle = len(self.paths) > 1 if shuffle is None else shuffle
        self.rng = np.random.RandomState(42 + rank)
        self.files = self.permuted(range(len(self.paths)))
        self.path = None
        self.open(0)

    def __str__(self):
        if len(self.paths) == 1:
            return super().__str__()
        return f"{self.pattern}: {self.total:,} tokens in {len(self.paths)} files"

    def inputs(self):
        """The paths of all files that batches come from: the same on all ranks, and in a run that
        is resumed."""
        return self.paths

    def permuted(self, items):
        """The items as a list; with shuffle, in random order, by Fisher and Yates's method from the
        end with a Mersenne Twister, as in llm.c."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1) if self.shuffle else ():
            j = int(self.rng.randint(2**32, dtype=np.uint32)) % (i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def open(self, place):
        """Go to the first batch of the file at a place in this epoch's order."""
        self.place, path = place, self.paths[self.files[place]]
        if path != self.path:
            self.read(path)
        super().restart()
        self.order = self.permuted(range(self.batches_of[self.files[place]]))

    def read(self, path):
        """Become the trainer's loader of a file, and count the tokens and batches of all."""
        super().__init__(path, read_tokens(path, self.c), *self.sizes)
        counts = [count_tokens(each, self.c)[0] for each in self.paths]
        for each, count in zip(self.paths, counts):
            self.check(each, count)
        self.batches_of = [(n - 1) // self.size for n in counts]
        self.total, self.per_epoch = sum(counts), sum(self.batches_of)

    def restart(self):
        self.open(0)

    def batch(self, i):
        """This rank's rows of batch i."""
        tokens, targets = super().batch(i)
        start = i * self.size + self.rank * self.own * self.T
        self.where = f"{self.path}, tokens {start} to {start + self.own * self.T}"
        return tokens[self.rows], targets[self.rows]

    def position(self):
        """Where the next batch is, for a checkpoint."""
        return SimpleNamespace(place=self.place, next=self.next, files=self.files, order=self.order,
                               shuffle=self.shuffle, rng=self.rng.get_state())

    def next_batch(self):
        if self.next == len(self.order):
            self.next_file()
        return super().next_batch()

    def next_file(self):
        if self.place + 1 == len(self.files):
            self.files = self.permuted(self.files)
        self.open((self.place + 1) % len(self.files))


class Shuffled:
    """Training on several files."""
    Loader = FilesLoader

    def data_paths(self):
        given = self.flags.train_data, self.flags.val_data
        paths = super().data_paths()
        check_pair(given, paths)
        return paths

    def loader(self, path, trains):
        """As the trainer's, of several files; or the trainer's, if that is enough."""
        B, paths = self.flags.batch_size, paths_of(path)
        if trains:
            return self.Loader(path, B, self.T, self.config, self.flags.shuffle, self.rank,
                               self.count)
        if len(paths) == len(self.config.TOKEN_FILES) == 1 and self.Loader is FilesLoader:
            return super().loader(paths[0], trains)
        shortest = min(count_tokens(each, self.config)[0] for each in paths)
        return self.Loader(path, max(1, min(B, (shortest - 1) // self.T)), self.T, self.config, 0)

    def settled(self):
        return super().settled() | dict(shuffle=int(self.train_data.shuffle))


FEATURE = Feature("loader", training=Shuffled, flags=(
    Flag("-i", "--train-data", "name", None, "token file to train on, or a quoted pattern for "
         "several (default: tinyshakespeare, prepared if missing; its bytes for a model of own "
         "sizes)", path=True, may_differ=True),
    Flag("-j", "--val-data", "name", None, "token file to validate on, or a pattern (default: "
         "-i's, with val for train)", path=True, may_differ=True),
    Flag(None, "--shuffle", "switch", None, "1: batches in llm.c's random order (default: 1 for "
         "several files)", "data and model", must_agree=True)))
