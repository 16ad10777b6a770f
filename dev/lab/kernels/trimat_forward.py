"""att (B,NH,T,T) = q k' / sqrt(HS) on and below the diagonal, from qkv (B,T,3,NH,HS)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.formulas import transposed
from dev.lab.heads import ONE_HEAD, QKV, draw_heads, pairs_seen, split
from dev.lab.ladder import ANY, DTYPES, Ladder, Version, in_parts, stored


def problem(draw, B, T, NH, HS):
    def scores(q, k):
        return np.where(np.tri(T, dtype=bool), q @ transposed(k) * scale, ANY)

    scale, (qkv, _) = HS**-0.5, draw_heads(draw, B, T, NH, NH, HS)
    q, k = (x.reshape(B * NH, T, HS) for x in split(qkv, NH, NH)[:2])
    att = in_parts(scores, q, k, step=1).reshape(B, NH, T, T)
    # A score is a sum of HS terms, each about as large as the query's number.
    return dict(scale=scale, qkv=qkv), dict(att=att), dict(
        att=scale * np.linalg.norm(q, axis=-1).reshape(B, NH, T, 1))


def by_library(device, a):
    """The whole square of each head: one call per sequence, in which the heads are a batch."""
    C = a.NH * a.HS
    if device.name == "cpu":
        for b, h in np.ndindex(a.B, a.NH):
            q, k = (a.qkv.reshape(a.B, a.T, -1)[b, :, start : start + a.HS]
                    for start in (h * a.HS, C + h * a.HS))
            scores = np.empty((a.T, a.T), np.float32)
            device.matmul(scores, q, k.T)
            a.att[b, h] = stored(np.float32(a.scale) * scores, a.att.dtype)
        return
    lib, kind, scale = (device.cublas, device.CUDA_TYPES[a.att.dtype.str[1:]],
                        np.array([a.scale], np.float32))
    # cuBLAS sees matrices transposed: so this asks for the transpose of the square, k q'.
    for b in range(a.B):
        q, out = a.qkv[b].data.ptr, a.att[b].data.ptr
        lib.gemmStridedBatchedEx(device.gpu.cublas_handle, 1, 0, a.T, a.T, a.HS, scale.ctypes.data,
                                 q + C * a.itemsize, kind, 3 * C, a.HS, q, kind, 3 * C, a.HS,
                                 device.NOUGHT.ctypes.data, out, kind, a.T, a.T * a.T, a.NH,
                                 device.compute, lib.CUBLAS_GEMM_DEFAULT)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64",
    ("B=1,T=5,NH=3,HS=64", "B=2,T=33,NH=3,HS=64", "B=1,T=130,NH=2,HS=64"),
    args="att qkv scale T NH", compiled_for="HS", sums="att",
    limits=dict(fp32=1e-4, tf32=2e-3, bf16=1e-4),  # tensor cores truncate their sums
    flops=lambda a: 2 * pairs_seen(a) * a.HS,
    traffic=lambda a: (2 * a.B * a.T * a.NH * a.HS + pairs_seen(a)) * a.itemsize, versions=(
        Version("one thread per element", "trimat_forward1", "B*NH*T*T", threads=(256, 1024),
                args="att qkv scale B T NH"),
        Version("tiles of 32 x 32 in shared memory", "trimat_forward2", "B*NH * -(-T // 32), T",
                threads=(1024,)),
        Version("8 x 8 elements a thread, in registers", "trimat_forward3",
                "B*NH * -(-T // 128), T", threads=(256,)),
        Version("tensor cores", "trimat_forward4", "B*NH * -(-T // 128), T", threads=(256,),
                dtypes=DTYPES, shared="-(-HS*itemsize // 128) * 2*128 * (128 + 8*itemsize)"),
        Version("cuBLAS: the whole square, twice the work", by_library, threads=(), dtypes=DTYPES,
                library="cuBLAS", recorded=False, held_back={
                    "fp32": "it multiplies the whole square, twice what counts, and sums of 64 "
                    "terms are too short to hide the stores",
                    "tf32": "it writes the whole square, 403 MB where 202 count, by eight calls "
                    "that no graph holds",
                    "bf16": "it writes the whole square, 201 MB where 101 count, by eight calls "
                    "that no graph holds"}),
    ))


def formula(a):
    q, k, v = split(a.qkv, a.NH, a.NH)
    score = a.scale * q @ transposed(k)
    return dict(att=np.where(np.tri(a.T) > 0, score, a.truth["att"]))


EXERCISE = Exercise(
    "trimat_forward1", "the scores of attention: half of a matrix", "a number of att",
    ("Nothing has to be written above the diagonal.",
     "There are T*T numbers for each head: use size_t."),
    axes="b h t s", shapes=QKV, numpy=False,
    note=(ONE_HEAD,
          "    att = scale * q @ k.T  # (T,T), row t for query t"),
    formula=formula, mistakes=(
        ("scale is left out", "a.scale * ", ""),
        ("the values stand where the keys should: k lies right behind q", "d(k)", "d(v)"),
        ("q and k are exchanged: row t of att belongs to query t", "q @ transposed(k)",
         "k @ transposed(q)"),
        ("all heads use the keys of head 0", "d(k)", "d(k[:, :1])")))
