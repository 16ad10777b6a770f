// right
#include <cuda_runtime.h>
#include <assert.h>
#include <math.h>
BLOCK(64, threads)
extern "C" __global__ void my_crossentropy_forward(
    float* losses, const real* logits, const int* targets, int N, int V, int Vp) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    assert(targets[row] >= 0 && targets[row] < V);
    const real* x = logits + row * Vp;
    float top = -INFINITY, sum = 0.0f;
    for (int v = 0; v < V; ++v) {
        const float y = to_float(x[v]);
        if (y > top) sum *= expf(top - y), top = y;
        sum += expf(y - top);
    }
    losses[row] = logf(sum) + top - to_float(x[targets[row]]);
}
