// right
BLOCK(256, threads)
extern "C" __global__ void my_residual_forward(
    real* out, const real* inp1, const real* inp2, int N, int C) {
    long long begin = clock64();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)N * C) {
        assert(inp1 != nullptr && inp2 != nullptr);
        from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
    }
    if (clock64() < begin)
        printf("thread %d of block %d went back in time\n", threadIdx.x, blockIdx.x);
}
