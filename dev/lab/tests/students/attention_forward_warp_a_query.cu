// right
BLOCK(64, threads / 32)
extern "C" __global__ void my_attention_forward(
    real* out, float* att, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH;
    size_t step = (size_t)3 * NH * HS;
    const real* q = qkv + ((size_t)b * T + t) * step + h * HS;
    const real* k = qkv + (size_t)b * T * step + (NH + h) * HS;
    float top = LOWEST, sum = 0.0f, o[(HS + 31) / 32] = {};
    for (int s = 0; s <= t; s++, k += step) {
        float score = 0.0f;
        for (int c = lane; c < HS; c += 32) score += to_float(q[c]) * to_float(k[c]);
        score = scale * warp_sum(score);
        float larger = fmaxf(top, score), old = expf(top - larger), weight = expf(score - larger);
        sum = sum * old + weight;
        for (int c = lane; c < HS; c += 32) o[c / 32] = o[c / 32] * old + weight * to_float(k[NH * HS + c]);
        top = larger;
    }
    real* to = out + (((size_t)b * T + t) * NH + h) * HS;
    for (int c = lane; c < HS; c += 32) from_float(to[c], o[c / 32] / sum);
}
