"""GPT-2's loss in PyTorch and float64, whose autograd the tests of features compare with."""
import numpy as np


def parameters_in_torch(model):
    """{name: tensor}, float64, of a model's parameters."""
    import torch
    return {name: torch.tensor(model.device.get(getattr(model.params, name)).astype(np.float64),
                               requires_grad=True) for name in vars(model.params)}


def sum_in_torch(p, c, tokens, targets, times=None, smoothing=0.0):
    """The sum of the losses of tokens and targets (B,T) int32, but for targets that are -1. p: see
    parameters_in_torch; times[site] (B*T,C): factors of the embeddings and of each branch."""
    import torch
    F = torch.nn.functional
    B, T = tokens.shape
    C = c.C
    times = times or [1.0] * (2 * c.L + 1)
    x = p["wte"][torch.tensor(tokens.astype(np.int64))] + p["wpe"][:T]
    x = x.reshape(B * T, C) * times[0]
    for l in range(c.L):
        ln1 = F.layer_norm(x, (C,), p["ln1w"][l], p["ln1b"][l])
        qkv = F.linear(ln1, p["qkvw"][l], p["qkvb"][l])
        q, k, v = qkv.reshape(B, T, 3, c.NH, -1).permute(2, 0, 3, 1, 4)
        atty = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        atty = atty.transpose(1, 2).reshape(B * T, C)
        x = x + F.linear(atty, p["attprojw"][l], p["attprojb"][l]) * times[2 * l + 1]
        ln2 = F.layer_norm(x, (C,), p["ln2w"][l], p["ln2b"][l])
        fch = F.gelu(F.linear(ln2, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        x = x + F.linear(fch, p["fcprojw"][l], p["fcprojb"][l]) * times[2 * l + 2]
    lnf = F.layer_norm(x, (C,), p["lnfw"], p["lnfb"])
    return F.cross_entropy(lnf @ p["wte"][: c.V].T, torch.tensor(targets.reshape(-1).astype(
        np.int64)), ignore_index=-1, reduction="sum", label_smoothing=smoothing)
