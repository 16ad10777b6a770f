"""--dtype fp8: the blocks' linear layers multiply numbers of 8 bits, forward and for the gradients of their inputs.

All else is as in bf16: the gradients of the weights, the head, attention, norms, and what AdamW updates. So is what the
backward pass keeps. A twin is a copy in 8 bits, times a scale, that lives from where a tensor is written to the product
that reads it:

    forward     out = inp @ w.T     twins of inp and w in e4m3
    backward    dinp = dout @ w     those of dout in e5m2 and of the transposed w in e4m3

e4m3 has 4 bits of exponent and 3 of mantissa, e5m2 has 5 and 2 (Micikevicius et al. 2022, section 3). A scale brings
the largest magnitude of a tensor to half of the largest number of its format. It is known only when all of the tensor
is written, and then its twin would cost another pass. So the scale comes from the step before, of which all kernels
leave the largest magnitude ("delayed scaling": Peng et al. 2023, section 2), and in the factor of two a tensor may
grow. The first step of a run is gone through once in bf16 for the first scales, without an update. Scales change at a
step's end, and go into checkpoints.

The trainer imports this for --dtype fp8 alone.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.cpu.device import Cpu
from prepro_tinyshakespeare import UserError
from train_gpt2 import ALONE, FastCuda, Row, carve, stride_of

SOURCE = Path(__file__).resolve().parent / "fp8.cu"
WHOLE = 16  # rows and columns of a weight are multiples of this, or its products are in bf16: cuBLASLt wants that
INPUT, WEIGHT, GRADIENT = range(3)  # kinds of tensors, in the order in which their scales lie
E5M2_GRADIENTS = True  # or else they are in e4m3


def values_of(mantissa, bias):
    """The numbers (256) that bytes of a format stand for, with so many bits of mantissa."""
    bits = np.arange(128)
    exponent, fraction = bits >> mantissa, bits % 2**mantissa / 2**mantissa
    values = np.where(exponent, 2.0 ** (exponent - bias) * (1 + fraction), 2.0 ** (1 - bias) * fraction)
    values[-1] = np.nan  # of e5m2's, infinity and other NaN are not made here
    return np.float32([*values, *-values])


VALUES = {False: values_of(3, 7), True: values_of(2, 15)}  # of e4m3, and of e5m2


def address(array):
    """Where the numbers of an array are, on a device or the host."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.__array_interface__["data"][0]


def shared_weights(c):
    """The rows of the parameter table whose products are in FP8."""
    return [row for row in c.parameter_table() if row.matrix and row.layers and not any(n % WHOLE for n in row.shape)]


class Fp8:
    """What a device does besides, in front of the class of a device."""
    fp8, weights = True, {}

    def tables(self, c, B, T):
        rows, twins = shared_weights(c), []
        for row in rows:
            R, C = row.shape
            twins += [Row(row.name, (R, C), np.uint8, row.layers), Row(f"{row.name}_transposed", (C, R), np.uint8,
                                                                      row.layers)]
        widest, tensors = max((max(row.shape) for row in rows), default=0), 3 * sum(row.layers for row in rows)
        numbers = [Row(name, (tensors,)) for name in ("scale", "inverse", "largest")]
        return {"fp8": [*numbers, Row("twin", (B * T * widest,), np.uint8), *twins]}

    def adopt(self, model):
        """Find the weights of a model, whose arena "fp8" is carved here."""
        self.eight = carve(model.arenas["fp8"], self.tables(model.config, model.B, model.T)["fp8"])
        self.weights, self.ready, self.calibrated, self.rows, n = {}, None, False, [], 0
        for row in shared_weights(model.config):
            whole = getattr(model.params, row.name)
            self.rows.append((whole, getattr(self.eight, row.name), getattr(self.eight, f"{row.name}_transposed"), n))
            for l in range(row.layers):
                twin, transposed = (getattr(self.eight, name)[l] for name in (row.name, f"{row.name}_transposed"))
                self.weights[address(whole[l])] = SimpleNamespace(forward=twin, backward=transposed, number=n + l)
            n += row.layers
        self.count = n  # of the weights; as many are of each kind
        for array in (self.eight.scale, self.eight.inverse):
            self.put(array, np.ones(array.shape))

    def scales(self, kind, weight):
        """(scale, its inverse, the largest magnitude) of the tensor of this kind at a weight, one number each."""
        i = kind * self.count + weight.number
        return [array[i : i + 1] for array in (self.eight.scale, self.eight.inverse, self.eight.largest)]

    def cast_weights(self, alone=False):
        """The twins of all weights, which have changed. alone: with scales of their own present sizes."""
        e, own = self.eight, slice(self.count, 2 * self.count)
        for again in range(1 + alone):
            for whole, twin, transposed, n in self.rows:
                layers, R, C = whole.shape
                self.launch("weights_to_fp8", (C, layers * -(-R // 64)), twin, transposed, whole,
                            e.scale[own][n:], e.largest[own][n:], R, C)
            if alone and not again:
                self.launch("set_scales", self.count, e.scale[own], e.inverse[own], e.largest[own], self.count,
                            self.count)

    def begin_step(self, model, batches):
        """Before the first micro-batch: what validations have left behind is not the step's."""
        n, self.ready = self.count, None
        for kind in (INPUT, GRADIENT):
            self.zero(self.eight.largest[kind * n : (kind + 1) * n])
        if not self.calibrated:
            for micro, batch in enumerate(batches):
                model.set_batch(batch)
                model.forward_pass()
                model.backward_pass(micro, model.ranks if micro + 1 == len(batches) else ALONE)
            self.end_step()
            self.calibrated = True

    def end_step(self):
        """The scales of the next step, and the twins of the weights as they are now."""
        e, n = self.eight, self.count
        self.launch("set_scales", 3 * n, e.scale, e.inverse, e.largest, 3 * n, 2 * n)
        self.cast_weights()

    def state(self):
        """The scales, for a checkpoint."""
        return self.get(self.eight.scale).tolist() if self.calibrated else []

    def go_on(self, scales):
        """Go on with the scales of a checkpoint, whose parameters are there already. It has none if it is of another
        dtype; then the first step begins as that of a new run does."""
        self.calibrated = len(scales) == 3 * self.count
        self.zero(self.eight.largest)
        if self.calibrated:
            self.put(self.eight.scale, scales)
            self.put(self.eight.inverse, 1 / np.float32(scales))
        self.cast_weights(alone=not self.calibrated)

    # ---- Verbs of a device

    def launch(self, name, items, *args, feeds=None, **more):
        """As Cuda.launch. If the kernel's first argument is what a product in FP8 reads next, it gets a twin."""
        weight = feeds is not None and self.weights.get(address(feeds))
        if weight:
            scale, _, largest = self.scales(INPUT if stride_of(feeds)[0] else GRADIENT, weight)
            self.ready = address(args[0])
            args = *args, self.eight.twin, scale, largest
        super().launch(name, items, *args, **more)

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None, feeds=None):
        """As Cuda.matmul."""
        weight = self.weights.get(address(b))
        if weight:
            kind = INPUT if stride_of(b)[0] else GRADIENT  # b is w.T or w
            scale, inverse, largest = self.scales(kind, weight)
            if self.ready != address(a):
                self.launch("to_fp8", a.size, a, a.size, kind == GRADIENT, self.eight.twin, scale, largest)
            self.ready = None
        if not weight or not self.calibrated:
            super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at, feeds)
            return
        _, inverse_of_b, _ = self.scales(WEIGHT, weight)
        twin, other = self.eight.twin[: a.size].reshape(a.shape), (weight.forward, weight.backward)[kind == GRADIENT]
        self.multiply_twins(out, twin, other.T, (inverse, inverse_of_b), bias, kind)
        self.gelu_of_product(out, gelu, dgelu_at, feeds)


class Fp8Cuda(Fp8, FastCuda):
    """FP8 on a GPU, by cuBLASLt."""
    OPTIONS = (*FastCuda.OPTIONS, f"-DE5M2_GRADIENTS={int(E5M2_GRADIENTS)}")

    def __init__(self, c, beside, graph):
        super().__init__("fp8", c, (*beside, SOURCE), graph)

    def multiply_twins(self, out, a, b, scales, bias, kind):
        """out (I,J) = a (I,K) @ b (K,J), twins, times their two scales, plus bias (J)."""
        a = a.view(np.int8) if kind == GRADIENT and E5M2_GRADIENTS else a  # by which FastCuda knows e5m2
        FastCuda.matmul(self, out, a, b, bias, scales=scales)


class Fp8Cpu(Fp8, Cpu):
    """FP8 on a CPU: fp32 products of the same numbers."""

    def __init__(self, c, beside):
        super().__init__("fp8", c, (*beside, SOURCE))

    def multiply_twins(self, out, a, b, scales, bias, kind):
        """As Fp8Cuda.multiply_twins."""
        a, b = VALUES[kind == GRADIENT and E5M2_GRADIENTS][a], VALUES[False][b]
        Cpu.matmul(self, out, a * scales[0], b * scales[1], bias)


def fp8_device(name, c, plain, graph, beside):
    """make_device for --dtype fp8. Raises UserError."""
    if plain:
        raise UserError("--dtype fp8 --plain 1: FP8 is there for speed alone: expected --plain 0, or --dtype bf16")
    return Fp8Cuda(c, beside, graph) if name == "cuda" else Fp8Cpu(c, beside)
