"""Test --optimizer muon: its kernels against NumPy in float64, updates and fifty steps beside
torch.optim.Muon and AdamW, and runs that stop, resume and are refused."""
import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import numpy as np
import pytest

from dev.common.bf16 import master_numbers, to_bf16
from dev.common.config import Config, draw_parameters
from dev.features import muon
from dev.features.base import GPT2
from dev.features.checkpoints.state_file import read_states, whole_tensors
from dev.features.devices import device_class
from dev.features.feature import stack
from dev.features.recompute import SOURCE as RECOMPUTE
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests import jobs
from dev.tests.checks import EXACT, TINY, check, check_refusal, fast, words
from dev.tests.models import in_each_order, model_class, on_device
from dev.tests.trainings import (LLAMA, TRAINER, call, check_resumed, place_of, token_files,
                                 trained)
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import ceil_div, offsets, pack_batch, to_float

CONFIG = Config(maxT=19, V=251, L=3, NH=2, C=64, Vp=264)
LLAMA_CONFIG = Config3(V=251, L=2, NH=4, NKV=2, C=64, multiple_of=8)
KERNELS = "muon_momentum", "muon_normalize", "muon_update"
JORDANS = [(3.4445, -4.7750, 2.0315)] * 5
DEFAULT = [(8.156555, -22.483293, 15.87877), (4.04293, -2.808917, 0.500018),
           (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.46449)]


def polynomial(s, coefficients=DEFAULT):
    """What the iterations make of a singular value."""
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


def orthogonalized(x, coefficients=DEFAULT):
    """The result for a matrix in float64, by its singular values and vectors."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    norm = np.sqrt(np.square(s / s.max()).sum()) * s.max() if s.any() else 1
    return u * polynomial(s / norm, coefficients) @ v


@functools.cache
def device_for(name, dtype):
    """A device with Muon's kernels; emulated, it has no others."""
    mixin = muon.BatchOnGpu if name == "cuda" else muon.BatchOnCpu
    only = [KERNELS] if name == "emulated" else []
    return stack(device_class(name), [mixin])(dtype, CONFIG, [muon.SOURCE], *only)


def hurtful(rows, columns):
    """{what: matrix}: gradients that an orthogonalization may stumble over."""
    rng = np.random.default_rng(rows + columns)
    usual = rng.standard_normal((rows, columns))
    steep = usual * np.geomspace(1, 1e-3, columns)
    return {"usual": usual, "steep": steep, "zeros": 0 * usual, "1e-30": 1e-30 * usual,
            "1e30": 1e30 * usual, "1e-37": np.where(usual > 1, 2e-37, 0),
            "rank 1": rng.standard_normal((rows, 1)) * rng.standard_normal(columns),
            "rank 1 too": rng.standard_normal((rows, 1)) * rng.standard_normal(columns) ** 3,
            "rank 2": rng.standard_normal((rows, 2)) @ rng.standard_normal((2, columns)),
            "one number": np.where(np.arange(usual.size).reshape(usual.shape) == 5, -3.0, 0)}


# settings of AdamW's that Muon reads: the clip and the decay; and a verdict, an update or none
def settings_of(device, clip=0.0, decay=0.0, rate=1.0, momentum=0.0, norm=1.0, update=1):
    return (on_device(device, np.float32([0, 0, 0, 0, 0, 0, decay, clip])),
            on_device(device, np.float32([rate, momentum, 1 - momentum])),
            on_device(device, np.float32([norm, 1, update, 0])))


def orthogonalize_on(device, matrices):
    """The device's result for gradients (n,rows,columns), fp32, from a momentum of zeros."""
    n, rows, columns = matrices.shape
    size, shares = rows * columns, ceil_div(rows * columns, muon.SHARE)
    side = min(rows, columns)
    x, y = (on_device(device, np.zeros((n, rows, columns), device.real)) for _ in range(2))
    gram, poly = (on_device(device, np.zeros((n, side, side), device.real)) for _ in range(2))
    squares, m = np.full((n, shares), np.nan), np.zeros(matrices.size, np.float32)
    squares, m = on_device(device, squares), on_device(device, m)
    scales = on_device(device, np.full(n, np.nan, np.float32))
    adamw, settings, verdict = settings_of(device)
    device.launch("muon_momentum", (size, n), x, squares, m, on_device(device, matrices.ravel()),
                  0, n, n * size, size, shares, adamw, settings, verdict)
    device.normalize(x, squares, scales)
    return to_float(device.get(device.orthogonalize(x, y, gram, poly, scales)))


@fast
def test_orthogonalize(device_name):
    """Hurtful matrices against a singular value decomposition, and their singular values, which
    lie in the band of the coefficients."""
    places = ("cuda",) if device_name == "cuda" else ("emulated", "cpu")
    sets = ("polar", DEFAULT, (0.41, 1.6), (0.36, 1.66)), ("jordan", JORDANS, (0.66, 1.22),
                                                           (0.6, 1.28))
    for place, dtype, (of, coefficients, in_fp32, in_bf16) in itertools.product(
            places, ("fp32", "bf16"), sets):
        device = device_for(place, dtype)
        low, high = in_fp32 if dtype == "fp32" else in_bf16
        for rows, columns in ((64, 64), (32, 288), (200, 32), (1, 64), (96, 1), (129, 160)):
            cases = hurtful(rows, columns)
            stored = np.stack([*cases.values()]).astype(np.float32)
            with mock.patch.object(device, "coefficients", coefficients):
                found = orthogonalize_on(device, stored)
            for what, x, result in zip(cases, stored, found):
                name = f"{place} {dtype} {of} {rows}x{columns} {what}"
                if dtype == "bf16":
                    x = to_float(to_bf16(x))
                if dtype == "fp32":  # small errors grow like small singular values
                    limit = 2e-4 if "rank" in what else 2e-5
                    yield name, result, orthogonalized(x, coefficients), limit
                s, before = (np.linalg.svd(y.astype(np.float64), compute_uv=False)
                             for y in (result, x))
                norm = np.linalg.norm(before / (before.max() or 1)) * before.max()
                count = np.count_nonzero(before > 0.01 * norm)
                check(f"{name}: in the band", np.count_nonzero(s > low) >= count, s)
                check(f"{name}: none is above it", s.max() < high, s.max())
                check(f"{name}: zero alone stays zero", result.any() == (what != "zeros"))


def test_polynomial():
    """The band itself: what iterations make of all singular values from where it begins to 1."""
    for name, coefficients, least, low, high in (("jordan", JORDANS, 0.0016, 0.68, 1.21),
                                                 ("polar-express", DEFAULT, 0.00102, 0.42, 1.58)):
        s = polynomial(np.linspace(least, 1, 10**5), coefficients)
        check(f"the band of {name}", low < s.min() and s.max() < high, (s.min(), s.max()))
        check(f"below the band of {name}", polynomial(0.9 * least, coefficients) < low)
        check("module and test have the same", muon.COEFFICIENTS[name] == coefficients)
    check("of devices without flags", muon.Orthogonal.coefficients == DEFAULT)
    flags = model_class(GPT2, "--optimizer", "muon", learning_rate=1e-3).flags
    check("by default", flags.muon_coefficients == "polar-express")


def test_kernels(device_name):
    """Momentum and update of matrices that lie apart in a tensor, against NumPy in float64, with
    clipping and decay; emulated threads run in several orders; without an update nothing
    changes."""
    rng = np.random.default_rng(3)
    layers, per, rows, columns, stride = 3, 2, 5, 2016, 11 * 2016  # a layer has a row more
    size, shares = rows * columns, ceil_div(rows * columns, muon.SHARE)
    check("several blocks share a matrix", shares == 2)
    first, count = 1, 4
    g, m0, p0 = rng.standard_normal((3, layers, stride)).astype(np.float32)
    index = (np.arange(first, first + count)[:, None] // per * stride +
             np.arange(first, first + count)[:, None] % per * size + np.arange(size))
    rate, momentum, clip, norm, decay, scale = 0.3, 0.8, 0.5, 2.0, 0.1, 1.7
    wide = np.float64(0.25) * g.ravel()[index]
    m = m0.ravel()[index] + (1 - momentum) * (wide - m0.ravel()[index])
    x = wide + momentum * (m - wide)
    places = ("cuda",) if device_name == "cuda" else ("emulated", "cpu")
    for place in places:
        device = device_for(place, "fp32")

        def work(device, update):
            made = on_device(device, np.zeros((count, size), np.float32))
            squares = on_device(device, np.zeros((count, shares)))
            moment, p = on_device(device, m0.ravel()), on_device(device, p0.ravel())
            adamw, settings, verdict = settings_of(device, clip, decay, rate, momentum, norm,
                                                   update)
            device.launch("muon_momentum", (size, count), made, squares, moment,
                          on_device(device, g.ravel()), first, per, stride, size, shares, adamw,
                          settings, verdict)
            total = device.get(squares).sum(axis=1)
            device.launch("muon_update", (size, count), p, None, made, first, per, stride, size,
                          scale, adamw, settings, verdict)
            return total, *map(device.get, (made, moment, p))

        for order, (total, made, moment, p) in in_each_order(device, work, device, 1):
            name = f"{place} {order}"
            yield f"{name}: x", made, x, 1e-6
            yield f"{name}: squares", total, np.square(x).sum(axis=1), 1e-6
            wish = m0.ravel().astype(np.float64)
            wish[index] = m
            yield f"{name}: m", moment, wish, 1e-6
            wish = p0.ravel().astype(np.float64)
            wish[index] -= rate * (scale * x + decay * wish[index])
            yield f"{name}: p", p, wish, 1e-6
        _, _, moment, p = work(device, 0)
        yield f"{place}: no update: m", moment, m0.ravel(), EXACT
        yield f"{place}: no update: p", p, p0.ravel(), EXACT


# ---- Beside PyTorch


def in_fp32(step):
    """A step of torch.optim.Muon, whose products are in bf16, with products in fp32."""
    import torch
    with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.clone()):
        step()


def with_default(coefficients):
    """A context in which torch.optim.Muon, which has Jordan's coefficients, has the default's, if
    these are named."""
    def orthogonalize(x, *_):
        x = x / x.norm()
        for a, b, c in DEFAULT:
            squares = x @ x.T
            x = a * x + (b * squares + c * squares @ squares) @ x
        return x

    if coefficients == "jordan":
        return contextlib.nullcontext()
    return mock.patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonalize)


def pieces_of(name, x, c):
    """The matrices of a layer's tensor, cut by hand: what the optimizer takes for one."""
    if name == "qkvw":
        HS = c.C // c.NH
        return [x[: c.C], x[c.C : c.C + c.NKV * HS], x[c.C + c.NKV * HS :]]
    if name == "fcw" and isinstance(c, Config3):
        return [x[: c.H], x[c.H :]]
    return [x] if name in ("attprojw", "fcw", "fcprojw") else []


class Twin:
    """torch.optim.Muon and AdamW for a model's parameters, {name: array}, with its settings."""

    def __init__(self, c, parameters, settings, rate, momentum, convention):
        import torch
        self.torch, self.c, self.tensors, hidden, rest = torch, c, {}, [], {True: [], False: []}
        for row in c.parameter_table():
            layers = parameters[row.name] if row.layers else [parameters[row.name]]
            for l, values in enumerate(layers):
                pieces = pieces_of(row.name, values, c)
                made = [torch.nn.Parameter(torch.tensor(piece)) for piece in pieces or [values]]
                self.tensors[row.name, l] = made
                (hidden if pieces else rest[row.decay]).extend(made)
        decay = settings["weight_decay"]
        self.clip = settings["clip"]
        self.optimizers = [
            torch.optim.Muon(hidden, lr=rate, momentum=momentum, weight_decay=decay,
                             adjust_lr_fn=convention),
            torch.optim.AdamW([dict(params=rest[decays], weight_decay=decay * decays)
                               for decays in rest], lr=settings["learning_rate"],
                              betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"])]

    def step(self, gradients=None):
        """An update. gradients {name: array}, unless the parameters have them."""
        once = {row.name for row in self.c.parameter_table() if not row.layers}
        for (name, l), made in self.tensors.items() if gradients else ():
            values = gradients[name] if name in once else gradients[name][l]
            for p, piece in zip(made, pieces_of(name, values, self.c) or [values]):
                p.grad = self.torch.tensor(piece)
        parameters = [p for made in self.tensors.values() for p in made]
        self.torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        for optimizer in self.optimizers:
            in_fp32(optimizer.step)

    def values(self):
        """{name: array} of the parameters."""
        found = {}
        for (name, _), made in self.tensors.items():
            found.setdefault(name, []).append(np.concatenate(
                [p.detach().numpy().reshape(-1) for p in made]))
        return {name: np.concatenate(parts) for name, parts in found.items()}


SETTINGS = dict(learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)


def muon_model(architecture, c, device_name, *more, B=8, T=19, dtype="fp32"):
    recompute = "--recompute" in more
    Model = model_class(architecture, "--optimizer", "muon", *map(str, more))
    Model.flags.learning_rate = SETTINGS["learning_rate"]
    Model.flags.device, Model.flags.plain = device_name, 0
    beside = [muon.SOURCE, *[RECOMPUTE] * recompute]
    device = stack(device_class(device_name), [muon.batch_class(Model.flags)])(dtype, c, beside)
    model = Model(c, device, B, T)
    model.set_parameters(draw_parameters(c, 5))
    return model


def arrays_of(model, views):
    return {row.name: model.device.get(getattr(views, row.name))
            for row in model.config.parameter_table()}


def test_updates(device_name):
    """Three updates with the model's own gradients, within 1e-5 of torch.optim.Muon's and AdamW's;
    matrices in one batch or in several, with Jordan's coefficients, and with the default's, which
    PyTorch's class is given. (With fewer tokens than C, gradients would have singular values of 0,
    which each of the two makes rounding errors of.)"""
    pytest.importorskip("torch")
    rng, place = np.random.default_rng(1), place_of(device_name)
    for c, architecture, convention, room, coefficients in (
            (CONFIG, GPT2, "original", 2**28, "jordan"), (CONFIG, GPT2, "rms", 300_000, "jordan"),
            (CONFIG, GPT2, "original", 2**28, "polar-express"),
            (LLAMA_CONFIG, Llama3, "original", 100_000, "jordan")):
        with mock.patch.object(muon, "WORKSPACE", room), with_default(coefficients):
            groups = muon.groups_of(muon.parts_of(c))
            batches = [*muon.batches_of(groups, np.float32)]
            model = muon_model(architecture, c, place, "--muon-scale", convention,
                               "--muon-lr", 0.3, "--muon-momentum", 0.9, "--muon-coefficients",
                               coefficients)
            title = f"{architecture.__name__} {convention} {coefficients}"
            check(f"{title}: batches", (len(batches) > len(groups)) == (room < 2**28))
            torchs = "match_rms_adamw" if convention == "rms" else convention
            twin = Twin(c, arrays_of(model, model.params), SETTINGS, 0.3, 0.9, torchs)
            for step in range(3):
                before = arrays_of(model, model.params)
                packed = pack_batch(*rng.integers(c.V, size=(2, 8, 19), dtype=np.int32))
                model.train_step(packed, **SETTINGS)
                twin.step(arrays_of(model, model.grads))
                after, wish = arrays_of(model, model.params), twin.values()
                for name in muon.HIDDEN:
                    change = after[name].ravel() - before[name].ravel()
                    yield (f"{title} step {step}: {name}", change,
                           wish[name] - before[name].ravel(), 1e-5 if step == 0 else 1e-4)
                for name in after.keys() - {*muon.HIDDEN}:
                    yield f"{title} step {step}: {name}", after[name].ravel(), wish[name], 1e-6


def test_fifty_steps(device_name):
    """The losses of fifty steps, within 2e-3 of the same model in PyTorch with torch.optim.Muon."""
    torch = pytest.importorskip("torch")
    from dev.bench.torch_reference import GPT2 as Reference
    c, steps, rng = CONFIG, 50, np.random.default_rng(7)
    model = muon_model(GPT2, c, place_of(device_name), "--muon-lr", 0.02, "--muon-coefficients",
                       "jordan", B=4, T=16)
    twin = Twin(c, arrays_of(model, model.params), SETTINGS, 0.02, 0.95, "original")
    shape = Reference(c.maxT, c.V, c.L, c.NH, c.C, c.V)
    data = rng.integers(c.V, size=(3, 2, 4, 16), dtype=np.int32)  # few enough to be learned
    apart, losses = 0, []
    for step in range(steps):
        x, y = data[step % len(data)]
        model.train_step(pack_batch(x, y), **SETTINGS)
        losses.append(model.verdict().loss)
        weights = {}
        for row in c.parameter_table():
            layers = [torch.cat(twin.tensors[row.name, l]) for l in range(max(1, row.layers))]
            weights[row.name] = layers if row.layers else layers[0]
        weights["wte"] = weights["wte"][: c.V]
        for made in twin.tensors.values():
            for p in made:
                p.grad = None
        loss = shape.forward(weights, *(torch.from_numpy(part.astype(np.int64))
                                        for part in (x, y)))[1]
        loss.backward()
        twin.step()
        apart = max(apart, abs(losses[-1] - loss.item()))
    check("losses", apart < 2e-3, f"{apart:.1e} apart at most")
    check("it learns", losses[-1] < losses[0] - 1.5, (losses[0], losses[-1]))


# ---- Other precisions and features


def test_bf16_and_recompute(device_name):
    """In bf16 the low bits are updated too, and an update is near fp32's; a model that recomputes
    has the same bits; two models have."""
    batch = pack_batch(*np.random.default_rng(2).integers(CONFIG.V, size=(2, 8, 19),
                                                          dtype=np.int32))
    found = {}
    for name, dtype, more in (("fp32", "fp32", ()), ("bf16", "bf16", ()), ("again", "bf16", ()),
                              ("recomputed", "bf16", ("--recompute", 2))):
        model = muon_model(GPT2, CONFIG, place_of(device_name), *more, dtype=dtype)
        before = master_numbers(model)
        for _ in range(2):
            model.train_step(batch, **SETTINGS)
        found[name] = master_numbers(model)
        change = found[name] - before
        found[f"{name}: change"] = change[model.numbers[4] : model.numbers[5]]
    # the small singular values of a gradient are its rounding errors
    yield "bf16", found["bf16: change"], found["fp32: change"], 0.25
    for name in ("again", "recomputed"):
        yield name, found[name], found["bf16"], EXACT


def test_operations():
    """The operations that --dry-run adds are those of all products of an update."""
    for architecture, c, coefficients in ((GPT2, CONFIG, "polar-express"),
                                          (Llama3, LLAMA_CONFIG, "jordan")):
        model, counted = muon_model(architecture, c, "cpu", "--muon-coefficients", coefficients,
                                    B=1, T=5), []
        multiply = model.device.matmul_batch

        def counting(out, left, right, *more, multiply=multiply, counted=counted):
            counted.append(2 * out.size * right.shape[1])
            multiply(out, left, right, *more)

        model.device.matmul_batch = counting
        model.update_pass()
        check(f"{architecture.__name__}", sum(counted) == muon.flops_of(c, model.device),
              (sum(counted), c))


def test_tables():
    """v of the hidden matrices is not in memory; the logits' memory is used if it is enough."""
    device = device_for("cpu", "fp32")
    hidden = sum(row.nbytes for row in CONFIG.parameter_table() if row.name in muon.HIDDEN)
    small, large = (model_class(GPT2, "--optimizer", "muon").tables(CONFIG, device, B, 19)
                    for B in (1, 400))
    plain = GPT2.tables(CONFIG, device, 1, 19)
    bytes_of = lambda table: sum(row.nbytes for row in table)
    model = muon_model(GPT2, CONFIG, "cpu", B=1, T=5)
    sizes = [row.size for row in CONFIG.parameter_table()]
    for first, end in model.runs:
        wish = np.cumsum([0, *sizes[first : end - 1]])
        check(f"starts of tensors {first} to {end}",
              np.array_equal(model.adam.rest_starts[first:end], wish))
    check("runs", sum(end - first for first, end in model.runs) == len(sizes) - len(muon.HIDDEN))
    check("v", bytes_of(plain["adam v"]) - bytes_of(small["adam v"]) == hidden)
    check("m", plain["adam m"] == small["adam m"])
    check("a workspace beside few logits", "muon" in small and "muon" not in large)


# ---- Runs


def test_runs(folder):
    """A run resumes to the bit, and only with its optimizer, whether its flags are known or not."""
    token_files(folder)
    whole, plain = folder / "whole", folder / "plain"
    flags = "--dtype", "bf16", "-n", 2, "-x", 4
    trained(whole, *flags, "--optimizer", "muon", "--muon-lr", 0.05)
    check_resumed("muon", whole, 4)
    state = np.fromfile(whole / "state_00000004_00000.bin", "<i4")
    check("the state has its own version", state[1] == 2)
    c = Config.from_file(TINY)
    numbers = sum(row.size for row in c.parameter_table())
    v = state[256 + numbers :][:numbers].view(np.float32)
    at = 0
    for row in c.parameter_table():
        zero = not v[at : at + row.size].any()
        check(f"v of {row.name}", zero == (row.name in muon.HIDDEN))
        at += row.size
    trained(plain, *flags)
    for run, other in ((whole, "adamw"), (plain, "muon")):
        text = trained(run, "-y", 1, "-x", 6, "--optimizer", other, status=1)
        check("another optimizer: one line", text.count("expected the same") == 1 and
              f"now it is {other}" in text, text)
        (run / "run_00000004.json").unlink()
        text = trained(run, "-e", TINY, "-i", folder / "part_train_0.bin", "-j",
                       folder / "part_val_0.bin", "-b", 2, "-t", 8, "--dtype", "bf16", "-y", 1,
                       "-x", 6, "--optimizer", other, status=1)
        was = {"adamw": "muon", "muon": "adamw"}[other]
        check("without the run's flags: one line",
              f"a state of --optimizer {was}; expected one of --optimizer {other}" in text, text)


def test_others(folder):
    """Llama and FP8 train with it; the learning rate follows the schedule."""
    token_files(folder)
    flags = "-x", 8, "--optimizer", "muon", "-q", 0
    for name, *more, program in (("Llama", "-e", "2x2x64", LLAMA), ("FP8", "--dtype", "fp8",
                                                                    TRAINER)):
        text = trained(folder / name, *flags, *more, program=program)
        check(f"{name} trains", "training loss" in text)
    model = muon_model(GPT2, CONFIG, "cpu", "--muon-lr", 0.04)
    model.start_step(**SETTINGS | dict(learning_rate=SETTINGS["learning_rate"] / 4))
    yield "the rate is in device memory", model.adam.muon, [0.01, 0.95, 0.05], 1e-6


def test_refused():
    """What does not go together is refused in one line."""
    muon = functools.partial(model_class, GPT2, "--optimizer", "muon", learning_rate=0.0)
    check_refusal("moments", "expected --moments fp32", muon, "--moments", "bf16")
    check_refusal("rate", "expected -l above 0", muon)
    found, _, said = call("--device", "cpu", "--dry-run", 1)
    check("no flag of Muon", found == 0, said)
    for given in ((), ("--optimizer", "adamw")):
        found, _, said = call("--device", "cpu", "--muon-lr", 0.1, *given)
        check(f"a flag without Muon {given}",
              found == 1 and "--muon-lr: is for Muon: expected --optimizer muon too" in said, said)


def needs_ranks(device_name, count):
    if count not in jobs.counts_of(device_name) or device_name != "cuda" and not jobs.MPIRUN:
        pytest.skip(f"{count} GPUs, or mpirun")


def states_of(folder, step, count):
    paths = [folder / f"state_{step:08d}_{rank:05d}.bin" for rank in range(count)]
    return read_states(paths.__getitem__, Config.from_file(TINY))


def test_ranks(device_name, folder):
    """Three ranks make the same update as one: of two matrices of a shape each orthogonalizes one,
    and the last rank none; of eight, three and two. So do ranks with --zero 1: each of two has a
    layer, and of three the first two have. The text repeats itself after T tokens, so all batches
    are the same. (The gradients have few singular values above 0, and rounding errors become
    larger.)"""
    needs_ranks(device_name, 3)
    write_tokens(folder / "part_train_0.bin", np.tile(words(257, 8), 20))
    write_tokens(folder / "part_val_0.bin", words(257, 100))
    start, changes = np.fromfile(TINY, "<f4")[256:], []
    for count, zero in ((1, 0), (3, 0), (2, 1), (3, 1)):
        output = folder / f"{count} {zero}"
        jobs.train(device_name, count, folder, output, *jobs.SMALL, "-u", 0, "-x", 1, "-z", zero,
                   "-n", zero, "--optimizer", "muon", "--dtype", "fp32", status=0)
        found = np.fromfile(output / "model_00000001.bin", "<f4")[256:]
        changes.append(found - start)
        yield f"{count} ranks, -z {zero}", changes[-1], changes[0], 1e-3
        if zero:
            states = states_of(output, 1, count)
            parts = whole_tensors(states, 2, Config.from_file(TINY))
            whole = np.concatenate([np.ravel(values) for _, values in parts])
            yield f"{count} ranks, -z {zero}: the state's parameters", whole, found, EXACT


def test_zero(device_name, folder):
    """Two ranks with --zero 1 have the bits of two without, in their parameters and in the merged
    momentum, second moment and fp32 parameters. They resume to the bit."""
    needs_ranks(device_name, 2)
    jobs.data_files(folder)
    flags = (*jobs.SMALL, "--dtype", "bf16", "--sums", "bf16", "--optimizer", "muon", "--muon-lr",
             0.05, "-l", 1e-2, "-u", 0, "--clip", 0, "-x", 3, "-n", 1)
    c, states, output = Config.from_file(TINY), [], folder / "1"
    for zero in (0, 1):
        more = dict(trainer=jobs.wrapped(folder, late=jobs.POISONED)) if zero else {}
        jobs.train(device_name, 2, folder, folder / f"{zero}", *flags, "-z", zero, **more)
        states.append(states_of(folder / f"{zero}", 3, 2))
    check("shares", [states[0][0].shared, states[1][0].shared] == [False, True])
    for i, what in enumerate(("momentum", "v", "parameter")):
        for (name, found), (_, wish) in zip(*(whole_tensors(each, i, c) for each in states[::-1])):
            yield f"{what} {name}", np.ravel(found), np.ravel(wish), EXACT
            if name in muon.HIDDEN:
                check(f"{what} {name}: zeros", np.any(found) == (what != "v"))
    check_resumed("again", output, 3, ranks=2, go_on=lambda copy: jobs.train(
        device_name, 2, folder, copy, *flags, "-z", 1, "-y", 1))


def share_of_model(architecture, c, device, rank, count):
    """A rank's model with --zero 1, whose parameters are their places among all, from 0."""
    model = model_class(architecture, "--optimizer", "muon", "-z", 1, rank=rank, count=count,
                        learning_rate=1e-3)(c, device, 1, 8)
    whole = model.arenas["gradients"].view(np.float32)
    device.put(whole, np.arange(whole.size))
    model.set_tensors((), model.masters)  # keeps the share of what is staged there
    return model


@pytest.mark.parametrize("c, architecture", [(dataclasses.replace(CONFIG, L=5), GPT2),
                                             (LLAMA_CONFIG, Llama3)])
def test_shares(c, architecture):
    """With --zero 1 the matrices of all ranks' shares are, each once, those of the model, and a
    rank's momentum is that of its layers."""
    table = c.parameter_table()
    starts = dict(zip((row.name for row in table), np.array(offsets(table)) // 4))
    wish = []
    for row in table:
        pieces = [x.shape for x in pieces_of(row.name, np.empty(row.shape), c)]
        ends = np.cumsum([0, *map(np.prod, pieces * row.layers)])
        wish += [(starts[row.name] + at, *shape) for at, shape in zip(ends, pieces * row.layers)]
    device = stack(device_class("cpu"), [muon.BatchOnCpu])("fp32", c, [muon.SOURCE])
    for count in (2, 3, 5):
        found = []
        for rank in range(count):
            model = share_of_model(architecture, c, device, rank, count)
            layers = len(range(rank, c.L, count))
            sizes = {row.name: row.nbytes for row in model.tables(c, device, 1, 8)["adam m"]}
            for row in table:
                if row.name in muon.HIDDEN:
                    own = sizes.get(row.name, 0) + sizes.get(f"{row.name}_tail", 0)
                    check(f"{rank} of {count}: {row.name}", own * c.L == layers * row.nbytes)
            share = model.arenas["param share"].view(np.float32)
            for part in itertools.chain(*model.groups(c).values()):
                size = part.rows * part.columns
                for j in range(part.count):  # as muon.cu finds it
                    at = model.place_of(part)[0] + j // part.per * part.stride + j % part.per * size
                    matrix = share[at : at + size]
                    check("a matrix", np.array_equal(matrix, matrix[0] + np.arange(size)))
                    found.append((matrix[0], part.rows, part.columns))
        check(f"{count} ranks: matrices", sorted(found) == sorted(wish), (found, wish))
