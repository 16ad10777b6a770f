// With norm = (inp - mean) * rstd and dnorm = dout * weight, of each row:
//   dresidual (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   dweight (C) += the sum over rows of dout * norm,  dbias (C) += the sum over rows of dout
//   before (C) += the sum over rows of the new dresidual, the bias gradient of the linear layer before
// The first needs sums over the channels of a row, the others sums over the rows of a channel: no layout suits both.

// One thread per row. It adds its part of the sums by 3 C atomics, all rows to the same 3 C places.
BLOCK(32, threads)
extern "C" __global__ void layernorm_backward1(real* __restrict__ dresidual, float* dweight, float* dbias,
                                               float* before, const real* __restrict__ dout,
                                               const real* __restrict__ inp, const real* __restrict__ weight,
                                               const float* __restrict__ mean, const float* __restrict__ rstd, int N,
                                               int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
    real* dx = dresidual + (size_t)row * C;
    float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
    for (int c = 0; c < C; c++) {
        float dnorm = to_float(dy[c]) * to_float(weight[c]);
        sum_dnorm += dnorm;
        sum_dnorm_norm += dnorm * (to_float(x[c]) - m) * s;
    }
    for (int c = 0; c < C; c++) {
        float norm = (to_float(x[c]) - m) * s, d = to_float(dy[c]);
        atomicAdd(dweight + c, d * norm);
        atomicAdd(dbias + c, d);
        float g = to_float(dx[c]) + s * (d * to_float(weight[c]) - sum_dnorm / C - norm * sum_dnorm_norm / C);
        atomicAdd(before + c, g);
        from_float(dx[c], g);
    }
}

// One warp per row. A block adds up the columns of its rows in shared memory, still by atomics, but these stay on the
// multiprocessor. Only its totals go to device memory: 3 C atomics per block, not per row.
BLOCK(512, 1)
extern "C" __global__ void layernorm_backward2(real* __restrict__ dresidual, float* dweight, float* dbias,
                                               float* before, const real* __restrict__ dout,
                                               const real* __restrict__ inp, const real* __restrict__ weight,
                                               const float* __restrict__ mean, const float* __restrict__ rstd, int N,
                                               int C) {
    DYNAMIC_SHARED(float, sums);  // (3, C)
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int c = threadIdx.x; c < 3 * C; c += blockDim.x) sums[c] = 0.0f;
    __syncthreads();
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < N; row += gridDim.x * warps) {
        const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
        real* dx = dresidual + (size_t)row * C;
        float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
        for (int c = lane; c < C; c += 32) {
            float dnorm = to_float(dy[c]) * to_float(weight[c]);
            sum_dnorm += dnorm;
            sum_dnorm_norm += dnorm * (to_float(x[c]) - m) * s;
        }
        float average_dnorm = warp_sum(sum_dnorm) / C, average_dnorm_norm = warp_sum(sum_dnorm_norm) / C;
        for (int c = lane; c < C; c += 32) {
            float norm = (to_float(x[c]) - m) * s, d = to_float(dy[c]);
            atomicAdd(sums + c, d * norm);
            atomicAdd(sums + C + c, d);
            float g = to_float(dx[c]) + s * (d * to_float(weight[c]) - average_dnorm - norm * average_dnorm_norm);
            atomicAdd(sums + 2 * C + c, g);
            from_float(dx[c], g);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        atomicAdd(dweight + c, sums[c]);
        atomicAdd(dbias + c, sums[C + c]);
        atomicAdd(before + c, sums[2 * C + c]);
    }
}

// Version 2 makes 3 C atomics in shared memory for each row. Here a block takes a row, in a loop over rows, so a thread
// has the same columns in every row, three if C is 768, and keeps their sums in nine registers: no atomics in the loop.
// At the end a block stores its sums in partials (3, gridDim.x, C), and add_partials of kernels.cu, a second launch,
// adds these up in the order of the blocks. So the bits are always the same. But now the sums over a row go through the
// whole block: each row takes two block_reduce, which is four barriers, and at each of them 8 warps wait for the slowest
// with no load under way. More blocks on a multiprocessor help, but leave more partials. Items: blocks.
BLOCK(256, 1)
extern "C" __global__ void layernorm_backward3(real* __restrict__ dresidual, float* partials,
                                               const real* __restrict__ dout, const real* __restrict__ inp,
                                               const real* __restrict__ weight, const float* __restrict__ mean,
                                               const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS, THREADS = 256, COLUMNS = (C + THREADS - 1) / THREADS;  // the columns of a thread
    float sums[3][COLUMNS] = {};
    for (int row = blockIdx.x; row < N; row += gridDim.x) {
        size_t start = (size_t)row * C;
        float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f, norm[COLUMNS], d[COLUMNS];
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            int c = THREADS * k + threadIdx.x;
            if (c >= C) continue;
            norm[k] = (to_float(inp[start + c]) - m) * s;
            d[k] = to_float(dout[start + c]);
            sum_dnorm += d[k] * to_float(weight[c]);
            sum_dnorm_norm += d[k] * to_float(weight[c]) * norm[k];
        }
        float average_dnorm = block_reduce<warp_sum>(sum_dnorm, 0.0f) / C;
        float average_dnorm_norm = block_reduce<warp_sum>(sum_dnorm_norm, 0.0f) / C;
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            int c = THREADS * k + threadIdx.x;
            if (c >= C) continue;
            float g = to_float(dresidual[start + c]);
            g += s * (d[k] * to_float(weight[c]) - average_dnorm - norm[k] * average_dnorm_norm);
            sums[0][k] += d[k] * norm[k];
            sums[1][k] += d[k];
            sums[2][k] += g;
            from_float(dresidual[start + c], g);
        }
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        int c = THREADS * k + threadIdx.x;
        for (int which = 0; which < 3 && c < C; which++)
            partials[((size_t)which * gridDim.x + blockIdx.x) * C + c] = sums[which][k];
    }
}

namespace layernorm_backward_ {

constexpr int TOGETHER = 12;  // blocks whose sums are added up by the last of them

// Adds up `count` rows, `step` apart, of each of partials (3, rows, C). The first row becomes the sum, or, with out,
// the sum is added to that.
__device__ __forceinline__ void add_rows(float* partials, int rows, int first, int count, int step,
                                         float* const* out) {
    constexpr int C = CHANNELS;
    for (int i = 4 * threadIdx.x; i < 3 * C; i += 4 * blockDim.x) {
        int which = i / C, c = i % C;
        float* from = partials + ((size_t)which * rows + first) * C + c;
        Pack<4> sum = {};
#pragma unroll 12
        for (int k = 0; k < count; k++) sum = sum + load<4>(from + (size_t)k * step * C);
        float* to = out ? out[which] + c : from;
        store(to, out ? load<4>(to) + sum : sum);
    }
}

}  // namespace layernorm_backward_

// One warp per row again, so a row needs no barrier, and one launch. A lane has the same columns of each of its rows, 16
// bytes at a time, so it keeps their three sums in registers, and the row too: 24 columns if C is 768, not three. At the
// end a block adds up its warps in shared memory, and stores its sums in partials (3, gridDim.x, C). If the last block
// to finish added up the sums of all 132 blocks, 1.2 MB, that would take more than ten microseconds, since one
// multiprocessor reads some 100 GB/s. So there are two levels. Blocks form groups of 12; the last block of a group to
// finish adds up that group, and the last block of all adds up the groups. The groups are fixed, and each sum goes from
// the first to the last, so the bits are always the same. This saves a second launch, and costs two fences, two atomics,
// and two short sums by a few blocks, which is about even. It is slower than the trainer's because 240 registers per
// thread leave 8 warps to a multiprocessor, and no load is under way while a warp adds up. counters (1 + groups) are 0
// before and after. Items: blocks.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256) layernorm_backward4(
    real* __restrict__ dresidual, float* dweight, float* dbias, float* before, float* partials, int* counters,
    const real* __restrict__ dout, const real* __restrict__ inp, const real* __restrict__ weight,
    const float* __restrict__ mean, const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS;
    DYNAMIC_SHARED(float, of_warp);  // (warps, C)
    int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    Pack<W> sums[3][packs_of<W, 32>] = {};
    for (int row = blockIdx.x * warps + warp; row < N; row += gridDim.x * warps) {
        size_t start = (size_t)row * C;
        float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
        Pack<W> norm[packs_of<W, 32>], d[packs_of<W, 32>], g[packs_of<W, 32>];
        each_pack<W, 32>([&](int k, int c) {  // all loads of a row are on their way at once
            norm[k] = load<W>(inp + start + c);
            d[k] = load<W>(dout + start + c);
            g[k] = load<W>(dresidual + start + c);
        });
        each_pack<W, 32>([&](int k, int c) {
            Pack<W> w = load<W>(weight + c);
            for (int i = 0; i < W; i++) {
                norm[k][i] = (norm[k][i] - m) * s;
                sum_dnorm += d[k][i] * w[i];
                sum_dnorm_norm += d[k][i] * w[i] * norm[k][i];
            }
        });
        float average_dnorm = warp_sum(sum_dnorm) / C, average_dnorm_norm = warp_sum(sum_dnorm_norm) / C;
        each_pack<W, 32>([&](int k, int c) {
            Pack<W> w = load<W>(weight + c);
            for (int i = 0; i < W; i++) {
                g[k][i] += s * (d[k][i] * w[i] - average_dnorm - norm[k][i] * average_dnorm_norm);
                sums[0][k][i] += d[k][i] * norm[k][i];
                sums[1][k][i] += d[k][i];
                sums[2][k][i] += g[k][i];
            }
            store(dresidual + start + c, g[k]);
        });
    }
#pragma unroll
    for (int which = 0; which < 3; which++) {
        __syncthreads();
        each_pack<W, 32>([&](int k, int c) { store(of_warp + warp * C + c, sums[which][k]); });
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < warps; w++) sum += of_warp[w * C + column];
            partials[((size_t)which * gridDim.x + blockIdx.x) * C + column] = sum;
        }
    }
    using namespace layernorm_backward_;
    int group = blockIdx.x / TOGETHER, groups = (gridDim.x + TOGETHER - 1) / TOGETHER;
    int members = min(TOGETHER, (int)gridDim.x - group * TOGETHER);
    if (!lab::last_of(counters + 1 + group, members)) return;
    add_rows(partials, gridDim.x, group * TOGETHER, members, 1, nullptr);
    if (!lab::last_of(counters, groups)) return;
    float* out[] = {dweight, dbias, before};
    add_rows(partials, gridDim.x, 0, groups, TOGETHER, out);
}

// layernorm_backward in kernels.cu: the same sums in registers. There is no room in registers for the next row as well,
// so asynchronous copies bring it to shared memory. One block of 12 warps fills a multiprocessor, and leaves few
// partials. add_partials, which matmul_backward_bias needs too, adds these up. The third sum, of the new dresidual, is
// matmul_backward_bias's: a kernel that does less is easier to read. dev/features/fused_biases.cu has it done here.
