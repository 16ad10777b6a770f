"""out (N,OC) = inp (N,C) weight' (OC,C) + bias (OC)"""
from dev.features.devices import Cuda
from dev.lab.exercises import Exercise, Repair
from dev.lab.ladder import DTYPES, Ladder, Version
from dev.lab.mistakes import parts

# For sums of some thousand products. Tensor cores truncate their sums.
MATMUL_LIMITS = dict(fp32=2e-5, tf32=1e-3, bf16=1e-4)
# It may round the product before it adds the bias, and then again.
LIBRARY_LIMITS = MATMUL_LIMITS | dict(bf16=3e-3)


def problem(draw, B, T, C, OC):
    N = B * T
    # The bias counts as much as the products.
    inp, weight, bias = draw(N, C), draw(OC, C), draw(OC, scale=C**0.5)
    return dict(N=N, inp=inp, weight=weight, bias=bias), dict(out=inp @ weight.T + bias)


def by_cublas(device, a):
    """As on the trainer's plain device; on the CPU by NumPy's BLAS."""
    matmul = Cuda.matmul if device.name == "cuda" else type(device).matmul
    matmul(device, a.out, a.inp, a.weight.T, bias=a.bias)


def by_cublaslt(device, a):
    device.matmul(a.out, a.inp, a.weight.T, bias=a.bias)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768,OC=3072",
    ("B=1,T=1,C=32,OC=1", "B=3,T=9,C=96,OC=288", "B=1,T=140,C=160,OC=257"),
    args="out inp weight bias N C OC", sums="out", limits=MATMUL_LIMITS,
    flops=lambda a: 2 * a.N * a.C * a.OC, versions=(
        Version("one thread per element", "matmul_forward1", "N*OC", threads=(256, 1024)),
        Version("tiles of 32 x 32 in shared memory", "matmul_forward2", "OC, N", threads=(1024,)),
        Version("8 x 8 elements a thread, in registers", "matmul_forward3", "OC, N",
                threads=(256,)),
        Version("16 bytes per load, and the next tile on its way", "matmul_forward4", "OC, N",
                threads=(256,)),
        Version("tensor cores, by mma.sync", "matmul_forward5", "OC, N", threads=(256,),
                shared="2 * 2*128 * (128 + 8*itemsize)", dtypes=DTYPES,
                limits=dict(fp32=1e-4)),  # three products of TF32 halves, each truncated
        Version("Hopper's tensor cores, by wgmma", "matmul_forward6", "OC, N", threads=(),
                dtypes=("tf32", "bf16"),
                # TF32 is cut off there, not rounded.
                shared="3 * 2*128 * 128", limits=dict(tf32=2e-3)),
        Version("cuBLAS and a kernel for the bias, as the plain device", by_cublas, threads=(),
                dtypes=DTYPES, library="cuBLAS", recorded=False, limits=LIBRARY_LIMITS),
        Version("cuBLASLt, which adds the bias, as the trainer", by_cublaslt, threads=(),
                dtypes=DTYPES, library="cuBLASLt", limits=LIBRARY_LIMITS),
    ), torch=lambda torch, x: lambda: torch.nn.functional.linear(x.inp, x.weight, x.bias))


EXERCISE = Exercise(
    "matmul_forward1", "a matrix product, first naive and then in tiles of shared memory",
    "a number of out",
    ("A thread takes the row n = i / OC of inp and the row oc = i % OC of weight.",
     "For tiles write BLOCK(1024, 32, 32): then blockIdx.x counts tiles of columns, and "
     "blockIdx.y tiles of rows."),
    helpers="to_float from_float shared", plane="OC, N",
    repair=Repair(2, "w[j][k];\n        __syncthreads();\n", "w[j][k];\n",
                  "A warp that is done with a tile goes on to load the next one. Into which "
                  "array?"),
    mistakes=(
        ("the bias is not added", "weight.T + bias", "weight.T"),
        ("weight (OC,C) is read as if it were (C,OC): number c of row oc is weight[oc * C + c]",
         "weight.T", "weight.reshape(C, OC)"),
        ("the bias is added once for each of the C terms", "T + bias", "T + C * bias"),
        *parts("inp @ weight.T", "inp[:, {0}] @ weight[:, {0}].T", "the sum over c")))
