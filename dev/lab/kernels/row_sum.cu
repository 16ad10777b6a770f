// out (N) = the sum of each row of inp (N,C).

// One thread per row: the loop that one would write in C. The 32 lanes of a warp read the same column of 32 rows, so a
// load touches 32 places that are far apart, and there are only N threads.
BLOCK(64, threads)
extern "C" __global__ void row_sum1(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(inp[(size_t)row * C + c]);
    out[row] = sum;
}

// One block per row. Neighbouring threads read neighbouring numbers, and each thread adds up its own. These sums go to
// shared memory, where they are added by a tree: first every second thread adds the sum to its right, then every fourth
// one the sum two to the right, and so on. A thread reads what another has written, so a barrier is before each step.
// The block's size must be a power of 2. In a step of 1 half of the lanes of each warp have nothing to do, in a step of
// 2 three quarters, and from a step of 16 on one lane of a warp adds at most: all warps go through all steps for few
// additions. And a remainder by a number that the compiler does not know takes some twenty instructions.
BLOCK(256, 1)
extern "C" __global__ void row_sum2(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ float part[1024];
    int row = blockIdx.x;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)row * C + c]);
    part[threadIdx.x] = sum;
    for (int step = 1; step < blockDim.x; step *= 2) {
        __syncthreads();  // the sums of the step before are written
        if (threadIdx.x % (2 * step) == 0) part[threadIdx.x] += part[threadIdx.x + step];
    }
    if (threadIdx.x == 0) out[row] = part[0];
}

// The same tree by halves: the first half of the threads adds the second half's sums, then the first quarter those of
// the second quarter. Now the threads that add are neighbours: whole warps work and whole warps have nothing to do. With
// version 2's tree and i = 2 * step * threadIdx.x whole warps would work, too, but their lanes want numbers 2 * step
// apart, which are in few banks of shared memory, and wait for each other. But there is still a barrier for each of the 8 steps of 256 threads, and
// below 32 threads a warp waits only for itself.
BLOCK(256, 1)
extern "C" __global__ void row_sum3(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ float part[1024];
    int row = blockIdx.x;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)row * C + c]);
    part[threadIdx.x] = sum;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();  // the sums of the step before are written
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[row] = part[0];
}

// The lanes of a warp add up by shuffles, from register to register, without a barrier. Shared memory is left with one
// number per warp, and the first warp adds these by shuffles too: one barrier in place of eight. block_reduce in
// kernels.cu does the same, and has a second barrier so that it can be called again.
BLOCK(256, 1)
extern "C" __global__ void row_sum4(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ float of_warp[32];
    int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)row * C + c]);
    sum = warp_sum(sum);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = warp_sum(lane < blockDim.x / 32 ? of_warp[lane] : 0.0f);
    if (lane == 0) out[row] = sum;
}
