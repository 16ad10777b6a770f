// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    int oc = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (oc >= OC) return;
    float sum = 0.0f;
    for (int n = lane; n < N; n += 32) sum += to_float(dout[(size_t)n * OC + oc]);
    sum = warp_sum(sum);
    if (lane == 0) {
        float before = atomicExch(&dbias[oc], 0.0f);
        atomicAdd(&dbias[oc], before + sum);
    }
}
