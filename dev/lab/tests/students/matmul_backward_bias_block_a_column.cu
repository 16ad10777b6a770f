// right
BLOCK(32, 1)
extern "C" __global__ void my_matmul_backward_bias(float* dbias, const real* dout, int N, int OC) {
    float sum = 0.0f;
    for (int n = threadIdx.x; n < N; n += blockDim.x) sum += to_float(dout[(size_t)n * OC + blockIdx.x]);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) dbias[blockIdx.x] += sum;
}
