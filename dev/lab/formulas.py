"""The formulas of kernels in NumPy and float64: the truths that kernels are compared with.

df(dout, x) is the gradient of sum(dout * f(x)), or a list of gradients if there are several x.
dev/tests/test_trainer.py and test_llama3.py compare each gradient with finite differences of its
function. Those of GPT-2's forward pass are in dev/lab/gpt2_numpy.py, and imported here.
"""
import numpy as np

from dev.lab.gpt2_numpy import (  # noqa: F401  (others import them from here)
    causal, cross_entropy, gelu, layernorm, sigmoid, softmax)


def dgelu(dout, x):
    g = sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))
    return dout * g * (1 + x * (1 - g) * np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2))


def moments(x):  # (N,C) -> mean (N,1), rstd (N,1)
    return x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def dlayernorm(dout, x, weight, bias):
    mean, rstd = moments(x)
    norm, dnorm = (x - mean) * rstd, dout * weight
    dx = rstd * (dnorm - dnorm.mean(-1, keepdims=True) -
                 norm * (dnorm * norm).mean(-1, keepdims=True))
    return [dx, (dout * norm).sum(0), dout.sum(0)]


def transposed(x):
    return x.swapaxes(-1, -2)


def heads(x, S, NH):  # (B,T,S*NH*HS) -> (S,B,NH,T,HS)
    return x.reshape(*x.shape[:2], S, NH, -1).transpose(2, 0, 3, 1, 4)


def attention_weights(kind, score):  # (...,T,T) -> (...,T,T), whose row t sees the columns s <= t
    return softmax(causal(score)) if kind == "softmax" else np.maximum(causal(score), 0)


# (...,T,T) twice, (...,T,1) -> the gradient of the scores (...,T,T)
def dattention_weights(kind, datt, att, delta):
    return att * (datt - delta) if kind == "softmax" else np.where(att > 0, datt, 0)


def attention(kind, q, k, v):  # (...,T,HS) three times -> (...,T,HS)
    return attention_weights(kind, q @ transposed(k) / np.sqrt(q.shape[-1])) @ v


def dattention(kind, dout, q, k, v, delta=None):
    """delta (...,T,1), which the gradient of softmax needs, is the average of dout @ v.T over a row
    of att."""
    att = attention_weights(kind, q @ transposed(k) / np.sqrt(q.shape[-1]))
    delta = (dout * (att @ v)).sum(-1, keepdims=True) if delta is None else delta
    dscore = dattention_weights(kind, dout @ transposed(v), att, delta) / np.sqrt(q.shape[-1])
    return [dscore @ k, transposed(dscore) @ q, transposed(att) @ dout]


def dcross_entropy(targets, dout, logits):
    return dout[:, None] * (softmax(logits) - (np.arange(logits.shape[-1]) == targets[:, None]))


# ---- Llama's


def root(x, eps):  # (N,C) -> rstd (N,1)
    return 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def rmsnorm(eps, x, weight):  # (N,C), (C) -> (N,C)
    return x * root(x, eps) * weight


def drmsnorm(eps, dout, x, weight):
    rstd, dnorm = root(x, eps), dout * weight
    return [rstd * (dnorm - x * rstd**2 * np.mean(dnorm * x, -1, keepdims=True)),
            (dout * x * rstd).sum(0)]


def frequencies(HS, theta, factor):
    """Radians per token of each pair of channels (HS/2), rounded to fp32 where PyTorch rounds.
    Llama 3.1 scales them by their wavelengths, in tokens."""
    exponent = np.float32(np.arange(0, HS, 2)) / np.float32(HS)
    frequency = np.float32(1) / np.float32(np.float64(np.float32(theta)) ** exponent)
    wavelength = 2 * np.pi / np.float64(frequency)
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    return (np.float32((1 - smooth) * frequency / factor + smooth * frequency)
            if factor > 1 else frequency)


def rotate(x, angle, half):
    """x (B,T,heads,HS): its pairs of channels, as complex numbers, turned by angles (T,HS/2)."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    if half:
        pairs = x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle[:, None])
    return np.stack([turned.real, turned.imag], -2 if half else -1).reshape(x.shape)


def swiglu(inp):  # (N,2H) -> (N,H)
    up, gate = np.split(inp, 2, -1)
    return up * gate * sigmoid(gate)


def dswiglu(dout, inp):
    up, gate = np.split(inp, 2, -1)
    s = sigmoid(gate)
    return [np.concatenate([dout * gate * s, dout * up * s * (1 + gate * (1 - s))], -1)]
