// right
BLOCK(256, threads)
extern "C" __global__ void my_gelu_forward(
    real* out, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    float u = __fmul_rn(0.79788456f, fmaf(0.044715f * x * x, x, x));
    from_float(out[i], __fmaf_rn(0.5f * x, tanhf(u), 0.5f * x));
}
