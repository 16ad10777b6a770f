// out (N,OC) = gelu(inp) = x/2 (1 + tanh u), with u = sqrt(2/pi) (x + 0.044715 x^3).

namespace gelu_forward_ {
constexpr float SQRT_2_OVER_PI = 0.7978845608f;
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}
}  // namespace gelu_forward_

// One thread per number, by the formula as it stands. tanhf is some twenty instructions.
BLOCK(256, threads)
extern "C" __global__ void gelu_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)N * OC) from_float(out[i], gelu_forward_::gelu(to_float(inp[i])));
}

// 16 bytes per lane: a quarter or an eighth of the loads, stores and indices. Each number still needs tanhf.
BLOCK(128, W * threads)
extern "C" __global__ void gelu_forward2(real* __restrict__ out, const real* __restrict__ inp, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i);
    for (int j = 0; j < W; j++) x[j] = gelu_forward_::gelu(x[j]);
    store(out + i, x);
}

// gelu_forward in kernels.cu: (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), one exponential and one division.
