"""--dtype fp8: the layers' matrix products are of numbers of 8 bits, forward and for the gradients of their inputs.

All else is as in bf16: the gradients of the weights, the head, attention, norms, and what AdamW updates. So is what is
kept for the backward pass. A twin is a copy in 8 bits, times a scale, that lives from where a tensor is written to the
product that reads it:

    forward     out = inp @ w.T     twins of inp and w
    backward    dinp = dout @ w     twins of dout and of the transposed w

All are e4m3, with 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, section 3). For gradients that paper
has e5m2, for its range; but with a scale for each tensor the bit of mantissa is worth more (see dev/RESULTS.md), as
DeepSeek-AI (2024, "DeepSeek-V3", section 3.3.2) found with scales for smaller parts. A scale brings the largest
magnitude of a tensor to half of 448, the largest number. It is known only when all of the tensor is written, and then
its twin would cost another pass. So the scale comes from the step before, in which the kernels have left the largest
magnitude that they stored ("delayed scaling": Peng et al. 2023, section 2). The factor of two is room for a tensor to
grow. The first step of a run is gone through once in bf16 for the first scales, without an update. Scales change at a
step's end, and go into checkpoints.

Hopper's tensor cores add up products of FP8 in about 14 bits (DeepSeek-AI, the same section), unless they are told to
move sums to fp32 again and again. They are not: it would take 4% of a step, and rounding to 8 bits takes away more than
it brings (see dev/RESULTS.md). Sums on a CPU are of fp32.

The trainer imports this for --dtype fp8 alone.
"""
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.cpu.device import Cpu
from dev.replay import address
from prepro_tinyshakespeare import ARGUMENTS, UserError
from train_gpt2 import ALONE, FastCuda, Row, carve, stride_of

SOURCE = Path(__file__).resolve().parent / "fp8.cu"
HEADER = SOURCE.with_name("fp8_output.cuh")
WHOLE = 16  # rows and columns of a weight are multiples of this, or its products are in bf16: cuBLASLt wants that
INPUT, GRADIENT, WEIGHT = range(3)  # kinds of tensors, in the order in which their scales lie


def e4m3_values():
    """The numbers (256) that the bytes stand for."""
    exponent, fraction = np.divmod(np.arange(128), 8)
    values = np.where(exponent, 2.0 ** (exponent - 7) * (1 + fraction / 8), 2.0**-6 * fraction / 8)
    values[-1] = np.nan
    return np.float32([*values, *-values])


class Output(NamedTuple):
    """An array that a kernel is to write, with its twin and the scale of that (4,)."""
    numbers: object
    twin: object
    scale: object


def output_of(array):
    """An array or an Output as a kernel's argument: HEADER's struct of 40 bytes, as one number for CuPy."""
    struct = np.zeros(5, np.uint64)
    for i, pointed in enumerate(array if isinstance(array, Output) else [array]):
        struct[i] = address(pointed)
    return struct.view("V40")


def fp8_rows(c):
    """The rows of the parameter table whose products are in FP8."""
    return [row for row in c.parameter_table() if row.matrix and row.layers and not any(n % WHOLE for n in row.shape)]


class Fp8:
    """What a device does besides: a mixin, in front of the class of a device. It serves one model, the last that was
    made. One buffer has the twin of what the next product reads; those of weights have memory of their own."""
    fp8 = True
    arguments = ARGUMENTS | {"Output": output_of}
    weights = {}  # {address of a weight: its twins, and its number}
    known = {}  # {launch: the tensor whose twin its kernel makes}
    writers = {}  # {address: the launches that have written there last}
    last = None  # the tensor that the product before has read
    ready = None  # (address, tensor) of what the buffer has the twin of

    def options(self, c):
        """As Cuda.options. CuPy keeps what it has compiled, and looks at these, but not at what a file includes."""
        version = zlib.crc32(HEADER.read_bytes())
        return [*super().options(c), f"-I{HEADER.parent}", f"-DOUTPUT=<{HEADER.name}>", f"-DVERSION={version}"]

    def tables(self, c, B, T):
        rows, twins = fp8_rows(c), []
        for row in rows:
            R, C = row.shape
            twins += [Row(row.name, (R, C), np.uint8, row.layers),
                      Row(f"{row.name}_transposed", (C, R), np.uint8, row.layers)]
        widest, tensors = max((max(row.shape) for row in rows), default=0), 3 * sum(row.layers for row in rows)
        return {"fp8": [Row("scales", (tensors, 4)), Row("twin", (B * T * widest,), np.uint8), *twins]}

    def adopt(self, model):
        """Find the weights of a model, whose arena "fp8" is carved here."""
        views, n = carve(model.arenas["fp8"], self.tables(model.config, model.B, model.T)["fp8"]), 0
        self.weights, self.whole, self.all_scales, self.twin = {}, [], views.scales, views.twin
        for row in fp8_rows(model.config):
            whole = getattr(model.params, row.name)
            twins = [getattr(views, row.name + end) for end in ("", "_transposed")]
            self.whole.append((whole, *twins, n))
            for l in range(row.layers):
                self.weights[address(whole[l])] = SimpleNamespace(twins=[twin[l] for twin in twins], number=n + l)
            n += row.layers
        self.count = n  # of the weights; as many are of each kind
        self.known, self.writers, self.ready, self.calibrated, self.verdict = {}, {}, None, False, model.adam.verdict
        self.set_scales(np.ones(3 * n))

    def set_scales(self, scales):
        """Set all scales, in the order of kernels.cu's struct, which is 16 bytes: cuBLASLt wants that of inverses."""
        nought = np.zeros(len(scales))
        self.put(self.all_scales, np.float32([1 / np.float32(scales), scales, nought, nought]).T)

    def scale(self, kind, number):
        """(4,), the scale of the tensor of this kind that belongs to a weight."""
        return self.all_scales[kind * self.count + number]

    def next_scales(self, scales, forget=False):
        """Set scales by the largest magnitudes; or only forget those."""
        self.launch("next_scales", len(scales), scales, len(scales), forget, self.verdict)

    def cast_weights(self, rescale=False):
        """The twins of all weights, which have changed. rescale: first set their scales by their present sizes."""
        scales = self.all_scales[WEIGHT * self.count :]
        for measure in (True, False) if rescale else (False,):
            for whole, twin, transposed, n in self.whole:
                layers, R, C = whole.shape
                self.launch("weights_to_fp8", (C, layers * -(-R // 64)), twin, transposed, whole, scales[n:], R, C)
            if measure:
                self.next_scales(scales)

    def begin_step(self, model, batches):
        """Before a step of these micro-batches. What validations have left behind is not the step's."""
        self.ready = self.last = None
        self.writers.clear()
        self.next_scales(self.all_scales[: WEIGHT * self.count], forget=True)
        if not self.calibrated:
            for micro, batch in enumerate(batches):
                model.set_batch(batch)
                model.forward_pass()
                model.backward_pass(micro, model.ranks if micro + 1 == len(batches) else ALONE)
            self.end_step()
            self.calibrated, self.last = True, None

    def end_step(self):
        """The scales of the next step, and the twins of the weights as they are now."""
        self.next_scales(self.all_scales)
        self.cast_weights()

    def state(self):
        """The scales, for a checkpoint."""
        return self.get(self.all_scales)[:, 1].tolist() if self.calibrated else []

    def go_on(self, scales):
        """Go on with the scales of a checkpoint, whose parameters are there already. It has none if it is of another
        dtype; then the first step begins as that of a new run does."""
        self.calibrated = len(scales) == 3 * self.count
        if self.calibrated:
            self.set_scales(scales)
        self.cast_weights(rescale=not self.calibrated)

    # ---- Verbs of a device. Which kernel writes what a product reads is learned: the first time a product makes the
    # twin itself, and notes for which launches that was. From then on these make it beside what they write. A launch
    # is known by its kernel, by what it writes, and by the product before it, which tells layers apart.

    def launch(self, name, items, *args, **more):
        """As Cuda.launch. If a product in FP8 reads next what the kernel writes, its first argument, it gets a twin."""
        note, kernel = (name, address(args[0]), self.last), self.kernels.get(name)
        if kernel and kernel.parameters[0][1] == output_of:
            self.writers.setdefault(note[1], []).append(note)
            if note in self.known:
                self.ready = note[1], self.known[note]
                args = Output(args[0], self.twin, self.scale(*self.known[note])), *args[1:]
        else:
            self.written(args[0])
        super().launch(name, items, *args, **more)

    def zero(self, array):
        self.written(array)
        super().zero(array)

    def written(self, array):
        """What is in an array now has no twin, and no kernel that could have made it."""
        self.writers.pop(address(array), None)
        if self.ready and self.ready[0] == address(array):
            self.ready = None

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul."""
        weight = self.weights.get(address(b))
        if weight:
            backward = not stride_of(b)[0]  # b is w, and not w.T
            tensor = GRADIENT if backward else INPUT, weight.number
            writers = self.writers.pop(address(a), [])
            if self.ready != (address(a), tensor):
                super().launch("to_fp8", a.size, a, a.size, self.twin, self.scale(*tensor))
                self.known |= dict.fromkeys(writers, tensor)
            self.ready, self.last = None, tensor
        self.written(out)
        if not weight or not self.calibrated:
            super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at)
            return
        scales = self.scale(*tensor)[:1], self.scale(WEIGHT, weight.number)[:1]
        self.multiply_twins(out, self.twin[: a.size].reshape(a.shape), weight.twins[backward].T, scales, bias)
        self.gelu_of_product(out, gelu, dgelu_at)


class Fp8Cuda(Fp8, FastCuda):
    """FP8 on a GPU, by cuBLASLt."""

    def __init__(self, c, beside, graph):
        super().__init__("fp8", c, (*beside, SOURCE), graph)

    def multiply_twins(self, out, a, b, scales, bias):
        """out (I,J) = a (I,K) @ b (K,J), twins, times the inverses of their scales, plus bias (J)."""
        FastCuda.matmul(self, out, a, b, bias, scales=scales)


class Fp8Cpu(Fp8, Cpu):
    """FP8 on a CPU: fp32 products of the same numbers."""
    VALUES = e4m3_values()

    def __init__(self, c, beside):
        super().__init__("fp8", c, (*beside, SOURCE))

    def multiply_twins(self, out, a, b, scales, bias):
        """As Fp8Cuda.multiply_twins."""
        Cpu.matmul(self, out, self.VALUES[a] * scales[0], self.VALUES[b] * scales[1], bias)


def fp8_device(name, c, plain, graph, beside):
    """make_device for --dtype fp8. Raises UserError."""
    if plain:
        raise UserError("--dtype fp8 --plain 1: FP8 is there for speed alone: expected --plain 0, or --dtype bf16")
    return Fp8Cuda(c, beside, graph) if name == "cuda" else Fp8Cpu(c, beside)
