"""-e 6x6x384: a model of any sizes, layers x heads x channels, with as many words as its data.

V is the size of the vocabulary beside the token file (dev/data/vocabulary.py), or GPT-2's if there
is none; Vp is V, padded. maxT is -t's T, or 1,024. A depth such as d12 has GPT-2's sizes, and its V
comes from the data, too. Without -i, a model of own sizes learns the bytes of the text that a first
run learns, and so does a checkpoint whose words are the bytes.
"""
import dataclasses

from dev.common.config import Config
from dev.data.first_text import first_text
from dev.features.feature import Feature


class OwnSizes:
    """Training of a model whose sizes are not all in its name."""
    reads_bytes = False  # without -i
    found = None  # the paths of the data

    def choose_model(self):
        super().choose_model()
        if self.flags.sample is not None:  # which needs no data
            return
        self.reads_bytes = self.all_own() or self.vocabulary and self.vocabulary.kind == "bytes"
        self.data_paths()  # finds the vocabulary beside the data, and whether it is a checkpoint's
        if self.vocabulary and not self.from_file:
            self.config = self.config.with_words(len(self.vocabulary.words))

    def all_own(self):
        return not self.from_file and "x" in self.name

    def find_config(self):
        kind = self.Model.Config
        c = super().find_config() if self.from_file else kind.from_descriptor(self.name)
        T = self.flags.seq_len or self.row
        if self.all_own() and T and type(c) is Config:  # others need no positions
            c = dataclasses.replace(c, maxT=T)
        return c

    def data_paths(self):
        """As Training.data_paths, looked up once."""
        flags = self.flags
        if not self.found:
            on_bytes = self.reads_bytes and not (flags.train_data or flags.val_data)
            self.found = first_text() if on_bytes else super().data_paths()
        return self.found

    def settled(self):
        train_path, val_path = self.found
        return super().settled() | dict(train_data=train_path, val_data=val_path)


FEATURE = Feature("own sizes", training=OwnSizes)
