// losses (N) = the cross-entropy of logits (N,Vp)[row, 0..V-1], and the logits become their own gradient, dloss *
// (softmax - 1 at the target), zeros in the padding. The probabilities are never stored; separate kernels for softmax,
// cross-entropy and the gradient would write and read N Vp numbers twice more.

// One thread per row, four passes.
BLOCK(32, threads)
extern "C" __global__ void classifier_fused1(real* logits, float* __restrict__ losses, const int* __restrict__ targets,
                                             float dloss, int N, int V, int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);
    losses[row] = logf(sum) + top - to_float(x[targets[row]]);
    for (int v = 0; v < Vp; v++)
        from_float(x[v], v < V ? dloss * (expf(to_float(x[v]) - top) / sum - (v == targets[row] ? 1.0f : 0.0f)) : 0.0f);
}

// One block per row: whole lines, and enough threads to have many loads under way.
BLOCK(256, 1)
extern "C" __global__ void classifier_fused2(real* logits, float* __restrict__ losses, const int* __restrict__ targets,
                                             float dloss, int N, int V, int Vp) {
    real* x = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(x[v]) - top);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + top - to_float(x[target]);
    __syncthreads();  // the logit of the target has been read
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(x[v], v < V ? dloss * (expf(to_float(x[v]) - top) / sum - (v == target ? 1.0f : 0.0f)) : 0.0f);
}

// Two passes instead of three: maximum and sum at once, the sum corrected when the maximum grows. Still one number per
// lane.
BLOCK(256, 1)
extern "C" __global__ void classifier_fused3(real* logits, float* __restrict__ losses, const int* __restrict__ targets,
                                             float dloss, int N, int V, int Vp) {
    real* x = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float largest = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        float l = to_float(x[v]), now = fmaxf(largest, l);
        if (now > largest) sum *= expf(largest - now);
        sum += expf(l - now);
        largest = now;
    }
    float top = block_reduce<warp_max>(largest, LOWEST);
    sum = block_reduce<warp_sum>(sum * expf(largest - top), 0.0f);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + top - to_float(x[target]);
    __syncthreads();
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(x[v], v < V ? dloss * (expf(to_float(x[v]) - top) / sum - (v == target ? 1.0f : 0.0f)) : 0.0f);
}

// 16 bytes per lane, and the row waits in shared memory for the second pass, so a logit is read from device memory
// once. A block goes through several rows. As soon as a thread is done with 16 bytes of one row, it starts the copy of
// 16 bytes of the next row to the same place, so that memory is busy in both directions while gradients are stored. A
// thread reads only what it copied itself.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) classifier_fused4(real* logits, float* __restrict__ losses,
                                                                     const int* __restrict__ targets, float dloss,
                                                                     int N, int V, int Vp) {
    DYNAMIC_SHARED(real, x);  // (Vp)
    const real* first = logits + (size_t)blockIdx.x * Vp;
    for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) copy16(x + v, first + v, true);
    for (int row = blockIdx.x; row < N; row += gridDim.x) {
        int target = targets[row];
        copies_end();
        wait_for_copies<0>();
        float largest = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
            Pack<W> l = load<W>(x + v);
            if (v + W > V)
                for (int i = 0; i < W; i++)
                    if (v + i >= V) l[i] = LOWEST;
            float before = largest;
            for (int i = 0; i < W; i++) largest = fmaxf(largest, l[i]);
            if (largest > before) sum *= exponential(before - largest);
            for (int i = 0; i < W; i++) sum += exponential(l[i] - largest);
        }
        float top = block_reduce<warp_max>(largest, LOWEST);
        sum = block_reduce<warp_sum>(sum * exponential(largest - top), 0.0f);
        float norm = dloss / sum;
        for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
            Pack<W> l = load<W>(x + v);
            if (target / W == v / W)  // the target's logit is this thread's
                for (int i = 0; i < W; i++)
                    if (v + i == target) losses[row] = logf(sum) + top - l[i];
            for (int i = 0; i < W; i++) {
                float gradient = exponential(l[i] - top) * norm - (v + i == target ? dloss : 0.0f);
                l[i] = v + i < V ? gradient : 0.0f;
            }
            store(logits + (size_t)row * Vp + v, l);
            asm volatile("" ::: "memory");  // l has been read before it is overwritten
            if (row + gridDim.x < (unsigned)N) copy16(x + v, logits + ((size_t)row + gridDim.x) * Vp + v, true);
        }
    }
}

// fused_classifier in kernels.cu: room for two rows in shared memory, so that the whole next row is copied while this
// one is summed, and no part of it waits for a store. Two rows of 50,304 logits fit in bf16. If two do not fit, it does
// as version 4. If not even one fits, such as one of 128,256 logits, it keeps the beginning and reads the rest again,
// which is short enough to be still in L2.
