// out (C,N) = inp (N,C) transposed: out[c,n] = inp[n,c].

// One thread per number of inp. The lanes of a warp read neighbours, but write N numbers apart: 32 lanes write to 32
// sectors of 32 bytes, and use 4 bytes of each, or 2 in bf16. With a thread per number of out, the loads would be the
// ones that are far apart. One of the two sides always is.
BLOCK(256, threads)
extern "C" __global__ void transpose1(real* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    out[i % C * N + i / C] = inp[i];
}

// A block turns a tile of 32 x 32 numbers in shared memory: it reads the tile by its rows and writes it by its columns,
// so that neighbouring lanes have neighbouring addresses on both sides. A thread writes what another has read, so a
// barrier is between the two. But a row of the tile is 128 bytes in fp32, which is once around the 32 banks of shared
// memory: the 32 numbers of a column are all in one bank, and a warp that reads a column takes 32 turns. In bf16, where
// two numbers share a bank's 4 bytes, it takes 16.
BLOCK(256, 32, 32)
extern "C" __global__ void transpose2(real* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ real tile[32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32, column = blockIdx.y * 32;
    for (int r = warp; r < 32; r += blockDim.x / 32)
        if (row + r < N && column + lane < C) tile[r][lane] = inp[(size_t)(row + r) * C + column + lane];
    __syncthreads();
    for (int c = warp; c < 32; c += blockDim.x / 32)
        if (column + c < C && row + lane < N) out[(size_t)(column + c) * N + row + lane] = tile[lane][c];
}

// The tile's rows are 4 bytes longer, one bank, and nobody uses these. Now the next number of a column is one bank
// further, so the 32 of a column are in 32 banks and a warp reads them in one turn. Number c of row r could also go to
// tile[r][c ^ r], a swizzle, which does the same without the extra column.
BLOCK(256, 32, 32)
extern "C" __global__ void transpose3(real* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    __shared__ real tile[32][32 + 4 / sizeof(real)];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32, column = blockIdx.y * 32;
    for (int r = warp; r < 32; r += blockDim.x / 32)
        if (row + r < N && column + lane < C) tile[r][lane] = inp[(size_t)(row + r) * C + column + lane];
    __syncthreads();
    for (int c = warp; c < 32; c += blockDim.x / 32)
        if (column + c < C && row + lane < N) out[(size_t)(column + c) * N + row + lane] = tile[lane][c];
}
