// right
BLOCK(128, threads)
extern "C" __global__ void my_matmul_forward(
    real* out, const real* inp, const real* weight, const real* bias, int N, int C, int OC) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)N * OC) return;
    long long n = i / OC, oc = i - n * OC;
    float sum = bias ? to_float(bias[oc]) : 0.0f;
    for (int c = 0; c < C; c++) sum = fmaf(to_float(inp[n * C + c]), to_float(weight[oc * C + c]), sum);
    from_float(out[i], sum);
}
