// The MLP's two products that meet GELU, on Hopper in FP8. Each writes what it computes as twins,
// plain and transposed, while the tensor cores work on another tile: compiled behind fp8.cu,
// hopper.cuh and turns.cuh with -DBF16 -DHOPPER. fp8_gelu.py launches them.
//   matmul_gelu_fp8    the twins of gelu(fch), with fch = inp (N,C) @ w (OC,C)' + bias (OC); and
//                      slopes (N,OC) = gelu'(fch), in bytes
//   matmul_dgelu_fp8   the twins of dfch = dout (N,C) @ w (OC,C)' * slopes, and sums of its columns
//
// Two teams take turns, as gelu_products.cu explains: one multiplies, while the other one has its
// tile of 128 x 128 in registers. A stage has 128 channels in place of 64, and the same bytes. A
// team is two warpgroups with 64 rows each. So each scheduler has two warps of a team: one works
// while the other waits for a result.
//
// The backward pass needs fch for GELU's derivative alone. So that is kept instead: here, beside
// GELU, it costs a few instructions. It is between -0.13 and 1.13, and a byte in steps of 1/192 is
// off by 0.0026 at most. A twin's rounding takes up to a sixteenth of each number.
//
// Three things save shared memory, which is the limit:
//   - Nobody but these kernels reads slopes. So a thread stores its part of a tile as it has it, 16
//     bytes at a time, and the thread that needs it loads it back. N and OC are multiples of 128,
//     so each of these parts has its place in the array.
//   - A lane has two rows, 8 apart, and two neighbouring columns of each 8. Its bytes would not be
//     neighbours in either twin. Therefore TMA brings each 16 rows of both operands in another
//     order: first the even ones, then the odd ones. Then the lane's rows are 2 i and 2 i + 1, and
//     its columns 4 q .. 4 q + 3. TMA restores the order of rows when it stores a twin.
//   - stmatrix moves 8 x 8 pairs of bytes, for the transposed twin with the pairs transposed.
//
// What a tile costs, in clocks of its multiprocessor, for C = 768: 3,072 of the tensor cores; of
// shared memory 3,840 for the products and 512 for the twins; and, forward, 2,048 of the unit for
// 2^x and 1/x.

namespace fp8_gelu {

using namespace turns;

constexpr int CHANNEL_BYTES = 128;  // of a stage
constexpr int TEAM = WORKERS;       // two warpgroups, which share a tile
using TileResult = Result<WIDTH>;   // 64 rows of it
using Sixteen = Stored<4, Pair>;    // bytes

constexpr float STEPS = 192, ZERO = 26;  // byte b stands for the slope (b - ZERO) / STEPS

static_assert(STAGE == 4 * BOX && TILE_SIZE == 4 * BOX && 2 * (STAGES + 2) * STAGE == 229376,
              "as fp8_gelu.py says");

#ifdef __CUDACC__
// D (64,128) = A (64,32) B (32,128) of e4m3, or with `add` D += A B. A and B' are 32 channels of
// the rows of two tiles.
__device__ void wgmma_e4m3(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{" NUMBERED_64 "}, "
                 "%64, %65, p, 1, 1;}"
                 : FLOATS32(d), FLOATS32((d + 8)) : "l"(a), "l"(b), "r"((int)add));
}

// All threads of a team wait for each other.
__device__ void team_sync(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM) : "memory");
}

// 16 bytes that are read once, now: the compiler does not move the load to where they are needed.
__device__ void load_now(Pair (&x)[4], const Sixteen* from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}

// Loads two boxes of 64 rows for both blocks: each block one of them.
__device__ void load_rows(real* boxes, const TileMap& map, int c, int row, unsigned long long& full) {
    int own = blockIdx.x % 2;
    expect_bytes(2 * BOX * sizeof(real), full);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 ::"r"(shared_address(boxes + own * BOX)), "l"(&map), "r"(c), "r"(0), "r"(0),
                   "r"(row / 16 + own * 4), "r"(shared_address(&full)), "h"((unsigned short)3)
                 : "memory");
}
#else
__device__ void team_sync(int, int line = __builtin_LINE()) { groups_sync<2>(line); }
__device__ void load_now(Pair (&x)[4], const Sixteen* from) {
    for (int i = 0; i < 4; i++) x[i] = from->x[i];
}
__device__ void load_rows(real* boxes, const TileMap& map, int c, int row, unsigned long long& full) {
    for (int box = 0; box < 2; box++)
        copy_box(boxes + box * BOX, &map, c, 0, 0, row / 16 + box * 4, full);
}
#endif

// GELU of x, as in gelu_products.cu, and its derivative. The limit keeps an infinite square from
// being multiplied by 0.
__device__ float gelu_and_slope(float x, float& slope) {
    constexpr float factor = -SQRT_8_OVER_PI * LOG2_E, cube = 3.0f * 0.044715f * SQRT_8_OVER_PI;
    float square = fminf(x * x, 0x1p100f);
    float g = reciprocal(1.0f + power_of_2(x * (factor + 0.044715f * factor * square))), xg = x * g;
    slope = g + (xg - xg * g) * (SQRT_8_OVER_PI + cube * square);
    return xg;
}

// A slope as a byte: the lowest of the result, whose fraction begins there.
__device__ unsigned byte_of_slope(float slope) {
    return __float_as_uint(slope * STEPS + (0x1p23f + ZERO));
}
__device__ unsigned four_bytes(const unsigned (&x)[4]) {
    return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

struct Sizes {
    int N, OC, C;
    __device__ int across() const { return OC / WIDTH; }  // even
    __device__ int tiles() const { return N / HEIGHT * across(); }
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
        my_turn[2];                   // a team may begin: the other one has all its stages
};

// One thread loads what is multiplied, step by step: 128 channels of a tile's rows and columns.
__device__ void load_operands(
    real* stages, Waits& waits, const TileMap& inp, const TileMap& w, const Sizes& sizes) {
    unsigned step = 0;
    for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x) {
        TileAt at(tile, sizes);
        for (int c = 0; c < sizes.C; c += CHANNEL_BYTES, step++) {
            real* stage = stages + step % STAGES * STAGE;
            auto& full = waits.full[step % STAGES];
            // At first all stages are empty: a new mbarrier counts the phase before as over.
            mbarrier_wait(waits.empty[step % STAGES], step / STAGES % 2 ^ 1);
            load_rows(stage, inp, c / 2, at.row, full);
            for (int box = 0; box < 2; box++)
                copy_box(stage + (2 + box) * BOX, &w, c / 2, 0, 0, at.column / 16 + box * 4, full);
            mbarrier_arrive(full);
        }
    }
}

// x = A B' of a stage, or with `add` x += A B'. A is half of the 128 rows, B' all of 128.
__device__ void multiply_step(TileResult& x, const real* stage, int half, bool add) {
    auto a = describe(own_address16(stage + half * BOX));
    auto b = describe(own_address16(stage + 2 * BOX));
    wgmma_fence(x.x);
#pragma unroll
    for (int k = 0; k < CHANNEL_BYTES / 2; k += 16)  // 32 bytes
        wgmma_e4m3(x.x[0], further(a, k / W), further(b, k / W), add || k > 0);
    wgmma_commit();
}

// Of each 16 columns, and of the 16 rows of its warp, a lane has rows 2 i and 2 i + 1 of columns
// 4 q .. 4 q + 3, with i = lane / 4 and q = lane % 4.
struct Eight {
    float x[2][4];  // [row][column]
};
__device__ Eight eight_of(const TileResult& x, int m) {
    Eight e;
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
        for (int c = 0; c < 4; c++) e.x[row][c] = x.x[0][2 * m + c % 2][2 * row + c / 2];
    return e;
}

// Where a lane's 16 slopes of 32 columns are.
__device__ size_t place_of_slopes(int tile, int k) {
    return (size_t)tile * (HEIGHT * WIDTH / 16) + threadIdx.x % TEAM / 128 * 512 + k * 128 +
           threadIdx.x % 128;
}

// Stores two steps of 16 columns, 2 k and 2 k + 1, as a tile's twins in shared memory: two boxes of
// 64 tokens, then two of 64 channels. Returns the largest magnitude.
__device__ float add_to_twins(real* result, const Eight (&e)[2], int half, int k) {
    unsigned lane = forget(threadIdx.x) % 32, warp = forget(threadIdx.x) / 32 % 4;
    Pair rows[4], columns[4];
    float largest = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float* y = e[m].x[row];
            for (int c = 0; c < 4; c++) largest = fmaxf(largest, fabsf(y[c]));
            rows[2 * m + row] = two_fp8(y[0], y[1]) | (unsigned)two_fp8(y[2], y[3]) << 16;
        }
        // Bytes of columns c and c + 2 of both rows, which stmatrix takes as two neighbours.
        columns[2 * m] = __byte_perm(rows[2 * m], rows[2 * m + 1], 0x6240);
        columns[2 * m + 1] = __byte_perm(rows[2 * m], rows[2 * m + 1], 0x7351);
    }
    // Thanks to the 128-byte swizzle the same 16 bytes of 8 rows are in different banks.
    store_matrices(result + half * BOX + (16 * warp + lane % 16) * 64 +
                       ((2 * k + lane / 16) ^ lane % 8) * W, rows);
    store_matrices_transposed(result + 2 * BOX + (32 * k + lane) * 64 +
                                  ((4 * half + warp) ^ lane % 8) * W, columns);
    return largest;
}

// two_fp8 makes 448 of infinity, which would hide it. So once a thread has had one, a row and a
// column of its warp's part of the twins get a NaN, from which the loss or the gradient's norm gets
// it: see fp8_output.cuh. They are where this warp has just stored, since others may store later.
__device__ void show_infinities(real* result, float largest, int half) {
    __syncwarp();
    if (largest <= -LOWEST) return;
    unsigned lane = forget(threadIdx.x) % 32, warp = forget(threadIdx.x) / 32 % 4;
    constexpr Pair nan = 0x7f7f7f7f;
    *reinterpret_cast<Pair*>(result + half * BOX + (16 * warp + lane % 16) * 64) = nan;
    for (int box = 2; box < 4; box++)
        *reinterpret_cast<Pair*>(result + box * BOX + (16 * warp + lane % 16) * 64 +
                                 ((4 * half + warp) ^ lane % 8) * W) = nan;
}

// When all threads of the team have left their part of the twins, one has TMA store them.
__device__ void store_twins(
    const TileMap& twin, const TileMap& across, const TileAt& at, const real* result, int team) {
    shared_written();
    team_sync(team);
    if (threadIdx.x % TEAM == 0) {
        for (int box = 0; box < 2; box++) {
            store_box(&twin, at.column / 2, 0, result + box * BOX, at.row / 16 + box * 4);
            store_box(&across, at.row / 2, 0, result + (2 + box) * BOX, at.column / 16 + box * 4);
        }
        stores_commit();
    }
    __syncwarp();
}

// The team may overwrite its twins in shared memory: TMA has read them.
__device__ void twins_free(int team) {
    if (threadIdx.x % TEAM == 0) stores_read();
    team_sync(team);
}

// The twins of GELU, and its slopes, from the product x.
__device__ void finish_forward(
    const TileMap& twin, const TileMap& across, float& largest, float scale, Sixteen* slopes,
    const TileResult& x, float factor, const real* bias, int tile, const TileAt& at, real* result,
    int team, int half) {
    twins_free(team);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        Eight e[2];
        Sixteen bytes;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            e[m] = eight_of(x, 2 * k + m);
            const Pair* of_bias = reinterpret_cast<const Pair*>(
                bias + at.column + 32 * k + 16 * m + threadIdx.x % 4 * 4);
            Pair two[2] = {of_bias[0], of_bias[1]};
#pragma unroll
            for (int row = 0; row < 2; row++) {
                unsigned of_four[4];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float &y = e[m].x[row][c], b = c % 2 ? high(two[c / 2]) : low(two[c / 2]);
                    float slope;
                    y = scale * gelu_and_slope(y * factor + b, slope);
                    of_four[c] = byte_of_slope(slope);
                }
                bytes.x[2 * m + row] = four_bytes(of_four);
            }
        }
        slopes[place_of_slopes(tile, k)] = bytes;
        largest = fmaxf(largest, add_to_twins(result, e, half, k));
    }
    show_infinities(result, largest, half);
    store_twins(twin, across, at, result, team);
}

// A lane has the sums of 2 rows of 8 columns. It gets those of all 16 rows of its warp for the
// column of number lane / 4.
__device__ float sum_of_lanes(float (&sum)[8]) {
    unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            bool upper = lane & 4 * n;
            float sent = upper ? sum[i] : sum[i + n], kept = upper ? sum[i + n] : sum[i];
            sum[i] = kept + __shfl_xor_sync(FULL_WARP, sent, 4 * n);
        }
    return sum[0];
}

// The twins of dfch and the sums of its columns, from the product x and GELU's slopes.
__device__ void finish_backward(
    const TileMap& twin, const TileMap& across, float& largest, const Scale* scale8, float* sums,
    const TileResult& x, float factor, const Pair (&slopes)[4][4], const TileAt& at, real* result,
    float (*of_warps)[WIDTH], int OC, int team, int half) {
    unsigned lane = forget(threadIdx.x) % 32, warp = forget(threadIdx.x) % TEAM / 32;
    // A float of the bytes 0x47, 0x80, b and 0, from the sign down, is 2^16 + 2 b: no conversion.
    // __byte_perm takes them from bytes 7 and 6 of its two words, byte c, and byte 4.
    float per_byte = factor / (2 * STEPS), at_zero = per_byte * -(0x1p16f + 2 * ZERO);
    float sum[4];  // of a column of each 32
    twins_free(team);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float of_column[8];  // sums of this lane's rows
        Eight e[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            e[m] = eight_of(x, 2 * k + m);
#pragma unroll
            for (int row = 0; row < 2; row++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float& d = e[m].x[row][c];
                    Pair four = slopes[k][2 * m + row];
                    float byte = __uint_as_float(__byte_perm(four, 0x47800000, 0x7604 | c << 4));
                    d *= byte * per_byte + at_zero;
                    of_column[4 * m + c] = row ? of_column[4 * m + c] + d : d;
                }
        }
        largest = fmaxf(largest, add_to_twins(result, e, half, k));
        sum[k] = sum_of_lanes(of_column);
    }
    // Two of the 8 warps at a time add their sums: places for all would not fit beside the stages.
    int own = lane / 16 * 16 + lane % 4 * 4 + lane / 4 % 4;  // its column of 32
    auto add = [&](unsigned turn) {
        float* to = of_warps[warp % 2] + own;
        for (int k = 0; k < 4 && warp / 2 == turn; k++)
            to[32 * k] = turn ? to[32 * k] + sum[k] : sum[k];
    };
    add(0);
    show_infinities(result, largest, half);
    store_twins(twin, across, at, result, team);
    for (unsigned turn = 1; turn < 4; turn++) {
        add(turn);
        team_sync(team);
    }
    for (int k = 0; k < 4 && warp == 0; k++)
        sums[(size_t)at.row / HEIGHT * OC + at.column + 32 * k + own] =
            scale8->inverse * (of_warps[0][32 * k + own] + of_warps[1][32 * k + own]);
}

// backward: matmul_dgelu_fp8, else matmul_gelu_fp8.
template <bool backward>
__device__ void product_with_gelu(
    const TileMap& twin, const TileMap& across, Scale* scale8, float* sums, Sixteen* slopes,
    const real* bias, const TileMap& inp, const TileMap& w, const Scale* of_inp, const Scale* of_w,
    Sizes sizes) {
    DYNAMIC_SHARED(real, stages);
    __shared__ Waits waits;
    __shared__ float of_warps[backward ? 2 : 1][2][backward ? WIDTH : 1];
    if (threadIdx.x == 0) {
        for (auto& mbarrier : waits.full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : waits.empty) mbarrier_start(mbarrier, 8 * CLUSTER);
        for (auto& mbarrier : waits.my_turn) mbarrier_start(mbarrier, 8);  // warps
    }
    cluster_sync();

    if (threadIdx.x >= 2 * TEAM) {
        keep_registers<32>();
        if (threadIdx.x == 2 * TEAM) load_operands(stages, waits, inp, w, sizes);
    } else {
        take_registers<112>();
        int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
        int team = group / 2, half = group % 2;
        real* result = stages + STAGES * STAGE + team * TILE_SIZE;
        // Numbers are multiplied by the scale of their twin at once.
        float factor = of_inp->inverse * of_w->inverse * (backward ? scale8->scale : 1.0f);
        float largest = 0.0f;
        int steps = (sizes.C + CHANNEL_BYTES - 1) / CHANNEL_BYTES, done = 0;  // tiles
        unsigned step = team * steps;
        for (int tile = blockIdx.x + team * gridDim.x; tile < sizes.tiles();
             tile += 2 * gridDim.x, step += steps, done++) {
            TileAt at(tile, sizes);
            TileResult x;
            Pair own_slopes[4][4];  // this lane's
            if (backward)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    load_now(own_slopes[k], slopes + place_of_slopes(tile, k));
            mbarrier_wait(waits.my_turn[team], (done + (team == 0)) % 2);  // 0 is first
            for (int i = 0; i < steps; i++, step++) {
                mbarrier_wait(waits.full[step % STAGES], step / STAGES % 2);
                multiply_step(x, stages + step % STAGES * STAGE, half, i > 0);
                if (i == steps - 1) warp_arrives(waits.my_turn[team ^ 1]);
                wait_for_products<1>(x);  // so the stage before is empty
                if (i > 0) warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
            }
            wait_for_products<0>(x);
            warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
            if constexpr (backward)
                finish_backward(twin, across, largest, scale8, sums, x, factor, own_slopes, at,
                                result, of_warps[team], sizes.OC, team, half);
            else
                finish_forward(twin, across, largest, scale8->scale, slopes, x, factor, bias, tile,
                               at, result, team, half);
        }
        if (threadIdx.x % TEAM == 0) stores_arrive();
        largest = warp_max(largest) * scale8->inverse;
        if (threadIdx.x % 32 == 0 && largest > __ldcg(&scale8->largest))
            atomicMax(reinterpret_cast<int*>(&scale8->largest), (int)__float_as_uint(largest));
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace fp8_gelu

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_gelu_fp8(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, Scale*, unsigned char*,
    const real*, const __grid_constant__ TileMap, const __grid_constant__ TileMap, const Scale*,
    const Scale*, int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_dgelu_fp8(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, Scale*, float*,
    const unsigned char*, const __grid_constant__ TileMap, const __grid_constant__ TileMap,
    const Scale*, const Scale*, int, int, int);
#endif

// twin (N,OC) and across (OC,N) of gelu(fch), with scale8, for fch = inp (N,C) @ w (OC,C)' + bias
// (OC); and slopes (N OC), gelu'(fch) in the order of these kernels' registers. inp and w are twins
// with the scales of_inp and of_w. N is a multiple of 128, OC of 256, C of 16. Items: blocks, an
// even number of them.
BLOCK(640, 1)
extern "C" __global__ void __launch_bounds__(640, 1) matmul_gelu_fp8(
    const __grid_constant__ TileMap twin, const __grid_constant__ TileMap across, Scale* scale8,
    unsigned char* __restrict__ slopes, const real* __restrict__ bias,
    const __grid_constant__ TileMap inp, const __grid_constant__ TileMap w, const Scale* of_inp,
    const Scale* of_w, int N, int OC, int C) {
    using namespace fp8_gelu;
    product_with_gelu<false>(twin, across, scale8, nullptr, reinterpret_cast<Sixteen*>(slopes),
                             bias, inp, w, of_inp, of_w, {N, OC, C});
}

// twin (N,OC) and across (OC,N) of dfch = dout (N,C) @ w (OC,C)' * slopes. sums (blocks of 128
// rows, OC): of each block the sums of dfch's columns. The rest as above.
BLOCK(640, 1)
extern "C" __global__ void __launch_bounds__(640, 1) matmul_dgelu_fp8(
    const __grid_constant__ TileMap twin, const __grid_constant__ TileMap across, Scale* scale8,
    float* __restrict__ sums, const unsigned char* __restrict__ slopes,
    const __grid_constant__ TileMap dout, const __grid_constant__ TileMap w, const Scale* of_dout,
    const Scale* of_w, int N, int OC, int C) {
    using namespace fp8_gelu;
    auto* of_tiles = reinterpret_cast<Sixteen*>(const_cast<unsigned char*>(slopes));
    product_with_gelu<true>(twin, across, scale8, sums, of_tiles, nullptr, dout, w, of_dout, of_w,
                            {N, OC, C});
}
