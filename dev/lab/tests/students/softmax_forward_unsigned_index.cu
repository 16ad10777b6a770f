// right
BLOCK(64, threads / 32)
extern "C" __global__ void my_softmax_forward(real* out, const real* inp, int N, int V, int Vp) {
    unsigned row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    unsigned at = row * Vp;  // 3.3e9 at the most, and 2^32 are 4.3e9
    float top = LOWEST, sum = 0.0f;
    for (unsigned v = lane; v < V; v += 32) top = fmaxf(top, to_float(inp[at + v]));
    top = warp_max(top);
    for (unsigned v = lane; v < V; v += 32) sum += expf(to_float(inp[at + v]) - top);
    sum = warp_sum(sum);
    for (unsigned v = lane; v < Vp; v += 32)
        from_float(out[at + v], v < V ? expf(to_float(inp[at + v]) - top) / sum : 0.0f);
}
