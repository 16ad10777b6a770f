// wrong: \+=
BLOCK(128, threads)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    int oc = blockIdx.x * blockDim.x + threadIdx.x;
    if (oc >= OC) return;
    float sum = 0.0f;
    for (int n = 0; n < N; n++) sum += to_float(dout[(size_t)n * OC + oc]);
    dbias[oc] = sum;
}
