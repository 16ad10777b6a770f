"""out (N,C) = the layernorm of residual, with its mean and rstd, and copy = residual as a real"""
from dev.lab.formulas import layernorm, moments
from dev.lab.ladder import LAUNCH_GAP, ODD_SHAPES, Ladder, Version

TRAINERS_ARGS = "out mean rstd copy residual branch weight bias N"


def problem(draw, B, T, C):
    N = B * T
    residual, weight, bias = draw.rows(N, C), draw(C), draw(C)
    mean, rstd = moments(residual)
    inputs = dict(N=N, residual=residual, branch=None, weight=weight, bias=bias)
    truth = dict(out=layernorm(residual, weight, bias), mean=mean[:, 0], rstd=rstd[:, 0],
                 copy=residual)
    return inputs, truth, dict(mean=abs(mean[:, 0]) + 1 / rstd[:, 0])


def in_three(device, a):
    device.launch("layernorm_forward2_mean", a.N, a.mean, a.residual, a.C, threads=a.threads)
    device.launch("layernorm_forward2_rstd", a.N, a.rstd, a.mean, a.residual, a.C,
                  threads=a.threads)
    device.launch("layernorm_forward2_normalize", a.N * a.C, a.out, a.mean, a.rstd, a.copy,
                  a.residual, a.weight, a.bias, a.N, a.C, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ODD_SHAPES, trainer_checks=("B=1,T=1,C=32", "B=8,T=5,C=768"),
    compiled_for="C", args="out mean rstd copy residual weight bias N C", fp32="residual mean rstd",
    exact="copy", sums="out mean", versions=(
        Version("one thread per row", "layernorm_forward1", "N", threads=(32, 64, 128, 256),
                limits=dict(fp32=1e-4)),  # a mean of 50 deviations, added up one by one
        Version("three kernels: means, deviations, and one thread per number", in_three,
                threads=(128, 256, 512)),
        Version("one kernel, one warp per row", "layernorm_forward3", "N"),
        Version("16 bytes per lane", "layernorm_forward4", "N"),
        Version("both sums in one pass, as E[x^2] - E[x]^2", "layernorm_forward5", "N",
                # Which cancels where a mean is 50 deviations: see its comment.
                limits=dict(fp32=1e-3, bf16=1e-3)),
        Version("the row in registers: the trainer's", "residual_layernorm_forward", "N", threads=(
            64, 128, 256, 512), args=TRAINERS_ARGS, trainer=True, held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: torch.nn.functional.layer_norm(
        x.residual.to(x.weight.dtype), x.weight.shape, x.weight, x.bias))
