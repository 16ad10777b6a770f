// What several of the lab's kernels share, after kernels.cu.

namespace lab {

// Counts this block, and says whether it is the last of `all`. The last one may read what the others have stored before
// they were counted, and leaves 0 in the counter for the next launch. Every thread of the block must call it.
__device__ __forceinline__ bool last_of(int* counter, int all) {
    __shared__ bool last;
    __threadfence();  // what this thread has stored is there before its block is counted
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == all - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

}  // namespace lab

// A product of tiles in shared memory, by mma.sync.
namespace tiles {

constexpr int STEP = 128 / sizeof(real);  // the summed index goes by steps of 128 bytes
constexpr int LD = STEP + 8;              // a tile's row: neighbours in a column are in different banks

// Rows first..first+rows-1 of a matrix, from column c on, into a tile (rows, LD), 16 bytes at a time that are on their
// way when this returns; zeros beyond the matrix's rows and columns. stride is from row to row.
template <int rows>
__device__ __forceinline__ void load(real* tile, const real* matrix, size_t stride, int first, int end, int c,
                                     int columns) {
    for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
        int row = i / 8, k = i % 8 * W;
        bool there = first + row < end && c + k < columns;
        copy16(tile + row * LD + k, there ? matrix + (first + row) * stride + c + k : matrix, there);
    }
}

// A from rows r..r+15 and columns c..c+15 of a tile.
template <int LD>
__device__ __forceinline__ void left(Pair (&a)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices(a, tile + (r + lane % 16) * LD + c + lane / 16 * 8);
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = *reinterpret_cast<const Pair*>(tile + (r + lane / 4 + i % 2 * 8) * LD + c + 2 * (lane % 4) + i / 2 * 8);
#endif
}

// A from the transpose of a tile: its 16 columns are rows r..r+15, and its 16 rows are columns c..c+15.
template <int LD>
__device__ __forceinline__ void left_transposed(Pair (&a)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices_transposed(a, tile + (r + lane % 8 + lane / 16 * 8) * LD + c + lane / 8 % 2 * 8);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const real* x = tile + (r + 2 * (lane % 4) + i / 2 * 8) * LD + c + lane / 4 + i % 2 * 8;
        a[i] = {x[0], x[LD]};
    }
#endif
}

// Two B side by side, whose 16 columns are rows r..r+15 of a tile: for a product with its transpose.
template <int LD>
__device__ __forceinline__ void right_transposed(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices(b, tile + (r + lane % 8 + lane / 16 * 8) * LD + c + lane / 8 % 2 * 8);
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        b[i] = *reinterpret_cast<const Pair*>(tile + (r + lane / 4 + i / 2 * 8) * LD + c + 2 * (lane % 4) + i % 2 * 8);
#endif
}

// Two B side by side, whose 16 columns are columns c..c+15 of a tile's rows r..r+15: for a product with the tile
// itself.
template <int LD>
__device__ __forceinline__ void right(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices_transposed(b, tile + (r + lane % 16) * LD + c + lane / 16 * 8);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const real* x = tile + (r + 2 * (lane % 4) + i % 2 * 8) * LD + c + lane / 4 + i / 2 * 8;
        b[i] = {x[0], x[LD]};
    }
#endif
}

// d (16 M, 8 N) += rows r.. of one tile times the transpose of rows s.. of another, over a whole step.
template <int M, int N>
__device__ __forceinline__ void multiply_transposed(float (&d)[M][N][4], const real* one, int r, const real* two,
                                                    int s) {
#pragma unroll
    for (int c = 0; c < STEP; c += 16) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) left<LD>(a[m], one, r + 16 * m, c);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            right_transposed<LD>(b, two, s + 16 * n, c);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
}

// The rows of a head, first..first+rows-1 of T, as a tile (rows, HEAD_LD). It has zeros beyond T. stride is from row to
// row. HS is a multiple of 16 here.
constexpr int HEAD_LD = HS + 8;
template <int rows>
__device__ __forceinline__ void load_head(real* tile, const real* head, size_t stride, int first, int T) {
    for (int i = threadIdx.x; i < rows * (HS / W); i += blockDim.x) {
        int row = i / (HS / W), c = i % (HS / W) * W;
        bool there = first + row < T;
        copy16(tile + row * HEAD_LD + c, there ? head + (first + row) * stride + c : head, there);
    }
}

}  // namespace tiles
