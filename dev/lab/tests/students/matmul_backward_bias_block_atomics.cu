// right
BLOCK(256, 32)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    __shared__ float sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, oc = 32 * blockIdx.x + lane;
    if (warp == 0) sums[lane] = 0.0f;
    __syncthreads();
    float mine = 0.0f;
    if (oc < OC)
        for (int n = warp; n < N; n += blockDim.x / 32) mine += to_float(dout[(size_t)n * OC + oc]);
    atomicAdd(&sums[lane], mine);
    __syncthreads();
    if (warp == 0 && oc < OC) dbias[oc] += sums[lane];
}
