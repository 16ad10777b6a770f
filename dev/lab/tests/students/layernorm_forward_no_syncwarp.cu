// wrong: race.*part
BLOCK(128, 4)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    volatile __shared__ float part[4][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 4 * blockIdx.x + warp;
    if (row >= N) return;
    volatile float* mine = part[warp];
    float m = 0.0f, var = 0.0f;
    for (int c = lane; c < C; c += 32) m += residual[(size_t)row * C + c];
    mine[lane] = m;  //!
    for (int d = 16; d > 0; d /= 2) {
        if (lane < d) mine[lane] = mine[lane] + mine[lane + d];  //!
    }
    __syncwarp();
    m = mine[0] / C;
    for (int c = lane; c < C; c += 32)
        var += (residual[(size_t)row * C + c] - m) * (residual[(size_t)row * C + c] - m);
    float s = 1.0f / sqrtf(warp_sum(var) / C + 1e-5f);
    for (int c = lane; c < C; c += 32) {
        float x = residual[(size_t)row * C + c], norm = (x - m) * s;
        from_float(copy[(size_t)row * C + c], x);
        from_float(out[(size_t)row * C + c], norm * to_float(weight[c]) + to_float(bias[c]));
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}
