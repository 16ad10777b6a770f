"""Mistakes in exercises on attention, forward and backward."""
from functools import partial

import numpy as np

from dev.lab.formulas import transposed
from dev.lab.heads import join, split
from dev.lab.mistakes.common import exp32, largest, nought, of, whole
from dev.lab.mistakes.indices import MODULO, modulo



def seen(T, mask=np.tri):
    return mask(T).astype(bool)


def strictly(T):
    return np.tri(T, k=-1)


def everything(T):
    return np.ones((T, T))


def softmax32(score, top=largest):
    e = exp32(score - top(score))
    return e / whole(e)


def relu(score):
    return np.maximum(score, 0)


def groups(a, head=None):
    """q, k, v (B,NH,T,HS): each query head with its key and value head."""
    q, k, v = split(a.qkv, a.NH, a.NKV)
    of_head = head(np.arange(a.NH), a) if head else np.arange(a.NH) // (a.NH // a.NKV)
    return q, k[:, of_head], v[:, of_head]


def attend(a, weights=softmax32, mask=np.tri, scale=None, head=None, values=lambda k, v: v):
    q, k, v = groups(a, head)
    score = np.where(seen(a.T, mask), (a.scale if scale is None else scale) * q @ transposed(k),
                     -np.inf)
    return dict(out=join(weights(score) @ values(k, v)))


def exponentials(score):
    return exp32(score - largest(score))


def only_last(score):
    return exponentials(score) / exp32(np.diagonal(score, axis1=-2,
                                                   axis2=-1)[..., None] - largest(score))


CAUSAL = [("a query does not see its own key: s goes up to t, so write s <= t",
           dict(mask=strictly)),
          ("every query sees all keys; it must stop at its own: s <= t", dict(mask=everything)),
          ("scale is left out", dict(scale=1)),
          ("all heads use the keys and values of head 0", dict(head=lambda h, a: h * 0))]
KEYS = ("the keys stand where the values should: v lies behind k", dict(values=lambda k, v: k))
ATTENTION = of(
    attend, *CAUSAL, KEYS, ("the weights are not divided by their sum", dict(weights=exponentials)),
    ("e^x is infinite in fp32 from x = 89 on. Subtract the largest score of the query before exp",
     dict(weights=partial(softmax32, top=nought))),
    ("the sum of the exponentials has only its last term. Write += and not =",
     dict(weights=only_last)))


def relu_attend(a, **pieces):
    return attend(a, **{"weights": relu, **pieces})


RELU_ATTENTION = of(
    relu_attend, *CAUSAL, KEYS,
    ("max(0, score) is missing", dict(weights=lambda score: np.where(np.isfinite(score), score,
                                                                     0))),
    ("this is softmax: here a weight is max(0, score)", dict(weights=softmax32)))


def scores(a, scale=None, key=lambda q, k, v: k, query=lambda q, k, v: q):
    q, k, v = split(a.qkv, a.NH, a.NH)
    score = (a.scale if scale is None else scale) * query(q, k, v) @ transposed(key(q, k, v))
    return dict(att=np.where(seen(a.T), score, a.truth["att"]))


SCORES = of(
    scores, ("scale is left out", dict(scale=1)),
    ("the values stand where the keys should: k lies right behind q", dict(key=lambda q, k, v: v)),
    ("q and k are exchanged: row t of att belongs to query t",
     dict(query=lambda q, k, v: k, key=lambda q, k, v: q)),
    ("all heads use the keys of head 0", dict(key=lambda q, k, v: k[:, :1])))


def attention_gradient(a, mask=np.tri, delta=1, scale=None,
                       weight=lambda score, lse: exp32(score - lse * np.log(2)),
                       score_scale=None, head=None, only=(), q_terms=lambda dscore, k: dscore @ k):
    q, k, v = groups(a, head)
    dout, out = a.dout.swapaxes(1, 2), a.out.swapaxes(1, 2)
    score = (a.scale if score_scale is None else score_scale) * q @ transposed(k)
    att = np.where(seen(a.T, mask), weight(score, a.lse[..., None]), 0)
    average_of = delta * (dout * out).sum(-1, keepdims=True)
    dscore = (a.scale if scale is None else scale) * att * (dout @ transposed(v) - average_of)
    two = []
    for each in (transposed(dscore) @ q, transposed(att) @ dout):
        total = np.zeros((a.B, a.NKV, a.T, a.HS))
        of_head = head(np.arange(a.NH), a) if head else np.arange(a.NH) // (a.NH // a.NKV)
        for h in range(a.NH):
            total[:, of_head[h]] += each[:, h]
        two.append(total)
    return dict(dqkv=join(q_terms(dscore, k), *two))


ATTENTION_GRADIENT = of(
    attention_gradient, *CAUSAL[:1], ("scale is left out of dscore", dict(scale=1)),
    ("scale is left out of the score", dict(score_scale=1)),
    ("delta, the sum of dout * out, is not subtracted", dict(delta=0)),
    ("delta is added instead of subtracted", dict(delta=-1)),
    ("lse is a logarithm to base 2: use exp2f, and multiply the score by LOG2_E",
     dict(weight=lambda score, lse: exp32(score - lse))),
    ("the score is not multiplied by LOG2_E",
     dict(weight=lambda score, lse: np.exp2(np.float32(score - lse)).astype(float))),
    ("dq has the term of the last key alone: write += and not =",
     dict(q_terms=lambda dscore, k: np.diagonal(dscore, axis1=-2, axis2=-1)[..., None] * k)))
GROUPED = (MODULO, dict(head=modulo))
