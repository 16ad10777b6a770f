"""Train GPT-2 from raw kernels.

    pip install -r requirements.txt && python train_gpt2.py

It reads from top to bottom: the model as tables, the files, the two devices, the forward pass, the backward pass, the
update, samples, the program. At a first reading skip the devices. The kernels are in kernels.cu, each forward next to
its backward. Sizes have the same letters everywhere:

    B   sequences in a batch            L   layers
    T   tokens in a sequence            NH  attention heads
    C   channels of a token             HS  channels of a head, C/NH
    V   words of the vocabulary         Vp  V padded, so that the matrix product over it is fast

Devices: a GPU through CuPy, or the CPU through a C++ compiler; everything below the devices is the same for both.
"""
import argparse
import bisect
import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# On a CPU two pools of threads take turns, NumPy's BLAS and the kernels' OpenMP. One that spins while it waits for work
# keeps the cores from the other, so both are told to sleep; both read this when they are loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from prepro_tinyshakespeare import (END_OF_TEXT, EOT, TINYSHAKESPEARE, UserError, byte_encoding,
                                    download_tinyshakespeare, gpt2_encoding, prepare, replace_file)

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# The model: its sizes, and what it keeps in memory


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2, in the order of a checkpoint's header."""
    maxT: int = 1024
    V: int = 50257
    L: int = 12
    NH: int = 12
    C: int = 768
    Vp: int = 50304

    @staticmethod
    def from_descriptor(descriptor):
        """The config of depth N for "dN". d12, d24, d36 and d48 are GPT-2 small, medium, large and XL; the depths
        between them follow the same line, those below d12 have a head for each layer. Raises UserError."""
        if not re.fullmatch(r"d[1-9]\d{0,2}", descriptor):
            raise UserError(f"-e {descriptor}: expected a checkpoint, or a descriptor from d1 to d999, such as d12")
        L = int(descriptor[1:])
        NH = 25 if L == 48 else min(L, 12 + max(0, L - 12) // 3)
        return Config(L=L, NH=NH, C=64 * NH)


BF16 = np.uint16  # NumPy has no bfloat16: its bits, the upper half of an fp32's


def to_bf16(x):
    """fp32 numbers rounded to bfloat16, to nearest with ties to even, as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(x):
    """An array as fp32, from bfloat16's bits or from fp32 as it is."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


class Tensor(NamedTuple):
    """A row of a table: a tensor. Those of a table lie one behind another in one allocation, an arena. The last three
    are for parameters: they start as mean + std * normal, and weight decay applies or does not."""
    name: str
    shape: tuple
    dtype: type = np.float32
    mean: float = 0.0
    std: float = 0.0
    decay: bool = False

    @property
    def size(self):
        return math.prod(self.shape)


def parameter_table(c, real=np.float32):
    """The parameters, stored as real (fp32, or bfloat16's bits), in the order of a checkpoint. Initialised as in the
    GPT-2 paper (Radford et al. 2019, section 2.3): the layers that end in the residual stream, fed by 2L of them, are
    scaled down by sqrt(2L)."""
    L, C, std, residual_std = c.L, c.C, 0.02, 0.02 / math.sqrt(2 * c.L)
    weight, residual = dict(dtype=real, std=std, decay=True), dict(dtype=real, std=residual_std, decay=True)
    zeros, ones = dict(dtype=real), dict(dtype=real, mean=1.0)
    return [
        Tensor("wte", (c.Vp, C), **weight),  # token embeddings, and the head that turns channels into logits
        Tensor("wpe", (c.maxT, C), **weight),  # position embeddings
        Tensor("ln1w", (L, C), **ones),
        Tensor("ln1b", (L, C), **zeros),
        Tensor("qkvw", (L, 3 * C, C), **weight),
        Tensor("qkvb", (L, 3 * C), **zeros),
        Tensor("attprojw", (L, C, C), **residual),
        Tensor("attprojb", (L, C), **zeros),
        Tensor("ln2w", (L, C), **ones),
        Tensor("ln2b", (L, C), **zeros),
        Tensor("fcw", (L, 4 * C, C), **weight),
        Tensor("fcb", (L, 4 * C), **zeros),
        Tensor("fcprojw", (L, C, 4 * C), **residual),
        Tensor("fcprojb", (L, C), **zeros),
        Tensor("lnfw", (C,), **ones),
        Tensor("lnfb", (C,), **zeros),
    ]


def batch_table(B, T):
    """A batch, as the host prepares it."""
    return [
        Tensor("tokens", (B, T), np.int32),
        Tensor("targets", (B, T), np.int32),
        Tensor("order", (B * T,), np.int32),  # positions sorted by token, and the lengths of the runs of equal
        Tensor("run", (B * T,), np.int32),  # tokens in that order: see encoder_backward_wte
    ]


LOGIT_ROWS = 8192


def logit_rows(N):
    """Of how many of N tokens logits are computed at a time: in at most four parts, since each goes over all of dwte
    again; a large batch's would, all at once, be its largest tensor."""
    return min(N, max(LOGIT_ROWS, -(-N // 4)))


def activation_table(c, B, T, real=np.float32, recompute=False):
    """What the forward pass leaves behind for the backward pass. With recompute, layernorms' and GELUs' outputs are not
    kept for each layer (K = 1) but computed again."""
    L, C, NH = c.L, c.C, c.NH
    K = 1 if recompute else L
    return [
        Tensor("residual", (B, T, C)),  # the residual stream, to which each layer adds twice
        Tensor("residual1", (L, B, T, C), real),  # what it is when a layer begins,
        Tensor("ln1", (K, B, T, C), real),
        Tensor("ln1_mean", (L, B, T)),
        Tensor("ln1_rstd", (L, B, T)),
        Tensor("qkv", (L, B, T, 3 * C), real),  # queries, keys and values, each of NH heads
        Tensor("lse", (L, B, NH, T)),  # log2 of the sum that normalises a row of attention
        Tensor("atty", (L, B, T, C), real),
        Tensor("branch", (B, T, C), real),  # what is about to be added to the residual stream
        Tensor("residual2", (L, B, T, C), real),  # after attention,
        Tensor("ln2", (K, B, T, C), real),
        Tensor("ln2_mean", (L, B, T)),
        Tensor("ln2_rstd", (L, B, T)),
        Tensor("fch", (L, B, T, 4 * C), real),
        Tensor("fch_gelu", (K, B, T, 4 * C), real),
        Tensor("residual3", (B, T, C), real),  # and after the last layer
        Tensor("lnf", (B, T, C), real),
        Tensor("lnf_mean", (B, T)),
        Tensor("lnf_rstd", (B, T)),
        Tensor("logits", (logit_rows(B * T), c.Vp), real),  # become their own gradient
        Tensor("losses", (B, T)),
    ]


PARTIAL_ROWS = 256  # a layernorm's gradients are sums of at most so many sums, each over a part of the rows


def backward_table(c, B, T, real=np.float32):
    """The gradients of the activations, each used by all layers in turn."""
    C = c.C
    return [
        Tensor("dresidual", (B, T, C), real),  # of the residual stream, all the way down
        Tensor("dbranch", (B, T, C), real),
        Tensor("dfch", (B, T, 4 * C), real),
        Tensor("dqkv", (B, T, 3 * C), real),
        Tensor("delta", (B, c.NH, T)),  # of attention: the sum over s of weight * dweight
        Tensor("partials", (3, PARTIAL_ROWS, C)),
    ]


ADAMW = "learning_rate", "rate1", "rate2", "correction1", "correction2", "eps", "weight_decay", "clip"  # in kernels.cu
NORM_BLOCKS = 1024  # of the norm's sum, at most


def arenas(c, B, T, real, recompute=False):
    """All that a training run allocates: {arena: table}. In bf16, AdamW works on an fp32 master of the parameters."""
    fp32 = parameter_table(c)
    update = [Tensor("settings", (len(ADAMW),)), Tensor("norm", (2 + NORM_BLOCKS,)),
              Tensor("starts", (len(fp32) + 1,), np.uint64),  # of the parameters, in numbers
              Tensor("decayed", (len(fp32),), np.int32),  # 1 where weight decay applies, else 0
              Tensor("added_to", (len(fp32),), np.int32)]  # 1 where a backward pass always adds to the gradient
    tables = {"parameters": parameter_table(c, real), "master": fp32, "gradients": fp32, "adam m": fp32, "adam v": fp32,
              "update": update, "batch": batch_table(B, T), "next batch": batch_table(B, T),
              "activations": activation_table(c, B, T, real, recompute), "backward": backward_table(c, B, T, real)}
    if real == np.float32:
        del tables["master"]
    return tables


ALIGN = 64  # bytes, for loads of 16; no parameter needs padding, since 32 divides C


def layout(table):
    """Where the tensors of an arena start, in bytes, and behind them where the arena ends."""
    starts = [0]
    for row in table:
        size = row.size * np.dtype(row.dtype).itemsize
        starts.append(starts[-1] + (size + ALIGN - 1) // ALIGN * ALIGN)
    return starts


def carve(arena, table):
    """Views of an arena (bytes, on either device): one attribute for each row of its table."""
    views = {}
    for row, start in zip(table, layout(table)):
        end = start + row.size * np.dtype(row.dtype).itemsize
        views[row.name] = arena[start:end].view(row.dtype).reshape(row.shape)
    return SimpleNamespace(**views)


def gibibytes(n):
    return f"{n / 2**30:.2f} GiB"


# ---------------------------------------------------------------------------------------------------------------------
# Files: llm.c's formats, each behind a header of 256 int32

HEADER_BYTES = 1024
STORED = {3: np.float32, 5: BF16}  # the numbers of a checkpoint, by its version
FILES = {  # kind: (magic, versions, how to get a good one); of a checkpoint, 3 is fp32 and 5 bf16
    "checkpoint": (20240326, (3, 5), "llm.c's train_gpt2.py or dev/torch_reference.py writes one"),
    "debug state": (20240327, (2,), "llm.c's train_gpt2.py or dev/torch_reference.py writes one"),
    "token file": (20240520, (1,), "prepro_tinyshakespeare.py writes one, also from a text of your own with --input"),
    "tokenizer": (20240328, (2,), "llm.c's train_gpt2.py writes one; without it tiktoken is used"),
}


def read_header(path, kind):
    """The 256 ints of a file's header. Raises UserError if the file is not of this kind and version."""
    magic, versions, remedy = FILES[kind]
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), "<i4")
    except ValueError:  # not a whole number of int32
        header = np.zeros(0, "<i4")
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kind}: {remedy}") from None
    if len(header) and header[0] != magic:
        legacy = "; a file without a header is of an old format" if kind == "token file" else ""
        raise UserError(f"{path}: begins with {header[0]}, and a {kind} with {magic}{legacy}: {remedy}")
    if len(header) < 256:
        raise UserError(f"{path}: truncated within its header of {HEADER_BYTES} bytes; expected a {kind}: {remedy}")
    if header[1] not in versions:
        old = " (an old format)" if header[1] < versions[0] else ""
        expected = " or ".join(map(str, versions))
        raise UserError(f"{path}: {kind} of version {header[1]}{old}; expected version {expected}: {remedy}")
    return [int(i) for i in header]


def check_size(path, kind, expected):
    """Raise UserError unless the file has exactly the expected number of bytes."""
    size = os.path.getsize(path)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(f"{path}: {what}: {size:,} bytes, and the header of this {kind} promises {expected:,}: "
                        f"{FILES[kind][2]}")


def check_config(path, c):
    """Raise UserError unless a config read from path makes sense."""
    for field, value in dataclasses.asdict(c).items():
        if not 0 < value < 2**24:
            raise UserError(f"{path}: {field} = {value} in its header; expected between 1 and {2**24 - 1}")
    for ok, wish in ((c.C % c.NH == 0, f"C = {c.C} to be divisible by NH = {c.NH}"),
                     (c.C % 32 == 0, f"C = {c.C} to be a multiple of 32"),
                     (c.V <= c.Vp, f"V = {c.V} not to exceed Vp = {c.Vp}")):
        if not ok:
            raise UserError(f"{path}: expected {wish}")


def read_config(path):
    """The Config of a checkpoint, after checking all that can be checked without reading its tensors."""
    header = read_header(path, "checkpoint")
    c = Config(*header[2:8])
    check_config(path, c)
    check_size(path, "checkpoint", HEADER_BYTES + layout(parameter_table(c, STORED[header[1]]))[-1])
    return c


def check_tokens(path, tokens, V):
    """Raise UserError unless all ids are in 0..V-1."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < V:
        bad = int(np.argmax((tokens < 0) | (tokens >= V)))
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}, and the model has V = {V} words; "
                        "expected a file made with the model's own vocabulary")


def read_debug_state(path, c):
    """A debug state for a model of config c: x, y (B,T) int32, logits (B,T,V), loss, and gradients {name: array}."""
    header = read_header(path, "debug state")
    B, T = header[2:4]
    if B < 1 or not 1 <= T <= c.maxT:
        raise UserError(f"{path}: B = {B}, T = {T} in its header; expected 1 <= B and 1 <= T <= maxT = {c.maxT}")
    rows = [Tensor("x", (B, T), np.int32), Tensor("y", (B, T), np.int32), Tensor("logits", (B, T, c.V)),
            Tensor("loss", ())] + parameter_table(c)
    check_size(path, "debug state", HEADER_BYTES + sum(4 * row.size for row in rows))
    state = {}
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        for row in rows:
            state[row.name] = np.fromfile(file, row.dtype, row.size).reshape(row.shape)
    x, y, logits, loss = (state.pop(row.name) for row in rows[:4])
    check_tokens(path, x, c.V)
    check_tokens(path, y, c.V)
    return SimpleNamespace(x=x, y=y, logits=logits, loss=float(loss), gradients=state)


class DataLoader:
    """Hands out the batches of a token file in order, and begins again at its end."""

    def __init__(self, path, B, T, V):
        count = read_header(path, "token file")[2]
        if count < 0:
            raise UserError(f"{path}: its header promises {count} tokens; expected at least B*T+1 = {B * T + 1}")
        check_size(path, "token file", HEADER_BYTES + 2 * count)
        if count < B * T + 1:
            raise UserError(f"{path}: {count:,} tokens, and a batch needs B*T+1 = {B * T + 1:,}; "
                            "give a longer file, or a smaller -b or -t")
        self.tokens = np.memmap(path, "<u2", "r", offset=HEADER_BYTES)
        check_tokens(path, self.tokens, V)
        self.B, self.T, self.batches, self.next = B, T, (count - 1) // (B * T), 0

    def next_batch(self):
        """x and y, both (B,T) int32: the tokens, and for each the token that follows."""
        size = self.B * self.T
        window = self.tokens[self.next * size : (self.next + 1) * size + 1].astype(np.int32)
        self.next = (self.next + 1) % self.batches
        return window[:-1].reshape(self.B, self.T), window[1:].reshape(self.B, self.T)


# ---------------------------------------------------------------------------------------------------------------------
# Two devices. Each has the same few verbs: empty allocates bytes, put copies an array to the device and get from it,
# put_beside copies while work goes on and adopt takes what came, zero clears an array, launch runs a kernel,
# launch_grid one with a grid of its own, matmul multiplies matrices, replay does the same work again, synchronize
# waits, and free_bytes says how much memory there is.

# How each kernel is shared out: the threads of a block, and what an item is. A NUMBER, of which each thread takes W, as
# many as 16 bytes hold, or FOUR; a row that takes a WARP; anything that takes a whole BLOCK; COLUMNS, of which a block
# takes 128 bytes, whether of real or of FP32. Blocks of 256 leave room to fill a multiprocessor evenly; the row of the
# classifier is long enough for 1,024.
def NUMBER(threads, W): return threads * W
def FOUR(threads, W): return threads * 4
def WARP(threads, W): return threads // 32
def BLOCK(threads, W): return 1
def COLUMNS(threads, W): return 8 * W
def FP32_COLUMNS(threads, W): return 32


LAUNCH = {
    "encoder_forward": (256, FOUR),
    "encoder_backward_wte": (256, BLOCK),
    "encoder_backward_wpe": (256, NUMBER),
    "layernorm_forward": (256, WARP),
    "layernorm_again": (256, NUMBER),
    "layernorm_backward": (256, BLOCK),  # or as many threads as layernorm_sizes says: see GPT2.layernorm_backward
    "matmul_backward_bias": (256, COLUMNS),
    "add_partials": (256, FP32_COLUMNS),
    "attention_forward": (128, BLOCK),
    "attention_backward_q": (128, BLOCK),
    "attention_backward_kv": (128, BLOCK),
    "gelu_forward": (256, NUMBER),
    "gelu_backward": (256, NUMBER),
    "fused_classifier": (1024, BLOCK),
    "global_norm": (512, BLOCK),
    "adamw": (256, NUMBER),
}
SIZES = {"attention_sizes": ("rows", "shared_forward", "shared_backward"),  # of blocks: what kernels.cu says of them
         "layernorm_sizes": ("threads", "shared_of_warp")}
SCALARS = {"int": ctypes.c_int, "float": ctypes.c_float, "size_t": ctypes.c_size_t}


def read_kernels(source):
    """{name: [parameter, ...]} of the kernels in a CUDA source; a parameter is a scalar's ctypes type, or c_void_p."""
    kernels = {}
    declaration = r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)"
    for name, parameters in re.findall(declaration, source):
        kernels[name] = []
        for parameter in map(str.strip, parameters.split(",")):
            kind = ctypes.c_void_p if "*" in parameter else SCALARS.get(parameter.split()[0])
            if kind is None:
                raise UserError(f"kernels.cu: {name}: parameter {parameter}: expected a pointer, {', '.join(SCALARS)}")
            kernels[name].append(kind)
    return kernels


def pack_arguments(kernels, name, args, address):
    """A kernel's arguments in the form of cuLaunchKernel: an array of pointers to the values. A wrong number of them
    would be read from whatever lies behind, so it is an error here. Returns the array and what it points to."""
    parameters = kernels.get(name)
    if parameters is None or len(args) != len(parameters):
        found = "no such kernel" if parameters is None else f"{len(parameters)} parameters"
        raise UserError(f"kernels.cu: {name}: {found}, and train_gpt2.py calls it with {len(args)} arguments")
    values = [t(address(a) if t is ctypes.c_void_p and a is not None else a) for t, a in zip(parameters, args)]
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values)), values


def grid_of(name, items, device):
    """The grid for a number of items, or for (items, rows of the grid), and the block: two triples."""
    x, y = items if isinstance(items, tuple) else (items, 1)
    threads, unit = LAUNCH[name]
    threads = min(threads, device.max_threads)
    return (-(-x // unit(threads, device.W)), y, 1), (threads, 1, 1)


def switches(dtype, C, NH):
    """What kernels.cu is compiled for: its numbers, the channels of a model, and those of a head."""
    return [f"-D{dtype.upper()}", f"-DCHANNELS={C}", f"-DHS={C // NH}"]


def gelu_beside(device, out, gelu_of, dgelu_of):
    """What a matrix product has not done itself: out (M,N) = gelu(gelu_of), or out *= gelu'(dgelu_of)."""
    if gelu_of is not None:
        device.launch("gelu_forward", out.size, out, gelu_of, *out.shape)
    if dgelu_of is not None:
        device.launch("gelu_backward", out.size, out, dgelu_of, *out.shape)


def cache_folder():
    """Where what took long to make is kept: $XDG_CACHE_HOME/train_gpt2, or ~/.cache/train_gpt2."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"


def round_to_tf32(x):
    """x rounded to TF32's 10 bits of mantissa, half away from zero, as tensor cores want their inputs."""
    return np.where(np.isnan(x), x, ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32))


class Cpu:
    """The CPU: kernels.cu compiled by g++ or clang++, matrix products by NumPy's BLAS, all on every core.

    CXX names the compiler and CXXFLAGS adds flags to it: with CXXFLAGS="-O0 -g" a debugger stops in a kernel's lines.
    beside are other CUDA files to compile after kernels.cu, whose helpers they may use: the kernel lab's.
    """
    name, memory, max_shared, multiprocessors = "cpu", "memory", 227 * 1024 - 1024, 4
    max_threads = 256  # of a block: at a barrier each costs 25 ns

    def __init__(self, dtype=None, C=768, NH=12, graph=True, beside=()):
        self.dtype = dtype or "fp32"
        self.sources = [HERE / "kernels.cu", *beside]
        self.real = BF16 if self.dtype == "bf16" else np.float32
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        self.compiled_for, self.switches = (C, NH), switches(self.dtype, C, NH)
        self.peak_flops = None  # depends on the machine in more ways than can be asked for
        np.seterr(over="ignore", invalid="ignore")  # a loss that is not finite is reported once, by the training loop
        self.kernels = read_kernels("".join(path.read_text(encoding="utf-8") for path in self.sources))
        self.library = ctypes.CDLL(str(self.build()))
        for name in self.kernels:
            function = getattr(self.library, f"launch_{name}")
            function.restype = ctypes.c_char_p
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        for name, fields in SIZES.items():
            values = (ctypes.c_int * len(fields)).in_dll(self.library, name)
            setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
        self.scratch = np.empty(2**20, np.float32)  # 4 MiB: a matmul's result on its way to being added, still in cache

    def __str__(self):
        return f"the CPU, {os.cpu_count()} cores, {self.dtype}"

    def build(self):
        """The path of the shared library, compiled if there is none for this source, compiler, flags and processor."""
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if not compiler or not shutil.which(compiler):
            found = f"CXX={compiler} is not there" if compiler else "neither g++ nor clang++ is there"
            raise UserError(f"{found}, and a CPU needs a C++ compiler to run the kernels: install one (Debian, Ubuntu: "
                            "apt install g++; macOS: xcode-select --install), or train on a GPU")
        flags = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-U_FORTIFY_SOURCE", "-Wall",
                 "-Wno-unknown-pragmas", "-fPIC", "-shared", "-fopenmp", *self.switches,
                 *os.environ.get("CXXFLAGS", "").split()]
        included = [HERE / "dev/cuda_on_cpu.h", *self.sources]
        source = "".join(f'#include "{path}"\n' for path in included)
        source += "".join(f"CPU_KERNEL({name})\n" for name in self.kernels)
        # -### prints what the driver would run, and so what -march=native means on this processor.
        target = subprocess.run([compiler, *flags, "-E", "-###", "-x", "c++", os.devnull], capture_output=True).stderr
        key = hashlib.sha256(b"\0".join([source.encode(), *(path.read_bytes() for path in included), target]))
        cache = cache_folder()
        library = cache / f"kernels_{key.hexdigest()[:16]}.so"
        if library.exists():
            return library
        print(f"compiling kernels.cu with {compiler}, once", flush=True)
        temporary = cache / f"{library.name}.{os.getpid()}"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            try:
                for _ in range(2):
                    done = subprocess.run([compiler, *flags, "-x", "c++", "-", "-o", temporary], input=source,
                                          text=True, capture_output=True)
                    if done.returncode == 0:
                        os.replace(temporary, library)
                        return library
                    if "openmp" not in done.stderr or "-fopenmp" not in flags:
                        break
                    flags.remove("-fopenmp")
                    print(f"{compiler} has no OpenMP: the kernels run on one core")
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as e:
            raise UserError(f"{cache}: compiled kernels could not be kept there ({e.strerror}); "
                            "set XDG_CACHE_HOME to a folder that can be written") from None
        raise UserError(f"{compiler} could not compile kernels.cu:\n{done.stderr.strip()}")

    def free_bytes(self):
        """How much memory there is to allocate."""
        try:
            return 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])
        except (OSError, TypeError):  # not Linux
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def empty(self, nbytes):
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {gibibytes(nbytes)} more; choose a smaller -b, -t or -e") from None

    def put(self, array, values):
        array[...] = values

    def put_beside(self, array, values):
        array[...] = values

    def adopt(self, array, beside):
        """array = beside, an array that put_beside has filled."""
        array[...] = beside

    def get(self, array):
        return array.copy()

    def zero(self, array):
        array.fill(0)

    def launch(self, name, items, *args, shared=0):
        """Run a kernel over its items (see grid_of), with `shared` bytes of dynamic shared memory a block."""
        self.launch_grid(name, *grid_of(name, items, self), *args, shared=shared)

    def launch_grid(self, name, grid, block, *args, shared=0):
        """The same with a grid of blocks and a block of threads, two triples, of the caller's own."""
        pointers, values = pack_arguments(self.kernels, name, args, lambda a: a.__array_interface__["data"][0])
        grid, block = ((ctypes.c_uint * 3)(*triple) for triple in (grid, block))
        error = getattr(self.library, f"launch_{name}")(grid, block, shared, pointers)
        if error:
            raise UserError(f"kernels.cu: {error.decode()}")

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu_of=None, dgelu_of=None):
        """out (M,N) = a (M,K) @ b (K,N), with bias (N) added to each row, or out += a @ b.

        With gelu_of (M,N), that gets the sum, and out its GELU; with dgelu_of (M,N), the product is multiplied by the
        derivative of GELU there.
        """
        result = out if gelu_of is None else gelu_of
        if self.dtype == "tf32":
            a, b = round_to_tf32(a), round_to_tf32(b)
        if self.dtype == "bf16":
            a, b = to_float(a), to_float(b)
        if accumulate:
            rows = max(1, self.scratch.size // out.shape[-1])
            for i in range(0, out.shape[0], rows):
                product = self.scratch[: out[i : i + rows].size].reshape(-1, out.shape[-1])
                out[i : i + rows] += np.matmul(a[i : i + rows], b, out=product)
            return
        product = np.matmul(a, b, out=result if result.dtype == np.float32 else None)
        if bias is not None:
            product += to_float(bias)
        if product is not result:
            result[...] = to_bf16(product)
        gelu_beside(self, out, gelu_of, dgelu_of)

    def replay(self, graphs, key, work):
        """Do work(). On a GPU the same work is recorded and replayed as a graph."""
        work()

    def synchronize(self):
        pass


NVRTC_OPTIONS = ("-std=c++17",)


class CublasLt:
    """The few functions of cuBLASLt that a matrix product with an epilogue needs, called in the library that CuPy has
    loaded: CuPy wraps neither these nor any product that a graph could capture.

    cuBLASLt stores matrices by columns, and so sees our arrays transposed: it is asked for out.T = b.T @ a.T, in which
    the bias goes down each column. The numbers are those of cublasLt.h.
    """
    COMPUTE = dict(fp32=68, tf32=77, bf16=68)  # CUBLAS_COMPUTE_32F, and CUBLAS_COMPUTE_32F_FAST_TF32
    STORED = {np.dtype(np.float32): 0, np.dtype(BF16): 14}  # CUDA_R_32F, CUDA_R_16BF
    TRANSA, TRANSB, EPILOGUE, BIAS, AUX, AUX_LEADING = 3, 4, 7, 8, 11, 12  # attributes of a product,
    MAX_WORKSPACE, *MIN_ALIGNMENTS = 1, 5, 6, 7, 8  # and of a preference (addresses are not all multiples of 256)
    NONE, ADD_BIAS, GELU_AUX_BIAS, DGELU = 1, 4, 164, 192  # epilogues; the aux is GELU's input
    CANDIDATES = 8  # of a shape, timed when it first comes up

    class Algorithm(ctypes.Structure):  # cublasLtMatmulHeuristicResult_t
        _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                    ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]

    WORKSPACE = 32 * 2**20  # what cuBLAS itself would take on Hopper

    def __init__(self, dtype):
        loaded = re.search(r"/.*libcublasLt\.so.*", Path("/proc/self/maps").read_text())
        if not loaded:
            raise UserError("CuPy has loaded no cuBLASLt: pip install -r requirements.txt brings NVIDIA's libraries")
        self.library = ctypes.CDLL(loaded[0])
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.compute = self.COMPUTE[dtype]
        self.handle = self.create("cublasLtCreate")
        self.one, self.nought = ctypes.c_float(1), ctypes.c_float(0)

    def call(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status:
            raise UserError(f"{name} failed with cuBLAS status {status}")

    def create(self, name, *args):
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        return made

    def set(self, function, thing, attribute, value):
        self.call(function, thing, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def describe(self, out, a, b, epilogue):
        """A product of arrays of these shapes and strides, as cuBLASLt wants to hear it: (description, layouts)."""
        description = self.create("cublasLtMatmulDescCreate", self.compute, self.STORED[np.dtype(np.float32)])
        layouts = []
        for x, transpose in ((b, self.TRANSA), (a, self.TRANSB), (out, None)):
            rows, columns = (s // x.itemsize for s in x.strides)
            transposed = columns != 1 and x.shape[1] != 1  # its columns are contiguous, not its rows
            (m, n), leading = (x.shape[::-1], rows) if not transposed else (x.shape, columns)
            layouts.append(self.create("cublasLtMatrixLayoutCreate", self.STORED[x.dtype], ctypes.c_uint64(m),
                                       ctypes.c_uint64(n), ctypes.c_int64(max(m, leading))))
            if transpose:
                self.set("cublasLtMatmulDescSetAttribute", description, transpose, ctypes.c_int(transposed))
        for attribute, value in ((self.EPILOGUE, ctypes.c_int(epilogue)),
                                 (self.AUX_LEADING, ctypes.c_int64(out.shape[1]))):
            self.set("cublasLtMatmulDescSetAttribute", description, attribute, value)
        return description, layouts

    def candidates(self, description, layouts):
        """The algorithms that cuBLASLt recommends, the one that it takes to be the fastest first."""
        preference = self.create("cublasLtMatmulPreferenceCreate")
        for attribute, value in ((self.MAX_WORKSPACE, ctypes.c_size_t(self.WORKSPACE)),
                                 *((matrix, ctypes.c_uint32(ALIGN)) for matrix in self.MIN_ALIGNMENTS)):
            self.set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
        algorithms, found = (self.Algorithm * self.CANDIDATES)(), ctypes.c_int()
        self.call("cublasLtMatmulAlgoGetHeuristic", self.handle, description, *layouts, layouts[2], preference,
                  self.CANDIDATES, algorithms, ctypes.byref(found))
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        return list(algorithms[: found.value])

    def run(self, description, layouts, algorithm, stream, workspace, out, a, b, accumulate, bias, aux):
        """The product, with addresses for arrays; bias and aux may be None."""
        for attribute, pointer in ((self.BIAS, bias), (self.AUX, aux)):
            if pointer:
                self.set("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.c_void_p(pointer))
        b_layout, a_layout, out_layout = layouts
        out = ctypes.c_void_p(out)
        self.call("cublasLtMatmul", self.handle, description, ctypes.byref(self.one), ctypes.c_void_p(b), b_layout,
                  ctypes.c_void_p(a), a_layout, ctypes.byref(self.one if accumulate else self.nought), out, out_layout,
                  out, out_layout, ctypes.byref(algorithm), ctypes.c_void_p(workspace),
                  ctypes.c_size_t(self.WORKSPACE), ctypes.c_void_p(stream))


class Cuda:
    """An NVIDIA GPU through CuPy: kernels.cu compiled by NVRTC, matrix products by cuBLASLt, all on one stream; a
    second one copies the next batch."""
    name, memory, max_threads = "cuda", "device memory", 1024

    # Dense FLOPs of one multiprocessor in one clock, by compute capability, from NVIDIA's architecture white papers.
    FLOPS_PER_CLOCK = {80: dict(fp32=128, tf32=1024, bf16=2048), 86: dict(fp32=256, tf32=256, bf16=512),
                       89: dict(fp32=256, tf32=256, bf16=512), 90: dict(fp32=256, tf32=2048, bf16=4096),
                       100: dict(fp32=256, tf32=4096, bf16=8192), 120: dict(fp32=256, tf32=256, bf16=512)}

    def __init__(self, dtype=None, C=768, NH=12, graph=True, beside=()):
        try:
            import cupy
        except ImportError:
            raise UserError("CuPy is not installed, and --device cuda needs it: pip install -r requirements.txt, "
                            "or train with --device cpu") from None
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as e:
            raise UserError(f"no GPU for --device cuda ({e}): check nvidia-smi, or train with --device cpu") from None
        self.cupy, self.device = cupy, cupy.cuda.Device()
        capability = int(self.device.compute_capability)
        if capability < 80:
            raise UserError(f"this GPU has compute capability {capability / 10}, and the kernels need 8.0 (Ampere) or "
                            "later: train with --device cpu")
        self.dtype, self.compiled_for = dtype or "bf16", (C, NH)
        dtype = self.dtype
        self.real = BF16 if dtype == "bf16" else np.float32
        self.W = 16 // np.dtype(self.real).itemsize  # as in kernels.cu: numbers in 16 bytes
        self.stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
        self.copy_stream, self.adopted = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
        self.pinned = None  # memory of the host that a copy can be made from while both go on
        self.cublaslt, self.plans, self.graph = CublasLt(dtype), {}, graph
        self.workspace = cupy.empty(CublasLt.WORKSPACE, np.uint8)
        self.fused_gelu = dtype == "bf16"
        sources = [HERE / "kernels.cu", *beside]
        source = "".join(path.read_text(encoding="utf-8") for path in sources)
        self.kernels = read_kernels(source)
        # Hopper's own instructions are an extra of its architecture, asked for with the a.
        hopper = ("-arch=sm_90a",) if capability == 90 else ()
        module = cupy.RawModule(code=source, options=(*NVRTC_OPTIONS, *hopper, *switches(dtype, C, NH)))
        try:
            self.functions = {name: module.get_function(name) for name in self.kernels}
            for name, fields in SIZES.items():
                values = cupy.ndarray(len(fields), np.int32, module.get_global(name)).get().tolist()
                setattr(self, name, SimpleNamespace(**dict(zip(fields, values))))
        except cupy.cuda.compiler.CompileException as e:
            raise UserError(f"NVRTC could not compile kernels.cu:\n{e}") from None
        flops = self.FLOPS_PER_CLOCK.get(capability, {}).get(dtype)
        attributes = self.device.attributes
        self.max_shared = attributes["MaxSharedMemoryPerBlockOptin"] - 1024  # the rest is for what kernels declare
        self.multiprocessors = attributes["MultiProcessorCount"]
        self.peak_flops = flops and flops * self.multiprocessors * attributes["ClockRate"] * 1e3
        version = f"{self.cublaslt.library.cublasLtGetVersion()} {cupy.cuda.runtime.driverGetVersion()}"
        known = hashlib.sha256(f"{self} {version}".encode()).hexdigest()[:16]
        self.choices_file = cache_folder() / f"matmul_{known}.json"
        self.choices = self.saved_choices()

    def __str__(self):
        name = self.cupy.cuda.runtime.getDeviceProperties(self.device.id)["name"].decode()
        peak = f", peak {self.peak_flops / 1e12:.0f} TFLOP/s" if self.peak_flops else ""
        return f"{name}, {self.dtype}{peak}"

    def free_bytes(self):
        """How much device memory there is to allocate."""
        return self.device.mem_info[0]

    def empty(self, nbytes):
        try:
            return self.cupy.empty(nbytes, np.uint8)
        except MemoryError:
            raise UserError(f"no memory for {gibibytes(nbytes)} more; choose a smaller -b, -t or -e") from None

    def put(self, array, values):
        array.set(np.ascontiguousarray(values, array.dtype).reshape(array.shape), stream=self.stream)

    def put_beside(self, array, values):
        """Copy values to array while the stream works on, but not before adopt() has taken what was there."""
        self.copy_stream.synchronize()  # the last copy has left the pinned memory
        if self.pinned is None or self.pinned.shape != values.shape:
            import cupyx
            self.pinned = cupyx.empty_pinned(values.shape, values.dtype)
        self.pinned[...] = values
        self.copy_stream.wait_event(self.adopted)
        array.set(self.pinned, stream=self.copy_stream)

    def adopt(self, array, beside):
        """array = beside, an array that put_beside has filled."""
        self.stream.wait_event(self.copy_stream.record())
        array.data.copy_from_device_async(beside.data, array.nbytes, self.stream)
        self.adopted.record(self.stream)

    def get(self, array):
        return array.get(stream=self.stream)

    def zero(self, array):
        array.data.memset_async(0, array.nbytes, self.stream)

    def launch(self, name, items, *args, shared=0):
        """Run a kernel over its items (see grid_of), with `shared` bytes of dynamic shared memory a block."""
        self.launch_grid(name, *grid_of(name, items, self), *args, shared=shared)

    def launch_grid(self, name, grid, block, *args, shared=0):
        """The same with a grid of blocks and a block of threads, two triples, of the caller's own."""
        pointers, values = pack_arguments(self.kernels, name, args, lambda a: a.data.ptr)
        function = self.functions[name]
        if shared > self.max_shared:
            raise UserError(f"{name} needs {shared} bytes of shared memory a block at this model's sizes, and this GPU "
                            f"has {self.max_shared}: choose a smaller -e")
        if shared > function.max_dynamic_shared_size_bytes:  # more than 48 KiB has to be asked for
            function.max_dynamic_shared_size_bytes = shared
        self.cupy.cuda.driver.launchKernel(function.kernel.ptr, *grid, *block, shared, self.stream.ptr,
                                           ctypes.addressof(pointers), 0)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu_of=None, dgelu_of=None):
        """As Cpu.matmul."""
        lt, aux, result = self.cublaslt, None, out
        epilogue = lt.NONE if bias is None else lt.ADD_BIAS
        if self.fused_gelu and gelu_of is not None:
            epilogue, aux = lt.GELU_AUX_BIAS, gelu_of
        elif self.fused_gelu and dgelu_of is not None:
            epilogue, aux = lt.DGELU, dgelu_of
        elif gelu_of is not None:
            result = gelu_of
        pointers = [x if x is None else x.data.ptr for x in (result, a, b)]
        extras = accumulate, *(x if x is None else x.data.ptr for x in (bias, aux))
        key = out.shape, a.shape, a.strides, b.strides, out.itemsize, epilogue, accumulate
        if key not in self.plans:
            description = lt.describe(result, a, b, epilogue)
            self.plans[key] = *description, self.choose(str(key), description, result, pointers, extras)
        lt.run(*self.plans[key], self.stream.ptr, self.workspace.data.ptr, *pointers, *extras)
        if aux is None:
            gelu_beside(self, out, gelu_of, dgelu_of)

    def saved_choices(self):
        """{product: the algorithm that earlier runs have chosen for it}."""
        try:
            return json.loads(self.choices_file.read_text())
        except (OSError, ValueError):  # not there yet, or damaged
            return {}

    def choose(self, key, description, out, pointers, extras):
        """The fastest of the algorithms for a product, by timing them on its own operands when it first comes up. The
        choice is kept, where it can be, for later runs, which then add up in the same order: the same seed, the same
        bits."""
        cupy, lt = self.cupy, self.cublaslt
        if key in self.choices:
            return lt.Algorithm(algo=(ctypes.c_uint64 * 8)(*self.choices[key]))
        algorithms, accumulate = lt.candidates(*description), extras[0]
        if not algorithms:
            raise UserError(f"cuBLASLt has no algorithm for a product {key}")
        before, times = None, []
        if accumulate:  # then what was there is needed again
            before = self.empty(out.nbytes)
            before.data.copy_from_device_async(out.data, out.nbytes, self.stream)
        for algorithm in algorithms:
            rounds = []
            for _ in range(4):  # the first of which warms up
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self.stream)
                for _ in range(3):
                    lt.run(*description, algorithm, self.stream.ptr, self.workspace.data.ptr, *pointers, *extras)
                end.record(self.stream)
                end.synchronize()
                rounds.append(cupy.cuda.get_elapsed_time(start, end))
            times.append(min(rounds[1:]))
        if accumulate:
            out.data.copy_from_device_async(before.data, out.nbytes, self.stream)
            self.synchronize()
        del before
        cupy.get_default_memory_pool().free_all_blocks()
        best = algorithms[int(np.argmin(times))]
        self.choices = {**self.saved_choices(), **self.choices, key: list(best.algo)}
        try:
            self.choices_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.choices_file, [json.dumps(self.choices).encode()])
        except (OSError, UserError):
            pass  # then the next run chooses again
        return best

    def replay(self, graphs, key, work):
        """Do work(), whose launches are the same each time for one key: the second time they are captured in
        graphs[key], which from then on takes one launch for all. The first time prepares what a capture forbids."""
        if key not in graphs or not self.graph:
            graphs[key] = None
            work()
            return
        if graphs[key] is None:
            self.stream.begin_capture()
            try:
                work()
            finally:
                graph = self.stream.end_capture()
            graphs[key] = graph
        graphs[key].launch(self.stream)

    def synchronize(self):
        self.stream.synchronize()


def has_gpu():
    """Whether NVIDIA's driver reports a GPU: asked of the driver itself, since CuPy takes a second to import."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# The model

def memory_of(c, device, B, T, recompute, free):
    """The bytes that a model's tables ask for, and the largest B whose tables are within `free` bytes."""
    def asked(B):
        return sum(layout(table)[-1] for table in arenas(c, B, T, device.real, recompute).values())

    return asked(B), bisect.bisect_right(range(1, 2**16), free, key=asked)


class GPT2:
    """GPT-2 on a device: forward, backward, and an AdamW update, each in the order in which it is computed.

    config: its sizes; B, T: the largest batch; attention: "softmax", or "relu" for att = max(0, q.k / sqrt(HS));
    recompute: see activation_table. Everything is allocated here. Raises UserError if the device has too little memory.
    """

    def __init__(self, config, device, B, T, attention="softmax", recompute=False):
        if T > config.maxT:
            raise UserError(f"-t {T}: this model has positions for at most maxT = {config.maxT} tokens")
        if device.compiled_for != (config.C, config.NH):
            raise UserError(f"the device's kernels are for (C, NH) = {device.compiled_for}, and the model has "
                            f"{(config.C, config.NH)}: make a device for it")
        self.config, self.device, self.B, self.T = config, device, B, T
        self.attention, self.recompute = attention, recompute
        free = device.free_bytes()
        asked, fits = memory_of(config, device, B, T, recompute, free)
        if asked > free:
            remedy = f"the largest -b that fits is {fits}" if fits else "not even -b 1 fits: choose a smaller -t or -e"
            if not recompute and memory_of(config, device, B, T, True, free)[0] <= free:
                remedy += "; or with --recompute 1 this one does"
            raise UserError(f"-b {B} -t {T}: the tables ask for {gibibytes(asked)} of {device.memory}, and "
                            f"{gibibytes(free)} are free; {remedy}")

        tables = arenas(config, B, T, device.real, recompute)
        self.arenas = {name: device.empty(layout(table)[-1]) for name, table in tables.items()}
        self.params = carve(self.arenas["parameters"], tables["parameters"])
        self.grads = carve(self.arenas["gradients"], tables["gradients"])
        self.master = self.arenas["master" if device.real == BF16 else "parameters"].view(np.float32)
        for name in ("gradients", "adam m", "adam v", "update"):
            device.zero(self.arenas[name])
        self.adam = carve(self.arenas["update"], tables["update"])
        device.put(self.adam.starts, [start // 4 for start in layout(tables["gradients"])])
        device.put(self.adam.decayed, [row.decay for row in tables["parameters"]])
        device.put(self.adam.added_to, [row.name == "wpe" or not row.decay for row in tables["parameters"]])
        self.fresh = True  # the gradients of the matrices have been used: they are to be set, not added to
        self.staged = None  # B, T of the next batch, and its bytes on the host
        self.step = 0  # updates done
        self.graphs = {}  # of a GPU, by batch: they hold this model's addresses
        self.stage = "the start"  # what is being computed, for a person who interrupts it

    def set_parameters(self, values):
        """Set all parameters from one flat array, fp32 or bf16, in the order of the table."""
        self.device.put(self.master, to_float(values))
        if self.device.real == BF16:
            self.device.put(self.arenas["parameters"].view(BF16), values if values.dtype == BF16 else to_bf16(values))

    def initialize(self, seed):
        """Random parameters. Each tensor has its own generator, so they can be drawn on all cores at once."""
        table = parameter_table(self.config)
        arena = np.empty(layout(table)[-1], np.uint8)
        params = carve(arena, table)

        def draw(i):
            row, values = table[i], getattr(params, table[i].name)
            values.fill(row.mean)
            if row.std:
                np.random.default_rng([seed, i]).standard_normal(dtype=np.float32, out=values)
                values *= row.std
            if row.name == "wte":
                values[self.config.V :] = 0

        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, range(len(table))))
        self.set_parameters(arena.view(np.float32))

    def load(self, path):
        """The parameters of a checkpoint whose config is this model's (see read_config)."""
        self.set_parameters(np.fromfile(path, STORED[read_header(path, "checkpoint")[1]], offset=HEADER_BYTES))

    def save(self, path):
        """Write a checkpoint, in bf16 of version 5, else of 3. Raises UserError; an older file is then untouched."""
        magic, versions, _ = FILES["checkpoint"]
        header = np.zeros(256, "<i4")
        header[:8] = magic, versions[self.device.real == BF16], *dataclasses.astuple(self.config)
        replace_file(path, [header, self.device.get(self.arenas["parameters"])])

    def bind(self, B, T):
        """Lay the activations out for a batch (B,T); a smaller one than at the start uses a part of the arenas."""
        if (B, T) != getattr(self, "bound", None):
            self.batch = carve(self.arenas["batch"], batch_table(B, T))
            self.acts = carve(self.arenas["activations"],
                              activation_table(self.config, B, T, self.device.real, self.recompute))
            self.back = carve(self.arenas["backward"], backward_table(self.config, B, T, self.device.real))
            self.bound = B, T

    def set_batch(self, **batch):
        """Copy a batch to the device: tokens (B,T) int32 and, as the work on it needs them, targets (B,T), order and
        run (B*T) (see runs_of_equal)."""
        self.bind(*batch["tokens"].shape)
        for name, values in batch.items():
            self.device.put(getattr(self.batch, name), values)

    def stage_batch(self, **batch):
        """Start to copy a whole batch, as above, to the device, while it works on another: train_step() takes it."""
        table = batch_table(*batch["tokens"].shape)
        host = np.zeros(layout(table)[-1], np.uint8)
        for name, view in vars(carve(host, table)).items():
            view[...] = batch[name].reshape(view.shape)
        self.staged = *batch["tokens"].shape, host.nbytes
        self.device.put_beside(self.arenas["next batch"][: host.nbytes], host)

    def loss(self):
        """The mean cross-entropy over the batch, in nats, once a forward pass with targets is done."""
        return float(self.device.get(self.acts.losses).mean(dtype=np.float64))

    def norm(self):
        """The norm of the last update's gradient, before it was clipped; the update is done if it is finite."""
        return float(self.device.get(self.adam.norm[:1])[0])

    def forward(self, tokens, targets=None, training=False):
        """The logits of tokens (B,T) int32, left in self.acts.logits (B*T,Vp) on the device, or, of a batch that is too
        large for that (see logit_rows), those of its last part.

        With targets (B,T) int32, returns the loss. With training, backward() may follow.
        """
        batch = {"tokens": tokens} if targets is None else {"tokens": tokens, "targets": targets}
        self.set_batch(**batch, **(runs_of_equal(tokens) if training else {}))
        self.forward_pass(targets is not None, training)
        return None if targets is None else self.loss()

    def train_step(self, **adamw):
        """Forward, backward and update of the batch that was staged, with AdamW's settings (see set_adamw). It returns
        before a GPU is done; loss() and norm() wait for it."""
        def work():
            self.forward_pass(True, True)
            self.backward()
            self.update_pass()

        B, T, size = self.staged
        self.bind(B, T)
        self.device.adopt(self.arenas["batch"][:size], self.arenas["next batch"][:size])
        self.set_adamw(**adamw)
        self.device.replay(self.graphs, (self.bound, self.fresh), work)
        self.fresh = True  # as update_pass leaves it, which a replay does not run

    def forward_pass(self, with_targets, training):
        """What forward() computes, from a batch that is on the device. For training it begins the backward pass too:
        the gradients of lnf, left in dbranch, and of wte as the head, since the logits do not last."""
        c, p, a, run, matmul = self.config, self.params, self.acts, self.device.launch, self.device.matmul
        (B, T), C, L = self.bound, c.C, c.L
        N, sizes = B * T, self.device.attention_sizes
        blocks = -(-T // sizes.rows) * B * c.NH  # of attention
        scale, relu = (C // c.NH) ** -0.5, int(self.attention == "relu")
        branch = None  # what is to be added to the residual stream

        run("encoder_forward", N * C, a.residual, self.batch.tokens, p.wte, p.wpe, N, T, C)
        for l in range(L):
            ln1, ln2, fch_gelu = self.kept(l)
            self.layernorm(ln1, a.ln1_mean[l], a.ln1_rstd[l], a.residual1[l], branch, p.ln1w[l], p.ln1b[l])
            matmul(a.qkv[l].reshape(N, 3 * C), ln1, p.qkvw[l].T, bias=p.qkvb[l])
            run("attention_forward", blocks, a.atty[l], a.lse[l], a.qkv[l], scale, relu, T, c.NH,
                shared=sizes.shared_forward)
            branch = a.branch.reshape(N, C)
            matmul(branch, a.atty[l].reshape(N, C), p.attprojw[l].T, bias=p.attprojb[l])

            self.layernorm(ln2, a.ln2_mean[l], a.ln2_rstd[l], a.residual2[l], branch, p.ln2w[l], p.ln2b[l])
            matmul(fch_gelu, ln2, p.fcw[l].T, bias=p.fcb[l], gelu_of=a.fch[l].reshape(N, 4 * C))
            matmul(branch, fch_gelu, p.fcprojw[l].T, bias=p.fcprojb[l])
        lnf = a.lnf.reshape(N, C)
        self.layernorm(lnf, a.lnf_mean, a.lnf_rstd, a.residual3, branch, p.lnfw, p.lnfb)

        dlnf, shared = self.back.dbranch.reshape(N, C), 2 * c.Vp * a.logits.itemsize
        stages = 2 if shared <= self.device.max_shared else 0  # of the classifier, one block a multiprocessor
        for start in range(0, N, len(a.logits)):  # with the backward pass of the logits, since they are gone thereafter
            rows = slice(start, min(start + len(a.logits), N))
            logits = a.logits[: rows.stop - start]
            matmul(logits, lnf[rows], p.wte.T)
            if with_targets:
                run("fused_classifier", min(len(logits), self.device.multiprocessors if stages else N), logits,
                    a.losses.reshape(N)[rows], self.batch.targets.reshape(N)[rows], 1.0 / N, len(logits), c.V, c.Vp,
                    int(training), stages, shared=shared if stages else 0)
            if training:
                matmul(dlnf[rows], logits, p.wte)
                matmul(self.grads.wte, logits.T, lnf[rows], accumulate=start > 0 or not self.fresh)

    def kept(self, l):
        """Layer l's ln1 (N,C), ln2 (N,C) and fch_gelu (N,4*C), or, if they are recomputed, where all layers' go."""
        return (x[l % len(x)].reshape(-1, x.shape[-1]) for x in (self.acts.ln1, self.acts.ln2, self.acts.fch_gelu))

    def layernorm(self, out, mean, rstd, inp, branch, weight, bias):
        """Add branch (N,C), unless it is None, to the residual stream, and normalise that: see layernorm_forward."""
        N = mean.size
        self.device.launch("layernorm_forward", N, out, mean, rstd, inp, self.acts.residual, branch, weight, bias, N)

    def backward(self):
        """Add the gradients of the last forward pass, which was for training, to those of the parameters.

        Of a matrix product out = x @ w.T the gradients are dx = dout @ w and dw = dout.T @ x. The bias of a layer that
        adds to the residual stream has the sum of dresidual's rows, which layernorm_backward takes in passing.
        """
        c, p, g, a, d, batch = self.config, self.params, self.grads, self.acts, self.back, self.batch
        device, run, matmul, bias = self.device, self.device.launch, self.device.matmul, self.bias_backward
        (B, T), C, L = self.bound, c.C, c.L
        N, sizes = B * T, device.attention_sizes
        blocks = -(-T // sizes.rows) * B * c.NH
        scale, relu = (C // c.NH) ** -0.5, int(self.attention == "relu")
        dresidual, dbranch, dfch = d.dresidual.reshape(N, C), d.dbranch.reshape(N, C), d.dfch.reshape(N, 4 * C)
        dqkv, add = d.dqkv.reshape(N, 3 * C), not self.fresh

        device.zero(d.dresidual)
        self.layernorm_backward(g.lnfw, g.lnfb, g.fcprojb[L - 1], a.residual3, p.lnfw, a.lnf_mean, a.lnf_rstd)
        for l in reversed(range(L)):
            ln1, ln2, fch_gelu = self.kept(l)
            if self.recompute:
                for out, inp, *others in ((ln1, a.residual1, a.ln1_mean, a.ln1_rstd, p.ln1w, p.ln1b),
                                          (ln2, a.residual2, a.ln2_mean, a.ln2_rstd, p.ln2w, p.ln2b)):
                    run("layernorm_again", N * C, out, inp[l], *(x[l] for x in others), N, C)
                run("gelu_forward", N * 4 * C, fch_gelu, a.fch[l], N, 4 * C)
            matmul(g.fcprojw[l], dresidual.T, fch_gelu, accumulate=add)
            matmul(dfch, dresidual, p.fcprojw[l], dgelu_of=a.fch[l].reshape(N, 4 * C))
            bias(g.fcb[l], dfch)
            matmul(g.fcw[l], dfch.T, ln2, accumulate=add)
            matmul(dbranch, dfch, p.fcw[l])
            self.layernorm_backward(g.ln2w[l], g.ln2b[l], g.attprojb[l], a.residual2[l], p.ln2w[l], a.ln2_mean[l],
                                    a.ln2_rstd[l])

            matmul(g.attprojw[l], dresidual.T, a.atty[l].reshape(N, C), accumulate=add)
            matmul(dbranch, dresidual, p.attprojw[l])
            run("attention_backward_q", blocks, d.dqkv, d.delta, d.dbranch, a.atty[l], a.qkv[l], a.lse[l], scale, relu,
                T, c.NH, shared=sizes.shared_backward)
            run("attention_backward_kv", blocks, d.dqkv, d.dbranch, a.qkv[l], a.lse[l], d.delta, scale, relu,
                T, c.NH, shared=sizes.shared_backward)
            bias(g.qkvb[l], dqkv)
            matmul(g.qkvw[l], dqkv.T, ln1, accumulate=add)
            matmul(dbranch, dqkv, p.qkvw[l])
            self.layernorm_backward(g.ln1w[l], g.ln1b[l], g.fcprojb[l - 1] if l else None, a.residual1[l], p.ln1w[l],
                                    a.ln1_mean[l], a.ln1_rstd[l])
        run("encoder_backward_wte", (N, -(-C // (32 * device.W))), g.wte, dresidual, batch.tokens, batch.order,
            batch.run, C)
        run("encoder_backward_wpe", T * C, g.wpe, dresidual, B, T, C)
        self.fresh = False

    def layernorm_backward(self, dweight, dbias, dbias_before, inp, weight, mean, rstd):
        """Add a layernorm's gradients to dresidual, dweight and dbias, and the sum of dresidual's rows to dbias_before,
        unless that is None; dbranch is the gradient of its output."""
        (B, T), C, device = self.bound, self.config.C, self.device
        N, sizes = B * T, device.layernorm_sizes
        # As many warps as fit, in one block on each multiprocessor; if not even one does, the launch says so.
        warps = max(1, min(sizes.threads // 32, device.max_shared // sizes.shared_of_warp))
        blocks = min(device.multiprocessors, -(-N // warps), PARTIAL_ROWS)
        partials = self.back.partials.reshape(-1)[: 3 * blocks * C].reshape(3, blocks, C)
        device.launch_grid("layernorm_backward", (blocks, 1, 1), (32 * warps, 1, 1), self.back.dresidual, partials,
                           self.back.dbranch, inp, weight, mean, rstd, N, shared=warps * sizes.shared_of_warp)
        device.launch("add_partials", (C, 3), dweight, dbias, dbias_before, partials, blocks, C)

    def bias_backward(self, dbias, dout):
        """dbias (OC) += the sum over rows of dout (N,OC): in two stages if there are many rows."""
        N, OC = dout.shape
        shares = min(64, N // 256)
        if shares > 1:
            self.device.launch("matmul_backward_bias", (OC, shares), self.back.partials, dout, N, OC)
            self.device.launch("add_partials", OC, dbias, None, None, self.back.partials, shares, OC)
        else:
            self.device.launch("matmul_backward_bias", OC, dbias, dout, N, OC)

    def set_adamw(self, learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0):
        """AdamW's settings for the next update; a gradient's norm is clipped to `clip`, unless that is 0."""
        self.step += 1  # first: a Ctrl-C during the launch is only seen when it is done
        settings = dict(learning_rate=learning_rate, rate1=1 - beta1, rate2=1 - beta2,
                        correction1=1 / (1 - beta1**self.step), correction2=1 / (1 - beta2**self.step), eps=eps,
                        weight_decay=weight_decay, clip=clip)
        self.device.put(self.adam.settings, [settings[name] for name in ADAMW])

    def update_pass(self):
        """An AdamW step, as set, with the gradients that were added up; the next backward pass begins anew."""
        n, adam, gradients = self.master.size, self.adam, self.arenas["gradients"].view(np.float32)
        blocks = min(NORM_BLOCKS, 8 * self.device.multiprocessors)
        self.device.launch("global_norm", blocks, adam.norm, gradients, n)
        self.device.launch("adamw", n, self.arenas["parameters"], self.master, gradients, self.arenas["adam m"],
                           self.arenas["adam v"], adam.starts, adam.decayed, adam.added_to, adam.decayed.size, n,
                           adam.settings, adam.norm)
        self.fresh = True

    def update(self, **adamw):
        """One AdamW step, with settings as set_adamw takes them."""
        self.set_adamw(**adamw)
        self.update_pass()


def runs_of_equal(tokens):
    """For encoder_backward_wte: order, the positions of tokens (B,T) sorted by token, and run, the length of each run
    of equal tokens in that order, at its head, and 0 elsewhere; both (B*T,) int32."""
    flat = tokens.reshape(-1).astype(np.uint32 if tokens.max() > 65535 else np.uint16)  # 16 bits are sorted by radix
    order = np.argsort(flat, kind="stable").astype(np.int32)
    heads = np.flatnonzero(np.r_[True, np.diff(flat[order].astype(np.int32)) != 0])
    run = np.zeros_like(order)
    run[heads] = np.diff(heads, append=flat.size)
    return {"order": order, "run": run}


def flops_per_token(c, T):
    """FLOPs of training on one token: 6 for each weight of a matrix product (2 forward, 4 backward), and 12*L*C for
    each of the T/2 tokens that attention sees on average (Chowdhery et al. 2022, appendix B, halved: it is causal)."""
    weights = sum(row.size for row in parameter_table(c) if row.decay and row.name != "wpe")
    return 6 * weights + 6 * c.L * c.C * T


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def read_tokenizer(path):
    """The bytes of each token, from a gpt2_tokenizer.bin."""
    count = read_header(path, "tokenizer")[2]
    data, words, at = Path(path).read_bytes(), [], HEADER_BYTES
    while at < len(data) and len(words) < count:
        words.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len(words) < count or at != len(data):
        raise UserError(f"{path}: its header promises {count} tokens, and its {len(data):,} bytes are not that many; "
                        f"{FILES['tokenizer'][2]}")
    return words


@functools.cache
def vocabulary():
    """{token id: its bytes}: by gpt2_tokenizer.bin if it is here, else by tiktoken, else the single bytes only."""
    if Path("gpt2_tokenizer.bin").exists():
        return dict(enumerate(read_tokenizer("gpt2_tokenizer.bin")))
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        encoding = byte_encoding()
    return {encoding.encode_single_token(word): word for word in encoding.token_byte_values()} | {
        EOT: END_OF_TEXT.encode()}


def decode(tokens):
    """The text of token ids."""
    return b"".join(vocabulary().get(t, f"<{t}>".encode()) for t in tokens).decode("utf-8", errors="replace")


def sample(model, count, rng):
    """Token ids (count), each drawn from the model's distribution after end-of-text and the tokens before it.

    Nothing is kept from one token to the next: each is a forward pass over the last T tokens.
    """
    V = model.config.V
    tokens = [min(EOT, V - 1)]
    for _ in range(count):
        model.forward(np.array([tokens[-model.T :]], np.int32))
        last = (model.bound[1] - 1) % len(model.acts.logits)
        logits = to_float(model.device.get(model.acts.logits[last]))[:V].astype(np.float64)
        cumulative = np.cumsum(np.exp(logits - logits.max()))
        tokens.append(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")))
    return tokens[1:]


# ---------------------------------------------------------------------------------------------------------------------
# The program

# What a CPU does unless told otherwise: a model that learns something visible in about a minute on two cores.
CPU_MODEL, CPU_T, CPU_STEPS = "d3", 64, 200

FLAGS = [  # letter, long name, type or choices, default (None: see main), what it is
    ("-i", "--train-data", str, None, "token file to train on (default: tinyshakespeare, prepared if it is missing)"),
    ("-j", "--val-data", str, None, "token file to validate on (default: -i's, with val for train in its name)"),
    ("-e", "--model", str, None, "checkpoint, or d12, d24, d36, d48 and the like for GPT-2 of that depth from scratch "
                                 "(default: gpt2_124M.bin if it is here, else d12 on a GPU and d3 on a CPU)"),
    ("-o", "--output", str, None, "folder for main.log and, at the end, a checkpoint (default: write neither)"),
    ("-b", "--batch-size", int, 4, "B, sequences in a batch"),
    ("-t", "--seq-len", int, None, "T, tokens in a sequence (default: 1024 on a GPU, 64 on a CPU)"),
    ("-l", "--learning-rate", float, 3e-4, "learning rate"),
    ("-x", "--steps", int, None, "steps to train (default: one epoch; on a CPU without -e and gpt2_124M.bin, 200)"),
    ("-v", "--val-every", int, 20, "steps between validations; 0 for none"),
    ("-m", "--val-batches", int, 20, "batches of a validation, at most"),
    ("-s", "--sample-every", int, 20, "steps between samples, with one more after the last step; 0 for none"),
    ("-g", "--sample-tokens", int, 64, "tokens of a sample"),
    ("-c", "--weight-decay", float, 0.0, "AdamW's weight decay, of matrices and embeddings only"),
    (None, "--beta1", float, 0.9, "AdamW's decay of the first moment"),
    (None, "--beta2", float, 0.999, "AdamW's decay of the second moment"),
    (None, "--eps", float, 1e-8, "AdamW's epsilon"),
    (None, "--clip", float, 1.0, "largest norm of a step's gradient, which is scaled down to it; 0 for none"),
    (None, "--seed", int, 42, "of the initial parameters and of the samples"),
    (None, "--device", ("cpu", "cuda"), None, "where to compute (default: cuda if there is a GPU)"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "fp32, with matrix products in tf32, or bf16 for parameters and "
     "activations too (default: bf16 on a GPU, fp32 on a CPU)"),
    (None, "--graph", int, 1, "on a GPU, launch a step's kernels as one graph (1) or one by one (0)"),
    (None, "--recompute", int, 0, "compute layernorms and GELUs again (1) instead of keeping them (0): less memory, "
     "somewhat slower"),
    (None, "--attention", ("softmax", "relu"), "softmax", "attention's weights: softmax, or max(0, q.k / sqrt(HS))"),
]

# What a value of a flag must be, beyond its type.
LIMITS = [(("batch_size", "seq_len", "val_batches"), lambda v: v >= 1, "at least 1"),
          (("steps", "val_every", "sample_every", "sample_tokens", "seed"), lambda v: v >= 0, "at least 0"),
          (("graph", "recompute"), lambda v: v in (0, 1), "0 or 1"),
          (("learning_rate", "weight_decay", "clip"), lambda v: 0 <= v < math.inf, "a finite number, at least 0"),
          (("beta1", "beta2"), lambda v: 0 <= v < 1, "at least 0 and below 1"),
          (("eps",), lambda v: 0 < v < math.inf, "a finite number above 0")]


def parse_flags(arguments):
    """The flags of a command line. Raises UserError."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; python train_gpt2.py --help lists the flags")

    parser = Parser(description="Train GPT-2 from raw kernels.", allow_abbrev=False)
    for letter, name, kind, default, text in FLAGS:
        form = dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=kind.__name__.upper())
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(*filter(None, (letter, name)), default=default, help=text + shown, **form)
    flags = parser.parse_args(arguments)
    for names, good, wish in LIMITS:
        for name in names:
            value = getattr(flags, name)
            if value is not None and not good(value):
                raise UserError(f"--{name.replace('_', '-')} {value}: expected {wish}")
    return flags


def counterpart(path, part, other, flag):
    """path with `other` for `part` (train, val) in its file's name. Raises UserError if the name has no such part."""
    if part not in Path(path).name:
        raise UserError(f"{path} has no '{part}' in its name: give {flag} too")
    return str(Path(path).with_name(Path(path).name.replace(part, other)))


def default_data():
    """The paths of tinyshakespeare's training and validation tokens, after preparing them if they are missing.

    Without a network it is another real text, the language reference that Python carries, so that the program always
    runs; each thing done without is a loud line.
    """
    def paths(pattern):
        return [str(pattern).format(part) for part in ("train", "val")]

    if all(Path(path).exists() for path in paths(TINYSHAKESPEARE)):
        return paths(TINYSHAKESPEARE)
    try:
        prepare(download_tinyshakespeare(), gpt2_encoding(), TINYSHAKESPEARE)
        return paths(TINYSHAKESPEARE)
    except UserError as e:
        print(f"WARNING: {e}. Training on Python's language reference instead.")
    try:
        encoding, name = gpt2_encoding(), "python_reference"
    except UserError as e:
        print(f"WARNING: {e}. Every byte of the text is a token of its own.")
        encoding, name = byte_encoding(), "python_reference_bytes"
    pattern = Path(f"data/{name}/{name}_{{}}.bin")
    if not all(Path(path).exists() for path in paths(pattern)):
        from pydoc_data.topics import topics
        prepare("\n\n".join(topics[key] for key in sorted(topics)), encoding, pattern)
    return paths(pattern)


def show_progress(step=0, steps=0):
    """A bar on a terminal's last line, or without arguments no bar; nothing where stderr is not a terminal."""
    if sys.stderr.isatty():
        bar = "#" * (40 * step // steps) if steps else ""
        print(f"\r\x1b[K[{bar:.<40}] {step}/{steps}" if steps else "\r\x1b[K", end="\r", file=sys.stderr, flush=True)


def train(model, train_data, val_data, steps, flags, log):
    """The training loop; log(line) writes to main.log. Raises UserError when the loss is no longer a number."""
    device, tokens_a_step, rng = model.device, model.B * model.T, np.random.default_rng([flags.seed, 1])
    flops_a_step = tokens_a_step * flops_per_token(model.config, model.T)
    adamw = dict(learning_rate=flags.learning_rate, beta1=flags.beta1, beta2=flags.beta2, eps=flags.eps,
                 weight_decay=flags.weight_decay, clip=flags.clip)
    times, losses = [], []

    def stage_next():
        tokens, targets = train_data.next_batch()
        model.stage_batch(tokens=tokens, targets=targets, **runs_of_equal(tokens))

    stage_next()
    for step in range(1, steps + 2):  # once more than there are steps, to validate and sample at the end
        done, last = step - 1, step > steps
        if flags.val_every and (done % flags.val_every == 0 or last):
            model.stage = f"the validation after step {done}"
            val_data.next = 0
            batches = min(flags.val_batches, val_data.batches)
            val_loss = sum(model.forward(*val_data.next_batch()) for _ in range(batches)) / batches
            show_progress()
            print(f"val loss {val_loss:.6f}", flush=True)
            log(f"s:{done} tel:{val_loss:.6f}")
        if flags.sample_every and flags.sample_tokens and (done and done % flags.sample_every == 0 or last):
            model.stage = f"the sample after step {done}"
            text = decode(sample(model, flags.sample_tokens, rng))
            show_progress()
            print(f"generating:\n---\n{text}\n---", flush=True)
        if last:
            break

        start = time.perf_counter()
        model.stage = f"step {step}"
        model.train_step(**adamw)
        stage_next()  # while a GPU is at work
        loss, norm = model.loss(), model.norm()
        times.append(time.perf_counter() - start)
        losses.append(loss)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(f"step {step}/{steps}: the loss is {loss} and the norm of its gradient {norm}; "
                            "try a smaller -l, or look at the data")

        share = f" | {flops_a_step / times[-1] / device.peak_flops:5.1%} of peak" if device.peak_flops else ""
        show_progress()
        print(f"step {step:4d}/{steps} | loss {loss:.6f} | norm {norm:7.4f} | {1e3 * times[-1]:8.2f} ms | "
              f"{tokens_a_step / times[-1]:9,.0f} tok/s{share}", flush=True)
        log(f"s:{step} trl:{loss:.6f}")
        show_progress(step, steps)
    if steps:
        median = float(np.median(times))
        print(f"{steps} steps in {sum(times):.1f} s, median {1e3 * median:.2f} ms, "
              f"{tokens_a_step / median:,.0f} tok/s; training loss {losses[0]:.6f} -> {losses[-1]:.6f}")


def open_log(folder):
    """A function that adds a line to folder/main.log, or drops it if there is no folder. Raises UserError.

    The lines are llm.c's: s is the step, tel a validation loss, trl a training loss.
    """
    if folder is None:
        return lambda line: None
    path = Path(folder) / "main.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", buffering=1)
    except OSError as e:
        raise UserError(f"-o {folder}: {path} could not be written ({e.strerror}); "
                        "give -o a folder that can be") from None

    def log(line):
        try:
            print(line, file=file)
        except OSError as e:
            raise UserError(f"{path}: could not be written ({e.strerror})") from None
    return log


def main(arguments=None):
    """Everything from the flags to the last checkpoint. Raises UserError."""
    flags = parse_flags(arguments)
    on_gpu = (flags.device or ("cuda" if has_gpu() else "cpu")) == "cuda"
    name = flags.model or ("gpt2_124M.bin" if Path("gpt2_124M.bin").exists() else None)
    small, name = not name and not on_gpu, name or ("d12" if on_gpu else CPU_MODEL)
    checkpoint = name if Path(name).exists() or name.endswith(".bin") else None
    c = read_config(checkpoint) if checkpoint else Config.from_descriptor(name)
    device = (Cuda if on_gpu else Cpu)(flags.dtype, c.C, c.NH, flags.graph)
    print(f"device       | {device} (--device, --dtype)")
    origin = "" if checkpoint else f" from scratch, seed {flags.seed}"
    print(f"model        | {name}{origin}: L={c.L} NH={c.NH} C={c.C} V={c.V} maxT={c.maxT}, "
          f"{sum(row.size for row in parameter_table(c)):,} parameters (-e)")
    B, T = flags.batch_size, flags.seq_len or min(c.maxT, 1024 if on_gpu else CPU_T)

    if T > c.maxT:
        raise UserError(f"-t {T}: this model has positions for at most maxT = {c.maxT} tokens")
    log = open_log(flags.output)

    if flags.train_data or flags.val_data:
        train_path = flags.train_data or counterpart(flags.val_data, "val", "train", "-i")
        val_path = flags.val_data or counterpart(flags.train_data, "train", "val", "-j")
    else:
        train_path, val_path = default_data()
    train_data, val_data = DataLoader(train_path, B, T, c.V), DataLoader(val_path, B, T, c.V)
    print(f"data         | {train_path}: {train_data.tokens.size:,} tokens (-i), {val_path} (-j)")
    steps = flags.steps if flags.steps is not None else CPU_STEPS if small else train_data.batches
    print(f"run          | B={B} T={T} (-b, -t), {steps} steps (-x), an epoch has {train_data.batches}")
    if small and not flags.seq_len and flags.steps is None:
        print("             | sizes for about a minute on two cores, since there is no GPU; -e d12 is GPT-2 124M")

    free = device.free_bytes()
    model = GPT2(c, device, B, T, flags.attention, bool(flags.recompute))
    for arena, table in arenas(c, B, T, device.real, flags.recompute).items():
        largest = max(table, key=lambda row: row.size)
        print(f"{arena:12} | {gibibytes(layout(table)[-1]):>10} in {len(table)} tensors, "
              f"of which {largest.name} {largest.shape} is the largest")
    for recompute in (0, 1):
        asked, fits = memory_of(c, device, B, T, recompute, free)
        print(f"{'' if recompute else 'memory':12} | {gibibytes(asked):>10} with --recompute {recompute}; "
              f"-b {fits} would fit into {gibibytes(free)}")
    if checkpoint:
        model.load(checkpoint)
    else:
        model.initialize(flags.seed)

    interrupted = False
    try:
        train(model, train_data, val_data, steps, flags, log)
    except KeyboardInterrupt:
        interrupted = True
        show_progress()
        print(f"\ninterrupted during {model.stage}: the weights are those after {model.step} of {steps} steps",
              flush=True)
    if flags.output:
        path = Path(flags.output) / f"model_{model.step:08d}.bin"
        model.save(path)
        print(f"wrote {path}")
    return 130 if interrupted else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
