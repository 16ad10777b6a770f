// wrong: initiali[sz]ed|no (first |start )?value|given a value|before it gets a value|never set
BLOCK(256, threads)
extern "C" __global__ void my_matmul_forward(
    real* out, const real* inp, const real* weight, const real* bias, int N, int C, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    size_t n = i / OC, oc = i % OC;
    float sum;  //!
    for (int c = 0; c < C; c++) sum += to_float(inp[n * C + c]) * to_float(weight[oc * C + c]);  //!
    from_float(out[i], sum + to_float(bias[oc]));
}
