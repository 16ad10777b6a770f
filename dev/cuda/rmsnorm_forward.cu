// out (N,C) = inp * rstd * weight, with rstd = 1/sqrt(mean square + 1e-5) of each row of inp (Zhang and Sennrich 2019,
// section 4): a layernorm that neither takes the mean away nor adds a bias.

// A thread a row: N threads, whose lanes read 32 rows at a time, a number from each.
BLOCK(64, threads)
extern "C" __global__ void rmsnorm_forward1(real* __restrict__ out, float* __restrict__ rstd,
                                            const real* __restrict__ inp, const real* __restrict__ weight, int N,
                                            int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real* x = inp + (size_t)row * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(x[c]) * to_float(x[c]);
    float s = 1.0f / sqrtf(sum / C + 1e-5f);
    for (int c = 0; c < C; c++) from_float(out[(size_t)row * C + c], to_float(x[c]) * s * to_float(weight[c]));
    rstd[row] = s;
}

// A warp a row: lanes read neighbours, the sum is five shuffles, and the second time the row comes from L1.
BLOCK(1024, threads / 32)
extern "C" __global__ void rmsnorm_forward2(real* __restrict__ out, float* __restrict__ rstd,
                                            const real* __restrict__ inp, const real* __restrict__ weight, int N,
                                            int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = inp + (size_t)row * C;
    float sum = 0.0f;
    for (int c = lane; c < C; c += 32) sum += to_float(x[c]) * to_float(x[c]);
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    for (int c = lane; c < C; c += 32) from_float(out[(size_t)row * C + c], to_float(x[c]) * s * to_float(weight[c]));
    if (lane == 0) rstd[row] = s;
}

// 16 bytes a lane, all of a lane's loads of the row on their way before the first is needed.
BLOCK(128, threads / 32)
extern "C" __global__ void rmsnorm_forward3(real* __restrict__ out, float* __restrict__ rstd,
                                            const real* __restrict__ inp, const real* __restrict__ weight, int N,
                                            int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = inp + (size_t)row * C;
    float sum = 0.0f;
#pragma unroll 8
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c);
        for (int i = 0; i < W; i++) sum += v[i] * v[i];
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
#pragma unroll 4
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c), w = load<W>(weight + c);
        for (int i = 0; i < W; i++) v[i] *= s * w[i];
        store(out + (size_t)row * C + c, v);
    }
    if (lane == 0) rstd[row] = s;
}
