// Grouped-query attention (Ainslie et al. 2023, section 2.2): inp (B,T,NH+2NKV,HS) has the queries of NH heads, and
// keys and values of NKV heads, each of which serves NH/NKV neighbouring query heads. out (B,T,NH,HS).

// One thread per query goes over its keys and keeps its output in registers; when a larger score comes, the sum and the
// output are scaled down. Every number of a key or value is read for a single multiplication.
BLOCK(64, threads)
extern "C" __global__ void gqa_forward1(real* __restrict__ out, const real* __restrict__ inp, float scale, int B, int T,
                                        int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, stride = (NH + 2 * NKV) * HS;
    const real *row = inp + (size_t)b * T * stride, *q = row + (size_t)t * stride + h * HS;
    const real *k = row + (NH + h / (NH / NKV)) * HS, *v = k + NKV * HS;
    float o[HS] = {}, top = LOWEST, sum = 0.0f;
    for (int s = 0; s <= t; s++, k += stride, v += stride) {
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[c]);
        score *= scale;
        float now = fmaxf(top, score), factor = expf(top - now), weight = expf(score - now);
        sum = sum * factor + weight, top = now;
#pragma unroll
        for (int c = 0; c < HS; c++) o[c] = o[c] * factor + weight * to_float(v[c]);
    }
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(out[(((size_t)b * T + t) * NH + h) * HS + c], o[c] / sum);
}

// Version 2 is repeat_kv_forward2, and then the trainer's attention_forward for NH heads, on tensor cores: fast, but it
// writes and reads NH/NKV copies of each key and value, in device memory that grouped attention is meant to save.

// attention_forward in kernels.cu: a block has queries of one head, and reads the keys and values of its group's head
// where they are, so nothing is copied. The heads of a group are neighbours in the grid, so all but the first find them
// in L2.
