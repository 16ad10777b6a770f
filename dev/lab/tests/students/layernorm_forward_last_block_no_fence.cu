// wrong: race.*(mean|rstd)
__device__ unsigned int done;

BLOCK(64, threads)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < N) {
        float m = 0.0f, var = 0.0f;
        for (int c = 0; c < C; c++) m += residual[(size_t)row * C + c] / C;
        for (int c = 0; c < C; c++) var += powf(residual[(size_t)row * C + c] - m, 2.0f) / C;
        mean[row] = m;  //!
        rstd[row] = 1.0f / sqrtf(var + 1e-5f);  //!
    }
    __syncthreads();
    __shared__ bool last;
    if (threadIdx.x == 0) last = atomicAdd(&done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) done = 0;  // for the next launch
    for (size_t i = threadIdx.x; i < (size_t)N * C; i += blockDim.x) {
        float norm = (residual[i] - __ldcg(mean + i / C)) * __ldcg(rstd + i / C);  //!
        from_float(out[i], norm * to_float(weight[i % C]) + to_float(bias[i % C]));
        from_float(copy[i], residual[i]);
    }
}
