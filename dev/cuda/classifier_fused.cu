// losses (N) = the cross-entropy of logits (N,Vp)[row, 0..V-1], and the logits become their own gradient,
// dloss * (softmax - 1 at the target), zeros in the padding. The probabilities are never stored: done one after the other,
// softmax, cross-entropy and its gradient would write and read N Vp numbers twice more.

// A thread a row, four passes.
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

// A block a row: whole lines, and enough threads to have many on their way.
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

// Two passes instead of three: maximum and sum at once, the sum corrected when the maximum grows. Still a number a lane.
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

// fused_classifier in kernels.cu: 16 bytes a lane, and the row waits in shared memory for the second pass, so that a
// logit is read from device memory once.
