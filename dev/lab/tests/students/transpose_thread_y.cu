// wrong: one-dimensional|threadIdx.y
BLOCK(1024, 32, 32)
extern "C" __global__ void my_transpose(real* out, const real* inp, int N, int C) {
    __shared__ real tile[32][33];
    int n = blockIdx.x * 32 + threadIdx.y, c = blockIdx.y * 32 + threadIdx.x;  //!
    if (n < N && c < C) tile[threadIdx.y][threadIdx.x] = inp[(size_t)n * C + c];  //!
    __syncthreads();
    n = blockIdx.x * 32 + threadIdx.x, c = blockIdx.y * 32 + threadIdx.y;
    if (n < N && c < C) out[(size_t)c * N + n] = tile[threadIdx.x][threadIdx.y];  //!
}
