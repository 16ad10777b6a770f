// right
BLOCK(256, threads)
extern "C" __global__ void my_gelu_backward(
    real* dinp, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]), d = to_float(dinp[i]);
    float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    float slope = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
    if (i == 0) printf("x = %f, tanh = %f\n", x, t);
    from_float(dinp[i], d * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope));
}
