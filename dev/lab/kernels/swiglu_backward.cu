// The gradient dinp (N,2H) of out (N,H) = up * silu(gate), up and then gate the halves of each row of inp (N,2H): with
// s = 1 / (1 + exp(-gate)),  dup = dout * gate * s  and  dgate = dout * up * s * (1 + gate * (1 - s)).

// One thread per number of dout.
BLOCK(128, threads)
extern "C" __global__ void swiglu_backward1(real* __restrict__ dinp, const real* __restrict__ dout,
                                            const real* __restrict__ inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    size_t at = i / H * 2 * H + i % H;
    float up = to_float(inp[at]), gate = to_float(inp[at + H]), d = to_float(dout[i]), s = 1.0f / (1.0f + expf(-gate));
    from_float(dinp[at], d * gate * s);
    from_float(dinp[at + H], d * up * s * (1.0f + gate * (1.0f - s)));
}

// swiglu_backward in llama3.cu: 16 bytes per lane, so three loads are in flight for each thread, and two stores follow.
