"""dinp (N,C) = dout (N,OC) weight (OC,C), and dweight (OC,C) += dout' inp (N,C)"""
from dev.cuda.kernel import ALL, Kernel, Version
from dev.cuda.matmul_forward import MATMUL_LIMITS


def problem(draw, B, T, C, OC, accumulate=1):
    """Without accumulate, dweight is set."""
    N = B * T
    inp, weight, dout = draw(N, C), draw(OC, C), draw(N, OC)
    before = draw.fp32(OC, C, scale=N**0.5) if accumulate else 0  # as large as what is added
    given = dict(N=N, accumulate=accumulate, inp=inp, weight=weight, dout=dout)
    return given | (dict(dweight=before) if accumulate else {}), dict(
        dinp=dout @ weight, dweight=before + dout.T @ inp)


def elements(device, a):
    device.launch("matmul_backward1_inp", a.N * a.C, a.dinp, a.dout, a.weight, a.N, a.C, a.OC, threads=a.threads)
    device.launch("matmul_backward1_weight", a.OC * a.C, a.dweight, a.dout, a.inp, a.N, a.C, a.OC, threads=a.threads)


def tiles(name):
    """A function that launches the two products of a version whose blocks have tiles of the results."""
    def run(device, a):
        device.launch(f"{name}_inp", (a.C, a.N), a.dinp, a.dout, a.weight, a.N, a.C, a.OC, threads=a.threads)
        device.launch(f"{name}_weight", (a.C, a.OC), a.dweight, a.dout, a.inp, a.N, a.C, a.OC, threads=a.threads)
    return run


def by_library(device, a):
    device.matmul(a.dinp, a.dout, a.weight)
    device.matmul(a.dweight, a.dout.T, a.inp, accumulate=bool(a.accumulate))


ADDS = dict(fits=lambda a: a.accumulate)

KERNEL = Kernel(
    problem, "B=8,T=1024,C=768,OC=3072", ("B=1,T=1,C=32,OC=8", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=264",
                                          "B=3,T=9,C=96,OC=288,accumulate=0"),
    fp32="dweight", sums="dinp dweight", limits=MATMUL_LIMITS, flops=lambda a: 4 * a.N * a.C * a.OC, versions=(
        Version("a thread an element", elements, threads=(256, 1024), **ADDS),
        Version("tiles of 32 x 32 in shared memory", tiles("matmul_backward2"), threads=(1024,), **ADDS),
        Version("8 x 8 elements a thread, in registers", tiles("matmul_backward3"), threads=(256,), **ADDS),
        Version("cuBLAS, as the trainer does", by_library, threads=(), dtypes=ALL, library="cuBLAS"),
    ))
