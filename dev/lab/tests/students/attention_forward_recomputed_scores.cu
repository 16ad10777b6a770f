// right
BLOCK(64, threads)
extern "C" __global__ void my_attention_forward(
    real* out, float* att, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    const real *first = qkv + (size_t)b * T * 3 * C + h * HS, *q = first + (size_t)t * 3 * C;
    float top = LOWEST, sum = 0.0f, o[HS];
    for (int c = 0; c < HS; c++) o[c] = 0.0f;
    for (int pass = 0; pass < 2; pass++)  // the largest score first, then all once more
        for (int s = 0; s <= t; s++) {
            const real* k = first + (size_t)s * 3 * C + C;
            float score = 0.0f;
            for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[c]);
            if (pass == 0) {
                top = fmaxf(top, scale * score);
                continue;
            }
            float p = expf(scale * score - top);
            sum += p;
            for (int c = 0; c < HS; c++) o[c] += p * to_float(k[C + c]);
        }
    for (int c = 0; c < HS; c++)
        from_float(out[((size_t)b * T + t) * C + h * HS + c], o[c] / sum);
}
