"""Test the trainer: each kernel against NumPy, then the whole model against PyTorch's numbers.

    python test_gpt2.py                                         # all, on a GPU if there is one
    python test_gpt2.py --device emulated --only gelu_forward   # a kernel, on a CPU
    python test_gpt2.py --checkpoint gpt2_124M.bin --state gpt2_124M_debug_state.bin

It prints a line for each comparison, and exits with 1 if any failed. It needs train_gpt2.py,
kernels.cu, two files of dev/fixtures, and a GPU; or a CPU and dev/. dev/tests has more tests.
"""
import itertools
from pathlib import Path

import numpy as np

from train_gpt2 import (BF16, GPT2, HEADER_BYTES, HERE, Cuda, FastCuda, FileKind, Parser, add_flag,
                        carve, check_size, kept_as, pack_batch, read_header, read_parameters,
                        run_main, sizes_of_file, to_float)

KERNEL_LIMIT = 1e-5  # a relative error, of what a kernel stores in fp32
BF16_LIMIT = 2.2e-3  # in bf16: rounding to its 8 bits gives 1.5e-3, cutting off 3e-3
ATTENTION_LIMITS = {"fp32": 5e-5, "tf32": 2e-3, "bf16": 8e-3}  # it rounds on the way
MODEL_LIMITS = {"fp32": 2e-5, "tf32": 3e-3, "bf16": 3e-2}  # so does a model, more often
results = []  # of all comparisons: did they pass?


def compare(device, title, rows):
    """Print a line for each (name, array or number, truth), or with a limit of its own."""
    for name, found, wish, *limit in rows:
        found, wish = device.get(found), np.float64(wish)
        [limit] = limit or [BF16_LIMIT if found.dtype == BF16 else KERNEL_LIMIT]
        off = to_float(found) - wish
        error = np.linalg.norm(off) / np.linalg.norm(wish)
        results.append(bool(error <= limit))  # False for a NaN
        line = f"{title + ' ' + name:40} error {error:.1e}, limit {limit:.1e}"
        if not results[-1]:
            at = np.unravel_index(np.argmax(abs(off)), off.shape)
            line += f"; {[*map(int, at)]} is off by {off[at]:.3g} from {wish[at]:.6g}"
        print("OK  " if results[-1] else "FAIL", line, flush=True)


# ---- Each kernel: the model launches it on random numbers, and NumPy has its formula

B, T, V, NH, HS = 2, 70, 300, 12, 64  # rows and heads as in GPT-2 124M
N, C = B * T, NH * HS
SIZES = GPT2.Config(maxT=80, V=V, L=1, NH=NH, C=C, Vp=384)


def small_model(device):
    """A model in the second micro-batch of a step, where gradients of parameters are added to."""
    m = GPT2(SIZES, device, B, T)
    for arena in (m.arenas["activations"], m.arenas["backward"]):
        device.put(arena, np.full(arena.nbytes, 255, np.uint8))  # NaN, until a kernel has written
    m.rng = np.random.default_rng(1337)
    m.words = m.rng.integers(V, size=(2, N))  # tokens, targets
    m.words[0, ::2] = 7  # encoder_backward_wte sums long runs in another way than short ones
    m.set_batch(pack_batch(*m.words.reshape(2, B, T)))
    m.micro = 1
    return m


def draw(m, *arrays):
    """Fill arrays of the device with random numbers. Yields these as stored, in float64."""
    for array in arrays:
        values = kept_as(np.float32(m.rng.normal(0.5, 2, array.shape)), array.dtype)
        m.device.put(array, values)
        yield np.float64(to_float(values))


def embedding(m):
    p, g, dx = m.params, m.grads, m.back.dresidual
    wte, wpe, dwte, dwpe, dout = draw(m, p.wte, p.wpe, g.wte, g.wpe, dx)
    m.embedding_forward()
    yield "x", m.acts.residual, wte[m.words[0]] + np.tile(wpe[:T], (B, 1))
    m.embedding_backward()
    np.add.at(dwte, m.words[0], dout)
    dwpe[:T] += dout.reshape(B, T, C).sum(0)
    yield "dwte", g.wte, dwte
    yield "dwpe", g.wpe, dwpe


def norm(m):
    y, x, dx, dinp = m.layers[0][0].ln2, m.acts.residual, m.back.dresidual, m.back.dinp
    w, b, dw, db, old_dx, dout = draw(m, y.w, y.b, y.dw, y.db, dx, dinp)
    inp = sum(draw(m, x, m.acts.branch))
    m.norm_forward(y, m.acts.branch)
    mean, rstd = inp.mean(1, keepdims=True), 1 / np.sqrt(inp.var(1, keepdims=True) + 1e-5)
    yield "x", x, inp
    yield "inp", y.inp, inp
    yield "out", y.out, (inp - mean) * rstd * w + b
    m.norm_backward(dx, dinp, y)
    norm, dnorm = (to_float(m.device.get(y.inp)) - mean) * rstd, dout * w
    average, along = (x.mean(1, keepdims=True) for x in (dnorm, dnorm * norm))
    yield "dx", dx, old_dx + rstd * (dnorm - average - norm * along)
    yield "dw", y.dw, dw + (dout * norm).sum(0)
    yield "db", y.db, db + dout.sum(0)


def heads(x):  # (N,n*C) -> (n,B,NH,T,HS)
    return x.reshape(B, T, -1, NH, HS).transpose(2, 0, 3, 1, 4)


def attention(m):
    a, dqkv, dinp = m.layers[0][1], m.back.dqkv, m.back.dinp
    q, k, v, dout = np.concatenate([*map(heads, draw(m, a.qkv, dinp))])  # (B,NH,T,HS) each
    m.attention_forward(a.atty, a.lse, a.qkv)
    m.attention_backward(dqkv, dinp, a.atty, a.lse, a.qkv)
    S = np.where(np.tri(T), q @ k.swapaxes(2, 3) / np.sqrt(HS), -np.inf)  # (B,NH,T,T)
    P = np.exp(S - np.logaddexp.reduce(S, 3, keepdims=True))
    dP = dout @ v.swapaxes(2, 3)
    dS = P * (dP - (P * dP).sum(3, keepdims=True)) / np.sqrt(HS)
    truths = [dS @ k, dS.swapaxes(2, 3) @ q, P.swapaxes(2, 3) @ dout]
    yield "out", heads(a.atty)[0], P @ v, ATTENTION_LIMITS[m.device.dtype]
    yield "dq, dk, dv", heads(dqkv), truths, ATTENTION_LIMITS[m.device.dtype]


def hidden(m):
    y, a = m.layers[0]
    db, x, dout = draw(m, y.fc.db, a.fch, a.fch_gelu)
    m.bias_backward(a.fch, y.fc)
    yield "db", y.fc.db, db + x.sum(0)
    g = (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    slope = np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2)
    m.device.launch("gelu_backward", x.size, a.fch_gelu, a.fch, *x.shape)
    yield "dgelu", a.fch_gelu, dout * (g + x * g * (1 - g) * slope)
    m.device.launch("gelu_forward", x.size, a.fch_gelu, a.fch, *x.shape)
    yield "gelu", a.fch_gelu, x * g


def classifier(m):
    [logits] = draw(m, m.acts.logits)
    target = np.arange(N), m.words[1]
    log_sum = np.logaddexp.reduce(logits[:, :V], 1)
    m.loss_forward(slice(0, N), m.acts.logits, with_gradient=True)
    yield "losses", m.acts.losses, log_sum - logits[target]
    dlogits = np.exp(logits - log_sum[:, None])
    dlogits[target] -= 1
    dlogits[:, V:] = 0  # the padding
    yield "dlogits", m.acts.logits, dlogits / N


def update(m):
    m1 = m2 = 0
    table, arenas = m.config.parameter_table(), m.arenas
    decay = 0.1 * np.repeat([row.decay for row in table], [row.size for row in table])
    p = np.float32(m.rng.normal(0.5, 2, len(decay)))
    m.set_parameters(vars(carve(p.view(np.uint8), table)).items())
    for step in (1, 2, 3):
        g, losses = draw(m, arenas["gradients"].view(np.float32), m.acts.losses)
        clip = np.linalg.norm(g) / 3
        m.start_step(0.5, beta1=0.9, beta2=0.95, eps=0.1, weight_decay=0.1, clip=clip)
        m.device.launch("add_loss", 1, m.adam.verdict, m.acts.losses, 1 / N, N, False)
        m.update_pass()
        m1 = 0.9 * m1 + 0.1 * g / 3
        m2 = 0.95 * m2 + 0.05 * g**2 / 9
        change = m1 / (1 - 0.9**step) / (np.sqrt(m2 / (1 - 0.95**step)) + 0.1)
        p = p - 0.5 * (change + decay * p)
    yield "norm, loss", np.divide(m.verdict()[:2], (3 * clip, losses.mean())), (1, 1)
    yield "m", arenas["adam m"].view(np.float32), m1
    yield "v", arenas["adam v"].view(np.float32), m2
    yield "p", arenas["parameters"].view(m.device.real), p


CHECKS = {  # each with the kernels that it tests
    embedding: {"encoder_forward", "encoder_backward_wte", "encoder_backward_wpe"},
    norm: {"residual_layernorm_forward", "layernorm_backward", "add_partials"},
    attention: {"attention_forward", "attention_backward_q", "attention_backward_kv"},
    hidden: {"matmul_backward_bias", "add_partials", "gelu_backward", "gelu_forward"},
    classifier: {"fused_classifier"},
    update: {"add_loss", "global_norm", "judge", "adamw"}}

# ---- The whole model: logits, loss, gradients, and ten updates, against PyTorch

FIXTURES = next(filter(Path.exists, (HERE / "dev/fixtures", HERE)))
STATE = FileKind("debug state", 20240327, (2,), "llm.c or dev/bench/torch_reference.py writes one")
LOSSES = {  # by the checkpoint's name: AdamW's settings, ten losses, and how far off in fp32
    "gpt2_tiny": (dict(learning_rate=1e-3, beta2=0.95, weight_decay=0.1), (
        7.0792864, 6.2861720, 5.6258775, 5.0554791, 4.5513761, 4.0943503, 3.6675866, 3.2630490,
        2.8814190, 2.5259975), 1e-5),
    "gpt2_124M": (dict(learning_rate=1e-4, weight_decay=0.01), (  # from llm.c's test_gpt2.c
        5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080,
        0.376511), 1e-2)}


def whole_model(device, c, checkpoint, state):
    B, T = read_header(state, STATE)[2:4]
    sizes = [2 * B * T, B * T * c.V, 1, *(row.size for row in c.parameter_table())]
    check_size(state, STATE, HEADER_BYTES + 4 * sum(sizes))
    numbers = np.fromfile(state, np.float32, offset=HEADER_BYTES)
    batch, logits, loss, *gradients = np.split(numbers, np.cumsum(sizes)[:-1])
    batch = batch.view(np.int32).reshape(2, B, T)  # tokens, targets
    m, limit = GPT2(c, device, B, T), MODEL_LIMITS[device.dtype]
    m.set_parameters(read_parameters(checkpoint, c))
    yield "loss", np.float64(m.forward(*batch)), loss[0], limit
    yield "logits", m.acts.logits[:, : c.V], logits.reshape(-1, c.V), limit
    m.loss_pass(with_gradient=True)
    m.backward_pass()
    for row, gradient in zip(c.parameter_table(), gradients):
        yield f"d{row.name}", getattr(m.grads, row.name).reshape(-1), gradient, limit
    settings, losses, bound = LOSSES.get(Path(checkpoint).stem, ({}, (), 0))
    bound = bound if device.dtype == "fp32" else 1e-2
    for step, loss in enumerate(losses, 1):  # a fast GPU runs, records and replays them
        m.train_step(pack_batch(*batch), **settings)
        yield f"loss of step {step}", np.float64(m.verdict().loss), loss, bound / loss


FLAGS = [  # as train_gpt2.py's
    (None, "--device", ("cuda", "emulated", "cpu"), None, "emulated: kernels.cu; cpu: its loops"),
    (None, "--dtype", (*MODEL_LIMITS,), None, "only this one"),
    (None, "--only", (*sorted(set().union(*CHECKS.values())),), None, "only this kernel's check"),
    (None, "--checkpoint", "name", FIXTURES / "gpt2_tiny.bin", "of --state"),
    (None, "--state", "name", None, "a debug state: only the whole model is compared with it")]


def make_device(kind, dtype, c, only=None):  # only: the kernels to emulate
    if kind in (Cuda, FastCuda):
        return kind(dtype, c)
    from dev.features.devices import on_cpu
    return on_cpu(kind, dtype, c, only)


def main():
    parser = Parser(description="Compare train_gpt2.py with NumPy and PyTorch.")
    for row in FLAGS:
        add_flag(parser, *row)
    flags = parser.parse_args()
    name = flags.device or "cuda"
    try:
        import cupy
        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # CuPy or a GPU is missing
        name = flags.device or ("emulated" if (HERE / "dev/cpu").exists() else "cuda")
    kinds = [Cuda, FastCuda] if name == "cuda" else [name]
    for kind, dtype in itertools.product(kinds, [flags.dtype] if flags.dtype else MODEL_LIMITS):
        print(f"--- {getattr(kind, '__name__', kind)}, {dtype}")
        for check, kernels in CHECKS.items():
            if not flags.state and flags.only in (None, *kernels):
                device = make_device(kind, dtype, SIZES, flags.only and kernels)
                compare(device, check.__name__, check(small_model(device)))
        if not flags.only:
            sizes = GPT2.Config(**sizes_of_file(flags.checkpoint))
            device = make_device(kind, dtype, sizes)
            state = flags.state or FIXTURES / "gpt2_tiny_debug_state.bin"
            compare(device, "model", whole_model(device, sizes, flags.checkpoint, state))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    run_main(main)
