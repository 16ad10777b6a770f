// residual (N,C), the fp32 stream, += branch (N,C), the output of a layer; copy (N,C) = the sum as a real; and out
// (N,C) = residual * rstd * weight, with rstd (N) = 1/sqrt(average square + eps) of a row (Zhang and Sennrich 2019,
// section 4): a layernorm without the mean and the bias.

// One thread per row: N threads, and the lanes of a warp read 32 rows at a time, one number from each.
BLOCK(64, threads)
extern "C" __global__ void rmsnorm_forward1(real* __restrict__ out, float* __restrict__ rstd, real* __restrict__ copy,
                                            float* residual, const real* __restrict__ branch,
                                            const real* __restrict__ weight, float eps, int N, int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) {
        float x = residual[start + c] + to_float(branch[start + c]);
        residual[start + c] = x;
        from_float(copy[start + c], x);
        sum += x * x;
    }
    float s = 1.0f / sqrtf(sum / C + eps);
    for (int c = 0; c < C; c++) from_float(out[start + c], residual[start + c] * s * to_float(weight[c]));
    rstd[row] = s;
}

// One warp per row: lanes read neighbouring numbers, the sum is five shuffles, and the second reading comes from L1.
BLOCK(1024, threads / 32)
extern "C" __global__ void rmsnorm_forward2(real* __restrict__ out, float* __restrict__ rstd, real* __restrict__ copy,
                                            float* residual, const real* __restrict__ branch,
                                            const real* __restrict__ weight, float eps, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float sum = 0.0f;
    for (int c = lane; c < C; c += 32) {
        float x = residual[start + c] + to_float(branch[start + c]);
        residual[start + c] = x;
        from_float(copy[start + c], x);
        sum += x * x;
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + eps);
    for (int c = lane; c < C; c += 32) from_float(out[start + c], residual[start + c] * s * to_float(weight[c]));
    if (lane == 0) rstd[row] = s;
}

// 16 bytes of the stream per lane, and several loads of a lane under way before the first number is needed.
BLOCK(128, threads / 32)
extern "C" __global__ void rmsnorm_forward3(real* __restrict__ out, float* __restrict__ rstd, real* __restrict__ copy,
                                            float* residual, const real* __restrict__ branch,
                                            const real* __restrict__ weight, float eps, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float sum = 0.0f;
#pragma unroll 4
    for (int c = 4 * lane; c < C; c += 128) {
        Pack<4> x = load<4>(residual + start + c) + load<4>(branch + start + c);
        store(residual + start + c, x);
        store(copy + start + c, x);
        for (int i = 0; i < 4; i++) sum += x[i] * x[i];
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + eps);
#pragma unroll 4
    for (int c = 4 * lane; c < C; c += 128) {
        Pack<4> x = load<4>(residual + start + c), w = load<4>(weight + c);
        for (int i = 0; i < 4; i++) x[i] *= s * w[i];
        store(out + start + c, x);
    }
    if (lane == 0) rstd[row] = s;
}

// residual_rmsnorm_forward in llama3.cu: the row stays in registers, since its length is known to the compiler, and all
// of its loads are under way at once. A lane has room for 32 numbers, so 2, 4 or 8 warps share a row of more than
// 1,024, and exchange their sums in shared memory.
