// out (N,OC) = inp (N,C) weight' (OC,C) + bias (OC): a linear layer. Both matrices have the summed index c as their
// fastest. The product has 2 N C OC operations on N C + OC C numbers, so what matters is how often a number is used
// each time it is read.

// One thread per element: two loads for each multiplication and addition. Neighbouring lanes share the row of inp, and
// each goes along a different row of weight. The caches save it from device memory, but not from its 2 C loads.
BLOCK(256, threads)
extern "C" __global__ void matmul_forward1(real* __restrict__ out, const real* __restrict__ inp,
                                           const real* __restrict__ weight, const real* __restrict__ bias, int N, int C,
                                           int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    const real *x = inp + i / OC * C, *w = weight + i % OC * C;
    float sum = to_float(bias[i % OC]);
    for (int c = 0; c < C; c++) sum += to_float(x[c]) * to_float(w[c]);
    from_float(out[i], sum);
}

// A block of 32 x 32 threads brings tiles of 32 x 32 of both matrices to shared memory, and uses each number 32 times.
// The lanes of a warp now load neighbours. A column of 33 numbers, not 32, puts the 32 rows that the lanes of a warp
// read at the same c in 32 different banks. Each multiplication still takes two loads, now from shared memory.
BLOCK(1024, 32, 32)
extern "C" __global__ void matmul_forward2(real* __restrict__ out, const real* __restrict__ inp,
                                           const real* __restrict__ weight, const real* __restrict__ bias, int N, int C,
                                           int OC) {
    __shared__ float x[32][33], w[32][33];
    int i = threadIdx.x / 32, j = threadIdx.x % 32, row = 32 * blockIdx.y + i, first = 32 * blockIdx.x, o = first + j;
    float sum = 0.0f;
    for (int c = 0; c < C; c += 32) {
        x[i][j] = row < N ? to_float(inp[(size_t)row * C + c + j]) : 0.0f;
        w[i][j] = first + i < OC ? to_float(weight[(size_t)(first + i) * C + c + j]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += x[i][k] * w[j][k];
        __syncthreads();
    }
    if (row < N && o < OC) from_float(out[(size_t)row * OC + o], sum + to_float(bias[o]));
}

// A block has 128 x 128 elements, and each of its 256 threads 8 x 8 of them in registers. From 8 numbers of each tile
// it makes 64 products: one load from shared memory for four multiplications, instead of two for one. In the tiles c is
// the slowest index, so that a thread's 8 numbers are neighbours.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_forward3(
    real* __restrict__ out, const real* __restrict__ inp, const real* __restrict__ weight,
    const real* __restrict__ bias, int N, int C, int OC) {
    __shared__ float x[8][128], w[8][128];
    int row = 128 * blockIdx.y, o = 128 * blockIdx.x, r = threadIdx.x / 16 * 8, s = threadIdx.x % 16 * 8;
    float sum[8][8] = {};
    for (int c = 0; c < C; c += 8) {
        for (int i = threadIdx.x; i < 128 * 8; i += 256) {
            x[i % 8][i / 8] = row + i / 8 < N ? to_float(inp[(size_t)(row + i / 8) * C + c + i % 8]) : 0.0f;
            w[i % 8][i / 8] = o + i / 8 < OC ? to_float(weight[(size_t)(o + i / 8) * C + c + i % 8]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += x[k][r + i] * w[k][s + j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (row + r + i < N && o + s + j < OC)
                from_float(out[(size_t)(row + r + i) * OC + o + s + j], sum[i][j] + to_float(bias[o + s + j]));
}

// The same with loads of 16 bytes everywhere. From device memory: they are written to shared memory transposed, in rows
// of 132 numbers, so that the lanes of a warp write to different banks. From shared memory: the 8 rows of a thread are
// two groups of 4, 64 apart, so that the 16 lanes side by side read 256 bytes without a gap. And the next tile is
// loaded into registers while this one is multiplied, then stored to the other of two tiles in shared memory: the
// latency of the loads is hidden behind arithmetic, and one barrier per tile is enough.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_forward4(
    real* __restrict__ out, const real* __restrict__ inp, const real* __restrict__ weight,
    const real* __restrict__ bias, int N, int C, int OC) {
    constexpr int K = 16, PACKS = 128 * K / W / 256;  // packs of a matrix's tile for each thread
    __shared__ __align__(16) float tile[2][2][K][132];
    int row = 128 * blockIdx.y, o = 128 * blockIdx.x, r = threadIdx.x / 16 * 4, s = threadIdx.x % 16 * 4;
    Pack<W> next[2][PACKS];
    auto fetch = [&](int c) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = threadIdx.x + 256 * p, at = i / (K / W), k = i % (K / W) * W;
            next[0][p] = row + at < N ? load<W>(inp + (size_t)(row + at) * C + c + k) : Pack<W>{};
            next[1][p] = o + at < OC ? load<W>(weight + (size_t)(o + at) * C + c + k) : Pack<W>{};
        }
    };
    auto put = [&](int stage) {
#pragma unroll
        for (int p = 0; p < PACKS; p++)
#pragma unroll
            for (int j = 0; j < W; j++) {
                int i = threadIdx.x + 256 * p, at = i / (K / W), k = i % (K / W) * W;
                tile[stage][0][k + j][at] = next[0][p][j];
                tile[stage][1][k + j][at] = next[1][p][j];
            }
    };
    float sum[8][8] = {};
    fetch(0);
    put(0);
    __syncthreads();
    for (int c = 0, stage = 0; c < C; c += K, stage ^= 1) {
        if (c + K < C) fetch(c + K);
#pragma unroll
        for (int k = 0; k < K; k++) {
            Pack<4> x[2], w[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                x[half] = load<4>(&tile[stage][0][k][64 * half + r]);
                w[half] = load<4>(&tile[stage][1][k][64 * half + s]);
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += x[i / 4][i % 4] * w[j / 4][j % 4];
        }
        if (c + K < C) put(stage ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int n = row + 64 * (i / 4) + r + i % 4, q = o + 64 * (j / 4) + s + j % 4;
            if (n < N && q < OC) from_float(out[(size_t)n * OC + q], sum[i][j] + to_float(bias[q]));
        }
}

namespace matmul_forward {

// 128 x 128 elements of out, from `row` and `o` on, by mma.sync: a block of eight warps that have 64 x 32 each.
__device__ __forceinline__ void multiply_tile(real* __restrict__ out, const real* __restrict__ inp,
                                              const real* __restrict__ weight, const real* __restrict__ bias, int N,
                                              int C, int OC, int row, int o) {
    DYNAMIC_SHARED(real, shared);  // (2, 2, 128, tiles::LD): two stages of inp and weight
    int warp = threadIdx.x / 32, r = warp / 4 * 64, s = warp % 4 * 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    auto tile = [&](int stage, int which) { return shared + (2 * stage + which) * 128 * tiles::LD; };
    auto load_stage = [&](int stage, int c) {
        tiles::load<128>(tile(stage, 0), inp, C, row, N, c, C);
        tiles::load<128>(tile(stage, 1), weight, C, o, OC, c, C);
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
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = row + r + 16 * m + g + i / 2 * 8, column = o + s + 8 * n + 2 * q + i % 2;
                if (at < N && column < OC)
                    from_float(out[(size_t)at * OC + column], d[m][n][i] + to_float(bias[column]));
            }
}

}  // namespace matmul_forward

// Tensor cores. A warp multiplies 16 x 16 by 16 x 8 in one instruction, in bf16 2,048 multiplications where the other
// kernels do 32. Eight warps have 64 x 32 elements each of a block's 128 x 128. Tiles of 128 bytes of each row are
// loaded by asynchronous copies, which need no registers; one of two stages is filled while the other is multiplied.
// With fp32 a product is three of TF32 halves.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_forward5(
    real* __restrict__ out, const real* __restrict__ inp, const real* __restrict__ weight,
    const real* __restrict__ bias, int N, int C, int OC) {
    matmul_forward::multiply_tile(out, inp, weight, bias, N, C, OC, 128 * blockIdx.y, 128 * blockIdx.x);
}

// Hopper's tensor cores, by wgmma, in bf16 and TF32; other GPUs do as version 5. There a warp brings its part of both
// tiles from shared memory to registers: 6 loads of 512 bytes for 16 products of 2,048 multiplications. For 32 bytes of
// each row the eight warps read 24 KiB, which at 128 bytes per clock takes 192 clocks, and the tensor cores could be
// done in 128. wgmma is told where both tiles are, and the tensor cores read them by themselves. The four warps of a
// group start a product of 64 x 128 elements together, and what is read of w serves all four: 12 KiB for the two
// groups. A thread needs registers for its results alone, waits for no load, and starts the copies of tiles to come
// while the tensor cores work. These are made for wgmma: mma.sync gets about 60% of Hopper's rate out of them, whatever
// one does. The tiles have no padding. That 8 rows of 128 bytes are in different banks is due to the 128-byte swizzle
// instead, which permutes the 8 pieces of 16 bytes of a row. The copies write it, and wgmma's description of a tile
// names it. TF32 is not rounded here: the tensor cores drop the lower bits of the mantissa. What bounds it now is L2.
// For 128 bytes of each row the tensor cores take 512 clocks, and the multiprocessor has to fetch 32 KiB: 64 bytes per
// clock, and L2 gives it little more than half of that when all ask. The evidence is that in bf16, which fetches 604 MB
// in 77 us, and in TF32, which fetches twice as much in 147, it is the same 8 TB/s. A tile of 128 x 256 asks for 48.
// But its results take 128 registers of each thread, and its stages nearly all of shared memory. So a multiprocessor
// has one block, and no other that multiplies while this one begins or ends: it was slower. cuBLAS goes further: blocks
// side by side share what either has fetched, and a block stores a tile while it multiplies the next.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256, 2) matmul_forward6(
    real* __restrict__ out, const real* __restrict__ inp, const real* __restrict__ weight,
    const real* __restrict__ bias, int N, int C, int OC) {
    int row = 128 * blockIdx.y, o = 128 * blockIdx.x;
#if HAS_WGMMA
    constexpr int STEP = tiles::STEP, STAGES = 3;
    DYNAMIC_SHARED(real, shared);  // (STAGES, 2, 128, STEP): rows of inp, rows of weight
    int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), steps = (C + STEP - 1) / STEP;
    auto x = [&](int step) { return shared + step % STAGES * 2 * 128 * STEP; };
    auto w = [&](int step) { return x(step) + 128 * STEP; };
    auto fill = [&](int step) {
        if (step < steps) {
            tiles::load_swizzled<128>(x(step), inp, C, row, N, step * STEP);
            tiles::load_swizzled<128>(w(step), weight, C, o, OC, step * STEP);
        }
        copies_end();  // a group of copies for each step, and empty ones at the end, so that the count is right
    };
    fill(0);
    fill(1);
    float d[16][4] = {};  // (64, 128) of the warp group
    for (int step = 0; step < steps; step++) {
        wait_for_copies<1>();
        tiles::fence();
        __syncthreads();  // this step's tiles are filled, and no thread reads those of the step before any more
        tiles::start_product(d, x(step) + group * 64 * STEP, w(step));
        fill(step + 2);
        tiles::wait_for_products(d);
    }
    __syncthreads();  // the tiles are no longer needed

    // A warp has 16 rows. They go through shared memory, so that it can store whole lines.
    constexpr int LD = 128 + W, packs = 128 / W;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    real* own = shared + warp * 16 * LD;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        int column = 8 * n + lane % 4 * 2;
        float left = to_float(bias[min(o + column, OC - 1)]), right = to_float(bias[min(o + column + 1, OC - 1)]);
        real* to = own + lane / 4 * LD + column;
        store(to, Pack<2>{d[n][0] + left, d[n][1] + right});
        store(to + 8 * LD, Pack<2>{d[n][2] + left, d[n][3] + right});
    }
    __syncwarp();
    for (int i = lane; i < 16 * packs; i += 32) {
        int at = row + 16 * warp + i / packs, column = o + i % packs * W;
        const real* from = own + i / packs * LD + i % packs * W;
        real* to = out + (size_t)at * OC + column;
        if (at >= N) break;
        if (OC % W == 0 && column < OC) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        for (int j = 0; OC % W > 0 && j < W && column + j < OC; j++) to[j] = from[j];
    }
#else
    matmul_forward::multiply_tile(out, inp, weight, bias, N, C, OC, row, o);
#endif
}
