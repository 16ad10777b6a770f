// wrong: inp.*bf16|bf16.*inp
BLOCK(256, threads)
extern "C" __global__ void my_gelu_forward(
    real* out, const real* inp, int N, int OC) {
#ifdef BF16
    size_t i = 2 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x), end = i + 2;
#else
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, end = i + 1;
#endif
    if (i > (size_t)N * OC || (sizeof(real) == 4 && i == (size_t)N * OC)) return;
    float x = to_float(inp[i]);  //!
    for (; i < end && i < (size_t)N * OC; i++) {
        x = to_float(inp[i]);
        from_float(out[i], x / (1.0f + expf(-1.5957691f * (x + 0.044715f * x * x * x))));
    }
}
