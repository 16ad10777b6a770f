// right
BLOCK(64, threads)
extern "C" __global__ void my_relu_attention_forward(
    real* out, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / (T * NH);
    const size_t step = (size_t)3 * NH * HS;  // from a token to the next
    const real *q = qkv + ((size_t)b * T + t) * step + h * HS;
    const real* k = qkv + (size_t)b * T * step + (NH + h) * HS;
    float o[HS];
    for (float& x : o) x = 0.0f;
    for (int s = 0; s <= t; s++, k += step) {
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[c]);
        if (score <= 0.0f) continue;
        for (int c = 0; c < HS; c++) o[c] += scale * score * to_float(k[NH * HS + c]);
    }
    real* to = out + (((size_t)b * T + t) * NH + h) * HS;
    for (float x : o) from_float(*to++, x);
}
