"""What features and tools ask of any architecture: the trainer's Config and its files behind names
that dev/llama3 has, too."""
import dataclasses
import re

import numpy as np

import train_gpt2
from dev.common.files import header_of_kinds
from train_gpt2 import (CHECKPOINT, EOT, HEADER_BYTES, KERNELS, STORED, TOKENS, UserError,
                        check_config, check_size, check_tokens, gpt2_encoding, make_header,
                        matrices, sizes_of_depth, sizes_of_file)


def padded(V):
    """V rounded up to Vp as in llm.c, to a multiple of 128."""
    return -(-V // 128) * 128


def sizes_of(descriptor, forms):
    """The numbers of a descriptor such as 6x6x384, or None if it is no such one. forms: what they
    may be, {"LxNHxC": an example}. Raises UserError if there are more or fewer."""
    if not re.fullmatch(r"\d+(x\d+)+", descriptor):
        return None
    sizes = [int(size) for size in descriptor.split("x")]
    if len(sizes) not in {form.count("x") + 1 for form in forms}:
        wish = " or ".join(f"{form}, such as {example}" for form, example in forms.items())
        raise UserError(f"-e {descriptor}: has {len(sizes)} sizes; expected {wish}")
    return sizes


class Config(train_gpt2.Config):
    """GPT-2's sizes and tables, with its files."""
    FILE = CHECKPOINT
    STORED = STORED
    TOKEN_FILES = {TOKENS: np.dtype("<u2")}  # the numbers of a token file, by its kind
    PADDED = ("wte",)  # parameters whose rows are words; those beyond V are zeros
    SOURCES = (KERNELS,)
    MODELS = ("gpt2_124M.bin", "d12")  # without -e: the file if it is here, else d12
    EOT = EOT
    encoding = staticmethod(gpt2_encoding)

    @classmethod
    def from_descriptor(cls, descriptor):
        """As the trainer's; and the config of any sizes, for "LxNHxC". V and maxT are GPT-2's: of
        the data's, features/own_sizes.py knows. Raises UserError."""
        sizes = sizes_of(descriptor, {"LxNHxC": "6x6x384"})
        if not sizes:
            try:
                return cls(**sizes_of_depth(descriptor))
            except UserError as e:
                raise UserError(f"{e}, or layers x heads x channels, such as 6x6x384") from None
        L, NH, C = sizes
        c = cls(L=L, NH=NH, C=C)
        c.check(f"-e {descriptor}")
        return c

    @classmethod
    def from_file(cls, path):
        """The config of a checkpoint. Raises UserError."""
        return cls(**sizes_of_file(path))

    def with_words(self, V):
        """The same sizes for a vocabulary of V words."""
        return dataclasses.replace(self, V=V, Vp=padded(V))

    @property
    def NKV(self):
        """Heads of keys and values: each query head has its own."""
        return self.NH

    def check(self, path):
        """Raise UserError unless the sizes make a model."""
        check_config(self, path)

    def file_table(self, real=np.float32, header=None):
        """The tensors of a checkpoint with this header."""
        return self.parameter_table(real)

    def file_parts(self, views, real=np.float32):
        """A checkpoint's arrays, matrix by matrix, from views of parameters."""
        for row in self.file_table(real):
            yield from matrices(getattr(views, row.name))

    def headers(self, version):
        """A checkpoint's headers."""
        return [make_header(self.FILE.magic, version, *dataclasses.astuple(self))]

    def read_parameters(self, path):
        return train_gpt2.read_parameters(path, self)

    def checkpoint_parts(self, params, real):
        return train_gpt2.checkpoint_parts(self, params, real)


def read_parameters(path, c):
    """(name, values) of a checkpoint's tensors, mapped into memory as stored."""
    return c.read_parameters(path)


def checkpoint_parts(c, params, real):
    """A checkpoint: its headers, then the tensors."""
    return c.checkpoint_parts(params, real)


def draw_parameters(c, seed):
    """As train_gpt2.draw_parameters, with zeros for all rows that are no words."""
    for name, values in train_gpt2.draw_parameters(c, seed):
        if name in c.PADDED:
            values[c.V :] = 0
        yield name, values


def count_tokens(path, c=Config):
    """(number of tokens, their NumPy type) of a token file."""
    header = header_of_kinds(path, *c.TOKEN_FILES)
    kind = next(kind for kind in c.TOKEN_FILES if kind.magic == header[0])
    dtype = c.TOKEN_FILES[kind]
    check_size(path, kind, HEADER_BYTES + dtype.itemsize * header[2])
    return header[2], dtype


def read_tokens(path, c):
    """The tokens of a token file, mapped into memory. Raises UserError."""
    count, dtype = count_tokens(path, c)
    if dtype == c.TOKEN_FILES[TOKENS]:
        return train_gpt2.read_tokens(path, c.V)
    tokens = np.memmap(path, dtype, "r", offset=HEADER_BYTES) if count else np.zeros(0, dtype)
    check_tokens(path, tokens, c.V)
    return tokens
