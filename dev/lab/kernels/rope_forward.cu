// Rotary position embedding (Su et al. 2021, section 3.2.2), in place: in each of the N rows of qkv (N,row), which has
// `row` numbers, the first `heads` heads of HS channels, those of queries and keys, are turned pair by pair. Pair i of
// position t turns by the angle t / theta^(2i/HS). A pair is two neighbours (2i, 2i+1), as Meta stores them, or with
// `half` (i, i + HS/2), as Hugging Face does.

// One thread per pair, which computes its own angle: a power in double precision, a sine and a cosine of large
// arguments, some hundreds of instructions for four numbers.
BLOCK(128, threads)
extern "C" __global__ void rope_forward1(real* qkv, float theta, int N, int T, int heads, int row, int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * heads * (HS / 2)) return;
    int pair = i % (HS / 2), head = i / (HS / 2) % heads, token = i / (HS / 2) / heads;
    real* x = qkv + (size_t)token * row + head * HS + (half ? pair : 2 * pair);
    real* y = x + (half ? HS / 2 : 1);
    float frequency = 1.0f / (float)pow((double)theta, (double)((float)(2 * pair) / HS)), angle = token % T * frequency;
    float left = to_float(*x), right = to_float(*y), cosine = cosf(angle), sine = sinf(angle);
    from_float(*x, left * cosine - right * sine);
    from_float(*y, left * sine + right * cosine);
}

// With a table (T,HS) of cosines and sines, side by side. It is a few hundred KB for all heads and sequences, so it
// stays in L2. But a thread still moves 2 bytes at a time, and needs three 64-bit divisions to find them.
BLOCK(128, threads)
extern "C" __global__ void rope_forward2(real* qkv, const float* __restrict__ table, int N, int T, int heads, int row,
                                         int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * heads * (HS / 2)) return;
    int pair = i % (HS / 2), head = i / (HS / 2) % heads, token = i / (HS / 2) / heads;
    real* x = qkv + (size_t)token * row + head * HS + (half ? pair : 2 * pair);
    real* y = x + (half ? HS / 2 : 1);
    float cosine = table[(size_t)(token % T) * HS + 2 * pair], sine = table[(size_t)(token % T) * HS + 2 * pair + 1];
    float left = to_float(*x), right = to_float(*y);
    from_float(*x, left * cosine - right * sine);
    from_float(*y, left * sine + right * cosine);
}

// rope_forward in llama3.cu: 16 bytes per thread. They are W neighbours, or twice W/2 of the two halves, and their
// cosines and sines are W neighbours of the table either way. Divisions have 32 bits.
