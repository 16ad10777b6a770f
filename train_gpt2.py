"""Train GPT-2 from raw kernels.

    pip install -r requirements.txt && python train_gpt2.py

Read this file from top to bottom, with kernels.cu beside it: the model as tables, the files, the GPU, a layer forward
beside the same layer backward, the update, the loop, a sample, the flags. The last section, "Faster", is there for
speed alone: leave it out at a first reading, as `--plain 1` does in a run. Sizes have the same letters everywhere:

    B   sequences in a batch            L   layers
    T   tokens in a sequence            NH  attention heads
    N   tokens in a batch, B*T          C   channels of a token; OC of a linear layer's output
    V   words of the vocabulary         HS  channels of a head, C/NH
    Vp  V padded, so that the matrix product over it is fast

A kernel is a C++ function that a GPU runs many times at once:

    thread         One run of the function. It knows its number, and so which part of the work is its own.
    warp           32 threads, its lanes, which execute each instruction together and should load neighbouring numbers.
    block          Up to 1,024 threads on one multiprocessor. They can wait for each other at a barrier.
    shared memory  Some 200 KB of fast memory on each multiprocessor, which the threads of a block share.
    grid           All blocks of a launch. The GPU's 100 or so multiprocessors take them in any order.

Version 1 of each kernel in dev/cuda/ is the loop that one would write first, and the place to start.
"""
import bisect
import ctypes
import dataclasses
import itertools
import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from prepro_tinyshakespeare import (ADAMW_FLAGS, BF16, DEFAULT_T, EOT, FLAGS, HEADER_BYTES, LOW, SIZES, FileKind,
                                    UserError, aligned_bytes, check_needs, check_size, count_tokens, data_paths, decode,
                                    duration, files_of, gpt2_encoding, has_gpu, kept_as, launched, make_header,
                                    parse_flags, progress, read_cache, read_header, read_kernels, read_tokens, run, say,
                                    set_defaults, stop_signals, to_float, write_cache)
import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

HERE = Path(__file__).resolve().parent

# ---- The model: its sizes, and tables of all that it keeps in memory


class Row(NamedTuple):
    """A row of a table describes a tensor: its name, shape and type; with layers, one such tensor for each layer."""
    name: str
    shape: tuple
    dtype: type = np.float32
    layers: int = 0
    mean: float = 0.0  # a parameter starts as mean + std * normal
    std: float = 0.0
    decay: bool = False  # weight decay applies
    matrix: bool = False  # a product sets its gradient; any other gradient is cleared first, and kernels add to it

    @property
    def size(self):
        return math.prod(self.shape) * max(1, self.layers)

    @property
    def nbytes(self):
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def whole_shape(self):
        return (self.layers, *self.shape) if self.layers else self.shape


ALIGN = 64  # bytes, where tensors start. 32 divides C, so parameters have no gaps: a checkpoint is the arena's bytes.
LOGIT_ROWS = 8192  # the fewest tokens whose logits are computed at a time, if there are as many
PARTIAL_ROWS = 256  # layernorm_backward leaves at most this many partial sums a column; add_partials adds them
NORM_BLOCKS = 1024  # the most blocks that share the sum of the gradient's norm
WINDOW = 128  # steps whose losses and norms say if the next one's are outliers
ADAMW = ("learning_rate", "rate1", "rate2", "correction1", "correction2", "eps", "weight_decay", "clip", "loss_limit",
         "norm_limit", "seed", "step")  # the fields of its struct in kernels.cu


class Verdict(NamedTuple):
    """What the device says of a step, as kernels.cu's struct has it: is its update made, or are all stopped?"""
    norm: float
    loss: float
    norm_z: float  # z-scores: how far above the mean of the last WINDOW steps, in their standard deviations; or NaN
    loss_z: float
    update: float
    stopped: float


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2: its sizes, in the order of a checkpoint's header, and the tables of its tensors. `real` is the type in
    which parameters and activations are stored, fp32 or bfloat16."""
    maxT: int = 1024
    V: int = 50257
    L: int = 12
    NH: int = 12
    C: int = 768
    Vp: int = 50304

    FILE = FileKind("GPT-2 checkpoint", 20240326, (3, 5), "a run with -o writes one, dev/convert.py another")
    STORED = {3: np.float32, 5: BF16}  # the numbers of a checkpoint, by its version
    SOURCES = (HERE / "kernels.cu",)
    MODELS = ("gpt2_124M.bin", "d12", "d3")  # without -e: a checkpoint, if it is here; on a GPU; on a CPU
    DESCRIPTORS = "d12, d24, d36, d48 and the like for that depth"
    PADDED = ("wte",)  # parameters whose rows are words, of which those beyond V are zeros
    EOT, data_paths = EOT, staticmethod(data_paths)  # the token between two texts; the token files of -i and -j
    longest = property(lambda self: self.maxT)  # T of a sequence, at most: wpe has no more positions
    NKV = property(lambda self: self.NH)  # heads of keys and values: each query head has its own

    @classmethod
    def from_file(cls, path):
        """The config of a checkpoint, after checking all that can be checked without reading its tensors."""
        header = read_header(path, cls.FILE)
        c = cls(*header[2:8])
        c.check(path)
        check_size(path, cls.FILE, HEADER_BYTES + sum(row.nbytes for row in c.file_table(cls.STORED[header[1]])))
        return c

    @classmethod
    def from_descriptor(cls, descriptor):
        """The config of depth N for "dN"; d12, d24, d36, d48 are GPT-2 small, medium, large, XL, and d60, d72, d84 are
        llm.c's larger ones. Raises UserError."""
        if not re.fullmatch(r"d[1-9]\d{0,2}", descriptor):
            raise UserError(f"-e {descriptor}: expected a checkpoint, or a descriptor from d1 to d999, such as d12")
        L = int(descriptor[1:])
        NH = {48: 25, 60: 30, 72: 30, 84: 36}.get(L, min(L, 12 + max(0, L - 12) // 3))
        return cls(L=L, NH=NH, C=NH * {72: 96, 84: 96}.get(L, 64))

    def check(self, path, wishes=()):
        """Raise UserError, naming where the sizes come from, unless they make a model and the wishes hold, each of them
        (whether it holds, what is expected)."""
        for ok, wish in ((all(0 < size < 2**24 for size in dataclasses.astuple(self)[:6]), "sizes from 1 to 2**24 - 1"),
                         (self.NH and self.C % self.NH == 0, "C to be divisible by NH"),
                         (self.C % 32 == 0, "C to be a multiple of 32"), (self.V <= self.Vp, "V not to exceed Vp"),
                         *wishes):
            if not ok:
                raise UserError(f"{path}: {self}; expected {wish}")

    def switches(self):
        """What kernels.cu is compiled for: the channels of a token, and those of a head."""
        return [f"-DCHANNELS={self.C}", f"-DHS={self.C // self.NH}"]

    def parameter_table(self, real=np.float32):
        """The parameters, in the order of a checkpoint. They start as in the GPT-2 paper (Radford et al. 2019, section
        2.3): the 2L matrices that add to the residual stream are scaled down by sqrt(2L)."""
        C, once, each = self.C, dict(dtype=real), dict(dtype=real, layers=self.L)
        weight = dict(std=0.02, decay=True, matrix=True)
        residual = weight | dict(std=0.02 / math.sqrt(2 * self.L))
        return [
            Row("wte", (self.Vp, C), **once, **weight),  # token embeddings, and the head that makes logits of channels
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
        """The tensors of a checkpoint, or of one with this header, in its order. One that is no parameter is zeros."""
        return self.parameter_table(real)

    def headers(self, version):
        """What a checkpoint of this version begins with."""
        return [make_header(self.FILE, version, *dataclasses.astuple(self))]

    def activation_table(self, B, T, real=np.float32, recompute=0):
        """What the forward pass leaves behind for the backward pass. With recompute 1, layers share one tensor for the
        outputs of norms and GELUs, which the backward pass computes again. With 2, a layer keeps the residual stream as
        it finds it, atty, and small tensors. Layers share the rest, and the same kernels and products compute it again,
        to the same bits. The stream itself is then the last of L + 1 tensors."""
        N, C, L = B * T, self.C, self.L
        normed, inner = L if recompute == 0 else 1, L if recompute < 2 else 1  # layers with such tensors of their own
        return [
            Row("residual", (N, C), layers=1 if recompute < 2 else L + 1),  # the residual stream, always fp32
            Row("branch", (N, C), real),  # what the last attention or MLP computed, about to be added to the stream
            Row("ln1_inp", (N, C), real, inner),  # what ln1 normalises: a copy of the stream as the layer finds it
            Row("ln1_mean", (N,), layers=L),
            Row("ln1_rstd", (N,), layers=L),
            Row("ln1", (N, C), real, normed),
            Row("qkv", (N, 3 * C), real, inner),  # queries, keys and values, each of NH heads
            Row("lse", (B * self.NH, T), layers=L),  # log2 of the sum that normalises a row of attention
            Row("atty", (N, C), real, L),  # attention's output
            Row("ln2_inp", (N, C), real, inner),  # a copy of the stream after attention
            Row("ln2_mean", (N,), layers=L),
            Row("ln2_rstd", (N,), layers=L),
            Row("ln2", (N, C), real, normed),
            Row("fch", (N, 4 * C), real, inner),  # the MLP's hidden channels, before GELU
            Row("fch_gelu", (N, 4 * C), real, normed),  # after GELU; becomes the gradient of fch
            Row("lnf_inp", (N, C), real),  # a copy of the stream after the last layer
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
            Row("dinp", (N, C), real),  # of what a matrix product read: lnf, then each layer's ln2, atty and ln1
            Row("dqkv", (N, 3 * C), real),
            Row("delta", (B * self.NH, T)),  # of attention: the sum over keys of weight * dweight
            Row("dqkv_sums", (B * -(-T // 64), 3 * C)),  # of dqkv's rows, of which a block of attention has 64 or more
            Row("partials", (3, PARTIAL_ROWS, C)),  # sums over some of the rows: see norm_backward, bias_backward
        ]

    def flops_per_token(self, T):
        """FLOPs of training on one token: 6 for each weight of a matrix product (2 forward, 4 backward), and 12*L*C for
        each of the T/2 tokens that attention sees on average (Chowdhery et al. 2022, appendix B, halved: causal)."""
        return 6 * sum(row.size for row in self.parameter_table() if row.matrix) + 6 * self.L * self.C * T


def logit_rows(N):
    """How many of N tokens have logits at a time: all would be a large tensor, but each part adds to all of wte's
    gradient."""
    return min(N, max(LOGIT_ROWS, -(-N // 4)))


def batch_table(B, T):
    """A batch, as the host prepares it."""
    return [
        Row("tokens", (B, T), np.int32),
        Row("targets", (B, T), np.int32),  # for each token the one that follows
        Row("order", (B * T,), np.int32),  # positions sorted by token: see encoder_backward_wte
        Row("run_length", (B * T,), np.int32),  # of the runs of equal tokens in that order
    ]


class Alone:
    """A run of one process. Several, each with a GPU and its part of a batch, are ranks, and dev/ranks.py has these
    verbs for them. Here they do nothing: skip them at a first reading."""
    rank, count, here, zero = 0, 1, 1, False  # here: on this machine; zero: AdamW has but a share of the parameters
    tables = lambda self, c, real: {}  # what a rank allocates besides
    begin = lambda self, *args: None  # before the first step: have all the same flags, code and data?
    sum = lambda self, model, l=None: None  # all-reduce the gradients of layer l, or of what is in no layer
    norm = lambda self, model: None  # with zero: that of the gradients of all shares
    gather = lambda self, model: None  # with zero: the parameters that others have updated
    agree = lambda self, stop, pauses: bool(stop)  # has a rank a signal to stop? pauses: something slow comes next
    exchange = lambda self, value, about: [value]  # [what each rank gives]; about: what an error calls it
    in_turn = lambda self, work: work()  # on each machine first by one rank, then by the others
    __str__ = lambda self: ""


ALONE = Alone()


def arena_tables(c, device, B, T, recompute=0, ranks=ALONE):
    """All that a training run allocates, {arena: table}: the tensors of a table share one allocation, an arena. In
    bf16, AdamW works on fp32 numbers all the same: their upper halves are the parameters, their lower ones low bits."""
    parameters, real = c.parameter_table(), device.real
    ours = ranks.share(parameters) if ranks.zero else parameters  # what AdamW updates here
    moments = [row._replace(dtype=device.moment) for row in ours]
    update = [Row("settings", (len(ADAMW),)), Row("norm", (2 + NORM_BLOCKS,)), Row("verdict", (len(Verdict._fields),)),
              Row("windows", (2, WINDOW), np.float64), Row("seen", (1,), np.int32),  # the last losses and norms
              Row("starts", (len(ours) + 1,), np.uint64),  # where each tensor starts, counted in numbers
              Row("decayed", (len(ours),), np.int32),  # 1 where weight decay applies, else 0
              Row("places", (3, len(ours)), np.uint64)]  # see dev/moments.cu
    low = [row._replace(dtype=LOW) for row in ours]
    return {"parameters": c.parameter_table(real), **({"low bits": low} if real == BF16 else {}),
            "gradients": parameters, "adam m": moments, "adam v": moments, "update": update,
            "batch": batch_table(B, T), "activations": c.activation_table(B, T, real, recompute),
            "backward": c.backward_table(B, T, real), **ranks.tables(c, real), **device.tables(c, B, T)}


def layout(table):
    """Where the tensors of an arena start, in bytes, and behind them where the arena ends."""
    return list(itertools.accumulate((-(-row.nbytes // ALIGN) * ALIGN for row in table), initial=0))


def carve(arena, table):
    """Views of an arena (bytes, on the host or a device), one attribute for each row; with layers, (layers, *shape)."""
    views = SimpleNamespace()
    for row, start in zip(table, layout(table)):
        setattr(views, row.name, arena[start : start + row.nbytes].view(row.dtype).reshape(row.whole_shape))
    return views


def of_layer(views, table, l):
    """The views of layer l alone. Where there are fewer tensors than layers, layers share them."""
    return SimpleNamespace(**{row.name: getattr(views, row.name)[l % row.layers] for row in table if row.layers})


def matrices(values):
    """A parameter's matrices, one a layer, so that billions of numbers can be moved in parts; or one, which is all."""
    return values.reshape(-1, *values.shape[-2:])


def draw_parameters(c, seed):
    """(name, values) of random parameters, fp32. Each tensor has a generator of its own, so that all cores can draw."""
    def draw(i, row):
        values = np.random.default_rng([seed, i]).standard_normal(row.whole_shape, np.float32)
        values *= row.std
        values += row.mean
        if row.name in c.PADDED:
            values[c.V :] = 0
        return row.name, values

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, itertools.count(), c.parameter_table())


# ---- Files, byte for byte as llm.c has them: a header of 256 int32, then numbers


def mapped(path, table, start):
    """(name, values) of the tensors of a table, which lie in a file from byte `start` on, mapped into memory."""
    for row in table:
        yield row.name, np.memmap(path, row.dtype, "r", start, row.whole_shape)
        start += row.nbytes


def read_parameters(path, c):
    """(name, values) of the tensors of a checkpoint of config c, mapped into memory as they are stored."""
    header = read_header(path, c.FILE)
    table = c.file_table(c.STORED[header[1]], header)
    return mapped(path, table, os.path.getsize(path) - sum(row.nbytes for row in table))


class DataLoader:
    """Hands out the batches of a token file, or of all that a pattern matches, and begins again at their end. What is
    left at the end of a file, and fills no batch, is skipped. With shuffle, files come in a random order, another in
    each epoch, and so do the batches of each file, as in llm.c. By default, files are shuffled if there are several.
    Each of several ranks has a slot, B*T tokens, of all batches, and an order of its own."""

    def __init__(self, pattern, B, T, V, shuffle=None, ranks=ALONE):
        self.paths, self.ranks, self.size = files_of(pattern), ranks, ranks.count * B * T  # tokens of a batch
        self.B, self.T, self.V, counts = B, T, V, [count_tokens(path)[0] for path in self.paths]
        for path, count in zip(self.paths, counts):
            if count <= self.size:
                raise UserError(f"{path}: {count:,} tokens, and a batch{ranks} needs B*T+1 = {self.size + 1:,}; "
                                "give a longer file, or a smaller -b or -t")
        self.total, self.batches_of = sum(counts), [(count - 1) // self.size for count in counts]
        self.batches = sum(self.batches_of)  # of an epoch
        self.shuffle = len(counts) > 1 if shuffle is None else shuffle
        self.rng = np.random.RandomState(42 + ranks.rank)
        self.files, self.path = self.permuted(range(len(counts))), None
        self.open(0)

    def permuted(self, items):
        """The items as a list; with shuffle, permuted by Fisher and Yates's method from the end, as llm.c does it, with
        the numbers of a Mersenne Twister."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1) if self.shuffle else ():
            j = int(self.rng.randint(2**32, dtype=np.uint32)) % (i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def open(self, place):
        """Go to the first batch of the file at a place in this epoch's order."""
        self.place, self.next, path = place, 0, self.paths[self.files[place]]
        if path != self.path:
            self.path, self.tokens = path, read_tokens(path, self.V)
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
        start = self.order[self.next - 1] * self.size + self.ranks.rank * slot
        self.where = f"{self.path}, tokens {start} to {start + slot}"  # for a report when something is wrong with them
        window = self.tokens[start : start + slot + 1].astype(np.int32)
        return window[:-1].reshape(self.B, self.T), window[1:].reshape(self.B, self.T)


def pack_batch(tokens, targets=0):
    """(the bytes of a batch's arena, (B,T)), of tokens and targets, each (B,T) int32; without targets they are 0."""
    table = batch_table(*tokens.shape)
    data = np.zeros(layout(table)[-1], np.uint8)
    batch = carve(data, table)
    batch.tokens[...], batch.targets[...] = tokens, targets
    flat = tokens.reshape(-1).astype(np.uint32 if tokens.max() > 65535 else np.uint16)  # NumPy radix-sorts 16 bits
    batch.order[...] = np.argsort(flat, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(flat[batch.order].astype(np.int32)) != 0])  # where a new word does
    batch.run_length[begins] = np.diff(begins, append=flat.size)
    return data, tokens.shape


# ---- The device, plain: a few verbs, in which all that follows is written. dev/cpu/device.py has them for a CPU.


def address(array):
    """A CuPy array's address, or a null pointer for None, as ctypes wants it."""
    return ctypes.c_void_p(None if array is None else array.data.ptr)


class Cuda:
    """An NVIDIA GPU through CuPy. Work is queued on CuPy's current stream and done in order; get waits for it. dtype:
    "bf16", "fp32", or "tf32", which is fp32 with matrix products that round their inputs to TF32; c: the Config that
    kernels are compiled for; beside: more CUDA files to compile behind kernels.cu. Raises UserError."""
    name, memory, launched, OPTIONS = "cuda", "device memory", "the start", ("-std=c++17",)
    TYPES = {"f4": 0, "u2": 14, "u1": 28}  # cuBLAS's CUDA_R_32F, _16BF and _8F_E4M3
    ONE, NOUGHT = np.ones(1, np.float32), np.zeros(1, np.float32)
    # What FP8 does besides: see dev/fp8.py.
    fp8, tables, state = False, lambda self, c, B, T: {}, lambda self: []
    adopt = begin_step = end_step = cast_weights = go_on = lambda self, *args, **more: None
    ahead = 0  # steps whose results may be outstanding when the next one is queued: see train()
    SPARE = 2**28  # bytes that are not for the tables: what CuPy, cuBLAS and the driver take in the first step
    # Dense FLOPs of a multiprocessor in a clock, in fp32, tf32, bf16 and fp8: NVIDIA's architecture white papers.
    FLOPS_PER_CLOCK = {80: (128, 1024, 2048, 0), 86: (256, 256, 512, 0), 89: (256, 256, 512, 1024),
                       90: (256, 2048, 4096, 8192), 100: (256, 4096, 8192, 16384), 120: (256, 256, 512, 1024)}

    def __init__(self, dtype, c, beside=()):
        try:
            import cupy
            from cupy_backends.cuda.libs import cublas
            cupy.cuda.runtime.getDeviceCount()
        except ImportError as e:
            raise UserError(f"--device cuda needs CuPy, which is not installed ({e}): pip install -r requirements.txt, "
                            "or train with --device cpu") from None
        except cupy.cuda.runtime.CUDARuntimeError as e:
            raise UserError(f"no GPU for --device cuda ({e}): check nvidia-smi, or train with --device cpu") from None
        self.cupy, self.cublas, self.gpu, self.dtype = cupy, cublas, cupy.cuda.Device(), dtype or "bf16"
        self.Fault = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, cublas.CUBLASError
        self.compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if dtype == "tf32" else cublas.CUBLAS_COMPUTE_32F
        capability, attributes = int(self.gpu.compute_capability), self.gpu.attributes
        least, name, remedy = (89, "Ada", "--dtype bf16") if dtype == "fp8" else (80, "Ampere", "--device cpu")
        if capability < least:
            raise UserError(f"this GPU has compute capability {capability / 10}, and the kernels need {least / 10} "
                            f"({name}) or later: train with {remedy}")
        self.real = BF16 if self.dtype in ("bf16", "fp8") else np.float32
        self.maps = {}  # {array: its tensor map}
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        self.max_shared = attributes["MaxSharedMemoryPerBlockOptin"] - 1024  # the rest is for kernels' own arrays
        self.multiprocessors = attributes["MultiProcessorCount"]
        flops = self.FLOPS_PER_CLOCK.get(capability, (0,) * 4)[("fp32", "tf32", "bf16", "fp8").index(self.dtype)]
        self.peak_flops = flops * self.multiprocessors * attributes["ClockRate"] * 1e3
        sources, self.compiled_for = [*c.SOURCES, *beside], c.switches()
        hopper = ["-arch=sm_90a"] if capability == 90 else []  # wgmma needs this target; sm_90 is not enough
        code = "".join(f'#line 1 "{path.name}"\n{path.read_text("utf-8")}' for path in sources)
        module = cupy.RawModule(code=code, options=(*self.OPTIONS, *hopper, f"-D{self.dtype.upper()}", *c.switches()))
        self.kernels = read_kernels(sources)
        try:
            self.functions = {name: module.get_function(name) for name in self.kernels}
            for name, fields in SIZES.items():  # attention_sizes, layernorm_sizes
                values = cupy.ndarray(len(fields), np.int32, module.get_global(name)).get().tolist()
                setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
            cublas.setMathMode(self.gpu.cublas_handle, 16)  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
        except cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile kernels.cu:\n{e}") from None
        except self.Fault as e:
            raise UserError(f"the GPU cannot be used ({e}): check nvidia-smi, or train with --device cpu") from None

    def __str__(self):
        name = self.cupy.cuda.runtime.getDeviceProperties(self.gpu.id)["name"].decode()
        return f"{name}, {self.dtype}" + (f", peak {self.peak_flops / 1e12:.0f} TFLOP/s" if self.peak_flops else "")

    def free_bytes(self):
        """How much device memory there is for the tables."""
        return max(0, self.gpu.mem_info[0] - self.SPARE)

    def empty(self, nbytes):
        try:
            return self.cupy.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {nbytes / 2**30:.2f} GiB more; choose a smaller -b, -t or -e") from None

    def put(self, array, values):
        """Copy an array of the host's to one on the device."""
        values = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
        array.set(values, stream=self.cupy.cuda.get_current_stream())

    def get(self, array):
        """A copy of an array on the host."""
        return self.cupy.asnumpy(array)

    def zero(self, array):
        array.data.memset_async(0, array.nbytes)

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over so many items. The BLOCK(...) over it says how many of them a block covers. Each block has
        `shared` bytes of dynamic shared memory."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: no kernel {name} with a BLOCK(...) over it, and train_gpt2.py launches it")
        function, self.launched = self.functions[name], name
        if shared > 2**15 and shared > function.max_dynamic_shared_size_bytes:  # more than 48 KiB has to be asked for
            function.max_dynamic_shared_size_bytes = shared
        function(*self.kernels[name].plan(items, args, self.W, threads), shared_mem=shared)

    def tensor_map(self, B, T, array):
        """What Hopper's copy engine has to know of an array (B,T,channels) in bf16, of which it copies boxes of 64
        tokens and 64 channels: 128 bytes, a kernel's argument. Zeros if kernels.cu has no use for it. Raises
        UserError."""
        key = B, T, array.data.ptr, array.size
        if key not in self.maps:
            self.maps[key] = made = aligned_bytes(128)
            width, numbers = array.size // (B * T), lambda kind, *values: (kind * len(values))(*values)
            status = self.attention_sizes.maps and ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
                ctypes.c_void_p(made.ctypes.data), 9, 3, address(array),  # bf16, in three dimensions
                numbers(ctypes.c_uint64, width, T, B), numbers(ctypes.c_uint64, 2 * width, 2 * width * T),
                numbers(ctypes.c_uint32, 64, 64, 1), numbers(ctypes.c_uint32, 1, 1, 1),
                0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128 bytes at a time from memory, zeros beyond
            if status:
                raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: {B=}, {T=}, {width} channels")
        return self.maps[key].view("V128")  # one number, for CuPy, that goes by value

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """out (I,J) = a (I,K) @ b (K,J), plus bias (J) in each row; or, with accumulate, out += a @ b.
        With gelu (I,J), that becomes GELU of out. With dgelu_at (I,J), out is multiplied by GELU's derivative there.

        cuBLAS stores matrices by columns, and we by rows. So it sees each of our matrices transposed:

            ours          its bytes            the same bytes to cuBLAS
            | 0 1 2 |                          | 0 3 |
            | 3 4 5 |     0 1 2 3 4 5          | 1 4 |
                                               | 2 5 |

        It is asked for out.T = b.T @ a.T, in which a and b have changed places, and what it writes is our out.
        """
        lib, handle, types = self.cublas, self.gpu.cublas_handle, self.TYPES
        if bias is not None:
            out[...] = bias
        one, beta = self.ONE, self.ONE if accumulate or bias is not None else self.NOUGHT  # out = one a @ b + beta out
        (transpose_a, stride_a), (transpose_b, stride_b) = stride_of(a), stride_of(b)
        lib.gemmEx(handle, transpose_b, transpose_a, *out.shape[::-1], a.shape[1], one.ctypes.data, b.data.ptr,
                   types[b.dtype.str[1:]], stride_b, a.data.ptr, types[a.dtype.str[1:]], stride_a, beta.ctypes.data,
                   out.data.ptr, types[out.dtype.str[1:]], out.shape[1], self.compute, lib.CUBLAS_GEMM_DEFAULT)
        self.gelu_of_product(out, gelu, dgelu_at)

    def gelu_of_product(self, out, gelu, dgelu_at):
        """What remains to be done where a product has no part in GELU."""
        if gelu is not None:
            self.launch("gelu_forward", out.size, gelu, out, *out.shape)
        if dgelu_at is not None:
            self.launch("gelu_backward", out.size, out, dgelu_at, *out.shape)

    def fetch(self, array):
        """A function that returns the numbers which array has when the work queued so far is done."""
        values = self.get(array)
        return lambda: values

    def replay(self, graphs, key, work, count):
        """Do work(), whose launches are the same each time for one key; or, if it need not be run for that, count()."""
        work()


def stride_of(x):
    """(transposed, stride) for BLAS: (0, numbers to the next row), or of a view such as w.T (1, to the next column)."""
    to_row, to_column = (stride // x.itemsize for stride in x.strides)
    return (0, max(to_row, x.shape[1])) if to_column == 1 or x.shape[1] == 1 else (1, max(to_column, x.shape[0]))


def make_device(name, dtype, c, plain=False, graph=True, beside=(), moments="fp32"):
    """The device "cuda" or "cpu", with the kernels of a config (see Cuda). Raises UserError."""
    if moments == "bf16":
        beside = [*beside, HERE / "dev/moments.cu"]
    if dtype == "fp8":
        from dev.fp8 import fp8_device
        device = fp8_device(name, c, plain, graph, beside)
    elif name == "cuda":
        device = Cuda(dtype, c, beside) if plain else FastCuda(dtype, c, beside, graph)
    else:
        from dev.cpu.device import Cpu
        device = Cpu(dtype, c, beside)
    device.moment = BF16 if moments == "bf16" else np.float32  # as which AdamW's moments are stored
    return device


# ---- The model


def launch_attention(device, kernel, arrays, tiled, B, T, NH, NKV, scale, relu):
    """Launch one of attention's three kernels, in which a block has some rows of a query head, or a key head. It copies
    tiles of the arrays `tiled`, (N,channels)."""
    sizes, heads = device.attention_sizes, NKV if kernel == "attention_backward_kv" else NH
    shared = sizes.shared_forward if kernel == "attention_forward" else sizes.shared_backward
    maps = [device.tensor_map(B, T, array) for array in tiled]
    device.launch(kernel, -(-T // sizes.rows) * B * heads, *arrays, *tiled, *maps, scale, relu, T, NH, NKV,
                  threads=sizes.threads, shared=shared)


def layernorm_backward_launch(device, N):
    """(blocks, threads, bytes of shared memory): a block on each multiprocessor, with as many rows as fit there."""
    sizes = device.layernorm_sizes
    rows = min(sizes.threads // sizes.row_threads, device.max_shared // sizes.shared_of_row)
    blocks = min(device.multiprocessors, -(-N // rows), PARTIAL_ROWS)
    return blocks, rows * sizes.row_threads, rows * sizes.shared_of_row


def classifier_launch(device, N, Vp, with_gradient):
    """(blocks, logits, bytes of shared memory): a block on each multiprocessor, with room for so many logits, at most
    two rows. Or a block for each row, without room: on a CPU, or where long rows are read only once."""
    room = min(2 * Vp, device.max_shared // 16 * device.W)
    if device.name == "cpu" or not with_gradient and room < 2 * Vp:
        return N, 0, 0
    return min(N, device.multiprocessors), room, room // device.W * 16


def memory_of(c, device, B, T, recompute, ranks=ALONE):
    """The bytes that a model's tables ask for, those that are free, and the largest B whose tables fit there, or 0."""
    def bytes_of(B):
        return sum(layout(table)[-1] for table in arena_tables(c, device, B, T, recompute, ranks).values())

    free = device.free_bytes()
    return bytes_of(B), free, bisect.bisect_right(range(1, 2**16), free, key=bytes_of)


class GPT2:
    """GPT-2 on a device. B, T: the largest batch; attention: "softmax", or "relu" for att = max(0, q.k / sqrt(HS));
    recompute: see Config.activation_table. Everything is allocated here. Raises UserError if the device is too small.
    dev/llama3/ has another architecture: a subclass with its own Config, head, and methods from layer_forward on."""
    Config, decode, encoding = Config, staticmethod(decode), staticmethod(gpt2_encoding)

    def __init__(self, config, device, B, T, attention="softmax", recompute=0, ranks=ALONE):
        if T > config.longest:
            raise UserError(f"-t {T}: this model has positions for at most maxT = {config.maxT} tokens")
        if device.compiled_for != config.switches():
            raise UserError(f"the device's kernels are compiled for {' '.join(device.compiled_for)}: expected a device "
                            f"for {' '.join(config.switches())}")
        shared = max(device.attention_sizes.shared_forward, device.attention_sizes.shared_backward,
                     device.layernorm_sizes.shared_of_row)
        if shared > device.max_shared:
            raise UserError(f"C = {config.C}, NH = {config.NH}: a block needs {shared:,} bytes of shared memory, "
                            f"and this device has {device.max_shared:,}: choose a smaller C, smaller heads, or bf16")
        asked, free, fits = memory_of(config, device, B, T, recompute, ranks)
        if asked > free:
            *_, fits_again = memory_of(config, device, B, T, 2, ranks)
            raise UserError(f"-b {B} -t {T}: the tables ask for {asked / 2**30:.2f} GiB of {device.memory}, and "
                            f"{free / 2**30:.2f} are free; the largest -b that fits is {fits}, with --recompute 2 "
                            f"{fits_again}" + "; choose a smaller -t or -e" * (fits_again == 0))

        self.config, self.device, self.B, self.T, self.recompute, self.ranks = config, device, B, T, recompute, ranks
        self.scale, self.relu = (config.C // config.NH) ** -0.5, int(attention == "relu")  # of attention's scores
        tables = arena_tables(config, device, B, T, recompute, ranks)
        self.arenas = {name: device.empty(layout(table)[-1]) for name, table in tables.items()}
        self.params = carve(self.arenas["parameters"], tables["parameters"])
        self.grads = carve(self.arenas["gradients"], tables["gradients"])
        own = "param share" if ranks.zero else "parameters"  # what AdamW updates here
        halves = [name for name in (own, "low bits") if name in tables]  # in fp32 the first is all
        self.halves = [self.arenas[name].view(tables[name][0].dtype) for name in halves]
        self.originals = [carve(self.arenas[name], tables[name]) for name in halves]  # the same, by tensors
        self.adamw_grads = self.arenas.get("grad share", self.arenas["gradients"]).view(np.float32)
        self.staged = self.grads if ranks.zero else None  # what whole tensors are read into, to keep a share of them
        self.m, self.v = (carve(self.arenas[name], tables[name]) for name in ("adam m", "adam v"))
        self.head, self.dhead = self.params.wte, self.grads.wte  # GPT-2's head makes logits with its embeddings
        for name in tables.keys() - {"activations", "backward"}:
            device.zero(self.arenas[name])
        self.adam = carve(self.arenas["update"], tables["update"])
        device.put(self.adam.starts, np.cumsum([0, *(row.size for row in tables[own])]))
        device.put(self.adam.decayed, [row.decay for row in tables[own]])
        if device.moment == BF16:
            from dev.moments import places
            device.put(self.adam.places, places(config, ranks))
        self.shape = None  # (B,T) of the batch that the activations are laid out for
        self.graphs = {}  # {see train_step: a graph} of a device that makes them: they hold this model's addresses
        self.step = 0  # steps done
        self.micros = 1  # micro-batches of the step that is queued, of all ranks, over which its loss is the mean
        device.adopt(self)

    def set_parameters(self, tensors):
        """Set parameters from (name, values) pairs, fp32 or bf16."""
        self.set_tensors(tensors, self.originals)
        self.device.cast_weights(rescale=True)

    def master(self):
        """The fp32 numbers that AdamW updates here, on the host."""
        return to_float(*map(self.device.get, self.halves))

    def set_tensors(self, tensors, sets):
        """Set tensors of these sets, which keep halves or all of them, from (name, values) pairs. Other names are
        skipped, and missing words stay. A rank that has shares puts whole tensors into the gradients' memory, and keeps
        its share of them. Of parameters it updates a share, but multiplies with all."""
        whole = sets if not self.staged else [self.staged, self.params] if sets is self.originals else [self.staged]
        for name, values in tensors:
            for views in whole:
                for to, part in zip(matrices(getattr(views, name)), matrices(values)) if hasattr(views, name) else ():
                    part = to_float(part)
                    self.device.put(to.reshape(-1)[: part.size], kept_as(part, to.dtype))
        if self.staged:
            self.ranks.keep(self, sets)

    def set_batch(self, batch):
        """Copy a batch of pack_batch to the device, and lay the arenas out for its (B,T), which may be smaller."""
        data, (B, T) = batch
        self.device.put(self.arenas["batch"][: data.nbytes], data)
        if (B, T) == self.shape:
            return
        c, real = self.config, self.device.real
        parameters, activations = c.parameter_table(), c.activation_table(B, T, real, self.recompute)
        self.batch = carve(self.arenas["batch"], batch_table(B, T))
        self.acts = carve(self.arenas["activations"], activations)
        self.back = carve(self.arenas["backward"], c.backward_table(B, T, real))
        self.layers = [(of_layer(self.params, parameters, l), of_layer(self.grads, parameters, l),
                        of_layer(self.acts, activations, l)) for l in range(c.L)]
        size = len(self.acts.logits)  # of the parts of the N tokens whose logits are computed together
        self.parts = [slice(start, min(start + size, B * T)) for start in range(0, B * T, size)]
        self.shape = B, T

    # The residual stream x (N,C) runs through all layers. Each reads it twice, through a norm, and adds to it twice:
    #
    #     x --+--------------------------------->(+)----+------------------------------>(+)--> x, for the next layer
    #         |                                   |     |                                |
    #         +-> ln1 -> qkv -> attention -> attproj    +-> ln2 -> fc ---> GELU ---> fcproj       (computed)
    #         |    |      |         |                   |    |      |        |
    #      ln1_inp ln1   qkv    atty, lse            ln2_inp ln2   fch    fch_gelu        (kept for the backward pass)
    #
    # attproj and fcproj leave their result in `branch`. The addition (+) is done by the next norm's kernel, which reads
    # all of x anyway. x is fp32, and its copies ln1_inp and ln2_inp are rounded to real. The gradient of x, dresidual,
    # goes from right to left: a (+) hands it to the stream and to the branch, and a fork adds what the branch returns.

    def layer_forward(self, l, again=False):
        """Layer l: x = x + attention(ln1(x)), then x = x + mlp(ln2(x)), which the next layer's ln1, or lnf, adds.
        With again, computes once more what layer_backward needs, from the x that it has found and attention's output.
        """
        p, _, a = self.layers[l]
        matmul, branch = self.device.matmul, self.acts.branch
        # x as the layer finds it and as it flows on: one tensor, but with --recompute 2 layers keep what they find.
        found, stream = a.residual, self.acts.residual[-1]
        added = branch if l and not again else None  # what the MLP of layer l - 1 computed: x = stream + added
        self.norm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.ln1_inp, found, stream, added, p.ln1w, p.ln1b)  # -> (N,C)
        matmul(a.qkv, a.ln1, p.qkvw.T, bias=p.qkvb)  # (N,C) @ (C,3C) -> (N,3C)
        if not again:
            self.attention("attention_forward", a.atty, a.lse, tiled=(a.qkv,))  # (N,3C) -> (N,C): tokens see each other
        matmul(branch, a.atty, p.attprojw.T, bias=p.attprojb)  # (N,C) @ (C,C) -> (N,C)

        self.norm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.ln2_inp, stream, found, branch, p.ln2w, p.ln2b)  # -> (N,C)
        matmul(a.fch, a.ln2, p.fcw.T, bias=p.fcb, gelu=a.fch_gelu)  # (N,C) @ (C,4C) -> (N,4C)
        if not again:
            matmul(branch, a.fch_gelu, p.fcprojw.T, bias=p.fcprojb)  # (N,4C) @ (4C,C) -> (N,C)

    def layer_backward(self, l):
        """layer_forward(l) from its last line to its first. A product out = inp @ w.T has the gradients dinp = dout @ w
        and dw = dout.T @ inp. dx, the gradient of the stream, is also that of a branch added to it: the dout of fcproj
        and attproj. Their biases' gradients are the sums of dx's rows, and norm_backward, which has dx, takes them."""
        p, g, a = self.layers[l]
        d, matmul, accumulate = self.back, self.device.matmul, self.accumulate
        dx, dinp = d.dresidual, d.dinp
        if self.recompute == 2:
            self.layer_forward(l, again=True)
        elif self.recompute:
            (N, C), launch = a.ln1.shape, self.device.launch
            launch("layernorm_again", N * C, a.ln1, a.ln1_inp, a.ln1_mean, a.ln1_rstd, p.ln1w, p.ln1b, N, C)
            launch("layernorm_again", N * C, a.ln2, a.ln2_inp, a.ln2_mean, a.ln2_rstd, p.ln2w, p.ln2b, N, C)
            launch("gelu_forward", N * 4 * C, a.fch_gelu, a.fch, N, 4 * C)

        matmul(g.fcprojw, dx.T, a.fch_gelu, accumulate=accumulate)  # (C,N) @ (N,4C) -> (C,4C)
        dfch = a.fch_gelu  # which nobody needs any more
        matmul(dfch, dx, p.fcprojw, dgelu_at=a.fch)  # (N,C) @ (C,4C) -> (N,4C)
        self.bias_backward(g.fcb, dfch)  # (N,4C) -> (4C)
        matmul(g.fcw, dfch.T, a.ln2, accumulate=accumulate)  # (4C,N) @ (N,C) -> (4C,C)
        matmul(dinp, dfch, p.fcw)  # dln2: (N,4C) @ (4C,C) -> (N,C)
        self.norm_backward(g.ln2w, g.ln2b, g.attprojb, a.ln2_inp, p.ln2w, a.ln2_mean, a.ln2_rstd)  # dx += (N,C)

        matmul(g.attprojw, dx.T, a.atty, accumulate=accumulate)  # (C,N) @ (N,C) -> (C,C)
        matmul(dinp, dx, p.attprojw)  # datty: (N,C) @ (C,C) -> (N,C)
        self.attention_backward(a.qkv, a.lse, a.atty, g.qkvb)  # (N,C) -> dqkv (N,3C), and (3C)
        matmul(g.qkvw, d.dqkv.T, a.ln1, accumulate=accumulate)  # (3C,N) @ (N,C) -> (3C,C)
        matmul(dinp, d.dqkv, p.qkvw)  # dln1: (N,3C) @ (3C,C) -> (N,C)
        bias_before = self.layers[l - 1][1].fcprojb if l else None  # of layer l - 1, whose result this norm added
        self.norm_backward(g.ln1w, g.ln1b, bias_before, a.ln1_inp, p.ln1w, a.ln1_mean, a.ln1_rstd)  # dx += (N,C)

    def norm_forward(self, out, mean, rstd, copy, x, before, branch, weight, bias):
        """x = before + branch, unless branch is None, and x is there already. Then copy = x; out = layernorm(x)."""
        self.device.launch("residual_layernorm_forward", len(out), out, mean, rstd, copy, x, before, branch, weight,
                           bias, len(out))

    def norm_backward(self, dweight, dbias, dbias_before, inp, weight, mean, rstd):
        """back.dresidual += the gradient of the norm's input, given back.dinp, that of its output. dweight and dbias +=
        theirs. dbias_before += the sum over rows of the new dresidual, unless it is None."""
        C, N, device, d = self.config.C, len(inp), self.device, self.back
        blocks, threads, shared = layernorm_backward_launch(device, N)
        device.launch("layernorm_backward", blocks, d.dresidual, d.partials, d.dinp, inp, weight, mean, rstd, N,
                      threads=threads, shared=shared)
        device.launch("add_partials", (C, 3), dweight, dbias, dbias_before, d.partials, blocks, C)

    def bias_backward(self, dbias, dout):
        """dbias (OC) += the sum over rows of dout (N,OC): in two stages if there are many rows."""
        (N, OC), device, partials = dout.shape, self.device, self.back.partials
        shares = max(1, min(64, N // 256))
        device.launch("matmul_backward_bias", (OC, shares), dbias if shares == 1 else partials, dout, N, OC)
        if shares > 1:
            device.launch("add_partials", OC, dbias, None, None, partials, shares, OC)

    def attention(self, kernel, *arrays, tiled):
        """launch_attention for this batch."""
        c = self.config
        launch_attention(self.device, kernel, arrays, tiled, *self.shape, c.NH, c.NKV, self.scale, self.relu)

    def attention_backward(self, qkv, lse, atty, dbias):
        """back.dqkv = the gradient of qkv, given back.dinp, that of atty. dbias += the sum of its rows, unless it is
        None."""
        (B, T), d, rows = self.shape, self.back, self.device.attention_sizes.rows
        sums = None if dbias is None else d.dqkv_sums
        self.attention("attention_backward_q", d.dqkv, sums, d.delta, lse, atty, tiled=(qkv, d.dinp))
        self.attention("attention_backward_kv", d.dqkv, sums, d.delta, lse, tiled=(qkv, d.dinp))
        if sums is not None:
            self.device.launch("add_partials", dbias.size, dbias, None, None, sums, B * -(-T // rows), dbias.size)

    def embedding_forward(self):
        """Where the stream begins: x = wte[token] + wpe[position]."""
        (_, T), p, x = self.shape, self.params, self.acts.residual[0]
        self.device.launch("encoder_forward", x.size, x, self.batch.tokens, p.wte, p.wpe, len(x), T, x.shape[1])

    def embedding_backward(self):
        (B, T), C, g, dx, b = self.shape, self.config.C, self.grads, self.back.dresidual, self.batch
        self.device.launch("encoder_backward_wte", (B * T, C), g.wte, dx, b.tokens, b.order, b.run_length, C)
        self.device.launch("encoder_backward_wpe", T * C, g.wpe, dx, B, T, C)

    def last_norm_forward(self):
        """Where the stream ends. logits = lnf @ wte.T follow, and the loss of a token, -log softmax(logits)[target]."""
        p, a, x = self.params, self.acts, self.acts.residual[-1]
        self.norm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.lnf_inp, x, x, a.branch, p.lnfw, p.lnfb)  # -> (N,C)

    def last_norm_backward(self):
        p, g, a = self.params, self.grads, self.acts
        self.device.zero(self.back.dresidual)
        self.norm_backward(g.lnfw, g.lnfb, g.fcprojb[-1], a.lnf_inp, p.lnfw, a.lnf_mean, a.lnf_rstd)

    def head_forward(self, rows):
        """The logits (rows,Vp) of some of the N tokens, a slice of them."""
        logits = self.acts.logits[: rows.stop - rows.start]
        self.device.matmul(logits, self.acts.lnf[rows], self.head.T)  # (rows,C) @ (C,Vp) -> (rows,Vp)
        return logits

    def loss_forward(self, rows, logits, with_gradient=False):
        """The losses of these tokens; with_gradient, the same kernel turns logits into the gradient of the step's."""
        c, a = self.config, self.acts
        blocks, room, shared = classifier_launch(self.device, len(logits), c.Vp, with_gradient)
        targets, dloss = self.batch.targets.reshape(-1)[rows], 1 / (len(a.losses) * self.micros)
        self.device.launch("fused_classifier", blocks, logits, a.losses[rows], targets, dloss, len(logits), c.V, c.Vp,
                           with_gradient, room, shared=shared)

    def mean_loss(self, accumulate=False):
        """A micro-batch's part of the step's mean loss: the first sets the verdict's loss, others are added to it."""
        N = len(self.acts.losses)
        self.device.launch("add_loss", 1, self.adam.verdict, self.acts.losses, 1 / (N * self.micros), N, accumulate)

    def head_backward(self, rows, dlogits):
        """The gradients of these tokens' lnf, into dinp, and of the head's weight, whose parts add up."""
        matmul, accumulate = self.device.matmul, self.accumulate or rows.start > 0
        matmul(self.back.dinp[rows], dlogits, self.head)  # (rows,Vp) @ (Vp,C) -> (rows,C)
        matmul(self.dhead, dlogits.T, self.acts.lnf[rows], accumulate=accumulate)  # (Vp,rows) @ (rows,C) -> (Vp,C)

    def forward_pass(self):
        """From a batch on the device to lnf (N,C)."""
        self.embedding_forward()
        for l in range(self.config.L):
            self.layer_forward(l)
        self.last_norm_forward()

    def backward_pass(self, micro=0, ranks=ALONE):
        """From lnf through the loss to the gradients of all parameters. The first of a step's micro-batches, 0, begins
        them anew: what kernels add to is cleared, and a product sets its matrix. The others add to them. In the last,
        several ranks sum up what each of them has."""
        self.accumulate = micro > 0
        for row in self.config.parameter_table():
            if not row.matrix and not self.accumulate:
                self.device.zero(getattr(self.grads, row.name))
        for rows in self.parts:  # the next part's logits overwrite these, so each goes forward and back by itself
            logits = self.head_forward(rows)
            self.loss_forward(rows, logits, with_gradient=True)
            self.head_backward(rows, logits)
        self.mean_loss(self.accumulate)
        self.last_norm_backward()
        for l in reversed(range(self.config.L)):
            self.layer_backward(l)
            ranks.sum(self, l)  # of this layer's gradients, over all ranks, beside the work on the next
        self.embedding_backward()
        ranks.sum(self)

    def forward(self, tokens, targets=None):
        """The mean loss of a batch, tokens and targets (B,T), in nats; without targets, None. Its logits are left in
        acts.logits: those of the last part, if there are several."""
        self.set_batch(pack_batch(tokens, 0 if targets is None else targets))
        self.forward_pass()
        for rows in self.parts:
            logits = self.head_forward(rows)
            if targets is not None:
                self.loss_forward(rows, logits)
        if targets is None:
            return None
        self.mean_loss()
        return self.report()().loss

    def next_logits(self, tokens):
        """The logits (V,) of the token that follows some tokens, a list of at most T ids."""
        padded = np.zeros((1, min(self.T, -(-len(tokens) // 64) * 64)), np.int32)  # which no token before it sees
        padded[0, : len(tokens)] = tokens
        self.set_batch(pack_batch(padded))
        self.forward_pass()
        logits = self.head_forward(slice(len(tokens) - 1, len(tokens)))
        return to_float(self.device.get(logits))[0, : self.config.V]

    def report(self):
        """Queue a copy of what the device says of the last step. Returns a function that waits for it: a Verdict."""
        verdict = self.device.fetch(self.adam.verdict)
        return lambda: Verdict(*verdict().tolist())

    # ---- The update

    def set_adamw(self, learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, seed=0, **others):
        """AdamW's settings for the next update; the others are 0 if not given. See kernels.cu's struct."""
        step, settings = self.step + 1, dict.fromkeys(ADAMW, 0.0)
        settings |= dict(learning_rate=learning_rate, rate1=1 - beta1, rate2=1 - beta2, eps=eps, **others,
                         correction1=1 / (1 - beta1**step), correction2=1 / (1 - beta2**step), step=step,
                         seed=seed % 2**24)  # below 2^24 fp32 has all whole numbers
        self.device.put(self.adam.settings, [settings[name] for name in ADAMW])

    def update_pass(self):
        """An AdamW step with the gradients that were added up, unless judge says that no parameter is to change."""
        adam, arenas, device, gradients = self.adam, self.arenas, self.device, self.adamw_grads
        n, params = gradients.size, self.halves[0]
        low = self.halves[1] if len(self.halves) > 1 else None
        device.launch("global_norm", min(NORM_BLOCKS, 8 * device.multiprocessors), adam.norm, gradients, n)
        self.ranks.norm(self)
        device.launch("judge", 32, adam.verdict, adam.windows, adam.seen, adam.norm, adam.settings)
        self.step += 1
        kernel, *places = ("adamw_bf16", adam.places) if device.moment == BF16 else ("adamw",)
        device.launch(kernel, n, params, low, gradients, arenas["adam m"], arenas["adam v"],
                      adam.starts, adam.decayed, adam.decayed.size, n, adam.settings, adam.verdict, *places)
        self.ranks.gather(self)
        device.end_step()

    def train_step(self, *batches, **adamw):
        """Queue a step of these micro-batches, of pack_batch, whose gradients are averaged, with set_adamw's settings.
        report()() waits for it. Its graphs are one for each kind of micro-batch: the only one; the first, which sets
        gradients; one that adds; the last, which updates too."""
        self.micros = len(batches) * self.ranks.count
        self.set_adamw(**adamw)
        self.device.begin_step(self, batches)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1

            def work(micro=micro, last=last):
                self.forward_pass()
                self.backward_pass(micro, self.ranks if last else ALONE)
                if last:
                    self.update_pass()

            def count(last=last):
                self.step += last

            self.set_batch(batch)
            self.device.replay(self.graphs, (self.shape, self.micros, micro > 0, last), work, count)
        self.micros = 1


# ---- The loop


def scheduled_rate(step, steps, flags):
    """The learning rate of a step, counted from 0, of so many, in fp32 as in llm.c. It rises to -l in -u steps, then
    falls to -q of that: like a cosine, along a line, or, for wsd, like a root in the last fifth of all."""
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
    left = f(0.5) * (f(1) + np.cos(f(math.pi * float(share)))) if kind == "cosine" else f(1) - np.sqrt(share)
    return least + left * (rate - least)


def train(model, train_data, val_data, steps, flags, stop, folder=None, examples=()):
    """The training loop, from the model's step on, until a signal's number is in `stop`. In between it validates,
    scores HellaSwag's examples, samples, and, with a folder (dev/run_folder.py), logs and writes checkpoints. Raises
    UserError when the loss is no longer a number."""
    device, tokens, begun, ranks = model.device, flags.total_batch, model.step, model.ranks
    here = tokens // ranks.count  # the tokens of a step that are this rank's
    flops_a_step, micros = here * model.config.flops_per_token(model.T), here // (model.B * model.T)
    ahead = device.ahead if micros == 1 else 0  # a step of several has the host copy batches while the device works
    adamw = {name: getattr(flags, name) for name in ADAMW_FLAGS}
    times, losses, queued, clock = [], [], [], 0.0
    log = folder.log if folder else lambda line: None

    def finish(step, rate, batches, report):
        """Wait for a step that was queued, and print its line."""
        nonlocal clock
        verdict = report()  # waits
        if not verdict.update:
            say(f"WARNING: step {step}: no update: loss {verdict.loss:.6f}, norm {verdict.norm:.6f}")
            if verdict.stopped:
                model.step = step - 1  # no later one has made an update
                if folder:
                    folder.save(model, batches.position, whole=True, prunes=False)
            from dev.replay import explain
            explain(model, verdict, batches, flags, folder)
        times.append(time.perf_counter() - clock)
        clock += times[-1]  # where the next step's time begins
        losses.append(verdict.loss)
        median = float(np.median(times[-100:]))
        share = f" | {flops_a_step / times[-1] / device.peak_flops:5.1%} of peak" if device.peak_flops else ""
        say(f"step {step:4d}/{steps} | loss {verdict.loss:.6f} | norm {verdict.norm:7.4f} | lr {rate:.2e} | "
            f"{1e3 * times[-1]:8.2f} ms | {tokens / times[-1]:9,.0f} tok/s{share} | {step * tokens:,} tokens")
        log(f"s:{step - 1} trl:{verdict.loss:.4f} lr:{rate:.6f} norm:{verdict.norm:.2f}")
        if len(times) == 20:
            say(f"estimate     | {steps - begun} steps of {1e3 * median:.2f} ms take "
                f"{duration((steps - begun) * median)}; validations, samples and checkpoints come on top")
        progress(step / steps, (steps - step) * median)

    def due(done, every):
        """Whether something that comes every so many steps, and at the end, comes after so many are done."""
        return every and (done % every == 0 or done == steps)

    def next_batches():
        """The micro-batches of a step, packed, and where they are in the data."""
        if flags.overfit:
            train_data.open(0)
        batches = SimpleNamespace(position=train_data.position(), packed=[], places=[])
        for _ in range(micros):
            batches.packed.append(pack_batch(*train_data.next_batch()))
            batches.places.append(train_data.where)
        return batches

    batches = next_batches()
    for step in range(begun + 1, steps + 2):  # once more than there are steps, to validate and sample at the end
        done, last = step - 1, step > steps
        validates, saves = due(done, flags.val_every), folder and done and due(done, flags.checkpoint_every)
        samples = done and flags.sample_tokens and due(done, flags.sample_every)
        opens = train_data.next + micros > len(train_data.order)  # the next file, and reads it
        stopping = ranks.agree(stop, validates or samples or saves or last or opens)  # a signal may come later, too
        validates, samples = validates and not stopping, samples and not stopping and ranks.rank == 0
        while len(queued) > (0 if validates or samples or saves or last else ahead):  # all, before one of those
            finish(*queued.pop(0))
        if validates:
            val_data.open(0)
            count = val_data.batches if flags.val_batches < 0 else min(flags.val_batches, val_data.batches)
            val_batches = (val_data.next_batch() for _ in range(count))
            own = itertools.islice(val_batches, ranks.rank, None, ranks.count)  # every N-th of N ranks; maybe none
            val_sum = sum(model.forward(*batch) for batch in own)
            val_loss = sum(ranks.exchange(val_sum, "a validation")) / count
            say(f"val loss {val_loss:.6f}")
            log(f"s:{done} tel:{val_loss:.4f}")
        if validates and examples and done:
            from dev.eval.hellaswag import score_by_ranks
            correct, total = score_by_ranks(model, examples)
            say(f"HellaSwag: {correct}/{total} = {correct / total:.6f}")
            log(f"s:{done} eval:{correct / total:.4f}")
        if samples:
            say(f"generating:\n---\n{model.decode(sample(model, flags.sample_tokens))}\n---")
        while stopping and queued:
            finish(*queued.pop(0))
        if folder and done != folder.step and (saves or last or stopping):
            folder.save(model, batches.position, whole=flags.checkpoint_every or stopping)
        if last or stopping:
            break

        clock = clock if queued else time.perf_counter()
        rate = scheduled_rate(done, steps, flags)
        model.train_step(*batches.packed, learning_rate=rate, **adamw)
        queued.append((step, rate, batches, model.report()))
        batches = next_batches()  # while a GPU is at work

    if times:
        median = float(np.median(times))
        say(f"{len(times)} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
            f"{tokens / median:,.0f} tok/s; training loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if stop:
        kept = "-y 1 goes on from there" if folder else "without -o the weights are lost"
        say(f"interrupted after {model.step} of {steps} steps; {kept}")


# ---- A sample


def coins():
    """llm.c's random numbers in [0, 1), fp32, the same in each sample: xorshift64* (Vigna 2014) from the state 1337."""
    state, bits = 1337, 2**64 - 1
    while True:
        state ^= state >> 12
        state ^= state << 25 & bits
        state ^= state >> 27
        yield np.float32((state * 0x2545F4914F6CDD1D & bits) >> 40) / np.float32(2**24)


def draw_token(logits, coin):
    """The token that a coin in [0, 1) draws, by the probabilities softmax(logits), in fp32 and float64 as in llm.c."""
    top = logits.max()
    weights = np.exp(logits - (top - np.clip(top, -80, 80)))  # as they are, unless that would overflow, or be all zeros
    coin = np.float32(coin * weights.sum(dtype=np.float64))
    return min(int(np.searchsorted(np.cumsum(weights, dtype=np.float32), coin, side="right")), len(logits) - 1)


def sample(model, count):
    """Token ids (count), each drawn from what the model expects after end-of-text and the last T, by a forward pass."""
    tokens = [min(model.config.EOT, model.config.V - 1)]
    for _, coin in zip(range(count), coins()):
        tokens.append(draw_token(model.next_logits(tokens[-model.T :]), coin))
    return tokens[1:]


# ---- Main: from the flags to the last checkpoint

def main(arguments=None, architecture=GPT2):
    """Everything from the flags to the last checkpoint. Returns the exit status. Raises UserError."""
    kind = architecture.Config
    flags = parse_flags("Train from raw kernels.", [(*row[:4], row[4].format(kind=kind)) for row in FLAGS], arguments,
                        defaults=False)
    check_needs(flags)
    place = flags.device or ("cuda" if has_gpu() else "cpu")
    if flags.replay:
        from dev.replay import replay
        return replay(flags.replay, architecture, flags, place)
    if launched() if flags.gpus is None else flags.gpus > 1:
        from dev.launch import start
        return start(flags, place, lambda ranks: work(architecture, flags, place, ranks))
    return work(architecture, flags, place)


def work(architecture, flags, place, ranks=ALONE):
    """What main does with its flags, on a device of this name: as one of several ranks, or alone."""
    kind, folder, val_data, examples = architecture.Config, None, None, ()
    if flags.output and not flags.dry_run:
        from dev.run_folder import RunFolder
        folder = RunFolder(flags, ranks, kind)  # to go on, it sets what is not given as it was
    name = flags.model or next(filter(os.path.exists, kind.MODELS[:1]), None)
    small = not name and place == "cpu"
    set_defaults(flags, place, not name)
    ranks.zero = ranks.count > 1 and bool(flags.zero)  # which -y 1 may have set
    flags.model = name or kind.MODELS[2 if small else 1]
    name = str(folder and folder.checkpoint or flags.model)
    from_file = os.path.exists(name) or name.endswith(".bin")
    c = kind.from_file(name) if from_file else kind.from_descriptor(name)
    B, T = flags.batch_size, flags.seq_len or min(c.maxT, DEFAULT_T[place])
    device = ranks.in_turn(lambda: make_device(place, flags.dtype, c, flags.plain, flags.graph,
                                                 moments=flags.moments))
    flags.device, flags.dtype = place, device.dtype

    def load(B):
        model = architecture(c, device, B, T, flags.attention, flags.recompute, ranks)
        model.set_parameters(read_parameters(name, c) if from_file else draw_parameters(c, flags.seed))
        return model

    if flags.sample is not None:
        from dev.eval.sample import go_on
        return go_on(from_file and load(1), flags)

    paths = ranks.in_turn(lambda: c.data_paths(flags.train_data, flags.val_data))
    train_path, val_path = flags.train_data, flags.val_data = paths
    train_path, flags.shuffle = (val_path, 0) if flags.overfit else (train_path, flags.shuffle)
    train_data = DataLoader(train_path, B, T, c.V, flags.shuffle, ranks)
    if flags.val_every:
        fits = min(count_tokens(path)[0] - 1 for path in files_of(val_path)) // T  # sequences; tinyshakespeare has 31
        val_data = DataLoader(val_path, max(1, min(B, fits)), T, c.V, False)
    flags.seq_len, flags.shuffle, flags.total_batch = T, int(train_data.shuffle), flags.total_batch or train_data.size
    if flags.total_batch % train_data.size:
        raise UserError(f"-d {flags.total_batch}: expected a multiple of B*T = {train_data.size}, "
                        f"a micro-batch's tokens{ranks}")
    epoch = max(1, train_data.total // flags.total_batch)
    steps = flags.steps = epoch if flags.steps in (None, -1) else flags.steps
    if flags.hellaswag:
        from dev.eval.hellaswag import read_examples
        examples = read_examples(flags.hellaswag, c.V, T)
    origin = "" if from_file else f" from scratch, seed {flags.seed}"
    print(f"device       | {device}{ranks} (--device, --dtype)")
    print(f"model        | {name}{origin}: {sum(row.size for row in c.parameter_table()):,} parameters (-e), {c}")
    files = f" in {len(train_data.paths)} files" * (len(train_data.paths) > 1)
    print(f"data         | {train_path}: {train_data.total:,} tokens{files} (-i), {val_path} (-j)")
    print(f"run          | B={B} T={T} (-b, -t), {flags.total_batch:,} tokens a step (-d), {steps} steps (-x), "
          f"an epoch has {epoch}")
    for arena, table in arena_tables(c, device, B, T, flags.recompute, ranks).items():
        print(f"{arena:12} | {layout(table)[-1] / 2**30:6.2f} GiB in {len(table)} tensors, "
              f"of which {max(table, key=lambda row: row.nbytes).name} is the largest")
    asked, free, fits = memory_of(c, device, B, T, flags.recompute, ranks)
    print(f"memory       | {asked / 2**30:6.2f} GiB; -b {fits} would fit into {free / 2**30:.2f} GiB (--recompute)")
    if flags.dry_run:
        from dev.dry_run import estimate
        return estimate(c, device, flags, ranks)
    try:
        model = load(B)
        if flags.nvtx:
            from dev.nvtx import annotate
            annotate(model)
        if folder:
            folder.begin(model, train_data)
        ranks.begin(model, train_data, val_data, flags, name)
        with stop_signals() as stop:
            try:
                train(model, train_data, val_data, steps, flags, stop, folder, examples)
            finally:
                if folder:
                    folder.close()
    except device.Fault as e:
        raise UserError(f"the GPU stopped ({e}) at {device.launched} or a launch before it: find the fault with "
                        "--graph 0, --plain 1, compute-sanitizer, or --device cpu") from None
    return 128 + stop[0] if stop else 0


# ---- Faster. A step of the 124M model in bf16 on an H200, with more and more of what is here (see dev/RESULTS.md):
#
#                                                              B=4          B=32
#     the plain device                                        10.41 ms     66.26 ms
#     cuBLASLt, which adds the bias in the product             9.15        55.08
#     its algorithms chosen by timing them                     8.71        54.11
#     GELU in the product too                                  8.68        52.79
#     a step as one graph                                      8.18        52.50
#     a step queued before the last one is reported            7.99        52.00


class FastCuda(Cuda):
    """Cuda with all that is there for speed alone. cuBLASLt multiplies as cuBLAS does. But a graph can hold what it
    does, where CuPy refuses cuBLAS, and products have epilogues: work on out before it leaves the registers. CuPy does
    not wrap it, so ctypes calls it, in the library that CuPy has loaded. Numbers without a name are cublasLt.h's."""
    ahead = 1  # while a step's results are outstanding, the next is queued, so that the GPU need not wait for the host
    WORKSPACE = 32 * 2**20  # bytes, as many as cuBLAS takes on Hopper
    CANDIDATES = 8  # algorithms of a product that are timed when it first comes up
    NO_EPILOGUE, ADD_BIAS, GELU_AND_BIAS, TIMES_DGELU = 1, 4, 164, 192

    def __init__(self, dtype, c, beside=(), graph=True):
        super().__init__(dtype, c, beside)
        import cupyx.profiler
        self.cupyx, self.graph, self.fused_gelu, self.plans = cupyx, graph, self.dtype == "bf16", {}
        self.capturing = self.cupy.cuda.Stream(non_blocking=True)  # CUDA's default stream cannot be captured
        loaded = re.search(r"/.*libcublasLt\.so.*", Path("/proc/self/maps").read_text())
        if not loaded:
            raise UserError("CuPy has loaded no cuBLASLt: pip install -r requirements.txt; --plain 1 does without it")
        self.library = ctypes.CDLL(loaded[0])
        self.handle, self.workspace = self.create(""), self.empty(self.WORKSPACE)
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        versions = self.library.cublasLtGetVersion(), self.cupy.cuda.runtime.driverGetVersion()
        self.cache = re.sub(r"\W+", "_", f"matmul {self} {versions}")
        self.choices = read_cache(self.cache)  # {product: the algorithm that an earlier run has chosen for it}

    def call(self, name, *args):
        """Call a function of cuBLASLt."""
        status = getattr(self.library, f"cublasLt{name}")(*args)
        if status:
            self.cupy.cuda.runtime.deviceSynchronize()  # raises what a kernel before it has done wrong
            raise UserError(f"cublasLt{name} failed with status {status}; --plain 1 does without it")

    def create(self, kind, *args, attributes=()):
        """An object of cuBLASLt, with these (attribute, value) set."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *args)
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            self.call(f"{kind}SetAttribute", made, attribute, ctypes.byref(value), size)
        return made

    def describe(self, epilogue, out, a, b, bias, aux, scales):
        """A product of these arrays, as cuBLASLt wants it: (description, layout of b, of a, of out)."""
        (transpose_b, _), (transpose_a, _), _ = strides = [stride_of(x) for x in (b, a, out)]
        # Attributes 3, 4: are b and a transposed? 7: the epilogue. 8: bias. 11, 12: GELU's input, and its rows' stride.
        # 17, 18: what FP8's b and a are multiplied by. 25: its sums may be of fewer bits, see dev/fp8.py.
        description = self.create("MatmulDesc", self.compute, self.TYPES["f4"], attributes=(
            (3, ctypes.c_int(transpose_b)), (4, ctypes.c_int(transpose_a)), (7, ctypes.c_int(epilogue)),
            (8, address(bias)), (11, address(aux)), (12, ctypes.c_int64(out.shape[1])),
            (25, ctypes.c_int8(len(scales) > 0)),
            *((17 + i, address(scale)) for i, scale in enumerate(reversed(scales)))))
        layouts = []
        for x, (transposed, stride) in zip((b, a, out), strides):
            m, n = x.shape if transposed else x.shape[::-1]
            sizes = ctypes.c_uint64(m), ctypes.c_uint64(n), ctypes.c_int64(stride)
            layouts.append(self.create("MatrixLayout", self.TYPES[x.dtype.str[1:]], *sizes))
        return description, *layouts

    def multiply(self, plan, algorithm, accumulate, out, a, b):
        """Queue a product that describe() has described."""
        description, b_layout, a_layout, out_layout = plan
        one, beta, stream = ctypes.c_float(1), ctypes.c_float(accumulate), self.cupy.cuda.get_current_stream().ptr
        algorithm, workspace = ctypes.c_void_p(algorithm.ctypes.data), address(self.workspace)
        self.call("Matmul", self.handle, description, ctypes.byref(one), address(b), b_layout, address(a), a_layout,
                  ctypes.byref(beta), address(out), out_layout, address(out), out_layout, algorithm, workspace,
                  ctypes.c_size_t(self.WORKSPACE), ctypes.c_void_p(stream))

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None, scales=()):
        """As Cuda.matmul; with scales, of FP8, out is multiplied by both."""
        epilogue, result, aux = self.NO_EPILOGUE if bias is None else self.ADD_BIAS, out, None
        if self.fused_gelu and gelu is not None:
            epilogue, result, aux = self.GELU_AND_BIAS, gelu, out
        elif self.fused_gelu and dgelu_at is not None:
            epilogue, aux = self.TIMES_DGELU, dgelu_at
        product = out.shape, a.shape, a.strides, b.strides, out.itemsize, epilogue, *[a.dtype.str] * len(scales)
        key = product, accumulate, *(x if x is None else x.data.ptr for x in (bias, aux, *scales))
        if key not in self.plans:
            plan = self.describe(epilogue, result, a, b, bias, aux, scales)
            self.plans[key] = plan, self.choose(product, plan, accumulate, result, a, b)
        self.multiply(*self.plans[key], accumulate, result, a, b)
        if aux is None:
            self.gelu_of_product(out, gelu, dgelu_at)

    def choose(self, product, plan, accumulate, out, a, b):
        """The fastest algorithm for a product, by timing it on its own operands when it first comes up. The choice is
        saved, so that later runs add up in the same order: the same seed, the same bits. What adds to out cannot be
        timed: it takes what was chosen for a product of these shapes that sets out, or the first that is offered."""
        known = self.choices.get(str((*product, accumulate))) or self.choices.get(str((*product, False)))
        if known:
            return np.array(known, np.uint64)

        preference = self.create("MatmulPreference", attributes=(
            (1, ctypes.c_size_t(self.WORKSPACE)), (3, ctypes.c_uint32(2)),  # a sum in several parts is added up in fp32
            *((matrix, ctypes.c_uint32(ALIGN)) for matrix in (5, 6, 7, 8))))
        algorithms, found = np.zeros((self.CANDIDATES, 12), np.uint64), ctypes.c_int()  # the first 8 of 12 matter
        self.call("MatmulAlgoGetHeuristic", self.handle, *plan, plan[3], preference, self.CANDIDATES,
                  ctypes.c_void_p(algorithms.ctypes.data), ctypes.byref(found))
        self.call("MatmulPreferenceDestroy", preference)
        if not found.value:
            raise UserError(f"cuBLASLt has no algorithm for a product {product}; --plain 1 does without it")
        thrice = lambda algorithm: [self.multiply(plan, algorithm, False, out, a, b) for _ in range(3)]
        times = [self.cupyx.profiler.benchmark(thrice, (algorithm,), n_repeat=3, n_warmup=1).gpu_times.min()
                 for algorithm in algorithms[: found.value] if not accumulate]
        best = algorithms[int(np.argmin(times or [0]))]
        chosen = {str((*product, accumulate)): best[:8].tolist()}
        self.choices |= chosen
        write_cache(self.cache, chosen)
        return best

    def replay(self, graphs, key, work, count):
        """Do work(): plainly the first time, which chooses algorithms. The second time it is recorded as a graph, and
        from then on one launch of that does it all, without gaps between kernels."""
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
        else:
            count()
        graphs[key].launch()

    def fetch(self, array):
        """As Cuda.fetch, but the copy is queued behind the work, and only the function waits for it."""
        stream, host = self.cupy.cuda.get_current_stream(), self.cupyx.empty_like_pinned(array)
        array.get(stream=stream, out=host, blocking=False)
        copied = stream.record()
        return lambda: (copied.synchronize(), host)[1]  # waits, then has the numbers


if __name__ == "__main__":
    sys.modules["train_gpt2"] = sys.modules["__main__"]  # what dev/ imports is this module, not another copy
    run(main)
