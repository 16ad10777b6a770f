// right
BLOCK(256, threads)
extern "C" __global__ void my_residual_forward(real* out, const real* inp1, const real* inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
#if __CUDA_ARCH__ >= 800
    float a = fmaf(1.0f, to_float(inp1[i]), 0.0f);
#else
    float a = to_float(inp1[i]);
#endif
    from_float(out[i], a + to_float(inp2[i]));
}
