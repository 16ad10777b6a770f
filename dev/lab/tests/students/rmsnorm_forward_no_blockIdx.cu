// wrong: blockIdx
BLOCK(64, threads)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    int row = threadIdx.x;  //!
    if (row >= N) return;
    float* x = residual + (size_t)row * C;
    const real* y = branch + (size_t)row * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) {
        x[c] += to_float(y[c]);  //!
        sum += x[c] * x[c];
    }
    float s = 1.0f / sqrtf(sum / C + eps);
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], x[c]);  //!
        from_float(out[(size_t)row * C + c], x[c] * s * to_float(weight[c]));  //!
    }
    rstd[row] = s;
}
