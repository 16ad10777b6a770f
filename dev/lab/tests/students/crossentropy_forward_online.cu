// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) {
        float now = fmaxf(top, to_float(x[v]));
        sum = sum * expf(top - now) + expf(to_float(x[v]) - now);
        top = now;
    }
    float whole = warp_max(top);
    sum = warp_sum(sum * expf(top - whole));
    if (lane == 0) losses[row] = logf(sum) + whole - to_float(x[targets[row]]);
}
