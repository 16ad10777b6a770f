// The MLP's two products that meet GELU, on Hopper in bf16, with GELU done while the tensor cores
// work: compiled behind kernels.cu, hopper.cuh and turns.cuh with -DBF16 -DHOPPER. gelu_products.py
// launches them.
//   matmul_gelu    fch (N,OC) = inp (N,C) @ w (OC,C)' + bias (OC), and fch_gelu (N,OC) = gelu(fch)
//   matmul_dgelu   dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)), and sums of its columns
//
// C is short, 768 for GPT-2 124M. So a tile of the result, 128 x 192, costs 9,216 clocks of the
// tensor cores, and thousands more until GELU is computed and the tile is stored. If the threads
// that multiply also do that, the tensor cores wait. Here two warpgroups take turns:
//   - A block stays on its multiprocessor and takes one tile after another. Warpgroup 0 has the
//     first, third, .. of them, and warpgroup 1 the others. While one multiplies, the other one has
//     its tile in registers, 192 fp32 a thread, and computes GELU.
//   - A thread of a third warpgroup asks TMA for what is multiplied, in the order of tiles. Who
//     waits for a stage knows only the parity of its use. So a warpgroup begins when the other one
//     has waited for all stages before (my_turn).
//   - Two neighbouring blocks are a cluster. They share the 192 rows or columns of their tiles, of
//     which each block loads half for both: L2 could not bring two whole operands to all
//     multiprocessors in time.
//   - Forward, a tile has 128 rows and 192 columns. wgmma leaves a lane two neighbouring columns of
//     each 8. But columns come in the order that w's rows have in shared memory, and TMA brings
//     every fourth row first, then the rows behind those, and so on. So a lane has 8 neighbours,
//     and stores them to device memory with one instruction.
//   - In the backward pass the order cannot change like this, since TMA moves 8 columns of w at
//     least. TMA brings fch in boxes, which warps replace by dfch, and TMA stores them. What is
//     computed is dfch', 128 columns and 192 rows of dfch: so a lane sums many rows in registers.
//
// What a tile costs, in clocks of its multiprocessor:
//   - its products, for each 64 of C: 768 of the tensor cores and 832 of shared memory, 512 to read
//     and 320 for what TMA writes. Tiles of 128 x 128 would cost 960 for as many numbers;
//   - more of shared memory, or of the L1 cache in the same place: 384 for each time that 48 KB are
//     written or read. Forward: fch and fch_gelu. Backward: fch and dfch, each once by threads and
//     once by TMA. So for C = 768 shared memory is the limit, 10,752 and 11,520 in all, and the
//     tensor cores can work 86% and 80% of the time;
//   - GELU: 3,072 of the unit for 2^x and 1/x, 8 for each instruction of a warp. A warp has 2,300
//     instructions between its products and those of its next tile, 2,650 backward. They are hidden
//     behind the products of the other warpgroup as long as they take no longer than those.

namespace turns::gelu_products {

constexpr int LONG = 192, STAGE = (HEIGHT + LONG) * 64;
template <bool backward>
constexpr int STAGES = backward ? 4 : 5;
constexpr int RING = 8;  // boxes of fch, each of which becomes a box of dfch
using TileResult = Result<2 * LONG>;  // x[0][n]: rows 0..63, then 64..127, of the product
static_assert(2 * (4 * STAGE + RING * BOX) == 229376 && STAGE <= RING * BOX,
              "as gelu_products.py says");

// GELU as in kernels.cu, x g with g = 1/(1 + e^(-2u)), without a true division: bf16 hides what the
// fast one loses. Far to the left e^(-2u) is infinity, and g its limit 0.
//
// Only one warp of a scheduler computes GELU. While it waits for 2^x, some 24 clocks, and again for
// 1/x, other numbers of its lanes have to fill the time. But where a branch does not end a piece of
// code after a few numbers, the compiler computes one after another, to save registers.
__device__ float gelu_share(float x) {
    constexpr float factor = -SQRT_8_OVER_PI * LOG2_E;
    return reciprocal(1.0f + power_of_2(x * (factor + 0.044715f * factor * (x * x))));
}
__device__ float fast_gelu(float x) { return x * gelu_share(x); }
__device__ float fast_gelu_derivative(float x) {
    float g = gelu_share(x), xg = x * g;
    return g + (xg - xg * g) * (SQRT_8_OVER_PI + 3.0f * 0.044715f * SQRT_8_OVER_PI * (x * x));
}

// Items are pairs of tiles, one for each of a cluster's two blocks.
template <bool backward>
struct Sizes {
    static constexpr int DOWN = backward ? LONG : 2 * HEIGHT;   // rows of a pair
    static constexpr int RIGHT = backward ? 2 * HEIGHT : LONG;  // its columns
    int N, OC, C;
    __device__ int across() const { return (OC + RIGHT - 1) / RIGHT; }
    __device__ int items() const { return (N + DOWN - 1) / DOWN * across(); }
};

// Where the rows and columns of this block's tile begin.
struct TileAt {
    int row, column;
    template <bool backward>
    __device__ TileAt(int item, const Sizes<backward>& sizes) {
        int further = blockIdx.x % 2 * HEIGHT;
        row = item / sizes.across() * sizes.DOWN + (backward ? 0 : further);
        column = item % sizes.across() * sizes.RIGHT + (backward ? further : 0);
    }
};

template <bool backward>
using Waits = FusedWaits<STAGES<backward>, RING>;

// One thread loads what is multiplied, step by step: 64 of C of a tile's rows and columns.
template <bool backward>
__device__ void load_operands(real* stages, Waits<backward>& waits, const TileMap& inp,
                              const TileMap& w, const Sizes<backward>& sizes) {
    constexpr int STAGES = gelu_products::STAGES<backward>;
    unsigned step = 0, own = blockIdx.x % 2;
    for (int item = blockIdx.x / 2; item < sizes.items(); item += gridDim.x / 2) {
        TileAt at(item, sizes);
#pragma unroll 1  // registers are few
        for (int c = 0; c < sizes.C; c += 64, step++) {
            real *a = stages + step % STAGES * STAGE, *b = a + 2 * BOX;
            auto& full = waits.full[step % STAGES];
            // At first all stages are empty: a new mbarrier counts the phase before as over.
            mbarrier_wait(waits.empty[step % STAGES], step / STAGES % 2 ^ 1);
            expect_bytes(LONG * 64 * sizeof(real), full);
            for (unsigned i = 0; i < (backward ? 3 : 4); i++)
                if (backward)
                    share_box(b + i * BOX, &inp, c, 0, at.row + 64 * i, 0, full,
                              (i + step) % 2 == own);
                else  // row i of each four
                    share_box<LONG / 4>(b + i * LONG / 4 * 64, &w, c, i, at.column / 4, 0, full,
                                        i % 2 == own);
            for (int i = 0; i < 2; i++)
                if (backward) copy_box(a + i * BOX, &w, at.column + 64 * i, 0, c, 0, full);
                else copy_box(a + i * BOX, &inp, c, 0, at.row + 64 * i, 0, full);
            mbarrier_arrive(full);
        }
    }
}

// Another thread has each box of dfch stored, and fch loaded to its place: a box is 64 rows and 64
// columns, and a tile has three of them one below another, then three more on the right.
__device__ void exchange_boxes(real* ring, Waits<true>& waits, const TileMap& dfch, const TileMap& fch,
                               const Sizes<true>& sizes) {
    int clusters = gridDim.x / 2, first = blockIdx.x / 2;
    int boxes = (sizes.items() - first + clusters - 1) / clusters * 6;  // of this block
    TileAt to(first, sizes), from(first, sizes);
#pragma unroll 1
    for (int i = 0; i < boxes + RING; i++) {
        real* box = ring + i % RING * BOX;
        if (i >= RING) {
            int done = i - RING;
            if (done % 6 == 0) to = TileAt(first + done / 6 * clusters, sizes);
            mbarrier_wait(waits.dfch_there[i % RING], done / RING % 2);
            store_box(&dfch, to.column + done % 6 / 3 * 64, to.row + done % 3 * 64, box);
            stores_commit();
            stores_read();
        }
        if (i < boxes) {
            if (i % 6 == 0) from = TileAt(first + i / 6 * clusters, sizes);
            auto& there = waits.fch_there[i / 6 % 2][i % 6];
            copy_box(box, &fch, from.column + i % 6 / 3 * 64, 0, from.row + i % 3 * 64, 0, there);
            mbarrier_arrive(there);
        }
    }
    stores_arrive();
}

// fch and its GELU, from the product x. GELU is that of fch as it is stored, rounded. Column
// 48 n + s of the product is column 4 s + n of the tile, so that a lane stores 16 bytes at once: of
// each 32 columns of the tile it has 8 neighbours, which come from 4 eights of the product.
//
//     column of the 8       0  1  2  3  4  5  6  7
//     n: its eight          0  1  2  3  0  1  2  3
//     in the lane's pair    0  0  0  0  1  1  1  1
__device__ void finish_forward(real* fch, real* fch_gelu, const TileResult& x, const real* bias,
                               unsigned item, const Sizes<false>& sizes) {
    TileAt at(forget(item), sizes);
    int lane = forget(threadIdx.x) % 32;
    int row = at.row + first_row_of_warp() + lane / 4, column = at.column + lane % 4 * 8;
    using Eight = Stored<4, Pair>;
    size_t first = (size_t)row * sizes.OC + column;
    fch += first, fch_gelu += first;
    constexpr int FURTHER = LONG / 32;  // eights from n to n + 1
    Eight next = *reinterpret_cast<const Eight*>(bias + column);
#pragma unroll
    for (int part = 0; part < LONG; part += 32) {
        if (at.column + part >= sizes.OC) break;
        float b[8];
        for (int i = 0; i < 4; i++)
            b[2 * i] = forget(low(next.x[i])), b[2 * i + 1] = forget(high(next.x[i]));
        if (part + 32 < LONG && at.column + part + 32 < sizes.OC)  // L2 is slow: load ahead
            next = *reinterpret_cast<const Eight*>(bias + column + part + 32);
#pragma unroll
        for (int eight = 0; eight < 4; eight++) {  // rows 0..7, 8..15, 64..71 and 72..79
            int further = eight / 2 * 64 + eight % 2 * 8;
            if (row + further >= sizes.N) continue;  // a branch: see gelu_share
            Eight y;
            for (int i = 0; i < 4; i++) {
                const float (*eights)[4] = x.x[0] + eight / 2 * LONG / 8 + part / 32;
                int n = i % 2 * 2, j = eight % 2 * 2 + i / 2;
                y.x[i] = pair(eights[n * FURTHER][j] + b[2 * i],
                              eights[(n + 1) * FURTHER][j] + b[2 * i + 1]);
            }
            unsigned to = forget(unsigned(sizes.OC)) * further + part;  // not kept in registers
            *reinterpret_cast<Eight*>(fch + to) = y;
            for (Pair& two : y.x) two = pair(fast_gelu(low(two)), fast_gelu(high(two)));
            *reinterpret_cast<Eight*>(fch_gelu + to) = y;
        }
    }
}

// For load_matrices_transposed and store_matrices_transposed, where the product's rows are columns
// of the result: where a lane's 8 columns begin in a box. 16 columns from `column` on, and 16 rows.
__device__ int turned_place(int column) {
    unsigned lane = forget(threadIdx.x) % 32;
    return (lane / 16 * 8 + lane % 8) * 64 + ((column / 8 + lane / 8 % 2) ^ lane % 8) * W;
}

// dfch, from fch and the product x, whose rows are dfch's columns. A warp replaces its 16 columns
// of a box of fch by dfch, and loads the next 16 rows of fch before it computes. Sums are of fp32,
// before dfch is rounded; those of a kernel that reads dfch are 0.2% off, as far as a bf16 is. n:
// the number of this tile among the block's.
//
// The other warpgroup may still work on its tile, the one before. So an mbarrier for each place of
// the ring would not do: who waits knows only a phase's parity, and would take the arrival before
// the last, of its own tile, for this one, while the last, of the other's, is on its way.
__device__ void finish_backward(
    float* sums, const TileResult& x, unsigned item, real* ring, unsigned n, Waits<true>& waits,
    const Sizes<true>& sizes) {
    float sum[4] = {};
    unsigned box = 6 * n;
    int place = turned_place(first_row_of_warp());
    int rows_left = sizes.N - TileAt(forget(item), sizes).row;
#pragma unroll
    for (int b = 0; b < 6; b++, box++) {
        real* rows = ring + box % RING * BOX + place;
        mbarrier_wait(waits.fch_there[n % 2][b], box / 12 % 2);
        Pair next[4];
        load_matrices_transposed(next, rows);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Pair y[4] = {next[0], next[1], next[2], next[3]};
            if (k < 3) load_matrices_transposed(next, rows + (k + 1) * 16 * 64);
            if (b % 3 * 64 + k * 16 >= rows_left) continue;  // a branch: see gelu_share
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, b, k, i);
                float left = two[0] * fast_gelu_derivative(low(y[i]));
                float right = two[1] * fast_gelu_derivative(high(y[i]));
                sum[b / 3 * 2 + i % 2] += left + right;
                y[i] = pair(left, right);
            }
            store_matrices_transposed(rows + k * 16 * 64, y);
        }
        shared_written();
        warp_arrives(waits.dfch_there[box % RING]);
    }
    TileAt at(forget(item), sizes);
    int lane = forget(threadIdx.x) % 32;
    for (int i = 0; i < 4; i++) {  // two columns of 64, and two of 64 more
        int column = at.column + i / 2 * 64 + first_row_of_warp() + lane / 4 + i % 2 * 8;
        float all = quad_sum(sum[i]);
        if (sums && lane % 4 == 0 && column < sizes.OC)
            sums[(size_t)(at.row / LONG) * sizes.OC + column] = all;
    }
}

// backward: matmul_dgelu, else matmul_gelu, which stores to out and out_gelu. sums may be null.
template <bool backward>
__device__ void product_with_gelu(
    const TileMap& dfch, float* sums, real* out, real* out_gelu, const real* bias, const TileMap& inp,
    const TileMap& w, const TileMap& fch, Sizes<backward> sizes) {
    constexpr int STAGES = gelu_products::STAGES<backward>;
    DYNAMIC_SHARED(real, stages);
    real* ring = stages + STAGES * STAGE;
    __shared__ Waits<backward> waits;
    if (threadIdx.x == 0) waits.start();
    cluster_sync();

    if (threadIdx.x >= WORKERS) {
        keep_registers<24>();
        if (threadIdx.x == WORKERS) load_operands(stages, waits, inp, w, sizes);
        if constexpr (backward)
            if (threadIdx.x == WORKERS + 32) exchange_boxes(ring, waits, dfch, fch, sizes);
    } else {
        take_registers<240>();
        int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), steps = sizes.C / 64;
        int first = blockIdx.x / 2, clusters = gridDim.x / 2;
        for (int n = group; first + n * clusters < sizes.items(); n += 2) {  // tiles of this block
            TileResult x;
            multiply_in_turn<STAGES, STAGE, false, backward>(x, stages, waits, n, steps, group);
            if constexpr (backward) {
                finish_backward(sums, x, first + n * clusters, ring, n, waits, sizes);
            } else {
                finish_forward(out, out_gelu, x, bias, first + n * clusters, sizes);
            }
        }
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace turns::gelu_products

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_gelu(
    real*, real*, const real*, const __grid_constant__ TileMap, const __grid_constant__ TileMap, int,
    int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_dgelu(
    const __grid_constant__ TileMap, float*, const __grid_constant__ TileMap,
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, int, int, int);
#endif

// fch (N,OC) = inp (N,C) @ w (OC,C)' + bias (OC), and fch_gelu (N,OC) = gelu(fch). C and OC are
// multiples of 64. Items: blocks, an even number of them.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_gelu(
    real* __restrict__ fch, real* __restrict__ fch_gelu, const real* __restrict__ bias,
    const __grid_constant__ TileMap inp, const __grid_constant__ TileMap w, int N, int OC, int C) {
    turns::gelu_products::product_with_gelu<false>(
        inp, nullptr, fch, fch_gelu, bias, inp, w, inp, {N, OC, C});
}

// dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)). sums (blocks of 192 rows, OC), unless
// null: of each block the sums of dfch's columns. C and OC as above. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_dgelu(
    const __grid_constant__ TileMap dfch, float* __restrict__ sums,
    const __grid_constant__ TileMap dout, const __grid_constant__ TileMap w,
    const __grid_constant__ TileMap fch, int N, int OC, int C) {
    turns::gelu_products::product_with_gelu<true>(
        dfch, sums, nullptr, nullptr, nullptr, dout, w, fch, {N, OC, C});
}
