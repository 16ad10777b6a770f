// wrong: race.*residual
BLOCK(128, threads / 32)
extern "C" __global__ void my_fused_residual_forward(
    real* out, float* mean, float* rstd, real* copy, float* residual, const real* branch,
    const real* weight, const real* bias, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    for (int c = lane; c < C; c += 32) {
        residual[start + c] += to_float(branch[start + c]);  //!
        from_float(copy[start + c], residual[start + c]);
    }
    float m = 0.0f, var = 0.0f;  // each lane has a strip of neighbours now
    for (int c = lane * C / 32; c < (lane + 1) * C / 32; c++) m += residual[start + c];  //!
    m = warp_sum(m) / C;
    for (int c = lane; c < C; c += 32) var += (residual[start + c] - m) * (residual[start + c] - m);
    float s = 1.0f / sqrtf(warp_sum(var) / C + 1e-5f);
    for (int c = lane; c < C; c += 32) {
        float norm = (residual[start + c] - m) * s;
        from_float(out[start + c], norm * to_float(weight[c]) + to_float(bias[c]));
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}
