// Products whose result is known to be symmetric, on Hopper in bf16, of many matrices of one shape:
// compiled behind kernels.cu, hopper.cuh and turns.cuh with -DBF16 -DHOPPER. symmetric.py launches
// them.
//   matmul_gram               out[i] = s^2 x[i] x[i]'
//   matmul_gram_of_columns    out[i] = s^2 x[i]' x[i]
//   matmul_symmetric          out[i] = s (factor * l[i] r[i] + share * add[i] + diagonal * I)
// l, r and add are symmetric, and l and r commute: they are the same matrix, or two polynomials of
// one. s is a number of each matrix, or 1. What is above the diagonal is computed. That is stored,
// and nobody reads what is below it, which saves a fifth of the bytes. Only what cuBLASLt
// multiplies next is stored on both sides.
//
// In tiles of 128 x 128, a matrix of 768 x 768 has 36 of them, and 21 on the diagonal or above it.
// A tile needs two panels: 128 rows of l (columns, for l' r) for its own rows, and of r for its
// columns. Warpgroups take turns as in gelu_products.cu. What they wait for is panels, so there are
// six stages in place of five, and one place for results, which they use by turns, too. Two
// neighbouring blocks, a cluster, have two tiles that share their columns' panel, of which each
// block loads half for both:
//
//         0 1 2 3 4 5
//      0  a b c d e f      the two rows of a band are the clusters' two blocks: b b, c c, ..
//      1    b c d e f      a is alone: two such tiles of any band and matrix make a cluster, and
//      2      g h i j      there is nothing to share
//      3        h i j
//
// On the diagonal a tile's panels are the same if l and r are, and one of them is enough. A panel of
// l or r turns at the diagonal: up to there its rows are the columns above it,
//
//         . . c . . .
//         . . c . . .      panel 2: boxes of columns, which wgmma can turn, and from the diagonal
//         . . c r r r      on boxes of rows
//
// What a tile costs, in clocks as in gelu_products.cu: for each 64 of what is summed 640 of shared
// memory, or 512 with one panel; and 512 for the result: 768 with add, and 1,024 and 1,280 if it is
// stored on both sides.

namespace turns::symmetric {

constexpr int STAGES = 6;  // one more than others have: the warpgroups share one place for results

// What is multiplied: rows of x, its columns, or l and r, of which only what is above the diagonal
// is read.
enum Kind { ROWS, COLUMNS, SYMMETRIC };

// side: of a result; length: what is summed over.
struct Sizes {
    int matrices, side, length;
    bool same;  // are l and r?
    bool backwards;  // whether the last matrix comes first
    __device__ int panels() const { return (side + HEIGHT - 1) / HEIGHT; }
    __device__ int bands() const { return panels() / 2; }
    __device__ int pairs() const { return bands() * (panels() - bands()); }  // of a matrix
    __device__ int alone() const { return panels() - bands(); }
    // pairs of tiles, one for each of two blocks
    __device__ int items() const { return matrices * pairs() + (matrices * alone() + 1) / 2; }
};

// The tile that this block has of a pair. row and column: in panels. Most pairs are two tiles of
// the same columns, one below the other. Each second tile of the diagonal has no such neighbour,
// and two of those, from anywhere, make a pair.
struct TileAt {
    int matrix, row, column;
    bool pair;  // whether the other block's tile has the same columns, and loads half of them
    bool rows, columns;  // panels that are loaded: both, unless they are the same
    bool counts;         // not if the last tile has no other beside it: then both blocks have it
    __device__ TileAt(int item, const Sizes& sizes) {
        int block = blockIdx.x % 2, pairs = sizes.pairs(), alone = sizes.alone();
        if (sizes.backwards) item = sizes.items() - 1 - item;
        pair = item < sizes.matrices * pairs;
        if (pair) {
            matrix = item / pairs;
            int k = item % pairs, band = 0, wide = sizes.panels() - 1;  // pairs of this band
            for (; k >= wide; wide -= 2, band++) k -= wide;
            row = 2 * band + block, column = 2 * band + 1 + k;
            counts = true;
        } else {
            int i = 2 * (item - sizes.matrices * pairs) + block;
            counts = i < sizes.matrices * alone;
            i = min(i, sizes.matrices * alone - 1);
            matrix = i / alone;
            row = column = 2 * (i % alone);
        }
        columns = pair || !sizes.same;
        rows = !pair || row != column || !sizes.same;
    }
};

// mbarriers.
struct Waits {
    unsigned long long full[STAGES],  // a step's panels have arrived
        empty[STAGES],                // both blocks have multiplied them
        my_turn[2],                   // a warpgroup may begin: the other one has all its stages
        add_there[2],                 // its tile of add has arrived
        result_read[2];               // its result has left: the other one may have the place
    // Until tile n of this block may come to where results are, or its add
    __device__ void wait_for_place(int n) {
        if (n > 0) mbarrier_wait(result_read[(n - 1) % 2], (n - 1) / 2 % 2);
    }
};

// Whether a panel's boxes of 64 of what is summed, from k on, are of columns.
template <Kind kind>
__device__ bool of_columns_at(int k, int panel) {
    return kind == COLUMNS || kind == SYMMETRIC && k < panel * HEIGHT;
}

// Two boxes of 64 of what is summed, from k on: a panel of 128 rows (or columns) from `first` on.
__device__ void load_panel(real* boxes, const TileMap& map, int first, int k, int matrix,
                           bool of_columns, bool for_both, unsigned long long& full) {
    int right = of_columns ? 64 : 0, down = 64 - right;  // from a box to the next
    int c = of_columns ? first : k, row = of_columns ? k : first;
    if (for_both) {
        load_for_both(boxes, map, c, row, matrix, right, down, full);
    } else {
        for (int box = 0; box < 2; box++)
            copy_box(boxes + box * BOX, &map, c + box * right, 0, row + box * down, matrix, full);
    }
}

// One thread loads panels of columns, step by step, and one those of rows.
template <Kind kind>
__device__ void load_panels(real* stages, Waits& waits, const TileMap& l, const TileMap& r,
                            const Sizes& sizes, bool of_columns) {
    unsigned step = 0;
    for (int item = blockIdx.x / 2; item < sizes.items(); item += gridDim.x / 2) {
        TileAt at(item, sizes);
        for (int k = 0; k < sizes.length; k += 64, step++) {
            real* stage = stages + step % STAGES * STAGE;
            auto& full = waits.full[step % STAGES];
            // At first all stages are empty: a new mbarrier counts the phase before as over.
            mbarrier_wait(waits.empty[step % STAGES], step / STAGES % 2 ^ 1);
            if (of_columns && at.columns)
                load_panel(stage + 2 * BOX, r, at.column * WIDTH, k, at.matrix,
                           of_columns_at<kind>(k, at.column), at.pair, full);
            if (!of_columns && at.rows)
                load_panel(stage, l, at.row * HEIGHT, k, at.matrix, of_columns_at<kind>(k, at.row),
                           false, full);
            mbarrier_arrive(full);
        }
    }
}

// Another thread loads a tile of add to where the result will be, once the last one was read.
__device__ void load_add(real* result, Waits& waits, const TileMap& add, const Sizes& sizes) {
    int n = 0;
    for (int item = blockIdx.x / 2; item < sizes.items(); item += gridDim.x / 2, n++) {
        TileAt at(item, sizes);
        waits.wait_for_place(n);
        for (int box = 0; box < 4; box++)
            copy_box(result + box * BOX, &add, at.column * WIDTH + box % 2 * 64, 0,
                     at.row * HEIGHT + box / 2 * 64, at.matrix, waits.add_there[n % 2]);
        mbarrier_arrive(waits.add_there[n % 2]);
    }
}

// How the product becomes the result. with_add: whether add is read; both_sides: whether it is also
// stored below the diagonal.
struct Terms {
    float factor, share, diagonal;
    bool with_add, both_sides;
};

// Scales the product x, adds the tile of add that is in `result` and the diagonal, and stores the
// tile: as it is, and for both sides, unless it is on the diagonal, transposed on the other one.
__device__ void finish(const TileMap& out, TileResult& x, const TileAt& at, real* result, int group,
                       const Terms& terms) {
    Pair y[4][4][4];
    // A lane has numbers of the diagonal in those 8 x 8 that lie on it: one of a Pair, or none
    int warp = first_row_of_warp() / 16, lane = forget(threadIdx.x) % 32;
    float diagonal[2];
    for (int j = 0; j < 2; j++)
        diagonal[j] = at.row == at.column && lane / 4 == lane % 4 * 2 + j ? terms.diagonal : 0.0f;
    RowsOfLane rows(result, first_row_of_warp());
#pragma unroll
    for (int box = 0; box < 4; box++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Pair more[4] = {};
            if (terms.with_add) load_matrices(more, rows(box, k));
            for (int i = 0; i < 4; i++) {
                const float* two = two_of(x, box, k, i);
                float a = terms.factor * two[0] + terms.share * low(more[i]);
                float b = terms.factor * two[1] + terms.share * high(more[i]);
                if (box % 3 == 0 && i % 3 == 0 && k == warp) a += diagonal[0], b += diagonal[1];
                y[box][k][i] = pair(a, b);
            }
            store_matrices(rows(box, k), y[box][k]);
        }
    if (at.counts) {
        store_tile(out, at.row * HEIGHT, at.column * WIDTH, result, group, at.matrix);
    } else {
        shared_written();
        warpgroup_sync(group);
    }
    if (terms.both_sides && at.row != at.column) {
        result_free(group);
        // A warp's 16 rows become 16 columns: where lane i has row i % 8 of 8 x 8 numbers
        real* turned = result + (lane / 16 * 8 + lane % 8) * 64 +
                       ((2 * warp + lane / 8 % 2) ^ lane % 8) * W;
#pragma unroll
        for (int box = 0; box < 4; box++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                store_matrices_transposed(
                    turned + (box % 2 * 2 + box / 2) * BOX + k * 16 * 64, y[box][k]);
        store_tile(out, at.column * WIDTH, at.row * HEIGHT, result, group, at.matrix);
    }
}

// Multiplies steps up to `end`, counted by i. `step` counts those of all tiles of the block.
template <bool b_of_rows, bool a_of_rows>
__device__ void multiply_steps(TileResult& x, const real* stages, Waits& waits, int a, int b, int& i,
                               int end, unsigned& step) {
    for (; i < end; i++, step++) {
        mbarrier_wait(waits.full[step % STAGES], step / STAGES % 2);
        const real* stage = stages + step % STAGES * STAGE;
        multiply_stage<b_of_rows, a_of_rows>(x, stage + a, stage + b, i > 0);
        wait_for_products<1>(x);  // so the stage before is empty
        if (i > 0) warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
    }
}

// scales: a number of each matrix, to the power of 2 unless the kind is SYMMETRIC; or null
template <Kind kind>
__device__ void symmetric_product(const TileMap& out, const TileMap& l, const TileMap& r,
                                  const TileMap& add, const float* scales, const Terms& given,
                                  const Sizes& sizes) {
    DYNAMIC_SHARED(real, stages);
    real* result = stages + STAGES * STAGE;
    __shared__ Waits waits;
    if (threadIdx.x == 0) {
        for (auto& mbarrier : waits.full) mbarrier_start(mbarrier, 2);  // rows, columns
        for (auto& mbarrier : waits.empty) mbarrier_start(mbarrier, 4 * CLUSTER);  // warps
        for (int i = 0; i < 2; i++) {
            mbarrier_start(waits.add_there[i], 1), mbarrier_start(waits.result_read[i], 4);
            mbarrier_start(waits.my_turn[i], 4);
        }
    }
    cluster_sync();

    if (threadIdx.x >= WORKERS) {
        keep_registers<40>();
        if (threadIdx.x == WORKERS) load_panels<kind>(stages, waits, l, r, sizes, true);
        if (threadIdx.x == WORKERS + 32) load_panels<kind>(stages, waits, l, r, sizes, false);
        if (given.with_add && threadIdx.x == WORKERS + 64) load_add(result, waits, add, sizes);
    } else {
        take_registers<232>();
        int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
        int steps = (sizes.length + 63) / 64, done = 0;  // tiles
        unsigned step = group * steps;
        for (int item = blockIdx.x / 2 + group * (gridDim.x / 2); item < sizes.items();
             item += gridDim.x, step += steps, done++) {
            TileAt at(item, sizes);
            int a = at.rows ? 0 : 2 * BOX, b = at.columns ? 2 * BOX : 0;  // where its panels are
            TileResult x;
            mbarrier_wait(waits.my_turn[group], (done + (group == 0)) % 2);  // 0 is first
            int i = 0;
            if (kind == SYMMETRIC) {  // both panels before their diagonals, one, none
                multiply_steps<true, true>(
                    x, stages, waits, a, b, i, at.row * (HEIGHT / 64), step);
                multiply_steps<true, false>(
                    x, stages, waits, a, b, i, at.column * (WIDTH / 64), step);
            }
            multiply_steps<kind == COLUMNS, kind == COLUMNS>(
                x, stages, waits, a, b, i, steps, step);
            warp_arrives(waits.my_turn[group ^ 1]);
            wait_for_products<0>(x);
            warp_arrives_at_all(waits.empty[(step - 1) % STAGES]);
            Terms terms = given;
            if (scales) {
                float s = scales[at.matrix];
                if (kind != SYMMETRIC) s *= s;
                terms.factor *= s, terms.share *= s, terms.diagonal *= s;
            }
            if (terms.with_add)
                mbarrier_wait(waits.add_there[group], done % 2);
            else
                waits.wait_for_place(2 * done + group);
            finish(out, x, at, result, group, terms);
            result_free(group);
            warp_arrives(waits.result_read[group]);
        }
        if (threadIdx.x % 128 == 0) stores_arrive();
    }
    cluster_sync();  // the other block may still arrive at mbarriers of this one
}

}  // namespace turns::symmetric

#ifdef __CUDACC__  // Clusters of two blocks. read_kernels does not know this word in a definition
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_gram(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, const float* __restrict__, int,
    int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_gram_of_columns(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, const float* __restrict__, int,
    int, int, int);
extern "C" __global__ void __cluster_dims__(2, 1, 1) matmul_symmetric(
    const __grid_constant__ TileMap, const __grid_constant__ TileMap, const __grid_constant__ TileMap,
    const __grid_constant__ TileMap, const float* __restrict__, float, float, float, int, int, int,
    int, int);
#endif

// out (matrices,side,side), on and above the diagonal, = s^2 x x', of x (side,length). s: scales
// (matrices), or 1 if it is null. backwards: whether the last matrix is first. Items: blocks, an
// even number of them.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_gram(
    const __grid_constant__ TileMap out, const __grid_constant__ TileMap x,
    const float* __restrict__ scales, int backwards, int matrices, int side, int length) {
    turns::symmetric::symmetric_product<turns::symmetric::ROWS>(
        out, x, x, out, scales, {1.0f, 0.0f, 0.0f, false, false},
        {matrices, side, length, true, backwards != 0});
}

// The same with x' x, of x (length,side).
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_gram_of_columns(
    const __grid_constant__ TileMap out, const __grid_constant__ TileMap x,
    const float* __restrict__ scales, int backwards, int matrices, int side, int length) {
    turns::symmetric::symmetric_product<turns::symmetric::COLUMNS>(
        out, x, x, out, scales, {1.0f, 0.0f, 0.0f, false, false},
        {matrices, side, length, true, backwards != 0});
}

// out = s (factor * l r + share * add + diagonal * I), all of them (matrices,side,side), of which
// what is on and above the diagonal is read, and stored unless both_sides is set. same: whether l
// and r are one array. add is not out; without with_add it is not read. s and items: as above.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(384, 1) matmul_symmetric(
    const __grid_constant__ TileMap out, const __grid_constant__ TileMap l,
    const __grid_constant__ TileMap r, const __grid_constant__ TileMap add,
    const float* __restrict__ scales, float factor, float share, float diagonal, int with_add,
    int same, int both_sides, int matrices, int side) {
    turns::symmetric::symmetric_product<turns::symmetric::SYMMETRIC>(
        out, l, r, add, scales, {factor, share, diagonal, with_add != 0, both_sides != 0},
        {matrices, side, side, same != 0, false});
}
