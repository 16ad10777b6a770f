// With norm = (inp - mean) * rstd and dnorm = dout * weight, of each row:
//   dinp (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   dweight (C) += the sum over rows of dout * norm,  dbias (C) += the sum over rows of dout
// The first is a sum over rows' channels, the others over the rows of a channel: no layout suits both.

// A thread a row. Its part of dweight and dbias goes there by atomics, 2 C of them a row, all rows to the same 2 C
// places.
extern "C" __global__ void layernorm_backward1(real* __restrict__ dinp, float* dweight, float* dbias,
                                               const real* __restrict__ dout, const real* __restrict__ inp,
                                               const real* __restrict__ weight, const float* __restrict__ mean,
                                               const float* __restrict__ rstd, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
    real* dx = dinp + (size_t)row * C;
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
        from_float(dx[c], to_float(dx[c]) + s * (d * to_float(weight[c]) - sum_dnorm / C - norm * sum_dnorm_norm / C));
    }
}

// A warp a row, and as many rows as there are blocks for; the column sums of a block's rows are added up in its shared
// memory, still by atomics, but these stay on the multiprocessor. Only the block's totals go to device memory: 2 C
// atomics a block, not a row.
extern "C" __global__ void layernorm_backward2(real* __restrict__ dinp, float* dweight, float* dbias,
                                               const real* __restrict__ dout, const real* __restrict__ inp,
                                               const real* __restrict__ weight, const float* __restrict__ mean,
                                               const float* __restrict__ rstd, int N, int C) {
    DYNAMIC_SHARED(float, sums);  // (2, C)
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) sums[c] = 0.0f;
    __syncthreads();
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < N; row += gridDim.x * warps) {
        const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
        real* dx = dinp + (size_t)row * C;
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
            from_float(dx[c], to_float(dx[c]) + s * (d * to_float(weight[c]) - average_dnorm
                                                     - norm * average_dnorm_norm));
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        atomicAdd(dweight + c, sums[c]);
        atomicAdd(dbias + c, sums[C + c]);
    }
}

// 16 bytes a lane, no atomics, and registers for all: a lane has the same columns in each row, at most 32 of them, so
// their sums stay with it; and the row that was read for the averages is still there for the rest. Memory other than
// the device's is touched only at the end, when a block's warps are added up as partials (2, gridDim.x, C), which
// add_partials of kernels.cu adds up in one order. C is at most 1,024.
extern "C" __global__ void __launch_bounds__(128) layernorm_backward3(
    real* __restrict__ dinp, float* __restrict__ partials, const real* __restrict__ dout,
    const real* __restrict__ inp, const real* __restrict__ weight, const float* __restrict__ mean,
    const float* __restrict__ rstd, int N, int C) {
    constexpr int PACKS = 32 / W;
    DYNAMIC_SHARED(float, sums);  // (warps, 2, C)
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Pack<W> dw[PACKS] = {}, db[PACKS] = {};
    for (int row = blockIdx.x * warps + warp; row < N; row += gridDim.x * warps) {
        size_t start = (size_t)row * C;
        Pack<W> norm[PACKS], dnorm[PACKS];
        float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = W * (32 * p + lane);
            if (c < C) norm[p] = load<W>(inp + start + c), dnorm[p] = load<W>(dout + start + c);
        }
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = W * (32 * p + lane);
            if (c >= C) continue;
            Pack<W> w = load<W>(weight + c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                norm[p][i] = (norm[p][i] - m) * s;
                dw[p][i] += dnorm[p][i] * norm[p][i];
                db[p][i] += dnorm[p][i];
                dnorm[p][i] *= w[i];
                sum_dnorm += dnorm[p][i];
                sum_dnorm_norm += dnorm[p][i] * norm[p][i];
            }
        }
        float average_dnorm = warp_sum(sum_dnorm) / C, average_dnorm_norm = warp_sum(sum_dnorm_norm) / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = W * (32 * p + lane);
            if (c >= C) continue;
            Pack<W> d = load<W>(dinp + start + c);
#pragma unroll
            for (int i = 0; i < W; i++) d[i] += s * (dnorm[p][i] - average_dnorm - norm[p][i] * average_dnorm_norm);
            store(dinp + start + c, d);
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int c = W * (32 * p + lane);
        if (c < C) store(sums + 2 * warp * C + c, dw[p]), store(sums + (2 * warp + 1) * C + c, db[p]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += sums[2 * w * C + c];
        partials[((size_t)(c / C) * gridDim.x + blockIdx.x) * C + c % C] = sum;
    }
}

// layernorm_backward in kernels.cu: 16 bytes a lane, and no atomics. Each warp has sums of its own, the block adds them
// up at its end, and a second kernel, add_partials, those of the blocks, all in one order.
