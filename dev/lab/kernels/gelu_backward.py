"""dinp (N,4C), the gradient of gelu(inp), becomes that of inp"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import dgelu, sigmoid
from dev.lab.kernels.gelu_forward import gelu_inputs
from dev.lab.ladder import ODD_SHAPES, Ladder, Version, in_parts


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    inp, dout = gelu_inputs(draw, N, OC), draw(N, OC)
    return (dict(N=N, OC=OC, inp=inp, dinp=dout), dict(dinp=in_parts(dgelu, dout, inp)),
            dict(dinp=abs(dout)))


# Near gelu' = 0 its terms cancel, so the size of dout counts. But then a limit of 1e-5 would test
# little for inputs of -4 or less.
LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32",), args="dinp inp N OC",
    sums="dinp", limits=dict(fp32=5e-7, bf16=1e-6), versions=(
        Version("one thread per number, by tanh", "gelu_backward1", "N*OC"),
        Version("16 bytes per lane", "gelu_backward2", "N*OC"),
        Version("one exponential: the trainer's", "gelu_backward", "N*OC", trainer=True),
    ),
    torch=lambda torch, x: lambda: torch.ops.aten.gelu_backward(x.dinp, x.inp, approximate="tanh"))


READ_FIRST = "dinp was overwritten before the gradient that it held was read"


def formula(a):
    x, dout = a.inp, a.dinp
    s = sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))
    slope = s * (1 + x * (1 - s) * np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2))
    return dict(dinp=dout * slope)


EXERCISE = Exercise(
    "gelu_backward1", "a gradient in place: read before you write", "a number of dinp",
    ("With u as in gelu_forward, the derivative is (1 + tanh u)/2 + x/2 (1 - tanh(u)^2) du/dx.",
     "dinp holds the gradient of the output, and must become the gradient of the input."),
    helpers="to_float from_float math", formula=formula, mistakes=(
        ("the gradient of the output, which dinp held, is not multiplied", "dout * ", ""),
        ("only the first term of the derivative is there: that of tanh(u) is missing",
         "s * (1 + x * (1 - s) * np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2))", "s"),
        ("du/dx has 3 * 0.044715 x^2, and the 3 is missing", "3 * ", ""),
        ("du/dx is left out: sqrt(2/pi) (1 + 3 * 0.044715 x^2)",
         " * np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2)", " * 2"),
        ("du/dx begins with sqrt(2/pi), which is left out", "(1 - s) * np.sqrt(8 / np.pi)",
         "(1 - s) * 2"),
        ("du/dx has (1 + 3 * 0.044715 x^2), which is left out", " * (1 + 3 * 0.044715 * x**2)", ""),
        ("this is GELU itself, and not its derivative, times the gradient", "dout * slope",
         "dout * x * s"),
        (READ_FIRST, "dout * slope", "s * slope"),
        (READ_FIRST, "dout * slope", "slope * slope"),
        ("this is GELU of inp, and not a gradient", "dout * slope", "x * s")))
