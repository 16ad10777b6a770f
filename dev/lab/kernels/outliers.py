"""whether a step is an outlier among the steps before it, by the z-scores of its loss and norm"""
import numpy as np

from dev.features.outliers import WINDOW
from dev.lab.ladder import Ladder, Version, f32
from train_gpt2 import Verdict

KINDS = ("normal", "outlier", "constant")


def problem(draw, seen, loss=0, norm=0, loss_limit=0, norm_limit=0, update=1, step=1):
    """One step after `seen` others. loss and norm are numbers of KINDS; an outlier is 9 deviations
    above the others, and a constant one is equal to them. update: 0 if judge has decided against
    one. The z-scores, by llm.c's formula, are NaN without a whole window of steps before."""
    windows, given = np.zeros((2, WINDOW)), np.zeros(2)
    for row, kind in enumerate((loss, norm)):
        history = f32(3 + draw.normal(seen) ** 2)
        if KINDS[kind] == "constant":
            history[:] = 3
        for i in range(seen):  # each takes the place of the oldest
            windows[row, i % WINDOW] = history[i]
        high = history[-WINDOW:].mean() + 9 * history[-WINDOW:].std() if seen else 3
        given[row] = f32([4, high, 3][kind])
    before = Verdict(loss=given[0], norm=given[1], update=update, stopped=1 - update)
    inputs = dict(verdict=np.float64(before), windows=windows.view(np.uint64),
                  seen=np.array([seen], np.int32), z_scores=draw.fp32(WINDOW, 2), step=f32([step]),
                  loss_limit=float(loss_limit), norm_limit=float(norm_limit))
    after, z_scores = before, inputs["z_scores"].copy()
    if update:
        windows = windows.copy()
        windows[:, seen % WINDOW] = given
        deviation = windows.std(1)
        z = np.where(deviation > 0,
                     (given - windows.mean(1)) / np.where(deviation > 0, deviation, 1), 0)
        z_scores[step % WINDOW] = z if seen >= WINDOW else np.nan
        loss_z, norm_z = z_scores[step % WINDOW]
        after = before._replace(update=not (0 < loss_limit < loss_z or 0 < norm_limit < norm_z))
    return inputs, dict(verdict=np.float64(after), windows=np.float64(windows.view(np.uint64)),
                        seen=np.array([seen + update], np.float64), z_scores=z_scores)


LADDER = Ladder(
    problem, "seen=300", (
        "seen=0", "seen=1", "seen=127", "seen=128", "seen=129", "seen=300,loss=1,norm=1,step=307",
        "seen=290,loss=1,loss_limit=3", "seen=290,norm=1,norm_limit=3,step=127",
        "seen=290,loss=1,norm_limit=3",
        "seen=290,norm=1,loss_limit=3", "seen=290,loss=1,norm=1,loss_limit=30,norm_limit=30",
        "seen=100,loss=1,norm=1,loss_limit=1,norm_limit=1",
        "seen=200,loss=2,norm=2,loss_limit=3,norm_limit=3",
        "seen=250,update=0", "seen=250,loss=1,update=0,loss_limit=3"),
    args="verdict windows seen z_scores loss_limit norm_limit step", fp32="verdict z_scores step",
    exact="windows seen", versions=(
        Version("one warp: the trainer's", "skip_outliers", "32", threads=(None,), trainer=True,
                held_back="one warp: a launch, then loads, sums in double precision and shuffles, "
                "each of which waits for the one before"),
    ))
