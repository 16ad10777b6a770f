"""llm.c's state files (sections a and i of its formats), read with struct alone, and a loader's way
through the training files (section f), counted again: nothing here is shared with the trainer."""
import struct

import numpy as np

from dev.tests.jobs import COUNTS

# The fixture's tensors in a file's order, (matrices, numbers of one): Vp = 384, maxT = 40, L = 2, C
# = 64
TENSORS = [(1, 384 * 64), (1, 40 * 64), (2, 64), (2, 64), (2, 192 * 64), (2, 192), (2, 64 * 64),
           (2, 64), (2, 64),
           (2, 64), (2, 256 * 64), (2, 256), (2, 64 * 256), (2, 64), (1, 64), (1, 64)]


def parse_state(path):
    """The fields of a state file of one process, read with struct alone."""
    data, fields, at = path.read_bytes(), {}, 1024
    ints = struct.unpack("<256i", data[:1024])
    fields["header"] = ints[:6]
    fields["step"] = ints[10]
    fields["rng"], fields["rng_before"] = struct.unpack("<2Q", data[80:96])
    fields["shard"], fields["sample"] = struct.unpack("<2Q", data[120:136])
    named = {0, 1, 2, 3, 4, 5, 10, 20, 21, 22, 23, 30, 31, 32, 33}
    fields["zeros"] = [i for i, x in enumerate(ints) if x and i not in named]
    return fields, data, at


def read_state(path, count=1, rank=0, zero=0):
    """The fields of a rank's state file, and its m, v and parameters: each the tensors (matrices,
    numbers of one); with ZeRO the pieces of all matrices, and behind those of rank 0 the tails."""
    fields, data, at = parse_state(path)
    shapes, arrays = TENSORS, []
    if zero:
        shapes = [(n, size // (8 * count) * 8) for n, size in TENSORS]
        tails = [(n, size - count * piece) for (n, size), (_, piece) in zip(TENSORS, shapes)]
        shapes += [(n, tail) for n, tail in tails if tail and not rank]
    for n, size in 3 * shapes:
        arrays.append(np.frombuffer(data, "<f4", n * size, at).reshape(n, size))
        at += 4 * n * size
    if fields["header"][5]:
        fields["shards"] = struct.unpack_from("<Q3i", data, at)
        [n] = struct.unpack_from("<Q", data, at + 20)
        fields["order"], at = struct.unpack_from(f"<{n}i", data, at + 28), at + 28 + 4 * n
        fields["twister"] = struct.unpack_from("<QiI624I2I", data, at)
        at += 2520
    assert at == len(data), f"{path}: {len(data)} bytes, expected {at}"
    return fields, [arrays[i : i + len(shapes)] for i in range(0, len(arrays), len(shapes))]


class Walk:
    """A rank's way through the training files."""

    def __init__(self, rank, ranks, shuffle, B=1, T=8, counts=COUNTS):
        self.twister, self.shuffle = np.random.RandomState(42 + rank), shuffle
        self.tokens, self.counts = ranks * B * T, counts
        self.shards, self.shard = self.permuted([0, 1, 2]), -1
        self.next_shard()

    def permuted(self, items):
        for i in range(len(items) - 1, 0, -1) if self.shuffle else ():
            j = int(np.frombuffer(self.twister.bytes(4), "<u4")[0]) % (i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def next_shard(self):
        if self.shard == 2:
            self.shards = self.permuted(self.shards)
        self.shard, self.sample = (self.shard + 1) % 3, 0
        count = self.counts[self.shards[self.shard]]
        self.order = self.permuted([*range((count - 1) // self.tokens)])

    def advance(self, samples):
        for _ in range(samples):
            if self.sample == len(self.order):
                self.next_shard()
            self.sample += 1
        return self

    def state(self):
        """Shard, sample, and what a shuffle is at."""
        _, key, used, *_ = self.twister.get_state()
        return [self.shard, self.sample,
                *self.shuffle * (3, *self.shards, *self.order, 0, max(1, 625 - used), used, *key, 0,
                                  0x9908B0DF)]


def place_of(fields):
    """The same of a state file."""
    shuffle = fields["header"][5] and (*fields["shards"], *fields["order"], *fields["twister"])
    return [fields["shard"], fields["sample"], *(shuffle or ())]
