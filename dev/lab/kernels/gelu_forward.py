"""out (N,4C) = gelu(inp)"""
import numpy as np

from dev.lab.exercises import Exercise
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


def formula(a):
    x = a.inp
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return dict(out=x / 2 * (1 + np.tanh(u)))


EXERCISE = Exercise(
    "gelu_forward1", "arithmetic in float, results in real, and a function of one's own",
    "a number of out",
    ("The index and the bound are those of residual_forward, with OC numbers in a row.",
     "C has no pi: sqrt(2/pi) is 0.7978846f. And 1/2 is 0 in C, as both are whole numbers: write "
     "0.5f."),
    helpers="to_float from_float math",
    note=("The formula of Hendrycks and Gimpel (2016) is",
          "    gelu(x) = x/2 (1 + tanh(u)), with u = sqrt(2/pi) (x + 0.044715 x^3)",
          "Both are equal, since 1 + tanh(u) = 2 sigmoid(2 u). You may write either."),
    formula=formula, mistakes=(
        ("this is GELU by erf. GPT-2's is the one by tanh", "np.tanh(u)", "erf(x / np.sqrt(2))"),
        ("e^u is infinite in fp32 from u = 89 on, and infinite / infinite is NaN. tanhf has no "
         "such limit; or write the quotient with e^(-2|u|)", "np.tanh(u)",
         "(exp32(u) - exp32(-u)) / (exp32(u) + exp32(-u))"),
        ("e^(2u) is infinite in fp32 from u = 45 on, and infinite / infinite is NaN. Divide by 1 + "
         "e^(-2u)", "np.tanh(u)", "2 * exp32(2 * u) / (1 + exp32(2 * u)) - 1"),
        ("0.044715 is left out", "0.044715 * ", ""),
        ("the term 0.044715 x^3 is left out", " + 0.044715 * x**3", ""),
        ("this has x^2; the formula has x^3", "x**3", "x**2"),
        ("the root is missing: sqrt(2/pi) is 0.7978846", "np.sqrt(2 / np.pi)", "2 / np.pi"),
        ("sqrt(2/pi), which is 0.7978846, is left out", "np.sqrt(2 / np.pi) * ", ""),
        ("it is tanh(u), with u = sqrt(2/pi) (x + 0.044715 x^3), and not tanh(2u)", "tanh(u)",
         "tanh(2 * u)")))
