// The gradient dinp (B,T,NH+2NKV,HS) of grouped-query attention, from dout and out (B,T,NH,HS) and lse (B,NH,T); see
// attention_backward.cu for the formulas. The gradients of a key and a value are sums over the queries of NH/NKV heads.

// One thread per query, which computes the terms of all three gradients and adds those of the key and the value by
// atomics. There the queries of all heads of a group wait for each other, and the order of a sum varies.
BLOCK(64, threads)
extern "C" __global__ void gqa_backward1(float* dinp, const real* __restrict__ dout, const real* __restrict__ out,
                                         const real* __restrict__ inp, const float* __restrict__ lse, float scale,
                                         int B, int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, stride = (NH + 2 * NKV) * HS;
    size_t sequence = (size_t)b * T * stride, at_q = sequence + (size_t)t * stride + h * HS;
    size_t at_k = sequence + (NH + h / (NH / NKV)) * HS, mine = (((size_t)b * T + t) * NH + h) * HS;
    const real *q = inp + at_q, *dy = dout + mine;
    float *dq = dinp + at_q, delta = 0.0f;
    for (int c = 0; c < HS; c++) delta += to_float(out[mine + c]) * to_float(dy[c]);
    for (int s = 0; s <= t; s++, at_k += stride) {
        size_t at_v = at_k + NKV * HS;
        float score = 0.0f, dweight = 0.0f;
        for (int c = 0; c < HS; c++) {
            score += to_float(q[c]) * to_float(inp[at_k + c]);
            dweight += to_float(dy[c]) * to_float(inp[at_v + c]);
        }
        float weight = exp2f(LOG2_E * scale * score - lse[i]), dscore = scale * weight * (dweight - delta);
        for (int c = 0; c < HS; c++) {
            dq[c] += dscore * to_float(inp[at_k + c]);
            atomicAdd(dinp + at_k + c, dscore * to_float(q[c]));
            atomicAdd(dinp + at_v + c, weight * to_float(dy[c]));
        }
    }
}

// No atomics: a thread of the second kernel owns a key and its value, and goes over the queries of one head after
// another, so each gradient is summed in one order and written once. The price is that the weights are computed twice.
// There are only NKV T threads per sequence, and each reads from the caches one number at a time.
BLOCK(64, threads)
extern "C" __global__ void gqa_backward2_q(real* __restrict__ dinp, const real* __restrict__ dout,
                                           const real* __restrict__ out, const real* __restrict__ inp,
                                           const float* __restrict__ lse, float* __restrict__ delta, float scale,
                                           int B, int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, stride = (NH + 2 * NKV) * HS;
    size_t at_q = ((size_t)b * T + t) * stride + h * HS, mine = (((size_t)b * T + t) * NH + h) * HS;
    const real *q = inp + at_q, *dy = dout + mine, *k = inp + (size_t)b * T * stride + (NH + h / (NH / NKV)) * HS;
    float dq[HS] = {}, sum = 0.0f;
    for (int c = 0; c < HS; c++) sum += to_float(out[mine + c]) * to_float(dy[c]);
    delta[i] = sum;
    for (int s = 0; s <= t; s++, k += stride) {
        const real* v = k + NKV * HS;
        float score = 0.0f, dweight = 0.0f;
        for (int c = 0; c < HS; c++) {
            score += to_float(q[c]) * to_float(k[c]);
            dweight += to_float(dy[c]) * to_float(v[c]);
        }
        float dscore = scale * exp2f(LOG2_E * scale * score - lse[i]) * (dweight - sum);
#pragma unroll
        for (int c = 0; c < HS; c++) dq[c] += dscore * to_float(k[c]);
    }
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(dinp[at_q + c], dq[c]);
}

BLOCK(64, threads)
extern "C" __global__ void gqa_backward2_kv(real* __restrict__ dinp, const real* __restrict__ dout,
                                            const real* __restrict__ out, const real* __restrict__ inp,
                                            const float* __restrict__ lse, const float* __restrict__ delta, float scale,
                                            int B, int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NKV * T) return;
    int s = i % T, kv = i / T % NKV, b = i / T / NKV, stride = (NH + 2 * NKV) * HS, heads = NH / NKV;
    size_t at_k = ((size_t)b * T + s) * stride + (NH + kv) * HS, at_v = at_k + NKV * HS;
    const real *k = inp + at_k, *v = inp + at_v;
    float dk[HS] = {}, dv[HS] = {};
    for (int h = kv * heads; h < (kv + 1) * heads; h++)
        for (int t = s; t < T; t++) {
            size_t row = (size_t)b * T + t, of_query = ((size_t)b * NH + h) * T + t;
            const real *q = inp + row * stride + h * HS, *dy = dout + (row * NH + h) * HS;
            float score = 0.0f, dweight = 0.0f;
            for (int c = 0; c < HS; c++) {
                score += to_float(q[c]) * to_float(k[c]);
                dweight += to_float(dy[c]) * to_float(v[c]);
            }
            float weight = exp2f(LOG2_E * scale * score - lse[of_query]);
            float dscore = scale * weight * (dweight - delta[of_query]);
#pragma unroll
            for (int c = 0; c < HS; c++) dk[c] += dscore * to_float(q[c]), dv[c] += weight * to_float(dy[c]);
        }
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(dinp[at_k + c], dk[c]), from_float(dinp[at_v + c], dv[c]);
}

// attention_backward_q and attention_backward_kv in kernels.cu: the same ownership on tensor cores. A block of keys
// stays in shared memory while the queries of all heads of its group pass by, so dk and dv are summed in registers.
