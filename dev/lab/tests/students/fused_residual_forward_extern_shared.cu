// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_fused_residual_forward(
    real* out, float* mean, float* rstd, real* copy, float* residual, const real* branch,
    const real* weight, const real* bias, int N, int C) {
    extern __shared__ float rows[];  // 4*C bytes for each warp
    int warp = threadIdx.x / warpSize, lane = threadIdx.x % warpSize;
    int row = blockIdx.x * (blockDim.x / warpSize) + warp;
    if (row >= N) return;
    float *x = rows + warp * C, m = 0.0f, var = 0.0f;
    for (int c = lane; c < C; c += warpSize) {
        size_t i = (size_t)row * C + c;
        x[c] = residual[i] += to_float(branch[i]);
        from_float(copy[i], x[c]);
        m += x[c];
    }
    m = warp_sum(m) / C;
    for (int c = lane; c < C; c += warpSize) var += (x[c] - m) * (x[c] - m);
    float s = 1.0f / sqrtf(warp_sum(var) / C + 1e-5f);
    for (int c = lane; c < C; c += warpSize)
        from_float(out[(size_t)row * C + c],
                   (x[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
    if (lane == 0) mean[row] = m, rstd[row] = s;
}
