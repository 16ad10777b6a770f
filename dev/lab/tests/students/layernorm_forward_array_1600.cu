// wrong: index \d+ is|out of bounds|mine\[\d+\]|larger
BLOCK(64, threads)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    float mine[1600], m = 0.0f, var = 0.0f;
    for (int c = 0; c < C; c++) m += mine[c] = x[c];  //!
    m /= C;
    for (int c = 0; c < C; c++) var += (mine[c] - m) * (mine[c] - m);
    float s = 1.0f / sqrtf(var / C + 1e-5f);
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], mine[c]);
        float norm = (mine[c] - m) * s;
        from_float(out[(size_t)row * C + c], norm * to_float(weight[c]) + to_float(bias[c]));
    }
    mean[row] = m;
    rstd[row] = s;
}
