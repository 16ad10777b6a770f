// dinp (N,OC) holds the gradient of the output and becomes, in place, that of the input of gelu.

namespace gelu_backward_ {
constexpr float SQRT_2_OVER_PI = 0.7978845608f;
__device__ __forceinline__ float derivative(float x) {
    float t = tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}
}  // namespace gelu_backward_

// One thread per number, with the derivative of x/2 (1 + tanh u) as it stands.
BLOCK(256, threads)
extern "C" __global__ void gelu_backward1(real* __restrict__ dinp, const real* __restrict__ inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)N * OC) from_float(dinp[i], to_float(dinp[i]) * gelu_backward_::derivative(to_float(inp[i])));
}

// 16 bytes per lane, two such loads in flight for each thread.
BLOCK(1024, W * threads)
extern "C" __global__ void gelu_backward2(real* __restrict__ dinp, const real* __restrict__ inp, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i), d = load<W>(dinp + i);
    for (int j = 0; j < W; j++) d[j] *= gelu_backward_::derivative(x[j]);
    store(dinp + i, d);
}

// gelu_backward in kernels.cu: by way of the logistic function, one exponential instead of tanhf.
