// wrong: race.*part
BLOCK(128, 1)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    __shared__ float part[4];
    size_t start = (size_t)blockIdx.x * C;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float m = 0.0f, var = 0.0f;
    for (int c = threadIdx.x; c < C; c += 128) m += residual[start + c];
    m = warp_sum(m);
    if (lane == 0) part[warp] = m;
    __syncthreads();
    m = (part[0] + part[1] + part[2] + part[3]) / C;  //!
    for (int c = threadIdx.x; c < C; c += 128)
        var += (residual[start + c] - m) * (residual[start + c] - m);
    var = warp_sum(var);
    if (lane == 0) part[warp] = var;  //!
    __syncthreads();
    float s = 1.0f / sqrtf((part[0] + part[1] + part[2] + part[3]) / C + 1e-5f);
    for (int c = threadIdx.x; c < C; c += 128) {
        float x = residual[start + c], norm = (x - m) * s;
        from_float(copy[start + c], x);
        from_float(out[start + c], norm * to_float(weight[c]) + to_float(bias[c]));
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = s;
}
