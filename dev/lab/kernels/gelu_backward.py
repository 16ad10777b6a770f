"""dinp (N,4C), the gradient of gelu(inp), becomes that of inp"""
from dev.lab.formulas import dgelu
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
