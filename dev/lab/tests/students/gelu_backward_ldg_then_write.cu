// wrong: __ldg
BLOCK(256, threads)
extern "C" __global__ void my_gelu_backward(real* dinp, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]), u = 0.7978846f * (x + 0.044715f * x * x * x), t = tanhf(u);
    float du = 0.7978846f * (1.0f + 3 * 0.044715f * x * x);
    float local = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * du;
    from_float(dinp[i], local * to_float(__ldg(dinp + i)));  //!
}
