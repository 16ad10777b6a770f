// out (1) = the sum of the squares of grads (n): the squared norm of all gradients, by which they may be clipped.

// A thread a number, and each block adds its sum to the result: an atomic for every 256 numbers, all to one address,
// which takes them one at a time. The sum's order is another one on each run.
extern "C" __global__ void global_norm1(float* out, const float* __restrict__ grads, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = block_reduce<warp_sum>(i < n ? grads[i] * grads[i] : 0.0f, 0.0f);
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

// As many blocks as the GPU can run at once, each of which walks through the whole array in strides: an atomic for each
// of these is nothing. A thread has one load in flight at a time.
extern "C" __global__ void global_norm2(float* out, const float* __restrict__ grads, size_t n) {
    float sum = 0.0f;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        sum += grads[i] * grads[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

// 16 bytes a lane, four of them in flight for each thread; and no atomics: a block stores its sum, and one more block
// adds them up, in the same order each time. n is a multiple of 4.
extern "C" __global__ void global_norm3(float* __restrict__ partials, const float* __restrict__ grads, size_t n) {
    Pack<4> sum = {};
    size_t stride = (size_t)4 * gridDim.x * blockDim.x;
#pragma unroll 4
    for (size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += stride) {
        Pack<4> g = load<4>(grads + i);
        for (int j = 0; j < 4; j++) sum[j] += g[j] * g[j];
    }
    float total = block_reduce<warp_sum>((sum[0] + sum[1]) + (sum[2] + sum[3]), 0.0f);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

extern "C" __global__ void global_norm3_total(float* __restrict__ out, const float* __restrict__ partials, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) out[0] = sum;
}
