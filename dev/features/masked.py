"""Only some tokens count as targets: those that a mask beside the token file names, as the answers
of conversations do (dev/data/chats.py). A target that does not count is -1, as PyTorch's
ignore_index: its loss is 0, and so is its gradient. The loss is the mean over the targets that
count, of all micro-batches and ranks of a step:

    loss = sum of the losses of targets that count / their number

See dev/data/masks.py for the file. With --mask 0 a run takes no notice of masks.

How many targets count is known only after the last micro-batch of the last rank. A recorded graph
cannot change its arguments, so the number is in device memory. Everything up to the update
divides by all tokens of the step, as without a mask; then one kernel multiplies the gradients and
the loss by tokens / number. Whatever comes after it, clipping, outliers and the update, sees the
mean over those that count. If none counts, the step makes no update, and its loss is NaN. See
masked.cu. (A step that is repeated, since it failed or was an outlier, tells norms from before
that kernel.)

A classifier of our own takes the trainer's place: it does not read rows of logits that do not
count. --label-smoothing's leaves them out as well.
"""
import math
from pathlib import Path

import numpy as np

from dev.data.masks import MASK, mask_path, masks_beside, read_mask, row_of
from dev.features.checkpoints.run_json import read_notes
from dev.features.data_loader import FilesLoader
from dev.features.feature import Feature, Flag, kernels_of
from train_gpt2 import Row, UserError

SOURCE = kernels_of(__file__)


def trained_with_masks(checkpoint):
    """Whether the run in whose folder a checkpoint lies had masks. Raises UserError."""
    for path in Path(checkpoint).parent.glob("run_????????.json"):
        mask, *paths = map(read_notes(path, ())["flags"].get, ("mask", "train_data", "val_data"))
        if mask or mask == 0 and masks_beside(*paths):  # 0: they were not used
            return True
    return False


# ---- The model and the training


class MaskedLoader(FilesLoader):
    """A loader whose targets are -1 where they do not count."""

    def open(self, place):
        before = self.path
        super().open(place)
        if self.path != before:
            self.mask = read_mask(self.path, self.tokens)

    def inputs(self):
        masks = map(mask_path, self.paths)
        return [*super().inputs(), *(str(path) for path in masks if path.is_file())]

    def batch(self, i):
        tokens, targets = super().batch(i)
        if self.mask is not None:
            start = i * self.size + self.rank * targets.size + 1
            counts = self.mask[start : start + targets.size].reshape(targets.shape)
            targets = np.where(counts, targets, np.int32(-1))
        return tokens, targets


class Counting:
    """A mixin in front of a device: its classifier knows targets that do not count."""

    def launch(self, name, items, *args, **more):
        """As Cuda.launch."""
        if name == "fused_classifier":  # for which classifier_launch has chosen the room
            logits, *others, room = args
            room = min(room, logits.shape[1])  # of one row
            name, items, args = "counted_classifier", len(logits), (logits, *others, room)
            more = dict(shared=room * logits.itemsize)
        super().launch(name, items, *args, **more)


class Masked:
    """A model some of whose targets are -1. forward() divides by all tokens of its batch:
    MaskedTraining.total_loss makes a mean of several."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        # how many targets of the step count, so far; fp32, which ranks can sum
        return tables | {"update": [*tables["update"], Row("counted", (1,))]}

    def forward_pass(self):
        super().forward_pass()
        targets = self.batch.targets.reshape(-1)
        self.device.launch("count_targets", 1, self.adam.counted, targets, targets.size,
                           self.micro > 0)

    def sum_last(self):
        """With several ranks, their counts become one."""
        super().sum_last()
        self.ranks.via.sum(self.adam.counted)

    def norm_of(self, gradients):
        """Make gradients and loss means over the targets that count, and then the norm."""
        tokens = self.BT[0] * self.BT[1] * self.micros * self.count
        n = gradients.nbytes // 4
        self.device.launch("scale_by_counted", n, gradients, self.adam.verdict, self.adam.counted,
                           tokens, n)
        super().norm_of(gradients)

    def judge(self):
        super().judge()
        self.device.launch("skip_uncounted", 1, self.adam.verdict, self.adam.counted)


class MaskedTraining:
    """A run of such a model."""
    Loader = MaskedLoader

    def choose_model(self):
        flags = self.flags
        self.row = row = max((row_of(path) for path in (flags.train_data, flags.val_data) if path),
                             default=0)
        try:
            super().choose_model()
        except UserError:
            if flags.seq_len or not self.config or row <= self.config.maxT:
                raise
            raise UserError(f"the conversations lie in rows of {row} tokens; expected at most maxT "
                            f"= {self.config.maxT} for this model: prepro_tinyshakespeare.py "
                            f"--chat --row {self.config.maxT} makes such rows") from None
        if row and self.T % row:
            self.say(f"WARNING: -t {self.T}: the conversations lie in rows of {row} tokens: "
                     "some answers lose their prompt; expected a multiple of that")

    def find_length(self):
        return self.flags.seq_len or self.row or super().find_length()

    def settled(self):
        return super().settled() | dict(mask=1)  # --replay and -y 1 may not find the files

    def data_paths(self):
        paths = super().data_paths()
        if not masks_beside(*paths):
            raise UserError(f"--mask 1: {paths[0]} and {paths[1]} have no masks beside them; "
                            f"expected {mask_path(paths[0])}: {MASK.remedy}")
        return paths

    def announce(self):
        super().announce()
        print("targets      | those that the masks beside the data name (--mask 0: all)")

    def total_loss(self, batches):
        """The mean loss over all targets that count, times the number of batches, by which validate
        divides."""
        sizes = []
        counted = []

        def noted():
            for tokens, targets in batches:
                sizes.append(targets.size)
                counted.append(np.count_nonzero(targets >= 0))
                yield tokens, targets

        total = super().total_loss(noted())
        if not sum(counted):
            raise UserError(f"{self.paths[1]}: none of the {sum(sizes):,} targets of a validation "
                            "counts; expected another -j (with a larger --row, if conversations "
                            "were cut), a larger -m, or -v 0")
        return total * sum(sizes) / sum(counted)

    def report(self, queued, verdict):
        if math.isnan(verdict.loss) and not verdict.stopped:
            self.say(f"WARNING: step {queued.number}: no update: none of its targets counts")
        super().report(queued, verdict)


def asked(flags, ranks):
    """--mask, or without it whether there are masks."""
    if flags.mask is None:
        return masks_beside(flags.train_data, flags.val_data)
    return flags.mask


FEATURE = Feature(
    "masked targets", asked, Masked, MaskedTraining, Counting, sources=(SOURCE,), flags=(
        Flag(None, "--mask", "switch", None, "0: count all tokens as targets, even if a mask "
             "beside -i says which do (default: 1 if there is one)", "data and model",
             after="--val-data", must_agree=True),))
