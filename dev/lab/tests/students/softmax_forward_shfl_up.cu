// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += warpSize) top = max(top, to_float(x[v]));
    for (int d = 1; d < warpSize; d *= 2) {
        float other = __shfl_up_sync(~0u, top, d);  // an inclusive scan: lane 31 has it all
        if (lane >= d) top = max(top, other);
    }
    top = __shfl_sync(~0u, top, 31);
    for (int v = lane; v < V; v += warpSize) sum += expf(to_float(x[v]) - top);
    for (int d = 1; d < warpSize; d *= 2) {
        float other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    sum = __shfl_sync(~0u, sum, warpSize - 1);
    for (int v = lane; v < Vp; v += warpSize)
        from_float(out[(size_t)row * Vp + v], v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}
