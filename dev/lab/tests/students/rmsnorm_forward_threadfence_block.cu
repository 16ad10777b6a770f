// right
BLOCK(64, 1)
extern "C" __global__ void my_rmsnorm_forward(
    real* out, float* rstd, real* copy, float* residual, const real* branch, const real* weight,
    float eps, int N, int C) {
    __shared__ float of_thread[64], all;
    size_t start = (size_t)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += 64) {
        float x = residual[start + c] += to_float(branch[start + c]);
        from_float(copy[start + c], x);
        sum += x * x;
    }
    of_thread[threadIdx.x] = sum;
    __threadfence_block();
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = warp_sum(of_thread[threadIdx.x] + of_thread[threadIdx.x + 32]);
        if (threadIdx.x == 0) all = sum;
    }
    __syncthreads();
    float s = rsqrtf(all / C + eps);
    for (int c = threadIdx.x; c < C; c += 64)
        from_float(out[start + c], residual[start + c] * s * to_float(weight[c]));
    if (threadIdx.x == 0) rstd[blockIdx.x] = s;
}
