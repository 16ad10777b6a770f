"""Train GPT-2 from raw kernels.

    pip install -r requirements.txt && python train_gpt2.py

dev/lab/gpt2_numpy.py has the model in 40 lines of NumPy, and gpt2_numpy_backward.py there derives
all gradients: begin there. Then read this file from top to bottom: tables of tensors; the model,
each layer's forward, then its backward; the update; the loop. You may stop there. The rest is what
these use: memory, the GPU, files and batches, a sample, the flags. "Faster", at the end, adds only
speed: `--plain 1` leaves it out. kernels.cu has the kernels, and dev/ adds features.

Sizes:

    B   sequences in a batch            L   layers
    T   tokens in a sequence            NH  attention heads
    N   tokens in a batch, B*T          C   channels of a token; OC of a linear layer's output
    V   words of the vocabulary         HS  channels of a head, C/NH
    Vp  V padded, so that the matrix product over it is fast

A kernel is a function of which a GPU runs many threads at once, in blocks that run in any order and
do not wait for each other. So a sum over all rows takes two: each block writes a partial sum, and
add_partials adds them.
"""
import argparse
import ctypes
import dataclasses
import itertools
import math
import os
import re
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

# ---- The model's sizes, and tables of all that it keeps in memory

PARTIAL_ROWS = 256  # the most blocks with partial sums


class Row(NamedTuple):
    """One tensor, or a stack with one per layer."""
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


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2's sizes, as in a checkpoint's header, and its tables. `real` is the type of stored
    parameters and activations. Comments: GPT-2 124M at B=4, T=1024."""
    maxT: int = 1024  # positions: T is at most this
    V: int = 50257
    L: int = 12
    NH: int = 12
    C: int = 768
    Vp: int = 50304

    def parameter_table(self, real=np.float32):
        """The parameters, in a checkpoint's order. They start as in llm.c: normal numbers, and the
        2L matrices that add to the residual stream are divided by sqrt(2L), so that the stream does
        not grow with depth (Radford et al. 2019, section 2.3)."""
        C = self.C
        once = dict(dtype=real)
        each = dict(dtype=real, layers=self.L)
        weight = dict(std=0.02, decay=True)
        residual = dict(std=0.02 / math.sqrt(2 * self.L), decay=True)
        return [
            Row("wte", (self.Vp, C), **once, **weight),  # 50304 x 768 = 38.6M; makes the logits too
            Row("wpe", (self.maxT, C), **once, **weight),  # 1024 x 768 = 0.8M, of positions
            Row("ln1w", (C,), **each, mean=1.0),  # 12 x 768
            Row("ln1b", (C,), **each),  # 12 x 768
            Row("qkvw", (3 * C, C), **each, **weight),  # 12 x 2304 x 768 = 21.2M
            Row("qkvb", (3 * C,), **each),  # 12 x 2304
            Row("attprojw", (C, C), **each, **residual),  # 12 x 768 x 768 = 7.1M
            Row("attprojb", (C,), **each),  # 12 x 768
            Row("ln2w", (C,), **each, mean=1.0),  # 12 x 768
            Row("ln2b", (C,), **each),  # 12 x 768
            Row("fcw", (4 * C, C), **each, **weight),  # 12 x 3072 x 768 = 28.3M
            Row("fcb", (4 * C,), **each),  # 12 x 3072
            Row("fcprojw", (C, 4 * C), **each, **residual),  # 12 x 768 x 3072 = 28.3M
            Row("fcprojb", (C,), **each),  # 12 x 768
            Row("lnfw", (C,), **once, mean=1.0),  # 768
            Row("lnfb", (C,), **once),  # 768; all: 124.5M
        ]

    def activation_table(self, B, T, real=np.float32):
        """What forward_pass and loss_pass write, most of it for backward_pass."""
        N = B * T  # 4096
        C = self.C
        each = dict(dtype=real, layers=self.L)
        statistic = dict(layers=self.L)  # always fp32
        return [
            Row("residual", (N, C)),  # the residual stream x, always fp32: 4096 x 768 = 3.1M
            Row("branch", (N, C), real),  # what attention or the MLP adds to x: 3.1M
            Row("ln1_inp", (N, C), **each),  # copies of x before attention: 12 x 3.1M = 37.7M
            Row("ln1_mean", (N,), **statistic),  # 12 x 4096
            Row("ln1_rstd", (N,), **statistic),  # 12 x 4096
            Row("ln1", (N, C), **each),  # 37.7M
            Row("qkv", (N, 3 * C), **each),  # queries, keys, values: 113M
            Row("lse", (B * self.NH, T), **statistic),  # log2 of softmax's denominators: 0.6M
            Row("atty", (N, C), **each),  # attention's output: 37.7M
            Row("ln2_inp", (N, C), **each),  # copies of x after attention: 37.7M
            Row("ln2_mean", (N,), **statistic),  # 12 x 4096
            Row("ln2_rstd", (N,), **statistic),  # 12 x 4096
            Row("ln2", (N, C), **each),  # 37.7M
            Row("fch", (N, 4 * C), **each),  # hidden channels, before GELU: 151M
            Row("fch_gelu", (N, 4 * C), **each),  # after GELU; becomes dfch: 151M
            Row("lnf_inp", (N, C), real),  # a copy of x after the last layer: 3.1M
            Row("lnf_mean", (N,)),  # 4096
            Row("lnf_rstd", (N,)),  # 4096
            Row("lnf", (N, C), real),  # 4096 x 768 = 3.1M
            Row("logits", (logit_rows(N), self.Vp), real),  # 4096 x 50304 = 206M; become gradients
            Row("losses", (N,)),  # 4096
        ]

    def backward_table(self, B, T, real=np.float32):
        """The backward pass writes these, one layer after another to the same memory."""
        N = B * T  # 4096
        C = self.C
        return [
            Row("dresidual", (N, C), real),  # of the stream, all the way down: 4096 x 768 = 3.1M
            Row("dinp", (N, C), real),  # of a product's input: lnf, then each ln2, atty, ln1: 3.1M
            Row("dqkv", (N, 3 * C), real),  # 4096 x 2304 = 9.4M
            Row("delta", (B * self.NH, T)),  # D of attention_backward, one for each query: 49K
            Row("partials", (2, PARTIAL_ROWS, C)),  # sums by many blocks, not yet added up: 0.4M
        ]

    def switches(self):
        """Flags for kernels.cu's compiler: sizes that it needs as constants."""
        return [f"-DCHANNELS={self.C}", f"-DHS={self.C // self.NH}"]


# A layer's parts, by their names in the tables: "qkv" has qkvw and qkvb, "ln1" ln1w, ln1_mean ...


class Linear(NamedTuple):
    """A linear layer: out (N,OC) = inp (N,C) @ w.T + b."""
    name: str
    l: int  # the index of its layer; the head's is L
    w: object  # (OC,C)
    b: object  # (OC); the head has none
    dw: object  # their gradients
    db: object


class Norm(NamedTuple):
    """A norm: out (N,C) = (inp - mean) * rstd * w + b, row by row."""
    name: str
    l: int  # the index of its layer; lnf's is L
    w: object  # (C)
    b: object  # (C)
    dw: object
    db: object
    inp: object  # (N,C), a copy of the residual stream
    mean: object  # (N)
    rstd: object  # (N), 1 / the standard deviation
    out: object  # (N,C)


# ---- The model: GPT-2 on a device
#
# A device does the arithmetic: Cuda, below, or the CPU of dev/cpu/device.py. The model calls
#
#     empty(nbytes)                 memory, as bytes
#     put(array, values)            host to device
#     get(array)                    device to host; a NumPy array stays as it is
#     zero(array)                   all bits 0
#     launch(kernel, items, *args)  run a kernel over items, or (items along x, items along y)
#     matmul(out, left, right, ...) out = left @ right, or +=, with a bias or a GELU if asked
#     repeat(graphs, key, work)     do work(); a fast device records its launches, and repeats them
# launch and matmul only queue work, which is done in order; get waits for it. Functions with launch
# in their names, behind the loop, choose blocks and shared memory.


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
    the stream and to the branch, and a fork adds what the branch returns."""
    Config = Config

    def __init__(self, config, device, B, T):
        self.config = config
        self.device = device
        self.B = B  # the largest batch
        self.T = T  # the longest sequence
        self.BT = None  # (B,T) of the present batch, for which set_batch lays out the arenas
        self.arenas = allocate(device, self.tables(config, device, B, T))

        # An arena is one allocation, cut into a table's tensors: views, attributes by their names.
        self.params = self.views("parameters")
        self.grads = self.views("gradients")  # of the parameters
        self.adam = self.views("update")
        self.batch = None  # tokens, targets, and tokens sorted
        self.acts = None  # activations, which the forward pass makes
        self.back = None  # the gradients of activations
        self.layers = None  # for each layer its parts, and its activations
        self.lnf = None  # the last norm
        self.head = Linear("head", config.L, self.params.wte, None, self.grads.wte, None)
        self.slices = None  # of the N tokens, which get logits in turn
        self.masters = master_views(self)  # of all 32 bits of parameters: see BF16, below

        self.step = 0  # steps begun
        self.micro = 0  # index of the micro-batch in the step
        self.micros = 1  # micro-batches of a step
        self.graphs = {}  # the launches of micro_step that the device has recorded
        put_starts(self)  # where each tensor starts in an arena, for AdamW

    # ---- A layer, forward and backward

    def layer_forward(self, l):
        """x = x + attention(ln1(x)), then x = x + mlp(ln2(x)). The next norm does each addition."""
        y, a = self.layers[l]  # this layer's parts and activations
        branch = self.acts.branch
        self.norm_forward(y.ln1, branch if l else None)  # (N,C); branch: of the layer before
        self.linear_forward(a.qkv, a.ln1, y.qkv)  # (N,C) -> (N,3C)
        self.attention_forward(a.atty, a.lse, a.qkv)  # (N,3C) -> (N,C)
        self.linear_forward(branch, a.atty, y.attproj)  # (N,C) -> (N,C)

        self.norm_forward(y.ln2, branch)  # (N,C)
        self.linear_forward(a.fch, a.ln2, y.fc, gelu=a.fch_gelu)  # (N,C) -> (N,4C)
        self.linear_forward(branch, a.fch_gelu, y.fcproj)  # (N,4C) -> (N,C)

    def layer_backward(self, l):
        """layer_forward(l), read upwards: each call takes the gradient of its twin's output, and
        makes those of the twin's input and parameters. GELU ends fc's call there, its derivative
        fcproj's here, which makes dfch. dx is the gradient of the stream, and so of each branch."""
        y, a = self.layers[l]
        dx = self.back.dresidual  # (N,C)
        dqkv = self.back.dqkv  # (N,3C)
        dln2 = datty = dln1 = self.back.dinp  # (N,C): each is read before the next is written
        dfch = a.fch_gelu  # (N,4C), the same memory: fch_gelu is read before dfch is written
        self.linear_backward(dfch, dx, a.fch_gelu, y.fcproj, dgelu_at=a.fch)  # (N,C) -> (N,4C)
        self.linear_backward(dln2, dfch, a.ln2, y.fc)  # (N,4C) -> (N,C)
        self.norm_backward(dx, dln2, y.ln2)  # (N,C)

        self.linear_backward(datty, dx, a.atty, y.attproj)  # (N,C) -> (N,C)
        self.attention_backward(dqkv, datty, a.atty, a.lse, a.qkv)  # (N,C) -> (N,3C)
        self.linear_backward(dln1, dqkv, a.ln1, y.qkv)  # (N,3C) -> (N,C)
        self.norm_backward(dx, dln1, y.ln1)  # (N,C)

    # ---- Its parts; y is one of them. A step's first micro-batch sets gradients, the others add.

    def linear_forward(self, out, inp, y, gelu=None):
        """out (N,OC) = inp (N,C) @ w.T (C,OC) + b (OC) of the linear layer y. gelu (N,OC), if
        given, becomes GELU(out); a fast device applies it while out is in registers."""
        self.device.matmul(out, inp, y.w.T, bias=y.b, gelu=gelu)

    def linear_backward(self, dinp, dout, inp, y, dgelu_at=None):
        """The three gradients of out = inp @ w.T + b, given dout (N,OC):

            db (OC)     = the sum of the rows of dout
            dw (OC,C)   = dout.T @ inp
            dinp (N,C)  = dout @ w

        If inp is GELU(x), x is given as dgelu_at: dinp is multiplied by GELU's derivative there,
        and becomes the gradient of x. dinp may overwrite inp."""
        self.bias_backward(dout, y)
        self.device.matmul(y.dw, dout.T, inp, accumulate=self.micro > 0)  # (OC,N) @ (N,C)
        self.device.matmul(dinp, dout, y.w, dgelu_at=dgelu_at)  # (N,OC) @ (OC,C)

    def bias_backward(self, dout, y):
        """db: each block sums a share of the rows, 32 or more. (add_partials has two outputs.)"""
        N, OC = dout.shape
        blocks = max(1, min(128, N // 32))
        partials = self.back.partials  # (blocks,OC) fits: it has 2 x 256 x C numbers
        self.device.launch("matmul_backward_bias", (OC, blocks), partials, dout, N, OC)
        self.device.launch("add_partials", (OC, 1), y.db, None, partials, blocks, OC,
                           self.micro > 0)

    def norm_forward(self, y, branch):
        """x += branch, unless None. Then inp = x and, row by row, out = (x - mean) * rstd * w + b
        of the norm y."""
        x = self.acts.residual
        N = len(y.out)
        self.device.launch("residual_layernorm_forward", N, y.out, y.mean, y.rstd, y.inp, x, branch,
                           y.w, y.b, N)

    def norm_backward(self, dx, dout, y):
        """Add the gradient of the input of the norm y to dx. With norm = (inp - mean) * rstd and
        dnorm = dout * w, for each row:

            dx += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
            dw = the sum over rows of dout * norm
            db = the sum over rows of dout
        """
        N, C = y.inp.shape
        partials = self.back.partials  # (2,blocks,C): each block's sums, which add_partials adds up
        blocks, threads, shared = layernorm_backward_launch(self.device, N)
        self.device.launch("layernorm_backward", blocks, dx, partials, dout, y.inp, y.w, y.mean,
                           y.rstd, N, threads=threads, shared=shared)
        self.device.launch("add_partials", (C, 2), y.dw, y.db, partials, blocks, C, self.micro > 0)

    def attention_forward(self, out, lse, qkv):
        """For each sequence and head, out (T,HS) = P v with P (T,T) = softmax(S), S = q k' /
        sqrt(HS); a token sees itself and those before it. (' transposes; qkv is (B,T,3,NH,HS), out
        (B,T,NH,HS).) Attention is the only part of a layer that mixes tokens. P is not stored: from
        lse (B*NH,T), log2 of the softmax's denominators, the backward pass computes it again, P =
        2^(S * log2(e) - lse)."""
        launch_attention(self, "attention_forward", out, lse, qkv)

    def attention_backward(self, dqkv, dout, out, lse, qkv):
        """dqkv (N,3C), given dout (N,C), by two kernels (Dao 2023, algorithm 2, has one):

            dv = P' dout      dP = dout v'      dS = P * (dP - D)
            dq = dS k / sqrt(HS)                dk = dS' q / sqrt(HS)

        For softmax's gradient a query needs D, the sum of P * dP over its keys. The sum of out *
        dout over its channels is the same number, and needs no P."""
        D = self.back.delta
        launch_attention(self, "attention_backward_q", dqkv, D, lse, out, qkv, dout)  # dq, D
        launch_attention(self, "attention_backward_kv", dqkv, D, lse, qkv, dout)  # dk, dv

    # ---- Before the first layer, after the last

    def embedding_forward(self):
        """The stream begins: x = wte[token] + wpe[position]."""
        p = self.params
        x = self.acts.residual
        N, C = x.shape
        self.device.launch("encoder_forward", N * C, x, self.batch.tokens, p.wte, p.wpe, N,
                           self.BT[1], C)

    def embedding_backward(self):
        """dx goes to the rows of wte and wpe that x was made of. Rows of dx with the same token are
        summed in an order that the host has sorted, so that no two threads add to one number: of
        tokens 7 3 7, order is 1 0 2 (sorted: 3 7 7), and the runs (first, length), longest first,
        are (1,2), of 7, and (0,1), of 3. The head has begun dwte; this adds."""
        B, T = self.BT
        dwte, dwpe = self.grads.wte, self.grads.wpe
        dx = self.back.dresidual
        N, C = dx.shape
        self.device.launch("encoder_backward_wte", (N, C), dwte, dx, self.batch.tokens,
                           self.batch.order, self.batch.runs, N, C)
        self.device.launch("encoder_backward_wpe", dwpe.size, dwpe, dx, B, T, len(dwpe), C,
                           self.micro > 0)

    def head_forward(self, rows):
        """The logits (rows,Vp) of some of the N tokens, a slice. Their weight is wte again."""
        logits = self.acts.logits[: rows.stop - rows.start]
        self.device.matmul(logits, self.lnf.out[rows], self.head.w.T)  # (rows,C) @ (C,Vp)
        return logits

    def head_backward(self, rows, dlogits):
        """The gradients of lnf[rows] and of wte. A step's first rows set dwte, later ones add."""
        adds = self.micro > 0 or rows.start > 0
        dlnf = self.back.dinp[rows]
        self.device.matmul(self.head.dw, dlogits.T, self.lnf.out[rows], accumulate=adds)
        self.device.matmul(dlnf, dlogits, self.head.w)  # (rows,Vp) @ (Vp,C)

    def loss_forward(self, rows, logits, with_gradient=False):
        """losses[rows] = -log(softmax(logits)[target]). with_gradient, the logits then become the
        gradient of the step's mean loss: (softmax(logits) - onehot(target)) / tokens."""
        c = self.config
        losses = self.acts.losses[rows]
        targets = self.batch.targets.reshape(-1)[rows]
        blocks, room, shared = classifier_launch(self.device, len(logits), c.Vp, with_gradient)
        self.device.launch("fused_classifier", blocks, logits, losses, targets, self.token_weight(),
                           len(logits), c.V, c.Vp, with_gradient, room, shared=shared)

    def token_weight(self):
        """A token's weight in the step's mean loss, which all micro-batches add up."""
        return 1 / (len(self.acts.losses) * self.micros)

    # ---- Passes over all layers

    def forward_pass(self):
        """From a batch to lnf (N,C)."""
        self.embedding_forward()
        for l in range(self.config.L):
            self.layer_forward(l)
        self.norm_forward(self.lnf, self.acts.branch)

    def loss_pass(self, with_gradient=False):
        """From lnf to the loss; with_gradient, back to the gradient of lnf. The logits of some
        tokens are made, turned into their gradients, and used, before those of the next."""
        for rows in self.slices:
            logits = self.head_forward(rows)
            self.loss_forward(rows, logits, with_gradient)
            if with_gradient:
                self.head_backward(rows, logits)
        losses = self.acts.losses  # verdict.loss = the mean of all of the step
        self.device.launch("add_loss", 1, self.adam.verdict, losses, self.token_weight(),
                           len(losses), self.micro > 0)

    def backward_pass(self):
        """From the gradient of lnf to those of all parameters."""
        dx = self.back.dresidual
        dlnf = self.back.dinp
        self.device.zero(dx)  # where the stream's gradient starts
        self.norm_backward(dx, dlnf, self.lnf)
        for l in reversed(range(self.config.L)):
            self.layer_backward(l)
        self.embedding_backward()

    def update_pass(self):
        """AdamW on whole arenas, all tensors at once."""
        arenas = self.arenas
        gradients = arenas["gradients"]
        self.norm_of(gradients)
        self.judge()
        self.adamw(arenas["parameters"], arenas.get("low bits"), gradients, arenas["adam m"],
                   arenas["adam v"])

    def norm_of(self, gradients):
        """gradient_norm[0] = the length of the whole gradient, in fp32; behind it, blocks' sums."""
        blocks = min(NORM_BLOCKS, 8 * self.device.multiprocessors)
        self.device.launch("global_norm", blocks, self.adam.gradient_norm, gradients,
                           gradients.nbytes // 4)

    def judge(self):
        """Decide whether adamw updates: the loss and the gradient's norm have to be finite."""
        self.device.launch("judge", 1, self.adam.verdict, self.adam.gradient_norm)

    def adamw(self, parameters, low, gradients, m, v):
        """The gradient g is scaled down to the norm `clip` if that is smaller. Then

            m += (1 - beta1) * (g - m)      v += (1 - beta2) * (g * g - v)
            p -= learning_rate * (m / (sqrt(v) + eps) + weight_decay * p)

        with m and v corrected for their start at 0, and weight_decay 0 where Row.decay is."""
        adam = self.adam
        n = gradients.nbytes // 4
        self.device.launch("adamw", n, parameters, low, gradients, m, v, adam.starts, adam.decayed,
                           adam.decayed.size, n, adam.settings, adam.verdict)

    # ---- A step, a validation

    def train_step(self, *batches, **settings):
        """Queue a step: the mean gradient of packed micro-batches, one by one, then AdamW."""
        self.start_step(**settings)
        self.micros = len(batches)
        for i, batch in enumerate(batches):
            self.micro = i
            self.set_batch(batch)
            key = self.BT, self.micros, i > 0, i == self.micros - 1  # all that changes launches
            self.device.repeat(self.graphs, key, self.micro_step)
        self.micro = 0  # forward() sees one batch alone
        self.micros = 1

    def micro_step(self):
        """A micro-batch, and after the last the update."""
        self.forward_pass()
        self.loss_pass(with_gradient=True)
        self.backward_pass()
        if self.micro == self.micros - 1:
            self.update_pass()

    def start_step(self, learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0,
                  clip=0):
        """Count a step, and put its settings into device memory, since recorded launches keep their
        arguments. clip=0: gradients are not scaled."""
        self.step += 1
        settings = dict(
            learning_rate=learning_rate, rate1=1 - beta1, rate2=1 - beta2,
            correction1=1 / (1 - beta1**self.step), correction2=1 / (1 - beta2**self.step),
            eps=eps, weight_decay=weight_decay, clip=clip)
        self.device.put(self.adam.settings, [settings[name] for name in ADAMW])

    def verdict(self):
        """Wait for the last step, and return its Verdict."""
        return Verdict(*self.device.get(self.adam.verdict).tolist())

    def forward(self, tokens, targets):
        """The mean loss, in nats, of tokens and targets (B,T)."""
        self.set_batch(pack_batch(tokens, targets))
        self.forward_pass()
        self.loss_pass()
        return self.verdict().loss

    # ---- Its memory

    @classmethod
    def tables(cls, c, device, B, T):
        """All arenas of a model, {name: table}."""
        return all_tables(c, device.real, B, T)

    def views(self, arena):
        """The tensors of an arena, by their names."""
        B, T = self.BT or (self.B, self.T)
        return carve(self.arenas[arena], self.tables(self.config, self.device, B, T)[arena])

    def set_parameters(self, tensors):
        self.set_tensors(tensors, self.masters)

    def set_tensors(self, tensors, kept):
        """Set tensors from (name, values) pairs, fp32 or bf16. kept: the views that get them."""
        for name, values in tensors:
            for views in kept:
                put_tensor(self.device, getattr(views, name), values)

    def set_batch(self, batch):
        """Copy a packed batch to the device, and lay the arenas out for its (B,T)."""
        data, BT = batch
        self.device.put(self.arenas["batch"][: data.nbytes], data)
        if BT != self.BT:
            self.BT = BT
            lay_out(self)


# ---- The loop


class Training:
    """A training run. The flags stay what was asked for; what the run makes of them is here."""
    Model = GPT2

    def __init__(self, flags):
        self.flags = flags
        self.name = None  # a checkpoint to start from, or a descriptor
        self.from_file = False  # which of the two
        self.config = None
        self.device = None
        self.model = None
        self.paths = None  # of the tokens to train and to validate on
        self.train_data = None  # their batches
        self.val_data = None
        self.T = 0  # tokens of a row
        self.total_batch = 0  # tokens of a step
        self.grad_accum = 1  # micro-batches of a step
        self.steps = 0
        self.observers = [Printer()]

    def train(self):
        """Run the remaining steps. After the last the loop comes round once more, to validate,
        sample and save."""
        settings = {name: getattr(self.flags, name) for name in ADAMW_FLAGS}
        batches = self.next_batches()
        for done in range(min(self.model.step, self.steps), self.steps + 1):  # step: 0, or resumed
            self.pause(done, batches)
            if self.ends(done):
                break

            # A step: forward, backward, update.
            begun = time.perf_counter()
            rate = self.learning_rate(done)
            self.model.train_step(*batches.packed, learning_rate=rate, **settings)
            step = SimpleNamespace(number=done + 1, rate=rate, begun=begun, batches=batches)
            batches = self.next_batches()  # while the device works
            self.finish(step)

    def pause(self, done, batches):
        """What comes between steps, when `done` are made."""
        # Once in a while: does it predict text that it is not trained on?
        if self.validates(done):
            self.validate(done)
        # Once in a while: let it write.
        if self.samples(done):
            self.sample()
        # At the end: keep what it has learned.
        if self.saves(done):
            self.save(done, batches)

    def learning_rate(self, step):
        """The learning rate of a step, counted from 0, in fp32 as in llm.c."""
        f = np.float32
        warmup = self.flags.warmup
        rate = f(self.flags.learning_rate)
        least = rate * f(self.flags.final_fraction)
        if step < warmup:  # 1. it rises
            return rate * f(step + 1) / f(warmup)
        progress = f(step - warmup) / f(self.steps - warmup)  # 2. it falls along half a cosine
        return least + f(0.5) * (f(1) + np.cos(f(math.pi * float(progress)))) * (rate - least)

    # ---- You may stop there: these are its steps, a few lines each.

    def due(self, done, every):
        """Whether a periodic action is due after `done` steps; each is due at the end."""
        return every > 0 and (done % every == 0 or done == self.steps)

    def validates(self, done):
        return self.flags.val_batches != 0 and self.due(done, self.flags.val_every)

    def samples(self, done):
        flags = self.flags
        return done > 0 and flags.sample_tokens > 0 and self.due(done, flags.sample_every)

    def saves(self, done):
        return done == self.steps

    def ends(self, done):
        return done == self.steps

    def next_batches(self):
        """The micro-batches of a step, packed, and where in the data each is."""
        batches = SimpleNamespace(packed=[], places=[])
        for _ in range(self.grad_accum):
            batches.packed.append(pack_batch(*self.train_data.next_batch()))
            batches.places.append(self.train_data.where)
        return batches

    def finish(self, step):
        """Wait for a step, and report it."""
        self.report(step, self.model.verdict())

    def report(self, step, verdict):
        """Tell of a step, if its loss and gradient are finite."""
        if verdict.stopped:
            self.give_up(step, verdict)
        step.verdict = verdict
        step.seconds = time.perf_counter() - step.begun
        self.tell("stepped", step)

    def give_up(self, step, verdict):
        raise UserError(f"the loss of step {step.number} is {verdict.loss} and the norm of its "
                        f"gradient {verdict.norm}: try a smaller -l, or look at the data: "
                        f"{'; '.join(step.batches.places)}")

    def validate(self, done):
        """The mean loss over -m validation batches, always the same ones."""
        data = self.val_data
        most = self.flags.val_batches
        data.restart()
        count = data.per_epoch if most < 0 else min(most, data.per_epoch)
        loss = self.total_loss(data.next_batch() for _ in range(count)) / count
        self.tell("validated", done, loss)
        return loss

    def total_loss(self, batches):
        return sum(self.model.forward(*batch) for batch in batches)

    def sample(self):
        """Let the model write."""
        text = self.decode(generate(self, self.flags.sample_tokens))
        self.tell("sampled", text)

    def next_logits(self, tokens):
        return next_logits(self.model, tokens)

    def decode(self, tokens):
        """The text of some tokens, if they are of GPT-2's vocabulary."""
        return gpt2_encoding().decode(tokens) if self.config.V == Config.V else str(tokens)

    def save(self, done, batches):
        """With -o: write the weights, in llm.c's format."""
        if self.flags.output:
            path = Path(self.flags.output) / f"model_{done:08d}.bin"
            parts = checkpoint_parts(self.config, self.model.params, self.device.real)
            replace_file(path, map(self.device.get, parts))
            self.tell("say", f"wrote {path}")

    def tell(self, what, *args):
        """Call the observers' methods of this name."""
        for each in self.observers:
            method = getattr(each, what, None)
            if method:
                method(self, *args)

    # ---- Before the first step

    def run(self):
        """Train as the flags say."""
        self.prepare()
        try:
            self.model = self.make_model()
            self.train()
        except self.device.Fault as e:
            raise UserError(f"the GPU stopped ({e}) at {self.device.last_kernel} or before: find "
                            "the fault with --plain 1 and compute-sanitizer") from None

    def prepare(self):
        """All checks, before memory is allocated."""
        self.choose_model()
        self.device = self.make_device()
        self.open_data()
        self.announce()

    def choose_model(self):
        """The model's config, from a checkpoint or a descriptor."""
        self.name = self.find_model()
        self.from_file = os.path.isfile(self.name) or self.name.endswith(".bin")
        self.config = self.find_config()
        self.T = self.find_length()
        self.check_length()

    def find_model(self):
        """The checkpoint or descriptor to start from."""
        return self.flags.model or ("gpt2_124M.bin" if os.path.isfile("gpt2_124M.bin") else "d12")

    def find_config(self):
        sizes = sizes_of_file(self.name) if self.from_file else sizes_of_depth(self.name)
        return self.Model.Config(**sizes)

    def find_length(self):
        """Tokens of a row."""
        return self.flags.seq_len or min(self.config.maxT, 1024)

    def check_length(self):
        if self.T > self.config.maxT:
            raise UserError(f"-t {self.T}: expected at most maxT = {self.config.maxT}: wpe has no "
                            "more positions")

    def make_device(self):
        kind = Cuda if self.flags.plain else FastCuda
        return kind(self.flags.dtype, self.config)

    def open_data(self):
        """Open the token files, and count steps and micro-batches."""
        flags = self.flags
        self.paths = self.data_paths()
        self.train_data = self.loader(self.paths[0], True)
        if flags.val_every:
            self.val_data = self.loader(self.paths[1], False)
        size = self.train_data.size
        self.total_batch = flags.total_batch or size
        if self.total_batch % size:
            raise UserError(f"-d {self.total_batch}: expected a multiple of processes*B*T "
                            f"= {size}")
        self.grad_accum = self.total_batch // size
        self.steps = self.epoch_steps() if flags.steps == -1 else flags.steps

    def epoch_steps(self):
        """llm.c's formula: unlike a loader's per_epoch, it does not ask for the last target."""
        return max(1, self.train_data.total // self.total_batch)

    def data_paths(self):
        """The token files to train and to validate on."""
        train = self.flags.train_data or DATA.format("train")
        return train, self.flags.val_data or other_part(train, "train", "val")

    def loader(self, path, trains):
        """The batches of a token file. Those of a validation are smaller if it is short."""
        tokens = read_tokens(path, self.config.V)
        B = self.flags.batch_size
        if not trains:
            B = max(1, min(B, (len(tokens) - 1) // self.T))
        return DataLoader(path, tokens, B, self.T)

    def announce(self):
        """Print the sizes, and how large the arenas are."""
        c = self.config
        B, T = self.flags.batch_size, self.T
        numbers = sum(row.size for row in c.parameter_table())
        print(f"device       | {self.device} (--dtype)")
        print(f"model        | {self.name} (-e): {numbers:,} parameters, {c}")
        print(f"data         | {self.train_data} (-i), {self.paths[1]} (-j)")
        print(f"run          | B={B} T={T} (-b, -t), {self.total_batch:,} tokens a step (-d), "
              f"{self.steps} steps (-x), an epoch has {self.epoch_steps()}")
        for arena, table in self.Model.tables(c, self.device, B, T).items():
            print(f"{arena:12} | {size_of(offsets(table)[-1])} in {len(table)} tensors")

    def make_model(self):
        """The model, with the parameters that it starts from."""
        model = self.Model(self.config, self.device, self.flags.batch_size, self.T)
        model.set_parameters(self.first_parameters())
        return model

    def first_parameters(self):
        """(name, values) of all parameters, from a checkpoint or random."""
        c = self.config
        return read_parameters(self.name, c) if self.from_file else draw_parameters(
            c, self.flags.seed)


class Printer:
    """Prints what a run tells."""

    def stepped(self, run, step):
        self.say(run, " | ".join(self.parts(run, step)))

    def parts(self, run, step):
        return [f"step {step.number:4d}/{run.steps}", f"loss {step.verdict.loss:.6f}",
                f"norm {step.verdict.norm:7.4f}", f"lr {step.rate:.2e}",
                f"{1e3 * step.seconds:8.2f} ms", f"{run.total_batch / step.seconds:9,.0f} tok/s",
                f"{step.number * run.total_batch:,} tokens"]

    def validated(self, run, done, loss):
        self.say(run, f"val loss {loss:.6f}")

    def sampled(self, run, text):
        self.say(run, f"generating:\n---\n{text}\n---")

    def say(self, run, line):
        print(line, flush=True)


def sizes_of_depth(descriptor):
    """The sizes of depth L, for "dL", as in llm.c; d12, d24, d36, d48 are GPT-2 small to XL."""
    if not re.fullmatch(r"d[1-9]\d{0,2}", descriptor):
        raise UserError(f"-e {descriptor}: expected a checkpoint, or a descriptor from d1 to "
                        "d999, such as d12")
    L = int(descriptor[1:])
    NH = {48: 25, 60: 30, 72: 30, 84: 36}.get(L, min(L, 12 + max(0, L - 12) // 3))
    HS = {72: 96, 84: 96}.get(L, 64)
    return dict(L=L, NH=NH, C=NH * HS)


def size_of(nbytes):
    """A number of bytes as text."""
    return f"{nbytes / 2**30:6.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:6.2f} MiB"


# ---- The model's memory: tables, arenas, views

# bfloat16 is the upper half of an fp32, rounded; NumPy has no such type, so arrays hold its bits.
# AdamW needs all of a parameter, and keeps both halves:
#
#     sign, exponent, 7 bits of mantissa | 16 bits of mantissa
#     BF16, which the products read      | LOW, signed: what rounding took away
BF16 = np.uint16
LOW = np.int16


def kept_as(x, dtype):
    """fp32 numbers as fp32, BF16 or LOW. (BF16 << 16) + LOW gives all bits back: a lower half from
    0x8000 on rounds BF16 up, and is negative in LOW. With ties to even, 0x8000 might be either."""
    bits = x.view(np.uint32)
    if dtype == BF16:
        return np.where(x == x, (bits + 0x8000) >> 16, 0x7FFF).astype(BF16)
    return bits.astype(LOW) if dtype == LOW else x


def to_float(x):
    """An array as fp32: from bfloat16's bits, or from fp32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


# Bytes: tensors start at multiples of it. C is a multiple of 32, so parameters have no gaps, and
# AdamW runs over an arena as over one array
ALIGN = 64


def ceil_div(count, size):
    """count / size, rounded up."""
    return -(-count // size)


LOGIT_ROWS = 8192  # many tokens' logits take gigabytes: some rows come at a time


def logit_rows(N):
    """How many tokens get logits at a time: a quarter or more, since each time rewrites dwte."""
    return min(N, max(LOGIT_ROWS, ceil_div(N, 4)))


def batch_table(B, T):
    """A batch, as the host prepares it."""
    return [
        Row("tokens", (B, T), np.int32),
        Row("targets", (B, T), np.int32),  # for each token the one that follows
        Row("order", (B * T,), np.int32),  # the N positions, sorted by token
        Row("runs", (B * T, 2), np.int32),  # of one token in order: (first index, length)
    ]


# The fields of kernels.cu's struct. rate1 is 1 - beta1, correction1 undoes the start of m at 0.
ADAMW = ("learning_rate", "rate1", "rate2", "correction1", "correction2", "eps", "weight_decay",
         "clip")


NORM_BLOCKS = 1024  # the most blocks of global_norm


class Verdict(NamedTuple):
    """A step's numbers, and kernels.cu's decisions: is its update made, is the run stopped?"""
    norm: float
    loss: float
    update: float  # each of these is 1 or 0
    stopped: float


def update_table(moments):
    """AdamW's other tensors, given the table of its moments."""
    return [
        Row("settings", (len(ADAMW),)),
        Row("gradient_norm", (2 + NORM_BLOCKS,)),  # norm, counter, each block's sum
        Row("verdict", (len(Verdict._fields),)),
        Row("starts", (len(moments) + 1,), np.uint64),  # where each tensor starts, in numbers
        Row("decayed", (len(moments),), np.int32),  # 1 where weight decay applies, else 0
    ]


def all_tables(c, real, B, T):
    """All arenas of a model, {name: table}."""
    fp32 = c.parameter_table()
    halves = {"low bits": c.parameter_table(LOW)} if real == BF16 else {}
    return {"parameters": c.parameter_table(real), **halves, "gradients": fp32,
            "adam m": fp32, "adam v": fp32, "update": update_table(fp32),
            "batch": batch_table(B, T), "activations": c.activation_table(B, T, real),
            "backward": c.backward_table(B, T, real)}


# An arena is one allocation, cut into the tensors of a table.


def allocate(device, tables):
    """{name: an arena, bytes}. All are zeros but those that a pass writes before it reads them."""
    arenas = {name: device.empty(offsets(table)[-1]) for name, table in tables.items()}
    for name in tables.keys() - {"activations", "backward"}:
        device.zero(arenas[name])
    return arenas


def whole_shape(row):
    return (row.layers, *row.shape) if row.layers else row.shape


def offsets(table):
    """The byte offset of each tensor in an arena, then the arena's size."""
    padded = (ceil_div(row.nbytes, ALIGN) * ALIGN for row in table)
    return list(itertools.accumulate(padded, initial=0))


def carve(arena, table):
    """Views of an arena (bytes), one attribute for each row; with layers, (layers, *shape)."""
    views = SimpleNamespace()
    for row, start in zip(table, offsets(table)):
        view = arena[start : start + row.nbytes].view(row.dtype).reshape(whole_shape(row))
        setattr(views, row.name, view)
    return views


def matrices(values):
    """The matrices of a stack, to copy a large tensor in pieces."""
    return values.reshape(-1, *values.shape[-2:])


def find_linear(name, l, p, g):
    """The linear layer of that name, from views of parameters and of gradients."""
    tensors = (vars(views).get(name + end) for views in (p, g) for end in "wb")
    return Linear(name, l, *tensors)


def find_norm(name, l, p, g, a):
    """The norm of that name; a: views of activations."""
    kept = (vars(a).get(name + end) for end in ("_inp", "_mean", "_rstd", ""))
    return Norm(*find_linear(name, l, p, g), *kept)


def layer_of(views, table, l):
    """Layer l of each stack of tensors in a table, from views of the whole stacks."""
    return SimpleNamespace(**{row.name: getattr(views, row.name)[l] for row in table if row.layers})


def lay_out(model):
    """Cut the arenas for batches of model.BT, and find each layer's parts and activations."""
    c = model.config
    B, T = model.BT
    model.batch = model.views("batch")
    model.acts = model.views("activations")
    model.back = model.views("backward")
    tables = model.tables(c, model.device, B, T)
    model.layers = []
    for l in range(c.L):
        p = layer_of(model.params, tables["parameters"], l)
        g = layer_of(model.grads, tables["gradients"], l)
        a = layer_of(model.acts, tables["activations"], l)
        y = SimpleNamespace(ln1=find_norm("ln1", l, p, g, a), ln2=find_norm("ln2", l, p, g, a))
        for name in ("qkv", "attproj", "fc", "fcproj"):
            setattr(y, name, find_linear(name, l, p, g))
        model.layers.append((y, a))
    model.lnf = find_norm("lnf", c.L, model.params, model.grads, model.acts)
    size = len(model.acts.logits)
    model.slices = [slice(start, min(start + size, B * T)) for start in range(0, B * T, size)]


def put_tensor(device, to, values):
    """Copy values, fp32 or bf16, to the start of a tensor of a device, matrix by matrix: a 32-bit
    copy of a large tensor would take too much memory."""
    for matrix, new in zip(matrices(to), matrices(values)):
        new = to_float(new)
        device.put(matrix.reshape(-1)[: new.size], kept_as(new, matrix.dtype))


def master_views(model):
    """Views of the parameters; in bf16 also of their low bits, in an arena of their own."""
    return [model.views(name) for name in ("parameters", "low bits") if name in model.arenas]


def put_starts(model):
    """Tell AdamW where in its arenas each tensor starts, and whether weight decay applies."""
    moments = model.tables(model.config, model.device, model.B, model.T)["adam m"]
    model.device.put(model.adam.starts, np.cumsum([0, *(row.size for row in moments)]))
    model.device.put(model.adam.decayed, [row.decay for row in moments])


# ---- The device, plain

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels.cu"
SCALARS = {"int": np.int32, "float": np.float32, "size_t": np.uint64}  # of kernels' parameters


class Kernel(NamedTuple):
    """A kernel of kernels.cu: BLOCK(threads, items along x, items along y), and its parameters.
    gelu_forward has BLOCK(256, W * threads): its items are numbers, and a thread takes W, 8 in
    bf16. So 10,000 are ceil(10000 / 2048) = 5 blocks."""
    name: str
    threads: int  # of a block
    covers: list  # functions of threads and W: a block's items along x, and along y
    parameters: list  # texts, such as "const real* __restrict__ inp" and "int N"

    def configure(self, items, args, W, threads=None):
        """(grid, block, arguments) of a launch over these items, or (along x, along y)."""
        if len(args) != len(self.parameters):
            raise UserError(f"kernels.cu: {self.name} has {len(self.parameters)} parameters, and "
                            f"is launched with {len(args)} arguments")
        threads = threads or self.threads
        # int(), as in C; 1 along y if BLOCK has no third argument
        covered = [*(int(covers(threads, W)) for covers in self.covers), 1]
        counts = items if isinstance(items, tuple) else (items,)
        grid = tuple(map(ceil_div, counts, covered))
        types = (SCALARS.get(text.split()[0]) for text in self.parameters)  # None: an array
        return grid, (threads,), tuple(to(arg) if to else arg for to, arg in zip(types, args))


# Arrays in kernels.cu that launches read: Cuda.compile makes them attributes with these names
SIZES = {"attention_sizes": ("rows", "threads", "shared_forward", "shared_backward"),
         "layernorm_sizes": ("threads", "row_threads", "shared_of_row")}


def source_of(path):
    """The text of a CUDA file, whose lines a compiler's messages count."""
    return f'#line 1 "{path.name}"\n{path.read_text("utf-8")}'


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


def launch_attention(model, kernel, *arrays):
    """Launch one of attention's kernels: a block has `rows` tokens of a head of a sequence."""
    B, T = model.BT
    c = model.config
    scale = (c.C // c.NH) ** -0.5  # of the scores: 1 / sqrt(HS)
    sizes = model.device.attention_sizes
    shared = sizes.shared_forward if kernel == "attention_forward" else sizes.shared_backward
    model.device.launch(kernel, B * c.NH * ceil_div(T, sizes.rows), *arrays, scale, T, c.NH,
                        threads=sizes.threads, shared=shared)


def layernorm_backward_launch(device, N):
    """(blocks, threads, bytes of shared memory): as many rows as fit share a block."""
    sizes = device.layernorm_sizes
    fit = max(1, device.max_shared // sizes.shared_of_row)  # launch refuses what is too large
    rows = min(sizes.threads // sizes.row_threads, fit)
    blocks = min(device.multiprocessors, ceil_div(N, rows), PARTIAL_ROWS)
    return blocks, rows * sizes.row_threads, rows * sizes.shared_of_row


def classifier_launch(device, N, Vp, with_gradient):
    """(blocks, logits that a block caches, bytes of shared memory).

        if two rows of logits fit    a block a multiprocessor, which loads the next row ahead
        else, for a gradient         the same without loading ahead: it reads its row twice
        else                         a block a row, and nothing is cached
    """
    room = min(2 * Vp, device.max_shared // 16 * device.W)
    loads_ahead = room == 2 * Vp
    if device.name == "cpu" or not (with_gradient or loads_ahead):
        return N, 0, 0  # a block a row; on a CPU nothing is cached
    return min(N, device.multiprocessors), room, room // device.W * 16


def stride_of(x):
    """(transposed, stride) for BLAS: (0, numbers to the next row), or (1, to the next column)."""
    to_row, to_column = (stride // x.itemsize for stride in x.strides)
    if to_column == 1 or x.shape[1] == 1:
        return 0, max(to_row, x.shape[1])  # a single row may have any stride
    return 1, max(to_column, x.shape[0])


class Cuda:
    """An NVIDIA GPU through CuPy. Work is queued on a stream and done in order; get waits for it.
    dtype: "bf16", "fp32", or "tf32", fp32 whose products round their inputs to TF32."""
    name = "cuda"
    OPTIONS = ("-std=c++17",)
    CUDA_TYPES = {"f4": 0, "u2": 14}  # cuBLAS's CUDA_R_32F and _16BF
    ONE = np.ones(1, np.float32)  # factors of a product, in the host's memory
    ZERO = np.zeros(1, np.float32)
    MINIMUM = {"fp32": 75, "tf32": 80, "bf16": 80}  # compute capabilities

    def __init__(self, dtype, c):
        try:
            import cupy
            from cupy_backends.cuda.libs import cublas
            cupy.cuda.runtime.getDeviceCount()
        except Exception as e:  # CuPy or a GPU is missing
            raise UserError(f"no GPU can be used: {e}: run python -m dev.tools.doctor") from None
        self.cupy = cupy
        self.cublas = cublas
        self.gpu = cupy.cuda.Device()
        self.Fault = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError,
                      cublas.CUBLASError)  # what CuPy raises after a kernel went wrong
        self.last_kernel = "the start"
        self.capability = int(self.gpu.compute_capability)  # 90 for Hopper's 9.0
        if self.capability < self.MINIMUM[dtype]:
            raise UserError(f"{dtype} needs compute capability {self.MINIMUM[dtype] / 10}, and "
                            f"this GPU has {self.capability / 10}: try another --dtype")
        self.dtype = dtype
        self.real = np.float32 if dtype in ("fp32", "tf32") else BF16
        self.W = 16 // np.dtype(self.real).itemsize  # numbers in 16 bytes
        self.compute = cublas.CUBLAS_COMPUTE_32F  # accumulate in fp32
        if dtype == "tf32":
            self.compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        self.compiled_for = c.switches()
        self.multiprocessors = self.gpu.attributes["MultiProcessorCount"]
        # bytes for a block; 1 KiB is left for arrays that kernels declare
        self.max_shared = self.gpu.attributes["MaxSharedMemoryPerBlockOptin"] - 1024
        self.compile([KERNELS])

    def compile(self, sources):
        """Compile CUDA files as one."""
        self.kernels = read_kernels(sources)
        module = self.module_of("".join(map(source_of, sources)))
        try:
            self.functions = {name: module.get_function(name) for name in self.kernels}
            for name, fields in SIZES.items():
                at = module.get_global(name)
                values = self.cupy.ndarray(len(fields), np.int32, at).get().tolist()
                setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
            self.cublas.setMathMode(self.gpu.cublas_handle, 16)  # fp32 for partial sums too
        except self.cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile kernels.cu:\n{e}") from None
        except self.Fault as e:
            raise UserError(f"the GPU cannot be used ({e}): check nvidia-smi") from None

    def module_of(self, code):
        """A CUDA program, which NVRTC compiles in one thread a core, or CuPy's cache has."""
        options = *self.OPTIONS, "--split-compile=0", *self.switches()
        return self.cupy.RawModule(code=code, options=options)

    def switches(self):
        return [f"-D{self.dtype.upper()}", *self.compiled_for]

    def __str__(self):
        name = self.cupy.cuda.runtime.getDeviceProperties(self.gpu.id)["name"].decode()
        return f"{name}, {self.dtype}"

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
        return self.cupy.asnumpy(array)  # lets a checkpoint's header through, a NumPy array

    def zero(self, array):
        array.data.memset_async(0, array.nbytes)

    def launch(self, name, items, *args, threads=None, shared=0):
        """Run a kernel over these items. shared: bytes of dynamic shared memory for each block."""
        if name not in self.kernels:
            raise UserError(f"kernels.cu: there is no kernel {name} with a BLOCK(...) over it")
        if shared > self.max_shared:
            raise UserError(f"a block of {name} needs {shared:,} bytes of shared memory, and "
                            f"{self} has {self.max_shared:,}: try another -e")
        function = self.functions[name]
        self.last_kernel = name
        # A block gets 48 KiB without a request, and the kernel's own arrays may take 16 of them
        if shared > 32 * 1024 and shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared
        function(*self.kernels[name].configure(items, args, self.W, threads), shared_mem=shared)

    def matmul(self, out, left, right, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """out (I,J) = left (I,K) @ right (K,J) + bias (J); with accumulate, out += left @ right.
        gelu (I,J) becomes GELU(out); out is multiplied by GELU's derivative at dgelu_at (I,J).

        cuBLAS stores matrices by columns, and we by rows, so it sees ours transposed:

            ours          its bytes            the same bytes to cuBLAS
            | 0 1 2 |                          | 0 3 |
            | 3 4 5 |     0 1 2 3 4 5          | 1 4 |
                                               | 2 5 |

        It is asked for out.T = right.T @ left.T, and what it writes is our out.
        """
        if bias is not None:
            out[...] = bias
        beta = self.ONE if accumulate or bias is not None else self.ZERO  # out's factor
        I, J = out.shape
        transposed_l, stride_l = stride_of(left)
        transposed_r, stride_r = stride_of(right)
        type_l, type_r, type_out = (self.CUDA_TYPES[x.dtype.str[1:]] for x in (left, right, out))
        # cuBLAS calls J, I and K m, n and k, and takes a matrix as its address, type and stride
        self.cublas.gemmEx(
            self.gpu.cublas_handle, transposed_r, transposed_l, J, I, len(right),
            self.ONE.ctypes.data, right.data.ptr, type_r, stride_r, left.data.ptr, type_l, stride_l,
            beta.ctypes.data, out.data.ptr, type_out, J, self.compute,
            self.cublas.CUBLAS_GEMM_DEFAULT)
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


class UserError(Exception):
    """An error that the user can fix: what was found, what was expected, what to do."""


class FileKind(NamedTuple):
    """A kind of file: its name, how it begins, and what to do about a bad one."""
    name: str
    magic: int
    versions: tuple
    remedy: str


HEADER_BYTES = 1024
CHECKPOINT = FileKind("GPT-2 checkpoint", 20240326, (3, 5), "a run with -o writes one, or "
                      "dev/tools/convert.py")
TOKENS = FileKind("token file", 20240520, (1,), "prepro_tinyshakespeare.py writes one; --input "
                  "takes your own text")
STORED = {3: np.float32, 5: BF16}  # the numbers of a checkpoint, by its version


def read_header(path, kind):
    """The header of a file of this kind, 256 numbers."""
    try:
        header = np.fromfile(path, "<i4", 256).tolist()
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kind.name}: "
                        f"{kind.remedy}") from None
    if len(header) < 256 or header[0] != kind.magic or header[1] not in kind.versions:
        versions = " or ".join(map(str, kind.versions))
        raise UserError(f"{path}: its header of {4 * len(header)} bytes begins with {header[:2]}; "
                        f"expected {HEADER_BYTES} bytes, and a {kind.name}'s [{kind.magic}, "
                        f"{versions}]: {kind.remedy}")
    return header


def make_header(magic, *fields):
    """The 256 int32 that llm.c's files begin with: a magic number, these fields, and zeros."""
    return np.array([magic, *fields, *[0] * (255 - len(fields))], "<i4")


def replace_file(path, chunks):
    """Write the chunks (bytes or C-contiguous arrays) to path, completely or not at all: to a
    temporary file beside it, which then takes its name. Raises UserError if the disk is full or the
    folder cannot be written."""
    temporary = Path(f"{path}.{secrets.token_hex(4)}.tmp")  # two containers may share a pid
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); what was there before is "
                        "untouched") from None
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass  # the folder is missing or read-only, as the UserError says


def check_size(path, kind, expected):
    """Raise UserError unless the file has that size."""
    size = os.path.getsize(path)
    if size != expected:
        raise UserError(f"{path}: {size:,} bytes; expected {expected:,} by the header of this "
                        f"{kind.name}: {kind.remedy}")


def check_config(c, path):
    """Raise UserError unless the sizes make a model."""
    sizes = c.maxT, c.V, c.L, c.NH, c.C, c.Vp
    for ok, wish in ((all(0 < n < 2**24 for n in sizes), "sizes from 1 to 2**24 - 1"),
                     (c.NH and c.C % c.NH == 0, "C to be divisible by NH"),
                     (c.C % 32 == 0, "C to be a multiple of 32"),
                     (c.V <= c.Vp, "V not to exceed Vp"),
                     (c.Vp % 8 == 0, "Vp to be a multiple of 8")):
        if not ok:
            raise UserError(f"{path}: {c}; expected {wish}")


def sizes_of_file(path):
    """The sizes in the header of a checkpoint, which is checked."""
    header = read_header(path, CHECKPOINT)
    c = Config(*header[2:8])
    check_config(c, path)
    table = c.parameter_table(STORED[header[1]])
    check_size(path, CHECKPOINT, HEADER_BYTES + sum(row.nbytes for row in table))
    return vars(c)


def read_parameters(path, c):
    """(name, values) of a checkpoint's tensors, mapped into memory as stored."""
    start = HEADER_BYTES
    for row in c.parameter_table(STORED[read_header(path, CHECKPOINT)[1]]):
        yield row.name, np.memmap(path, row.dtype, "r", start, whole_shape(row))
        start += row.nbytes


def checkpoint_parts(c, params, real):
    """A checkpoint: its header, then the tensors, matrix by matrix."""
    version = 5 if real == BF16 else 3
    yield make_header(CHECKPOINT.magic, version, *dataclasses.astuple(c))
    for row in c.parameter_table():
        yield from matrices(getattr(params, row.name))


def draw_parameters(c, seed):
    """(name, values) of random parameters, drawn by all cores."""
    def draw(i, row):
        values = np.random.default_rng([seed, i]).standard_normal(whole_shape(row), np.float32)
        values *= row.std
        values += row.mean
        if row.name == "wte":
            values[c.V :] = 0  # no word
        return row.name, values

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, itertools.count(), c.parameter_table())


DATA = "data/tinyshakespeare/tiny_shakespeare_{}.bin"  # {}: train or val


def other_part(path, part, other):
    """The path with `other` for the last `part` in the file's name, if possible one that is a word
    by itself: constraint_train.bin's is constraint_val.bin. Raises UserError if it has none."""
    path = Path(path)
    word = f"(?<![A-Za-z]){part}(?![A-Za-z])"
    found = [*re.finditer(word, path.name)] or [*re.finditer(part, path.name)]
    if not found:
        flag = dict(train="-j", val="-i")[part]
        raise UserError(f"{path} has no '{part}' in its name: give {flag} too")
    start, end = found[-1].span()
    return str(path.with_name(path.name[:start] + other + path.name[end:]))


def read_tokens(path, V):
    """The tokens of a token file, mapped into memory. Raises UserError unless all are below V."""
    count = read_header(path, TOKENS)[2]
    check_size(path, TOKENS, HEADER_BYTES + 2 * count)
    tokens = np.memmap(path, "<u2", "r", offset=HEADER_BYTES) if count else np.zeros(0, "<u2")
    check_tokens(path, tokens, V)
    return tokens


def check_tokens(path, tokens, V):
    """Raise UserError unless all ids are below V."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < V:
        bad = int(np.argmax((tokens < 0) | (tokens >= V)))
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}; expected ids below V = {V}, "
                        "the model's vocabulary")


class DataLoader:
    """Batches of the tokens of a file, epoch after epoch. The last, partial batch is skipped."""

    def __init__(self, path, tokens, B, T):
        self.path = path
        self.tokens = tokens
        self.B = B
        self.T = T
        self.size = B * T  # tokens in a batch
        self.total = len(tokens)
        self.per_epoch = (self.total - 1) // self.size  # batches
        self.order = range(self.per_epoch)  # in which they come
        self.next = 0  # how many of them have come
        self.where = ""  # the tokens of the last one, for errors
        self.check(path, self.total)

    def check(self, path, total):
        """Raise UserError if a file is too short for a batch and its last target."""
        if total <= self.size:
            raise UserError(f"{path}: {total:,} tokens; expected {self.size + 1:,} or more, a "
                            "batch and one: a longer file, or a smaller -b or -t")

    def __str__(self):
        return f"{self.path}: {self.total:,} tokens"

    def restart(self):
        self.next = 0

    def next_batch(self):
        """Tokens and their targets, both (B,T) int32."""
        if self.next == len(self.order):
            self.restart()
        self.next += 1
        return self.batch(self.order[self.next - 1])

    def batch(self, i):
        """Batch i of the file."""
        start = i * self.size
        end = start + self.size
        self.where = f"{self.path}, tokens {start} to {end}"
        window = self.tokens[start : end + 1].astype(np.int32)
        return window[:-1].reshape(self.B, self.T), window[1:].reshape(self.B, self.T)


def pack_batch(tokens, targets):
    """(the bytes of a batch's arena, (B,T)), from tokens and targets (B,T)."""
    table = batch_table(*tokens.shape)
    data = np.zeros(offsets(table)[-1], np.uint8)
    batch = carve(data, table)
    batch.tokens[...] = tokens
    batch.targets[...] = targets
    flat = tokens.reshape(-1)
    narrow = flat.astype(np.min_scalar_type(flat.max()))  # NumPy radix-sorts 16 bits
    batch.order[...] = np.argsort(narrow, kind="stable")
    counts = np.bincount(flat)
    counts = counts[counts > 0]
    runs = np.stack([np.cumsum(counts) - counts, counts], 1)
    batch.runs[: len(runs)] = runs[np.argsort(-counts)]
    return data, tokens.shape


# ---- A sample

EOT = 50256  # GPT-2's <|endoftext|>, with which a text begins


def gpt2_encoding():
    """GPT-2's byte-pair encoding, 50,257 tokens: downloaded once, or from TIKTOKEN_CACHE_DIR.
    Raises UserError."""
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # what its HTTP library raises
        raise UserError(f"tiktoken could not get GPT-2's vocabulary ({type(e).__name__}): connect "
                        "to the network once, or set TIKTOKEN_CACHE_DIR to a folder that holds "
                        "it") from None


def coins():
    """llm.c's random numbers in [0, 1): xorshift64* (Vigna 2014). Every sample begins again."""
    bits = 2**64 - 1
    state = 1337
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


def next_logits(model, tokens):
    """The logits (V,) of the token that follows some tokens, a list of at most T ids."""
    # Only a row of another length lays the arenas out anew: so it is one of 64, 128 ...
    padded = np.zeros((1, min(model.T, ceil_div(len(tokens), 64) * 64)), np.int32)
    padded[0, : len(tokens)] = tokens  # causal: padding at the end is never seen
    model.set_batch(pack_batch(padded, np.zeros_like(padded)))  # nobody reads the targets
    model.forward_pass()
    logits = model.head_forward(slice(len(tokens) - 1, len(tokens)))
    return to_float(model.device.get(logits))[0, : model.config.V]


def generate(run, count):
    """Token ids, each drawn by a forward pass over those before it."""
    tokens = [min(EOT, run.config.V - 1)]
    for _, coin in zip(range(count), coins()):
        tokens.append(draw_token(run.next_logits(tokens[-run.T :]), coin))
    return tokens[1:]


# ---- Flags and main


def number(kind, least, top=math.inf):
    """The type of a flag: an int or a float, least <= x < top."""
    def convert(text):
        if not least <= kind(text) < top:
            end = f" and below {top}" if top < math.inf else " and finite" if kind is float else ""
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}{end}")
        return kind(text)
    convert.__name__ = kind.__name__  # for argparse
    return convert


FLAG_TYPES = {
    "name": str, "count": number(int, 1), "count or 0": number(int, 0), "amount": number(float, 0),
    "count or -1": number(int, -1), "switch": number(int, 0, 2), "fraction": number(float, 0, 1),
    "eps": number(float, 1e-37)}  # the smallest numbers of fp32 would be 0 on a GPU
ADAMW_FLAGS = ("beta1", "beta2", "eps", "weight_decay", "clip")

# A flag's letter, long name, type or choices, default, and help. dev/ adds flags, and has other
# defaults for a run without any.
FLAGS = [
    ("-i", "--train-data", "name", None, "token file to train on (default: tinyshakespeare)"),
    ("-j", "--val-data", "name", None, "token file to validate on (default: beside -i)"),
    ("-e", "--model", "name", None, "checkpoint, or d12, d24 ... (default: gpt2_124M.bin or d12)"),
    ("-o", "--output", "name", None, "folder for the weights"),
    ("-b", "--batch-size", "count", 4, "B, sequences in a micro-batch"),
    ("-d", "--total-batch", "count", None, "tokens in a step of micro-batches (default: B*T)"),
    ("-t", "--seq-len", "count", None, "T, tokens in a sequence (default: maxT, at most 1024)"),
    ("-l", "--learning-rate", "amount", 3e-4, "learning rate"),
    ("-u", "--warmup", "count or 0", 0, "steps in which the rate rises"),
    ("-q", "--final-fraction", "amount", 1.0, "what the rate falls to, as a fraction of it"),
    ("-c", "--weight-decay", "amount", 0.0, "weight decay, of matrices and embeddings"),
    (None, "--beta1", "fraction", 0.9, "AdamW's decay of the first moment"),
    (None, "--beta2", "fraction", 0.999, "AdamW's decay of the second moment"),
    (None, "--eps", "eps", 1e-8, "AdamW's epsilon"),
    (None, "--clip", "amount", 1.0, "scale a step's gradient down to this norm; 0: never"),
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


def add_flag(parser, letter, name, kind, default, text):
    """Give a parser the flag of a row of FLAGS."""
    if isinstance(kind, tuple):
        form = dict(choices=kind)
    else:
        convert = FLAG_TYPES.get(kind, kind)
        form = dict(type=convert, metavar=convert.__name__.upper())
    if kind == "switch":
        form |= dict(nargs="?", const=1)  # the flag by itself
    shown = "" if default is None else f" (default: {default})"
    return parser.add_argument(*filter(None, (letter, name)), default=default, help=text + shown,
                               **form)


def parse_flags(arguments=None):
    """The flags of a command line."""
    parser = Parser(description="Train GPT-2 from raw kernels.", allow_abbrev=False)
    for row in FLAGS:
        add_flag(parser, *row)
    return parser.parse_args(arguments)


def main():
    """Train as the command line says, with the features of dev/ (such as a CPU) if it is there."""
    try:
        from dev.features import order
    except ModuleNotFoundError as e:
        if e.name != "dev":
            raise
        return Training(parse_flags()).run()
    return order.program()


def run_main(main):
    """Run a program. An error ends it with one line and status 1, Ctrl-C with 130."""
    try:
        sys.exit(main())
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(print("interrupted", file=sys.stderr) or 130)


# ---- Faster. A step of the 124M model in bf16 on an H100, with more on each line:
#
#                                                              B=4          B=32
#     the plain device                                        11.6 ms      73.4 ms
#     cuBLASLt with the bias, and Hopper's own attention      11.6         57.9
#     GELU in the product too                                 10.5         56.0
#     a step as one graph: this file                           8.82        55.8
#     with dev/, which replaces some verbs                     8.17        51.8
#
# At B=4 the host is too slow to launch one kernel after another, until the graph does it.


# cublasLt.h's numbers: functions applied to a product before it is stored
EPILOGUES = {"DEFAULT": 1, "BIAS": 4, "GELU_AUX_BIAS": 164, "DGELU": 192}
REDUCE_IN_COMPUTE_TYPE = 2  # sums of several parts of a product are added up in fp32


def pointer(array):
    """A CuPy array's address, a number; 0 for None."""
    return 0 if array is None else array.data.ptr


def address(array):
    """The same for ctypes."""
    return ctypes.c_void_p(pointer(array))


def aligned_bytes(size):
    """Zeros whose address is a multiple of 128."""
    memory = np.zeros(size + 127, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size]


class FastCuda(Cuda):
    """Cuda with cuBLASLt. Its epilogues apply bias or GELU to out in registers, and graphs can have
    its products, while CuPy refuses to capture cuBLAS. CuPy has no calls for it, so ctypes has."""
    # Attributes of a product, and of a search for algorithms: cublasLt.h's numbers, and their types
    PRODUCT = {"TRANSA": (3, ctypes.c_int), "TRANSB": (4, ctypes.c_int),
               "EPILOGUE": (7, ctypes.c_int), "BIAS_POINTER": (8, ctypes.c_void_p),
               "EPILOGUE_AUX_POINTER": (11, ctypes.c_void_p),
               "EPILOGUE_AUX_LD": (12, ctypes.c_int64)}
    SEARCH = {"MAX_WORKSPACE_BYTES": (1, ctypes.c_size_t),
              "REDUCTION_SCHEME_MASK": (3, ctypes.c_uint32),
              **{f"MIN_ALIGNMENT_{x}_BYTES": (n, ctypes.c_uint32) for n, x in enumerate("ABCD", 5)}}
    WORKSPACE = 32 * 2**20  # bytes, as cuBLAS takes on Hopper
    AVOID = "--plain 1 does without it"

    def __init__(self, dtype, c):
        self.HS = c.C // c.NH  # before Cuda's constructor, which compiles
        super().__init__(dtype, c)
        self.fused_gelu = dtype == "bf16"  # whether GELU is part of its product
        self.capturing = self.cupy.cuda.Stream(non_blocking=True)  # the default one cannot capture
        self.maps = {}  # {(T, HS, array's address, its shape): tensor map}
        self.products = {}  # {shapes and more of a product: (its plan, the algorithm)}
        # Linux lists the files that a process has loaded
        loaded = re.search(r"/.*libcublasLt\.so.*", Path("/proc/self/maps").read_text())
        if not loaded:
            raise UserError("CuPy has loaded no cuBLASLt: pip install -r requirements.txt; "
                            f"{self.AVOID}")
        self.library = ctypes.CDLL(loaded[0])
        self.handle = self.create("")
        self.workspace = self.empty(self.WORKSPACE)
        alignments = {f"MIN_ALIGNMENT_{operand}_BYTES": ALIGN for operand in "ABCD"}
        self.search = self.create("MatmulPreference", table=self.SEARCH, values=dict(
            MAX_WORKSPACE_BYTES=self.WORKSPACE, REDUCTION_SCHEME_MASK=REDUCE_IN_COMPUTE_TYPE,
            **alignments))

    @property
    def hopper(self):
        """Whether attention uses Hopper's own instructions: in bf16, for heads of 64, 72 .. 128."""
        return self.capability == 90 and self.real == BF16 and self.HS in range(64, 129, 8)

    def switches(self):
        target = ["-arch=sm_90a"] if self.capability == 90 else []  # sm_90 has no wgmma
        return [*super().switches(), *target, *(["-DHOPPER"] if self.hopper else [])]

    # ---- A product: matmul chooses its epilogue, product makes its plan once and queues it.

    def matmul(self, out, left, right, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul."""
        forward = self.fused_gelu and gelu is not None
        backward = self.fused_gelu and dgelu_at is not None
        if forward:  # GELU(x) goes to gelu, and x to the auxiliary array, out
            epilogue = dict(EPILOGUE=EPILOGUES["GELU_AUX_BIAS"], BIAS_POINTER=pointer(bias),
                            EPILOGUE_AUX_POINTER=pointer(out), EPILOGUE_AUX_LD=out.shape[1])
        elif backward:
            epilogue = dict(EPILOGUE=EPILOGUES["DGELU"], EPILOGUE_AUX_POINTER=pointer(dgelu_at),
                            EPILOGUE_AUX_LD=out.shape[1])
        elif bias is not None:
            epilogue = dict(EPILOGUE=EPILOGUES["BIAS"], BIAS_POINTER=pointer(bias))
        else:
            epilogue = dict(EPILOGUE=EPILOGUES["DEFAULT"])
        self.product(gelu if forward else out, left, right, accumulate, epilogue)
        if not (forward or backward):
            self.gelu_of_product(out, gelu, dgelu_at)

    def product(self, out, left, right, accumulate, epilogue):
        """Queue out = left @ right, or +=, with an epilogue: attributes of PRODUCT."""
        key = (out.shape, left.shape, left.strides, right.strides, out.itemsize, left.dtype,
               accumulate, *epilogue.items())
        if key not in self.products:
            plan = self.describe(out, left, right, epilogue)
            self.products[key] = plan, self.algorithm(plan, out, left, right, accumulate, epilogue)
        self.multiply(*self.products[key], out, left, right, accumulate)

    def describe(self, out, left, right, epilogue):
        """A product as cuBLASLt wants it, of out.T = right.T @ left.T: (description, matrices
        right, left and out)."""
        transposed = dict(TRANSA=stride_of(right)[0], TRANSB=stride_of(left)[0])
        description = self.create("MatmulDesc", self.compute, self.CUDA_TYPES["f4"],
                                  table=self.PRODUCT, values=transposed | epilogue)
        return description, *(self.describe_matrix(x) for x in (right, left, out))

    def describe_matrix(self, x):
        """A matrix as cuBLASLt wants it: by columns."""
        transposed, stride = stride_of(x)
        rows, columns = x.shape if transposed else x.shape[::-1]
        return self.create("MatrixLayout", self.CUDA_TYPES[x.dtype.str[1:]], ctypes.c_uint64(rows),
                           ctypes.c_uint64(columns), ctypes.c_int64(stride))

    def algorithm(self, plan, *product):
        """The algorithm of a product: the first of cuBLASLt's, 12 numbers."""
        return self.algorithms(plan, 1)[0]

    def algorithms(self, plan, most):
        """Algorithms for a product, at most so many rows of 12 numbers. The first are those that
        cuBLASLt expects to be the fastest."""
        found = np.zeros((most, 12), np.uint64)
        count = ctypes.c_int()
        self.call("MatmulAlgoGetHeuristic", self.handle, *plan, plan[3], self.search, most,
                  ctypes.c_void_p(found.ctypes.data), ctypes.byref(count))
        if not count.value:
            raise UserError(f"cuBLASLt has no algorithm for a product; {self.AVOID}")
        return found[: count.value]

    def multiply(self, plan, algorithm, out, left, right, accumulate):
        """Queue a described product."""
        description, *matrices = plan  # right, left and out
        one = ctypes.c_float(1)
        beta = ctypes.c_float(accumulate)
        stream = self.cupy.cuda.get_current_stream()
        to = address(out), matrices[2]  # out is read times beta, and written
        self.call("Matmul", self.handle, description, ctypes.byref(one), address(right),
                  matrices[0], address(left), matrices[1], ctypes.byref(beta), *to, *to,
                  ctypes.c_void_p(algorithm.ctypes.data), address(self.workspace),
                  ctypes.c_size_t(self.WORKSPACE), ctypes.c_void_p(stream.ptr))

    def create(self, kind, *args, table=None, values=()):
        """An object of cuBLASLt with these values of attributes, which are in a table."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *args)
        for name in values:
            attribute, kind_of_value = table[name]
            value = kind_of_value(values[name])
            self.call(f"{kind}SetAttribute", made, attribute, ctypes.byref(value),
                      ctypes.c_size_t(ctypes.sizeof(value)))
        return made

    def call(self, name, *args):
        """Call a function of cuBLASLt."""
        function = getattr(self.library, f"cublasLt{name}")
        status = function(*args)
        if status:
            self.cupy.cuda.runtime.deviceSynchronize()  # raises the error of an earlier kernel
            raise UserError(f"cublasLt{name} failed with status {status}; {self.AVOID}")

    # ---- A step as one graph

    def repeat(self, graphs, key, work):
        """Do work(): first plainly, which makes products' plans, then to record a graph. From
        then on one launch does it all, without gaps between kernels."""
        if key not in graphs:
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

    # ---- Hopper's copy engine, which brings attention its tiles

    def launch(self, name, items, *args, **block):
        """As Cuda.launch."""
        super().launch(name, items, *self.with_tensor_maps(name, args), **block)

    def with_tensor_maps(self, name, args):
        """The arguments; on Hopper, tensor maps for arrays that attention reads by tiles."""
        if not (self.hopper and name.startswith("attention")):
            return args
        words = [text.split() for text in self.kernels[name].parameters]
        T = args[words.index(["int", "T"])]
        return [self.tensor_map(arg, T, self.HS) if "TileMap" in word else arg
                for word, arg in zip(words, args)]

    def tensor_map(self, array, T, HS):
        """The 128 bytes that tell Hopper's copy engine how to copy boxes of 64 tokens and 64
        channels of a head from a bf16 array (B*T,heads*HS)."""
        key = T, HS, array.data.ptr, array.shape
        if key not in self.maps:
            N, width = array.shape
            made = aligned_bytes(128)
            shape = (ctypes.c_uint64 * 4)(HS, width // HS, T, N // T)
            strides = (ctypes.c_uint64 * 3)(2 * HS, 2 * width, 2 * width * T)  # bytes
            box = (ctypes.c_uint32 * 4)(64, 1, 64, 1)
            steps = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
            status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
                ctypes.c_void_p(made.ctypes.data), 9, 4,  # bf16; channel, head, token, sequence
                address(array), shape, strides, box, steps,
                0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128 bytes at a time, zeros beyond
            if status:
                raise UserError(f"cuTensorMapEncodeTiled failed with status {status}: {T=}, "
                                f"{array.shape}; {self.AVOID}")
            self.maps[key] = made
        return self.maps[key].view("V128")  # for CuPy one number, passed by value


if __name__ == "__main__":
    sys.modules["train_gpt2"] = sys.modules["__main__"]  # dev/ imports this module, not a copy
    run_main(main)
