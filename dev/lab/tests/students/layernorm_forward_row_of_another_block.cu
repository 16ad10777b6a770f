// wrong: race.*(rstd|mean)
BLOCK(64, threads / 32)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    float m = 0.0f, var = 0.0f;
    for (int c = lane; row < N && c < C; c += 32) m += residual[(size_t)row * C + c] / C;
    m = warp_sum(m);
    for (int c = lane; row < N && c < C; c += 32) {
        float d = residual[(size_t)row * C + c] - m;
        var += d * d / C;
    }
    var = warp_sum(var);
    if (lane == 0 && row < N) mean[row] = m, rstd[row] = 1.0f / sqrtf(var + 1e-5f);  //!
    __syncthreads();
    size_t step = (size_t)gridDim.x * blockDim.x;  // and now a number for each thread of the grid
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (size_t)N * C; i += step) {
        float norm = (residual[i] - mean[i / C]) * rstd[i / C];  //!
        from_float(out[i], norm * to_float(weight[i % C]) + to_float(bias[i % C]));
        from_float(copy[i], residual[i]);
    }
}
