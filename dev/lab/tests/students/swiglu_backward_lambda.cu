// right
BLOCK(128, threads)
extern "C" __global__ void my_swiglu_backward(
    real* dinp, const real* dout, const real* inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    size_t at = i / H * 2 * H + i % H;
    auto sigmoid = [](float x) { return 1.0f / (1.0f + expf(-x)); };
    float up = to_float(inp[at]), gate = to_float(inp[at + H]), d = to_float(dout[i]);
    float s = sigmoid(gate);
    auto put = [&](size_t j, float x) { from_float(dinp[j], x); };
    put(at, d * gate * s);
    put(at + H, d * up * s * (1.0f + gate * (1.0f - s)));
}
