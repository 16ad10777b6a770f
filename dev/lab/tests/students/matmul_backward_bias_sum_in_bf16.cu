// wrong: bf16
BLOCK(128, threads)
extern "C" __global__ void my_matmul_backward_bias(
    float* dbias, const real* dout, int N, int OC) {
    int oc = blockIdx.x * blockDim.x + threadIdx.x;
    if (oc >= OC) return;
    real sum;
    from_float(sum, 0.0f);
    for (int n = 0; n < N; n++)
        from_float(sum, to_float(sum) + to_float(dout[(size_t)n * OC + oc]));
    dbias[oc] += to_float(sum);
}
