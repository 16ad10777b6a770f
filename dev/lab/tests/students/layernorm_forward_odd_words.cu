// right
#include <assert.h>
#include <stdio.h>
union Bits { float f; unsigned u; };
struct Moments { double sum, squares; };
__device__ double block_total(double x) {
    __shared__ Moments parts[4];
    for (int half = 16; half > 0; half >>= 1) x += __shfl_down_sync(0xffffffff, x, half);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32].sum = x;
    __syncthreads();
    double all = 0;
    for (const Moments* p = parts; p != parts + 4; ++p) all += p->sum;
    __syncthreads();
    return all;
}
BLOCK(128, 1)
extern "C" __global__ void my_layernorm_forward(
    real* out, float* mean, float* rstd, real* copy, const float* residual, const real* weight,
    const real* bias, int N, int C) {
    const size_t at = (size_t)blockIdx.x * C;
    assert(blockDim.x == 128);
    double sum = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += __ldcs(residual + at + c);
    const float m = float(block_total(sum) / C);
    double squares = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) squares += (residual[at + c] - m) * double(residual[at + c] - m);
    const float r = rsqrtf(float(block_total(squares) / C) + 1e-5f);
    Bits bits;
    bits.f = r;
    if (__syncthreads_or(bits.u >> 31)) printf("negative\n");
    if (threadIdx.x == 0) __stcs(mean + blockIdx.x, m), __stcs(rstd + blockIdx.x, r);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        from_float(out[at + c], __fmaf_rn((residual[at + c] - m) * r, to_float(weight[c]), to_float(bias[c])));
        from_float(copy[at + c], residual[at + c]);
    }
}
