// Rotary position embedding (Su et al. 2021, section 3.2.2): in inp (B,T,NH,HS), the pair of channels 2i, 2i+1 of
// position t is turned by the angle t / 10000^(2i/HS).

// A thread a pair, which computes its own angle: a power, a sine and a cosine of large arguments, some hundred
// instructions for four numbers. In fp32 the power's last bit, multiplied by t, is also an error of the angle.
BLOCK(128, threads)
extern "C" __global__ void rope_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int T, int NH,
                                         int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * NH * (head / 2)) return;
    int pair = i % (head / 2), t = i / (head / 2) / NH % T;
    float angle = t * powf(10000.0f, -2.0f * pair / head), x = to_float(inp[2 * i]), y = to_float(inp[2 * i + 1]);
    from_float(out[2 * i], x * cosf(angle) - y * sinf(angle));
    from_float(out[2 * i + 1], x * sinf(angle) + y * cosf(angle));
}

// With tables (T,HS/2) of cosines and sines, computed once in double precision. They are a few hundred KB for all heads
// and sequences, so they stay in L2.
BLOCK(128, threads)
extern "C" __global__ void rope_forward2(real* __restrict__ out, const real* __restrict__ inp,
                                         const float* __restrict__ cosines, const float* __restrict__ sines, int N,
                                         int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * NH * (head / 2)) return;
    int pair = i % (head / 2), t = i / (head / 2) / NH % T, at = t * (head / 2) + pair;
    float x = to_float(inp[2 * i]), y = to_float(inp[2 * i + 1]);
    from_float(out[2 * i], x * cosines[at] - y * sines[at]);
    from_float(out[2 * i + 1], x * sines[at] + y * cosines[at]);
}

// 16 bytes a lane: two or four pairs, and their entries of the tables as one load each.
BLOCK(128, W * threads)
extern "C" __global__ void rope_forward3(real* __restrict__ out, const real* __restrict__ inp,
                                         const float* __restrict__ cosines, const float* __restrict__ sines, int N,
                                         int T, int NH, int head) {
    size_t i = first_number();
    if (i >= (size_t)N * NH * head) return;
    unsigned row = i / head, at = row / NH % T * (head / 2) + i % head / 2;
    Pack<W> x = load<W>(inp + i);
    Pack<W / 2> cosine = load<W / 2>(cosines + at), sine = load<W / 2>(sines + at);
    for (int j = 0; j < W / 2; j++) {
        float left = x[2 * j], right = x[2 * j + 1];
        x[2 * j] = left * cosine[j] - right * sine[j];
        x[2 * j + 1] = left * sine[j] + right * cosine[j];
    }
    store(out + i, x);
}
