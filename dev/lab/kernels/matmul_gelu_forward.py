"""fch (N,4C) = inp (N,C) @ weight' (4C,C) + bias, and fch_gelu = gelu(fch)"""
from dev.lab.formulas import gelu
from dev.lab.kernel import ALL, Kernel, Version, in_parts
from dev.lab.kernels.matmul_forward import LIBRARY_LIMITS
from dev.lab.tensor_maps import tensor_maps

THREADS = 384
SHARED = 3 * (128 + 256) * 64 * 2 + 128 * 256 * 2 + 4 * 256 * 2 + 128  # bytes: Shared in the .cu


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    inp, weight, bias = draw(N, C), draw(OC, C, scale=C**-0.5), draw(OC)
    fch = inp @ weight.T + bias
    return dict(N=N, OC=OC, inp=inp, weight=weight, bias=bias), dict(fch=fch, fch_gelu=in_parts(gelu, fch)), dict(
        fch=1 + abs(fch), fch_gelu=1 + abs(fch))  # a GELU is as exact as its argument


def by_two(device, a):
    device.matmul(a.fch, a.inp, a.weight.T, bias=a.bias)
    device.launch("gelu_forward", a.fch.size, a.fch_gelu, a.fch, a.N, a.OC)


def by_epilogue(device, a):
    device.matmul(a.fch, a.inp, a.weight.T, bias=a.bias, gelu=a.fch_gelu)


def cluster_of(device):
    """Blocks that share what they copy, as the .cu says."""
    return 2 if device.name == "cuda" else 1


def blocks_of(device):
    """One on each multiprocessor, in whole clusters."""
    return device.multiprocessors // cluster_of(device) * cluster_of(device)


def by_wgmma(device, a):
    maps = tensor_maps(device, (a.inp, 128), (a.weight, 256 // cluster_of(device)))
    device.launch("matmul_gelu_forward3", blocks_of(device), a.fch, a.fch_gelu, a.bias, maps, a.N, a.C, a.OC,
                  threads=THREADS, shared=SHARED)


KERNEL = Kernel(
    problem, "B=8,T=1024,C=768",
    ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=1,T=300,C=160", "B=1,T=70,C=288", "B=1,T=2100,C=32"), sums="fch fch_gelu",
    limits=LIBRARY_LIMITS, flops=lambda a: 2 * a.N * a.C * a.OC, versions=(
        Version("a product, then GELU", by_two, threads=(), dtypes=ALL),
        Version("cuBLASLt's epilogue, as the trainer", by_epilogue, threads=(), dtypes=ALL, library="cuBLASLt"),
        Version("warps of their own for GELU", by_wgmma, threads=(), dtypes=("bf16",), fits=lambda a: a.hopper,
                held_back={"bf16": "the stores of both results do not overlap with the products"}),
    ))
