// right
BLOCK(512, 1)
extern "C" __global__ void my_global_norm(
    float* norm, const float* grads, size_t n) {
    __shared__ float of_warp[16];
    float sum = 0.0f;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += grads[i] * grads[i];
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffff, sum, d);
    if (threadIdx.x % warpSize == 0) of_warp[threadIdx.x / warpSize] = sum;
    __syncthreads();
    if (threadIdx.x < 16) {
        sum = of_warp[threadIdx.x];
        for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_down_sync(0xffff, sum, offset);
        if (threadIdx.x == 0) *norm = sqrtf(sum);
    }
}
