// wrong: int overflows|never written|address
BLOCK(256, threads)
extern "C" __global__ void my_crossentropy_softmax_backward(
    real* dlogits, const float* dlosses, const real* probs, const int* targets, int N, int V, int Vp) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  //!
    if (i >= N * Vp) return;  //!
    int row = i / Vp, v = i % Vp;
    float p = v < V ? to_float(probs[i]) - (v == targets[row]) : 0.0f;
    from_float(dlogits[i], p * dlosses[row]);  //!
}
