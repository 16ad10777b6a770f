// out (N,C) = inp, one place to the right in its row: out[n,c] = inp[n,c-1], and out[n,0] = 0.

// One thread per number. It reads its left neighbour's number, and the first of a row has no neighbour. out is another
// array than inp for a reason: in one array a thread would overwrite the number that its right neighbour still has to
// read, and the two may be in different blocks, for which there is no barrier.
BLOCK(256, threads)
extern "C" __global__ void shift1(real* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    from_float(out[i], i % C ? to_float(inp[i - 1]) : 0.0f);
}

// 16 bytes per lane. A load of 16 bytes must begin at a multiple of 16 bytes, so a pack cannot begin one place to the
// left: a lane loads the same W numbers that it will write, and the one before them alone. That one is in the pack of
// the lane before, so it comes from L1. C is a multiple of W here, so that no pack has the end of a row within it.
BLOCK(256, W * threads)
extern "C" __global__ void shift2(real* __restrict__ out, const real* __restrict__ inp, int N, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    Pack<W> x = load<W>(inp + i), shifted;
    shifted[0] = i % C ? to_float(inp[i - 1]) : 0.0f;
    for (int j = 1; j < W; j++) shifted[j] = x[j - 1];
    store(out + i, shifted);
}
