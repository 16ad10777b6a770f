// out (B,T,C), the fp32 residual stream, = wte (V,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1].

// One thread per token, which copies its C channels one by one. Each lane goes along a different row.
BLOCK(64, threads)
extern "C" __global__ void encoder_forward1(float* __restrict__ out, const int* __restrict__ tokens,
                                            const real* __restrict__ wte, const real* __restrict__ wpe, int N, int T,
                                            int C) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    for (int c = 0; c < C; c++)
        out[(size_t)row * C + c] =
            to_float(wte[(size_t)tokens[row] * C + c]) + to_float(wpe[(size_t)(row % T) * C + c]);
}

// One thread per channel of a token: C times as many threads, and neighbouring lanes touch neighbouring addresses.
BLOCK(256, threads)
extern "C" __global__ void encoder_forward2(float* __restrict__ out, const int* __restrict__ tokens,
                                            const real* __restrict__ wte, const real* __restrict__ wpe, int N, int T,
                                            int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    int row = i / C, c = i % C;
    out[i] = to_float(wte[(size_t)tokens[row] * C + c]) + to_float(wpe[(size_t)(row % T) * C + c]);
}

// encoder_forward in kernels.cu: 4 channels per lane, 16 bytes of out, so that the token is looked up, and i divided,
// once for all four, in 32 bits.
