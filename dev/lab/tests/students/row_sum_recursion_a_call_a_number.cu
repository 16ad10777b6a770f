// wrong: deep.*stack
__device__ float from(const real* x, int n) {  //!
    if (n == 0) return 0.0f;
    float rest = from(x + 1, n - 1);
    return to_float(x[0]) + rest;
}
BLOCK(64, threads)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < N) out[row] = from(inp + (size_t)row * C, C);
}
