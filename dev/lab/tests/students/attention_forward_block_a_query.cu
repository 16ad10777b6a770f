// right
BLOCK(64, 1)
extern "C" __global__ void my_attention_forward(
    real* out, float* att, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x, t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    const real *first = qkv + (size_t)b * T * 3 * C + h * HS, *q = first + (size_t)t * 3 * C;
    float *a = att + (size_t)i * T, top = LOWEST, sum = 0.0f;
    for (int s = threadIdx.x; s <= t; s += blockDim.x) {
        float score = 0.0f;
        for (int c = 0; c < HS; c++)
            score += to_float(q[c]) * to_float(first[(size_t)s * 3 * C + C + c]);
        a[s] = scale * score;
        top = fmaxf(top, a[s]);
    }
    top = block_reduce<warp_max>(top, LOWEST);
    for (int s = threadIdx.x; s <= t; s += blockDim.x) sum += a[s] = expf(a[s] - top);
    sum = block_reduce<warp_sum>(sum, 0.0f);  // with barriers, behind which all see a
    for (int c = threadIdx.x; c < HS; c += blockDim.x) {
        float o = 0.0f;
        for (int s = 0; s <= t; s++) o += a[s] * to_float(first[(size_t)s * 3 * C + 2 * C + c]);
        from_float(out[((size_t)b * T + t) * C + h * HS + c], o / sum);
    }
}
