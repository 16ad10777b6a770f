// out (N,C) = the sum of inp (N,C) from the beginning of the row up to each number. Among other things it draws a word:
// of the running sums of probabilities, the first that is larger than a random number from 0 to 1 says which.

// One thread per row. Each sum needs the one before, so this looks as if nothing could be done at the same time.
BLOCK(64, threads)
extern "C" __global__ void prefix_sum1(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) {
        sum += to_float(inp[(size_t)row * C + c]);
        out[(size_t)row * C + c] = sum;
    }
}

// One block per row (Hillis and Steele 1986). In a step of 1 each thread adds the number to its left, in a step of 2
// the sum two to the left, in a step of 4 the sum four to the left: after 8 steps each of 256 threads has the sum of all numbers up
// to its own. There are more additions, 8 for a number in place of one, but 256 at a time. Each step needs two
// barriers: one after all have written, since a thread reads what another wrote, and one after all have read, since a
// thread overwrites what another reads. With two arrays in turn, one to read and one to write, the second could go. A
// longer row takes several rounds, and `before` is the sum of the rounds before.
BLOCK(256, 1)
extern "C" __global__ void prefix_sum2(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ float sums[1024];
    size_t start = (size_t)blockIdx.x * C;
    float before = 0.0f;
    for (int first = 0; first < C; first += blockDim.x) {
        int c = first + threadIdx.x;
        float sum = c < C ? to_float(inp[start + c]) : 0.0f;
        sums[threadIdx.x] = sum;
        __syncthreads();  // all numbers are there
        for (int step = 1; step < blockDim.x; step *= 2) {
            if (threadIdx.x >= step) sum += sums[threadIdx.x - step];
            __syncthreads();  // all have read the sums of the step before
            sums[threadIdx.x] = sum;
            __syncthreads();  // all have written theirs
        }
        if (c < C) out[start + c] = before + sum;
        before += sums[blockDim.x - 1];
        __syncthreads();  // all have read the last sum, and the next round may write
    }
}

// One warp per row, which takes 32 numbers at a time and needs no barrier. The lanes exchange sums by a butterfly, as in
// warp_sum: `total` is the sum of a group of 1 lane, then 2, 4, up to 32. The other half of the group is to the left of
// a lane if the lane's bit `step` is set; then the other half's total belongs to the lane's own sum. In the end total is
// the sum of all 32, which is what the next 32 have to begin with.
BLOCK(256, threads / 32)
extern "C" __global__ void prefix_sum3(float* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float before = 0.0f;
    for (int first = 0; first < C; first += 32) {
        int c = first + lane;
        float sum = c < C ? to_float(inp[start + c]) : 0.0f, total = sum;
        for (int step = 1; step < 32; step *= 2) {
            float other = __shfl_xor_sync(FULL_WARP, total, step);
            if (lane & step) sum += other;
            total += other;
        }
        if (c < C) out[start + c] = before + sum;
        before += total;
    }
}
