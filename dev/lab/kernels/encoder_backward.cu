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

// A block for each position. Only positions of the same word add to the same row of dwte, so if one block does all
// positions of a word, in order, nobody is in its way: no atomics, and as many blocks at work as there are words in the
// batch. The host does not say where a word occurs; a block looks for it. It compares blockDim.x tokens at a time with
// its own. If it finds its word before its own position, the block of that position adds up the word, and this one
// ends. What makes this slow is the looking: a block whose word is not there earlier reads all N tokens, and waits for
// its slowest warp after each blockDim.x of them. And a word that makes up a tenth of the batch is the work of one
// block, one row after the other, when all others are done. The barrier at the end of the loop is there because the
// next tokens overwrite what a slower warp may still read. dwpe needs no search, and is left to encoder_backward_wpe in
// kernels.cu. Items: N positions along x, C channels along y.
BLOCK(256, 1, threads)
extern "C" __global__ void encoder_backward3(float* dwte, const real* __restrict__ dout,
                                             const int* __restrict__ tokens, int N, int C) {
    __shared__ bool same[1024];  // which of the tokens at hand are this block's word
    int n = blockIdx.x, word = tokens[n], c = blockIdx.y * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (int first = 0; first < N; first += blockDim.x) {
        int row = first + threadIdx.x;
        same[threadIdx.x] = row < N && tokens[row] == word;
        if (block_reduce<warp_sum>(same[threadIdx.x], 0.0f) == 0.0f) continue;
        for (int i = 0; i < blockDim.x; i++) {
            if (!same[i]) continue;
            if (first + i < n) return;  // as all threads of the block do
            if (c < C) sum += to_float(dout[(size_t)(first + i) * C + c]);
        }
        __syncthreads();
    }
    if (c < C) dwte[(size_t)word * C + c] += sum;
}

// encoder_backward_wte and encoder_backward_wpe in kernels.cu: nobody looks for a word. The host sorts the positions by
// token, once for each batch, and lists the words, the most frequent first. The 32 warps of a block share a frequent
// word, so it takes a 32nd of the time; a rare one has a warp. The order of each sum is always the same.
// dwpe sums over the B rows of t.
