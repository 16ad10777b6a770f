// wrong: scale|out
BLOCK(64, threads)
extern "C" __global__ void my_attention_forward(
    real* out, float* att, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    const real *qkv_b = qkv + (size_t)b * T * 3 * C, *q = qkv_b + (size_t)t * 3 * C + h * HS;
    float *a = att + (size_t)i * T, top = LOWEST, sum = 0.0f;
    for (int s = 0; s <= t; s++) {
        const real* k = qkv_b + (size_t)s * 3 * C + C + h * HS;
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[c]);
        a[s] = score;
        top = fmaxf(top, a[s]);
    }
    for (int s = 0; s <= t; s++) {
        a[s] = expf(a[s] - top);
        sum += a[s];
    }
    for (int c = 0; c < HS; c++) {
        float o = 0.0f;
        const real* v = qkv_b + 2 * C + h * HS + c;
        for (int s = 0; s <= t; s++) o += a[s] * to_float(v[(size_t)s * 3 * C]);
        from_float(out[((size_t)b * T + t) * C + h * HS + c], o / sum);
    }
}
