// norm[0] = the square root of the sum of the squares of grads (n), by which they may be clipped.

// One thread per number, and each block adds its sum to the result: an atomic for every 256 numbers, all to one
// address, which takes them one at a time. The order of the sum varies. A second kernel takes the root.
BLOCK(1024, threads)
extern "C" __global__ void global_norm1(float* norm, const float* __restrict__ grads, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = block_reduce<warp_sum>(i < n ? grads[i] * grads[i] : 0.0f, 0.0f);
    if (threadIdx.x == 0) atomicAdd(norm, sum);
}

BLOCK(1, 1)
extern "C" __global__ void global_norm1_root(float* norm) { norm[0] = sqrtf(norm[0]); }

// As many blocks as the GPU runs at once, each of which goes through the whole array in strides. One atomic for each
// costs nothing. But a thread has only one load in flight at a time.
BLOCK(512, 1)
extern "C" __global__ void global_norm2(float* norm, const float* __restrict__ grads, size_t n) {
    float sum = 0.0f;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        sum += grads[i] * grads[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) atomicAdd(norm, sum);
}

// global_norm in kernels.cu: 16 bytes per lane, four of them in flight for each thread; and no float atomics: a block
// stores its sum and counts itself, and the last block adds up all sums, always in the same order, and takes the root.
// So there is one launch, and nothing to set to zero before it.
