// dbias (OC) += the sum over rows of dout (N,OC).

// One thread per column: lanes read neighbouring numbers, but OC threads are few, and each does one addition at a time.
BLOCK(128, threads)
extern "C" __global__ void matmul_backward_bias1(float* __restrict__ dbias, const real* __restrict__ dout, int N,
                                                 int OC) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= OC) return;
    float sum = 0.0f;
    for (int row = 0; row < N; row++) sum += to_float(dout[(size_t)row * OC + o]);
    dbias[o] += sum;
}

// The rows are divided along the grid's y, and each share adds its sum by an atomic. There are enough threads, but 64
// wait for each other at each address, in an order that varies.
BLOCK(128, threads)
extern "C" __global__ void matmul_backward_bias2(float* dbias, const real* __restrict__ dout, int N, int OC) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= OC) return;
    float sum = 0.0f;
    for (int row = blockIdx.y; row < N; row += gridDim.y) sum += to_float(dout[(size_t)row * OC + o]);
    atomicAdd(dbias + o, sum);
}

// No float atomics, and one launch: 16 bytes per lane, and each share stores its sum. Then its block counts itself, and
// the last block of a column adds up the shares, always from the first to the last, so the bits do not depend on which
// block that was. This saves a second kernel, with a launch and the time in which the first ends and the second begins:
// two or three microseconds. It costs a fence, which waits for the stores of a block, an atomic for each block, and a
// sum by a few blocks at the end, while the others have nothing to do. It also needs a counter for every 8 W columns,
// which must be 0 before the first launch. Both take about the same time: on an H200 it takes 30.9 us in fp32, where
// two launches take 29.1, and 17.3 in bf16, where they take 17.4 to 18.2. Items: OC columns along x, at least two
// shares along y.
BLOCK(256, 8 * W)
extern "C" __global__ void matmul_backward_bias3(float* dbias, float* partials, int* counters,
                                                 const real* __restrict__ dout, int N, int OC) {
    int shares = gridDim.y, share = blockIdx.y, rows = (N + shares - 1) / shares, first = rows * share;
    add_columns<8>(partials + (size_t)share * OC, dout + (size_t)first * OC, min(rows, N - first), OC, false);
    if (!lab::last_of(counters + blockIdx.x, gridDim.y)) return;
    int column = 8 * W * blockIdx.x + threadIdx.x;
    if (threadIdx.x >= 8 * W || column >= OC) return;
    float sum = 0.0f;
#pragma unroll 16  // loads on their way at once
    for (int share = 0; share < (int)gridDim.y; share++) sum += __ldcg(partials + (size_t)share * OC + column);
    dbias[column] += sum;
}

// matmul_backward_bias in kernels.cu: the same sums of shares, but a warp reads 512 bytes of one row, not 128 of four, and
// add_partials adds them up, which layernorm_backward needs too. So there is no counter, but a second launch.
