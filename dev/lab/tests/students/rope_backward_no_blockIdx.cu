// wrong: blockIdx|race|block
BLOCK(128, threads)
extern "C" __global__ void my_rope_backward(
    real* dqkv, const float* table, int N, int T, int heads, int row, int half) {
    for (int i = threadIdx.x; i < N * heads * (HS / 2); i += blockDim.x) {
        int p = i % (HS / 2), head = i / (HS / 2) % heads, n = i / (HS / 2) / heads;
        real* x = dqkv + (size_t)n * row + head * HS;
        int a = half ? p : 2 * p, b = half ? p + HS / 2 : 2 * p + 1;
        float cosine = table[n % T * HS + 2 * p], sine = table[n % T * HS + 2 * p + 1];
        float x0 = to_float(x[a]), x1 = to_float(x[b]);  //!
        from_float(x[a], x0 * cosine + x1 * sine);  //!
        from_float(x[b], x1 * cosine - x0 * sine);  //!
    }
}
