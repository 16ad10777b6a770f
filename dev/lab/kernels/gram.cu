// out (B,T,T) = inp (B,T,C) times its own transpose: out[b,t,s] is the sum over c of inp[b,t,c] *
// inp[b,s,c]. A matrix of such products is symmetric, so half of them are enough.

// One thread per number: 2 C loads for C multiplications, and each product is made twice.
BLOCK(256, threads)
extern "C" __global__ void gram1(
    real* __restrict__ out, const real* __restrict__ inp, int B, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * T) return;
    const real *x = inp + i / T * C, *y = inp + (i / T / T * T + i % T) * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(x[c]) * to_float(y[c]);
    from_float(out[i], sum);
}

// Half of the threads have nothing to do, and the others store their number twice. The lanes of a
// warp store neighbours first, and then numbers that are a row apart: 32 lanes write to 32 sectors,
// and use 4 bytes of each.
BLOCK(256, threads)
extern "C" __global__ void gram2(
    real* __restrict__ out, const real* __restrict__ inp, int B, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * T) return;
    size_t matrix = i / T / T * T;  // its first row among all
    int t = i / T % T, s = i % T;
    if (s < t) return;
    const real *x = inp + (matrix + t) * C, *y = inp + (matrix + s) * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(x[c]) * to_float(y[c]);
    from_float(out[i], sum);
    from_float(out[(matrix + s) * T + t], sum);
}

// Tiles of 32 x 32 in shared memory, which use each number 32 times. A block below the diagonal
// returns at once. Shared memory also turns the result, so that both times the lanes of a warp
// store neighbours: the tile is written to it by rows and read by columns. Rows of 33 numbers have
// a column in 32 banks. Items, here and below: the tiles of all matrices along x, T rows along y.
BLOCK(1024, 1, 32)
extern "C" __global__ void gram3(
    real* __restrict__ out, const real* __restrict__ inp, int T, int C) {
    __shared__ float one[32][33], two[32][33];
    int tiles = (T + 31) / 32, row = blockIdx.y * 32, column = blockIdx.x % tiles * 32;
    int i = threadIdx.x / 32, j = threadIdx.x % 32;
    size_t matrix = (size_t)(blockIdx.x / tiles) * T;
    if (column < row) return;
    float sum = 0.0f;
    for (int c = 0; c < C; c += 32) {
        bool there = c + j < C;
        const real* x = inp + (matrix + i) * C + c + j;
        one[i][j] = there && row + i < T ? to_float(x[(size_t)row * C]) : 0.0f;
        two[i][j] = there && column + i < T ? to_float(x[(size_t)column * C]) : 0.0f;
        __syncthreads();
        for (int n = 0; n < 32; n++) sum += one[i][n] * two[j][n];
        __syncthreads();
    }
    if (row + i < T && column + j < T)
        from_float(out[(matrix + row + i) * T + column + j], sum);
    if (row == column) return;
    one[i][j] = sum;
    __syncthreads();
    if (column + i < T && row + j < T)
        from_float(out[(matrix + column + i) * T + row + j], one[j][i]);
}

// Tensor cores, as version 5 of matmul_forward, in tiles of 128 x 128: of 6 x 6 tiles 21 are made.
// When the last step is multiplied, shared memory is free for the turned tile. (The trainer's, for
// Hopper, is in dev/features/hopper: symmetric.cu. There two blocks share what they load, and one
// tile is stored while the next is multiplied.)
BLOCK(256, 1, 128)
extern "C" __global__ void __launch_bounds__(256) gram4(
    real* __restrict__ out, const real* __restrict__ inp, int T, int C) {
    DYNAMIC_SHARED(real, shared);  // (2, 2, 128, tiles::LD): two stages of rows and columns
    int blocks = (T + 127) / 128, row = blockIdx.y * 128, column = blockIdx.x % blocks * 128;
    int warp = threadIdx.x / 32, r = warp / 4 * 64, s = warp % 4 * 32;
    int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    size_t matrix = (size_t)(blockIdx.x / blocks) * T;
    if (column < row) return;
    inp += matrix * C;
    out += matrix * T;
    auto tile = [&](int stage, int which) {
        return shared + (2 * stage + which) * 128 * tiles::LD;
    };
    auto load_stage = [&](int stage, int c) {
        tiles::load<128>(tile(stage, 0), inp, C, row, T, c, C);
        tiles::load<128>(tile(stage, 1), inp, C, column, T, c, C);
    };
    float d[4][4][4] = {};
    load_stage(0, 0);
    for (int c = 0, stage = 0; c < C; c += tiles::STEP, stage ^= 1) {
        copies_end();
        wait_for_copies<0>();
        __syncthreads();  // this stage is filled, and no thread reads the other any more
        if (c + tiles::STEP < C) load_stage(stage ^ 1, c + tiles::STEP);
        tiles::multiply_transposed(d, tile(stage, 0), r, tile(stage, 1), s);
    }
    __syncthreads();
    constexpr int LD = 128 + W;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int t = r + 16 * m + g + i / 2 * 8, u = s + 8 * n + 2 * q + i % 2;
                if (row + t < T && column + u < T)
                    from_float(out[(size_t)(row + t) * T + column + u], d[m][n][i]);
                from_float(shared[u * LD + t], d[m][n][i]);
            }
    if (row == column) return;
    __syncthreads();
    for (int i = threadIdx.x; i < 128 * 128; i += 256) {
        int t = i / 128, u = i % 128;
        if (column + t < T && row + u < T)
            out[(size_t)(column + t) * T + row + u] = shared[t * LD + u];
    }
}
