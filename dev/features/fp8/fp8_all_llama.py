"""--fp8 all for Llama 3: the gradients of its layers' weights, too, are products of 8-bit numbers.

    dw = dout.T @ inp        twins of the transposed dout and of the transposed inp

Unlike fp8_all.py, this keeps nothing more for the backward pass: inp is there in bf16, and becomes
a transposed twin where its product comes, with the scale that it had in the forward pass. So it
goes with --recompute and --dropout. A product of N tokens costs 3 bytes for each number of inp, and
2 for each of dout, whose twin is there already. Of the gradients of up and gate only the twin is
stored, after the first step. A batch whose number of tokens is no multiple of 16 has its products
in bf16, as with --fp8 head.
"""
import numpy as np

from dev.features.feature import Feature
from dev.features.fp8.fp8 import GRADIENT, INPUT, WHOLE, padded, tiles, transposed
from dev.features.fp8.fp8_all import multiply_transposed
from train_gpt2 import Row, carve


class Fp8AllLlama:
    """Llama 3 with such layers. It stands behind Fp8Model, which has begun the layer."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables, N = super().tables(c, device, B, T), padded(B * T)
        return tables | {"fp8 turned": [
            Row("inp", (max(c.C, c.H), N), np.uint8),
            Row("gradient", (max(c.C, c.QKV, 2 * c.H), N), np.uint8)]}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        table = self.tables(self.config, self.device, self.B, self.T)["fp8 turned"]
        self.turned = carve(self.arenas["fp8 turned"], table)

    def set_batch(self, batch):
        super().set_batch(batch)
        B, T = self.BT
        self.device.twins_only = set() if B * T % WHOLE else {(GRADIENT, "fc")}

    def weight_backward(self, dout, inp, y):
        """As Fp8Products.weight_backward."""
        device, (N, C), name = self.device, inp.shape, (y.name, y.l)
        if N % WHOLE or not (device.calibrated and name in device.weights):
            return super().weight_backward(dout, inp, y)
        across = transposed(device, self.turned.gradient, device.twin_of(dout, GRADIENT, *name))
        turned = self.turned.inp.reshape(-1)[: C * N].reshape(C, N)
        device.launch("weights_to_fp8", tiles(N, C), turned, None, inp, device.scale(INPUT, *name),
                      N, C)
        multiply_transposed(self, y, across, turned)


FEATURE = Feature(
    "fp8 all of Llama", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 == "all",
    Fp8AllLlama, only="Llama3")
