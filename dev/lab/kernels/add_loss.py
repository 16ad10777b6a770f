"""verdict's loss = share * the sum of losses (N), or += that with accumulate"""
from dev.lab.ladder import Ladder, Version, f32
from train_gpt2 import Verdict

LOSS = Verdict._fields.index("loss")


def problem(draw, N, accumulate=0):
    """accumulate: 0 or 1."""
    verdict, losses = abs(draw.fp32(len(Verdict._fields))), f32(3 + 10 * draw.normal(N) ** 2)
    share, truth = float(f32(0.125 / N)), verdict.copy()
    truth[LOSS] = share * losses.sum() + verdict[LOSS] * accumulate
    return (dict(share=share, accumulate=accumulate, verdict=verdict, losses=losses),
            dict(verdict=truth))


LADDER = Ladder(
    problem, "N=8192", ("N=1", "N=37,accumulate=1", "N=1024", "N=5000,accumulate=1"),
    fp32="verdict losses", versions=(
        Version("one block: the trainer's", "add_loss", "1", args="verdict losses share N "
                "accumulate", trainer=True, held_back="one block adds up all losses in a fixed "
                "order: a launch and the wait for its loads, whatever the bytes are"),
    ))
