// The two products behind a linear layer out (N,OC) = inp (N,C) weight' (OC,C):
//   dinp (N,C) = dout (N,OC) weight  and  dweight (OC,C) += dout' inp.
// In both, at least one matrix has the summed index as the slow one: it is fast to read along rows, but needed along
// columns.

// One thread per element. In dinp a warp shares a row of dout and reads weight in whole lines; in dweight it shares a
// column of dout, one number from each row, and reads inp in whole lines.
BLOCK(1024, threads)
extern "C" __global__ void matmul_backward1_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                                const real* __restrict__ weight, int N, int C, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    size_t row = i / C, c = i % C;
    float sum = 0.0f;
    for (int o = 0; o < OC; o++) sum += to_float(dout[row * OC + o]) * to_float(weight[(size_t)o * C + c]);
    from_float(dinp[i], sum);
}

BLOCK(1024, threads)
extern "C" __global__ void matmul_backward1_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                   const real* __restrict__ inp, int N, int C, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)OC * C) return;
    size_t o = i / C, c = i % C;
    float sum = 0.0f;
    for (int row = 0; row < N; row++) sum += to_float(dout[(size_t)row * OC + o]) * to_float(inp[(size_t)row * C + c]);
    dweight[i] += sum;
}

namespace matmul_backward {

// The tile of a block in the product of left(row, k) and right(k, column). The block has `rows` x `rows` elements, a
// thread M x M, and `put` stores one. A tile of each matrix is in shared memory with k as the slow index; it is loaded
// along the index that is fast in device memory: for left that is k if left_k, else the row.
template <int rows, int M, int K, bool left_k, class Left, class Right, class Put>
__device__ __forceinline__ void multiply(int first_row, int first_column, int size, Left left, Right right, Put put) {
    constexpr int threads = rows / M * (rows / M);
    __shared__ float x[K][rows + left_k], w[K][rows];  // one more, where a column is written
    int r = threadIdx.x / (rows / M) * M, s = threadIdx.x % (rows / M) * M;
    float sum[M][M] = {};
    for (int k0 = 0; k0 < size; k0 += K) {
        for (int i = threadIdx.x; i < rows * K; i += threads) {
            int k = left_k ? i % K : i / rows, row = left_k ? i / K : i % rows;
            x[k][row] = k0 + k < size ? left(first_row + row, k0 + k) : 0.0f;
            w[i / rows][i % rows] = k0 + i / rows < size ? right(k0 + i / rows, first_column + i % rows) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < M; j++) sum[i][j] += x[k][r + i] * w[k][s + j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < M; j++) put(first_row + r + i, first_column + s + j, sum[i][j]);
}

template <int rows, int M, int K>
__device__ __forceinline__ void multiply_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                             const real* __restrict__ weight, int N, int C, int OC) {
    multiply<rows, M, K, true>(
        blockIdx.y * rows, blockIdx.x * rows, OC,
        [=](int row, int o) { return row < N ? to_float(dout[(size_t)row * OC + o]) : 0.0f; },
        [=](int o, int c) { return c < C ? to_float(weight[(size_t)o * C + c]) : 0.0f; },
        [=](int row, int c, float sum) { if (row < N && c < C) from_float(dinp[(size_t)row * C + c], sum); });
}

template <int rows, int M, int K>
__device__ __forceinline__ void multiply_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                const real* __restrict__ inp, int N, int C, int OC) {
    multiply<rows, M, K, false>(
        blockIdx.y * rows, blockIdx.x * rows, N,
        [=](int o, int row) { return o < OC ? to_float(dout[(size_t)row * OC + o]) : 0.0f; },
        [=](int row, int c) { return c < C ? to_float(inp[(size_t)row * C + c]) : 0.0f; },
        [=](int o, int c, float sum) { if (o < OC && c < C) dweight[(size_t)o * C + c] += sum; });
}

}  // namespace matmul_backward

// Tiles of 32 x 32 in shared memory; each number serves 32 elements. In shared memory either index may be the fast one:
// a tile is loaded along one and read along the other. In fp32 it is slower than version 1. It saves loads from L2, but
// those are not what version 1 waits for. In both, each multiplication takes two loads, one of a number that the lanes
// share and one of 32 neighbours, without bank conflicts. A load from shared memory is no faster than one that hits L1,
// which is the same memory. But now there are two barriers for every 32 of the summed index, and between them the whole
// block waits for device memory. Another block would fill the gap. But ptxas gives each thread 40 registers, and a
// multiprocessor has 65,536, which is one block of 1,024 threads. Version 1 has 32 registers, and so two blocks, and no
// barrier. matmul_forward2, the same idea with 32 registers, does half of the operations in less than a third of the
// time.
BLOCK(1024, 32, 32)
extern "C" __global__ void matmul_backward2_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                                const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_inp<32, 1, 32>(dinp, dout, weight, N, C, OC);
}

BLOCK(1024, 32, 32)
extern "C" __global__ void matmul_backward2_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                   const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_weight<32, 1, 32>(dweight, dout, inp, N, C, OC);
}

// 8 x 8 elements a thread, in registers: four multiplications for a load from shared memory instead of a half.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward3_inp(
    real* __restrict__ dinp, const real* __restrict__ dout, const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_inp<128, 8, 8>(dinp, dout, weight, N, C, OC);
}

BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward3_weight(
    float* __restrict__ dweight, const real* __restrict__ dout, const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_weight<128, 8, 8>(dweight, dout, inp, N, C, OC);
}

namespace matmul_backward {

// 128 x 128 of left right, with left(row, k) and right(k, column), as matmul_forward4 does it: loads of 16 bytes, and
// the next tile on its way while this one is multiplied. The fast index of left in device memory is k if left_k, else
// the row; that of right is the column. `put` takes each element.
template <bool left_k, class Put>
__device__ __forceinline__ void multiply_ahead(const real* __restrict__ left, const real* __restrict__ right,
                                               int left_stride, int right_stride, int rows, int columns, int size,
                                               Put put) {
    constexpr int K = 16, PACKS = 128 * K / W / 256;  // packs of a matrix's tile for each thread
    __shared__ __align__(16) float tile[2][2][K][132];
    int row = 128 * blockIdx.y, column = 128 * blockIdx.x, r = threadIdx.x / 16 * 4, s = threadIdx.x % 16 * 4;
    Pack<W> next[2][PACKS];
    auto fetch = [&](int k0) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = threadIdx.x + 256 * p, k = k0 + i / (128 / W), at = i % (128 / W) * W;
            next[1][p] = k < size && column + at < columns ? load<W>(right + (size_t)k * right_stride + column + at)
                                                           : Pack<W>{};
            if (left_k) k = k0 + i % (K / W) * W, at = i / (K / W);
            size_t from = left_k ? (size_t)(row + at) * left_stride + k : (size_t)k * left_stride + row + at;
            next[0][p] = k < size && row + at < rows ? load<W>(left + from) : Pack<W>{};
        }
    };
    auto keep = [&](int stage) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = threadIdx.x + 256 * p;
            store(&tile[stage][1][i / (128 / W)][i % (128 / W) * W], next[1][p]);
            if (!left_k) store(&tile[stage][0][i / (128 / W)][i % (128 / W) * W], next[0][p]);
#pragma unroll
            for (int j = 0; left_k && j < W; j++) tile[stage][0][i % (K / W) * W + j][i / (K / W)] = next[0][p][j];
        }
    };
    float sum[8][8] = {};
    fetch(0);
    keep(0);
    __syncthreads();
    for (int k0 = 0, stage = 0; k0 < size; k0 += K, stage ^= 1) {
        if (k0 + K < size) fetch(k0 + K);
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
        if (k0 + K < size) keep(stage ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) put(row + 64 * (i / 4) + r + i % 4, column + 64 * (j / 4) + s + j % 4, sum[i][j]);
}

}  // namespace matmul_backward

// As matmul_forward4: loads of 16 bytes, and the next tile on its way while this one is multiplied. Version 3 waits for
// each tile of 8 summed numbers with nothing else to do: dweight has 144 blocks of 128 x 128, hardly more than an H200
// has multiprocessors, so most of these have a single block, which goes over 8,192 rows. Here a matrix whose summed
// index is the slow one is even easier: 16 bytes of a row go to shared memory as they are, and only dout, for dinp,
// must be transposed on the way. The packs want rows that start on 16 bytes, so OC is a multiple of 8.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward4_inp(
    real* __restrict__ dinp, const real* __restrict__ dout, const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_ahead<true>(dout, weight, OC, C, N, C, OC, [=](int row, int c, float sum) {
        if (row < N && c < C) from_float(dinp[(size_t)row * C + c], sum);
    });
}

BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward4_weight(
    float* __restrict__ dweight, const real* __restrict__ dout, const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_ahead<false>(dout, inp, OC, C, OC, C, N, [=](int o, int c, float sum) {
        if (o < OC && c < C) dweight[(size_t)o * C + c] += sum;
    });
}

namespace matmul_backward {

// The same by tensor cores, as in matmul_forward5. Tiles have the same layout in shared memory as in device memory.
template <bool left_k, class Put>
__device__ __forceinline__ void multiply_on_tensor_cores(const real* __restrict__ left, const real* __restrict__ right,
                                                         int left_stride, int right_stride, int rows, int columns,
                                                         int size, Put put) {
    using tiles::STEP;
    constexpr int LEFT = left_k ? 128 * tiles::LD : STEP * tiles::WIDE_LD;
    DYNAMIC_SHARED(real, shared);  // two stages of left, (128, tiles::LD) or wide, and of right, wide
    int row = 128 * blockIdx.y, column = 128 * blockIdx.x, warp = threadIdx.x / 32;
    int r = warp / 4 * 64, s = warp % 4 * 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    auto x = [&](int stage) { return shared + stage * (LEFT + STEP * tiles::WIDE_LD); };
    auto w = [&](int stage) { return x(stage) + LEFT; };
    auto load_stage = [&](int stage, int k) {
        if (left_k) tiles::load<128>(x(stage), left, left_stride, row, rows, k, size);
        else tiles::load<STEP, 128, tiles::WIDE_LD>(x(stage), left, left_stride, k, size, row, rows);
        tiles::load<STEP, 128, tiles::WIDE_LD>(w(stage), right, right_stride, k, size, column, columns);
    };
    float d[4][4][4] = {};
    load_stage(0, 0);
    for (int k = 0, stage = 0; k < size; k += STEP, stage ^= 1) {
        copies_end();
        wait_for_copies<0>();
        __syncthreads();  // this stage is filled, and no thread reads the other any more
        if (k + STEP < size) load_stage(stage ^ 1, k + STEP);
        tiles::multiply<!left_k>(d, x(stage), r, w(stage), s);
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                put(row + r + 16 * m + g + i / 2 * 8, column + s + 8 * n + 2 * q + i % 2, d[m][n][i]);
}

}  // namespace matmul_backward

// Tensor cores by mma.sync, as in matmul_forward5. They need two neighbours along the summed index in one register. In
// bf16 ldmatrix transposes 8 x 8 numbers on their way from shared memory, so neither product costs more than the
// forward one. In fp32 and TF32 a register holds one number, and a lane takes the two from two rows.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward5_inp(
    real* __restrict__ dinp, const real* __restrict__ dout, const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_on_tensor_cores<true>(dout, weight, OC, C, N, C, OC, [=](int row, int c, float sum) {
        if (row < N && c < C) from_float(dinp[(size_t)row * C + c], sum);
    });
}

BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward5_weight(
    float* __restrict__ dweight, const real* __restrict__ dout, const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_on_tensor_cores<false>(dout, inp, OC, C, OC, C, N, [=](int o, int c, float sum) {
        if (o < OC && c < C) dweight[(size_t)o * C + c] += sum;
    });
}
