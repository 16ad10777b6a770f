// right
#include <stdlib.h>
BLOCK(64, threads)
extern "C" __global__ void my_softmax_forward(real* out, const real* inp, int N, int V, int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float* e = (float*)malloc(2 * sizeof(float));
    if (!e) __trap();
    e[0] = LOWEST, e[1] = 0.0f;
    for (int v = 0; v < V; v++) e[0] = fmaxf(e[0], to_float(x[v]));
    for (int v = 0; v < V; v++) e[1] += expf(to_float(x[v]) - e[0]);
    for (int v = 0; v < Vp; v++)
        from_float(out[(size_t)row * Vp + v], v < V ? expf(to_float(x[v]) - e[0]) / e[1] : 0.0f);
    free(e);
}
