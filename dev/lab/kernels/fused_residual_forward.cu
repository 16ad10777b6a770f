// residual (N,C), the fp32 stream, += branch (N,C), the output of a layer; copy (N,C) = the sum as a real; and out =
// its layernorm, with mean and rstd. A transformer has this between any two branches.

// Two kernels: this addition, 16 bytes per lane, then residual_layernorm_forward of kernels.cu with branch = null. The
// sum is written to device memory and read again.
BLOCK(128, 4 * threads)
extern "C" __global__ void fused_residual_forward1_add(float* __restrict__ residual,
                                                       const real* __restrict__ branch, int N, int C) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < (size_t)N * C) store(residual + i, load<4>(residual + i) + load<4>(branch + i));
}

// One kernel: one warp per row adds, keeps the sum in shared memory, C numbers for each warp, and normalises from
// there. A lane reads only what it wrote itself, so no barrier is needed. It moves 4 bytes less for each number, of 14
// in bf16 and 20 in fp32, with one launch less.
BLOCK(128, threads / 32)
extern "C" __global__ void fused_residual_forward2(real* __restrict__ out, float* __restrict__ mean,
                                                   float* __restrict__ rstd, real* __restrict__ copy, float* residual,
                                                   const real* __restrict__ branch, const real* __restrict__ weight,
                                                   const real* __restrict__ bias, int N, int C) {
    DYNAMIC_SHARED(float, shared);  // (warps, C)
    int warp = threadIdx.x / 32, row = blockIdx.x * (blockDim.x / 32) + warp, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float *x = shared + warp * C, sum = 0.0f;
#pragma unroll 4
    for (int c = 4 * lane; c < C; c += 128) {
        Pack<4> v = load<4>(residual + start + c) + load<4>(branch + start + c);
        store(x + c, v);
        store(residual + start + c, v);
        store(copy + start + c, v);
        for (int i = 0; i < 4; i++) sum += v[i];
    }
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    for (int c = 4 * lane; c < C; c += 128) {
        Pack<4> v = load<4>(x + c);
        for (int i = 0; i < 4; i++) sum += (v[i] - m) * (v[i] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    for (int c = 4 * lane; c < C; c += 128) {
        Pack<4> v = load<4>(x + c), w = load<4>(weight + c), b = load<4>(bias + c);
        for (int i = 0; i < 4; i++) v[i] = (v[i] - m) * s * w[i] + b[i];
        store(out + start + c, v);
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}

// residual_layernorm_forward in kernels.cu, with a branch: the sum stays in registers, since the length of a row is
// known to the compiler. Only registers limit the warps of a multiprocessor, and all loads of a row are under way at
// once.
