"""--exact 1: a run whose bits do not depend on the machine, in fp32: on any GPU from 8.0 on, and on
a CPU with any compiler and any number of threads.

Sums have one order in kernels.cu as it is, as long as grids and blocks are the same: so they are.
exact.cuh replaces what is left to a machine: approximations of e^x, 2^x and logarithms, and
attention's tensor cores. exact.cu multiplies, and no compiler may make an fmaf of a product and a
sum. On the CPU the loops of dev/cpu/kernels.cpp, or of exact.cpp, have the kernels' order of sums.

After each step all bits of the parameters are summed up, tensor by tensor and layer by layer. In
log.jsonl "hash" is a hash of these sums, the loss, and the hash before, so that the last one stands
for the whole run; "parts" has 16 bits of each sum, to say what differs. python -m dev.tools.verify
replays such a run on another machine.
"""
import hashlib
import re
from decimal import Decimal

import numpy as np

from dev.common.cache import cache_folder
from dev.cpu.emulated import Emulated
from dev.features.feature import Feature, Flag, kernels_of, stack
from train_gpt2 import (Cuda, Row, UserError, ceil_div, replace_file, source_of, stride_of,
                        whole_shape)

SOURCE = kernels_of(__file__)
ARITHMETIC = SOURCE.with_suffix(".cuh")


# ---- Devices: the same grids, blocks and arithmetic

# Sizes that fix the order of sums: shares of a sum, and how many rows fit a block
SAME = dict(multiprocessors=128, max_shared=98 * 1024)  # bytes, which GPUs from 8.0 on have


class Products:
    """A mixin in front of a device: exact.cu multiplies."""
    enough = SAME["multiprocessors"]  # blocks that occupy the GPU

    def matmul(self, out, left, right, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul. Tiles of 128 are faster if they fill the GPU, and give the same bits."""
        (I, J), K = out.shape, len(right)
        transposed_l, stride_l = stride_of(left)
        transposed_r, stride_r = stride_of(right)
        side = 128 if ceil_div(I, 128) * ceil_div(J, 128) >= self.enough else 64
        self.launch("exact_product" if side == 128 else "exact_small_product", (J, I), out, left,
                    right, bias, not transposed_l, transposed_r, stride_l, stride_r, I, J, K,
                    accumulate, shared=2 * 2 * 16 * (side + 4) * 4)  # two stages of both tiles
        self.gelu_of_product(out, gelu, dgelu_at)


class ExactCuda(Products):
    """A mixin in front of a GPU's devices."""
    OPTIONS = (*Cuda.OPTIONS, "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
    MINIMUM = {"fp32": 80}

    def compile(self, sources):
        self.enough = self.multiprocessors
        vars(self).update(SAME)
        super().compile(sources)

    def module_of(self, code):
        """As Cuda's. CuPy makes NVRTC flush numbers below 1.2e-38 to zero, which the CPU's loops do
        not. So NVRTC is called here, and its program is kept in a file."""
        from cupy.cuda.compiler import CompileException, compile_using_nvrtc
        code = source_of(ARITHMETIC) + code
        options = *self.OPTIONS, "--split-compile=0", *self.switches()
        key = hash_of(repr((code, options, self.capability, self.cupy.__version__)).encode())
        path = cache_folder() / f"exact_{key}.cubin"
        if not path.exists():
            try:
                program, _ = compile_using_nvrtc(code, options)
            except CompileException as e:
                raise UserError(f"NVRTC could not compile kernels.cu for --exact:\n{e}") from None
            replace_file(path, [program])
        return self.cupy.RawModule(path=str(path))


class ExactCpu:
    """What both devices of the CPU share."""
    multiprocessors, max_shared = SAME.values()
    AHEAD, CONTRACTION = (ARITHMETIC,), ("-ffp-contract=off",)


class ExactEmulated(ExactCpu, Products):
    """A mixin in front of Emulated."""
    max_threads = 1024


class ExactLoops(ExactCpu):
    """A mixin in front of Cpu, whose loops called exact_... take the place of others. Two kernels
    are fast enough when they are emulated."""
    INSTEAD, emulator = "exact_", stack(Emulated, [ExactEmulated])

    def __init__(self, dtype, c, beside=()):
        super().__init__(dtype, c, [*dict.fromkeys([*beside, SOURCE])])
        self.loops.pop("encoder_backward_wte", None)
        if self.unknown:  # nor multiply by NumPy
            self.matmul = self.emulated.matmul
        else:
            self.emulated = self.emulate(self.kernels.keys() - self.loops.keys())
        self.layernorm_sizes = self.emulated.layernorm_sizes


DEVICES = {"cuda": ExactCuda, "cpu": ExactLoops, "emulated": ExactEmulated}


# ---- The model: host arithmetic, and what the parameters' bits are


class Power(float):
    """A number whose powers are decimal ones: the last bit of pow depends on the C library."""

    def __pow__(self, n):
        return float(Decimal(float(self)) ** n)


def cosine(x):
    """cos(x) for 0 <= x <= pi, from sums and products of doubles."""
    term = total = 1.0
    for n in range(1, 16):
        term *= -x * x / ((2 * n - 1) * (2 * n))
        total += term
    return total


def hash_of(data):
    return hashlib.sha256(data).hexdigest()[:16]


def parts_of(sums):
    """16 bits of each sum, as words."""
    return " ".join(f"{int(x) % 65536:04x}" for x in sums)


def pieces_of(c):
    """[(name, layer or None, numbers)] of the parameters, in their order in memory."""
    return [(row.name, l if row.layers else None, row.size // max(1, row.layers))
            for row in c.parameter_table() for l in range(max(1, row.layers))]


class ExactModel:
    """A model that sums up its parameters' bits after each update."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables, count = super().tables(c, device, B, T), len(pieces_of(c))
        rows = [Row("sums", (count,), np.uint64), Row("pieces", (count + 1,), np.uint64)]
        return tables | {"update": tables["update"] + rows}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        sizes = [size for *_, size in pieces_of(self.config)]
        self.largest = max(sizes)
        self.device.put(self.adam.pieces, np.cumsum([0, *sizes]))

    def start_step(self, beta1=0.9, beta2=0.999, **settings):
        super().start_step(beta1=Power(beta1), beta2=Power(beta2), **settings)

    def update_pass(self):
        super().update_pass()
        self.sum_bits()

    def sum_bits(self):
        """sums = the sums of the bits of all pieces of the parameters."""
        sums, parameters = self.adam.sums, self.arenas["parameters"].view(np.float32)
        self.device.zero(sums)
        self.device.launch("fingerprints", (self.largest, len(sums)), sums, parameters,
                           self.adam.pieces)


class ExactTraining:
    """A run of such a model: its first numbers, its rates, and its hashes."""
    hash = ""  # after the last step

    def first_parameters(self):
        """As the trainer's; drawn from the integers of PCG64, which all versions of NumPy share."""
        if self.from_file:
            yield from super().first_parameters()
            return
        for i, row in enumerate(self.config.parameter_table()):
            bits = np.random.PCG64([self.flags.seed, i]).random_raw(3 * row.size).astype("<u8")
            sums = bits.view("<u2").reshape(12, row.size).sum(axis=0, dtype=np.int32)
            # a sum of 12 uniform numbers has the variance 1, and is nearly normal
            values = (sums - np.int32(6 * 65535)).astype(np.float32) / np.float32(65536)
            values = (values * np.float32(row.std) + np.float32(row.mean)).reshape(whole_shape(row))
            if row.name == "wte":
                values[self.config.V :] = 0  # padding
            yield row.name, values

    def learning_rate(self, step):
        flags, f = self.flags, np.float32
        if flags.schedule != "cosine" or step < flags.warmup:
            return super().learning_rate(step)
        rate = f(flags.learning_rate)
        least = rate * f(flags.final_fraction)
        progress = f(step - flags.warmup) / f(self.steps - flags.warmup)
        angle = float(f(np.pi * float(progress)))
        return least + f(0.5) * (f(1) + f(cosine(angle))) * (rate - least)

    def make_model(self):
        model = super().make_model()
        model.sum_bits()
        self.hash = self.next_hash(model.device.get(model.adam.sums), 0.0)
        return model

    def next_hash(self, sums, loss):
        loss, sums = np.array(loss, "<f4"), sums.astype("<u8")
        return hash_of(self.hash.encode() + loss.tobytes() + sums.tobytes())

    def report(self, step, verdict):
        sums = self.device.get(self.model.adam.sums)
        self.hash = self.next_hash(sums, verdict.loss)
        step.noted = dict(hash=self.hash, parts=parts_of(sums))
        super().report(step, verdict)

    def state(self, model):
        return super().state(model) | dict(hash=self.hash)

    def set_state(self, model, notes):
        super().set_state(model, notes)
        self.hash = notes.get("hash", self.hash)


class LastHash:
    """Tells the last hash."""

    def ended(self, run):
        run.say(f"hash         | {run.hash} after step {run.model.step} (--exact), of all losses "
                "and parameters")


OTHERS = {
    "ranks": "several processes, whose sums have another order", "Llama3": "Llama 3",
    "muon": "--optimizer muon", "dropout": "--dropout", "recompute 1": "--recompute",
    "recompute 2": "--recompute", "masked targets": "masked targets", "moments": "--moments",
    "outliers": "-sl and -sg", "label smoothing": "--label-smoothing", "relu": "--attention relu",
    "documents": "--document-mask"}
FEATURE = Feature(
    "exact", lambda flags, ranks: flags.exact, ExactModel, ExactTraining,
    device=lambda flags: DEVICES.get(flags.device, ExactCuda), observer=LastHash, sources=(SOURCE,),
    excludes={name: f"--exact 1: does not go with {what}; leave one out"
              for name, what in OTHERS.items()},
    refuses=lambda flags: f"--exact 1 --dtype {flags.dtype}: expected --dtype fp32" * bool(
        flags.exact and flags.dtype not in (None, "fp32")),
    flags=(
        Flag(None, "--exact", "switch", 0, "1: fp32 whose bits are the same on every machine, with "
             "a hash of each step in log.jsonl, which dev.tools.verify checks", "the machine",
             after="--plain", must_agree=True),),
    state={"hash": (lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{16}", x),
                    "16 hexadecimal digits")})
