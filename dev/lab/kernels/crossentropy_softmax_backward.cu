// dlogits (N,Vp) = (probs (N,Vp) - 1 at the target) * dlosses (N), zeros in the padding.

// One thread per number.
BLOCK(256, threads)
extern "C" __global__ void crossentropy_softmax_backward1(real* __restrict__ dlogits,
                                                          const float* __restrict__ dlosses,
                                                          const real* __restrict__ probs,
                                                          const int* __restrict__ targets, int N, int V, int Vp) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * Vp) return;
    int row = i / Vp, v = i % Vp;
    float indicator = v == targets[row] ? 1.0f : 0.0f;
    from_float(dlogits[i], v < V ? (to_float(probs[i]) - indicator) * dlosses[row] : 0.0f);
}

// 16 bytes per lane, and the row from the grid: no 64-bit division, and one comparison with the target for W numbers.
BLOCK(128, W * threads)
extern "C" __global__ void crossentropy_softmax_backward2(real* __restrict__ dlogits,
                                                          const float* __restrict__ dlosses,
                                                          const real* __restrict__ probs,
                                                          const int* __restrict__ targets, int N, int V, int Vp) {
    int v = first_number(), row = blockIdx.y, target = targets[row];
    if (v >= Vp) return;
    Pack<W> p = load<W>(probs + (size_t)row * Vp + v);
    float factor = dlosses[row];
    if (target / W == v / W) p[target % W] -= 1.0f;
    for (int i = 0; i < W; i++) p[i] = v + i < V ? p[i] * factor : 0.0f;
    store(dlogits + (size_t)row * Vp + v, p);
}
