"""Train Llama 3 from raw kernels.

    python -m dev.llama3.train_llama3    # a small one, from scratch, on the bytes of Shakespeare

or, from Meta's weights and in Llama's tokens,

    python -m dev.tools.convert meta-llama/Llama-3.2-1B llama3.2_1B.bin
    python -m dev.llama3.tokens --tokenizer tokenizer.json --input book.txt
    python -m dev.llama3.train_llama3 -e llama3.2_1B.bin -i data/book_llama/book_llama_train.bin

Read train_gpt2.py first: devices, loop, update, files and flags come from there. This file has what
differs in Llama 3 (Grattafiori et al. 2024, section 3.2). Its kernels are in llama3.cu.

    RMSNorm          Rows are divided by their root mean square; no mean is subtracted, and there
                     is no bias.
    no biases        Linear layers have none either.
    RoPE             A token's position is not an embedding. It rotates pairs of channels of the
                     queries and keys.
    grouped queries  The NH heads of queries share NKV heads of keys and values.
    SwiGLU           The MLP makes two products of its input, up and gate. Its hidden channels are
                     up * silu(gate).
    the head         Large models have a separate weight for the logits, lm_head. Small ones use
                     wte.

More letters: NKV, heads of keys and values; QKV, the channels of a token's queries, keys and
values; H, hidden channels of the MLP.
"""
import dataclasses
import math
import os
import re
from pathlib import Path

import numpy as np

from dev.common.config import Config, draw_parameters, padded, read_parameters, sizes_of
from dev.common.files import checked_header, paths_of
from dev.common.program import run_main
from dev.features.base import GPT2
from dev.features.tokenizer import encoding_of_model, words_of_model
from dev.llama3.tokens import BEGIN_ID, LLAMA_TOKENS, encoding, tokenizer_here, vocabulary
from train_gpt2 import (BF16, EOT, HEADER_BYTES, PARTIAL_ROWS, FileKind, Row, UserError, ceil_div,
                        check_size, launch_attention, logit_rows, make_header, matrices, to_float,
                        whole_shape)

HERE = Path(__file__).resolve().parent

# ---- The model: its sizes, and tables of all that it keeps in memory

META = {  # Meta's models, by their descriptors
    "llama3.1:8B": dict(L=32, NH=32, NKV=8, C=4096, ffn_multiplier=1.3, scaled=1, minor=1,
                        tied=False),
    "llama3.2:3B": dict(L=28, NH=24, NKV=8, C=3072, ffn_multiplier=1.0, scaled=32),
    "llama3.2:1B": dict(L=16, NH=32, NKV=8, C=2048, ffn_multiplier=1.4, scaled=32),
}


def whole_numbers_only(header):
    """Whether a checkpoint's header is that of llm.c's master, which has more fields than that of
    its branch llama3."""
    return header[14] != 0


@dataclasses.dataclass(frozen=True)
class Config3(Config):
    """A Llama 3: its sizes, and the tables of its tensors. Vp follows from V: memory is padded, and
    files are not."""
    maxT: int = 8192  # in the header of a checkpoint; RoPE has positions for any T
    NKV: int = 4
    multiple_of: int = 256  # H is rounded up to a multiple of this
    ffn_multiplier: float = 1.0
    eps: float = 1e-5  # under RMSNorm's root
    theta: float = 500000.0  # larger: RoPE's slow pairs of channels turn more slowly
    scaled: int = 0  # 1: RoPE's slow pairs are 8 times slower, as in Llama 3.1; n > 1: n times
    minor: int = 2  # Llama 3.1 or 3.2
    tied: bool = True  # the head's weight is wte

    FILE = FileKind("Llama 3 checkpoint", 20240803, (3, 5), "dev/tools/convert.py makes one from "
                    "Hugging Face's files")
    TOKEN_FILES = {**Config.TOKEN_FILES, LLAMA_TOKENS: np.dtype("<u4")}
    SOURCES = (*Config.SOURCES, HERE / "llama3.cu")
    MODELS = ("llama3.2_1B.bin", "llama3:d12")
    DESCRIPTORS = f"{', '.join(META)}, or llama3:d12 and the like"
    SIZES = {"LxNHxC": "6x6x384", "LxNHxNKVxC": "6x6x2x384"}  # of one's own
    PADDED = ("wte", "lm_head")
    EOT = property(lambda self: BEGIN_ID if self.has_llamas_words else EOT)

    def __post_init__(self):
        object.__setattr__(self, "Vp", padded(self.V))

    @property
    def H(self):
        """The MLP's hidden channels: two thirds of GPT-2's 4C, times ffn_multiplier, rounded up.
        With two thirds, its three matrices have as many weights as GPT-2's two."""
        hidden = int(self.ffn_multiplier * int(2 * 4 * self.C / 3))
        return -(-hidden // self.multiple_of) * self.multiple_of

    @property
    def factor(self):
        """How many times slower RoPE's slow pairs are."""
        return {0: 1, 1: 8}.get(self.scaled, self.scaled)

    @property
    def QKV(self):
        """The channels of a token's queries, keys and values."""
        return (self.NH + 2 * self.NKV) * (self.C // self.NH)

    @property
    def has_llamas_words(self):
        """Whether the vocabulary is Llama 3's, not GPT-2's."""
        return self.V > BEGIN_ID

    @classmethod
    def from_descriptor(cls, descriptor):
        """The config of one of META; or, for "llama3:dN" or "dN", a tied model with the sizes and
        words of GPT-2 of depth N; or one of any sizes, see SIZES. Key-value heads divide the heads
        and are at most a third of them, if they are not given. Raises UserError."""
        if descriptor in META:
            return cls(V=128256, multiple_of=1024, **META[descriptor])
        name = descriptor.removeprefix("llama3:")
        sizes = sizes_of(name, cls.SIZES)
        if sizes:
            L, NH, *given, C = sizes
        elif re.fullmatch(r"d[1-9]\d{0,2}", name):
            c = Config.from_descriptor(name)
            L, NH, given, C = c.L, c.NH, [], c.C
        else:
            raise UserError(f"-e {descriptor}: expected a checkpoint, or {cls.DESCRIPTORS}, or "
                            f"sizes such as {' or '.join(cls.SIZES.values())}")
        NKV = max(n for n in range(1, 1 + max(1, NH // 3)) if NH % n == 0)
        c = cls(L=L, NH=NH, C=C, NKV=given[0] if given else NKV)
        c.check(f"-e {descriptor}")
        return c

    @classmethod
    def from_file(cls, path):
        """The config of a checkpoint. Checks its sizes, and that its biases are zeros. It is tied
        if its head equals its embeddings. There are two formats: llm.c's branch llama3 has a second
        header of floats; its master truncates each float to a whole number, and eps is taken to be
        Llama's. Raises UserError."""
        header = checked_header(path, cls.FILE)
        maxT, V, L, NH, NKV, C = header[2:8]
        cut_off = whole_numbers_only(header)
        if cut_off:
            multiplier, multiple_of, eps, theta, scaled = header[8:13]
            major, minor = header[14:16]
            eps = eps or cls.eps
        else:
            multiple_of, scaled, major, minor = header[8:12]
            floats = np.fromfile(path, "<f4", 256, offset=HEADER_BYTES)
            if floats.size < 256:
                raise UserError(f"{path}: truncated within its second header: {cls.FILE.remedy}")
            # as text: 1.3, not fp32's 1.29999995
            multiplier, eps, theta = (float(str(x)) for x in floats[:3])
        c = cls(maxT=maxT, V=V, L=L, NH=NH, C=C, NKV=NKV, multiple_of=multiple_of,
                ffn_multiplier=multiplier, eps=eps, theta=theta, scaled=scaled, minor=minor,
                tied=False)
        c.check(path)
        if major != 3:
            raise UserError(f"{path}: a Llama {major}.{minor}; expected a Llama 3")
        expected = HEADER_BYTES * (1 if cut_off else 2) + sum(
            row.nbytes for row in c.file_table(cls.STORED[header[1]], header))
        if cut_off and Path(path).stat().st_size > expected:
            raise UserError(f"{path}: its header says ffn_dim_multiplier = {multiplier}, and its "
                            "weights are more: it was cut off; expected the format of llm.c's "
                            "branch llama3, as dev/tools/convert.py writes it")
        check_size(path, cls.FILE, expected)
        tensors = dict(read_parameters(path, c))
        for name, values in tensors.items():
            if name.endswith("b") and to_float(values).any():
                raise UserError(f"{path}: {name} is not zero; expected a Llama 3, whose linear "
                                "layers have no biases")
        tied = np.array_equal(tensors["wte"], tensors["lm_head"])
        return dataclasses.replace(c, tied=tied)

    def check(self, path):
        HS = self.C // max(1, self.NH)
        has_mlp = self.multiple_of > 0 and 0 < self.ffn_multiplier < 100
        super().check(path)
        for ok, wish in (
            (self.NKV > 0 and self.NH % self.NKV == 0, "NH to be divisible by NKV"),
            (HS % 2 == 0, "heads of an even number of channels, which RoPE turns in pairs"),
            (has_mlp and self.H % 8 == 0,
             "H, by ffn_multiplier and multiple_of, to be a multiple of 8"),
            (self.C <= 8192, "C of at most 8,192"),
            (0 <= self.scaled < 2**16, "a scaling of RoPE from 0 to 65,535"),
            (0 < self.eps < 1 and 1 < self.theta < math.inf,
             "eps between 0 and 1, and a theta above 1")):
            if not ok:
                raise UserError(f"{path}: {self}; expected {wish}")

    def words(self):
        """{token id: its bytes}; for Llama's words, from the tokenizer in the current folder; {} if
        they are not known."""
        return vocabulary() if self.has_llamas_words else words_of_model(self.V)

    def encoding(self):
        """The encoding of texts. Raises UserError if it is not known."""
        if not self.has_llamas_words:
            return encoding_of_model(self.V)
        if not tokenizer_here():
            raise UserError(f"the model has V = {self.V:,} words of Llama 3: expected its "
                            "tokenizer.json or tokenizer.model in this folder, or an empty text")
        return encoding()

    def headers(self, version):
        floats = np.zeros(256, "<f4")
        floats[:3] = self.ffn_multiplier, self.eps, self.theta
        return [make_header(self.FILE.magic, version, self.maxT, self.V, self.L, self.NH, self.NKV,
                            self.C, self.multiple_of, self.scaled, 3, self.minor), floats]

    def read_parameters(self, path):
        """(name, values) of a checkpoint's tensors, mapped into memory as stored."""
        header = checked_header(path, self.FILE)
        table = self.file_table(self.STORED[header[1]], header)
        start = os.path.getsize(path) - sum(row.nbytes for row in table)
        for row in table:
            yield row.name, np.memmap(path, row.dtype, "r", start, whole_shape(row))
            start += row.nbytes

    def checkpoint_parts(self, params, real):
        """A checkpoint: its headers, then the tensors."""
        yield from self.headers(5 if real == BF16 else 3)
        yield from self.file_parts(params, real)

    def switches(self):
        """As Config.switches; GROUP query heads share a head of keys and values."""
        return [*super().switches(), f"-DGROUP={self.NH // self.NKV}"]

    def file_table(self, real=np.float32, header=None):
        """The tensors of a checkpoint, named as in memory. llm.c's branch has GPT-2's biases, which
        are zeros, and up and gate in one tensor; its master has no biases, and two tensors. The
        vocabulary is not padded."""
        each, C, H = dict(dtype=real, layers=self.L), self.C, self.H
        words, final = (self.V, C), Row("lnfw", (C,), real)
        if header and whole_numbers_only(header):
            return [
                Row("wte", words, real), Row("ln1w", (C,), **each),
                Row("qkvw", (self.QKV, C), **each), Row("attprojw", (C, C), **each),
                Row("ln2w", (C,), **each), Row("upw", (H, C), **each), Row("gatew", (H, C), **each),
                Row("fcprojw", (C, H), **each), final, Row("lm_head", words, real)]
        table = [Row("wte", words, real), Row("lm_head", words, real)]
        for name, *shape in (("ln1", C), ("qkv", self.QKV, C), ("attproj", C, C), ("ln2", C),
                             ("fc", 2 * H, C), ("fcproj", C, H)):
            table += [Row(f"{name}w", tuple(shape), **each),
                      Row(f"{name}b", tuple(shape[:1]), **each)]
        return [*table, final, Row("lnfb", (C,), real)]

    def file_parts(self, views, real=np.float32):
        """As Config.file_parts, without padding, and with zeros for tensors that are not
        parameters."""
        for row in self.file_table(real):
            absent = np.zeros(0 if hasattr(views, row.name) else row.size, row.dtype)
            parts = matrices(getattr(views, row.name, absent))
            yield from (part.reshape(-1)[: row.size // len(parts)] for part in parts)

    def parameter_table(self, real=np.float32):
        """The parameters, as they lie in memory. They start as GPT-2's do."""
        C, H, once, each = self.C, self.H, dict(dtype=real), dict(dtype=real, layers=self.L)
        weight = dict(std=0.02, decay=True)
        residual = weight | dict(std=0.02 / math.sqrt(2 * self.L))
        head = [] if self.tied else [Row("lm_head", (self.Vp, C), **once, **weight)]
        return [
            Row("wte", (self.Vp, C), **once, **weight),
            *head,  # turns channels into logits
            Row("ln1w", (C,), **each, mean=1.0),
            Row("qkvw", (self.QKV, C), **each, **weight),
            Row("attprojw", (C, C), **each, **residual),
            Row("ln2w", (C,), **each, mean=1.0),
            Row("fcw", (2 * H, C), **each, **weight),  # up, and below it gate
            Row("fcprojw", (C, H), **each, **residual),  # down
            Row("lnfw", (C,), **once, mean=1.0),
        ]

    def activation_table(self, B, T, real=np.float32):
        """What the forward pass leaves behind for the backward pass."""
        N, C, H, each = B * T, self.C, self.H, dict(dtype=real, layers=self.L)
        return [
            Row("rope", (T, C // self.NH)),  # the cosine and sine that rotate a pair of channels
            Row("residual", (N, C)),  # the residual stream x, always fp32
            Row("branch", (N, C), real),  # what attention or the MLP computed, to be added to x
            Row("ln1_inp", (N, C), **each),  # what ln1 normalises: a copy of x
            Row("ln1_rstd", (N,), layers=self.L),
            Row("ln1", (N, C), **each),
            Row("qkv", (N, self.QKV), **each),  # queries and keys, after RoPE, and values
            Row("lse", (B * self.NH, T), layers=self.L),  # log2 of each softmax's denominator
            Row("atty", (N, C), **each),  # attention's output
            Row("ln2_inp", (N, C), **each),  # a copy of x after attention
            Row("ln2_rstd", (N,), layers=self.L),
            Row("ln2", (N, C), **each),
            Row("fch", (N, 2 * H), **each),  # up and gate, H channels each
            Row("fch_swiglu", (N, H), **each),  # up * silu(gate); becomes its own gradient
            Row("lnf_inp", (N, C), real),  # a copy of x after the last layer
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
            Row("dqkv", (N, self.QKV), real),
            Row("delta", (B * self.NH, T)),  # of attention: the sum over keys of weight * dweight
            Row("partials", (PARTIAL_ROWS, C)),  # sums of rows: see norm_backward
        ]


# ---- The model


def rmsnorm_backward_launch(device, N):
    """(blocks, bytes of shared memory): at most two blocks per multiprocessor; see the kernel."""
    return min(N, 2 * device.multiprocessors, PARTIAL_ROWS), min(96 * 1024, device.max_shared)


class Llama3Training:
    """The run of such a model."""

    def find_model(self):
        file, descriptor = Config3.MODELS
        return self.flags.model or (file if os.path.isfile(file) else descriptor)

    def find_config(self):
        return self.Model.Config.from_file(self.name)

    def check_length(self):
        """RoPE has positions for any T."""

    def data_paths(self):
        """As Training.data_paths. Also refuses a damaged tokenizer, before the first sample needs
        it."""
        paths = super().data_paths()
        if self.config.has_llamas_words:
            vocabulary()
            header = checked_header(paths_of(paths[0])[0], *self.config.TOKEN_FILES)
            if header[0] != LLAMA_TOKENS.magic:
                print(f"WARNING: {paths[0]} has GPT-2's tokens, and the model Llama's words, for "
                      "which dev/llama3/tokens.py writes token files")
        return paths

    def first_parameters(self):
        c = self.config
        return c.read_parameters(self.name) if self.from_file else draw_parameters(
            c, self.flags.seed)


class Llama3(GPT2):
    """Llama 3 on a device: GPT2 with other layers, another beginning and another end."""
    Config = Config3
    Training = Llama3Training

    def __init__(self, config, *args, **keywords):
        super().__init__(config, *args, **keywords)
        self.head = self.head._replace(w=self.params.lm_head, dw=self.grads.lm_head)

    def views(self, arena):
        """As GPT2's; of parameters with the names that tensors have in files too."""
        views, H = super().views(arena), self.config.H
        if hasattr(views, "fcw"):
            views.lm_head = views.wte if self.config.tied else views.lm_head
            views.upw, views.gatew = views.fcw[:, :H], views.fcw[:, H:]
        return views

    def set_tensors(self, tensors, kept):
        """As GPT2's. Skips tensors of a file that are not parameters."""
        super().set_tensors((pair for pair in tensors if hasattr(kept[0], pair[0])), kept)

    def layer_forward(self, l):
        """Layer l: x = x + attention(ln1(x)), then x = x + mlp(ln2(x)), which the next layer's ln1,
        or lnf, adds."""
        y, a = self.layers[l]
        branch = self.acts.branch
        added = branch if l else None  # what the MLP of the layer before computed
        self.norm_forward(y.ln1, added)  # (N,C)
        self.linear_forward(a.qkv, a.ln1, y.qkv)  # (N,C) -> (N,QKV)
        self.rope("rope_forward", a.qkv)  # queries and keys get their positions
        self.attention_forward(a.atty, a.lse, a.qkv)  # (N,QKV) -> (N,C)
        self.linear_forward(branch, a.atty, y.attproj)  # (N,C) -> (N,C)

        self.norm_forward(y.ln2, branch)  # (N,C)
        self.hidden_forward(y, a)  # (N,C) -> (N,H)
        self.linear_forward(branch, a.fch_swiglu, y.fcproj)  # (N,H) -> (N,C)

    def bias_backward(self, dout, y):
        """There are no biases."""

    def hidden_forward(self, y, a):
        """The MLP's hidden channels, up * silu(gate)."""
        N, H = a.fch_swiglu.shape
        self.linear_forward(a.fch, a.ln2, y.fc)  # (N,C) -> (N,2H)
        self.device.launch("swiglu_forward", N * H, a.fch_swiglu, a.fch, N, H)  # -> (N,H)

    def hidden_backward(self, y, a, dx):
        """The gradient of up and gate (N,2H), given dx (N,C), that of the MLP's output."""
        N, H = a.fch_swiglu.shape
        dswiglu = a.fch_swiglu  # read before it is written
        self.linear_backward(dswiglu, dx, a.fch_swiglu, y.fcproj)  # (N,C) -> (N,H)
        dfch = a.fch  # becomes its own gradient: (N,H) -> (N,2H)
        self.device.launch("swiglu_backward", N * H, dfch, dswiglu, a.fch, N, H)
        return dfch

    def layer_backward(self, l):
        """layer_forward(l) from its last line to its first: see GPT2.layer_backward."""
        y, a = self.layers[l]
        dx = self.back.dresidual
        dqkv = self.back.dqkv
        dln2 = datty = dln1 = self.back.dinp  # one buffer in turn
        dfch = self.hidden_backward(y, a, dx)  # (N,C) -> (N,2H)
        self.linear_backward(dln2, dfch, a.ln2, y.fc)  # (N,2H) -> (N,C)
        self.norm_backward(dx, dln2, y.ln2)

        self.linear_backward(datty, dx, a.atty, y.attproj)  # (N,C) -> (N,C)
        self.attention_backward(dqkv, datty, a.atty, a.lse, a.qkv)  # (N,C) -> (N,QKV)
        self.rope("rope_backward", dqkv)  # of queries and keys, in place
        self.linear_backward(dln1, dqkv, a.ln1, y.qkv)  # (N,QKV) -> (N,C)
        self.norm_backward(dx, dln1, y.ln1)

    def norm_forward(self, y, branch):
        """x += branch, unless that is None. Then inp = x and out = rmsnorm(x) of the norm y."""
        x = self.acts.residual
        N = len(y.out)
        self.device.launch("residual_rmsnorm_forward", N, y.out, y.rstd, y.inp, x, branch, y.w,
                           self.config.eps, N)

    def norm_backward(self, dx, dout, y):
        """Add the gradient of the norm's input to dx, given dout, that of its output. Makes dw."""
        N, C = y.inp.shape
        partials = self.back.partials
        blocks, shared = rmsnorm_backward_launch(self.device, N)
        launch = self.device.launch
        launch("rmsnorm_backward", blocks, dx, partials, dout, y.inp, y.w, y.rstd, N, shared=shared)
        launch("add_partials", (C, 1), y.dw, None, partials, blocks, C, self.micro > 0)

    def attention_backward(self, dqkv, dout, out, lse, qkv):
        """As GPT2.attention_backward, with fewer heads of keys and values."""
        (B, T), c, delta = self.BT, self.config, self.back.delta
        launch_attention(self, "attention_backward_q", dqkv, delta, lse, out, qkv, dout)
        sizes = self.device.attention_sizes
        blocks = B * c.NKV * ceil_div(T, sizes.rows)
        self.device.launch("attention_backward_kv", blocks, dqkv, delta, lse, qkv, dout,
                           (c.C // c.NH) ** -0.5, T, c.NH, threads=sizes.threads,
                           shared=sizes.shared_backward)

    def rope(self, kernel, qkv):
        """Rotate the queries and keys of qkv (N,QKV), or rotate their gradients back. The two
        channels of a pair are neighbours, as in a checkpoint; Hugging Face's are not, so
        dev/tools/convert.py reorders them."""
        c, N, half = self.config, len(qkv), 0
        heads = c.NH + c.NKV
        self.device.launch(kernel, N * heads * (c.C // c.NH), qkv, self.acts.rope, N, self.BT[1],
                           heads, c.QKV, half)

    def embedding_forward(self):
        """The stream begins: x = wte[token]. RoPE's table is computed for this T, which takes
        microseconds."""
        c, (_, T), a, x = self.config, self.BT, self.acts, self.acts.residual
        self.device.launch("rope_table", a.rope.size // 2, a.rope, c.theta, c.factor, T)  # (T,HS)
        self.device.launch("encoder_forward", x.size, x, self.batch.tokens, self.params.wte, None,
                           len(x), T, c.C)

    def embedding_backward(self):
        """Add to the gradient of wte: if tied to what the head has set, else to zeros."""
        (B, T), C, b = self.BT, self.config.C, self.batch
        if self.micro == 0 and not self.config.tied:
            self.device.zero(self.grads.wte)
        self.device.launch("encoder_backward_wte", (B * T, C), self.grads.wte, self.back.dresidual,
                           b.tokens, b.order, b.runs, B * T, C)


def main(arguments=None):
    """Train as the arguments say."""
    from dev.features import order
    return order.main(arguments, Llama3)


if __name__ == "__main__":
    run_main(main)
