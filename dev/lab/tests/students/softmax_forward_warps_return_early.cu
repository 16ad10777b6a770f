// right
BLOCK(256, threads / 32)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    int lane = threadIdx.x & 31, row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= N) return;  // whole warps leave, so the shuffles below have all their lanes
    const real* x = inp + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) top = fmaxf(top, to_float(x[v]));
    top = warp_max(top);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(x[v]) - top);
    sum = warp_sum(sum);
    for (int v = lane; v < Vp; v += 32)
        from_float(out[(size_t)row * Vp + v], v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}
