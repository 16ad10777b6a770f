// dwte (V,C)[tokens] and dwpe (maxT,C)[t] += dout (B,T,C). Many positions may have the same token.

// A thread a channel of a position; atomics let those of one token add to its row at the same time. All is parallel,
// but a common word's row is a queue, each addition waits for its turn in L2, and the order is another one on each run:
// the same seed does not give the same bits.
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

// A thread a channel, which goes through all positions in order: no two threads meet at an address, so no atomics, and
// the same bits each time. But there are only C threads for the whole GPU, each with one addition at a time.
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

// encoder_backward_wte and encoder_backward_wpe in kernels.cu: parallel and in one order. The host sorts the positions
// by token, and a block owns a word's channels, so its 8 warps may add up the run; dwpe is a sum over the B rows of t.
