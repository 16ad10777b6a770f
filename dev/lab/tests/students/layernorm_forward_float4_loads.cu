// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float4* x = reinterpret_cast<const float4*>(residual + (size_t)row * C);
    float m = 0.0f, var = 0.0f;
    for (int k = lane; k < C / 4; k += 32) m += x[k].x + x[k].y + x[k].z + x[k].w;
    m = warp_sum(m) / C;
    for (int k = lane; k < C / 4; k += 32) {
        float4 v = __ldg(&x[k]);
        v.x -= m, v.y -= m, v.z -= m, v.w -= m;
        var += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    float s = rsqrtf(warp_sum(var) / C + 1e-5f);
    for (int c = lane; c < C; c += 32) {
        size_t i = (size_t)row * C + c;
        from_float(copy[i], residual[i]);
        from_float(out[i], (residual[i] - m) * s * to_float(weight[c]) + to_float(bias[c]));
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}
