// The two products of Llama's MLP that meet SwiGLU, on Hopper in bf16, with SwiGLU done while the
// tensor cores work: compiled behind kernels.cu, hopper.cuh and turns.cuh with -DBF16 -DHOPPER.
// swiglu_products.py launches them.
//   matmul_swiglu    fch (N,2H) = inp (N,C) @ w (2H,C)', and fch_swiglu (N,H) = up * silu(gate),
//                    where a row of fch is up, then gate, and silu(x) = x / (1 + e^-x)
//   matmul_dswiglu   dfch (N,2H), the gradients of up and gate, from dout (N,C), w (C,H) and fch.
//                    dfch may be fch's memory
//
// gelu_products.cu says how two warpgroups take turns. What differs here:
//   - SwiGLU needs both halves of a row. So the left half of a forward tile of 128 x 128 is 64
//     columns of up, and the right half the same columns of gate: a thread that has a number of up
//     in its registers has that of gate, too.
//   - A backward tile is 128 columns of the product, which is neither stored nor rounded. There is
//     room for up and gate of only 64 columns of it. So a warpgroup finishes its left half, and
//     then the right half, for which TMA loads up and gate when it has stored the left one's.
//   - w of Llama 3.2 1B and larger models does not stay in L2 from one row of tiles to the next.
//     So tiles go down TALL rows of tiles before they go on to the right: w is read from memory
//     once for each TALL of them.

namespace turns::swiglu_products {

constexpr int TALL = 16;
static_assert(2 * (STAGES * STAGE + 2 * TILE_SIZE) == 229376, "as swiglu_products.py says");

// 1/(1 + e^-x). Far to the left e^-x is infinity, and this its limit 0.
__device__ float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-LOG2_E * x)); }

// width: the columns of up of a tile. across is even: neighbours have the same rows.
struct Sizes {
    int N, H, C, width;
    __device__ int down() const { return (N + HEIGHT - 1) / HEIGHT; }
    __device__ int across() const { return (H + 2 * width - 1) / (2 * width) * 2; }
    __device__ int tiles() const { return down() * across(); }
};

// Where the rows and columns of tile number `tile` begin.
struct TileAt {
    int row, column;
    __device__ TileAt(int tile, const Sizes& sizes) {
        int of_band = TALL * sizes.across(), band = tile / of_band, inside = tile % of_band;
        int rows = min(TALL, sizes.down() - band * TALL), pair = inside / 2;
        row = (band * TALL + pair % rows) * HEIGHT;
        column = (pair / rows * 2 + inside % 2) * sizes.width;
    }
};

// mbarriers.
struct Waits {
    unsigned long long full[STAGES],  // a step's operands have arrived
        empty[STAGES],                // the blocks of the cluster have multiplied them
        my_turn[2],                   // a warpgroup may begin: the other one has all its stages
        fch_there[2],                 // up and gate of half a tile have arrived
        result_read[2];               // TMA may load the next ones to the place of its result
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
            for (int box = 0; box < 2; box++) {
                int column = at.column + (backward ? 64 : sizes.H) * box;
                copy_box(stage + (2 + box) * BOX, &w, backward ? column : c, 0,
                         backward ? c : column, 0, full);
            }
            mbarrier_arrive(full);
        }
    }
}

// Another thread loads up and gate to where their gradients will be, as soon as the last ones there
// were read: of a tile's left half, then of its right half.
__device__ void load_fch(real* results, Waits& waits, const Tiles& fch, const Sizes& sizes) {
    int n = 0;
    for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x, n++) {
        TileAt at(tile, sizes);
        for (int side = 0; side < 2; side++) {
            mbarrier_wait(waits.result_read[n % 2], side ^ 1);
            for (int box = 0; box < 4; box++)
                copy_box(results + n % 2 * TILE_SIZE + box * BOX, &fch,
                         at.column + 64 * side + box % 2 * sizes.H, 0, at.row + box / 2 * 64, 0,
                         waits.fch_there[n % 2]);
            mbarrier_arrive(waits.fch_there[n % 2]);
        }
    }
}

// When all threads of the warpgroup have left their part of a result, one has TMA store it: its
// left boxes are 64 columns of up, and its right ones the same of gate; or, unless `gate`, its
// first two boxes are columns of a matrix without gate. The columns may be beyond H.
__device__ void store_columns(const Tiles& to, int row, int column, int H, bool gate,
                              const real* result, int group) {
    shared_written();
    warpgroup_sync(group);
    if (threadIdx.x % 128 == 0 && column < H) {
        for (int box = 0; box < (gate ? 4 : 2); box++)
            store_box(&to, column + (gate ? box % 2 * H : 0),
                      row + (gate ? box / 2 : box) * 64, result + box * BOX);
        stores_commit();
    }
    __syncwarp();
}

// fch and its SwiGLU, from the product x. SwiGLU is that of fch as it is stored, rounded.
__device__ void finish_forward(const Tiles& fch, const Tiles& fch_swiglu, TileResult& x,
                               const TileAt& at, real* result, int H, int group) {
    Pair y[4][4][4];  // of each box
    result_free(group);
    RowsOfLane rows(result, first_row_of_warp());
#pragma unroll
    for (int box = 0; box < 4; box++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, box, k, i);
                y[box][k][i] = pair(two[0], two[1]);
            }
            store_matrices(rows(box, k), y[box][k]);
        }
    }
    store_columns(fch, at.row, at.column, H, true, result, group);
#pragma unroll
    for (int half = 0; half < 2; half++) {  // while TMA reads fch
        // Without a branch the compiler would begin with the powers of all boxes, and spill.
        if (at.column >= H) continue;
#pragma unroll
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 4; i++) {
                Pair &up = y[2 * half][k][i], gate = y[2 * half + 1][k][i];
                float left = low(gate), right = high(gate);
                up = pair(low(up) * left * sigmoid(left), high(up) * right * sigmoid(right));
            }
    }
    result_free(group);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < 4; k++) store_matrices(rows(half, k), y[2 * half][k]);
    store_columns(fch_swiglu, at.row, at.column, H, false, result, group);
}

// The gradients of one number of up and of gate, given d, that of up * silu(gate):
//   dup = d * gate * g      dgate = d * up * (g + gate * g * (1 - g)), with g = sigmoid(gate)
__device__ void swiglu_gradient(float d, float up, float gate, float& dup, float& dgate) {
    float g = sigmoid(gate), gg = gate * g;
    dup = d * gg;
    dgate = d * up * (g + (gg - gg * g));
}

// dfch of half a tile, from the product x and fch. A warp replaces its part of up and gate in
// shared memory by their gradients. These may be overwritten once all four warps have returned: the
// first of them waits until TMA has read them.
template <int side>
__device__ void finish_backward(const Tiles& dfch, TileResult& x, const TileAt& at, real* result,
                                int H, int group) {
    RowsOfLane rows(result, first_row_of_warp());
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Pair up[4], gate[4];
            load_matrices(up, rows(2 * half, k));
            load_matrices(gate, rows(2 * half + 1, k));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, 2 * half + side, k, i);
                float dup[2], dgate[2];
                swiglu_gradient(two[0], low(up[i]), low(gate[i]), dup[0], dgate[0]);
                swiglu_gradient(two[1], high(up[i]), high(gate[i]), dup[1], dgate[1]);
                up[i] = pair(dup[0], dup[1]);
                gate[i] = pair(dgate[0], dgate[1]);
            }
            store_matrices(rows(2 * half, k), up);
            store_matrices(rows(2 * half + 1, k), gate);
        }
    store_columns(dfch, at.row, at.column + 64 * side, H, true, result, group);
    if (threadIdx.x % 128 == 0) stores_read();
    shared_written();
}

// backward: matmul_dswiglu, else matmul_swiglu.
template <bool backward>
__device__ void product_with_swiglu(const Tiles& out, const Tiles& out_swiglu, const Tiles& inp,
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
                finish_forward(out, out_swiglu, x, at, result, sizes.H, group);
            } else {
                mbarrier_wait(waits.fch_there[group], 0);
                finish_backward<0>(out, x, at, result, sizes.H, group);
                warp_arrives(waits.result_read[group]);
                mbarrier_wait(waits.fch_there[group], 1);
                finish_backward<1>(out, x, at, result, sizes.H, group);
                warp_arrives(waits.result_read[group]);
            }
        }
        if (threadIdx.x % 128 == 0) stores_arrive();
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace turns::swiglu_products

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_swiglu(
    const __grid_constant__ Tiles, const __grid_constant__ Tiles, const __grid_constant__ Tiles,
    const __grid_constant__ Tiles, int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_dswiglu(
    const __grid_constant__ Tiles, const __grid_constant__ Tiles, const __grid_constant__ Tiles,
    const __grid_constant__ Tiles, int, int, int);
#endif

// fch (N,2H) = inp (N,C) @ w (2H,C)', and fch_swiglu (N,H) = up * silu(gate). C and H are multiples
// of 64. Items: blocks, an even number of them.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_swiglu(
    const __grid_constant__ Tiles fch, const __grid_constant__ Tiles fch_swiglu,
    const __grid_constant__ Tiles inp, const __grid_constant__ Tiles w, int N, int H, int C) {
    turns::swiglu_products::product_with_swiglu<false>(
        fch, fch_swiglu, inp, w, inp, {N, H, C, turns::WIDTH / 2});
}

// dfch (N,2H), the gradients of up and gate, from dout (N,C), w (C,H) and fch (N,2H). C and H as
// above. Items: blocks, an even number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_dswiglu(
    const __grid_constant__ Tiles dfch, const __grid_constant__ Tiles dout,
    const __grid_constant__ Tiles w, const __grid_constant__ Tiles fch, int N, int H, int C) {
    turns::swiglu_products::product_with_swiglu<true>(
        dfch, dfch, dout, w, fch, {N, H, C, turns::WIDTH});
}
