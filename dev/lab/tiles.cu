// Code that several kernels of the lab share, compiled after kernels.cu.

namespace lab {

// Counts this block, and returns whether it is the last of `all`. The last block may read what the others stored before
// they were counted, and leaves 0 in the counter for the next launch. Every thread of the block must call it.
__device__ __forceinline__ bool last_of(int* counter, int all) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what the block has stored is there before it is counted
        last = atomicAdd(counter, 1) == all - 1;
        if (last) *counter = 0;
        __threadfence();  // and what others have stored is read after that
    }
    __syncthreads();
    return last;
}

}  // namespace lab

// Products of tiles in shared memory, by mma.sync and by wgmma.
namespace tiles {

constexpr int STEP = 128 / sizeof(real);  // the summed index goes by steps of 128 bytes
constexpr int LD = STEP + 8;              // a tile's row: neighbours in a column are in different banks
// The same for a wide tile: rows of 128 numbers, one for each summed index. Only some files have wide tiles.
[[maybe_unused]] constexpr int WIDE_LD = 128 + W;

// Rows first..first+rows-1 of a matrix, from column c on, into a tile (rows, LD), by asynchronous copies of 16 bytes;
// zeros beyond the matrix. stride is from row to row.
template <int rows, int width = STEP, int ld = LD>
__device__ __forceinline__ void load(real* tile, const real* matrix, size_t stride, int first, int end, int c,
                                     int columns) {
    constexpr int packs = width / W;
    for (int i = threadIdx.x; i < rows * packs; i += blockDim.x) {
        int row = i / packs, k = i % packs * W;
        bool there = first + row < end && c + k < columns;
        copy16(tile + row * ld + k, there ? matrix + (first + row) * stride + c + k : matrix, there);
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

// d (16 M, 8 N) += columns r.. of a wide tile, or rows r.. of one that is not wide, times columns s.. of a wide tile,
// over a whole step.
template <bool left_wide, int M, int N>
__device__ __forceinline__ void multiply(float (&d)[M][N][4], const real* one, int r, const real* two, int s) {
#pragma unroll
    for (int c = 0; c < STEP; c += 16) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
            if (left_wide) left_transposed<WIDE_LD>(a[m], one, c, r + 16 * m);
            else left<LD>(a[m], one, r + 16 * m, c);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            right<WIDE_LD>(b, two, c, s + 16 * n);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
}

// Hopper's tensor cores, for bf16 and TF32, where there are any; kernels.cu says how they take their matrices. Here
// four warps start D (64, 128) += A (64, 32 bytes) B.
#if defined(__CUDACC__) ? defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(FP32) : HOPPER
#define HAS_WGMMA 1

// Where a number lies in a tile whose rows are 128 bytes, in the 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int c) { return row * STEP + (c ^ row % 8 * W); }

// As load(), for such a tile. A row beyond the matrix repeats its last row; its results are not stored.
template <int rows>
__device__ __forceinline__ void load_swizzled(real* tile, const real* matrix, int C, int first, int end, int c) {
    int row = threadIdx.x / 8, k = threadIdx.x % 8 * W;  // a block of 256 threads copies 32 rows at a time
#pragma unroll
    for (int i = 0; i < rows; i += 32)
        copy16(tile + swizzled(row + i, k), matrix + (size_t)min(first + row + i, end - 1) * C + c + k, c + k < C);
}

#ifdef __CUDACC__
// wgmma's description of a tile, as describe() of kernels.cu for rows of 128 bytes. Its place counts 16 bytes.
__device__ __forceinline__ unsigned long long describe(const real* tile) {
    return (unsigned)__cvta_generic_to_shared(tile) / 16 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#ifdef BF16
#define WGMMA_SHAPE "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
#define WGMMA_SIGNS ", p, 1, 1, 0, 0;}"
#else
#define WGMMA_SHAPE "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
#define WGMMA_SIGNS ", p, 1, 1;}"
#endif
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FLOATS_OF_4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define FLOATS_OF_16(d, n) FLOATS_OF_4(d[n]), FLOATS_OF_4(d[n + 1]), FLOATS_OF_4(d[n + 2]), FLOATS_OF_4(d[n + 3])
#define FLOATS_OF_64(d, n) FLOATS_OF_16(d, n), FLOATS_OF_16(d, n + 4), FLOATS_OF_16(d, n + 8), FLOATS_OF_16(d, n + 12)

__device__ __forceinline__ void wgmma(float (&d)[16][4], unsigned long long a, unsigned long long b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;" WGMMA_SHAPE "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
                 "%60,%61,%62,%63}, %64, %65" WGMMA_SIGNS : FLOATS_OF_64(d, 0) : "l"(a), "l"(b));
}

// Starts d (64, 128) += 64 rows of one tile, times the transpose of 128 rows of another, over a whole step.
__device__ __forceinline__ void start_product(float (&d)[16][4], const real* one, const real* two) {
    unsigned long long a = describe(one), b = describe(two);
    asm volatile("wgmma.fence.sync.aligned;" : FLOATS_OF_64(d, 0)::"memory");
#pragma unroll
    for (int i = 0; i < 8; i += 2) wgmma(d, a + i, b + i);  // 32 bytes further along the rows
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for this warp group's products. d goes in and out, so that the compiler moves no use of it before this.
__device__ __forceinline__ void wait_for_products(float (&d)[16][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : FLOATS_OF_64(d, 0)::"memory");
}

// Lets wgmma read what this thread wrote to shared memory. A barrier must follow.
__device__ __forceinline__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else  // dev/cpu/hopper.h has products of 64 columns
__device__ float (&as_one(float (&d)[16][4]))[1][16][4] { return reinterpret_cast<float (&)[1][16][4]>(d); }
__device__ void start_product(float (&d)[16][4], const real* one, const real* two) {
    unsigned a = address16(one), b = address16(two);
    wgmma_fence(as_one(d));
    for (int i = 0; i < 8; i += 2)
        for (int n = 0; n < 2; n++) wgmma(d + 8 * n, describe(a + i), describe(b + i + n * 64 * 128 / 16), true);
    wgmma_commit();
}
__device__ void wait_for_products(float (&d)[16][4]) { wgmma_wait<0>(as_one(d)); }
__device__ void fence() {}
#endif
#else
#define HAS_WGMMA 0
#endif

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
