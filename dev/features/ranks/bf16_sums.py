"""--sums bf16: the ranks send the gradients of matrices and embeddings in bf16, half of the bytes.

Micro-batches add up in fp32 as before. When a layer's gradients are complete, a kernel rounds them
to bf16 in an arena of their own, "wire". The ranks sum that, and a second kernel writes the sums to
where AdamW reads fp32. Both run on the collectives' stream, beside the backward pass. The gradients
of biases and norms are few, and stay fp32.

A gradient is rounded on each rank, and its sum once more (NCCL rounds each sum of two). Each
rounding changes it by up to 1/512 of itself. llm.c, too, sends bf16.
"""
from dev.features.feature import Feature, Flag, kernels_of
from train_gpt2 import BF16, carve

SOURCE = kernels_of(__file__)


class Bf16Sums:
    """The model of a rank, a mixin in front of Ranked and Sharded, whose sums get arrays in
    bf16."""

    @classmethod
    def tables(cls, c, device, B, T):
        return super().tables(c, device, B, T) | {"wire": c.parameter_table(BF16)}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.wire = carve(self.arenas["wire"], self.config.parameter_table(BF16))
        self.casts = {}  # {layer: [(kernel, out, inp) before its sums], [the same after them]}
        for part, sums in self.sums.items():
            self.casts[part] = [], []
            self.sums[part] = [(row, *self.in_bf16(part, row, *arrays)) if row.decay
                               else (row, *arrays) for row, *arrays in sums]

    def in_bf16(self, part, row, pieces, own, tail, rest):
        """The arrays in bf16 to be summed in place of these gradients, of a layer of a tensor.
        Notes the casts."""
        wire = getattr(self.wire, row.name)
        layer = (wire[part] if row.layers else wire).reshape(-1)
        pieces16, tail16 = layer[: pieces.size], layer[pieces.size :]
        own16 = rest16 = None
        if own is not None:
            own16 = pieces16 if own is pieces else pieces16[self.rank * own.size :][: own.size]
        if rest is not None:
            rest16 = tail16
        before, after = self.casts[part]
        before += [("gradient_to_wire", *pair) for pair in ((pieces16, pieces), (tail16, tail))]
        after += [("gradient_from_wire", *pair) for pair in ((own, own16), (rest, rest16))]
        return pieces16, own16, tail16, rest16

    def sum_part(self, part):
        self.cast(*self.casts[part][0])
        super().sum_part(part)

    def queue_sums(self):
        parts = self.ready
        super().queue_sums()
        for part in parts:
            self.cast(*self.casts[part][1])

    def cast(self, *casts):
        """Queue casts behind the collectives so far."""
        def work():
            for kernel, out, inp in casts:
                if out is not None and out.size:
                    self.device.launch(kernel, out.size, out, inp, out.size)

        self.ranks.via.beside(work)


FEATURE = Feature(
    "bf16 sums", lambda flags, ranks: ranks and flags.sums == "bf16", Bf16Sums, sources=(SOURCE,),
    flags=(
        Flag(None, "--sums", ("fp32", "bf16"), "fp32", "bf16: ranks send gradients in bf16, half "
             "of the bytes", "several GPUs", after="--zero"),))
