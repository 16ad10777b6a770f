"""out (N,4C) = gelu(inp)"""
import numpy as np

from dev.cuda.formulas import gelu
from dev.cuda.kernel import ROWS, Kernel, Version, in_parts


def gelu_inputs(draw, N, OC):
    """(N,OC): half of them normal numbers, where the formula's constants count, and half of them up to 100, where
    exponentials overflow."""
    large = draw.real(np.resize(draw.rng.uniform(-100, 100, 9973), (N, OC)))
    return np.where(np.resize(draw.rng.random(10007) < 0.5, (N, OC)), draw(N, OC), large)


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    inp = gelu_inputs(draw, N, OC)
    return dict(N=N, OC=OC, inp=inp), dict(out=in_parts(gelu, inp)), dict(out=abs(inp))


BY_TANH = dict(sums="out", limits=dict(fp32=5e-7, bf16=5e-7))  # 1 + tanh u cancels, so that inp's size counts


KERNEL = Kernel(
    problem, "B=8,T=1024,C=768", ROWS, trainer_checks=("B=1,T=1,C=32",), args="out inp N OC", versions=(
        Version("a thread a number, by tanh", "gelu_forward1", "N*OC", **BY_TANH),
        Version("16 bytes a lane", "gelu_forward2", "N*OC", **BY_TANH),
        Version("one exponential: the trainer's", "gelu_forward", "N*OC", trainer=True),
    ), torch=lambda torch, x: lambda: torch.nn.functional.gelu(x.inp, approximate="tanh"))
