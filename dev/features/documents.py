"""--document-mask 1: attention stays within a document, so that those in a row do not see each
other. It is the default of new runs whose data has a mask, where a row holds several conversations.

A document begins where a row does, and at each <|endoftext|> that does not end an answer. (An
answer's end counts as a target, and the next token does not: see dev/data/chats.py.) So prepro's
texts are documents, too, and each token that pads a row is one.

A kernel finds the bounds of each token's document. kernels.cu is compiled with documents.cuh:
attention hides the keys of other documents, and skips tiles that have no others; the shorter the
documents, the faster it is. On Hopper the two chapters that replace attention's kernels are off.
GPT-2's positions begin again with each document, as in a sample, since that gave small models a
lower loss (RoPE knows distances alone). A sample is one document, whatever it says.
"""
import numpy as np

from dev.features import masked
from dev.features.devices import address_of
from dev.features.feature import Feature, Flag, header_switches, kernels_of
from train_gpt2 import Row

SOURCE = kernels_of(__file__)
SIGHT = SOURCE.with_suffix(".cuh")  # in place of three functions of kernels.cu


class SeesDocuments:
    """A mixin in front of a device: attention stays within a document."""

    def switches(self):
        return [*super().switches(), *header_switches("SIGHT", SIGHT)]

    def launch(self, name, items, *args, **more):
        """As Cuda.launch. Attention's kernels read document_bounds, which find_documents sets; on a
        CPU attention's loops get the address from here."""
        if name == "find_documents" and self.name == "cpu":
            self.documents.value = address_of(args[0])
        super().launch(name, items, *args, **more)


class Documents:
    """A model in which a token sees those of its own document."""
    whole = False  # whether each row is one document

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        bounds = Row("bounds", (B, 2, T), np.int32)  # of each token's document: begin, end
        return tables | {"activations": [*tables["activations"], bounds]}

    def forward_pass(self):
        batch, c = self.batch, self.config
        N = batch.tokens.size
        eot = -1 if self.whole else min(c.EOT, c.V - 1)
        self.device.launch("find_documents", N, self.acts.bounds, batch.tokens, batch.targets, N,
                           self.BT[1], eot)
        super().forward_pass()

    def next_logits(self, tokens):
        """As GPT2.next_logits."""
        self.whole = True
        try:
            return super().next_logits(tokens)
        finally:
            self.whole = False


class Positions:
    """A GPT-2 whose positions begin again with each document."""

    def embedding_forward(self):
        """As GPT2.embedding_forward."""
        p, x = self.params, self.acts.residual
        (N, C), T = x.shape, self.BT[1]
        self.device.launch("encoder_forward", N * C, x, self.batch.tokens, p.wte, None, N, T, C)
        self.device.launch("add_positions", N * C, x, p.wpe, self.acts.bounds, N, T, C)

    def embedding_backward(self):
        """As GPT2.embedding_backward."""
        (B, T), g, dx, batch = self.BT, self.grads, self.back.dresidual, self.batch
        N, C = dx.shape
        self.device.launch("encoder_backward_wte", (N, C), g.wte, dx, batch.tokens, batch.order,
                           batch.runs, N, C)
        self.device.launch("add_position_gradients", g.wpe.size, g.wpe, dx, self.acts.bounds, B, T,
                           len(g.wpe), C, self.micro > 0)


class DocumentTraining:
    """A run of such a model."""

    def open_data(self):
        super().open_data()
        if self.vocabulary:  # of ids, the last one would begin documents
            self.vocabulary.check_text("--document-mask 1", "expected --document-mask 0")

    def settled(self):
        return super().settled() | dict(document_mask=1)  # --replay and -y 1 may not find the files

    def announce(self):
        super().announce()
        print("documents    | a token sees those of its own (--document-mask 0: of its row)")


def asked(flags, ranks):
    """--document-mask, or without it whether there are masks."""
    return masked.asked(flags, ranks) if flags.document_mask is None else flags.document_mask


FEATURE = Feature(
    "documents", asked, Documents, DocumentTraining, SeesDocuments, sources=(SOURCE,), flags=(
        Flag(None, "--document-mask", "switch", None, "1: a token sees only those of its own "
             "document, and not all of its row (default: 1 if --mask is)", "data and model",
             after="--mask", of_older=0),))
POSITIONS = Feature("positions of documents", asked, Positions, only="GPT2")
