// wrong: __syncthreads|barrier
BLOCK(128, 4)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    __shared__ float best[4];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 4 * blockIdx.x + warp;
    if (row >= N) return;
    const real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) top = fmaxf(top, to_float(x[v]));
    top = warp_max(top);
    if (lane == 0) best[warp] = top;
    __syncthreads();  //!
    for (int v = lane; v < V; v += 32) sum += expf(to_float(x[v]) - best[warp]);
    sum = warp_sum(sum);
    if (lane == 0) losses[row] = logf(sum) + best[warp] - to_float(x[targets[row]]);
}
