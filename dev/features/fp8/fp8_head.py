"""--fp8 head: the head's two products of the backward pass, too, take 8-bit numbers.

    dlnf = dlogits @ wte      twins of dlogits and of the transposed wte
    dwte = dlogits.T @ lnf    twins of the transposed dlogits and of the transposed lnf

dlogits and lnf are transposed from their plain twins, tile by tile (transpose_fp8).

The logits stay in bf16. With 8-bit lnf and wte each logit gets noise of a few percent, and the
softmax takes its exponential.

The classifier stores dlogits as a twin at once, which halves its bytes. Since dlogits is dloss *
(softmax - 1 at the target), its scale is known: dloss becomes 448. The smallest number of e4m3 is
2**18 times smaller. Rounded to nearest, a probability below 2e-6 would become 0, and its logit
would not be pushed down any more. Many words soon are as rare as that, and together they would keep
1% of each row. So small numbers are rounded up or down at random such that the mean is right
(dither). In e5m2 they would fit, but the gradients would be less exact, as dev/tests/test_fp8.py
shows: errors come from the mantissa of large probabilities. dev/RESULTS.md has the losses with
8-bit logits, without them, and with the dither.

dlnf sums over all words, and dwte over thousands of tokens. A few large terms dominate such sums,
and beside them Hopper's 14 bits would lose the many small ones: a tenth of dlnf (see
dev/RESULTS.md). So they are promoted to fp32 on their way.
"""
from dev.features.feature import Feature
from dev.features.fp8.fp8 import GRADIENT, INPUT, WEIGHT, WHOLE, padded, transposed
from train_gpt2 import Row, carve, classifier_launch, logit_rows

import numpy as np


class Fp8Head:
    """A model with an FP8 device, whose head has its backward pass in FP8 too."""

    @classmethod
    def weights_in_fp8(cls, c):
        head = [Row("head", (c.Vp, c.C))] if c.Vp % WHOLE == 0 else []
        return [*super().weights_in_fp8(c), *head]

    @classmethod
    def tables(cls, c, device, B, T):
        tables, rows = super().tables(c, device, B, T), logit_rows(B * T)
        return tables | {"fp8": [*tables["fp8"], Row("dlogits", (rows, c.Vp), np.uint8),
                                 Row("lnf_transposed", (c.C, padded(rows)), np.uint8)]}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        table = self.tables(self.config, self.device, self.B, self.T)["fp8"]
        views = carve(self.arenas["fp8"], table)
        self.dlogits8, self.lnf_transposed = views.dlogits, views.lnf_transposed
        self.head8 = self.device.weights.get(("head", self.config.L))

    def in_fp8(self):
        """Whether dlnf and dwte are FP8 products. Transposed dlogits need the memory of 8 rows."""
        return self.head8 and self.device.calibrated and len(self.acts.logits) >= WHOLE // 2

    def scale8(self, kind):
        return self.device.scale(kind, self.head.name, self.head.l)

    def loss_forward(self, rows, logits, with_gradient=False):
        """With a gradient, that goes to dlogits8, and the logits stay."""
        if not (with_gradient and self.in_fp8()):
            super().loss_forward(rows, logits, with_gradient)
            return
        c, a, N = self.config, self.acts, len(logits)
        blocks, room, shared = classifier_launch(self.device, N, c.Vp, with_gradient)
        targets, dloss = self.batch.targets.reshape(-1)[rows], self.token_weight()
        self.device.launch("classifier_to_fp8", blocks, self.dlogits8[:N], self.scale8(GRADIENT),
                           a.losses[rows], logits, targets, dloss, N, c.V, c.Vp, room,
                           shared=shared)

    def head_backward(self, rows, dlogits):
        """As GPT2.head_backward. The logits' memory is free now: it gets transposed dlogits."""
        if self.head8:  # also in the first step, in bf16, to measure the scale of lnf
            lnf = self.device.twin_of(self.lnf.out, INPUT, self.head.name, self.head.l)[rows]
        if not self.in_fp8():
            super().head_backward(rows, dlogits)
            return
        matmul, adds = self.device.matmul, self.micro > 0 or rows.start > 0
        _, wte_transposed = self.head8.twins
        dlogits = self.dlogits8[: len(dlogits)]
        dlogits_transposed = transposed(self.device, self.acts.logits.view(np.uint8), dlogits)
        lnf_transposed = transposed(self.device, self.lnf_transposed, lnf)
        of_lnf, of_dlogits, of_wte = map(self.scale8, (INPUT, GRADIENT, WEIGHT))
        matmul(self.back.dinp[rows], dlogits, wte_transposed.T,
               scales=(of_dlogits, of_wte), promote=True)  # (rows,Vp) @ (Vp,C) -> (rows,C)
        matmul(self.head.dw, dlogits_transposed, lnf_transposed.T, accumulate=adds,
               scales=(of_dlogits, of_lnf), promote=True)  # (Vp,rows) @ (rows,C) -> (Vp,C)


FEATURE = Feature(
    "fp8 head", lambda flags, ranks: flags.dtype == "fp8" and flags.fp8 != "layers", Fp8Head,
    excludes={"label smoothing": "--fp8 head or all with --label-smoothing: the classifier for FP8 "
                                 "has no smoothing: expected --fp8 layers",
              "masked targets": "--fp8 head or all with a mask beside the data (--mask): the "
                                "classifier for FP8 knows no targets that do not count: expected "
                                "--fp8 layers"})
