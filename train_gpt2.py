"""Train GPT-2 from raw kernels.

    pip install -r requirements.txt && python train_gpt2.py

Read this file from top to bottom, with kernels.cu beside it: the model as tables; each layer
forward beside the same layer backward; the update; the training loop. You may stop there. Then
comes what these use: the GPU, files and batches, a sample, the flags. The last section, "Faster",
only adds speed; `--plain 1` leaves it out. Everything else is under dev/: dev/features.py lists it.
An error that the user can fix is a UserError, one line.

Sizes have the same letters everywhere:

    B   sequences in a batch            L   layers
    T   tokens in a sequence            NH  attention heads
    N   tokens in a batch, B*T          C   channels of a token; OC of a linear layer's output
    V   words of the vocabulary         HS  channels of a head, C/NH
    Vp  V padded, so that the matrix product over it is fast

A kernel is a C++ function that a GPU runs many times at once:

    thread         One run of the function. Its index tells it which part of the work to do.
    warp           32 threads, its lanes, which execute each instruction together and should load
                   neighbouring numbers.
    block          Up to 1,024 threads on one multiprocessor. They can wait for each other at a
                   barrier.
    shared memory  Some 200 KB of fast memory on each multiprocessor, which the threads of a block
                   share.
    grid           All blocks of a launch. The GPU's 100 or so multiprocessors take them in any
                   order.

Version 1 of each kernel in the kernel lab is the loop that one would write first: begin there.
"""
import argparse
import bisect
import contextlib
import ctypes
import dataclasses
import functools
import glob
import itertools
import json
import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from prepro_tinyshakespeare import (EOT, UserError, byte_encoding, data_paths, gpt2_encoding,
                                    make_header, replace_file, run)
import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

HERE = Path(__file__).resolve().parent

# ---- The model: its sizes, and tables of all that it keeps in memory

BF16 = np.uint16  # NumPy has no bfloat16, so an array holds its bits: the upper half of an fp32's
LOW = np.int16  # the lower half of an fp32's bits, signed: see kept_as


class Row(NamedTuple):
    """A tensor, or, with layers, one for each layer."""
    name: str
    shape: tuple
    dtype: type = np.float32
    layers: int = 0
    mean: float = 0.0  # a parameter starts as mean + std * normal
    std: float = 0.0
    decay: bool = False  # weight decay applies
    matrix: bool = False  # a matrix product sets its gradient; kernels add to any other

    @property
    def size(self):
        return math.prod(self.shape) * max(1, self.layers)

    @property
    def nbytes(self):
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def whole_shape(self):
        return (self.layers, *self.shape) if self.layers else self.shape


ALIGN = 64  # bytes. C is a multiple of 32, so parameters have no gaps, as in a checkpoint.
LOGIT_ROWS = 8192  # logits are computed for at least this many tokens at a time
PARTIAL_ROWS = 256  # layernorm_backward leaves at most this many partial sums a column
NORM_BLOCKS = 1024  # the most blocks that share the sum of the gradient's norm
ADAMW = ("learning_rate", "rate1", "rate2", "correction1", "correction2", "eps", "weight_decay",
         "clip", "seed", "step")  # the fields of kernels.cu's struct


class Verdict(NamedTuple):
    """What kernels.cu decides about a step: whether to update, and whether to stop the run."""
    norm: float
    loss: float
    update: float
    stopped: float


class FileKind(NamedTuple):
    """A kind of file: its name, how its header begins, and what to tell the user if it is bad."""
    name: str
    magic: int
    versions: tuple
    remedy: str


HEADER_BYTES = 1024
TOKENS = FileKind("token file", 20240520, (1,), "prepro_tinyshakespeare.py writes one, also from a "
                  "text of your own with --input; a file without a header is of an old format")


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2: its sizes, in the order of a checkpoint's header, and the tables of its tensors.
    `real` is the type in which parameters and activations are stored, fp32 or bfloat16."""
    maxT: int = 1024
    V: int = 50257
    L: int = 12
    NH: int = 12
    C: int = 768
    Vp: int = 50304

    FILE = FileKind("GPT-2 checkpoint", 20240326, (3, 5), "a run with -o writes one, "
                    "dev/convert.py another")
    STORED = {3: np.float32, 5: BF16}  # the numbers of a checkpoint, by its version
    TOKEN_FILES = {TOKENS: np.dtype("<u2")}  # the kinds of token files that it reads
    SOURCES = (HERE / "kernels.cu",)
    MODELS = ("gpt2_124M.bin", "d12", "d3")  # without -e: a checkpoint; on a GPU; on a CPU
    DESCRIPTORS = "d12, d24, d36, d48 and the like for that depth"
    PADDED = ("wte",)  # parameters whose rows are words, of which those beyond V are zeros
    # Its vocabulary: what stands between two texts, how texts are encoded, the files of -i and -j.
    EOT, encoding, data_paths = EOT, staticmethod(gpt2_encoding), staticmethod(data_paths)
    longest = property(lambda self: self.maxT)  # of a sequence: wpe has no more positions
    NKV = property(lambda self: self.NH)  # heads of keys and values: each query head has its own

    @classmethod
    def from_file(cls, path):
        """The config of a checkpoint. All is checked but the tensors themselves."""
        header = read_header(path, cls.FILE)
        c = cls(*header[2:8])
        c.check(path)
        table = c.file_table(cls.STORED[header[1]])
        check_size(path, cls.FILE, HEADER_BYTES + sum(row.nbytes for row in table))
        return c

    @classmethod
    def from_descriptor(cls, descriptor):
        """The config of depth N for "dN"; d12, d24, d36, d48 are GPT-2 small, medium, large, XL,
        and d60, d72, d84 are llm.c's larger ones."""
        if not re.fullmatch(r"d[1-9]\d{0,2}", descriptor):
            raise UserError(f"-e {descriptor}: expected a checkpoint, or a descriptor from d1 to "
                            "d999, such as d12")
        L = int(descriptor[1:])
        NH = {48: 25, 60: 30, 72: 30, 84: 36}.get(L, min(L, 12 + max(0, L - 12) // 3))
        return cls(L=L, NH=NH, C=NH * {72: 96, 84: 96}.get(L, 64))

    def check(self, path, wishes=()):
        """Raise UserError unless the sizes make a model, and each wish (ok, what is expected)
        holds."""
        sizes = dataclasses.astuple(self)[:6]
        for ok, wish in ((all(0 < n < 2**24 for n in sizes), "sizes from 1 to 2**24 - 1"),
                         (self.NH and self.C % self.NH == 0, "C to be divisible by NH"),
                         (self.C % 32 == 0, "C to be a multiple of 32"),
                         (self.V <= self.Vp, "V not to exceed Vp"), *wishes):
            if not ok:
                raise UserError(f"{path}: {self}; expected {wish}")

    def words(self):
        """{token id: its bytes}"""
        return vocabulary()

    def switches(self):
        """What kernels.cu is compiled for: the channels of a token, and those of a head."""
        return [f"-DCHANNELS={self.C}", f"-DHS={self.C // self.NH}"]

    def parameter_table(self, real=np.float32):
        """The parameters, in the order of a checkpoint. They start as in the GPT-2 paper (Radford
        et al. 2019, section 2.3): the 2L matrices that add to the residual stream are scaled down
        by sqrt(2L)."""
        C, once, each = self.C, dict(dtype=real), dict(dtype=real, layers=self.L)
        weight = dict(std=0.02, decay=True, matrix=True)
        residual = weight | dict(std=0.02 / math.sqrt(2 * self.L))
        return [
            Row("wte", (self.Vp, C), **once, **weight),  # token embeddings, and the head's weight
            Row("wpe", (self.maxT, C), **once, std=0.02, decay=True),  # position embeddings
            Row("ln1w", (C,), **each, mean=1.0),
            Row("ln1b", (C,), **each),
            Row("qkvw", (3 * C, C), **each, **weight),
            Row("qkvb", (3 * C,), **each),
            Row("attprojw", (C, C), **each, **residual),
            Row("attprojb", (C,), **each),
            Row("ln2w", (C,), **each, mean=1.0),
            Row("ln2b", (C,), **each),
            Row("fcw", (4 * C, C), **each, **weight),
            Row("fcb", (4 * C,), **each),
            Row("fcprojw", (C, 4 * C), **each, **residual),
            Row("fcprojb", (C,), **each),
            Row("lnfw", (C,), **once, mean=1.0),
            Row("lnfb", (C,), **once),
        ]

    def file_table(self, real=np.float32, header=None):
        """The tensors of a checkpoint, in its order; one that is no parameter is zeros."""
        return self.parameter_table(real)

    def headers(self, version):
        """What a checkpoint of this version begins with."""
        return [make_header(self.FILE.magic, version, *dataclasses.astuple(self))]

    def activation_table(self, B, T, real=np.float32):
        """What the forward pass leaves behind for the backward pass."""
        N, C, each = B * T, self.C, dict(dtype=real, layers=self.L)
        return [
            Row("residual", (N, C)),  # the residual stream x, always fp32
            Row("branch", (N, C), real),  # what attention or the MLP computed, to be added to x
            Row("ln1_inp", (N, C), **each),  # what ln1 normalises: a copy of x
            Row("ln1_mean", (N,), layers=self.L),
            Row("ln1_rstd", (N,), layers=self.L),
            Row("ln1", (N, C), **each),
            Row("qkv", (N, 3 * C), **each),  # queries, keys and values, each of NH heads
            Row("lse", (B * self.NH, T), layers=self.L),  # log2 of each softmax's denominator
            Row("atty", (N, C), **each),  # attention's output
            Row("ln2_inp", (N, C), **each),  # a copy of x after attention
            Row("ln2_mean", (N,), layers=self.L),
            Row("ln2_rstd", (N,), layers=self.L),
            Row("ln2", (N, C), **each),
            Row("fch", (N, 4 * C), **each),  # the MLP's hidden channels, before GELU
            Row("fch_gelu", (N, 4 * C), **each),  # after GELU; becomes the gradient of fch
            Row("lnf_inp", (N, C), real),  # a copy of x after the last layer
            Row("lnf_mean", (N,)),
            Row("lnf_rstd", (N,)),
            Row("lnf", (N, C), real),
            Row("logits", (logit_rows(N), self.Vp), real),  # become their own gradient
            Row("losses", (N,)),
        ]

    def backward_table(self, B, T, real=np.float32):
        """The gradients of activations, which layers use in turn."""
        N, C = B * T, self.C
        return [
            Row("dresidual", (N, C), real),  # of the residual stream, all the way down
            Row("dinp", (N, C), real),  # of a product's input: lnf, then each ln2, atty and ln1
            Row("dqkv", (N, 3 * C), real),
            Row("delta", (B * self.NH, T)),  # of attention: the sum over keys of weight * dweight
            Row("dqkv_sums", (B * -(-T // 64), 3 * C)),  # sums of dqkv's rows, of 64 or more each
            Row("partials", (3, PARTIAL_ROWS, C)),  # sums of rows: norm_backward, bias_backward
        ]


def logit_rows(N):
    """How many of N tokens have logits at a time: fewer save memory, but each part adds to all of
    wte's gradient."""
    return min(N, max(LOGIT_ROWS, -(-N // 4)))


def batch_table(B, T):
    """A batch, as the host prepares it."""
    return [
        Row("tokens", (B, T), np.int32),
        Row("targets", (B, T), np.int32),  # for each token the one that follows
        Row("order", (B * T,), np.int32),  # positions sorted by token: see encoder_backward_wte
        Row("run_length", (B * T,), np.int32),  # of the runs of equal tokens in that order
    ]


def update_table(updated):
    """What AdamW needs besides the tensors of a table, which it updates."""
    return [
        Row("settings", (len(ADAMW),)),
        Row("norm", (2 + NORM_BLOCKS,)),
        Row("verdict", (len(Verdict._fields),)),
        Row("starts", (len(updated) + 1,), np.uint64),  # where each tensor starts, in numbers
        Row("decayed", (len(updated),), np.int32),  # 1 where weight decay applies, else 0
    ]


def layout(table):
    """The byte offset of each tensor in an arena, then the arena's size."""
    sizes = (-(-row.nbytes // ALIGN) * ALIGN for row in table)
    return list(itertools.accumulate(sizes, initial=0))


def carve(arena, table):
    """Views of an arena (bytes, on the host or a device), one attribute for each row; with layers,
    (layers, *shape)."""
    views = SimpleNamespace()
    for row, start in zip(table, layout(table)):
        view = arena[start : start + row.nbytes].view(row.dtype).reshape(row.whole_shape)
        setattr(views, row.name, view)
    return views


def of_layer(views, table, l):
    """The views of layer l alone. Where there are fewer tensors than layers, layers share them."""
    return SimpleNamespace(**{row.name: getattr(views, row.name)[l % row.layers]
                              for row in table if row.layers})


def matrices(values):
    """A stack of matrices, one per layer, so that large tensors can be copied in pieces."""
    return values.reshape(-1, *values.shape[-2:])


def kept_as(x, dtype):
    """fp32 numbers converted to a storage type: BF16 keeps the upper half of the bits, rounded, and
    LOW the lower half, so that the number's bits are (upper << 16) + lower:

        fp32        sign, exponent, 7 bits of mantissa | 16 bits of mantissa
        in halves   BF16, what the products multiply   | LOW, signed: what rounding has changed

    Ties are rounded away from zero, because that has an inverse: with ties to even, a lower half of
    0x8000 would not say whether the upper one was rounded up or down."""
    bits = x.view(np.uint32)
    if dtype == BF16:
        return np.where(x == x, (bits + 0x8000) >> 16, 0x7FFF).astype(BF16)
    return bits.astype(LOW) if dtype == LOW else x


def to_float(x, low=None):
    """An array as fp32: from bfloat16's bits, with the lower halves if given, or from fp32."""
    if x.dtype != BF16:
        return x
    bits = x.astype(np.uint32) << 16
    return (bits if low is None else bits + low.astype(np.uint32)).view(np.float32)


def to_bf16(x):
    """fp32 numbers rounded to bfloat16, to nearest with ties to even, as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


# ---- The model: GPT-2 on a device
#
# A device does the arithmetic. Cuda, below, is a GPU; dev/cpu/device.py has the same verbs.
#
#     empty(nbytes)                 memory, as bytes
#     put(array, values)            host to device         get(array)    device to host
#     zero(array)                   all bits 0             tiles(array, B, T)   see launch_attention
#     launch(kernel, items, *args)  run a kernel of kernels.cu over so many items
#     matmul(out, a, b, ...)        out = a @ b, or out += a @ b, with a bias or a GELU if asked
#     repeat(graphs, key, work)     do work(), whose launches are the same each time for one key


def launch_attention(device, kernel, arrays, tiled, B, T, NH, NKV, scale, relu):
    """Launch an attention kernel: a block takes some rows of a query head, or of a key head. It
    reads tiles of the arrays `tiled`, each (N,channels)."""
    sizes, heads = device.attention_sizes, NKV if kernel == "attention_backward_kv" else NH
    forward = kernel == "attention_forward"
    shared = sizes.shared_forward if forward else sizes.shared_backward
    tiles = [device.tiles(array, B, T) for array in tiled]
    device.launch(kernel, -(-T // sizes.rows) * B * heads, *arrays, *tiles, scale, relu, T, NH, NKV,
                  threads=sizes.threads, shared=shared)


def layernorm_backward_launch(device, N):
    """(blocks, threads, bytes of shared memory): a block on each multiprocessor, with as many rows
    as fit there."""
    sizes = device.layernorm_sizes
    rows = min(sizes.threads // sizes.row_threads, device.max_shared // sizes.shared_of_row)
    blocks = min(device.multiprocessors, -(-N // rows), PARTIAL_ROWS)
    return blocks, rows * sizes.row_threads, rows * sizes.shared_of_row


def classifier_launch(device, N, Vp, with_gradient):
    """(blocks, logits, bytes of shared memory): a block on each multiprocessor, which keeps up to
    two rows of logits there; or a block for each row, which keeps none: on a CPU, or where long
    rows are read only once."""
    room = min(2 * Vp, device.max_shared // 16 * device.W)
    if device.name == "cpu" or not with_gradient and room < 2 * Vp:
        return N, 0, 0
    return min(N, device.multiprocessors), room, room // device.W * 16


class GPT2:
    """GPT-2 on a device, for batches of up to B sequences of T tokens, with softmax attention, or
    "relu": att = max(0, q.k / sqrt(HS))."""
    Config = Config
    rank, count = 0, 1  # this process's index, and how many share each batch

    @classmethod
    def tables(cls, c, device, B, T):
        """All that a run allocates, {arena: table}; an arena is one allocation. AdamW works on fp32
        numbers: in bf16 the parameters are their upper halves, `low bits` their lower: see kept_as.
        """
        real, parameters = device.real, c.parameter_table()
        low = [row._replace(dtype=LOW) for row in parameters]
        halves = {"low bits": low} if real == BF16 else {}
        return {"parameters": c.parameter_table(real), **halves, "gradients": parameters,
                "adam m": parameters, "adam v": parameters, "update": update_table(parameters),
                "batch": batch_table(B, T), "activations": c.activation_table(B, T, real),
                "backward": c.backward_table(B, T, real)}

    @classmethod
    def memory(cls, c, device, B, T):
        """(bytes that the tables ask for, bytes that are free, the largest B that fits)."""
        def bytes_of(B):
            return sum(layout(table)[-1] for table in cls.tables(c, device, B, T).values())

        free = device.free_bytes()
        return bytes_of(B), free, bisect.bisect_right(range(1, 2**16), free, key=bytes_of)

    def __init__(self, config, device, B, T, attention="softmax"):
        self.check(config, device, B, T)
        self.config, self.device, self.B, self.T = config, device, B, T
        self.scale, self.relu = (config.C // config.NH) ** -0.5, int(attention == "relu")
        tables = self.tables(config, device, B, T)
        self.arenas = {name: device.empty(layout(table)[-1]) for name, table in tables.items()}
        for name in tables.keys() - {"activations", "backward"}:
            device.zero(self.arenas[name])
        self.params, self.grads = self.whole_views("parameters"), self.whole_views("gradients")
        self.m, self.v, self.adam = (carve(self.arenas[name], tables[name])
                                     for name in ("adam m", "adam v", "update"))
        # The fp32 numbers that AdamW updates: the parameters, or, in bf16, both of their halves.
        self.master = [self.params]
        if "low bits" in tables:
            self.master.append(self.whole_views("low bits"))
        self.head, self.dhead = self.params.wte, self.grads.wte  # wte makes the logits, too
        updated = tables["adam m"]
        device.put(self.adam.starts, np.cumsum([0, *(row.size for row in updated)]))
        device.put(self.adam.decayed, [row.decay for row in updated])
        self.shape = None  # (B,T) of the batch that the activations are laid out for
        self.graphs = {}  # what the device has recorded of train_step, with this model's addresses
        self.step = 0  # steps done
        self.micro, self.last_micro = 0, True  # which micro-batch of a step; is it the last one?
        self.micros = 1  # micro-batches over which the step's loss is the mean

    def check(self, config, device, B, T):
        """Raise UserError unless the device has the kernels and the memory for such a model."""
        if T > config.longest:
            raise UserError(f"-t {T}: this model has positions for at most maxT = {config.maxT} "
                            "tokens")
        if device.compiled_for != config.switches():
            raise UserError("the device's kernels are compiled for "
                            f"{' '.join(device.compiled_for)}: expected a device for "
                            f"{' '.join(config.switches())}")
        attention = device.attention_sizes
        shared = max(attention.shared_forward, attention.shared_backward,
                     device.layernorm_sizes.shared_of_row)
        if shared > device.max_shared:
            raise UserError(f"C = {config.C}, NH = {config.NH}: a block needs {shared:,} bytes of "
                            f"shared memory, and this device has {device.max_shared:,}: choose a "
                            "smaller C, smaller heads, or bf16")
        asked, free, fits = self.memory(config, device, B, T)
        if asked > free:
            raise UserError(f"-b {B} -t {T}: the tables ask for {asked / 2**30:.2f} GiB of "
                            f"{device.memory}, and {free / 2**30:.2f} are free; the largest -b "
                            f"that fits is {fits}" + self.smaller(config, device, B, T, fits))

    def smaller(self, config, device, B, T, fits):
        """What else to tell a user whose model does not fit."""
        return "" if fits else "; choose a smaller -t or -e"

    def whole_views(self, arena):
        """Views of an arena that has a tensor for each parameter."""
        dtype = {"parameters": self.device.real, "low bits": LOW}.get(arena, np.float32)
        return carve(self.arenas[arena], self.config.parameter_table(dtype))

    def set_parameters(self, tensors):
        """Set parameters from (name, values) pairs, fp32 or bf16."""
        self.set_tensors(tensors, self.master)

    def set_tensors(self, tensors, kept):
        """Set tensors from (name, values) pairs in views that keep all of an fp32 number, or in two
        that keep a half each. Unknown names are ignored; rows beyond a shorter vocabulary keep
        their values."""
        for name, values in tensors:
            for views in kept if hasattr(kept[0], name) else ():
                for to, part in zip(matrices(getattr(views, name)), matrices(values)):
                    part = to_float(part)
                    self.device.put(to.reshape(-1)[: part.size], kept_as(part, to.dtype))

    def master_numbers(self):
        """The fp32 numbers that AdamW updates, on the host, one after another."""
        arenas = [name for name in ("parameters", "low bits") if name in self.arenas]
        dtypes = self.device.real, LOW
        return to_float(*(self.device.get(self.arenas[name].view(dtype))
                          for name, dtype in zip(arenas, dtypes)))

    def set_batch(self, batch):
        """Copy a batch of pack_batch to the device, and lay the arenas out for its (B,T), which may
        be smaller."""
        data, (B, T) = batch
        self.device.put(self.arenas["batch"][: data.nbytes], data)
        if (B, T) == self.shape:
            return
        tables = self.tables(self.config, self.device, B, T)
        self.batch, self.acts, self.back = (carve(self.arenas[name], tables[name])
                                            for name in ("batch", "activations", "backward"))
        self.layers = [self.layer_views(l, tables) for l in range(self.config.L)]
        size = len(self.acts.logits)  # tokens whose logits are computed together
        self.parts = [slice(start, min(start + size, B * T)) for start in range(0, B * T, size)]
        self.shape = B, T

    def layer_views(self, l, tables):
        """(parameters, gradients, activations) of layer l."""
        return (of_layer(self.params, tables["parameters"], l),
                of_layer(self.grads, tables["gradients"], l),
                of_layer(self.acts, tables["activations"], l))

    # The residual stream x (N,C) runs through all layers. Each reads it twice, through a norm, and
    # adds to it twice:
    #
    #  x --+------------------------------->(+)----+---------------------------->(+)--> next layer
    #      |                                 |     |                              |
    #      +-> ln1 -> qkv -> attention -> attproj  +-> ln2 -> fc --> GELU --> fcproj    (computed)
    #      |    |      |        |                  |    |      |       |
    #   ln1_inp ln1   qkv   atty, lse           ln2_inp ln2   fch   fch_gelu    (kept for backward)
    #
    # attproj and fcproj leave their result in `branch`. The addition (+) is done by the next norm's
    # kernel, which reads all of x anyway. x is fp32, and its copies ln1_inp and ln2_inp are rounded
    # to real. The gradient of x, dresidual, goes from right to left: a (+) hands it to the stream
    # and to the branch, and a fork adds what the branch returns.

    def layer_forward(self, l):
        """Layer l: x = x + attention(ln1(x)), then x = x + mlp(ln2(x)), which the next layer's ln1,
        or lnf, adds."""
        p, _, a = self.layers[l]
        matmul, branch = self.device.matmul, self.acts.branch
        added = branch if l else None  # what the MLP of the layer before computed
        self.norm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.ln1_inp, added, p.ln1w, p.ln1b)  # (N,C)
        matmul(a.qkv, a.ln1, p.qkvw.T, bias=p.qkvb)  # (N,C) @ (C,3C) -> (N,3C)
        self.attention_forward(a.atty, a.lse, a.qkv)  # (N,3C) -> (N,C): tokens see each other
        matmul(branch, a.atty, p.attprojw.T, bias=p.attprojb)  # (N,C) @ (C,C) -> (N,C)

        self.norm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.ln2_inp, branch, p.ln2w, p.ln2b)  # (N,C)
        matmul(a.fch, a.ln2, p.fcw.T, bias=p.fcb, gelu=a.fch_gelu)  # (N,C) @ (C,4C) -> (N,4C)
        matmul(branch, a.fch_gelu, p.fcprojw.T, bias=p.fcprojb)  # (N,4C) @ (4C,C) -> (N,C)

    def layer_backward(self, l):
        """layer_forward(l) from its last line to its first. A product out = inp @ w.T has the
        gradients dinp = dout @ w and dw = dout.T @ inp. dx, the gradient of the stream, is also
        that of a branch added to it: the dout of fcproj and attproj. Their biases' gradients are
        the sums of dx's rows; norm_backward reads dx anyway, so it sums these too."""
        p, g, a = self.layers[l]
        d, matmul, adds = self.back, self.device.matmul, self.micro > 0
        dx, dinp = d.dresidual, d.dinp
        matmul(g.fcprojw, dx.T, a.fch_gelu, accumulate=adds)  # (C,N) @ (N,4C) -> (C,4C)
        dfch = a.fch_gelu  # whose memory is free now
        matmul(dfch, dx, p.fcprojw, dgelu_at=a.fch)  # (N,C) @ (C,4C) -> (N,4C)
        self.bias_backward(g.fcb, dfch)  # (N,4C) -> (4C)
        matmul(g.fcw, dfch.T, a.ln2, accumulate=adds)  # (4C,N) @ (N,C) -> (4C,C)
        matmul(dinp, dfch, p.fcw)  # dln2: (N,4C) @ (4C,C) -> (N,C)
        self.norm_backward(g.ln2w, g.ln2b, g.attprojb, a.ln2_inp, p.ln2w, a.ln2_mean, a.ln2_rstd)

        matmul(g.attprojw, dx.T, a.atty, accumulate=adds)  # (C,N) @ (N,C) -> (C,C)
        matmul(dinp, dx, p.attprojw)  # datty: (N,C) @ (C,C) -> (N,C)
        self.attention_backward(a.qkv, a.lse, a.atty, g.qkvb)  # (N,C) -> dqkv (N,3C), and (3C)
        matmul(g.qkvw, d.dqkv.T, a.ln1, accumulate=adds)  # (3C,N) @ (N,C) -> (3C,C)
        matmul(dinp, d.dqkv, p.qkvw)  # dln1: (N,3C) @ (3C,C) -> (N,C)
        bias_before = self.layers[l - 1][1].fcprojb if l else None  # whose branch this norm added
        self.norm_backward(g.ln1w, g.ln1b, bias_before, a.ln1_inp, p.ln1w, a.ln1_mean, a.ln1_rstd)

    def norm_forward(self, out, mean, rstd, copy, branch, weight, bias):
        """x += branch, unless that is None. Then copy = x and out = layernorm(x)."""
        x = self.acts.residual
        self.device.launch("residual_layernorm_forward", len(out), out, mean, rstd, copy, x, x,
                           branch, weight, bias, len(out))

    def norm_backward(self, dweight, dbias, dbias_before, inp, weight, mean, rstd):
        """dx += the gradient of the norm's input, given back.dinp, that of its output. dweight and
        dbias += theirs. dbias_before += the sum over rows of the new dx, unless it is None."""
        C, N, device, d = self.config.C, len(inp), self.device, self.back
        blocks, threads, shared = layernorm_backward_launch(device, N)
        device.launch("layernorm_backward", blocks, d.dresidual, d.partials, d.dinp, inp, weight,
                      mean, rstd, N, threads=threads, shared=shared)
        device.launch("add_partials", (C, 3), dweight, dbias, dbias_before, d.partials, blocks, C)

    def bias_backward(self, dbias, dout):
        """dbias (OC) += the sum over rows of dout (N,OC): in two stages if there are many rows."""
        (N, OC), device, partials = dout.shape, self.device, self.back.partials
        shares = max(1, min(64, N // 256))
        to = dbias if shares == 1 else partials
        device.launch("matmul_backward_bias", (OC, shares), to, dout, N, OC)
        if shares > 1:
            device.launch("add_partials", OC, dbias, None, None, partials, shares, OC)

    def attention(self, kernel, *arrays, tiled):
        """launch_attention for this batch."""
        c = self.config
        launch_attention(self.device, kernel, arrays, tiled, *self.shape, c.NH, c.NKV, self.scale,
                         self.relu)

    def attention_forward(self, atty, lse, qkv):
        """atty (N,C) = attention of the queries, keys and values in qkv (N,3C)."""
        self.attention("attention_forward", atty, lse, tiled=(qkv,))

    def attention_backward(self, qkv, lse, atty, dbias):
        """back.dqkv = the gradient of qkv, given back.dinp, that of atty. dbias += the sum of its
        rows, unless it is None."""
        (B, T), d, rows = self.shape, self.back, self.device.attention_sizes.rows
        sums, tiled = None if dbias is None else d.dqkv_sums, (qkv, d.dinp)
        self.attention("attention_backward_q", d.dqkv, sums, d.delta, lse, atty, tiled=tiled)
        self.attention("attention_backward_kv", d.dqkv, sums, d.delta, lse, tiled=tiled)
        if sums is not None:
            self.device.launch("add_partials", dbias.size, dbias, None, None, sums,
                               B * -(-T // rows), dbias.size)

    def embedding_forward(self):
        """Where the stream begins: x = wte[token] + wpe[position]."""
        (_, T), p, x = self.shape, self.params, self.acts.residual
        self.device.launch("encoder_forward", x.size, x, self.batch.tokens, p.wte, p.wpe, len(x), T,
                           x.shape[1])

    def embedding_backward(self):
        """The gradients of wte and wpe, which add to what the head has left in wte's."""
        (B, T), C, g, b, dx = self.shape, self.config.C, self.grads, self.batch, self.back.dresidual
        self.device.launch("encoder_backward_wte", (B * T, C), g.wte, dx, b.tokens, b.order,
                           b.run_length, C)
        self.device.launch("encoder_backward_wpe", T * C, g.wpe, dx, B, T, C)

    def last_norm_forward(self):
        """Where the stream ends: lnf (N,C), of which the head makes logits."""
        p, a = self.params, self.acts
        self.norm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.lnf_inp, a.branch, p.lnfw, p.lnfb)

    def last_norm_backward(self):
        """Where the gradient dx of the stream begins."""
        p, g, a = self.params, self.grads, self.acts
        self.device.zero(self.back.dresidual)
        self.norm_backward(g.lnfw, g.lnfb, g.fcprojb[-1], a.lnf_inp, p.lnfw, a.lnf_mean, a.lnf_rstd)

    def head_forward(self, rows):
        """The logits (rows,Vp) of some of the N tokens, a slice of them."""
        logits = self.acts.logits[: rows.stop - rows.start]
        self.device.matmul(logits, self.acts.lnf[rows], self.head.T)  # (rows,C) @ (C,Vp)
        return logits

    def loss_forward(self, rows, logits, with_gradient=False):
        """The losses of these tokens, -log softmax(logits)[target]. With the gradient, the same
        kernel turns the logits into the gradient of the step's mean loss."""
        c, a = self.config, self.acts
        blocks, room, shared = classifier_launch(self.device, len(logits), c.Vp, with_gradient)
        targets, dloss = self.batch.targets.reshape(-1)[rows], 1 / (len(a.losses) * self.micros)
        self.device.launch("fused_classifier", blocks, logits, a.losses[rows], targets, dloss,
                           len(logits), c.V, c.Vp, with_gradient, room, shared=shared)

    def head_backward(self, rows, dlogits):
        """The gradients of these tokens' lnf, into dinp, and of the head's weight."""
        matmul, adds = self.device.matmul, self.micro > 0 or rows.start > 0
        matmul(self.back.dinp[rows], dlogits, self.head)  # (rows,Vp) @ (Vp,C) -> (rows,C)
        matmul(self.dhead, dlogits.T, self.acts.lnf[rows], accumulate=adds)  # (Vp,rows) @ (rows,C)

    def mean_loss(self):
        """A micro-batch's part of the step's mean loss: the first sets the verdict's loss, others
        add to it."""
        N = len(self.acts.losses)
        self.device.launch("add_loss", 1, self.adam.verdict, self.acts.losses,
                           1 / (N * self.micros), N, self.micro > 0)

    def forward_pass(self):
        """From a batch on the device to lnf (N,C). The loss is not here, since the logits of all
        tokens would be the largest tensor by far: backward_pass takes them part by part."""
        self.embedding_forward()
        for l in range(self.config.L):
            self.layer_forward(l)
        self.last_norm_forward()

    def backward_pass(self):
        """From lnf through the loss to the gradients of all parameters. The first micro-batch of a
        step begins them anew: what kernels add to is cleared, and a product sets its matrix. The
        others add to them."""
        for row in self.config.parameter_table():
            if self.micro == 0 and not row.matrix:
                self.device.zero(getattr(self.grads, row.name))
        for rows in self.parts:
            logits = self.head_forward(rows)
            self.loss_forward(rows, logits, with_gradient=True)
            self.head_backward(rows, logits)
        self.mean_loss()
        self.last_norm_backward()
        for l in reversed(range(self.config.L)):
            self.layer_backward(l)
        self.embedding_backward()

    def forward(self, tokens, targets=None):
        """The mean loss of a batch, tokens and targets (B,T), in nats; without targets, None. Its
        logits are left in acts.logits: those of the last part, if there are several."""
        self.set_batch(pack_batch(tokens, 0 if targets is None else targets))
        self.forward_pass()
        for rows in self.parts:
            logits = self.head_forward(rows)
            if targets is not None:
                self.loss_forward(rows, logits)
        if targets is None:
            return None
        self.mean_loss()
        return self.report().loss

    def next_logits(self, tokens):
        """The logits (V,) of the token that follows some tokens, a list of at most T ids."""
        padded = np.zeros((1, min(self.T, -(-len(tokens) // 64) * 64)), np.int32)
        padded[0, : len(tokens)] = tokens  # causal: padding at the end is never seen
        self.set_batch(pack_batch(padded))
        self.forward_pass()
        logits = self.head_forward(slice(len(tokens) - 1, len(tokens)))
        return to_float(self.device.get(logits))[0, : self.config.V]

    def report(self):
        """What the device says of the last step, a Verdict. Waits for it."""
        return Verdict(*self.device.get(self.adam.verdict).tolist())

    # ---- The update

    def set_adamw(self, learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, seed=0, **others):
        """Begin a step with these settings of AdamW; the others are 0 if not given."""
        self.step += 1
        settings = dict(others, learning_rate=learning_rate, rate1=1 - beta1, rate2=1 - beta2,
                        eps=eps, correction1=1 / (1 - beta1**self.step),
                        correction2=1 / (1 - beta2**self.step), step=self.step,
                        seed=seed % 2**24)  # below 2^24 fp32 has all whole numbers
        self.device.put(self.adam.settings, [settings.get(name, 0) for name in ADAMW])

    def update_pass(self):
        """An AdamW step with the gradients that were added up."""
        arenas = self.arenas
        self.adamw(arenas["parameters"], arenas.get("low bits"), arenas["gradients"],
                   arenas["adam m"], arenas["adam v"])

    def adamw(self, parameters, low, gradients, m, v):
        """AdamW, unless judge is against it, on arrays that hold all tensors one after another."""
        n = gradients.nbytes // 4
        self.norm_of(gradients, n)
        self.judge()
        self.adamw_launch("adamw", parameters, low, gradients, m, v, n)

    def norm_of(self, gradients, n):
        """adam.norm[0] = the norm of n gradients."""
        blocks = min(NORM_BLOCKS, 8 * self.device.multiprocessors)
        self.device.launch("global_norm", blocks, self.adam.norm, gradients, n)

    def judge(self):
        """Decide on the device whether this step updates the parameters."""
        self.device.launch("judge", 1, self.adam.verdict, self.adam.norm)

    def adamw_launch(self, kernel, parameters, low, gradients, m, v, n, *more):
        adam = self.adam
        self.device.launch(kernel, n, parameters, low, gradients, m, v, adam.starts, adam.decayed,
                           adam.decayed.size, n, adam.settings, adam.verdict, *more)

    def train_step(self, *batches, **adamw):
        """Queue a step: the mean gradient of these packed micro-batches, then AdamW with these
        settings. report() waits for it."""
        self.set_adamw(**adamw)
        self.micros = len(batches) * self.count
        for self.micro, batch in enumerate(batches):
            self.last_micro = self.micro == len(batches) - 1
            self.set_batch(batch)
            self.device.repeat(self.graphs, (self.shape, self.micros, self.micro > 0,
                                             self.last_micro), self.micro_step)
        self.micro, self.micros, self.last_micro = 0, 1, True

    def micro_step(self):
        """What a micro-batch takes; behind the last one, the update."""
        self.forward_pass()
        self.backward_pass()
        if self.last_micro:
            self.update_pass()


# ---- The loop


def scheduled_rate(step, steps, flags):
    """The learning rate of a step, counted from 0, in fp32 as in llm.c: up to -l in -u steps, then
    down to -q of that, by a cosine, a line, or, for wsd, 1 - sqrt in the last fifth of the run."""
    f, kind, warmup = np.float32, flags.schedule, flags.warmup
    rate = f(flags.learning_rate)
    least = rate * f(flags.final_fraction)
    if kind == "constant":
        return rate
    if step < warmup:
        return rate * f(step + 1) / f(warmup)
    begin = int(f(0.8) * f(steps)) if kind == "wsd" else warmup
    if step < begin:
        return rate
    share = f(step - begin) / f(steps - begin)  # of the way down
    if kind == "linear":
        return rate - share * (rate - least)
    if kind == "cosine":
        left = f(0.5) * (f(1) + np.cos(f(math.pi * float(share))))
    else:
        left = f(1) - np.sqrt(share)
    return least + left * (rate - least)


class Training:
    """A run: what happens when."""
    rank, count = 0, 1  # as GPT2's

    def __init__(self, flags, Model):
        self.flags, self.Model = flags, Model
        self.times, self.losses = [], []  # of the steps of this run

    def train(self):
        """Train from the model's step on."""
        flags, steps = self.flags, self.flags.steps
        batches = self.next_batches()
        for done in range(self.model.step, steps):
            self.pause(done, batches)
            begun, rate = time.perf_counter(), scheduled_rate(done, steps, flags)
            adamw = {name: getattr(flags, name) for name in ADAMW_FLAGS}
            self.model.train_step(*batches.packed, learning_rate=rate, **adamw)
            queued = SimpleNamespace(number=done + 1, rate=rate, begun=begun, batches=batches)
            batches = self.next_batches()  # while a GPU is at work
            self.finish(queued)
        self.pause(steps, batches)
        self.summarize()

    def due(self, done, every):
        """Whether a periodic action is due after `done` steps; at the end it always is."""
        return every > 0 and (done % every == 0 or done == self.flags.steps)

    def validates(self, done):
        return self.flags.val_batches != 0 and self.due(done, self.flags.val_every)

    def samples(self, done):
        flags = self.flags
        return done > 0 and flags.sample_tokens > 0 and self.due(done, flags.sample_every)

    def saves(self, done):
        return done == self.flags.steps

    def pauses(self, done):
        """Whether anything but a step comes after `done` steps."""
        return self.validates(done) or self.samples(done) or self.saves(done)

    def pause(self, done, batches):
        if self.validates(done):
            self.validate(done)
        if self.samples(done):
            self.sample()
        if self.saves(done):
            self.save(done, batches)

    def next_batches(self):
        """The micro-batches of a step, packed; their places in words; the first one's position."""
        if self.flags.overfit:
            self.train_data.open(0)
        batches = SimpleNamespace(position=self.train_data.position(), packed=[], places=[])
        for _ in range(self.micros):
            batches.packed.append(pack_batch(*self.train_data.next_batch()))
            batches.places.append(self.train_data.where)
        return batches

    def validate(self, done):
        """Print the mean loss of -m batches of -j, and return it."""
        loss = self.validation_loss()
        self.say(f"val loss {loss:.6f}")
        return loss

    def validation_loss(self):
        data, most = self.val_data, self.flags.val_batches
        data.open(0)
        count = data.batches if most < 0 else min(most, data.batches)
        return self.total_loss(data.next_batch() for _ in range(count)) / count

    def total_loss(self, batches):
        """The sum of the mean losses of these batches."""
        return sum(self.model.forward(*batch) for batch in batches)

    def sample(self):
        """Print what the model makes up."""
        text = decode(sample(self.model, self.flags.sample_tokens), self.words())
        self.say(f"generating:\n---\n{text}\n---")

    def words(self):
        """The bytes of each token id, in which samples are shown."""
        return self.config.words()

    def save(self, done, batches):
        """At the end of a run with -o: write the weights, in llm.c's format."""
        if self.flags.output:
            path = Path(self.flags.output) / f"model_{done:08d}.bin"
            parts = checkpoint_parts(self.config, self.model.params, self.device.real)
            replace_file(path, map(self.device.get, parts))
            self.say(f"wrote {path}")

    def finish(self, queued):
        """Wait for a step that was queued, and report it."""
        self.report(queued, self.model.report())

    def report(self, queued, verdict):
        """Print the line of a step."""
        flags, step, steps = self.flags, queued.number, self.flags.steps
        if not verdict.update:
            self.no_update(queued, verdict)
        seconds, tokens = time.perf_counter() - queued.begun, flags.total_batch
        self.times.append(seconds)
        self.losses.append(verdict.loss)
        self.say(f"step {step:4d}/{steps} | loss {verdict.loss:.6f} | norm {verdict.norm:7.4f} | "
                 f"lr {queued.rate:.2e} | {self.speed(seconds)} | {step * tokens:,} tokens")

    def speed(self, seconds):
        """A step's time, and tokens in a second."""
        return f"{1e3 * seconds:8.2f} ms | {self.flags.total_batch / seconds:9,.0f} tok/s"

    def no_update(self, queued, verdict):
        """Say that a step did not update the parameters."""
        step = queued.number
        self.say(f"WARNING: step {step}: no update: loss {verdict.loss:.6f}, norm "
                 f"{verdict.norm:.6f}")
        if verdict.stopped:
            self.model.step = step - 1  # no later one has made an update
            self.give_up(queued, verdict)

    def give_up(self, queued, verdict):
        raise UserError(f"the loss of step {queued.number} is {verdict.loss} and the norm of its "
                        f"gradient {verdict.norm}: try a smaller -l, or look at the data: "
                        f"{'; '.join(queued.batches.places)}")

    def summarize(self):
        times, losses = self.times, self.losses
        if times:
            median = float(np.median(times))
            self.say(f"{len(times)} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
                     f"{self.flags.total_batch / median:,.0f} tok/s; training loss "
                     f"{losses[0]:.6f} -> {losses[-1]:.6f}")

    def say(self, line):
        print(line, flush=True)

    # ---- Before the first step

    def run(self):
        """Everything from the flags to the last line. Returns the exit status."""
        self.prepare()
        return self.start()

    def prepare(self):
        self.choose_model()
        self.device = self.make_device()
        self.flags.dtype = self.device.dtype
        self.open_data()
        self.announce()

    def choose_model(self):
        """Which model: its config, and the checkpoint that it starts from, if there is one."""
        flags, kind = self.flags, self.Model.Config
        given = flags.model or os.path.exists(kind.MODELS[0]) and kind.MODELS[0]
        scratch = not given and (flags.device == "cpu" or not flags.train_data)
        set_defaults(flags, scratch)
        small = not given and flags.device == "cpu"
        self.name = self.checkpoint(given or kind.MODELS[2 if small else 1])
        self.from_file = os.path.exists(self.name) or self.name.endswith(".bin")
        make = kind.from_file if self.from_file else kind.from_descriptor
        self.config = make(self.name)
        flags.seq_len = flags.seq_len or min(self.config.maxT, DEFAULT_T[flags.device])

    def checkpoint(self, name):
        """What the run starts from, if -e is this name."""
        return str(name)

    def make_device(self, *beside):
        """The device; beside: CUDA files to compile behind the model's own."""
        device = self.device_class()(self.flags.dtype, self.config, beside)
        device.graph = self.flags.graph
        return device

    def device_class(self):
        return device_class(self.flags.device, self.flags.plain)

    def open_data(self):
        """Open the tokens to train and to validate on, and set what follows from their number."""
        flags, c, (B, T) = self.flags, self.config, (self.flags.batch_size, self.flags.seq_len)
        self.train_path, self.val_path = self.data_paths()
        if flags.overfit:
            self.train_path, flags.shuffle = self.val_path, 0
        self.train_data = DataLoader(self.train_path, B, T, c, flags.shuffle, self.rank, self.count)
        if flags.val_every:
            counts = [count_tokens(path, c)[0] for path in files_of(self.val_path)]
            fits = (min(counts) - 1) // T  # sequences; tinyshakespeare has 31
            self.val_data = DataLoader(self.val_path, max(1, min(B, fits)), T, c, 0)
        size = self.train_data.size
        flags.shuffle, flags.total_batch = int(self.train_data.shuffle), flags.total_batch or size
        if flags.total_batch % size:
            raise UserError(f"-d {flags.total_batch}: expected a multiple of B*T = {size}, a "
                            f"micro-batch's tokens{self.place()}")
        self.micros = flags.total_batch // size
        self.epoch = max(1, self.train_data.total // flags.total_batch)
        if flags.steps in (None, -1):
            flags.steps = self.epoch

    def data_paths(self):
        return self.config.data_paths(self.flags.train_data, self.flags.val_data)

    def place(self):
        """Where the run is, beside its device, for a line that it prints."""
        return ""

    def announce(self):
        """Print the run's sizes, and the tables of its memory."""
        flags, c, data, (B, T) = self.flags, self.config, self.train_data, self.model_size()
        origin = "" if self.from_file else f" from scratch, seed {flags.seed}"
        numbers = sum(row.size for row in c.parameter_table())
        files = f" in {len(data.paths)} files" if len(data.paths) > 1 else ""
        print(f"device       | {self.device}{self.place()} (--device, --dtype)")
        print(f"model        | {self.name}{origin}: {numbers:,} parameters (-e), {c}")
        print(f"data         | {self.train_path}: {data.total:,} tokens{files} (-i), "
              f"{self.val_path} (-j)")
        print(f"run          | B={B} T={T} (-b, -t), {flags.total_batch:,} tokens a step (-d), "
              f"{flags.steps} steps (-x), an epoch has {self.epoch}")
        for arena, table in self.Model.tables(c, self.device, B, T).items():
            print(f"{arena:12} | {layout(table)[-1] / 2**30:6.2f} GiB in {len(table)} tensors, of "
                  f"which {max(table, key=lambda row: row.nbytes).name} is the largest")
        asked, free, fits = self.Model.memory(c, self.device, B, T)
        print(f"memory       | {asked / 2**30:6.2f} GiB; -b {fits} would fit into "
              f"{free / 2**30:.2f} GiB")

    def model_size(self):
        return self.flags.batch_size, self.flags.seq_len

    def start(self):
        try:
            self.model = self.make_model()
            self.train()
        except self.device.Fault as e:
            raise UserError(f"the GPU stopped ({e}) at {self.device.launched} or a launch before "
                            "it: find the fault with --graph 0, --plain 1, compute-sanitizer, or "
                            "--device cpu") from None
        return 0

    def make_model(self):
        """The model, with the parameters that it starts from."""
        c, flags = self.config, self.flags
        model = self.Model(c, self.device, *self.model_size(), flags.attention)
        model.set_parameters(read_parameters(self.name, c) if self.from_file
                             else draw_parameters(c, flags.seed))
        return model


# ---- The device, plain


def stride_of(x):
    """(transposed, stride) for BLAS: (0, numbers to the next row), or of a view such as w.T (1, to
    the next column)."""
    to_row, to_column = (stride // x.itemsize for stride in x.strides)
    if to_column == 1 or x.shape[1] == 1:
        return 0, max(to_row, x.shape[1])
    return 1, max(to_column, x.shape[0])


class Kernel(NamedTuple):
    """What kernels.cu says of a kernel: BLOCK(threads, items along x, items along y), and its
    parameters. gelu_forward has

        BLOCK(256, W * threads)        256 threads, of which each takes W numbers, 8 in bf16

    so for 10,000 numbers it is launched as ceil(10000 / 2048) = 5 blocks of 256 threads."""
    name: str
    threads: int  # of a block
    covers: list  # functions of threads and W: items that a block covers along x, and along y
    parameters: list  # (name, NumPy type of a scalar or None, whether the kernel only reads it)

    def plan(self, items, args, W, threads=None):
        """(grid, block, arguments) of a launch over so many items, or (items along x, along y)."""
        if len(args) != len(self.parameters):
            raise UserError(f"kernels.cu: {self.name} has {len(self.parameters)} parameters, and "
                            f"is launched with {len(args)} arguments")
        threads = threads or self.threads
        # int, since C's / of ints is a float in Python; the 1 is for y, where BLOCK does not say
        sizes = [*(int(covers(threads, W)) for covers in self.covers), 1]
        counts = items if isinstance(items, tuple) else (items,)
        grid = tuple(-(-count // size) for count, size in zip(counts, sizes))  # rounded up
        args = (kind(arg) if kind else arg for arg, (_, kind, _) in zip(args, self.parameters))
        return grid, (threads,), tuple(args)


SCALARS = {"int": np.int32, "float": np.float32, "size_t": np.uint64}
# Arrays in a struct of kernels.cu: {type: whether the kernel only reads them}
STRUCTS = {"Output": False, "Tiles": True}
# Constant arrays of kernels.cu: how to launch attention and layernorm_backward.
SIZES = {"attention_sizes": ("rows", "threads", "shared_forward", "shared_backward"),
         "layernorm_sizes": ("threads", "row_threads", "shared_of_row")}


def without_comments(text):
    """CUDA text with its comments blanked, every offset kept."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text,
                  flags=re.S)


def read_kernels(sources):
    """{name: Kernel} of CUDA files."""
    declaration = (r'BLOCK\(\s*(\d+)\s*,([^()]*)\)\s*extern "C" __global__ void\s+'
                   r"(?:__launch_bounds__\(.*?\)\s*)?(\w+)\(([^)]*)\)")
    kernels = {}
    found = [(path, *words) for path in sources
             for words in re.findall(declaration, without_comments(path.read_text("utf-8")))]
    for path, threads, covers, name, parameters in found:
        try:
            covers = [eval(f"lambda threads, W: {expression}") for expression in covers.split(",")]
            if min(function(int(threads), W) for function in covers for W in (4, 8)) < 1:
                raise ValueError("a block covers nothing")
        except Exception as e:
            raise UserError(f"{path.name}: BLOCK over {name}: {e}: expected arithmetic in threads "
                            "and W") from None
        kernels[name] = Kernel(name, int(threads), covers, [])
        for parameter in parameters.replace("__restrict__", "").split(","):
            *_, kind, label = re.findall(r"\w+", parameter)
            array = "*" in parameter or kind in STRUCTS
            if not (array or kind in SCALARS):
                raise UserError(f"{path.name}: {name}: {kind} {label}: expected a pointer or "
                                f"{', '.join([*SCALARS, *STRUCTS])}")
            const = STRUCTS.get(kind, "const" in parameter)
            kernels[name].parameters.append((label, None if array else SCALARS[kind], const))
    return kernels


class Cuda:
    """An NVIDIA GPU through CuPy. Work is queued on CuPy's current stream and done in order; get
    waits for it. dtype: "bf16", "fp32", or "tf32", which is fp32 with matrix products that round
    their inputs to TF32; c: the Config that kernels are compiled for; beside: more CUDA files to
    compile behind kernels.cu."""
    name, memory, launched = "cuda", "device memory", "the start"
    OPTIONS = ("-std=c++17",)
    TYPES = {"f4": 0, "u2": 14}  # cuBLAS's CUDA_R_32F and _16BF
    ONE, NOUGHT = np.ones(1, np.float32), np.zeros(1, np.float32)
    SPARE = 2**28  # bytes left for what CuPy, cuBLAS and the driver take in the first step
    NEEDS = 80, "Ampere", "--device cpu"  # the least compute capability, and what else to do

    def __init__(self, dtype, c, beside=()):
        try:
            import cupy
            from cupy_backends.cuda.libs import cublas
            cupy.cuda.runtime.getDeviceCount()
        except ImportError as e:
            raise UserError(f"--device cuda needs CuPy, which is not installed ({e}): pip install "
                            "-r requirements.txt, or train with --device cpu") from None
        except cupy.cuda.runtime.CUDARuntimeError as e:
            raise UserError(f"no GPU for --device cuda ({e}): check nvidia-smi, or train with "
                            "--device cpu") from None
        self.cupy, self.cublas, self.gpu = cupy, cublas, cupy.cuda.Device()
        self.dtype = dtype or "bf16"
        self.Fault = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError,
                      cublas.CUBLASError)
        self.capability, attributes = int(self.gpu.compute_capability), self.gpu.attributes
        least, name, remedy = self.NEEDS
        if self.capability < least:
            raise UserError(f"this GPU has compute capability {self.capability / 10}, and the "
                            f"kernels need {least / 10} ({name}) or later: train with {remedy}")
        self.real = np.float32 if self.dtype in ("fp32", "tf32") else BF16
        self.compute = cublas.CUBLAS_COMPUTE_32F
        if self.dtype == "tf32":
            self.compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        # A KiB is left for the arrays that kernels declare themselves.
        self.max_shared = attributes["MaxSharedMemoryPerBlockOptin"] - 1024
        self.multiprocessors = attributes["MultiProcessorCount"]
        self.compiled_for = c.switches()
        self.compile([*c.SOURCES, *beside])

    def compile(self, sources):
        """Compile CUDA files as one, with what kernels.cu is to know."""
        code = "".join(f'#line 1 "{path.name}"\n{path.read_text("utf-8")}' for path in sources)
        module = self.cupy.RawModule(code=code, options=(*self.OPTIONS, *self.switches()))
        self.kernels = read_kernels(sources)
        try:
            self.functions = {name: module.get_function(name) for name in self.kernels}
            for name, fields in SIZES.items():
                at = module.get_global(name)
                values = self.cupy.ndarray(len(fields), np.int32, at).get().tolist()
                setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
            self.cublas.setMathMode(self.gpu.cublas_handle, 16)  # sums are of fp32
        except self.cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile kernels.cu:\n{e}") from None
        except self.Fault as e:
            raise UserError(f"the GPU cannot be used ({e}): check nvidia-smi, or train with "
                            "--device cpu") from None

    def switches(self):
        return [f"-D{self.dtype.upper()}", *self.compiled_for]

    def __str__(self):
        name = self.cupy.cuda.runtime.getDeviceProperties(self.gpu.id)["name"].decode()
        return f"{name}, {self.dtype}"

    def free_bytes(self):
        """How much device memory there is for the tables."""
        return max(0, self.gpu.mem_info[0] - self.SPARE)

    def empty(self, nbytes):
        try:
            return self.cupy.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {nbytes / 2**30:.2f} GiB more; choose a smaller -b, -t "
                            "or -e") from None

    def put(self, array, values):
        values = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
        array.set(values, stream=self.cupy.cuda.get_current_stream())

    def get(self, array):
        return self.cupy.asnumpy(array)

    def zero(self, array):
        array.data.memset_async(0, array.nbytes)

    def tiles(self, array, B, T):
        """What attention reads tiles of an array (B,T,channels) from."""
        return array

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over so many items, each block with `shared` bytes of dynamic shared
        memory."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: no kernel {name} with a BLOCK(...) over it, and "
                            "train_gpt2.py launches it")
        function, self.launched = self.functions[name], name
        if shared > 2**15 and shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared  # more than 48 KiB has to be asked for
        function(*self.kernels[name].plan(items, args, self.W, threads), shared_mem=shared)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """out (I,J) = a (I,K) @ b (K,J), plus bias (J) in each row; or, with accumulate, out += a @
        b. With gelu (I,J), that becomes GELU of out. With dgelu_at (I,J), out is multiplied by
        GELU's derivative there.

        cuBLAS stores matrices by columns, and we by rows. So it sees each of our matrices
        transposed:

            ours          its bytes            the same bytes to cuBLAS
            | 0 1 2 |                          | 0 3 |
            | 3 4 5 |     0 1 2 3 4 5          | 1 4 |
                                               | 2 5 |

        It is asked for out.T = b.T @ a.T, in which a and b have changed places, and what it writes
        is our out.
        """
        lib, handle, types = self.cublas, self.gpu.cublas_handle, self.TYPES
        if bias is not None:
            out[...] = bias
        one = self.ONE  # out = one a @ b + beta out
        beta = one if accumulate or bias is not None else self.NOUGHT
        (transpose_a, stride_a), (transpose_b, stride_b) = stride_of(a), stride_of(b)
        type_a, type_b, type_out = (types[x.dtype.str[1:]] for x in (a, b, out))
        lib.gemmEx(handle, transpose_b, transpose_a, *out.shape[::-1], a.shape[1], one.ctypes.data,
                   b.data.ptr, type_b, stride_b, a.data.ptr, type_a, stride_a, beta.ctypes.data,
                   out.data.ptr, type_out, out.shape[1], self.compute, lib.CUBLAS_GEMM_DEFAULT)
        self.gelu_of_product(out, gelu, dgelu_at)

    def gelu_of_product(self, out, gelu, dgelu_at):
        """Apply GELU, or its derivative, after a product that did not fuse it."""
        if gelu is not None:
            self.launch("gelu_forward", out.size, gelu, out, *out.shape)
        if dgelu_at is not None:
            self.launch("gelu_backward", out.size, out, dgelu_at, *out.shape)

    def repeat(self, graphs, key, work):
        work()


def has_gpu():
    """Whether NVIDIA's driver reports a GPU. CuPy would take a second to import."""
    with contextlib.suppress(OSError):
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        driver.cuInit(0)
        return driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


def device_class(name, plain=False):
    """The class of the device "cuda" or "cpu". plain: without the section "Faster"."""
    if name == "cuda":
        return Cuda if plain else FastCuda
    from dev.cpu.device import Cpu
    return Cpu


def make_device(name, dtype, c, plain=False, graph=True, beside=()):
    """A device, as Cuda's and Cpu's __init__ have it."""
    device = device_class(name, plain)(dtype, c, beside)
    device.graph = graph  # "Faster" records a step's launches
    return device


# ---- Files and batches: llm.c's files, byte for byte. A header of 256 int32, then numbers


def read_header(path, kind, *others):
    """The 256 ints of a file's header, which is of one of these kinds."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kind.name}: "
                        f"{kind.remedy}") from None
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()
    kinds = {kind.magic: kind for kind in (kind, *others)}
    magic = header[0] if header else kind.magic
    kind, wrong = kinds.get(magic, kind), None
    if magic not in kinds:
        names = " or a ".join({kind.name: 0 for kind in kinds.values()})
        wrong = f"begins with {magic}, and a {names} with {' or '.join(map(str, kinds))}"
    elif len(header) < 256:
        wrong = f"truncated within its header of {HEADER_BYTES} bytes; expected a {kind.name}"
    elif header[1] not in kind.versions:
        old = " (an old format)" if header[1] < kind.versions[0] else ""
        wrong = (f"{kind.name} of version {header[1]}{old}; expected version "
                 f"{' or '.join(map(str, kind.versions))}")
    if wrong:
        raise UserError(f"{path}: {wrong}: {kind.remedy}")
    return header


def check_size(path, kind, expected):
    """Raise UserError unless the file has so many bytes."""
    size = os.path.getsize(path)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(f"{path}: {what}: {size:,} bytes, and the header of this {kind.name} "
                        f"promises {expected:,}: {kind.remedy}")


def mapped(path, table, start):
    """(name, values) of a table's tensors, in a file from byte `start` on, mapped into memory."""
    for row in table:
        yield row.name, np.memmap(path, row.dtype, "r", start, row.whole_shape)
        start += row.nbytes


def read_parameters(path, c):
    """(name, values) of the tensors of a checkpoint of config c, mapped into memory as stored."""
    header = read_header(path, c.FILE)
    table = c.file_table(c.STORED[header[1]], header)
    return mapped(path, table, os.path.getsize(path) - sum(row.nbytes for row in table))


def checkpoint_parts(c, params, real):
    """What a checkpoint of these parameters consists of: headers, then the tensors."""
    yield from c.headers(next(version for version, dtype in c.STORED.items() if dtype == real))
    yield from in_file_order(c, params, real)


def in_file_order(c, views, real):
    """The tensors of a checkpoint as a file has them, matrix by matrix."""
    for row in c.file_table(real):
        absent = np.zeros(0 if hasattr(views, row.name) else row.size, row.dtype)
        parts = matrices(getattr(views, row.name, absent))
        yield from (part.reshape(-1)[: row.size // len(parts)] for part in parts)


def draw_parameters(c, seed):
    """(name, values) of random parameters. Each has a generator of its own: all cores draw."""
    def draw(i, row):
        values = np.random.default_rng([seed, i]).standard_normal(row.whole_shape, np.float32)
        values *= row.std
        values += row.mean
        if row.name in c.PADDED:
            values[c.V :] = 0
        return row.name, values

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, itertools.count(), c.parameter_table())


def files_of(pattern):
    """The paths that a pattern such as data/fineweb_train_*.bin matches, sorted as in llm.c; or,
    if none does, that of a file of this name."""
    return sorted(glob.glob(str(pattern))) or [str(pattern)]


def count_tokens(path, c=Config):
    """(how many tokens a token file has, their NumPy type)."""
    header = read_header(path, *c.TOKEN_FILES)
    [(kind, dtype)] = [item for item in c.TOKEN_FILES.items() if item[0].magic == header[0]]
    check_size(path, kind, HEADER_BYTES + dtype.itemsize * header[2])
    return header[2], dtype


def read_tokens(path, c):
    """The tokens of a token file, mapped into memory."""
    count, dtype = count_tokens(path, c)
    tokens = np.memmap(path, dtype, "r", offset=HEADER_BYTES) if count else np.zeros(0, dtype)
    check_tokens(path, tokens, c.V)
    return tokens


def check_tokens(path, tokens, V):
    """Raise UserError unless all ids are below V."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < V:
        bad = int(np.argmax((tokens < 0) | (tokens >= V)))
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}, and the model has V = {V} "
                        "words; expected a file made with the model's own vocabulary")


class DataLoader:
    """Batches of the token files that match a pattern, epoch after epoch. A file's last, partial
    batch is skipped. With shuffle, the default for several files, each epoch shuffles the files,
    and the batches of each, as in llm.c. Each rank takes its own B*T tokens of every batch, in an
    order of its own."""

    def __init__(self, pattern, B, T, c, shuffle=None, rank=0, count=1):
        self.paths, self.rank, self.size = files_of(pattern), rank, count * B * T  # of a batch
        self.B, self.T, self.c = B, T, c
        counts = [count_tokens(path, c)[0] for path in self.paths]
        for path, tokens in zip(self.paths, counts):
            if tokens <= self.size:
                raise UserError(f"{path}: {tokens:,} tokens, and a batch needs B*T+1 = "
                                f"{self.size + 1:,}; give a longer file, or a smaller -b or -t")
        self.total, self.batches_of = sum(counts), [(n - 1) // self.size for n in counts]
        self.batches = sum(self.batches_of)  # of an epoch
        self.shuffle = len(counts) > 1 if shuffle is None else shuffle
        self.rng = np.random.RandomState(42 + rank)
        self.files, self.path = self.permuted(range(len(counts))), None
        self.open(0)

    def permuted(self, items):
        """The items as a list; with shuffle, permuted by Fisher and Yates's method from the end, as
        llm.c does it, with the numbers of a Mersenne Twister."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1) if self.shuffle else ():
            j = int(self.rng.randint(2**32, dtype=np.uint32)) % (i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def open(self, place):
        """Go to the first batch of the file at a place in this epoch's order."""
        self.place, self.next, path = place, 0, self.paths[self.files[place]]
        if path != self.path:
            self.path, self.tokens = path, read_tokens(path, self.c)
        self.order = self.permuted(range(self.batches_of[self.files[place]]))

    def position(self):
        """Where the next batch is, for a checkpoint."""
        return SimpleNamespace(place=self.place, next=self.next, files=self.files, order=self.order,
                               shuffle=self.shuffle, rng=self.rng.get_state())

    def next_file(self):
        if self.place + 1 == len(self.files):
            self.files = self.permuted(self.files)
        self.open((self.place + 1) % len(self.files))

    def next_batch(self):
        """Tokens and targets, both (B,T) int32: for each token the one that follows."""
        if self.next == len(self.order):
            self.next_file()
        slot, self.next = self.B * self.T, self.next + 1
        start = self.order[self.next - 1] * self.size + self.rank * slot
        self.where = f"{self.path}, tokens {start} to {start + slot}"  # for reports of errors
        window = self.tokens[start : start + slot + 1].astype(np.int32)
        return window[:-1].reshape(self.B, self.T), window[1:].reshape(self.B, self.T)


def pack_batch(tokens, targets=0):
    """(the bytes of a batch's arena, (B,T)), of tokens and targets, each (B,T) int32."""
    table = batch_table(*tokens.shape)
    data = np.zeros(layout(table)[-1], np.uint8)
    batch = carve(data, table)
    batch.tokens[...], batch.targets[...] = tokens, targets
    narrow = np.uint32 if tokens.max() > 65535 else np.uint16  # NumPy radix-sorts 16 bits
    flat = tokens.reshape(-1).astype(narrow)
    batch.order[...] = np.argsort(flat, kind="stable")
    steps = np.diff(flat[batch.order].astype(np.int32))
    begins = np.flatnonzero(np.r_[True, steps != 0])  # where a new word does
    batch.run_length[begins] = np.diff(begins, append=flat.size)
    return data, tokens.shape


# ---- A sample


def words_of(encoding):
    """{token id: its bytes} of an encoding, special tokens too."""
    special = (name.encode() for name in encoding.special_tokens_set)
    words = *encoding.token_byte_values(), *special
    return {encoding.encode_single_token(word): word for word in words}


@functools.cache
def vocabulary():
    """{token id: its bytes}: by tiktoken, else the single bytes only."""
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        encoding = byte_encoding()
    return words_of(encoding)


def decode(tokens, words):
    """The text of token ids; words: {id: bytes}."""
    text = b"".join(words.get(t, f"<{t}>".encode()) for t in tokens)
    return text.decode("utf-8", errors="replace")


def coins():
    """llm.c's random numbers in [0, 1), the same in each sample: xorshift64* (Vigna 2014)."""
    state, bits = 1337, 2**64 - 1
    while True:
        state ^= state >> 12
        state ^= state << 25 & bits
        state ^= state >> 27
        yield np.float32((state * 0x2545F4914F6CDD1D & bits) >> 40) / np.float32(2**24)


def draw_token(logits, coin):
    """The token that a coin in [0, 1) draws from softmax(logits), in llm.c's precisions."""
    top = logits.max()
    shift = top - np.clip(top, -80, 80)  # logits as they are, unless exp would overflow or be all 0
    weights = np.exp(logits - shift)
    coin = np.float32(coin * weights.sum(dtype=np.float64))
    drawn = np.searchsorted(np.cumsum(weights, dtype=np.float32), coin, side="right")
    return min(int(drawn), len(logits) - 1)


def sample(model, count):
    """Token ids, each drawn by a forward pass over the last T, end-of-text first."""
    tokens = [min(model.config.EOT, model.config.V - 1)]
    for _, coin in zip(range(count), coins()):
        tokens.append(draw_token(model.next_logits(tokens[-model.T :]), coin))
    return tokens[1:]


# ---- Flags and main


def number(kind, least, below=math.inf, alone=None):
    """The type of a flag: text as an int or a float, at least `least` and below `below`. alone:
    what the flag means by itself."""
    def convert(text):
        if not least <= kind(text) < below:
            upper = ", and finite" if kind is float else ""
            if below < math.inf:
                upper = f" and below {below}"
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}{upper}")
        return kind(text)
    convert.__name__ = kind.__name__  # as argparse calls it where text is no number at all
    convert.alone = alone
    return convert


def named(text):
    """The type of a flag that names something."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, found nothing")
    return text


named.__name__ = "name"  # as --help has it
TYPES = {  # of flags, by their names in the tables of flags
    "name": named, "count": number(int, 1), "count or 0": number(int, 0), "rate": number(float, 0),
    "count or -1": number(int, -1), "switch": number(int, 0, 2, alone=1),
    "level": number(int, 0, 3, alone=1), "share": number(float, 0, 1),
    "eps": number(float, 1e-37)}  # the smallest numbers of fp32 would be 0 on a GPU
ADAMW_FLAGS = "beta1", "beta2", "eps", "weight_decay", "clip", "seed"

# A flag's letter, long name, type or choices, default (None: see set_defaults), what it is.
FLAGS = [
    ("-i", "--train-data", "name", None, "token file to train on, or in quotes a pattern of "
     "several (default: tinyshakespeare, prepared if missing)"),
    ("-j", "--val-data", "name", None, "token file to validate on (default: -i's, with val for "
     "train)"),
    ("-e", "--model", "name", None, "checkpoint; or, from scratch, {kind.DESCRIPTORS} (default: "
     "{kind.MODELS[0]} if it is here, else {kind.MODELS[1]} on a GPU and {kind.MODELS[2]} on a "
     "CPU)"),
    ("-o", "--output", "name", None, "folder for the weights, which are written at the end "
     "(default: none)"),
    ("-b", "--batch-size", "count", 4, "B, sequences in a micro-batch"),
    ("-d", "--total-batch", "count", None, "tokens in a step, which accumulates gradients over "
     "-d/(B*T) micro-batches (default: B*T)"),
    ("-t", "--seq-len", "count", None, "T, tokens in a sequence (default: 1024 on a GPU, 64 on a "
     "CPU)"),
    ("-l", "--learning-rate", "rate", 3e-4, "learning rate"),
    ("-k", "--schedule", ("cosine", "linear", "constant", "wsd"), "cosine", "how the learning rate "
     "falls; wsd: late"),
    ("-u", "--warmup", "count or 0", 0, "steps in which the rate rises, except if it is constant"),
    ("-q", "--final-fraction", "rate", 1.0, "what the learning rate falls to, as a fraction of it"),
    ("-c", "--weight-decay", "rate", 0.0, "AdamW's weight decay, of matrices and embeddings only"),
    (None, "--beta1", "share", 0.9, "AdamW's decay of the first moment"),
    (None, "--beta2", "share", 0.999, "AdamW's decay of the second moment"),
    (None, "--eps", "eps", 1e-8, "AdamW's epsilon"),
    (None, "--clip", "rate", 1.0, "norm that a step's gradient is scaled down to; 0: none"),
    ("-x", "--steps", "count or -1", None, "steps to train; -1: an epoch (default: -1)"),
    ("-v", "--val-every", "count or 0", 20, "steps between validations; 0: none"),
    ("-m", "--val-batches", "count or -1", 20, "batches of a validation, at most; -1: all"),
    ("-s", "--sample-every", "count or 0", 20, "steps between samples; 0: none"),
    ("-g", "--sample-tokens", "count or 0", 64, "tokens of a sample"),
    ("-a", "--overfit", "switch", 0, "1: train on the first batch of -j alone, over and over"),
    (None, "--attention", ("softmax", "relu"), "softmax", "or relu: max(0, q.k / sqrt(HS))"),
    (None, "--shuffle", "switch", None, "1: batches in llm.c's random order (default: for several "
     "files)"),
    (None, "--seed", "count or 0", 42, "of the initial parameters, and of all that is drawn"),
    (None, "--device", ("cpu", "cuda"), None, "where to compute (default: cuda if there is a GPU)"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "tf32: fp32, products in TF32 (default: "
     "bf16; on a CPU fp32)"),
    (None, "--plain", "switch", 0, "1: on a GPU, without the section Faster of train_gpt2.py"),
    (None, "--graph", "switch", 1, "0: on a GPU, launch kernels one by one, not as one graph"),
]

# Headlines of --help: {the first flag below one: headline}.
GROUPS = {"--train-data": "data and model", "--batch-size": "the size of a step",
          "--learning-rate": "the update", "--steps": "how long, and what to see meanwhile",
          "--overfit": "experiments, and what is random", "--device": "the machine"}

# A run that is told neither what to train nor on what has other defaults, tuned on tinyshakespeare:
# about a minute on two cores, and seconds on a GPU.
SCRATCH = {"cpu": dict(steps=250, learning_rate=1e-3, warmup=25, final_fraction=0.1, beta2=0.95,
                       val_every=50, sample_every=125),
           "cuda": dict(batch_size=2, steps=1200, learning_rate=2e-4, warmup=120,
                        final_fraction=0.3, val_every=100, sample_every=400)}
DEFAULT_T = {"cpu": 64, "cuda": 1024}


def parse_flags(description, table, arguments=None, defaults=True, groups=()):
    """The flags of a command line. Without defaults, a flag that is not given is None. groups: the
    headlines of --help, {the first flag below: headline}."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     exit_on_error=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for letter, name, kind, default, text in table:
        kind = TYPES.get(kind, kind)
        group = parser.add_argument_group(groups[name]) if name in groups else group
        form = dict(type=kind, metavar=getattr(kind, "__name__", "").upper())
        if isinstance(kind, tuple):
            form = dict(choices=kind)
        if getattr(kind, "alone", None):
            form |= dict(nargs="?", const=kind.alone)
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(*filter(None, (letter, name)), help=text + shown,
                           default=default if defaults else None, **form)
    given = sys.argv[1:] if arguments is None else arguments
    if any(flag == "-h" and value[:1] != "-" for flag, value in itertools.pairwise(given)):
        raise UserError("-h is help, and takes no value; --help lists the flags")
    try:
        flags, unknown = parser.parse_known_args(given)
    except argparse.ArgumentError as e:
        what = str(e).removeprefix("argument ")
        raise UserError(f"{what}; --help lists the flags") from None
    if unknown:
        pattern = "" if unknown[0].startswith("-") else "; a pattern of files goes in quotes"
        raise UserError(f"{unknown[0]} is no flag{pattern}; --help lists them")
    return flags


def set_defaults(flags, scratch):
    """Set the trainer's flags that are None and have a default."""
    defaults = {name.removeprefix("--").replace("-", "_"): default
                for _, name, _, default, _ in FLAGS}
    if scratch:
        defaults |= SCRATCH[flags.device]
    for name, value in defaults.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)


def main(arguments=None, Model=GPT2):
    """Everything from the flags to the last line. Returns the exit status."""
    try:
        from dev.features import FLAGS as more_flags, GROUPS as more_groups, run_with
    except ModuleNotFoundError as e:  # the top-level files alone train, too
        if e.name not in ("dev", "dev.features"):
            raise
        more_flags, more_groups, run_with = [], {}, None
    table = {row[1]: (*row[:4], row[4].format(kind=Model.Config)) for row in [*FLAGS, *more_flags]}
    flags = parse_flags("Train from raw kernels.", table.values(), arguments, defaults=False,
                        groups=GROUPS | more_groups)
    flags.device = flags.device or ("cuda" if has_gpu() else "cpu")
    training = FastTraining if flags.device == "cuda" and not flags.plain else Training
    if run_with:
        return run_with(flags, training, Model, table.values())
    return training(flags, Model).run()


# ---- Faster. A step of the 124M model in bf16 on an H200, with more and more of what is here:
#
#                                                              B=4          B=32
#     the plain device                                        10.82 ms     69.90 ms
#     cuBLASLt, with the bias; Hopper's own attention          9.63        54.91
#     algorithms of products chosen by timing them             9.98        53.35
#     GELU in the product too                                  9.49        52.69
#     a step as one graph                                      8.13        52.46
#     a step queued before the last one is reported            8.04        52.33


class FastTraining(Training):
    """A step is queued before the last one is reported, so that the GPU need not wait for the host.
    A step of several micro-batches has the host copy batches while the GPU works, anyway."""

    def train(self):
        self.late = []  # steps that are queued and not yet reported: (step, its verdict's fetch)
        self.reported = 0.0  # when the last one was
        super().train()

    def finish(self, queued):
        self.late.append((queued, self.device.fetch(self.model.adam.verdict)))
        while len(self.late) > (1 if self.micros == 1 else 0):
            self.report_oldest()

    def report_oldest(self):
        queued, wait = self.late.pop(0)
        verdict = Verdict(*wait().tolist())
        queued.begun = max(queued.begun, self.reported)
        self.reported = time.perf_counter()
        self.report(queued, verdict)

    def pause(self, done, batches):
        while self.late and self.pauses(done):
            self.report_oldest()
        super().pause(done, batches)


def address(array):
    """A CuPy array's address, or a null pointer for None, as ctypes wants it."""
    return ctypes.c_void_p(None if array is None else array.data.ptr)


def aligned_bytes(size):
    """Zeros whose address is a multiple of 128."""
    memory = np.zeros(size + 127, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size]


def cache_folder():
    """Where slow results are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"


def read_cache(name):
    """The dict that is cached under a name, or {}."""
    try:
        return json.loads((cache_folder() / f"{name}.json").read_text())
    except (OSError, ValueError):  # not there yet, or damaged
        return {}


def write_cache(name, values):
    """Merge a dict into the one cached under a name, if the folder can be written."""
    with contextlib.suppress(OSError, UserError):
        text = json.dumps(read_cache(name) | values)
        replace_file(cache_folder() / f"{name}.json", [text.encode()])


class FastCuda(Cuda):
    """Cuda with cuBLASLt in place of cuBLAS: graphs can capture its products, and epilogues work on
    out before it leaves the registers. CuPy loads the library without wrapping it, so ctypes calls
    it. Bare numbers are cublasLt.h's."""
    WORKSPACE = 32 * 2**20  # bytes, as many as cuBLAS takes on Hopper
    CANDIDATES = 8  # algorithms of a product that are timed when it first comes up
    NO_EPILOGUE, ADD_BIAS, GELU_AND_BIAS, TIMES_DGELU = 1, 4, 164, 192
    hopper = False  # whether kernels are compiled with -DHOPPER
    graph = True

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, beside)
        import cupyx.profiler
        self.cupyx, self.fused_gelu = cupyx, self.dtype == "bf16"
        self.maps, self.plans = {}, {}  # {array: its tensor map}, {product: how to do it}
        self.capturing = self.cupy.cuda.Stream(non_blocking=True)  # the default one cannot capture
        loaded = re.search(r"/.*libcublasLt\.so.*", Path("/proc/self/maps").read_text())
        if not loaded:
            raise UserError("CuPy has loaded no cuBLASLt: pip install -r requirements.txt; --plain "
                            "1 does without it")
        self.library = ctypes.CDLL(loaded[0])
        self.handle, self.workspace = self.create(""), self.empty(self.WORKSPACE)
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        versions = (self.library.cublasLtGetVersion(),
                    self.cupy.cuda.runtime.driverGetVersion())
        self.cache = re.sub(r"\W+", "_", f"matmul {self} {versions}")
        self.choices = read_cache(self.cache)  # {product: the algorithm chosen by an earlier run}

    def switches(self):
        """On Hopper, bf16 attention of heads of 64 or 128 channels has its own instructions."""
        if self.capability != 90:
            return super().switches()
        self.hopper = self.real == BF16 and bool({"-DHS=64", "-DHS=128"} & set(self.compiled_for))
        # wgmma needs the target sm_90a; sm_90 is not enough
        return [*super().switches(), "-arch=sm_90a", *(["-DHOPPER"] if self.hopper else [])]

    def tiles(self, array, B, T):
        """What Hopper's copy engine has to know of an array (B,T,channels) in bf16, of which it
        copies boxes of 64 tokens and 64 channels: 128 bytes, by value."""
        if not self.hopper:
            return array
        key = B, T, array.data.ptr, array.size
        if key not in self.maps:
            self.maps[key] = made = aligned_bytes(128)
            width = array.size // (B * T)

            def numbers(kind, *values):
                return (kind * len(values))(*values)

            status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
                ctypes.c_void_p(made.ctypes.data), 9, 3, address(array),  # bf16, three dimensions
                numbers(ctypes.c_uint64, width, T, B),
                numbers(ctypes.c_uint64, 2 * width, 2 * width * T),
                numbers(ctypes.c_uint32, 64, 64, 1), numbers(ctypes.c_uint32, 1, 1, 1),
                0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128 bytes at a time, zeros beyond
            if status:
                raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: {B=}, {T=}, "
                                f"{width} channels")
        return self.maps[key].view("V128")  # one number, for CuPy, that goes by value

    def call(self, name, *args):
        """Call a function of cuBLASLt."""
        status = getattr(self.library, f"cublasLt{name}")(*args)
        if status:
            self.cupy.cuda.runtime.deviceSynchronize()  # raises what a kernel before has done wrong
            raise UserError(f"cublasLt{name} failed with status {status}; --plain 1 does without "
                            "it")

    def create(self, kind, *args, attributes=()):
        """An object of cuBLASLt, with these (attribute, value) set."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *args)
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            self.call(f"{kind}SetAttribute", made, attribute, ctypes.byref(value), size)
        return made

    def attributes(self, transpose_a, transpose_b, epilogue, out, bias, aux):
        """(attribute, value) that describe a product: 3, 4: are b and a transposed? 7: the
        epilogue. 8: bias. 11, 12: GELU's input, and its rows' stride."""
        return [(3, ctypes.c_int(transpose_b)), (4, ctypes.c_int(transpose_a)),
                (7, ctypes.c_int(epilogue)), (8, address(bias)), (11, address(aux)),
                (12, ctypes.c_int64(out.shape[1]))]

    def describe(self, epilogue, out, a, b, *more):
        """A product as cuBLASLt wants it: (description, layout of b, of a, of out)."""
        (transpose_b, _), (transpose_a, _), _ = strides = [stride_of(x) for x in (b, a, out)]
        attributes = self.attributes(transpose_a, transpose_b, epilogue, out, *more)
        description = self.create("MatmulDesc", self.compute, self.TYPES["f4"],
                                  attributes=attributes)
        layouts = []
        for x, (transposed, stride) in zip((b, a, out), strides):
            m, n = x.shape if transposed else x.shape[::-1]
            sizes = ctypes.c_uint64(m), ctypes.c_uint64(n), ctypes.c_int64(stride)
            layouts.append(self.create("MatrixLayout", self.TYPES[x.dtype.str[1:]], *sizes))
        return description, *layouts

    def multiply(self, plan, algorithm, accumulate, out, a, b):
        """Queue a product that describe() has described."""
        description, b_layout, a_layout, out_layout = plan
        one, beta = ctypes.c_float(1), ctypes.c_float(accumulate)
        stream = ctypes.c_void_p(self.cupy.cuda.get_current_stream().ptr)
        self.call("Matmul", self.handle, description, ctypes.byref(one), address(b), b_layout,
                  address(a), a_layout, ctypes.byref(beta), address(out), out_layout, address(out),
                  out_layout, ctypes.c_void_p(algorithm.ctypes.data), address(self.workspace),
                  ctypes.c_size_t(self.WORKSPACE), stream)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul."""
        epilogue, result, aux = self.NO_EPILOGUE if bias is None else self.ADD_BIAS, out, None
        if self.fused_gelu and gelu is not None:
            epilogue, result, aux = self.GELU_AND_BIAS, gelu, out
        elif self.fused_gelu and dgelu_at is not None:
            epilogue, aux = self.TIMES_DGELU, dgelu_at
        self.product(epilogue, result, a, b, bias, aux, accumulate)
        if aux is None:
            self.gelu_of_product(out, gelu, dgelu_at)

    def product(self, epilogue, out, a, b, bias, aux, accumulate, *more):
        """Queue a product. more: what else describe() is told of it, arrays."""
        name = out.shape, a.shape, a.strides, b.strides, out.itemsize, epilogue
        name = *name, *(a.dtype.str for _ in more)
        arrays = (x if x is None else x.data.ptr for x in (bias, aux, *more))
        key = name, accumulate, *arrays
        if key not in self.plans:
            plan = self.describe(epilogue, out, a, b, bias, aux, *more)
            self.plans[key] = plan, self.choose(name, plan, accumulate, out, a, b)
        self.multiply(*self.plans[key], accumulate, out, a, b)

    def choose(self, name, plan, accumulate, out, a, b):
        """The fastest algorithm for a product, timed on its own operands when it first comes up.
        It is saved, so that later runs add up in the same order: the same seed, the same bits. An
        accumulating product cannot be timed, since repeating it changes out; it reuses the plain
        product's choice, or takes the first on offer."""
        known = (self.choices.get(str((*name, accumulate)))
                 or self.choices.get(str((*name, False))))
        if known:
            return np.array(known, np.uint64)

        preference = self.create("MatmulPreference", attributes=(
            (1, ctypes.c_size_t(self.WORKSPACE)),
            (3, ctypes.c_uint32(2)),  # a sum in several parts is added up in fp32
            *((matrix, ctypes.c_uint32(ALIGN)) for matrix in (5, 6, 7, 8))))
        # Of an algorithm's 12 numbers the first 8 matter.
        algorithms, found = np.zeros((self.CANDIDATES, 12), np.uint64), ctypes.c_int()
        self.call("MatmulAlgoGetHeuristic", self.handle, *plan, plan[3], preference,
                  self.CANDIDATES, ctypes.c_void_p(algorithms.ctypes.data), ctypes.byref(found))
        self.call("MatmulPreferenceDestroy", preference)
        if not found.value:
            raise UserError(f"cuBLASLt has no algorithm for a product {name}; --plain 1 does "
                            "without it")

        def thrice(algorithm):
            for _ in range(3):
                self.multiply(plan, algorithm, False, out, a, b)

        benchmark = functools.partial(self.cupyx.profiler.benchmark, thrice, n_repeat=3, n_warmup=1)
        times = [benchmark((algorithm,)).gpu_times.min()
                 for algorithm in algorithms[: found.value] if not accumulate]
        best = algorithms[int(np.argmin(times or [0]))]
        chosen = {str((*name, accumulate)): best[:8].tolist()}
        self.choices |= chosen
        write_cache(self.cache, chosen)
        return best

    def repeat(self, graphs, key, work):
        """Do work(): plainly the first time, which chooses algorithms; the second time it is
        recorded as a graph. From then on one launch does it all, without gaps between kernels."""
        if not self.graph or key not in graphs:
            work()
            graphs[key] = None
            return
        if graphs[key] is None:
            with self.capturing:
                self.capturing.begin_capture()
                try:
                    work()
                finally:
                    graph = self.capturing.end_capture()
            graphs[key] = graph
        graphs[key].launch()

    def fetch(self, array):
        """Queue a copy to the host, and return a function that waits for it and returns it."""
        stream, host = self.cupy.cuda.get_current_stream(), self.cupyx.empty_like_pinned(array)
        array.get(stream=stream, out=host, blocking=False)
        copied = stream.record()

        def wait():
            copied.synchronize()
            return host

        return wait


if __name__ == "__main__":
    sys.modules["train_gpt2"] = sys.modules["__main__"]  # dev/ imports this module, not a copy
    run(main)
