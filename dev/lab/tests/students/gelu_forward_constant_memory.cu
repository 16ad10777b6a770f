// right
__constant__ float polynomial[2] = {0.79788456f, 0.79788456f * 0.044715f};

BLOCK(256, threads)
extern "C" __global__ void my_gelu_forward(
    real* out, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    float u = polynomial[0] * x + polynomial[1] * x * x * x;
    from_float(out[i], x / (1.0f + expf(-2.0f * u)));
}
