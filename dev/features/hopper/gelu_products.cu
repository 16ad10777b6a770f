// The MLP's two products that meet GELU, on Hopper in bf16, with GELU done while the tensor cores
// work: compiled behind kernels.cu and hopper.cuh with -DBF16 -DHOPPER. gelu_products.py launches
// them.
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
static_assert(HOPPER, "compile it with -DBF16 -DHOPPER");

namespace gelu_products {  // other files beside kernels.cu use some of these names, too

constexpr int BOX = 64 * 64;                     // numbers that TMA copies at a time
constexpr int HEIGHT = 128, WIDTH = 128;         // of a tile
constexpr int STAGES = 5;                        // steps of 64 channels, loaded or multiplied
constexpr int TILE_SIZE = HEIGHT * WIDTH, STAGE = (HEIGHT + WIDTH) * 64;  // in numbers
constexpr int WORKERS = 2 * 128;                 // threads of the two warpgroups that multiply
using TileResult = Result<2 * WIDTH>;            // x[0][n]: rows 0..63, then 64..127
static_assert(2 * (STAGES * STAGE + 2 * TILE_SIZE) == 229376, "as gelu_products.py says");

#ifdef __CUDACC__
// D (64,128) = A (64,16) B (16,128), or with `add` D += A B. Each warp has 16 rows of D. A is 16
// channels of 64 rows. So is B', of 128 rows; or, b_of_rows, B is 128 columns of 16 rows.
template <bool b_of_rows>
__device__ void wgmma_wide(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "%64, %65, p, 1, 1, 0, %67;}"
                 : FLOATS32(d), FLOATS32((d + 8))
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)b_of_rows));
}

// All threads of a warpgroup wait for each other.
__device__ void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// The opposite of load_matrices: lane i gives the address of row i % 8 of matrix i / 8.
__device__ void store_matrices(real* row, const Pair (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Starts to copy a box from shared to device memory, from (row, c) on. TMA leaves out what is
// beyond the matrix.
__device__ void store_box(const Tiles* map, int c, int row, const real* box) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%1, %2, %3, %2}], [%4];"
                 ::"l"(map), "r"(c), "r"(0), "r"(row), "r"(shared_address(box)) : "memory");
}

__device__ float reciprocal(float x) {  // of infinity it is 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr int CLUSTER = 2;  // blocks that share rows

// Until all threads of the cluster are here. Shared memory of the other block may be used between
// the first call and the last.
__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
// Arrives at the mbarrier of block `rank` of this cluster.
__device__ void mbarrier_arrive_at(unsigned long long& mbarrier, int rank) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];}"
                 ::"r"(shared_address(&mbarrier)), "r"(rank) : "memory");
}
// Starts to copy a box to the same place of both blocks. Each one's own mbarrier counts its bytes,
// which must be expected there.
__device__ void copy_box_to_both(
    real* box, const Tiles* map, int c, int row, unsigned long long& mbarrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3, %4, %3}], [%5], %6;"
                 ::"r"(shared_address(box)), "l"(map), "r"(c), "r"(0), "r"(row),
                   "r"(shared_address(&mbarrier)), "h"((unsigned short)3) : "memory");
}
__device__ void expect_bytes(int bytes, unsigned long long& mbarrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(&mbarrier)), "r"(bytes) : "memory");
}
// Block `own` of two loads its half of a tile's rows for both.
__device__ void load_rows(
    real* stage, const Tiles& inp, int c, int row, unsigned long long& full) {
    int own = blockIdx.x % 2;
    expect_bytes(2 * BOX * sizeof(real), full);
    copy_box_to_both(stage + own * BOX, &inp, c, row + 64 * own, full);
}
#else  // a CPU has no clusters: a block loads all of its rows
constexpr int CLUSTER = 1;
__device__ void cluster_sync() { __syncthreads(); }
__device__ void mbarrier_arrive_at(unsigned long long& mbarrier, int) { mbarrier_arrive(mbarrier); }
__device__ void load_rows(
    real* stage, const Tiles& inp, int c, int row, unsigned long long& full) {
    for (int half = 0; half < 2; half++)
        copy_box(stage + half * BOX, &inp, c, 0, row + 64 * half, 0, full);
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

// As warp_arrives, at the mbarriers of all blocks of the cluster.
__device__ void warp_arrives_at_all(unsigned long long& mbarrier) {
    __syncwarp();
    if (threadIdx.x % 32 < CLUSTER) mbarrier_arrive_at(mbarrier, threadIdx.x % 32);
}

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
            load_rows(stage, inp, c, at.row, full);
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

// As address16, but in a cluster an address also says in its upper bits which block's memory it is
// in. In a description they would change the leading offset.
__device__ unsigned own_address16(const real* tile) { return address16(tile) % (1 << 14); }

// x = A B of a stage, or with `add` x += A B. B is (64,WIDTH) if b_of_rows, else B' (WIDTH,64).
template <bool b_of_rows>
__device__ void multiply_stage(TileResult& x, const real* stage, bool add) {
    auto a = describe(own_address16(stage)), b = describe(own_address16(stage + 2 * BOX));
    if (b_of_rows) b += (unsigned long long)(BOX / W - 1) << 16;  // to the next 64 columns
    wgmma_fence(x.x);
#pragma unroll
    for (int k = 0; k < 64; k += 16)
#pragma unroll
        for (int half = 0; half < 2; half++)
            wgmma_wide<b_of_rows>(
                x.x[0] + WIDTH / 8 * half, further(a, (half * BOX + k) / W),
                further(b, (b_of_rows ? k * 64 : k) / W), add || k > 0);
    wgmma_commit();
}

// A warpgroup's result in shared memory is four boxes: two side by side, and two below. A warp has
// 16 rows of each box. Of these it has, for k = 0..3, columns 16 k .. 16 k + 15 in registers as an
// A of mma: each lane has four Pairs of neighbouring columns. For load_matrices and store_matrices,
// this says where a lane's 8 columns begin, in 16 rows of the first box. Thanks to the 128-byte
// swizzle the same columns of 8 rows are in different banks.
struct RowsOfLane {
    real* of[4];
    __device__ RowsOfLane(real* box, int row) {
        unsigned lane = forget(threadIdx.x) % 32;
#pragma unroll
        for (int k = 0; k < 4; k++)
            of[k] = box + (row + lane % 16) * 64 + ((2 * k + lane / 16) ^ lane % 8) * W;
    }
    __device__ real* operator()(int box, int k) const { return of[k] + box * BOX; }
};
__device__ int first_row_of_warp() { return forget(threadIdx.x) / 32 % 4 * 16; }

// The two numbers of the product that become Pair i of these columns.
__device__ const float* two_of(const TileResult& x, int box, int k, int i) {
    return x.x[0][8 * box + 2 * k + i / 2] + i % 2 * 2;
}
__device__ float low(Pair two) { return __uint_as_float(two << 16); }
__device__ float high(Pair two) { return __uint_as_float(two & 0xffff0000); }

// When all threads of the warpgroup have left their part of the result, one has TMA store it.
__device__ void store_tile(const Tiles& to, const TileAt& at, const real* result, int group) {
    shared_written();
    warpgroup_sync(group);
    if (threadIdx.x % 128 == 0) {
        for (int box = 0; box < 4; box++)
            store_box(&to, at.column + box % 2 * 64, at.row + box / 2 * 64, result + box * BOX);
        stores_commit();
    }
    __syncwarp();
}
// After this the result may be overwritten: TMA has read it.
__device__ void result_free(int group) {
    if (threadIdx.x % 128 == 0) stores_read();
    warpgroup_sync(group);
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
    store_tile(fch, at, result, group);
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
    store_tile(fch_gelu, at, result, group);
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
    store_tile(dfch, at, result, group);
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
                multiply_stage<backward>(x, stages + step % STAGES * STAGE, i > 0);
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

}  // namespace gelu_products

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
    gelu_products::product_with_gelu<false>(
        fch, fch_gelu, nullptr, bias, inp, w, inp, {N, OC, C});
}

// dfch (N,OC) = dout (N,C) @ w (C,OC) * gelu'(fch (N,OC)). sums (blocks of 128 rows, OC), unless
// null: of each block the sums of dfch's columns. C and OC as above. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_dgelu(
    const __grid_constant__ Tiles dfch, float* __restrict__ sums,
    const __grid_constant__ Tiles dout, const __grid_constant__ Tiles w,
    const __grid_constant__ Tiles fch, int N, int OC, int C) {
    gelu_products::product_with_gelu<true>(
        dfch, dfch, sums, nullptr, dout, w, fch, {N, OC, C});
}
