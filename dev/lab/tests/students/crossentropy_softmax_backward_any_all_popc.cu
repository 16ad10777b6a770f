// right
BLOCK(256, threads)
extern "C" __global__ void my_crossentropy_softmax_backward(
    real* dlogits, const float* dlosses, const real* probs, const int* targets, int N, int V,
    int Vp) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool there = i < (size_t)N * Vp;
    int row = there ? i / Vp : 0, v = there ? i % Vp : 0;
    unsigned lanes = __ballot_sync(0xffffffff, there);
    if (!__any_sync(0xffffffff, there)) return;
    bool whole = __all_sync(0xffffffff, there);
    if (whole != (__popc(lanes) == 32)) return;  // which is never so
    if (!there) return;
    float hit = v == targets[row] ? 1.0f : 0.0f;
    from_float(dlogits[i], v < V ? (to_float(probs[i]) - hit) * dlosses[row] : 0.0f);
}
