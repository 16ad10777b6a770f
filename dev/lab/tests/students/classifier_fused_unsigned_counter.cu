// right
BLOCK(128, 1)
extern "C" __global__ void my_classifier_fused(
    real* logits, float* losses, const int* targets, float dloss, int N, int V, int Vp) {
    // Threads fetch their next columns from a counter, each when it is ready.
    __shared__ unsigned int next;
    real* x = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float top = LOWEST, sum = 0.0f, wanted = to_float(x[target]);
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(x[v]) - top);
    if (threadIdx.x == 0) next = 0;
    sum = block_reduce<warp_sum>(sum, 0.0f);
    for (unsigned v = atomicAdd(&next, 1u); v < Vp; v = atomicAdd(&next, 1u)) {
        float p = v < V ? expf(to_float(x[v]) - top) / sum - (v == target ? 1.0f : 0.0f) : 0.0f;
        from_float(x[v], dloss * p);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + top - wanted;
}
