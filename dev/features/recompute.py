"""--recompute: the backward pass computes parts of a layer again, so that they need no memory in
between (activation checkpointing, Chen et al. 2016).

A layer keeps what its backward pass reads: see Config.activation_table. What is computed again
needs only one tensor, which all layers share. The same kernels and products compute it, in fp32
from the same numbers, so the bits are the same. In bf16 a norm is computed again from the rounded
stream that it has kept, and where a product has applied GELU, level 1 does it with a kernel: a last
bit may differ.

    1    what is cheap: the outputs of norms, and the MLP's hidden channels after GELU. Three
         launches per layer.
    2    everything except attention's output atty, the residual stream before each layer, and what
         has one number per row (means, lse). All products of the forward pass except fcproj's are
         done again.

Llama 3 has other norms and another MLP, so each level has a small class for it.
"""
import contextlib

from dev.features.base import SharedLayers
from dev.features.feature import Feature, Flag, Pair, kernels_of

SOURCE = kernels_of(__file__)
LLAMA_SOURCE = SOURCE.with_name("recompute_llama.cu")


class RecomputeInside(SharedLayers):
    """Level 1."""
    SHARED = "ln1", "ln2", "fch_gelu"

    def layer_backward(self, l):
        self.compute_again(*self.layers[l])
        super().layer_backward(l)

    def compute_again(self, y, a):
        self.norm_again("layernorm_again", y.ln1, y.ln1.mean, y.ln1.rstd, y.ln1.w, y.ln1.b)
        self.norm_again("layernorm_again", y.ln2, y.ln2.mean, y.ln2.rstd, y.ln2.w, y.ln2.b)
        self.device.launch("gelu_forward", a.fch.size, a.fch_gelu, a.fch, *a.fch.shape)

    def norm_again(self, kernel, y, *kept):
        """The output of the norm y, from what it has kept."""
        self.device.launch(kernel, y.out.size, y.out, y.inp, *kept, *y.out.shape)


class LlamaInside:
    """Level 1 for Llama 3, with the product that makes the MLP's hidden channels."""
    SHARED = "ln1", "ln2", "fch", "fch_swiglu"

    def compute_again(self, y, a):
        self.norm_again("rmsnorm_again", y.ln1, y.ln1.rstd, y.ln1.w)
        self.norm_again("rmsnorm_again", y.ln2, y.ln2.rstd, y.ln2.w)
        self.hidden_forward(y, a)


class RecomputeLayers(SharedLayers):
    """Level 2: before a layer's backward pass comes its forward pass again, without attention, of
    which atty and lse are kept, and without the last product, whose result nobody would read.

    The residual stream is L + 1 tensors: x before each layer, and last the one that a layer works
    in. A norm's kernel reads x from one, adds the branch, and writes the sum to the other."""
    SHARED = "ln1_inp", "ln1", "qkv", "ln2_inp", "ln2", "fch", "fch_gelu", "fch_swiglu"
    again = False  # whether a layer's forward pass comes again

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        return tables | {"activations": [row._replace(layers=c.L + 1) if row.name == "residual"
                                         else row for row in tables["activations"]]}

    @contextlib.contextmanager
    def residual(self, l):
        """Inside, the residual stream is tensor l only, as without --recompute 2."""
        acts, all_of_them = self.acts, self.acts.residual
        acts.residual = all_of_them[l]
        try:
            yield
        finally:
            acts.residual = all_of_them

    def embedding_forward(self):
        with self.residual(0):
            super().embedding_forward()

    def layer_backward(self, l):
        self.again = True
        super().layer_forward(l)  # not the gathering of --zero 1 in front of it
        self.again = False
        super().layer_backward(l)

    def attention_forward(self, *arrays):
        if not self.again:
            super().attention_forward(*arrays)

    def linear_forward(self, out, inp, y, **more):
        if not (self.again and y.name == "fcproj"):
            super().linear_forward(out, inp, y, **more)

    def norm_forward(self, y, branch):
        """As the model's, between two tensors: ln1 works on x before the layer, which has the sum
        already if the layer comes again; ln2 leaves its sum in the last."""
        if y.name == "lnf":
            with self.residual(-1):
                return super().norm_forward(y, branch)
        before, last = self.acts.residual[y.l], self.acts.residual[-1]
        if y.name == "ln1":
            self.norm_into(before, last, None if self.again else branch, y)
        else:
            self.norm_into(last, before, branch, y)

    def norm_into(self, x, before, branch, y):
        """x = before + branch; with branch None, x stays. Then inp = x and out = layernorm(x)."""
        self.device.launch("residual_layernorm_into", len(y.out), y.out, y.mean, y.rstd, y.inp, x,
                           before, branch, y.w, y.b, len(y.out))


class LlamaLayers:
    """Level 2 for Llama 3."""

    def norm_into(self, x, before, branch, y):
        self.device.launch("residual_rmsnorm_into", len(y.out), y.out, y.rstd, y.inp, x, before,
                           branch, y.w, self.config.eps, len(y.out))


class RecomputeHint:
    """If a model does not fit, name the batch that would with --recompute 2."""

    def smaller(self, config, device, B, T, fits):
        least = type("Least", (RecomputeLayers, type(self)), {})
        *_, fits = least.memory(config, device, B, T)
        return f", with --recompute 2 {fits}" + super().smaller(config, device, B, T, fits)


INSIDE = Feature(
    "recompute 1", lambda flags, ranks: flags.recompute == 1, RecomputeInside, sources=(SOURCE,),
    flags=(
        Flag(None, "--recompute", "level", 0, "1: compute norms and the inside of the MLP again in "
             "the backward pass: less memory, slower; 2: all of a layer except attention: least "
             "memory, slowest", "less memory"),),
    pairs=(Pair("Llama3", LlamaInside),))
LAYERS = Feature("recompute 2", lambda flags, ranks: flags.recompute == 2, RecomputeLayers,
                 sources=(SOURCE,), pairs=(Pair("Llama3", LlamaLayers, sources=(LLAMA_SOURCE,)),))
HINT = Feature("hint", lambda flags, ranks: flags.recompute != 2, RecomputeHint)
