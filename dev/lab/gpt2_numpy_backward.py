"""GPT-2's backward pass in NumPy. Read it after gpt2_numpy.py, whose functions have their
gradients here. train_gpt2.py does the same fast, and reuses memory.

Names: dx is the gradient of the loss with respect to x, and has its shape. Most functions f(x)
there have a df(dout, x) here: given dout, the gradient of what f returned, it returns the gradient
of x, and those of the parameters. The tests compare the gradients with PyTorch's.
"""
from types import SimpleNamespace

import numpy as np

from dev.lab.gpt2_numpy import (
    attention, block, causal, gelu, layernorm, linear, mean_loss, sigmoid, softmax)


# out[t,o] = the sum over c of x[t,c] * w[o,c]. So x[t,c] has a part in each out[t,o], by w[o,c],
# and w[o,c] in the out of each token, by x[t,c]. The bias is added to each token.
def dlinear(dout, x, w):  # (T,OC), (T,C), (OC,C)
    return dout @ w, dout.T @ x, dout.sum(0)  # (T,C), (OC,C), (OC)


# gelu(x) = x * g with a gate g = sigmoid(u). The product rule; sigmoid's derivative is g * (1 - g).
def dgelu(dout, x):
    s = np.sqrt(8 / np.pi)
    g = sigmoid(s * (x + 0.044715 * x**3))
    return dout * (g + x * g * (1 - g) * s * (1 + 3 * 0.044715 * x**2))


# out = norm * weight + bias, with norm = (x - mean) / deviation. If a constant is added to all of a
# row, or if the row is scaled, norm stays as it is. So dx has no part in these two directions, (1,
# 1, ..) and norm itself: both are subtracted. Each has the square length C, hence the means. (With
# 1e-5 under the root scaling changes norm a little, but the formula is exact: it is norm's own
# derivative.)
def dlayernorm(dout, x, weight):  # (T,C), (T,C), (C)
    norm, dnorm = layernorm(x, 1, 0), dout * weight
    across, along = dnorm.mean(-1, keepdims=True), (dnorm * norm).mean(-1, keepdims=True)  # (T,1)
    dx = (dnorm - across - norm * along) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return dx, (dout * norm).sum(0), dout.sum(0)  # (T,C), (C), (C)


# A weight grows with its own score, and shrinks with the others: d weight[j] / d score[i] is
# weight[j] * ((i == j) - weight[i]). Summed over j, that is weight[i] * (dout[i] - D), where D is
# the mean of dout, weighted. (FlashAttention has no room for weights. It finds D elsewhere: see
# below.)
def dsoftmax(dout, weights):
    D = (weights * dout).sum(-1, keepdims=True)
    return weights * (dout - D)


# heads = weights @ v and scores = q @ k.T are products of two inputs, and each has a gradient as in
# dlinear. D of a query is also the sum over channels of heads * dheads: both are
# sum over s and c of weights[t,s] * v[s,c] * dheads[t,c].
def dattention(dout, qkv, NH):  # (T,C), (T,3C) -> (T,3C)
    T, scale = len(qkv), np.sqrt(qkv.shape[-1] // 3 // NH)
    q, k, v = qkv.reshape(T, 3, NH, -1).transpose(1, 2, 0, 3)  # (NH,T,HS) three times
    weights = softmax(causal(q @ k.swapaxes(1, 2) / scale))  # (NH,T,T)
    dheads = dout.reshape(T, NH, -1).swapaxes(0, 1)  # (T,C) -> (NH,T,HS)
    dv = weights.swapaxes(1, 2) @ dheads  # (NH,T,HS)
    dscores = dsoftmax(dheads @ v.swapaxes(1, 2), weights) / scale  # 0 where the mask is
    dq, dk = dscores @ k, dscores.swapaxes(1, 2) @ q  # (NH,T,HS) twice
    return np.stack([dq, dk, dv]).transpose(2, 0, 1, 3).reshape(T, -1)  # -> (T,3C)


# The loss is log(sum of e^logit) - the target's logit. The derivative of the first is softmax, that
# of the second 1 at the target. So the loss falls if the target's logit rises and likely others
# fall.
def dmean_loss(targets, logits):  # (T), (T,V) -> (T,V)
    return (softmax(logits) - (np.arange(logits.shape[-1]) == targets[:, None])) / len(targets)


# block, from its last line to its first; its inner values are computed again. dx arrives from the
# layer above. Where the stream was added to, dx goes on unchanged, and into the branch as well;
# where a branch was taken from it, what the branch returns is added to dx.
def dblock(dx, x, p, g, l, NH):  # (T,C), (T,C) -> (T,C)
    ln1 = layernorm(x, p.ln1w[l], p.ln1b[l])
    qkv = linear(ln1, p.qkvw[l], p.qkvb[l])
    atty = attention(qkv, NH)
    middle = x + linear(atty, p.attprojw[l], p.attprojb[l])
    ln2 = layernorm(middle, p.ln2w[l], p.ln2b[l])
    fch = linear(ln2, p.fcw[l], p.fcb[l])

    dgelu_out, g.fcprojw[l], g.fcprojb[l] = dlinear(dx, gelu(fch), p.fcprojw[l])  # (T,4C)
    dfch = dgelu(dgelu_out, fch)  # (T,4C)
    dln2, g.fcw[l], g.fcb[l] = dlinear(dfch, ln2, p.fcw[l])  # (T,C)
    dbranch, g.ln2w[l], g.ln2b[l] = dlayernorm(dln2, middle, p.ln2w[l])  # (T,C)
    dx = dx + dbranch

    datty, g.attprojw[l], g.attprojb[l] = dlinear(dx, atty, p.attprojw[l])  # (T,C)
    dqkv = dattention(datty, qkv, NH)  # (T,3C)
    dln1, g.qkvw[l], g.qkvb[l] = dlinear(dqkv, ln1, p.qkvw[l])  # (T,C)
    dbranch, g.ln1w[l], g.ln1b[l] = dlayernorm(dln1, x, p.ln1w[l])  # (T,C)
    return dx + dbranch


# The loss of a sequence, and its gradient for each parameter: forward, which keeps x before each
# layer, then backward.
def loss_and_gradients(p, tokens, targets, NH):
    g = SimpleNamespace(**{name: np.zeros(np.shape(x)) for name, x in vars(p).items()})
    stream = [np.float64(p.wte[tokens]) + p.wpe[: len(tokens)]]  # (T,C)
    for l in range(len(p.ln1w)):
        stream.append(block(stream[-1], p, l, NH))
    lnf = layernorm(stream[-1], p.lnfw, p.lnfb)  # (T,C)
    logits = lnf @ p.wte.T  # (T,V)

    dlogits = dmean_loss(targets, logits)  # (T,V)
    dlnf, g.wte, _ = dlinear(dlogits, lnf, p.wte)  # (T,C), (V,C)
    dx, g.lnfw, g.lnfb = dlayernorm(dlnf, stream[-1], p.lnfw)  # (T,C)
    for l in reversed(range(len(p.ln1w))):
        dx = dblock(dx, stream[l], p, g, l, NH)
    # a word that comes twice gets the sum; wte has one from dlogits, too
    np.add.at(g.wte, tokens, dx)
    g.wpe[: len(tokens)] = dx
    return mean_loss(targets, logits), g
