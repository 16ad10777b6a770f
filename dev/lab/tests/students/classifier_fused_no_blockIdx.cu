// wrong: blockIdx
BLOCK(32, threads)
extern "C" __global__ void my_classifier_fused(
    real* logits, float* losses, const int* targets, float dloss, int N, int V, int Vp) {
    int row = threadIdx.x;  //!
    if (row >= N) return;
    real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));  //!
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);
    losses[row] = logf(sum) + top - to_float(x[targets[row]]);  //!
    for (int v = 0; v < Vp; v++) {
        float p = v < V ? expf(to_float(x[v]) - top) / sum : 0.0f;
        from_float(x[v], v < V ? dloss * (p - (v == targets[row] ? 1.0f : 0.0f)) : 0.0f);  //!
    }
}
