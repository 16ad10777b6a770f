"""the verdict on a step, from its loss and norm and from windows (2,WINDOW) of those before"""
import numpy as np

from dev.cuda.kernel import Kernel, Version, f32
from train_gpt2 import ADAMW, WINDOW
from train_gpt2 import Verdict as TrainersVerdict

KINDS = ("normal", "outlier", "infinite", "NaN", "constant")


def problem(draw, seen, loss=0, norm=0, loss_limit=0, norm_limit=0, stopped=0):
    """One step after `seen` others. loss and norm are numbers of KINDS; an outlier is 9 deviations above the others,
    and one that is constant is as they are. stopped: 1 if a step before was not finite. The z-scores, by the formula of
    llm.c's detector, are NaN without a whole window of steps before."""
    windows, given = np.zeros((2, WINDOW)), np.zeros(2)
    for row, kind in enumerate((loss, norm)):
        history = f32(3 + draw.normal(seen) ** 2)
        if KINDS[kind] == "constant":
            history[:] = 3
        for step in range(seen):  # each takes the place of the oldest
            windows[row, step % WINDOW] = history[step]
        high = history[-WINDOW:].mean() + 9 * history[-WINDOW:].std() if seen else 3
        given[row] = f32([4, high, np.inf, np.nan, 3][kind])
    verdict = draw.fp32(len(TrainersVerdict._fields))
    verdict[[1, 5]] = given[0], stopped
    settings = dict.fromkeys(ADAMW, 0.0) | dict(loss_limit=float(loss_limit), norm_limit=float(norm_limit))
    inputs = dict(verdict=verdict, windows=windows.view(np.uint64), seen=np.array([seen], np.int32),
                  norm=np.array([given[1], 7]), settings=np.array([settings[name] for name in ADAMW]))
    loss_z, norm_z, update, stops = *verdict[[3, 2]], 0, 1
    if np.isfinite(given).all() and not stopped:
        windows, stops = windows.copy(), 0
        windows[:, seen % WINDOW] = given
        deviation = windows.std(1)
        z = np.where(deviation > 0, (given - windows.mean(1)) / np.where(deviation > 0, deviation, 1), 0)
        loss_z, norm_z = z if seen >= WINDOW else (np.nan, np.nan)
        update = not (0 < loss_limit < loss_z or 0 < norm_limit < norm_z)
    truth = np.array([given[1], given[0], norm_z, loss_z, update, stops], np.float64)
    return inputs, dict(verdict=truth, windows=np.float64(windows.view(np.uint64)), seen=np.array([seen + 1.0 - stops]))


KERNEL = Kernel(
    problem, "seen=300", (
        "seen=0", "seen=1", "seen=127", "seen=128", "seen=129", "seen=300,loss=1,norm=1",
        "seen=290,loss=1,loss_limit=3", "seen=290,norm=1,norm_limit=3", "seen=290,loss=1,norm_limit=3",
        "seen=290,norm=1,loss_limit=3", "seen=290,loss=1,norm=1,loss_limit=30,norm_limit=30",
        "seen=100,loss=1,norm=1,loss_limit=1,norm_limit=1", "seen=200,loss=4,norm=4,loss_limit=3,norm_limit=3",
        "seen=60,loss=2", "seen=60,norm=2", "seen=250,loss=3", "seen=250,norm=3", "seen=250,loss=3,norm=2",
        "seen=250,stopped=1", "seen=250,loss=1,stopped=1,loss_limit=3"),
    fp32="verdict norm settings", exact="windows seen", versions=(
        Version("one warp: the trainer's", "judge", "32", args="verdict windows seen norm settings", threads=(None,),
                trainer=True, held_back={
                    "fp32": "one warp: a launch, then loads, sums in double precision and shuffles, each of "
                            "which waits for the one before",
                    "bf16": "one warp: a launch, then loads, sums in double precision and shuffles, each of "
                            "which waits for the one before"}),
    ))
