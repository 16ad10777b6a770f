// wrong: race|target|loss
BLOCK(128, threads / 32)
extern "C" __global__ void my_classifier_fused(
    real* logits, float* losses, const int* targets, float dloss, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    real* x = logits + (size_t)row * Vp;
    int target = targets[row];
    float top = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) top = fmaxf(top, to_float(x[v]));
    top = warp_max(top);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(x[v]) - top);
    sum = warp_sum(sum);
    for (int v = lane; v < Vp; v += 32) {
        float p = v < V ? expf(to_float(x[v]) - top) / sum - (v == target ? 1.0f : 0.0f) : 0.0f;
        from_float(x[v], dloss * p);
    }
    if (lane == 0) losses[row] = logf(sum) + top - to_float(x[target]);
}
