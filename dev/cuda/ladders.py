"""The kernels of the lab: for each its shapes, its versions, and what NumPy computes from the same inputs.

A kernel is a function under @ladder, its problem. It is given a namespace `a` with the sizes. It puts the inputs there,
which are float64 or integers. A seeded generator draws them, and they are rounded to what the device will store. The
function returns {output: what NumPy computes, in float64}, where NaN stands for any value. An output that is among the
inputs too is updated in place. The arguments of the decorator are

    shape, checks       the shape to time, and small odd shapes to check
    args                the names in `a` of the kernel's arguments, if most versions have the same
    versions            a Version each; if the trainer has the kernel, the last of them is the trainer's
    fp32                the arrays that are fp32 in every dtype; the others are real, as kernels.cu calls it
    flops, traffic      the FLOPs that it takes; and the bytes, if they are not those of each input and output once
    compiled_for_C      whether it calls kernels that are compiled for a model's channels, C
    limits              {dtype: largest relative error}, if not that of a kernel in test_gpt2.py
    torch               what PyTorch would do, for comparison: (torch, tensors) -> a function

A version's launch is given by expressions in the names of `a`, as in "N*C". Four names are there besides those of the
problem: W, the numbers of type real in 16 bytes; itemsize, the bytes of a real; threads; and what is in `more`.
"""
import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from prepro_tinyshakespeare import UserError
from test_gpt2 import (bf16, cross_entropy, dcross_entropy, dgelu, dlayernorm, f32, gelu, layernorm, moments, softmax)
from train_gpt2 import (ADAMW, PARTIAL_ROWS, Verdict, batch_table, carve, classifier_launch, layernorm_backward_launch,
                        pack_batch)

ALL = "fp32", "tf32", "bf16"  # the dtypes of a version that uses tensor cores; to the others tf32 is fp32


class Version(NamedTuple):
    what: str  # a line that says what it changes
    run: str | Callable  # a kernel's name, or a function (device, a) that launches several
    items: str = None  # what the kernel's BLOCK shares out; with a comma, how many along x and how many along y
    threads: tuple = (64, 128, 256, 512, 1024)  # of a block, to try; () takes as many as BLOCK says
    args: str = None  # the names in `a` of the kernel's arguments, if not those of the ladder
    shared: str = "0"  # bytes of dynamic shared memory
    scratch: Callable = None  # a -> {name: shape} of more arrays
    more: dict = {}  # what else can be chosen, {name: values to try}
    dtypes: tuple = ("fp32", "bf16")
    limits: dict = None
    library: str = ""  # its name, if that is what it calls
    fits: Callable = None  # a -> whether it does these sizes

    def choices(self, device):
        """Each combination of what can be chosen: {"threads": 256, ...}."""
        threads = self.threads or (() if callable(self.run) else (device.kernels[self.run].threads,))
        tries = {**({"threads": threads} if threads else {}), **self.more}
        return [dict(zip(tries, values)) for values in itertools.product(*tries.values())]

    def launch(self, device, a, ladder):
        if callable(self.run):
            self.run(device, a)
            return
        items, shared = (eval(expression, {}, vars(a)) for expression in (self.items, self.shared))
        args = [getattr(a, name) for name in (self.args or ladder.args).split()]
        device.launch(self.run, items, *args, threads=a.threads, shared=shared)


class Ladder(NamedTuple):
    name: str
    summary: str
    problem: Callable
    shape: str
    checks: tuple
    versions: tuple
    args: str = ""
    fp32: str = ""
    flops: Callable = None
    traffic: Callable = None
    compiled_for_C: bool = False
    limits: dict = None
    torch: Callable = None
    held_back: str = ""


LADDERS = {}


def ladder(shape, *checks, **rows):
    """Register the kernel of a function's name; the first line of its docstring says what it computes."""
    def register(problem):
        summary = problem.__doc__.strip().splitlines()[0]
        LADDERS[problem.__name__] = Ladder(problem.__name__, summary, problem, shape, checks, **rows)
        return problem
    return register


POOL = 2**22 + 1  # numbers drawn for an array; a larger one repeats them, no two of its rows alike


class Draw:
    """Inputs: draw(*shape) are normal numbers as real stores them."""

    def __init__(self, in_bf16):
        self.rng, self.round = np.random.default_rng(1337), bf16 if in_bf16 else f32
        self.bf16 = in_bf16

    def __call__(self, *shape, scale=1.0):
        return np.resize(self.round(scale * self.rng.standard_normal(min(math.prod(shape), POOL))), shape)

    def fp32(self, *shape, scale=1.0):
        return np.resize(f32(scale * self.rng.standard_normal(min(math.prod(shape), POOL))), shape)

    def words(self, V, *shape):
        return self.rng.integers(V, size=shape, dtype=np.int32)


def in_parts(f, *arrays, step=None):
    """f over the arrays' first axis, `step` of it at a time and on all cores, so that no temporary is as large as the
    arrays. f returns an array or a tuple of them, whose first axis is the same."""
    step = step or max(1, 2**20 // max(array[0].size for array in arrays))
    parts = [tuple(array[i : i + step] for array in arrays) for i in range(0, len(arrays[0]), step)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda part: f(*part), parts))
    return np.concatenate(results) if isinstance(results[0], np.ndarray) else [*map(np.concatenate, zip(*results))]


ROWS = ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=2,T=10,C=768", "B=1,T=5,C=1600")  # odd shapes of (B,T,C)


# ---------------------------------------------------------------------------------------------------------------------
# Token and position embeddings


@ladder("B=8,T=1024,C=768,V=50257", *(f"{shape},V=257" for shape in ROWS), args="out tokens wte wpe N T C",
        fp32="out", traffic=lambda a: (a.N + a.T) * a.C * a.itemsize + 4 * a.N * (a.C + 1), versions=(
    Version("a thread a token", "encoder_forward1", "N", threads=(32, 64, 128, 256)),
    Version("a thread a channel", "encoder_forward2", "N*C"),
    Version("4 channels a lane: the trainer's", "encoder_forward", "N*C"),
))
def encoder_forward(a, draw):
    """out (B,T,C) = wte (V,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]"""
    a.N = a.B * a.T
    a.tokens, a.wte, a.wpe = draw.words(a.V, a.B, a.T), draw(a.V, a.C), draw(a.T, a.C)
    return dict(out=a.wte[a.tokens] + a.wpe)


def trainers_encoder_backward(device, a):
    device.launch("encoder_backward_wte", (a.N, a.C), a.dwte, a.dout, a.tokens, a.order, a.run, a.C)
    device.launch("encoder_backward_wpe", a.T * a.C, a.dwpe, a.dout, a.B, a.T, a.C, threads=a.threads)


@ladder("B=8,T=1024,C=768,V=50257", *(f"{shape},V=17" for shape in ROWS), args="dwte dwpe dout tokens N T C",
        fp32="dwte dwpe", traffic=lambda a: a.N * a.C * a.itemsize + 8 * (a.words + a.T) * a.C, versions=(
    Version("a thread a channel of a token, with atomics", "encoder_backward1", "N*C"),
    Version("a thread a channel, all tokens in order", "encoder_backward2", "C", threads=(32, 64, 128)),
    Version("runs of equal tokens: the trainer's", trainers_encoder_backward, threads=(64, 128, 256, 512)),
),
        held_back="a block of 256 threads for each token moves one row, most of its warps idle: it is made "
                  "for the words that make up a tenth of a text")
def encoder_backward(a, draw):
    """dwte (V,C)[tokens (B,T)] and dwpe (maxT,C)[t] += dout (B,T,C)"""
    a.N = a.B * a.T
    a.tokens = np.where(draw.rng.random((a.B, a.T)) < 0.1, a.V - 1, draw.words(a.V, a.B, a.T)).astype(np.int32)
    batch, a.words = carve(pack_batch(a.tokens)[0], batch_table(a.B, a.T)), len(np.unique(a.tokens))
    a.order, a.run = batch.order, batch.run_length
    a.dwte, a.dwpe, a.dout = draw.fp32(a.V, a.C), draw.fp32(a.T, a.C), draw(a.B, a.T, a.C)
    dwte, order = a.dwte.copy(), np.argsort(a.tokens.reshape(-1), kind="stable")
    words, starts = np.unique(a.tokens.reshape(-1)[order], return_index=True)
    dwte[words] += np.add.reduceat(a.dout.reshape(a.N, a.C)[order], starts)
    return dict(dwte=dwte, dwpe=a.dwpe + a.dout.sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# Layernorm, and the residual stream before it


TRAINERS_LAYERNORM = "out mean rstd copy residual branch weight bias N"


def layernorm_in_three(device, a):
    device.launch("layernorm_forward2_mean", a.N, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_rstd", a.N, a.rstd, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_normalize", a.N * a.C, a.out, a.mean, a.rstd, a.copy, a.residual, a.weight,
                  a.bias, a.N, a.C, threads=a.threads)


@ladder("B=8,T=1024,C=768", *ROWS, fp32="residual mean rstd", compiled_for_C=True,
        args="out mean rstd copy residual weight bias N C", versions=(
    Version("a thread a row", "layernorm_forward1", "N", threads=(32, 64, 128, 256)),
    Version("three kernels: means, deviations, and a thread a number", layernorm_in_three, threads=(128, 256, 512)),
    Version("one kernel, a warp a row", "layernorm_forward3", "N"),
    Version("16 bytes a lane", "layernorm_forward4", "N"),
    Version("the row in registers: the trainer's", "residual_layernorm_forward", "N", threads=(64, 128, 256, 512),
            args=TRAINERS_LAYERNORM),
), torch=lambda torch, x: lambda: torch.nn.functional.layer_norm(
    x.residual.to(x.weight.dtype), x.weight.shape, x.weight, x.bias))
def layernorm_forward(a, draw):
    """out (N,C) = the layernorm of residual, with its mean and rstd, and copy = residual as a real"""
    a.N, a.branch = a.B * a.T, None
    a.residual, a.weight, a.bias = draw.fp32(a.N, a.C), draw(a.C), draw(a.C)
    mean, rstd = moments(a.residual)
    return dict(out=layernorm(a.residual, a.weight, a.bias), mean=mean[:, 0], rstd=rstd[:, 0], copy=a.residual)


def trainers_layernorm_backward(device, a):
    blocks, threads, shared = layernorm_backward_launch(device, a.N)
    device.launch("layernorm_backward", blocks, a.dresidual, a.partials, a.dout, a.inp, a.weight, a.mean, a.rstd, a.N,
                  threads=threads, shared=shared)
    device.launch("add_partials", (a.C, 3), a.dweight, a.dbias, a.before, a.partials, blocks, a.C)


BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


@ladder("B=8,T=1024,C=768", *ROWS, fp32="mean rstd dweight dbias before partials", compiled_for_C=True,
        args="dresidual dweight dbias before dout inp weight mean rstd N C", versions=(
    Version("a thread a row, with atomics", "layernorm_backward1", "N", threads=(32, 64, 128, 256)),
    Version("a warp a row, atomics in shared memory", "layernorm_backward2", "blocks", threads=(128, 256, 512),
            shared="4 * 3*C", more=dict(blocks=BLOCKS)),
    Version("sums in registers, rows by asynchronous copies: the trainer's", trainers_layernorm_backward, threads=(),
            scratch=lambda a: dict(partials=(3, PARTIAL_ROWS, a.C))),
), torch=lambda torch, x: lambda: torch.ops.aten.native_layer_norm_backward(
    x.dout, x.inp, x.inp.shape[-1:], x.mean[:, None], x.rstd[:, None], x.weight, x.weight, [True, True, True]),
        held_back="each of 1,584 warps has five or six rows, so the wait for the first, the sum over the "
                  "warps at the end and the second launch weigh as much as the rows")
def layernorm_backward(a, draw):
    """dresidual (N,C), dweight and dbias (C) += layernorm's gradients; before (C) += the sum of dresidual's rows"""
    a.N = a.B * a.T
    a.inp, a.dout, a.dresidual, a.weight = draw(a.N, a.C), draw(a.N, a.C), draw(a.N, a.C), draw(a.C)
    a.dweight, a.dbias, a.before = draw.fp32(a.C), draw.fp32(a.C), draw.fp32(a.C)
    a.mean, a.rstd = (f32(x[:, 0]) for x in moments(a.inp))
    dx, dweight, dbias = dlayernorm(a.dout, a.inp, a.weight, 0)
    dresidual = a.dresidual + dx
    return dict(dresidual=dresidual, dweight=a.dweight + dweight, dbias=a.dbias + dbias,
                before=a.before + dresidual.sum(0))


@ladder("B=8,T=1024,C=768", *ROWS, args="out inp1 inp2 N C", versions=(
    Version("a thread a number", "residual_forward1", "N*C"),
    Version("16 bytes a lane", "residual_forward2", "N*C"),
), torch=lambda torch, x: lambda: x.inp1 + x.inp2)
def residual_forward(a, draw):
    """out (N,C) = inp1 + inp2"""
    a.N = a.B * a.T
    a.inp1, a.inp2 = draw(a.N, a.C), draw(a.N, a.C)
    return dict(out=a.inp1 + a.inp2)


def add_then_normalize(device, a):
    device.launch("fused_residual_forward1_add", a.N * a.C, a.residual, a.branch, a.N, a.C, threads=a.threads)
    device.launch("residual_layernorm_forward", a.N, a.out, a.mean, a.rstd, a.copy, a.residual, None, a.weight, a.bias,
                  a.N, threads=a.threads)


@ladder("B=8,T=1024,C=768", *ROWS, fp32="residual mean rstd", compiled_for_C=True,
        args=TRAINERS_LAYERNORM + " C", traffic=lambda a: a.N * (a.C * (8 + 3 * a.itemsize) + 8), versions=(
    Version("two kernels: an addition, then the layernorm", add_then_normalize, threads=(128, 256, 512)),
    Version("one kernel, the sum kept in shared memory", "fused_residual_forward2", "N", threads=(64, 128, 256),
            shared="threads // 32 * 4*C"),
    Version("the sum in registers: the trainer's", "residual_layernorm_forward", "N", threads=(64, 128, 256, 512),
            args=TRAINERS_LAYERNORM),
))
def fused_residual_forward(a, draw):
    """residual (N,C) += branch, copy = residual as a real, and out = its layernorm"""
    a.N = a.B * a.T
    a.residual, a.branch, a.weight, a.bias = draw.fp32(a.N, a.C), draw(a.N, a.C), draw(a.C), draw(a.C)
    residual = f32(a.residual + a.branch)
    mean, rstd = moments(residual)
    return dict(residual=residual, copy=residual, out=layernorm(residual, a.weight, a.bias), mean=mean[:, 0],
                rstd=rstd[:, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


def trainers_matmul_backward_bias(device, a):
    device.launch("matmul_backward_bias", (a.OC, a.shares), a.partials, a.dout, a.N, a.OC)
    device.launch("add_partials", a.OC, a.dbias, None, None, a.partials, a.shares, a.OC)


@ladder("B=8,T=1024,OC=3072", "B=1,T=2,OC=32", "B=3,T=9,OC=288", "B=1,T=140,OC=1600", fp32="dbias partials",
        args="dbias dout N OC", versions=(
    Version("a thread a column", "matmul_backward_bias1", "OC", threads=(32, 64, 128)),
    Version("the rows shared out, with atomics", "matmul_backward_bias2", "OC, shares", threads=(128, 256),
            more=dict(shares=(16, 64, 256))),
    Version("16 bytes a lane, no atomics: the trainer's", trainers_matmul_backward_bias, threads=(),
            more=dict(shares=(16, 32, 64)), scratch=lambda a: dict(partials=(a.shares, a.OC))),
), torch=lambda torch, x: lambda: x.dout.sum(0),
        held_back="the second launch, which adds up the shares, takes two or three of them")
def matmul_backward_bias(a, draw):
    """dbias (OC) += the sum over rows of dout (N,OC)"""
    a.N = a.B * a.T
    a.dout, a.dbias = draw(a.N, a.OC), draw.fp32(a.OC)
    return dict(dbias=a.dbias + a.dout.sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# GELU


@ladder("B=8,T=1024,C=768", *ROWS, args="out inp N OC", versions=(
    Version("a thread a number, by tanh", "gelu_forward1", "N*OC"),
    Version("16 bytes a lane", "gelu_forward2", "N*OC"),
    Version("one exponential: the trainer's", "gelu_forward", "N*OC"),
), torch=lambda torch, x: lambda: torch.nn.functional.gelu(x.inp, approximate="tanh"))
def gelu_forward(a, draw):
    """out (N,4C) = gelu(inp)"""
    a.N, a.OC = a.B * a.T, 4 * a.C
    a.inp = draw(a.N, a.OC, scale=3)
    return dict(out=in_parts(gelu, a.inp))


@ladder("B=8,T=1024,C=768", *ROWS, args="dinp inp N OC", versions=(
    Version("a thread a number, by tanh", "gelu_backward1", "N*OC"),
    Version("16 bytes a lane", "gelu_backward2", "N*OC"),
    Version("one exponential: the trainer's", "gelu_backward", "N*OC"),
), torch=lambda torch, x: lambda: torch.ops.aten.gelu_backward(x.dinp, x.inp, approximate="tanh"))
def gelu_backward(a, draw):
    """dinp (N,4C), the gradient of gelu(inp), becomes that of inp"""
    a.N, a.OC = a.B * a.T, 4 * a.C
    a.inp, a.dinp = draw(a.N, a.OC, scale=3), draw(a.N, a.OC)
    return dict(dinp=in_parts(dgelu, a.dinp, a.inp))


# ---------------------------------------------------------------------------------------------------------------------
# Softmax and cross-entropy over the vocabulary


WORDS = "B=1,T=1,V=17,Vp=32", "B=3,T=9,V=257,Vp=384", "B=1,T=3,V=50257,Vp=50304"


def set_words(a):
    """The sizes of a row of logits. Raises UserError."""
    if a.V > a.Vp:
        raise UserError(f"expected V = {a.V} not to exceed Vp = {a.Vp}")
    a.N = a.B * a.T


def pad(a, x):
    """x (N,V) with columns of zeros up to Vp."""
    return np.pad(x, ((0, 0), (0, a.Vp - a.V)))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="out inp N V Vp", versions=(
    Version("a thread a row, three passes", "softmax_forward1", "N", threads=(32, 128),
            limits=dict(fp32=1e-4)),  # a sum of 50,257 numbers one by one
    Version("a block a row, three passes", "softmax_forward2", "N", threads=(256, 512, 1024)),
    Version("two passes, 16 bytes a lane", "softmax_forward3", "N", threads=(256, 512, 1024)),
    Version("one pass, the next row on its way", "softmax_forward4", "min(blocks, N)", threads=(512, 1024),
            shared="Vp*itemsize", more=dict(blocks=(132, 264))),
), torch=lambda torch, x: lambda: torch.softmax(x.inp[:, :x.V], -1))
def softmax_forward(a, draw):
    """out (N,Vp) = softmax(inp) over the first V columns, zeros in the others"""
    set_words(a)
    a.inp = draw(a.N, a.Vp, scale=3)
    return dict(out=in_parts(lambda x: pad(a, softmax(x[:, :a.V])), a.inp))


def torch_cross_entropy(torch, x):
    logits, targets = x.logits[:, :x.V], x.targets.long()
    return lambda: torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def trainers_classifier(device, a, with_gradient):
    blocks, room, shared = classifier_launch(device, a.N, a.Vp, with_gradient)
    device.launch("fused_classifier", blocks, a.logits, a.losses, a.targets, a.dloss, a.N, a.V, a.Vp, with_gradient,
                  room, threads=a.threads, shared=shared)


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="losses logits targets N V Vp", fp32="losses", versions=(
    Version("a thread a row, two passes", "crossentropy_forward1", "N", threads=(32, 128)),
    Version("a block a row", "crossentropy_forward2", "N", threads=(256, 512, 1024)),
    Version("one pass, 16 bytes a lane: the trainer's", functools.partial(trainers_classifier, with_gradient=False),
            threads=(256, 512, 1024)),
), torch=torch_cross_entropy,
        held_back="an exponential for every 2 bytes keeps the instructions as busy as the memory")
def crossentropy_forward(a, draw):
    """losses (N) = -log(softmax(logits (N,Vp)) at the target), over the first V columns"""
    set_words(a)
    a.dloss = 0.0
    a.logits, a.targets = draw(a.N, a.Vp, scale=3), draw.words(a.V, a.N)
    return dict(losses=in_parts(lambda targets, x: cross_entropy(targets, x[:, :a.V]), a.targets, a.logits))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, args="dlogits dlosses probs targets N V Vp", fp32="dlosses", versions=(
    Version("a thread a number", "crossentropy_softmax_backward1", "N*Vp"),
    Version("16 bytes a lane", "crossentropy_softmax_backward2", "Vp, N"),
))
def crossentropy_softmax_backward(a, draw):
    """dlogits (N,Vp) = (probs - 1 at the target) * dlosses (N)"""
    def gradient(probs, targets, dlosses):
        return pad(a, dlosses[:, None] * (probs[:, :a.V] - (np.arange(a.V) == targets[:, None])))

    set_words(a)
    a.probs, a.targets, a.dlosses = abs(draw(a.N, a.Vp)), draw.words(a.V, a.N), draw.fp32(a.N)
    return dict(dlogits=in_parts(gradient, a.probs, a.targets, a.dlosses))


@ladder("B=8,T=1024,V=50257,Vp=50304", *WORDS, "B=1,T=3,V=128256,Vp=128256", args="logits losses targets dloss N V Vp",
        fp32="losses", versions=(
    Version("a thread a row, four passes", "classifier_fused1", "N", threads=(32, 128),
            limits=dict(fp32=1e-4, bf16=1e-4)),
    Version("a block a row, three passes", "classifier_fused2", "N", threads=(256, 512, 1024)),
    Version("two passes", "classifier_fused3", "N", threads=(256, 512, 1024)),
    Version("16 bytes a lane, one row in shared memory", "classifier_fused4", "min(blocks, N)", threads=(512, 1024),
            shared="Vp*itemsize", more=dict(blocks=(132, 264)), fits=lambda a: a.Vp <= 50304),
    Version("two rows in shared memory, or as much of one as fits: the trainer's", functools.partial(
        trainers_classifier, with_gradient=True), threads=(256, 512, 1024)),
))
def classifier_fused(a, draw):
    """losses (N) of logits (N,Vp), which become their gradient dloss * (softmax - 1 at the target)"""
    def both(targets, x):
        dloss = np.full(len(targets), a.dloss)
        return cross_entropy(targets, x[:, :a.V]), pad(a, dcross_entropy(targets, dloss, x[:, :a.V]))

    set_words(a)
    a.dloss = float(np.float32(1 / a.N))
    a.logits, a.targets = draw(a.N, a.Vp, scale=3), draw.words(a.V, a.N)
    losses, dlogits = in_parts(both, a.targets, a.logits)
    return dict(losses=losses, logits=dlogits)


# ---------------------------------------------------------------------------------------------------------------------
# The update


def norm_with_atomics(name, items):
    """A function that launches a kernel over items(a), which adds to zero, and the root."""
    def run(device, a):
        device.zero(a.norm)
        device.launch(name, items(a), a.norm, a.grads, a.n, threads=a.threads)
        device.launch("global_norm1_root", 1, a.norm)
    return run


@ladder("n=124475904", "n=32", "n=9600", "n=300032", args="norm grads n", fp32="grads norm", limits=dict(fp32=1e-4),
        versions=(
    Version("a thread a number, an atomic a block", norm_with_atomics("global_norm1", lambda a: a.n), dtypes=("fp32",)),
    Version("as many blocks as run at once", norm_with_atomics("global_norm2", lambda a: a.blocks), dtypes=("fp32",),
            threads=(256, 512), more=dict(blocks=BLOCKS)),
    Version("16 bytes a lane, no float atomics: the trainer's", "global_norm", "blocks", dtypes=("fp32",),
            threads=(256, 512), more=dict(blocks=BLOCKS)),
), torch=lambda torch, x: lambda: torch.linalg.vector_norm(x.grads))
def global_norm(a, draw):
    """norm[0] = the square root of the sum of the squares of grads (n)"""
    a.grads, a.norm = draw.fp32(a.n), np.zeros(2 + max(BLOCKS))
    return dict(norm=np.r_[np.sqrt(np.square(a.grads).sum()), 0, np.full(max(BLOCKS), np.nan)])


def adamw_line_by_line(device, a):
    launch = functools.partial(device.launch, threads=a.threads)
    launch("adamw1_clip", a.n, a.clipped, a.grads, a.n, a.settings, a.verdict)
    launch("adamw1_decay", a.n, a.master, a.starts, a.decayed, a.tensors, a.n, a.settings)
    launch("adamw1_m", a.n, a.m, a.clipped, a.n, a.settings)
    launch("adamw1_v", a.n, a.v, a.clipped, a.n, a.settings)
    launch("adamw1_step", a.n, a.params, a.master, a.m, a.v, a.n, a.settings)


@ladder("n=124475904", "n=32", "n=9600", "n=300032", fp32="master grads clipped m v settings verdict",
        args="params master grads m v starts decayed tensors n settings verdict", versions=(
    Version("five kernels, a line of the algorithm each", adamw_line_by_line, threads=(256, 512, 1024),
            scratch=lambda a: dict(clipped=(a.n,))),
    Version("one kernel, a thread a number", "adamw2", "n"),
    Version("16 bytes a lane: the trainer's", "adamw", "n"),
))
def adamw(a, draw):
    """a step of AdamW on n numbers, clipped, in 16 tensors of arenas; params are rounded copies of the master"""
    values = dict.fromkeys(ADAMW, 0) | dict(learning_rate=0.01, rate1=0.1, rate2=0.001, eps=1e-8, weight_decay=0.1,
                                            clip=1.0, correction1=1 / (1 - 0.9**3), correction2=1 / (1 - 0.999**3))
    a.settings, a.tensors = f32([values[name] for name in ADAMW]), min(16, a.n // 32)
    a.verdict = np.array(Verdict(norm=2.5, loss=0, norm_z=0, loss_z=0, update=1, stopped=0))  # the norm comes first
    a.starts = np.append(np.arange(a.tensors) * (a.n // a.tensors // 32 * 32), a.n).astype(np.uint64)
    a.decayed = np.resize(np.int32([1, 0, 0]), a.tensors)
    a.master, a.grads, a.m, a.v = draw.fp32(a.n), draw.fp32(a.n), draw.fp32(a.n), abs(draw.fp32(a.n))
    s = dict(zip(ADAMW, a.settings))

    def step(p, g, m, v, decayed):
        g = g * s["clip"] / 2.5
        m, v = m + s["rate1"] * (g - m), v + s["rate2"] * (g**2 - v)
        change = m * s["correction1"] / (np.sqrt(v * s["correction2"]) + s["eps"])
        return p - s["learning_rate"] * (change + s["weight_decay"] * decayed * p), m, v

    decayed = np.repeat(a.decayed.astype(bool), np.diff(a.starts.astype(np.int64)))
    master, m, v = (x.reshape(-1) for x in in_parts(step, *(
        x.reshape(-1, 32) for x in (a.master, a.grads, a.m, a.v, decayed))))
    if draw.bf16:
        return dict(master=master, m=m, v=v, params=master)
    a.params = None  # in fp32 they are the master
    return dict(master=master, m=m, v=v)
