// wrong: blockIdx
BLOCK(64, threads)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = threadIdx.x;  //!
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    float m = 0.0f, var = 0.0f;
    for (int c = 0; c < C; c++) m += x[c];
    m /= C;
    for (int c = 0; c < C; c++) var += (x[c] - m) * (x[c] - m);
    float s = 1.0f / sqrtf(var / C + 1e-5f);
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], x[c]);  //!
        float norm = (x[c] - m) * s;
        from_float(out[(size_t)row * C + c], norm * to_float(weight[c]) + to_float(bias[c]));  //!
    }
    mean[row] = m;  //!
    rstd[row] = s;
}
