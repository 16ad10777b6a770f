// The two products behind a linear layer out (N,OC) = inp (N,C) weight' (OC,C):
//   dinp (N,C) = dout (N,OC) weight  and  dweight (OC,C) += dout' inp.
// Either has one matrix whose summed index is the slow one, or both: what is easy to read in rows is needed in columns.

// A thread an element. In dinp a warp shares a row of dout and reads weight in whole lines; in dweight it shares a
// column of dout, one number from each row, and reads inp in whole lines.
BLOCK(1024, threads)
extern "C" __global__ void matmul_backward1_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                                const real* __restrict__ weight, int N, int C, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    size_t row = i / C, c = i % C;
    float sum = 0.0f;
    for (int o = 0; o < OC; o++) sum += to_float(dout[row * OC + o]) * to_float(weight[(size_t)o * C + c]);
    from_float(dinp[i], sum);
}

BLOCK(1024, threads)
extern "C" __global__ void matmul_backward1_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                   const real* __restrict__ inp, int N, int C, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)OC * C) return;
    size_t o = i / C, c = i % C;
    float sum = 0.0f;
    for (int row = 0; row < N; row++) sum += to_float(dout[(size_t)row * OC + o]) * to_float(inp[(size_t)row * C + c]);
    dweight[i] += sum;
}

namespace matmul_backward {

// A block's tile of left right, with left(row, k) and right(k, column); `put` takes each element of it. The block has
// `rows` x `rows` of them, a thread M x M. A tile of each matrix waits in shared memory, k as the slow index; it is
// loaded along the index that is fast in device memory, k for left if left_k, else the row.
template <int rows, int M, int K, bool left_k, class Left, class Right, class Put>
__device__ __forceinline__ void multiply(int first_row, int first_column, int size, Left left, Right right, Put put) {
    constexpr int threads = rows / M * (rows / M);
    __shared__ float x[K][rows + left_k], w[K][rows];  // one more, where a column is written
    int r = threadIdx.x / (rows / M) * M, s = threadIdx.x % (rows / M) * M;
    float sum[M][M] = {};
    for (int k0 = 0; k0 < size; k0 += K) {
        for (int i = threadIdx.x; i < rows * K; i += threads) {
            int k = left_k ? i % K : i / rows, row = left_k ? i / K : i % rows;
            x[k][row] = k0 + k < size ? left(first_row + row, k0 + k) : 0.0f;
            w[i / rows][i % rows] = k0 + i / rows < size ? right(k0 + i / rows, first_column + i % rows) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < M; j++) sum[i][j] += x[k][r + i] * w[k][s + j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < M; j++) put(first_row + r + i, first_column + s + j, sum[i][j]);
}

template <int rows, int M, int K>
__device__ __forceinline__ void multiply_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                             const real* __restrict__ weight, int N, int C, int OC) {
    multiply<rows, M, K, true>(
        blockIdx.y * rows, blockIdx.x * rows, OC,
        [=](int row, int o) { return row < N ? to_float(dout[(size_t)row * OC + o]) : 0.0f; },
        [=](int o, int c) { return c < C ? to_float(weight[(size_t)o * C + c]) : 0.0f; },
        [=](int row, int c, float sum) { if (row < N && c < C) from_float(dinp[(size_t)row * C + c], sum); });
}

template <int rows, int M, int K>
__device__ __forceinline__ void multiply_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                const real* __restrict__ inp, int N, int C, int OC) {
    multiply<rows, M, K, false>(
        blockIdx.y * rows, blockIdx.x * rows, N,
        [=](int o, int row) { return o < OC ? to_float(dout[(size_t)row * OC + o]) : 0.0f; },
        [=](int row, int c) { return c < C ? to_float(inp[(size_t)row * C + c]) : 0.0f; },
        [=](int o, int c, float sum) { if (o < OC && c < C) dweight[(size_t)o * C + c] += sum; });
}

}  // namespace matmul_backward

// Tiles of 32 x 32 in shared memory, of which each number serves 32 elements. In shared memory it does not matter which
// index was the fast one: a tile is loaded along it, and read along the other.
BLOCK(1024, 32, 32)
extern "C" __global__ void matmul_backward2_inp(real* __restrict__ dinp, const real* __restrict__ dout,
                                                const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_inp<32, 1, 32>(dinp, dout, weight, N, C, OC);
}

BLOCK(1024, 32, 32)
extern "C" __global__ void matmul_backward2_weight(float* __restrict__ dweight, const real* __restrict__ dout,
                                                   const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_weight<32, 1, 32>(dweight, dout, inp, N, C, OC);
}

// 8 x 8 elements a thread, in registers: four multiplications for a load from shared memory instead of a half.
BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward3_inp(
    real* __restrict__ dinp, const real* __restrict__ dout, const real* __restrict__ weight, int N, int C, int OC) {
    matmul_backward::multiply_inp<128, 8, 8>(dinp, dout, weight, N, C, OC);
}

BLOCK(256, 128, 128)
extern "C" __global__ void __launch_bounds__(256) matmul_backward3_weight(
    float* __restrict__ dweight, const real* __restrict__ dout, const real* __restrict__ inp, int N, int C, int OC) {
    matmul_backward::multiply_weight<128, 8, 8>(dweight, dout, inp, N, C, OC);
}
