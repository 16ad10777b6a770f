"""out (N,4C) = gelu(inp)"""
import numpy as np

from dev.lab.formulas import gelu
from dev.lab.ladder import ODD_SHAPES, Ladder, Version, in_parts


def gelu_inputs(draw, N, OC):
    """(N,OC): normal numbers, where the formula's constants count. In every 64th row half of them
    are up to 100, where exponentials overflow. Only few, since a GPU divides by infinity slowly,
    and training does not."""
    inp = draw(N, OC)
    large = draw.real(np.resize(draw.rng.uniform(-100, 100, 9973), inp[::64].shape))
    inp[::64] = np.where(np.resize(draw.rng.random(10007) < 0.5, large.shape), inp[::64], large)
    return inp


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    inp = gelu_inputs(draw, N, OC)
    return dict(N=N, OC=OC, inp=inp), dict(out=in_parts(gelu, inp)), dict(out=abs(inp))


# 1 + tanh u cancels, so that inp's size counts.
BY_TANH = dict(sums="out", limits=dict(fp32=5e-7, bf16=5e-7))


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32",), args="out inp N OC",
    versions=(
        Version("one thread per number, by tanh", "gelu_forward1", "N*OC", **BY_TANH),
        Version("16 bytes per lane", "gelu_forward2", "N*OC", **BY_TANH),
        Version("one exponential: the trainer's", "gelu_forward", "N*OC", trainer=True, held_back={
                    "bf16": "some twenty instructions for each number take more than half as long, "
                    "and not all of them hide behind the memory"}),
    ), torch=lambda torch, x: lambda: torch.nn.functional.gelu(x.inp, approximate="tanh"))
