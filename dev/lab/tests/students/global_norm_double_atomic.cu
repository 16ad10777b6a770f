// right
BLOCK(512, 1)
extern "C" __global__ void my_global_norm(
    float* norm, const float* grads, size_t n) {
    __shared__ double sum;
    if (threadIdx.x == 0) sum = 0.0;
    __syncthreads();
    double mine = 0.0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) mine += (double)grads[i] * grads[i];
    atomicAdd(&sum, mine);
    __syncthreads();
    if (threadIdx.x == 0) norm[0] = (float)sqrt(sum);
}
