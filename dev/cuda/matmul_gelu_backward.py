"""dfch (N,4C) = dout (N,C) @ weight (C,4C) * gelu'(fch), and dbias (4C) += the sum over rows of dfch"""
from dev.cuda.formulas import dgelu
from dev.cuda.gelu_forward import gelu_inputs
from dev.cuda.kernel import ALL, Kernel, Version, in_parts
from dev.cuda.matmul_forward import LIBRARY_LIMITS
from dev.cuda.matmul_gelu_forward import SHARED, THREADS, blocks_of
from dev.cuda.tensor_maps import tensor_maps


def problem(draw, B, T, C):
    N, OC = B * T, 4 * C
    dout, weight, fch, before = draw(N, C), draw(C, OC, scale=C**-0.5), gelu_inputs(draw, N, OC), draw.fp32(OC)
    dfch = in_parts(dgelu, dout @ weight, fch)
    return dict(N=N, OC=OC, dout=dout, weight=weight, fch=fch, dbias=before), dict(
        dfch=dfch, dbias=before + dfch.sum(0)), dict(dfch=1 + abs(dfch), dbias=1 + (dfch**2).sum(0) ** 0.5)


def shares_of(a):
    """In how many bands rows are shared out, as in GPT2.bias_backward."""
    return max(1, min(64, a.N // 256))


def bias(device, a):
    shares = shares_of(a)
    device.launch("matmul_backward_bias", (a.OC, shares), a.dbias if shares == 1 else a.partials, a.dfch, a.N, a.OC)
    if shares > 1:
        device.launch("add_partials", a.OC, a.dbias, None, None, a.partials, shares, a.OC)


def by_three(device, a):
    device.matmul(a.dfch, a.dout, a.weight)
    device.launch("gelu_backward", a.dfch.size, a.dfch, a.fch, a.N, a.OC)
    bias(device, a)


def by_epilogue(device, a):
    device.matmul(a.dfch, a.dout, a.weight, dgelu_at=a.fch)
    bias(device, a)


def rows_of(a):
    """Of partials: the sums of each tile of 128 rows."""
    return -(-a.N // 128)


def by_wgmma(device, a):
    maps = tensor_maps(device, (a.dout, 128), (a.weight, 64))
    device.launch("matmul_gelu_backward3", blocks_of(device), a.dfch, a.partials, a.fch, maps, a.N, a.C, a.OC,
                  threads=THREADS, shared=SHARED)
    device.launch("add_partials", a.OC, a.dbias, None, None, a.partials, rows_of(a), a.OC)


KERNEL = Kernel(
    problem, "B=8,T=1024,C=768",
    ("B=1,T=1,C=32", "B=3,T=9,C=96", "B=1,T=300,C=160", "B=1,T=70,C=288", "B=1,T=2100,C=32"), sums="dfch dbias",
    fp32="dbias partials", limits=LIBRARY_LIMITS, flops=lambda a: 2 * a.N * a.C * a.OC, beside=("matmul_gelu_forward",),
    versions=(
        Version("a product, then GELU, then the sums", by_three, threads=(), dtypes=ALL,
                scratch=lambda a: dict(partials=(shares_of(a), a.OC))),
        Version("cuBLASLt's epilogue, then the sums, as the trainer", by_epilogue, threads=(), dtypes=ALL,
                library="cuBLASLt", scratch=lambda a: dict(partials=(shares_of(a), a.OC))),
        Version("warps of their own for GELU and the sums", by_wgmma, threads=(), dtypes=("bf16",),
                fits=lambda a: a.hopper, scratch=lambda a: dict(partials=(rows_of(a), a.OC))),
    ))
