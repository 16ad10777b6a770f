"""a step of AdamW on n numbers, clipped, in tensors of arenas; params are rounded copies of the master"""
import functools

import numpy as np

from dev.cuda.kernel import Kernel, Version, f32, in_parts
from train_gpt2 import ADAMW, Verdict

NORM = 2.5


def problem(draw, n, tensors=16, clip=1, step=3, update=1, seed=0, moment=f32):
    """Gradients of ten decades, of which the small bring out eps, after `step` - 1 steps with such; every third tensor
    decays. They are clipped to so many halves of their norm, unless clip is 0. Without update, nothing changes. moment
    rounds to what m and v are stored in."""
    rate1, rate2 = f32([0.1, 0.001])
    values = dict.fromkeys(ADAMW, 0) | dict(
        learning_rate=0.01, rate1=rate1, rate2=rate2, eps=1e-8, weight_decay=0.1, clip=clip * NORM / 2,
        correction1=1 / (1 - (1 - rate1) ** step), correction2=1 / (1 - (1 - rate2) ** step),
        seed=seed, step=step)
    settings = f32([values[name] for name in ADAMW])
    s = dict(zip(ADAMW, settings))
    verdict = np.float64(Verdict(norm=NORM, loss=0, norm_z=0, loss_z=0, update=update, stopped=1 - update))
    cuts = 32 * np.sort(draw.rng.choice(np.arange(1, n // 32), tensors - 1, replace=False))
    starts, decayed = np.r_[0, cuts, n].astype(np.uint64), np.resize(np.int32([1, 0, 0]), tensors)
    normal = [draw.pool(n) for _ in range(4)]
    size = 10 ** draw.rng.uniform(-10, 0, normal[0].size)
    master, grads = (np.resize(f32(x), n) for x in (0.02 * normal[0], size * normal[1]))
    m, v = (np.resize(moment(x * (step > 1)), n) for x in (size * normal[2], (size * (0.5 + abs(normal[3]))) ** 2))

    def new(p, g, m, v, decayed):
        g = g * min(1, s["clip"] / NORM) if clip else g
        m, v = m + s["rate1"] * (g - m), v + s["rate2"] * (g**2 - v)
        change = m * s["correction1"] / (np.sqrt(v * s["correction2"]) + s["eps"])
        return p - s["learning_rate"] * (change + s["weight_decay"] * decayed * p), m, v

    before = master, grads, m, v, np.repeat(decayed.astype(bool), np.diff(starts.astype(np.int64)))
    after = (x.reshape(-1) for x in in_parts(new, *(x.reshape(-1, 32) for x in before))) if update else (master, m, v)
    truth = dict(zip(("master", "m", "v"), after))
    inputs = dict(tensors=tensors, settings=settings, verdict=verdict, starts=starts, decayed=decayed, master=master,
                  grads=grads, m=m, v=v)
    if not draw.in_bf16:
        inputs["params"] = None  # they are the master
    elif update:
        truth["params"] = truth["master"]
    else:
        inputs["params"] = truth["params"] = draw(n)
    return inputs, truth, dict(master=abs(master), params=abs(master), m=abs(m))


def line_by_line(device, a):
    launch = functools.partial(device.launch, threads=a.threads)
    launch("adamw1_clip", a.n, a.clipped, a.grads, a.n, a.settings, a.verdict)
    launch("adamw1_decay", a.n, a.master, a.starts, a.decayed, a.tensors, a.n, a.settings)
    launch("adamw1_m", a.n, a.m, a.clipped, a.n, a.settings)
    launch("adamw1_v", a.n, a.v, a.clipped, a.n, a.settings)
    launch("adamw1_step", a.n, a.params, a.master, a.m, a.v, a.n, a.settings)


KERNEL = Kernel(
    problem, "n=124475904", ("n=32,tensors=1,clip=0,step=1", "n=9600,tensors=14,clip=1", "n=300032,tensors=32,clip=4"),
    trainer_checks=("n=9600,tensors=14,update=0", "n=9600,tensors=3,clip=0", "n=1024,tensors=32,step=1"),
    args="params master grads m v starts decayed tensors n settings verdict",
    fp32="master grads clipped m v settings verdict", sums="master params m", versions=(
        Version("five kernels, a line of the algorithm each", line_by_line, threads=(256, 512, 1024),
                scratch=lambda a: dict(clipped=(a.n,))),
        Version("one kernel, a thread a number", "adamw2", "n"),
        Version("16 bytes a lane: the trainer's", "adamw", "n", trainer=True),
    ))
