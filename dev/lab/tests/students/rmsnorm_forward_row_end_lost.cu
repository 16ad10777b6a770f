// wrong: column|never written|copy|out
BLOCK(64, 1)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    size_t start = (size_t)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c - threadIdx.x + 64 <= C; c += 64) {  // whole strips of 64
        residual[start + c] += to_float(branch[start + c]);
        from_float(copy[start + c], residual[start + c]);
        sum += residual[start + c] * residual[start + c];
    }
    float s = 1.0f / sqrtf(block_reduce<warp_sum>(sum, 0.0f) / C + eps);
    for (int c = threadIdx.x; c < C; c += 64)
        from_float(out[start + c], residual[start + c] * s * to_float(weight[c]));
    if (threadIdx.x == 0) rstd[blockIdx.x] = s;
}
