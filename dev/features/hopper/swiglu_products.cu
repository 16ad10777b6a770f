// The two products of Llama's MLP that meet SwiGLU, on Hopper in bf16, with SwiGLU done while the
// tensor cores work: compiled behind kernels.cu, hopper.cuh and turns.cuh with -DBF16 -DHOPPER.
// swiglu_products.py launches them.
//   matmul_swiglu    fch (N,2H) = inp (N,C) @ w (2H,C)', and fch_swiglu (N,H) = up * silu(gate),
//                    where a row of fch is up, then gate, and silu(x) = x / (1 + e^-x)
//   matmul_dswiglu   dfch (N,2H), the gradients of up and gate, from dout (N,C), w (C,H) and fch.
//                    dfch may be fch's memory
//
// gelu_products.cu says how two warpgroups take turns with tiles of 128 x 192, how a cluster's two
// blocks, which here have the same columns, share w, and what a tile costs. What differs here:
//   - SwiGLU needs both halves of a row. So a forward tile is 96 columns of up, and the same 96 of
//     gate. As there, TMA brings every fourth row of w first: a lane has 8 neighbouring columns of
//     up, and the same 8 of gate, and stores each 16 bytes with one instruction.
//   - A backward tile is 192 columns of the product, which is neither stored nor rounded. TMA
//     brings up and gate in pairs of boxes, which warps replace by their gradients, and stores
//     them.
//   - w of Llama 3.2 1B and larger models does not stay in L2 from one row of tiles to the next.
//     So tiles go down TALL pairs of rows of tiles before they go on to the right: w is read from
//     memory once for each TALL of them.

namespace turns::swiglu_products {

constexpr int LONG = 192, STAGE = (HEIGHT + LONG) * 64;
constexpr int TALL = 8;
template <bool backward>
constexpr int STAGES = backward ? 4 : 5;
constexpr int RING = 4;  // pairs of boxes of up and gate, which become their gradients
using TileResult = Result<2 * LONG>;  // x[0][n]: rows 0..63, then 64..127, of the product
static_assert(2 * (4 * STAGE + 2 * RING * BOX) == 229376 && STAGE <= 2 * RING * BOX,
              "as swiglu_products.py says");

// 1/(1 + e^-x). Far to the left e^-x is infinity, and this its limit 0.
__device__ float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-LOG2_E * x)); }

// Items are pairs of tiles, one below the other, for a cluster's two blocks.
template <bool backward>
struct Sizes {
    static constexpr int RIGHT = backward ? LONG : LONG / 2;  // the columns of up of a tile
    int N, H, C;
    __device__ int down() const { return (N + 2 * HEIGHT - 1) / (2 * HEIGHT); }
    __device__ int across() const { return (H + RIGHT - 1) / RIGHT; }
    __device__ int items() const { return down() * across(); }
};

// Where the rows and columns of this block's tile begin.
struct TileAt {
    int row, column;
    template <bool backward>
    __device__ TileAt(int item, const Sizes<backward>& sizes) {
        int of_band = TALL * sizes.across(), band = item / of_band, inside = item % of_band;
        int rows = min(TALL, sizes.down() - band * TALL);
        row = ((band * TALL + inside % rows) * 2 + blockIdx.x % 2) * HEIGHT;
        column = inside / rows * sizes.RIGHT;
    }
};

template <bool backward>
using Waits = FusedWaits<STAGES<backward>, RING>;  // a box of fch: of up and the same of gate

// One thread loads what is multiplied, step by step: 64 of C of a tile's rows and columns.
template <bool backward>
__device__ void load_operands(real* stages, Waits<backward>& waits, const TileMap& inp,
                              const TileMap& w, const Sizes<backward>& sizes) {
    constexpr int STAGES = swiglu_products::STAGES<backward>, EIGHTH = LONG / 8;
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
            for (unsigned i = 0; i < (backward ? 3 : 8); i++)
                if (backward)
                    share_box(b + i * BOX, &w, at.column + 64 * i, 0, c, 0, full,
                              (i + step) % 2 == own);
                else  // row i % 4 of each four, of up, then of gate
                    share_box<EIGHTH>(b + i * EIGHTH * 64, &w, c, i % 4,
                                      (at.column + i / 4 * sizes.H) / 4, 0, full, i % 2 == own);
            for (int i = 0; i < 2; i++) copy_box(a + i * BOX, &inp, c, 0, at.row + 64 * i, 0, full);
            mbarrier_arrive(full);
        }
    }
}

// Another thread has each pair of boxes of gradients stored, and up and gate loaded to its place: a
// box is 64 rows and 64 columns, and a tile has three pairs side by side, then three below.
// Columns beyond H would be others' gate.
__device__ void exchange_boxes(real* ring, Waits<true>& waits, const TileMap& dfch, const TileMap& fch,
                               const Sizes<true>& sizes) {
    int clusters = gridDim.x / 2, first = blockIdx.x / 2;
    int pairs = (sizes.items() - first + clusters - 1) / clusters * 6;  // of this block
#pragma unroll 1
    for (int i = 0; i < pairs + RING; i++) {
        real* boxes = ring + i % RING * 2 * BOX;
        if (i >= RING) {
            int done = i - RING;
            TileAt at(first + done / 6 * clusters, sizes);
            int row = at.row + done % 6 / 3 * 64, column = at.column + done % 3 * 64;
            mbarrier_wait(waits.dfch_there[i % RING], done / RING % 2);
            if (column < sizes.H) {
                store_box(&dfch, column, row, boxes);
                store_box(&dfch, column + sizes.H, row, boxes + BOX);
                stores_commit();
                stores_read();
            }
        }
        if (i < pairs) {
            TileAt at(first + i / 6 * clusters, sizes);
            int row = at.row + i % 6 / 3 * 64, column = at.column + i % 3 * 64;
            auto& there = waits.fch_there[i / 6 % 2][i % 6];
            if (column < sizes.H) {
                copy_box(boxes, &fch, column, 0, row, 0, there);
                copy_box(boxes + BOX, &fch, column + sizes.H, 0, row, 0, there);
            }
            mbarrier_arrive(there);
        }
    }
    stores_arrive();
}

// fch and its SwiGLU, from the product x. SwiGLU is that of fch as it is stored, rounded. Column
// 24 n + s of the product is column 4 s + n of up in the tile, and column 96 + 24 n + s of gate.
__device__ void finish_forward(real* fch, real* fch_swiglu, const TileResult& x, unsigned item,
                               const Sizes<false>& sizes) {
    TileAt at(forget(item), sizes);
    int lane = forget(threadIdx.x) % 32;
    int row = at.row + first_row_of_warp() + lane / 4, column = at.column + lane % 4 * 8;
#pragma unroll
    for (int part = 0; part < 3; part++, column += 32) {
        if (at.column + 32 * part >= sizes.H) break;
#pragma unroll
        for (int eight = 0; eight < 4; eight++) {  // rows 0..7, 8..15, 64..71 and 72..79
            int r = row + eight / 2 * 64 + eight % 2 * 8;
            if (r >= sizes.N) continue;
            Stored<4, Pair> two[2];  // up and gate
            for (int i = 0; i < 8; i++) {
                const float (*four)[4] = x.x[0] + eight / 2 * LONG / 8 + i / 4 * LONG / 16 + part;
                int n = i % 2 * 2 * 3, j = eight % 2 * 2 + i % 4 / 2;
                two[i / 4].x[i % 4] = pair(four[n][j], four[n + 3][j]);
            }
            real* to = fch + (size_t)r * 2 * sizes.H + column;
            *reinterpret_cast<Stored<4, Pair>*>(to) = two[0];
            *reinterpret_cast<Stored<4, Pair>*>(to + sizes.H) = two[1];
            for (int i = 0; i < 4; i++) {
                Pair &up = two[0].x[i], gate = two[1].x[i];
                float left = low(gate), right = high(gate);
                up = pair(low(up) * left * sigmoid(left), high(up) * right * sigmoid(right));
            }
            *reinterpret_cast<Stored<4, Pair>*>(fch_swiglu + (size_t)r * sizes.H + column) = two[0];
        }
    }
}

// The gradients of one number of up and of gate, given d, that of up * silu(gate):
//   dup = d * gate * g      dgate = d * up * (g + gate * g * (1 - g)), with g = sigmoid(gate)
__device__ void swiglu_gradient(float d, float up, float gate, float& dup, float& dgate) {
    float g = sigmoid(gate), gg = gate * g;
    dup = d * gg;
    dgate = d * up * (g + (gg - gg * g));
}

// dfch, from fch and the product x. A warp replaces its 16 rows of a box of up, and of the same box
// of gate, by their gradients. `number`: of the tile's first pair of boxes.
__device__ void finish_backward(const TileResult& x, real* ring, unsigned number,
                                Waits<true>& waits) {
    unsigned lane = forget(threadIdx.x) % 32;
    int row = (first_row_of_warp() + lane % 16) * 64, half = lane / 16, turn = lane % 8;
#pragma unroll
    for (int b = 0; b < 6; b++, number++) {
        unsigned slot = number % RING;
        mbarrier_wait(waits.fch_there[number / 6 % 2][b], number / 12 % 2);
        real* rows = ring + slot * 2 * BOX + row;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            real* place = rows + ((2 * k + half) ^ turn) * W;  // swizzled by 128 bytes
            Pair up[4], gate[4];
            load_matrices(up, place);
            load_matrices(gate, place + BOX);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, b, k, i);
                float dup[2], dgate[2];
                swiglu_gradient(two[0], low(up[i]), low(gate[i]), dup[0], dgate[0]);
                swiglu_gradient(two[1], high(up[i]), high(gate[i]), dup[1], dgate[1]);
                up[i] = pair(dup[0], dup[1]);
                gate[i] = pair(dgate[0], dgate[1]);
            }
            store_matrices(place, up);
            store_matrices(place + BOX, gate);
        }
        shared_written();
        warp_arrives(waits.dfch_there[slot]);
    }
}

// backward: matmul_dswiglu, else matmul_swiglu, which stores to out and out_swiglu.
template <bool backward>
__device__ void product_with_swiglu(const TileMap& dfch, real* out, real* out_swiglu,
                                    const TileMap& inp, const TileMap& w, const TileMap& fch,
                                    Sizes<backward> sizes) {
    constexpr int STAGES = swiglu_products::STAGES<backward>;
    DYNAMIC_SHARED(real, stages);
    real* ring = stages + STAGES * STAGE;
    __shared__ Waits<backward> waits;
    if (threadIdx.x == 0) waits.start();
    cluster_sync();

    if (threadIdx.x >= WORKERS) {
        keep_registers<40>();
        if (threadIdx.x == WORKERS) load_operands(stages, waits, inp, w, sizes);
        if constexpr (backward)
            if (threadIdx.x == WORKERS + 32) exchange_boxes(ring, waits, dfch, fch, sizes);
    } else {
        take_registers<232>();
        int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), steps = sizes.C / 64;
        int first = blockIdx.x / 2, clusters = gridDim.x / 2;
        for (int n = group; first + n * clusters < sizes.items(); n += 2) {  // tiles of this block
            TileResult x;
            multiply_in_turn<STAGES, STAGE, backward, false>(x, stages, waits, n, steps, group);
            if constexpr (backward) finish_backward(x, ring, 6 * n, waits);
            else finish_forward(out, out_swiglu, x, first + n * clusters, sizes);
        }
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace turns::swiglu_products

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_swiglu(
    real*, real*, const __grid_constant__ TileMap, const __grid_constant__ TileMap, int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_dswiglu(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, const __grid_constant__ TileMap,
    const __grid_constant__ TileMap, int, int, int);
#endif

// fch (N,2H) = inp (N,C) @ w (2H,C)', and fch_swiglu (N,H) = up * silu(gate). C and H are multiples
// of 64. Items: blocks, an even number of them.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_swiglu(
    real* __restrict__ fch, real* __restrict__ fch_swiglu, const __grid_constant__ TileMap inp,
    const __grid_constant__ TileMap w, int N, int H, int C) {
    turns::swiglu_products::product_with_swiglu<false>(
        inp, fch, fch_swiglu, inp, w, inp, {N, H, C});
}

// dfch (N,2H), the gradients of up and gate, from dout (N,C), w (C,H) and fch (N,2H). C and H as
// above. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_dswiglu(
    const __grid_constant__ TileMap dfch, const __grid_constant__ TileMap dout,
    const __grid_constant__ TileMap w, const __grid_constant__ TileMap fch, int N, int H, int C) {
    turns::swiglu_products::product_with_swiglu<true>(
        dfch, nullptr, nullptr, dout, w, fch, {N, H, C});
}
