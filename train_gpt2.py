"""Train GPT-2 from raw kernels.

    pip install -r requirements.txt && python train_gpt2.py

dev/gpt2_numpy.py has the model in 40 lines of NumPy: begin there. Then read this file from top to
bottom, with kernels.cu beside it: tables of all tensors; the model, each layer's forward, then its
backward; the update; the loop. You may stop there. The rest is what these use: the GPU, files and
batches, a sample, the flags. The last section, "Faster", adds only speed: `--plain 1` leaves it
out. dev/features.py lists what else the program can do.

Sizes:

    B   sequences in a batch            L   layers
    T   tokens in a sequence            NH  attention heads
    N   tokens in a batch, B*T          C   channels of a token; OC of a linear layer's output
    V   words of the vocabulary         HS  channels of a head, C/NH
    Vp  V padded, so that the matrix product over it is fast

A kernel is a function in C++ that a GPU runs many times at once:

    thread         One run of the function. Its index tells it which part of the work to do.
    warp           32 threads, its lanes, which execute each instruction together.
    block          Up to 1,024 threads on one multiprocessor, which can wait for each other.
    shared memory  Some 200 KB of fast memory on each multiprocessor, shared by a block's threads.
    grid           All blocks of a launch. The 100 or so multiprocessors take them in any order.
"""
import argparse
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

from prepro_tinyshakespeare import (EOT, UserError, data_paths, gpt2_encoding,
                                    make_header, replace_file, run)
import numpy as np  # after prepro_tinyshakespeare, which sets how its threads wait

HERE = Path(__file__).resolve().parent

# ---- The model's sizes, and tables of all that it keeps in memory

# bfloat16 is the upper half of an fp32, rounded; NumPy has no such type, so arrays hold its bits.
# AdamW needs all of a parameter, and keeps both halves:
#
#     sign, exponent, 7 bits of mantissa | 16 bits of mantissa
#     BF16, which the products read      | LOW, signed: what rounding took away
BF16, LOW = np.uint16, np.int16

ALIGN = 64  # bytes. C is a multiple of 32, so parameters have no gaps, as in a checkpoint.
LOGIT_ROWS = 8192  # logits are computed for this many tokens at once, or for more
PARTIAL_ROWS = 256  # the most blocks of layernorm_backward: each leaves a row of sums
NORM_BLOCKS = 1024  # the most blocks of global_norm


class Row(NamedTuple):
    """A tensor; or, with layers, one for each layer."""
    name: str
    shape: tuple
    dtype: type = np.float32
    layers: int = 0
    mean: float = 0.0  # a parameter starts as mean + std * normal
    std: float = 0.0
    decay: bool = False  # weight decay applies

    @property
    def size(self):
        return math.prod(self.shape) * max(1, self.layers)

    @property
    def nbytes(self):
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def whole_shape(self):
        return (self.layers, *self.shape) if self.layers else self.shape


class FileKind(NamedTuple):
    """A kind of file: its name, how it begins, and what to do about a bad one."""
    name: str
    magic: int
    versions: tuple
    remedy: str


HEADER_BYTES = 1024
TOKENS = FileKind("token file", 20240520, (1,), "prepro_tinyshakespeare.py writes one; --input "
                  "takes your own text")


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2: its sizes, in the order of a checkpoint's header, and its tables. `real` is the type
    of stored parameters and activations."""
    maxT: int = 1024
    V: int = 50257
    L: int = 12
    NH: int = 12
    C: int = 768
    Vp: int = 50304

    def parameter_table(self, real=np.float32):
        """The parameters, in a checkpoint's order. They start as in GPT-2 (Radford et al. 2019,
        section 2.3): the 2L matrices that add to the residual stream are divided by sqrt(2L)."""
        C, once, each = self.C, dict(dtype=real), dict(dtype=real, layers=self.L)
        weight = dict(std=0.02, decay=True)
        residual = weight | dict(std=0.02 / math.sqrt(2 * self.L))
        return [
            Row("wte", (self.Vp, C), **once, **weight),  # token embeddings, and the head's weight
            Row("wpe", (self.maxT, C), **once, **weight),  # position embeddings
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

    def activation_table(self, B, T, real=np.float32):
        """What the forward pass leaves for the backward pass."""
        N, C, each = B * T, self.C, dict(dtype=real, layers=self.L)
        return [
            Row("residual", (N, C)),  # the residual stream x, always fp32
            Row("branch", (N, C), real),  # what attention or the MLP computed, to be added to x
            Row("ln1_inp", (N, C), **each),  # a copy of x before attention
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
            Row("partials", (3, PARTIAL_ROWS, C)),  # sums of rows: see norm_backward
            Row("sums", (B * -(-T // 64) + 1, 3 * C)),  # of 64+ rows of dqkv, or of shares of dfch
        ]

    FILE = FileKind("GPT-2 checkpoint", 20240326, (3, 5), "a run with -o writes one, "
                    "or dev/tools/convert.py")
    STORED = {3: np.float32, 5: BF16}  # the numbers of a checkpoint, by its version
    TOKEN_FILES = {TOKENS: np.dtype("<u2")}
    PADDED = ("wte",)  # parameters whose rows are words; those beyond V are zeros
    SOURCES = (HERE / "kernels.cu",)
    MODELS = ("gpt2_124M.bin", "d12")  # without -e: the file if it is here, else d12
    EOT, encoding, data_paths = EOT, staticmethod(gpt2_encoding), staticmethod(data_paths)

    @classmethod
    def from_file(cls, path):
        """The config of a checkpoint; checks its header and size."""
        header = read_header(path, cls.FILE)
        c = cls(*header[2:8])
        c.check(path)
        table = c.file_table(cls.STORED[header[1]])
        check_size(path, cls.FILE, HEADER_BYTES + sum(row.nbytes for row in table))
        return c

    @classmethod
    def from_descriptor(cls, descriptor):
        """The config of depth N for "dN"; d12, d24, d36, d48 are GPT-2 small, medium, large, XL."""
        if not re.fullmatch(r"d[1-9]\d{0,2}", descriptor):
            raise UserError(f"-e {descriptor}: expected a checkpoint, or a descriptor from d1 to "
                            "d999, such as d12")
        L = int(descriptor[1:])
        NH = {48: 25, 60: 30, 72: 30, 84: 36}.get(L, min(L, 12 + max(0, L - 12) // 3))
        return cls(L=L, NH=NH, C=NH * {72: 96, 84: 96}.get(L, 64))

    def check(self, path):
        """Raise UserError unless the sizes make a model."""
        sizes = dataclasses.astuple(self)[:6]
        for ok, wish in ((all(0 < n < 2**24 for n in sizes), "sizes from 1 to 2**24 - 1"),
                         (self.NH and self.C % self.NH == 0, "C to be divisible by NH"),
                         (self.C % 32 == 0, "C to be a multiple of 32"),
                         (self.V <= self.Vp, "V not to exceed Vp")):
            if not ok:
                raise UserError(f"{path}: {self}; expected {wish}")

    @property
    def NKV(self):
        """Heads of keys and values: each query head has its own."""
        return self.NH

    def switches(self):
        """What kernels.cu is compiled for."""
        return [f"-DCHANNELS={self.C}", f"-DHS={self.C // self.NH}"]

    def file_table(self, real=np.float32, header=None):
        """A checkpoint's tensors."""
        return self.parameter_table(real)

    def file_parts(self, views, real=np.float32):
        """A checkpoint's arrays, matrix by matrix, from views of parameters."""
        for row in self.file_table(real):
            yield from matrices(getattr(views, row.name))

    def headers(self, version):
        """A checkpoint's headers."""
        return [make_header(self.FILE.magic, version, *dataclasses.astuple(self))]


def logit_rows(N):
    """How many tokens get logits at a time: few parts, since each adds to all of dwte."""
    return min(N, max(LOGIT_ROWS, -(-N // 4)))


def batch_table(B, T):
    """A batch, as the host prepares it."""
    return [
        Row("tokens", (B, T), np.int32),
        Row("targets", (B, T), np.int32),  # for each token the one that follows
        Row("order", (B * T,), np.int32),  # positions sorted by token
        Row("runs", (B * T, 2), np.int32),  # of equal tokens: see encoder_backward_wte
    ]


ADAMW = ("learning_rate", "rate1", "rate2", "correction1", "correction2", "eps", "weight_decay",
         "clip")  # the fields of kernels.cu's struct


class Verdict(NamedTuple):
    """A step's numbers, and what kernels.cu decided: whether to update, whether to stop."""
    norm: float
    loss: float
    update: float
    stopped: float


def update_table(updated):
    """What AdamW needs besides the tensors it updates."""
    return [
        Row("settings", (len(ADAMW),)),
        Row("norm", (2 + NORM_BLOCKS,)),  # norm, counter, each block's sum
        Row("verdict", (len(Verdict._fields),)),
        Row("starts", (len(updated) + 1,), np.uint64),  # where each tensor starts, in numbers
        Row("decayed", (len(updated),), np.int32),  # 1 where weight decay applies, else 0
    ]


def layout(table):
    """The byte offset of each tensor in an arena, then the arena's size."""
    sizes = (-(-row.nbytes // ALIGN) * ALIGN for row in table)
    return list(itertools.accumulate(sizes, initial=0))


def carve(arena, table):
    """Views of an arena (bytes), one attribute for each row; with layers, (layers, *shape)."""
    views = SimpleNamespace()
    for row, start in zip(table, layout(table)):
        view = arena[start : start + row.nbytes].view(row.dtype).reshape(row.whole_shape)
        setattr(views, row.name, view)
    return views


def of_layer(views, table, l):
    """The views of layer l; a row may have fewer layers, used in turn."""
    return SimpleNamespace(**{row.name: getattr(views, row.name)[l % row.layers]
                              for row in table if row.layers})


def matrices(values):
    """The matrices of a stack, to copy a large tensor in pieces."""
    return values.reshape(-1, *values.shape[-2:])


# ---- The model: GPT-2 on a device
#
# A device does the arithmetic: Cuda, below, or the CPU of dev/cpu/device.py. Its methods:
#
#     empty(nbytes)                 memory, as bytes
#     put(array, values)            host to device
#     get(array)                    device to host
#     zero(array)                   all bits 0
#     launch(kernel, items, *args)  run a kernel of kernels.cu, which says what items are
#     matmul(out, a, b, ...)        out = a @ b, or out += a @ b, with a bias or a GELU if asked
#     repeat(graphs, key, work)     do work(), or launch what graphs recorded of it


class GPT2:
    """GPT-2 on a device, for batches of up to (B,T) tokens. The residual stream x (N,C) runs
    through all layers. Each reads it twice, through a norm, and adds to it twice:

     x --+------------------------------->(+)----+---------------------------->(+)--> next layer
         |                                 |     |                              |
         +-> ln1 -> qkv -> attention -> attproj  +-> ln2 -> fc --> GELU --> fcproj    (computed)
         |    |      |        |                  |    |      |       |
      ln1_inp ln1   qkv   atty, lse           ln2_inp ln2   fch   fch_gelu    (kept for backward)

    attproj and fcproj leave their result in `branch`; the next norm's kernel adds it, since it
    reads all of x anyway. The gradient of x, dresidual, goes from right to left: a (+) hands it to
    the stream and to the branch, and a fork adds what the branch returns.

    Tensors are attributes of params, grads, acts (the forward pass's) and back (the backward
    pass's), by their names in the tables. layers[l] has the first three of one layer.
    """
    Config = Config
    rank, count = 0, 1  # this process's index, and how many share each batch
    relu = 0  # 1: attention's weights are max(0, scale * q.k), no softmax

    def layer_forward(self, l):
        """x = x + attention(ln1(x)), then x = x + mlp(ln2(x)). The next norm does each addition."""
        p, _, a = self.layers[l]
        matmul, branch = self.device.matmul, self.acts.branch
        added = branch if l else None  # what the MLP of the layer before computed
        self.norm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.ln1_inp, added, p.ln1w, p.ln1b)  # (N,C)
        matmul(a.qkv, a.ln1, p.qkvw.T, bias=p.qkvb)  # (N,C) @ (C,3C) -> (N,3C)
        self.attention("attention_forward", a.atty, a.lse, a.qkv)  # (N,3C) -> (N,C)
        matmul(branch, a.atty, p.attprojw.T, bias=p.attprojb)  # (N,C) @ (C,C) -> (N,C)

        self.norm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.ln2_inp, branch, p.ln2w, p.ln2b)  # (N,C)
        matmul(a.fch, a.ln2, p.fcw.T, bias=p.fcb, gelu=a.fch_gelu)  # (N,C) @ (C,4C) -> (N,4C)
        matmul(branch, a.fch_gelu, p.fcprojw.T, bias=p.fcprojb)  # (N,4C) @ (4C,C) -> (N,C)

    def layer_backward(self, l):
        """layer_forward(l) from its last line to its first. A product out = inp @ w.T has the
        gradients dinp = dout @ w and dw = dout.T @ inp. The dout of fcproj and attproj is dx, the
        stream's gradient. norm_backward reads it anyway, so it also sums its rows, for the
        gradients of their biases."""
        p, g, a = self.layers[l]
        d, matmul, adds = self.back, self.device.matmul, self.micro > 0
        dx, dinp = d.dresidual, d.dinp
        matmul(g.fcprojw, dx.T, a.fch_gelu, accumulate=adds)  # (C,N) @ (N,4C) -> (C,4C)
        dfch = a.fch_gelu  # whose memory is free now
        matmul(dfch, dx, p.fcprojw, dgelu_at=a.fch)  # (N,C) @ (C,4C) -> (N,4C)
        fcb = self.bias_backward(g.fcb, dfch)  # (N,4C) -> (4C)
        matmul(g.fcw, dfch.T, a.ln2, accumulate=adds)  # (4C,N) @ (N,C) -> (4C,C)
        matmul(dinp, dfch, p.fcw)  # dln2: (N,4C) @ (4C,C) -> (N,C)
        self.norm_backward(g.ln2w, g.ln2b, g.attprojb, a.ln2_inp, p.ln2w, a.ln2_mean, a.ln2_rstd,
                           fcb)

        matmul(g.attprojw, dx.T, a.atty, accumulate=adds)  # (C,N) @ (N,C) -> (C,C)
        matmul(dinp, dx, p.attprojw)  # datty: (N,C) @ (C,C) -> (N,C)
        qkvb = self.attention_backward(a.qkv, a.lse, a.atty, g.qkvb)  # (N,C) -> (N,3C), (3C)
        matmul(g.qkvw, d.dqkv.T, a.ln1, accumulate=adds)  # (3C,N) @ (N,C) -> (3C,C)
        matmul(dinp, d.dqkv, p.qkvw)  # dln1: (N,3C) @ (3C,C) -> (N,C)
        bias_before = self.layers[l - 1][1].fcprojb if l else None  # whose branch this norm added
        self.norm_backward(g.ln1w, g.ln1b, bias_before, a.ln1_inp, p.ln1w, a.ln1_mean, a.ln1_rstd,
                           qkvb)

    def norm_forward(self, out, mean, rstd, copy, branch, weight, bias):
        """x += branch, unless None. Then copy = x and out = layernorm(x)."""
        x = self.acts.residual
        self.device.launch("residual_layernorm_forward", len(out), out, mean, rstd, copy, x, x,
                           branch, weight, bias, len(out))

    def norm_backward(self, dweight, dbias, dbias_before, inp, weight, mean, rstd,
                      summed=(None, 0, 0)):
        """Add the gradient of inp to dx, given dinp, that of the norm's output. Make dweight, dbias
        and, unless None, dbias_before: the sum over rows of the new dx. summed: what bias_backward
        or attention_backward returned. The same launch finishes that gradient."""
        C, N, device = self.config.C, len(inp), self.device
        blocks, threads, shared = layernorm_backward_launch(device, N)
        d = self.back
        other, rows, OC = summed
        device.launch("layernorm_backward", blocks, d.dresidual, d.partials, d.dinp, inp, weight,
                      mean, rstd, N, threads=threads, shared=shared)
        device.launch("add_partials", (max(C, OC), 4), dweight, dbias, dbias_before, other,
                      d.partials, d.sums, blocks, C, rows, OC, self.micro > 0)

    def bias_backward(self, dbias, dout):
        """Begin dbias (OC), the sum over rows of dout (N,OC): sum shares of the rows. Returns
        (dbias, shares, OC), from which norm_backward finishes it."""
        N, OC = dout.shape
        shares = max(1, min(64, N // 256))
        self.device.launch("matmul_backward_bias", (OC, shares), self.back.sums, dout, N, OC)
        return dbias, shares, OC

    def attention_backward(self, qkv, lse, atty, dbias):
        """dqkv = the gradient of qkv, given dinp, that of atty. Begins dbias, and returns
        (dbias, blocks of rows, 3C), from which norm_backward finishes it."""
        (B, T), d = self.BT, self.back
        self.attention("attention_backward_q", d.dqkv, d.sums, d.delta, lse, atty, qkv, d.dinp)
        self.attention("attention_backward_kv", d.dqkv, d.sums, d.delta, lse, qkv, d.dinp)
        return dbias, B * -(-T // self.device.attention_sizes.rows), dbias.size

    def attention(self, kernel, *arrays):
        """Launch an attention kernel: a block takes some rows of one head."""
        (B, T), c = self.BT, self.config
        sizes = self.device.attention_sizes
        heads = c.NKV if kernel == "attention_backward_kv" else c.NH
        forward = kernel == "attention_forward"
        shared = sizes.shared_forward if forward else sizes.shared_backward
        self.device.launch(kernel, -(-T // sizes.rows) * B * heads, *arrays, self.scale, self.relu,
                           T, c.NH, c.NKV, threads=sizes.threads, shared=shared)

    # ---- Before the first layer, after the last

    def embedding_forward(self):
        """The stream begins: x = wte[token] + wpe[position]."""
        p, x, T = self.params, self.acts.residual, self.BT[1]
        self.device.launch("encoder_forward", x.size, x, self.batch.tokens, p.wte, p.wpe, len(x), T,
                           x.shape[1])

    def embedding_backward(self):
        """Add to the gradient of wte, which the head has set, and make that of wpe."""
        (B, T), C = self.BT, self.config.C
        launch, b = self.device.launch, self.batch
        dx, g = self.back.dresidual, self.grads
        launch("encoder_backward_wte", (B * T, C), g.wte, dx, b.tokens, b.order, b.runs, B * T, C)
        launch("encoder_backward_wpe", g.wpe.size, g.wpe, dx, B, T, len(g.wpe), C, self.micro > 0)

    def last_norm_forward(self):
        """The stream ends in lnf (N,C), which the head turns into logits."""
        p, a = self.params, self.acts
        self.norm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.lnf_inp, a.branch, p.lnfw, p.lnfb)

    def last_norm_backward(self):
        """The stream's gradient dx begins."""
        p, g, a = self.params, self.grads, self.acts
        self.device.zero(self.back.dresidual)
        self.norm_backward(g.lnfw, g.lnfb, g.fcprojb[-1], a.lnf_inp, p.lnfw, a.lnf_mean, a.lnf_rstd)

    def head_forward(self, rows):
        """The logits (rows,Vp) of some of the N tokens, a slice."""
        logits = self.acts.logits[: rows.stop - rows.start]
        self.device.matmul(logits, self.acts.lnf[rows], self.head.T)  # (rows,C) @ (C,Vp)
        return logits

    def head_backward(self, rows, dlogits):
        """dinp[rows] = the gradient of lnf[rows]. The first part sets dhead, others add."""
        matmul, adds = self.device.matmul, self.micro > 0 or rows.start > 0
        matmul(self.back.dinp[rows], dlogits, self.head)  # (rows,Vp) @ (Vp,C) -> (rows,C)
        matmul(self.dhead, dlogits.T, self.acts.lnf[rows], accumulate=adds)  # (Vp,rows) @ (rows,C)

    def loss_forward(self, rows, logits, with_gradient=False):
        """losses[rows] = -log softmax(logits)[target]; with_gradient, the logits then become the
        gradient of the step's mean loss."""
        c, a = self.config, self.acts
        blocks, room, shared = classifier_launch(self.device, len(logits), c.Vp, with_gradient)
        targets, dloss = self.batch.targets.reshape(-1)[rows], 1 / (len(a.losses) * self.micros)
        self.device.launch("fused_classifier", blocks, logits, a.losses[rows], targets, dloss,
                           len(logits), c.V, c.Vp, with_gradient, room, shared=shared)

    def mean_loss(self):
        """verdict.loss = the step's mean loss; each micro-batch adds its part."""
        N = len(self.acts.losses)
        self.device.launch("add_loss", 1, self.adam.verdict, self.acts.losses,
                           1 / (N * self.micros), N, self.micro > 0)

    # ---- Passes over all layers

    def forward_pass(self):
        """From a batch to lnf (N,C). The loss is taken in the backward pass, part by part: the
        logits of all tokens would be the largest tensor by far."""
        self.embedding_forward()
        for l in range(self.config.L):
            self.layer_forward(l)
        self.last_norm_forward()

    def backward_pass(self):
        """From lnf through the loss to the gradients of all parameters. A step's first micro-batch
        sets them, the others add."""
        for rows in self.parts:
            logits = self.head_forward(rows)
            self.loss_forward(rows, logits, with_gradient=True)
            self.head_backward(rows, logits)
        self.mean_loss()
        self.last_norm_backward()
        for l in reversed(range(self.config.L)):
            self.layer_backward(l)
        self.embedding_backward()

    def forward(self, tokens, targets=0):
        """The mean loss, in nats, of tokens and targets (B,T). acts.logits keeps the last part."""
        self.set_batch(pack_batch(tokens, targets))
        self.forward_pass()
        for rows in self.parts:
            self.loss_forward(rows, self.head_forward(rows))
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

    def train_step(self, *batches, **adamw):
        """Queue a step: the mean gradient of these packed micro-batches, then AdamW."""
        self.set_adamw(**adamw)
        self.micros = len(batches) * self.count
        for i, batch in enumerate(batches):
            self.micro, self.last_micro = i, i == len(batches) - 1
            self.set_batch(batch)
            key = self.BT, self.micros, self.micro > 0, self.last_micro
            self.device.repeat(self.graphs, key, self.micro_step)
        self.micro, self.micros, self.last_micro = 0, 1, True

    def micro_step(self):
        """A micro-batch; after the last, the update."""
        self.forward_pass()
        self.backward_pass()
        if self.last_micro:
            self.update_pass()

    def report(self):
        """Wait for the last step, and return its Verdict."""
        return Verdict(*self.device.get(self.adam.verdict).tolist())

    # ---- The update

    def set_adamw(self, learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0,
                  clip=0):
        """Begin a step. Settings go to device memory: a graph records arguments. The corrections
        undo the moments' start at 0."""
        self.step += 1
        self.device.put(self.adam.settings, [
            learning_rate, 1 - beta1, 1 - beta2, 1 / (1 - beta1**self.step),
            1 / (1 - beta2**self.step), eps, weight_decay, clip])

    def update_pass(self):
        arenas = self.arenas
        self.adamw(arenas["parameters"], arenas.get("low bits"), arenas["gradients"],
                   arenas["adam m"], arenas["adam v"])

    def adamw(self, parameters, low, gradients, m, v):
        """AdamW on arenas, which hold all tensors one after another. With running means m of g and
        v of g*g, both corrected: p -= learning_rate * (m / (sqrt(v) + eps) + weight_decay * p)."""
        n = gradients.nbytes // 4
        self.norm_of(gradients, n)
        self.judge()
        a = self.adam
        self.device.launch("adamw", n, parameters, low, gradients, m, v, a.starts, a.decayed,
                           a.decayed.size, n, a.settings, a.verdict)

    def norm_of(self, gradients, n):
        """adam.norm[0] = the norm of n gradients."""
        blocks = min(NORM_BLOCKS, 8 * self.device.multiprocessors)
        self.device.launch("global_norm", blocks, self.adam.norm, gradients, n)

    def judge(self):
        """Decide whether this step updates the parameters: its loss and norm have to be finite."""
        self.device.launch("judge", 1, self.adam.verdict, self.adam.norm)

    # ---- Its memory

    @classmethod
    def tables(cls, c, device, B, T):
        """All that a run allocates, {arena: table}; an arena is one allocation."""
        parameters, low = c.parameter_table(), c.parameter_table(LOW)
        halves = {"low bits": low} if device.real == BF16 else {}
        return {"parameters": c.parameter_table(device.real), **halves, "gradients": parameters,
                "adam m": parameters, "adam v": parameters, "update": update_table(parameters),
                "batch": batch_table(B, T), "activations": c.activation_table(B, T, device.real),
                "backward": c.backward_table(B, T, device.real)}

    def __init__(self, config, device, B, T):
        self.check(config, device, B, T)
        self.config, self.device = config, device
        self.B, self.T = B, T
        self.scale = (config.C // config.NH) ** -0.5
        tables = self.tables(config, device, B, T)
        self.arenas = {name: device.empty(layout(table)[-1]) for name, table in tables.items()}
        for name in tables.keys() - {"activations", "backward"}:
            device.zero(self.arenas[name])
        self.params, self.grads = self.whole_views("parameters"), self.whole_views("gradients")
        self.adam = carve(self.arenas["update"], tables["update"])
        self.master = [self.params]  # views that hold fp32 parameters: in bf16, two halves
        if "low bits" in tables:
            self.master.append(self.whole_views("low bits"))
        self.head, self.dhead = self.params.wte, self.grads.wte  # wte makes the logits, too
        updated = tables["adam m"]
        device.put(self.adam.starts, np.cumsum([0, *(row.size for row in updated)]))
        device.put(self.adam.decayed, [row.decay for row in updated])
        self.BT = None  # (B,T) that the activations are laid out for
        self.graphs = {}  # what the device has recorded of train_step
        self.step = 0  # steps done
        self.micro, self.last_micro = 0, True  # index of the micro-batch; is it the last?
        self.micros = 1  # micro-batches of a step, over all ranks

    def check(self, config, device, B, T):
        """Raise UserError unless the device can train such batches."""
        if T > config.maxT:
            raise UserError(f"-t {T}: expected at most maxT = {config.maxT}")
        shared = max(device.attention_sizes.shared_backward, device.layernorm_sizes.shared_of_row)
        if shared > device.max_shared:
            raise UserError(f"{config}: {device} has too little shared memory")

    def whole_views(self, arena):
        """Views of an arena that has a tensor for each parameter."""
        dtype = {"parameters": self.device.real, "low bits": LOW}.get(arena, np.float32)
        return carve(self.arenas[arena], self.config.parameter_table(dtype))

    def set_parameters(self, tensors):
        """Set parameters from (name, values), fp32 or bf16."""
        self.set_tensors(tensors, self.master)

    def set_tensors(self, tensors, kept):
        """Set tensors from (name, values) pairs. kept: views of fp32, or two views of its halves.
        Rows beyond a shorter vocabulary keep their values."""
        for name, values in tensors:
            for views in kept:
                for to, part in zip(matrices(getattr(views, name)), matrices(values)):
                    part = to_float(part)
                    self.device.put(to.reshape(-1)[: part.size], kept_as(part, to.dtype))

    def set_batch(self, batch):
        """Copy a packed batch to the device, and lay the arenas out for its (B,T)."""
        data, (B, T) = batch
        self.device.put(self.arenas["batch"][: data.nbytes], data)
        if (B, T) == self.BT:
            return
        tables = self.tables(self.config, self.device, B, T)
        self.batch, self.acts, self.back = (carve(self.arenas[name], tables[name])
                                            for name in ("batch", "activations", "backward"))
        views = ((self.params, "parameters"), (self.grads, "gradients"), (self.acts, "activations"))
        self.layers = [[of_layer(whole, tables[name], l) for whole, name in views]
                       for l in range(self.config.L)]
        size = len(self.acts.logits)  # tokens whose logits are computed together
        self.parts = [slice(start, min(start + size, B * T)) for start in range(0, B * T, size)]
        self.BT = B, T


# ---- The loop


class Training:
    """A training run."""
    rank, count = 0, 1  # as GPT2's
    longest = 1024  # T without -t, at most

    def __init__(self, flags, Model):
        self.flags, self.Model = flags, Model

    def train(self):
        """Train from the model's step on until all steps are done."""
        flags, steps = self.flags, self.flags.steps
        adamw = {name: getattr(flags, name) for name in ADAMW_FLAGS}
        batches = self.next_batches()
        for done in range(self.model.step, steps):
            self.pause(done, batches)
            rate, begun = self.learning_rate(done), time.perf_counter()
            self.model.train_step(*batches.packed, learning_rate=rate, **adamw)
            queued = SimpleNamespace(number=done + 1, rate=rate, begun=begun, batches=batches)
            batches = self.next_batches()  # while the GPU works
            self.finish(queued)
        self.pause(steps, batches)

    def learning_rate(self, step):
        """The learning rate of a step, counted from 0, in fp32 as in llm.c."""
        f, flags, warmup = np.float32, self.flags, self.flags.warmup
        rate = f(flags.learning_rate)
        least = rate * f(flags.final_fraction)
        if step < warmup:  # 1. it rises
            return rate * f(step + 1) / f(warmup)
        share = f(step - warmup) / f(flags.steps - warmup)  # 2. it falls along half a cosine
        return least + f(0.5) * (f(1) + np.cos(f(math.pi * float(share)))) * (rate - least)

    def pause(self, done, batches):
        """Once in a while: validate, sample, save."""
        if self.validates(done):
            self.validate(done)
        if self.samples(done):
            self.sample()
        if self.saves(done):
            self.save(done, batches)

    def validates(self, done):
        return self.flags.val_batches != 0 and self.due(done, self.flags.val_every)

    def samples(self, done):
        flags = self.flags
        return done > 0 and flags.sample_tokens > 0 and self.due(done, flags.sample_every)

    def saves(self, done):
        return done == self.flags.steps

    def due(self, done, every):
        return every > 0 and (done % every == 0 or done == self.flags.steps)

    def next_batches(self):
        """The micro-batches of a step, packed, and where in the data each is."""
        batches = SimpleNamespace(packed=[], places=[])
        for _ in range(self.micros):
            batches.packed.append(pack_batch(*self.train_data.next_batch()))
            batches.places.append(self.train_data.where)
        return batches

    def finish(self, queued):
        """Wait for a step that was queued, and report it."""
        self.report(queued, self.model.report())

    def report(self, queued, verdict):
        if verdict.stopped:
            self.give_up(queued, verdict)
        step, seconds = queued.number, time.perf_counter() - queued.begun
        self.say(f"step {step:4d}/{self.flags.steps} | loss {verdict.loss:.6f} | "
                 f"norm {verdict.norm:7.4f} | lr {queued.rate:.2e} | {self.speed(seconds)} | "
                 f"{step * self.flags.total_batch:,} tokens")

    def speed(self, seconds):
        return f"{1e3 * seconds:8.2f} ms | {self.flags.total_batch / seconds:9,.0f} tok/s"

    def give_up(self, queued, verdict):
        raise UserError(f"the loss of step {queued.number} is {verdict.loss} and the norm of its "
                        f"gradient {verdict.norm}: try a smaller -l, or look at the data: "
                        f"{'; '.join(queued.batches.places)}")

    def validate(self, done):
        """Print the mean loss of -m batches of -j, and return it."""
        data, most = self.val_data, self.flags.val_batches
        data.restart()
        count = data.batches if most < 0 else min(most, data.batches)
        loss = self.total_loss(data.next_batch() for _ in range(count)) / count
        self.say(f"val loss {loss:.6f}")
        return loss

    def total_loss(self, batches):
        return sum(self.model.forward(*batch) for batch in batches)

    def sample(self):
        text = self.decode(sample(self.model, self.flags.sample_tokens))
        self.say(f"generating:\n---\n{text}\n---")

    def decode(self, tokens):
        return self.config.encoding().decode(tokens)

    def save(self, done, batches):
        """With -o: write the weights, in llm.c's format."""
        if self.flags.output:
            path = Path(self.flags.output) / f"model_{done:08d}.bin"
            parts = checkpoint_parts(self.config, self.model.params, self.device.real)
            replace_file(path, map(self.device.get, parts))
            self.say(f"wrote {path}")

    def say(self, line):
        print(line, flush=True)

    # ---- Before the first step

    def run(self):
        """Train as the flags say. Returns the exit status."""
        self.prepare()
        try:
            self.model = self.make_model()
            self.train()
        except self.device.Fault as e:
            raise UserError(f"the GPU stopped ({e}) at {self.device.last_kernel} or before: find "
                            "the fault with --plain 1 and compute-sanitizer") from None
        return 0

    def prepare(self):
        self.choose_model()
        self.device = self.make_device()
        self.flags.dtype = self.device.dtype
        self.open_data()
        self.announce()

    def choose_model(self):
        """Find the model's config, in a file or by descriptor."""
        flags, kind = self.flags, self.Model.Config
        file, descriptor = kind.MODELS
        self.name = flags.model or (file if os.path.exists(file) else descriptor)
        self.from_file = os.path.exists(self.name) or self.name.endswith(".bin")
        make = kind.from_file if self.from_file else kind.from_descriptor
        self.config = make(self.name)
        flags.seq_len = flags.seq_len or min(self.config.maxT, self.longest)

    def make_device(self, *beside):
        """The device; beside: more CUDA files to compile."""
        kind = self.device_class()
        return kind(self.flags.dtype, self.config, beside)

    def device_class(self):
        return Cuda if self.flags.plain else FastCuda

    def open_data(self):
        flags = self.flags
        B, T = flags.batch_size, flags.seq_len
        self.train_path, self.val_path = self.data_paths()
        self.train_data = self.loader(self.train_path, B, T, self.rank, self.count)
        if flags.val_every:
            self.val_data = self.loader(self.val_path, B, T)
        size = self.train_data.size
        flags.total_batch = flags.total_batch or size
        if flags.total_batch % size:
            raise UserError(f"-d {flags.total_batch}: expected a multiple of ranks*B*T = {size}")
        self.micros = flags.total_batch // size  # of each rank
        self.epoch = max(1, self.train_data.total // flags.total_batch)
        if flags.steps == -1:
            flags.steps = self.epoch

    def loader(self, path, B, T, *ranks):
        """Batches of a token file. ranks: rank and count, in training."""
        return DataLoader(path, B, T, self.config, *ranks)

    def data_paths(self):
        return self.config.data_paths(self.flags.train_data, self.flags.val_data)

    def announce(self):
        """Print the sizes, and the tables of memory."""
        flags, c = self.flags, self.config
        B, T = flags.batch_size, flags.seq_len
        numbers = sum(row.size for row in c.parameter_table())
        print(f"device       | {self.device} (--dtype)")
        print(f"model        | {self.name} (-e): {numbers:,} parameters, {c}")
        print(f"data         | {self.train_data} (-i), {self.val_path} (-j)")
        print(f"run          | B={B} T={T} (-b, -t), {flags.total_batch:,} tokens a step (-d), "
              f"{flags.steps} steps (-x), an epoch has {self.epoch}")
        for arena, table in self.Model.tables(c, self.device, B, T).items():
            print(f"{arena:12} | {layout(table)[-1] / 2**30:6.2f} GiB in {len(table)} tensors")

    def make_model(self):
        """The model, with the parameters that it starts from."""
        c, flags = self.config, self.flags
        model = self.Model(c, self.device, flags.batch_size, flags.seq_len)
        model.set_parameters(read_parameters(self.name, c) if self.from_file
                             else draw_parameters(c, flags.seed))
        return model


# ---- The device, plain


SCALARS = {"int": np.int32, "float": np.float32, "size_t": np.uint64}  # of kernels' parameters


class Kernel(NamedTuple):
    """What kernels.cu says of a kernel: BLOCK(threads, items along x, items along y), and its
    parameters. gelu_forward has BLOCK(256, W * threads): each thread takes W numbers, 8 in bf16. So
    10,000 numbers are ceil(10000 / 2048) = 5 blocks of 256 threads."""
    name: str
    threads: int  # of a block
    covers: list  # functions of threads and W: a block's items along x, and along y
    parameters: list  # texts, such as "const real* __restrict__ inp" and "int N"

    def plan(self, items, args, W, threads=None):
        """(grid, block, arguments) of a launch over so many items, or (items along x, along y)."""
        if len(args) != len(self.parameters):
            raise UserError(f"kernels.cu: {self.name} has {len(self.parameters)} parameters, and "
                            f"is launched with {len(args)} arguments")
        threads = threads or self.threads
        # int(), as C's / of ints gives an int; 1 along y if BLOCK has no third argument
        sizes = [*(int(covers(threads, W)) for covers in self.covers), 1]
        counts = items if isinstance(items, tuple) else (items,)
        grid = tuple(-(-count // size) for count, size in zip(counts, sizes))  # rounded up
        types = (SCALARS.get(text.split()[0]) for text in self.parameters)  # None: an array
        return grid, (threads,), tuple(to(arg) if to else arg for to, arg in zip(types, args))


# Arrays in kernels.cu that launches read
SIZES = {"attention_sizes": ("rows", "threads", "shared_forward", "shared_backward"),
         "layernorm_sizes": ("threads", "row_threads", "shared_of_row")}


def read_kernels(sources):
    """{name: Kernel} of CUDA files."""
    declaration = (r'BLOCK\((\s*\d+\s*,[^()]*)\)\s*extern "C" __global__ void\s+'
                   r"(?:__launch_bounds__\(.*?\)\s*)?(\w+)\(([^)]*)\)")
    kernels = {}
    for path in sources:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text("utf-8"), flags=re.S)
        for block, name, parameters in re.findall(declaration, text):
            threads, *covers = block.split(",")
            covers = [eval(f"lambda threads, W: {items}") for items in covers]
            kernels[name] = Kernel(name, int(threads), covers, parameters.split(","))
    return kernels


def layernorm_backward_launch(device, N):
    """(blocks, threads, bytes of shared memory): a block a multiprocessor, as many rows as fit."""
    sizes = device.layernorm_sizes
    rows = min(sizes.threads // sizes.row_threads, device.max_shared // sizes.shared_of_row)
    blocks = min(device.multiprocessors, -(-N // rows), PARTIAL_ROWS)
    return blocks, rows * sizes.row_threads, rows * sizes.shared_of_row


def classifier_launch(device, N, Vp, with_gradient):
    """(blocks, logits that a block caches, bytes of shared memory). A block on each multiprocessor
    caches up to two rows; without a cache, a block a row."""
    room = min(2 * Vp, device.max_shared // 16 * device.W)
    if device.name == "cpu" or not with_gradient and room < 2 * Vp:
        return N, 0, 0
    return min(N, device.multiprocessors), room, room // device.W * 16


def stride_of(x):
    """(transposed, stride) for BLAS: (0, numbers to the next row), or (1, to the next column)."""
    to_row, to_column = (stride // x.itemsize for stride in x.strides)
    if to_column == 1 or x.shape[1] == 1:
        return 0, max(to_row, x.shape[1])  # a single row may have any stride
    return 1, max(to_column, x.shape[0])


class Cuda:
    """An NVIDIA GPU through CuPy. Work is queued on a stream and done in order; get waits for it.
    dtype: "bf16", "fp32", or "tf32": fp32 whose products round their inputs to TF32; c: the Config
    that kernels are compiled for; beside: CUDA files to compile behind kernels.cu."""
    name, last_kernel = "cuda", "the start"
    OPTIONS = ("-std=c++17",)
    TYPES = {"f4": 0, "u2": 14}  # cuBLAS's CUDA_R_32F and _16BF
    ONE, NOUGHT = np.ones(1, np.float32), np.zeros(1, np.float32)
    NEEDS = 80, "--dtype fp32"  # least compute capability, or else

    def __init__(self, dtype, c, beside=()):
        try:
            import cupy
            from cupy_backends.cuda.libs import cublas
            cupy.cuda.runtime.getDeviceCount()
        except Exception as e:  # CuPy or a GPU is missing
            raise UserError(f"--device cuda: {e}: run python -m dev.tools.doctor, or train with "
                            "--device cpu") from None
        self.cupy, self.cublas, self.gpu = cupy, cublas, cupy.cuda.Device()
        self.Fault = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError,
                      cublas.CUBLASError)
        self.capability = int(self.gpu.compute_capability)
        self.dtype = dtype or "bf16"
        least, remedy = (75, "--device cpu") if self.dtype == "fp32" else self.NEEDS
        if self.capability < least:
            raise UserError(f"{self.dtype} needs compute capability {least / 10}, and this GPU has "
                            f"{self.capability / 10}: train with {remedy}")
        self.real = np.float32 if self.dtype in ("fp32", "tf32") else BF16
        self.compute = cublas.CUBLAS_COMPUTE_32F
        if self.dtype == "tf32":
            self.compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        # 1 KiB is left for arrays that kernels declare
        self.max_shared = self.gpu.attributes["MaxSharedMemoryPerBlockOptin"] - 1024
        self.multiprocessors = self.gpu.attributes["MultiProcessorCount"]
        self.compiled_for = c.switches()
        self.compile([*c.SOURCES, *beside])

    def compile(self, sources):
        """Compile CUDA files as one."""
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

    def empty(self, nbytes):
        try:
            return self.cupy.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {nbytes / 2**30:.2f} GiB; lower -b or -t") from None

    def put(self, array, values):
        values = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
        array.set(values, stream=self.cupy.cuda.get_current_stream())

    def get(self, array):
        return self.cupy.asnumpy(array)

    def zero(self, array):
        array.data.memset_async(0, array.nbytes)

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over so many items; shared: each block's bytes of dynamic shared memory."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: there is no kernel {name} with a BLOCK(...) over it")
        function, self.last_kernel = self.functions[name], name
        if shared > 2**15 and shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared  # static + dynamic > 48 KiB: opt in
        function(*self.kernels[name].plan(items, args, self.W, threads), shared_mem=shared)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """out (I,J) = a (I,K) @ b (K,J) + bias (J); or, with accumulate, out += a @ b. gelu (I,J)
        becomes GELU of out; with dgelu_at (I,J), out is multiplied by GELU's derivative there.

        cuBLAS stores matrices by columns, and we by rows, so it sees ours transposed:

            ours          its bytes            the same bytes to cuBLAS
            | 0 1 2 |                          | 0 3 |
            | 3 4 5 |     0 1 2 3 4 5          | 1 4 |
                                               | 2 5 |

        It is asked for out.T = b.T @ a.T, and what it writes is our out.
        """
        lib, one = self.cublas, self.ONE  # out = one a @ b + beta out
        if bias is not None:
            out[...] = bias
        beta = one if accumulate or bias is not None else self.NOUGHT
        transpose_a, stride_a = stride_of(a)
        transpose_b, stride_b = stride_of(b)
        type_a, type_b, type_out = (self.TYPES[x.dtype.str[1:]] for x in (a, b, out))
        lib.gemmEx(self.gpu.cublas_handle, transpose_b, transpose_a, *out.shape[::-1], a.shape[1],
                   one.ctypes.data, b.data.ptr, type_b, stride_b, a.data.ptr, type_a, stride_a,
                   beta.ctypes.data, out.data.ptr, type_out, out.shape[1], self.compute,
                   lib.CUBLAS_GEMM_DEFAULT)
        self.gelu_of_product(out, gelu, dgelu_at)

    def gelu_of_product(self, out, gelu, dgelu_at):
        """Apply GELU, or its derivative, after a product that did not fuse it."""
        if gelu is not None:
            self.launch("gelu_forward", out.size, gelu, out, *out.shape)
        if dgelu_at is not None:
            self.launch("gelu_backward", out.size, out, dgelu_at, *out.shape)

    def repeat(self, graphs, key, work):
        work()


# ---- Files and batches, in llm.c's format: 256 int32 of header, then numbers


def read_header(path, *kinds):
    """The header of a file of one of these kinds."""
    try:
        header = np.fromfile(path, "<i4", 256).tolist()
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kinds[0].name}: "
                        f"{kinds[0].remedy}") from None
    for kind in kinds:
        if len(header) == 256 and header[0] == kind.magic and header[1] in kind.versions:
            return header
    wish = " or ".join(f"a {kind.name}'s [{kind.magic}, {' or '.join(map(str, kind.versions))}]"
                       for kind in kinds)
    raise UserError(f"{path}: its header of {4 * len(header)} bytes begins with {header[:2]}; "
                    f"expected {HEADER_BYTES} bytes, and {wish}: {kinds[0].remedy}")


def check_size(path, kind, expected):
    """Raise UserError unless the file has that size."""
    size = os.path.getsize(path)
    if size != expected:
        raise UserError(f"{path}: {size:,} bytes; expected {expected:,} by the header of this "
                        f"{kind.name}: {kind.remedy}")


def read_parameters(path, c):
    """(name, values) of a checkpoint's tensors, mapped into memory as stored."""
    header = read_header(path, c.FILE)
    table = c.file_table(c.STORED[header[1]], header)
    start = os.path.getsize(path) - sum(row.nbytes for row in table)
    for row in table:
        yield row.name, np.memmap(path, row.dtype, "r", start, row.whole_shape)
        start += row.nbytes


def checkpoint_parts(c, params, real):
    """A checkpoint: its headers, then the tensors."""
    yield from c.headers(next(version for version, dtype in c.STORED.items() if dtype == real))
    yield from c.file_parts(params, real)


def draw_parameters(c, seed):
    """(name, values) of random parameters, drawn by all cores."""
    def draw(i, row):
        values = np.random.default_rng([seed, i]).standard_normal(row.whole_shape, np.float32)
        values *= row.std
        values += row.mean
        if row.name in c.PADDED:
            values[c.V :] = 0
        return row.name, values

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, itertools.count(), c.parameter_table())


def kept_as(x, dtype):
    """fp32 numbers as fp32, BF16 or LOW. (BF16 << 16) + LOW gives all bits back. Ties round away
    from zero: with ties to even, a LOW of 0x8000 would not say whether BF16 was rounded up."""
    bits = x.view(np.uint32)
    if dtype == BF16:
        return np.where(x == x, (bits + 0x8000) >> 16, 0x7FFF).astype(BF16)
    return bits.astype(LOW) if dtype == LOW else x


def to_float(x):
    """An array as fp32: from bfloat16's bits, or from fp32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


def count_tokens(path, c=Config):
    """(number of tokens, their NumPy type) of a token file."""
    header = read_header(path, *c.TOKEN_FILES)
    kind = next(kind for kind in c.TOKEN_FILES if kind.magic == header[0])
    dtype = c.TOKEN_FILES[kind]
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
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}; expected ids below V = {V}, "
                        "the model's vocabulary")


class DataLoader:
    """Batches of a token file, one after another, epoch after epoch. Each rank takes its own B*T
    tokens of every batch; the last, partial batch is skipped."""

    def __init__(self, path, B, T, c, rank=0, count=1):
        self.path, self.rank = path, rank
        self.B, self.T = B, T
        self.size = count * B * T  # of a batch
        self.tokens = read_tokens(path, c)
        self.total = len(self.tokens)
        self.batches = (self.total - 1) // self.size  # of an epoch
        if self.batches < 1:
            raise UserError(f"{path}: {self.total:,} tokens; expected {self.size + 1:,} or more; "
                            "use a longer file, or a smaller -b or -t")
        self.restart()

    def __str__(self):
        return f"{self.path}: {self.total:,} tokens"

    def restart(self):
        self.next = 0

    def next_batch(self):
        """Tokens and their targets, both (B,T) int32."""
        if self.next == self.batches:
            self.restart()
        self.next += 1
        return self.batch(self.next - 1)

    def batch(self, i):
        """This rank's part of batch i."""
        slot = self.B * self.T
        start = i * self.size + self.rank * slot
        self.where = f"{self.path}, tokens {start} to {start + slot}"  # for reports of errors
        window = self.tokens[start : start + slot + 1].astype(np.int32)
        return window[:-1].reshape(self.B, self.T), window[1:].reshape(self.B, self.T)


def pack_batch(tokens, targets=0):
    """(the bytes of a batch's arena, (B,T)), from tokens and targets (B,T)."""
    table = batch_table(*tokens.shape)
    data = np.zeros(layout(table)[-1], np.uint8)
    batch = carve(data, table)
    batch.tokens[...], batch.targets[...] = tokens, targets
    flat = tokens.reshape(-1)
    narrow = flat.astype(np.min_scalar_type(flat.max()))  # NumPy radix-sorts 16 bits
    batch.order[...] = np.argsort(narrow, kind="stable")
    counts = np.bincount(flat)
    counts = counts[counts > 0]
    runs = np.stack([np.cumsum(counts) - counts, counts], 1)
    batch.runs[: len(runs)] = runs[np.argsort(-counts)]
    return data, tokens.shape


# ---- A sample


def coins():
    """llm.c's random numbers in [0, 1): xorshift64* (Vigna 2014)."""
    state, bits = 1337, 2**64 - 1
    while True:
        state ^= state >> 12
        state ^= state << 25 & bits
        state ^= state >> 27
        yield np.float32((state * 0x2545F4914F6CDD1D & bits) >> 40) / np.float32(2**24)


def draw_token(logits, coin):
    """The token that a coin in [0, 1) draws from softmax(logits), in llm.c's precisions."""
    top = logits.max()
    shift = top - np.clip(top, -80, 80)  # 0, unless exp would overflow or be all 0
    weights = np.exp(logits - shift)
    coin = np.float32(coin * weights.sum(dtype=np.float64))
    drawn = np.searchsorted(np.cumsum(weights, dtype=np.float32), coin, side="right")
    return min(int(drawn), len(logits) - 1)


def sample(model, count):
    """Token ids, each drawn by a forward pass over those before it."""
    tokens = [min(model.config.EOT, model.config.V - 1)]
    for _, coin in zip(range(count), coins()):
        tokens.append(draw_token(model.next_logits(tokens[-model.T :]), coin))
    return tokens[1:]


# ---- Flags and main


def number(kind, least, below=math.inf):
    """The type of a flag: an int or a float, least <= x < below."""
    def convert(text):
        if not least <= kind(text) < below:
            upper = "" if below == math.inf else f" and below {below}"
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}{upper}")
        return kind(text)
    convert.__name__ = kind.__name__  # for argparse's messages
    return convert


TYPES = {  # of flags, by name
    "name": str, "count": number(int, 1), "count or 0": number(int, 0), "rate": number(float, 0),
    "count or -1": number(int, -1), "switch": number(int, 0, 2), "level": number(int, 0, 3),
    "share": number(float, 0, 1),
    "eps": number(float, 1e-37)}  # the smallest numbers of fp32 would be 0 on a GPU
ADAMW_FLAGS = "beta1", "beta2", "eps", "weight_decay", "clip"

# A flag's letter, long name, type or choices, default, and what it is.
FLAGS = [
    ("-i", "--train-data", "name", None, "token file to train on (default: tinyshakespeare)"),
    ("-j", "--val-data", "name", None, "token file to validate on (default: -i's other one)"),
    ("-e", "--model", "name", None, "checkpoint, or d12, d24 ... (default: gpt2_124M.bin or d12)"),
    ("-o", "--output", "name", None, "folder for the weights (default: none)"),
    ("-b", "--batch-size", "count", 4, "B, sequences in a micro-batch"),
    ("-d", "--total-batch", "count", None, "tokens in a step of micro-batches (default: B*T)"),
    ("-t", "--seq-len", "count", None, "T, tokens in a sequence (default: 1024)"),
    ("-l", "--learning-rate", "rate", 3e-4, "learning rate"),
    ("-u", "--warmup", "count or 0", 0, "steps in which the rate rises"),
    ("-q", "--final-fraction", "rate", 1.0, "what the rate falls to, as a fraction of it"),
    ("-c", "--weight-decay", "rate", 0.0, "weight decay, of matrices and embeddings only"),
    (None, "--beta1", "share", 0.9, "AdamW's decay of the first moment"),
    (None, "--beta2", "share", 0.999, "AdamW's decay of the second moment"),
    (None, "--eps", "eps", 1e-8, "AdamW's epsilon"),
    (None, "--clip", "rate", 1.0, "scale a step's gradient down to this norm; 0: never"),
    ("-x", "--steps", "count or -1", -1, "steps to train; -1: an epoch"),
    ("-v", "--val-every", "count or 0", 20, "steps between validations; 0: none"),
    ("-m", "--val-batches", "count or -1", 20, "batches of a validation, at most; -1: all"),
    ("-s", "--sample-every", "count or 0", 20, "steps between samples; 0: none"),
    ("-g", "--sample-tokens", "count or 0", 64, "tokens of a sample"),
    (None, "--seed", "count or 0", 42, "of the initial parameters"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), "bf16", "tf32: fp32, products in TF32"),
    (None, "--plain", "switch", 0, "1: on a GPU, without the section Faster"),
]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}; --help lists the flags")


def parse_flags(description, table, arguments=None, defaults=True, groups=()):
    """The flags of a command line; without defaults, None if not given. groups:
    {first flag: headline}, for --help."""
    parser = group = Parser(description=description, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    for letter, name, *more in table:
        kind, default, text = more
        group = parser.add_argument_group(groups[name]) if name in groups else group
        if isinstance(kind, tuple):
            form = dict(choices=kind)
        else:
            convert = TYPES.get(kind, kind)
            form = dict(type=convert, metavar=convert.__name__.upper())
        if kind in ("switch", "level"):
            form |= dict(nargs="?", const=1)  # the flag by itself
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(*filter(None, (letter, name)), help=text + shown,
                           default=default if defaults else None, **form)
    return parser.parse_args(arguments)


def main(arguments=None, Model=GPT2):
    """Train as the arguments say, with dev/'s features if they are there, such as a CPU."""
    try:
        from dev import features
    except ModuleNotFoundError as e:
        if e.name != "dev":
            raise
        flags = parse_flags("Train from raw kernels.", FLAGS, arguments)
        return (Training if flags.plain else FastTraining)(flags, Model).run()
    table, groups = features.table_of_flags(FLAGS, Model.Config)
    flags = parse_flags("Train from raw kernels.", table, arguments, defaults=False, groups=groups)
    return features.run_with(flags, table, Model, Training, FastTraining)


# ---- Faster. A step of the 124M model in bf16 on an H200, with one thing more on each line:
#
#                                                              B=4          B=32
#     the plain device                                        10.70 ms     69.32 ms
#     cuBLASLt, with the bias; Hopper's own attention          8.48        54.04
#     algorithms of products chosen by timing them             8.39        53.80
#     GELU in the product too                                  8.43        51.86
#     a step as one graph                                      8.11        51.60
#     a step queued before the last one is reported            8.01        51.67
#
# dev/gpu/products.py chooses the algorithms; without it, the first offered is taken.


class FastTraining(Training):
    """Queues each step before reporting the last, so that the GPU need not wait for the host."""
    late = None  # (the step to report, a wait() for its verdict)
    reported = 0.0  # when the last report was

    def finish(self, queued):
        wait = self.device.fetch(self.model.adam.verdict)  # before a report uses the device
        self.report_late()
        self.late = queued, wait

    def report_late(self):
        if self.late:
            (queued, wait), self.late = self.late, None
            verdict = Verdict(*wait().tolist())
            queued.begun = max(queued.begun, self.reported)  # it waited its turn
            self.reported = time.perf_counter()
            self.report(queued, verdict)

    def pause(self, done, batches):
        if self.pauses(done):
            self.report_late()
        super().pause(done, batches)

    def pauses(self, done):
        """Whether anything but a step comes next."""
        return self.validates(done) or self.samples(done) or self.saves(done)


def address(array):
    """A CuPy array's address for ctypes; of None, a null pointer."""
    return ctypes.c_void_p(None if array is None else array.data.ptr)


def aligned_bytes(size):
    """Zeros whose address is a multiple of 128."""
    memory = np.zeros(size + 127, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size]


class FastCuda(Cuda):
    """Cuda with cuBLASLt. Graphs can capture its products, and an epilogue applies bias or GELU
    to out in registers. CuPy loads the library without wrapping it, so ctypes calls it. Bare
    numbers are cublasLt.h's."""
    WORKSPACE = 32 * 2**20  # bytes, as many as cuBLAS takes on Hopper
    NO_EPILOGUE, ADD_BIAS = 1, 4
    GELU_AND_BIAS, TIMES_DGELU = 164, 192
    AVOID = "--plain 1 does without it"
    hopper = False  # whether kernels are compiled with -DHOPPER
    graph = True

    def __init__(self, dtype, c, beside=()):
        self.HS = c.C // c.NH
        super().__init__(dtype, c, beside)
        self.fused_gelu = self.dtype == "bf16"
        self.maps, self.plans = {}, {}  # {array: its tensor map}, {product: how to do it}
        self.capturing = self.cupy.cuda.Stream(non_blocking=True)  # the default one cannot capture
        loaded = re.search(r"/.*libcublasLt\.so.*", Path("/proc/self/maps").read_text())
        if not loaded:
            raise UserError("CuPy has loaded no cuBLASLt: pip install -r requirements.txt; "
                            f"{self.AVOID}")
        self.library = ctypes.CDLL(loaded[0])
        self.handle, self.workspace = self.create(""), self.empty(self.WORKSPACE)
        self.preference = self.create("MatmulPreference", attributes=(
            (1, ctypes.c_size_t(self.WORKSPACE)),
            (3, ctypes.c_uint32(2)),  # a sum in several parts is added up in fp32
            *((operand, ctypes.c_uint32(ALIGN)) for operand in (5, 6, 7, 8))))

    def switches(self):
        """On Hopper, bf16 attention has its own instructions, for heads of 64, 72 .. 128."""
        if self.capability != 90:
            return super().switches()
        self.hopper = self.real == BF16 and self.HS in range(64, 129, 8)
        # wgmma needs the target sm_90a; sm_90 is not enough
        return [*super().switches(), "-arch=sm_90a", *(["-DHOPPER"] if self.hopper else [])]

    def launch(self, name, items, *args, **sizes):
        """As Cuda.launch."""
        super().launch(name, items, *self.with_tensor_maps(name, args), **sizes)

    def with_tensor_maps(self, name, args):
        """The arguments; on Hopper, tensor maps for arrays that attention reads by tiles."""
        if not (self.hopper and name.startswith("attention")):
            return args
        words = [text.split() for text in self.kernels[name].parameters]
        T = args[words.index(["int", "T"])]
        return [self.tensor_map(arg, T, self.HS) if "Tiles" in word else arg
                for word, arg in zip(words, args)]

    def tensor_map(self, array, T, HS):
        """The 128 bytes that tell Hopper's copy engine how to copy boxes of 64 tokens and 64
        channels of a head from a bf16 array (B*T,heads*HS)."""
        key = T, HS, array.data.ptr, array.shape
        if key not in self.maps:
            N, width = array.shape
            self.maps[key] = made = aligned_bytes(128)

            def numbers(kind, *values):
                return (kind * len(values))(*values)

            driver = ctypes.CDLL("libcuda.so.1")
            status = driver.cuTensorMapEncodeTiled(
                ctypes.c_void_p(made.ctypes.data), 9, 4, address(array),  # bf16, four dimensions
                numbers(ctypes.c_uint64, HS, width // HS, T, N // T),
                numbers(ctypes.c_uint64, 2 * HS, 2 * width, 2 * width * T),
                numbers(ctypes.c_uint32, 64, 1, 64, 1), numbers(ctypes.c_uint32, 1, 1, 1, 1),
                0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128 bytes at a time, zeros beyond
            if status:
                raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: {T=}, "
                                f"{array.shape}; {self.AVOID}")
        return self.maps[key].view("V128")  # for CuPy one number, passed by value

    def call(self, name, *args):
        """Call a function of cuBLASLt."""
        function = getattr(self.library, f"cublasLt{name}")
        status = function(*args)
        if status:
            self.cupy.cuda.runtime.deviceSynchronize()  # raises the error of an earlier kernel
            raise UserError(f"cublasLt{name} failed with status {status}; {self.AVOID}")

    def create(self, kind, *args, attributes=()):
        """An object of cuBLASLt, with these (attribute, value) set."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *args)
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            self.call(f"{kind}SetAttribute", made, attribute, ctypes.byref(value), size)
        return made

    def attributes(self, transpose_a, transpose_b, epilogue, out, bias, aux):
        """(attribute, value) of a product. 3, 4: are b and a transposed? 7: the
        epilogue. 8: bias. 11, 12: GELU's input, and its rows' stride."""
        return [(3, ctypes.c_int(transpose_b)), (4, ctypes.c_int(transpose_a)),
                (7, ctypes.c_int(epilogue)), (8, address(bias)), (11, address(aux)),
                (12, ctypes.c_int64(out.shape[1]))]

    def describe(self, epilogue, out, a, b, *more):
        """A product as cuBLASLt wants it: (description, layout of b, of a, of out)."""
        attributes = self.attributes(stride_of(a)[0], stride_of(b)[0], epilogue, out, *more)
        description = self.create("MatmulDesc", self.compute, self.TYPES["f4"],
                                  attributes=attributes)
        layouts = []
        for x in (b, a, out):
            transposed, stride = stride_of(x)
            m, n = x.shape if transposed else x.shape[::-1]
            sizes = ctypes.c_uint64(m), ctypes.c_uint64(n), ctypes.c_int64(stride)
            layouts.append(self.create("MatrixLayout", self.TYPES[x.dtype.str[1:]], *sizes))
        return description, *layouts

    def multiply(self, plan, algorithm, accumulate, out, a, b):
        """Queue a described product."""
        description, *layouts = plan
        one, beta = ctypes.c_float(1), ctypes.c_float(accumulate)
        stream = ctypes.c_void_p(self.cupy.cuda.get_current_stream().ptr)
        to = address(out), layouts[2]  # read times beta, and written
        self.call("Matmul", self.handle, description, ctypes.byref(one), address(b), layouts[0],
                  address(a), layouts[1], ctypes.byref(beta), *to, *to,
                  ctypes.c_void_p(algorithm.ctypes.data), address(self.workspace),
                  ctypes.c_size_t(self.WORKSPACE), stream)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul."""
        epilogue = self.NO_EPILOGUE if bias is None else self.ADD_BIAS
        result, aux = out, None
        if self.fused_gelu and gelu is not None:
            epilogue, result, aux = self.GELU_AND_BIAS, gelu, out
        elif self.fused_gelu and dgelu_at is not None:
            epilogue, aux = self.TIMES_DGELU, dgelu_at
        self.product(epilogue, result, a, b, bias, aux, accumulate)
        if aux is None:
            self.gelu_of_product(out, gelu, dgelu_at)

    def product(self, epilogue, out, a, b, bias, aux, accumulate, *more):
        """Queue a product. Its plan holds the addresses of bias, aux and more."""
        name = out.shape, a.shape, a.strides, b.strides, out.itemsize, epilogue
        name = *name, *(a.dtype.str for _ in more)
        arrays = (x if x is None else x.data.ptr for x in (bias, aux, *more))
        key = name, accumulate, *arrays
        if key not in self.plans:
            plan = self.describe(epilogue, out, a, b, bias, aux, *more)
            self.plans[key] = plan, self.choose(name, plan, accumulate, out, a, b)
        self.multiply(*self.plans[key], accumulate, out, a, b)

    def choose(self, name, plan, accumulate, out, a, b):
        """The algorithm for a product."""
        return self.algorithms(name, plan, 1)[0]

    def algorithms(self, name, plan, most):
        """What cuBLASLt offers for a product, likely the fastest first: rows of 12 numbers."""
        found, count = np.zeros((most, 12), np.uint64), ctypes.c_int()
        self.call("MatmulAlgoGetHeuristic", self.handle, *plan, plan[3], self.preference, most,
                  ctypes.c_void_p(found.ctypes.data), ctypes.byref(count))
        if not count.value:
            raise UserError(f"cuBLASLt has no algorithm for a product {name}; {self.AVOID}")
        return found[: count.value]

    def repeat(self, graphs, key, work):
        """Do work(): first plainly, which chooses algorithms, then to record a graph. From then on
        one launch does it all, without gaps between kernels."""
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
                    graphs[key] = self.capturing.end_capture()
        graphs[key].launch()

    def fetch(self, array):
        """Queue a copy to the host, and return a function that waits for it and returns it."""
        import cupyx
        stream, host = self.cupy.cuda.get_current_stream(), cupyx.empty_like_pinned(array)
        array.get(stream=stream, out=host, blocking=False)
        copied = stream.record()

        def wait():
            copied.synchronize()
            return host

        return wait


if __name__ == "__main__":
    sys.modules["train_gpt2"] = sys.modules["__main__"]  # dev/ imports this module, not a copy
    run(main)
