// right
BLOCK(128, threads)
extern "C" __global__ void my_rope_forward(
    real* qkv, const float* table, int N, int T, int heads, int row, int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * heads * (HS / 2)) return;
    int p = i % (HS / 2), h = i / (HS / 2) % heads;
    size_t bt = i / (HS / 2) / heads, t = bt % T;
    real* x = qkv + bt * row + h * HS;
    int a = half ? p : 2 * p, b = half ? p + HS / 2 : 2 * p + 1;
    float2 turn = __ldg((const float2*)table + (size_t)t * (HS / 2) + p);
    float u = to_float(x[a]), v = to_float(x[b]);
    from_float(x[a], u * turn.x - v * turn.y);
    from_float(x[b], u * turn.y + v * turn.x);
}
