"""The usual mistakes of each exercise, each with the numbers that come of it.

If a student's numbers are those of the formula without eps, then eps is missing. So a Mistake has a
sentence, and a function that computes the wrong numbers; causes.py compares. Where rounding decides
the numbers, it has the places that the mistake makes wrong.

The functions get the problem, a: its sizes, its inputs in float64, and a.truth {output: numbers}.
They return {output: numbers} for the outputs that the mistake changes. A mistake in a formula is one
of its pieces replaced: layernorm(a, rstd=lambda v: v**-0.5) has no eps.
"""
from dev.lab.mistakes.small import GROUP_SCALE, PREFIX_SUM, ROW_SUM, SHIFT, TRANSPOSE
from dev.lab.mistakes.attention import (
    ATTENTION, ATTENTION_GRADIENT, GROUPED, RELU_ATTENTION, SCORES, attend, attention_gradient)
from dev.lab.mistakes.common import of, parts
from dev.lab.mistakes.indices import (
    EMBEDDING, EMBEDDING_GRADIENT, REPEATED, SUMMED, TABLE, permutation, turns)
from dev.lab.mistakes.numbers import ADAMW_STEP, GELU, GELU_GRADIENT, RESIDUAL, SWIGLU, SWIGLU_GRADIENT
from dev.lab.mistakes.rows import (
    CLASSIFIER, FUSED, LAYERNORM_GRADIENT, LOSS, LOSS_GRADIENT, NORM_OF, PRODUCT, RMSNORM,
    RMSNORM_GRADIENT,
    SOFTMAX, column_sums, layernorm, layernorm_mistakes)

MISTAKES = dict(
    shift=SHIFT, row_sum=ROW_SUM, transpose=TRANSPOSE, group_scale=GROUP_SCALE, prefix_sum=PREFIX_SUM,
    residual_forward=RESIDUAL, gelu_forward=GELU, swiglu_forward=SWIGLU, encoder_forward=EMBEDDING,
    permute=permutation((2, 0, 3, 1, 4), ("t and h are exchanged", (2, 0, 1, 3, 4)),
                        ("b and which are exchanged: out is (3,B,NH,T,HS)", (0, 2, 3, 1, 4))),
    unpermute=permutation((0, 2, 1, 3)), repeat_kv_forward=REPEATED, gelu_backward=GELU_GRADIENT,
    swiglu_backward=SWIGLU_GRADIENT, crossentropy_softmax_backward=LOSS_GRADIENT, rope_table=TABLE,
    rope_forward=turns("qkv", 1, "backward"), rope_backward=turns("dqkv", -1, "forward"),
    adamw=ADAMW_STEP,
    matmul_backward_bias=parts(column_sums, "the sum over rows"), softmax_forward=SOFTMAX,
    rmsnorm_forward=RMSNORM, layernorm_forward=layernorm_mistakes(layernorm),
    fused_residual_forward=FUSED,
    crossentropy_forward=LOSS, classifier_fused=CLASSIFIER, global_norm=NORM_OF,
    matmul_forward=PRODUCT,
    repeat_kv_backward=SUMMED, encoder_backward=EMBEDDING_GRADIENT,
    rmsnorm_backward=RMSNORM_GRADIENT,
    layernorm_backward=LAYERNORM_GRADIENT, relu_attention_forward=RELU_ATTENTION,
    trimat_forward=SCORES,
    attention_forward=ATTENTION, gqa_forward=[*ATTENTION, *of(attend, GROUPED)],
    attention_backward=ATTENTION_GRADIENT, gqa_backward=[*ATTENTION_GRADIENT,
                                                         *of(attention_gradient, GROUPED)])
