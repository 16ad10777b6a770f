"""GPT-2's forward pass in NumPy. Read it first, then gpt2_numpy_backward.py, which has its
gradients, then train_gpt2.py, which does both fast.

    python -m dev.lab.gpt2_numpy "To be, or not to be"              # with gpt2_124M.bin
    python -m dev.lab.gpt2_numpy model.bin "To be, or not to be"    # with another checkpoint

It prints the loss of the text, and the five likeliest next tokens. OpenAI's weights are downloaded
by `python -m dev.tools.convert gpt2 gpt2_124M.bin`; train_gpt2.py -o saves its own.

Names and letters for sizes are train_gpt2.py's:

    T   tokens of a sequence        C   channels of a token; OC of a linear layer's output
    V   words of the vocabulary     NH  attention heads
    L   layers                      HS  channels of a head, C/NH

There is one sequence here, not a batch. The parameters p are a checkpoint's, without the padding of
wte: wte (V,C), wpe (maxT,C), lnfw and lnfb (C), and the others with a first axis for layers, such
as qkvw (L,3C,C). The tests compare train_gpt2.py with this file in float64, and this file with
PyTorch. The kernel lab uses its formulas.
"""
from types import SimpleNamespace

import numpy as np


# A gate: 0 for very negative x, 1 for very positive x, 1/2 at 0. e**710 would overflow.
def sigmoid(x):
    return 1 / (1 + np.exp(np.minimum(-x, 700)))


# The MLP's nonlinearity: numbers above 0 pass, those below fade out. Without it, two linear layers
# could do no more than one. GPT-2's is x/2 * (1 + tanh(u)), which is x * sigmoid(2u).
def gelu(x):
    return x * sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))


# Turns scores into weights: positive, with a sum of 1 over the last axis.
# Subtracting the largest score first changes no weight, and exp cannot overflow.
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Gives each token's channels mean 0 and variance 1, then a learned scale and shift per channel.
# So layers see numbers of the same size, however large x has grown.
def layernorm(x, weight, bias):  # (T,C), (C), (C) -> (T,C)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)  # (T,C) -> (T,1), (T,1)
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


# Each output channel is a weighted sum of a token's input channels.
# Nearly all parameters are such weights, and nearly all time goes into these products.
def linear(x, w, bias):
    return x @ w.T + bias  # (T,C) @ (C,OC) -> (T,OC)


# A token sees itself and earlier tokens: later ones get the score -inf, and so the weight 0.
# Otherwise it could look up the token that it has to predict.
def causal(scores):  # (...,T,T), a row for each query
    return np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)


# The only place where tokens see each other: each takes a mean of the values v, weighted by how
# well its query q matches the keys k. Each head does so in its own HS channels.
def attention(qkv, NH):
    T = len(qkv)
    q, k, v = qkv.reshape(T, 3, NH, -1).transpose(1, 2, 0, 3)  # (T,3C) -> (NH,T,HS) three times
    scores = q @ k.swapaxes(1, 2)  # (NH,T,HS) @ (NH,HS,T) -> (NH,T,T)
    weights = softmax(causal(scores / np.sqrt(q.shape[-1])))  # (NH,T,T) -> (NH,T,T)
    heads = weights @ v  # (NH,T,T) @ (NH,T,HS) -> (NH,T,HS)
    return heads.swapaxes(0, 1).reshape(T, -1)  # (NH,T,HS) -> (T,C)


# Layer l: tokens exchange what they know (attention), then each thinks about it (the MLP).
# Both add to x, the residual stream, which carries a token from its embedding to its logits.
def block(x, p, l, NH):
    ln1 = layernorm(x, p.ln1w[l], p.ln1b[l])  # (T,C)
    qkv = linear(ln1, p.qkvw[l], p.qkvb[l])  # (T,C) @ (C,3C) -> (T,3C)
    atty = attention(qkv, NH)  # (T,3C) -> (T,C)
    x = x + linear(atty, p.attprojw[l], p.attprojb[l])  # (T,C) @ (C,C) -> (T,C)

    ln2 = layernorm(x, p.ln2w[l], p.ln2b[l])  # (T,C)
    fch = linear(ln2, p.fcw[l], p.fcb[l])  # (T,C) @ (C,4C) -> (T,4C)
    return x + linear(gelu(fch), p.fcprojw[l], p.fcprojb[l])  # (T,4C) @ (4C,C) -> (T,C)


# The model: for each token, a score (a logit) for every word that might follow it.
# A word's embedding serves twice: x starts from it, and is compared with it at the end.
def forward(p, tokens, NH):
    x = np.float64(p.wte[tokens]) + p.wpe[: len(tokens)]  # (T) -> (T,C): which word, and where
    for l in range(len(p.ln1w)):
        x = block(x, p, l, NH)  # (T,C) -> (T,C)
    lnf = layernorm(x, p.lnfw, p.lnfb)  # (T,C)
    return lnf @ p.wte.T  # (T,C) @ (C,V) -> (T,V)


# How surprised the model is by each target, the token that did follow: -log(its probability). It is
# 0 if the model was sure of it, log(V) if it had no idea. See softmax for subtracting the top.
def cross_entropy(targets, logits):  # (T), (T,V) -> (T)
    top = logits.max(-1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(-1))  # (T,V) -> (T)
    return log_sum - logits[np.arange(len(targets)), targets]  # (T)


# What training minimizes. gpt2_numpy_backward.py has the same steps backward, for the gradients:
# how the loss changes with each number of p. train_gpt2.py adds AdamW, which changes them.
def mean_loss(targets, logits):
    return cross_entropy(targets, logits).mean()  # (T) -> one number


# ---- Try it


def main():
    from dev.features.tokenizer import decode, encoding_of_model, vocabulary_of_run, words_of
    from train_gpt2 import UserError
    from dev.common.config import Config, read_parameters
    from train_gpt2 import Parser, to_float
    parser = Parser(description="The loss of a text, and what likely follows.")
    parser.add_argument("checkpoint", nargs="?", default="gpt2_124M.bin")
    parser.add_argument("text")
    flags = parser.parse_args()
    c = Config.from_file(flags.checkpoint)
    p = SimpleNamespace(**{name: to_float(x) for name, x in read_parameters(flags.checkpoint, c)})
    p.wte = p.wte[: c.V]
    # <|endoftext|>, and the text, in which a special token's name is that token
    own = vocabulary_of_run(flags.checkpoint, c.V)
    if own:
        tokens, words = np.array([own.eot, *own.encode(flags.text)]), dict(enumerate(own.words))
    else:
        encoding = encoding_of_model(c.V)
        tokens = np.array([c.EOT, *encoding.encode(flags.text, allowed_special="all")])
        words = words_of(encoding)
    if not (2 <= len(tokens) <= c.maxT and tokens.max() < c.V):
        raise UserError(f"<|endoftext|> and the text are {len(tokens)} tokens, ids up to "
                        f"{tokens.max()}; expected 2 to {c.maxT} tokens, ids below {c.V}")
    logits = forward(p, tokens, c.NH)
    print(f"loss {mean_loss(tokens[1:], logits[:-1]):.6f} over {len(tokens) - 1} tokens")
    chance = softmax(logits[-1])
    for token in np.argsort(-chance)[:5]:
        print(f"{chance[token]:8.2%}  {decode([token], words)!r}")


if __name__ == "__main__":
    from dev.common.program import run_main
    run_main(main)
