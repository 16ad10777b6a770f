"""--dtype fp8: matrix products take 8-bit numbers, which tensor cores multiply twice as fast. --fp8
says which; without it, the last of these that the model and the other flags allow:

    layers    out = inp @ w.T     twins of inp and w                       this file
              dinp = dout @ w     twins of dout and of the transposed w
    head      these, and the head's two of the backward pass               fp8_head.py
    all       these, and dw = dout.T @ inp of the layers    fp8_all.py, and fp8_all_llama.py

Everything else is as in bf16: attention, norms, the update, and, except with GPT-2's `all`, what is
kept for the backward pass. A twin is an 8-bit copy of a tensor, times a scale. It is made when the
tensor is written, and lives until a product has read it; weights' twins live for a step, and
GPT-2's `all` keeps those of inputs for the backward pass. In both factors of a product the summed
index has to be the fastest. So some twins are of transposed tensors.

All are e4m3: 4 bits of exponent, 3 of mantissa (Micikevicius et al. 2022, section 3). For gradients
that paper uses e5m2, for its range. But with a scale for each tensor the extra bit of mantissa is
worth more (see dev/RESULTS.md), as DeepSeek-AI (2024, "DeepSeek-V3", section 3.3.2) found with
scales for smaller blocks. A scale maps the largest magnitude of a tensor to half of 448, the
largest number of e4m3; the factor of two is room to grow. (dlogits have a bound, so fp8_head.py
uses all of 448.) That magnitude is known only when the
whole tensor is written, and then making the twin would cost another pass. So scales come from the
step before ("delayed scaling": Peng et al. 2023, section 2): kernels note the largest magnitude
they store. For the first scales, the passes of a run's first step are done once in bf16, without an
update. Scales change at the end of a step, and are in checkpoints.

Hopper's tensor cores sum FP8 products in about 14 bits (DeepSeek-AI, the same section) unless they
are told to promote the sums to fp32 every so often. That takes 4% of a step with --fp8 layers, and
gains less than rounding to 8 bits loses (see dev/RESULTS.md). So only sums are promoted that are
long, or that a few large terms dominate: fp8_head.py and fp8_all.py say which. A CPU's sums are
fp32.

A tensor is known by the linear layer whose product reads it: (INPUT or GRADIENT, the layer's name,
l). The model says which tensor a kernel writes (read_by); then the device has the kernel store the
twin. Where the product comes, the model asks the device for its factors.
"""
import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np

from dev.features import fused_biases
from dev.features.devices import Cuda, FastCuda, WithoutGraphs, address_of, device_class
from dev.features.feature import Feature, Flag, Pair, kernels_of, numbers, stack
from dev.features.fused_biases import kernels_with_output, output_switches
from train_gpt2 import EPILOGUES, Row, UserError, carve, pointer

SOURCE = kernels_of(__file__)
SUMS = fused_biases.SOURCE
OUTPUT = SOURCE.with_name("fp8_output.cuh")  # in place of kernels.cu's struct Output
TILE = 128  # rows, and columns, that a block transposes
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
            if row.decay and row.layers and not any(n % WHOLE for n in row.shape)]


def fp8_table(c, B, T, rows):
    """The arena "fp8" for these weights: all scales, structs of fp8_output.cuh; the twin of the
    next product's input; and the weights' twins: plain, for a layer's forward pass, and
    transposed, for the backward pass."""
    twins = []
    for row in rows:
        R, C = row.shape
        plain = [Row(row.name, (R, C), np.uint8, row.layers)] if row.layers else []
        twins += [*plain, Row(f"{row.name}_transposed", (C, R), np.uint8, max(1, row.layers))]
    widest = max((max(row.shape) for row in fp8_rows(c)), default=0)
    tensors = 3 * sum(max(1, row.layers) for row in rows)
    return [Row("scales", (tensors, 4)), Row("twin", (B * T * widest,), np.uint8), *twins]


def padded(rows):
    """The length of a transposed row: a multiple of WHOLE."""
    return -(-rows // WHOLE) * WHOLE


def tiles(rows, columns):
    """The blocks that take TILE rows and TILE columns each."""
    return -(-rows // TILE) * -(-columns // TILE)


def transposed(device, memory, twin):
    """The transposed twin (R,C) in some memory: (C,R), with zeros up to a multiple of WHOLE."""
    R, C = twin.shape
    across = memory.reshape(-1)[: C * padded(R)].reshape(C, padded(R))
    device.launch("transpose_fp8", tiles(*across.shape), across, twin, R, C, padded(R))
    return across


# ---- The device


class Fp8:
    """A mixin in front of a device class. It serves one model, the last one made."""
    CUDA_TYPES = Cuda.CUDA_TYPES | {"u1": 28}  # CUDA_R_8F_E4M3
    MINIMUM = Cuda.MINIMUM | {"fp8": 89}
    column_sums = None  # where the next kernels leave sums of columns: see fused_biases.py
    promote = False  # whether the sums of this product are promoted to fp32 on their way
    reader = None  # the tensor that kernels write now, or None

    def __init__(self, dtype, c, beside=()):
        self.weights = {}  # {(name, l) of a linear layer: its weight's twins, and its number}
        self.twins_only = set()  # (kind, name) of tensors that only FP8 products read
        self.ready = None, None, None  # the last array that got a twin, its tensor, the twin
        self.calibrated = False  # whether each tensor has a scale
        super().__init__(dtype, c, beside)
        self.outputs = kernels_with_output([*c.SOURCES, *beside])

    def switches(self):
        return [*super().switches(), "-DBF16", *output_switches(OUTPUT)]

    def adopt(self, model):
        """Find a model's weights, and carve its arena "fp8"."""
        c, rows = model.config, model.weights_in_fp8(model.config)
        views, n = carve(model.arenas["fp8"], model.tables(c, self, model.B, model.T)["fp8"]), 0
        self.all_scales, self.twin, self.verdict = views.scales, views.twin, model.adam.verdict
        self.weights, self.whole = {}, []
        for row in rows:
            whole = model.head.w if row.name == "head" else getattr(model.params, row.name)
            whole = whole.reshape(-1, *row.shape)
            twins = [getattr(views, row.name + end, None) for end in ("", "_transposed")]
            self.whole.append((whole, *twins, n))
            for l in range(len(whole)):
                of = row.name.removesuffix("w"), l if row.layers else c.L
                self.weights[of] = SimpleNamespace(
                    twins=[twin if twin is None else twin[l] for twin in twins], number=n + l)
            n += len(whole)
        self.count = n  # the number of tensors of each kind
        self.twins_only, self.calibrated = set(), False
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

    def scale(self, kind, name, l):
        """The scale, (4,), of a tensor, or of a linear layer's WEIGHT."""
        return self.all_scales[kind * self.count + self.weights[name, l].number]

    def next_scales(self, scales, forget=False):
        """Set scales from the largest magnitudes, and forget those; or only forget them."""
        self.launch("next_scales", len(scales), scales, len(scales), forget, self.verdict)

    def cast_weights(self, rescale=False):
        """Make the twins of all weights, which have changed. rescale: first set their scales from
        their present sizes."""
        for measure in (True, False) if rescale else (False,):
            for weight in self.whole:
                self.cast(*weight)
            if measure:
                self.next_scales(self.all_scales[WEIGHT * self.count :])

    def cast_layer(self, l, last):
        """Make the twins of layer l's weights; with the last layer, of the head's, too."""
        for whole, twin, transposed, n in self.whole:
            if len(whole) > 1:
                self.cast(whole[l : l + 1], twin[l : l + 1], transposed[l : l + 1], n + l)
            elif last:
                self.cast(whole, twin, transposed, n)

    def cast(self, whole, twin, transposed, n):
        """Make the twins of a weight's layers. n: the number of the first."""
        layers, R, C = whole.shape
        scales = self.all_scales[WEIGHT * self.count + n :]
        self.launch("weights_to_fp8", layers * tiles(R, C), transposed, twin, whole, scales, R, C)

    def begin_step(self):
        """Forget what validations have left behind."""
        self.ready = None, None, None
        self.next_scales(self.all_scales[: WEIGHT * self.count], forget=True)

    def end_step(self):
        """Set the scales of the next step, and make the new weights' twins."""
        self.next_scales(self.all_scales)
        self.cast_weights()

    # ---- Launches and products

    @contextlib.contextmanager
    def read_by(self, *tensor):
        """Inside, kernels write this tensor, unless its product is in bf16, or there is none."""
        before, self.reader = self.reader, tensor if tensor[1:] in self.weights else None
        try:
            yield
        finally:
            self.reader = before

    def launch(self, name, items, *args, **more):
        """As Cuda.launch. If a product reads what the kernel writes, its first argument, the kernel
        stores the twin too."""
        if name in self.outputs:
            if self.reader:
                self.stored(args[0])
            args = self.with_twin(args[0]), *args[1:]
        super().launch(name, items, *args, **more)

    def with_twin(self, out):
        """The struct Output of an array, 48 bytes by value: four pointers, and the kernel's
        notes."""
        struct, tensor = np.zeros(6, np.uint64), self.reader
        if not (tensor and self.calibrated and tensor[:2] in self.twins_only):
            struct[0] = address_of(out)
        if tensor:
            struct[1:3] = address_of(self.twin), address_of(self.scale(*tensor))
        if self.column_sums is not None:
            struct[3] = address_of(self.column_sums)
        return struct.view("V48")

    def launch_both(self, name, out, across, args):
        """Launch a kernel that makes the twin of out (N,C), plain and transposed, and not out."""
        (N, C), stride = out.shape, across.shape[1]
        self.launch(name, tiles(stride, C), self.twin, across, self.scale(*self.reader), *args, N,
                    C, stride)
        self.stored(out)

    def stored(self, array, twin=None, tensor=None):
        """Kernels have stored the twin of an array: in the buffer, if not given; of this tensor, or
        the one that is written now. Returns the twin."""
        twin = self.twin[: array.size].reshape(array.shape) if twin is None else twin
        self.ready = array, tensor or self.reader, twin
        return twin

    def twin_of(self, array, *tensor):
        """The twin of an array, made now unless the kernel that wrote the array has stored it."""
        of, found, twin = self.ready
        if of is array and found == tensor:
            return twin
        assert not (self.calibrated and tensor[:2] in self.twins_only), "its twin was overwritten"
        super().launch("to_fp8", array.size, array, array.size, self.twin, self.scale(*tensor))
        return self.stored(array, tensor=tensor)

    def factors(self, kind, array, y):
        """(left, right, their scales) of a product of the linear layer y: of an INPUT with w.T, or
        of a GRADIENT with w. Twins, or without scales what they are of."""
        weight = self.weights.get((y.name, y.l))
        twin = weight and self.twin_of(array, kind, y.name, y.l)  # notes the largest magnitude, too
        if not (weight and self.calibrated):
            return array, (y.w.T, y.w)[kind], None
        return twin, weight.twins[kind].T, [self.scale(x, y.name, y.l) for x in (kind, WEIGHT)]

    def matmul(self, out, a, b, bias=None, accumulate=False, gelu=None, dgelu_at=None, scales=None,
               promote=False):
        """As Cuda.matmul. scales: those of a and b, if these are twins. promote: their sums, to
        fp32 on their way."""
        if scales is None:
            super().matmul(out, a, b, bias, accumulate, gelu, dgelu_at)
            return
        self.promote = promote
        self.multiply_twins(out, a, b, [scale[:1] for scale in scales], bias, accumulate)
        self.gelu_of_product(out, gelu, dgelu_at)


class Fp8OnGpu(Fp8):
    """FP8 on a GPU, with cuBLASLt: in front of FastCuda."""
    PRODUCT = FastCuda.PRODUCT | {
        "FAST_ACCUM": (25, ctypes.c_int8),  # sums may have fewer bits
        "A_SCALE_POINTER": (17, ctypes.c_void_p), "B_SCALE_POINTER": (18, ctypes.c_void_p)}

    def multiply_twins(self, out, a, b, scales, bias, accumulate=False):
        """out (I,J) = a (I,K) @ b (K,J) + bias (J), of twins times the inverses of their scales; or
        out += that."""
        of_a, of_b = scales
        epilogue = dict(EPILOGUE=EPILOGUES["DEFAULT" if bias is None else "BIAS"],
                        BIAS_POINTER=pointer(bias), FAST_ACCUM=not self.promote,
                        A_SCALE_POINTER=pointer(of_b), B_SCALE_POINTER=pointer(of_a))
        self.product(out, a, b, accumulate, epilogue)

    def name_of(self, out, a, b, epilogue):
        """As TimedProducts.name_of. What is fastest depends on how sums are made."""
        name = super().name_of(out, a, b, epilogue)
        if "FAST_ACCUM" in epilogue:
            name = *name, a.dtype.str, a.dtype.str, *["promoted"] * self.promote
        return name


class Fp8OnCpu(Fp8):
    """FP8 on a CPU: fp32 products of the twins' numbers."""
    VALUES = e4m3_values()

    def multiply_twins(self, out, a, b, scales, bias, accumulate=False):
        """As Fp8OnGpu.multiply_twins."""
        a, b = self.VALUES[a] * scales[0], self.VALUES[b] * scales[1]
        super(Fp8, self).matmul(out, a, b, bias, accumulate)


def with_fp8(device):
    """The device class with FP8."""
    return stack(device, [Fp8OnCpu if device.name == "cpu" else Fp8OnGpu])


def fp8_device(name, c, plain=False, graph=True, beside=()):
    """As devices.make_device, for FP8. graph=False: it launches kernels one by one."""
    if plain:
        raise UserError(WITHOUT_PLAIN)
    kind = stack(device_class(name), [] if graph else [WithoutGraphs])
    return with_fp8(kind)("fp8", c, (*beside, SUMS, SOURCE))


WITHOUT_PLAIN = ("--dtype fp8 --plain 1: FP8 is there for speed alone: expected --plain 0, or "
                 "--dtype bf16")


# ---- The model and the training


# {a norm: the linear layer that reads its output}
READERS = {"ln1": "qkv", "ln2": "fc", "lnf": "head"}


class Fp8Model:
    """A model on such a device: which tensors its kernels write."""
    of_dqkv = "qkv"  # the linear layer that reads dqkv as attention's kernels leave it
    l = of_hidden = None  # the layer at hand, and the linear layer that reads GELU's output

    @classmethod
    def weights_in_fp8(cls, c):
        """Rows of the weights whose products are in FP8."""
        return fp8_rows(c)

    @classmethod
    def tables(cls, c, device, B, T):
        return super().tables(c, device, B, T) | {
            "fp8": fp8_table(c, B, T, cls.weights_in_fp8(c))}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.device.adopt(self)

    def set_parameters(self, tensors):
        super().set_parameters(tensors)
        self.device.cast_weights(rescale=True)

    def layer_forward(self, l):
        self.l, self.of_hidden = l, "fcproj"
        super().layer_forward(l)

    def layer_backward(self, l):
        self.l, self.of_hidden = l, None  # --recompute does not repeat fcproj's product
        super().layer_backward(l)

    def norm_forward(self, y, branch):
        with self.device.read_by(INPUT, READERS[y.name], y.l):
            super().norm_forward(y, branch)

    def linear_forward(self, out, inp, y, **more):
        with self.device.read_by(INPUT, self.of_hidden, y.l):  # GELU's output
            super().linear_forward(out, inp, y, **more)

    def attention_forward(self, *arrays):
        with self.device.read_by(INPUT, "attproj", self.l):
            super().attention_forward(*arrays)

    def attention_backward(self, *arrays):
        with self.device.read_by(GRADIENT, self.of_dqkv, self.l):
            super().attention_backward(*arrays)

    def linear_backward(self, dinp, dout, inp, y, **more):
        with self.device.read_by(GRADIENT, "fc", y.l):  # the gradient of GELU's input
            super().linear_backward(dinp, dout, inp, y, **more)

    def norm_backward(self, dx, dout, y):
        """The stream's gradient dx goes on to the product whose output the norm has added to x."""
        reader = ("attproj", y.l) if y.name == "ln2" else ("fcproj", y.l - 1)
        with self.device.read_by(GRADIENT, *reader):
            super().norm_backward(dx, dout, y)

    def train_step(self, *batches, **adamw):
        self.begin_step(batches)
        super().train_step(*batches, **adamw)

    def begin_step(self, batches):
        """Before a step of these micro-batches; the first time, measure magnitudes in bf16."""
        device = self.device
        device.begin_step()
        if not device.calibrated:
            self.measure(batches)
            self.end_step()
            device.calibrated = True

    def measure(self, batches):
        """The passes of a step, whose kernels note the largest magnitudes."""
        self.micros = len(batches)
        self.sharing = self.count
        for self.micro, batch in enumerate(batches):
            self.set_batch(batch)
            self.forward_pass()
            self.loss_pass(with_gradient=True)
            self.backward_pass()
        self.micro, self.micros, self.sharing = 0, 1, 1

    def update_pass(self):
        super().update_pass()
        self.end_step()

    def end_step(self):
        self.device.end_step()


class Fp8Products:
    """The products of such a model. They stand below features that skip some, or hand on another
    array."""

    def linear_forward(self, out, inp, y, gelu=None):
        left, right, scales = self.device.factors(INPUT, inp, y)
        self.device.matmul(out, left, right, bias=y.b, gelu=gelu, scales=scales)

    def linear_backward(self, dinp, dout, inp, y, dgelu_at=None):
        self.bias_backward(dout, y)
        self.weight_backward(dout, inp, y)
        left, right, scales = self.device.factors(GRADIENT, dout, y)
        self.device.matmul(dinp, left, right, dgelu_at=dgelu_at, scales=scales)

    def weight_backward(self, dout, inp, y):
        """dw = dout.T @ inp, or += in later micro-batches."""
        self.device.matmul(y.dw, dout.T, inp, accumulate=self.micro > 0)


class Fp8Llama:
    """Llama 3 on such a device. rope_backward changes dqkv, which so gets its twin when its product
    comes."""
    of_dqkv = None

    def hidden_forward(self, y, a):
        with self.device.read_by(INPUT, self.of_hidden, self.l):
            super().hidden_forward(y, a)

    def hidden_backward(self, y, a, dx):
        with self.device.read_by(GRADIENT, "fc", self.l):
            return super().hidden_backward(y, a, dx)


class Fp8Training:
    """A run of such a model, whose state has the scales."""

    def state(self, model):
        return super().state(model) | {"scales": model.device.get_scales()}

    def set_state(self, model, notes):
        super().set_state(model, notes)
        model.device.restore_scales(notes.get("scales", []))


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


class Fp8Sharded:
    """A model with --zero 1. The twins of a layer's weights are made when its parameters have been
    gathered, on the same stream, while the layer below computes."""

    def end_step(self):
        self.device.next_scales(self.device.all_scales)

    def gather_part(self, part):
        super().gather_part(part)
        if part is not None:
            last = part == self.config.L - 1
            self.ranks.via.beside(lambda: self.device.cast_layer(part, last))


def refused(flags):
    """Why flags do not go together, or ""."""
    if flags.fp8 not in (None, "layers") and flags.dtype not in (None, "fp8"):
        return f"--fp8 {flags.fp8} --dtype {flags.dtype}: expected --dtype fp8"
    return WITHOUT_PLAIN if flags.dtype == "fp8" and flags.plain else ""


PRODUCTS = Feature("fp8 products", lambda flags, ranks: flags.dtype == "fp8", Fp8Products)
FEATURE = Feature(
    "fp8", lambda flags, ranks: flags.dtype == "fp8", Fp8Model, Fp8Training,
    lambda flags: Fp8OnGpu if flags.device == "cuda" else Fp8OnCpu, sources=(SUMS, SOURCE), flags=(
        Flag(None, "--dtype", ("fp32", "tf32", "bf16", "fp8"), None, "tf32: fp32, products in "
             "TF32; fp8: bf16, the layers' products in FP8 (default: bf16; on a CPU, and a GPU "
             "before 8.0, fp32)"),
        Flag(None, "--fp8", ("layers", "head", "all"), None, "for --dtype fp8: layers: products of "
             "the layers, but no gradients of weights; head: the head's backward products too; "
             "all: those gradients too (default: all; GPT-2 with --recompute or --dropout: head; "
             "--label-smoothing, --mask: layers)", "the machine", after="--dtype")),
    pairs=(Pair("Llama3", Fp8Llama), Pair("ranks", Fp8Ranked), Pair("zero", Fp8Sharded)),
    refuses=refused,
    state={"scales": (lambda x: x == [] or isinstance(x, list) and numbers(x, (len(x),)),
                      "numbers")})
