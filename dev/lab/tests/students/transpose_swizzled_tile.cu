// right
BLOCK(1024, 32, 32)
extern "C" __global__ void my_transpose(
    real* out, const real* inp, int N, int C) {
    __shared__ real tile[32 * 32];  // number (r, c) is at r * 32 + (c ^ r), so a column is in 32 banks
    int x = threadIdx.x & 31, y = threadIdx.x >> 5;
    int n0 = blockIdx.x * 32, c0 = blockIdx.y * 32;
    bool inside = n0 + y < N && c0 + x < C;
    if (inside) tile[y * 32 + (x ^ y)] = inp[(size_t)(n0 + y) * C + c0 + x];
    __syncthreads();
    if (c0 + y >= C || n0 + x >= N) return;
    out[(size_t)(c0 + y) * N + n0 + x] = tile[x * 32 + (y ^ x)];
}
