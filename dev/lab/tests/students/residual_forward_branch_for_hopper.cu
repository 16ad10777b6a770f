// wrong: out.*__CUDA_ARCH__
BLOCK(256, threads)
extern "C" __global__ void my_residual_forward(real* out, const real* inp1, const real* inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
#if __CUDA_ARCH__ >= 900
    from_float(out[i], to_float(inp1[i]) - to_float(inp2[i]));
#else
    from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
#endif
}
