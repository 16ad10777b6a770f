// right
BLOCK(256, 2)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    __shared__ float of_warp[8];
    int half = threadIdx.x / 128, t = threadIdx.x % 128, row = 2 * blockIdx.x + half;
    bool there = row < N;  // everybody comes to the barrier
    float sum = 0.0f;
    for (int c = t; there && c < C; c += 128) {
        size_t i = (size_t)row * C + c;
        residual[i] += to_float(branch[i]);
        from_float(copy[i], residual[i]);
        sum += residual[i] * residual[i];
    }
    sum = warp_sum(sum);
    if (t % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (!there) return;
    const float* four = of_warp + 4 * half;
    float s = 1.0f / sqrtf((four[0] + four[1] + four[2] + four[3]) / C + eps);
    for (int c = t; c < C; c += 128)
        from_float(out[(size_t)row * C + c],
                   residual[(size_t)row * C + c] * s * to_float(weight[c]));
    if (t == 0) rstd[row] = s;
}
