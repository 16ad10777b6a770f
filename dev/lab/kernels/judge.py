"""the verdict on a step: whether its loss and norm, and those of all steps before it, are finite"""
import numpy as np

from dev.lab.ladder import Ladder, Version
from train_gpt2 import Verdict

KINDS = 3.5, np.inf, np.nan, -np.inf, 3.4028235e38  # the last is the largest fp32


def problem(draw, loss=0, norm=0, stopped=0):
    """loss and norm are numbers of KINDS. stopped: 1 if an earlier step was not finite."""
    loss, norm = KINDS[loss], abs(KINDS[norm])
    stops = stopped or not np.isfinite([loss, norm]).all()
    before = Verdict(norm=draw.fp32(1)[0], loss=loss, update=1 - stopped, stopped=stopped)
    return (dict(verdict=np.float64(before), norm=np.array([norm, 7])),
            dict(verdict=np.float64(Verdict(norm=norm, loss=loss, update=1 - stops,
                                            stopped=stops))))


LADDER = Ladder(
    problem, "loss=0", (
        "loss=0", "loss=4,norm=4", "loss=1", "loss=2", "loss=3", "norm=1", "norm=2",
        "loss=2,norm=2", "stopped=1",
        "stopped=1,norm=2"), fp32="verdict norm", versions=(
        Version("one thread: the trainer's", "judge", "1", args="verdict norm", threads=(None,),
                trainer=True, held_back="one thread: a launch, a load and a store"),
    ))
