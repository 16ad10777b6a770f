/*
--exact: the product of two matrices, with an order that does not depend on the machine, and a sum of all bits of the
parameters. Compiled after kernels.cu.
*/
namespace exact {

constexpr int DEPTH = 16;
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = 2;  // of a multiprocessor
#else
constexpr int BLOCKS = 1;  // with 128 registers a thread would spill
#endif

// A block has side x side numbers of out, and each of its 256 threads n x n, n = side / 16, in registers. For DEPTH of the
// summed index k, tiles of both matrices pass through shared memory, one stage while the other is used. A matrix whose
// neighbours are along k (along_k) is transposed on its way.
template <int side, bool left_along_k, bool right_along_k>
__device__ void multiply_tile(
    float (*tiles)[2][DEPTH][side + 4], float* __restrict__ out, const float* __restrict__ left,
    const float* __restrict__ right, const float* __restrict__ bias, int left_step, int right_step, int I, int J, int K,
    bool adds) {
    constexpr int n = side / 16, PACKS = side * DEPTH / 4 / 256;
    int row = side * blockIdx.y, column = side * blockIdx.x;
    int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 4;  // of the first of n / 4 squares, 64 numbers apart
    Pack<4> next[2][PACKS];
    // f(at, k) for this thread's packs of a tile: its place across the summed index, and along it
    auto each_pack = [&](bool along_k, auto f) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = threadIdx.x + 256 * p;
            f(p, along_k ? i / 4 : i % (side / 4) * 4, along_k ? i % 4 * 4 : i / (side / 4));
        }
    };
    auto fetch = [&](int first) {
        each_pack(left_along_k, [&](int p, int at, int k) {
            size_t i = row + at, along = first + k;
            next[0][p] = i < I && along < K ? load<4>(left + (left_along_k ? i * left_step + along
                                                                           : along * left_step + i)) : Pack<4>{};
        });
        each_pack(right_along_k, [&](int p, int at, int k) {
            size_t j = column + at, along = first + k;
            next[1][p] = j < J && along < K ? load<4>(right + (right_along_k ? j * right_step + along
                                                                             : along * right_step + j)) : Pack<4>{};
        });
    };
    auto put = [&](int stage) {
        auto put_one = [&](bool along_k, int which) {
            each_pack(along_k, [&](int p, int at, int k) {
                if (along_k)
                    for (int j = 0; j < 4; j++) tiles[stage][which][k + j][at] = next[which][p][j];
                else store(&tiles[stage][which][k][at], next[which][p]);
            });
        };
        put_one(left_along_k, 0);
        put_one(right_along_k, 1);
    };
    float sum[n][n] = {};
    fetch(0);
    put(0);
    __syncthreads();
    for (int first = 0, stage = 0; first < K; first += DEPTH, stage ^= 1) {
        if (first + DEPTH < K) fetch(first + DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Pack<4> x[n / 4], y[n / 4];
#pragma unroll
            for (int square = 0; square < n / 4; square++) {
                x[square] = load<4>(&tiles[stage][0][k][64 * square + r]);
                y[square] = load<4>(&tiles[stage][1][k][64 * square + c]);
            }
#pragma unroll
            for (int i = 0; i < n; i++)
#pragma unroll
                for (int j = 0; j < n; j++) sum[i][j] = fmaf(x[i / 4][i % 4], y[j / 4][j % 4], sum[i][j]);
        }
        if (first + DEPTH < K) put(stage ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int square = 0; square < n / 4; square++) {
            int at = row + 64 * (i / 4) + r + i % 4, first = column + 64 * square + c;
            if (at >= I || first >= J) continue;
            Pack<4> x = {sum[i][4 * square], sum[i][4 * square + 1], sum[i][4 * square + 2], sum[i][4 * square + 3]};
            float* to = out + (size_t)at * J + first;
            if (bias) x = x + load<4>(bias + first);
            store(to, adds ? load<4>(to) + x : x);
        }
}

template <int side, class... Args>
__device__ void multiply(int left_along_k, int right_along_k, Args... args) {
    DYNAMIC_SHARED(float, shared);
    auto tiles = reinterpret_cast<float (*)[2][DEPTH][side + 4]>(shared);
    if (!left_along_k) multiply_tile<side, false, false>(tiles, args...);
    else if (right_along_k) multiply_tile<side, true, true>(tiles, args...);
    else multiply_tile<side, true, false>(tiles, args...);
}

// Spreads the bits of a number and of its place over 64 bits (splitmix64, by Vigna).
__device__ unsigned long long spread(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

}  // namespace exact

// out (I,J) = left (I,K) right (K,J) + bias (J), unless that is null; with adds, out += left right. Each number is one
// chain of fmaf from k = 0 on, which begins with 0, whatever the size of a tile. Neighbours along k are neighbours in
// memory with left_along_k; else those along i are. The step is from one row, or column, to the next. Left along
// i and right along k do not occur. I, J and K are multiples of 4 where they are along memory. Items: J
// columns along x, I rows along y.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256, exact::BLOCKS) exact_product(
    float* __restrict__ out, const float* __restrict__ left, const float* __restrict__ right,
    const float* __restrict__ bias, int left_along_k, int right_along_k, int left_step, int right_step, int I, int J,
    int K, int adds) {
    exact::multiply<128>(left_along_k, right_along_k, out, left, right, bias, left_step, right_step, I, J, K, adds);
}

// The same by smaller tiles, of which a small product has enough for all multiprocessors.
BLOCK(256, 64, 64)
extern "C" __global__ void __launch_bounds__(256) exact_small_product(
    float* __restrict__ out, const float* __restrict__ left, const float* __restrict__ right,
    const float* __restrict__ bias, int left_along_k, int right_along_k, int left_step, int right_step, int I, int J,
    int K, int adds) {
    exact::multiply<64>(left_along_k, right_along_k, out, left, right, bias, left_step, right_step, I, J, K, adds);
}

// sums (pieces) += for each piece of numbers, [starts[i], starts[i+1]), the sum of spread(bits and place) modulo 2^64,
// which is the same in any order. Items: 65,536 numbers of a piece along x, pieces along y.
BLOCK(256, 65536)
extern "C" __global__ void fingerprints(
    size_t* sums, const float* __restrict__ numbers, const size_t* __restrict__ starts) {
    size_t end = starts[blockIdx.y + 1], first = starts[blockIdx.y] + (size_t)65536 * blockIdx.x;
    if (first >= end) return;
    unsigned long long sum = 0;
    for (size_t i = first + threadIdx.x; i < min(end, first + 65536); i += blockDim.x)
        sum += exact::spread((unsigned long long)i << 32 | __float_as_uint(numbers[i]));
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sums) + blockIdx.y, sum);
}
