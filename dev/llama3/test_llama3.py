"""Compare llama3.cu and train_llama3.py with independent truths: formulas in NumPy, and tensors dumped from PyTorch.

    python dev/llama3/test_llama3.py                                  # all, on the CPU, and on a GPU if there is one
    python dev/llama3/test_llama3.py --checkpoint FILE --state FILE   # only this dump, of dev/torch_reference.py
    python dev/llama3/test_llama3.py --kernels                        # only the kernels, for a sanitizer
    python dev/llama3/test_llama3.py --only rope_forward              # only one of them, for a debugger

It prints a line a tensor, and then `N passed, N failed`. The exit status is 1 if any failed. Flags, limits and the way
a kernel is launched are test_gpt2.py's, which tests the kernels of kernels.cu.
"""
import contextlib
import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from prepro_tinyshakespeare import BF16, FileKind, UserError, read_kernels, to_float, write_tokens  # noqa: E402

import numpy as np  # noqa: E402  (after prepro_tinyshakespeare, which has said how its threads are to wait)

import test_gpt2  # noqa: E402  (for what changes there: rng, and the device under test)
from dev.llama3.train_llama3 import Config3, Llama3, rmsnorm_backward_launch  # noqa: E402
from dev.test_files import TINY, check_refusal, numbers_of, test_steps, token_files  # noqa: E402
from test_gpt2 import (BF16_LIMIT, DEBUG_STATE, EXACT, FIXTURES, KERNEL_LIMIT, SMALL_MODEL, as_real, check,  # noqa: E402
                       device_of, each_device, each_kind, f32, finite_difference, kernel, nan32, normal, normal32,
                       read_flags, run, stored, summary, test_dump, test_kernels, write_checkpoint)
from train_gpt2 import Config, draw_parameters, read_parameters  # noqa: E402

# ---- The formulas. df(dout, x) is the gradient of sum(dout * f(x)), and a list of them if there are several x.


def root(x, eps):  # (N,C) -> rstd (N,1)
    return 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def rmsnorm(eps, x, weight):  # (N,C), (C) -> (N,C)
    return x * root(x, eps) * weight


def drmsnorm(eps, dout, x, weight):
    rstd, dnorm = root(x, eps), dout * weight
    return [rstd * (dnorm - x * rstd**2 * np.mean(dnorm * x, -1, keepdims=True)), (dout * x * rstd).sum(0)]


def frequencies(HS, theta, factor):
    """Radians a token of each pair of channels (HS/2), rounded to fp32 where PyTorch rounds. Llama 3.1's scaling goes
    by wavelengths, in tokens."""
    exponent = np.float32(np.arange(0, HS, 2)) / np.float32(HS)
    frequency = np.float32(1) / np.float32(np.float64(np.float32(theta)) ** exponent)
    wavelength = 2 * np.pi / np.float64(frequency)
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    return np.float32((1 - smooth) * frequency / factor + smooth * frequency) if factor > 1 else frequency


def rotate(x, angle, half):
    """x (B,T,heads,HS) with its pairs of channels as complex numbers, each turned by its angle (T,HS/2)."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2) if half else x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle[:, None])
    return np.stack([turned.real, turned.imag], -2 if half else -1).reshape(x.shape)


def swiglu(inp):  # (N,2H) -> (N,H)
    up, gate = np.split(inp, 2, -1)
    return up * gate / (1 + np.exp(-gate))


def dswiglu(dout, inp):
    up, gate = np.split(inp, 2, -1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return [np.concatenate([dout * gate * sigmoid, dout * up * (sigmoid + gate * sigmoid * (1 - sigmoid))], -1)]


def finite_differences():
    yield finite_difference("rmsnorm", *(functools.partial(f, 0.1) for f in (rmsnorm, drmsnorm)), normal(5, 32),
                            normal(32))
    yield finite_difference("swiglu", swiglu, dswiglu, 3 * normal(5, 64))


# ---- Each kernel against its formula. The sizes of each run stand over its test.

KERNELS = {}  # name: (test, runs)
NC = (1, 32), (27, 96), (40, 768), (9, 1600), (7, 2112), (1, 4096), (11, 4096), (5, 8192)
# C and NH: for each C of NC, and for heads of 2, 6, 32, 64, 128 and 80 channels.
COMPILED_FOR = (32, 16), (96, 16), (768, 24), (1600, 25), (2112, 33), (4096, 32), (8192, 64), (160, 2)


@kernel(*((*sizes, eps, with_branch) for sizes in NC for eps, with_branch in ((1e-5, 0), (1e-3, 1))), tests=KERNELS)
def residual_rmsnorm_forward(launch, N, C, eps, with_branch):
    # Rows of deviation 10 to 0.001, where eps counts; every third has a mean of 50 deviations.
    deviation, mean = np.logspace(1, -3, N)[:, None], 50 * (np.arange(N)[:, None] % 3 == 0)
    residual, branch = f32(deviation * (normal32(N, C) + mean)), as_real(deviation * normal(N, C))
    x, weight = f32(residual + branch * with_branch), normal(C)
    out, rstd, copy, found = launch(N, (N, C), nan32(N, 1), (N, C), np.float32(residual),
                                    branch if with_branch else None, weight, eps, N)
    yield "residual", found, x, EXACT
    yield "copy", copy, x, EXACT
    yield "out", out, rmsnorm(eps, x, weight)
    yield "rstd", rstd / root(x, eps), np.ones((N, 1))


@kernel(*NC, tests=KERNELS)
def rmsnorm_again(launch, N, C):
    inp, rstd, weight = normal(N, C), normal32(N, 1), normal(C)
    yield "out", *launch(N * C, (N, C), inp, np.float32(rstd), weight, N, C), inp * rstd * weight


@kernel(*((*sizes, blocks) for sizes in (*NC, (300, 96), (70, 1600), (37, 4096), (23, 8192)) for blocks in (None, 3)),
        tests=KERNELS)
def rmsnorm_backward(launch, N, C, blocks):
    """With the trainer's own grid, or with another, in which a block may have no row."""
    own_blocks, shared = rmsnorm_backward_launch(test_gpt2.under_test, N)
    blocks = blocks or own_blocks
    inp, dresidual, weight = as_real(normal(N, C) + 3), normal(N, C), as_real(1 + normal(C))
    dout = as_real(normal(N, C) + inp)  # so that dnorm * norm has an average
    found, partials = launch(blocks, dresidual, nan32(blocks, C), dout, inp, weight, np.float32(root(inp, 1e-5)), N,
                             shared=shared)
    dx, dweight = drmsnorm(1e-5, dout, inp, weight)
    yield "dresidual", found, dresidual + dx
    yield "dweight", partials.sum(0), dweight


@kernel(*((T, HS, theta, factor) for theta, factor in ((5e5, 1), (5e5, 8), (5e5, 32), (1e4, 1)) for T, HS in (
    (1, 2), (7, 2), (33, 6), (9000, 32), (8192, 64), (4097, 80), (9001, 128))), tests=KERNELS)
def rope_table(launch, T, HS, theta, factor):
    angle = np.float32(np.arange(T))[:, None] * frequencies(HS, theta, factor)  # an fp32, whose cosine is exact
    expected = np.stack([f(np.float64(angle)) for f in (np.cos, np.sin)], -1).reshape(T, HS)
    yield "table", *launch(T * HS // 2, nan32(T, HS), theta, factor, T), expected, 1e-6


ROPE = [(*sizes, half) for half in (0, 1) for sizes in (
    (70, 1, 1, 1, 2), (2, 5, 5, 5, 2), (3, 7, 3, 1, 6), (2, 33, 6, 2, 32), (1, 70, 8, 1, 64), (2, 9, 2, 1, 80),
    (3, 17, 4, 2, 128))]


def rope_kernels(direction, launch, B, T, NH, NKV, HS, half):
    """Queries and keys turn by an angle for each position and pair, here any angle. Values stay, bit for bit."""
    sizes = B * T, T, NH + NKV, (NH + 2 * NKV) * HS, half
    turned = B * T * (NH + NKV) * HS
    qkv, angle = normal(B, T, NH + 2 * NKV, HS), test_gpt2.rng.uniform(-np.pi, np.pi, (T, HS // 2))
    table = np.float32(np.stack([np.cos(angle), np.sin(angle)], -1).reshape(T, HS))
    [found] = launch(turned, qkv, table, *sizes)
    expected = rotate(qkv[:, :, : NH + NKV], angle if direction == "forward" else -angle, half)
    yield "q, k", found[:, :, : NH + NKV], expected
    yield "v untouched", found[:, :, NH + NKV :], qkv[:, :, NH + NKV :], EXACT
    [back] = test_gpt2.launch("rope_backward" if direction == "forward" else "rope_forward", turned, found, table,
                              *sizes)
    yield "there and back", back, qkv, 2 * BF16_LIMIT if back.dtype == BF16 else KERNEL_LIMIT


for direction in ("forward", "backward"):
    KERNELS[f"rope_{direction}"] = functools.partial(rope_kernels, direction), ROPE


def swiglu_kernels(direction, launch, N, H, gates):
    low, high = {"small": (-4, 4), "saturated": (-100, 100), "left": (-20, -1), "right": (1, 20)}[gates]
    gate = test_gpt2.rng.uniform(low, high, (N, H))
    if gates == "saturated":
        gate = np.where(gate < 0, low, high)
    inp, dout = np.concatenate([normal(N, H), as_real(gate)], -1), normal(N, H)
    if direction == "forward":
        yield "out", *launch(N * H, (N, H), inp, N, H), swiglu(inp)
    else:
        [found], [expected] = launch(N * H, inp.shape, dout, inp, N, H), dswiglu(dout, inp)
        yield "dup", found[:, :H], expected[:, :H]
        yield "dgate", found[:, H:], expected[:, H:]
        yield "dinp in place of inp", swiglu_backward_in_place(test_gpt2.under_test, dout, inp), found, EXACT
    inp[0, [0, -1]] = np.nan  # an up and a gate
    f, arrays = (swiglu, [inp]) if direction == "forward" else (lambda *x: dswiglu(*x)[0], [dout, inp])
    [found], expected = launch(N * H, f(*arrays).shape, *arrays, N, H), f(*arrays)
    yield "NaN", np.isnan(to_float(found)), np.isnan(expected), EXACT


def swiglu_backward_in_place(device, dout, inp):
    dout, inp = (stored(values, device.real) for values in (dout, inp))
    arrays = [device.empty(values.nbytes).view(values.dtype).reshape(values.shape) for values in (dout, inp)]
    for array, values in zip(arrays, (dout, inp)):
        device.put(array, values)
    device.launch("swiglu_backward", dout.size, arrays[1], *arrays, *dout.shape)
    return device.get(arrays[1])


for direction in ("forward", "backward"):
    KERNELS[f"swiglu_{direction}"] = functools.partial(swiglu_kernels, direction), [
        (*sizes, gates) for sizes in ((1, 2056), (27, 96), (9, 264))
        for gates in ("small", "saturated", "left", "right")]


# ---- The whole model against dumps, and its steps

DEBUG_STATE[Config3] = FileKind("Llama 3 debug state", 20240803, (3,), "dev/torch_reference.py writes one")
SMALL_MODEL[Llama3] = dict(V=257, L=2, NH=2, C=64, NKV=1)
GQA, TIED = FIXTURES / "llama_gqa.bin", FIXTURES / "llama_tied.bin"


def test_models(device_name, dtype, plain):
    """The dumps that are here, and steps of a small model."""
    for checkpoint in (GQA, TIED):
        state = checkpoint.with_name(f"{checkpoint.stem}_debug_state.bin")
        test_dump((device_name, dtype, plain, Llama3), checkpoint, state, fp32_bound=1e-5)
    test_steps(device_name, dtype, plain, Llama3)


# ---- Sizes, files, refusals, the command line


def sizes(device_name, folder):
    """Meta's own counts of parameters; and of small models, by hand."""
    for name, H, count in (("llama3.1:8B", 14336, 8030261248), ("llama3.2:3B", 8192, 3212749824),
                           ("llama3.2:1B", 8192, 1235814400), ("llama3:d12", 2048, 114150144),
                           ("d1", 256, 64 * (50304 + 2 + 192 + 64 + 512 + 256 + 1))):
        c = Config3.from_descriptor(name)
        c.check(name)
        check(f"H of {name}", c.H == H, f"{c.H}")
        found = sum(row.size for row in c.parameter_table())
        check(f"parameters of {name}", found == count, f"{found:,}")
    heads = [Config3.from_descriptor(f"llama3:d{L}").NKV for L in (1, 2, 3, 6, 12, 24, 36, 48)]
    check("key-value heads of d1 to d48", heads == [1, 1, 1, 2, 4, 4, 5, 5], f"{heads}")


def format_b(c, tensors, version=3):
    """The bytes of a checkpoint of llm.c's branch llama3, written out by hand. tensors: {name: fp32 array}."""
    ints, floats = np.zeros(256, "<i4"), np.zeros(256, "<f4")
    ints[:12] = 20240803, version, c.maxT, c.V, c.L, c.NH, c.NKV, c.C, c.multiple_of, c.scaled, 3, c.minor
    floats[:3] = c.ffn_multiplier, c.eps, c.theta
    L, C, H, QKV = c.L, c.C, c.H, (c.NH + 2 * c.NKV) * (c.C // c.NH)
    order = ("wte", "lm_head", "ln1w", (L, C), "qkvw", (L, QKV), "attprojw", (L, C), "ln2w", (L, C), "fcw", (L, 2 * H),
             "fcprojw", (L, C), "lnfw", (C,))
    numbers = [np.zeros(x, np.float32) if isinstance(x, tuple) else tensors[x] for x in order]
    return ints.tobytes() + floats.tobytes() + b"".join(
        (stored(x, BF16) if version == 5 else np.float32(x)).tobytes() for x in numbers)


def format_a(c, tensors):
    """The bytes of a checkpoint of llm.c's master, in which up and gate are apart, and floats are cut off."""
    ints = np.zeros(256, "<i4")
    ints[:16] = (20240803, 3, c.maxT, c.V, c.L, c.NH, c.NKV, c.C, int(c.ffn_multiplier), c.multiple_of, int(c.eps),
                 int(c.theta), c.scaled, 4, 3, c.minor)
    up, gate = tensors["fcw"][:, : c.H], tensors["fcw"][:, c.H :]
    names = "wte", "ln1w", "qkvw", "attprojw", "ln2w", up, gate, "fcprojw", "lnfw", "lm_head"
    return ints.tobytes() + b"".join(np.float32(tensors[x] if isinstance(x, str) else x).tobytes() for x in names)


def files(device_name, folder):
    """What is read is what was written, in both formats, and nothing but the padding is added in memory."""
    path, copy = folder / "model.bin", folder / "copy.bin"
    for tied in (False, True):
        c = Config3(maxT=40, V=257, L=2, NH=4, C=64, NKV=2, multiple_of=32, theta=10000.0, minor=1 + tied, tied=tied)
        tensors = {name: np.float32(normal32(*shape)) for name, *shape in (
            ("wte", 257, 64), ("lm_head", 257, 64), ("ln1w", 2, 64), ("qkvw", 2, 128, 64), ("attprojw", 2, 64, 64),
            ("ln2w", 2, 64), ("fcw", 2, 2 * c.H, 64), ("fcprojw", 2, 64, c.H), ("lnfw", 64))}
        if tied:
            tensors["lm_head"] = tensors["wte"]
        for dtype, version in (("fp32", 3), ("bf16", 5)):
            device = device_of(device_name, dtype, 64, 4, True, Llama3)
            model, whole = Llama3(c, device, 1, 1), format_b(c, tensors, version)
            path.write_bytes(whole)
            found = Config3.from_file(path)
            check(f"{dtype} {tied=}: its config", found == c, f"{found}")
            model.set_parameters(read_parameters(path, found))
            write_checkpoint(copy, model)
            check(f"{dtype} {tied=}: what was read, written again", copy.read_bytes() == whole)
            for name, array in {"wte": model.params.wte, "lm_head": model.params.lm_head}.items():
                array = to_float(device.get(array))
                yield f"{dtype} {tied=}: {name}", array[:257], to_float(stored(tensors[name], device.real)), EXACT
                yield f"{dtype} {tied=}: padding of {name}", array[257:], np.zeros((127, 64), np.float32), EXACT
        path.write_bytes(format_a(c, tensors))
        model = Llama3(c, device_of(device_name, "fp32", 64, 4, True, Llama3), 1, 1)
        check(f"{tied=}: the config of format A", Config3.from_file(path) == c)
        model.set_parameters(read_parameters(path, c))
        write_checkpoint(copy, model)
        check(f"{tied=}: format A, written as format B", copy.read_bytes() == format_b(c, tensors))
        drawn = dict(draw_parameters(c, 1))
        check(f"{tied=}: what is drawn", drawn.keys() == tensors.keys() - ({"lm_head"} if tied else set()))
        check(f"{tied=}: its padding", not any(drawn[name][257:].any() for name in drawn.keys() & {"wte", "lm_head"}))
    fraction = dataclasses.replace(c, ffn_multiplier=1.3)
    tensors["fcw"], tensors["fcprojw"] = np.zeros((2, 2 * fraction.H, 64)), np.zeros((2, 64, fraction.H))
    path.write_bytes(format_a(fraction, tensors))
    check_refusal("format A", "ffn_dim_multiplier = 1.* cut off", Config3.from_file, path)
    check_refusal("a GPT-2's", "begins with 20240326, and a Llama 3 checkpoint with 20240803", Config3.from_file, TINY)
    check_refusal("for GPT-2", "begins with 20240803, and a checkpoint with 20240326", Config.from_file, GQA)


def bad_files(device_name, folder):
    """Each change to a good file is refused in one line that says what is wrong."""
    path, whole = folder / "file.bin", np.frombuffer(GQA.read_bytes(), "<i4")
    bias = 512 + 2 * 331 * 96 + 2 * 96 + 5  # a number of ln1b, counted in numbers from the file's start
    ratio = np.float32([np.nan, 0, -1, 1e30, 2]).view(np.int32)
    for wish, index, number, *cut in (
            ("NH to be divisible by NKV", 6, 4), ("divisible by NKV", 6, 0), ("divisible by NKV", 6, -2),
            ("C to be divisible by NH", 5, 7), ("an even number of channels", 5, 32), ("sizes from 1", 3, -1),
            ("sizes from 1", 4, 2**30), ("multiple of 32", 7, 108), ("H, by ffn_multiplier", 8, 0),
            ("H, by ffn_multiplier", 8, 1), *(("H, by ffn_multiplier", 256, int(x)) for x in ratio[:4]),
            ("promises", 256, int(ratio[4])), ("eps between 0 and 1", 257, int(ratio[1])),
            ("a theta above 1", 258, int(ratio[0])), ("a scaling of RoPE", 9, -1), ("C of at most 8,192", 7, 96 * 96),
            ("a Llama 2.1; expected a Llama 3", 10, 2),
            ("ln1b is not zero", bias, 1), ("truncated", 3, 332), ("truncated", 0, 20240803, 1500),
            ("too long", 3, 330), ("version 4", 1, 4)):
        changed = whole.copy()
        changed[index] = number
        path.write_bytes(changed.tobytes()[: cut[0] if cut else None])
        check_refusal(f"file with {number} at {index}", wish, Config3.from_file, path)
    check_refusal("descriptor", "llama3:d400: .* C of at most 8,192", Config3.from_descriptor, "llama3:d400")
    for name in ("llama3:d0", "llama3.1:70B", "gpt2"):
        check_refusal("descriptor", f"-e {name}: expected .*llama3.2:1B.*llama3:d12", Config3.from_descriptor, name)


def command_line(device_name, folder):
    """train_llama3.py trains twice to the same bits, by other ways to nearly the same, and says in one line what it was
    given wrong."""
    token_files(folder)
    with contextlib.redirect_stdout(None):
        write_tokens(folder / "larger.bin", [5] * 9 + [331] * 90)
    tiny = ("-e", GQA, "-i", "tokens.bin", "-j", "tokens.bin", "-b", "2", "-t", "8", "-x", "3", "-s", "3", "-g", "2")
    others = ("plain", "--plain", "1"), ("no_graph", "--graph", "0"), ("recompute", "--recompute", "1")
    for wish, *flags in (
            *((None, *tiny, "--dtype", dtype, "-o", f"{dtype}_{n}") for dtype in ("fp32", "bf16") for n in (1, 2)),
            *((None, *tiny, "--dtype", "fp32", *flags, "-o", name) for name, *flags in others),
            (None, *tiny[2:], "-e", "llama3:d1", "-t", "9", "-g", "0"),
            ("begins with 20240326", *tiny, "-e", TINY), ("-e d1.5: expected", "-e", "d1.5"),
            ("token 9 is 331, and the model has V = 331 words", *tiny, "-i", "larger.bin")):
        done = subprocess.run([sys.executable, HERE / "train_llama3.py", "--device", device_name, *flags], cwd=folder,
                              capture_output=True, text=True)
        ok = done.returncode == (wish is not None) and re.fullmatch(
            f"error: .*{wish}.*\n" if wish else "", done.stderr)
        check(f"train_llama3.py: {wish or ' '.join(map(str, flags[len(tiny) :]))}", ok,
              "" if ok else f"{done.returncode}, {done.stderr!r}")

    def result(name):
        return folder / name / "model_00000003.bin"

    for dtype in ("fp32", "bf16"):
        one, two = (result(f"{dtype}_{n}") for n in (1, 2))
        check(f"train_llama3.py: its checkpoint in {dtype} is one", Config3.from_file(one) == Config3.from_file(GQA))
        same = one.read_bytes() == two.read_bytes() != GQA.read_bytes()
        check(f"train_llama3.py: the same bits again in {dtype}", same)
    c = Config3.from_file(GQA)
    for name, *_ in others:
        yield f"{name}", *(numbers_of(read_parameters(result(x), c)) for x in (name, "fp32_1")), 5e-4


# ---- The program


def main():
    flags = read_flags("Compare llama3.cu and train_llama3.py with independent truths.", KERNELS)
    everything = not (flags.kernels or flags.only or flags.state)
    if everything:
        run("gradient of", finite_differences)
        untested = read_kernels(Config3.SOURCES[1:]).keys() ^ KERNELS.keys()
        check("each kernel has a test, and each test a kernel", not untested, " ".join(sorted(untested)))
    for name, dtype in each_device(flags):
        if not flags.state:
            test_kernels(name, dtype, flags.only, KERNELS, COMPILED_FOR, Llama3)
        for plain in each_kind(flags, name, dtype) if not (flags.kernels or flags.only) else ():
            if flags.state:
                test_dump((name, dtype, plain, Llama3), flags.checkpoint, flags.state, flags.attention)
            else:
                test_models(name, dtype, plain)
    for test in (sizes, files, bad_files, command_line) if everything else ():
        with tempfile.TemporaryDirectory() as folder:
            run(test.__name__.replace("_", " ") + ":", test, name, Path(folder))
    return summary()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
