// right
__device__ float pairwise(const real* x, int n) {
    if (n == 1) return to_float(x[0]);
    return pairwise(x, n / 2) + pairwise(x + n / 2, n - n / 2);
}
BLOCK(64, threads)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < N) out[row] = pairwise(inp + (size_t)row * C, C);
}
