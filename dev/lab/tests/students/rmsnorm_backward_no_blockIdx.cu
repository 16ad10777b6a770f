// wrong: blockIdx
BLOCK(32, threads)
extern "C" __global__ void my_rmsnorm_backward(
    real* dinp, float* dweight, const real* dout, const real* inp, const real* weight,
    const float* rstd, int N, int C) {
    int row = threadIdx.x;  //!
    if (row >= N) return;
    const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
    real* dx = dinp + (size_t)row * C;
    float s = rstd[row], sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(dy[c]) * to_float(weight[c]) * to_float(x[c]);
    for (int c = 0; c < C; c++) {
        float dnorm = to_float(dy[c]) * to_float(weight[c]), xc = to_float(x[c]);
        from_float(dx[c], to_float(dx[c]) + s * (dnorm - xc * s * s * sum / C));  //!
        atomicAdd(&dweight[c], to_float(dy[c]) * xc * s);
    }
}
