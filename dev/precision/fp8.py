"""--dtype fp8: the layers' matrix products take 8-bit numbers, in the forward pass and for the
gradients of their inputs.

Everything else is as in bf16: the gradients of the weights, the head, attention, norms, the update,
and what is kept for the backward pass. A twin is an 8-bit copy of a tensor, times a scale. It lives
from the kernel that writes the tensor to the product that reads it:

    forward     out = inp @ w.T     twins of inp and w
    backward    dinp = dout @ w     twins of dout and of the transposed w

All are e4m3: 4 bits of exponent, 3 of mantissa (Micikevicius et al. 2022, section 3). For gradients
that paper uses e5m2, for its range. But with a scale for each tensor the extra bit of mantissa is
worth more (see dev/RESULTS.md), as DeepSeek-AI (2024, "DeepSeek-V3", section 3.3.2) found with
scales for smaller blocks. A scale maps the largest magnitude of a tensor to half of 448, the
largest number of e4m3; the factor of two is room to grow. That magnitude is known only when the
whole tensor is written, and then making the twin would cost another pass. So scales come from the
step before ("delayed scaling": Peng et al. 2023, section 2): kernels note the largest magnitude
they store. For the first scales, the passes of a run's first step are done once in bf16, without an
update. Scales change at the end of a step, and are in checkpoints.

Hopper's tensor cores sum FP8 products in about 14 bits (DeepSeek-AI, the same section) unless they
are told to promote the sums to fp32 every so often. We do not: it takes 4% of a step, and gains
less than rounding to 8 bits loses (see dev/RESULTS.md). A CPU's sums are fp32.

It is done inside the device's methods: launch makes kernels store twins, and matmul multiplies
them. The model says when a step begins and ends.
"""
import ctypes
import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.common.devices import address_of, device_class
from dev.common.cuda_source import without_comments
from prepro_tinyshakespeare import UserError
from train_gpt2 import Cuda, Row, address, carve, stride_of

SOURCE = Path(__file__).resolve().with_name("fp8.cu")
OUTPUT = SOURCE.with_name("fp8_output.cuh")  # in place of kernels.cu's struct Output
WHOLE = 16  # cuBLASLt needs rows and columns in multiples of this; other weights stay in bf16
INPUT, GRADIENT, WEIGHT = range(3)  # kinds of tensors, in the order of their scales


def e4m3_values():
    """The numbers that the 256 bytes stand for."""
    exponent, fraction = np.divmod(np.arange(128), 8)
    values = np.where(exponent, 2.0 ** (exponent - 7) * (1 + fraction / 8), 2.0**-6 * fraction / 8)
    values[-1] = np.nan
    return np.float32([*values, *-values])


def fp8_rows(c):
    """The rows of the parameter table that have products in FP8."""
    return [row for row in c.parameter_table()
            if row.linear and row.layers and not any(n % WHOLE for n in row.shape)]


def fp8_table(c, B, T):
    """The arena "fp8": all scales, structs of fp8_output.cuh; the twin of the next product's input;
    and the weights' twins, plain and transposed."""
    rows, twins = fp8_rows(c), []
    for row in rows:
        R, C = row.shape
        twins += [Row(row.name, (R, C), np.uint8, row.layers),
                  Row(f"{row.name}_transposed", (C, R), np.uint8, row.layers)]
    widest = max((max(row.shape) for row in rows), default=0)
    tensors = 3 * sum(row.layers for row in rows)
    return [Row("scales", (tensors, 4)), Row("twin", (B * T * widest,), np.uint8), *twins]


# ---- The device


class Fp8:
    """A mixin in front of a device class. It serves one model, the last one made."""
    TYPES = Cuda.TYPES | {"u1": 28}  # CUDA_R_8F_E4M3
    NEEDS = 89, "--dtype bf16"

    def __init__(self, dtype, c, beside=()):
        self.weights = {}  # {address of a weight: its twins and its number}
        self.known = {}  # {launch: the tensor whose twin its kernel makes}
        self.writers = {}  # {address: the last launches that wrote there}
        self.last = None  # the tensor that the last product read
        self.ready = None  # (address, tensor) whose twin is in the buffer
        self.calibrated = False  # whether each tensor has a scale
        super().__init__(dtype, c, beside)
        text = "".join(path.read_text("utf-8") for path in (*c.SOURCES, *beside))
        self.outputs = {*re.findall(r"(\w+)\(\s*Output\b", without_comments(text))}  # kernels

    def switches(self):
        # Compilers' caches know flags, but not included files: so the file's checksum is a flag.
        return [*super().switches(), "-DBF16", f"-I{OUTPUT.parent}", f"-DOUTPUT=<{OUTPUT.name}>",
                f"-DOUTPUT_VERSION={zlib.crc32(OUTPUT.read_bytes())}"]

    def adopt(self, model):
        """Find a model's weights, and carve its arena "fp8"."""
        table = fp8_table(model.config, model.B, model.T)
        views, n = carve(model.arenas["fp8"], table), 0
        self.all_scales, self.twin, self.verdict = views.scales, views.twin, model.adam.verdict
        self.weights, self.whole = {}, []
        for row in fp8_rows(model.config):
            whole = getattr(model.params, row.name)
            twins = [getattr(views, row.name + end) for end in ("", "_transposed")]
            self.whole.append((whole, *twins, n))
            for l in range(row.layers):
                self.weights[address_of(whole[l])] = SimpleNamespace(
                    twins=[twin[l] for twin in twins], number=n + l)
            n += row.layers
        self.count = n  # the number of tensors of each kind
        self.known, self.writers, self.ready, self.calibrated = {}, {}, None, False
        self.set_scales(np.ones(3 * n))

    # ---- Scales

    def set_scales(self, scales):
        """Set all scales. Each is a struct of 16 bytes, the alignment that cuBLASLt needs, and has
        the inverse first."""
        nought = np.zeros(len(scales))
        values = np.float32([1 / np.float32(scales), scales, nought, nought])
        self.put(self.all_scales, values.T)

    def get_scales(self):
        """A list of the scales, for a checkpoint; empty before the first step."""
        return self.get(self.all_scales)[:, 1].tolist() if self.calibrated else []

    def restore_scales(self, scales):
        """Restore the scales of a checkpoint, after its parameters. A checkpoint of another dtype
        has none; then the first step measures them, as in a new run."""
        self.calibrated = len(scales) == 3 * self.count
        if self.calibrated:
            self.set_scales(scales)
        self.cast_weights(rescale=not self.calibrated)

    def scale(self, kind, number):
        """The scale, (4,), of the tensor of this kind that belongs to a weight."""
        return self.all_scales[kind * self.count + number]

    def next_scales(self, scales, forget=False):
        """Set scales from the largest magnitudes, and forget those; or only forget them."""
        self.launch("next_scales", len(scales), scales, len(scales), forget, self.verdict)

    def cast_weights(self, rescale=False):
        """Make the twins of all weights, which have changed. rescale: first set their scales from
        their present sizes."""
        scales = self.all_scales[WEIGHT * self.count :]
        for measure in (True, False) if rescale else (False,):
            for whole, twin, transposed, n in self.whole:
                layers, R, C = whole.shape
                self.launch("weights_to_fp8", (C, layers * -(-R // 64)), twin, transposed, whole,
                            scales[n:], R, C)
            if measure:
                self.next_scales(scales)

    def begin_step(self):
        """Forget what validations have left behind."""
        self.ready = self.last = None
        self.writers.clear()
        self.next_scales(self.all_scales[: WEIGHT * self.count], forget=True)

    def end_step(self):
        """Set the scales of the next step, and make the new weights' twins."""
        self.next_scales(self.all_scales)
        self.cast_weights()

    # ---- Launches and products. The device learns which kernels write what products read: the
    # first time, the product makes the twin itself, and notes which launches wrote the tensor. From
    # then on these launches make the twin too. A launch is identified by its kernel, what it
    # writes, and the product before it, which tells layers apart.

    def launch(self, name, items, *args, **more):
        """As Cuda.launch. What the kernel writes, its first argument, gets a twin if an FP8 product
        reads it next."""
        if name in self.outputs:
            out = args[0]
            note = name, address_of(out), self.last
            self.writers.setdefault(address_of(out), []).append(note)
            tensor = self.known.get(note)
            if tensor:
                self.ready = address_of(out), tensor
            args = self.with_twin(out, tensor), *args[1:]
        else:
            self.written(args[0])
        super().launch(name, items, *args, **more)

    def with_twin(self, out, tensor):
        """The struct Output of an array, 40 bytes by value: three pointers, and the kernel's
        notes."""
        struct = np.zeros(5, np.uint64)
        struct[0] = address_of(out)
        if tensor:
            struct[1:3] = address_of(self.twin), address_of(self.scale(*tensor))
        return struct.view("V40")

    def zero(self, array):
        self.written(array)
        super().zero(array)

    def written(self, array):
        """An array was overwritten by something that makes no twins."""
        self.writers.pop(address_of(array), None)
        if self.ready and self.ready[0] == address_of(array):
            self.ready = None

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None):
        """As Cuda.matmul."""
        weight = self.weights.get(address_of(b))
        if weight:
            backward = not stride_of(b)[0]  # b is w, and not w.T
            tensor = GRADIENT if backward else INPUT, weight.number
            writers = self.writers.pop(address_of(a), [])
            if self.ready != (address_of(a), tensor):
                super().launch("to_fp8", a.size, a, a.size, self.twin, self.scale(*tensor))
                self.known |= dict.fromkeys(writers, tensor)
            self.ready, self.last = None, tensor
        self.written(out)
        if not weight or not self.calibrated:
            super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at)
            return
        scales = self.scale(*tensor)[:1], self.scale(WEIGHT, weight.number)[:1]
        twin_of_a = self.twin[: a.size].reshape(a.shape)
        self.multiply_twins(out, twin_of_a, weight.twins[backward].T, scales, bias)
        self.gelu_of_product(out, gelu, dgelu_at)


class Fp8OnGpu(Fp8):
    """FP8 on a GPU, with cuBLASLt: in front of FastCuda."""

    def multiply_twins(self, out, a, b, scales, bias):
        """out (I,J) = a (I,K) @ b (K,J) + bias (J), of twins times the inverses of their scales."""
        epilogue = self.NO_EPILOGUE if bias is None else self.ADD_BIAS
        self.product(epilogue, out, a, b, bias, None, False, *scales)

    def attributes(self, transpose_a, transpose_b, epilogue, out, bias, aux, *scales):
        """17, 18: scales of b and a. 25: sums may have fewer bits."""
        made = super().attributes(transpose_a, transpose_b, epilogue, out, bias, aux)
        if scales:
            of_a, of_b = scales
            made += [(25, ctypes.c_int8(1)), (17, address(of_b)), (18, address(of_a))]
        return made


class Fp8OnCpu(Fp8):
    """FP8 on a CPU: fp32 products of the twins' numbers."""
    VALUES = e4m3_values()

    def multiply_twins(self, out, a, b, scales, bias):
        """As Fp8OnGpu.multiply_twins."""
        a, b = self.VALUES[a] * scales[0], self.VALUES[b] * scales[1]
        super(Fp8, self).matmul(out, a, b, bias)


def with_fp8(device):
    """The device class with FP8."""
    return type(device.__name__, (Fp8OnCpu if device.name == "cpu" else Fp8OnGpu, device), {})


def fp8_device(name, c, plain=False, graph=True, beside=()):
    """As devices.make_device, for FP8."""
    check_plain(plain)
    device = with_fp8(device_class(name))("fp8", c, (*beside, SOURCE))
    device.graph = graph
    return device


def check_plain(plain):
    if plain:
        raise UserError("--dtype fp8 --plain 1: FP8 is there for speed alone: expected --plain 0, "
                        "or --dtype bf16")


# ---- The model and the training


class Fp8Model:
    """A model on such a device."""

    @classmethod
    def tables(cls, c, device, B, T):
        return super().tables(c, device, B, T) | {"fp8": fp8_table(c, B, T)}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.device.adopt(self)

    def set_parameters(self, tensors):
        super().set_parameters(tensors)
        self.device.cast_weights(rescale=True)

    def train_step(self, *batches, **adamw):
        self.begin_step(batches)
        super().train_step(*batches, **adamw)

    def begin_step(self, batches):
        """Before a step of these micro-batches; the first time, measure magnitudes in bf16."""
        device = self.device
        device.begin_step()
        if not device.calibrated:
            self.measure(batches)
            device.end_step()
            device.calibrated, device.last = True, None

    def measure(self, batches):
        """The passes of a step, whose kernels note the largest magnitudes."""
        self.micros = len(batches) * self.count
        for self.micro, batch in enumerate(batches):
            self.set_batch(batch)
            self.forward_pass()
            self.backward_pass()
        self.micro, self.micros = 0, 1

    def update_pass(self):
        super().update_pass()
        self.device.end_step()


class Fp8Training:
    """A run of such a model."""

    def device_class(self):
        check_plain(self.flags.plain)
        return with_fp8(super().device_class())

    def make_device(self, *beside):
        return super().make_device(*beside, SOURCE)


class Fp8Ranked:
    """A model on one of several ranks. All ranks share the largest magnitudes, and so the
    scales."""

    def sum_last(self):
        super().sum_last()
        self.ranks.via.largest(self.device.all_scales)  # of each number

    def measure(self, batches):
        super().measure(batches)
        with self.ranks.via.fork():
            self.ranks.via.largest(self.device.all_scales)
        self.ranks.via.join()

    def try_products(self, B, backward):
        """The products of a run's first passes are in bf16, later ones in FP8."""
        before = self.device.calibrated
        for self.device.calibrated in (False, True):
            super().try_products(B, backward)
        self.device.calibrated = before


class Fp8Explained:
    """The notes of a checkpoint, and of a step to replay, have the scales."""

    def state(self, model):
        return super().state(model) | {"scales": model.device.get_scales()}

    def set_state(self, model, notes):
        super().set_state(model, notes)
        model.device.restore_scales(notes.get("scales", []))
