// With norm = inp * rstd and dnorm = dout * weight, of each row:
//   dinp (N,C) += rstd * (dnorm - norm * average(dnorm * norm)),  dweight (C) += the sum over rows of dout * norm

// One thread per row, and an atomic for each of its numbers: all rows add to the same C places.
BLOCK(32, threads)
extern "C" __global__ void rmsnorm_backward1(real* __restrict__ dinp, float* dweight, const real* __restrict__ dout,
                                             const real* __restrict__ inp, const real* __restrict__ weight,
                                             const float* __restrict__ rstd, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
    real* dx = dinp + (size_t)row * C;
    float s = rstd[row], sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(dy[c]) * to_float(weight[c]) * to_float(x[c]) * s;
    for (int c = 0; c < C; c++) {
        float norm = to_float(x[c]) * s, d = to_float(dy[c]);
        atomicAdd(dweight + c, d * norm);
        from_float(dx[c], to_float(dx[c]) + s * (d * to_float(weight[c]) - norm * sum / C));
    }
}

// One warp per row, several rows per block. Their sums for dweight are added up in shared memory, by atomics that stay
// on the multiprocessor; only the totals of a block go to device memory.
BLOCK(512, 1)
extern "C" __global__ void rmsnorm_backward2(real* __restrict__ dinp, float* dweight, const real* __restrict__ dout,
                                             const real* __restrict__ inp, const real* __restrict__ weight,
                                             const float* __restrict__ rstd, int N, int C) {
    DYNAMIC_SHARED(float, sums);  // (C)
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sums[c] = 0.0f;
    __syncthreads();
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < N; row += gridDim.x * warps) {
        const real *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
        real* dx = dinp + (size_t)row * C;
        float s = rstd[row], sum = 0.0f;
        for (int c = lane; c < C; c += 32) sum += to_float(dy[c]) * to_float(weight[c]) * to_float(x[c]) * s;
        float average = warp_sum(sum) / C;
        for (int c = lane; c < C; c += 32) {
            float norm = to_float(x[c]) * s, d = to_float(dy[c]);
            atomicAdd(sums + c, d * norm);
            from_float(dx[c], to_float(dx[c]) + s * (d * to_float(weight[c]) - norm * average));
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) atomicAdd(dweight + c, sums[c]);
}

// 16 bytes per lane, and registers for all: a lane always has the same columns, at most 32 of them, so it keeps their
// sums from row to row, and the row that was read for the average is still there for the rest. Neither L1 nor shared
// memory is used until the end, and all loads of a row are under way before the first number is needed. Then the block
// adds up its warps in shared memory, as partials (gridDim.x, C), and add_partials of kernels.cu adds up those: no
// atomics, and a fixed order. C is at most 1,024.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256) rmsnorm_backward3(
    real* __restrict__ dinp, float* __restrict__ partials, const real* __restrict__ dout,
    const real* __restrict__ inp, const real* __restrict__ weight, const float* __restrict__ rstd, int N, int C) {
    constexpr int PACKS = 32 / W;
    DYNAMIC_SHARED(float, sums);  // (warps, C)
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Pack<W> dw[PACKS] = {};
    for (int row = blockIdx.x * warps + warp; row < N; row += gridDim.x * warps) {
        size_t start = (size_t)row * C;
        Pack<W> norm[PACKS], dnorm[PACKS];
        float s = rstd[row], sum = 0.0f;
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
                norm[p][i] *= s;
                dw[p][i] += dnorm[p][i] * norm[p][i];
                dnorm[p][i] *= w[i];
                sum += dnorm[p][i] * norm[p][i];
            }
        }
        float average = warp_sum(sum) / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = W * (32 * p + lane);
            if (c >= C) continue;
            Pack<W> d = load<W>(dinp + start + c);
#pragma unroll
            for (int i = 0; i < W; i++) d[i] += s * (dnorm[p][i] - norm[p][i] * average);
            store(dinp + start + c, d);
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++)
        if (W * (32 * p + lane) < C) store(sums + warp * C + W * (32 * p + lane), dw[p]);
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += sums[w * C + c];
        partials[(size_t)blockIdx.x * C + c] = sum;
    }
}

// rmsnorm_backward in llama3.cu: 2, 4 or 8 warps share a row of more than 1,024 channels, so a lane never keeps the
// sums of more than 32 columns. Asynchronous copies bring the next row to shared memory meanwhile, so memory is busy
// during the sums too.
