// table (T,HS) of rotary position embedding: at 2i the cosine and at 2i + 1 the sine of t / theta^(2i/HS). The power is
// rounded to fp32, as PyTorch does, but it must be right to the last bit: at position 8,000 a wrong last bit would turn
// a pair by 0.0005. So it is computed in double precision, which is slow.

// One thread per pair.
BLOCK(128, threads)
extern "C" __global__ void rope_table1(float* __restrict__ table, float theta, int T) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / (HS / 2), pair = i % (HS / 2);
    if (t >= T) return;
    float angle = t * (1.0f / (float)pow((double)theta, (double)((float)(2 * pair) / HS)));
    table[2 * (size_t)i] = cosf(angle);
    table[2 * (size_t)i + 1] = sinf(angle);
}

// rope_table in llama3.cu: a block computes the HS/2 powers once, in shared memory, and then uses them for several
// positions. It also does Llama 3.1's scaling of frequencies.
