// Sums of rows, for the gradients of biases, by kernels that have the rows at hand anyway: attention's
// gradient and layernorm_backward leave sums, and one launch for each norm adds them up. Compiled
// after kernels.cu, with fused_biases.cuh's Output.

static_assert(B_r >= 64, "fused_biases.py has room for the sums of blocks of at least 64 rows");

// store_rows has stored a tile. This adds up its columns into the block's row of sums (B, blocks of
// rows, heads, HS), unless sums is null. Lanes that have the same columns of a warp's rows add up what
// they have stored. They leave these sums where the warp's rows begin in the tile.
__device__ void store_column_sums(float* sums, Head head, const Own& own, const real* tile) {
    constexpr int shares = 32 / HEAD_LANES;  // of a column's sum in a warp
    constexpr int packs = (HS + HEAD_LANES * HEAD_PACK - 1) / (HEAD_LANES * HEAD_PACK);
    static_assert(shares * HP * sizeof(float) <= 16 * M * 64 * sizeof(real) || LD < 64);
    static_assert(shares * HP * sizeof(float) <= 16 * M * LD * sizeof(real));
    if (!sums) return;
    auto sums_of_warp = [&](int warp) {
        return reinterpret_cast<float*>(const_cast<real*>(tile) + in_tile(16 * M * warp, 0));
    };
    int in_block = own.warp_first - own.first, lane = threadIdx.x % 32, share = lane / HEAD_LANES;
    Pack<HEAD_PACK> sum[packs] = {};
    auto column = [&](int k) { return (HEAD_LANES * k + lane % HEAD_LANES) * HEAD_PACK; };
#pragma unroll
    for (int k = 0; k < packs; k++)
        if (column(k) < HS)
#pragma unroll
            for (int r = 0; r < 16 * M; r += shares)
                if (own.warp_first + r + share < head.T)
                    sum[k] = sum[k] + load<HEAD_PACK>(tile + in_tile(in_block + r + share, column(k)));
    __syncwarp();
#pragma unroll
    for (int k = 0; k < packs; k++)
        if (column(k) < HS) store(sums_of_warp(threadIdx.x / 32) + share * HP + column(k), sum[k]);
    __syncthreads();
    int blocks = (head.T + B_r - 1) / B_r;
    size_t row = ((size_t)head.b * blocks + own.first / B_r) * head.heads + head.h;
    for (int c = threadIdx.x; c < HS; c += THREADS) {
        float total = 0.0f;
        for (int i = 0; i < WARPS * shares; i++)
            total += sums_of_warp(i / shares)[i % shares * HP + c];
        sums[row * HS + c] = total;
    }
}

// sums (gridDim.y, OC)[share] = the sum of each column of dout (N,OC) over every gridDim.y-th band of 32
// rows, from band `share` on. From these add_all_partials makes the gradient of a bias. A block has 32
// octets of lanes; each reads 128 neighbouring bytes of one row of a band. Items: OC columns along x,
// shares along y.
BLOCK(256, 8 * W)
extern "C" __global__ void __launch_bounds__(256, 4) sum_rows(
    float* __restrict__ sums, const real* __restrict__ dout, int N, int OC) {
    constexpr int columns = 8 * W;
    __shared__ float of_octet[32][columns];
    int octet = threadIdx.x / 8, o = columns * blockIdx.x + threadIdx.x % 8 * W;
    int first = 32 * blockIdx.y + octet, step = 32 * gridDim.y;
    Pack<W> sum = {};
    int count = first < N && o < OC ? (N - first + step - 1) / step : 0;
#pragma unroll 8  // of a loop whose length is known, so that all of these loads are on their way
    for (int i = 0; i < count; i++)
        sum = sum + load<W>(dout + (size_t)(first + i * step) * OC + o);
    for (int i = 0; i < W; i++) of_octet[octet][threadIdx.x % 8 * W + i] = sum[i];
    __syncthreads();
    int column = columns * blockIdx.x + threadIdx.x;
    if (threadIdx.x >= columns || column >= OC) return;
    float total = 0.0f;
    for (int i = 0; i < 32; i++) total += of_octet[i][threadIdx.x];
    sums[(size_t)blockIdx.y * OC + column] = total;
}

// Finishes the gradients of a norm and of one linear layer's bias, in one launch:
//   out1, out2, out3 (C) = the sums over the blocks of partials (3,blocks,C)
//   dbias (OC) = the sum of the rows of sums (rows,OC)
// or += with adds. Null outputs are skipped. Items: max(C, OC) columns along x, outputs along y.
BLOCK(256, 32)
extern "C" __global__ void add_all_partials(
    float* out1, float* out2, float* out3, float* dbias, const float* __restrict__ partials,
    const float* __restrict__ sums, int blocks, int C, int rows, int OC, int adds) {
    int y = blockIdx.y;
    float* out = y == 0 ? out1 : y == 1 ? out2 : y == 2 ? out3 : dbias;
    if (!out) return;
    if (y < 3) add_columns<8>(out, partials + (size_t)y * blocks * C, blocks, C, adds);
    else add_columns<8>(out, sums, rows, OC, adds);
}
