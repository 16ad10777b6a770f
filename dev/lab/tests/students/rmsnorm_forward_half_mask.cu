// right
BLOCK(128, threads / 16)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16, lane = threadIdx.x % 16;
    if (row >= N) return;
    unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;  // my half of the warp
    float sum = 0.0f;
    for (int c = lane; c < C; c += 16) {
        size_t i = (size_t)row * C + c;
        float x = residual[i] + to_float(branch[i]);
        residual[i] = x;
        from_float(copy[i], x);
        sum += x * x;
    }
    for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(mask, sum, d);
    float s = 1.0f / sqrtf(sum / C + eps);
    for (int c = lane; c < C; c += 16) {
        size_t i = (size_t)row * C + c;
        from_float(out[i], residual[i] * s * to_float(weight[c]));
    }
    if (lane == 0) rstd[row] = s;
}
