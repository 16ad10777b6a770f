// right
BLOCK(64, threads)
extern "C" __global__ void my_attention_backward(
    float* dqkv, const real* dout, const real* out, const real* qkv, const float* lse,
    float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    size_t head = (size_t)b * T * 3 * C + h * HS, mine = ((size_t)b * T + t) * C + h * HS;
    const real *q = qkv + head + (size_t)t * 3 * C, *dy = dout + mine;
    float *dq = dqkv + head + (size_t)t * 3 * C, delta = 0.0f;
    for (int c = 0; c < HS; c++) delta += to_float(out[mine + c]) * to_float(dy[c]);
    for (int s = 0; s <= t; s++) {
        size_t k = head + (size_t)s * 3 * C + C, v = k + C;
        float score = 0.0f, dp = 0.0f;
        for (int c = 0; c < HS; c++) {
            score += to_float(q[c]) * to_float(qkv[k + c]);
            dp += to_float(dy[c]) * to_float(qkv[v + c]);
        }
        float p = exp2f(LOG2_E * scale * score - lse[i]), ds = scale * p * (dp - delta);
        for (int c = 0; c < HS; c++) {
            dq[c] += ds * to_float(qkv[k + c]);
            atomicAdd(&dqkv[k + c], ds * to_float(q[c]));
            atomicAdd(&dqkv[v + c], p * to_float(dy[c]));
        }
    }
}
