"""a step of AdamW with moments in bf16, rounded stochastically by SplitMix64's numbers"""
import numpy as np

from dev.common.bf16 import to_bf16
from dev.lab.kernels import adamw
from dev.lab.ladder import ANY, Ladder, Version, bf16, in_parts


def splitmix64(seed, i):
    """Number i of the random numbers of a seed: uint64 arrays (Steele, Lea and Flood 2014; Vigna's
    splitmix64.c). The state grows by the golden ratio's 64 bits for each number, and is mixed."""
    count = np.asarray(i, np.uint64) + np.uint64(1)
    state = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * count
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rounded(x, parts, terms):
    """x, float64, rounded to a bf16 next to it: away from zero if what is cut off and the parts,
    both of 65,536 of the last bit, make a whole one. ANY where fp32's own rounding of sums of such
    terms may decide that."""
    _, exponent = np.frexp(x)
    last = np.ldexp(1.0, exponent - 8)
    below = np.trunc(x / last)
    excess = 2**16 * (abs(x / last - below) - 1) + parts
    unsure = abs(excess) <= 8 * (1 + terms / np.maximum(abs(x), 1e-300))
    return np.where(unsure & (x / last != below), ANY, last * (below + np.sign(x) * (excess >= 0)))


def problem(draw, n, piece=0, seed=7, step=3, **sizes):
    """As adamw's. A tensor is one piece, or several of `piece` numbers, with numbers of other ranks
    between them."""
    inputs, truth, terms = adamw.problem(draw, n, step=step, moment=bf16, **sizes)
    starts, tensors = inputs["starts"], inputs["tensors"]
    pieces = np.full(tensors, piece or n, np.uint64)
    strides = pieces + draw.rng.integers(0, 2**36 // n, tensors, np.uint64)
    places = np.stack([draw.rng.integers(0, 2**38, tensors, np.uint64), pieces, strides])
    settings = dict(zip(adamw.ADAMW, inputs["settings"]))

    def new(i, m, v, m_before, v_before, grads):
        tensor = np.searchsorted(starts[1:], i, side="right")
        j, (first, length, stride) = i - starts[tensor], places[:, tensor]
        bits = splitmix64(seed, np.uint64(step << 40) + first + j // length * stride + j % length)
        terms = abs(m_before) + settings["rate1"] * abs(grads)
        return (rounded(m, (bits & np.uint64(0xFFFF)).astype(float), terms),
                rounded(v, (bits >> np.uint64(16) & np.uint64(0xFFFF)).astype(float), abs(v)))

    given = truth["m"], truth["v"], inputs["m"], inputs["v"], inputs["grads"]
    after = in_parts(new, np.arange(n, dtype=np.uint64).reshape(-1, 32),
                     *(x.reshape(-1, 32) for x in given))
    truth |= dict(zip(("m", "v"), (x.reshape(-1) for x in after)))
    inputs |= dict(places=places, noise=np.float32([seed, step]), m=to_bf16(inputs["m"]),
                   v=to_bf16(inputs["v"]))
    return inputs, truth, {name: terms[name] for name in ("master", "params")}


LADDER = Ladder(
    problem, "n=124475904", ("n=32,tensors=1,clip=0,step=1", "n=9600,tensors=14,clip=1,piece=13",
                             "n=300032,tensors=32,clip=4,seed=16777215"),
    trainer_checks=("n=9600,tensors=14,update=0", "n=9600,tensors=3,clip=0,piece=24",
                    "n=9600,tensors=14,step=70000",
                    "n=1024,tensors=32,step=1,piece=1"),
    args="params low grads m v starts decayed tensors n settings verdict places noise",
    fp32="grads settings verdict noise", exact="m v", sums="master params",
    made_of=adamw.LADDER.made_of, versions=(
        Version("a hash of the number's place rounds it: the trainer's", "adamw_bf16", "n",
                trainer=True),
    ))
