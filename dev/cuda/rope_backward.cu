// The gradient dinp (B,T,NH,HS) of rotary position embedding: dout turned back by the same angles, since the transpose
// of a rotation is its inverse.

// A thread a pair, with the tables (T,HS/2) of cosines and sines.
BLOCK(128, threads)
extern "C" __global__ void rope_backward1(real* __restrict__ dinp, const real* __restrict__ dout,
                                          const float* __restrict__ cosines, const float* __restrict__ sines, int N,
                                          int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * NH * (head / 2)) return;
    int pair = i % (head / 2), t = i / (head / 2) / NH % T, at = t * (head / 2) + pair;
    float x = to_float(dout[2 * i]), y = to_float(dout[2 * i + 1]);
    from_float(dinp[2 * i], x * cosines[at] + y * sines[at]);
    from_float(dinp[2 * i + 1], y * cosines[at] - x * sines[at]);
}

// 16 bytes a lane, as in the forward pass.
BLOCK(128, W * threads)
extern "C" __global__ void rope_backward2(real* __restrict__ dinp, const real* __restrict__ dout,
                                          const float* __restrict__ cosines, const float* __restrict__ sines, int N,
                                          int T, int NH, int head) {
    size_t i = first_number();
    if (i >= (size_t)N * NH * head) return;
    unsigned row = i / head, at = row / NH % T * (head / 2) + i % head / 2;
    Pack<W> x = load<W>(dout + i);
    Pack<W / 2> cosine = load<W / 2>(cosines + at), sine = load<W / 2>(sines + at);
    for (int j = 0; j < W / 2; j++) {
        float left = x[2 * j], right = x[2 * j + 1];
        x[2 * j] = left * cosine[j] + right * sine[j];
        x[2 * j + 1] = right * cosine[j] - left * sine[j];
    }
    store(dinp + i, x);
}
