// wrong: padding|never written
BLOCK(256, threads)
extern "C" __global__ void my_crossentropy_softmax_backward(
    real* dlogits, const float* dlosses, const real* probs, const int* targets, int N, int V,
    int Vp) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * Vp) return;
    int row = i / Vp, v = i % Vp;
    if (v >= V) return;
    from_float(dlogits[i], (to_float(probs[i]) - (v == targets[row] ? 1 : 0)) * dlosses[row]);
}
