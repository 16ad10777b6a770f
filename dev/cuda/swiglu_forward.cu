// out (N,H) = silu(gate) * up, with gate and up the halves of each row of inp (N,2H), and silu(x) = x / (1 + exp(-x))
// (Shazeer 2020, section 2).

// A thread a number of out.
BLOCK(128, threads)
extern "C" __global__ void swiglu_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    const real* x = inp + i / H * 2 * H + i % H;
    float gate = to_float(x[0]);
    from_float(out[i], gate / (1.0f + expf(-gate)) * to_float(x[H]));
}

// 16 bytes a lane of either half, and one exponential of the hardware where results are rounded to bf16. The row comes
// from the grid, so nothing is divided to find it.
BLOCK(64, W * threads)
extern "C" __global__ void swiglu_forward2(real* __restrict__ out, const real* __restrict__ inp, int N, int H) {
    int c = first_number();
    size_t row = blockIdx.y;
    if (c >= H) return;
    Pack<W> gate = load<W>(inp + row * 2 * H + c), up = load<W>(inp + row * 2 * H + H + c);
    for (int i = 0; i < W; i++) up[i] *= gate[i] / (1.0f + exponential(-gate[i]));
    store(out + row * H + c, up);
}
