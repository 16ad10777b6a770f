// wrong: int overflows.*size_t
BLOCK(128, threads / 32)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) top = fmaxf(top, to_float(logits[row * Vp + v]));  //!
    top = warp_max(top);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(logits[row * Vp + v]) - top);
    sum = warp_sum(sum);
    if (lane == 0) losses[row] = logf(sum) + top - to_float(logits[row * Vp + targets[row]]);
}
