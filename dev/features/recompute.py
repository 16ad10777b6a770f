"""--recompute: the backward pass computes parts of a layer again, so that they need no memory in
between (activation checkpointing, Chen et al. 2016).

A layer keeps what its backward pass reads: see Config.activation_table. What is computed again
needs only one tensor, which all layers share. The same kernels and products compute it from the
same numbers, so the bits are the same; but where a product has applied GELU, level 1 does it with a
kernel, and a last bit may differ.

    1    what is cheap: the outputs of norms, and the MLP's hidden channels after GELU. Three
         launches per layer.
    2    everything except attention's output atty, the residual stream before each layer, and what
         has one number per row (means, lse). All products of the forward pass except fcproj's are
         done again.

Llama 3 has other norms and another MLP, so each level has a small class for it.
"""
import contextlib
from pathlib import Path

from dev.features.declare import Feature, Flag, Pair

SOURCE = Path(__file__).resolve().with_suffix(".cu")
LLAMA_SOURCE = SOURCE.with_name("recompute_llama.cu")


class Shared:
    """All layers share one tensor for each of the activations with these names."""
    SHARED = ()

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        return tables | {"activations": [row._replace(layers=1) if row.name in cls.SHARED else row
                                         for row in tables["activations"]]}


class RecomputeInside(Shared):
    """Level 1."""
    SHARED = "ln1", "ln2", "fch_gelu"

    def layer_backward(self, l):
        p, _, a = self.layers[l]
        self.compute_again(p, a)
        super().layer_backward(l)

    def compute_again(self, p, a):
        (N, C), launch = a.ln1.shape, self.device.launch
        launch("layernorm_again", N * C, a.ln1, a.ln1_inp, a.ln1_mean, a.ln1_rstd, p.ln1w, p.ln1b,
               N, C)
        launch("layernorm_again", N * C, a.ln2, a.ln2_inp, a.ln2_mean, a.ln2_rstd, p.ln2w, p.ln2b,
               N, C)
        launch("gelu_forward", a.fch.size, a.fch_gelu, a.fch, *a.fch.shape)


class LlamaInside:
    """Level 1 for Llama 3, with the product that makes the MLP's hidden channels."""
    SHARED = "ln1", "ln2", "fch", "fch_swiglu"

    def compute_again(self, p, a):
        (N, C), launch = a.ln1.shape, self.device.launch
        launch("rmsnorm_again", N * C, a.ln1, a.ln1_inp, a.ln1_rstd, p.ln1w, N, C)
        launch("rmsnorm_again", N * C, a.ln2, a.ln2_inp, a.ln2_rstd, p.ln2w, N, C)
        self.hidden_forward(p, a)


class RecomputeLayers(Shared):
    """Level 2. The residual stream is L + 1 tensors: x before each layer, and last the one that a
    layer works in. A norm's kernel reads x from one, adds the branch, and writes the sum to the
    other."""
    SHARED = "ln1_inp", "ln1", "qkv", "ln2_inp", "ln2", "fch", "fch_gelu", "fch_swiglu"

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

    def last_norm_forward(self):
        with self.residual(-1):
            super().last_norm_forward()

    def layer_forward(self, l):
        p, _, a = self.layers[l]
        self.before_attention(p, a, self.acts.branch if l else None)
        self.attention_forward(a.atty, a.lse, a.qkv)
        self.after_attention(p, a)
        self.end_of_mlp(p, a)

    def layer_backward(self, l):
        p, _, a = self.layers[l]
        self.before_attention(p, a, None)
        self.after_attention(p, a)
        super().layer_backward(l)

    def before_attention(self, p, a, branch):
        """Up to qkv. branch: what the layer before computed; None if x has it already."""
        self.norm_into(a.residual, self.acts.residual[-1], branch, p.ln1w, p.ln1b, a.ln1,
                       a.ln1_mean, a.ln1_rstd, a.ln1_inp)
        self.device.matmul(a.qkv, a.ln1, p.qkvw.T, bias=p.qkvb)  # (N,C) @ (C,3C) -> (N,3C)

    def after_attention(self, p, a):
        """From atty to the MLP's hidden channels."""
        matmul, branch = self.device.matmul, self.acts.branch
        matmul(branch, a.atty, p.attprojw.T, bias=p.attprojb)  # (N,C) @ (C,C) -> (N,C)
        self.norm_into(self.acts.residual[-1], a.residual, branch, p.ln2w, p.ln2b, a.ln2,
                       a.ln2_mean, a.ln2_rstd, a.ln2_inp)
        matmul(a.fch, a.ln2, p.fcw.T, bias=p.fcb, gelu=a.fch_gelu)  # (N,C) @ (C,4C) -> (N,4C)

    def end_of_mlp(self, p, a):
        """(N,4C) @ (4C,C) -> (N,C)"""
        self.device.matmul(self.acts.branch, a.fch_gelu, p.fcprojw.T, bias=p.fcprojb)

    def norm_into(self, x, before, branch, weight, bias, out, mean, rstd, copy):
        """x = before + branch; with branch None, x stays. Then copy = x and out = layernorm(x)."""
        self.device.launch("residual_layernorm_into", len(out), out, mean, rstd, copy, x, before,
                           branch, weight, bias, len(out))


class LlamaLayers:
    """Level 2 for Llama 3."""

    def before_attention(self, p, a, branch):
        self.norm_into(a.residual, self.acts.residual[-1], branch, p.ln1w, a.ln1, a.ln1_rstd,
                       a.ln1_inp)
        self.device.matmul(a.qkv, a.ln1, p.qkvw.T)  # (N,C) @ (C,QKV) -> (N,QKV)
        self.rope("rope_forward", a.qkv)

    def after_attention(self, p, a):
        branch = self.acts.branch
        self.device.matmul(branch, a.atty, p.attprojw.T)  # (N,C) @ (C,C) -> (N,C)
        self.norm_into(self.acts.residual[-1], a.residual, branch, p.ln2w, a.ln2, a.ln2_rstd,
                       a.ln2_inp)
        self.hidden_forward(p, a)  # (N,C) -> (N,H)

    def end_of_mlp(self, p, a):
        self.device.matmul(self.acts.branch, a.fch_swiglu, p.fcprojw.T)  # (N,H) @ (H,C) -> (N,C)

    def norm_into(self, x, before, branch, weight, out, rstd, copy):
        self.device.launch("residual_rmsnorm_into", len(out), out, rstd, copy, x, before, branch,
                           weight, self.config.eps, len(out))


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
