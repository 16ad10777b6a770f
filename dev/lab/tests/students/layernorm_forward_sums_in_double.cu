// right
BLOCK(64, threads)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    double sum = 0.0, squares = 0.0;
    for (int c = 0; c < C; c++) sum += x[c], squares += (double)x[c] * x[c];
    double m = sum / C;
    float s = (float)(1.0 / sqrt(squares / C - m * m + 1e-5));
    mean[row] = (float)m, rstd[row] = s;
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], x[c]);
        from_float(out[(size_t)row * C + c], float(x[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
    }
}
