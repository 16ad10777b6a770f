// out (B,OC) = inp (B,C) weight' (OC,C) + bias (OC), for a few rows, at most four: what a new token of B samples needs.
// All of the weight is read for two operations a number and row, so memory is the bound.

// One thread per number: the lanes of a warp read 32 rows of the weight at a time, one number from each.
BLOCK(64, threads)
extern "C" __global__ void token_linear1(real* __restrict__ out, const real* __restrict__ inp,
                                         const real* __restrict__ weight, const real* __restrict__ bias, int B, int C,
                                         int OC) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, b = i / OC, o = i % OC;
    if (b >= B) return;
    float sum = to_float(bias[o]);
    for (int c = 0; c < C; c++) sum += to_float(inp[b * C + c]) * to_float(weight[(size_t)o * C + c]);
    from_float(out[i], sum);
}

// One warp per row of the weight, for all rows of inp: lanes read neighbours, and add up by shuffles.
BLOCK(256, threads / 32)
extern "C" __global__ void token_linear2(real* __restrict__ out, const real* __restrict__ inp,
                                         const real* __restrict__ weight, const real* __restrict__ bias, int B, int C,
                                         int OC) {
    int o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (o >= OC) return;
    float sum[4] = {};
    for (int c = lane; c < C; c += 32) {
        float w = to_float(weight[(size_t)o * C + c]);
        for (int b = 0; b < 4; b++)
            if (b < B) sum[b] += w * to_float(inp[b * C + c]);
    }
    for (int b = 0; b < 4; b++) {
        float total = warp_sum(sum[b]);
        if (lane == 0 && b < B) from_float(out[(size_t)b * OC + o], total + to_float(bias[o]));
    }
}

// 16 bytes per lane: a quarter or an eighth of the loads.
BLOCK(256, threads / 32)
extern "C" __global__ void token_linear3(real* __restrict__ out, const real* __restrict__ inp,
                                         const real* __restrict__ weight, const real* __restrict__ bias, int B, int C,
                                         int OC) {
    int o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (o >= OC) return;
    float sum[4] = {};
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> w = load<W>(weight + (size_t)o * C + c);
        for (int b = 0; b < 4; b++)
            if (b < B) {
                Pack<W> x = load<W>(inp + b * C + c);
                for (int j = 0; j < W; j++) sum[b] += w[j] * x[j];
            }
    }
    for (int b = 0; b < 4; b++) {
        float total = warp_sum(sum[b]);
        if (lane == 0 && b < B) from_float(out[(size_t)b * OC + o], total + to_float(bias[o]));
    }
}

// token_linear in dev/features/kv_cache.cu: up to four loads of a lane are under way before the first is needed, the rows
// of inp are in shared memory, and the norm before the product or the addition behind it take no launch of their own.
