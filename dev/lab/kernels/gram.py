"""out (B,T,T) = inp (B,T,C) times its own transpose, for each of B matrices: a symmetric product"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.ladder import DTYPES, Ladder, Version, stored
from dev.lab.mistakes import parts


def problem(draw, B, T, C):
    inp = draw(B, T, C)
    return dict(inp=inp), dict(out=inp @ inp.swapaxes(1, 2))


def by_library(device, a):
    """The whole square, of all matrices in one call."""
    if device.name == "cpu":
        for b in range(a.B):
            product = np.empty((a.T, a.T), np.float32)
            device.matmul(product, a.inp[b], a.inp[b].T)
            a.out[b] = stored(product, a.out.dtype)
        return
    lib, kind, one = device.cublas, device.CUDA_TYPES[a.out.dtype.str[1:]], np.ones(1, np.float32)
    inp = a.inp.data.ptr
    # cuBLAS sees matrices transposed: inp[b] as (C,T), and a symmetric result as it is
    lib.gemmStridedBatchedEx(device.gpu.cublas_handle, 1, 0, a.T, a.T, a.C, one.ctypes.data,
                             inp, kind, a.C, a.T * a.C, inp, kind, a.C, a.T * a.C,
                             device.NOUGHT.ctypes.data, a.out.data.ptr, kind, a.T, a.T * a.T, a.B,
                             device.compute, lib.CUBLAS_GEMM_DEFAULT)


def terms_that_count(a):
    return a.B * a.T * (a.T + 1) // 2 * a.C


LADDER = Ladder(
    problem, "B=12,T=768,C=768", ("B=1,T=1,C=32", "B=3,T=33,C=96", "B=2,T=140,C=160"),
    args="out inp T C", sums="out", limits=dict(fp32=2e-5, tf32=1e-3, bf16=1e-4),
    flops=lambda a: 2 * terms_that_count(a), versions=(
        Version("one thread per number", "gram1", "B*T*T", threads=(256, 1024),
                args="out inp B T C"),
        Version("half of the numbers, each stored twice", "gram2", "B*T*T", threads=(256, 1024),
                args="out inp B T C"),
        Version("tiles of 32 x 32 in shared memory, which also turns them", "gram3",
                "B * -(-T // 32), T", threads=(1024,)),
        Version("tensor cores", "gram4", "B * -(-T // 128), T", threads=(256,), dtypes=DTYPES,
                shared="2 * 2*128 * (128 + 8*itemsize)",
                limits=dict(fp32=1e-4)),  # three products of TF32 halves, each truncated
        Version("cuBLAS: the whole square, twice the work", by_library, threads=(), dtypes=DTYPES,
                library="cuBLAS", recorded=False),
    ))


EXERCISE = Exercise(
    "gram1", "a symmetric product: half of the numbers are enough", "a number of out",
    ("Number i of out is in matrix i / T / T, row i / T % T and column i % T.",
     "A thread below the diagonal returns at once. The others store their number twice: the "
     "second time in row i % T and column i / T % T."),
    axes="b t s", mistakes=(
        ("all matrices are multiplied with the first one", "@ inp", "@ inp[:1]"),
        *parts("inp @ inp", "inp[..., {0}] @ inp[..., {0}]", "the sum over c")))
