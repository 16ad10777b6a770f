// right
__device__ float total;
BLOCK(256, 1)
extern "C" __global__ void my_global_norm(float* norm, const float* grads, size_t n) {
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
    float sum = 0.0f;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += grads[i] * grads[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, sum);
    __syncthreads();
    if (threadIdx.x == 0) norm[0] = sqrtf(total);
}
