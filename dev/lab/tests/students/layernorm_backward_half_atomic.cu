// wrong: race.*dbias|dbias.*race
BLOCK(32, threads)
extern "C" __global__ void my_layernorm_backward(
    real* dresidual, float* dweight, float* dbias, float* before, const real* dout,
    const real* inp, const real* weight, const float* mean, const float* rstd, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
    float m = mean[row], s = rstd[row], a = 0.0f, b = 0.0f;
    for (int c = 0; c < C; c++) {
        float dnorm = to_float(dy[c]) * to_float(weight[c]);
        a += dnorm / C;
        b += dnorm * (to_float(x[c]) - m) * s / C;
    }
    for (int c = 0; c < C; c++) {
        float norm = (to_float(x[c]) - m) * s, d = to_float(dy[c]);
        real* dx = dresidual + (size_t)row * C + c;
        float g = to_float(*dx) + s * (d * to_float(weight[c]) - a - norm * b);
        from_float(*dx, g);
        atomicAdd(&dweight[c], d * norm);
        dbias[c] = dbias[c] + d;  //!
        atomicAdd(&before[c], g);
    }
}
