// wrong: qkv
BLOCK(128, threads)
extern "C" __global__ void my_rope_forward(
    real* qkv, const float* table, int N, int T, int heads, int row, int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * heads * (HS / 2)) return;
    int pair = i % (HS / 2), head = i / (HS / 2) % heads, token = i / (HS / 2) / heads;
    real* x = qkv + (size_t)token * row + head * HS + (half ? pair : 2 * pair);
    real* y = x + (half ? HS / 2 : 1);
    const float* angle = table + (size_t)(token % T) * HS + 2 * pair;
    from_float(*x, to_float(*x) * angle[0] - to_float(*y) * angle[1]);
    from_float(*y, to_float(*x) * angle[1] + to_float(*y) * angle[0]);
}
