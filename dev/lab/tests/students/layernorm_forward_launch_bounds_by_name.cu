// wrong: launch.*64.*128
constexpr int most = 64;  //!
BLOCK(128, threads)  //!
extern "C" __global__ void __launch_bounds__(most) my_layernorm_forward(  //!
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    float m = 0, variance = 0;
    for (int c = 0; c < C; c++) m += x[c] / C;
    for (int c = 0; c < C; c++) variance += (x[c] - m) * (x[c] - m);
    float s = rsqrtf(variance / C + 1e-5f);
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], x[c]);
        from_float(out[(size_t)row * C + c], (x[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
    }
    mean[row] = m, rstd[row] = s;
}
