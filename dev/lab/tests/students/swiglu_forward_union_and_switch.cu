// right
union Word { float x; unsigned bits; };
struct Gate {
    float value;
    __device__ float operator()(float x) const { return x * value / (1.0f + __expf(-value)); }
};
BLOCK(256, threads)
extern "C" __global__ void my_swiglu_forward(real* out, const real* inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    size_t row = i / H, h = i % H;
    Word up;
    up.x = to_float(inp[row * 2 * H + h]);
    switch (up.bits >> 31) {
        case 0: case 1: from_float(out[i], Gate{to_float(inp[row * 2 * H + H + h])}(up.x)); break;
        default: __trap();
    }
}
