// dbias (OC) += the sum over rows of dout (N,OC).

// A thread a column: lanes read neighbours, but OC threads are few, and each has one addition at a time to do.
BLOCK(128, threads)
extern "C" __global__ void matmul_backward_bias1(float* __restrict__ dbias, const real* __restrict__ dout, int N,
                                                 int OC) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= OC) return;
    float sum = 0.0f;
    for (int row = 0; row < N; row++) sum += to_float(dout[(size_t)row * OC + o]);
    dbias[o] += sum;
}

// The rows are shared out along the grid's y, and each share adds its sum by an atomic: enough threads, of which
// 64 wait for each other at an address, in an order that changes from run to run.
BLOCK(128, threads)
extern "C" __global__ void matmul_backward_bias2(float* dbias, const real* __restrict__ dout, int N, int OC) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= OC) return;
    float sum = 0.0f;
    for (int row = blockIdx.y; row < N; row += gridDim.y) sum += to_float(dout[(size_t)row * OC + o]);
    atomicAdd(dbias + o, sum);
}

// matmul_backward_bias in kernels.cu: 16 bytes a lane, 8 lanes side by side and the groups of a block one below the
// other, four rows in flight for each; the shares' sums are stored, and add_partials adds them up in one order.
