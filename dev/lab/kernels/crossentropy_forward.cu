// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]).

// One thread per row: the maximum, then the sum of exponentials, each with its own pass through device memory.
BLOCK(32, threads)
extern "C" __global__ void crossentropy_forward1(float* __restrict__ losses, const real* __restrict__ logits,
                                                 const int* __restrict__ targets, int N, int V, int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);
    losses[row] = logf(sum) + top - to_float(x[targets[row]]);
}

// One block per row: lanes read neighbouring numbers, and there are enough threads.
BLOCK(1024, 1)
extern "C" __global__ void crossentropy_forward2(float* __restrict__ losses, const real* __restrict__ logits,
                                                 const int* __restrict__ targets, int N, int V, int Vp) {
    const real* x = logits + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(x[v]) - top);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + top - to_float(x[targets[blockIdx.x]]);
}

// fused_classifier in kernels.cu, without its gradient: maximum and sum in one pass, 16 bytes per lane, four of them in
// flight for each thread.
