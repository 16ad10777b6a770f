// wrong: blockIdx
BLOCK(32, threads)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    int row = threadIdx.x;  //!
    if (row >= N) return;
    const real* x = logits + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));  //!
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);
    losses[row] = logf(sum) + top - to_float(x[targets[row]]);  //!
}
