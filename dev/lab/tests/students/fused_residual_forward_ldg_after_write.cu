// wrong: __ldg.*without __ldg
BLOCK(128, threads / 32)
extern "C" __global__ void my_fused_residual_forward(
    real* out, float* mean, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t at = (size_t)row * C;
    float sum = 0;
    for (int c = lane; c < C; c += 32) {
        float x = __ldg(residual + at + c) + to_float(branch[at + c]);  //!
        residual[at + c] = x;  //!
        from_float(copy[at + c], x);
        sum += x;
    }
    float m = warp_sum(sum) / C, squares = 0;
    for (int c = lane; c < C; c += 32) {
        float d = __ldg(residual + at + c) - m;  //!
        squares += d * d;
    }
    float r = rsqrtf(warp_sum(squares) / C + 1e-5f);
    if (lane == 0) mean[row] = m, rstd[row] = r;
    for (int c = lane; c < C; c += 32)
        from_float(out[at + c], (__ldg(residual + at + c) - m) * r * to_float(weight[c]) + to_float(bias[c]));  //!
}
