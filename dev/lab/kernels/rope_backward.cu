// The gradient of rotary position embedding, in place: the first `heads` heads of each row of dqkv (N,row) are turned
// back by the same angles, since the transpose of a rotation is its inverse. Pairs are as in rope_forward.

// One thread per pair, with the table (T,HS) of cosines and sines.
BLOCK(128, threads)
extern "C" __global__ void rope_backward1(real* dqkv, const float* __restrict__ table, int N, int T, int heads, int row,
                                          int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * heads * (HS / 2)) return;
    int pair = i % (HS / 2), head = i / (HS / 2) % heads, token = i / (HS / 2) / heads;
    real* x = dqkv + (size_t)token * row + head * HS + (half ? pair : 2 * pair);
    real* y = x + (half ? HS / 2 : 1);
    float cosine = table[(size_t)(token % T) * HS + 2 * pair], sine = table[(size_t)(token % T) * HS + 2 * pair + 1];
    float left = to_float(*x), right = to_float(*y);
    from_float(*x, left * cosine + right * sine);
    from_float(*y, right * cosine - left * sine);
}

// rope_backward in llama3.cu: 16 bytes per thread, as in the forward pass.
