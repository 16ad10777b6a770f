// inp (B,T,3,NH,HS), the queries, keys and values of a linear layer, to q, k, v (3,B,NH,T,HS), where the rows of a head
// are together, as batched matrix products need them.

// One thread per number, with four divisions to find its place. Reads and writes are whole lines, since a head's
// channels stay neighbours.
BLOCK(128, threads)
extern "C" __global__ void permute1(real* __restrict__ out, const real* __restrict__ inp, int B, int T, int NH,
                                    int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)3 * B * NH * T * head) return;
    size_t c = i % head, t = i / head % T, h = i / head / T % NH, sequence = i / head / T / NH;
    size_t b = sequence % B, which = sequence / B;
    out[i] = inp[(((b * T + t) * 3 + which) * NH + h) * head + c];
}

// 16 bytes per lane: the same divisions for 4 or 8 numbers, and of 32 bits, which take a third of the instructions of
// those of 64. The block's y, which is b and `which`, needs no division.
BLOCK(128, W * threads)
extern "C" __global__ void permute2(real* __restrict__ out, const real* __restrict__ inp, int B, int T, int NH,
                                    int head) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * W, size = NH * T * head;
    if (i >= size) return;
    int b = blockIdx.y / 3, which = blockIdx.y % 3, c = i % head, t = i / head % T, h = i / head / T;
    store(out + ((size_t)which * B + b) * size + i,
          load<W>(inp + ((((size_t)b * T + t) * 3 + which) * NH + h) * head + c));
}
