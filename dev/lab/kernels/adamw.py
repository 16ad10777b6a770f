"""a step of AdamW on n fp32 numbers with clipped gradients; in bf16, params and low hold the halves
of their bits"""
import functools

import numpy as np

from dev.common.bf16 import joined
from dev.lab.exercises import Exercise
from dev.lab.ladder import ANY, Ladder, Version, f32, in_parts
from train_gpt2 import ADAMW, BF16, LOW, Verdict, to_float

NORM = 2.5
# Numbers, as bits, that do not change without weight decay: two ties, one with an even number below
# it; one that rounds up to a power of 2; zeros and their neighbours; and a NaN whose sum with
# 0x8000 would be zero.
STAY = np.uint32([0x3C808000, 0xBC818000, 0xBCFF8001, 0x3CFF7FFF, 0, 0x80000000, 1, 0x7FFFFFFF])


def halves(x):
    """For fp32 numbers in float64: the bits of the nearest bfloat16, ties away from zero, and the
    distance in steps of fp32."""
    _, exponent = np.frexp(x)
    # Of a bfloat16's bits; below 2**-126 all have the same.
    last = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    upper = np.copysign(np.floor(abs(x / last) + 0.5) * last, x)
    with np.errstate(over="ignore"):  # to infinity
        bits, of_upper = (np.float32(values).view(np.uint32).astype(np.int64)
                          for values in (x, upper))
    return (of_upper >> 16).astype(BF16), (bits - of_upper).astype(LOW)


def problem(draw, n, tensors=16, clip=1, step=3, update=1, moment=f32):
    """Gradients over ten decades, the smallest so small that eps counts, after `step` - 1 such
    steps. Every third tensor decays. They are clipped to clip / 2 of their norm, unless clip is 0.
    Without update, nothing changes. moment rounds to what m and v are stored in."""
    rate1, rate2 = f32([0.1, 0.001])
    values = dict.fromkeys(ADAMW, 0) | dict(
        learning_rate=0.01, rate1=rate1, rate2=rate2, eps=1e-8, weight_decay=0.1, clip=clip * NORM /
        2, correction1=1 / (1 - (1 - rate1) ** step), correction2=1 / (1 - (1 - rate2) ** step))
    settings = f32([values[name] for name in ADAMW])
    s = dict(zip(ADAMW, settings))
    verdict = np.float64(Verdict(norm=NORM, loss=0, update=update, stopped=1 - update))
    cuts = 32 * np.sort(draw.rng.choice(np.arange(1, n // 32), tensors - 1, replace=False))
    starts, decayed = np.r_[0, cuts, n].astype(np.uint64), np.resize(np.int32([1, 0, 0]), tensors)
    normal = [draw.pool(n) for _ in range(4)]
    size = 10 ** draw.rng.uniform(-10, 0, normal[0].size)
    master, grads = (np.resize(f32(x), n) for x in (0.02 * normal[0], size * normal[1]))
    m, v = (np.resize(moment(x * (step > 1)), n)
            for x in (size * normal[2], (size * (0.5 + abs(normal[3]))) ** 2))
    master[-8:], grads[-8:], m[-8:], v[-8:] = STAY.view(np.float32), 0, 0, 0

    def new(p, g, m, v, decayed):
        g = g * min(1, s["clip"] / NORM) if clip else g
        new_m, new_v = m + s["rate1"] * (g - m), v + s["rate2"] * (g**2 - v)
        change = new_m * s["correction1"] / (np.sqrt(new_v * s["correction2"]) + s["eps"])
        return p - s["learning_rate"] * (change + s["weight_decay"] * decayed * p), new_m, new_v

    before = master, grads, m, v, np.repeat(decayed.astype(bool), np.diff(starts.astype(np.int64)))
    after = ((x.reshape(-1) for x in in_parts(new, *(x.reshape(-1, 32) for x in before)))
             if update else (master, m, v))
    truth = dict(zip(("params", "m", "v"), after))
    inputs = dict(tensors=tensors, settings=settings, verdict=verdict, starts=starts,
                  decayed=decayed, params=master, low=None, grads=grads, m=m, v=v)
    if draw.in_bf16:
        upper, low = in_parts(halves, master)
        upper[-1], low[-1] = 0x8000, -1  # the NaN's
        inputs |= dict(params=upper, low=low)
        truth["master"] = truth["params"]
        if update:  # with another last bit of the sum, all of low may be another
            truth["low"] = np.full(n, ANY)
        else:
            truth |= dict(params=f32(to_float(upper)), low=low.astype(np.float64))
    terms = np.nan_to_num(abs(master))
    return inputs, truth, dict(master=terms, params=terms, m=abs(m))


def line_by_line(device, a):
    launch = functools.partial(device.launch, threads=a.threads)
    launch("adamw1_clip", a.n, a.clipped, a.grads, a.n, a.settings, a.verdict)
    launch("adamw1_decay", a.n, a.params, a.low, a.starts, a.decayed, a.tensors, a.n, a.settings)
    launch("adamw1_m", a.n, a.m, a.clipped, a.n, a.settings)
    launch("adamw1_v", a.n, a.v, a.clipped, a.n, a.settings)
    launch("adamw1_step", a.n, a.params, a.low, a.m, a.v, a.n, a.settings)


LADDER = Ladder(
    problem, "n=124475904",
    ("n=32,tensors=1,clip=0,step=1", "n=9600,tensors=14,clip=1", "n=300032,tensors=32,clip=4"),
    trainer_checks=("n=9600,tensors=14,update=0", "n=9600,tensors=3,clip=0",
                    "n=1024,tensors=32,step=1"), args="params low grads m v starts decayed tensors "
    "n settings verdict", fp32="grads clipped m v settings verdict", sums="master params m",
    made_of=dict(master=lambda a: joined(a.params, a.low)), versions=(
        Version("five kernels, a line of the algorithm each", line_by_line,
                threads=(256, 512, 1024), scratch=lambda a: dict(clipped=(a.n,))),
        Version("one kernel, one thread per number", "adamw2", "n"),
        Version("16 bytes per lane: the trainer's", "adamw", "n", trainer=True),
    ))


EXERCISE = Exercise(
    "adamw2", "an update of many arrays in one pass", "a number",
    ("settings is a struct in device memory: AdamW a = *settings, then a.learning_rate, a.rate1, "
     "and so on.",
     "Which tensor has number i? starts is sorted: go through it, or bisect it."),
    helpers="master math", shapes=dict(settings="1", norm="1"),
    note=("For each number, with the fields of settings:",
          "    g = grads[i] * (clip / norm if 0 < clip < norm else 1)",
          "    m += rate1 * (g - m), and v += rate2 * (g * g - v)",
          "    change = m * correction1 / (sqrt(v * correction2) + eps)",
          "    params -= learning_rate * (change + weight_decay * params), the decay only if "
          "decayed[tensor]",
          "Tensor j is the numbers from starts[j] to starts[j + 1] - 1."),
    mistakes=(
        ("the gradients are not clipped: each is multiplied by min(1, clip / norm)",
         'g * min(1, s["clip"] / NORM) if clip else g', "g"),
        ("the weight decay is left out", ' + s["weight_decay"] * decayed * p', ""),
        ("all tensors decay: only those with decayed[i] do", "* decayed *", "*"),
        ("those tensors decay whose decayed[i] is 0", "* decayed *", "* ~decayed *"),
        ("v takes the square of the gradient, and not the gradient", "g**2", "g"),
        ("the step uses m from before its update", "change = new_m", "change = m"),
        ("correction1 and correction2 are left out", ' * s["correction1"]', "",
         ' * s["correction2"]', ""),
        ("correction1 is left out", ' * s["correction1"]', ""),
        ("correction2 is left out", ' * s["correction2"]', ""),
        ("eps is added inside the root: it belongs outside, sqrtf(v) + eps",
         '"correction2"]) + s["eps"]', '"correction2"] + s["eps"])'),
        ("eps is left out", ' + s["eps"]', ""),
        ("v's root is missing", "np.sqrt", "")))
