// wrong: int overflows|never written|address
BLOCK(256, threads)
extern "C" __global__ void my_matmul_forward(
    real* out, const real* inp, const real* weight, const real* bias, int N, int C, int OC) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    int n = i / OC, oc = i % OC;
    float sum = bias ? to_float(bias[oc]) : 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(inp[n * C + c]) * to_float(weight[oc * C + c]);
    from_float(out[n * OC + oc], sum);  //!
}
