// The gradient dinp (N,2H) of out (N,H) = silu(gate) * up, gate and up the halves of each row of inp (N,2H): with
// s = 1 / (1 + exp(-gate)),  dup = dout * gate * s  and  dgate = dout * up * s * (1 + gate * (1 - s)).

// A thread a number of dout.
BLOCK(128, threads)
extern "C" __global__ void swiglu_backward1(real* __restrict__ dinp, const real* __restrict__ dout,
                                            const real* __restrict__ inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    size_t at = i / H * 2 * H + i % H;
    float gate = to_float(inp[at]), up = to_float(inp[at + H]), d = to_float(dout[i]), s = 1.0f / (1.0f + expf(-gate));
    from_float(dinp[at], d * up * s * (1.0f + gate * (1.0f - s)));
    from_float(dinp[at + H], d * gate * s);
}

// 16 bytes a lane: three loads in flight for each thread, and two stores.
BLOCK(64, W * threads)
extern "C" __global__ void swiglu_backward2(real* __restrict__ dinp, const real* __restrict__ dout,
                                            const real* __restrict__ inp, int N, int H) {
    int c = first_number();
    size_t row = blockIdx.y, at = row * 2 * H + c;
    if (c >= H) return;
    Pack<W> gate = load<W>(inp + at), up = load<W>(inp + at + H), d = load<W>(dout + row * H + c);
    for (int i = 0; i < W; i++) {
        float s = 1.0f / (1.0f + exponential(-gate[i])), dup = d[i] * gate[i] * s;
        gate[i] = d[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        up[i] = dup;
    }
    store(dinp + at, gate);
    store(dinp + at + H, up);
}
