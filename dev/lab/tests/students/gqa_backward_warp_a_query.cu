// right
__device__ float dot(const real* a, const real* b, int lane) {
    float sum = 0.0f;
    for (int c = lane; c < HS; c += 32) sum += to_float(a[c]) * to_float(b[c]);
    return warp_sum(sum);
}
BLOCK(64, threads / 32)
extern "C" __global__ void my_gqa_backward(
    float* dinp, const real* dout, const real* out, const real* inp, const float* lse, float scale, int B,
    int T, int NH, int NKV) {
    int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH;
    size_t width = (size_t)(NH + 2 * NKV) * HS, kv = (size_t)(NH + h / (NH / NKV)) * HS;
    size_t here = ((size_t)b * T + t) * NH * HS + h * HS;
    size_t mine = ((size_t)b * T + t) * width + h * HS;
    const real *q = inp + mine, *d = dout + here;
    float delta = dot(d, out + here, lane), dq[(HS + 31) / 32] = {};
    for (int s = 0; s <= t; s++) {
        size_t k = ((size_t)b * T + s) * width + kv, v = k + (size_t)NKV * HS;
        float weight = exp2f(LOG2_E * scale * dot(q, inp + k, lane) - lse[i]);
        float dscore = scale * weight * (dot(d, inp + v, lane) - delta);
        for (int c = lane; c < HS; c += 32) {
            dq[c / 32] += dscore * to_float(inp[k + c]);
            atomicAdd(&dinp[k + c], dscore * to_float(q[c]));
            atomicAdd(&dinp[v + c], weight * to_float(d[c]));
        }
    }
    for (int c = lane; c < HS; c += 32) dinp[mine + c] = dq[c / 32];
}
