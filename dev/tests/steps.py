"""Tests of training steps: they repeat to the bit, take no more memory, and give the same gradients
in other ways."""
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import joined, master_numbers
from dev.common.config import draw_parameters
from dev.features.base import GPT2
from dev.lab.bench import KERNEL_LIMIT
from dev.lab.heads import launch_trainers
from dev.lab.kernels.adamw import halves
from dev.lab.ladder import stored
from dev.tests.checks import EXACT, check, run, words
from dev.tests.models import (ATTENTION, LIMITS, LOWER, SMALL_MODEL, device_of, fits, for_attention,
                              gradients, on_device, poison, poisoned_model, rounds_alone)
from train_gpt2 import ADAMW, BF16, LOW, Verdict, kept_as, pack_batch, to_float


def micro_batches(device):
    """A step's micro-batches add up. Nothing is left of earlier gradients, whether NaN or another
    step's."""
    model, batches, alone = poisoned_model(device, 2, 20), words(257, 3, 2, 2, 20), []
    for batch in batches:
        poison(model, "gradients")
        alone.append(gradients(model, batch))
    together, again = gradients(model, *batches), gradients(model, batches[0])
    for name in together:
        yield (f"sum of d{name}", together[name], sum(np.float64(one[name]) for one in alone),
               KERNEL_LIMIT)
        yield f"d{name} after other micro-batches", again[name], alone[0][name], EXACT


def accumulated_steps(device):
    """A step of several micro-batches has the mean of their losses and of their gradients, as
    AdamW's first moment shows. On a fast GPU that holds whether the step is run, recorded or
    replayed."""
    model, alone, losses = poisoned_model(device, 2, 20), [], []
    batches, parameters = words(257, 3, 2, 2, 20), master_numbers(model)
    for batch in batches:
        alone.append(np.concatenate([array.ravel() for array in gradients(model, batch).values()],
                                    dtype=np.float64))
        losses.append(model.verdict().loss)
    for count in (3, 3, 3, 2, 1):
        packed = [pack_batch(*batch) for batch in batches[:count]]
        model.train_step(*packed, learning_rate=0.0, beta1=0, clip=0)
        norm, loss, *_ = model.verdict()
        mean = sum(alone[:count]) / count
        yield f"loss of {count}", loss, np.mean(losses[:count]), KERNEL_LIMIT
        # A third is rounded again.
        limit = KERNEL_LIMIT if device.dtype == "fp32" else LIMITS[device.dtype]
        yield f"norm of {count}", norm, np.linalg.norm(mean), limit
        yield f"m of {count}", device.get(model.arenas["adam m"].view(np.float32)), mean, limit
    yield "steps", model.step, 5, EXACT
    yield "the parameters stay", master_numbers(model), parameters, EXACT


def repeated_steps(device):
    """Runs with the same seed end with the same bits, in steps of two shapes, whether train_step
    makes the steps (with late reports where the device has them) or pass by pass. A fast GPU
    records the second step of each shape as a graph, and takes no more memory after that."""
    runs, memory, settings = [], [], dict(learning_rate=1e-2, weight_decay=0.1, clip=0.5)
    for pass_by_pass in (False, False, True):
        model, reports, generator = poisoned_model(device, 2, 20), [], np.random.default_rng(1)
        for step in range(7):
            B, T = ((2, 20), (1, 13))[step % 2]
            x, y = generator.integers(257, size=(2, B, T), dtype=np.int32)
            model.forward(y[:1, :7], x[:1, :7])  # a validation between two steps
            if pass_by_pass:
                gradients(model, (x, y))
                model.start_step(**settings)
                model.update_pass()
                reports.append(model.verdict())
            else:
                model.train_step(pack_batch(x, y), **settings)
                late = hasattr(device, "fetch")
                reports.append(device.fetch(model.adam.verdict) if late else model.verdict())
            if device.name == "cuda":
                memory.append((device.gpu.mem_info[0],
                               device.cupy.get_default_memory_pool().total_bytes()))
        reports = [Verdict(*report().tolist()) if callable(report) else report
                   for report in reports]
        runs.append([reports, *(device.get(model.arenas[name])
                                for name in ("adam m", "adam v", "parameters"))])
    for name, *found, by_passes in zip(("losses, norms", "m", "v", "parameters"), *runs):
        yield name, np.stack(found), np.stack([by_passes] * 2), EXACT
    if memory:
        yield ("memory, free and in CuPy's pool", np.array(memory[4:7]), np.array(memory[3:4] * 3),
               EXACT)


def clipped_gradients(device):
    """The norm of a gradient, and the gradient clipped to half of it, as AdamW's first moment
    shows. The update does not change the gradient itself."""
    model, batch = poisoned_model(device, 2, 20), words(257, 2, 2, 20)
    for clip, left in ((0, 1), (0.5, 0.5), (2, 1)):
        gradient = np.concatenate([array.ravel() for array in gradients(model, batch).values()])
        norm = np.linalg.norm(np.float64(gradient))
        model.start_step(clip=clip * norm, beta1=0)
        model.update_pass()
        yield f"norm, clip {clip}", model.verdict().norm, norm
        yield (f"m, clip {clip}", device.get(model.arenas["adam m"].view(np.float32)),
               left * gradient)
        yield (f"gradient, clip {clip}", device.get(model.arenas["gradients"].view(np.float32)),
               gradient, EXACT)


def other_ways(device):
    """Recomputing activations, and computing logits for a part of the batch at a time, give the
    same gradients."""
    batches, found, memory = words(257, 2, 2, 2, 21), [], []  # 42 tokens: parts of 11, 11, 11 and 9
    for recompute, rows in ((0, 42), (1, 42), (0, 7)):
        with mock.patch("train_gpt2.LOGIT_ROWS", rows):
            model = poisoned_model(device, 2, 21, recompute=recompute)
            found.append(gradients(model, *batches) | {"loss": model.verdict().loss})
            memory.append(model.arenas["activations"].nbytes)
    for i, way in ((1, "recomputed"), (2, "in parts")):
        check(f"{device.dtype} other ways: less memory {way}", memory[i] < memory[0],
              f"{memory[i]} < {memory[0]}")
        for name, gradient in found[i].items():
            yield (f"{way}: {name if name == 'loss' else 'd' + name}", gradient, found[0][name],
                   LIMITS[device.dtype])


def computed_again(device):
    """--recompute 2 changes no bit of losses, of gradients of micro-batches, or of parameters after
    some updates: it runs the same kernels and products on the same numbers. The same holds for ReLU
    attention."""
    batches = words(257, 3, 2, 2, 21)
    for kind in ("softmax", "relu"):
        found, memory = [], []
        for recompute in (0, 2):
            model = poisoned_model(device, 2, 21, kind, recompute)
            found.append(gradients(model, *batches) | {"loss": np.float32(model.verdict().loss)})
            for _ in range(3):  # on a fast GPU: run, recorded, replayed
                model.train_step(*[pack_batch(*batch) for batch in batches[:2]], learning_rate=1e-2)
            found[-1] |= {f"master, {kind}": master_numbers(model),
                          "verdict": device.get(model.adam.verdict)}
            memory.append(model.arenas["activations"].nbytes)
        check(f"{device.dtype} computed again: less memory", memory[1] < memory[0],
              f"{memory[1]} < {memory[0]}")
        for name, array in found[1].items():
            yield name, array, found[0][name], EXACT


def moments_in_bf16(device):
    """With moments in bf16, the same seed gives the same run and another seed another run. Losses
    are close to those with fp32 moments."""
    batch, runs = pack_batch(*words(257, 2, 2, 20)), {}
    for moment, seed, again in ((np.float32, 0, 0), (np.float32, 1,
                                                     0), (BF16, 0, 0), (BF16, 0, 1), (BF16, 1, 0)):
        model, losses = (poisoned_model(device, 2, 20,
                                        moments="bf16" if moment == BF16 else "fp32"), [])
        for _ in range(12):
            model.train_step(batch, learning_rate=5e-3, **dict(seed=seed) if moment == BF16 else {})
            losses.append(model.verdict().loss)
        runs[moment, seed, again] = np.array(losses), device.get(model.arenas["parameters"])
        size, wish = (model.arenas["adam v"].nbytes,
                      model.arenas["gradients"].nbytes // 4 * np.dtype(moment).itemsize)
        yield "bytes of a moment", size, wish, EXACT
    for i, what in enumerate(("losses", "parameters")):
        yield (f"{what} with fp32 moments and another seed", runs[np.float32, 1, 0][i],
               runs[np.float32, 0, 0][i], EXACT)
        yield f"{what} again", runs[BF16, 0, 1][i], runs[BF16, 0, 0][i], EXACT
        check(f"{device.dtype} moments: {what} of another seed",
              (runs[BF16, 1, 0][i] != runs[BF16, 0, 0][i]).any())
    limit = 1e-3 if device.name == "cpu" else 3e-3  # an H200 sums in another order: 1.2e-3 was seen
    yield "losses beside fp32 moments", runs[BF16, 0, 0][0], runs[np.float32, 0, 0][0], limit
    check(f"{device.dtype} moments: it has learned", losses[-1] < losses[0] - 0.5,
          f"{losses[0]:.2f} {losses[-1]:.2f}")


def mean_moments(device):
    """After 1,500 steps with the same gradient, the mean of the second moment in bf16 is right.
    Rounding to nearest would have stopped it at less than a third of that."""
    gradient, steps = np.float32(0.01), 1500
    model = poisoned_model(device, 2, 20, L=1, moments="bf16")
    gradients = model.arenas["gradients"].view(np.float32)
    device.put(gradients, np.full(gradients.size, gradient))
    for _ in range(steps):
        model.start_step(learning_rate=0.0, seed=42)
        model.update_pass()
        model.norm_of = lambda gradients: None  # the norm stays
    for name, wish, limit in (("m", gradient, 1e-4), ("v", gradient**2 * (1 - 0.999**steps), 1e-3)):
        found = to_float(device.get(model.arenas[f"adam {name}"].view(BF16)))
        yield f"the mean of {name}", np.mean(found, dtype=np.float64), wish, limit


def bits_of_updates(device):
    """AdamW gives the same bits for fp32 numbers in halves as for whole ones. With a learning rate
    of 0 no bit changes, whatever the halves are, except that infinities and NaNs all become NaN.
    (CuPy compiles kernels to treat denormal numbers as zeros.)"""
    every = (np.arange(2**16).repeat(LOWER.size).astype(BF16),
             np.resize(LOWER, 2**16 * LOWER.size).astype(LOW))
    normal = np.float32(np.random.default_rng(1).standard_normal((4, every[0].size)))
    grads, m, v = normal[1], normal[2], normal[3] ** 2

    def updated(device, rate, *numbers):
        model, results = SimpleNamespace(device=device, step=2, adam=SimpleNamespace()), []
        for array in (*numbers, grads * (rate > 0), m * (rate > 0), v, np.uint64(
            [0, grads.size]), np.int32([0]), np.zeros(len(ADAMW),
                                                      np.float32), np.float32(Verdict(1, 0, 1, 0))):
            results.append(on_device(device, array))
        *arrays, starts, decayed, model.adam.settings, verdict = results
        GPT2.start_step(model, learning_rate=rate)
        given = arrays if len(numbers) == 2 else (arrays[0], None, *arrays[1:])
        device.launch("adamw", grads.size, *given, starts, decayed, 1, grads.size,
                      model.adam.settings, verdict)
        return [*map(device.get, arrays[: len(numbers)])]

    upper, low = updated(device, 0.0, *every)
    before, after, finite = joined(*every), joined(upper, low), np.isfinite(joined(*every))
    before[abs(before) < np.finfo(np.float32).tiny] *= device.name == "cpu"  # which leaves the sign
    yield "at a rate of 0", after[finite].view(np.uint32), before[finite].view(np.uint32), EXACT
    check("bf16 updates: not finite",
          np.isnan(to_float(upper)[~finite]).all() and np.isnan(after[~finite]).all())
    [whole] = updated(device_of(device.name, "fp32", 64, 2), 1e-2, normal[0])
    halved = updated(device, 1e-2, *(kept_as(normal[0], kind) for kind in (BF16, LOW)))
    yield "of halves", joined(*halved), whole, EXACT
    yield "of halves, rounded", halved[0], halves(whole.astype(np.float64))[0], EXACT


def smaller_batches(device):
    """A model made for (2,maxT), given (B,t): no logit depends on later tokens, and the gradients
    of a batch are the average of those of its two rows. The gradient of a bias takes two stages at
    520 tokens, one at fewer."""
    T, limit = 260, LIMITS[device.dtype]
    model = poisoned_model(device, 2, T)
    model.set_parameters(draw_parameters(model.config, 42))
    x, y = words(257, 2, 2, T)
    model.forward(x, x)
    logits = to_float(device.get(model.acts.logits)).reshape(2, T, -1)
    for t in (1, 50, T):
        model.forward(x[:1, :t], x[:1, :t])
        yield f"logits of (1,{t})", device.get(model.acts.logits), logits[0, :t], limit
        rows = gradients(model, (x[:1, :t], y[:1, :t]), (x[1:, :t], y[1:, :t]))
        for name, gradient in gradients(model, (x[:, :t], y[:, :t])).items():
            yield f"d{name} of (2,{t})", 2 * gradient, rows[name], limit


def next_logits(device):
    """The logits of the next token are the last row of a forward pass without padding. The model
    has room for T tokens, and T is no multiple of 64, to which tokens are padded."""
    T = 100
    model, tokens = poisoned_model(device, 1, T), words(257, T)
    for n in (1, 63, 64, 65, T):
        model.forward(tokens[None, :n], tokens[None, :n])
        expected = to_float(device.get(model.acts.logits))[n - 1, :257]
        poison(model, "activations")
        yield (f"after {n} tokens", model.next_logits(tokens[:n].tolist()), expected,
               LIMITS[device.dtype])


def attention_of_nan(device, T, HS):
    """A NaN in q, k or v of token p of one head goes through the three kernels of attention. All
    rows that depend on it become NaN, and the other heads do not change."""
    B, NH, p, channel, real = 2, 3, T // 2, 5, device.real
    qkv, dout = (np.float32(np.random.default_rng(1).normal(size=(B, T, *of_token)))
                 for of_token in ((3, NH, HS), (NH, HS)))

    in_relu = for_attention(device, "relu")

    def array(values, dtype=real):
        return on_device(device, stored(values, dtype))

    def launch(kernel, *arrays, tiled, on=device):
        a = SimpleNamespace(B=B, T=T, NH=NH, scale=HS**-0.5)
        sizes = on.attention_sizes
        shared = sizes.shared_forward if kernel == "attention_forward" else sizes.shared_backward
        launch_trainers(on, a, kernel, NH, shared, *arrays, tiled=tiled)

    def outputs(given):
        """out, dq, dk and dv (4,B,T,NH,HS), in fp32."""
        given, douts, out, dqkv = (array(given), array(dout), array(np.nan * dout),
                                   array(np.nan * qkv))
        lse, delta = (array(np.full((B, NH, T), np.nan), np.float32) for _ in range(2))
        launch("attention_forward", out, lse, tiled=(given,))
        launch("attention_backward_q", dqkv, delta, lse, out, tiled=(given, douts))
        launch("attention_backward_kv", dqkv, delta, lse, tiled=(given, douts))
        return to_float(np.stack([device.get(out), *device.get(dqkv).transpose(2, 0, 1, 3, 4)]))

    def relu_output(given):
        given, out, lse = (array(given), array(np.nan * dout),
                           array(np.full((B, NH, T), np.nan), np.float32))
        launch("attention_forward", out, lse, tiled=(given,), on=in_relu)
        return to_float(device.get(out))

    clean, itself, before, after, every = (outputs(qkv), slice(p, p + 1), slice(p + 1), slice(p, T),
                                           slice(T))
    yield "finite without a NaN", np.isfinite(clean), True, EXACT
    # The rows of out, dq, dk and dv that become NaN; dv does not depend on v.
    for part, rows in enumerate((
            (itself, itself, before, before), (after, after, every, every), (after, after, every))):
        # A GPU's NaN, a CPU's.
        for bits in (0x7FFF, 0xFFC0) if real == BF16 else (0x7FFFFFFF, 0xFFC00000):
            poisoned = stored(qkv, real).view(f"u{np.dtype(real).itemsize}")
            poisoned[1, p, part, 1, channel] = bits
            found, name = outputs(poisoned.view(real)), f"{bits:#x} in {'qkv'[part]}"
            hit = np.concatenate([found[i, 1, of_part, 1, channel]
                                  for i, of_part in enumerate(rows)])
            yield f"{name}, its rows are NaN", np.isnan(hit), True, EXACT
            found[:, 1, :, 1] = clean[:, 1, :, 1]
            yield f"{name}, other heads", found, clean, EXACT
            found = relu_output(poisoned.view(real))[1, rows[0], 1, channel]
            yield f"{name}, ReLU's rows are NaN", np.isnan(found), True, EXACT


FEW = micro_batches, other_ways, next_logits
OF_ALL = *FEW, accumulated_steps, repeated_steps, clipped_gradients, computed_again, smaller_batches
OF_GPT2 = *OF_ALL, moments_in_bf16  # an update is the same for all


def check_steps(device_name, dtype, plain, architecture=GPT2):
    """Run all of these on one device; few of them, if its dtype only rounds otherwise."""
    sizes = SMALL_MODEL[architecture]
    group = sizes["NH"] // sizes.get("NKV", sizes["NH"])
    device = device_of(device_name, dtype, sizes["C"], sizes["NH"], plain, architecture,
                       group=group)
    few = rounds_alone(device_name, dtype)
    tests = FEW if few else OF_GPT2 if architecture is GPT2 else OF_ALL
    if architecture is GPT2 and dtype == "bf16":
        tests += mean_moments, bits_of_updates
    one_by_one = (device_name, dtype, architecture) == ("emulated", "fp32", GPT2)
    for test in () if one_by_one else tests:  # by test_steps of test_trainer.py
        run(f"{dtype} {test.__name__}:", test, device)
    # HS = 32, 64, 128.
    heads = ((64, 2, 40), (768, 12, 70), (768, 6, 130)) if plain and architecture is GPT2 else ()
    for C, NH, T in heads[:1] if few else heads:
        if not fits(device_name, HS=C // NH):
            continue
        device = device_of(device_name, dtype, C, NH,
                           only=ATTENTION if device_name != "cuda" and C > 64 else None)
        run(f"{dtype} attention, HS={C // NH},", attention_of_nan, device, T, C // NH)
