// With norm = (inp - mean) * rstd and dnorm = dout * weight, of each row:
//   dresidual (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   dweight (C) += the sum over rows of dout * norm,  dbias (C) += the sum over rows of dout
//   before (C) += the sum over rows of the new dresidual, the bias gradient of the linear layer before
// The first is a sum over rows' channels, the others over the rows of a channel: no layout suits both.

// A thread a row. Its part of the sums goes there by atomics, 3 C of them a row, all rows to the same 3 C places.
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

// A warp a row, and as many rows as there are blocks for; the column sums of a block's rows are added up in its shared
// memory, still by atomics, but these stay on the multiprocessor. Only the block's totals go to device memory: 3 C
// atomics a block, not a row.
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

// layernorm_backward in kernels.cu: 16 bytes a lane, and no atomics. A lane has the same columns of each of its
// rows, so their three sums stay in its registers until the end; then a block adds up its warps, and add_partials
// the blocks, all in one order. Registers that hold sums can not hold rows that are still to come: asynchronous
// copies bring the next row to shared memory while one is at work. One block of 12 warps fills a multiprocessor, and
// leaves few partials.
