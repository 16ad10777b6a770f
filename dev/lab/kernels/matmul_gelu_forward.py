"""fch (N,4C) = inp (N,C) @ weight' (4C,C) + bias, and fch_gelu = gelu(fch)

Version 1 is a product and then a kernel that reads again what the product has stored. In version 2
cuBLASLt's epilogue computes GELU in bf16: with B=32 and T=1024 on an H200 that takes 284 to 298 us,
and the product alone 204.
"""
from dev.lab.formulas import gelu
from dev.lab.kernels.matmul_forward import LIBRARY_LIMITS
from dev.lab.ladder import DTYPES, Ladder, Version, in_parts


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    inp, weight, bias = draw(N, C), draw(OC, C, scale=C**-0.5), draw(OC)
    fch = inp @ weight.T + bias
    return dict(N=N, OC=OC, inp=inp, weight=weight,
                bias=bias), dict(fch=fch, fch_gelu=in_parts(gelu, fch)), dict(
        fch=1 + abs(fch), fch_gelu=1 + abs(fch))  # a GELU is as exact as its argument


def by_two(device, a):
    device.matmul(a.fch, a.inp, a.weight.T, bias=a.bias)
    device.launch("gelu_forward", a.fch.size, a.fch_gelu, a.fch, a.N, a.OC)


def by_epilogue(device, a):
    device.matmul(a.fch, a.inp, a.weight.T, bias=a.bias, gelu=a.fch_gelu)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768", ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=1,T=300,C=160"),
    sums="fch fch_gelu", limits=LIBRARY_LIMITS, flops=lambda a: 2 * a.N * a.C * a.OC, versions=(
        Version("a product, then GELU", by_two, threads=(), dtypes=DTYPES),
        Version("cuBLASLt's epilogue, as the trainer", by_epilogue, threads=(), dtypes=DTYPES,
                library="cuBLASLt", held_back={
                    "tf32": "GELU is a kernel of its own, which takes a third of the time",
                    "bf16": "GELU's exponential and division are done by the threads that hold the "
                    "results, while the tensor cores have less to do"}),
    ))
