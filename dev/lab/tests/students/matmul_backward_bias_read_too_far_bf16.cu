// wrong: dout.*bf16|bf16.*dout
BLOCK(128, threads)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    int oc = blockIdx.x * blockDim.x + threadIdx.x;
    if (oc >= OC) return;
    float sum = 0.0f;
    if (sizeof(real) == 4) {
        for (int n = 0; n < N; n++) sum += to_float(dout[(size_t)n * OC + oc]);
    } else {  // the next row is on its way while this one is added
        real next = dout[oc];
        for (int n = 0; n < N; n++) {
            float now = to_float(next);
            next = dout[(size_t)(n + 1) * OC + oc];  //!
            sum += now;
        }
    }
    dbias[oc] += sum;
}
