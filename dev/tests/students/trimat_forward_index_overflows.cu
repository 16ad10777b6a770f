// wrong: size_t|32 bits|overflow
BLOCK(1024, threads)
extern "C" __global__ void my_trimat_forward(
    real* att, const real* qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  //!
    if (i >= B * NH * T * T) return;  //!
    int s = i % T, t = i / T % T, h = i / T / T % NH, b = i / T / T / NH, C = NH * HS;
    if (s > t) return;
    const real* q = qkv + ((size_t)b * T + t) * 3 * C + h * HS;
    const real* k = qkv + ((size_t)b * T + s) * 3 * C + C + h * HS;
    float sum = 0.0f;
    for (int c = 0; c < HS; c++) sum += to_float(q[c]) * to_float(k[c]);
    from_float(att[i], scale * sum);
}
