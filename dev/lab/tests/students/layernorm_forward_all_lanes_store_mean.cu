// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    float m = 0, variance = 0;
    for (int c = lane; c < C; c += 32) m += x[c];
    m = warp_sum(m) / C;
    for (int c = lane; c < C; c += 32) variance += (x[c] - m) * (x[c] - m);
    float s = rsqrtf(warp_sum(variance) / C + 1e-5f);
    mean[row] = m;
    rstd[row] = s;
    for (int c = lane; c < C; c += 32) {
        from_float(copy[(size_t)row * C + c], x[c]);
        from_float(out[(size_t)row * C + c], (x[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
    }
}
