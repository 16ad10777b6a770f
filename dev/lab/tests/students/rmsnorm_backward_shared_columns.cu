// right
BLOCK(128, 4)
extern "C" __global__ void my_rmsnorm_backward(
    real* dinp, float* dweight, const real* dout, const real* inp, const real* weight,
    const float* rstd, int N, int C) {
    // Four warps have a row each; then each thread adds the four rows' terms of its columns.
    __shared__ float s[4], average[4];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 4 * blockIdx.x + warp;
    float sum = 0.0f;
    for (int c = lane; row < N && c < C; c += 32) {
        size_t i = (size_t)row * C + c;
        sum += to_float(dout[i]) * to_float(weight[c]) * to_float(inp[i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        s[warp] = row < N ? rstd[row] : 0.0f;
        average[warp] = sum / C;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float dw = 0.0f;
        for (int r = 0; r < 4 && 4 * blockIdx.x + r < N; r++) {
            size_t i = ((size_t)4 * blockIdx.x + r) * C + c;
            float d = to_float(dout[i]), x = to_float(inp[i]);
            float g = s[r] * (d * to_float(weight[c]) - x * s[r] * s[r] * average[r]);
            from_float(dinp[i], to_float(dinp[i]) + g);
            dw += d * x * s[r];
        }
        atomicAdd(&dweight[c], dw);
    }
}
