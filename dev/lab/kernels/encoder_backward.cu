// dwte (V,C)[tokens] and dwpe (maxT,C)[t] += dout (B,T,C). Many positions may have the same token.

// A thread for each channel of a position. With atomics all threads of a word add to its row at the same time. But in
// the row of a common word each addition waits for its turn in L2, and the order differs each time, so the same seed
// does not give the same bits.
BLOCK(256, threads)
extern "C" __global__ void encoder_backward1(float* dwte, float* dwpe, const real* __restrict__ dout,
                                             const int* __restrict__ tokens, int N, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    int row = i / C, c = i % C;
    float d = to_float(dout[i]);
    atomicAdd(dwte + (size_t)tokens[row] * C + c, d);
    atomicAdd(dwpe + (size_t)(row % T) * C + c, d);
}

// A thread for each channel, which goes through all positions in order. No two threads add to the same address, so no
// atomics are needed, and the bits are the same each time. But there are only C threads for the whole GPU, each with
// one addition at a time.
BLOCK(128, threads)
extern "C" __global__ void encoder_backward2(float* dwte, float* dwpe, const real* __restrict__ dout,
                                             const int* __restrict__ tokens, int N, int T, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    for (int row = 0; row < N; row++) {
        float d = to_float(dout[(size_t)row * C + c]);
        dwte[(size_t)tokens[row] * C + c] += d;
        dwpe[(size_t)(row % T) * C + c] += d;
    }
}

// encoder_backward_wte and encoder_backward_wpe in kernels.cu: parallel, and always in the same order. The host sorts
// the positions by token, and the 8 warps of a block add up all positions of one word. dwpe sums over the B rows of t.
