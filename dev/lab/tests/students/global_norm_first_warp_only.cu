// wrong: norm
BLOCK(512, 1)
extern "C" __global__ void my_global_norm(
    float* norm, const float* grads, size_t n) {
    float sum = 0.0f;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += grads[i] * grads[i];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) norm[0] = sqrtf(sum);
}
