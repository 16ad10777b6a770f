// right
BLOCK(128, threads)
extern "C" __global__ void __launch_bounds__(128) my_gqa_forward(
    real* out, const real* inp, float scale, int B, int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, stride = (NH + 2 * NKV) * HS;
    const real* row = inp + (size_t)b * T * stride;
    const real *k = row + (NH + h / (NH / NKV)) * HS, *v = k + NKV * HS;
    float q[HS], o[HS] = {}, top = LOWEST, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < HS; c++) q[c] = to_float(row[(size_t)t * stride + h * HS + c]);
    for (int s = 0; s <= t; s++, k += stride, v += stride) {
        float score = 0.0f;
#pragma unroll
        for (int c = 0; c < HS; c++) score += q[c] * to_float(k[c]);
        float now = fmaxf(top, scale * score), old = expf(top - now), p = expf(scale * score - now);
        sum = sum * old + p;
        top = now;
#pragma unroll
        for (int c = 0; c < HS; c++) o[c] = o[c] * old + p * to_float(v[c]);
    }
#pragma unroll
    for (int c = 0; c < HS; c++)
        from_float(out[(((size_t)b * T + t) * NH + h) * HS + c], o[c] / sum);
}
