// inp (B,NH,T,HS), the result of batched products, to out (B,T,NH,HS), as the next linear layer needs it.

// One thread per number, with three divisions to find its source.
BLOCK(128, threads)
extern "C" __global__ void unpermute1(real* __restrict__ out, const real* __restrict__ inp, int B, int T, int NH,
                                      int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T * head) return;
    size_t c = i % head, h = i / head % NH, t = i / head / NH % T, b = i / head / NH / T;
    out[i] = inp[((b * NH + h) * T + t) * head + c];
}

// 16 bytes per lane, and b from the grid, so that divisions have 32 bits.
BLOCK(128, W * threads)
extern "C" __global__ void unpermute2(real* __restrict__ out, const real* __restrict__ inp, int B, int T, int NH,
                                      int head) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * W, size = NH * T * head;
    if (i >= size) return;
    int c = i % head, h = i / head % NH, t = i / head / NH;
    size_t start = (size_t)blockIdx.y * size;
    store(out + start + i, load<W>(inp + start + ((size_t)h * T + t) * head + c));
}
