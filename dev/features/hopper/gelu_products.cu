// The MLP's two products that meet GELU, on Hopper in bf16, with GELU done while the tensor cores
// work: compiled behind kernels.cu, hopper.cuh and turns.cuh with -DBF16 -DHOPPER. gelu_products.py
// launches them.
//   matmul_gelu    fch (N,OC) = inp (N,C) @ w (OC,C)' + bias (OC), and fch_gelu (N,OC) = gelu(fch)
//   matmul_dgelu   dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)), and sums of its columns
//
// C is short, 768 for GPT-2 124M. So a tile of the result costs 6,144 clocks of the tensor cores,
// and thousands more until GELU is computed and the tile is stored. If the threads that multiply
// also do that, the tensor cores wait. Here two warpgroups take turns:
//   - A block stays on its multiprocessor and takes one tile after another. Warpgroup 0 has the
//     first, third, .. of them, and warpgroup 1 the others. While one multiplies, the other one has
//     its tile in registers, 128 fp32 a thread, and computes GELU.
//   - A thread of a third warpgroup asks TMA for what is multiplied, in the order of tiles. Who
//     waits for a stage knows only the parity of its use. So a warpgroup begins when the other one
//     has waited for all stages before (my_turn).
//   - Two neighbouring blocks are a cluster. Their tiles have the same rows, and each block loads
//     half of these for both: L2 could not bring two whole operands to all multiprocessors in time.
//   - TMA also stores results. Threads leave them in shared memory as boxes, by stmatrix.
//
// What a tile of 128 x 128 costs, in clocks of its multiprocessor:
//   - its products, for each 64 of C: 512 of the tensor cores and 640 of shared memory, 384 to read
//     and 256 for what TMA writes;
//   - more of shared memory: 256 for each time that 32 KB are written or read. Forward: fch and
//     fch_gelu, each once by threads and once by TMA. Backward: fch and dfch likewise, and once
//     more for the sums. So for C = 768 shared memory is the limit, 8,704 and 8,960 in all, and the
//     tensor cores can work 70% of the time;
//   - GELU: 2,048 of the unit for 2^x and 1/x, 8 for each instruction of a warp. A warp has 1,600
//     instructions between its products and those of its next tile, 1,900 backward. They are hidden
//     behind the products of the other warpgroup as long as they take less time.

namespace turns::gelu_products {

static_assert(2 * (STAGES * STAGE + 2 * TILE_SIZE) == 229376, "as gelu_products.py says");

#ifdef __CUDACC__
__device__ float reciprocal(float x) {  // of infinity it is 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// GELU as in kernels.cu, x g with g = 1/(1 + e^(-2u)), without a true division: bf16 hides what the
// fast one loses. Far to the left e^(-2u) is infinity, and g its limit 0.
__device__ float gelu_share(float x) {
    constexpr float factor = -SQRT_8_OVER_PI * LOG2_E;
    return reciprocal(1.0f + power_of_2(x * (factor + 0.044715f * factor * (x * x))));
}
__device__ float fast_gelu(float x) { return x * gelu_share(x); }
__device__ float fast_gelu_derivative(float x) {
    float g = gelu_share(x), xg = x * g;
    return g + (xg - xg * g) * (SQRT_8_OVER_PI + 3.0f * 0.044715f * SQRT_8_OVER_PI * (x * x));
}

struct Sizes {
    int N, OC, C;
    __device__ int down() const { return (N + HEIGHT - 1) / HEIGHT; }
    __device__ int across() const { return (OC + 2 * WIDTH - 1) / (2 * WIDTH) * 2; }  // even
    __device__ int tiles() const { return down() * across(); }
};

// Where the rows and columns of tile number `tile` begin. Neighbours have the same rows.
struct TileAt {
    int row, column;
    __device__ TileAt(int tile, const Sizes& sizes) {
        row = tile / sizes.across() * HEIGHT, column = tile % sizes.across() * WIDTH;
    }
};

// mbarriers.
struct Waits {
    unsigned long long full[STAGES],  // a step's operands have arrived
        empty[STAGES],                // the blocks of the cluster have multiplied them
        my_turn[2],                   // a warpgroup may begin: the other one has all its stages
        fch_there[2],                 // its fch has arrived
        result_read[2];               // TMA may load the next fch to the place of its result
};

// One thread loads what is multiplied, step by step: 64 of C of a tile's rows and columns.
template <bool backward>
__device__ void load_operands(
    real* stages, Waits& waits, const Tiles& inp, const Tiles& w, const Sizes& sizes) {
    unsigned step = 0;
    for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x) {
        TileAt at(tile, sizes);
        for (int c = 0; c < sizes.C; c += 64, step++) {
            real* stage = stages + step % STAGES * STAGE;
            auto& full = waits.full[step % STAGES];
            // At first all stages are empty: a new mbarrier counts the phase before as over.
            mbarrier_wait(waits.empty[step % STAGES], step / STAGES % 2 ^ 1);
            load_for_both(stage, inp, c, at.row, 0, 0, 64, full);
            for (int box = 0; box < WIDTH / 64; box++) {
                int column = at.column + 64 * box;
                copy_box(stage + (2 + box) * BOX, &w, backward ? column : c, 0,
                         backward ? c : column, 0, full);
            }
            mbarrier_arrive(full);
        }
    }
}

// Another thread loads fch to where the result will be, as soon as the last result there was read.
__device__ void load_fch(real* results, Waits& waits, const Tiles& fch, const Sizes& sizes) {
    int n = 0;
    for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x, n++) {
        TileAt at(tile, sizes);
        mbarrier_wait(waits.result_read[n % 2], n / 2 % 2 ^ 1);
        for (int box = 0; box < 2 * (WIDTH / 64); box++)
            copy_box(results + n % 2 * TILE_SIZE + box * BOX, &fch,
                     at.column + box % (WIDTH / 64) * 64, 0, at.row + box / (WIDTH / 64) * 64, 0,
                     waits.fch_there[n % 2]);
        mbarrier_arrive(waits.fch_there[n % 2]);
    }
}

// fch and its GELU, from the product x. GELU is that of fch as it is stored, rounded.
__device__ void finish_forward(
    const Tiles& fch, const Tiles& fch_gelu, TileResult& x, const real* bias, const TileAt& at,
    real* result, int OC, int group) {
    Pair y[4][4][4], of_bias[2][8];  // of each box; of the columns on the left and on the right
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
        for (int n = 0; n < 8; n++)
            of_bias[side][n] = *reinterpret_cast<const Pair*>(
                bias + min(at.column + 64 * side, OC - 64) + column_of(n, 0));
    result_free(group);
    RowsOfLane rows(result, first_row_of_warp());
#pragma unroll
    for (int box = 0; box < 4; box++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, box, k, i);
                Pair b = of_bias[box % 2][2 * k + i / 2];
                y[box][k][i] = pair(two[0] + low(b), two[1] + high(b));
            }
            store_matrices(rows(box, k), y[box][k]);
        }
    }
    store_tile(fch, at.row, at.column, result, group);
#pragma unroll
    for (int box = 0; box < 4; box++) {  // while TMA reads fch
        // Without a branch the compiler would begin with the powers of all boxes, and spill.
        if (at.column + box % 2 * 64 >= OC) continue;
#pragma unroll
        for (int k = 0; k < 4; k++)
            for (Pair& two : y[box][k]) two = pair(fast_gelu(low(two)), fast_gelu(high(two)));
    }
    result_free(group);
#pragma unroll
    for (int box = 0; box < 4; box++)
#pragma unroll
        for (int k = 0; k < 4; k++) store_matrices(rows(box, k), y[box][k]);
    store_tile(fch_gelu, at.row, at.column, result, group);
}

// Sums of a result's columns, over 128 rows. Tensor cores add them up, always in the same order: in
// a product with a matrix of ones each row is the sums. A warp has 32 columns of all rows.
__device__ void sum_columns(float* sums, const TileAt& at, real* result, int OC) {
    float sum[4][4] = {};
    constexpr Pair one = 0x3f803f80, ones[4] = {one, one, one, one};
    int warp = threadIdx.x / 32 % 4;
    RowsOfLane rows(result + warp / 2 * BOX, 0);
#pragma unroll
    for (int row = 0; row < HEIGHT; row += 16)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            Pair b[4];
            const real* from = warp % 2 ? rows.of[2 + k] : rows.of[k];
            load_matrices_transposed(b, from + row / 64 * 2 * BOX + row % 64 * 64);
            mma_pair(sum[2 * k], sum[2 * k + 1], ones, b);
        }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int column = at.column + 32 * warp + column_of(n, 0);
        if (threadIdx.x % 32 < 4 && column < OC)
            store(sums + (size_t)at.row / HEIGHT * OC + column, Pack<2>{sum[n][0], sum[n][1]});
    }
}

// dfch, from the product x and fch. A warp replaces its part of fch in shared memory by dfch, and
// loads the next 16 columns of fch before it computes. The result may be overwritten once all four
// warps have returned: the first of them waits until TMA has read it.
__device__ void finish_backward(
    const Tiles& dfch, float* sums, TileResult& x, const TileAt& at, real* result, int OC,
    int group) {
    RowsOfLane rows(result, first_row_of_warp());
    Pair next[4];
    load_matrices(next, rows(0, 0));
#pragma unroll
    for (int step = 0; step < 16; step++) {
        int box = step / 4, k = step % 4;
        Pair y[4] = {next[0], next[1], next[2], next[3]};
        if (step < 15) load_matrices(next, rows((step + 1) / 4, (step + 1) % 4));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* two = two_of(x, box, k, i);
            y[i] = pair(two[0] * fast_gelu_derivative(low(y[i])),
                        two[1] * fast_gelu_derivative(high(y[i])));
        }
        store_matrices(rows(box, k), y);
    }
    store_tile(dfch, at.row, at.column, result, group);
    if (sums) sum_columns(sums, at, result, OC);
    if (threadIdx.x % 128 == 0) stores_read();
    shared_written();
}

// backward: matmul_dgelu, else matmul_gelu. sums may be null.
template <bool backward>
__device__ void product_with_gelu(
    const Tiles& out, const Tiles& out_gelu, float* sums, const real* bias, const Tiles& inp,
    const Tiles& w, const Tiles& fch, Sizes sizes) {
    DYNAMIC_SHARED(real, stages);
    real* results = stages + STAGES * STAGE;  // one for each warpgroup
    __shared__ Waits waits;
    if (threadIdx.x == 0) {
        for (auto& mbarrier : waits.full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : waits.empty) mbarrier_start(mbarrier, 4 * CLUSTER);  // warps
        for (int i = 0; i < 2; i++) {
            mbarrier_start(waits.fch_there[i], 1), mbarrier_start(waits.result_read[i], 4);
            mbarrier_start(waits.my_turn[i], 4);
        }
    }
    cluster_sync();

    if (threadIdx.x >= WORKERS) {
        keep_registers<40>();
        if (threadIdx.x == WORKERS) load_operands<backward>(stages, waits, inp, w, sizes);
        if (backward && threadIdx.x == WORKERS + 32) load_fch(results, waits, fch, sizes);
    } else {
        take_registers<232>();
        int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
        real* result = results + group * TILE_SIZE;
        int steps = sizes.C / 64, done = 0;  // tiles
        unsigned step = group * steps;
        for (int tile = blockIdx.x + group * gridDim.x; tile < sizes.tiles();
             tile += 2 * gridDim.x, step += steps, done++) {
            TileAt at(tile, sizes);
            TileResult x;
            mbarrier_wait(waits.my_turn[group], (done + (group == 0)) % 2);  // 0 is first
            for (int i = 0; i < steps; i++, step++) {
                mbarrier_wait(waits.full[step % STAGES], step / STAGES % 2);
                const real* stage = stages + step % STAGES * STAGE;
                multiply_stage<backward>(x, stage, stage + 2 * BOX, i > 0);
                wait_for_products<1>(x);  // so the stage before is empty
                if (i > 0) warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
            }
            warp_arrives(waits.my_turn[group ^ 1]);
            wait_for_products<0>(x);
            warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
            if (!backward) {
                finish_forward(out, out_gelu, x, bias, at, result, sizes.OC, group);
            } else {
                mbarrier_wait(waits.fch_there[group], done % 2);
                finish_backward(out, sums, x, at, result, sizes.OC, group);
                warp_arrives(waits.result_read[group]);
            }
        }
        if (threadIdx.x % 128 == 0) stores_arrive();
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace turns::gelu_products

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_gelu(
    const __grid_constant__ Tiles, const __grid_constant__ Tiles, const real*,
    const __grid_constant__ Tiles, const __grid_constant__ Tiles, int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_dgelu(
    const __grid_constant__ Tiles, float*, const __grid_constant__ Tiles,
    const __grid_constant__ Tiles, const __grid_constant__ Tiles, int, int, int);
#endif

// fch (N,OC) = inp (N,C) @ w (OC,C)' + bias (OC), and fch_gelu (N,OC) = gelu(fch). C and OC are
// multiples of 64. Items: blocks, an even number of them.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_gelu(
    const __grid_constant__ Tiles fch, const __grid_constant__ Tiles fch_gelu,
    const real* __restrict__ bias, const __grid_constant__ Tiles inp,
    const __grid_constant__ Tiles w, int N, int OC, int C) {
    turns::gelu_products::product_with_gelu<false>(
        fch, fch_gelu, nullptr, bias, inp, w, inp, {N, OC, C});
}

// dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)). sums (blocks of 128 rows, OC), unless
// null: of each block the sums of dfch's columns. C and OC as above. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_dgelu(
    const __grid_constant__ Tiles dfch, float* __restrict__ sums,
    const __grid_constant__ Tiles dout, const __grid_constant__ Tiles w,
    const __grid_constant__ Tiles fch, int N, int OC, int C) {
    turns::gelu_products::product_with_gelu<true>(
        dfch, dfch, sums, nullptr, dout, w, fch, {N, OC, C});
}
