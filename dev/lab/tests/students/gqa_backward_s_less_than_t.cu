// wrong: itself|s <= t|<= t|own key|diagonal|last key
BLOCK(64, threads)
extern "C" __global__ void my_gqa_backward(
    float* dinp, const real* dout, const real* out, const real* inp, const float* lse, float scale, int B,
    int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH;
    int W3 = (NH + 2 * NKV) * HS, g = h / (NH / NKV);
    size_t row = (size_t)b * T;
    const real* q = inp + (row + t) * W3 + h * HS;
    const real* d = dout + ((row + t) * NH + h) * HS;
    const real* o = out + ((row + t) * NH + h) * HS;
    float delta = 0.0f;
    for (int c = 0; c < HS; c++) delta += to_float(d[c]) * to_float(o[c]);
    for (int s = 0; s < t; s++) {
        size_t k = (row + s) * W3 + (NH + g) * HS, v = k + NKV * HS;
        float score = 0.0f, dweight = 0.0f;
        for (int c = 0; c < HS; c++) {
            score += to_float(q[c]) * to_float(inp[k + c]);
            dweight += to_float(d[c]) * to_float(inp[v + c]);
        }
        float weight = exp2f(LOG2_E * scale * score - lse[i]);
        float dscore = scale * weight * (dweight - delta);
        for (int c = 0; c < HS; c++) {
            dinp[(row + t) * W3 + h * HS + c] += dscore * to_float(inp[k + c]);
            atomicAdd(dinp + k + c, dscore * to_float(q[c]));
            atomicAdd(dinp + v + c, weight * to_float(d[c]));
        }
    }
}
