// The product of the MLP that has GELU behind it: fch (N,OC) = inp (N,C) weight' (OC,C) + bias (OC), and
// gelu (N,OC) = gelu(fch). Version 1 is a product, and then a kernel that reads again what the product has stored. In
// version 2 cuBLASLt computes GELU in the product's epilogue. The threads that have the results in their registers do
// it, with an exponential and a division for each, and meanwhile the tensor cores have less to do: with B=32 and T=1024
// it takes an H200 284 to 298 us, and the product alone 204.

#if defined(BF16) && (defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__))
#define HAS_BULK 1
#else
#define HAS_BULK 0
#endif

struct alignas(64) TensorMap { unsigned char bytes[128]; };  // see tensor_maps.py

#ifdef __CUDACC__
namespace bulk {
#if HAS_BULK
__device__ __forceinline__ unsigned place(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// A Barrier counts arrivals, and bytes that copies bring. When all that it expects have come, a phase is over, and the
// next one begins. Phases have parities 0, 1, 0, ... wait(parity) returns when the phase of that parity is over, and at
// once if that is the one before the first. What was written before an arrival can be read after the wait.
using Barrier = unsigned long long;
__device__ __forceinline__ void start(Barrier& b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place(&b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(Barrier& b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(&b)) : "memory");
}
// The same at the barrier in this place of a block of the cluster.
__device__ __forceinline__ void arrive_at(Barrier& b, int block) {
    asm volatile("{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];}"
                 ::"r"(place(&b)), "r"(block) : "memory");
}
// Arrives, and says how many bytes copies will bring in this phase.
__device__ __forceinline__ void expect(Barrier& b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place(&b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(Barrier& b, int parity) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 ::"r"(place(&b)), "r"(parity) : "memory");
}

// Lets the copy engine, and the blocks of the cluster, see barriers that this thread has started.
__device__ __forceinline__ void barriers_fence() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
// Lets the copy engine see a map that the host has written.
__device__ __forceinline__ void map_fence(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Starts a copy of the map's box of a matrix, from this column and row on, to shared memory. Its rows are 128 bytes,
// in the 128-byte swizzle. What lies beyond the matrix is zeros, and counts as bytes too. copy_to_all copies it to the
// same place in each block of a cluster of two, and its bytes arrive at the barrier that each has in the same place.
__device__ __forceinline__ void copy(real* shared, const TensorMap* map, int column, int row, Barrier& b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(place(shared)), "l"(map), "r"(column), "r"(row), "r"(place(&b)) : "memory");
}
__device__ __forceinline__ void copy_to_all(real* shared, const TensorMap* map, int column, int row, Barrier& b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(place(shared)), "l"(map), "r"(column), "r"(row), "r"(place(&b)), "h"((short)3) : "memory");
}

// Starts a copy of so many bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(void* shared, const void* global, int bytes, Barrier& b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(place(shared)), "l"(global), "r"(bytes), "r"(place(&b)) : "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// 1 / x in one instruction, to the last bit or two. Of infinity it is 0.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Stores four 8 x 8 matrices to shared memory: the inverse of load_matrices.
__device__ __forceinline__ void store_matrices(real* row, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(place(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
}

#define FLOATS_OF_128(d) FLOATS_OF_64(d, 0), FLOATS_OF_64(d, 16)
// d (64, 256) = A (64, 16) B (16, 256), or with `add` d += A B. Both are described as kernels.cu says.
__device__ __forceinline__ void wgmma(float (&d)[32][4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
                 "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0;}"
                 : FLOATS_OF_128(d) : "l"(a), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void products_start(float (&d)[32][4]) {
    asm volatile("" : FLOATS_OF_64(d, 16));
    asm volatile("wgmma.fence.sync.aligned;" : FLOATS_OF_64(d, 0)::"memory");
}
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` of this warp group's groups of products are under way.
template <int pending>
__device__ __forceinline__ void products_arrive() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// What goes before a use of d, so that the compiler does not move it to before products_arrive.
__device__ __forceinline__ void products_done(float (&d)[32][4]) {
    asm volatile("" : FLOATS_OF_64(d, 0)::"memory");
    asm volatile("" : FLOATS_OF_64(d, 16)::"memory");
}
#endif
}  // namespace bulk
#endif

namespace matmul_gelu {

// gelu() of kernels.cu, for results that are rounded to bf16. The factors of the exponent are multiplied
// beforehand, and one instruction stands for the division, which otherwise is ten and a branch.
#if HAS_BULK
constexpr float LINEAR = -SQRT_8_OVER_PI * LOG2_E, CUBIC = 0.044715f * LINEAR;
__device__ __forceinline__ float logistic(float x) {  // 1/(1 + exp(-2u))
    return bulk::reciprocal(1.0f + power_of_2(x * (LINEAR + CUBIC * (x * x))));
}

constexpr int ROWS = 128, COLUMNS = 256;  // of a tile of the result
constexpr int STEP = 64, STAGES = 3;      // the summed index goes by steps of 128 bytes; so many are in shared memory
constexpr int BIASES = STAGES + 1;        // a tile's bias is in use until STAGES steps after its last one have come
constexpr int GROUP = ROWS / 2;           // rows of a warp group's part of a tile
#ifdef __CUDACC__
constexpr int CLUSTER = 2;                // blocks whose tiles lie one below the other, and who share what they copy
#else
constexpr int CLUSTER = 1;
#endif
constexpr int BAND = 16 / CLUSTER;        // so many clusters' tiles, one below the other, are worked on at a time

struct Shared {
    real x[STAGES][ROWS * STEP], w[STAGES][COLUMNS * STEP];
    real product[ROWS * COLUMNS];     // see piece()
    real bias[BIASES][COLUMNS];       // of tiles, by turns
    bulk::Barrier full[STAGES], empty[STAGES];  // has a stage been filled, and is it no longer needed?
    bulk::Barrier written[2], drained[2];       // has a product been written, and is it no longer needed?
};

// Where the 8 columns 8 i..8 i+7 of a row lie in a product. They would be in the same banks in all rows, but for this.
__device__ __forceinline__ int piece(int row, int i) { return row * COLUMNS + (i ^ row % 8) * 8; }

// A stage's number, and the parity of the phase in which it is used.
struct Turn {
    int stage = 0, parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The tiles of a block. All blocks together are at work on a few rows and columns of tiles, so that what they copy is
// in L2 when another block wants it.
struct Tiles {
    int rows, columns, rank, i, step;  // rows and columns of clusters' tiles; i is the one that comes next
    int row, column;                   // where the block's tile begins

    __device__ Tiles(int N, int OC, int rank)
        : rows((N + ROWS * CLUSTER - 1) / (ROWS * CLUSTER)), columns((OC + COLUMNS - 1) / COLUMNS), rank(rank),
          i(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}
    __device__ bool next() {
        if (i >= rows * columns) return false;
        int band = i / (BAND * columns) * BAND, height = min(BAND, rows - band), j = i - band * columns;
        row = ((band + j % height) * CLUSTER + rank) * ROWS;
        column = j / height * COLUMNS;
        i += step;
        return true;
    }
};

// wgmma's description of a tile, as describe() of kernels.cu: rows of 128 bytes, 8 of them are 1,024. It
// counts 16 bytes.
__device__ __forceinline__ unsigned long long describe(const real* tile) {
    return bulk::place(tile) / 16 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// One thread starts all copies of a block: of each step 64 columns of x's rows, and of the cluster's w a share.
__device__ __forceinline__ void fetch(Shared& s, const TensorMap* maps, const real* bias, Tiles tiles, int C,
                                      int OC) {
    int first = tiles.rank * (COLUMNS / CLUSTER);  // of the share
    Turn turn;
    for (int tile = 0; tiles.next(); tile++)
        for (int c = 0; c < C; c += STEP, turn.next()) {
            bulk::Barrier& full = s.full[turn.stage];
            int bytes = c == 0 ? min(COLUMNS, OC - tiles.column) * (int)sizeof(real) : 0;
            bulk::wait(s.empty[turn.stage], turn.parity ^ 1);
            bulk::expect(full, sizeof(s.x[0]) + sizeof(s.w[0]) + bytes);
            if (bytes > 0) bulk::copy_bytes(s.bias[tile % BIASES], bias + tiles.column, bytes, full);
            bulk::copy(s.x[turn.stage], maps, c, tiles.row, full);
            real* w = s.w[turn.stage] + first * STEP;
            if (CLUSTER > 1) bulk::copy_to_all(w, maps + 1, c, tiles.column + first, full);
            else bulk::copy(w, maps + 1, c, tiles.column + first, full);
        }
}

// A warp group computes 64 rows of each tile, and leaves them in shared memory, in bf16.
__device__ __forceinline__ void multiply(Shared& s, Tiles tiles, int group, int C) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int row = GROUP * group + 16 * warp + lane % 16;  // which this lane stores
    auto release = [&](int stage) {                   // one lane of a warp for each block of the cluster
        if (lane < CLUSTER) bulk::arrive_at(s.empty[stage], lane);
    };
    Turn turn;
    float d[32][4];
    for (int tile = 0; tiles.next(); tile++) {
        int before = 0;
        for (int c = 0; c < C; c += STEP, turn.next()) {
            bulk::wait(s.full[turn.stage], turn.parity);
            unsigned long long a = describe(s.x[turn.stage] + group * GROUP * STEP);
            unsigned long long b = describe(s.w[turn.stage]);
            bulk::products_start(d);
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) bulk::wgmma(d, a + 2 * k, b + 2 * k, c > 0 || k > 0);
            bulk::products_end();
            if (c > 0) {
                bulk::products_arrive<1>();
                release(before);
            }
            before = turn.stage;
        }
        bulk::products_arrive<0>();
        bulk::products_done(d);
        release(before);
        bulk::wait(s.drained[group], tile % 2 ^ 1);
#pragma unroll
        for (int n = 0; n < 32; n += 2) {
            unsigned x[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                Pack<2> b = load<2>(s.bias[tile % BIASES] + 8 * (n + i) + lane % 4 * 2);
                x[2 * i] = two_bf16(d[n + i][0] + b[0], d[n + i][1] + b[1]);
                x[2 * i + 1] = two_bf16(d[n + i][2] + b[0], d[n + i][3] + b[1]);
            }
            bulk::store_matrices(s.product + piece(row, n + lane / 16), x);
        }
        bulk::arrive(s.written[group]);
    }
}

// Three warps take what the two groups have left, while these are at the next tile. A warp has every third chunk of 8
// rows, counted through all tiles, and a lane has 8 columns.
struct Chunks {
    Tiles tiles;
    int chunk, parity = 1;  // which of its tile's, and the parity of the tile's phase

    __device__ Chunks(Tiles tiles) : tiles(tiles), chunk(ROWS / 8 + threadIdx.x / 32 - 4) {}
    __device__ bool next() {
        chunk += 3;
        if (chunk < ROWS / 8) return true;
        chunk -= ROWS / 8, parity ^= 1;
        return tiles.next();
    }
    __device__ int group() { return 8 * chunk / GROUP; }
    __device__ size_t place(int OC) { return (size_t)(tiles.row + 8 * chunk) * OC + column(); }
    __device__ int column() { return tiles.column + threadIdx.x % 32 * 8; }
    __device__ int rows(int N, int OC) { return column() < OC ? N - tiles.row - 8 * chunk : 0; }  // there, or more
};

__device__ __forceinline__ uint4 rounded(Pack<W> x) {
    return {two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]), two_bf16(x[6], x[7])};
}

__device__ __forceinline__ void finish(Shared& s, Tiles tiles, real* fch, real* gelu, int N, int OC) {
    int lane = threadIdx.x % 32;
    for (Chunks now(tiles); now.next();) {
        int rows = now.rows(N, OC);
        size_t start = now.place(OC);
        bulk::wait(s.written[now.group()], now.parity);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 bits = *reinterpret_cast<const uint4*>(s.product + piece(8 * now.chunk + i, lane));
            Pack<W> x = load<W>(reinterpret_cast<const real*>(&bits));
            for (int j = 0; j < W; j++) x[j] *= logistic(x[j]);
            if (i < rows) {
                *reinterpret_cast<uint4*>(fch + start + (size_t)i * OC) = bits;
                *reinterpret_cast<uint4*>(gelu + start + (size_t)i * OC) = rounded(x);
            }
        }
        __syncwarp();
        if (lane == 0) bulk::arrive(s.drained[now.group()]);
    }
}

__device__ __forceinline__ void run(real* fch, real* gelu, const real* bias, const TensorMap* maps, int N, int C,
                                    int OC) {
    DYNAMIC_SHARED(Shared, shared);
    Shared& s = *shared;
    int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bulk::start(s.full[i], 1);
            bulk::start(s.empty[i], 8 * CLUSTER);
        }
        for (int i = 0; i < 2; i++) {
            bulk::start(s.written[i], 128);
            bulk::start(s.drained[i], GROUP / 8);
        }
        bulk::barriers_fence();
        bulk::map_fence(maps);
        bulk::map_fence(maps + 1);
    }
    bulk::cluster_barrier();
    Tiles tiles(N, OC, bulk::rank_in_cluster());
    if (group > 0) multiply(s, tiles, group - 1, C);
    else if (threadIdx.x >= 32) finish(s, tiles, fch, gelu, N, OC);
    else if (threadIdx.x == 0) fetch(s, maps, bias, tiles, C, OC);
    bulk::cluster_barrier();  // a block's shared memory must be there as long as the other uses it
}
#endif

}  // namespace matmul_gelu

#if HAS_BULK && defined(__CUDACC__)
#define CLUSTERED __cluster_dims__(matmul_gelu::CLUSTER, 1, 1)
extern "C" __global__ void CLUSTERED matmul_gelu_forward3(real*, real*, const real*, const TensorMap*, int, int, int);
#endif

// Version 3 has threads of their own for each kind of work, and so all of it goes on at the same time. On each
// multiprocessor one block takes tiles of 128 x 256 elements, one after the other, as long as there are any:
//
//   a thread   starts copies: the copy engine brings 64 columns of both matrices' rows to one of three stages in shared
//              memory as soon as it is free. It needs no thread for each 16 bytes, and none waits for it.
//   8 warps    wait for a stage, have the tensor cores multiply it, and free the stage before it. At a tile's end they
//              leave the result in shared memory, rounded to bf16 as if it were stored, and begin the next.
//   3 warps    fetch it from there, compute GELU, and store. They may take as long as the tensor cores for a tile.
//
// They hand over by barriers in shared memory, which the copy engine knows too. With a tile of this size a
// multiprocessor asks L2 for 48 bytes a clock if its tensor cores are to be busy, and would get some 35 when all ask.
// So two of them are a cluster, whose tiles have the same columns of the result: each fetches half of what both need of
// the weights, for both. That leaves 32.
// It should take as long as the product alone. It does not. In us on an H200, both versions by turns:
//
//       N      C   version 2   version 3
//   32768    768         298         315
//    8192   1600         276         298
//    4096    768          46          48
//
// What stands in the way are the stores. At N = 32768 both results are 400 MB, which take 96 us at the rate of a copy.
// Without its stores version 3 takes 204 us, and with them 315: they do not overlap with the products. Without GELU it
// takes 259.
// Hopper GPUs run this, and the CPU device, which has their instructions in C++.
// maps: of inp, with 128 rows in a box, and of weight, with 256 for all blocks of a cluster. Items: blocks.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_gelu_forward3(
    real* __restrict__ fch, real* __restrict__ gelu, const real* __restrict__ bias,
    const TensorMap* __restrict__ maps, int N, int C, int OC) {
#if HAS_BULK
    matmul_gelu::run(fch, gelu, bias, maps, N, C, OC);
#endif
}
