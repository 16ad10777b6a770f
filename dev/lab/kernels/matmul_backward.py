"""dinp (N,C) = dout (N,OC) weight (OC,C), and dweight (OC,C) += dout' inp (N,C)"""
from dev.lab.kernels.matmul_forward import MATMUL_LIMITS
from dev.lab.ladder import DTYPES, Ladder, Version


def problem(draw, B, T, C, OC, accumulate=1):
    """Without accumulate, dweight is set."""
    N = B * T
    inp, weight, dout = draw(N, C), draw(OC, C), draw(N, OC)
    # As large as the sum that is added.
    before = draw.fp32(OC, C, scale=N**0.5) if accumulate else 0
    given = dict(N=N, accumulate=accumulate, inp=inp, weight=weight, dout=dout)
    return given | (dict(dweight=before) if accumulate else {}), dict(
        dinp=dout @ weight, dweight=before + dout.T @ inp)


def elements(device, a):
    device.launch("matmul_backward1_inp", a.N * a.C, a.dinp, a.dout, a.weight, a.N, a.C, a.OC,
                  threads=a.threads)
    device.launch("matmul_backward1_weight", a.OC * a.C, a.dweight, a.dout, a.inp, a.N, a.C, a.OC,
                  threads=a.threads)


def tiles(name, shared=lambda a: 0):
    """A function that launches both products of a version whose blocks compute tiles."""
    def run(device, a):
        options = dict(threads=a.threads, shared=shared(a))
        device.launch(f"{name}_inp", (a.C, a.N), a.dinp, a.dout, a.weight, a.N, a.C, a.OC,
                      **options)
        device.launch(f"{name}_weight", (a.C, a.OC), a.dweight, a.dout, a.inp, a.N, a.C, a.OC,
                      **options)
    return run


def by_library(device, a):
    device.matmul(a.dinp, a.dout, a.weight)
    device.matmul(a.dweight, a.dout.T, a.inp, accumulate=bool(a.accumulate))


ADDS = dict(fits=lambda a: a.accumulate)
ADDS_PACKS = dict(fits=lambda a: a.accumulate and a.OC % 8 == 0)

LADDER = Ladder(
    problem, "B=8,T=1024,C=768,OC=3072",
    ("B=1,T=1,C=32,OC=8", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=264",
                                          "B=3,T=9,C=96,OC=288,accumulate=0"),
    fp32="dweight", sums="dinp dweight", limits=MATMUL_LIMITS, flops=lambda a: 4 * a.N * a.C * a.OC,
    versions=(
        Version("one thread per element", elements, threads=(256, 1024), **ADDS),
        Version("tiles of 32 x 32 in shared memory", tiles("matmul_backward2"), threads=(1024,),
                **ADDS),
        Version("8 x 8 elements a thread, in registers", tiles("matmul_backward3"), threads=(256,),
                **ADDS),
        Version("16 bytes per load, and the next tile on its way", tiles("matmul_backward4"),
                threads=(256,), **ADDS_PACKS),
        Version("tensor cores, by mma.sync",
                tiles("matmul_backward5", shared=lambda a: 2 * 2*128 * (128 + 8*a.itemsize)),
                threads=(256,),
                # Three products of TF32 halves, each truncated.
                dtypes=DTYPES, limits=dict(fp32=1e-4), **ADDS_PACKS),
        Version("cuBLASLt, as the trainer", by_library, threads=(), dtypes=DTYPES,
                library="cuBLASLt", held_back={
                    "tf32": "wgmma reads TF32 only with the summed index as the fastest, and of "
                    "these four operands three have it as the slow one"}),
    ))
