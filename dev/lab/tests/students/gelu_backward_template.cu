// right
constexpr float ROOT = 0.7978845608f, CUBIC = 0.044715f;  // ROOT is sqrt(2/pi)
template <typename T> __device__ T scaled(T x) { return ROOT * (x + CUBIC * x * x * x); }
template <typename T> __device__ T slope(T x) { return ROOT * (1 + 3 * CUBIC * x * x); }

BLOCK(256, threads)
extern "C" __global__ void my_gelu_backward(
    real* dinp, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    float g = 1.0f / (1.0f + expf(-2.0f * scaled<float>(x)));
    from_float(dinp[i], to_float(dinp[i]) * g * (1.0f + 2.0f * x * (1.0f - g) * slope<float>(x)));
}
