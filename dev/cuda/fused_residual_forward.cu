// residual (N,C) = inp1 + inp2, and out = layernorm(residual) with its mean and rstd: what follows every branch. Done
// by residual_forward and then layernorm_forward, the sum is written to device memory and read again.

// A warp a row adds, keeps the sum in shared memory, C numbers for each warp, and normalises from there: two reads and
// two writes instead of three and two, and one launch instead of two.
extern "C" __global__ void fused_residual_forward2(real* __restrict__ residual, real* __restrict__ out,
                                                   float* __restrict__ mean, float* __restrict__ rstd,
                                                   const real* __restrict__ inp1, const real* __restrict__ inp2,
                                                   const real* __restrict__ weight, const real* __restrict__ bias,
                                                   int N, int C) {
    DYNAMIC_SHARED(real, shared);  // (warps, C)
    int warp = threadIdx.x / 32, row = blockIdx.x * (blockDim.x / 32) + warp, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    real* x = shared + warp * C;
    float sum = 0.0f;
    for (int c = lane; c < C; c += 32) {
        from_float(x[c], to_float(inp1[start + c]) + to_float(inp2[start + c]));
        residual[start + c] = x[c];
        sum += to_float(x[c]);
    }
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    for (int c = lane; c < C; c += 32) sum += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    for (int c = lane; c < C; c += 32)
        from_float(out[start + c], (to_float(x[c]) - m) * s * to_float(weight[c]) + to_float(bias[c]));
    if (lane == 0) mean[row] = m, rstd[row] = s;
}

// The same with 16 bytes a lane. A lane reads from shared memory what it wrote there, so no barrier is needed.
extern "C" __global__ void fused_residual_forward3(real* __restrict__ residual, real* __restrict__ out,
                                                   float* __restrict__ mean, float* __restrict__ rstd,
                                                   const real* __restrict__ inp1, const real* __restrict__ inp2,
                                                   const real* __restrict__ weight, const real* __restrict__ bias,
                                                   int N, int C) {
    DYNAMIC_SHARED(real, shared);  // (warps, C)
    int warp = threadIdx.x / 32, row = blockIdx.x * (blockDim.x / 32) + warp, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    real* x = shared + warp * C;
    float sum = 0.0f;
#pragma unroll 4
    for (int c = W * lane; c < C; c += 32 * W) {
        store(x + c, load<W>(inp1 + start + c) + load<W>(inp2 + start + c));
        Pack<W> v = load<W>(x + c);  // as it was rounded
        store(residual + start + c, v);
        for (int i = 0; i < W; i++) sum += v[i];
    }
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c);
        for (int i = 0; i < W; i++) sum += (v[i] - m) * (v[i] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c), w = load<W>(weight + c), b = load<W>(bias + c);
        for (int i = 0; i < W; i++) v[i] = (v[i] - m) * s * w[i] + b[i];
        store(out + start + c, v);
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}
