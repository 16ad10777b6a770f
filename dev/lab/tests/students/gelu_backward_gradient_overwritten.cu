// wrong: dinp
BLOCK(256, threads)
extern "C" __global__ void my_gelu_backward(
    real* dinp, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    from_float(dinp[i], 0.5f * (1.0f + t));
    float slope = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
    float d = to_float(dinp[i]);
    from_float(dinp[i], d * (d + 0.5f * x * (1.0f - t * t) * slope));
}
