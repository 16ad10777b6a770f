// right
BLOCK(64, 1)
extern "C" __global__ void my_relu_attention_forward(
    real* out, const real* qkv, float scale, int B, int T, int NH) {
    __shared__ float query[HS], weight[64];
    int t = blockIdx.x % T, h = blockIdx.x / T % NH, b = blockIdx.x / T / NH;
    size_t step = (size_t)3 * NH * HS;
    const real* of_head = qkv + (size_t)b * T * step + h * HS;  // q of token 0
    for (int c = threadIdx.x; c < HS; c += 64) query[c] = scale * to_float(of_head[t * step + c]);
    float sum[(HS + 63) / 64] = {};
    for (int first = 0; first <= t; first += 64) {
        __syncthreads();  // query is there, and nobody reads the old weights any more
        int s = first + threadIdx.x;
        float score = 0.0f;
        if (s <= t) {
            const real* k = of_head + s * step + (size_t)NH * HS;
            for (int c = 0; c < HS; c++) score += query[c] * to_float(k[c]);
        }
        weight[threadIdx.x] = score > 0.0f ? score : 0.0f;
        __syncthreads();
        int keys = t + 1 - first < 64 ? t + 1 - first : 64;
        const real* v = of_head + first * step + (size_t)2 * NH * HS;
        for (int j = 0; j < keys; j++)
            for (int c = threadIdx.x; c < HS; c += 64) sum[c / 64] += weight[j] * to_float(v[j * step + c]);
    }
    real* o = out + (((size_t)b * T + t) * NH + h) * HS;
    for (int c = threadIdx.x; c < HS; c += 64) from_float(o[c], sum[c / 64]);
}
