// wrong: race.*dweight
BLOCK(32, threads)
extern "C" __global__ void my_rmsnorm_backward(
    real* dinp, float* dweight, const real* dout, const real* inp, const real* weight,
    const float* rstd, int N, int C) {
    // Behind the rows each thread adds up columns over the block's rows, so one addition is enough.
    int first = blockIdx.x * blockDim.x, row = first + threadIdx.x;
    if (row < N) {
        float s = rstd[row], sum = 0.0f;
        const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
        for (int c = 0; c < C; c++) sum += to_float(dy[c]) * to_float(weight[c]) * to_float(x[c]);
        for (int c = 0; c < C; c++) {
            float dnorm = to_float(dy[c]) * to_float(weight[c]);
            real* dx = dinp + (size_t)row * C + c;
            from_float(*dx, to_float(*dx) + s * (dnorm - to_float(x[c]) * s * s * sum / C));
        }
    }
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float dw = 0.0f;
        for (int r = first; r < min(first + (int)blockDim.x, N); r++)
            dw += to_float(dout[(size_t)r * C + c]) * to_float(inp[(size_t)r * C + c]) * rstd[r];
        dweight[c] += dw;  //!
    }
}
