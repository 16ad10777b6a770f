// right
BLOCK(128, threads)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    int oc = blockIdx.x * blockDim.x + threadIdx.x;
    if (oc >= OC) return;
    float sum = 0.0f, lost = 0.0f;
    for (int n = 0; n < N; n++) {
        float y = to_float(dout[(size_t)n * OC + oc]) - lost, t = sum + y;
        lost = (t - sum) - y;
        sum = t;
    }
    dbias[oc] += sum;
}
