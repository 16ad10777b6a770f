// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f, wanted = 0.0f;
    for (int v = lane; v < V; v += 32) top = fmaxf(top, to_float(x[v]));
    top = warp_max(top);
    for (int first = 0; first < V; first += 32) {
        int v = first + lane;
        float value = v < V ? to_float(x[v]) : LOWEST;
        sum += v < V ? expf(value - top) : 0.0f;
        unsigned who = __ballot_sync(0xffffffff, v == targets[row]);
        if (who) wanted = __shfl_sync(0xffffffff, value, __ffs(who) - 1);
    }
    sum = warp_sum(sum);
    if (lane == 0) losses[row] = logf(sum) + top - wanted;
}
