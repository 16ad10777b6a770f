// wrong: mask|lanes
BLOCK(128, threads / 32)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float sum = 0.0f;
    for (int c = lane; c < C; c += 32) {
        size_t i = (size_t)row * C + c;
        residual[i] += to_float(branch[i]);
        from_float(copy[i], residual[i]);
        sum += residual[i] * residual[i];
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffff, sum, d);  //!
    float s = 1.0f / sqrtf(sum / C + eps);
    for (size_t i = (size_t)row * C + lane; i < ((size_t)row + 1) * C; i += 32)
        from_float(out[i], residual[i] * s * to_float(weight[i % C]));
    if (lane == 0) rstd[row] = s;
}
