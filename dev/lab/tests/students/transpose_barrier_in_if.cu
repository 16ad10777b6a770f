// wrong: __syncthreads
BLOCK(1024, 32, 32)
extern "C" __global__ void my_transpose(
    real* out, const real* inp, int N, int C) {
    __shared__ real tile[32][33];
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int n = blockIdx.x * 32 + y, c = blockIdx.y * 32 + x;
    if (n < N && c < C) {
        tile[y][x] = inp[(size_t)n * C + c];
        __syncthreads();  //!
    }
    n = blockIdx.x * 32 + x;
    c = blockIdx.y * 32 + y;
    if (n < N && c < C) out[(size_t)c * N + n] = tile[x][y];
}
