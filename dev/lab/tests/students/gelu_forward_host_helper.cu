// wrong: __device__
float cube(float x) { return x * x * x; }  //!

BLOCK(256, threads)
extern "C" __global__ void my_gelu_forward(
    real* out, const real* inp, int N, int OC) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * OC) return;
    float x = to_float(inp[i]);
    from_float(out[i], x / (1.0f + expf(-1.5957691f * (x + 0.044715f * cube(x)))));  //!
}
