// right
BLOCK(128, threads)
extern "C" __global__ void my_swiglu_forward(
    real* out, const real* inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    size_t row = i / H, h = i % H;
    float up = to_float(inp[row * 2 * H + h]), gate = to_float(inp[row * 2 * H + H + h]);
    float e = __expf(-gate);
    from_float(out[i], up * gate * __frcp_rn(1.0f + e));
}
