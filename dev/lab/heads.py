"""Heads of attention: the inputs, truths, sizes and launches that the kernels of attention
share."""
import numpy as np

from dev.lab.formulas import attention, attention_weights, causal, dattention, transposed
from dev.lab.ladder import f32, in_parts
from dev.lab.mistakes import exp32, largest, whole
from train_gpt2 import UserError

# Sizes for every version: a single token, tiles that are not full, and tiles of several kinds.
HEADS = ("B=1,T=1,NH=1,HS=64", "B=2,T=33,NH=3,HS=64", "B=1,T=130,NH=2,HS=64")
LONG_HEADS = (*HEADS, "B=1,T=150,NH=2,HS=128")
GROUPS = ("B=1,T=1,NH=1,NKV=1,HS=64", "B=2,T=33,NH=6,NKV=2,HS=64", "B=1,T=130,NH=4,NKV=1,HS=64",
          "B=1,T=70,NH=3,NKV=3,HS=64")
LONG_GROUPS = (*GROUPS, "B=1,T=150,NH=4,NKV=2,HS=128")
# For the trainer's version only: heads of odd sizes, and more of them than SECTION in kernels.cu.
ODD_HEADS = ("B=1,T=40,NH=2,HS=32", "B=1,T=64,NH=3,HS=32", "B=2,T=70,NH=33,HS=32",
             "B=1,T=300,NH=2,HS=64",
             "B=1,T=150,NH=5,HS=72", "B=1,T=130,NH=4,HS=100")
# Of ReLU, which is compiled for each.
SOME_HEADS = (*LONG_HEADS, "B=2,T=70,NH=33,HS=32", "B=1,T=150,NH=5,HS=72")
ODD_GROUPS = ("B=3,T=5,NH=44,NKV=22,HS=3", "B=2,T=27,NH=8,NKV=1,HS=6", "B=1,T=40,NH=2,NKV=1,HS=32",
              "B=1,T=260,NH=2,NKV=1,HS=128")


SOME_GROUPS = (GROUPS[1], LONG_GROUPS[-1], ODD_GROUPS[1])

# Attention in fp32 on a GPU is sums that tensor cores truncate: 1e-5 for a head of 128 channels. In
# tf32 and bf16 weights are rounded on the way.
ATTENTION_LIMITS = dict(fp32=2e-5, tf32=5e-4, bf16=3e-3)
# Its weights are added up in fp32, before they are rounded.
LSE_LIMITS = dict(fp32=2e-5, tf32=5e-4, bf16=2e-5)
# Why the trainer's attention is below its ceiling: see Version.held_back.
FORWARD_GAP = {
    "tf32": "mma.sync has 60% of wgmma's rate, and the threads load and round all that it "
            "multiplies",
    "bf16": "a tile's second product waits for its exponentials, which alone take some 13 us, and "
            "four blocks overlap only a part"}
BACKWARD_GAP = {
    "fp32": "it does seven products where five are counted",
    "tf32": "seven products for the five that are counted, by mma.sync, from operands that threads "
    "load and round, two blocks a multiprocessor",
    "bf16": "it does seven products where five are counted, exponentials lie between them, and "
    "registers allow only three or four blocks"}


def pairs_seen(a):
    """The number of pairs of a query and a key that it sees."""
    return a.B * a.NH * a.T * (a.T + 1) // 2


def split(x, NH, NKV):
    """q (B,NH,T,HS), and k and v (B,NKV,T,HS), of x (B,T,NH+2NKV,HS)."""
    x = x.swapaxes(1, 2)
    return x[:, :NH], x[:, NH : NH + NKV], x[:, NH + NKV :]


def join(*heads):
    """x (B,T,heads,HS) of heads (B,..,T,HS)."""
    return np.concatenate(heads, 1).swapaxes(1, 2)


def draw_heads(draw, B, T, NH, NKV, HS, coarse=False):
    """qkv (B,T,NH+2NKV,HS) and dout (B,T,NH,HS), of two kinds that alternate between groups of
    heads.

    The first has scores of up to some hundreds: its queries are 2^-3 to 2^3 times as large as
    normal numbers, its keys are 4 times as large, and its values a quarter, so that dq, dk and dv
    are alike in size. All of its numbers have few bits, sixteenths before that, and are exact in
    each dtype, since an exponential multiplies the error of a large score. The second has small
    scores, its queries being 2^-3 to 1 times as large, and all bits of its numbers count. With
    coarse, all groups are of the first kind. Raises UserError.
    """
    if NH % NKV:
        raise UserError(f"expected NKV = {NKV} to divide NH = {NH}")
    first = (np.arange(NKV) + np.arange(B)[:, None]) % 2 == 0
    group = (first | coarse)[:, None, :, None]  # (B,1,NKV,1)
    head = group.repeat(NH // NKV, 2)
    qkv, dout = (np.where(kind, np.round(16 * x) / 16, draw.real(x)) for kind, x in (
        (np.concatenate([head, group, group], 2), draw.normal(B, T, NH + 2 * NKV, HS)),
        (head, draw.normal(B, T, NH, HS))))
    qkv[:, :, :NH] *= 2.0 ** draw.rng.integers(-3, np.where(head, 4, 1), (B, T, NH, 1))
    qkv[:, :, NH : NH + NKV] *= np.where(group, 4, 1)
    qkv[:, :, NH + NKV :] /= np.where(group, 4, 1)
    return qkv, dout


def forward_of(kind, q, k, v):
    """out, and lse, log2 of the sum that normalises a row (...,T)."""
    score = causal(q @ transposed(k) / np.sqrt(q.shape[-1]))
    return attention(kind, q, k, v), np.logaddexp.reduce(score, -1) / np.log(2)


def size_of(a, b):
    """The root of the sum of the squares of the terms of each element of a @ b."""
    return np.sqrt(a**2 @ b**2)


def by_heads(f, q, k, v, *more):
    """f of each head, (1,T,HS), with the key and value of its group. Returns a list of
    (B,NH,...)."""
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    arrays = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *more))
    return [x.reshape(*q.shape[:2], *x.shape[1:]) for x in in_parts(f, *arrays, step=1)]


def sizes_of(B, T, NH, NKV, HS, relu):
    return dict(NKV=NKV, N=B * T, scale=HS**-0.5, relu=relu)


def forward_problem(draw, B, T, NH, NKV, HS, relu=0, with_lse=0):
    """Attention from qkv; with relu, max(0, score) in place of softmax; with_lse, lse is an output
    too."""
    kind = "relu" if relu else "softmax"
    qkv, _ = draw_heads(draw, B, T, NH, NKV, HS)
    out, lse = by_heads(lambda *x: forward_of(kind, *x), *split(qkv, NH, NKV))
    truth = dict(out=join(out), lse=lse) if with_lse else dict(out=join(out))
    # lse is a logarithm: its error is that of its argument and of the score that was subtracted.

    def sizes(q, k, v):
        if relu:  # a score near 0 has the error of any other, and may change its sign
            return (size_of(np.tri(T) * HS**-0.5 * size_of(q, transposed(k)), v),)
        return (size_of(attention_weights(kind, HS**-0.5 * q @ transposed(k)), v),)

    terms = dict(out=join(*by_heads(sizes, *split(qkv, NH, NKV))), lse=1 + abs(lse))
    return dict(sizes_of(B, T, NH, NKV, HS, relu), with_lse=with_lse, qkv=qkv), truth, terms


def backward_problem(draw, B, T, NH, NKV, HS, relu=0, cold=0):
    """The gradients of attention. out is slightly wrong, or dscore would be 0 with T = 1. With relu
    all scores are exact in each dtype, or one near 0 could change its sign. With cold all scores of
    the last query are so low that a weight would be infinite if a kernel took padding for a
    query."""
    kind = "relu" if relu else "softmax"
    qkv, dout = draw_heads(draw, B, T, NH, NKV, HS, coarse=bool(relu))
    if cold:
        qkv[:, :, NH : NH + NKV], qkv[:, -1, :NH] = draw.real(qkv[:, :, NH : NH + NKV] / 2 - 4), 4
    dout_heads, heads = dout.swapaxes(1, 2), split(qkv, NH, NKV)
    out, lse = by_heads(lambda *x: forward_of(kind, *x), *heads)
    out = draw.real(out + draw.normal(*out.shape) / 20)

    def gradients(q, k, v, dout, out):
        delta, scale = (dout * out).sum(-1, keepdims=True), HS**-0.5
        att = attention_weights(kind, scale * q @ transposed(k))
        # The size of the terms of dscore, and of its products: dout v' and delta nearly cancel.
        size = np.where(att > 0, size_of(dout, transposed(v)), 0) if relu else att * (
            size_of(dout, transposed(v)) + abs(delta))
        terms = (scale * size_of(size, k), scale * size_of(transposed(size), q),
                 size_of(transposed(att), dout))
        return *dattention(kind, dout, q, k, v, delta), *terms

    dq, dk, dv, *terms = by_heads(gradients, *heads, dout_heads, out)
    dk, dv, *terms[1:] = (x.reshape(B, NKV, NH // NKV, T, HS).sum(2) for x in (dk, dv, *terms[1:]))
    inputs = dict(sizes_of(B, T, NH, NKV, HS, relu), qkv=qkv, dout=dout, out=join(out),
                  lse=f32(lse))
    return inputs, dict(dqkv=join(dq, dk, dv)), dict(dqkv=join(*terms))


def launch_trainers(device, a, kernel, heads, shared, *arrays, tiled):
    """Launch an attention kernel of kernels.cu as the trainer does. tiled: the arrays that it reads
    in tiles."""
    blocks = a.B * heads * -(-a.T // device.attention_sizes.rows)
    device.launch(kernel, blocks, *arrays, *(x.reshape(a.B * a.T, -1) for x in tiled), a.scale, a.T,
                  a.NH, threads=device.attention_sizes.threads, shared=shared)


def trainers_forward(device, a):
    shared = device.attention_sizes.shared_forward
    launch_trainers(device, a, "attention_forward", a.NH, shared, a.out, a.lse, tiled=(a.qkv,))


def trainers_backward_q(device, a):
    shared = device.attention_sizes.shared_backward
    launch_trainers(device, a, "attention_backward_q", a.NH, shared, a.dqkv, a.delta, a.lse, a.out,
                    tiled=(a.qkv, a.dout))


def trainers_backward_kv(device, a):
    shared = device.attention_sizes.shared_backward
    launch_trainers(device, a, "attention_backward_kv", a.NKV, shared, a.dqkv, a.delta, a.lse,
                    tiled=(a.qkv, a.dout))


def trainers_backward(device, a):
    trainers_backward_q(device, a)
    trainers_backward_kv(device, a)


def lse_scratch(a):
    """lse, unless it is an output."""
    return {} if a.with_lse else dict(lse=(a.B, a.NH, a.T))


def delta_scratch(a):
    return dict(delta=(a.B, a.NH, a.T))


def plain_softmax(a):
    """Whether the lab's own versions can do a problem."""
    return not (a.relu or getattr(a, "with_lse", 0))


def torch_heads(x):
    """q, k and v (B,heads,T,HS) as PyTorch wants them."""
    return [t.transpose(1, 2) for t in x.qkv.split([x.NH, x.NKV, x.NKV], 2)]


def torch_attention(torch, x, q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=x.NKV < x.NH)


def torch_forward(torch, x):
    q, k, v = torch_heads(x)
    return lambda: torch_attention(torch, x, q, k, v)


def torch_backward(torch, x):
    q, k, v = (t.detach().requires_grad_() for t in torch_heads(x))
    out = torch_attention(torch, x, q, k, v)
    dout = x.dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


# ---- What exercises on attention share: notes of their files, formulas, and usual mistakes

QKV = dict(qkv="B,T,3,NH,HS", dqkv="B,T,3,NH,HS", scale="1/sqrt(HS)")
# Of one head, with q, k, v (T,HS).
ONE_HEAD = "In NumPy, for the q, k and v (T,HS) of one head"
ATTEND = (ONE_HEAD, "    score = scale * q @ k.T  # (T,T), row t for query t; -inf where s > t",
          "    out = softmax(score) @ v")
GRADIENT = (ONE_HEAD + ", and its out, dout and lse (T,1)",
            "    delta = (dout * out).sum(-1)                             # (T,1)",
            "    weight = exp2(LOG2_E * scale * q @ k.T - lse)            # (T,T); 0 where s > t",
            "    dscore = scale * weight * (dout @ v.T - delta)           # (T,T)",
            "    dq, dk, dv = dscore @ k, dscore.T @ q, weight.T @ dout")


def attend(a):
    q, k, v = split(a.qkv, a.NH, a.NKV)
    head = np.arange(a.NH) // (a.NH // a.NKV)
    score = np.where(np.tri(a.T) > 0, a.scale * q @ transposed(k[:, head]), -np.inf)
    e = exp32(score - largest(score))
    return dict(out=join(e / whole(e) @ v[:, head]))


CAUSAL = (
    ("a query does not see its own key: s goes up to t, so write s <= t", "np.tri(a.T)",
     "np.tri(a.T, k=-1)"),
    ("every query sees all keys; it must stop at its own: s <= t", "np.tri(a.T)",
     "np.ones((a.T, a.T))"),
    ("scale is left out", "a.scale * ", ""),
    ("all heads use the keys and values of head 0", "// (a.NH // a.NKV)", "* 0"),
    ("the keys stand where the values should: v lies behind k", "v[:, head]", "k[:, head]"))
ATTENTION_MISTAKES = (
    *CAUSAL,
    ("the weights are not divided by their sum", " / whole(e)", ""),
    ("e^x is infinite in fp32 from x = 89 on. Subtract the largest score of the query before exp",
     " - largest(score)", ""),
    ("the sum of the exponentials has only its last term. Write += and not =", "whole(e)",
     "np.diagonal(e, axis1=2, axis2=3)[..., None]"))


def attend_backward(a):
    q, k, v = split(a.qkv, a.NH, a.NKV)
    head = np.arange(a.NH) // (a.NH // a.NKV)
    dout, out = a.dout.swapaxes(1, 2), a.out.swapaxes(1, 2)
    score = a.scale * q @ transposed(k[:, head])
    weight = exp32(score - a.lse[..., None] * np.log(2))
    weight = np.where(np.tri(a.T) > 0, weight, 0)
    delta = (dout * out).sum(-1, keepdims=True)
    dscore = a.scale * weight * (dout @ transposed(v[:, head]) - delta)
    dk, dv = np.zeros(k.shape), np.zeros(k.shape)
    np.add.at(dk, np.s_[:, head], transposed(dscore) @ q)
    np.add.at(dv, np.s_[:, head], transposed(weight) @ dout)
    return dict(dqkv=join(dscore @ k[:, head], dk, dv))


GRADIENT_MISTAKES = (
    CAUSAL[0],
    ("scale is left out of dscore", "a.scale * weight", "weight"),
    ("scale is left out of the score", "a.scale * q", "q"),
    ("delta, the sum of dout * out, is not subtracted", " - delta", ""),
    ("delta is added instead of subtracted", "- delta", "+ delta"),
    ("lse is a logarithm to base 2: use exp2f, and multiply the score by LOG2_E", " * np.log(2)",
     ""),
    ("the score is not multiplied by LOG2_E", "exp32(score - a.lse[..., None] * np.log(2))",
     "np.exp2(np.float32(score - a.lse[..., None])).astype(float)"),
    ("dq has the term of the last key alone: write += and not =", "dscore @ k",
     "np.diagonal(dscore, axis1=2, axis2=3)[..., None] * k"))
