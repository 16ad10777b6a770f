// wrong: 8 bytes|8-byte|align
BLOCK(64, threads)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x = residual + (size_t)row * C;
    float m = x[0], var = 0.0f;
    for (int c = 1; c + 1 < C; c += 2) {
        Pack<2> two = load<2>(x + c);  //!
        m += two[0] + two[1];
    }
    m = (m + x[C - 1]) / C;
    for (int c = 0; c < C; c++) var += (x[c] - m) * (x[c] - m);
    float s = 1.0f / sqrtf(var / C + 1e-5f);
    for (int c = 0; c < C; c++) {
        from_float(copy[(size_t)row * C + c], x[c]);
        float norm = (x[c] - m) * s;
        from_float(out[(size_t)row * C + c], norm * to_float(weight[c]) + to_float(bias[c]));
    }
    mean[row] = m;
    rstd[row] = s;
}
