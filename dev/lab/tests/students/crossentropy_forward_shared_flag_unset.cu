// wrong: shared
BLOCK(128, 1)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    const real* x = logits + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    __shared__ int seen;  //!
    if (threadIdx.x == 0 && blockIdx.x % 2) seen = 1;
    __syncthreads();
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(x[v]) - top);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) losses[blockIdx.x] = seen ? logf(sum) + top - to_float(x[targets[blockIdx.x]]) : 0.0f;
}
