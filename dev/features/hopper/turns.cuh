// What kernels for Hopper share whose two warpgroups, or two teams of them (fp8_gelu.cu), take turns:
// while one multiplies a tile of 128 x 128 or 128 x 192, the other one has its tile in registers,
// works on it and stores it. gelu_products.cu says how that works. This file is compiled behind
// kernels.cu and hopper.cuh with -DBF16 -DHOPPER, in front of the files that use it. Each of them
// may bring it, so it may be there twice.
#ifndef HOPPER_TURNS
#define HOPPER_TURNS
static_assert(HOPPER, "compile it with -DBF16 -DHOPPER");

namespace turns {  // other files beside kernels.cu use some of these names, too

constexpr int BOX = 64 * 64;                     // numbers that TMA copies at a time
constexpr int HEIGHT = 128, WIDTH = 128;         // of a tile, unless a file says otherwise
constexpr int STAGES = 5;                        // steps of 64 channels, loaded or multiplied
constexpr int TILE_SIZE = HEIGHT * WIDTH, STAGE = (HEIGHT + WIDTH) * 64;  // in numbers
constexpr int WORKERS = 2 * 128;                 // threads of the two warpgroups that multiply
using TileResult = Result<2 * WIDTH>;            // x[0][n]: rows 0..63, then 64..127
static_assert(2 * (STAGES * STAGE + 2 * TILE_SIZE) == 229376, "that much fits");

#ifdef __CUDACC__
#define NUMBERED_64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
                    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
                    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
                    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// D (64,width) = A (64,16) B (16,width), or with `add` D += A B; width is 128 or 192. Each warp has
// 16 rows of D. A is 16 channels of 64 rows; or, a_of_rows, A' is 64 columns of 16 rows. So is B',
// of `width` rows; or, b_of_rows, B is `width` columns of 16 rows.
template <int width, bool b_of_rows, bool a_of_rows>
__device__ void wgmma_wide(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    static_assert(width == 128 || width == 192);
    if constexpr (width == 128)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERED_64 "}, "
                     "%64, %65, p, 1, 1, %67, %68;}"
                     : FLOATS32(d), FLOATS32((d + 8))
                     : "l"(a), "l"(b), "r"((int)add), "n"((int)a_of_rows), "n"((int)b_of_rows));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %98, 0;"
                     "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NUMBERED_64 ","
                     "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
                     "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
                     "%96, %97, p, 1, 1, %99, %100;}"
                     : FLOATS32(d), FLOATS32((d + 8)), FLOATS32((d + 16))
                     : "l"(a), "l"(b), "r"((int)add), "n"((int)a_of_rows), "n"((int)b_of_rows));
}

__device__ float reciprocal(float x) {  // of infinity it is 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The opposite of load_matrices: lane i gives the address of row i % 8 of matrix i / 8.
__device__ void store_matrices(real* row, const Pair (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// And with the 8 x 8 matrices transposed.
__device__ void store_matrices_transposed(real* row, const Pair (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Starts to copy a box from shared memory to one of several matrices, from (row, c) on. TMA leaves
// out what is beyond the matrix.
__device__ void store_box(const TileMap* map, int c, int row, const real* box, int matrix = 0) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"(map), "r"(c), "r"(0), "r"(row), "r"(matrix), "r"(shared_address(box))
                 : "memory");
}

constexpr int CLUSTER = 2;  // blocks that share an operand

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
// One of the blocks, for which `ours` is true, starts to copy a box to the same place of both. Each
// one's own mbarrier counts its bytes, which must be expected there. Coordinates as in copy_box.
template <int rows = 64>
__device__ void share_box(real* box, const TileMap* map, int c, int head, int row, int matrix,
                          unsigned long long& mbarrier, bool ours) {
    if (ours)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx"
                     "::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                     ::"r"(shared_address(box)), "l"(map), "r"(c), "r"(head), "r"(row),
                       "r"(matrix), "r"(shared_address(&mbarrier)), "h"((unsigned short)3)
                     : "memory");
}
__device__ void expect_bytes(int bytes, unsigned long long& mbarrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(&mbarrier)), "r"(bytes) : "memory");
}
#else  // a CPU has no clusters: a block loads all boxes itself
constexpr int CLUSTER = 1;
__device__ void cluster_sync() { __syncthreads(); }
__device__ void mbarrier_arrive_at(unsigned long long& mbarrier, int) { mbarrier_arrive(mbarrier); }
template <int rows = 64>
__device__ void share_box(real* box, const TileMap* map, int c, int head, int row, int matrix,
                          unsigned long long& mbarrier, bool) {
    copy_box(box, map, c, head, row, matrix, mbarrier, rows);
}
__device__ void expect_bytes(int, unsigned long long&) {}
#endif

// Loads two boxes of one matrix for both blocks: each block one of them. The second begins `right`
// channels and `down` rows behind the first.
__device__ void load_for_both(real* boxes, const TileMap& map, int c, int row, int matrix, int right,
                              int down, unsigned long long& full) {
    expect_bytes(2 * BOX * sizeof(real), full);
    for (int box = 0; box < 2; box++)
        share_box(boxes + box * BOX, &map, c + box * right, 0, row + box * down, matrix, full,
                  box == int(blockIdx.x % 2));
}

// As warp_arrives, at the mbarriers of all blocks of the cluster.
__device__ void warp_arrives_at_all(unsigned long long& mbarrier) {
    __syncwarp();
    if (threadIdx.x % 32 < CLUSTER) mbarrier_arrive_at(mbarrier, threadIdx.x % 32);
}

// As address16, but in a cluster an address also says in its upper bits which block's memory it is
// in. In a description they would change the leading offset.
__device__ unsigned own_address16(const real* tile) { return address16(tile) % (1 << 14); }

// x = A B of a stage, or with `add` x += A B. A is (HEIGHT,64), or A' (64,HEIGHT) if a_of_rows; B,
// (64,width) if b_of_rows, else B' (width,64). Both are boxes of 64 rows and 64 columns.
template <bool b_of_rows, bool a_of_rows = false, int columns>
__device__ void multiply_stage(
    Result<columns>& x, const real* of_a, const real* of_b, bool add) {
    constexpr int width = columns / 2;
    auto a = describe(own_address16(of_a)), b = describe(own_address16(of_b));
    if (b_of_rows) b += (unsigned long long)(BOX / W - 1) << 16;  // to the next 64 columns
    wgmma_fence(x.x);
#pragma unroll
    for (int k = 0; k < 64; k += 16)
#pragma unroll
        for (int half = 0; half < 2; half++)
            wgmma_wide<width, b_of_rows, a_of_rows>(
                x.x[0] + width / 8 * half,
                further(a, (half * BOX + (a_of_rows ? k * 64 : k)) / W),
                further(b, (b_of_rows ? k * 64 : k) / W), add || k > 0);
    wgmma_commit();
}

// x = A B, the product of this block's n-th tile in `steps` stages, when it is the turn of this
// warpgroup, which is number `group`.
template <int STAGES, int STAGE, bool b_of_rows, bool a_of_rows, int columns, class Waits>
__device__ void multiply_in_turn(
    Result<columns>& x, const real* stages, Waits& waits, int n, int steps, int group) {
    unsigned step = n * steps;
    mbarrier_wait(waits.my_turn[group], (n / 2 + (group == 0)) % 2);  // 0 is first
    for (int i = 0; i < steps; i++, step++) {
        mbarrier_wait(waits.full[step % STAGES], step / STAGES % 2);
        const real* stage = stages + step % STAGES * STAGE;
        multiply_stage<b_of_rows, a_of_rows>(x, stage, stage + 2 * BOX, i > 0);
        wait_for_products<1>(x);  // so the stage before is empty
        if (i > 0) warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
    }
    warp_arrives(waits.my_turn[forget(unsigned(group)) ^ 1]);  // a register less
    wait_for_products<0>(x);
    warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
}

// mbarriers of a product that goes with an activation.
template <int STAGES, int RING>
struct FusedWaits {
    unsigned long long full[STAGES],  // a step's operands have arrived
        empty[STAGES],                // the blocks of the cluster have multiplied them
        my_turn[2],        // a warpgroup may begin: the other one has all its stages
        fch_there[2][6],   // a box of fch has arrived, one of six of a warpgroup's tile
        dfch_there[RING];  // all warps have replaced their part of it by dfch
    __device__ void start() {
        for (auto& mbarrier : full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : empty) mbarrier_start(mbarrier, 4 * CLUSTER);  // warps
        for (auto& mbarrier : my_turn) mbarrier_start(mbarrier, 4);
        for (auto& of_group : fch_there)
            for (auto& mbarrier : of_group) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : dfch_there) mbarrier_start(mbarrier, 4);
    }
};

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
template <int columns>
__device__ const float* two_of(const Result<columns>& x, int box, int k, int i) {
    return x.x[0][8 * box + 2 * k + i / 2] + i % 2 * 2;
}
__device__ float low(Pair two) { return __uint_as_float(two << 16); }
__device__ float high(Pair two) { return __uint_as_float(two & 0xffff0000); }

// When all threads of the warpgroup have left their part of the result, one has TMA store it.
__device__ void store_tile(
    const TileMap& to, int row, int column, const real* result, int group, int matrix = 0) {
    shared_written();
    warpgroup_sync(group);
    if (threadIdx.x % 128 == 0) {
        for (int box = 0; box < 4; box++)
            store_box(&to, column + box % 2 * 64, row + box / 2 * 64, result + box * BOX, matrix);
        stores_commit();
    }
    __syncwarp();
}
// After this the result may be overwritten: TMA has read it.
__device__ void result_free(int group) {
    if (threadIdx.x % 128 == 0) stores_read();
    warpgroup_sync(group);
}

}  // namespace turns
#endif
