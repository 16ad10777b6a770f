// right
__device__ __forceinline__ void turn_back(real& a, real& b, float2 angle) {
    float x = to_float(a), y = to_float(b);
    from_float(a, fmaf(x, angle.x, y * angle.y));
    from_float(b, fmaf(y, angle.x, -x * angle.y));
}
BLOCK(128, threads)
extern "C" __global__ void my_rope_backward(
    real* dqkv, const float* table, int N, int T, int heads, int row, int half) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int pairs = HS / 2;
    if (i >= (size_t)N * heads * pairs) return;
    int p = i % pairs, head = i / pairs % heads;
    size_t n = i / pairs / heads;
    real* x = dqkv + n * row + head * HS;
    const float2 angle = reinterpret_cast<const float2*>(table)[(n % T) * pairs + p];
    if (half)
        turn_back(x[p], x[p + pairs], angle);
    else
        turn_back(x[2 * p], x[2 * p + 1], angle);
}
