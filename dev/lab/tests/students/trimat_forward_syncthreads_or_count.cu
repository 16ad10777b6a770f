// right
BLOCK(256, threads)
extern "C" __global__ void my_trimat_forward(
    real* att, const real* qkv, float scale, int B, int T, int NH) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool there = i < (size_t)B * NH * T * T;
    int s = i % T, t = i / T % T;
    if (!__syncthreads_or(there && s <= t)) return;  // nothing to do in this block
    if (!there || s > t) return;
    size_t h = i / T / T % NH, b = i / T / T / NH, C = (size_t)NH * HS;
    const real* q = qkv + (b * T + t) * 3 * C + h * HS;
    const real* k = qkv + (b * T + s) * 3 * C + C + h * HS;
    float sum = 0.0f;
    for (int c = 0; c < HS; c++) sum += to_float(q[c]) * to_float(k[c]);
    from_float(att[i], scale * sum);
}
